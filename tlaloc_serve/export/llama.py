"""The graph of one entry for decoders of the Llama shape: Llama, Mistral, Qwen2, Qwen3.

    h = embed[token];  per layer: h += o(attend(rope(norm(q)), rope(norm(k)), v));  h += down(silu(gate) * up)
    logits = head(norm(h)), of each sequence's last token only

Norms, softmax, rotary embedding, residuals and the KV pools are f32. A matrix of bf16 is multiplied in bf16, with its
input rounded to bf16 and the sums in f32. N = B * T rows, H query heads, KV key heads, D numbers a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tlaloc_serve.artifact.manifest import Kind, TensorType
from tlaloc_serve.export.config import ModelConfig
from tlaloc_serve.export.entries import Arguments, Boundary, Point, open_body
from tlaloc_serve.export.hlo import Body, Value
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
    hidden = body.take_rows(given.weights["embedTokens"], body.reshape(given.token_ids, rows))
    hidden = body.convert(hidden, "f32")  # [N, hidden]
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
    tables = [body.reshape(body.unary(name, angles), rows, 1, half) for name in ("cosine", "sine")]
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
    weight = weights[name]
    rows = x.dims[0]
    if weight.dtype == "bf16":
        x = body.convert(x, "bf16")
    if weight.dtype == "bf16" and rows == 1 and target.doubles_bf16_row:
        result = body.slice(body.dot(body.concatenate([x, x], 0), weight, (1, 1)), 0, 0, 1)
    elif rows <= target.most_grouped_rows and weight.dims[0] % _GROUPS == 0:
        result = _grouped(body, x, weight)
    else:
        result = body.dot(x, weight, (1, 1))
    if bias in weights:
        result = body.binary("add", result, body.broadcast(weights[bias], result.dims, [1]))
    return result


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
