"""The graph of one entry for decoders of the Llama shape: Llama, Mistral, Qwen2, Qwen3.

    h = embed[token];  per layer: h += o(attend(rope(norm(q)), rope(norm(k)), v));  h += down(silu(gate) * up)
    logits = head(norm(h)), of each sequence's last token only

Norms, softmax, rotary embedding, residuals and the KV pools are f32. A matrix of bf16 is multiplied in bf16, with its
input rounded to bf16 and the sums in f32; one of i8 is multiplied in f32 (for a GPU in bf16, which holds it exactly),
and each sum by the scale of its row.
N = B * T rows, H query heads, KV key heads, D numbers a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from tlaloc_serve.artifact.manifest import Kind, TensorType
from tlaloc_serve.export.config import ModelConfig
from tlaloc_serve.export.entries import Arguments, Boundary, Point, open_body
from tlaloc_serve.export.hlo import Body, Value
from tlaloc_serve.export.layout import scale_name
from tlaloc_serve.export.paged import (
    Heads,
    attend_decode,
    attend_prefill,
    decode_mask,
    gather_pages,
    prefill_mask,
    slot_places,
)
from tlaloc_serve.export.target import Target

_GROUPS = 2  # slabs of a weight in a batched product
# Numbers of a weight that are widened at once: 4 MiB of f32. Pieces of 0.6 to 1.7 million take the same time; smaller
# ones are not spread over the cores, larger ones leave the cache (the whole head at once: five times as long).
_PIECE = 1 << 20
_MOST_PIECES = 32  # a bound on the size of the body


@dataclass(frozen=True)
class _Step:
    """What every layer of one entry shares: what it is given, and what is made once.

    turns has the cosines and sines [N, heads, D / 2] f32 for each number of heads; masks has one mask a window.
    """

    point: Point
    target: Target
    given: Arguments
    heads: Heads
    places: Value
    turns: dict[int, tuple[Value, Value]]
    masks: dict[int | None, Value]


def llama_body(config: ModelConfig, layers: int, block_size: int, target: Target, slots: Boundary, point: Point) -> str:
    """The StableHLO text of the entry at `point` with the first `layers` layers of the model."""
    body, given = open_body(slots)
    step = _prepare(body, config, layers, block_size, target, given, point)
    rows = point.batch * point.tokens
    hidden = _embed(body, given, body.reshape(given.token_ids, rows))
    keys, values = [], []
    own = _by_layer(given.weights)
    for layer in range(layers):
        operands = [hidden, given.keys[layer], given.values[layer], *own[layer]]
        emit = partial(_layer, body, config, layer, hidden, step)
        hidden, key_pool, value_pool = body.section(config.windows[layer], operands, emit)
        keys.append(key_pool)
        values.append(value_pool)
    by_sequence = body.reshape(hidden, point.batch, point.tokens, config.hidden_size)
    last = body.slice(by_sequence, 1, point.tokens - 1, point.tokens)
    last = body.reshape(last, point.batch, config.hidden_size)
    last = _norm(body, last, given.weights["finalNorm"], config.rms_norm_eps)
    head = "lmHead" if "lmHead" in given.weights else "embedTokens"
    logits = body.reshape(_linear(body, last, step, head), point.batch, 1, config.vocab_size)
    pools = [pool for pair in zip(keys, values, strict=True) for pool in pair]
    return body.finish([logits, *pools])


def _by_layer(weights: dict[str, Value]) -> dict[int, list[Value]]:
    """The weights whose names end in a layer's number, by that number."""
    found: dict[int, list[Value]] = {}
    for name, value in weights.items():
        number = name[len(name.rstrip("0123456789")) :]
        if number:
            found.setdefault(int(number), []).append(value)
    return found


