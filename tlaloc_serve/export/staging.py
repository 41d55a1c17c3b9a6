"""One weight file from tensors of a checkpoint: read, hashed, converted and written in chunks.

Rules: a tensor of the right dtype is copied byte for byte. Chunks are small, so the memory in use does not depend on
the size of the tensor. The hash of the weight and the hash of the bytes it was made from are taken on the way; where
all of it is copied they are one, and so is the pass.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tlaloc_serve.artifact.manifest import TensorType
from tlaloc_serve.artifact.writer import write_failure
from tlaloc_serve.errors import ExportError
from tlaloc_serve.export import floats

# The chunk that is read, hashed and written stays in a core's second-level cache.
COPY_BYTES = 1 << 18
CONVERT_BYTES = 1 << 18


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint: where its bytes are and what they are.

    `type_name` is a key of `gguf.BLOCKS`; safetensors' names are among them. `head_rows` is not 0 where the rows of
    each head of that many rows are interleaved (row 2i + j holds row j * head_rows / 2 + i) and have to be put back.
    """

    path: str
    tensor: str
    type_name: str
    dims: tuple[int, ...]
    offset: int
    byte_length: int
    head_rows: int = 0

    @property
    def row_bytes(self) -> int:
        return self.byte_length // self.dims[0]


@dataclass(frozen=True)
class Job:
    """A weight file to write: the rows of the pieces, one after the other, as `type`.

    An i8 weight is quantised, and the scales of its rows go to a file of their own, `scales_path`.
    """

    path: str
    type: TensorType
    pieces: tuple[Piece, ...]
    scales_path: str = ""


class Staged(NamedTuple):
    """What `stage` wrote: the file's hash, and the hash of the pieces' bytes as they were read, one after the other.

    Of an i8 weight also the hash of the scales, and the root mean square of what quantising changed over that of the
    weight itself, over a sample of rows.
    """

    sha256: str
    source_sha256: str
    scales_sha256: str = ""
    error: float = 0.0


def stage(job: Job, room: bytearray | None = None) -> Staged:
    """Write the file, or the two files, of `job`. Raises ExportError when a piece cannot be read or a file not written.

    `room` is memory to read into, to be used for one job after the other: new memory costs more than a small job.
    """
    if job.scales_path:
        return _stage_quantised(job, room)
    copies = [piece.type_name.lower() == job.type.dtype and not piece.head_rows for piece in job.pieces]
    with _Target(job.path, job.type.byte_length) as target:
        source = target.hash if all(copies) else hashlib.sha256()
        for piece, copied in zip(job.pieces, copies, strict=True):
            for raw in _read(piece, COPY_BYTES if copied else CONVERT_BYTES, room):
                if source is not target.hash:
                    source.update(raw)
                for chunk in [raw] if copied else _convert(piece, raw, job.type.dtype):
                    target.write(chunk)
    return Staged(target.hash.hexdigest(), source.hexdigest())


def _stage_quantised(job: Job, room: bytearray | None) -> Staged:
    from tlaloc_serve.export.quantise import quantise_rows

    source, scales = hashlib.sha256(), bytearray()
    error = power = 0.0
    with _Target(job.path, job.type.byte_length) as target:
        for piece in job.pieces:
            for raw in _read(piece, CONVERT_BYTES, room, whole_rows=True):
                source.update(raw)
                found = quantise_rows(b"".join(_convert(piece, raw, "f32")), job.type.dims[1])
                if found is None:
                    raise ExportError(
                        f"{piece.path}: {piece.tensor}",
                        "a number is not finite, so that its row cannot be quantised",
                        todo="export with --weights f32 or bf16",
                    )
                target.write(found.values)
                scales += found.scales
                error += found.error
                power += found.power
    with _Target(job.scales_path, len(scales)) as second:
        second.write(scales)
    relative = math.sqrt(error / power) if power else 0.0
    return Staged(target.hash.hexdigest(), source.hexdigest(), second.hash.hexdigest(), relative)


