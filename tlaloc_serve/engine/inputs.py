"""The small integer inputs of one entry: filled from a batch, padded as the contract says, uploaded on change.

A row without a sequence has token 0, position 0, page table 0, slot -1 so that its write is dropped, and length 1,
since length 0 would mask every lane and give 0/0. The tokens of a prefill row are right-aligned; what stands before
them is padded the same way.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

from tlaloc_serve.artifact.manifest import Entry, Role
from tlaloc_serve.engine.pages import DROPPED_SLOT, SCRATCH_PAGE, page_of, pages_for, slot_of
from tlaloc_serve.engine.scheduler import Batch, Row
from tlaloc_serve.pjrt.client import Buffer, Client, Execution

_PADDING = {Role.SEQ_LENS: 1, Role.SLOT_MAPPING: DROPPED_SLOT, Role.WINDOW_SLOT_MAPPING: DROPPED_SLOT}


@dataclass
class _Input:
    """One input slot: its place in the call, its host memory (int32), what it holds on the device now."""

    index: int
    dims: tuple[int, ...]
    memory: ctypes.Array[ctypes.c_int32]
    values: list[int] | None = None
    buffer: Buffer | None = None


class StepInputs:
    """Fills and uploads the integer inputs of one entry. Owns one device buffer a slot, replaced only on change."""

    def __init__(self, entry: Entry, client: Client, execution: Execution):
        self._entry = entry
        self._client = client
        self._execution = execution
        self._page_size = entry.context // entry.max_blocks_per_seq
        self._inputs: dict[str, _Input] = {}
        self._tables: object = None
        for index, slot in enumerate(entry.inputs):
            if slot.type.dtype == "i32" and slot.role not in (Role.WEIGHT, Role.KV_POOL_IN, Role.WINDOW_KV_POOL_IN):
                memory = (ctypes.c_int32 * (slot.type.byte_length // 4))()
                self._inputs[slot.role] = _Input(index, slot.type.dims, memory)

    def close(self) -> None:
        for item in self._inputs.values():
            if item.buffer is not None:
                item.buffer.close()

    def fill(self, batch: Batch) -> None:
        """Write a batch of at most `entry.batch` rows, each of at most `entry.tokens_per_seq` tokens."""
        width = self._entry.tokens_per_seq
        values = {
            role: [_PADDING.get(role, 0)] * len(item.memory)
            for role, item in self._inputs.items()
            if "TABLES" not in role
        }
        for number, row in enumerate(batch.rows):
            end = (number + 1) * width
            span = slice(end - len(row.tokens), end)
            positions = range(row.start, row.end)
            values[Role.TOKEN_IDS][span] = row.tokens
            values[Role.POSITIONS][span] = positions
            values[Role.SLOT_MAPPING][span] = [slot_of(position, row.pages, self._page_size) for position in positions]
            values[Role.SEQ_LENS][number] = row.end
            if row.ring:
                slots = [slot_of(position, row.ring, self._page_size) for position in positions]
                values[Role.WINDOW_SLOT_MAPPING][span] = slots
        # Page tables are the widest inputs and change only when a row crosses into a new page.
        tables = [(row.pages, row.ring, pages_for(row.end, self._page_size)) for row in batch.rows]
        if tables != self._tables:
            self._tables = tables
            values[Role.BLOCK_TABLES] = self._table([row.pages for row in batch.rows], batch.rows)
            if Role.WINDOW_BLOCK_TABLES in self._inputs:
                values[Role.WINDOW_BLOCK_TABLES] = self._table([row.ring for row in batch.rows], batch.rows)
        for role, items in values.items():
            self._upload(self._inputs[role], items)

    def _table(self, pages: list[tuple[int, ...]], rows: tuple[Row, ...]) -> list[int]:
        width = self._entry.max_blocks_per_seq
        table = [SCRATCH_PAGE] * (self._entry.batch * width)
        for number, row in enumerate(rows):
            blocks = range(pages_for(row.end, self._page_size))
            table[number * width : number * width + len(blocks)] = [page_of(block, pages[number]) for block in blocks]
        return table

    def _upload(self, item: _Input, values: list[int]) -> None:
        if values == item.values:
            return
        item.memory[:] = values  # type: ignore[assignment]  # typeshed wants c_int32 items; ctypes takes ints
        fresh = self._client.buffer_from_host(item.memory, "i32", item.dims)
        self._execution.bind(item.index, fresh)
        if item.buffer is not None:
            item.buffer.close()
        item.buffer, item.values = fresh, values
