"""The text of the bodies: float literals, only ops of the specification, size, and the same bytes every time."""

from __future__ import annotations

import random
import re
import struct
import subprocess
import sys
import unittest
from unittest import mock

from tests.support import REPO
from tlaloc_serve.artifact.body import check_signature, parse_signature
from tlaloc_serve.artifact.manifest import Model, TensorType
from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.config import ModelConfig, read_config
from tlaloc_serve.export.entries import Point, boundary, make_entry
from tlaloc_serve.export.hlo import Body, f32_text
from tlaloc_serve.export.layout import lay_out
from tlaloc_serve.export.llama import llama_body
from tlaloc_serve.export.target import TARGETS

# Ops of the StableHLO specification that the bodies may use.
OPS = {
    "add", "and", "broadcast_in_dim", "compare", "concatenate", "constant", "convert", "cosine", "divide",
    "dot_general", "exponential", "gather", "iota", "logistic", "maximum", "multiply", "optimization_barrier", "reduce",
    "reduce_precision", "remainder", "reshape", "return", "rsqrt", "scatter", "select", "sine", "slice", "subtract",
    "transpose",
}  # fmt: skip
SMOLLM2 = {
    "model_type": "llama", "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip
# Prints a digest of one large body; run by another interpreter.
DIGEST = """
import hashlib, sys
sys.path.insert(0, {root!r})
from tests.host.test_export_hlo import SMOLLM2, body
text = "".join(body(SMOLLM2, kind, dtype) for kind in ("decode", "prefill") for dtype in ("f32", "bf16"))
print(hashlib.sha256(text.encode()).hexdigest())
"""


def model_of(config: ModelConfig, dtype: str) -> Model:
    return Model(config.vocab_size, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim,
                 config.num_layers, 33, 16, dtype, "f32", (33, 16, config.num_kv_heads, config.head_dim))  # fmt: skip


def body(document: dict[str, object], kind: str, dtype: str = "f32", target: str = "generic", batch: int = 2) -> str:
    """The body of one entry of a model with this config; its signature is checked against the entry's."""
    config = read_config(document, "config.json")
    weights = [slot for plan in lay_out(config, config.num_layers, bool(config.tied), dtype) for slot in plan.slots]
    model, point = model_of(config, dtype), Point(kind, batch, 512, 1 if kind == "decode" else 512)
    slots = boundary(model, point, weights)
    text = llama_body(config, config.num_layers, 16, TARGETS[target], slots, point)
    check_signature(parse_signature(text, "body"), make_entry(model, "hash", point, slots, "0" * 64), "body")
    return text


class Literals(unittest.TestCase):
    def test_known_literals(self) -> None:
        for number, text in ((1.0, "1.0"), (0.1, "0.1"), (1e-5, "1.0e-05"), (-0.0, "-0.0"), (1 / 3, "0.33333334"),
                             (0.5**0.5, "0.70710677"), (3.4028234663852886e38, "3.4028235e+38"),
                             (16777216.0, "16777216.0"), (1e-45, "1.0e-45")):  # fmt: skip
            self.assertEqual(f32_text(number), text)

    def test_shortest_that_reads_back(self) -> None:
        draw = random.Random(3)
        for _ in range(3000):
            (number,) = struct.unpack("<f", struct.pack("<I", draw.getrandbits(32)))
            if number != number or abs(number) == float("inf"):
                with self.assertRaises(ExportError):
                    f32_text(number)
                continue
            text = f32_text(number)
            self.assertRegex(text, r"^-?\d+\.\d*(e[+-]\d+)?$")
            self.assertEqual(struct.pack("<f", float(text)), struct.pack("<f", number))
            digits = len(re.sub(r"e.*|[-.]", "", text.replace(".0e", "e").removesuffix(".0")).strip("0"))
            if digits > 1:
                shorter = float(f"{number:.{digits - 2}e}")
                self.assertNotEqual(struct.pack("<f", shorter), struct.pack("<f", number), text)

    def test_out_of_range(self) -> None:
        with self.assertRaises(ExportError):
            f32_text(1e39)


class Ops(unittest.TestCase):
    def test_operands_that_do_not_fit_are_refused(self) -> None:
        b = Body()
        a, c = b.parameter(TensorType("f32", (2, 3))), b.parameter(TensorType("f32", (3, 2)))
        ints = b.parameter(TensorType("i32", (2, 3)))
        for call in (
            lambda: b.binary("add", a, c),
            lambda: b.binary("add", a, ints),
            lambda: b.dot(a, c, (1, 1)),
            lambda: b.reshape(a, 4),
            lambda: b.slice(a, 1, 2, 4),
            lambda: b.broadcast(a, (2, 4), [0, 1]),
            lambda: b.constant([1.0], TensorType("f32", (2,))),
            lambda: b.select(a, a, a),
            lambda: b.write_slots(a, ints, c),
        ):
            with self.assertRaises(ExportError):
                call()

    def test_constants(self) -> None:
        b = Body()
        value = b.constant([1.0, 2.5, -3.0, 0.1], TensorType("f32", (2, 2)))
        b.constant([7, -1], TensorType("i32", (2,)))
        self.assertIs(b.splat(0.0, TensorType("f32", ())), b.splat(0.0, TensorType("f32", ())))
        text = b.finish([value])
        self.assertIn("dense<[[1.0, 2.5], [-3.0, 0.1]]> : tensor<2x2xf32>", text)
        self.assertIn("dense<[7, -1]> : tensor<2xi32>", text)
        self.assertEqual(text.count("dense<0.0>"), 1)


class Bodies(unittest.TestCase):
    def test_only_ops_of_the_specification(self) -> None:
        families = ({}, {"model_type": "qwen2"}, {"model_type": "qwen3"},
                    {"model_type": "mistral", "sliding_window": 64},
                    {"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 9})  # fmt: skip
        for changes in families:
            for kind in ("decode", "prefill"):
                for dtype in ("f32", "bf16", "i8"):
                    text = body({**SMOLLM2, "num_hidden_layers": 1, **changes}, kind, dtype, batch=1)
                    self.assertLessEqual(set(re.findall(r"(?:stablehlo|chlo|mhlo)\.(\w+)[ (\"]", text)), OPS)
                    self.assertNotIn("custom_call", text)
                    self.assertTrue(text.isascii())

    def test_a_thirty_layer_entry_is_small(self) -> None:
        for kind in ("decode", "prefill"):
            for dtype in ("f32", "bf16", "i8"):
                self.assertLess(len(body(SMOLLM2, kind, dtype)), 600_000)

    def test_a_repeated_layer_is_what_emitting_it_gives(self) -> None:
        windows = {"model_type": "qwen3", "use_sliding_window": True, "sliding_window": 64, "num_hidden_layers": 9,
                   "layer_types": ["full_attention", "full_attention", "sliding_attention"] * 3}  # fmt: skip
        for changes in ({}, {"attention_bias": True, "mlp_bias": True}, windows):
            for kind in ("decode", "prefill"):
                for dtype in ("f32", "bf16", "i8"):
                    document = {**SMOLLM2, "num_hidden_layers": 9, **changes}
                    repeated = body(document, kind, dtype)
                    with mock.patch.object(Body, "section", lambda self, key, operands, emit: tuple(emit())):
                        self.assertEqual(repeated, body(document, kind, dtype))

    def test_matrices_are_multiplied_in_their_dtype(self) -> None:
        for dtype, products in (("f32", 0), ("bf16", 5)):  # qkv, o, gate and up, down, head
            text = body({**SMOLLM2, "num_hidden_layers": 1}, "prefill", dtype)
            narrow = re.findall(r"dot_general .*\(tensor<[\dx]*bf16>, tensor<[\dx]*bf16>\) -> tensor<[\dx]*f32>", text)
            self.assertEqual(len(narrow), products)
            self.assertNotRegex(text, r"dot_general .*-> tensor<[\dx]*bf16>")

    def test_the_forms_of_each_target(self) -> None:
        one_layer = {**SMOLLM2, "num_hidden_layers": 1}
        slabs = r"dot_general .* batching_dims = \[0\] x \[0\], .* : \(tensor<2x\d+x\d+xf32>, tensor<2x"
        for batch in (1, 8):
            generic, cpu, gpu = (body(one_layer, "decode", "f32", name, batch) for name in ("generic", "cpu", "gpu"))
            self.assertEqual(generic, cpu)
            self.assertEqual(len(re.findall(slabs, generic)), 5)  # qkv, o, gate and up, down, head
            self.assertEqual(len(re.findall(slabs, gpu)), 0)
            self.assertIn("optimization_barrier", generic)
            self.assertNotIn("optimization_barrier", gpu)
            self.assertIn(f"tensor<{batch}x3x1x3x512xf32>", gpu)  # scores by KV head

    def test_how_narrow_weights_are_multiplied(self) -> None:
        one_layer = {**SMOLLM2, "num_hidden_layers": 1}
        wide = r"dot_general .*tensor<960x576xf32>.*tensor<1x576xf32>\) -> tensor<960x1xf32>"
        for dtype, batch, widened in (("bf16", 1, True), ("bf16", 8, False), ("i8", 1, True), ("i8", 8, True)):
            with self.subTest(dtype=dtype, batch=batch):
                generic, gpu = (body(one_layer, "decode", dtype, name, batch) for name in ("generic", "gpu"))
                self.assertEqual(f"tensor<960x576x{dtype}>) -> tensor<960x576xf32>" in generic, widened)
                self.assertEqual(bool(re.search(wide, generic)), widened and batch == 1)
                self.assertEqual("reduce_precision" in generic, dtype == "bf16" and batch == 1)
                self.assertIn(f"(tensor<{batch}x576xbf16>, tensor<960x576xbf16>) -> tensor<{batch}x960xf32>", gpu)
                for text in (generic, gpu):  # the result of each product by its scale
                    self.assertEqual(len(re.findall(r"broadcast_in_dim %\d+, dims = \[1\] : \(tensor<960xf32>", text)),
                                     int(dtype == "i8"))  # fmt: skip

    def test_no_piece_of_a_weight_is_large_and_no_row_is_left_out(self) -> None:
        for batch in (1, 8):
            text = body({**SMOLLM2, "num_hidden_layers": 1}, "decode", "i8", batch=batch)
            pieces = re.findall(r"slice %\S+ \[(\d+):(\d+), 0:576\] : \(tensor<49152x576xi8>\)", text)
            bounds = [(int(start), int(stop)) for start, stop in pieces]
            self.assertEqual([start for start, _ in bounds[1:]], [stop for _, stop in bounds[:-1]])
            self.assertEqual((bounds[0][0], bounds[-1][1]), (0, 49152))
            self.assertLessEqual(max(stop - start for start, stop in bounds) * 576, 1.7e6)

    def test_the_same_bytes_in_another_process(self) -> None:
        digests = set()
        for seed in ("0", "1"):
            command = [sys.executable, "-c", DIGEST.format(root=str(REPO))]
            done = subprocess.run(command, env={"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True)
            digests.add(done.stdout)
        self.assertEqual(len(digests), 1)


if __name__ == "__main__":
    unittest.main()
