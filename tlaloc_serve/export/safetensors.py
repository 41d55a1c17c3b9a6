"""A checked reader of safetensors headers, single files and sharded folders. Reads no tensor: it says where each is.

Rules: the header is capped and may not lie. Every tensor lies inside the file, has the size of its dtype and shape,
and the tensors cover the data from its first byte to the end of the file without a hole or an overlap. Whatever is
wrong raises ExportError with the file, the tensor and the reason.
"""

from __future__ import annotations

import math
import os
import pathlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.jsonfile import parse_json_object, read_json_object, refuse_lfs_pointer

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes, the format's own cap
# Bytes an element. Only the first three can become weights; the others may stand beside them, unused.
_WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
           "U16": 2, "U32": 4, "U64": 8}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """Where a tensor is: `byte_length` bytes at `offset` of `path`, row-major. `dtype` as the file spells it."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    path: str
    offset: int
    byte_length: int


def read_checkpoint(folder: pathlib.Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint folder by name: of model.safetensors, or of the shards that its index lists."""
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if (folder / INDEX).exists():
        return _read_shards(folder)
    others = sorted(name for name in os.listdir(folder) if name.endswith((".safetensors", ".bin", ".pt", ".pth")))
    raise ExportError(
        str(folder),
        "no weights in it",
        got=", ".join(others[:4]) or None,
        want=f"{SINGLE} or {INDEX}",
        todo="convert the weights to safetensors" if others else "is this a checkpoint's folder?",
    )


def read_header(path: pathlib.Path) -> dict[str, Tensor]:
    """The tensors of one safetensors file by name. Raises ExportError."""
    where = str(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(64)
            refuse_lfs_pointer(where, head)
            if size < 8:
                raise ExportError(where, "no safetensors file", got=f"{size} bytes", want="at least 8")
            (length,) = struct.unpack_from("<Q", head)
            if length > min(size - 8, MAX_HEADER):
                raise ExportError(
                    f"{where}: header length",
                    "longer than the file or the format's cap",
                    got=length,
                    want=f"at most {min(size - 8, MAX_HEADER)}",
                    todo="fetch the file again",
                )
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        raise ExportError(where, f"cannot be read: {error.strerror}") from None
    header = parse_json_object(text, f"{where}: header")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(where, name, record, 8 + length, size) for name, record in header.items()}
    _check_cover(where, tensors, 8 + length, size)
    return tensors


def _tensor(where: str, name: str, record: Any, base: int, size: int) -> Tensor:
    place = f"{where}: {name}"
    if not isinstance(record, dict) or not {"dtype", "shape", "data_offsets"} <= set(record):
        raise ExportError(place, "not described", want="dtype, shape and data_offsets")
    dtype, dims, offsets = record["dtype"], record["shape"], record["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _WIDTHS:
        raise ExportError(place, "dtype not supported", got=dtype, want="F32, F16 or BF16")
    if not _naturals(dims):
        raise ExportError(place, "shape not usable", got=dims, want="a list of whole numbers")
    if not _naturals(offsets) or len(offsets) != 2:
        raise ExportError(place, "data_offsets not usable", got=offsets, want="[begin, end]")
    begin, end = offsets
    want = math.prod(dims) * _WIDTHS[dtype]
    if base + end > size:
        raise ExportError(
            place,
            "data_offsets past the end of the file",
            got=end,
            want=f"at most {size - base}",
            todo="the file is cut short or damaged: fetch it again",
        )
    if end - begin != want:
        what = f"data_offsets are not the size of {dtype}{dims}"
        raise ExportError(place, what, got=f"{end - begin} bytes", want=want)
    return Tensor(name, dtype, tuple(dims), where, base + begin, want)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 1 << 63 for item in value)


def _check_cover(where: str, tensors: Mapping[str, Tensor], base: int, size: int) -> None:
    at = base
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.byte_length)):
        if tensor.offset != at:
            what = "overlaps the tensor before it" if tensor.offset < at else "leaves a hole before it"
            got, want = tensor.offset - base, at - base
            raise ExportError(f"{where}: {tensor.name}", f"data_offsets: {what}", got=got, want=want)
        at += tensor.byte_length
    if at != size:
        raise ExportError(where, "bytes after the last tensor", got=size - base, want=at - base)


def _read_shards(folder: pathlib.Path) -> dict[str, Tensor]:
    index = folder / INDEX
    table = read_json_object(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise ExportError(f"{index}: weight_map", "not usable", want="an object of tensor names and files")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(map(str, table.values()))):
        if pathlib.PurePath(shard).name != shard or shard in (".", ".."):
            raise ExportError(f"{index}: weight_map", "a shard outside the folder", got=repr(shard))
        if not (folder / shard).exists():
            missing = next(name for name, file in table.items() if file == shard)
            raise ExportError(
                str(folder / shard), f"missing shard: the index puts {missing} in it", todo="fetch the missing file"
            )
        for name, tensor in read_header(folder / shard).items():
            if table.get(name) != shard:
                want = table.get(name, "no such tensor")
                raise ExportError(f"{folder / shard}: {name}", "the index disagrees", got=shard, want=want)
            tensors[name] = tensor
    absent = sorted(set(table) - set(tensors))
    if absent:
        raise ExportError(f"{folder / table[absent[0]]}: {absent[0]}", "not in the shard where the index puts it")
    return tensors
