"""The step loop: schedule, run, pick, advance. Token ids in, events out; nothing is printed and nothing calls back.

A cancel is a mark that is acted on at the next step boundary, so a sequence is freed in exactly one place.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple

from tlaloc_serve.artifact.store import Artifact
from tlaloc_serve.engine.compiler import Compilation, Compiler
from tlaloc_serve.engine.runner import Runner
from tlaloc_serve.engine.sampling import Sampler, SamplingParams
from tlaloc_serve.engine.scheduler import Batch, Reason, Scheduler, Sequence
from tlaloc_serve.errors import RequestError
from tlaloc_serve.pjrt.client import Client


@dataclass(frozen=True)
class Staged:
    """Weights reached the device: bytes so far and in all. Comes once a weight, before the first step."""

    done: int
    total: int


class StepRow(NamedTuple):
    """One live row of a step: which prompt, the ids that were fed, whether the last was generated, and the argmax."""

    sequence: int
    tokens: tuple[int, ...]
    generated: bool
    argmax: int | None


class Step(NamedTuple):
    """One call of an entry. `seconds` is wall time; `compile_seconds` the part of it spent on having its executable,
    0.0 where it was there; `cached` says that it came from the disk."""

    number: int
    entry: str
    rows: tuple[StepRow, ...]
    seconds: float
    compile_seconds: float
    cached: bool = False


@dataclass(frozen=True)
class Token:
    """A generated id of prompt number `sequence`; `index` counts that prompt's generated ids from 0."""

    sequence: int
    index: int
    id: int


@dataclass(frozen=True)
class Finished:
    """The end of prompt number `sequence`: its generated ids and why it ended (a value of `Reason`)."""

    sequence: int
    generated: tuple[int, ...]
    reason: str
    detail: str = ""


Event = Staged | Step | Token | Finished


@dataclass
class RunReport:
    """The facts of the last `generate`, filled as it runs. Times in seconds.

    `compiles` counts the ladder points whose executable was made, `cache_hits` those among them that came from the
    disk, `pick_compiles` the selection programs. `compilations` has each of all these; `warnings` are the compiler's.
    """

    prompts: tuple[tuple[int, ...], ...] = ()
    max_new: tuple[int, ...] = ()
    seeds: tuple[int | None, ...] = ()
    steps: list[Step] = field(default_factory=list)
    finished: dict[int, Finished] = field(default_factory=dict)
    compiles: int = 0
    cache_hits: int = 0
    pick_compiles: int = 0
    compilations: list[Compilation] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    staged_bytes: int = 0

    @property
    def median_step_seconds(self) -> float | None:
        """The median over the steps that compiled nothing, or over all where every step did."""
        settled = [step.seconds for step in self.steps[1:] if not step.compile_seconds]
        return _median(settled or [step.seconds for step in self.steps]) if self.steps else None


