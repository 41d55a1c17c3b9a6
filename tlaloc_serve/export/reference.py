"""The reference decode graph: one attention layer over an 11-word vocabulary, small enough to check by hand.

`h = embed[token]`, `q, k, v = h @ W`, KV write, paged attention with scale 1 / sqrt(headDim), `logits = mixed @ W`.
No positions are used. The weights are constants in the bodies, drawn from a fixed 32-bit linear congruential
generator, so two exports are byte-identical and the artifact needs no checkpoint.
"""

from __future__ import annotations

from tlaloc_serve.artifact.manifest import Ladder, Model, TensorType
from tlaloc_serve.export.entries import Boundary, Point, open_body
from tlaloc_serve.export.hlo import Body, Value, round_f32
from tlaloc_serve.export.paged import Heads, attend_decode, decode_mask, gather_pages, slot_places

NAME = "tlaloc-reference-decode"
HASH = "reference-decode-lcg-v1"
LADDER = Ladder(block_size=2, batch=(1, 2, 4), context=(2, 4))
MODEL = Model(
    vocab_size=11,
    hidden_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    num_layers=1,
    num_blocks=6,
    block_size=2,
    dtype="f32",
    kv_dtype="f32",
    kv_pool_dims=(6, 2, 2, 2),
)
_HEADS = Heads(MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim)
# Seed and dims of each weight, [in, out].
_EMBED, _QUERY, _KEY, _VALUE, _HEAD = (1, (11, 8)), (2, (8, 8)), (3, (8, 4)), (4, (8, 4)), (5, (8, 11))


def draw(seed: int, count: int) -> list[float]:
    """`count` weights: s = s * 1664525 + 1013904223 mod 2^32 before each draw, then f32(s >> 8 over 2^24) - 0.5."""
    state, numbers = seed, []
    for _ in range(count):
        state = (state * 1664525 + 1013904223) % (1 << 32)
        numbers.append(round_f32((state >> 8) / (1 << 24) - 0.5))
    return numbers


def reference_body(slots: Boundary, point: Point) -> str:
    """The StableHLO text of the decode entry at `point`."""
    body, given = open_body(slots)
    batch = point.batch
    hidden = body.take_rows(_weight(body, _EMBED), body.reshape(given.token_ids, batch))  # [B, 8]
    query, key, value = (body.dot(hidden, _weight(body, weight), (1, 0)) for weight in (_QUERY, _KEY, _VALUE))
    places = slot_places(body, given.slot_mapping, MODEL.block_size)
    row = (batch, _HEADS.kv, _HEADS.dim)
    keys = body.write_slots(given.keys[0], places, body.reshape(key, *row))
    values = body.write_slots(given.values[0], places, body.reshape(value, *row))
    mixed = attend_decode(
        body,
        body.reshape(query, batch, _HEADS.query, _HEADS.dim),
        gather_pages(body, keys, given.block_tables),
        gather_pages(body, values, given.block_tables),
        decode_mask(body, given.seq_lens, point.context, _HEADS.query, None),
        _HEADS,
        block_diagonal=True,
    )
    logits = body.dot(mixed, _weight(body, _HEAD), (1, 0))
    return body.finish([body.reshape(logits, batch, 1, MODEL.vocab_size), keys, values])


def _weight(body: Body, weight: tuple[int, tuple[int, int]]) -> Value:
    seed, dims = weight
    return body.constant(draw(seed, dims[0] * dims[1]), TensorType("f32", dims))
