"""Float conversion, against figures from PyTorch 2.13 over every 16-bit pattern and every rounding tie."""

from __future__ import annotations

import hashlib
import random
import struct
import time
import unittest

from tlaloc_serve.errors import ExportError
from tlaloc_serve.export import floats

# SHA-256 of what torch gives for the inputs that the tests below build (NaNs zeroed: their payload is a free choice).
TORCH_F32_TO_BF16 = "a7299e0e22cc5d704d639cae9265a33dba9114d388a3f0afdf9c75092acc2c17"
TORCH_F16_TO_F32 = "faa6d965574036872b0d39a42d1f8bee361d5be92b1e718155a69556a5abacdd"
TORCH_F16_TO_BF16 = "dd9445cccdd10fb0941d5075845c2f0279e55bb6122cad1c4087e5ad2a9c52c4"


def words(values: list[int], code: str) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def f16_without_nan() -> list[int]:
    return [0 if half >> 10 & 31 == 31 and half & 0x3FF else half for half in range(65536)]


def sha(data: floats.Bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Widening(unittest.TestCase):
    def test_every_bf16_pattern(self) -> None:
        wide = floats.bf16_to_f32(words(list(range(65536)), "H"))
        self.assertEqual(struct.unpack("<65536I", wide), tuple(pattern << 16 for pattern in range(65536)))

    def test_every_f16_pattern(self) -> None:
        self.assertEqual(sha(floats.f16_to_f32(words(f16_without_nan(), "H"))), TORCH_F16_TO_F32)

    def test_f16_agrees_with_struct_where_subnormals_are_few_or_many(self) -> None:
        rng = random.Random(3)
        normal = [half for half in range(65536) if 0 < half >> 10 & 31 < 31]
        tiny = [half for half in range(65536) if half >> 10 & 31 == 0]
        for few in (0, 5, 4000):
            halves = rng.sample(normal, 8000) + rng.sample(tiny, min(few, len(tiny)))
            rng.shuffle(halves)
            data = words(halves, "H")
            with self.subTest(subnormals=few):
                want = struct.pack(f"<{len(halves)}f", *struct.unpack(f"<{len(halves)}e", data))
                self.assertEqual(floats.f16_to_f32(data), want)

    def test_f16_nan_and_infinity(self) -> None:
        wide = floats.f16_to_f32(words([0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01], "H"))
        self.assertEqual(struct.unpack("<5I", wide), (0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC02000, 0x7F802000))


class Narrowing(unittest.TestCase):
    def test_random_words_and_the_neighbours_of_every_tie(self) -> None:
        lanes = list(struct.unpack("<200000I", random.Random(7).randbytes(800_000)))
        for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
            lanes += [pattern << 16 | low for pattern in range(65536)]
        lanes = [0 if lane & 0x7FFFFFFF > 0x7F800000 else lane for lane in lanes]
        self.assertEqual(sha(floats.f32_to_bf16(words(lanes, "I"))), TORCH_F32_TO_BF16)

    def test_nan_stays_nan_and_leaves_its_neighbours_alone(self) -> None:
        lanes = [0x3F800000, 0xFFFFFFFF, 0x3F800000, 0x7F800001, 0xFF800000, 0x7F7FFFFF, 0x00000000, 0x80000000]
        narrow = struct.unpack("<8H", floats.f32_to_bf16(words(lanes, "I")))
        self.assertEqual(narrow, (0x3F80, 0xFFFF, 0x3F80, 0x7FC0, 0xFF80, 0x7F80, 0x0000, 0x8000))

    def test_every_f16_pattern_to_bf16(self) -> None:
        self.assertEqual(sha(floats.f16_to_bf16(words(f16_without_nan(), "H"))), TORCH_F16_TO_BF16)


class Api(unittest.TestCase):
    def test_chunks_join_without_a_seam(self) -> None:
        data = random.Random(1).randbytes(4 * (floats.CHUNK + 3))
        data = bytes(byte & 0x3F if at % 4 == 3 else byte for at, byte in enumerate(data))
        whole = floats.f32_to_bf16(data)
        at = 4 * (floats.CHUNK - 2)
        self.assertEqual(whole[at // 2 :], floats.f32_to_bf16(data[at:]))
        self.assertEqual(floats.bf16_to_f32(whole)[2 * at // 2 :], floats.bf16_to_f32(whole[at // 2 :]))

    def test_any_bytes_like_input(self) -> None:
        data = words([0x3C00, 0xBC00], "H")
        for like in (data, bytearray(data), memoryview(data), memoryview(data).cast("H")):
            self.assertEqual(floats.convert(like, "f16", "f32"), struct.pack("<2f", 1.0, -1.0))
        self.assertEqual(floats.convert(b"", "bf16", "f32"), b"")
        self.assertIs(floats.convert(data, "bf16", "bf16"), data)

    def test_refusals(self) -> None:
        with self.assertRaisesRegex(ExportError, "an element is cut, got 3 bytes, want a multiple of 2"):
            floats.bf16_to_f32(b"abc")
        with self.assertRaisesRegex(ExportError, "an element is cut, got 6 bytes, want a multiple of 4"):
            floats.f32_to_bf16(b"abcdef")
        with self.assertRaisesRegex(ExportError, "no such conversion, got f8 to f32"):
            floats.convert(b"", "f8", "f32")
        with self.assertRaisesRegex(ExportError, "no such conversion, got f8 to f8"):
            floats.convert(b"", "f8", "f8")

    def test_widening_is_not_done_an_element_at_a_time(self) -> None:
        data = bytes(8 << 20)  # 4 M elements: about 10 ms in bulk, over 150 ms with a Python step for each
        best = min(self.seconds(data) for _ in range(5))
        self.assertLess(best, 0.1)

    @staticmethod
    def seconds(data: bytes) -> float:
        begin = time.process_time()
        floats.bf16_to_f32(data)
        return time.process_time() - begin


if __name__ == "__main__":
    unittest.main()
