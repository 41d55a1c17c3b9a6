"""Attention over the paged KV pools, as ops of a body. Knows the page contract and nothing of any model.

A pool is [P, S, KV, D]: P pages of S slots. The new rows are scattered straight into the 4-D pool and the pages are
then gathered from the updated pool: XLA:CPU runs that in place, where a scatter through a flat view of the pool, or a
gather from the pool as it was, makes it copy the whole pool every step. A slot of -1 must be dropped: integer
division rounds to zero, so the page of slot -1 may be 0, but its remainder is then negative and the place is out of
range, which a scatter drops.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tlaloc_serve.artifact.manifest import TensorType
from tlaloc_serve.export.hlo import NEGATIVE_INFINITY, Body, Value


@dataclass(frozen=True)
class Heads:
    """The shape of attention: `query` heads share `kv` heads of `dim` numbers each, query / kv to one."""

    query: int
    kv: int
    dim: int

    @property
    def group(self) -> int:
        return self.query // self.kv


def slot_places(body: Body, slots: Value, block_size: int) -> Value:
    """i32 [N] slots to i32 [N, 2] (page, slot in the page)."""
    count = slots.dims[0]
    pages = body.scale("divide", slots, block_size)
    offsets = body.scale("remainder", slots, block_size)
    return body.concatenate([body.reshape(pages, count, 1), body.reshape(offsets, count, 1)], 1)  # [N, 2] i32


def gather_pages(body: Body, pool: Value, tables: Value) -> Value:
    """The pages that i32 [B, M] tables name, as rows of the sequence: [B, M * S, KV * D]."""
    pages, size, kv, dim = pool.dims
    batch, blocks = tables.dims
    flat = body.take_rows(body.reshape(pool, pages, size * kv * dim), tables)  # [B, M, S * KV * D]
    return body.reshape(flat, batch, blocks * size, kv * dim)


def decode_mask(body: Body, seq_lens: Value, context: int, heads: int, window: int | None) -> Value:
    """i1 [B, H, C]: which of C positions the one new token of each sequence attends to.

    The token is at position seqLen - 1. With a window it sees itself and the `window - 1` positions before it.
    """
    batch = seq_lens.dims[0]
    grid = TensorType("i32", (batch, heads, context))
    key = body.iota(2, grid)
    seen = body.compare("LT", key, body.broadcast(seq_lens, grid.dims, [0]))
    if window is not None and window < context:
        oldest = body.scale("subtract", seq_lens, window)
        seen = body.binary("and", seen, body.compare("GE", key, body.broadcast(oldest, grid.dims, [0])))
    return seen


def prefill_mask(body: Body, positions: Value, context: int, heads: Heads, window: int | None) -> Value:
    """i1 [B, KV, T, G, C]: which of C positions each of T tokens attends to: up to its own, within the window."""
    batch, tokens = positions.dims
    grid = TensorType("i32", (batch, heads.kv, tokens, heads.group, context))
    key = body.iota(4, grid)
    seen = body.compare("LE", key, body.broadcast(positions, grid.dims, [0, 2]))
    if window is not None and window < context:
        before = body.scale("subtract", positions, window)
        seen = body.binary("and", seen, body.compare("GT", key, body.broadcast(before, grid.dims, [0, 2])))
    return seen


def _weigh(body: Body, scores: Value, mask: Value) -> tuple[Value, Value]:
    """exp(scores - max) over the last axis with the masked lanes 0, and its sum: softmax before the division."""
    axis = len(scores.dims) - 1
    lower = list(range(axis))
    masked = body.select(mask, scores, body.splat(NEGATIVE_INFINITY, scores.type))
    top = body.broadcast(body.reduce("maximum", masked, axis), scores.dims, lower)
    raised = body.unary("exponential", body.binary("subtract", masked, top))
    return raised, body.reduce("add", raised, axis)


def attend_decode(
    body: Body, query: Value, keys: Value, values: Value, mask: Value, heads: Heads, block_diagonal: bool
) -> Value:
    """query f32 [B, H, D] over keys and values [B, C, KV * D], mask i1 [B, H, C], to [B, H * D].

    `block_diagonal` spreads each query over all KV heads, with zeros at those of others, so that K and V need no
    transpose; without it the queries are grouped by KV head.
    """
    if not block_diagonal:
        rows = body.reshape(query, query.dims[0], 1, heads.query * heads.dim)
        grouped = (query.dims[0], heads.kv, 1, heads.group, mask.dims[2])
        return attend_prefill(body, rows, keys, values, body.reshape(mask, *grouped), heads)
    batch = query.dims[0]
    wide = (batch, heads.query, heads.kv, heads.dim)
    scaled = body.scale("multiply", query, 1.0 / math.sqrt(heads.dim))
    own = [float(kv == head // heads.group) for head in range(heads.query) for kv in range(heads.kv)]
    diagonal = body.broadcast(body.constant(own, TensorType("f32", (heads.query, heads.kv))), wide, [1, 2])
    spread = body.binary("multiply", body.broadcast(scaled, wide, [0, 1, 3]), diagonal)
    spread = body.reshape(spread, batch, heads.query, heads.kv * heads.dim)
    scores = body.dot(spread, keys, (2, 2), ([0], [0]))  # [B, H, C]
    raised, total = _weigh(body, scores, mask)
    mixed = body.dot(raised, values, (2, 1), ([0], [0]))  # [B, H, KV * D]
    mixed = body.binary("multiply", body.reshape(mixed, *wide), diagonal)
    mixed = body.reduce("add", mixed, 2)  # [B, H, D]
    mixed = body.binary("divide", mixed, body.broadcast(total, mixed.dims, [0, 1]))
    return body.reshape(mixed, batch, heads.query * heads.dim)


def attend_prefill(body: Body, query: Value, keys: Value, values: Value, mask: Value, heads: Heads) -> Value:
    """query f32 [B, T, H * D] over keys and values [B, C, KV * D], mask i1 [B, KV, T, G, C], to [B * T, H * D]."""
    batch, tokens, _ = query.dims
    context = keys.dims[1]
    scaled = body.scale("multiply", query, 1.0 / math.sqrt(heads.dim))
    grouped = body.reshape(scaled, batch, tokens, heads.kv, heads.group, heads.dim)
    keys = body.reshape(keys, batch, context, heads.kv, heads.dim)
    values = body.reshape(values, batch, context, heads.kv, heads.dim)
    scores = body.dot(grouped, keys, (4, 3), ([0, 2], [0, 2]))  # [B, KV, T, G, C]
    raised, total = _weigh(body, scores, mask)
    mixed = body.dot(raised, values, (4, 1), ([0, 1], [0, 2]))  # [B, KV, T, G, D]
    mixed = body.binary("divide", mixed, body.broadcast(total, mixed.dims, [0, 1, 2, 3]))
    mixed = body.transpose(mixed, 0, 2, 1, 3, 4)  # [B, T, KV, G, D]
    return body.reshape(mixed, batch * tokens, heads.query * heads.dim)
