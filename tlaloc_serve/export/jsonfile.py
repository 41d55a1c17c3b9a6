"""Reading the JSON files of a checkpoint: one object a file, errors that name the file and the key."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from tlaloc_serve.errors import ExportError

_LARGEST = 1 << 28  # bytes; the largest tokenizer.json in use is a few tens of MB


def read_json_object(path: pathlib.Path) -> dict[str, Any]:
    """The object in the file. Raises ExportError when it is missing, a git-lfs pointer, damaged or no object."""
    return parse_json_object(read_bytes(path), str(path))


def read_bytes(path: pathlib.Path) -> bytes:
    """The bytes of a small file. Raises ExportError when it cannot be read, is huge, or is a git-lfs pointer."""
    try:
        if path.stat().st_size > _LARGEST:
            raise ExportError(str(path), "too large for what it should be", got=f"{path.stat().st_size} bytes")
        data = path.read_bytes()
    except OSError as error:
        raise ExportError(str(path), f"cannot be read: {error.strerror}") from None
    refuse_lfs_pointer(str(path), data[:64])
    return data


def refuse_lfs_pointer(where: str, head: bytes) -> None:
    """Raise ExportError when a file's first bytes are those of a git-lfs pointer."""
    if head.startswith(b"version https://git-lfs"):
        raise ExportError(where, "a git-lfs pointer instead of the file", todo="fetch the file with `git lfs pull`")


def parse_json_object(data: bytes, where: str) -> dict[str, Any]:
    """`data` as one JSON object. Raises ExportError; a key given twice is refused, readers differ about it."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(items)
        if len(values) != len(items):
            seen: set[str] = set()
            twice = next(key for key, _ in items if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise ExportError(where, "the key is there twice", got=twice)
        return values

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise ExportError(where, f"is no JSON: {error}", todo="fetch the file again") from None
    if not isinstance(value, dict):
        raise ExportError(where, "is no JSON object", got=type(value).__name__)
    return value
