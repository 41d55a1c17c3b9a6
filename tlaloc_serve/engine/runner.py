"""Runs batches: an executable a ladder point, weights staged once, pools that stay on the device, donation.

Rules that hold here:
- Entries compile at the first step that lands on them. Weights are staged and pools are made before the first step.
- The pools a step returns are the pools the next step takes. Where the body aliases them the old handle is consumed,
  where it does not the old buffer is destroyed; either way no byte of them crosses to the host.
- A step that fails after it donated the pools is final: the runner is broken and says so at every later step.
- One thread owns the runner and every device handle below it.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterator
from dataclasses import dataclass

from tlaloc_serve.artifact.manifest import POOL_OUTPUT_OF, Entry, Role, TensorType
from tlaloc_serve.artifact.store import Artifact
from tlaloc_serve.engine.argmax import argmax_body
from tlaloc_serve.engine.inputs import StepInputs
from tlaloc_serve.engine.scheduler import Batch
from tlaloc_serve.errors import EngineBroken, PjrtError, TlalocError
from tlaloc_serve.pjrt.client import Buffer, Client, Executable, Execution
from tlaloc_serve.pjrt.compile_options import compile_options


@dataclass(frozen=True)
class StepResult:
    """What a step gave back.

    `picks[i]` is the greedy next token of row i, None where its logits were not needed. `logits` holds, when asked
    for, the raw little-endian row [vocab] of each live row in the entry's logits dtype. `compile_seconds` is 0.0 unless
    this step compiled its entry.
    """

    picks: tuple[int | None, ...]
    logits: tuple[bytes, ...] | None
    seconds: float
    compile_seconds: float


@dataclass(frozen=True)
class _Loaded:
    """An entry that has been compiled. `pools` pairs each pool output with the pool it replaces."""

    execution: Execution
    inputs: StepInputs
    pools: tuple[tuple[int, Buffer], ...]
    logits: int
    logits_type: TensorType
    donates: bool


class Runner:
    """The device side of one artifact on one client. Close it before the client."""

    def __init__(self, artifact: Artifact, client: Client):
        self.artifact = artifact
        self.client = client
        self.compiles = 0
        self.pick_compiles = 0
        self.pools: dict[str, Buffer] = {}
        self._weights: dict[str, Buffer] = {}
        self._loaded: dict[str, _Loaded] = {}
        self._pickers: dict[TensorType, tuple[Execution, bytearray]] = {}
        self._broken: str | None = None
        self._options = compile_options()
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        """Destroy every buffer and executable; idempotent."""
        self._stack.close()
        self.pools.clear()
        self._weights.clear()
        self._loaded.clear()
        self._pickers.clear()

    def stage(self) -> Iterator[tuple[int, int]]:
        """Put weights and zeroed pools on the device, once; yields (bytes staged, bytes in all) after each weight.

        On a CPU client a weight is not copied: the device buffer is the mapped file.
        """
        weights = self.artifact.manifest.weights
        total, done = self.artifact.manifest.weight_bytes(), 0
        zero_copy = self.client.platform_name == "cpu"
        for weight in weights:
            if weight.name in self._weights:
                continue
            data = self.artifact.map_weight(weight)
            buffer = self.client.buffer_from_host(data, weight.type.dtype, weight.type.dims, zero_copy=zero_copy)
            self._weights[weight.name] = self._stack.enter_context(buffer)
            done += weight.byte_length
            yield done, total
        if not self.pools:
            self._make_pools()

    def _make_pools(self) -> None:
        for slot in self.artifact.manifest.entries[0].inputs:
            if slot.role in POOL_OUTPUT_OF:
                # An anonymous mapping is zero without being written, so the only copy is the transfer itself.
                zeros = mmap.mmap(-1, slot.type.byte_length)
                buffer = self.client.buffer_from_host(zeros, slot.type.dtype, slot.type.dims)
                self.pools[slot.name] = self._stack.enter_context(buffer)

    def step(self, batch: Batch, *, pick_all: bool = False, keep_logits: bool = False) -> StepResult:
        """Run one batch. `pick_all` picks for rows in the middle of their prompt too; `keep_logits` reads whole rows.

        Raises EngineBroken when the pools are lost, PjrtError when the plugin refuses the body or has no memory.
        """
        if self._broken is not None:
            raise EngineBroken("engine", f"an earlier step failed: {self._broken}", todo="open the artifact again")
        begin = time.perf_counter()
        for _ in self.stage():
            pass
        loaded, compile_seconds = self._load(batch.entry)
        loaded.inputs.fill(batch)
        try:
            loaded.execution.run()
            for output, pool in loaded.pools:
                loaded.execution.give(output, pool)
            picks, logits = self._read(loaded, batch, pick_all, keep_logits)
        except TlalocError as error:
            if loaded.donates:
                self._broken = str(error)
                raise EngineBroken(batch.entry.id, f"the step failed and its KV pools are gone: {error}") from error
            raise
        return StepResult(picks, logits, time.perf_counter() - begin, compile_seconds)

    def _load(self, entry: Entry) -> tuple[_Loaded, float]:
        """The compiled entry and the seconds this call spent compiling."""
        loaded = self._loaded.get(entry.id)
        if loaded is not None:
            return loaded, 0.0
        begin = time.perf_counter()
        body = self.artifact.body(entry)
        with contextlib.ExitStack() as stack:
            executable = stack.enter_context(self._compile(body.data, f"{entry.id} ({entry.body_path})"))
            outputs = [(slot.type.dtype, slot.type.dims) for slot in entry.outputs]
            donated = frozenset(body.signature.aliases)
            execution = stack.enter_context(executable.execution(len(entry.inputs), donated, outputs))
            inputs = stack.enter_context(contextlib.closing(StepInputs(entry, self.client, execution)))
            for index, slot in enumerate(entry.inputs):
                if slot.role == Role.WEIGHT:
                    execution.bind(index, self._weights[slot.name])
                elif slot.role in POOL_OUTPUT_OF:
                    execution.bind(index, self.pools[slot.name])
            pools = tuple((output, self.pools[entry.inputs[source].name]) for source, output in entry.donation_pairs)
            logits = next(i for i, slot in enumerate(entry.outputs) if slot.role == Role.LOGITS)
            loaded = _Loaded(execution, inputs, pools, logits, entry.outputs[logits].type, bool(donated))
            self._stack.push(stack.pop_all())
        self._loaded[entry.id] = loaded
        self.compiles += 1
        return loaded, time.perf_counter() - begin

    def _compile(self, code: bytes, what: str) -> Executable:
        try:
            return self.client.compile(code, self._options)
        except PjrtError as error:
            detail = f"the plugin cannot compile {what}: {error.detail}"
            raise type(error)(error.call, error.code, error.code_name, detail) from None

    def _read(
        self, loaded: _Loaded, batch: Batch, pick_all: bool, keep_logits: bool
    ) -> tuple[tuple[int | None, ...], tuple[bytes, ...] | None]:
        """Await the step and bring over what is needed of it: nothing, an id a row, or whole rows."""
        wanted = [pick_all or row.last for row in batch.rows]
        if not any(wanted):
            loaded.execution.wait()
            return (None,) * len(batch.rows), None
        with loaded.execution.take(loaded.logits) as logits:
            ids = self._pick(logits, loaded.logits_type)
            rows = self._rows(logits, len(batch.rows)) if keep_logits else None
        vocab = loaded.logits_type.dims[-1]
        for number, (row, pick) in enumerate(zip(batch.rows, ids, strict=False)):
            if wanted[number] and pick == vocab:
                raise EngineBroken(
                    batch.entry.id, f"the logits of sequence {row.sequence} at position {row.end - 1} hold a NaN"
                )
        return tuple(pick if want else None for pick, want in zip(ids, wanted, strict=False)), rows

    def _pick(self, logits: Buffer, kind: TensorType) -> memoryview:
        """The argmax of every row [B], computed on the device."""
        picker = self._pickers.get(kind)
        if picker is None:
            executable = self._stack.enter_context(self._compile(argmax_body(kind), f"the argmax over {kind}"))
            batch = kind.dims[0]
            execution = self._stack.enter_context(executable.execution(1, frozenset(), [("i32", (batch,))]))
            picker = self._pickers[kind] = (execution, bytearray(4 * batch))
            self.pick_compiles += 1
        execution, ids = picker
        execution.bind(0, logits)
        execution.run()
        with execution.take(0) as buffer:
            buffer.read_into(ids)
        return memoryview(ids).cast("i")

    @staticmethod
    def _rows(logits: Buffer, count: int) -> tuple[bytes, ...]:
        """The first `count` rows; padding rows stay where they are when the plugin can read a part of a buffer."""
        size = logits.nbytes // logits.dims[0]
        data = bytearray(size * count if logits.can_read_range else logits.nbytes)
        if logits.can_read_range:
            logits.read_range(0, data)
        else:
            logits.read_into(data)
        return tuple(bytes(data[size * row : size * (row + 1)]) for row in range(count))
