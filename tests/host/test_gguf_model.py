"""A GGUF file as a checkpoint: config, names, row order, and the refusal of what would change the arithmetic."""

from __future__ import annotations

import os
import struct
import tempfile
import unittest
from typing import Any

from tests.gguf_writer import Described, gguf
from tlaloc_serve.artifact.manifest import TensorType
from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.config import ModelConfig, read_config
from tlaloc_serve.export.gguf import GgufFile
from tlaloc_serve.export.gguf_model import model_config, model_pieces, rope_divisors, tensor_names
from tlaloc_serve.export.staging import Job, stage

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 4, 2, 8, 32, 24, 7


def floats(*dims: int, start: int = 0) -> list[float]:
    count = 1
    for dim in dims:
        count *= dim
    return [float(start + index) for index in range(count)]


def tensor(name: str, *dims: int, start: int = 0) -> Described:
    return Described(name, dims, "F32", struct.pack(f"<{len(floats(*dims))}f", *floats(*dims, start=start)))


def metadata(architecture: str = "llama", **more: Any) -> dict[str, Any]:
    """`more` are keys below the architecture, with __ for a dot; None takes one away."""
    keys: dict[str, Any] = {
        "context_length": 64, "embedding_length": HIDDEN, "block_count": 1, "feed_forward_length": INNER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "rope.dimension_count": HEAD_DIM,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 50000.0,
    }  # fmt: skip
    keys.update({key.replace("__", "."): value for key, value in more.items()})
    values = {f"{architecture}.{key}": value for key, value in keys.items() if value is not None}
    return {"general.architecture": architecture, "general.name": "m", **values}


def tensors(*, biases: tuple[str, ...] = (), norms: bool = False, head: bool = False) -> list[Described]:
    rows = {"attn_q": HEADS * HEAD_DIM, "attn_k": KV_HEADS * HEAD_DIM, "attn_v": KV_HEADS * HEAD_DIM,
            "attn_output": HIDDEN, "ffn_gate": INNER, "ffn_up": INNER, "ffn_down": HIDDEN}  # fmt: skip
    columns = {"attn_output": HEADS * HEAD_DIM, "ffn_down": INNER}
    made = [tensor("token_embd.weight", VOCAB, HIDDEN), tensor("output_norm.weight", HIDDEN)]
    made += [tensor(f"blk.0.{norm}.weight", HIDDEN) for norm in ("attn_norm", "ffn_norm")]
    made += [tensor(f"blk.0.{name}.weight", size, columns.get(name, HIDDEN)) for name, size in rows.items()]
    made += [tensor(f"blk.0.{name}.bias", rows[name]) for name in biases]
    if norms:
        made += [tensor(f"blk.0.{name}.weight", HEAD_DIM) for name in ("attn_q_norm", "attn_k_norm")]
    if head:
        made.append(tensor("output.weight", VOCAB, HIDDEN, start=5))
    return made


