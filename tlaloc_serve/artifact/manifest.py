"""The manifest as frozen dataclasses, and the ladder's fit. Pure data: `parse.py` reads it, `writer.py` writes it.

In the manifest's own keys a page is a "block" (`blockSize`, `numBlocks`); the fields here keep those words so that
a field and its key can be found from each other. Every length is in tokens unless its name says bytes or blocks.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, field
from typing import Any

MANIFEST_NAME = "tlaloc-serving.json"
SCHEMA_PREFIX = "tlaloc-serving-v"
SUPPORTED_SCHEMAS = (1, 2, 3)
# Versions that exist and are refused by name until this runtime implements what they add.
UNIMPLEMENTED_SCHEMAS = {4: "linear-attention state pools", 5: "speculative entries"}

POOL_AXIS_ORDER = ("numBlocks", "blockSize", "numKvHeads", "headDim")

DTYPE_BYTES = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2,
    "i64": 8, "i32": 4, "i16": 2, "i8": 1,
    "u64": 8, "u32": 4, "u16": 2, "u8": 1,
    "i1": 1,
}  # fmt: skip


class Kind:
    DECODE = "decode"
    PREFILL = "prefill"


class Role:
    """What a slot of an entry is for. Shapes are in `artifact.validate`."""

    TOKEN_IDS = "TOKEN_IDS"
    POSITIONS = "POSITIONS"
    BLOCK_TABLES = "BLOCK_TABLES"
    SEQ_LENS = "SEQ_LENS"
    SLOT_MAPPING = "SLOT_MAPPING"
    KV_POOL_IN = "KV_POOL_IN"
    WEIGHT = "WEIGHT"
    WINDOW_BLOCK_TABLES = "WINDOW_BLOCK_TABLES"
    WINDOW_SLOT_MAPPING = "WINDOW_SLOT_MAPPING"
    WINDOW_KV_POOL_IN = "WINDOW_KV_POOL_IN"
    LOGITS = "LOGITS"
    KV_POOL_OUT = "KV_POOL_OUT"
    WINDOW_KV_POOL_OUT = "WINDOW_KV_POOL_OUT"


# Which role of output replaces which role of input.
POOL_OUTPUT_OF = {Role.KV_POOL_IN: Role.KV_POOL_OUT, Role.WINDOW_KV_POOL_IN: Role.WINDOW_KV_POOL_OUT}


@dataclass(frozen=True)
class TensorType:
    """A dense row-major tensor: `dtype` is a key of `DTYPE_BYTES`, `dims` may be empty (a scalar)."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def byte_length(self) -> int:
        return math.prod(self.dims) * DTYPE_BYTES[self.dtype]

    @functools.cached_property
    def json_text(self) -> str:
        return json.dumps(_type_json(self), separators=(",", ":"))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@functools.lru_cache(maxsize=4096)
def tensor_type(dtype: str, dims: tuple[int, ...]) -> TensorType:
    """One object for each type, so that comparing the thousands of types in an artifact mostly compares addresses."""
    return TensorType(dtype, dims)


@dataclass(frozen=True)
class Slot:
    """One input or output of an entry, in call order."""

    name: str
    role: str
    type: TensorType


@dataclass(frozen=True)
class Entry:
    """One compiled ladder point."""

    kind: str
    batch: int
    context: int
    tokens_per_seq: int
    max_blocks_per_seq: int
    cache_key: str
    entry_point: str
    body_path: str
    body_hash: str
    program_path: str
    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    donation_pairs: tuple[tuple[int, int], ...]

    @property
    def id(self) -> str:
        """`decode_b1_c64`, `prefill_b1_c64`, or `prefill_b1_c64_t16` where the chunk is not the whole context."""
        text = f"{self.kind}_b{self.batch}_c{self.context}"
        if self.kind == Kind.PREFILL and self.tokens_per_seq != self.context:
            text += f"_t{self.tokens_per_seq}"
        return text


@dataclass(frozen=True)
class TensorSource:
    """Where an exporter read a part of a weight: a file of the checkpoint and the byte range."""

    file: str
    tensor: str
    offset: int
    byte_length: int


