"""``--fuse-lm-head``: the loss in the place of Megatron's output layer, with everything that hangs on the layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..vocab_parallel import CenteredLmHeadOutput, centered_lm_head_loss


def fused_head_loss(
    output_layer: Any,
    output_weight: Tensor | None,
    hidden_states: Tensor,
    scale_logits: Callable[[Tensor], Tensor],
    config: Any,
    *arguments: Any,
    **options: Any,
) -> CenteredLmHeadOutput:
    """``centered_lm_head_loss`` as if it were the forward of Megatron's output layer.

    Args:
        output_layer: Megatron's ``ColumnParallelLinear``.
        output_weight: the embedding's weight where it is tied, else None: the layer's own.
        hidden_states: ``[s, b, h]``; ``[s / tp, b, h]`` under sequence parallelism.
        scale_logits: what the model does to its logits: a multiplication by a number (MuP), or nothing.
        config: the model's ``TransformerConfig``.
        arguments: as of ``centered_lm_head_loss``, after the weight.
        options: of ``centered_lm_head_loss``.

    Raises:
        ValueError: for a layer that does what the fused head does not; it names the flag.
    """
    check_layer(output_layer, config, "--fuse-lm-head")
    if getattr(config, "fp16", False):
        raise ValueError("--fuse-lm-head does not support --fp16: remove one of them")
    scale = _multiplier(scale_logits)

    def forward(hidden: Tensor) -> CenteredLmHeadOutput:
        weight = output_layer.weight if output_weight is None else output_weight
        return centered_lm_head_loss(
            hidden.flatten(0, 1),
            weight,
            *arguments,
            logits_scale=scale,
            sequence_parallel=output_layer.sequence_parallel,
            **options,
        )

    return call_in_place_of_forward(output_layer, forward, hidden_states)


def loss_with_gradient(out: CenteredLmHeadOutput) -> Tensor:
    """``[n]``: the losses of the tokens, each with 1/n of the gradient of their sum.

    ``loss.sum()`` then has the value and the gradient of ``out.loss_sum``, also after multiplication by a number. The
    gradients of single tokens are gone: they were added up when they were computed.
    """
    nothing = out.loss_sum - out.loss_sum.detach()  # 0, with a gradient
    return out.loss + nothing / max(out.loss.numel(), 1)


def call_in_place_of_forward(layer: torch.nn.Module, forward: Callable[..., Any], *inputs: Any) -> Any:
    """``layer(*inputs)`` with another forward, so that the layer's hooks run around it.

    A forward pre-hook of the layer waits for its weight under ``--overlap-param-gather``: what ``forward`` reads before
    the hook has run is the weight before the last update.
    """
    before = vars(layer).get("forward")
    layer.forward = forward
    try:
        return layer(*inputs)
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before


def check_layer(layer: Any, config: Any, flag: str) -> None:
    """Refuse what a product in the place of Megatron's output layer does not do.

    Args:
        layer: Megatron's output layer.
        config: the model's ``TransformerConfig``.
        flag: what asks for the product.

    Raises:
        ValueError: naming the flag.
    """
    is_fsdp = any(hasattr(parameter, "__fsdp_param__") for parameter in layer.parameters(recurse=False))
    refused = {
        "an output layer with a bias": layer.bias is not None,
        "--fp8-output-proj": getattr(config, "fp8_output_proj", False),
        "--defer-embedding-wgrad-compute": getattr(config, "defer_embedding_wgrad_compute", False),
        "--use-megatron-fsdp": is_fsdp,
        "generalized tensor parallelism (gtp_remat)": getattr(layer, "gtp_remat_size", 1) > 1,
        "an output layer that does not reduce its gradient": getattr(layer, "disable_grad_reduce", False),
    }
    for what, found in refused.items():
        if found:
            raise ValueError(f"{flag} does not support {what}: remove one of them")


def _multiplier(scale_logits: Callable[[Tensor], Tensor]) -> float:
    """The number by which the model multiplies its logits, found on the CPU."""
    probe = torch.tensor([0.0, 1.0, -3.0], dtype=torch.float64)
    scaled = scale_logits(probe)
    multiplier = float(scaled[1])
    if not torch.allclose(scaled, multiplier * probe, rtol=1e-12, atol=0.0):
        raise ValueError(
            "--fuse-lm-head supports a model that multiplies its logits by a number, and this one does more (a soft "
            "cap?): remove the flag"
        )
    return multiplier
