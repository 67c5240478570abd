"""The mismatch report: its numbers, its attribution, and the command on a checkpoint under tensor parallelism."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from megatron_sc.cli import main
from megatron_sc.diagnostics.mismatch import (
    TAIL_QUANTILES,
    Attribution,
    Mismatch,
    Positions,
    attribute,
    component_names,
    layer_names,
    with_components,
    with_layers,
)
from megatron_sc.diagnostics.mismatch_report import attribution_figure, attribution_table, mismatch_table
from megatron_sc.diagnostics.probe_sampler import SamplerProbe
from megatron_sc.objective import Support, TopKHead
from megatron_sc.precision.quantize import Quantizer
from megatron_sc.precision.specs import SPECS, SamplerSpec
from megatron_sc.rollouts import HeadPolicy, Manifest, RolloutWriter
from megatron_sc.sampling import SamplingParameters, generate, simulated
from megatron_sc.vocab_parallel import centered_loss
from tests.distributed import run_megatron, run_ranks
from tests.sampling_models import VOCAB, build_model, groups
from tests.test_simulate_training import train_and_record
from tests.test_training import CENTERED
from tests.train_fixed import train_fixed

MODEL = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --ffn-hidden-size 128 --seq-length 16
    --max-position-embeddings 16 --position-embedding-type rope --vocab-size 30 --tokenizer-type NullTokenizer
    --make-vocab-size-divisible-by 8
"""