@dataclass(frozen=True)
class Weight:
    """One row of the weight table: a file that is the operand, byte for byte.

    `source_sha256` is the hash of the sources' bytes, one range after the other, as they are in the checkpoint. Where
    nothing was converted these are the bytes of the file, and the two hashes are the same. `quantisation_error` of an
    i8 weight is the root mean square of what quantising changed over that of the weight, over a sample of its rows.
    """

    name: str
    path: str
    type: TensorType
    byte_length: int
    sha256: str
    sources: tuple[TensorSource, ...] = ()
    source_sha256: str | None = None
    quantisation_error: float | None = None


@dataclass(frozen=True)
class WindowedKv:
    """The layers that keep their KV in a ring of `ring_pages` pages a sequence, in pools of their own."""

    window: int
    layers: tuple[int, ...]
    num_blocks: int
    ring_pages: int
    kv_pool_dims: tuple[int, ...]


@dataclass(frozen=True)
class RefusedToken:
    """An id that stands for what this text model cannot take (an image, a video); `config_key` says which."""

    id: int
    config_key: str


@dataclass(frozen=True)
class Model:
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    num_blocks: int
    block_size: int
    dtype: str
    kv_dtype: str
    kv_pool_dims: tuple[int, ...]
    windowed_kv: WindowedKv | None = None
    refused_tokens: tuple[RefusedToken, ...] = ()


@dataclass(frozen=True)
class Ladder:
    """The compiled bucket sizes. Requests round up to a rung and are never clamped down to one."""

    block_size: int
    batch: tuple[int, ...]
    context: tuple[int, ...]

    @property
    def max_batch(self) -> int:
        return self.batch[-1]

    @property
    def max_context(self) -> int:
        return self.context[-1]

    def fit_context(self, tokens: int) -> int | None:
        """The smallest context rung that holds `tokens` positions, or None."""
        return next((rung for rung in self.context if rung >= tokens), None)


@dataclass(frozen=True)
class TokenizerFile:
    """The tokenizer.json beside the manifest, pinned by its hash."""

    path: str
    byte_length: int
    sha256: str


@dataclass(frozen=True)
class Frontend:
    """What a frontend would otherwise have to guess. All of it is optional; readers that do not know it ignore it.

    `eos_token_ids` ends a sequence. `add_bos` says whether `bos_token_id` goes before a prompt; None: not known.
    `chat_template` is the checkpoint's own Jinja text, kept for recognition, never executed.
    """

    tokenizer: TokenizerFile | None = None
    bos_token_id: int | None = None
    add_bos: bool | None = None
    eos_token_ids: tuple[int, ...] = ()
    chat_template: str | None = None
    default_prompt: str | None = None


@dataclass(frozen=True)
class Exporter:
    """Who wrote the artifact, and for which target its bodies were formulated (`generic`, `cpu`, `gpu`)."""

    name: str
    version: str
    target: str | None = None


@dataclass(frozen=True)
class Manifest:
    schema: int
    model_name: str
    model_hash: str
    model: Model
    ladder: Ladder
    weights_format: str
    weights_path: str | None
    weights: tuple[Weight, ...]
    entries: tuple[Entry, ...]
    frontend: Frontend = field(default_factory=Frontend)
    exporter: Exporter | None = None

    @property
    def schema_version(self) -> str:
        return f"{SCHEMA_PREFIX}{self.schema}"

    def of_kind(self, kind: str) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.kind == kind)

    def weight_bytes(self) -> int:
        return sum(weight.byte_length for weight in self.weights)

    def to_json(self) -> dict[str, Any]:
        """The manifest as the JSON object that goes to disk, keys in the order other exporters write them."""
        document: dict[str, Any] = {
            "schemaVersion": self.schema_version,
            "modelName": self.model_name,
            "modelHash": self.model_hash,
            "model": _model_json(self.model),
            "bucketLadder": {
                "blockSize": self.ladder.block_size,
                "batch": list(self.ladder.batch),
                "context": list(self.ladder.context),
            },
            "weights": {
                "format": self.weights_format,
                "path": self.weights_path,
                "embedded": self.weights_format == "embedded",
                "table": [_weight_json(weight) for weight in self.weights],
            },
            "entries": [_entry_json(entry) for entry in self.entries],
        }
        if self.frontend != Frontend():
            document["frontend"] = _frontend_json(self.frontend)
        if self.exporter is not None:
            exporter = {"name": self.exporter.name, "version": self.exporter.version, "target": self.exporter.target}
            document["exporter"] = exporter
        return document


