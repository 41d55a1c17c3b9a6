"""Bulk conversion of raw little-endian float bytes: f16, bf16 and f32, with the standard library only.

Rules: no Python statement runs once an element on the usual path. Bytes are moved with strided slices of bytes
objects (about 0.5 ns a byte; a strided memoryview is four times slower), mapped with `bytes.translate`, and added
in one big integer whose 32-bit lanes are the elements. Work goes in chunks of `CHUNK` elements, so the temporaries
stay near the cache and below a few MiB whatever the size of the tensor.
Widening is exact. Narrowing to bf16 rounds to nearest, ties to even; infinities stay, a NaN keeps its sign and the
upper bits of its payload and becomes quiet. Widening keeps a NaN's payload as it is.
"""

from __future__ import annotations

import re
import struct
from array import array
from collections.abc import Callable, Iterator
from functools import lru_cache

from tlaloc_serve.errors import ExportError

Bytes = bytes | bytearray | memoryview

CHUNK = 1 << 18  # elements
WIDTH = {"f32": 4, "f16": 2, "bf16": 2}  # bytes an element


def _f16_tables() -> tuple[bytes, bytes, bytes, bytes]:
    """Maps from the bytes of an f16 to those of its f32, true of every value that is not subnormal.

    f16 is s eeeee mmmmmmmmmm, f32 is s eeeeeeee m..m: byte 3 and the first bits of byte 2 follow from the high byte
    of the f16, the rest of byte 2 and byte 1 from its low byte; byte 0 is zero.
    """
    top, upper = bytearray(256), bytearray(256)
    for high in range(256):
        exponent = high >> 2 & 31
        wide = 0 if exponent == 0 else 255 if exponent == 31 else exponent + 112
        top[high] = high & 0x80 | wide >> 1
        upper[high] = (wide & 1) << 7 | (high & 3) << 5
    return bytes(top), bytes(upper), bytes(low >> 3 for low in range(256)), bytes((low & 7) << 5 for low in range(256))


_TOP, _UPPER, _LOWER, _TAIL = _f16_tables()
_TINY_HIGH = bytes([0, 1, 2, 3, 0x80, 0x81, 0x82, 0x83])  # the high bytes of f16 zeros and subnormals
_OTHER_HIGH = bytes(b for b in range(256) if b not in _TINY_HIGH)
_TINY = re.compile(b"[\x00-\x03\x80-\x83]")
_HUGE = re.compile(b"[\x7f\xff]")  # the high bytes of f32 NaNs, infinities and the largest finite values


def _chunks(data: Bytes, width: int) -> Iterator[tuple[int, bytes]]:
    """(first element, bytes) of each chunk of `data`. Raises ExportError where an element is cut."""
    view = memoryview(data).cast("B")
    if len(view) % width:
        raise ExportError("float data", "an element is cut", got=f"{len(view)} bytes", want=f"a multiple of {width}")
    step = CHUNK * width
    for at in range(0, len(view), step):
        yield at // width, bytes(view[at : at + step])


def bf16_to_f32(data: Bytes) -> bytearray:
    """bf16 [n] -> f32 [n], exact. Raises ExportError where `data` is no whole number of elements."""
    out = bytearray(2 * len(memoryview(data).cast("B")))
    for first, chunk in _chunks(data, 2):
        begin, end = 4 * first, 4 * first + 2 * len(chunk)
        out[begin + 2 : end : 4] = chunk[0::2]
        out[begin + 3 : end : 4] = chunk[1::2]
    return out


def f16_to_f32(data: Bytes) -> bytearray:
    """f16 [n] -> f32 [n], exact, subnormals included. Raises ExportError as `bf16_to_f32` does."""
    out = bytearray(2 * len(memoryview(data).cast("B")))
    for first, chunk in _chunks(data, 2):
        begin, end = 4 * first, 4 * first + 2 * len(chunk)
        low, high = chunk[0::2], chunk[1::2]
        tiny = len(high.translate(None, _OTHER_HIGH))
        if 8 * tiny > len(high):
            out[begin:end] = array("I", map(_f16_patterns().__getitem__, memoryview(chunk).cast("H"))).tobytes()
            continue
        either = int.from_bytes(high.translate(_UPPER), "little") | int.from_bytes(low.translate(_LOWER), "little")
        out[begin + 1 : end : 4] = low.translate(_TAIL)
        out[begin + 2 : end : 4] = either.to_bytes(len(high), "little")
        out[begin + 3 : end : 4] = high.translate(_TOP)
        if tiny:
            patterns = _f16_patterns()
            for at in [match.start() for match in _TINY.finditer(high)]:
                here = begin + 4 * at
                out[here : here + 4] = patterns[high[at] << 8 | low[at]].to_bytes(4, "little")
    return out


