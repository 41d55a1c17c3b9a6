"""Dequantisation, bit for bit against ggml 0.25's `dequantize_row_*` in C, over every kind of scale."""

from __future__ import annotations

import hashlib
import struct
import unittest
from unittest import mock

from tests.quant_blocks import SCALES_AT, blocks
from tlaloc_serve.errors import ExportError
from tlaloc_serve.export import dequantise as module
from tlaloc_serve.export.dequantise import dequantise
from tlaloc_serve.export.gguf import BLOCKS

# The first six weights of `blocks(type, "any", count(type))` as f32 bytes, from ggml.
FIRST = {
    "Q8_0": "002ecf46009d02c700b365c6002e4f46c0fd0547806cc8c6",
    "Q4_0": "00402f3b00402fbb005899bc007083bc0000000000402f3b",
    "Q4_1": "002a7bc6002a7bc600b698c6008019c6005070c6009c5ac6",
    "Q5_0": "008e694000fcd9bf002079be0020f93f00d83a400020f9bf",
    "Q5_1": "00a086b9000046b8000046b800e8333a0040abb90000be37",
    "Q4_K": "602372bd00da3a3b00f512bd20af32bd00da3a3be0a8a8bd",
    "Q5_K": "90dc334780df314708de324758cf3c47c8e92a4738d53847",
    "Q6_K": "006e5c3d40ca943d004d9a3d0079f2bc0058b0bb004d9a3c",
}

# The start of the SHA-256 of all weights of `blocks(type, kind, count(type))`: ggml's f32, and torch's bf16 of those.
GGML = {
    ("Q8_0", "any"): ("2927a5f9bd5f93dc951b942c640674c3", "87f6e79c6a06b586e24b5a7091080848"),
    ("Q8_0", "tiny"): ("8a8b73c6b3179652c92bd325d71fbea7", "00cba7c00beb6686cc936ce899e09023"),
    ("Q8_0", "zero"): ("a10fe2626b41a89e56cd0b1f7aeb2523", "631416e858027733c63b7fea350e17f5"),
    ("Q8_0", "few"): ("d6bfe376a19daf682d9bb46c394b5d20", "59776a2cc172f404c486fa863ae55d8f"),
    ("Q4_0", "any"): ("b4946c80ee2d9bd74ad065221243f649", "410b734bfcf8f1e480b86a6a23cf86da"),
    ("Q4_0", "tiny"): ("83b46407c710e9958abff7f897171285", "0a3f44522601056046a2ad590eb6bfc8"),
    ("Q4_0", "zero"): ("b41a6fc77f1991e1180f62b9da76c4d5", "f2f03f84a65ef1b9b469c5007fa40bfc"),
    ("Q4_0", "few"): ("6b4255167ee1129038bb183e4c96ecaf", "9d58f8291edf2dabcafe95d119c976c6"),
    ("Q4_1", "any"): ("6c405346dabb9492b3ea157086342e52", "222a2528c2276c02e27cca1c7f6ed4a5"),
    ("Q4_1", "tiny"): ("877bdfe4c875503e93d9e82d60ea181a", "7e19470fd4dc009e1c99e01b4a8faea2"),
    ("Q4_1", "zero"): ("d7e31e432f4621a4fd19f456e34ee534", "1b22f894dc1465c90a7a93668b83c309"),
    ("Q4_1", "few"): ("b2347ef8ee19a1f7fb4d9b46c7c44212", "75aeab782d415f57739e8b59d2355a92"),
    ("Q5_0", "any"): ("b7b6650a147724abdb23844bb8ac76db", "8493dc30abf0eafdd5d6d4ebc075ce7c"),
    ("Q5_0", "tiny"): ("f54274de4e77e63c98b96b3d65a8a01e", "c9f0469e55145f124aea15aec10f38c7"),
    ("Q5_0", "zero"): ("fd0215831075aa8031584f287fa79ca4", "ad4f5817056dd4383042a99b3fc48bf9"),
    ("Q5_0", "few"): ("0d82747c7e5ab078c7eb8b9f659c5668", "16dd3da945547069050e9f1d25e3467e"),
    ("Q5_1", "any"): ("4f3770a1ae1c1f60f0ccff1f990347d6", "7dc191173c4f054ef2bd832989026e38"),
    ("Q5_1", "tiny"): ("92758e2570404524dcb3e6dedd2dcf89", "6aab68149b9c43f59b194a1643aebab8"),
    ("Q5_1", "zero"): ("ec38019f1531633ae737741e87f85afd", "48228d0cc6f1d81cb102b006753ccb43"),
    ("Q5_1", "few"): ("2b07a94a27c79335eaba5a2138ba72ba", "69a3ebc405fc7e8006ef2d450077dab1"),
    ("Q4_K", "any"): ("4d2385de1d14c80b6f462f4c3932af96", "178d4afa84c2419e4cefc21fb5de515c"),
    ("Q4_K", "tiny"): ("12f7609605dc49aac42e97fa95cf1ba7", "08e69cff1d84315f2c7b6c5b14f20955"),
    ("Q4_K", "zero"): ("c124e97849320a04ee54ff1b652e96f7", "a26a095d7d8a809338e22ec7e54c8111"),
    ("Q4_K", "few"): ("a45afdece967c1588f81a1ff2e4d65e3", "02499b0a941eda2dcb5f0d0d51a62db3"),
    ("Q5_K", "any"): ("a26a02d1c18b970e19b234050b3975c3", "804ccec25e43f96a53590d1f6e8a378e"),
    ("Q5_K", "tiny"): ("d19f769f79e8bcaf351bf4c1b1705a0e", "d32b030853b327bb9a4e203502a75b3d"),
    ("Q5_K", "zero"): ("4700fb3461058bc5886f20cc3c089283", "3a5d1baa766d9ba5a9efbc5d3e2cac51"),
    ("Q5_K", "few"): ("c49f8edcf727bde31552ab1a4978e50b", "b77855f5691625ad59ed11b7ddba4bd5"),
    ("Q6_K", "any"): ("b9fcc00255c9aed25a1586f4dd66211d", "5ffd210095c79d01a457c9f5caabd294"),
    ("Q6_K", "tiny"): ("ce2da6d222d547690220e9faaf17a39f", "a11239529d02a1703c34a281c22d28c7"),
    ("Q6_K", "zero"): ("da71b781aaf63f2e039c56f95a304a38", "ddd0d2e112940fec2bec684e4f766292"),
    ("Q6_K", "few"): ("c414d6593244799d2ea1876de1d2bd0c", "31d863ca2b7850e37239b45c9f2157c6"),
}


