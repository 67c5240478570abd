"""Plans of every shipped layout against sums done by hand, Hugging Face's model and Megatron's own report."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.measure import counted
from megatron_sc.configuration import read_files
from megatron_sc.planning.traffic import LossCost, loss_cost
from megatron_sc.rollouts import HeadPolicy, Manifest, SamplerFingerprint
from megatron_sc.rollouts.schema import arrow_schema, to_arrow
from megatron_sc.sampling import SamplerConfig
from megatron_sc.training.batch import BatchLayout, collate
from megatron_sc.training.config import Distribution, ObjectiveConfig
from megatron_sc.vocab_parallel import VocabShard
from tests.distributed import run_ranks
from tests.problems import make_problem
from tests.rollouts import make_rollouts

ROOT = Path(__file__).parents[1]
LAYOUTS = sorted(
    path for folder in ("qwen3_30b_a3b", "qwen3_0.6b", "tiny") for path in (ROOT / "configs" / folder).glob("*")
)
QWEN = [path for path in LAYOUTS if "qwen" in path.parent.name]
IDS = [f"{path.parent.name}/{path.stem}" for path in LAYOUTS]
SMALL = (ROOT / "configs/qwen3_30b_a3b/1x8_tp4_pp2_ep4.yaml").as_posix()
OFFLOADED = (ROOT / "configs/qwen3_30b_a3b/1x8_tp4_ep8.yaml").as_posix()
TINY = (ROOT / "configs/tiny/1x1.yaml").as_posix()

# GPT-3's kind of layer, for which Megatron's formula of activations is made: two stages, so that no logits are in it.
GPT3 = """
flags:
  num-layers: 8
  hidden-size: 2048
  num-attention-heads: 16
  seq-length: 2048
  max-position-embeddings: 2048
  micro-batch-size: 2
  global-batch-size: 64
  vocab-size: 50304
  bf16: true
  tensor-model-parallel-size: 4
  pipeline-model-parallel-size: 2
