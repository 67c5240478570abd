"""Schema v1: the manifest of a buffer and the columns of its shards. docs/rollout-schema.md is its description."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

import numpy as np
import pyarrow as pa

from .codec import HeadPolicy
from .problem import BufferRefusedError, Problem
from .ragged import Ragged
from .table import RolloutTable

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class SamplerFingerprint:
    """Everything about the sampler that changes what its log-probabilities mean. Empty or None: unknown.

    Attributes:
        engine: "vllm", "sglang", "embedded", ...
        engine_version: as the engine reports it.
        weight_dtype: e.g. "bfloat16", "fp8_e4m3".
        activation_dtype: of the matrix multiplications' inputs.
        kv_cache_dtype: of the key-value cache.
        quantization: scheme, e.g. "w8a8-block128"; empty: none.
        scale_type: of the quantizers' scales, "float32" or "power-of-two".
        logits_dtype: of the output layer's product.
        logprobs_mode: "processed" (after temperature and truncation) or "raw".
        temperature: of all rollouts, or None where it differs between them (the column decides).
        top_p: 1 keeps all.
        top_k: 0 keeps all.
        min_p: 0 keeps all.
        repetition_penalty: 1 is none.
        presence_penalty: 0 is none.
        frequency_penalty: 0 is none.
    """

    engine: str = ""
    engine_version: str = ""
    weight_dtype: str = ""
    activation_dtype: str = ""
    kv_cache_dtype: str = ""
    quantization: str = ""
    scale_type: str = ""
    logits_dtype: str = ""
    logprobs_mode: str = "processed"
    temperature: float | None = None
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def truncates(self) -> bool:
        """Whether the sampler cuts its distribution, so that a head must be its whole support."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True)
class ExpertRoutes:
    """Shape of recorded expert routes.

    Attributes:
        layers: MoE layers.
        topk: experts a token.
        experts: experts a layer.
    """

    layers: int
    topk: int
    experts: int