def distributions(n: int = 50, vocab: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two log-distributions at n positions that differ somewhat, and tokens of the second."""
    generator = np.random.default_rng(seed)
    logits = generator.standard_normal((n, vocab)) * 2
    p, q = (
        torch.log_softmax(torch.from_numpy(z), -1)
        for z in (logits, logits + 0.4 * generator.standard_normal(logits.shape))
    )
    return p, q, torch.from_numpy(np.array([generator.choice(vocab, p=row) for row in q.exp().numpy()]))


def test_the_numbers_are_their_definitions() -> None:
    logp, logq, ids = distributions()
    mismatch = Mismatch.of(Positions.of(logp.float(), logq.float(), ids, head_size=4))
    p, q = logp.exp().numpy(), logq.exp().numpy()
    kl, head_kl, k3, ratios, drifts, tails, outside = [], [], [], [], [], [], 0
    for pi, qi, y in zip(p, q, ids.tolist(), strict=True):
        head = np.argsort(-qi)[:4]
        rest = np.setdiff1d(np.arange(12), head)
        tail_p, tail_q = pi[rest].sum(), qi[rest].sum()
        kl.append((qi * np.log(qi / pi)).sum())
        head_kl.append((qi[head] * np.log(qi[head] / pi[head])).sum() + tail_q * np.log(tail_q / tail_p))
        ratio = pi[y] / qi[y]
        k3.append(ratio - 1 - np.log(ratio))
        ratios.append(abs(np.log(ratio)))
        drifts.append((np.abs(qi - pi)[head].sum(), np.abs(qi - pi)[rest].sum()))
        tails.append(tail_q / tail_p)
        outside += y not in head
    assert mismatch.positions == 50
    assert mismatch.kl == pytest.approx(np.mean(kl), rel=1e-5)
    assert mismatch.head_kl == pytest.approx(np.mean(head_kl), rel=1e-5)
    assert mismatch.head_kl < mismatch.kl
    assert mismatch.k3_kl == pytest.approx(np.mean(k3), rel=1e-5)
    assert mismatch.log_ratio_abs == pytest.approx(np.mean(ratios), rel=1e-5)
    assert mismatch.log_ratio_abs_max == pytest.approx(max(ratios), rel=1e-5)
    assert (mismatch.drift_head, mismatch.drift_tail) == pytest.approx(np.mean(drifts, axis=0), rel=1e-5)
    assert mismatch.tail_ratio == pytest.approx(np.quantile(tails, TAIL_QUANTILES), rel=1e-5)
    assert mismatch.outside_head == outside / 50


def test_the_training_steps_metrics_are_the_same_quantities() -> None:
    logp, logq, ids = distributions()
    head_logq, head = logq.topk(4, dim=1)
    tail = logq.scatter(1, head, -torch.inf).logsumexp(1)
    out = centered_loss(logp, ids, torch.ones(50), TopKHead(head, head_logq, tail), logq.gather(1, ids[:, None])[:, 0])
    means = {name: value.mean().item() for name, value in out.metrics.items()}
    positions = Positions.of(logp, logq, ids, 4)
    mismatch = Mismatch.of(positions)
    assert mismatch.head_kl == pytest.approx(means["sampler_kl"])
    assert mismatch.k3_kl == pytest.approx(means["ratio_kl"])
    assert mismatch.log_ratio_abs == pytest.approx(means["log_ratio_abs"])
    assert mismatch.outside_head == pytest.approx(1 - means["sampled_in_recorded"])
    assert mismatch.drift_head == pytest.approx(means["drift_l1"] - means["drift_l1_tail"])


def test_a_whole_head_and_a_truncated_sampler() -> None:
    logp, logq, ids = distributions()
    whole = Mismatch.of(Positions.of(logp, logq, ids, head_size=50))
    assert whole.head_kl == pytest.approx(whole.kl)
    assert whole.drift_tail == whole.outside_head == 0
    assert all(map(math.isnan, whole.tail_ratio))
    cut = torch.log_softmax(logq.masked_fill(logq < logq.topk(3, dim=1).values[:, -1:], -torch.inf), 1)
    truncated = Mismatch.of(Positions.of(logp, cut, cut.argmax(1), head_size=3))
    assert math.isfinite(truncated.kl)
    assert truncated.kl == pytest.approx(truncated.head_kl)
    assert max(truncated.tail_ratio) == 0
    same = Mismatch.of(Positions.of(logp, logp, ids, head_size=3))
    assert same.kl == same.k3_kl == same.log_ratio_abs_max == same.drift_head == same.drift_tail == 0
    joined = Positions.join(
        [Positions.of(*(x[part] for x in (logp, logq, ids)), 4) for part in (slice(20), slice(20, 50))]
    )
    assert Mismatch.of(joined) == Mismatch.of(Positions.of(logp, logq, ids, 4))


@pytest.mark.parametrize("with_tail", [True, False])
def test_a_recorded_head_gives_what_can_be_known_of_the_whole_distribution(with_tail: bool) -> None:
    logp, logq, ids = distributions()
    head_logq, head = logq.topk(4, dim=1)
    tail = logq.scatter(1, head, -torch.inf).logsumexp(1) if with_tail else None
    if with_tail:  # ragged: the second half records three tokens, and the fourth belongs to the tail
        tail[25:] = logq[25:].scatter(1, head[25:, :3], -torch.inf).logsumexp(1)
        head[25:, 3], head_logq[25:, 3] = -1, -torch.inf
    recorded = Positions.of_recorded(logp, ids, logq.gather(1, ids[:, None])[:, 0], head, head_logq, tail)
    halves = [Positions.of(logp[rows], logq[rows], ids[rows], k) for rows, k in
              ((slice(25), 4), (slice(25, 50), 3 if with_tail else 4))]  # fmt: skip
    whole = Positions.join(halves)
    for name in ("log_ratio", "head_kl", "head_drift", "tail_ratio", "outside"):
        assert torch.allclose(getattr(recorded, name), getattr(whole, name), atol=1e-12), name
    assert (recorded.tail_drift <= whole.tail_drift + 1e-12).all()
    assert recorded.kl.isnan().all()
    as_dict = Mismatch.of(recorded).as_dict()
    assert as_dict["kl"] is None
    assert json.loads(json.dumps(as_dict, allow_nan=False))["head_kl"] == pytest.approx(whole.head_kl.mean().item())


def test_a_recorded_support_is_compared_on_itself() -> None:
    logp, logq, _ = distributions()
    support_logq, support = logq.topk(3, dim=1)
    support_logq = torch.log_softmax(support_logq, 1)
    ids, sampled_logq = support[:, 1], support_logq[:, 1]
    out = centered_loss(logp, ids, torch.ones(50), Support(support, support_logq), sampled_logq)
    mismatch = Mismatch.of(Positions.of_recorded(logp, ids, sampled_logq, support, support_logq, is_support=True))
    for name, value in (("sampler_kl", mismatch.head_kl), ("drift_l1", mismatch.drift_head),
                        ("log_ratio_abs", mismatch.log_ratio_abs)):  # fmt: skip
        assert value == pytest.approx(out.metrics[name].mean().item()), name
    assert mismatch.drift_tail == mismatch.outside_head == 0


def test_attribution_turns_one_part_on_at_a_time_and_fits_nothing() -> None:
    calls = []
    size = {"a": 1.0, "b": 2.0, "c": 4.0}

    def kl(on: Any) -> float:
        calls.append(tuple(on))
        return sum(size[name] for name in on) + 10.0 * ({"a", "c"} <= set(on))

    found = attribute(["a", "b", "c"], kl)
    assert found == Attribution(17.0, size, {"a": 1.0, "b": 3.0, "c": 17.0})
    assert found.residual == 10.0
    assert calls == [("a",), ("b",), ("c",), ("a", "b"), ("a", "b", "c")]
    assert attribute([], kl) == Attribution(0.0, {}, {})


def test_parts_put_together_are_the_whole_spec() -> None:
    noisy = dataclasses.replace(SPECS["fp8-fp4kv"], noise=0.1, head="bfloat16", ignored=("decoder.layers.0.mlp.*",))
    everything = ["noise", "weights", "activations", "keys", "values", "expert weights", "expert activations", "head"]
    assert component_names(noisy, has_experts=True) == everything
    assert component_names(noisy, has_experts=False) == [name for name in everything if "expert" not in name]
    assert component_names(SamplerSpec(), True) == layer_names(SamplerSpec(), 2) == []
    whole = with_components(noisy, everything)
    assert dataclasses.replace(whole, expert_weights="same", expert_activations="same") == noisy
    assert whole.linear(is_expert=True) == noisy.linear(is_expert=True)
    nothing = with_components(noisy, [])
    assert component_names(nothing, True) == []
    only = with_components(noisy, ["expert weights"])
    assert component_names(only, True) == ["expert weights"]
    assert only.expert_weights == Quantizer.parse("e4m3/128x128")
    assert layer_names(noisy, 2) == ["noise", "layer 0", "layer 1", "head"]
    assert with_layers(noisy, 2, layer_names(noisy, 2)) == noisy
    first = with_layers(noisy, 2, ["layer 0"])
    assert first.ignored == ("decoder.layers.0.mlp.*", "decoder.layers.1.*")
    assert first.ignored_caches == ("decoder.layers.1.*",)
    assert (first.noise, first.head) == (0.0, "trainer")


def command(*arguments: str | Path) -> list[str]:
    return ["-m", "megatron_sc.cli", "mismatch", *map(str, arguments)]


def measured(output: str) -> dict[str, Any]:
    """The JSON object among what a rank printed."""
    (line,) = [line for line in output.splitlines() if line.startswith("{")]
    return json.loads(line)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a tiny model in bfloat16 after two steps."""
    directory = tmp_path_factory.mktemp("checkpoint")
    flags = "--loss-correction score_centering --micro-batch-size 8 --train-iters 2 --init-method-std 0.2"
    save = f"{flags} --save {directory} --save-interval 2"
    run_ranks(train_fixed, 1, save, str(directory / "metrics.jsonl"), megatron=True)
    return directory


def test_the_command_on_a_checkpoint_under_tensor_parallelism(checkpoint: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": list(range(i, 2 * i))}) + "\n" for i in range(2, 7)))
    spec = tmp_path / "mine.yaml"
    spec.write_text("base: int8-int4kv\nnoise: 0.05\nhead: bfloat16\n")
    plot = tmp_path / "bars.png"
    options = ["fp8-fp4kv", spec, "--prompts", prompts, "--response", "5", "--json", "--plot", plot]
    model = [*MODEL.split(), "--load", checkpoint]
    (one,) = run_megatron(command(*options, "--model", *model), 1)
    first, second = run_megatron(command(*options, "--model", *model, "--tensor-model-parallel-size", "2"), 2)
    alone, parallel = measured(one), measured(first)
    assert not any(line.startswith("{") for line in second.splitlines())
    assert plot.read_bytes()[:4] == b"\x89PNG"
    assert list(alone) == ["fp8-fp4kv", str(spec)]
    for name, found in alone.items():
        assert found["positions"] == 25
        assert found["kl"] > 1e-4
        assert found["kl"] == pytest.approx(found["up_to"][list(found["up_to"])[-1]], rel=1e-9)
        assert found["residual"] == pytest.approx(found["kl"] - sum(found["alone"].values()))
        assert parallel[name]["kl"] == pytest.approx(found["kl"], rel=1e-2)  # sums in another order round elsewhere
        assert parallel[name]["alone"] == pytest.approx(found["alone"], rel=1e-2)
    assert list(alone[str(spec)]["alone"]) == ["noise", "weights", "activations", "keys", "values", "head"]
    (layers,) = run_megatron(command("fp8-fp4kv", "--by", "layer", "--json", "--model", *MODEL.split()), 1)
    fresh = measured(layers)["fp8-fp4kv"]
    assert list(fresh["alone"]) == ["layer 0", "layer 1"]
    assert fresh["kl"] == pytest.approx(fresh["up_to"]["layer 1"], rel=1e-9)
    assert fresh["kl"] < alone["fp8-fp4kv"]["kl"] / 10  # a fresh model with small weights: the checkpoint was loaded


def test_the_command_on_a_buffer_that_the_checkpoint_itself_sampled(checkpoint: Path, tmp_path: Path) -> None:
    flags = f"{CENTERED} --load {checkpoint} --finetune --no-load-optim --prompts-per-step 4 --samples-per-prompt 2"
    ((_, (rollouts, *_)),) = run_ranks(train_and_record, 1, flags, str(tmp_path / "metrics.jsonl"), megatron=True)
    stale = [copy.deepcopy(r) for r in rollouts]
    stale = [dataclasses.replace(r, weight_version=r.weight_version + 7, group_id=r.group_id + 9) for r in stale]
    for rollout in stale:  # a sampler that gave every recorded token 22 % less, and the tail the rest
        rollout.sampled_logprobs[:] -= 0.25
        rollout.head_logprobs[:] -= 0.25
        rollout.log_tail_mass[:] = np.log1p(-np.exp(rollout.head_logprobs.astype(np.float64)).sum(1))
    exact = HeadPolicy(target_mass=1.0, dropped_norm=0.0, precision="float32")
    with RolloutWriter(tmp_path / "buffer", Manifest(true_vocab_size=30, heads=exact)) as writer:
        writer.write([*rollouts, *stale])
    options = ["--buffer", tmp_path / "buffer", "--json", "--model", *MODEL.split(), "--load", checkpoint]
    (output,) = run_megatron(command(*options), 1)
    found = measured(output)
    assert list(found) == ["all", "version 7", "version 0"]
    assert [found[name]["positions"] for name in found] == [96, 48, 48]
    assert found["version 0"]["head_kl"] < 1e-9
    assert found["version 0"]["log_ratio_abs_max"] < 1e-4
    assert found["version 7"]["log_ratio_abs"] == pytest.approx(0.25, abs=1e-4)
    assert found["version 7"]["drift_head"] == pytest.approx(found["version 7"]["drift_tail"], rel=1e-3)
    assert found["all"]["log_ratio_abs_max"] == pytest.approx(0.25, abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fp9"], "error: no sampler precision 'fp9'; there are"),
        ([], "error: give one or more SPEC, or --buffer"),
        (["fp8-fp8kv", "--count", "0"], "error: --count, --head-size and --response must be at least 1"),
    ],
)
def test_wrong_calls_are_refused_before_megatron_starts(arguments: list[str], message: str, capsys: Any) -> None:
    assert main(["mismatch", *arguments]) == 2
    assert capsys.readouterr().err.startswith(message)


def loaded_from_nowhere(directory: str) -> str:
    from megatron_sc.training.evaluation_model import evaluation_model

    try:
        evaluation_model([*MODEL.split(), "--load", directory], "test")
    except ValueError as error:
        return str(error)
    return "accepted"


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (message,) = run_ranks(loaded_from_nowhere, 1, str(tmp_path), megatron=True)
    assert message == f"--load {tmp_path} holds no checkpoint"


def probed() -> tuple[torch.Tensor, torch.Tensor, float, float]:
    """Log q of responses as the sampler drew them and as the probe scores them; KL of sampler and trainer."""
    prompts = [np.arange(1, 2 + i) for i in range(5)]
    model = build_model()
    probe = SamplerProbe(model, prompts, 4, VOCAB, groups(), seed=3, temperature=0.7, head_size=4)
    spec = SPECS["int8-int4kv"]
    responses = probe._sample(spec)
    with simulated(model, spec, VOCAB, groups()):
        drawn = generate(
            model, *probe._padded(slice(None)), probe._uniforms, VOCAB, SamplingParameters(0.7, head_size=1)
        )
    assert torch.equal(drawn.ids.long(), responses)
    scores = torch.cat(probe._scores(spec, responses)).gather(1, responses.flatten()[:, None]).view(5, 4)
    measured_kl = [probe.measure(s, "nothing")[0].kl for s in (spec, SPECS["trainer"])]
    return drawn.logprobs, scores, *measured_kl


def test_the_probe_scores_each_token_where_it_was_drawn() -> None:
    ((drawn, scored, kl, none),) = run_ranks(probed, 1, megatron=True)
    assert torch.allclose(drawn, scored, atol=1e-5)
    assert kl > 1e-3
    assert none == 0


@pytest.mark.parametrize("line", ["[1]", '{"prompt_ids": []}', '{"prompt_ids": [1, -2]}', '{"prompt_ids": "a"}', "x"])
def test_wrong_prompts_are_refused_by_file_and_line(line: str) -> None:
    from megatron_sc.commands.mismatch import _prompt

    with pytest.raises(ValueError, match=r"^prompts\.jsonl:3: not an object"):
        _prompt(line, "prompts.jsonl:3")


def test_tables_and_figure_show_every_part() -> None:
    logp, logq, ids = distributions()
    mismatch = Mismatch.of(Positions.of(logp, logq, ids, 4))
    attribution = Attribution(0.5, {"weights": 0.25, "keys": 0.125}, {"weights": 0.25, "keys": 0.5})
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(mismatch_table({"mine": mismatch}))
    console.print(attribution_table("mine", attribution))
    text = console.export_text()
    for part in (
        f"{mismatch.kl:.3e}",
        "weights",
        "2.500e-01",
        "with all above",
        "+1.250e-01",
        f"{mismatch.tail_ratio[-1]:.3f}",
    ):
        assert part in text
    (panel,) = attribution_figure({"mine": attribution}).axes
    assert [label.get_text() for label in panel.get_yticklabels()] == ["weights", "keys", "all", "residual"]
    assert [bar.get_width() for bar in panel.patches] == [0.25, 0.125, 0.5, 0.125]
