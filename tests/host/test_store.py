"""Opening artifacts: what is checked before anyone looks for a plugin."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import tempfile
import unittest
from typing import Any
from unittest import mock

from tests.support import shared
from tlaloc_serve.artifact.store import Artifact, open_artifact
from tlaloc_serve.errors import ArtifactError


class Store(unittest.TestCase):
    """Each test damages its own copy of a real artifact."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.outside = pathlib.Path(folder.name)
        self.root = self.outside / "artifact"
        shutil.copytree(shared("artifacts", "window-v3"), self.root, copy_function=shutil.copyfile)
        for path in [self.root, *self.root.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        self.manifest = self.root / "tlaloc-serving.json"

    def edit(self, change: Any) -> None:
        document = json.loads(self.manifest.read_text())
        change(document)
        self.manifest.write_text(json.dumps(document))

    def refused(self, *words: str, verify: bool = False, path: pathlib.Path | None = None) -> ArtifactError:
        with self.assertRaises(ArtifactError) as caught:
            open_artifact(path or self.root, verify_weights=verify)
        for word in words:
            self.assertIn(word, str(caught.exception))
        return caught.exception

    def weight(self) -> pathlib.Path:
        return self.root / "weights" / "0003_kProj0.bin"

    def body(self) -> pathlib.Path:
        return next((self.root / "bodies").iterdir())

    def test_the_real_one_opens(self) -> None:
        artifact = open_artifact(self.root, verify_weights=True)
        self.assertIsInstance(artifact, Artifact)
        entry = artifact.manifest.entries[0]
        self.assertEqual(artifact.body(entry).data, (self.root / entry.body_path).read_bytes())
        self.assertEqual(artifact.body(entry).signature.aliases, dict(entry.donation_pairs))
        with artifact.map_weight(artifact.manifest.weights[3]) as data:
            self.assertEqual(bytes(data), self.weight().read_bytes())

    def test_bodies_without_alias_consume_nothing(self) -> None:
        artifact = open_artifact(shared("artifacts", "reference-v2"))
        for entry in artifact.manifest.entries:
            self.assertEqual(artifact.body(entry).signature.aliases, {})
            self.assertEqual(len(entry.donation_pairs), 2)

    def test_not_an_artifact(self) -> None:
        self.refused("no such directory", path=self.outside / "nowhere")
        self.refused("not an artifact", "tlaloc-serving.json", path=self.root / "bodies")
        self.refused("not a directory", path=self.body())

    def test_a_body_with_one_byte_changed(self) -> None:
        body = self.body()
        data = bytearray(body.read_bytes())
        data[len(data) // 2] ^= 1
        body.write_bytes(data)
        self.refused(body.name, "not the ones that were exported")

    def test_a_missing_body_and_program(self) -> None:
        self.body().unlink()
        self.refused("bodies/", "cannot be read")
        shutil.copytree(shared("artifacts", "window-v3", "bodies"), self.root / "bodies", dirs_exist_ok=True)
        (self.root / "programs" / "decode_b1_c16.json").unlink()
        self.refused("decode_b1_c16.json", "programPath")

    def test_a_program_that_disagrees(self) -> None:
        path = self.root / "programs" / "decode_b1_c16.json"
        program = json.loads(path.read_text())
        for key, value in (
            ("bodyHash", "0" * 64),
            ("inputs", program["inputs"][1:]),
            ("outputs", [{"dtype": "f32", "dims": [1, 1, 63], "axisNames": []}, *program["outputs"][1:]]),
            ("meshRequirement", "mesh-2x2"),
        ):
            with self.subTest(key):
                path.write_text(json.dumps({**program, key: value}))
                self.refused("decode_b1_c16.json", key)

    def test_a_body_that_disagrees_with_its_entry(self) -> None:
        def swap(document: Any) -> None:
            first, second = document["entries"][0], document["entries"][1]
            for key in ("bodyPath", "bodyHash"):
                first[key], second[key] = second[key], first[key]

        self.edit(swap)
        for name in ("decode_b1_c16", "decode_b1_c32"):
            path = self.root / "programs" / f"{name}.json"
            program = json.loads(path.read_text())
            other = [
                entry
                for entry in json.loads(self.manifest.read_text())["entries"]
                if entry["programPath"].endswith(path.name)
            ]
            path.write_text(json.dumps({**program, "bodyHash": other[0]["bodyHash"]}))
        self.refused("@main input 2 (blockTables)", "differs from the manifest")

    def test_weights_missing_short_or_long(self) -> None:
        data = self.weight().read_bytes()
        for change, words in (
            (data[:-1], ["wrong size", f"{len(data)} bytes"]),
            (data + b"\0", ["wrong size"]),
            (b"", ["wrong size"]),
        ):
            self.weight().write_bytes(change)
            self.refused("0003_kProj0.bin", *words)
        self.weight().unlink()
        self.refused("0003_kProj0.bin", "cannot be read")

    def test_a_weight_with_one_byte_changed_is_found_when_asked(self) -> None:
        data = bytearray(self.weight().read_bytes())
        data[7] ^= 1
        self.weight().write_bytes(data)
        open_artifact(self.root)
        self.refused("0003_kProj0.bin", "not the ones that were exported", verify=True)

    def test_a_weight_that_shrinks_after_opening_is_no_bus_error(self) -> None:
        artifact = open_artifact(self.root)
        self.weight().write_bytes(b"short")
        with self.assertRaisesRegex(ArtifactError, "wrong size"):
            artifact.map_weight(artifact.manifest.weights[3])

    def test_weights_mapped_ahead(self) -> None:
        artifact = open_artifact(self.root)
        weight = artifact.manifest.weights[3]
        artifact.map_ahead()
        first, second = artifact.map_weight(weight), artifact.map_weight(weight)
        self.assertIsNot(first, second)
        for data in (first, second):
            with data:
                self.assertEqual(bytes(data), self.weight().read_bytes())
        self.weight().write_bytes(b"short")
        with self.assertRaisesRegex(ArtifactError, "wrong size"):
            artifact.map_ahead()
        sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": artifact.manifest.weight_bytes() * 2 // 4096 - 1}
        with mock.patch("os.sysconf", sizes.__getitem__):
            artifact.map_ahead()  # more than half of the memory: nothing is mapped, so nothing is found short

    def test_paths_that_leave_the_directory(self) -> None:
        target = self.outside / "secret.bin"
        shutil.copyfile(self.weight(), target)
        for path in ("../secret.bin", str(target), "weights/../../secret.bin", "weights/\0.bin"):
            with self.subTest(path):
                self.edit(lambda document, path=path: document["weights"]["table"][3].update(path=path))
                self.refused("weights.table[3].path", "may not leave")
        self.edit(lambda document: document["weights"]["table"][3].update(path="weights/0003_kProj0.bin"))
        self.weight().unlink()
        self.weight().symlink_to(target)
        self.refused("0003_kProj0.bin", "symbolic link leaves")

    def test_links_inside_and_loops(self) -> None:
        moved = self.weight().rename(self.root / "weights" / "moved.bin")
        self.weight().symlink_to("moved.bin")
        open_artifact(self.root)
        moved.unlink()
        moved.symlink_to("0003_kProj0.bin")
        self.refused("0003_kProj0.bin", "cannot be read")

    def test_what_is_not_a_regular_file(self) -> None:
        self.weight().unlink()
        os.mkfifo(self.weight())
        self.refused("0003_kProj0.bin", "not a regular file")

    def test_the_manifest_itself_may_not_be_a_link_to_elsewhere(self) -> None:
        moved = self.manifest.rename(self.outside / "manifest.json")
        self.manifest.symlink_to(moved)
        self.refused("symbolic link leaves")


if __name__ == "__main__":
    unittest.main()
