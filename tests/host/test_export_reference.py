"""The reference graph: its weights are the ones other exporters draw, and the committed artifact is what we export."""

from __future__ import annotations

import pathlib
import re
import tempfile
import unittest

from tests.support import REPO, shared
from tlaloc_serve.artifact.store import open_artifact
from tlaloc_serve.export.hlo import round_f32
from tlaloc_serve.export.reference import draw
from tlaloc_serve.export.write import export_reference

COMMITTED = REPO / "examples" / "reference"


def files(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Reference(unittest.TestCase):
    def test_export_is_the_committed_artifact_byte_for_byte(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder, "reference")
            export_reference(str(out))
            self.assertEqual(files(out), files(COMMITTED))

    def test_two_exports_are_byte_identical(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            first, second = pathlib.Path(folder, "a"), pathlib.Path(folder, "b")
            for out in (first, second, first):
                export_reference(str(out))
            self.assertEqual(files(first), files(second))
            self.assertEqual(sorted(path.name for path in pathlib.Path(folder).iterdir()), ["a", "b"])

    def test_six_entries_on_the_ladder(self) -> None:
        artifact = open_artifact(COMMITTED)
        self.assertEqual(
            [entry.id for entry in artifact.manifest.entries],
            [f"decode_b{batch}_c{context}" for batch in (1, 2, 4) for context in (2, 4)],
        )
        for entry in artifact.manifest.entries:
            self.assertEqual(artifact.body(entry).signature.aliases, {5: 1, 6: 2})

    def test_the_manifest_says_what_the_real_one_says(self) -> None:
        ours, real = (open_artifact(path).manifest for path in (COMMITTED, shared("artifacts", "reference-v2-aliased")))
        for field in ("schema", "model_name", "model_hash", "model", "ladder", "weights_format", "weights"):
            self.assertEqual(getattr(ours, field), getattr(real, field), field)
        for mine, theirs in zip(ours.entries, real.entries, strict=True):
            for field in ("id", "cache_key", "program_path", "inputs", "outputs", "donation_pairs"):
                self.assertEqual(getattr(mine, field), getattr(theirs, field), field)

    def test_weights_are_those_of_the_real_artifact(self) -> None:
        body = next(shared("artifacts", "reference-v2", "bodies").glob("*.mlir")).read_text()
        constants = re.findall(r"constant dense<(\[\[.*?\]\])> : tensor<(\d+)x(\d+)xf32>", body)
        self.assertEqual([(int(rows), int(columns)) for _, rows, columns in constants],
                         [(11, 8), (8, 8), (8, 4), (8, 4), (8, 11)])  # fmt: skip
        for seed, (text, rows, columns) in enumerate(constants, 1):
            theirs = [round_f32(float(number)) for number in re.findall(r"-?\d[\d.eE+-]*", text)]
            ours = draw(seed, int(rows) * int(columns))
            self.assertEqual(theirs, ours)


if __name__ == "__main__":
    unittest.main()
