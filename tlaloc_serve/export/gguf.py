"""A checked reader of GGUF files, versions 2 and 3, little-endian.

Rules: the file is mapped, and nothing in it is believed before it is compared with the file's size: a count or a
length is refused before anything is allocated for it, a tensor must lie inside the file, on the alignment, on no
other tensor, and be a whole number of blocks a row. Whatever is wrong raises ExportError with the path, the field,
what was there and what should have been. The layout is that of the GGUF specification and of ggml's `gguf.cpp`.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from types import TracebackType
from typing import Any

from tlaloc_serve.errors import ExportError

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4
MAX_TENSOR_NAME = 64  # bytes, ggml's GGML_MAX_NAME
MAX_KEY = 65535  # bytes, of the specification

# Every tensor type of ggml by its number, so that one that cannot be read is refused by its name.
TYPE_NAMES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K",
    12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip

# The types that can be read: (elements a block, bytes a block).
BLOCKS = {
    "F32": (1, 4), "F16": (1, 2), "BF16": (1, 2), "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20),
    "Q5_0": (32, 22), "Q5_1": (32, 24), "Q4_K": (256, 144), "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip

# Metadata value types by number: the struct code of one value. 8 is a string, 9 an array, 7 a bool of one byte.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_VALUE_TYPES = ("u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64")
_LEAST_PAIR = 8 + 4 + 1  # bytes of the smallest key-value pair: an empty key, a type, one byte
_LEAST_TENSOR = 8 + 4 + 8 + 4 + 8  # bytes of the smallest tensor description: an empty name, one dimension

_Described = tuple[str, tuple[int, ...], str, int, int]  # name, dims, type, offset within the data, bytes

Value = Any  # str | int | float | bool | list[str] | array.array of numbers (a bool is a 0 or 1 of array("B"))


@dataclass(frozen=True)
class GgufTensor:
    """One tensor: where its bytes are and what they mean."""

    name: str
    dims: tuple[int, ...]  # row-major: the reverse of ggml's `ne`, so dims[-1] is the length of a row
    type_name: str  # a key of BLOCKS
    offset: int  # bytes from the start of the file
    nbytes: int


class GgufFile:
    """An open GGUF file. A context manager; views given by `data` must be released before it closes."""

    def __init__(
        self, path: str, mapping: mmap.mmap, version: int, metadata: dict[str, Value], tensors: dict[str, GgufTensor]
    ):
        self.path = path
        self.version = version
        self.metadata = metadata
        self.tensors = tensors
        self._mapping = mapping

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> GgufFile:
        """Maps and checks the whole header. Raises ExportError for a file that cannot be read or is not sound."""
        where = os.fspath(path)
        mapping = _map(where)
        try:
            parser = _Parser(where, mapping)
            version, metadata, tensors = parser.parse()
        except BaseException:
            mapping.close()
            raise
        return cls(where, mapping, version, metadata, tensors)

    @property
    def architecture(self) -> str:
        """`general.architecture`. Raises ExportError where it is missing or no string."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise ExportError(f"{self.path}: general.architecture", "not there", got=value, want="a string")
        return value

    def data(self, tensor: GgufTensor) -> memoryview:
        """The bytes of a tensor of this file, in its own type; valid until the file is closed."""
        return memoryview(self._mapping)[tensor.offset : tensor.offset + tensor.nbytes]

    def close(self) -> None:
        """Unmaps the file. Raises BufferError while a view of it is alive. Idempotent."""
        self._mapping.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _map(where: str) -> mmap.mmap:
    try:
        with open(where, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(64)
            if head[:4] != MAGIC:
                if head.startswith(b"version https://git-lfs"):
                    raise ExportError(where, "a git-lfs pointer, not the file", todo="fetch it with `git lfs pull`")
                raise ExportError(f"{where}: magic", "not a GGUF file", got=head[:4], want=MAGIC)
            return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ExportError(where, "cannot be read", got=error.strerror or error) from error


class _Parser:
    """A cursor over the header. Every read is checked against the end of the file first."""

    def __init__(self, where: str, buffer: mmap.mmap):
        self.where = where
        self.buffer = buffer
        self.size = len(buffer)
        self.at = 0

    def fail(self, field: str, what: str, **more: Any) -> ExportError:
        return ExportError(f"{self.where}: {field}", what, **more)

    def parse(self) -> tuple[int, dict[str, Value], dict[str, GgufTensor]]:
        self.at = len(MAGIC)
        version = self.number("I", "version")
        if version & 0xFFFF == 0 and version:
            raise self.fail("version", "a big-endian file", got=hex(version), want="little-endian, version 2 or 3")
        if version not in (2, 3):
            raise self.fail("version", "not supported", got=version, want="2 or 3", todo="convert the file again")
        tensor_count = self.length("tensor_count", _LEAST_TENSOR)
        pair_count = self.length("metadata_kv_count", _LEAST_PAIR)
        metadata: dict[str, Value] = {}
        for index in range(pair_count):
            key = self.string(f"metadata key {index}", MAX_KEY)
            if key in metadata:
                raise self.fail(key, "given twice")
            metadata[key] = self.value(key)
        self.refuse_a_part(metadata)
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise self.fail("general.alignment", "not usable", got=alignment, want="a power of two")
        described = [self.tensor(index, alignment) for index in range(tensor_count)]
        return version, metadata, self.place(described, alignment)

    def refuse_a_part(self, metadata: dict[str, Value]) -> None:
        parts = metadata.get("split.count", 1)
        if parts not in (0, 1):
            raise self.fail(
                "split.count",
                "the file is one part of several",
                got=parts,
                want=1,
                todo="merge the parts with `llama-gguf-split --merge`",
            )

    def take(self, count: int, field: str) -> int:
        """Moves over `count` bytes and returns where they began."""
        begin = self.at
        if count > self.size - begin:
            raise self.fail(
                field, "the file ends before it", got=f"{self.size - begin} bytes at {begin}", want=f"{count} bytes"
            )
        self.at = begin + count
        return begin

    def number(self, code: str, field: str) -> Any:
        return struct.unpack_from("<" + code, self.buffer, self.take(struct.calcsize("<" + code), field))[0]

    def length(self, field: str, least: int) -> int:
        """A 64-bit count of things of at least `least` bytes each, of which the rest of the file must have room."""
        count: int = self.number("Q", field)
        room = (self.size - self.at) // least
        if count > room:
            raise self.fail(field, "more than the file can hold", got=count, want=f"at most {room}")
        return count

    def string(self, field: str, longest: int | None = None) -> str:
        count = self.length(f"{field}: length", 1)
        if longest is not None and count > longest:
            raise self.fail(f"{field}: length", "too long", got=count, want=f"at most {longest} bytes")
        begin = self.take(count, field)
        try:
            return self.buffer[begin : begin + count].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(field, "not UTF-8", got=f"byte {error.start} of {count}") from error

    def value(self, key: str) -> Value:
        kind = self.number("I", f"{key}: type")
        if kind == _STRING:
            return self.string(key)
        if kind == _ARRAY:
            return self.array(key)
        if kind not in _SCALARS:
            raise self.fail(f"{key}: type", "unknown", got=kind, want=f"0 to {len(_VALUE_TYPES) - 1}")
        value = self.number(_SCALARS[kind], key)
        if kind != _BOOL:
            return value
        if value > 1:
            raise self.fail(key, "not a bool", got=value, want="0 or 1")
        return bool(value)

    def array(self, key: str) -> list[str] | array[Any]:
        kind = self.number("I", f"{key}: element type")
        if kind == _STRING:
            return [self.string(key) for _ in range(self.length(f"{key}: count", 8))]
        if kind not in _SCALARS:
            got = _VALUE_TYPES[kind] if kind < len(_VALUE_TYPES) else kind
            raise self.fail(f"{key}: element type", "not supported", got=got, want="numbers or strings")
        values = array(_SCALARS[kind])
        count = self.length(f"{key}: count", values.itemsize)
        begin = self.take(count * values.itemsize, key)
        values.frombytes(self.buffer[begin : begin + count * values.itemsize])
        return values

    def tensor(self, index: int, alignment: int) -> _Described:
        name = self.string(f"tensor {index}: name", MAX_TENSOR_NAME)
        rank = self.number("I", f"{name}: n_dims")
        if not 1 <= rank <= MAX_DIMS:
            raise self.fail(f"{name}: n_dims", "not supported", got=rank, want=f"1 to {MAX_DIMS}")
        dims = tuple(reversed([self.number("Q", f"{name}: dims") for _ in range(rank)]))
        kind = self.number("I", f"{name}: type")
        offset = self.number("Q", f"{name}: offset")
        type_name = TYPE_NAMES.get(kind, f"number {kind}")
        if type_name not in BLOCKS:
            raise self.fail(f"{name}: type", "tensor type not supported", got=type_name, want=", ".join(BLOCKS))
        block, size = BLOCKS[type_name]
        if 0 in dims or dims[-1] % block:
            raise self.fail(
                f"{name}: dims",
                f"not whole blocks of {type_name}",
                got=list(dims),
                want=f"rows of a multiple of {block}",
            )
        if offset % alignment:
            raise self.fail(f"{name}: offset", "not aligned", got=offset, want=f"a multiple of {alignment}")
        return name, dims, type_name, offset, prod(dims) // block * size

    def place(self, described: list[_Described], alignment: int) -> dict[str, GgufTensor]:
        """The tensors by name, each inside the file and apart from the others."""
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, dims, type_name, offset, nbytes in described:
            if name in tensors:
                raise self.fail(name, "tensor given twice")
            if base + offset + nbytes > self.size:
                raise self.fail(
                    f"{name}: offset",
                    "data past the end of the file",
                    got=f"bytes {base + offset} to {base + offset + nbytes}",
                    want=f"at most {self.size}",
                    todo="the file is cut short or damaged: fetch it again",
                )
            tensors[name] = GgufTensor(name, dims, type_name, base + offset, nbytes)
        for before, after in pairwise(sorted(tensors.values(), key=lambda tensor: tensor.offset)):
            if before.offset + before.nbytes > after.offset:
                raise self.fail(
                    f"{after.name}: offset",
                    f"overlaps {before.name}",
                    got=after.offset,
                    want=f"at least {before.offset + before.nbytes}",
                )
        return tensors
