"""Small checkpoints written with the standard library, for tests that damage them or look at every byte."""

from __future__ import annotations

import json
import pathlib
import random
import struct
from collections.abc import Mapping
from typing import Any

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 40,
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10000.0,
}  # fmt: skip
WIDTHS = {"F32": 4, "F16": 2, "BF16": 2, "I64": 8, "F8_E4M3": 1, "I4": 1}


def shapes(config: Mapping[str, Any] = CONFIG) -> dict[str, tuple[int, ...]]:
    """The dims of every tensor of a Llama of this config, by name."""
    hidden, wide, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = hidden // config["num_attention_heads"]
    kv = dim * config["num_key_value_heads"]
    result: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, dims in {
            "input_layernorm": (hidden,), "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden),
            "self_attn.v_proj": (kv, hidden), "self_attn.o_proj": (hidden, hidden),
            "post_attention_layernorm": (hidden,), "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden),
            "mlp.down_proj": (hidden, wide),
        }.items():  # fmt: skip
            result[f"model.layers.{layer}.{name}.weight"] = dims
    result["model.norm.weight"] = (hidden,)
    result["lm_head.weight"] = (vocab, hidden)
    return result


def values(dims: tuple[int, ...], seed: int) -> bytes:
    """Random f32 numbers around 0 that bf16 and f16 hold exactly."""
    draw = random.Random(seed)
    count = 1
    for dim in dims:
        count *= dim
    return struct.pack(f"<{count}f", *[draw.randint(-127, 127) / 256 for _ in range(count)])


def narrow(data: bytes, dtype: str) -> bytes:
    """f32 bytes as the bytes of `dtype`, an independent and slow conversion."""
    numbers = struct.unpack(f"<{len(data) // 4}f", data)
    if dtype == "F32":
        return data
    if dtype == "F16":
        return struct.pack(f"<{len(numbers)}e", *numbers)
    return b"".join(struct.pack("<f", number)[2:] for number in numbers)


def pack(tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], metadata: bool = True) -> bytes:
    """A safetensors file of (dtype, dims, bytes) by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}} if metadata else {}
    data = b""
    for name, (dtype, dims, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(dims), "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    return pack_raw(header, data)


def pack_raw(header: object, data: bytes) -> bytes:
    """A safetensors file with this header, whatever it says."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensors(
    config: Mapping[str, Any] = CONFIG, dtypes: tuple[str, ...] = ("F32",)
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The tensors of a Llama of this config; the dtypes take turns."""
    result = {}
    for seed, (name, dims) in enumerate(shapes(config).items()):
        dtype = dtypes[seed % len(dtypes)]
        result[name] = (dtype, dims, narrow(values(dims, seed), dtype))
    return result


def write(
    folder: pathlib.Path,
    config: Mapping[str, Any] = CONFIG,
    content: Mapping[str, tuple[str, tuple[int, ...], bytes]] | None = None,
) -> pathlib.Path:
    """A checkpoint folder with one model.safetensors."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(pack(tensors(config) if content is None else content))
    return folder
