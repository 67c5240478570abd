"""Start from a Hugging Face checkpoint, publish, stop and come back: in Megatron's own loop."""

import shlex
import sys
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from megatron_sc.weights import WeightsConfig, latest
from tests import tiny_model
from tests.distributed import run_ranks

FLAGS = shlex.split("""
    --num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --kv-channels 16 --ffn-hidden-size 48 --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --qk-layernorm
    --disable-bias-linear --position-embedding-type rope --rotary-base 10000 --untie-embeddings-and-output-weights
    --seq-length 16 --max-position-embeddings 16 --tokenizer-type NullTokenizer --vocab-size 32
    --make-vocab-size-divisible-by 64 --attention-dropout 0 --hidden-dropout 0 --bf16
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --lr-decay-style constant --seed 1 --log-interval 1
    --eval-interval 1000 --eval-iters 0 --dataloader-type external --calculate-per-token-loss
    --ckpt-format torch_dist --load-hf-weights
""")


def train(*flags):
    """One run of the tiny model in our loop."""
    from megatron.core import mpu
    from megatron.core.enums import ModelType
    from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from megatron_sc.training.arguments import add_arguments
    from megatron_sc.training.loop import pretrain

    with mock.patch.object(sys, "argv", ["train", *FLAGS, *flags]):
        args = parse_and_validate_args(extra_args_provider=add_arguments)

    def datasets_provider(sizes, vp_stage=None):
        rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        return tiny_model.micro_batches(rank, size, args.iteration + 1, set()), None, None

    datasets_provider.is_distributed = True
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets_provider, ModelType.encoder_or_decoder, tiny_model.forward_step)


def published(root):
    """Version to tensors."""
    return {
        int(path.name.partition("-")[0]): {
            name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()
        }
        for path in sorted(root.iterdir())
        if path.is_dir()
    }


def largest_change(one, other):
    return max((tensor.float() - other[name].float()).abs().max().item() for name, tensor in one.items())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A bfloat16 checkpoint that transformers made."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(4)
    config = Qwen3Config(
        num_hidden_layers=2, hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=32, initializer_range=0.3,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("hf")
    model.save_pretrained(folder)
    return folder, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def test_a_run_publishes_and_comes_back(checkpoint, tmp_path):
    folder, initial = checkpoint
    root = tmp_path / "weights"
    flags = ["--hf-checkpoint", str(folder), "--publish-weights", str(root), "--publish-keep", "9"]
    flags += ["--save", str(tmp_path / "megatron"), "--load", str(tmp_path / "megatron"), "--save-interval", "2"]
    run_ranks(train, 1, *flags, "--train-iters", "3", megatron=True)
    before = published(root)
    assert list(before) == [0, 1, 2, 3]
    assert set(before[0]) == set(initial)
    assert all(torch.equal(tensor, initial[name]) for name, tensor in before[0].items())
    # Three steps of Adam move a weight by 3 * lr at most, if they start from the loaded weights in float32.
    assert 0 < largest_change(before[3], before[0]) < 0.05

    (tmp_path / "megatron" / "latest_checkpointed_iteration.txt").write_text("2")  # as if step 3 was not saved
    held = latest(root)
    run_ranks(train, 1, *flags, "--train-iters", "3", "--publish-interval", "3", megatron=True)
    after = published(root)
    assert list(after) == [0, 1, 2, 3]
    assert all(torch.equal(tensor, before[2][name]) for name, tensor in after[2].items())
    assert latest(root).version == held.version == 3
    assert latest(root) != held
    assert all(torch.equal(tensor, before[3][name]) for name, tensor in after[3].items())


def test_parameters_that_are_gathered_late_are_published_up_to_date(checkpoint, tmp_path):
    folder, _ = checkpoint
    sharded = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
    for name, more in (("plain", []), ("late", sharded)):
        root = ["--publish-weights", str(tmp_path / name), "--publish-keep", "9", "--hf-checkpoint", str(folder)]
        run_ranks(train, 2, *root, "--train-iters", "2", *more, megatron=True)
    plain, late = published(tmp_path / "plain"), published(tmp_path / "late")
    assert list(plain) == list(late) == [0, 1, 2]
    assert largest_change(plain[2], plain[1]) > 0 < largest_change(plain[1], plain[0])
    for version, tensors in plain.items():  # Megatron's hooks rest in the first step, and nothing is gathered after it
        assert all(torch.equal(tensor, late[version][name]) for name, tensor in tensors.items()), version


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"publish_weights": "w"}, "--publish-weights needs --hf-checkpoint"),
        ({"load_hf_weights": True}, "--load-hf-weights needs --hf-checkpoint"),
        ({"publish_interval": 0}, "--publish-interval is 0 but must be at least 1"),
        ({"publish_keep": 0}, "--publish-keep is 0 but must be at least 1"),
    ],
)
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        WeightsConfig(**settings)


def refused_flags(folder):
    """What is said of flags that contradict each other."""
    from megatron.training import training
    from megatron.training.arguments import parse_and_validate_args

    from megatron_sc.training.arguments import add_arguments
    from megatron_sc.training.launch import centering_pretrain
    from megatron_sc.training.weights import RunWeights

    messages = []
    for flags, settings in (
        (["--finetune"], {}),
        # Megatron itself refuses these without a GPU:
        ([], {"use_megatron_fsdp": True}),
        ([], {"gtp_weight_remat_size": 2}),
        ([], {"fp8_param_gather": True}),
        (["--publish-weights", "w", "--loss-correction", "none", "--true-vocab-size", "31"], {}),
        (["--publish-weights", "w", "--loss-correction", "none"], {}),
    ):
        argv = ["train", *FLAGS, "--train-iters", "1", "--hf-checkpoint", folder, *flags]
        with mock.patch.object(sys, "argv", argv):
            args = parse_and_validate_args(extra_args_provider=add_arguments)
        vars(args).update(settings)
        try:
            RunWeights.from_args(args)
            messages.append("accepted")
        except ValueError as error:
            messages.append(str(error))
        training.destroy_global_state()
    with mock.patch.object(sys, "argv", ["train", *FLAGS, "--train-iters", "1", "--hf-checkpoint", folder]):
        parse_and_validate_args(extra_args_provider=add_arguments)
    with pytest.raises(ValueError, match="--load-hf-weights needs --loss-correction"):
        centering_pretrain(training.pretrain)(None, None, None, None)
    return messages


def test_contradicting_flags_are_refused(checkpoint):
    (messages,) = run_ranks(refused_flags, 1, str(checkpoint[0]), megatron=True)
    assert messages[0] == "--load-hf-weights would overwrite what --finetune loads: remove one of them"
    assert "--load-hf-weights does not work with --use-megatron-fsdp" in messages[1]
    assert "--load-hf-weights does not work with --tensor-parallel-num-weight-shards" in messages[2]
    assert "--load-hf-weights with --fp8-param-gather would start the optimizer from rounded weights" in messages[3]
    assert "--true-vocab-size is 31, but the sampler's softmax will have vocab_size 32" in messages[4]
    assert messages[5] == "accepted"
