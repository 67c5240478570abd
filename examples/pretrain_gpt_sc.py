"""Train a GPT policy from rollouts: an ordinary Megatron-Core script with a few more flags.

    torchrun --nproc-per-node 8 examples/pretrain_gpt_sc.py <your Megatron flags> --loss-correction score_centering ...
    torchrun --nproc-per-node 8 examples/pretrain_gpt_sc.py --sc-config FILE <flags that win over the file's>

Without a GPU the same script runs on the CPU over gloo: python examples/pretrain_gpt_sc.py ...
"""

import sys

from megatron_sc.training import cpu

cpu.install()  # before the import of megatron.training; with a GPU it only skips the build of a helper for datasets

from megatron.core.enums import ModelType  # noqa: E402
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402

from megatron_sc.training.arguments import add_arguments  # noqa: E402
from megatron_sc.training.config_files import expand_argv  # noqa: E402
from megatron_sc.training.loop import pretrain  # noqa: E402
from megatron_sc.training.plugin import ScoreCentering  # noqa: E402


def main() -> None:
    """Parse, build, train."""
    sys.argv[1:] = expand_argv(sys.argv[1:])  # --sc-config FILE
    args = parse_and_validate_args(extra_args_provider=add_arguments, args_defaults={"tokenizer_type": "NullTokenizer"})
    plugin = ScoreCentering.from_args(args)
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(
        config,
        plugin.datasets_provider,
        ModelType.encoder_or_decoder,
        plugin.forward_step,
        metrics_path=args.metrics_jsonl,
    )


if __name__ == "__main__":
    main()
