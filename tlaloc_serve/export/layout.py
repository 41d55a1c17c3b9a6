"""Which tensors of a checkpoint become which weights of the artifact.

Rules: a weight keeps the checkpoint's [out, in] layout, so a tensor of the right dtype is copied byte for byte. q, k
and v are one weight, gate and up are one weight: the rows of one follow the rows of the other. A tied head is the
embedding and is stored once. Every tensor of the checkpoint is used, known to be redundant, or refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tlaloc_serve.artifact.manifest import TensorType
from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.config import ModelConfig

EMBED, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
# Buffers that old checkpoints carry: the inverse frequencies, which the config determines, and mask caches.
_BUFFERS = re.compile(r"model\.(layers\.\d+\.self_attn\.(rotary_emb\.inv_freq|masked_bias|bias)|rotary_emb\.inv_freq)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


class Described(Protocol):
    """What the layout needs to know of a tensor."""

    @property
    def dims(self) -> tuple[int, ...]: ...

    @property
    def path(self) -> str: ...


@dataclass(frozen=True)
class Part:
    """A tensor of the checkpoint by its transformers name, and the dims it must have."""

    tensor: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Planned:
    """One weight to write: its type, and the tensors whose rows it holds, in this order.

    An i8 weight has a second one beside it, f32 [rows]: what each of its rows is multiplied by (`scale_name`).
    """

    name: str
    type: TensorType
    parts: tuple[Part, ...]

    @property
    def slots(self) -> tuple[tuple[str, TensorType], ...]:
        """Name and type of each weight that this makes."""
        if self.type.dtype != "i8":
            return ((self.name, self.type),)
        return (self.name, self.type), (scale_name(self.name), TensorType("f32", self.type.dims[:1]))


def plan_weights(
    config: ModelConfig, layers: int, tensors: Mapping[str, Described], dtype: str, where: str
) -> tuple[Planned, ...]:
    """The weight table for the first `layers` layers: matrices in `dtype`, norms, biases and scales in f32.

    `where` is the checkpoint, for messages. Raises ExportError for a tensor that is missing, of another shape than the
    config says, or not understood.
    """
    planned = lay_out(config, layers, is_tied(config, tensors, where), dtype)
    _check(config, layers, tensors, planned, where)
    return planned


def lay_out(config: ModelConfig, layers: int, tied: bool, dtype: str) -> tuple[Planned, ...]:
    """The weight table that such a model has, whatever a checkpoint holds."""
    vocab = (config.vocab_size, config.hidden_size)
    planned = [_weight("embedTokens", [Part(EMBED, vocab)], dtype)]
    for layer in range(layers):
        planned += _layer(config, layer, dtype)
    planned.append(_weight("finalNorm", [Part(FINAL_NORM, (config.hidden_size,))], "f32"))
    if not tied:
        planned.append(_weight("lmHead", [Part(HEAD, vocab)], dtype))
    return tuple(planned)


def is_tied(config: ModelConfig, tensors: Iterable[str], where: str) -> bool:
    """Whether the head is the embedding. A head that is neither declared tied nor there is refused."""
    present = HEAD in set(tensors)
    if config.tied is False and not present:
        raise ExportError(f"{where}: {HEAD}", "missing tensor, and tie_word_embeddings is false")
    return bool(config.tied) or not present


def scale_name(weight: str) -> str:
    """The name of the f32 weight that holds the scale of each row of the i8 weight `weight`; a layer stays last."""
    stem = weight.rstrip("0123456789")
    return f"{stem}Scale{weight[len(stem) :]}"


def _weight(name: str, parts: list[Part], dtype: str) -> Planned:
    dims = (sum(part.dims[0] for part in parts), *parts[0].dims[1:])
    return Planned(name, TensorType(dtype, dims), tuple(parts))


def _layer(config: ModelConfig, layer: int, dtype: str) -> list[Planned]:
    prefix = f"model.layers.{layer}"
    hidden, wide, dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, kv = config.num_heads * dim, config.num_kv_heads * dim
    qkv = [("q_proj", query), ("k_proj", kv), ("v_proj", kv)]
    gate_up = [("gate_proj", wide), ("up_proj", wide)]

    def matrix(name: str, block: str, parts: list[tuple[str, int]], inner: int) -> Planned:
        rows = [Part(f"{prefix}.{block}.{part}.weight", (size, inner)) for part, size in parts]
        return _weight(f"{name}{layer}", rows, dtype)

    def vector(name: str, parts: list[tuple[str, int]]) -> Planned:
        return _weight(f"{name}{layer}", [Part(f"{prefix}.{part}", (size,)) for part, size in parts], "f32")

    planned = [vector("inputNorm", [("input_layernorm.weight", hidden)]), matrix("qkvProj", "self_attn", qkv, hidden)]
    if config.qkv_bias:
        planned.append(vector("qkvBias", [(f"self_attn.{part}.bias", size) for part, size in qkv]))
    if config.qk_norm:
        planned += [vector(f"{x}Norm", [(f"self_attn.{x}_norm.weight", dim)]) for x in ("q", "k")]
    planned.append(matrix("oProj", "self_attn", [("o_proj", hidden)], query))
    if config.output_bias:
        planned.append(vector("oBias", [("self_attn.o_proj.bias", hidden)]))
    planned.append(vector("postAttnNorm", [("post_attention_layernorm.weight", hidden)]))
    planned.append(matrix("gateUpProj", "mlp", gate_up, hidden))
    if config.mlp_bias:
        planned.append(vector("gateUpBias", [(f"mlp.{part}.bias", size) for part, size in gate_up]))
    planned.append(matrix("downProj", "mlp", [("down_proj", hidden)], wide))
    if config.mlp_bias:
        planned.append(vector("downBias", [("mlp.down_proj.bias", hidden)]))
    return planned


def _check(
    config: ModelConfig, layers: int, tensors: Mapping[str, Described], planned: Sequence[Planned], where: str
) -> None:
    used: set[str] = set()
    for part in (part for plan in planned for part in plan.parts):
        if part.tensor not in tensors:
            raise ExportError(f"{where}: {part.tensor}", "missing tensor", todo="is the checkpoint complete?")
        found = tensors[part.tensor]
        if found.dims != part.dims:
            raise ExportError(
                f"{found.path}: {part.tensor}",
                "shape disagrees with the config",
                got=list(found.dims),
                want=list(part.dims),
            )
        used.add(part.tensor)
    for name in sorted(set(tensors) - used):
        layer = _LAYER.match(name)
        left_out = layer is not None and layers <= int(layer.group(1)) < config.num_layers
        if not (left_out or name == HEAD or _BUFFERS.fullmatch(name)):
            raise ExportError(f"{tensors[name].path}: {name}", f"a tensor that a {config.family} model has no use for")
