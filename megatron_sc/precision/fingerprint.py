"""What numerics the trainer runs, what the sampler ran, and where the two contradict each other.

    refuse   training would be wrong: another vocabulary, tokenizer or temperature, a truncated sampler read as a head
    warn     a mismatch that is usually a mistake: a float32 head on one side, scales of different types, unknown KV
    note     a difference that is usually meant, or that cannot be judged: an FP8 sampler and a bfloat16 trainer

``report`` prints both at the start of a run. The sampler's side is what a buffer's manifest says of it, as a mapping or
a dataclass with the fields of ``rollouts.SamplerFingerprint`` and ``rollouts.Manifest``; what it lacks is unknown. Two
fields more are read where there are any: ``logits_dtype`` and ``scale_type``, with the values of the trainer's.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal, Self

from .alignment import Precision, padding_effects

Severity = Literal["refuse", "warn", "note"]

KNOBS = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "CUBLAS_WORKSPACE_CONFIG")
"""Environment variables that change numerics, beside every ``NVTE_*`` of Transformer Engine."""

PACKAGES = ("torch", "megatron-core", "transformer-engine", "megatron-sc")

_UNQUANTIZED = ("", "none", "trainer", "gaussian", "demonstrations")  # of ``SamplerFingerprint.quantization``


class PrecisionRefusedError(ValueError):
    """Trainer and sampler contradict each other so that training would be wrong."""


@dataclass(frozen=True)
class Contradiction:
    """One thing that differs between trainer and sampler.

    Attributes:
        severity: see the module.
        what: the setting.
        trainer: its value there.
        sampler: its value there.
        reason: what follows from it, and what to do.
    """

    severity: Severity
    what: str
    trainer: str
    sampler: str
    reason: str

    def __str__(self) -> str:
        return f"{self.severity}: {self.what}: trainer {self.trainer}, sampler {self.sampler}: {self.reason}"


@dataclass(frozen=True)
class TrainerFingerprint:
    """The trainer's numerics. Empty or None: unknown or not used.

    Attributes:
        params_dtype: of the weights that are not quantized.
        quantization: e.g. ``"fp8 blockwise"``; empty: none.
        recipe: Transformer Engine's recipe as it prints itself, or Megatron's flags for it where that is not installed.
        scale_type: ``"float32"`` or ``"power-of-two"``.
        bf16_layers: layers that stay unquantized, counted from 0.
        logits_dtype: of the output layer's product.
        param_gather: whether weights are kept and gathered quantized.
        precision_file: SHA-256 of ``--te-precision-config-file``.
        evaluates_in: recipes that the file sets for evaluation only.
        shares_scales: whether a token's rounding depends on what else is in its micro-batch.
        padding_effects: see ``alignment.padding_effects``.
        true_vocab_size: tokens of the softmax.
        tokenizer_hash: as in a manifest.
        temperature: None: each rollout's own.
        distribution: ``--sampler-distribution``.
        environment: variables that change numerics, as set.
        versions: of ``PACKAGES``, where installed.
    """

    params_dtype: str
    quantization: str = ""
    recipe: str = ""
    scale_type: str = ""
    bf16_layers: tuple[int, ...] = ()
    logits_dtype: str = ""
    param_gather: bool = False
    precision_file: str = ""
    evaluates_in: tuple[str, ...] = ()
    shares_scales: bool = False
    padding_effects: tuple[str, ...] = ()
    true_vocab_size: int | None = None
    tokenizer_hash: str = ""
    temperature: float | None = None
    distribution: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_args(cls, args: argparse.Namespace, temperature: float | None = None) -> Self:
        """From Megatron's arguments with the plugin's, and this process's environment.

        Args:
            args: parsed; validation may come later.
            temperature: what the trainer divides all logits by; None: each rollout's own.

        Raises:
            ValueError: for a precision file that cannot be read.
        """
        params = "float16" if args.fp16 else "bfloat16" if args.bf16 else "float32"
        kind = "fp8" if getattr(args, "fp8", None) else "fp4" if getattr(args, "fp4", None) else ""
        if getattr(args, "transformer_impl", "transformer_engine") != "transformer_engine":
            kind = ""
        recipes = Precision.from_args(args).recipes if kind else ()
        name = _text(getattr(args, f"{kind}_recipe")) if kind else ""
        logits = "float32" if getattr(args, "sc_logits_dtype", "params") == "fp32" else params
        rows = args.micro_batch_size > 1 or getattr(args, "micro_batch_tokens", None) is not None
        file_hash, evaluates_in = _precision_file(getattr(args, "te_precision_config_file", None))
        return cls(
            params_dtype=params,
            quantization=f"{kind} {name}".strip(),
            recipe=_recipe(args, kind, name),
            scale_type=_scale_type(name),
            bf16_layers=_bf16_layers(args) if kind else (),
            logits_dtype=logits,
            param_gather=bool(getattr(args, f"{kind}_param_gather", False)),
            precision_file=file_hash,
            evaluates_in=evaluates_in,
            shares_scales=rows and any(recipe in ("delayed", "tensorwise") for recipe in recipes),
            padding_effects=tuple(padding_effects(args)),
            true_vocab_size=getattr(args, "true_vocab_size", None) or getattr(args, "vocab_size", None),
            tokenizer_hash=getattr(args, "rollout_tokenizer_hash", None) or "",
            temperature=temperature,
            distribution=getattr(args, "sampler_distribution", ""),
            environment={
                key: value for key, value in sorted(os.environ.items()) if key.startswith("NVTE_") or key in KNOBS
            },
            versions=_versions(),
        )

    def to_json(self) -> str:
        """As ``from_json`` reads it."""
        return json.dumps({"trainer": dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, file: str) -> Self:
        """Parse what ``to_json`` wrote.

        Raises:
            ValueError: naming the file and the key.
        """
        try:
            body = json.loads(text)["trainer"]
            known = {item.name for item in dataclasses.fields(cls)}
            unknown = sorted(set(body) - known)
            if unknown:
                raise ValueError(f"{file}: unknown key {unknown[0]!r}; another release wrote this file")
            lists = {key: tuple(value) for key, value in body.items() if isinstance(value, list)}
            return cls(**{**body, **lists})
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: not a trainer's fingerprint: {error}") from error


def report(
    args: argparse.Namespace,
    sampler: Any = None,
    *,
    temperature: float | None = None,
    show: bool = True,
    save: str | os.PathLike[str] | None = None,
) -> list[Contradiction]:
    """Print both fingerprints and what contradicts; the one call of a run.

    Args:
        args: Megatron's arguments with the plugin's.
        sampler: a ``Manifest`` or ``SamplerFingerprint``, or a mapping of their fields; None: only the trainer is
            printed.
        temperature: see ``TrainerFingerprint.from_args``.
        show: False on all ranks but one: nothing is printed or saved.
        save: where the trainer's fingerprint is written, for ``megatron-sc fingerprint``.

    Returns:
        What contradicts, the worst first.

    Raises:
        PrecisionRefusedError: if anything is to be refused; after printing.
    """
    trainer = TrainerFingerprint.from_args(args, temperature)
    found = [] if sampler is None else contradictions(trainer, sampler)
    if show:
        print_table(trainer, sampler, found)
        if save is not None:
            Path(save).parent.mkdir(parents=True, exist_ok=True)
            Path(save).write_text(trainer.to_json())
    refused = [str(item) for item in found if item.severity == "refuse"]
    if refused:
        raise PrecisionRefusedError("trainer and sampler contradict each other:\n  " + "\n  ".join(refused))
    return found


def contradictions(trainer: TrainerFingerprint, sampler: Any) -> list[Contradiction]:
    """What differs and matters, the worst first.

    Args:
        trainer: its numerics.
        sampler: see ``report``.
    """
    fields = sampler_fields(sampler)
    found = [item for rule in _RULES for item in rule(trainer, fields)]
    order = {"refuse": 0, "warn": 1, "note": 2}
    return sorted(found, key=lambda item: order[item.severity])


def sampler_fields(sampler: Any) -> dict[str, Any]:
    """A manifest or a sampler's fingerprint as one flat mapping; ``sampler`` of a manifest is merged into it."""
    given = sampler if isinstance(sampler, Mapping) else dataclasses.asdict(sampler)
    nested = given.get("sampler") or {}
    return {**{key: value for key, value in given.items() if key != "sampler"}, **nested}


