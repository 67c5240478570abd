"""How many tokens a micro-batch must hold for its matrix products to be quantized, and padding that changes nothing.

A quantized product works on blocks of tokens, so the tokens that one rank holds must be a multiple of the block. Under
sequence parallelism a rank holds 1/TP of them, under context parallelism 2 of 2 CP chunks of every sequence.

    multiple of a recipe     delayed, tensorwise 16 | mxfp8 32 | blockwise 128 | nvfp4 128 | custom 128 | none 1
    tokens of a micro-batch  that x TP under sequence parallelism x 2 CP under context parallelism

Sources: Megatron-Core 0.19.2 ``get_fp8_align_size`` (16, 32) and ``get_fp4_align_size`` (128); Transformer Engine 2.20
``Float8BlockQuantizer.is_quantizable``, without which a sequence-parallel rank gathers bfloat16 instead of FP8 (128),
and ``CustomRecipe.quantization_alignment`` (128, a multiple of all formats'). 2 CP and not CP, because attention over a
ring quantizes the two chunks of a rank separately.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

MULTIPLES: Mapping[str, int] = MappingProxyType(
    {"delayed": 16, "tensorwise": 16, "mxfp8": 32, "blockwise": 128, "nvfp4": 128, "custom": 128}
)
"""Tokens of a block, by Megatron's name of the recipe."""

PADDING: Mapping[str, float] = MappingProxyType(
    {"ids": -1, "logprobs": -torch.inf, "log_tail_mass": torch.nan, "temperature": 1.0, "padding": 1, "routes": -1}
)
"""What a padding position holds, by field; 0 in all others, ``mask`` among them."""


@dataclass(frozen=True)
class Precision:
    """The recipes that the trainer's modules run.

    Attributes:
        recipes: names of ``MULTIPLES``; empty: nothing is quantized.
    """

    recipes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        unknown = [recipe for recipe in self.recipes if recipe not in MULTIPLES]
        if unknown:
            raise ValueError(f"no alignment is known for recipe {unknown[0]!r}; known: {', '.join(MULTIPLES)}")

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Precision:
        """From ``--fp8-format``, ``--fp4-format``, their recipes, and the file of ``--te-precision-config-file``.

        Raises:
            ValueError: for an unknown recipe in the file.
        """
        recipes = []
        if getattr(args, "fp8", None):
            recipes.append(_name(args.fp8_recipe))
        if getattr(args, "fp4", None):
            recipes.append(_name(args.fp4_recipe))
        if getattr(args, "te_precision_config_file", None):
            recipes += _recipes_of_file(args.te_precision_config_file)
        if getattr(args, "kitchen_config_file", None) or getattr(args, "kitchen_recipe_number", None) is not None:
            recipes.append("custom")
        return cls(tuple(dict.fromkeys(recipes)))

    @property
    def multiple(self) -> int:
        """Tokens of the largest block."""
        return max((MULTIPLES[recipe] for recipe in self.recipes), default=1)


@dataclass(frozen=True)
class Parallel:
    """How the tokens of a micro-batch are shared among ranks.

    Attributes:
        tensor: tensor-parallel size.
        context: context-parallel size.
        sequence: whether sequence parallelism is on.
    """

    tensor: int = 1
    context: int = 1
    sequence: bool = False

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Parallel:
        """From Megatron's parsed arguments."""
        return cls(args.tensor_model_parallel_size, args.context_parallel_size, args.sequence_parallel)

    @property
    def multiple(self) -> int:
        """Tokens of a sequence that can be shared: TP under sequence parallelism x 2 CP under context parallelism."""
        return (self.tensor if self.sequence else 1) * (2 * self.context if self.context > 1 else 1)


