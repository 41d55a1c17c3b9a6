"""Random quantised blocks, the same on every Python: what the golden hashes of dequantised weights were taken over."""

from __future__ import annotations

import random
import struct

from tlaloc_serve.export.gguf import BLOCKS

SCALES_AT = {"Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q4_K": (0, 2), "Q5_K": (0, 2),
             "Q6_K": (208,)}  # fmt: skip


def blocks(type_name: str, kind: str, count: int) -> bytes:
    """`count` blocks with random codes. Scales by `kind`: any finite f16, subnormals, signed zeros, four of them."""
    rng = random.Random(f"{type_name} {kind}")
    size = BLOCKS[type_name][1]
    data = bytearray(rng.randbytes(count * size))
    few = [rng.randrange(0x7C00) for _ in range(4)]
    for block in range(count):
        for at in SCALES_AT[type_name]:
            draw = rng.randrange(0x7C00)
            sign = rng.randrange(2) << 15
            half = {"any": draw, "tiny": draw & 63, "zero": 0, "few": few[draw & 3]}[kind] | sign
            struct.pack_into("<H", data, block * size + at, half)
    return bytes(data)
