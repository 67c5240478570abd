"""Models whose forward pass takes no output processor: Megatron-Core's HybridModel (attention, Mamba, MLP, MoE layers).

Their output layer gets a hook for the length of one forward pass, which puts the loss in the place of the logits. So
the logits are neither transposed nor cast to float32, as the model and its wrapper do with what they return.
"""

from __future__ import annotations

import inspect
from typing import Any

from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch import Tensor, nn

from ..precision.head_dtype import require_unquantized_head
from .output_processor import LossContext, centered_logits


def takes_output_processor(model: nn.Module) -> bool:
    """Whether the wrapped model's ``forward`` is GPTModel's."""
    inner: Any = model
    while hasattr(inner, "module"):
        inner = inner.module
    return "output_processor" in inspect.signature(inner.forward).parameters


def forward_with_loss(model: nn.Module, *inputs: Any, context: LossContext, **options: Any) -> Tensor:
    """``model(*inputs, **options)`` with the loss in the place of the logits.

    Args:
        model: this pipeline stage, wrapped as Megatron wraps it.
        inputs: tokens, position ids, attention mask.
        context: see ``LossContext``.
        options: passed on.

    Returns:
        On the last stage float32 ``[1 + M, s, b]``, as from the output processor; elsewhere hidden states.

    Raises:
        ValueError: for settings that need GPTModel.
    """
    if context.objective.fuse_lm_head:
        raise ValueError("--fuse-lm-head needs GPTModel's output processor; remove it, HybridModel has none")
    if context.objective.float32_logits:
        raise ValueError("--sc-logits-dtype fp32 needs GPTModel's output processor; remove it, HybridModel has none")
    require_unquantized_head(get_model_config(model))
    if get_model_config(model).use_mup:
        raise ValueError("--use-mup scales a HybridModel's logits after its output layer; not supported: remove it")
    if not get_attr_wrapped_model(model, "post_process"):
        return model(*inputs, **options)
    output_layer = get_attr_wrapped_model(model, "output_layer")

    def put_loss(_module: nn.Module, _inputs: Any, output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        return centered_logits(output[0], context), output[1]

    hook = output_layer.register_forward_hook(put_loss)
    try:
        output = model(*inputs, **options)
    finally:
        hook.remove()
    return output.transpose(0, 1)  # the model returns [s, b, ...] as [b, s, ...]