cluster: {nodes: 1, gpus-per-node: 8, gpu-memory-gib: 0.5}
"""
REFUSED = {  # what is added to the tiny job, and what must be said
    "{bf16: true, fp16: true}": [
        "Megatron requires not args.bf16, where args.fp16",
        "flags.fp16 = True",
        "flags.bf16 =",
    ],
    "{tensor-model-parallel-size: 3}": ["world size (1)", "flags.tensor-model-parallel-size = 3", "cluster.nodes = 1"],
    "{num-attention-heads: 7}": [
        "num_attention_heads == 0",
        "added.yaml: flags.num-attention-heads = 7",
        "hidden-size",
    ],
    "{importance-weight: tis, tis-cap: -1}": ["cap must be positive", "flags.importance-weight = 'tis'"],
    "{prompts-per-step: 3}": ["--global-batch-size 128 must equal", "added.yaml: flags.prompts-per-step = 3"],
    "{optimizer: muon}": ["--optimizer muon: its memory is not known here"],
    "{multi-latent-attention: true, kv-lora-rank: 16}": ["--multi-latent-attention"],
    "{recompute-granularity: full}": ["recompute_method"],
}

MIS = (ROOT / "configs/objectives/mis.yaml").as_posix()
COMMANDS = {
    "show": ["config", "show", "--origins", TINY, "--micro-batch-size", "8", "--sc-config", MIS],
    "show quoted": ["config", "show", TINY, "--load", "a path"],
    "show part": ["config", "show", MIS],
    "show part unchecked": ["config", "show", "--unchecked", MIS],
    "plan": ["plan", SMALL],
    "plan small GPU": ["plan", "--gpu-memory-gib", "40", "--reserve-gib", "5", SMALL],
    "plan larger": ["plan", "--nodes", "2", "--json", SMALL, "--global-batch-size=256", "--prompts-per-step", "32"],
    "plan unknown GPU": ["plan", TINY],
    "plan misplaced": ["plan", SMALL, "--gpu-memory-gib", "40"],
    "plan nothing": ["plan", "--nodes", "0", SMALL],
}


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """All plans by name, from one process: importing Megatron is what costs."""
    folder = tmp_path_factory.mktemp("plans")

    def file(name: str, text: str) -> str:
        (folder / name).write_text(text)
        return str(folder / name)

    gpt3 = file("gpt3.yaml", GPT3)
    on_gpu = file("on_gpu.yaml", "flags: {optimizer-cpu-offload: false, use-precision-aware-optimizer: false, "
                  "overlap-cpu-optimizer-d2h-h2d: false, optimizer-offload-fraction: 0.0}")  # fmt: skip
    cases = {str(path): {"files": [str(path)], "flags": []} for path in LAYOUTS}
    cases["on the GPU"] = {"files": [OFFLOADED, on_gpu], "flags": []}
    cases |= {
        "every rank": {"files": [SMALL], "flags": [], "all_ranks": True},
        "gpt3": {"files": [gpt3], "flags": []},
        "gpt3 sp": {
            "files": [gpt3],
            "flags": ["--sequence-parallel", "--recompute-granularity", "selective"],
        },
        "gpt3 sp interleaved": {
            "files": [gpt3],
            "flags": ["--sequence-parallel", "--recompute-activations", "--num-layers-per-virtual-pipeline-stage", "1"],
        },
        "gpt3 one": {"files": [gpt3], "flags": ["--recompute-granularity=full", "--recompute-method=uniform",
                     "--recompute-num-layers=1"]},
        "gpt3 block": {"files": [gpt3], "flags": ["--recompute-granularity=full", "--recompute-method=block",
                       "--recompute-num-layers=1"]},
        "fp8": {"files": [SMALL], "flags": ["--sc-config", str(ROOT / "configs/precision/fp8.yaml")]},
    }  # fmt: skip
    for objective in (ROOT / "configs/objectives").glob("*"):
        cases[objective.stem] = {"files": [TINY, str(objective)], "flags": []}
    for name, words in COMMANDS.items():
        cases[name] = {"cli": words}
    for number, added in enumerate(REFUSED):
        path = file(f"{number}-added.yaml", f"flags: {added}\n")
        cases[added] = {"files": [TINY, path], "flags": []}
    (folder / "cases.json").write_text(json.dumps(list(cases.values())))
    run = subprocess.run(
        [sys.executable, "-m", "tests.plans", folder / "cases.json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return dict(zip(cases, json.loads(run.stdout), strict=True))


def by_hand(flags: dict[str, Any], stage: int) -> dict[str, int]:
    """Parameters of a rank of Qwen3, from the shapes of its weights."""

    def size(kind: str, default: int = 1) -> int:
        return int(flags.get(f"{kind}-parallel-size", default))

    tp, pp, ep = size("tensor-model"), size("pipeline-model"), size("expert-model")
    etp = size("expert-tensor", tp)
    h, layers = flags["hidden-size"], flags["num-layers"] // pp
    query, key = flags["num-attention-heads"] * 128, flags["num-query-groups"] * 128
    attention = h * (query + 2 * key) // tp + query * h // tp + 2 * 128  # q, k, v; output; norms of q and k
    experts = flags.get("num-experts", 0)
    if experts:
        mlp, expert = h * experts, experts // ep * 3 * h * flags["moe-ffn-hidden-size"] // etp
    else:
        mlp, expert = 3 * h * flags["ffn-hidden-size"] // tp, 0
    is_first, is_last = stage == 0, stage == pp - 1
    tables = is_first + (is_last and ("untie-embeddings-and-output-weights" in flags or pp > 1))
    return {
        "embedding": tables * 151936 * h // tp,
        "dense": layers * (attention + mlp + 2 * h) + is_last * h,
        "expert": layers * expert,
    }


@pytest.mark.parametrize("path", QWEN, ids=IDS[: len(QWEN)])
def test_parameters_of_each_stage_are_those_counted_by_hand(path: Path, plans: dict[str, dict[str, Any]]) -> None:
    flags = {key: setting.value for key, setting in read_files([path]).flags.items()}
    stages = plans[str(path)]["stages"]
    assert len(stages) == flags.get("pipeline-model-parallel-size", 1)
    for number, stage in enumerate(stages):
        assert stage["parameters"] == by_hand(flags, number)


def test_every_rank_of_a_stage_holds_the_same(plans: dict[str, dict[str, Any]]) -> None:
    plan = plans["every rank"]
    assert [number for number, _ in plan["ranks"]] == [0] * 4 + [1] * 4
    for number, parameters in plan["ranks"]:
        assert parameters == plan["stages"][number]["parameters"]


@pytest.mark.parametrize(("folder", "kind"), [("qwen3_30b_a3b", "qwen3_moe"), ("qwen3_0.6b", "qwen3")])
def test_the_model_is_hugging_faces(folder: str, kind: str, plans: dict[str, dict[str, Any]]) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    flags = {key: setting.value for key, setting in read_files([ROOT / f"configs/models/{folder}.yaml"]).flags.items()}
    config = AutoConfig.for_model(
        kind,
        vocab_size=flags["vocab-size"],
        hidden_size=flags["hidden-size"],
        intermediate_size=flags["ffn-hidden-size"],
        num_hidden_layers=flags["num-layers"],
        num_attention_heads=flags["num-attention-heads"],
        num_key_value_heads=flags["num-query-groups"],
        head_dim=flags["kv-channels"],
        tie_word_embeddings="untie-embeddings-and-output-weights" not in flags,
        **({"num_experts": 128, "moe_intermediate_size": 768, "num_experts_per_tok": 8} if kind == "qwen3_moe" else {}),
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total == {"qwen3_moe": 30_532_122_624, "qwen3": 596_049_920}[kind]
    for path in (ROOT / "configs" / folder).glob("*"):
        assert sum(plans[str(path)]["model"].values()) == total, path


@pytest.mark.parametrize("path", LAYOUTS, ids=IDS)
def test_a_shipped_layout_is_valid_and_fits(path: Path, plans: dict[str, dict[str, Any]]) -> None:
    plan = plans[str(path)]
    assert "error" not in plan, plan
    assert plan["too_large"] == 0
    assert plan["cluster"]["nodes"] * plan["cluster"]["gpus_per_node"] > 0
    assert path.stem.startswith(f"{plan['cluster']['nodes']}x{plan['cluster']['gpus_per_node']}")


@pytest.mark.parametrize("path", QWEN, ids=IDS[: len(QWEN)])
def test_weights_and_optimizer_agree_with_megatrons_report(path: Path, plans: dict[str, dict[str, Any]]) -> None:
    plan = plans["on the GPU" if str(path) == OFFLOADED else str(path)]
    assert max(plan["states"]) == pytest.approx(plan["megatron_state"], rel=0.02)


def test_the_host_takes_what_the_gpu_does_not_keep(plans: dict[str, dict[str, Any]]) -> None:
    (offloaded,), (kept,) = plans[OFFLOADED]["stages"], plans["on the GPU"]["stages"]
    assert offloaded["bytes"]["optimizer"] == kept["offloaded"] == 0
    assert offloaded["offloaded"] == pytest.approx(kept["bytes"]["optimizer"] * 16 / 12)
    assert offloaded["bytes"]["gradients"] == kept["bytes"]["gradients"]


@pytest.mark.parametrize(("name", "overhead"), [("gpt3", 1.05), ("gpt3 sp", 1.0), ("gpt3 sp interleaved", 1.0)])
def test_activations_of_gpt3s_layer_agree_with_megatrons_report(
    name: str, overhead: float, plans: dict[str, dict[str, Any]]
) -> None:
    """Without sequence parallelism Megatron's formula adds 5 % for temporaries."""
    first = plans[name]["stages"][0]["bytes"]
    ours = first["activations"] + first["embedding, last norm"]
    assert ours == pytest.approx(plans[name]["megatron"]["activations"] / overhead, rel=0.02)


