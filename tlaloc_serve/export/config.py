"""A checkpoint's config.json to the numbers of its graph.

Rules: every key that changes the arithmetic is understood or refused by name. The defaults of absent keys are those
that transformers has for the family. A key that is not known here is refused unless its value switches nothing on
(null, false, an empty string, list or object) or its name is of a kind that never reaches the arithmetic: those in
`_HARMLESS`, and names that start with `_` or end in `_token_id`, `_token_ids`, `_dropout` or `_pdrop`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.rope import inverse_frequencies, read_rope

_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096,
              "attention_bias": True, "use_sliding_window": False, "max_window_layers": 28},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096, "head_dim": 128,
              "attention_bias": False, "use_sliding_window": False, "max_window_layers": 28},
}  # fmt: skip
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM",
                  "qwen3": "Qwen3ForCausalLM"}  # fmt: skip
_UNDERSTOOD = {
    "model_type", "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings",
    "tie_word_embeddings", "hidden_act", "rope_theta", "rope_scaling", "rope_parameters",
    "original_max_position_embeddings", "sliding_window", "layer_types",
}  # fmt: skip
# Keys of other architectures or of a distributed run, with the value that means "off".
_NEUTRAL: dict[str, Any] = {
    "pretraining_tp": 1, "partial_rotary_factor": 1.0, "rotary_pct": 1.0, "attention_multiplier": 1.0,
    "residual_multiplier": 1.0, "embedding_multiplier": 1.0, "logits_scaling": 1.0, "logit_scale": 1.0,
    "num_experts": 0, "num_local_experts": 0, "attention_bias": False, "mlp_bias": False, "is_decoder": True,
}  # fmt: skip
_HARMLESS = {
    "torch_dtype", "dtype", "transformers_version", "use_cache", "initializer_range", "attention_dropout",
    "is_llama_config", "transformers.js_config", "auto_map", "name_or_path", "max_length", "min_length", "do_sample",
    "temperature", "top_k", "top_p", "typical_p", "num_beams", "num_return_sequences", "repetition_penalty",
    "length_penalty", "early_stopping", "diversity_penalty", "num_beam_groups", "id2label", "label2id",
    "chunk_size_feed_forward", "output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate",
    "output_scores", "problem_type", "task_specific_params", "tokenizer_class", "prefix", "finetuning_task",
    "torchscript", "gradient_checkpointing", "attn_implementation", "rope_interleaved", "max_window_layers",
    "use_sliding_window", "unsloth_version", "unsloth_fixed", "model_max_length", "vocab_size_multiple", "pad_token",
    "bos_token", "eos_token", "keys_to_ignore_at_inference", "cross_attention_hidden_size",
    "encoder_no_repeat_ngram_size", "no_repeat_ngram_size", "remove_invalid_values", "tf_legacy_loss", "use_bfloat16",
}  # fmt: skip
_HARMLESS_ENDS = ("_token_id", "_token_ids", "_dropout", "_pdrop")


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a decoder of the Llama shape. `windows` has the sliding window of each layer, or None.

    `tied` is None where the config does not say: then the head is tied exactly if the checkpoint has none.
    `inverse_frequencies` has head_dim / 2 f32 numbers: radians a position.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_positions: int
    tied: bool | None
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    inverse_frequencies: tuple[float, ...]
    windows: tuple[int | None, ...]


class _Reader:
    """The config with the family's defaults, and errors that name the file and the key."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], where: str):
        self.config = config
        self.defaults = defaults
        self.where = where

    def refuse(self, key: str, what: str, *, got: object = None, want: object = None) -> ExportError:
        return ExportError(f"{self.where}: {key}", what, got=got, want=want)

    def get(self, key: str) -> Any:
        """The value of `key`, or the family's default where it is absent; null stays null."""
        return self.config[key] if key in self.config else self.defaults.get(key)

    def integer(self, key: str, otherwise: int | None = None, least: int = 1) -> int:
        value = self.get(key)
        if value is None:
            if otherwise is None:
                raise self.refuse(key, "missing key")
            return otherwise
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 40:
            raise self.refuse(key, "not usable", got=repr(value), want=f"an integer of at least {least}")
        return value

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.refuse(key, "not usable", got=repr(value), want="true or false")
        return value


