"""GGUF's tensor types to f32 or bf16 bytes, bit for bit what ggml's `dequantize_row_*` gives, standard library only.

Rules. Every format here is `scale * code + offset` over groups of weights that share a scale. ggml computes it in
f32; here it is computed in double and rounded once, which gives the same bits: a scale is an f16 (11 bits, a multiple
of 2^-24), a code has at most 8 bits, and where there is a sub-scale too the three have at most 11 + 7 + 5 (-128 and -32
are powers of two). So ggml's product is exact in f32, the sum is exact in double, and only the last step rounds, there
and here. Signs of zero follow from the same order of operations.
A scale that is infinite or NaN is refused: ggml's own validation calls such a block damaged.

How it is fast without numpy. A weight that Python touches by itself costs 50 ns and more (CPython 3.10 to 3.13); Q4_1
costs 30 here, Q8_0 of a real model 25, Q6_K, which is left with a product a weight, 60. Codes of 4 or 5 bits take few
values a group, so a group's 16 or 32 results are computed once, by `map` over all groups of a chunk at a time. They
are kept as four 256-byte tables, one a byte of the f32; 16 (or 8) groups share a table, told apart by a tag in the
upper bits of the code, so `bytes.translate` looks up 512 weights a call and four calls give their bytes. Codes of 8
bits have a table for each scale, kept from chunk to chunk: a tensor has a few hundred scales. What remains is copies
with a stride, half a nanosecond a byte. Chunks hold 2^18 weights: long enough that a Python statement a byte position
is nothing, small enough for the cache.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import repeat
from operator import add, itemgetter, mul
from typing import cast

from tlaloc_serve.errors import ExportError
from tlaloc_serve.export import floats
from tlaloc_serve.export.gguf import BLOCKS

CHUNK = 1 << 18  # weights; a multiple of every block
MOST_TABLES = 8192  # of a kilobyte each

_LOW = bytes(byte & 15 for byte in range(256))
_HIGH = bytes(byte >> 4 for byte in range(256))
_SIGNED_TO_CODE = bytes(byte ^ 128 for byte in range(256))
_FINITE_HIGH = bytes(byte for byte in range(256) if byte & 0x7C != 0x7C)  # the high bytes of finite f16


@dataclass(frozen=True)
class _Groups:
    """Weights as codes. Group g holds `size` weights: scales[g] * (code - zero) + offsets[g]."""

    size: int  # weights a group
    bits: int  # of a code
    zero: int  # subtracted from a code before the product
    scales: list[float]  # [groups]
    offsets: list[float] | None  # [groups]; none where the format has no offset
    codes: bytearray  # [groups * size], in the order of the weights


def dequantise(type_name: str, data: floats.Bytes, out: str) -> Iterator[bytes | bytearray]:
    """The weights of `data`, whole blocks of `type_name`, as `out` ("f32" or "bf16") bytes, in chunks in order.

    bf16 is the f32 value rounded to nearest, ties to even. A chunk holds at most `CHUNK` weights.
    Raises ExportError for an unknown type or dtype, a cut block, and a scale that is not finite.
    """
    if type_name not in BLOCKS or out not in ("f32", "bf16"):
        raise ExportError(f"tensor type {type_name}", "no such conversion", got=f"to {out}")
    block, size = BLOCKS[type_name]
    view = memoryview(data).cast("B")
    if len(view) % size:
        raise ExportError(
            f"tensor type {type_name}", "a block is cut", got=f"{len(view)} bytes", want=f"a multiple of {size}"
        )
    step = CHUNK // block * size
    for at in range(0, len(view), step):
        chunk = bytes(view[at : at + step])
        if type_name in _UNPACK:
            groups = _UNPACK[type_name](chunk)
            yield _by_table(groups, out) if groups.bits <= 5 else _by_scale(groups, out)
        else:
            yield bytes(floats.convert(chunk, type_name.lower(), out))


def _by_table(groups: _Groups, out: str) -> bytearray:
    """Codes of 4 and 5 bits: a table for 16 or 8 groups."""
    width, span = floats.WIDTH[out], (256 >> groups.bits) * groups.size  # weights a table
    tagged = _tag(groups.codes, groups.size, groups.bits)
    pieces = [tagged[at : at + span] for at in range(0, len(tagged), span)]
    result = bytearray(width * len(tagged))
    for byte, plane in enumerate(_planes(groups, out)):
        plane += bytes(-len(plane) % 256)
        tables = [plane[at : at + 256] for at in range(0, len(plane), 256)]
        result[byte::width] = b"".join(map(bytes.translate, pieces, tables))
    return result


def _planes(groups: _Groups, out: str) -> list[bytearray]:
    """Byte k of the value of code c of group g, at [k][g * levels + c]."""
    levels, count, width = 1 << groups.bits, len(groups.scales), floats.WIDTH[out]
    planes = [bytearray(count * levels) for _ in range(width)]
    for code, column in enumerate(_columns(groups, levels)):
        packed = struct.pack(f"{count}f", *column)
        if out == "bf16":
            packed = bytes(floats.f32_to_bf16(packed))
        for byte, plane in enumerate(planes):
            plane[code::levels] = packed[byte::width]
    return planes


def _columns(groups: _Groups, levels: int) -> Iterator[list[float]]:
    """For each code, the value of that code in every group. Exact in double, see the top."""
    scales = groups.scales
    if groups.offsets is None:
        for code in range(levels):
            yield list(map(mul, scales, repeat(float(code - groups.zero))))
        return
    column = list(map(add, map(mul, scales, repeat(0.0)), groups.offsets))
    yield column
    for _ in range(levels - 1):
        column = list(map(add, column, scales))
        yield column


def _tag(codes: bytearray, size: int, bits: int) -> bytes:
    """The codes with their group's number, modulo the groups that share a table, in the bits above the code."""
    tags = _tags(len(codes), size, bits)
    return (int.from_bytes(codes, "little") | tags).to_bytes(len(codes), "little")