def test_full_recomputation_keeps_the_inputs_of_layers(plans: dict[str, dict[str, Any]]) -> None:
    entry = 2048 * 2 * 2048 * 2  # s b h, bf16; no sequence parallelism
    everything, uniform, block = (plans[name]["stages"] for name in ("gpt3", "gpt3 one", "gpt3 block"))
    layer = everything[1]["bytes"]["activations"] / 4
    for stage, in_flight in ((0, 2), (1, 1)):
        assert uniform[stage]["bytes"]["activations"] == in_flight * 4 * entry
        assert uniform[stage]["bytes"]["recomputed at once"] == layer
        assert block[stage]["bytes"]["activations"] == in_flight * (entry + 3 * layer)
    assert plans["gpt3"]["too_large"] == 2  # 0.5 GiB less 6


def test_tied_embeddings_count_once_in_the_model_and_on_each_rank_that_holds_them(
    plans: dict[str, dict[str, Any]],
) -> None:
    plan = plans[str(ROOT / "configs/tiny/2x1_pp2.yaml")]
    first, last = (stage["parameters"]["embedding"] for stage in plan["stages"])
    assert (first, last) == (32 * 64 + 16 * 64, 32 * 64)  # tokens and positions; tokens
    assert plan["model"]["embedding"] == first


def test_every_objective_and_precision_is_valid(plans: dict[str, dict[str, Any]]) -> None:
    names = {path.stem for path in (ROOT / "configs/objectives").glob("*")}
    assert {"reinforce", "is", "tis", "mis", "ppo", "score_centering", "tis_score_centering"} <= names
    for name in names | {"fp8"}:
        assert "error" not in plans[name], (name, plans[name])
    assert plans["fp8"]["argv"].count("--bf16") == 1


