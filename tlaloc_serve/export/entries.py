"""The boundary of an entry: its slots in call order, the body's parameters that match them, and its manifest record.

One list of slots makes both the signature of `@main` and the manifest, so they cannot disagree. The order is the one
other exporters use: token ids, positions, block tables, sequence lengths, slot mapping, the pools (key then value,
layers ascending), then every weight in the order of the weight table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tlaloc_serve.artifact.manifest import POOL_OUTPUT_OF, Entry, Kind, Ladder, Model, Role, Slot, TensorType
from tlaloc_serve.export.hlo import Body, Value


@dataclass(frozen=True)
class Point:
    """One ladder point to compile: `tokens` a sequence in one call, 1 for decode."""

    kind: str
    batch: int
    context: int
    tokens: int


@dataclass(frozen=True)
class Boundary:
    """The slots of one entry and which output may take over which input's buffer."""

    inputs: tuple[Slot, ...]
    outputs: tuple[Slot, ...]
    donation_pairs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Arguments:
    """The parameters of `@main` by what they are for.

    token_ids and positions i32 [B, T], block_tables i32 [B, M], seq_lens i32 [B], slot_mapping i32 [B * T]; keys and
    values hold one pool a layer; weights are by name.
    """

    token_ids: Value
    positions: Value
    block_tables: Value
    seq_lens: Value
    slot_mapping: Value
    keys: tuple[Value, ...]
    values: tuple[Value, ...]
    weights: dict[str, Value]


def ladder_points(ladder: Ladder, prefill_chunk: int | None) -> tuple[Point, ...]:
    """Every decode point, then every prefill point; none of those without a `prefill_chunk`.

    A prefill call takes `prefill_chunk` tokens a sequence, or the rung's context where that is fewer.
    """
    rungs = [(batch, context) for batch in ladder.batch for context in ladder.context]
    points = [Point(Kind.DECODE, batch, context, 1) for batch, context in rungs]
    if prefill_chunk is not None:
        points += [Point(Kind.PREFILL, batch, context, min(prefill_chunk, context)) for batch, context in rungs]
    return tuple(points)


def boundary(model: Model, point: Point, weights: Sequence[tuple[str, TensorType]]) -> Boundary:
    """The slots of the entry at `point`."""
    batch, tokens = point.batch, point.tokens
    pool = TensorType(model.kv_dtype, model.kv_pool_dims)
    pools = [f"{kind}Cache{layer}" for layer in range(model.num_layers) for kind in ("key", "value")]
    inputs = [
        Slot("tokenIds", Role.TOKEN_IDS, TensorType("i32", (batch, tokens))),
        Slot("positions", Role.POSITIONS, TensorType("i32", (batch, tokens))),
        Slot("blockTables", Role.BLOCK_TABLES, TensorType("i32", (batch, point.context // model.block_size))),
        Slot("seqLens", Role.SEQ_LENS, TensorType("i32", (batch,))),
        Slot("slotMapping", Role.SLOT_MAPPING, TensorType("i32", (batch * tokens,))),
    ]
    first = len(inputs)
    inputs += [Slot(name, Role.KV_POOL_IN, pool) for name in pools]
    inputs += [Slot(name, Role.WEIGHT, tensor) for name, tensor in weights]
    outputs = [Slot("logits", Role.LOGITS, TensorType("f32", (batch, 1, model.vocab_size)))]
    outputs += [Slot(f"{name}Out", POOL_OUTPUT_OF[Role.KV_POOL_IN], pool) for name in pools]
    pairs = tuple((first + index, 1 + index) for index in range(len(pools)))
    return Boundary(tuple(inputs), tuple(outputs), pairs)


def open_body(slots: Boundary) -> tuple[Body, Arguments]:
    """A body whose parameters are the inputs of `slots`, with the pools aliased to their outputs."""
    body = Body()
    aliases = dict(slots.donation_pairs)
    values = [body.parameter(slot.type, aliases.get(index)) for index, slot in enumerate(slots.inputs)]
    by_role: dict[str, list[Value]] = {}
    for slot, value in zip(slots.inputs, values, strict=True):
        by_role.setdefault(slot.role, []).append(value)
    pools = by_role[Role.KV_POOL_IN]
    weights = {slot.name: value for slot, value in zip(slots.inputs, values, strict=True) if slot.role == Role.WEIGHT}
    return body, Arguments(
        token_ids=by_role[Role.TOKEN_IDS][0],
        positions=by_role[Role.POSITIONS][0],
        block_tables=by_role[Role.BLOCK_TABLES][0],
        seq_lens=by_role[Role.SEQ_LENS][0],
        slot_mapping=by_role[Role.SLOT_MAPPING][0],
        keys=tuple(pools[0::2]),
        values=tuple(pools[1::2]),
        weights=weights,
    )


def make_entry(model: Model, model_hash: str, point: Point, slots: Boundary, body_hash: str) -> Entry:
    """The manifest's record of the entry at `point` whose body has the hash `body_hash`."""
    place = f"{point.kind}/b{point.batch}/c{point.context}/t{point.tokens}"
    entry = Entry(
        kind=point.kind,
        batch=point.batch,
        context=point.context,
        tokens_per_seq=point.tokens,
        max_blocks_per_seq=point.context // model.block_size,
        cache_key=f"tlaloc-decode-v1/{model_hash}/{place}/dt{model.dtype}/kv{model.kv_dtype}",
        entry_point="main",
        body_path=f"bodies/{body_hash}.mlir",
        body_hash=body_hash,
        program_path="",
        inputs=slots.inputs,
        outputs=slots.outputs,
        donation_pairs=slots.donation_pairs,
    )
    return replace(entry, program_path=f"programs/{entry.id}.json")