def print_table(trainer: TrainerFingerprint, sampler: Any, found: list[Contradiction]) -> None:
    """Both sides beside each other, then one line for each contradiction."""
    from rich.console import Console
    from rich.table import Table

    theirs = {} if sampler is None else sampler_fields(sampler)
    table = Table(title="Numerics", show_lines=False)
    for column in ("", "trainer", "sampler"):
        table.add_column(column, overflow="fold")
    for name, left, right in _rows(trainer, theirs):
        table.add_row(name, left, right)
    console = Console()
    console.print(table)
    for item in found:
        console.print(str(item), markup=False, highlight=False, soft_wrap=True)


def _rows(trainer: TrainerFingerprint, sampler: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(name, trainer's value, sampler's value)."""

    def text(*keys: str) -> str:
        return " ".join(str(sampler[key]) for key in keys if sampler.get(key) not in (None, ""))

    packages = ", ".join(f"{name} {number}" for name, number in trainer.versions.items())
    yield "software", packages, text("engine", "engine_version")
    yield "weights", trainer.params_dtype, text("weight_dtype")
    yield "quantization", trainer.quantization or "none", text("quantization")
    yield "recipe", trainer.recipe, ""
    yield "activations", "", text("activation_dtype")
    yield "KV cache", "", text("kv_cache_dtype")
    yield "scales", trainer.scale_type, _sampler_scales(sampler)
    yield "unquantized layers", ", ".join(map(str, trainer.bf16_layers)), ""
    yield "logits", trainer.logits_dtype, text("logits_dtype")
    yield "vocabulary", _optional(trainer.true_vocab_size), text("true_vocab_size")
    yield "tokenizer", trainer.tokenizer_hash, text("tokenizer_hash")
    yield "temperature", _optional(trainer.temperature) or "each rollout's", text("temperature")
    yield "log-probabilities", trainer.distribution, text("logprobs_mode")
    yield "truncation", "", ", ".join(f"{key} {value}" for key, value in _truncation(sampler).items())
    yield "precision file", trainer.precision_file[:12], ""
    yield "environment", " ".join(f"{key}={value}" for key, value in trainer.environment.items()), ""


# Rules: each yields what it finds.

_Rule = Callable[[TrainerFingerprint, Mapping[str, Any]], Iterator[Contradiction]]


def _identity(trainer: TrainerFingerprint, sampler: Mapping[str, Any]) -> Iterator[Contradiction]:
    reasons = {
        "true_vocab_size": "the softmax runs over other tokens; set --true-vocab-size to the sampler's",
        "tokenizer_hash": "token ids mean other text; sample with the trainer's tokenizer",
        "temperature": "at two temperatures ratios differ from 1 for equal weights; sample at the trainer's",
    }
    for name, reason in reasons.items():
        ours, theirs = getattr(trainer, name), sampler.get(name)
        if ours not in (None, "") and theirs not in (None, "") and ours != theirs:
            yield Contradiction("refuse", name, str(ours), str(theirs), reason)


def _sampling(trainer: TrainerFingerprint, sampler: Mapping[str, Any]) -> Iterator[Contradiction]:
    temperature, truncation = sampler.get("temperature"), _truncation(sampler)
    if temperature == 0:
        reason = "a greedy sampler has no distribution to train against; sample at a temperature above 0"
        yield Contradiction("refuse", "temperature", _optional(trainer.temperature) or "each rollout's", "0", reason)
    if sampler.get("logprobs_mode") == "raw" and (truncation or temperature not in (None, 1.0)):
        reason = (
            "tokens are not drawn from raw log-probabilities, and a head cannot be re-tempered; record processed ones"
        )
        yield Contradiction("refuse", "logprobs_mode", "processed", "raw", reason)
    if truncation and trainer.distribution in ("head", "full"):
        cut = ", ".join(f"{key} {value}" for key, value in truncation.items())
        reason = "the sampler's probabilities sum to 1 over the tokens it kept; use --sampler-distribution support"
        yield Contradiction("refuse", "truncation", f"--sampler-distribution {trainer.distribution}", cut, reason)
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    for name, value in neutral.items():
        theirs = sampler.get(name, value)
        if theirs != value:
            reason = "the trainer does not apply it, so its ratios differ from 1 where its weights are the sampler's"
            yield Contradiction("warn", name, "none", str(theirs), reason)


def _head(trainer: TrainerFingerprint, sampler: Mapping[str, Any]) -> Iterator[Contradiction]:
    ours, theirs = trainer.logits_dtype, str(sampler.get("logits_dtype") or "")
    if theirs and theirs != ours and "float32" in (ours, theirs):
        reason = "a float32 head on one side only is worse than none: set --sc-logits-dtype as the sampler computes"
        yield Contradiction("warn", "logits", ours, theirs, reason)
    elif not theirs and ours == "float32" and trainer.params_dtype != "float32":
        reason = "worse than none if the sampler's head is not in float32 too: check the engine's setting"
        yield Contradiction("warn", "logits", ours, "unknown", reason)


def _scales(trainer: TrainerFingerprint, sampler: Mapping[str, Any]) -> Iterator[Contradiction]:
    if not (trainer.quantization and _is_quantized(sampler)):
        return
    ours, theirs = trainer.scale_type, _sampler_scales(sampler)
    if ours and theirs and ours != theirs:
        reason = (
            "scales of one type on both sides round alike; power-of-two scales on one side have been seen to raise the "
            "KL from 0.0038 to 0.0059: set NVTE_FP8_BLOCK_SCALING_FP32_SCALES or the engine's scale format"
        )
        yield Contradiction("warn", "scales", ours, theirs, reason)
    elif ours and not theirs:
        reason = "float32 and power-of-two scales round differently: check the engine's scale format"
        yield Contradiction("note", "scales", ours, "unknown", reason)


def _cache(trainer: TrainerFingerprint, sampler: Mapping[str, Any]) -> Iterator[Contradiction]:
    if not sampler.get("kv_cache_dtype") and sampler.get("engine") != "embedded":
        reason = "the key-value cache's rounding is a large part of a mismatch: record its dtype in the manifest"
        yield Contradiction("warn", "KV cache", trainer.params_dtype, "unknown", reason)


def _packing(trainer: TrainerFingerprint, sampler: Mapping[str, Any]) -> Iterator[Contradiction]:
    del sampler
    if trainer.shares_scales:
        reason = (
            "one scale a tensor: a token's log-probability depends on what else is in its micro-batch; --fp8-recipe "
            "blockwise or mxfp8 does not have this, nor --micro-batch-size 1 without packing"
        )
        yield Contradiction("warn", "scales of a micro-batch", trainer.quantization, "", reason)
    for effect in trainer.padding_effects:
        if not effect.startswith("recipe "):
            yield Contradiction("warn", "padding", "changes training", "", effect)


def _evaluation(trainer: TrainerFingerprint, sampler: Mapping[str, Any]) -> Iterator[Contradiction]:
    del sampler
    if trainer.evaluates_in:
        reason = "forward passes in evaluation mode, scores among them, run another precision than training"
        yield Contradiction("warn", "evaluation recipes", ", ".join(trainer.evaluates_in), "", reason)


def _formats(trainer: TrainerFingerprint, sampler: Mapping[str, Any]) -> Iterator[Contradiction]:
    theirs = _is_quantized(sampler)
    ours = trainer.quantization
    named = str(sampler.get("quantization") or sampler.get("weight_dtype") or "unknown")
    if theirs != bool(ours) and named != "unknown":
        reason = "one side quantizes: this is the mismatch that centering is for; megatron-sc mismatch measures it"
        yield Contradiction("note", "quantization", ours or "none", named if theirs else "none", reason)
    elif named == "unknown":
        reason = "record weight_dtype or quantization in the manifest"
        yield Contradiction("note", "weights", ours or trainer.params_dtype, "unknown", reason)
    if theirs and trainer.bf16_layers:
        reason = "the sampler must leave the same layers unquantized: megatron-sc audit compares them"
        layers = ", ".join(map(str, trainer.bf16_layers))
        yield Contradiction("note", "unquantized layers", layers, named, reason)


_RULES: tuple[_Rule, ...] = (_identity, _sampling, _head, _scales, _cache, _packing, _evaluation, _formats)


def _is_quantized(sampler: Mapping[str, Any]) -> bool:
    weights = str(sampler.get("weight_dtype") or "").lower()
    low = any(part in weights for part in ("fp8", "float8", "int8", "int4", "fp4", "float4"))
    return low or str(sampler.get("quantization") or "") not in _UNQUANTIZED


def _sampler_scales(sampler: Mapping[str, Any]) -> str:
    """From ``scale_type``, or from a scheme's name that says it."""
    named = str(sampler.get("scale_type") or "")
    if named:
        return named
    scheme = str(sampler.get("quantization") or "").lower()
    return "power-of-two" if "e8m0" in scheme or "mxfp" in scheme else ""


def _truncation(sampler: Mapping[str, Any]) -> dict[str, Any]:
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    return {key: sampler[key] for key, value in neutral.items() if sampler.get(key) not in (None, value, -1)}


def _scale_type(recipe: str) -> str:
    """Of the trainer's recipe, with the environment's choice as Transformer Engine reads it."""
    if recipe == "blockwise":
        return "float32" if os.environ.get("NVTE_FP8_BLOCK_SCALING_FP32_SCALES", "0") == "1" else "power-of-two"
    if recipe == "tensorwise":
        return "power-of-two" if os.environ.get("NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES", "0") == "1" else "float32"
    return {"delayed": "float32", "mxfp8": "power-of-two", "nvfp4": "e4m3"}.get(recipe, "")


def _bf16_layers(args: argparse.Namespace) -> tuple[int, ...]:
    """As Megatron's ``is_first_last_bf16_layer``."""
    if not getattr(args, "first_last_layers_bf16", False) or getattr(args, "num_layers", None) is None:
        return ()
    last = args.num_layers - args.num_layers_at_end_in_bf16
    return tuple(i for i in range(args.num_layers) if i < args.num_layers_at_start_in_bf16 or i >= last)


def _recipe(args: argparse.Namespace, kind: str, name: str) -> str:
    """The recipe as Transformer Engine prints it; without it, Megatron's flags."""
    if not kind:
        return ""
    flags = {"format": args.fp8 if kind == "fp8" else args.fp4}
    if name == "delayed":
        flags |= {
            "margin": args.fp8_margin,
            "amax_history_len": args.fp8_amax_history_len,
            "amax_compute_algo": args.fp8_amax_compute_algo,
        }
    described = f"{name}({', '.join(f'{key}={value}' for key, value in flags.items())})"
    try:
        from transformer_engine.common import recipe as recipes
    except (ImportError, OSError, RuntimeError):
        return described
    classes = {
        "delayed": "DelayedScaling",
        "tensorwise": "Float8CurrentScaling",
        "blockwise": "Float8BlockScaling",
        "mxfp8": "MXFP8BlockScaling",
        "nvfp4": "NVFP4BlockScaling",
    }
    if name not in classes:
        return described
    options = {key: value for key, value in flags.items() if key != "format"}
    if kind == "fp8":
        options["fp8_format"] = getattr(recipes.Format, str(args.fp8).upper())
    return repr(getattr(recipes, classes[name])(**options))


def _precision_file(path: str | None) -> tuple[str, tuple[str, ...]]:
    """SHA-256 of the file, and the configurations that evaluate in another recipe than they train in."""
    if not path:
        return "", ()
    import yaml

    try:
        text = Path(path).read_bytes()
        configs = (yaml.safe_load(text) or {}).get("configs") or {}
    except (OSError, yaml.YAMLError, AttributeError) as error:
        raise ValueError(f"--te-precision-config-file {path}: {error}") from error
    differing = [
        f"{key}: {config['evaluation_recipe'] or 'bf16'}"
        for key, config in configs.items()
        if "evaluation_recipe" in config and config["evaluation_recipe"] != config.get("training_recipe")
    ]
    return hashlib.sha256(text).hexdigest(), tuple(differing)


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _optional(value: Any) -> str:
    return "" if value is None else str(value)


def _text(recipe: Any) -> str:
    return str(getattr(recipe, "value", recipe))