def _median(values: Seq[float]) -> float:
    """As `statistics.median`, whose import takes 5 ms of every start."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


class Engine:
    """An artifact on a client, ready to generate. Made by `tlaloc_serve.open`; a context manager.

    `report` holds the facts of the last run. One thread at a time may use an engine; `cancel` may come from any. With
    `verify_weights` each weight is hashed as it is staged; one with another hash raises ArtifactError then.
    """

    def __init__(
        self,
        artifact: Artifact,
        client: Client,
        resources: contextlib.ExitStack | None = None,
        *,
        compiler: Compiler | None = None,
        verify_weights: bool = False,
    ):
        self.artifact = artifact
        self.client = client
        self.report = RunReport()
        self._scheduler = Scheduler(artifact.manifest, client.platform_name)
        self._cancelled = threading.Event()
        self._stopped: set[int] = set()
        with resources or contextlib.ExitStack() as stack:
            self._runner = stack.enter_context(
                contextlib.closing(Runner(artifact, client, compiler, verify_weights=verify_weights))
            )
            self._resources = stack.pop_all()

    @property
    def platform(self) -> str:
        """The platform that the live client names."""
        return self.client.platform_name

    def close(self) -> None:
        """Destroy every buffer, executable and the client, in that order; idempotent."""
        self._resources.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def cancel(self) -> None:
        """End every sequence of the run in progress at the next step boundary, with the reason `cancelled`."""
        self._cancelled.set()

    def find(self, sequences: int) -> Callable[[], None] | None:
        """What loads the decode entry that so many prompts are likely to need; None where the compile cache has it not.

        Calling it ahead of `generate` is worth while where another thread has work for that time: it is spent in the
        plugin, without the interpreter lock.
        """
        return self._runner.find(self._scheduler.shortest_decode(sequences))

    def stage(self) -> Iterator[Staged]:
        """Put weights and pools on the device now; `generate` does it before the first step of the first run."""
        for done, total in self._runner.stage():
            yield Staged(done, total)

    def generate(
        self,
        prompts: Iterable[Seq[int]],
        max_new: int | None = None,
        *,
        sampling: SamplingParams | Seq[SamplingParams] | None = None,
        eos_ids: Collection[int] | None = None,
        pick_all: bool = False,
    ) -> Iterator[Event]:
        """Decode; yields `Staged`, `Step`, `Token` and `Finished` events as they happen.

        `prompts` are lists of token ids; together they run as one batch where the ladder holds them, else in turns.
        `max_new` counts new tokens a prompt; None means 16, or what the largest context leaves. `sampling` is greedy by
        default; one for all prompts, or one each; a seed of None is drawn now and told in the report. `eos_ids` None
        means the artifact's own. `pick_all` computes the argmax inside prompts too, for `Step` rows.

        The request is checked before the first event: RequestError and CapacityError are raised by this call itself.
        While iterating: PjrtError from the plugin, RequestError where logits to draw from are no distribution (NaN),
        EngineBroken where those of a greedy row hold a NaN, and once the pools are lost. An iterator that is closed
        early frees its sequences.
        """
        eos = frozenset(self.artifact.manifest.frontend.eos_token_ids if eos_ids is None else eos_ids)
        sequences = self._scheduler.check(prompts, max_new)
        samplers = self._samplers(sequences, sampling or SamplingParams())
        return self._run(sequences, samplers, eos, pick_all)

    def _samplers(self, sequences: list[Sequence], sampling: SamplingParams | Seq[SamplingParams]) -> list[Sampler]:
        each = [sampling] * len(sequences) if isinstance(sampling, SamplingParams) else list(sampling)
        if len(each) != len(sequences):
            raise RequestError("sampling", "number of parameters", got=len(each), want=f"one, or {len(sequences)}")
        vocab = self.artifact.manifest.model.vocab_size
        for params in each:
            outside = [token for token in params.logit_bias if token >= vocab]
            if outside:
                raise RequestError("logit_bias", "outside the vocabulary", got=outside[0], want=f"0 to {vocab - 1}")
        return [Sampler(params.seeded(), item.prompt) for params, item in zip(each, sequences, strict=True)]

    def stop(self, sequence: int) -> None:
        """End prompt number `sequence` of the run in progress at the next step boundary, with the reason `stop`.

        To be called while handling an event of that run. A sequence that ended by length in the same step counts as
        stopped too.
        """
        self._stopped.add(sequence)

    def _run(
        self, sequences: list[Sequence], samplers: list[Sampler], eos: frozenset[int], pick_all: bool
    ) -> Iterator[Event]:
        if self._scheduler.live:
            raise RequestError("generate", "another run is in progress", todo="finish or close its iterator first")
        self._cancelled.clear()
        self._stopped.clear()
        self._scheduler.submit(sequences)
        self.report = RunReport(
            prompts=tuple(sequence.prompt for sequence in sequences),
            max_new=tuple(sequence.max_new for sequence in sequences),
            seeds=tuple(None if sampler.greedy else sampler.params.seed for sampler in samplers),
            staged_bytes=self.artifact.manifest.weight_bytes(),
            warnings=list(self._runner.compiler.warnings),
        )
        before, log = self._counts(), self._runner.compiler.log
        begin = time.perf_counter()
        try:
            yield from self.stage()
            while not self._cancelled.is_set() and (batch := self._scheduler.next_batch()) is not None:
                heats = [samplers[row.sequence].temperature if row.last else None for row in batch.rows]
                result = self._runner.step(
                    batch, temperatures=heats, pick_all=pick_all, upcoming=self._scheduler.upcoming
                )
                picks = [
                    pick if candidates is None else samplers[row.sequence].pick(candidates)
                    for row, pick, candidates in zip(batch.rows, result.picks, result.candidates, strict=True)
                ]
                # The first step's time holds the staging of the weights, as the one thing a user waited for.
                seconds = result.seconds if self.report.steps else time.perf_counter() - begin
                if len(log) != before[3] + len(self.report.compilations):
                    self._tell_compiles(before)
                rows = [
                    StepRow(row.sequence, row.tokens, row.end > len(self.report.prompts[row.sequence]), pick)
                    for row, pick in zip(batch.rows, picks, strict=True)
                ]
                number, compiled = len(self.report.steps), result.compile_seconds
                step = Step(number, batch.entry.id, tuple(rows), seconds, compiled, result.cached)
                self.report.steps.append(step)
                yield step
                yield from self._advance(batch, picks, samplers, eos)
            for sequence in self._scheduler.live:
                self._scheduler.end(sequence, Reason.CANCELLED)
                yield self._finished(sequence)
        finally:
            for sequence in self._scheduler.live:
                self._scheduler.end(sequence, Reason.CANCELLED)

    def _counts(self) -> tuple[int, int, int, int]:
        runner = self._runner
        return runner.compiles, runner.cache_hits, runner.pick_compiles, len(runner.compiler.log)

    def _tell_compiles(self, before: tuple[int, int, int, int]) -> None:
        """Put into the report what was compiled since the counts were `before`."""
        compiles, hits, picks, _ = (now - then for now, then in zip(self._counts(), before, strict=True))
        self.report.compiles, self.report.cache_hits, self.report.pick_compiles = compiles, hits, picks
        self.report.compilations = self._runner.compiler.log[before[3] :]
        self.report.warnings = list(self._runner.compiler.warnings)

    def _advance(
        self, batch: Batch, picks: Seq[int | None], samplers: list[Sampler], eos: frozenset[int]
    ) -> Iterator[Event]:
        live = {sequence.index: sequence for sequence in self._scheduler.live}
        before = [len(live[row.sequence].tokens) for row in batch.rows]
        ended = self._scheduler.advance(batch, picks, eos)
        for row, length in zip(batch.rows, before, strict=True):
            sequence = live[row.sequence]
            if len(sequence.tokens) > length:
                token = sequence.tokens[-1]
                samplers[row.sequence].seen(token)
                yield Token(row.sequence, length - len(sequence.prompt), token)
        for sequence in ended:
            pick = next(pick for row, pick in zip(batch.rows, picks, strict=True) if row.sequence == sequence.index)
            yield self._finished(sequence, pick)
        for sequence in self._scheduler.live if self._stopped else ():
            if sequence.index in self._stopped:
                self._scheduler.end(sequence, Reason.STOP)
                yield self._finished(sequence)

    def _finished(self, sequence: Sequence, pick: int | None = None) -> Finished:
        detail = ""
        if sequence.reason == Reason.REFUSED_TOKEN:
            keys = {token.id: token.config_key for token in self.artifact.manifest.model.refused_tokens}
            detail = f"the model generated {pick} ({keys.get(pick or 0)}), which it cannot produce as text"
        if sequence.index in self._stopped and sequence.reason in (Reason.LENGTH, Reason.CONTEXT):
            sequence.reason = Reason.STOP
        event = Finished(sequence.index, sequence.generated, sequence.reason or "", detail)
        self.report.finished[event.sequence] = event
        return event
