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
import math
import mmap
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tlaloc_serve.artifact.manifest import POOL_OUTPUT_OF, Entry, Role, TensorType, Weight
from tlaloc_serve.artifact.store import Artifact
from tlaloc_serve.engine.compiler import Compiler
from tlaloc_serve.engine.inputs import StepInputs
from tlaloc_serve.engine.logits import Chosen, LogitsReader
from tlaloc_serve.engine.sampling import Candidates, Row
from tlaloc_serve.engine.scheduler import Batch
from tlaloc_serve.engine.selection import NAN_ROW
from tlaloc_serve.errors import EngineBroken, HandleClosed, TlalocError
from tlaloc_serve.pjrt.client import Buffer, Client, Execution


class StepResult(NamedTuple):
    """What a step gave back.

    `picks[i]` is the greedy next token of row i, None where its logits were not needed; `candidates[i]` what a sampler
    picks from, None where no temperature was given. Candidates can read their whole row until the next step.
    `logits` holds, when asked for, the row [vocab] of each live row as f32. `compile_seconds` is 0.0 unless
    this step made its entry's executable; `cached` says that it came from the disk then.
    """

    picks: tuple[int | None, ...]
    candidates: tuple[Candidates | None, ...]
    logits: tuple[Row, ...] | None
    seconds: float
    compile_seconds: float
    cached: bool = False


@dataclass(frozen=True)
class _Loaded:
    """An entry that has been compiled. `pools` pairs each pool output with the pool it replaces."""

    execution: Execution
    inputs: StepInputs
    pools: tuple[tuple[int, Buffer], ...]
    logits: int
    logits_type: TensorType
    donates: bool
    cached: bool


class _Checks:
    """Hashes weights in threads of its own, no further ahead of the staging than there are cores."""

    def __init__(self, artifact: Artifact):
        from concurrent.futures import Future, ThreadPoolExecutor  # 15 ms that most starts need not spend

        self._artifact = artifact
        self._cores = os.cpu_count() or 1
        self._pool = ThreadPoolExecutor(self._cores)
        self._begun: deque[tuple[Weight, Future[None]]] = deque()
        self.passed: set[str] = set()

    def __enter__(self) -> _Checks:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def begin(self, weight: Weight, data: mmap.mmap) -> None:
        """Begin with one more; raises the ArtifactError of one that is done."""
        self._begun.append((weight, self._pool.submit(self._artifact.check_weight, weight, data)))
        self._settle(self._cores)

    def finish(self) -> None:
        """Wait for all; raises the first one's ArtifactError."""
        self._settle(0)

    def _settle(self, rest: int) -> None:
        while len(self._begun) > rest:
            weight, check = self._begun.popleft()
            check.result()
            self.passed.add(weight.name)