def program_bytes(entry: Entry) -> bytes:
    """The file `programs/<id>.json`, the description of one entry. A reader compares it, so it is put together fast."""
    text = (
        f'{{"name":{json.dumps(entry.id)},"inputs":{_types_text(entry.inputs)},"outputs":{_types_text(entry.outputs)}'
        f',"meshRequirement":"single-device","bodyHash":{json.dumps(entry.body_hash)}'
        ',"shardingSpec":[],"backendMatrix":[]}'
    )
    return text.encode("ascii")


def _types_text(slots: tuple[Slot, ...]) -> str:
    return "[" + ",".join([slot.type.json_text for slot in slots]) + "]"


def _type_json(tensor: TensorType) -> dict[str, Any]:
    return {"dtype": tensor.dtype, "dims": list(tensor.dims), "axisNames": []}


def _slot_json(slot: Slot) -> dict[str, Any]:
    return {"name": slot.name, "role": slot.role, "type": _type_json(slot.type)}


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "batch": entry.batch,
        "context": entry.context,
        "tokensPerSeq": entry.tokens_per_seq,
        "maxBlocksPerSeq": entry.max_blocks_per_seq,
        "cacheKey": entry.cache_key,
        "entryPoint": entry.entry_point,
        "bodyPath": entry.body_path,
        "bodyHash": entry.body_hash,
        "programPath": entry.program_path,
        "inputs": [_slot_json(slot) for slot in entry.inputs],
        "outputs": [_slot_json(slot) for slot in entry.outputs],
        "donationPairs": [list(pair) for pair in entry.donation_pairs],
    }


def _weight_json(weight: Weight) -> dict[str, Any]:
    record: dict[str, Any] = {
        "name": weight.name,
        "path": weight.path,
        "dtype": weight.type.dtype,
        "dims": list(weight.type.dims),
        "byteLength": weight.byte_length,
        "sha256": weight.sha256,
    }
    if weight.sources:
        record["sources"] = [
            {
                "file": source.file,
                "tensor": source.tensor,
                "offset": source.offset,
                "byteLength": source.byte_length,
            }
            for source in weight.sources
        ]
    if weight.source_sha256 is not None:
        record["sourceSha256"] = weight.source_sha256
    if weight.quantisation_error is not None:
        record["quantisationError"] = weight.quantisation_error
    return record


def _model_json(model: Model) -> dict[str, Any]:
    document: dict[str, Any] = {
        "vocabSize": model.vocab_size,
        "hiddenSize": model.hidden_size,
        "numHeads": model.num_heads,
        "numKvHeads": model.num_kv_heads,
        "headDim": model.head_dim,
        "numLayers": model.num_layers,
        "numBlocks": model.num_blocks,
        "blockSize": model.block_size,
        "dtype": model.dtype,
        "kvDtype": model.kv_dtype,
        "kvQuant": None,
        "kvPoolAxisOrder": list(POOL_AXIS_ORDER),
        "kvPoolDims": list(model.kv_pool_dims),
    }
    if model.windowed_kv is not None:
        window = model.windowed_kv
        document["windowedKv"] = {
            "window": window.window,
            "layers": list(window.layers),
            "numBlocks": window.num_blocks,
            "ringPages": window.ring_pages,
            "kvPoolDims": list(window.kv_pool_dims),
        }
    if model.refused_tokens:
        document["refusedTokens"] = [{"id": token.id, "configKey": token.config_key} for token in model.refused_tokens]
    return document


def _frontend_json(frontend: Frontend) -> dict[str, Any]:
    tokenizer = frontend.tokenizer
    return {
        "tokenizer": tokenizer
        and {"path": tokenizer.path, "byteLength": tokenizer.byte_length, "sha256": tokenizer.sha256},
        "bosTokenId": frontend.bos_token_id,
        "addBos": frontend.add_bos,
        "eosTokenIds": list(frontend.eos_token_ids),
        "chatTemplate": frontend.chat_template,
        "defaultPrompt": frontend.default_prompt,
    }
