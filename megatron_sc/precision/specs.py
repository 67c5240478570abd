"""What a quantized inference engine computes with: by name, or from a YAML file."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal, cast, get_args

import yaml

from .quantize import Quantizer

HeadPrecision = Literal["trainer", "float32", "bfloat16"]
ReceivedPrecision = Literal["trainer", "bfloat16"]
Same = Literal["same"]


@dataclass(frozen=True)
class SamplerSpec:
    """The numerics of a sampler, where they differ from the trainer's. The default differs in nothing.

    Embeddings, norms, router and attention's softmax keep the trainer's precision, as in every engine.

    Attributes:
        weights: of the linear layers; None: as the trainer's. Each matrix of the checkpoint is quantized by itself:
            query, key and value, or gate and up projection, share no block.
        activations: of the linear layers' inputs, token by token.
        expert_weights: of routed experts; 'same': like the other layers.
        expert_activations: likewise.
        keys: of the cache, head by head and token by token, after the rotary embedding.
        values: likewise.
        head: in which dtype the logits are computed: 'trainer' (as the trainer does), 'float32', 'bfloat16'.
        ignored: linear layers that keep the trainer's precision: shell patterns (``*``, ``?``, ``[]``) that match a
            whole module path of the whole model, such as ``decoder.layers.0.*`` or ``*.linear_qkv``.
        ignored_caches: attentions whose keys and values are cached in the trainer's precision: likewise, such as
            ``decoder.layers.0.*``.
        received: the dtype in which weights reach the engine. They are rounded to it before they are quantized.
        noise: Gaussian noise on every weight matrix, in its standard deviations, the same at every step.
        noise_seed: of its direction.
        staleness: the sampler's weights are refreshed every this many steps.

    Raises:
        ValueError: from ``__post_init__``; the message names the field.
    """

    weights: Quantizer | None = None
    activations: Quantizer | None = None
    expert_weights: Quantizer | Same | None = "same"
    expert_activations: Quantizer | Same | None = "same"
    keys: Quantizer | None = None
    values: Quantizer | None = None
    head: HeadPrecision = "trainer"
    ignored: tuple[str, ...] = ()
    ignored_caches: tuple[str, ...] = ()
    received: ReceivedPrecision = "bfloat16"
    noise: float = 0.0
    noise_seed: int = 0
    staleness: int = 1

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("activations", "expert_activations", "keys", "values"):
            quantizer = getattr(self, name)
            if isinstance(quantizer, Quantizer) and not quantizer.is_rowwise:
                raise ValueError(
                    f"{name}: {quantizer.name} shares scales between tokens, so that a token's value would depend on "
                    "the rest of the batch and on the parallel layout. Use a scale for each token (row, 1x128, "
                    "e4m3_row) or none (one)"
                )
        for name, choices in (("head", HeadPrecision), ("received", ReceivedPrecision)):
            if getattr(self, name) not in get_args(choices):
                raise ValueError(f"{name} is {getattr(self, name)!r} but must be one of {', '.join(get_args(choices))}")
        if not 0 <= self.noise < float("inf"):
            raise ValueError(f"noise is {self.noise} but must be at least 0 and finite")
        if self.staleness < 1:
            raise ValueError(f"staleness is {self.staleness} but must be at least 1")
        if self.noise_seed < 0:
            raise ValueError(f"noise_seed is {self.noise_seed} but must be at least 0")

    @classmethod
    def load(cls, name: str) -> SamplerSpec:
        """A spec by its name in ``SPECS``, or from a YAML file (any name that ends in .yaml or .yml).

        A name may be followed by changes of noise and staleness, as in ``fp8-fp4kv+noise=0.02+staleness=8``.

        The file is a mapping of fields, with quantizers by name (see ``Quantizer.parse``; ``none`` for None). ``base``
        names the spec that it starts from; without, it starts from the trainer's precision.

        Raises:
            ValueError: naming the file and the field, or the names there are.
        """
        if not name.endswith((".yaml", ".yml")):
            return _from_name(name)
        try:
            read = yaml.safe_load(Path(name).read_text(encoding="utf-8"))
        except (OSError, yaml.YAMLError) as error:
            raise ValueError(f"{name}: {error}") from None
        if not isinstance(read, dict):
            raise ValueError(f"{name} is not a mapping of {', '.join(_field_names())}")
        try:
            return _from_mapping(read)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None

    def linear(self, is_expert: bool) -> tuple[Quantizer | None, Quantizer | None]:
        """The quantizers of a linear layer's weights and activations."""
        if not is_expert:
            return self.weights, self.activations
        weights = self.weights if self.expert_weights == "same" else self.expert_weights
        activations = self.activations if self.expert_activations == "same" else self.expert_activations
        return weights, activations

    def as_dict(self) -> dict[str, Any]:
        """Plain values that YAML can hold and ``load`` reads back."""
        plain: dict[str, Any] = {}
        for name in _field_names():
            value = getattr(self, name)
            if isinstance(value, Quantizer):
                value = value.name
            plain[name] = list(value) if isinstance(value, tuple) else value
        return plain


