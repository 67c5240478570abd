"""Read configuration files: YAML that includes other files, each value with the place where it was written.

    include: [../models/tiny.yaml, ../objectives/tis.yaml]    # paths from this file
    cluster: {nodes: 1, gpus-per-node: 8, gpu-memory-gib: 79.1}
    flags:
      tensor-model-parallel-size: 4                           # --tensor-model-parallel-size 4
      sequence-parallel: true                                 # --sequence-parallel
      recompute-granularity: null                             # as if no included file had set it

A file wins over the files that it includes. Two included files that set one key to different values contradict each
other, unless the file that includes both sets the key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

SECTIONS = ("include", "cluster", "flags")
CLUSTER_KEYS = ("nodes", "gpus-per-node", "gpu-memory-gib")


class ConfigurationError(ValueError):
    """What is wrong, with the file and the path of the key."""


@dataclass(frozen=True)
class Setting:
    """A value and where it was written.

    Attributes:
        key: within its section, as ``num-layers``.
        value: bool, int, float, str or a list of those; None takes back what an included file set.
        place: the file and the key's path, as ``configs/models/tiny.yaml: flags.num-layers``.
    """

    key: str
    value: Any
    place: str

    def __str__(self) -> str:
        return f"{self.place} = {self.value!r}"


@dataclass(frozen=True)
class Cluster:
    """What a job is planned for; no flag says it.

    Attributes:
        nodes: machines.
        gpus_per_node: processes a machine.
        gpu_memory_gib: what a GPU has, GiB; None: not known.
    """

    nodes: int = 1
    gpus_per_node: int = 1
    gpu_memory_gib: float | None = None

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return self.nodes * self.gpus_per_node


@dataclass(frozen=True)
class Configuration:
    """Settings by key."""

    flags: Mapping[str, Setting] = field(default_factory=dict)
    cluster_settings: Mapping[str, Setting] = field(default_factory=dict)

    def over(self, other: Configuration) -> Configuration:
        """Both, where this one wins."""
        return Configuration(
            {**other.flags, **self.flags},
            {**other.cluster_settings, **self.cluster_settings},
        )

    @property
    def cluster(self) -> Cluster:
        """The cluster section.

        Raises:
            ConfigurationError: where a value is not a positive number.
        """
        values: dict[str, Any] = {}
        for setting in self.cluster_settings.values():
            if setting.value is None:
                continue
            number: Any = setting.value
            is_number = isinstance(number, int) or (isinstance(number, float) and setting.key == "gpu-memory-gib")
            if not is_number or isinstance(number, bool) or not number > 0:
                kind = "number" if setting.key == "gpu-memory-gib" else "whole number"
                raise ConfigurationError(f"{setting}: must be a {kind} above 0")
            values[setting.key.replace("-", "_")] = number
        return Cluster(**values)


def read_files(files: Iterable[str | Path]) -> Configuration:
    """Read files in order; a later one wins over an earlier one.

    Raises:
        ConfigurationError: for a file that is not there, is not such YAML, has an unknown section or a key twice,
            includes itself, or includes files that contradict each other.
    """
    configuration = Configuration()
    for file in files:
        configuration = _read(Path(file), ()).over(configuration)
    return configuration


def _read(file: Path, including: Sequence[Path]) -> Configuration:
    """A file and what it includes. ``including``: the files that led here."""
    if file.resolve() in including:
        raise ConfigurationError(f"{file}: include: this file includes itself")
    content = _load(file)
    for section in content:
        if section not in SECTIONS:
            raise ConfigurationError(f"{file}: {section}: unknown section; a file has {', '.join(SECTIONS)}")
    own = Configuration(
        _settings(file, "flags", content.get("flags")), _settings(file, "cluster", content.get("cluster"))
    )
    for key in own.cluster_settings:
        if key not in CLUSTER_KEYS:
            raise ConfigurationError(f"{file}: cluster.{key}: unknown key; there are {', '.join(CLUSTER_KEYS)}")
    included = Configuration()
    for path in _includes(file, content.get("include")):
        other = _read(path, (*including, file.resolve()))
        _refuse_contradictions(included.flags, other.flags, own.flags, file)
        _refuse_contradictions(included.cluster_settings, other.cluster_settings, own.cluster_settings, file)
        included = other.over(included)
    return own.over(included)


def _load(file: Path) -> dict[Any, Any]:
    """The file's mapping, with ``${...}`` resolved."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(file), resolve=True, throw_on_missing=True)
    except OSError as error:
        raise ConfigurationError(f"{file}: cannot be read: {error.strerror}") from None
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: not YAML: {error}") from None
    except OmegaConfBaseException as error:
        raise ConfigurationError(f"{file}: {error.full_key}: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file}: a file is a mapping with the sections {', '.join(SECTIONS)}")
    return content


def _settings(file: Path, section: str, content: Any) -> dict[str, Setting]:
    """The settings of a section."""
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"{file}: {section}: must map keys to values")
    settings = {}
    for key, value in content.items():
        place = f"{file}: {section}.{key}"
        values = value if isinstance(value, list) else [value]
        if not isinstance(key, str):
            raise ConfigurationError(f"{place}: a key is a word; quote it")
        if any(isinstance(item, dict | list) or (item is None and item is not value) for item in values):
            raise ConfigurationError(f"{place}: must be a number, a text, true, false, null or a list of such")
        settings[key] = Setting(key, value, place)
    return settings


def _includes(file: Path, content: Any) -> list[Path]:
    """Paths of the include section, which are relative to ``file``."""
    if content is None:
        return []
    if not isinstance(content, list) or not all(isinstance(path, str) for path in content):
        raise ConfigurationError(f"{file}: include: must be a list of paths")
    return [_shortest(file.parent / path) for path in content]


def _shortest(path: Path) -> Path:
    """Without ``x/..``, so that messages name files as a person would."""
    parts: list[str] = []
    for part in path.parts:
        if part == ".." and parts and parts[-1] not in ("..", path.anchor):
            parts.pop()
        else:
            parts.append(part)
    return Path(*parts)


def _refuse_contradictions(
    first: Mapping[str, Setting], second: Mapping[str, Setting], decided: Mapping[str, Setting], file: Path
) -> None:
    for key in first.keys() & second.keys() - decided.keys():
        if first[key].value != second[key].value:
            raise ConfigurationError(
                f"{first[key]} contradicts {second[key]}; set {key} in {file}, which includes both"
            )
