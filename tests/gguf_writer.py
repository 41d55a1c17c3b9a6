"""Small GGUF files for tests, packed by hand so that every field can be made wrong."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tlaloc_serve.export.gguf import TYPE_NAMES

TYPE_NUMBERS = {name: number for number, name in TYPE_NAMES.items()}
U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_CODES = {U8: "B", I8: "b", U16: "H", I16: "h", U32: "I", I32: "i", F32: "f", BOOL: "B", U64: "Q", I64: "q", F64: "d"}


@dataclass(frozen=True)
class Typed:
    """A metadata value of a given type; a list is an array of it."""

    kind: int
    value: Any


@dataclass(frozen=True)
class Described:
    """A tensor: `dims` row-major, as in this package. `offset` is by default behind the tensor before it."""

    name: str
    dims: Sequence[int]
    type_name: str
    data: bytes
    offset: int | None = None
    type_number: int | None = None


def text(value: str | bytes) -> bytes:
    raw = value.encode("utf-8") if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def _one(kind: int, value: Any) -> bytes:
    return text(value) if kind == STRING else struct.pack("<" + _CODES[kind], value)


def pair(key: str | bytes, value: Any) -> bytes:
    """A key and its value; plain Python values get the type a converter would give them."""
    if not isinstance(value, Typed):
        sample = value[0] if isinstance(value, list) else value
        kind = BOOL if isinstance(sample, bool) else U32 if isinstance(sample, int) else F32
        value = Typed(STRING if isinstance(sample, (str, bytes)) else kind, value)
    if isinstance(value.value, list):
        items = b"".join(_one(value.kind, item) for item in value.value)
        return text(key) + struct.pack("<IIQ", ARRAY, value.kind, len(value.value)) + items
    return text(key) + struct.pack("<I", value.kind) + _one(value.kind, value.value)


def gguf(
    metadata: Mapping[str, Any] | Sequence[bytes],
    tensors: Sequence[Described] = (),
    *,
    version: int = 3,
    alignment: int = 32,
    tensor_count: int | None = None,
    pair_count: int | None = None,
) -> bytes:
    """A whole file. `metadata` may be packed pairs already; the counts may be made to lie."""
    pairs = [pair(k, v) for k, v in metadata.items()] if isinstance(metadata, Mapping) else list(metadata)
    infos, data = b"", b""
    for tensor in tensors:
        offset = len(data) if tensor.offset is None else tensor.offset
        number = TYPE_NUMBERS[tensor.type_name] if tensor.type_number is None else tensor.type_number
        dims = list(reversed(tensor.dims))
        infos += text(tensor.name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, number, offset)
        data += tensor.data + bytes(-len(tensor.data) % alignment)
    head = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if tensor_count is None else tensor_count,
        len(pairs) if pair_count is None else pair_count,
    )
    head += b"".join(pairs) + infos
    return head + bytes(-len(head) % alignment) + data