@lru_cache(maxsize=8)
def _tags(count: int, size: int, bits: int) -> int:
    cycle = b"".join(bytes([group << bits]) * size for group in range(256 >> bits))
    return int.from_bytes((cycle * (count // len(cycle) + 1))[:count], "little")


def _by_scale(groups: _Groups, out: str) -> bytes | bytearray:
    """Codes of 6 and 8 bits: a table for each distinct scale where they are few, else one product a weight."""
    known = _known_tables(groups.bits, out)
    count, levels, width = len(groups.scales), 1 << groups.bits, floats.WIDTH[out]
    keys = memoryview(struct.pack(f"{count}f", *groups.scales)).cast("I").tolist()  # tells -0.0 from 0.0
    fresh = {key: scale for key, scale in zip(keys, groups.scales, strict=True) if key not in known}
    if len(fresh) * levels > count * groups.size:
        return _by_product(groups, out)
    if len(known) + len(fresh) > MOST_TABLES:
        _known_tables.cache_clear()  # the dict that is in use here, perhaps in another thread too, stays whole
    if fresh:
        planes = [bytes(plane) for plane in _planes(replace(groups, scales=list(fresh.values())), out)]
        for index, key in enumerate(fresh):
            known[key] = [plane[index * levels : (index + 1) * levels].ljust(256, b"\0") for plane in planes]
    codes, size = bytes(groups.codes), groups.size
    pieces = [codes[at : at + size] for at in range(0, len(codes), size)]
    tables = [known[key] for key in keys]
    result = bytearray(width * len(codes))
    for byte in range(width):
        result[byte::width] = b"".join(map(bytes.translate, pieces, map(itemgetter(byte), tables)))
    return result


@lru_cache(maxsize=4)
def _known_tables(bits: int, out: str) -> dict[int, list[bytes]]:
    """f32 bits of a scale -> for each byte of a result, its 256 values by code: of the scales seen lately."""
    return {}


def _by_product(groups: _Groups, out: str) -> bytes | bytearray:
    """One product a weight."""
    size, count = groups.size, len(groups.scales)
    factors = [float(code - groups.zero) for code in range(1 << groups.bits)]
    result = bytearray(4 * len(groups.codes))
    lanes = memoryview(result).cast("f")
    for position in range(size):
        products = map(mul, groups.scales, map(factors.__getitem__, groups.codes[position::size]))
        lanes[position::size] = memoryview(struct.pack(f"{count}f", *products)).cast("f")
    return result if out == "f32" else floats.f32_to_bf16(result)


# --- The layouts, from ggml-quants.c. `plane(p)` below is byte p of every block of the chunk.


def _halves(blocks: bytes, size: int, at: int) -> list[float]:
    """The f16 at byte `at` of each block."""
    raw = bytearray(len(blocks) // size * 2)
    raw[0::2] = blocks[at::size]
    raw[1::2] = blocks[at + 1 :: size]
    if raw[1::2].translate(None, _FINITE_HIGH):
        raise ExportError("quantised block", "a scale is infinite or NaN", todo="the file is damaged: fetch it again")
    return cast("list[float]", memoryview(floats.f16_to_f32(raw)).cast("f").tolist())


def _small_blocks(type_name: str, offset: bool, high: bool) -> Callable[[bytes], _Groups]:
    """Q4_0, Q4_1, Q5_0, Q5_1: d, [m], [32 fifth bits], 16 bytes whose low nibbles are weights 0-15, high ones 16-31."""
    _, size = BLOCKS[type_name]
    fifth_at = 4 if offset else 2
    nibbles_at = fifth_at + (4 if high else 0)

    def unpack(blocks: bytes) -> _Groups:
        codes = bytearray(len(blocks) // size * 32)
        for position in range(16):
            plane = blocks[nibbles_at + position :: size]
            codes[position::32] = plane.translate(_LOW)
            codes[position + 16 :: 32] = plane.translate(_HIGH)
        if high:
            fifth = bytearray(len(codes))
            for position in range(32):
                plane = blocks[fifth_at + position // 8 :: size]
                fifth[position::32] = plane.translate(_bit(position % 8))
            codes = _either(codes, fifth)
        offsets = _halves(blocks, size, 2) if offset else None
        zero = 0 if offset else 16 if high else 8
        return _Groups(32, 5 if high else 4, zero, _halves(blocks, size, 0), offsets, codes)

    return unpack


@lru_cache(maxsize=8)
def _bit(position: int) -> bytes:
    """A byte to 16 where its bit `position` is set: the fifth bit of a code."""
    return bytes((byte >> position & 1) << 4 for byte in range(256))


def _either(a: bytearray, b: bytearray) -> bytearray:
    return bytearray((int.from_bytes(a, "little") | int.from_bytes(b, "little")).to_bytes(len(a), "little"))


def _q8_0(blocks: bytes) -> _Groups:
    """d, 32 signed bytes, which become codes by adding 128."""
    codes = bytearray(len(blocks) // 34 * 32)
    for position in range(32):
        codes[position::32] = blocks[2 + position :: 34]
    return _Groups(32, 8, 128, _halves(blocks, 34, 0), None, codes.translate(_SIGNED_TO_CODE))


def _k_blocks(type_name: str, high: bool) -> Callable[[bytes], _Groups]:
    """Q4_K, Q5_K: d, dmin, 12 bytes of eight 6-bit (scale, min), [32 bytes of fifth bits], 128 bytes of nibbles.

    A value is d * scale * code - dmin * min. Nibble byte 32 j + l holds weights 64 j + l (low) and 64 j + 32 + l
    (high); bit g of fifth-bit byte l belongs to weight 32 g + l.
    """
    _, size = BLOCKS[type_name]
    nibbles_at = 48 if high else 16

    def unpack(blocks: bytes) -> _Groups:
        count = len(blocks) // size
        codes = bytearray(count * 256)
        for position in range(128):
            plane = blocks[nibbles_at + position :: size]
            weight = position // 32 * 64 + position % 32
            codes[weight::256] = plane.translate(_LOW)
            codes[weight + 32 :: 256] = plane.translate(_HIGH)
        if high:
            fifth = bytearray(len(codes))
            for position in range(32):
                plane = blocks[16 + position :: size]
                for group in range(8):
                    fifth[32 * group + position :: 256] = plane.translate(_bit(group))
            codes = _either(codes, fifth)
        scales, offsets = _k_scales(blocks, size)
        return _Groups(32, 5 if high else 4, 0, scales, offsets, codes)

    return unpack


def _k_scales(blocks: bytes, size: int) -> tuple[list[float], list[float]]:
    """The scale and the offset of each of the eight groups a block of Q4_K and Q5_K."""
    delta, delta_min = _halves(blocks, size, 0), _halves(blocks, size, 2)
    packed = [blocks[4 + index :: size] for index in range(12)]
    scales, offsets = [0.0] * (8 * len(delta)), [0.0] * (8 * len(delta))
    for group in range(8):
        if group < 4:
            scale = [byte & 63 for byte in packed[group]]
            least = [byte & 63 for byte in packed[group + 4]]
        else:
            scale = [low & 15 | top >> 6 << 4 for low, top in zip(packed[group + 4], packed[group - 4], strict=True)]
            least = [low >> 4 | top >> 6 << 4 for low, top in zip(packed[group + 4], packed[group], strict=True)]
        scales[group::8] = map(mul, delta, scale)
        offsets[group::8] = [-d * m for d, m in zip(delta_min, least, strict=True)]
    return scales, offsets


def _q6_k(blocks: bytes) -> _Groups:
    """128 bytes of nibbles, 64 bytes of two upper bits, 16 signed scales, d: d * scale * (code - 32).

    In each half of 128 weights, nibble byte l (0-63) holds weights l and l + 64, upper-bit byte l (0-31) the four
    weights l, l + 32, l + 64, l + 96. A scale serves 16 weights.
    """
    count = len(blocks) // 210
    codes, upper = bytearray(count * 256), bytearray(count * 256)
    for half in (0, 1):
        for position in range(64):
            plane = blocks[64 * half + position :: 210]
            codes[128 * half + position :: 256] = plane.translate(_LOW)
            codes[128 * half + position + 64 :: 256] = plane.translate(_HIGH)
        for position in range(32):
            plane = blocks[128 + 32 * half + position :: 210]
            for quarter in range(4):
                upper[128 * half + 32 * quarter + position :: 256] = plane.translate(_two_bits(2 * quarter))
    delta = _halves(blocks, 210, 208)
    scales = [0.0] * (16 * count)
    for group in range(16):
        scales[group::16] = map(mul, delta, memoryview(blocks[192 + group :: 210]).cast("b"))
    return _Groups(16, 6, 32, scales, None, _either(codes, upper))


@lru_cache(maxsize=4)
def _two_bits(position: int) -> bytes:
    return bytes((byte >> position & 3) << 4 for byte in range(256))


_UNPACK: dict[str, Callable[[bytes], _Groups]] = {
    "Q4_0": _small_blocks("Q4_0", offset=False, high=False),
    "Q4_1": _small_blocks("Q4_1", offset=True, high=False),
    "Q5_0": _small_blocks("Q5_0", offset=False, high=True),
    "Q5_1": _small_blocks("Q5_1", offset=True, high=True),
    "Q8_0": _q8_0,
    "Q4_K": _k_blocks("Q4_K", high=False),
    "Q5_K": _k_blocks("Q5_K", high=True),
    "Q6_K": _q6_k,
}