def _prepare(
    body: Body, config: ModelConfig, layers: int, block_size: int, target: Target, given: Arguments, point: Point
) -> _Step:
    heads = Heads(config.num_heads, config.num_kv_heads, config.head_dim)
    rows, half = point.batch * point.tokens, config.head_dim // 2
    angle = TensorType("f32", (rows, half))
    position = body.convert(body.reshape(given.positions, rows), "f32")
    turn = body.constant(config.inverse_frequencies, TensorType("f32", (half,)))
    angles = body.binary("multiply", body.broadcast(position, angle.dims, [0]), body.broadcast(turn, angle.dims, [1]))
    tables = [body.unary(name, angles) for name in ("cosine", "sine")]
    if target.keeps_turns:
        tables = [body.barrier(table) for table in tables]
    tables = [body.reshape(table, rows, 1, half) for table in tables]
    turns = {}
    for count in sorted({heads.query, heads.kv}):
        cos, sin = (body.broadcast(table, (rows, count, half), [0, 1, 2]) for table in tables)
        turns[count] = (cos, sin)
    masks = {}
    for window in sorted(set(config.windows[:layers]), key=lambda window: window or 0):
        if point.kind == Kind.DECODE:
            masks[window] = decode_mask(body, given.seq_lens, point.context, heads.query, window)
        else:
            masks[window] = prefill_mask(body, given.positions, point.context, heads, window)
    return _Step(
        point=point,
        target=target,
        given=given,
        heads=heads,
        places=slot_places(body, given.slot_mapping, block_size),
        turns=turns,
        masks=masks,
    )


def _embed(body: Body, given: Arguments, ids: Value) -> Value:
    """The rows of the embedding for ids i32 [N]: f32 [N, hidden]."""
    hidden = body.convert(body.take_rows(given.weights["embedTokens"], ids), "f32")
    scale = given.weights.get(scale_name("embedTokens"))
    if scale is not None:
        hidden = body.binary("multiply", hidden, body.broadcast(body.take_rows(scale, ids), hidden.dims, [0]))
    return hidden


def _layer(body: Body, config: ModelConfig, layer: int, hidden: Value, step: _Step) -> tuple[Value, Value, Value]:
    """hidden [N, hidden] after the layer, and the layer's two pools with the new rows in them."""
    weights, epsilon = step.given.weights, config.rms_norm_eps
    normed = _norm(body, hidden, weights[f"inputNorm{layer}"], epsilon)
    mixed, key_pool, value_pool = _attention(body, config, layer, normed, step)
    hidden = body.binary("add", hidden, _linear(body, mixed, step, f"oProj{layer}", f"oBias{layer}"))
    normed = _norm(body, hidden, weights[f"postAttnNorm{layer}"], epsilon)
    return body.binary("add", hidden, _mlp(body, config, layer, normed, step)), key_pool, value_pool


def _attention(body: Body, config: ModelConfig, layer: int, normed: Value, step: _Step) -> tuple[Value, Value, Value]:
    """normed [N, hidden] to the mixed heads [N, H * D], and the layer's two pools with the new rows in them."""
    heads, point, given = step.heads, step.point, step.given
    rows = normed.dims[0]
    wide, narrow = heads.query * heads.dim, heads.kv * heads.dim
    qkv = _linear(body, normed, step, f"qkvProj{layer}", f"qkvBias{layer}")
    query = body.reshape(body.slice(qkv, 1, 0, wide), rows, heads.query, heads.dim)
    key = body.reshape(body.slice(qkv, 1, wide, wide + narrow), rows, heads.kv, heads.dim)
    value = body.reshape(body.slice(qkv, 1, wide + narrow, wide + 2 * narrow), rows, heads.kv, heads.dim)
    if config.qk_norm:
        query = _norm(body, query, given.weights[f"qNorm{layer}"], config.rms_norm_eps)
        key = _norm(body, key, given.weights[f"kNorm{layer}"], config.rms_norm_eps)
    query, key = _rotate(body, query, step), _rotate(body, key, step)
    key_pool = body.write_slots(given.keys[layer], step.places, key)
    value_pool = body.write_slots(given.values[layer], step.places, value)
    keys = gather_pages(body, key_pool, given.block_tables)
    values = gather_pages(body, value_pool, given.block_tables)
    mask = step.masks[config.windows[layer]]
    if point.kind == Kind.DECODE:
        block_diagonal = heads.kv <= step.target.most_block_diagonal_heads
        mixed = attend_decode(body, query, keys, values, mask, heads, block_diagonal)
    else:
        mixed = attend_prefill(body, body.reshape(query, point.batch, point.tokens, wide), keys, values, mask, heads)
    return mixed, key_pool, value_pool


def _mlp(body: Body, config: ModelConfig, layer: int, normed: Value, step: _Step) -> Value:
    wide = config.intermediate_size
    both = _linear(body, normed, step, f"gateUpProj{layer}", f"gateUpBias{layer}")  # [N, 2 * wide]
    gate, up = body.slice(both, 1, 0, wide), body.slice(both, 1, wide, 2 * wide)
    active = body.binary("multiply", gate, body.unary("logistic", gate))
    return _linear(body, body.binary("multiply", active, up), step, f"downProj{layer}", f"downBias{layer}")


