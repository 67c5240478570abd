"""How each engine decides whether a module is left unquantized, from the list in a checkpoint's quantization config.

The same entry means different things: ``mlp.gate`` is nothing to vLLM's FP8 (it wants whole paths), the router to
SGLang's (it compares whole components), and ``mlp.gate_up_proj`` too where entries are compared as parts of the text.

    vllm-fp8             the whole path, of every shard of a fused module; for experts, any expert's entry counts
    vllm-awq             part of the text of every shard
    sglang-fp8           whole path components, with or without the leading ``model.``
    substring            part of the text of the fused module (SGLang's AWQ, older FP8 filters)
    compressed-tensors   the whole path, or ``re:`` and a regular expression from the start of the path
    compressed-tensors-sglang   also the last components of the path
    vllm-modelopt        the whole path, part of the text, or a glob over the whole path
    sglang-modelopt      a glob over the whole path or over one component
    transformers         a regular expression from the start up to a component, or the end of the path

Sources: vLLM ``quant_utils.is_layer_skipped``, ``fp8.py``, ``modelopt.py``, ``compressed_tensors/utils.py``; SGLang
0.5.23 ``quantization/utils.py``, ``fp8.py``, ``modelopt_quant.py``, ``compressed_tensors``; transformers
``should_convert_module``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from types import MappingProxyType

from .names import Kind

Match = Callable[[str, str], bool]  # (entry, path)


@dataclass(frozen=True)
class Module:
    """A module as an engine builds it.

    Attributes:
        path: e.g. ``model.layers.0.mlp.gate_up_proj``.
        shards: the checkpoint's matrices in it, e.g. ``...gate_proj`` and ``...up_proj``.
        kind: what it does.
    """

    path: str
    shards: tuple[str, ...]
    kind: Kind

    @property
    def is_fused(self) -> bool:
        """Whether the engine looks up its shards instead of its own path."""
        return len(self.shards) > 1 and self.kind != "expert"


class PartlyIgnoredError(ValueError):
    """Some but not all shards of a fused module are ignored: the engine does not load such a checkpoint."""


Rule = Callable[[Module, Sequence[str]], str | None]
"""(module, entries) -> the entry that leaves the module unquantized, or None."""


def is_component_match(entry: str, path: str) -> bool:
    """Whether ``entry`` is whole components of ``path``: ``mlp.gate`` is of ``0.mlp.gate``, not of ``0.mlp.gates``."""
    return f".{entry.rstrip('.')}." in f".{path.rstrip('.')}."


def _equal(entry: str, path: str) -> bool:
    return entry == path


def _part_of_text(entry: str, path: str) -> bool:
    return entry in path


def _equal_or_regex(entry: str, path: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry[3:], path) is not None
    return entry == path


def _equal_suffix_or_regex(entry: str, path: str) -> bool:
    return _equal_or_regex(entry, path) or (not entry.startswith("re:") and path.endswith(f".{entry}"))


def _glob_over_components(entry: str, path: str) -> bool:
    pattern = re.compile(entry.replace(".", r"\.").replace("*", ".*"))
    return any(pattern.fullmatch(text) for text in (path, *path.split(".")))


def _regex_up_to_a_component(entry: str, path: str) -> bool:
    return re.match(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))", path) is not None or path.endswith(entry)


def _first(match: Match, entries: Sequence[str], path: str) -> str | None:
    return next((entry for entry in entries if match(entry, path)), None)


def _of_all_shards(match: Match, module: Module, entries: Sequence[str]) -> str | None:
    """The entry for a fused module: all shards are ignored, or none."""
    found = [_first(match, entries, shard) for shard in module.shards]
    if all(entry is None for entry in found):
        return None
    if None in found:
        ignored = [shard for shard, entry in zip(module.shards, found, strict=True) if entry is not None]
        raise PartlyIgnoredError(f"{module.path}: {', '.join(ignored)} ignored, the other shards are not")
    return found[0]


def _any_expert(module: Module, entries: Sequence[str]) -> str | None:
    """vLLM and SGLang: an entry that names any part of the layer's experts."""
    return next((entry for entry in entries if "experts" in entry and module.path in entry), None)