def read_config(config: Mapping[str, Any], where: str) -> ModelConfig:
    """Read the config of a checkpoint; `where` is its path, for messages. Raises ExportError naming the key."""
    family = _family(config, where)
    reader = _Reader(config, _FAMILY_DEFAULTS[family], where)
    _refuse_unknown(reader, family)
    hidden, heads, layers = (reader.integer(k) for k in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    if reader.get("head_dim") is None and hidden % heads:
        raise reader.refuse(
            "hidden_size",
            "no multiple of num_attention_heads, and there is no head_dim",
            got=hidden,
            want=f"a multiple of {heads}",
        )
    head_dim = reader.integer("head_dim", hidden // heads)
    kv_heads = reader.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.refuse(
            "num_key_value_heads", "does not divide num_attention_heads", got=kv_heads, want=f"a divisor of {heads}"
        )
    if head_dim % 2:
        raise reader.refuse("head_dim", "odd, so that it cannot be rotated", got=head_dim)
    bias = reader.flag("attention_bias")
    tied = reader.get("tie_word_embeddings")
    return ModelConfig(
        family=family,
        vocab_size=reader.integer("vocab_size"),
        hidden_size=hidden,
        intermediate_size=reader.integer("intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_epsilon(reader),
        max_positions=reader.integer("max_position_embeddings"),
        tied=None if tied is None else reader.flag("tie_word_embeddings"),
        qkv_bias=bias or family == "qwen2",  # Qwen2 has these biases whatever attention_bias says, and no other
        output_bias=bias and family in ("llama", "qwen3"),
        mlp_bias=reader.flag("mlp_bias"),
        qk_norm=family == "qwen3",
        inverse_frequencies=inverse_frequencies(read_rope(config, where), head_dim),
        windows=_windows(reader, family, layers),
    )


def _family(config: Mapping[str, Any], where: str) -> str:
    family = config.get("model_type")
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) > 1:
        raise ExportError(f"{where}: architectures", "not usable", got=names, want="a list of one name")
    if family is None and names:
        family = next((key for key, name in _ARCHITECTURES.items() if name == names[0]), None)
    if not isinstance(family, str) or family not in _ARCHITECTURES:
        raise ExportError(
            f"{where}: model_type",
            "architecture not supported",
            got=config.get("model_type") or names,
            want=f"one of {', '.join(_ARCHITECTURES)}",
        )
    if names and names[0] != _ARCHITECTURES[family]:
        raise ExportError(f"{where}: architectures", "not supported", got=names[0], want=_ARCHITECTURES[family])
    return family


def _refuse_unknown(reader: _Reader, family: str) -> None:
    known = _UNDERSTOOD | set(_FAMILY_DEFAULTS[family])
    for key, value in reader.config.items():
        if key in known:
            continue
        if key in _NEUTRAL and value is not None and value != _NEUTRAL[key] and value is not False:
            raise reader.refuse(
                key,
                f"changes the arithmetic and is not supported for {family}",
                got=repr(value),
                want=repr(_NEUTRAL[key]),
            )
        off = value is None or value is False or value in ("", [], {})
        harmless = key in _NEUTRAL or key in _HARMLESS or key.startswith("_") or key.endswith(_HARMLESS_ENDS)
        if not off and not harmless:
            shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "..."
            raise ExportError(
                f"{reader.where}: {key}",
                "a key that is not understood and may change the arithmetic",
                got=shown,
                todo="remove the key if it changes nothing",
            )
    if reader.config.get("rope_interleaved") not in (None, False):
        raise reader.refuse("rope_interleaved", "interleaved rotary embedding is not supported", got=True, want=False)
    window = reader.config.get("sliding_window")
    if family == "llama" and window is not None:
        raise reader.refuse("sliding_window", "not supported for llama", got=window, want="null")
    activation = reader.config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise reader.refuse("hidden_act", "activation not supported", got=repr(activation), want="silu")


def _epsilon(reader: _Reader) -> float:
    value = reader.config.get("rms_norm_eps", 1e-6)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise reader.refuse("rms_norm_eps", "not usable", got=repr(value), want="a number from 0 to 1")
    return float(value)


def _windows(reader: _Reader, family: str, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer: all of them for Mistral; for Qwen by layer_types, else from
    max_window_layers on, and only where use_sliding_window says so."""
    types = reader.get("layer_types")
    if types is not None and (
        not isinstance(types, list)
        or len(types) != layers
        or any(kind not in ("full_attention", "sliding_attention") for kind in types)
    ):
        raise reader.refuse(
            "layer_types", "not usable", got=types, want=f"{layers} times full_attention or sliding_attention"
        )
    window = reader.get("sliding_window")
    if family == "llama" or (family != "mistral" and not reader.flag("use_sliding_window")):
        window = None
    if window is not None:
        window = reader.integer("sliding_window")
    if family == "mistral":
        every = ["full_attention" if window is None else "sliding_attention"] * layers
        if types not in (None, every):
            raise reader.refuse("layer_types", "not supported for mistral", got=types, want=every)
        types = every
    elif types is None:
        first = layers if window is None else reader.integer("max_window_layers", least=0)
        types = ["full_attention" if layer < first else "sliding_attention" for layer in range(layers)]
    if window is None and "sliding_attention" in types:
        raise reader.refuse("layer_types", "a layer with a sliding window, but no window", got="sliding_attention")
    return tuple(window if kind == "sliding_attention" else None for kind in types)