def _quantized(weights: str, activations: str, cache: str) -> SamplerSpec:
    return SamplerSpec(
        weights=Quantizer.parse(weights),
        activations=Quantizer.parse(activations),
        keys=Quantizer.parse(cache),
        values=Quantizer.parse(cache),
    )


SPECS: dict[str, SamplerSpec] = {
    "trainer": SamplerSpec(),
    # The three samplers of Marek & Ryabinin 2026, table "three levels of sampler quantization". The paper does not say
    # which scales; these are the usual ones of each format: FP8 as in block-quantized checkpoints, INT8 as W8A8.
    "fp8-fp8kv": _quantized("e4m3/128x128", "e4m3/1x128", "e4m3/row"),
    "fp8-fp4kv": _quantized("e4m3/128x128", "e4m3/1x128", "e2m1/1x16/e4m3_row"),
    "int8-int4kv": _quantized("int8/row", "int8/row", "int4/row"),
    # Further formats in use.
    "fp8-tensor": _quantized("e4m3/tensor", "e4m3/row", "e4m3/tensor/one"),  # and a cache without calibration
    "mxfp8": _quantized("mxfp8", "mxfp8", "e4m3/row"),
    "nvfp4": _quantized("nvfp4", "e2m1/1x16/e4m3_row", "e4m3/row"),
    "int4-weights": SamplerSpec(weights=Quantizer.parse("int4/1x128")),
}
"""Specs by name. Noise and staleness are added in a file, or by the sampler's own flags."""


def _field_names() -> list[str]:
    return [field.name for field in fields(SamplerSpec)]


def _from_name(name: str) -> SamplerSpec:
    base, *changes = name.split("+")
    if base not in SPECS:
        raise ValueError(f"no sampler precision {base!r}; there are {', '.join(SPECS)}, or a .yaml file")
    changed: dict[str, Any] = {}
    for change in changes:
        field, _, value = change.partition("=")
        if field not in ("noise", "noise_seed", "staleness") or field in changed:
            raise ValueError(
                f"sampler precision {name!r}: {change!r} is not one of noise=X, noise_seed=N, staleness=N, each once; "
                "other changes are for a .yaml file"
            )
        changed[field] = yaml.safe_load(value)
    try:
        return _from_mapping({"base": base} | changed)
    except ValueError as error:
        raise ValueError(f"sampler precision {name!r}: {error}") from None


def _from_mapping(read: dict[Any, Any]) -> SamplerSpec:
    base = SamplerSpec()
    values = dict(read)
    if "base" in values:
        name = values.pop("base")
        if name not in SPECS:
            raise ValueError(f"base: no sampler precision {name!r}; there are {', '.join(SPECS)}")
        base = SPECS[name]
    for name in values:
        if name not in _field_names():
            raise ValueError(f"no field {name!r}; there are base, {', '.join(_field_names())}")
    return replace(base, **{name: _value(name, value) for name, value in values.items()})


def _value(name: str, value: Any) -> Any:
    """A field's value from YAML's."""
    match name:
        case "weights" | "activations" | "expert_weights" | "expert_activations" | "keys" | "values":
            if value is None or value == "none":
                return None
            if not isinstance(value, str):
                raise ValueError(f"{name}: {value!r} is not the name of a quantizer, such as e4m3/1x128")
            if value == "same" and name.startswith("expert"):
                return value
            try:
                return Quantizer.parse(value)
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from None
        case "ignored" | "ignored_caches":
            if not isinstance(value, list) or not all(isinstance(pattern, str) for pattern in value):
                raise ValueError(f"{name}: {value!r} is not a list of patterns, such as ['decoder.layers.0.*']")
            return tuple(cast(list[str], value))
        case "noise":
            return _number(name, value, (int, float))
        case "noise_seed" | "staleness":
            return _number(name, value, (int,))
    return value


def _number(name: str, value: Any, kinds: tuple[type, ...]) -> Any:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ValueError(f"{name}: {value!r} is not a {'whole ' * (kinds == (int,))}number")
    return value
