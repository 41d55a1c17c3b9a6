"""The small integer inputs of one entry: filled from a batch, padded as the contract says, uploaded on change.

A row without a sequence has token 0, position 0, page table 0, slot -1 so that its write is dropped, and length 1,
since length 0 would mask every lane and give 0/0. The tokens of a prefill row are right-aligned; what stands before
them is padded the same way.
"""

from __future__ import annotations

from array import array

from tlaloc_serve.artifact.manifest import POOL_OUTPUT_OF, Entry, Role
from tlaloc_serve.engine.logits import Chosen
from tlaloc_serve.engine.pages import DROPPED_SLOT, SCRATCH_PAGE, page_of, pages_for, slot_of
from tlaloc_serve.engine.scheduler import Batch, Row
from tlaloc_serve.pjrt.client import Client, Execution
from tlaloc_serve.pjrt.transfer import Upload

_PADDING = {Role.SEQ_LENS: 1, Role.SLOT_MAPPING: DROPPED_SLOT, Role.WINDOW_SLOT_MAPPING: DROPPED_SLOT}


class _Input:
    """One input slot: an array of int32 on the host and what of it is on the device."""

    def __init__(self, client: Client, dims: tuple[int, ...]):
        self._upload = Upload(client, "i32", dims)
        self._ints = memoryview(self._upload.memory).cast("B").cast("i")
        self._sent: list[int] | None = None
        self.buffer = self._upload.buffer
        self.close = self._upload.close

    def __len__(self) -> int:
        return len(self._ints)

    def set(self, values: list[int]) -> None:
        """Send `values`, all of them, unless they are there already."""
        if values != self._sent:
            self._sent = None  # until it is there: sending can fail
            self._ints[:] = array("i", values)
            self._upload.send()
            self._sent = values


class StepInputs:
    """Fills and uploads the integer inputs of one entry; each keeps one device buffer, bound to the execution."""

    def __init__(self, entry: Entry, client: Client, execution: Execution):
        self._entry = entry
        self._execution = execution
        self._token_ids = next(index for index, slot in enumerate(entry.inputs) if slot.role == Role.TOKEN_IDS)
        self._page_size = entry.context // entry.max_blocks_per_seq
        self._inputs: dict[str, _Input] = {}
        self._placed: object = None
        self._tables: object = None
        for index, slot in enumerate(entry.inputs):
            if slot.role not in (Role.WEIGHT, *POOL_OUTPUT_OF):
                self._inputs[slot.role] = _Input(client, slot.type.dims)
                execution.bind(index, self._inputs[slot.role].buffer)

    def close(self) -> None:
        """Destroy the device buffers; idempotent."""
        for item in self._inputs.values():
            item.close()

    def fill(self, batch: Batch, chosen: Chosen | None = None) -> None:
        """Write a batch of at most `entry.batch` rows, each of at most `entry.tokens_per_seq` tokens.

        Where the token ids are just those that the last step chose, they are on the device already.
        """
        self.place(batch)
        width = self._entry.tokens_per_seq
        ids = [0] * len(self._inputs[Role.TOKEN_IDS])
        for number, row in enumerate(batch.rows):
            end = (number + 1) * width
            ids[end - len(row.tokens) : end] = row.tokens
        tokens = self._inputs[Role.TOKEN_IDS]
        if chosen is not None and chosen.ids == ids and chosen.buffer.dims == tokens.buffer.dims:
            self._execution.bind(self._token_ids, chosen.buffer)
        else:
            tokens.set(ids)
            self._execution.bind(self._token_ids, tokens.buffer)

    def place(self, batch: Batch) -> None:
        """Write all of `batch` but its token ids, which do not matter yet. Nothing is done where that stands there."""
        placed = [(row.start, row.end, row.pages, row.ring) for row in batch.rows]
        if placed == self._placed:
            return
        self._placed = None
        width = self._entry.tokens_per_seq
        values = {
            role: [_PADDING.get(role, 0)] * len(item)
            for role, item in self._inputs.items()
            if "TABLES" not in role and role != Role.TOKEN_IDS
        }
        for number, row in enumerate(batch.rows):
            end = (number + 1) * width
            span = slice(end - (row.end - row.start), end)
            positions = range(row.start, row.end)
            values[Role.POSITIONS][span] = positions
            values[Role.SLOT_MAPPING][span] = [slot_of(position, row.pages, self._page_size) for position in positions]
            values[Role.SEQ_LENS][number] = row.end
            if row.ring:
                slots = [slot_of(position, row.ring, self._page_size) for position in positions]
                values[Role.WINDOW_SLOT_MAPPING][span] = slots
        # Page tables are the widest inputs and change only when a row crosses into a new page.
        tables = [(row.pages, row.ring, pages_for(row.end, self._page_size)) for row in batch.rows]
        if tables != self._tables:
            self._tables = None
            values[Role.BLOCK_TABLES] = self._table([row.pages for row in batch.rows], batch.rows)
            if Role.WINDOW_BLOCK_TABLES in self._inputs:
                values[Role.WINDOW_BLOCK_TABLES] = self._table([row.ring for row in batch.rows], batch.rows)
        for role, items in values.items():
            self._inputs[role].set(items)
        self._placed, self._tables = placed, tables

    def _table(self, pages: list[tuple[int, ...]], rows: tuple[Row, ...]) -> list[int]:
        width = self._entry.max_blocks_per_seq
        table = [SCRATCH_PAGE] * (self._entry.batch * width)
        for number, row in enumerate(rows):
            blocks = range(pages_for(row.end, self._page_size))
            table[number * width : number * width + len(blocks)] = [page_of(block, pages[number]) for block in blocks]
        return table