@dataclass(frozen=True, eq=False)
class PaddedBatch:
    """What ``pad_tokens`` returns.

    Attributes:
        fields: the batch's, ``[b, s', ...]``.
        padding_mask: bool ``[b, s']``, True where there is no token: Megatron's ``padding_mask``, whose docstrings in
            0.19.2 say the opposite of what its code does.
    """

    fields: dict[str, Tensor]
    padding_mask: Tensor


def alignment(args: argparse.Namespace) -> int:
    """The multiple that the tokens of a micro-batch must be, as a row or as a pack of sequences.

    Args:
        args: Megatron's parsed arguments.

    Raises:
        ValueError: for a recipe whose block is not known.
    """
    return Precision.from_args(args).multiple * Parallel.from_args(args).multiple


def sequence_alignment(args: argparse.Namespace) -> int:
    """The multiple that every single sequence of a pack must be: what the ranks' shares need, without the recipe's."""
    return Parallel.from_args(args).multiple


def check_alignment(args: argparse.Namespace) -> None:
    """Refuse rows of ``--seq-length`` tokens that the ranks or the recipe cannot take.

    Raises:
        ValueError: naming the flag, the multiple and what it comes from.
    """
    precision, parallel = Precision.from_args(args), Parallel.from_args(args)
    multiple = precision.multiple * parallel.multiple
    if args.seq_length % parallel.multiple or args.seq_length * args.micro_batch_size % multiple:
        raise ValueError(
            f"--seq-length {args.seq_length} x --micro-batch-size {args.micro_batch_size} must be a multiple of "
            f"{multiple} tokens: {precision.multiple} for {', '.join(precision.recipes) or 'no recipe'}, times "
            f"{parallel.multiple} for the ranks that share a sequence; set --seq-length "
            f"{-(-args.seq_length // multiple) * multiple}"
        )


