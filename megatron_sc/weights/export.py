"""A Megatron model, spread over ranks, as one Hugging Face checkpoint.

Each parameter is put together on one rank of its tensor-parallel group and written there, so that no rank ever holds
more than one file's tensors in host memory and one parameter's shards beside the model. Experts are written where they
are. Who writes what changes from layer to layer over the ranks with equal copies, and from parameter to parameter over
the tensor-parallel ranks: every node writes its share.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..sampling.isolation import gathered_parameters
from ..sampling.shards import unwrap
from .hf_config import HFConfig, check_architecture
from .layout import split_dim, to_hf
from .names import HFWeight, hf_weights
from .ranks import ModelRanks, agree, on_first_rank
from .versions import sync_file, sync_folder, write_synced

FILE_BYTES = 2 << 30  # of tensors in one file: the host memory that writing takes
INDEX = "model.safetensors.index.json"
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files that make a checkpoint usable by a sampler and do not change in training; copied where there are any."""


def export(
    chunks: Sequence[nn.Module],
    config: HFConfig,
    folder: Path,
    ranks: ModelRanks | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Write a Hugging Face checkpoint; collective over all ranks.

    The tensors have the values and the dtype of the model's parameters (FP8 parameters are dequantized), to the bit and
    whatever the parallel layout. The padding of the vocabulary is left out. ``config.json`` is ``config.raw`` with that
    dtype. Everything is synced to disk when the call returns.

    Args:
        chunks: this rank's model: one GPTModel, possibly wrapped, or one for each virtual pipeline stage.
        config: of the architecture; the tokenizer's files beside it are copied too.
        folder: exists, is empty, and is the same folder on every rank's machine.
        ranks: this rank's places; None: Megatron's.
        file_bytes: size of the files, and of the host memory taken.

    Raises:
        ValueError: where ``config`` is not the model's architecture, or a parameter has no place in the checkpoint.
        OSError: on this rank; a full disk, for example.
        RuntimeError: on the other ranks, with the message of the one that failed.
    """
    ranks = ranks or ModelRanks.from_megatron()
    agree(_check(chunks, config, ranks))
    files = _Files(folder, f"model-{dist.get_rank():05d}", file_bytes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        for chunk in chunks:
            stack.enter_context(gathered_parameters(chunk))
        for chunk in chunks:
            _write_chunk(unwrap(chunk), config, ranks, files)
    files.flush()
    agree(files.error)
    written: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(files.tensors, written, dst=0)
    on_first_rank(lambda: _finish(config, folder, written or []))


def _check(chunks: Sequence[nn.Module], config: HFConfig, ranks: ModelRanks) -> Exception | None:
    try:
        for chunk in chunks:
            core = unwrap(chunk)
            check_architecture(config, core)
            for _ in hf_weights(core, ranks.expert.rank, ranks.expert.size):
                pass
    except ValueError as error:
        return error
    return None


def _write_chunk(core: Any, config: HFConfig, ranks: ModelRanks, files: _Files) -> None:
    for number, (_, weight, parameter) in enumerate(hf_weights(core, ranks.expert.rank, ranks.expert.size)):
        replicas = ranks.expert_replicas if weight.is_expert else ranks.replicas
        if weight.is_copy or replicas.rank != weight.layer % replicas.size:
            continue
        place = ranks.expert_tensor if weight.is_expert else ranks.tensor
        writer = number % place.size
        value = _plain(parameter)
        if split_dim(weight.layout) is not None:
            shards = place.gather(value, onto=writer)
        else:
            shards = [value] if place.rank == writer else None
        if shards is not None:
            files.add(weight, shards, config)


def _plain(parameter: Tensor) -> Tensor:
    """The values of a parameter that may be kept in FP8 or FP4 (``--fp8-param-gather``, ``--fp4-param-gather``)."""
    from megatron.core.fp4_utils import dequantize_fp4_tensor, is_nvfp4tensor
    from megatron.core.fp8_utils import dequantize_fp8_tensor, is_float8tensor

    value: Tensor = parameter.detach()
    if is_float8tensor(value):
        return dequantize_fp8_tensor(value)
    return dequantize_fp4_tensor(value) if is_nvfp4tensor(value) else value


class _Files:
    """Collects tensors in host memory and writes them, a file at a time.

    An error is kept, and nothing more is written: the ranks go on together until all can be told.
    """

    def __init__(self, folder: Path, prefix: str, file_bytes: int):
        self.tensors: dict[str, tuple[str, tuple[int, ...], str, int]] = {}  # name: file, shape, dtype, bytes
        self.error: Exception | None = None
        self._folder = folder
        self._prefix = prefix
        self._file_bytes = file_bytes
        self._pending: dict[str, Tensor] = {}
        self._number = 0

    def add(self, weight: HFWeight, shards: list[Tensor], config: HFConfig) -> None:
        """Take the tensors of a parameter."""
        if self.error is not None:
            return
        try:
            for name, tensor in to_hf(weight, shards, config).items():
                size = tensor.numel() * tensor.element_size()
                if self._pending and sum(map(_bytes, self._pending.values())) + size > self._file_bytes:
                    self._write()
                self._pending[name] = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
        except Exception as error:
            self.error = error

    def flush(self) -> None:
        """Write what is left."""
        if self.error is None and self._pending:
            try:
                self._write()
            except Exception as error:
                self.error = error

    def _write(self) -> None:
        from safetensors.torch import save_file

        self._number += 1
        path = self._folder / f"{self._prefix}-{self._number:05d}.safetensors"
        save_file(self._pending, path, metadata={"format": "pt"})
        sync_file(path)
        for name, tensor in self._pending.items():
            dtype = str(tensor.dtype).removeprefix("torch.")
            self.tensors[name] = path.name, tuple(tensor.shape), dtype, _bytes(tensor)
        self._pending = {}


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _finish(config: HFConfig, folder: Path, written: list[dict[str, tuple[str, tuple[int, ...], str, int]]]) -> None:
    """On rank 0: check that every tensor was written once, then write the index, config.json and the tokenizer."""
    expected = config.tensors()
    tensors = {name: record for part in written for name, record in part.items()}
    twice = sum(map(len, written)) - len(tensors)
    wrong = [
        f"{name} is {list(tensors[name][1])}, not {list(expected[name])}"
        for name in sorted(tensors)
        if name in expected and tensors[name][1] != expected[name]
    ]
    problems = [
        *(f"{name} is missing" for name in expected if name not in tensors),
        *(f"{name} is unknown" for name in tensors if name not in expected),
        *wrong,
        *([f"{twice} tensors were written twice"] if twice else []),
    ]  # fmt: skip
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise ValueError(f"the model is not that of {config.path}: {'; '.join(problems[:5])}{more}")
    for file in sorted({record[0] for record in tensors.values()}):
        if not (folder / file).exists():
            raise ValueError(
                f"{folder / file} was written by another rank and is not there: the folder must be the same on every "
                "node"
            )
    index = {
        "metadata": {"total_size": sum(record[3] for record in tensors.values())},
        "weight_map": {name: tensors[name][0] for name in expected},
    }
    write_synced(folder / INDEX, json.dumps(index, indent=2) + "\n")
    raw = dict(config.raw)
    dtype = tensors["model.embed_tokens.weight"][2]
    for key in [key for key in ("dtype", "torch_dtype") if key in raw] or ["torch_dtype"]:
        raw[key] = dtype
    write_synced(folder / "config.json", json.dumps(raw, indent=2) + "\n")
    for companion in COMPANIONS:
        if (config.path.parent / companion).is_file():
            shutil.copyfile(config.path.parent / companion, folder / companion)
            sync_file(folder / companion)
    sync_folder(folder)
