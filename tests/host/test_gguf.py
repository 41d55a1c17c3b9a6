"""The GGUF reader: what it reads, and that no damage gets past it or makes it crash, hang or take memory."""

from __future__ import annotations

import os
import random
import struct
import tempfile
import time
import tracemalloc
import unittest
from typing import Any

from tests.gguf_writer import ARRAY, BOOL, F64, I8, I64, STRING, U8, U64, Described, Typed, gguf, pair, text
from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.gguf import BLOCKS, GgufFile

METADATA = {
    "general.architecture": "llama",
    "a.u8": Typed(U8, 255),
    "a.i8": Typed(I8, -1),
    "a.i64": Typed(I64, -(1 << 60)),
    "a.u64": Typed(U64, 1 << 63),
    "a.f32": 0.5,
    "a.f64": Typed(F64, 1e-300),
    "a.true": True,
    "a.text": "a \u2581 \U0001f642",
    "a.words": ["one", "", "tres \u00e9"],
    "a.numbers": [1, 2, 3],
    "a.empty": Typed(STRING, []),
}
TENSORS = (
    Described("x", (3, 32), "Q4_1", bytes(range(60))),
    Described("y", (5,), "F32", struct.pack("<5f", *range(5))),
    Described("z", (2, 256), "Q6_K", bytes(420)),
)


