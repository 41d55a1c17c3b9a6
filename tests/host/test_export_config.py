"""config.json: every spelling of one model reads alike, and what would change the numbers is refused by name."""

from __future__ import annotations

import contextlib
import random
import unittest
from typing import Any

from tests import tiny_checkpoint as tiny
from tests.support import load_json, shared
from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.config import ModelConfig, read_config
from tlaloc_serve.export.rope import inverse_frequencies, read_rope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# Inverse frequencies of transformers 5.17 (LlamaRotaryEmbedding.inv_freq, f32), as hex.
TRANSFORMERS = [
    (16, {"rope_type": "default", "rope_theta": 10000.0},
     "0x1.0000000000000p+0 0x1.43d1360000000p-2 0x1.99999a0000000p-4 0x1.030dc60000000p-5 0x1.47ae140000000p-7 "
     "0x1.9e7c700000000p-9 0x1.0624de0000000p-10 0x1.4b96c00000000p-12"),
    (16, {"rope_type": "linear", "factor": 3.0, "rope_theta": 1000000.0},
     "0x1.5555560000000p-2 0x1.e596be0000000p-5 0x1.5967b20000000p-7 0x1.eb61a00000000p-10 0x1.5d867e0000000p-12 "
     "0x1.f13e320000000p-15 0x1.61b1da0000000p-17 0x1.f72cae0000000p-20"),
    (32, {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3},
     "0x1.0000000000000p+0 0x1.c2ef780000000p-2 0x1.8d27600000000p-3 0x1.5dc95a0000000p-4 0x1.3411900000000p-5 "
     "0x1.0f53860000000p-6 0x1.ddee9e0000000p-8 0x1.a4ee400000000p-9 0x1.132ba40000000p-11 0x1.46831a0000000p-14 "
     "0x1.1f91f00000000p-15 0x1.fa8b860000000p-17 0x1.be21880000000p-18 0x1.88ec200000000p-19 0x1.5a0f4e0000000p-20 "
     "0x1.30c94e0000000p-21"),
    (16, {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3, "original_max_position_embeddings": 32},
     "0x1.0000000000000p+0 0x1.888f800000000p-4 0x1.99999a0000000p-7 0x1.030dc60000000p-8 0x1.47ae140000000p-10 "
     "0x1.9e7c700000000p-12 0x1.0624de0000000p-13 0x1.4b96c00000000p-15"),
]  # fmt: skip


def read(**changes: Any) -> ModelConfig:
    """The tiny config with changes; a value of `...` removes the key."""
    merged = {**tiny.CONFIG, **changes}
    return read_config({key: value for key, value in merged.items() if value is not ...}, "config.json")


