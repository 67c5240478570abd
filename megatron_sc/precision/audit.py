"""Which matrices the trainer quantizes and the sampler does not, or the other way round.

Both sides decide by names, each with rules of its own: an entry that one system reads as a whole path and another as a
part of a name leaves layers in bfloat16 on one side only, and nothing fails. The audit decides for every matrix as each
side would, from the same files, and lists the differences with the entry that caused each.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from .ignore_rules import RULES, Module, PartlyIgnoredError, is_component_match, rule_for
from .names import Kind, Projection, projections

Engine = Literal["vllm", "sglang", "transformers"]

_IGNORED_KEYS = ("ignored_layers", "modules_to_not_convert", "ignore", "exclude_modules")
_UNEVEN = (
    "pipeline_model_parallel_layout",
    "decoder_first_pipeline_num_layers",
    "decoder_last_pipeline_num_layers",
    "account_for_embedding_in_pipeline_split",
    "account_for_loss_in_pipeline_split",
)
"""Flags under which pipeline stages hold different numbers of layers."""


@dataclass(frozen=True)
class Verdict:
    """What one side does with a matrix.

    Attributes:
        precision: ``"bf16"`` or the format it is quantized to.
        because: what decided: a flag, a recipe or an entry.
        entry: of the ignore list, where one decided.
    """

    precision: str
    because: str
    entry: str | None = None

    @property
    def is_quantized(self) -> bool:
        """Whether it is quantized at all."""
        return self.precision != "bf16"


@dataclass(frozen=True)
class Difference:
    """A matrix that one side quantizes and the other does not.

    Attributes:
        projection: the matrix.
        trainer: what Megatron does.
        sampler: what the engine does.
    """

    projection: Projection
    trainer: Verdict
    sampler: Verdict


@dataclass(frozen=True)
class Audit:
    """What the audit found.

    Attributes:
        differences: in the order of the model.
        refused: checkpoints' modules that the engine would refuse to load, each with the reason.
        partial_names: (entry, module) where an entry took a module by a part of a name, not by whole components.
        unused: entries that name nothing of this model.
        matrices: how many were compared.
    """

    differences: tuple[Difference, ...]
    refused: tuple[str, ...]
    partial_names: tuple[tuple[str, str], ...]
    unused: tuple[str, ...]
    matrices: int

    @property
    def agrees(self) -> bool:
        """Whether both sides quantize the same matrices and the engine loads the checkpoint."""
        return not (self.differences or self.refused)


@dataclass(frozen=True)
class SamplerLayers:
    """The engine's side: a checkpoint's quantization config as an engine reads it.

    Attributes:
        precision: what it quantizes to; ``"bf16"``: nothing.
        rule: name of a rule of ``ignore_rules.RULES``.
        ignored: entries of the ignore list.
        targets: of compressed-tensors' groups: class names, paths, or ``re:`` and a regular expression.
        unquantized_kinds: what the engine's model code never quantizes.
    """

    precision: str
    rule: str
    ignored: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)
    unquantized_kinds: frozenset[Kind] = frozenset(("router", "head"))

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"no ignore rule {self.rule!r}; known: {', '.join(RULES)}")

    @classmethod
    def from_config(cls, quantization: Mapping[str, Any] | None, engine: Engine, rule: str | None = None) -> Self:
        """From ``quantization_config`` of a ``config.json``, or what stands in ``hf_quant_config.json``.

        Args:
            quantization: None: the engine serves the checkpoint as it is.
            engine: who reads it.
            rule: another rule than the engine's, e.g. ``substring``.

        Raises:
            ValueError: for a quantization method whose rule is not known.
        """
        if quantization is None:
            return cls("bf16", rule or "substring")
        method = quantization.get("quant_method")
        quantization = quantization.get("quantization", quantization)  # hf_quant_config.json
        if method is None and "quant_algo" in quantization:
            method = "modelopt"
        if method is None:
            raise ValueError("quantization config: key 'quant_method' is missing")
        ignored = next((list(quantization[key]) for key in _IGNORED_KEYS if quantization.get(key)), [])
        groups = (quantization.get("config_groups") or {}).values()
        targets = tuple(target for group in groups for target in group.get("targets", ())) or ("Linear",)
        chosen = rule or rule_for(engine, str(method))
        unquantized: set[Kind] = {"router", "head"}
        if "modelopt" in chosen or chosen == "transformers":
            unquantized.remove("head")
        if chosen == "transformers" and not ignored:
            ignored = ["lm_head"]
        precision = str(quantization.get("quant_algo") or quantization.get("format") or method).lower()
        return cls(precision, chosen, tuple(ignored), targets, frozenset(unquantized))

    def modules(self, found: Sequence[Projection]) -> list[tuple[Module, list[Projection]]]:
        """The engine's modules, with the matrices that each holds."""
        grouped: dict[str, list[Projection]] = {}
        for projection in found:
            fused = self.rule != "transformers" or projection.kind == "expert"
            grouped.setdefault(projection.engine if fused else projection.checkpoint, []).append(projection)
        return [
            (Module(path, tuple(part.checkpoint for part in parts), parts[0].kind), parts)
            for path, parts in grouped.items()
        ]

    def verdict(self, module: Module) -> Verdict:
        """What the engine does with a module.

        Raises:
            PartlyIgnoredError: if it would refuse the checkpoint.
        """
        if self.precision == "bf16":
            return Verdict("bf16", "no quantization config")
        if module.kind in self.unquantized_kinds:
            return Verdict("bf16", f"the engine leaves every {module.kind} alone")
        entry = RULES[self.rule](module, self.ignored)
        if entry is not None:
            return Verdict("bf16", f"ignored by {entry!r}", entry)
        if self.rule.startswith("compressed-tensors") and not self._is_target(module):
            return Verdict("bf16", "no group targets it")
        return Verdict(self.precision, "not ignored")

    def _is_target(self, module: Module) -> bool:
        shards = [shard for shard in module.shards if module.kind != "expert" or ".experts.0." in shard]
        if any(
            "linear" in target.lower() and not target.startswith("re:") and "." not in target for target in self.targets
        ):
            return True  # a class name: contained in ColumnParallelLinear and the like
        whole = any(_names(target, module.path) for target in self.targets)
        return whole or all(any(_names(target, shard) for target in self.targets) for shard in shards)