@lru_cache(maxsize=1)
def _f16_patterns() -> list[int]:
    """The f32 bits of each of the 65536 f16 patterns."""
    tiny = struct.unpack("<1024I", struct.pack("<1024f", *[mantissa * 2.0**-24 for mantissa in range(1024)]))
    patterns = list(tiny)  # exponent 0: f32 holds these as normal numbers
    for exponent in range(1, 32):
        wide = 255 if exponent == 31 else exponent + 112
        patterns += [wide << 23 | mantissa << 13 for mantissa in range(1024)]
    return patterns + [0x80000000 | bits for bits in patterns]


def f32_to_bf16(data: Bytes) -> bytearray:
    """f32 [n] -> bf16 [n], to nearest, ties to even. Raises ExportError as `bf16_to_f32` does."""
    out = bytearray(len(memoryview(data).cast("B")) // 2)
    for first, chunk in _chunks(data, 4):
        nans = _nans(chunk)
        if nans:  # their lanes could carry into the next one
            cleared = bytearray(chunk)
            for at in nans:
                cleared[4 * at : 4 * at + 4] = b"\0\0\0\0"
            chunk, dirty = bytes(cleared), chunk
        ones, bias = _lanes(len(chunk) // 4)
        lanes = int.from_bytes(chunk, "little")
        rounded = (lanes + bias + (lanes >> 16 & ones)).to_bytes(len(chunk), "little")
        begin, end = 2 * first, 2 * first + len(chunk) // 2
        out[begin:end:2] = rounded[2::4]
        out[begin + 1 : end : 2] = rounded[3::4]
        for at in nans:
            out[begin + 2 * at] = dirty[4 * at + 2] | 0x40
            out[begin + 2 * at + 1] = dirty[4 * at + 3]
    return out


def _nans(chunk: bytes) -> list[int]:
    """The elements of an f32 chunk that are NaN."""
    found = []
    for match in _HUGE.finditer(chunk[3::4]):
        at = 4 * match.start()
        if int.from_bytes(chunk[at : at + 4], "little") & 0x7FFFFFFF > 0x7F800000:
            found.append(match.start())
    return found


@lru_cache(maxsize=4)
def _lanes(count: int) -> tuple[int, int]:
    """`count` 32-bit lanes of 1, and of 0x7FFF: half a unit of the last bf16 place, less one."""
    return int.from_bytes(b"\1\0\0\0" * count, "little"), int.from_bytes(b"\xff\x7f\0\0" * count, "little")


def f16_to_bf16(data: Bytes) -> bytearray:
    """f16 [n] -> bf16 [n], to nearest, ties to even. Raises ExportError as `bf16_to_f32` does."""
    out = bytearray()
    for _, chunk in _chunks(data, 2):
        out += f32_to_bf16(f16_to_f32(chunk))
    return out


_CONVERT: dict[tuple[str, str], Callable[[Bytes], bytearray]] = {
    ("bf16", "f32"): bf16_to_f32,
    ("f16", "f32"): f16_to_f32,
    ("f32", "bf16"): f32_to_bf16,
    ("f16", "bf16"): f16_to_bf16,
}


def convert(data: Bytes, source: str, target: str) -> Bytes:
    """`data` as dtype `target`, "f32" or "bf16"; `data` itself where nothing changes.

    `source` is "f32", "f16" or "bf16". Raises ExportError for another pair and where an element is cut.
    """
    if source == target and source in WIDTH:
        return data
    if (source, target) not in _CONVERT:
        raise ExportError(
            "float data", "no such conversion", got=f"{source} to {target}", want="f16, bf16 or f32 to bf16 or f32"
        )
    return _CONVERT[source, target](data)