def documented_methods() -> dict[str, str]:
    """The flags of each row of docs/methods.md's table."""
    rows = [line.split("|") for line in (ROOT / "docs/methods.md").read_text().splitlines() if "| `--loss-corr" in line]
    return {row[1].strip(): row[-2].strip(" `") for row in rows}


@pytest.mark.parametrize(
    ("method", "name"),
    [
        ("REINFORCE (the base)", "reinforce"),
        ("Naive IS", "is"),
        ("TIS", "tis"),
        ("MIS", "mis"),
        ("PPO / GRPO clip", "ppo"),
        ("Score centering", "score_centering"),
        ("TIS + score centering", "tis_score_centering"),
    ],
)
def test_objectives_are_the_rows_of_appendix_c(method: str, name: str) -> None:
    words = documented_methods()[method].replace("--", "").split()
    documented = dict(zip(words[::2], words[1::2], strict=True))
    flags = read_files([ROOT / f"configs/objectives/{name}.yaml"]).flags
    for key, value in documented.items():
        written = flags[key].value
        assert written == (value if isinstance(written, str) else float(value)), key
    assert flags["advantage"].value == "group"  # Eq. 13


@pytest.mark.parametrize("added", REFUSED)
def test_what_megatron_refuses_leads_back_to_the_settings(added: str, plans: dict[str, dict[str, Any]]) -> None:
    for part in REFUSED[added]:
        assert part in plans[added].get("error", "accepted")


def test_show_prints_the_command_line(plans: dict[str, dict[str, Any]]) -> None:
    shown = plans["show"]
    lines = shown["out"].splitlines()
    assert shown["status"] == 0
    assert f"--importance-weight mis  # {MIS}: flags.importance-weight" in lines
    assert "--micro-batch-size 8  # command line" in lines[-1]
    quoted = plans["show quoted"]["out"]
    assert shlex.split(quoted) == [*plans[TINY]["argv"], "--load", "a path"]
    assert quoted.splitlines()[-1] == "--load 'a path'"


def test_show_checks_a_job_and_prints_a_part(plans: dict[str, dict[str, Any]]) -> None:
    checked, unchecked = plans["show part"], plans["show part unchecked"]
    assert (checked["status"], checked["out"]) == (2, "")
    assert "Megatron requires args.micro_batch_size is not None" in checked["err"]
    assert (unchecked["status"], unchecked["out"].splitlines()[:2]) == (
        0,
        ["--loss-correction none", "--importance-weight mis"],
    )


def test_plan_says_whether_a_job_fits(plans: dict[str, dict[str, Any]]) -> None:
    fits, small, unknown = plans["plan"], plans["plan small GPU"], plans["plan unknown GPU"]
    assert (fits["status"], small["status"], unknown["status"]) == (0, 1, 0)
    assert "1 x 8 GPUs, TP4 PP2 EP4 ETP1; a step is 128 rollouts of up to 4096 tokens" in fits["out"]
    for number in ("30,532,122,624", "3,821,312,000", "3,821,314,048", "48 bytes a token on the wire"):
        assert number in fits["out"]
    assert "\nfits: 64.6 GiB of 73.6" in fits["out"]
    assert "does not fit: stage 0 needs 64.4 GiB of 35.0" in small["out"]
    assert "most of it: optimizer 42.7, gradients 14.2, weights 7.1" in small["out"]
    assert "the GPU's memory is not known" in unknown["out"]


def test_plan_of_a_larger_job_shares_optimizer_state(plans: dict[str, dict[str, Any]]) -> None:
    larger = json.loads(plans["plan larger"]["out"])
    assert (larger["fits"], larger["cluster"]["nodes"], larger["micro_batches"]) == (True, 2, 128)
    for one, two in zip(plans[SMALL]["stages"], larger["stages"], strict=True):
        assert two["bytes"]["optimizer"] == one["bytes"]["optimizer"] / 2
        assert two["bytes"]["weights"] == one["bytes"]["weights"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plan misplaced", "--gpu-memory-gib is a flag of megatron-sc plan, not of the script: put it before FILE"),
        ("plan nothing", "--nodes must be above 0, got 0"),
    ],
)
def test_plan_refuses_a_wrong_call(name: str, message: str, plans: dict[str, dict[str, Any]]) -> None:
    assert plans[name] == {"status": 2, "out": "", "err": f"error: {message}\n"}