@dataclass(frozen=True)
class TrainerLayers:
    """Megatron's side.

    Attributes:
        precision: recipe of the quantized layers; ``"bf16"``: none.
        num_layers: of the whole model.
        first_bf16: layers at the start that stay in bfloat16.
        last_bf16: layers at the end that do.
        quantizes_head: ``--fp8-output-proj``.
        overrides: of ``--te-precision-config-file``, as Megatron's ``RecipeConfig``; None without the file.
        chunk_layers: layers of a model chunk: the file's patterns see names that count from 0 in each chunk.
    """

    precision: str
    num_layers: int
    first_bf16: int = 0
    last_bf16: int = 0
    quantizes_head: bool = False
    overrides: Any = None
    chunk_layers: int = 0

    @classmethod
    def from_args(cls, args: argparse.Namespace, num_layers: int) -> Self:
        """From Megatron's arguments; the number of layers is the checkpoint's.

        Raises:
            ValueError: for a precision file together with stages of different numbers of layers, where the names that
                its patterns see are not known here.
        """
        precision = "bf16"
        if getattr(args, "transformer_impl", "transformer_engine") == "transformer_engine":
            if getattr(args, "fp8", None):
                precision = f"fp8 {_text(args.fp8_recipe)}"
            elif getattr(args, "fp4", None):
                precision = f"fp4 {_text(args.fp4_recipe)}"
        bounds = (args.num_layers_at_start_in_bf16, args.num_layers_at_end_in_bf16)
        first, last = bounds if args.first_last_layers_bf16 else (0, 0)
        overrides, chunk = None, num_layers
        if getattr(args, "te_precision_config_file", None):
            chunk = _chunk_layers(args, num_layers)
            overrides = _load_overrides(args.te_precision_config_file)
        quantizes_head = bool(getattr(args, "fp8_output_proj", False)) and precision == "fp8 mxfp8"
        return cls(precision, num_layers, first, last, quantizes_head, overrides, chunk)

    def verdict(self, projection: Projection) -> Verdict:
        """What Megatron does with a matrix in training mode."""
        if projection.kind == "head":
            if self.quantizes_head:
                return Verdict(self.precision, "--fp8-output-proj")
            return Verdict("bf16", "the output layer is outside every FP8 context")
        if projection.kind == "router":
            return Verdict("bf16", "routers are not Transformer Engine modules")
        layer, precision, because = projection.layer, self.precision, "recipe of the run"
        if precision == "bf16":
            because = "no FP8 or FP4"
        elif layer < self.first_bf16 or layer >= self.num_layers - self.last_bf16:
            precision, because = "bf16", "--first-last-layers-bf16"
        return self._overridden(projection, Verdict(precision, because))

    def _overridden(self, projection: Projection, default: Verdict) -> Verdict:
        """As ``TEQuantizationParams`` decides: the first matcher that fits, where it may override the default."""
        if self.overrides is None:
            return default
        local = projection.layer % self.chunk_layers
        path = projection.megatron.replace(f"layers.{projection.layer}.", f"layers.{local}.", 1)
        from megatron.core.quantization.quant_config import MatchContext

        key = self.overrides.match_to_config_key(MatchContext(path, local))
        if key is None:
            return default
        recipe = self.overrides.configs[key].get("training_recipe") or {}
        if default.is_quantized:
            overrides = recipe.get("override_quantized_autocast", True)
        else:
            overrides = recipe.get("override_nonquantized_autocast", False)
        if not overrides:
            return default
        because = f"{key!r} of the precision file"
        for format_, field in (("fp8", "fp8_quantization_recipe"), ("fp4", "fp4_quantization_recipe")):
            if recipe.get(field):
                return Verdict(f"{format_} {_text(recipe[field])}", because)
        return Verdict("bf16", because)