def count(type_name: str) -> int:
    return 300 if type_name.endswith("K") else 1100


def weights(type_name: str, data: bytes, out: str) -> bytes:
    return b"".join(dequantise(type_name, data, out))


def start(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


class AgainstGgml(unittest.TestCase):
    def test_first_weights(self) -> None:
        for type_name, want in FIRST.items():
            with self.subTest(type_name):
                data = blocks(type_name, "any", count(type_name))[: BLOCKS[type_name][1]]
                self.assertEqual(weights(type_name, data, "f32")[:24].hex(), want)

    def test_every_type_and_kind_of_scale(self) -> None:
        for (type_name, kind), (f32, bf16) in GGML.items():
            data = blocks(type_name, kind, count(type_name))
            with self.subTest(type_name, kind=kind):
                self.assertEqual(start(weights(type_name, data, "f32")), f32)
                self.assertEqual(start(weights(type_name, data, "bf16")), bf16)

    def test_every_block_type_has_a_golden_value(self) -> None:
        self.assertEqual({name for name, (block, _) in BLOCKS.items() if block > 1}, {name for name, _ in GGML})

    def test_tables_that_are_dropped_and_made_again(self) -> None:
        with mock.patch.object(module, "MOST_TABLES", 5):
            self.test_every_type_and_kind_of_scale()


class Chunks(unittest.TestCase):
    def test_chunks_join_without_a_seam(self) -> None:
        for type_name in SCALES_AT:
            block, size = BLOCKS[type_name]
            data = blocks(type_name, "few", count(type_name))
            whole = weights(type_name, data, "f32")
            with self.subTest(type_name), mock.patch.object(module, "CHUNK", 7 * 256):
                pieces = list(dequantise(type_name, data, "f32"))
                self.assertEqual(b"".join(pieces), whole)
                self.assertEqual(len(pieces[0]), 4 * 7 * 256)
                self.assertEqual(weights(type_name, data[3 * size :], "f32"), whole[4 * 3 * block :])

    def test_plain_types(self) -> None:
        self.assertEqual(weights("F32", struct.pack("<2f", 1.5, -2), "f32"), struct.pack("<2f", 1.5, -2))
        self.assertEqual(weights("F16", struct.pack("<2e", 1.5, -2), "f32"), struct.pack("<2f", 1.5, -2))
        self.assertEqual(weights("BF16", bytes.fromhex("c03f00c0"), "f32"), struct.pack("<2f", 1.5, -2))
        self.assertEqual(weights("F32", struct.pack("<2f", 1.5, -2), "bf16").hex(), "c03f00c0")
        self.assertEqual(weights("BF16", b"", "bf16"), b"")


class Refusals(unittest.TestCase):
    def test_a_scale_that_is_not_finite(self) -> None:
        for type_name, places in SCALES_AT.items():
            for at in places:
                for half in (0x7C00, 0xFC00, 0x7E01):
                    data = bytearray(blocks(type_name, "zero", 3))
                    struct.pack_into("<H", data, BLOCKS[type_name][1] + at, half)
                    with self.subTest(type_name, at=at, half=half):
                        self.assertRaisesRegex(ExportError, "infinite or NaN", weights, type_name, bytes(data), "f32")

    def test_unknown_types_and_cut_blocks(self) -> None:
        for type_name, out in (("Q2_K", "f32"), ("Q4_1", "f16"), ("q4_1", "f32")):
            with self.assertRaisesRegex(ExportError, f"tensor type {type_name}: no such conversion, got to {out}"):
                weights(type_name, b"", out)
        with self.assertRaisesRegex(ExportError, "a block is cut, got 21 bytes, want a multiple of 20"):
            weights("Q4_1", bytes(21), "f32")


if __name__ == "__main__":
    unittest.main()