class Runner:
    """The device side of one artifact on one client. Close it before the client."""

    def __init__(
        self, artifact: Artifact, client: Client, compiler: Compiler | None = None, *, verify_weights: bool = False
    ):
        self.artifact = artifact
        self._verify = verify_weights
        self.client = client
        self.compiler = compiler or Compiler(client)
        self.compiles = 0
        self.cache_hits = 0
        self._reader = LogitsReader(client, lambda body, what: self.compiler.compile(body, what).executable)
        self._logits: Buffer | None = None
        self._chosen: Chosen | None = None  # on the device until the reader chooses again
        self.pools: dict[str, Buffer] = {}
        self._weights: dict[str, Buffer] = {}
        self._staged = False
        self._loaded: dict[str, _Loaded] = {}
        self._broken: str | None = None
        self._closed = False
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        """Destroy every buffer and executable; idempotent."""
        self._closed = True
        self._drop_logits()
        self._chosen = None
        self._reader.close()
        self.compiler.close()
        self._stack.close()
        if not self.client.closed:
            self.client.take_back()
        self.pools.clear()
        self._weights.clear()
        self._loaded.clear()

    @property
    def pick_compiles(self) -> int:
        """How many selection programs were compiled; they are the runtime's own, not entries."""
        return self._reader.compiles

    def find(self, entry: Entry) -> Callable[[], None] | None:
        """What loads the executable of `entry` ahead of its first step; None where the disk does not have it."""
        return self.compiler.find(self.artifact.body(entry).data)

    def stage(self) -> Iterator[tuple[int, int]]:
        """Put weights and zeroed pools on the device, once; yields (bytes staged, bytes in all) after each weight.

        On a CPU client a weight is not copied: the device buffer is the mapped file. With `verify_weights` each one is
        hashed meanwhile, on all cores; one with another hash raises ArtifactError, and no step runs.
        """
        self._refuse_if_unusable()
        if self._staged:
            return
        weights = [weight for weight in self.artifact.manifest.weights if weight.name not in self._weights]
        total = self.artifact.manifest.weight_bytes()
        done = total - sum(weight.byte_length for weight in weights)
        with _Checks(self.artifact) if self._verify else contextlib.nullcontext() as check:
            try:
                for weight in weights:
                    data = self.artifact.map_weight(weight)
                    if check is not None:
                        check.begin(weight, data)
                    self._stage(weight, data)
                    done += weight.byte_length
                    yield done, total
                if check is not None:
                    check.finish()
                    self.artifact.weights_verified = True
            finally:  # what was not found right is staged, and hashed, another time
                for name in set(self._weights) - check.passed if check is not None else ():
                    self._weights.pop(name).close()
        self._make_pools()
        self._staged = True

    def _stage(self, weight: Weight, data: mmap.mmap) -> None:
        in_place = self.client.platform_name == "cpu"
        buffer = self.client.buffer_from_host(data, weight.type.dtype, weight.type.dims, zero_copy=in_place)
        self._weights[weight.name] = self._stack.enter_context(buffer)

    def _make_pools(self) -> None:
        """Pools of zeros. On a CPU client they are anonymous memory in place: a page costs when it is first used."""
        slots = [slot for slot in self.artifact.manifest.entries[0].inputs if slot.role in POOL_OUTPUT_OF]
        in_place = self.client.platform_name == "cpu"
        for slot in slots:
            if slot.name in self.pools:
                continue
            zeros = mmap.mmap(-1, slot.type.byte_length)
            buffer = self.client.buffer_from_host(
                zeros, slot.type.dtype, slot.type.dims, zero_copy=in_place, donatable=in_place
            )
            self.pools[slot.name] = self._stack.enter_context(buffer)

    def step(
        self,
        batch: Batch,
        *,
        temperatures: Sequence[float | None] = (),
        pick_all: bool = False,
        keep_logits: bool = False,
        upcoming: Callable[[Batch], Batch | None] | None = None,
    ) -> StepResult:
        """Run one batch. A row with a temperature gets candidates, the others a greedy pick.

        `upcoming` says what the next step is likely to be: its inputs are put in place while the device works.

        `pick_all` picks for rows in the middle of their prompt too; `keep_logits` reads whole rows. Raises
        EngineBroken when the pools are lost, PjrtError when the plugin refuses the body or has no memory.
        """
        self._refuse_if_unusable()
        begin = time.perf_counter()
        if not self._staged:
            for _ in self.stage():
                pass
        loaded, compile_seconds = self._load(batch.entry)
        loaded.inputs.fill(batch, self._chosen)
        wanted = [pick_all or keep_logits or row.last for row in batch.rows]
        try:
            loaded.execution.run(awaited=not any(wanted))
            # From here to the wait in `_read` the device works: what does not need the step's results is done now.
            self._drop_logits()
            loaded.execution.give(loaded.pools)
            likely = upcoming(batch) if upcoming is not None else None
            if likely is not None and likely.entry is batch.entry:
                with contextlib.suppress(TlalocError):  # the step itself will try again, and tell
                    loaded.inputs.place(likely)
            picks, candidates = self._read(loaded, batch, wanted, temperatures)
            logits = self._rows(loaded.logits_type, len(batch.rows)) if keep_logits else None
        except TlalocError as error:
            if loaded.donates:
                self._broken = str(error)
                raise EngineBroken(batch.entry.id, f"the step failed and its KV pools are gone: {error}") from error
            raise
        seconds = time.perf_counter() - begin
        return StepResult(picks, candidates, logits, seconds, compile_seconds, bool(compile_seconds) and loaded.cached)

    def _refuse_if_unusable(self) -> None:
        if self._closed:
            raise HandleClosed("engine", "used after close()")
        if self._broken is not None:
            raise EngineBroken("engine", f"an earlier step failed: {self._broken}", todo="open the artifact again")

    def _load(self, entry: Entry) -> tuple[_Loaded, float]:
        """The compiled entry and the seconds this call spent on having it."""
        loaded = self._loaded.get(entry.id)
        if loaded is not None:
            return loaded, 0.0
        begin = time.perf_counter()
        body = self.artifact.body(entry)
        with contextlib.ExitStack() as stack:
            compiled = self.compiler.compile(body.data, entry.id, entry.body_path)
            executable = stack.enter_context(compiled.executable)
            outputs = [(slot.type.dtype, slot.type.dims) for slot in entry.outputs]
            donated = frozenset(body.signature.aliases)
            execution = stack.enter_context(executable.execution(len(entry.inputs), donated, outputs))
            inputs = stack.enter_context(contextlib.closing(StepInputs(entry, self.client, execution)))
            weights = [(i, self._weights[slot.name]) for i, slot in enumerate(entry.inputs) if slot.role == Role.WEIGHT]
            execution.hold(*weights)
            for index, slot in enumerate(entry.inputs):
                if slot.role in POOL_OUTPUT_OF:
                    execution.bind(index, self.pools[slot.name])
            pools = tuple((output, self.pools[entry.inputs[source].name]) for source, output in entry.donation_pairs)
            logits = next(i for i, slot in enumerate(entry.outputs) if slot.role == Role.LOGITS)
            kind, cached = entry.outputs[logits].type, compiled.compilation.cached
            loaded = _Loaded(execution, inputs, pools, logits, kind, bool(donated), cached)
            self._stack.push(stack.pop_all())
        self._loaded[entry.id] = loaded
        self.compiles += 1
        self.cache_hits += loaded.cached
        return loaded, time.perf_counter() - begin

    def _read(
        self, loaded: _Loaded, batch: Batch, wanted: Sequence[bool], temperatures: Sequence[float | None]
    ) -> tuple[tuple[int | None, ...], tuple[Candidates | None, ...]]:
        """Await the step and bring over what is needed of it: nothing, an id a row, or candidates a row."""
        nothing = (None,) * len(batch.rows)
        if not any(wanted):
            loaded.execution.wait()
            return nothing, nothing
        self._logits = loaded.execution.take(loaded.logits)
        self._chosen = None
        if any(temperature is not None for temperature in temperatures):
            found = self._reader.candidates(self._logits, loaded.logits_type, temperatures)
            # A sampler refuses a row with a NaN itself; the largest logit that comes along says nothing of one.
            ids = [
                NAN_ROW if heat is None and math.isnan(item.mass) else item.ids[0]
                for item, heat in zip(found, temperatures, strict=True)
            ]
            hot = tuple(item if heat is not None else None for item, heat in zip(found, temperatures, strict=True))
        else:
            self._chosen, hot = self._reader.greedy(self._logits, loaded.logits_type), nothing
            ids = self._chosen.ids
        picks = tuple([pick if want else None for pick, want in zip(ids, wanted, strict=False)])
        if NAN_ROW in picks:
            row = batch.rows[picks.index(NAN_ROW)]
            where = f"the logits of sequence {row.sequence} at position {row.end - 1}"
            raise EngineBroken(batch.entry.id, f"{where} hold a NaN")
        return picks, hot

    def _rows(self, kind: TensorType, count: int) -> tuple[Row, ...]:
        if self._logits is None:
            return ()
        return tuple(self._reader.row(self._logits, kind, number) for number in range(count))

    def _drop_logits(self) -> None:
        if self._logits is not None:
            self._logits.close()
            self._logits = None