@dataclass(frozen=True)
class Manifest:
    """What holds for every rollout of a buffer.

    Attributes:
        true_vocab_size: tokens the sampler's softmax runs over, without padding.
        tokenizer_hash: any stable digest; compared as text.
        sampler: see ``SamplerFingerprint``.
        heads: what is kept of a head.
        expert_routes: their shape, or None where none are recorded.
        schema_version: of the files.
    """

    true_vocab_size: int
    tokenizer_hash: str = ""
    sampler: SamplerFingerprint = field(default_factory=SamplerFingerprint)
    heads: HeadPolicy = field(default_factory=HeadPolicy)
    expert_routes: ExpertRoutes | None = None
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if self.true_vocab_size < 1:
            raise ValueError(f"manifest: true_vocab_size must be >= 1, got {self.true_vocab_size}")

    def to_json(self) -> bytes:
        """The file's text, with a digest of the rest."""
        body = asdict(self)
        return (json.dumps({**body, "check": _digest(body)}, indent=2) + "\n").encode()

    @property
    def digest(self) -> str:
        """What the ledger and every shard carry, so that a manifest cannot be exchanged."""
        return _digest(asdict(self))

    @classmethod
    def from_json(cls, text: bytes, file: str = MANIFEST) -> Self:
        """Parse and check.

        Raises:
            BufferRefusedError: for another schema version, a missing or unknown key, a wrong type or an edited file.
        """
        try:
            body = json.loads(text)
        except ValueError as error:
            raise BufferRefusedError(Problem(f"not JSON: {error}", file)) from error
        if not isinstance(body, dict):
            raise BufferRefusedError(Problem("must be a JSON object", file))
        version = body.get("schema_version")
        if version != SCHEMA_VERSION or isinstance(version, bool):
            raise BufferRefusedError(
                Problem(f"this release reads {SCHEMA_VERSION} only", file, field="schema_version", value=repr(version))
            )
        check = body.pop("check", None)
        if check != _digest(body):
            raise BufferRefusedError(
                Problem("not the digest of the other keys: the file was edited", file, field="check", value=repr(check))
            )
        try:
            routes = body["expert_routes"]
            return cls(
                **{
                    **body,
                    "sampler": SamplerFingerprint(**body["sampler"]),
                    "heads": HeadPolicy(**body["heads"]),
                    "expert_routes": None if routes is None else ExpertRoutes(**routes),
                }
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BufferRefusedError(Problem(f"missing, unknown or impossible key: {error}", file)) from error


RAGGED: dict[str, pa.DataType] = {
    "prompt_ids": pa.int32(),
    "response_ids": pa.int32(),
    "response_mask": pa.bool_(),
    "sampled_logprobs": pa.float32(),
    "weight_version": pa.int32(),
    "head_sizes": pa.int32(),
    "head_ids": pa.int32(),
    "head_logprobs": pa.float32(),
    "log_tail_mass": pa.float32(),
    "draw_ids": pa.int32(),
    "draw_logprobs": pa.float32(),
    "expert_routes": pa.int16(),
}
SCALAR: dict[str, pa.DataType] = {
    "head_is_support": pa.bool_(),
    "temperature": pa.float64(),
    "reward": pa.float64(),
    "advantage": pa.float64(),
    "group_id": pa.int64(),
    "finish_reason": pa.string(),
    "metadata": pa.string(),
}
PLAIN_BYTES = (
    "prompt_ids",
    "response_ids",
    "sampled_logprobs",
    "head_ids",
    "head_logprobs",
    "log_tail_mass",
    "draw_ids",
    "draw_logprobs",
)
"""Columns whose bytes are stored plane by plane (BYTE_STREAM_SPLIT): the high ones hardly vary and compress away."""


def arrow_schema(manifest: Manifest) -> pa.Schema:
    """Columns of a shard. Only ``advantage`` has nulls; a column that is not recorded holds empty lists."""
    columns = []
    for name, dtype in RAGGED.items():
        if name == "head_logprobs" and manifest.heads.precision == "float16":
            dtype = pa.float16()
        columns.append(pa.field(name, pa.list_(pa.field("element", dtype, nullable=False)), nullable=False))
    columns += [pa.field(name, dtype, nullable=name == "advantage") for name, dtype in SCALAR.items()]
    return pa.schema(columns)


def to_arrow(table: RolloutTable, schema: pa.Schema) -> pa.Table:
    """Columns in the order of the schema; arrays are not copied but for float16."""
    arrays = []
    for name in schema.names:
        column = getattr(table, name)
        if isinstance(column, Ragged):
            dtype = schema.field(name).type.value_type
            values = column.values.astype(np.float16) if pa.types.is_float16(dtype) else column.values
            offsets = pa.array(column.offsets.astype(np.int32))
            arrays.append(pa.ListArray.from_arrays(offsets, pa.array(values, dtype), type=schema.field(name).type))
        elif name == "advantage":
            arrays.append(pa.array(column, mask=np.isnan(column)))
        else:
            arrays.append(pa.array(column, schema.field(name).type))
    return pa.Table.from_arrays(arrays, schema=schema)


def from_arrow(data: pa.Table, schema: pa.Schema, file: str) -> RolloutTable:
    """The inverse; float16 becomes float32, the rest is not copied.

    Raises:
        BufferRefusedError: for other columns, types or nulls than the schema's.
    """
    if not data.schema.equals(schema):
        for name in dict.fromkeys([*schema.names, *data.schema.names]):
            index = data.schema.get_field_index(name)
            found = str(data.schema.field(index)) if index >= 0 else "absent or repeated"
            wanted = str(schema.field(name)) if name in schema.names else "no such column"
            if found != wanted:
                raise BufferRefusedError(Problem(f"schema v1 has {wanted}", file, field=name, value=found))
        raise BufferRefusedError(Problem("columns must stand in the order of schema v1", file))
    columns: dict[str, Any] = {}
    for name in schema.names:
        array = data.column(name).combine_chunks()
        if isinstance(array, pa.ChunkedArray):
            array = pa.concat_arrays(array.chunks) if array.num_chunks else pa.array([], array.type)
        if array.null_count and name != "advantage":
            raise BufferRefusedError(Problem("must not be null", file, field=name, value="null"))
        if name in RAGGED:
            offsets = array.offsets.to_numpy().astype(np.int64)
            values = array.values.slice(offsets[0], offsets[-1] - offsets[0])
            if values.null_count:
                raise BufferRefusedError(Problem("must not hold nulls", file, field=name, value="null"))
            flat = values.to_numpy(zero_copy_only=False)
            if flat.dtype == np.float16:
                flat = flat.astype(np.float32)
            columns[name] = Ragged(flat, offsets - offsets[0])
        elif pa.types.is_string(array.type):
            columns[name] = array.to_pylist()
        else:
            columns[name] = array.to_numpy(zero_copy_only=False)
    return RolloutTable(**columns)


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


assert {f.name for f in fields(RolloutTable)} == RAGGED.keys() | SCALAR.keys()
