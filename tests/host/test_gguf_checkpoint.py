"""A checkpoint as GGUF against the same checkpoint as safetensors, and whole GGUF files with damage in them.

The GGUF files are made here as llama.cpp's converter makes them: `llama` q and k rows interleaved, llama3 scaling as a
tensor of divisors.
"""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import random
import struct
import tempfile
import time
import unittest
from typing import Any

from tests.gguf_vocab import metadata as vocabulary
from tests.gguf_vocab import tiny_bytes
from tests.gguf_writer import Described, gguf
from tests.support import load_json, shared
from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.checkpoint import Checkpoint, open_checkpoint
from tlaloc_serve.export.gguf_model import tensor_names
from tlaloc_serve.export.layout import plan_weights
from tlaloc_serve.export.staging import Job, Piece, stage

FOLDERS = ("llama3_rope", "llama_bias", "llama_explicit_head_dim", "llama_gqa_untied", "llama_linear_rope",
           "llama_mha_tied", "llama_sharded", "mistral_sliding", "qwen2", "qwen3")  # fmt: skip


def converted(folder: pathlib.Path) -> bytes:
    """The GGUF file of a safetensors checkpoint."""
    config, plain = load_json(folder / "config.json"), open_checkpoint(str(folder))
    architecture = {"mistral": "llama"}.get(config["model_type"], config["model_type"])
    names = tensor_names(plain.config.num_layers)
    made = [described(names[name], piece, plain, architecture) for name, piece in sorted(plain.tensors.items())]
    numbers = plain.config
    keys: dict[str, Any] = {
        "context_length": numbers.max_positions, "embedding_length": numbers.hidden_size,
        "block_count": numbers.num_layers, "feed_forward_length": numbers.intermediate_size,
        "attention.head_count": numbers.num_heads, "attention.head_count_kv": numbers.num_kv_heads,
        "attention.layer_norm_rms_epsilon": numbers.rms_norm_eps, "attention.key_length": numbers.head_dim,
        "attention.value_length": numbers.head_dim, "rope.dimension_count": numbers.head_dim,
    }  # fmt: skip
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    keys["rope.freq_base"] = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = rope.get("rope_type", rope.get("type"))
    if kind == "linear":
        keys["rope.scaling.type"], keys["rope.scaling.factor"] = "linear", float(rope["factor"])
    if kind == "llama3":
        divisors = [divisor(keys["rope.freq_base"] ** (-2 * index / numbers.head_dim), rope)
                    for index in range(numbers.head_dim // 2)]  # fmt: skip
        packed = struct.pack(f"<{len(divisors)}f", *divisors)
        made.append(Described("rope_freqs.weight", (len(divisors),), "F32", packed))
    if numbers.windows[0] is not None:
        keys["attention.sliding_window"] = numbers.windows[0]
    values = {f"{architecture}.{key}": value for key, value in keys.items()}
    return gguf({"general.architecture": architecture, **values}, made)


def described(name: str, piece: Piece, plain: Checkpoint, architecture: str) -> Described:
    with open(piece.path, "rb") as file:
        file.seek(piece.offset)
        data = file.read(piece.byte_length)
    heads = {"attn_q": plain.config.num_heads, "attn_k": plain.config.num_kv_heads}.get(name.split(".")[-2])
    if heads and architecture == "llama":
        size, rows = piece.byte_length // piece.dims[0], piece.dims[0] // heads
        order = [head * rows + side * (rows // 2) + index
                 for head in range(heads) for index in range(rows // 2) for side in (0, 1)]  # fmt: skip
        data = b"".join(data[row * size : row * size + size] for row in order)
    return Described(name, piece.dims, piece.type_name, data)


def divisor(angle: float, rope: dict[str, Any]) -> float:
    """By what llama3 scaling divides an inverse frequency."""
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * angle / (2 * math.pi)
    if turns < low or turns > high:
        return float(factor) if turns < low else 1.0
    smooth = (turns - low) / (high - low)
    return float(1 / ((1 - smooth) / factor + smooth))


class Folder(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.path = os.path.join(self.folder, "model.gguf")

    def write(self, data: bytes) -> str:
        with open(self.path, "wb") as file:
            file.write(data)
        return self.path


class SameAsSafetensors(Folder):
    def hashes(self, checkpoint: Checkpoint, dtype: str) -> dict[str, str]:
        """The hash of each weight file of the artifact."""
        config = checkpoint.config
        path = os.path.join(self.folder, "weight.bin")
        hashes = {}
        for weight in plan_weights(config, config.num_layers, checkpoint.tensors, dtype, checkpoint.where):
            pieces = tuple(checkpoint.tensors[part.tensor] for part in weight.parts)
            hashes[weight.name] = stage(Job(path, weight.type, pieces)).sha256
            os.remove(path)
        return hashes

    def test_weights_and_config_of_every_checkpoint(self) -> None:
        for name in FOLDERS:
            folder = shared("checkpoints", name)
            plain, other = open_checkpoint(str(folder)), open_checkpoint(self.write(converted(folder)))
            with self.subTest(name):
                for dtype in ("f32", "bf16"):
                    self.assertEqual(self.hashes(other, dtype), self.hashes(plain, dtype))
                exact = [dataclasses.replace(config, rms_norm_eps=0.0, inverse_frequencies=(), tied=None)
                         for config in (other.config, plain.config)]  # fmt: skip
                self.assertEqual(*exact)
                self.assertAlmostEqual(other.config.rms_norm_eps, plain.config.rms_norm_eps, places=12)
                pairs = zip(other.config.inverse_frequencies, plain.config.inverse_frequencies, strict=True)
                self.assertLess(max(abs(a / b - 1) for a, b in pairs), 3e-7)


class Damage(Folder):
    def test_bytes_flipped_in_a_whole_checkpoint(self) -> None:
        keys = {"context_length": 8, "embedding_length": 4, "block_count": 1, "feed_forward_length": 4,
                "attention.head_count": 2, "attention.layer_norm_rms_epsilon": 1e-5}  # fmt: skip
        values = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in keys.items()}}
        values.update(vocabulary(tiny_bytes(), "smollm"))
        rows = len(values["tokenizer.ggml.tokens"])
        shapes = {"token_embd": (rows, 4), "output_norm": (4,), "blk.0.attn_norm": (4,), "blk.0.ffn_norm": (4,)}
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            shapes[f"blk.0.{name}"] = (4, 4)
        made = [Described(f"{name}.weight", dims, "F32", bytes(4 * math.prod(dims))) for name, dims in shapes.items()]
        whole = gguf(values, [*made, Described("rope_freqs.weight", (1,), "F32", struct.pack("<f", 1))])
        open_checkpoint(self.write(whole))
        rng = random.Random(5)
        header = len(whole) - sum(len(tensor.data) for tensor in made)
        begin = time.monotonic()
        refused = 0
        for _ in range(600):
            data = bytearray(whole)
            for _ in range(rng.choice((1, 2, 8))):
                data[rng.randrange(header)] = rng.choice((0, 1, 0x7F, 0xFF, rng.randrange(256)))
            try:
                open_checkpoint(self.write(bytes(data)))
            except ExportError as error:
                refused += 1
                self.assertIn(self.path, str(error))
        self.assertGreater(refused, 100)
        self.assertLess(time.monotonic() - begin, 120)


if __name__ == "__main__":
    unittest.main()
