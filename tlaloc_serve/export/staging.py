"""One weight file from tensors of a checkpoint: read, hashed, converted and written in chunks.

Rules: a tensor of the right dtype is copied byte for byte. Chunks are small, so the memory in use does not depend on
the size of the tensor. The hash of the weight and the hash of the bytes it was made from are taken on the way; where
all of it is copied they are one, and so is the pass.
"""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

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
    """A weight file to write: the rows of the pieces, one after the other, as `type`."""

    path: str
    type: TensorType
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Staged:
    """What `stage` wrote: the file's hash, and the hash of the pieces' bytes as they were read, one after the other."""

    sha256: str
    source_sha256: str


def stage(job: Job, room: bytearray | None = None) -> Staged:
    """Write the weight file of `job`. Raises ExportError when a piece cannot be read or the file not be written.

    `room` is memory to read into, to be used for one job after the other: new memory costs more than a small job.
    """
    copies = [piece.type_name.lower() == job.type.dtype and not piece.head_rows for piece in job.pieces]
    whole = hashlib.sha256()
    source = whole if all(copies) else hashlib.sha256()
    written = 0
    try:
        target = os.open(job.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except OSError as error:
        raise write_failure(job.path, error) from None
    try:
        _reserve(job.path, target, job.type.byte_length)
        for piece, copied in zip(job.pieces, copies, strict=True):
            for raw in _read(piece, COPY_BYTES if copied else CONVERT_BYTES, room):
                if source is not whole:
                    source.update(raw)
                for chunk in [raw] if copied else _convert(piece, raw, job.type.dtype):
                    whole.update(chunk)
                    written += _write(job.path, target, chunk)
    finally:
        os.close(target)
    if written != job.type.byte_length:
        raise ExportError(job.path, "the pieces are not the weight", got=f"{written} bytes", want=job.type.byte_length)
    return Staged(whole.hexdigest(), source.hexdigest())


def _reserve(path: str, target: int, size: int) -> None:
    """Have the disk set the file's space aside, where it can: writing is then a tenth faster, and a full disk is met
    before the work."""
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(target, 0, size)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise write_failure(path, error) from None


def same_bytes(a: Piece, b: Piece) -> bool:
    """Whether two tensors are the same to the last bit."""
    if (a.type_name, a.dims) != (b.type_name, b.dims):
        return False
    return all(x == y for x, y in zip(_read(a, COPY_BYTES), _read(b, COPY_BYTES), strict=True))


def _read(piece: Piece, about: int, room: bytearray | None = None) -> Iterator[memoryview]:
    """The piece's bytes in chunks of about so many; whole elements, and whole heads where their rows are interleaved.

    A chunk is valid until the next one is asked for.
    """
    unit = piece.head_rows * piece.row_bytes or _block_bytes(piece.type_name)
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


def _write(path: str, target: int, chunk: floats.Bytes) -> int:
    """Write all of `chunk`. A full disk is met as a short write first."""
    view = memoryview(chunk)
    done = 0
    try:
        while done < len(view):
            done += os.write(target, view[done:])
    except OSError as error:
        raise write_failure(path, error) from None
    return done
