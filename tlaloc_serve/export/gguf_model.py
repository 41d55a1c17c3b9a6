"""A GGUF file as a HuggingFace checkpoint: its config in config.json's keys, its tensors under transformers' names.

Rules: architectures llama, qwen2 and qwen3; another is refused by name. Every `<architecture>.*` key is understood,
known to change nothing, or refused by name, and so is every tensor. Sizes that the tensors show (vocabulary, biases,
a tied head) are read off the tensors. Numbers that GGUF keeps in f32 (epsilon, rope base) stay those f32 values.
llama.cpp stores the q and k rows of `llama` for a rotation of neighbouring pairs: `Piece.head_rows` says where the rows
have to be put back. The rows of qwen2 and qwen3 are as transformers has them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.dequantise import dequantise
from tlaloc_serve.export.gguf import BLOCKS, GgufFile, GgufTensor
from tlaloc_serve.export.staging import Piece

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
ROPE_FREQS = "rope_freqs.weight"

_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight"}  # fmt: skip
_LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
          "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
          "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate",
          "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}  # fmt: skip

# Keys below `<architecture>.`: those read here, and those that a converter writes and nothing depends on.
_READ = {"context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size",
         "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
         "attention.layer_norm_rms_epsilon", "attention.sliding_window", "rope.freq_base", "rope.dimension_count",
         "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear"}  # fmt: skip
_HARMLESS = {"tensor_data_layout", "rope.scaling.finetuned", "rope.scaling.original_context_length"}
# Keys that would change the arithmetic, with the values at which they do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "expert_count": (0,), "expert_used_count": (0,), "attention.causal": (True,), "logit_scale": (0.0, 1.0),
    "attention.scale": (0.0,), "rope.scaling.attn_factor": (1.0,), "use_parallel_residual": (False,),
    "attention.clamp_kqv": (0.0,), "attention.max_alibi_bias": (0.0,), "pooling_type": (0,),
}  # fmt: skip


class _Keys:
    """The metadata of one architecture, with errors that name the file and the whole key."""

    def __init__(self, where: str, architecture: str, metadata: Mapping[str, Any]):
        self.where = where
        self.prefix = architecture + "."
        self.metadata = metadata

    def get(self, key: str) -> Any:
        return self.metadata.get(self.prefix + key)

    def refuse(self, key: str, what: str, **more: Any) -> ExportError:
        return ExportError(f"{self.where}: {self.prefix}{key}", what, **more)

    def integer(self, key: str, otherwise: int | None = None) -> int:
        value = self.get(key)
        if value is None and otherwise is not None:
            return otherwise
        if type(value) is not int or value < 1:
            what = "missing key" if value is None else "not usable"
            raise self.refuse(key, what, got=value, want="an integer above 0")
        return value

    def number(self, key: str, otherwise: float | None = None) -> float:
        value = self.get(key)
        if value is None and otherwise is not None:
            return otherwise
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            what = "missing key" if value is None else "not usable"
            raise self.refuse(key, what, got=value, want="a number above 0")
        return float(value)


def model_config(file: GgufFile) -> dict[str, Any]:
    """What config.json would say. Raises ExportError for an architecture, key or combination that is not supported.

    A `llama` file with a sliding window is given as `mistral`, which computes the same with that window. llama3
    scaling is not in the config but in `rope_divisors`.
    """
    architecture = _architecture(file)
    keys = _Keys(file.path, architecture, file.metadata)
    _refuse_unknown(keys)
    heads, hidden = keys.integer("attention.head_count"), keys.integer("embedding_length")
    config: dict[str, Any] = {
        "model_type": architecture,
        "architectures": [ARCHITECTURES[architecture]],
        "vocab_size": _vocab_size(file),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": _layers(file, keys),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": _head_dim(keys, hidden, heads),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.integer("context_length"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    factor = _linear_factor(keys)
    if factor != 1.0:
        config["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    if architecture == "llama":
        config["attention_bias"] = _all_or_none(file, ("attn_q", "attn_k", "attn_v", "attn_output"))
        config["mlp_bias"] = _all_or_none(file, ("ffn_gate", "ffn_up", "ffn_down"))
    _add_window(keys, config)
    return config


def _architecture(file: GgufFile) -> str:
    architecture = file.architecture
    if architecture not in ARCHITECTURES:
        raise ExportError(
            f"{file.path}: general.architecture",
            "not supported",
            got=architecture,
            want=f"one of {', '.join(ARCHITECTURES)}",
        )
    return architecture


def _refuse_unknown(keys: _Keys) -> None:
    for full, value in keys.metadata.items():
        key = full.removeprefix(keys.prefix)
        if key == full or key in _READ or key in _HARMLESS:
            continue
        if key not in _NEUTRAL:
            raise keys.refuse(key, "a key that is not understood and may change the arithmetic", got=str(value)[:60])
        if value not in _NEUTRAL[key]:
            raise keys.refuse(key, "changes the arithmetic and is not supported", got=value, want=_NEUTRAL[key][0])


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ExportError(f"{file.path}: token_embd.weight", "missing tensor", todo="is the file a whole model?")
    rows = embedding.dims[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and len(tokens) != rows:
        raise ExportError(
            f"{file.path}: tokenizer.ggml.tokens",
            "disagrees with token_embd.weight",
            got=len(tokens),
            want=f"{rows} tokens",
        )
    return rows


def _layers(file: GgufFile, keys: _Keys) -> int:
    layers = keys.integer("block_count")
    if layers > len(file.tensors):
        raise keys.refuse("block_count", "more layers than tensors", got=layers, want=f"at most {len(file.tensors)}")
    return layers


def _head_dim(keys: _Keys, hidden: int, heads: int) -> int:
    head_dim = keys.integer("attention.key_length", max(hidden // heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.integer(key, head_dim) != head_dim:
            raise keys.refuse(key, "not the length of a head: not supported", got=keys.get(key), want=head_dim)
    return head_dim


def _linear_factor(keys: _Keys) -> float:
    """The factor of linear rope scaling, 1.0 for none. Without a type, llama.cpp takes a factor as linear."""
    kind = keys.get("rope.scaling.type")
    if kind == "none":
        return 1.0
    if kind not in (None, "linear"):
        raise keys.refuse("rope.scaling.type", "not supported", got=kind, want="none or linear")
    for key in ("rope.scaling.factor", "rope.scale_linear"):
        if keys.get(key) not in (None, 0.0):
            return keys.number(key)
    return 1.0


def _all_or_none(file: GgufFile, names: tuple[str, ...]) -> bool:
    """Whether these matrices of a layer have biases: each of them in layer 0, or none."""
    present = [name for name in names if f"blk.0.{name}.bias" in file.tensors]
    if present and len(present) < len(names):
        raise ExportError(
            f"{file.path}: blk.0.{present[0]}.bias",
            "biases on some matrices only: not supported",
            got=", ".join(present),
            want=f"all of {', '.join(names)}, or none",
        )
    return bool(present)


def _add_window(keys: _Keys, config: dict[str, Any]) -> None:
    if not keys.get("attention.sliding_window"):
        return
    window = keys.integer("attention.sliding_window")
    if config["model_type"] != "llama":
        if window < config["max_position_embeddings"]:
            raise keys.refuse(
                "attention.sliding_window", "which layers it is for is not in the file: not supported", got=window
            )
        return
    if config["attention_bias"] or config["mlp_bias"]:
        raise keys.refuse("attention.sliding_window", "a window beside biases: not supported", got=window)
    del config["attention_bias"], config["mlp_bias"]
    config.update(model_type="mistral", architectures=["MistralForCausalLM"], sliding_window=window)


def rope_divisors(file: GgufFile, head_dim: int) -> tuple[float, ...] | None:
    """By what each of the head_dim / 2 inverse frequencies is divided (llama3 scaling), or None where none is.

    llama.cpp keeps that scaling as the tensor `rope_freqs.weight` and divides base^(-2i/head_dim) by it, in f32.
    """
    tensor = file.tensors.get(ROPE_FREQS)
    if tensor is None:
        return None
    if tensor.dims != (head_dim // 2,) or tensor.type_name not in ("F32", "F16", "BF16"):
        raise ExportError(
            f"{file.path}: {ROPE_FREQS}",
            "not usable",
            got=f"{tensor.type_name} {list(tensor.dims)}",
            want=f"F32 [{head_dim // 2}]",
        )
    with file.data(tensor) as data:
        values = tuple(float(x) for x in memoryview(b"".join(dequantise(tensor.type_name, data, "f32"))).cast("f"))
    if not all(0 < value < float("inf") for value in values):
        raise ExportError(f"{file.path}: {ROPE_FREQS}", "a divisor that is not above 0 and finite")
    return values


def model_pieces(file: GgufFile) -> dict[str, Piece]:
    """The tensors by transformers name. Raises ExportError for a tensor that is not understood.

    `rope_freqs.weight` is left out: it is no weight of the graph, see `rope_divisors`.
    """
    architecture = _architecture(file)
    keys = _Keys(file.path, architecture, file.metadata)
    heads = keys.integer("attention.head_count")
    interleaved = {"attn_q": heads, "attn_k": keys.integer("attention.head_count_kv", heads)}
    theirs = {source: name for name, source in tensor_names(_layers(file, keys)).items()}
    pieces: dict[str, Piece] = {}
    for tensor in file.tensors.values():
        if tensor.name == ROPE_FREQS:
            continue
        if tensor.name not in theirs:
            raise ExportError(f"{file.path}: {tensor.name}", f"a tensor that a {architecture} model has no use for")
        matrix = re.sub(r"blk\.\d+\.|\.(weight|bias)$", "", tensor.name)
        over = interleaved.get(matrix, 0) if architecture == "llama" else 0
        pieces[theirs[tensor.name]] = Piece(
            file.path,
            tensor.name,
            tensor.type_name,
            tensor.dims,
            tensor.offset,
            tensor.nbytes,
            _head_rows(file, tensor, over),
        )
    return pieces


def tensor_names(layers: int) -> dict[str, str]:
    """transformers' name of every tensor these families may have -> GGUF's."""
    names = dict(_TOP)
    for layer in range(layers):
        for ours, theirs in _LAYER.items():
            for kind in ("weight",) if "norm" in ours else ("weight", "bias"):
                names[f"model.layers.{layer}.{ours}.{kind}"] = f"blk.{layer}.{theirs}.{kind}"
    return names


def _head_rows(file: GgufFile, tensor: GgufTensor, heads: int) -> int:
    """Rows a head where they are interleaved over `heads` heads, else 0."""
    if not heads:
        return 0
    rows = tensor.dims[0]
    if rows % (2 * heads):
        raise ExportError(
            f"{file.path}: {tensor.name}",
            "rows are no whole number of pairs a head",
            got=rows,
            want=f"a multiple of {2 * heads}",
        )
    if len(tensor.dims) == 1 and BLOCKS[tensor.type_name][0] > 1:
        raise ExportError(
            f"{file.path}: {tensor.name}",
            "a bias whose elements must be moved is in blocks",
            got=tensor.type_name,
            want="F32, F16 or BF16",
        )
    return rows // heads