def test_a_step_is_divided_into_micro_batches(plans: dict[str, dict[str, Any]]) -> None:
    counts = {path.stem: plans[str(path)]["micro_batches"] for path in QWEN}
    assert counts["1x8_tp4_pp2_ep4"] == 128  # one data-parallel rank
    assert counts["2x8_ep16"] == 8
    assert counts["8x8_tp4_pp2_cp2_ep4"] == 32


def job(distribution: str, **changed: Any) -> SimpleNamespace:
    """Arguments as ``loss_cost`` reads them."""
    correction = "none" if distribution == "none" else "score_centering"
    objective = ObjectiveConfig(loss_correction=correction, sampler_distribution=distribution)  # type: ignore[arg-type]
    sampler = SamplerConfig(head_size=16, num_draws=4)
    values: dict[str, Any] = {
        "seq_length": 32, "micro_batch_size": 2, "context_parallel_size": 1, "tensor_model_parallel_size": 2,
        "params_dtype": torch.bfloat16, "hidden_size": 8, "vocab_size": 64, "global_batch_size": 4,
        "moe_router_topk": 2, "moe_enable_routing_replay": False, "micro_batch_tokens": None,
    }  # fmt: skip
    return SimpleNamespace(**{**vars(objective), **vars(sampler), **values, **changed})


def cost(distribution: str, moe_layers: int = 0, **changed: Any) -> LossCost:
    return loss_cost(job(distribution, **changed), 64, moe_layers)  # type: ignore[arg-type]


def bytes_sent(estimator: str) -> tuple[int, float]:
    """Collectives of the loss and bytes a token that this rank hands to them."""
    rank, problem = dist.get_rank(), make_problem(estimator, rows=10, vocab=16)
    shard = VocabShard(8 * rank, 8 * rank + 8, 16)
    changed = {"center": False} if estimator == "none" else {}
    with counted() as traffic:
        problem.run(
            torch.float32,
            logits=problem.logits[:, shard.start : shard.stop],
            vocab=shard,
            group=dist.group.WORLD,
            **changed,
        )
    return traffic.collectives, traffic.contributed / 10


@pytest.mark.parametrize("distribution", ["none", "head", "support", "draws"])
def test_wire_is_what_the_loss_hands_to_its_collectives(distribution: str) -> None:
    planned = cost(distribution)
    assert run_ranks(bytes_sent, 2, distribution) == [(planned.collectives, planned.wire)] * 2


@pytest.mark.parametrize(("distribution", "width"), [("none", 0), ("head", 16), ("draws", 4), ("full", 32)])
def test_broadcast_is_the_size_of_a_batch(distribution: Distribution, width: int) -> None:
    batch = collate(
        make_rollouts(1, 2, vocab=32, head=width if distribution == "head" else 32),
        [1.0, -1.0],
        3,
        BatchLayout(2, 32, distribution, width),
    )
    size = sum(value.nbytes for name, value in vars(batch).items() if name != "per_rollout")
    assert cost(distribution, vocab_size=32).broadcast == size / 64
    assert cost(distribution, vocab_size=32).batch == size + 64 * 9 * 4


def test_replayed_routes_are_part_of_batch_and_buffer() -> None:
    plain, replayed = cost("head"), cost("head", moe_layers=3, moe_enable_routing_replay=True)
    assert replayed.broadcast - plain.broadcast == 3 * 2 * 4
    assert replayed.head_bytes - plain.head_bytes == 3 * 2 * 2


def test_logits_are_those_of_one_shard() -> None:
    assert cost("head").logits == 64 * 32 * 2
    assert cost("head", context_parallel_size=2).logits == 32 * 32 * 2
    assert cost("head", micro_batch_tokens=20).logits == 20 * 32 * 2
    assert cost("head", fuse_lm_head=True).logits == 64 * 32 * 2 + 32 * 8 * 4  # one chunk holds all, and the gradient
    assert cost("head", loss_correction=None).logits == 64 * 32 * (2 + 4)
    assert cost("head", tensor_model_parallel_size=1).wire == 0


def test_heads_take_the_bytes_of_their_arrow_columns() -> None:
    from benchmarks.rollouts import make_table

    table, _ = make_table(rollouts=4, length=500, k=16, seed=0)
    policy = HeadPolicy(k=16, target_mass=1.0, dropped_norm=0.0, precision="float16")
    manifest = Manifest(151936, "sha256:0", SamplerFingerprint(engine="test", weight_dtype="bf16"), policy)
    size = to_arrow(table, arrow_schema(manifest)).nbytes
    assert cost("head").head_bytes == pytest.approx(size / 2000, rel=0.01)
    assert cost("head").head_step == cost("head").head_bytes * 4 * 32