def audit(
    config: Mapping[str, Any], trainer: TrainerLayers, sampler: SamplerLayers, grouped_experts: bool = True
) -> Audit:
    """Compare both sides matrix by matrix.

    Args:
        config: the checkpoint's ``config.json``, for the names of its matrices.
        trainer: Megatron's side.
        sampler: the engine's side.
        grouped_experts: see ``projections``.

    Raises:
        ValueError: for a model whose names are not known.
    """
    found = projections(config, grouped_experts)
    differences, refused, partial = [], [], []
    modules = sampler.modules(found)
    for module, parts in modules:
        try:
            theirs = sampler.verdict(module)
        except PartlyIgnoredError as error:
            refused.append(str(error))
            continue
        if theirs.entry is not None and _took_part_of_a_name(theirs.entry, module):
            partial.append((theirs.entry, module.path))
        for projection in parts:
            ours = trainer.verdict(projection)
            if ours.is_quantized != theirs.is_quantized:
                differences.append(Difference(projection, ours, theirs))
    unused = _unused(sampler, [module for module, _ in modules])
    return Audit(tuple(differences), tuple(refused), tuple(partial), unused, len(found))


def by_layers(differences: Iterable[Difference]) -> list[tuple[str, str, Difference, int]]:
    """Differences that are alike but for layer and expert, as one: (pattern, layers, an example, how many)."""
    grouped: dict[tuple[str, Verdict, Verdict], list[Difference]] = {}
    for difference in differences:
        pattern = re.sub(r"\.experts\.\d+\.", ".experts.*.", difference.projection.checkpoint)
        pattern = re.sub(r"layers\.\d+\.", "layers.*.", pattern)
        sampler = Verdict(difference.sampler.precision, re.sub(r"\.\d+\.", ".*.", difference.sampler.because))
        grouped.setdefault((pattern, difference.trainer, sampler), []).append(difference)
    return [
        (pattern, _ranges(sorted({member.projection.layer for member in members})), members[0], len(members))
        for (pattern, _, _), members in grouped.items()
    ]


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> 0-2, 5."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join("" if a < 0 else str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _is_plain(entry: str) -> bool:
    """Whether it is text to compare, not a glob or a regular expression."""
    return not entry.startswith("re:") and not any(sign in entry for sign in "*?[\\(|$^")


def _took_part_of_a_name(entry: str, module: Module) -> bool:
    """Whether a plain entry is in none of the module's paths as whole components."""
    bases = {entry, entry.removeprefix("model.")}
    paths = (module.path, *module.shards)
    return _is_plain(entry) and not any(is_component_match(base, path) for base in bases for path in paths)


def _unused(sampler: SamplerLayers, modules: Sequence[Module]) -> tuple[str, ...]:
    """Entries that name no module and no matrix in one, and that take none by the engine's rule either."""
    named: set[str] = set()
    for path in {path for module in modules for path in (module.path, *module.shards)}:
        parts = path.split(".")
        spans = ((i, j) for i in range(len(parts)) for j in range(i + 1, len(parts) + 1))
        named |= {".".join(parts[i:j]) for i, j in spans}
    rest = [entry for entry in sampler.ignored if entry.rstrip(".").removeprefix("model.") not in named]
    return tuple(entry for entry in rest if not any(_takes(sampler.rule, entry, module) for module in modules))


def _takes(rule: str, entry: str, module: Module) -> bool:
    """Whether the entry alone makes the engine ignore the module, or a part of it."""
    try:
        return RULES[rule](module, [entry]) is not None
    except PartlyIgnoredError:
        return True


def _names(target: str, path: str) -> bool:
    return re.match(target[3:], path) is not None if target.startswith("re:") else target == path


def _load_overrides(path: str) -> Any:
    from megatron.core.quantization.utils import load_quantization_recipe

    return load_quantization_recipe(path)


def _chunk_layers(args: argparse.Namespace, num_layers: int) -> int:
    """Layers of a model chunk."""
    uneven = [name for name in _UNEVEN if getattr(args, name, None)]
    if uneven:
        raise ValueError(
            f"--te-precision-config-file with --{uneven[0].replace('_', '-')}: the file's patterns see layers counted "
            "from 0 in each stage, and stages differ here; audit each stage's patterns by hand"
        )
    per_chunk = getattr(args, "num_layers_per_virtual_pipeline_stage", None)
    stages = args.pipeline_model_parallel_size * (getattr(args, "num_virtual_stages_per_pipeline_rank", None) or 1)
    return int(per_chunk) if per_chunk else max(num_layers // stages, 1)


def _text(recipe: Any) -> str:
    return str(getattr(recipe, "value", recipe))
