"""The signature of a body: what its common form and every other form of MLIR say, and what is refused."""

from __future__ import annotations

import unittest

from tlaloc_serve.artifact.body import Signature, parse_signature
from tlaloc_serve.artifact.manifest import TensorType
from tlaloc_serve.errors import ArtifactError


def signature(parameters: str, results: str = "tensor<f32>") -> Signature:
    return parse_signature(f"module {{\n  func.func public @main({parameters}) -> {results} {{\n", "body")


POOL = TensorType("f32", (4, 2))
IDS = TensorType("i32", (1,))


class Forms(unittest.TestCase):
    def test_spellings_of_one_signature(self) -> None:
        common = signature("%0: tensor<4x2xf32> {tf.aliasing_output = 1 : i32}, %1: tensor<1xi32>")
        self.assertEqual(common.inputs, (POOL, IDS))
        self.assertEqual(common.aliases, {0: 1})
        for text in (
            "%arg0: tensor<4x2xf32> {tf.aliasing_output = 1 : i32},\n   %arg1 : tensor<1xi32>",
            '%0: tensor<4x2xf32> {mhlo.sharding = "{replicated}", tf.aliasing_output = 1 : i32}, %1: tensor<1xi32>',
            '%0: tensor<4x2xf32> {tf.aliasing_output = 1 : i32} loc("a, b)"), %1: tensor<1xi32> loc(unknown)',
            '%0: tensor<4x2xf32> {a = {b = "}"}, tf.aliasing_output = 1 : i32}, %1: tensor<1xi32> {c = "x)"}',
            "%0: tensor<4x2xf32> {d = [1, 2], tf.aliasing_output = 1 : i32}, %1: tensor<1xi32>",
        ):
            self.assertEqual(signature(text), common, text)

    def test_results(self) -> None:
        for results in (
            "(tensor<4x2xf32>, tensor<1xi32>)",
            "(tensor<4x2xf32> {jax.result_info = [0]}, tensor<1xi32>)",
            '(tensor<4x2xf32> {jax.result_info = "a{)", b = {}}, tensor<1xi32>)',
        ):
            self.assertEqual(signature("%0: tensor<f32>", results).outputs, (POOL, IDS))
        self.assertEqual(
            signature("%0: tensor<f32>", "tensor<2xui8>").outputs,
            (TensorType("u8", (2,)),),
        )

    def test_no_parameters(self) -> None:
        self.assertEqual(signature("").inputs, ())


class Refused(unittest.TestCase):
    def test_what_cannot_be_read(self) -> None:
        for parameters in (
            "%0: tensor<?x2xf32>",
            "%0: tensor<2xcomplex<f32>>",
            "%0: tensor<2xf33>",
            "%0: !stablehlo.token",
            "tensor<2xf32>",
            "%0: tensor<2xf32> {a",
        ):
            with self.assertRaises(ArtifactError, msg=parameters):
                signature(parameters)

    def test_no_main(self) -> None:
        with self.assertRaisesRegex(ArtifactError, "no `func.func @main"):
            parse_signature("module { func.func @other(%0: tensor<f32>) -> tensor<f32> {", "body")


if __name__ == "__main__":
    unittest.main()
