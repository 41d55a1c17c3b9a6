"""Quantising to i8 against the definition in exact arithmetic, and what cannot be quantised."""

from __future__ import annotations

import json
import math
import pathlib
import random
import struct
import tempfile
import unittest
from array import array
from fractions import Fraction

from tests.support import load_json
from tests.tiny_checkpoint import CONFIG, pack, shapes
from tlaloc_serve.artifact.store import open_artifact
from tlaloc_serve.errors import ArtifactError, ExportError
from tlaloc_serve.export.checkpoint import open_checkpoint
from tlaloc_serve.export.quantise import quantise_rows
from tlaloc_serve.export.write import ExportOptions, export_checkpoint, plan_export


def f32(number: float) -> float:
    return float(struct.unpack("<f", struct.pack("<f", number))[0])


class Rows(unittest.TestCase):
    def test_the_definition(self) -> None:
        draw = random.Random(11)
        for inner in (1, 2, 3, 64, 577):
            for spread in (1e-44, 1e-38, 1e-3, 1.0, 3e38):
                rows = [[f32(draw.uniform(-spread, spread)) for _ in range(inner)] for _ in range(5)]
                rows.append([0.0] * inner)
                rows.append([-spread] * inner)
                found = quantise_rows(array("f", [x for row in rows for x in row]).tobytes(), inner)
                assert found is not None
                values, scales = array("b", bytes(found.values)), array("f", found.scales)
                self.assertEqual((len(values), len(scales)), (inner * len(rows), len(rows)))
                for number, row in enumerate(rows):
                    largest, scale = max(map(abs, row)), scales[number]
                    self.assertEqual(scale, f32(largest / 127) if largest / 127 >= 2.0**-126 else 0.0)
                    for weight, q in zip(row, values[number * inner :], strict=False):
                        self.assertLessEqual(abs(q), 127)
                        if scale == 0.0:
                            self.assertEqual(q, 0)
                        elif largest > 1e-36:  # below, the scale itself has few digits
                            off = abs(Fraction(weight) / Fraction(scale) - q)
                            self.assertLessEqual(off, Fraction(1, 2) + Fraction(1, 10**6))

    def test_ties_go_to_even(self) -> None:
        found = quantise_rows(array("f", [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]).tobytes(), 7)
        assert found is not None
        self.assertEqual(list(array("b", bytes(found.values))), [127, 0, 2, 2, 0, -2, -2])
        self.assertEqual(found.error, 6 * 0.25)

    def test_what_is_not_finite_wherever_it_stands(self) -> None:
        for bad in (math.nan, math.inf, -math.inf, -math.nan):
            for place in range(12):
                numbers = array("f", [1.0, -2.0, 0.5] * 4)
                numbers[place] = bad
                self.assertIsNone(quantise_rows(numbers.tobytes(), 6), (bad, place))


class Export(unittest.TestCase):
    def setUp(self) -> None:
        held = tempfile.TemporaryDirectory()
        self.addCleanup(held.cleanup)
        self.folder = pathlib.Path(held.name)

    def export(self, out: str, spoil: str = "") -> pathlib.Path:
        draw = random.Random(3)
        tensors = {}
        for name, dims in shapes(CONFIG).items():
            data = array("f", [draw.gauss(0, 0.1) for _ in range(math.prod(dims))])
            if name == spoil:
                data[len(data) // 2] = math.nan
            tensors[name] = ("F32", dims, data.tobytes())
        checkpoint = self.folder / "checkpoint"
        checkpoint.mkdir(exist_ok=True)
        (checkpoint / "config.json").write_text(json.dumps(CONFIG))
        (checkpoint / "model.safetensors").write_bytes(pack(tensors))
        plan = plan_export(open_checkpoint(str(checkpoint)), ExportOptions(context=(64,), weights="int8"))
        export_checkpoint(plan, str(self.folder / out))
        return self.folder / out

    def test_the_artifact(self) -> None:
        first, second = (self.export(out) for out in ("one", "two"))
        texts = [(folder / "tlaloc-serving.json").read_bytes() for folder in (first, second)]
        self.assertEqual(*texts)
        manifest = open_artifact(first, verify_weights=True).manifest
        self.assertEqual(manifest.model.dtype, "i8")
        names = [weight.name for weight in manifest.weights]
        self.assertEqual(names[:5], ["embedTokens", "embedTokensScale", "inputNorm0", "qkvProj0", "qkvProjScale0"])
        for weight in manifest.weights:
            error = weight.quantisation_error
            self.assertEqual(error is not None, weight.type.dtype == "i8")
            # A uniform error of one step, 2 / 254 of the largest of a few dozen numbers: 0.3 to 1 % of their size.
            self.assertTrue(error is None or 0.003 < error < 0.01, (weight.name, error))

    def test_a_nan_is_refused_by_name_and_leaves_nothing(self) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        with self.assertRaisesRegex(ExportError, f"model.safetensors: {name}: a number is not finite.*f32 or bf16"):
            self.export("bad", spoil=name)
        self.assertEqual([path.name for path in self.folder.iterdir()], ["checkpoint"])

    def test_a_manifest_that_reports_nonsense(self) -> None:
        out = self.export("one")
        document = load_json(out / "tlaloc-serving.json")
        for bad in (-0.1, True, "0.1", [0.1]):
            document["weights"]["table"][0]["quantisationError"] = bad
            (out / "tlaloc-serving.json").write_text(json.dumps(document))
            with self.assertRaisesRegex(ArtifactError, r"weights.table\[0\].quantisationError: wrong type"):
                open_artifact(out)


if __name__ == "__main__":
    unittest.main()
