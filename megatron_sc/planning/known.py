"""What a plan cannot add up, and says so."""

from __future__ import annotations

import argparse

from ..configuration import ConfigurationError
from .activations import DROPPED_BY


def refuse_unknown(args: argparse.Namespace) -> None:
    """Refuse models, optimizers and shardings whose memory the formulas here do not describe.

    Args:
        args: validated.

    Raises:
        ConfigurationError: naming the flag.
    """
    unknown = {
        f"--optimizer {args.optimizer}": args.optimizer not in ("adam", "sgd"),
        "--use-megatron-fsdp": args.use_megatron_fsdp,
        "--use-torch-fsdp2": args.use_torch_fsdp2,
        "--tensor-parallel-num-weight-shards": args.gtp_weight_remat_size > 1,
        "--expert-tensor-parallel-num-weight-shards": args.expert_gtp_weight_remat_size > 1,
        "--multi-latent-attention": args.multi_latent_attention,
        "--hybrid-layer-pattern": args.hybrid_layer_pattern is not None,
        "--mtp-num-layers": bool(args.mtp_num_layers),
        "--moe-latent-size": args.moe_latent_size is not None,
        "--experimental-attention-variant": args.experimental_attention_variant is not None,
        "--heterogeneous-layers-config-path": args.heterogeneous_layers_config_path is not None,
        "--cpu-offloading-num-layers": args.cpu_offloading_num_layers > 0,
        "--fine-grained-activation-offloading": args.fine_grained_activation_offloading,
    }
    if args.recompute_granularity == "selective":
        for module in args.recompute_modules or []:
            unknown[f"--recompute-modules {module}"] = module not in DROPPED_BY
    for flag, is_set in unknown.items():
        if is_set:
            raise ConfigurationError(f"{flag}: its memory is not known here; plan without it")