def pad_tokens(
    batch: Mapping[str, Tensor], precision: Precision, parallel: Parallel, lengths: Tensor | None = None
) -> PaddedBatch:
    """Pad every row of a micro-batch to the next multiple. Nothing is copied where no padding is needed.

    Padding positions have mask 0, so they are not in the number of tokens that gradients are divided by, and they are
    marked for the router, so that they take no part in its auxiliary losses. Under the delayed and tensorwise recipes
    their activations still enter a tensor's largest magnitude, see ``padding_effects``.

    Args:
        batch: fields ``[b, s, ...]`` of whole sequences, before they are cut for context parallelism.
        precision: the trainer's recipes.
        parallel: how tokens are shared.
        lengths: int ``[b]``, tokens of each row where it is padded already; None: s.

    Raises:
        ValueError: for fields of different shapes, or a trained position after a row's last token.
    """
    if not batch:
        raise ValueError("pad_tokens needs at least one field [b, s, ...]")
    shapes = {name: tuple(value.shape[:2]) for name, value in batch.items()}
    first = next(iter(shapes))
    for name, shape in shapes.items():
        if len(shape) != 2 or shape != shapes[first]:
            raise ValueError(f"field {name} is {list(batch[name].shape)}, but {first} is {list(batch[first].shape)}")
    rows, size = shapes[first]
    multiple = precision.multiple * parallel.multiple
    padded = -(-size // multiple) * multiple
    if lengths is None:
        lengths = torch.full((rows,), size, device=batch[first].device)
    mask = padding_mask(lengths, padded)
    if "mask" in batch and (batch["mask"].bool() & mask[:, :size]).any():
        row = int((batch["mask"].bool() & mask[:, :size]).any(dim=1).nonzero()[0, 0])
        raise ValueError(f"row {row} has {int(lengths[row])} tokens, but mask is 1 after the last one")
    fields = {name: _extend(value, padded, PADDING.get(name, 0)) for name, value in batch.items()}
    return PaddedBatch(fields, mask)


def padding_mask(lengths: Tensor, size: int) -> Tensor:
    """bool ``[b, size]`` for ``GPTModel.forward(padding_mask=)``: True from each row's length ``[b]`` on.

    Cut it for context parallelism like every other field. Pass it on every pipeline stage, see ``stage_padding_mask``.
    """
    return torch.arange(size, device=lengths.device) >= lengths.unsqueeze(1)


def stage_padding_mask(mask: Tensor, first_stage: bool, parallel: Parallel, tensor_rank: int) -> Tensor:
    """The padding mask as this pipeline stage's ``GPTModel.forward`` needs it.

    Megatron 0.19.2 cuts it for sequence parallelism on the first stage only; on the others it reaches the routers as it
    was given, so there it must hold this rank's tokens alone.

    Args:
        mask: bool ``[b, s]``, after the cut for context parallelism.
        first_stage: whether this stage embeds tokens.
        parallel: how tokens are shared.
        tensor_rank: this rank in its tensor-parallel group.
    """
    if first_stage or not parallel.sequence:
        return mask
    return mask.chunk(parallel.tensor, dim=1)[tensor_rank]


def accept_padding_mask(model: nn.Module) -> None:
    """Let routers with ``--moe-router-enable-expert-bias`` take a padding mask. Call it once on a new model.

    Megatron 0.19.2 combines the routing map [n, experts] with the mask [n], which raises, or counts the wrong tokens
    where n equals the number of experts. The routers of ``model`` get the mask as [n, 1]; nothing else changes.
    """
    for module in model.modules():
        if getattr(module, "enable_expert_bias", False):
            count: Any = module._apply_expert_bias
            module._apply_expert_bias = functools.partial(_count_tokens, count)  # type: ignore[assignment]


def padding_effects(args: argparse.Namespace) -> list[str]:
    """Settings under which padding or packing does change training, each as a sentence; empty: it changes nothing."""
    found = []
    if getattr(args, "num_experts", None):
        routing = getattr(args, "moe_router_load_balancing_type", None) or []
        kinds = [routing] if isinstance(routing, str) else list(routing)
        for kind in kinds:
            if kind in ("sinkhorn", "quantile_balancing"):
                found.append(f"--moe-router-load-balancing-type {kind} ignores or refuses a padding mask")
        if getattr(args, "moe_expert_capacity_factor", None) is not None:
            found.append("--moe-expert-capacity-factor: padding tokens take places that other tokens lose")
        if getattr(args, "moe_input_jitter_eps", None) is not None:
            found.append("--moe-input-jitter-eps: the noise a token gets depends on the number of tokens")
    for recipe in Precision.from_args(args).recipes:
        if recipe in ("delayed", "tensorwise"):
            found.append(
                f"recipe {recipe}: one scale a tensor, so a token is rounded by what else is in its micro-batch; "
                "blockwise and mxfp8 are not"
            )
    return found


def _count_tokens(count: Callable[..., None], routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
    """A router's ``_apply_expert_bias`` with a mask that fits."""
    count(routing_map, padding_mask=None if padding_mask is None else padding_mask.view(-1, 1))


def _extend(value: Tensor, size: int, fill: float) -> Tensor:
    """``[b, s, ...]`` -> ``[b, size, ...]``."""
    missing = size - value.shape[1]
    if not missing:
        return value
    return torch.cat([value, value.new_full((value.shape[0], missing, *value.shape[2:]), fill)], dim=1)


def _recipes_of_file(path: str) -> list[str]:
    """Recipes of all configurations of a precision file, in training or evaluation."""
    from megatron.core.quantization.utils import load_quantization_recipe

    found = []
    for config in load_quantization_recipe(path).configs.values():
        for phase in ("training_recipe", "evaluation_recipe"):
            chosen: Mapping[str, Any] = config.get(phase) or {}
            for key in ("fp8_quantization_recipe", "fp4_quantization_recipe"):
                if chosen.get(key):
                    found.append(_name(chosen[key]))
    return found


def _name(recipe: Any) -> str:
    """Megatron's enumerations are strings, and parse as strings."""
    return str(getattr(recipe, "value", recipe))
