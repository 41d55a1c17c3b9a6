"""The safetensors reader: what it finds, and every way in which a file can lie."""

from __future__ import annotations

import json
import pathlib
import random
import struct
import tempfile
import unittest

from tests import tiny_checkpoint as tiny
from tests.support import shared
from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.safetensors import INDEX, read_checkpoint, read_header

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 538090408\n"


class Reader(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.path = self.folder / "model.safetensors"

    def refused(self, data: bytes, *words: str) -> None:
        """The file is refused, and the message names the file and the reason."""
        self.path.write_bytes(data)
        with self.assertRaises(ExportError) as caught:
            read_header(self.path)
        for word in (str(self.path), *words):
            self.assertIn(word, str(caught.exception))

    def test_says_where_each_tensor_is(self) -> None:
        self.path.write_bytes(tiny.pack({"a": ("F32", (2, 3), bytes(range(24))), "b": ("BF16", (4,), b"12345678")}))
        found = read_header(self.path)
        data = self.path.read_bytes()
        self.assertEqual(
            {name: (t.dtype, t.dims) for name, t in found.items()}, {"a": ("F32", (2, 3)), "b": ("BF16", (4,))}
        )
        self.assertEqual(data[found["a"].offset :][: found["a"].byte_length], bytes(range(24)))
        self.assertEqual(data[found["b"].offset :][: found["b"].byte_length], b"12345678")

    def test_tensors_may_stand_in_any_order(self) -> None:
        header = {"z": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
                  "a": {"dtype": "F16", "shape": [], "data_offsets": [2, 4]},
                  "empty": {"dtype": "F32", "shape": [0, 5], "data_offsets": [2, 2]}}  # fmt: skip
        self.path.write_bytes(tiny.pack_raw(header, b"1234"))
        self.assertEqual(read_header(self.path)["a"].dims, ())

    def test_no_safetensors_file(self) -> None:
        self.refused(b"", "0 bytes")
        self.refused(b"1234567", "7 bytes")
        self.refused(LFS, "git-lfs pointer", "git lfs pull")

    def test_header_length_beyond_the_file_or_the_cap(self) -> None:
        self.refused(struct.pack("<Q", 100) + b"{}", "header length", "100", "at most 2")
        self.refused(struct.pack("<Q", 2**63) + b"{}", "header length")

    def test_header_that_is_no_object(self) -> None:
        for header in ([], 7, None):
            self.refused(tiny.pack_raw(header, b""), "no JSON object")
        self.refused(struct.pack("<Q", 2) + b"{x", "header", "no JSON")
        self.refused(struct.pack("<Q", 3) + b'"\xff"', "header", "no JSON")
        deep = b"[" * 100_000
        self.refused(struct.pack("<Q", len(deep)) + deep, "no JSON")

    def test_tensor_given_twice(self) -> None:
        one = '"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}'
        text = ("{" + one + ", " + one + "}").encode()
        self.refused(struct.pack("<Q", len(text)) + text + b"1", "twice", "a")

    def test_dtypes_that_are_no_plain_numbers(self) -> None:
        for dtype in ("F8_E4M3", "F8_E5M2", "I4", "F4", "", 3, ["F32"]):
            header = {"w": {"dtype": dtype, "shape": [4], "data_offsets": [0, 4]}}
            self.refused(tiny.pack_raw(header, b"1234"), "w", "dtype not supported", str(dtype))

    def test_offsets_that_lie(self) -> None:
        def two(a: list[int], b: list[int], data: bytes = b"12345678") -> bytes:
            record = {"dtype": "F32", "shape": [1]}
            return tiny.pack_raw({"a": {**record, "data_offsets": a}, "b": {**record, "data_offsets": b}}, data)

        self.refused(two([0, 4], [2, 6]), "b", "overlaps")
        self.refused(two([0, 4], [0, 4]), "overlaps")
        self.refused(two([0, 4], [8, 12], b"123456789012"), "b", "hole")
        self.refused(two([4, 8], [8, 12], b"123456789012"), "a", "hole")
        self.refused(two([0, 4], [4, 8], b"123456"), "b", "past the end", "cut short")
        self.refused(two([0, 4], [4, 8], b"1234567890"), "bytes after the last tensor")
        self.refused(two([0, 4], [4, 9], b"123456789"), "b", "not the size of F32")
        self.refused(two([0, 4], [8, 4]), "b", "not the size of F32")
        self.refused(two([0, 4], [-4, 0]), "b", "data_offsets not usable")
        self.refused(two([0, 4], [4, 2**64]), "b")

    def test_records_that_are_not_records(self) -> None:
        for record in (None, [], {"dtype": "F32"}, {"dtype": "F32", "shape": [1], "data_offsets": [0]},
                       {"dtype": "F32", "shape": [1.0], "data_offsets": [0, 4]},
                       {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]},
                       {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
                       {"dtype": "F32", "shape": "1", "data_offsets": [0, 4]}):  # fmt: skip
            self.refused(tiny.pack_raw({"w": record}, b"1234"), "w")

    def test_a_damaged_file_is_refused_or_read_never_a_crash(self) -> None:
        draw = random.Random(7)
        sound = tiny.pack({"a": ("F32", (2, 3), bytes(range(24))), "b": ("BF16", (4,), b"12345678")})
        for _ in range(600):
            data = bytearray(sound)
            for _ in range(draw.randint(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            self.path.write_bytes(bytes(data[: draw.choice((len(data), draw.randrange(len(data) + 1)))]))
            try:
                found = read_header(self.path)
            except ExportError:
                continue
            size = self.path.stat().st_size
            self.assertTrue(all(tensor.offset + tensor.byte_length <= size for tensor in found.values()))


class Shards(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.map = {"a": "one.safetensors", "b": "two.safetensors"}
        for name, shard in self.map.items():
            (self.folder / shard).write_bytes(tiny.pack({name: ("F32", (1,), b"1234")}))

    def read(self, table: object) -> dict[str, str]:
        (self.folder / INDEX).write_text(json.dumps(table))
        return {name: pathlib.Path(tensor.path).name for name, tensor in read_checkpoint(self.folder).items()}

    def refused(self, table: object, *words: str) -> None:
        with self.assertRaises(ExportError) as caught:
            self.read(table)
        for word in words:
            self.assertIn(word, str(caught.exception))

    def test_reads_every_shard(self) -> None:
        self.assertEqual(self.read({"weight_map": self.map}), self.map)

    def test_missing_shard(self) -> None:
        (self.folder / "two.safetensors").unlink()
        self.refused({"weight_map": self.map}, "two.safetensors", "missing shard", "b")

    def test_index_and_shards_that_disagree(self) -> None:
        self.refused({"weight_map": {**self.map, "c": "two.safetensors"}}, "two.safetensors", "c", "not in the shard")
        self.refused({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}, "b", "not in the shard")
        (self.folder / "two.safetensors").write_bytes(tiny.pack({"b": ("F32", (1,), b"1234"), "x": ("F32", (0,), b"")}))
        self.refused({"weight_map": self.map}, "x", "index disagrees")

    def test_a_shard_outside_the_folder(self) -> None:
        for shard in ("../one.safetensors", "/etc/passwd", "..", "sub/one.safetensors"):
            self.refused({"weight_map": {"a": shard}}, "outside the folder")

    def test_an_index_that_is_none(self) -> None:
        for table in ({}, {"weight_map": []}, {"weight_map": {}}, [], 3):
            self.refused(table, INDEX)

    def test_one_pointer_among_the_shards(self) -> None:
        (self.folder / "two.safetensors").write_bytes(LFS)
        self.refused({"weight_map": self.map}, "two.safetensors", "git-lfs pointer")

    def test_weights_in_another_format(self) -> None:
        for path in self.folder.iterdir():
            path.unlink()
        (self.folder / "pytorch_model.bin").write_bytes(b"")
        with self.assertRaises(ExportError) as caught:
            read_checkpoint(self.folder)
        self.assertIn("pytorch_model.bin", str(caught.exception))
        self.assertIn("convert the weights to safetensors", str(caught.exception))

    def test_a_real_sharded_checkpoint(self) -> None:
        found = read_checkpoint(shared("checkpoints", "llama_sharded"))
        self.assertEqual(len(found), 3 * 9 + 3)
        self.assertEqual({tensor.dtype for tensor in found.values()}, {"F16"})
        self.assertEqual(len({tensor.path for tensor in found.values()}), 3)


if __name__ == "__main__":
    unittest.main()
