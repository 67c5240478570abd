"""Export and import of tiny Qwen3 and Qwen3-MoE models: against ``transformers``, and under every layout."""

import json
import math
import resource
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron_sc.weights.hf_config import HFConfig
from tests.distributed import RankError, run_ranks
from tests.qwen3_models import VOCAB, Layout, build, write_config

SINGLE = Layout()
MODELS = {
    "dense": {},
    "tied": {"tie_word_embeddings": True},
    "one-group": {"num_key_value_heads": 1},
    "moe": {"moe": True},
    "every-second": {"moe": True, "mlp_only_layers": [], "decoder_sparse_step": 2, "tie_word_embeddings": True},
}


def read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, by the index; every file must be named there."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = {path.name: load_file(path) for path in folder.glob("*.safetensors")}
    assert set(files) == set(index.values())
    assert sum(map(len, files.values())) == len(index)
    return {name: files[file][name] for name, file in index.items()}


def assert_same_checkpoint(folder: Path, other: Path) -> None:
    ours, theirs = read_checkpoint(folder), read_checkpoint(other)
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert torch.equal(tensor, theirs[name]), name
    assert (folder / "config.json").read_text() == (other / "config.json").read_text()


def exported(folders, layout=SINGLE, rename=None, dtype=torch.float32, **export_settings):
    """Export models, one after another: (folder with config.json, checkpoint to load or None, to save or None, out)."""
    from megatron.core import parallel_state

    from megatron_sc.weights.export import export

    logits = []
    for config, load_from, save_to, out in folders:
        parallel_state.destroy_model_parallel()
        chunks = build(config, layout, load_from, save_to, dtype)
        if rename is not None:
            rename(chunks)
        export(chunks, HFConfig.read(config), out, **export_settings)
        if layout == SINGLE and rename is None and dtype is torch.float32:
            logits.append(forward(chunks[0]))
    return logits


def forward(model):
    """Logits of the tokens of :func:`some_tokens`, over the true vocabulary."""
    positions, later = torch.arange(12).expand(3, -1), torch.ones(12, 12, dtype=torch.bool).triu(1)[None, None]
    with torch.no_grad():
        return model.eval()(some_tokens(), positions, later)[..., :VOCAB]