def _vllm_fp8(module: Module, entries: Sequence[str]) -> str | None:
    if module.is_fused:
        return _of_all_shards(_equal, module, entries)
    if module.kind == "expert":
        return _any_expert(module, entries)
    return _first(_equal, entries, module.path)


def _vllm_awq(module: Module, entries: Sequence[str]) -> str | None:
    if module.is_fused:
        return _of_all_shards(_part_of_text, module, entries)
    return _first(_part_of_text, entries, module.path)


def _sglang_fp8(module: Module, entries: Sequence[str]) -> str | None:
    def variants(entry: str) -> tuple[str, str]:
        base = entry.removeprefix("model.")
        return base, f"model.{base}"

    def match(entry: str, path: str) -> bool:
        return any(is_component_match(variant, path) for variant in variants(entry))

    if module.is_fused:
        return _of_all_shards(match, module, entries)
    found = _first(match, entries, module.path)
    if found is None and module.kind == "expert":
        return next((entry for entry in entries if _any_expert(module, variants(entry))), None)
    return found


def _substring(module: Module, entries: Sequence[str]) -> str | None:
    return _first(_part_of_text, entries, module.path)


def _compressed_tensors(match: Match) -> Rule:
    def rule(module: Module, entries: Sequence[str]) -> str | None:
        if module.kind == "expert":  # both engines look at expert 0 alone
            first = [shard for shard in module.shards if ".experts.0." in shard]
            return _of_all_shards(match, Module(module.path, tuple(first), module.kind), entries)
        if module.is_fused and module.path not in entries:
            return _of_all_shards(match, module, entries)
        return _first(match, entries, module.path)

    return rule


def _vllm_modelopt(module: Module, entries: Sequence[str]) -> str | None:
    found = _vllm_fp8(module, entries)
    found = found or next((entry for entry in entries if entry != module.path and entry in module.path), None)
    return found or _first(lambda entry, path: fnmatch(path, entry), entries, module.path)


def _sglang_modelopt(module: Module, entries: Sequence[str]) -> str | None:
    if module.kind == "expert":
        return _first(_glob_over_components, entries, module.path)
    shards = _of_all_shards(is_component_match, module, entries) if module.is_fused else None
    alone = None if module.is_fused else _first(is_component_match, entries, module.path)
    return shards or alone or _first(_glob_over_components, entries, module.path)


def _transformers(module: Module, entries: Sequence[str]) -> str | None:
    return _first(_regex_up_to_a_component, entries, module.path)


RULES: MappingProxyType[str, Rule] = MappingProxyType(
    {
        "vllm-fp8": _vllm_fp8,
        "vllm-awq": _vllm_awq,
        "sglang-fp8": _sglang_fp8,
        "substring": _substring,
        "compressed-tensors": _compressed_tensors(_equal_or_regex),
        "compressed-tensors-sglang": _compressed_tensors(_equal_suffix_or_regex),
        "vllm-modelopt": _vllm_modelopt,
        "sglang-modelopt": _sglang_modelopt,
        "transformers": _transformers,
    }
)

_RULE_OF_METHOD = {
    ("vllm", "fp8"): "vllm-fp8",
    ("vllm", "mxfp8"): "vllm-fp8",
    ("vllm", "awq"): "vllm-awq",
    ("vllm", "compressed-tensors"): "compressed-tensors",
    ("vllm", "modelopt"): "vllm-modelopt",
    ("sglang", "fp8"): "sglang-fp8",
    ("sglang", "mxfp8"): "sglang-fp8",
    ("sglang", "awq"): "substring",
    ("sglang", "compressed-tensors"): "compressed-tensors-sglang",
    ("sglang", "modelopt"): "sglang-modelopt",
    ("transformers", "fp8"): "transformers",
}


def rule_for(engine: str, method: str) -> str:
    """The name of the rule by which ``engine`` reads a config of ``quant_method`` ``method``.

    Raises:
        ValueError: if it is not known.
    """
    family = "modelopt" if method.startswith("modelopt") else method.removesuffix("_marlin")
    try:
        return _RULE_OF_METHOD[engine, family]
    except KeyError:
        known = ", ".join(f"{e} {m}" for e, m in _RULE_OF_METHOD)
        raise ValueError(f"no rule is known for quant_method {method!r} in {engine}; known: {known}") from None