class Config(unittest.TestCase):
    def refused(self, *words: str, **changes: Any) -> None:
        with self.assertRaises(ExportError) as caught:
            read(**changes)
        for word in ("config.json", *words):
            self.assertIn(word, str(caught.exception))

    def test_both_spellings_of_every_checkpoint_read_alike(self) -> None:
        folders = sorted(path.parent for path in shared("checkpoints").glob("*/config.alt_spelling.json"))
        self.assertEqual(len(folders), 10)
        for folder in folders:
            with self.subTest(folder.name):
                one, other = (read_config(load_json(folder / name), name)
                              for name in ("config.json", "config.alt_spelling.json"))  # fmt: skip
                self.assertEqual(one, other)

    def test_defaults_of_absent_keys(self) -> None:
        plain = read(num_key_value_heads=..., tie_word_embeddings=..., rms_norm_eps=..., rope_theta=...,
                     max_position_embeddings=...)  # fmt: skip
        self.assertEqual((plain.num_kv_heads, plain.head_dim, plain.tied, plain.rms_norm_eps, plain.max_positions),
                         (4, 4, None, 1e-6, 2048))  # fmt: skip
        self.assertEqual(plain.inverse_frequencies, inverse_frequencies(read_rope({"rope_theta": 1e4}, ""), 4))
        mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "num_attention_heads": 8}
        self.assertEqual(read(**mistral, num_key_value_heads=...).num_kv_heads, 8)
        self.assertEqual(read(**mistral).windows, (4096, 4096))
        qwen3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
        self.assertEqual(
            (read(**qwen3).head_dim, read(**qwen3).windows, read(**qwen3).qk_norm), (128, (None, None), True)
        )

    def test_the_architecture_alone_names_the_family(self) -> None:
        self.assertEqual(read(model_type=...).family, "llama")
        self.assertEqual(read(architectures=...).family, "llama")

    def test_biases(self) -> None:
        def biases(**changes: Any) -> tuple[bool, bool, bool]:
            config = read(**changes)
            return config.qkv_bias, config.output_bias, config.mlp_bias

        self.assertEqual(biases(), (False, False, False))
        self.assertEqual(biases(attention_bias=True), (True, True, False))
        self.assertEqual(biases(mlp_bias=True), (False, False, True))
        self.assertEqual(biases(model_type="qwen2", architectures=["Qwen2ForCausalLM"]), (True, False, False))
        self.assertEqual(
            biases(model_type="qwen3", architectures=["Qwen3ForCausalLM"], attention_bias=True), (True, True, False)
        )
        self.refused("attention_bias", model_type="mistral", architectures=["MistralForCausalLM"], attention_bias=True)

    def test_sliding_windows(self) -> None:
        qwen = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "sliding_window": 16}
        self.assertEqual(read(**qwen, use_sliding_window=False, max_window_layers=1).windows, (None, None))
        self.assertEqual(read(**qwen, use_sliding_window=True, max_window_layers=1).windows, (None, 16))
        self.assertEqual(read(**qwen, use_sliding_window=True, max_window_layers=0).windows, (16, 16))
        kinds = ["sliding_attention", "full_attention"]
        self.assertEqual(read(**qwen, use_sliding_window=True, layer_types=kinds).windows, (16, None))
        self.refused("layer_types", **qwen, layer_types=kinds)
        self.refused("layer_types", **qwen, layer_types=["full_attention"])
        self.refused("layer_types", **qwen, layer_types=["full_attention", "chunked_attention"])
        mistral = {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}
        self.assertEqual(read(**mistral, sliding_window=None).windows, (None, None))
        self.refused("layer_types", **mistral, sliding_window=8, layer_types=kinds)
        self.refused("sliding_window", sliding_window=16)
        self.refused("sliding_window", **mistral, sliding_window=0)

    def test_what_changes_the_arithmetic_is_refused_by_name(self) -> None:
        for key, value in {
            "hidden_act": "gelu", "quantization_config": {"quant_method": "gptq"}, "quantization": {"bits": 4},
            "num_experts": 8, "num_local_experts": 8, "pretraining_tp": 2, "partial_rotary_factor": 0.5,
            "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "residual_multiplier": 0.22,
            "embedding_multiplier": 12.0, "logits_scaling": 8.0, "attention_multiplier": 0.01, "rope_interleaved": True,
            "no_rope_layers": [1, 0], "query_pre_attn_scalar": 256, "scale_depth": 1.4, "some_new_factor": 0.5,
            "compression_config": {"format": "int-quantized"},
        }.items():  # fmt: skip
            with self.subTest(key):
                self.refused(key, **{key: value})

    def test_what_changes_nothing_passes(self) -> None:
        plain = read()
        for key, value in {
            "torch_dtype": "float16", "dtype": "float32", "transformers_version": "4.31.0", "use_cache": True,
            "initializer_range": 0.02, "pad_token_id": 0, "image_token_id": 7, "_name_or_path": "x",
            "attention_dropout": 0.1, "resid_pdrop": 0.1, "pretraining_tp": 1, "rope_interleaved": False,
            "is_llama_config": True,
            "transformers.js_config": {"dtype": "q4"}, "quantization_config": None, "num_experts": 0,
            "some_new_switch": False, "some_new_list": [], "partial_rotary_factor": 1.0,
        }.items():  # fmt: skip
            with self.subTest(key):
                self.assertEqual(read(**{key: value}), plain)

    def test_values_that_cannot_be(self) -> None:
        for key, value in {
            "hidden_size": 18, "num_key_value_heads": 3, "num_hidden_layers": 0, "vocab_size": "40", "head_dim": 5,
            "intermediate_size": True, "num_attention_heads": 1e3, "rms_norm_eps": "1e-5", "tie_word_embeddings": "no",
            "max_position_embeddings": -1, "model_type": "gpt2", "architectures": ["LlamaModel"],
        }.items():  # fmt: skip
            with self.subTest(key):
                self.refused(key, **{key: value})
        for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"):
            with self.subTest(key):
                self.refused(key, "missing key", **{key: ...})
        self.refused(
            "model_type", "architecture not supported", model_type="mixtral", architectures=["MixtralForCausalLM"]
        )

    def test_a_value_of_any_kind_is_read_or_refused_never_a_crash(self) -> None:
        draw = random.Random(11)
        kinds: list[Any] = [
            None,
            True,
            False,
            0,
            -3,
            1.5,
            2**70,
            "",
            "x",
            [],
            [3],
            [[1]],
            [{}],
            {},
            {"a": {}},
            {"type": []},
        ]
        keys = [*tiny.CONFIG, "rope_scaling", "rope_parameters", "layer_types", "sliding_window", "use_sliding_window",
                "head_dim", "attention_bias", "num_experts", "anything"]  # fmt: skip
        for _ in range(3000):
            changes = {draw.choice(keys): draw.choice(kinds) for _ in range(draw.randint(1, 3))}
            if draw.random() < 0.5:
                changes["model_type"], changes["architectures"] = draw.choice(("qwen2", "qwen3", "mistral")), []
            with contextlib.suppress(ExportError):
                self.assertIsInstance(read(**changes), ModelConfig)


