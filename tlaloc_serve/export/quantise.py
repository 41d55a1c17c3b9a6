"""Matrices to i8 with one f32 scale a row (an output channel): w is about q * scale, q in -127..127.

scale = max |w| / 127 of the row, rounded to f32; q = w / scale, rounded to the nearest integer, ties to even. This is
symmetric round-to-nearest quantisation, without data. A scale below the smallest normal f32 is 0, and so is its row.
"""

from __future__ import annotations

import math
from array import array
from typing import NamedTuple

from tlaloc_serve.export import floats

_LARGEST = 127
# 1.5 * 2^23: an f32 of this size has no fraction, so that adding it rounds to an integer, which is then the low byte
# (two's complement) of the sum. The high byte is that of the constant itself for every q, and for no NaN.
_ROUND = 12582912.0
_ROUND_HIGH = b"\x4b"
_SMALLEST_NORMAL = 2.0**-126


class Quantised(NamedTuple):
    """Rows as i8 [rows, inner] and their scales f32 [rows].

    `error` and `power` are the sums of (w - q * scale)^2 and of w^2 over the first row, as a sample.
    """

    values: bytearray
    scales: bytes
    error: float
    power: float


def quantise_rows(data: floats.Bytes, inner: int) -> Quantised | None:
    """f32 [rows, inner], little-endian bytes, to i8; None where a number is not finite."""
    numbers = array("f", bytes(data))
    values, scales = bytearray(), array("f")
    for start in range(0, len(numbers), inner):
        row = numbers[start : start + inner].tolist()
        highest, lowest = max(row), min(row)
        largest = max(highest, -lowest) / _LARGEST
        scales.append(0.0 if largest < _SMALLEST_NORMAL else largest)
        scale = scales[-1]  # as f32
        turn = 1.0 / scale if scale else 0.0
        shifted = array("f", [number * turn + _ROUND for number in row]).tobytes()
        if shifted[3::4].count(_ROUND_HIGH) != inner:
            return None
        values += shifted[0::4]
    first = numbers[:inner].tolist()
    rounded = array("b", bytes(values[:inner])).tolist()
    # Summed exactly: `sum` gives other digits on some Pythons than on others.
    error = math.fsum([(number - q * scales[0]) ** 2 for number, q in zip(first, rounded, strict=True)])
    return Quantised(values, scales.tobytes(), error, math.fsum([number * number for number in first]))