class Reading(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = os.path.join(self.folder.name, "model.gguf")

    def write(self, data: bytes) -> str:
        with open(self.path, "wb") as file:
            file.write(data)
        return self.path

    def read(self, data: bytes) -> tuple[int, dict[str, Any], dict[str, Any]]:
        """The version, the metadata, and each tensor's fields with its bytes."""
        with GgufFile.open(self.write(data)) as file:
            tensors = {}
            for name, tensor in file.tensors.items():
                with file.data(tensor) as view:
                    tensors[name] = (tensor.dims, tensor.type_name, bytes(view))
            return file.version, file.metadata, tensors

    def refuse(self, data: bytes, message: str) -> None:
        with self.assertRaises(ExportError) as caught:
            GgufFile.open(self.write(data))
        self.assertIn(self.path, str(caught.exception))
        self.assertRegex(str(caught.exception).removeprefix(self.path), message)


class WhatIsRead(Reading):
    def test_every_value_type_and_the_tensors_in_both_versions(self) -> None:
        for version in (2, 3):
            got, metadata, tensors = self.read(gguf(METADATA, TENSORS, version=version))
            self.assertEqual(got, version)
            plain = {key: value.value if isinstance(value, Typed) else value for key, value in METADATA.items()}
            self.assertEqual({k: list(v) if k == "a.numbers" else v for k, v in metadata.items()}, plain)
            self.assertEqual(tensors, {t.name: (tuple(t.dims), t.type_name, t.data) for t in TENSORS})

    def test_alignment_of_the_file(self) -> None:
        for alignment in (1, 8, 32, 4096):
            data = gguf({"general.alignment": alignment}, TENSORS, alignment=alignment)
            _, _, tensors = self.read(data)
            self.assertEqual(tensors["y"][2], TENSORS[1].data)

    def test_no_tensors_and_no_metadata(self) -> None:
        self.assertEqual(self.read(gguf({})), (3, {}, {}))

    def test_architecture(self) -> None:
        with GgufFile.open(self.write(gguf(METADATA, TENSORS))) as file:
            self.assertEqual(file.architecture, "llama")

    def test_missing_architecture(self) -> None:
        with (
            GgufFile.open(self.write(gguf({"general.architecture": 3}))) as file,
            self.assertRaisesRegex(ExportError, "general.architecture: not there, got 3, want a string"),
        ):
            _ = file.architecture


class WhatIsRefused(Reading):
    def test_not_a_gguf_file(self) -> None:
        self.refuse(b"", "magic: not a GGUF file")
        self.refuse(b"PK\x03\x04" + bytes(100), "magic: not a GGUF file, got b'PK")
        self.refuse(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "a git-lfs pointer.*git lfs pull")
        for path in (self.path + ".gone", self.folder.name):
            with self.assertRaisesRegex(ExportError, "cannot be read, got (No such file|Is a directory)"):
                GgufFile.open(path)

    def test_versions(self) -> None:
        self.refuse(gguf({}, version=1), "version: not supported, got 1, want 2 or 3")
        self.refuse(gguf({}, version=4), "version: not supported, got 4, want 2 or 3")
        self.refuse(b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "version: a big-endian file")

    def test_counts_and_lengths_beyond_the_file(self) -> None:
        for huge in (1 << 20, 1 << 40, (1 << 64) - 1):
            self.refuse(gguf(METADATA, TENSORS, pair_count=huge), f"kv_count: more than the file can hold, got {huge}")
            self.refuse(gguf(METADATA, TENSORS, tensor_count=huge), f"tensor_count: more than .* hold, got {huge}")
            self.refuse(gguf([struct.pack("<Q", huge) + bytes(40)]), f"metadata key 0: length: more .* got {huge}")
            self.refuse(gguf([text("k") + struct.pack("<IQ", STRING, huge) + bytes(40)]), f"k: length: .* got {huge}")
            for kind in (U8, U64, STRING, BOOL):
                array = text("k") + struct.pack("<IIQ", ARRAY, kind, huge) + bytes(40)
                self.refuse(gguf([array]), f"k: count: more than the file can hold, got {huge}")

    def test_metadata(self) -> None:
        self.refuse(gguf([pair("k", 1), pair("k", 2)]), "k: given twice")
        self.refuse(gguf([pair("k" * 70000, 1)]), "key 0: length: too long, got 70000, want at most 65535 bytes")
        self.refuse(gguf([pair(b"\xff", 1)]), "metadata key 0: not UTF-8")
        self.refuse(gguf([pair("k", b"ab\xff")]), "k: not UTF-8, got byte 2 of 3")
        self.refuse(gguf([text("k") + struct.pack("<IB", BOOL, 2)]), "k: not a bool, got 2")
        self.refuse(gguf([text("k") + struct.pack("<II", 13, 0)]), "k: type: unknown, got 13")
        nested = text("k") + struct.pack("<IIQ", ARRAY, ARRAY, 1) + bytes(16)
        self.refuse(gguf([nested]), "k: element type: not supported, got array")
        for bad in (0, 3, 33, "32", True):
            self.refuse(gguf({"general.alignment": bad}), "general.alignment: not usable")
        self.refuse(gguf({"split.count": 3}), "one part of several, got 3, want 1; merge the parts")

    def test_tensors(self) -> None:
        def one(**fields: Any) -> bytes:
            usual = {"name": "t", "dims": (2, 32), "type_name": "Q4_0", "data": bytes(36)}
            return gguf({}, [Described(**{**usual, **fields})])

        self.refuse(one(type_number=10), "t: type: tensor type not supported, got Q2_K, want F32, F16")
        self.refuse(one(type_number=999), "t: type: tensor type not supported, got number 999")
        self.refuse(one(dims=(2, 33)), r"t: dims: not whole blocks of Q4_0, got \[2, 33\], want .* multiple of 32")
        self.refuse(one(dims=(0, 32)), "t: dims: not whole blocks")
        self.refuse(one(dims=()), "t: n_dims: not supported, got 0")
        self.refuse(one(dims=(1, 1, 1, 1, 32)), "t: n_dims: not supported, got 5")
        self.refuse(one(offset=4), "t: offset: not aligned, got 4, want a multiple of 32")
        self.refuse(one(offset=64), "t: offset: data past the end of the file")
        self.refuse(one(dims=(1 << 62, 1 << 62, 1 << 62, 32)), "t: offset: data past the end of the file")
        self.refuse(one(name="t" * 65), "tensor 0: name: length: too long, got 65, want at most 64")
        self.refuse(gguf({}, [TENSORS[0], TENSORS[0]]), "x: tensor given twice")
        overlap = Described("w", (5,), "F32", bytes(20), offset=32)
        self.refuse(gguf({}, [TENSORS[0], overlap]), "w: offset: overlaps x, got ")

    def test_every_readable_type_has_a_number(self) -> None:
        for name, (block, size) in BLOCKS.items():
            _, _, tensors = self.read(gguf({}, [Described("t", (block,), name, bytes(size))]))
            self.assertEqual(tensors["t"], ((block,), name, bytes(size)))


class Damage(Reading):
    """Nothing but a sound read or an ExportError, quickly and in little memory."""

    def survive(self, data: bytes) -> bool:
        try:
            self.read(data)
        except ExportError:
            return False
        return True

    def test_every_truncation(self) -> None:
        whole = gguf(METADATA, TENSORS)
        cut = len(whole) - 28  # the last tensor's padding is no part of it
        for size in range(cut):
            self.assertFalse(self.survive(whole[:size]), size)
        self.assertTrue(self.survive(whole[:cut]))

    def test_bytes_flipped(self) -> None:
        whole = gguf(METADATA, TENSORS)
        rng = random.Random(11)
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        begin = time.monotonic()
        outcomes = set()
        for _ in range(3000):
            data = bytearray(whole)
            for _ in range(rng.choice((1, 1, 2, 8))):
                data[rng.randrange(len(data))] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
            outcomes.add(self.survive(bytes(data)))
        self.assertEqual(outcomes, {True, False})
        self.assertLess(tracemalloc.get_traced_memory()[1], 8 << 20)
        self.assertLess(time.monotonic() - begin, 60)


if __name__ == "__main__":
    unittest.main()