class Rope(unittest.TestCase):
    def test_inverse_frequencies_are_those_of_transformers(self) -> None:
        for head_dim, rope, golden in TRANSFORMERS:
            with self.subTest(rope["rope_type"]):
                want = [float.fromhex(text) for text in golden.split()]
                self.assertEqual(list(inverse_frequencies(read_rope({"rope_parameters": rope}, ""), head_dim)), want)

    def test_every_spelling(self) -> None:
        want = {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}
        scaling = {"rope_type": "llama3", **LLAMA3}
        for config in (
            {"rope_theta": 5e5, "rope_scaling": scaling},
            {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **LLAMA3}},
            {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3}},
            {"rope_parameters": {**scaling, "rope_theta": 5e5}},
            {"rope_parameters": {**scaling, "rope_theta": 5e5}, "rope_scaling": scaling, "rope_theta": 5e5},
            {"rope_parameters": {"full_attention": {**scaling, "rope_theta": 5e5}}},
            {"rope_theta": 5e5, "rope_scaling": {**scaling, "partial_rotary_factor": 1.0}},
        ):
            self.assertEqual(read_rope(config, "c"), want)
        self.assertEqual(
            read_rope({"rope_scaling": None, "rope_theta": 7.0}, "c"), {"rope_type": "default", "rope_theta": 7.0}
        )
        self.assertEqual(read_rope({}, "c"), {"rope_type": "default", "rope_theta": 10000.0})
        self.assertEqual(
            read_rope({"rope_scaling": {"type": "linear", "factor": 2}}, "c"),
            {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2},
        )

    def test_refused_by_name(self) -> None:
        linear = {"type": "linear", "factor": 2.0}
        for config, word in (
            ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
            ({"rope_parameters": {"rope_type": "longrope"}}, "longrope"),
            ({"rope_scaling": {"rope_type": "mrope", "mrope_section": [1]}}, "mrope"),
            ({"rope_scaling": {"type": "linear"}}, "factor"),
            ({"rope_scaling": {"factor": 2.0}}, "factor"),
            ({"rope_scaling": {**linear, "attention_factor": 1.2}}, "attention_factor"),
            ({"rope_scaling": {**linear, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
            ({"rope_scaling": {**linear, "rope_type": "llama3"}}, "disagrees"),
            ({"rope_scaling": linear, "rope_parameters": {"rope_type": "default"}}, "disagrees"),
            ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, "disagrees"),
            ({"rope_parameters": {"full_attention": linear, "sliding_attention": {"type": "default"}}}, "disagrees"),
            ({"rope_scaling": {"type": "linear", "factor": -1}}, "factor"),
            ({"rope_scaling": {"type": "linear", "factor": True}}, "factor"),
            ({"rope_scaling": [2.0]}, "rope_scaling"),
            ({"rope_theta": "10000"}, "rope_theta"),
            ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ):
            with self.subTest(word), self.assertRaises(ExportError) as caught:
                read_rope(config, "config.json")
            self.assertIn(word, str(caught.exception))
            self.assertIn("config.json", str(caught.exception))


if __name__ == "__main__":
    unittest.main()
