"""Start from a Hugging Face checkpoint: the way back of ``export``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..sampling.shards import unwrap
from .hf_config import HFConfig, check_architecture
from .layout import from_hf, split_dim
from .names import HFWeight, hf_weights
from .ranks import ModelRanks, agree

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"


def load_hf_weights(chunks: Sequence[nn.Module], config: HFConfig, ranks: ModelRanks | None = None) -> None:
    """Set a Megatron model's parameters to those of the checkpoint that ``config`` was read from.

    Each rank reads the tensors of its own parameters, one parameter at a time, and casts them to the parameters' dtype.
    The padding of the vocabulary becomes 0. Tell the optimizer afterwards (``optimizer.reload_model_params()``): its
    copies in float32 are older.

    Args:
        chunks: this rank's model: one GPTModel, possibly wrapped, or one for each virtual pipeline stage.
        config: the checkpoint's.
        ranks: this rank's places; None: Megatron's.

    Raises:
        ValueError: where ``config`` is not the model's architecture, or a tensor is missing or has another shape.
        RuntimeError: on the other ranks, with the message of the one that failed.
    """
    ranks = ranks or ModelRanks.from_megatron()
    error: Exception | None = None
    try:
        checkpoint = _Checkpoint(config)
        with torch.no_grad():
            for chunk in chunks:
                core = unwrap(chunk)
                check_architecture(config, core)
                for _, weight, parameter in hf_weights(core, ranks.expert.rank, ranks.expert.size):
                    parameter.copy_(_shard(weight, parameter, checkpoint, ranks))
    except (OSError, ValueError) as raised:
        error = raised
    agree(error)
    if dist.get_rank() == 0:
        print(f"> started from the weights in {config.path.parent}", flush=True)


def _shard(weight: HFWeight, parameter: Tensor, checkpoint: _Checkpoint, ranks: ModelRanks) -> Tensor:
    place = ranks.expert_tensor if weight.is_expert else ranks.tensor
    is_split = split_dim(weight.layout) is not None
    rank, size = (place.rank, place.size) if is_split else (0, 1)
    tensors = [checkpoint.tensor(name) for name in weight.names]
    return from_hf(weight, tensors, checkpoint.config, rank, size, rows=len(parameter))


class _Checkpoint:
    """The tensors of a checkpoint in one or several safetensors files."""

    def __init__(self, config: HFConfig):
        self.config = config
        self._folder = config.path.parent
        self._shapes = config.tensors()
        self._files: dict[str, Any] = {}
        if (self._folder / _INDEX).exists():
            self._file_of = json.loads((self._folder / _INDEX).read_text())["weight_map"]
        elif (self._folder / _SINGLE).exists():
            self._file_of = dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        else:
            raise ValueError(f"--hf-checkpoint {self._folder}: there is neither {_INDEX} nor {_SINGLE}")

    def tensor(self, name: str) -> Tensor:
        """Read a tensor.

        Raises:
            ValueError: where it is missing or has another shape than config.json says.
        """
        if name not in self._file_of:
            raise ValueError(f"{self._folder}: tensor {name} is missing")
        tensor: Tensor = self._open(self._file_of[name]).get_tensor(name)
        if tuple(tensor.shape) != self._shapes[name]:
            raise ValueError(
                f"{self._folder / self._file_of[name]}: {name} is {list(tensor.shape)}, but {list(self._shapes[name])} "
                "by config.json"
            )
        return tensor

    def _open(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._files:
            path: Path = self._folder / file
            if not path.exists():
                raise ValueError(f"{path} is missing")
            self._files[file] = safe_open(path, framework="pt")
        return self._files[file]