def some_tokens():
    return torch.randint(VOCAB, (3, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """One rank's export, Megatron checkpoint and logits of every model: name to (config, Megatron's, ours, logits)."""
    root = tmp_path_factory.mktemp("single")
    folders = []
    for name, keys in MODELS.items():
        (root / f"{name}-hf").mkdir()
        folders.append((write_config(root / name, **keys), None, root / f"{name}-megatron", root / f"{name}-hf"))
    (logits,) = run_ranks(exported, 1, folders, megatron=True, file_bytes=20_000)
    return {
        name: (config, megatron, ours, values)
        for (name, (config, _, megatron, ours)), values in zip(zip(MODELS, folders, strict=True), logits, strict=True)
    }


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_same_logits(single, name):
    from transformers import AutoModelForCausalLM

    _, _, ours, logits = single[name]
    assert len(list(ours.glob("*.safetensors"))) > 2  # several files
    model, report = AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.float32  # config.json said bfloat16; the weights are what they are
    with torch.no_grad():
        theirs = model(some_tokens()).logits
    assert theirs.shape == logits.shape
    assert theirs.std() > 0.5
    assert (theirs - logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("layout", "names"),
    [
        (Layout(), ["dense", "moe"]),  # two data-parallel ranks, which share the writing
        (Layout(tp=2), ["dense", "tied", "one-group"]),
        (Layout(tp=2, ep=2, etp=1), ["moe", "every-second"]),
        (Layout(tp=2, etp=2), ["moe"]),
        (Layout(pp=2), ["dense", "tied", "moe"]),
        (Layout(pp=2, vpp=2), ["tied", "moe"]),
        (Layout(ep=2), ["moe", "every-second"]),
    ],
    ids=["dp2", "tp2", "tp2-ep2", "tp2-etp2", "pp2", "pp2-vpp2", "ep2-dp2"],
)
def test_every_layout_gives_the_same_checkpoint(single, tmp_path, layout, names):
    folders = []
    for name in names:
        config, megatron, _, _ = single[name]
        (tmp_path / name).mkdir()
        folders.append((config, megatron, None, tmp_path / name))
    run_ranks(exported, 2, folders, layout, megatron=True)
    for name in names:
        assert_same_checkpoint(tmp_path / name, single[name][2])
        writers = {path.name.split("-")[1] for path in (tmp_path / name).glob("*.safetensors")}
        assert writers == {"00000", "00001"}


def as_transformer_engine(chunks):
    """Give the parameters the names they have in Transformer Engine's layers and grouped experts."""
    for layer in (layer for chunk in chunks for layer in chunk.decoder.layers):
        layer.self_attention.linear_qkv.layer_norm_weight = layer.input_layernorm.weight
        del layer.input_layernorm
        if hasattr(layer.mlp, "experts"):
            experts = layer.mlp.experts
            for linear in ("linear_fc1", "linear_fc2"):
                grouped = torch.nn.Module()
                for i, expert in enumerate(experts.local_experts):
                    grouped.register_parameter(f"weight{i}", getattr(expert, linear).weight)
                setattr(experts, linear, grouped)
            del experts.local_experts
        else:
            layer.mlp.linear_fc1.layer_norm_weight = layer.pre_mlp_layernorm.weight
            del layer.pre_mlp_layernorm
    names = [name for name, _ in chunks[0].named_parameters()]
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names


def test_names_of_transformer_engine(single, tmp_path):
    config, megatron, ours, _ = single["moe"]
    run_ranks(
        exported, 2, [(config, megatron, None, tmp_path)], Layout(ep=2), as_transformer_engine, megatron=True
    )  # fmt: skip
    assert_same_checkpoint(tmp_path, ours)


def test_bfloat16_parameters_are_written_as_they_are(single, tmp_path):
    config, megatron, ours, _ = single["dense"]
    run_ranks(exported, 1, [(config, megatron, None, tmp_path)], dtype=torch.bfloat16, megatron=True)
    written = read_checkpoint(tmp_path)
    for name, tensor in read_checkpoint(ours).items():
        assert torch.equal(written[name], tensor.bfloat16()), name
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def imported_and_exported(config, layout, out):
    """Load a Hugging Face checkpoint into a model with random weights, and export that."""
    from megatron_sc.weights.export import export
    from megatron_sc.weights.load import load_hf_weights

    chunks = build(config, layout)
    load_hf_weights(chunks, HFConfig.read(config))
    export(chunks, HFConfig.read(config), out)
    core = chunks[-1]
    head = core.output_layer.weight if core.post_process and core.output_layer.weight is not None else None
    return None if head is None else head.detach().clone()


@pytest.mark.parametrize(
    ("layout", "ranks", "name"),
    [
        (Layout(), 1, "tied"),
        (Layout(tp=2, ep=2, etp=1), 2, "moe"),
        (Layout(tp=2), 2, "one-group"),
        (Layout(pp=2, vpp=2), 2, "tied"),
        (Layout(tp=2, etp=2), 2, "moe"),
    ],
    ids=["1", "tp2-ep2", "tp2", "pp2-vpp2", "tp2-etp2"],
)
def test_loading_undoes_the_export(single, tmp_path, layout, ranks, name):
    source = single[name][2]
    for file in ("tokenizer.json", "merges.txt"):
        (source / file).write_text(file)
    heads = run_ranks(imported_and_exported, ranks, source, layout, tmp_path, megatron=True)
    assert_same_checkpoint(tmp_path, source)
    assert (tmp_path / "tokenizer.json").read_text() == "tokenizer.json"
    assert (tmp_path / "merges.txt").exists()
    if layout.tp == 1 and ranks == 2:  # the last stage's copy of the embedding
        embedding = read_checkpoint(source)["model.embed_tokens.weight"]
        assert torch.equal(heads[-1][:VOCAB], embedding)
        assert not heads[-1][VOCAB:].any()


def save_moe(folder):
    """A small Qwen3-MoE checkpoint made and saved by transformers; the model."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(2)
    config = Qwen3MoeConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=VOCAB, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24,
        norm_topk_prob=True, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, initializer_range=0.3,
    )  # fmt: skip
    model = Qwen3MoeForCausalLM(config).eval()
    model.save_pretrained(folder)
    return model


def test_transformers_own_checkpoint_is_loaded(tmp_path):
    """The other direction: a model made and saved by transformers computes the same in Megatron."""
    model = save_moe(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    with torch.no_grad():
        theirs = model(some_tokens()).logits
    (ours,) = run_ranks(logits_after_loading, 1, tmp_path, megatron=True)
    assert theirs.std() > 0.5
    assert (theirs - ours).abs().max() < 1e-4


@pytest.mark.gpu
def test_transformer_engine_itself(tmp_path):
    """Its layers and grouped experts, on a GPU: what is loaded is exported again."""
    import torch.distributed as dist

    from megatron_sc.weights.export import export
    from megatron_sc.weights.load import load_hf_weights

    save_moe(tmp_path)
    (tmp_path / "out").mkdir()
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        chunks = [chunk.cuda() for chunk in build(tmp_path, transformer_engine=True, moe_grouped_gemm=True)]
        names = {name for name, _ in chunks[0].named_parameters()}
        assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
        assert "decoder.layers.1.mlp.experts.linear_fc1.weight3" in names
        load_hf_weights(chunks, HFConfig.read(tmp_path))
        export(chunks, HFConfig.read(tmp_path), tmp_path / "out")
    finally:
        dist.destroy_process_group()
    written, loaded = read_checkpoint(tmp_path / "out"), load_file(tmp_path / "model.safetensors")
    assert written.keys() == loaded.keys()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in written.items())


def logits_after_loading(folder):
    from megatron_sc.weights.load import load_hf_weights

    (model,) = build(folder)
    load_hf_weights([model], HFConfig.read(folder))
    return forward(model)


@pytest.mark.parametrize(
    ("keys", "parameters"),
    [
        (
            {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16,
             "num_key_value_heads": 8, "tie_word_embeddings": True},
            596_049_920,
        ),
        (
            {"moe": True, "num_hidden_layers": 48, "hidden_size": 2048, "num_attention_heads": 32,
             "num_key_value_heads": 4, "num_experts": 128, "moe_intermediate_size": 768, "mlp_only_layers": []},
            30_532_122_624,
        ),
    ],
    ids=["Qwen3-0.6B", "Qwen3-30B-A3B"],
)  # fmt: skip
def test_published_models_have_their_parameters(tmp_path, keys, parameters):
    config = HFConfig.read(write_config(tmp_path, head_dim=128, vocab_size=151936, **keys))
    assert sum(map(math.prod, config.tensors().values())) == parameters


def refusals(changes, out):
    """What export says of one model for each change of its config.json, and whether it wrote anything."""
    from megatron_sc.weights.export import export

    folder = write_config(out / "model", moe=True)
    chunks = build(folder)
    messages = []
    for i, change in enumerate(changes):
        (out / f"{i}").mkdir()
        try:
            export(chunks, HFConfig.read(write_config(out / f"config{i}", moe=True, **change)), out / f"{i}")
            messages.append("accepted")
        except ValueError as error:
            messages.append(str(error))
        if list((out / f"{i}").glob("*.json")):
            messages[-1] += " (and wrote its index)"
    with pytest.raises(ValueError, match="is a GPTModel, not a Linear"):
        export([torch.nn.Linear(2, 2)], HFConfig.read(folder), out / "0")
    return messages


def test_another_architecture_is_refused(tmp_path):
    changes = {
        "rope_theta 10000 in config.json, but --rotary-base is 5000": {"rope_theta": 10000},
        "rms_norm_eps 1e-05 in config.json, but --norm-epsilon is 1e-06": {"rms_norm_eps": 1e-5},
        "tie_word_embeddings True in config.json, but tied embeddings is False": {"tie_word_embeddings": True},
        "norm_topk_prob False in config.json": {"norm_topk_prob": False},
        "num_experts_per_tok 3 in config.json, but --moe-router-topk is 2": {"num_experts_per_tok": 3},
        "num_key_value_heads 4 in config.json, but --num-query-groups is 2": {"num_key_value_heads": 4},
        "head_dim 8 in config.json, but --kv-channels is 16": {"head_dim": 8},
        "num_hidden_layers 5 in config.json, but --num-layers is 4": {"num_hidden_layers": 5},
        "model.layers.1.mlp.gate.weight is missing": {"mlp_only_layers": []},
        "is [48, 32], not [40, 32]": {"intermediate_size": 40},
        "vocab_size in": {"vocab_size": 65},
        "attention_bias is True, which is not supported": {"attention_bias": True},
        "rope_scaling is {'factor': 4.0}, which is not supported": {"rope_scaling": {"factor": 4.0}},
        "model_type is 'llama'; supported are qwen3 and qwen3_moe": {"model_type": "llama"},
        "hidden_size must be a whole number, got None": {"hidden_size": None},
        "num_experts must be a whole number, got '4'": {"num_experts": "4"},
        "num_experts 8 in config.json, but --num-experts is 4": {"num_experts": 8},
    }
    (messages,) = run_ranks(refusals, 1, list(changes.values()), tmp_path, megatron=True)
    for expected, message in zip(changes, messages, strict=True):
        assert expected in message
        assert "config" in message
        assert "wrote" not in message


def with_adapter(config, layout, out):
    """The last stage has a parameter that no Qwen3 has."""
    from megatron_sc.weights.export import export

    chunks = build(config, layout)
    if chunks[0].post_process:
        layer = chunks[0].decoder.layers[1]
        layer.self_attention.linear_proj.adapter = torch.nn.Linear(2, 2, bias=False)
    export(chunks, HFConfig.read(config), out)


def test_an_unknown_parameter_is_refused_on_every_rank(single, tmp_path):
    with pytest.raises(RankError) as error:
        run_ranks(with_adapter, 2, single["dense"][0], Layout(pp=2), tmp_path, megatron=True, timeout=60)
    name = "parameter decoder.layers.1.self_attention.linear_proj.adapter.weight has no place"
    assert f"rank 1: {name}" in str(error.value).partition("--- rank 1")[0]
    assert f"ValueError: {name}" in str(error.value)
    assert not list(tmp_path.iterdir())


def with_full_disk(config, layout, root):
    """Publish once; then again while no file of rank 1 may grow beyond 1000 bytes. What each rank says of it."""
    import torch.distributed as dist

    from megatron_sc.weights import WeightsConfig, latest
    from megatron_sc.weights.publisher import Publisher

    chunks = build(config, layout)
    publisher = Publisher(WeightsConfig(hf_checkpoint=str(config), publish_weights=str(root)))
    first = publisher.publish(chunks, 1)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        publisher.publish(chunks, 2)
        message = "published"
    except Exception as error:
        message = repr(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    after_failure = latest(root)
    dist.barrier()
    return message, first == after_failure, publisher.publish(chunks, 3) == latest(root)


def test_a_full_disk_publishes_nothing_and_hangs_no_rank(single, tmp_path):
    first, second = run_ranks(with_full_disk, 2, single["dense"][0], Layout(tp=2), tmp_path, megatron=True, timeout=60)
    assert "File too large" in second[0]
    assert first[0].startswith("RuntimeError('rank 1: ")
    assert "File too large" in first[0]
    assert first[1:] == second[1:] == (True, True)
    assert sorted(path.name.partition("-")[0] for path in tmp_path.iterdir()) == ["00000001", "00000003", "latest.json"]