def _linear(body: Body, x: Value, step: _Step, name: str, bias: str = "") -> Value:
    """x f32 [N, in] times the weight [out, in], plus the bias where the model has it: f32 [N, out]."""
    weights, target = step.given.weights, step.target
    weight, rows = weights[name], x.dims[0]
    if weight.dtype == "f32":
        result = _product(body, x, weight, target)
    elif target.widens_weights and (weight.dtype == "i8" or rows == 1):
        result = _widened(body, x, weight, target)
    else:
        result = _product(body, body.convert(x, "bf16"), body.convert(weight, "bf16"), target)
    if scale_name(name) in weights:
        result = body.binary("multiply", result, body.broadcast(weights[scale_name(name)], result.dims, [1]))
    if bias in weights:
        result = body.binary("add", result, body.broadcast(weights[bias], result.dims, [1]))
    return result


def _widened(body: Body, x: Value, weight: Value, target: Target) -> Value:
    """x f32 [N, in] times a bf16 or i8 weight [out, in] that is widened to f32 piece by piece: f32 [N, out].

    The barriers keep XLA:CPU from widening all weights before the first product. So the wide copy of a piece is used
    while it is in the cache, and with one row, where PJRT 0.81 and 0.106 widen inside the product, there is no copy.
    """
    if weight.dtype == "bf16":
        x = body.round_to_bf16(x)
    out = weight.dims[0]
    step = -(-out // _piece_count(weight.type))
    step += step % _GROUPS
    results = []
    for start in range(0, out, step):
        weight, x = body.barrier_of_two(weight, x)
        piece = body.convert(body.slice(weight, 0, start, min(start + step, out)), "f32")
        if x.dims[0] == 1:
            results.append(body.transpose(body.dot(piece, x, (1, 1)), 1, 0))
        else:
            results.append(_product(body, x, piece, target))
    return body.concatenate(results, 1) if len(results) > 1 else results[0]


def _piece_count(weight: TensorType) -> int:
    """Into how many pieces a weight is cut to be widened."""
    return min(-(-math.prod(weight.dims) // _PIECE), _MOST_PIECES)


def _product(body: Body, x: Value, weight: Value, target: Target) -> Value:
    """x [N, in] times weight [out, in] of the same dtype: f32 [N, out]."""
    if x.dims[0] <= target.most_grouped_rows and weight.dims[0] % _GROUPS == 0:
        return _grouped(body, x, weight)
    return body.dot(x, weight, (1, 1))


def _grouped(body: Body, x: Value, weight: Value) -> Value:
    """x [N, in] times weight [out, in] as a batched product of `_GROUPS` slabs of the weight: f32 [N, out].

    Without the barrier the XLA of PJRT 0.115 draws what makes x into the product and, from 8 rows on, mixes rows up
    (seen behind attention: the first row stays right, the others do not). It costs nothing that could be measured.
    """
    rows, (out, inner) = x.dims[0], weight.dims
    slabs = body.reshape(weight, _GROUPS, out // _GROUPS, inner)
    each = body.broadcast(body.barrier(x), (_GROUPS, rows, inner), [1, 2])
    result = body.dot(slabs, each, (2, 2), ([0], [0]))  # [G, out / G, N]
    return body.reshape(body.transpose(result, 2, 0, 1), rows, out)


def _norm(body: Body, x: Value, weight: Value, epsilon: float) -> Value:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis."""
    axis = len(x.dims) - 1
    lower = list(range(axis))
    mean = body.scale("divide", body.reduce("add", body.binary("multiply", x, x), axis), float(x.dims[axis]))
    inverse = body.unary("rsqrt", body.scale("add", mean, epsilon))
    scaled = body.binary("multiply", x, body.broadcast(inverse, x.dims, lower))
    return body.binary("multiply", scaled, body.broadcast(weight, x.dims, [axis]))


def _rotate(body: Body, x: Value, step: _Step) -> Value:
    """Rotary embedding of x [N, heads, D]: the first half of D is rotated against the second."""
    half = x.dims[2] // 2
    first, second = body.slice(x, 2, 0, half), body.slice(x, 2, half, 2 * half)
    cos, sin = step.turns[x.dims[1]]
    left = body.binary("subtract", body.binary("multiply", first, cos), body.binary("multiply", second, sin))
    right = body.binary("add", body.binary("multiply", second, cos), body.binary("multiply", first, sin))
    return body.concatenate([left, right], 2)