class Files(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.path = os.path.join(self.folder, "model.gguf")

    def open(self, values: dict[str, Any], made: list[Described]) -> GgufFile:
        with open(self.path, "wb") as file:
            file.write(gguf(values, made))
        opened = GgufFile.open(self.path)
        self.addCleanup(opened.close)
        return opened

    def config(self, values: dict[str, Any], made: list[Described]) -> ModelConfig:
        return read_config(model_config(self.open(values, made)), self.path)

    def refuse(self, values: dict[str, Any], message: str, made: list[Described] | None = None) -> None:
        with self.assertRaisesRegex(ExportError, f"model.gguf: {message}"):
            model_config(self.open(values, tensors() if made is None else made))


class Config(Files):
    def test_llama(self) -> None:
        config = self.config(metadata(), tensors())
        self.assertEqual((config.family, config.vocab_size, config.hidden_size), ("llama", VOCAB, HIDDEN))
        self.assertEqual((config.num_heads, config.num_kv_heads, config.head_dim), (HEADS, KV_HEADS, HEAD_DIM))
        self.assertEqual((config.num_layers, config.max_positions, config.intermediate_size), (1, 64, INNER))
        self.assertEqual(struct.pack("<f", config.rms_norm_eps), struct.pack("<f", 1e-5))
        self.assertAlmostEqual(config.inverse_frequencies[1], 50000.0**-0.25, places=7)
        self.assertTrue(config.tied)
        self.assertEqual((config.qkv_bias, config.output_bias, config.mlp_bias), (False, False, False))

    def test_the_head_and_the_biases_are_read_off_the_tensors(self) -> None:
        attention, mlp = ("attn_q", "attn_k", "attn_v", "attn_output"), ("ffn_gate", "ffn_up", "ffn_down")
        config = self.config(metadata(), tensors(head=True, biases=attention + mlp))
        self.assertEqual((config.tied, config.qkv_bias, config.output_bias, config.mlp_bias), (False, True, True, True))

    def test_qwen(self) -> None:
        config = self.config(metadata("qwen2"), tensors(biases=("attn_q", "attn_k", "attn_v")))
        self.assertEqual((config.family, config.qkv_bias, config.output_bias), ("qwen2", True, False))
        values = metadata("qwen3", attention__key_length=6, attention__value_length=6, rope__dimension_count=6)
        qwen3 = self.config(values, tensors(norms=True))
        self.assertEqual((qwen3.family, qwen3.head_dim, qwen3.qkv_bias, qwen3.qk_norm), ("qwen3", 6, False, True))

    def test_defaults_of_llama_cpp(self) -> None:
        values = metadata(attention__head_count_kv=None, rope__freq_base=None, rope__dimension_count=None)
        config = model_config(self.open(values, tensors()))
        self.assertEqual((config["num_key_value_heads"], config["rope_theta"], config["head_dim"]), (HEADS, 10000.0, 8))

    def test_linear_scaling(self) -> None:
        plain = self.config(metadata(), tensors()).inverse_frequencies
        for key in ("rope__scaling__factor", "rope__scale_linear"):
            scaled = self.config(metadata(**{key: 4.0}), tensors()).inverse_frequencies
            self.assertEqual(scaled, tuple(angle / 4 for angle in plain))
        for more in ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, {"rope__scale_linear": 0.0}):
            self.assertEqual(self.config(metadata(**more), tensors()).inverse_frequencies, plain)

    def test_llama3_scaling_is_a_tensor(self) -> None:
        divisors = Described("rope_freqs.weight", (4,), "F32", struct.pack("<4f", 1, 1, 2.5, 8))
        file = self.open(metadata(), [*tensors(), divisors])
        self.assertEqual(rope_divisors(file, HEAD_DIM), (1.0, 1.0, 2.5, 8.0))
        self.assertNotIn("rope_freqs.weight", {piece.tensor for piece in model_pieces(file).values()})
        self.assertIsNone(rope_divisors(self.open(metadata(), tensors()), HEAD_DIM))
        for data, message in ((struct.pack("<4f", 1, 1, 1, 0), "not above 0"), (bytes(12), "not usable")):
            bad = Described("rope_freqs.weight", (len(data) // 4,), "F32", data)
            with self.assertRaisesRegex(ExportError, f"rope_freqs.weight: .*{message}"):
                rope_divisors(self.open(metadata(), [*tensors(), bad]), HEAD_DIM)

    def test_sliding_window(self) -> None:
        config = self.config(metadata(attention__sliding_window=32), tensors())
        self.assertEqual((config.family, config.windows), ("mistral", (32,)))
        self.assertEqual(self.config(metadata(attention__sliding_window=0), tensors()).windows, (None,))
        self.refuse(metadata("qwen2", attention__sliding_window=32), "qwen2.attention.sliding_window: which layers")
        self.assertEqual(self.config(metadata("qwen2", attention__sliding_window=64), tensors()).windows, (None,))


class Refusals(Files):
    def test_architecture(self) -> None:
        for name in ("gemma", "qwen2moe", "phi3"):
            self.refuse(metadata(name), f"general.architecture: not supported, got {name}, want one of llama")

    def test_keys_that_change_the_arithmetic(self) -> None:
        self.refuse(metadata(expert_count=8), "llama.expert_count: changes the arithmetic .*, got 8, want 0")
        self.refuse(metadata(attention__scale=0.1), "llama.attention.scale: changes the arithmetic")
        self.refuse(metadata(logit_scale=0.5), "llama.logit_scale: changes the arithmetic")
        self.refuse(metadata(attention__causal=False), "llama.attention.causal: changes the arithmetic")
        self.refuse(metadata(brand_new=1), "llama.brand_new: a key that is not understood and may change")
        self.refuse(metadata(rope__scaling__type="yarn"), "llama.rope.scaling.type: not supported, got yarn")
        self.refuse(metadata(rope__dimension_count=2), "llama.rope.dimension_count: not the length of a head")
        self.refuse(metadata(attention__value_length=4), "llama.attention.value_length: not the length of a head")

    def test_values_that_cannot_be(self) -> None:
        for key in ("context_length", "embedding_length", "block_count", "attention.head_count", "feed_forward_length"):
            self.refuse(metadata(**{key: None}), f"llama.{key}: missing key, want an integer above 0")
            self.refuse(metadata(**{key: 0}), f"llama.{key}: not usable, got 0")
            self.refuse(metadata(**{key: [1, 1]}), f"llama.{key}: not usable, got array")
        self.refuse(metadata(block_count=1 << 31), "llama.block_count: more layers than tensors")
        self.refuse(metadata(attention__layer_norm_rms_epsilon=None), "llama.attention.layer_norm_rms_epsilon: missing")
        self.refuse(metadata(rope__freq_base=-1.0), "llama.rope.freq_base: not usable")

    def test_tensors(self) -> None:
        self.refuse(metadata(), "token_embd.weight: missing tensor", [tensor("x", 2)])
        self.refuse(metadata(), "blk.0.attn_q.bias: biases on some", tensors(biases=("attn_q", "attn_k", "attn_v")))
        self.refuse({**metadata(), "tokenizer.ggml.tokens": ["a"]}, "tokenizer.ggml.tokens: disagrees .* got 1, want 7")
        for name in ("blk.0.attn_qkv.weight", "blk.1.attn_q.weight", "blk.0.ffn_gate_inp.weight", "position.weight"):
            with self.assertRaisesRegex(ExportError, f"{name}: a tensor that a llama model has no use for"):
                model_pieces(self.open(metadata(), [*tensors(), tensor(name, 4)]))
        odd = Described("blk.0.attn_q.weight", (12, HIDDEN), "F32", bytes(4 * 12 * HIDDEN))
        with self.assertRaisesRegex(ExportError, "attn_q.weight: rows are no whole number of pairs a head"):
            model_pieces(self.open(metadata(), [odd]))


class Tensors(Files):
    def test_names(self) -> None:
        names = tensor_names(2)
        self.assertEqual(names["model.layers.1.self_attn.o_proj.weight"], "blk.1.attn_output.weight")
        self.assertEqual(names["lm_head.weight"], "output.weight")
        self.assertNotIn("model.layers.0.input_layernorm.bias", names)
        self.assertEqual(len(set(names.values())), len(names))

    def rows_of(self, architecture: str, name: str) -> list[float]:
        """The first number of each row of a staged tensor, whose rows are numbered in the file's order."""
        biases = ("attn_q", "attn_k", "attn_v", "attn_output")
        piece = model_pieces(self.open(metadata(architecture), tensors(biases=biases)))[name]
        path = os.path.join(self.folder, "weight.bin")
        stage(Job(path, TensorType("f32", piece.dims), (piece,)))
        with open(path, "rb") as file:
            data = file.read()
        os.remove(path)
        width = 1 if len(piece.dims) == 1 else piece.dims[1]
        return [value / width for value in struct.unpack(f"<{len(data) // 4}f", data)[::width]]

    def test_llama_rows_of_q_and_k_are_put_back(self) -> None:
        # The converter turns the rows 0 to 7 of a head into 0 4 1 5 2 6 3 7. Here the file's rows are numbered.
        head = [0, 2, 4, 6, 1, 3, 5, 7]
        query = [8 * index + row for index in range(HEADS) for row in head]
        key = [8 * index + row for index in range(KV_HEADS) for row in head]
        for kind in ("weight", "bias"):
            with self.subTest(kind):
                self.assertEqual(self.rows_of("llama", f"model.layers.0.self_attn.q_proj.{kind}"), query)
                self.assertEqual(self.rows_of("llama", f"model.layers.0.self_attn.k_proj.{kind}"), key)
                self.assertEqual(self.rows_of("llama", f"model.layers.0.self_attn.v_proj.{kind}"), list(range(16)))

    def test_qwen_rows_stay(self) -> None:
        for architecture in ("qwen2", "qwen3"):
            self.assertEqual(self.rows_of(architecture, "model.layers.0.self_attn.q_proj.weight"), list(range(32)))


if __name__ == "__main__":
    unittest.main()