class _Target:
    """A new file of `size` bytes, written from the front and hashed on the way."""

    def __init__(self, path: str, size: int):
        self.hash = hashlib.sha256()
        self._path, self._size, self._written = path, size, 0
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except OSError as error:
            raise write_failure(path, error) from None

    def __enter__(self) -> _Target:
        try:
            self._reserve()
        except BaseException:
            os.close(self._file)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        os.close(self._file)
        if kind is None and self._written != self._size:
            got = f"{self._written} bytes"
            raise ExportError(self._path, "the pieces are not the weight", got=got, want=self._size)

    def _reserve(self) -> None:
        """Have the disk set the file's space aside, where it can: writing is then a tenth faster, and a full disk is
        met before the work."""
        if not hasattr(os, "posix_fallocate"):
            return
        try:
            os.posix_fallocate(self._file, 0, self._size)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise write_failure(self._path, error) from None

    def write(self, chunk: floats.Bytes) -> None:
        """Write all of `chunk`. A full disk is met as a short write first."""
        self.hash.update(chunk)
        view = memoryview(chunk)
        done = 0
        try:
            while done < len(view):
                done += os.write(self._file, view[done:])
        except OSError as error:
            raise write_failure(self._path, error) from None
        self._written += done


def same_bytes(a: Piece, b: Piece) -> bool:
    """Whether two tensors are the same to the last bit."""
    if (a.type_name, a.dims) != (b.type_name, b.dims):
        return False
    return all(x == y for x, y in zip(_read(a, COPY_BYTES), _read(b, COPY_BYTES), strict=True))


def _read(piece: Piece, about: int, room: bytearray | None = None, *, whole_rows: bool = False) -> Iterator[memoryview]:
    """The piece's bytes in chunks of about so many; whole elements, or whole rows, and whole heads where their rows are
    interleaved.

    A chunk is valid until the next one is asked for.
    """
    unit = piece.head_rows * piece.row_bytes or (piece.row_bytes if whole_rows else _block_bytes(piece.type_name))
    size = max(1, about // unit) * unit
    size = min(size, piece.byte_length)
    buffer = memoryview(bytearray(size) if room is None or len(room) < size else room)[:size]
    try:
        source = os.open(piece.path, os.O_RDONLY)
    except OSError as error:
        raise ExportError(piece.path, f"cannot be read: {error.strerror}") from None
    try:
        done = 0
        while done < piece.byte_length:
            chunk = buffer[: piece.byte_length - done]
            filled = 0
            while filled < len(chunk):
                count = os.preadv(source, [chunk[filled:]], piece.offset + done + filled)
                if not count:
                    raise ExportError(f"{piece.path}: {piece.tensor}", "the file has become shorter while it was read")
                filled += count
            yield chunk
            done += filled
    except OSError as error:
        raise ExportError(f"{piece.path}: {piece.tensor}", f"cannot be read: {error.strerror}") from None
    finally:
        os.close(source)


def _block_bytes(type_name: str) -> int:
    if type_name.lower() in floats.WIDTH:
        return floats.WIDTH[type_name.lower()]
    from tlaloc_serve.export.gguf import BLOCKS  # here and below: what a copy does not need is not loaded for it

    return BLOCKS[type_name][1]


def _convert(piece: Piece, raw: memoryview, dtype: str) -> Iterator[floats.Bytes]:
    data: floats.Bytes = raw
    if piece.head_rows:
        row = piece.row_bytes
        rows = [raw[at : at + row] for at in range(0, len(raw), row)]
        heads = [rows[at : at + piece.head_rows] for at in range(0, len(rows), piece.head_rows)]
        data = b"".join(part for head in heads for part in (*head[0::2], *head[1::2]))
    source = piece.type_name.lower()
    if source in floats.WIDTH:
        yield floats.convert(data, source, dtype)
    else:
        from tlaloc_serve.export.dequantise import dequantise

        yield from dequantise(piece.type_name, data, dtype)
