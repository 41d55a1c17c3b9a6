"""Which sequences run in the next step, on which ladder point. Plain integers in and out; no device objects.

Rules that hold here:
- A request is checked whole before anything runs: ids, lengths, pages. What cannot run is refused by name.
- Pages are given out as positions are reached, and only while every sequence can still finish in the order of arrival.
  So nothing runs out half way, nothing is taken back, and the queue always moves.
- Batch and context round up to the ladder, never down.
- A prompt goes through prefill entries where the artifact has them, in as few calls as they allow. A single token, a
  few where decode steps cost less, and every prompt of an artifact without prefill entries go through decode steps.
- A sequence is freed in one place: `_release`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from tlaloc_serve.artifact.manifest import Entry, Kind, Manifest
from tlaloc_serve.engine.pages import PageAllocator, pages_for
from tlaloc_serve.errors import CapacityError, RequestError

DEFAULT_MAX_NEW = 16
# On a platform, how many tokens of a prefill call, padding included, take as long as one decode step. Measured for CPU
# with SmolLM2-135M in f32 on three plugins (22 to 25 ms a step; a call of 64 tokens takes 135 to 210 ms, one of 512 840
# to 1,300 ms): 9 to 14. Where a platform is not listed a call is taken to cost no more than a step.
PREFILL_TOKENS_A_STEP = {"cpu": 12}


class Reason:
    """Why a sequence ended."""

    EOS = "eos"  # the model said so
    STOP = "stop"  # a stop string was completed
    LENGTH = "length"  # max_new tokens were generated
    CONTEXT = "context"  # the largest compiled context is full
    REFUSED_TOKEN = "refused_token"  # the model generated an id that stands for what it cannot produce
    CANCELLED = "cancelled"


@dataclass(eq=False)
class Sequence:
    """One prompt on its way. `index` is its place in the request.

    `position` counts the tokens whose keys and values are in the pools.
    """

    index: int
    prompt: tuple[int, ...]
    max_new: int
    fills_context: bool  # max_new was not asked for but is what the context leaves
    tokens: list[int] = field(default_factory=list)
    position: int = 0
    pages: tuple[int, ...] = ()
    ring: tuple[int, ...] = ()
    reason: str | None = None

    @property
    def generated(self) -> tuple[int, ...]:
        return tuple(self.tokens[len(self.prompt) :])

    @property
    def pending(self) -> int:
        """Tokens that are known and not yet in the pools."""
        return len(self.tokens) - self.position

    @property
    def positions_needed(self) -> int:
        """The last generated token is never fed back, so its position is never written."""
        return len(self.prompt) + self.max_new - 1


class Row(NamedTuple):
    """One live row of a batch: `tokens` go to positions `start ...`; `last` says that its logits are needed."""

    sequence: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    ring: tuple[int, ...]
    last: bool

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class Batch(NamedTuple):
    """What one call of an entry computes; rows beyond `rows` are padding."""

    entry: Entry
    rows: tuple[Row, ...]


class Scheduler:
    """Admission, batching and the life of sequences over one manifest's ladder and pools.

    `platform` is a key of `PREFILL_TOKENS_A_STEP`, or any other name.
    """

    def __init__(self, manifest: Manifest, platform: str = ""):
        self.manifest = manifest
        self._tokens_a_step = PREFILL_TOKENS_A_STEP.get(platform)
        model = manifest.model
        self._page_size = model.block_size
        self._window = model.windowed_kv
        self._pages = PageAllocator("KV pool", model.num_blocks)
        self._ring_pages = PageAllocator("windowed KV pool", self._window.num_blocks if self._window else 1)
        self._decode = sorted(manifest.of_kind(Kind.DECODE), key=lambda entry: (entry.batch, entry.context))
        # Cheapest first: the work of a prefill call grows with its tokens and with the context they attend to.
        self._prefill = sorted(
            manifest.of_kind(Kind.PREFILL), key=lambda entry: (entry.batch, entry.context, entry.tokens_per_seq)
        )
        self._refused = {token.id: token.config_key for token in model.refused_tokens}
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def live(self) -> tuple[Sequence, ...]:
        """Every accepted sequence that has not ended."""
        return (*self._running, *self._waiting)

    def check(self, prompts: Iterable[Seq[int]], max_new: int | None = None) -> list[Sequence]:
        """Prompts as sequences that can run, all or none; they take nothing until they are submitted.

        `max_new` None means 16 tokens or what the largest context leaves. Raises RequestError for ids the model does
        not have or refuses, CapacityError for more positions than the ladder or the pool can hold.
        """
        sequences = [self._check(number, tuple(prompt), max_new) for number, prompt in enumerate(prompts)]
        if not sequences:
            raise RequestError("prompts", "there is none", want="at least one list of token ids")
        return sequences

    def submit(self, sequences: Iterable[Sequence]) -> None:
        """Queue checked sequences, in order."""
        self._waiting.extend(sequences)

    def _check(self, number: int, prompt: tuple[int, ...], max_new: int | None) -> Sequence:
        where = f"prompt {number}"
        vocab, most = self.manifest.model.vocab_size, self.manifest.ladder.max_context
        if not prompt:
            raise RequestError(where, "empty", want="at least one token id")
        for place, token in enumerate(prompt):
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab:
                raise RequestError(
                    where, f"token {place} is outside the vocabulary", got=repr(token), want=f"0 to {vocab - 1}"
                )
            if token in self._refused:
                raise RequestError(
                    where, f"token {place} is refused by this model", got=f"{token} ({self._refused[token]})"
                )
        if max_new is not None and (not isinstance(max_new, int) or isinstance(max_new, bool) or max_new < 1):
            raise RequestError("max_new", "not a number of tokens", got=repr(max_new), want="at least 1")
        if len(prompt) > most:
            raise CapacityError(
                where,
                "longer than the largest compiled context",
                got=f"{len(prompt)} tokens",
                want=f"at most {most}",
                todo="shorten it, or export with a larger --context",
            )
        fits = most - len(prompt) + 1
        if max_new is not None and max_new > fits:
            raise CapacityError(
                where,
                f"{len(prompt)} prompt tokens and max_new {max_new} do not fit the largest compiled context of {most}",
                want=f"max_new at most {fits}",
            )
        fills_context = max_new is None and fits < DEFAULT_MAX_NEW
        max_new = min(DEFAULT_MAX_NEW, fits) if max_new is None else max_new
        sequence = Sequence(number, prompt, max_new, fills_context, tokens=list(prompt))
        pages, ring = self._needs(sequence)
        for need, pool in ((pages, self._pages), (ring, self._ring_pages)):
            if need > pool.capacity:
                raise CapacityError(
                    where,
                    f"needs more pages than the {pool.name} has",
                    got=f"{need} pages",
                    want=f"at most {pool.capacity}",
                    todo="ask for fewer tokens, or export with a larger --num-blocks",
                )
        return sequence

    def _needs(self, sequence: Sequence) -> tuple[int, int]:
        pages = pages_for(sequence.positions_needed, self._page_size)
        return pages, min(pages, self._window.ring_pages) if self._window else 0

    def next_batch(self) -> Batch | None:
        """The next step's batch, or None when every sequence has ended."""
        self._admit()
        if not self._running:
            return None
        prefill = [(sequence, self._prefill_shape(sequence)) for sequence in self._running if sequence.pending > 1]
        for shape in dict.fromkeys(shape for _, shape in prefill if shape is not None):
            batch = self._prefill_batch([sequence for sequence, its in prefill if its == shape], shape)
            if batch is not None:
                return batch
        rows = tuple(self._row(item, 1) for item in self._running if self._grant(item, item.position + 1))
        return Batch(self._smallest(self._decode, len(rows), max(row.end for row in rows)), rows)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.manifest.ladder.max_batch:
            sequence = self._waiting[0]
            ring = self._needs(sequence)[1]
            if ring > self._ring_pages.available or not self._all_can_finish([*self._running, sequence]):
                return
            sequence.ring = self._ring_pages.allocate(ring)
            self._running.append(self._waiting.popleft())

    def _grant(self, sequence: Sequence, end: int) -> bool:
        """Give the sequence the pages that positions below `end` need; False when it has to wait for them."""
        missing = pages_for(end, self._page_size) - len(sequence.pages)
        if missing <= 0:
            return True
        if missing > self._pages.available or not self._all_can_finish(self._running, sequence, missing):
            return False
        sequence.pages += self._pages.allocate(missing)
        return True

    def _all_can_finish(self, sequences: list[Sequence], granted: Sequence | None = None, extra: int = 0) -> bool:
        """Whether, with `extra` pages more for `granted`, each sequence can still finish once those before it have.

        This is the safety check of Dijkstra's banker's algorithm in the order of arrival: the first sequence never
        waits, so pages can be given out one at a time without a deadlock and without taking any back.
        """
        free = self._pages.available - extra
        for sequence in sequences:
            held = len(sequence.pages) + (extra if sequence is granted else 0)
            if self._needs(sequence)[0] - held > free:
                return False
            free += held
        return True

    def _prefill_shape(self, sequence: Sequence) -> tuple[int, int] | None:
        """(context, tokens a sequence) of the cheapest prefill entries that take most of what is pending.

        None where there are none, and where as many decode steps cost less than the call.
        """
        best: tuple[int, int] | None = None
        most = 0
        for entry in self._prefill:
            takes = self._takes(sequence, entry)
            if takes > most:
                best, most = (entry.context, entry.tokens_per_seq), takes
        if best is not None and self._tokens_a_step is not None and sequence.pending * self._tokens_a_step <= best[1]:
            return None
        return best

    def _takes(self, sequence: Sequence, entry: Entry) -> int:
        takes = min(sequence.pending, entry.tokens_per_seq, entry.context - sequence.position)
        if self._window is not None:
            # A longer call would overwrite ring pages that its own first tokens still attend to.
            ring = self._window.ring_pages * self._page_size
            takes = min(takes, ring - min(sequence.position, self._window.window - 1))
        return takes

    def _prefill_batch(self, sequences: list[Sequence], shape: tuple[int, int]) -> Batch | None:
        """One call for the sequences of one shape; None when all of them wait for pages."""
        entries = [entry for entry in self._prefill if (entry.context, entry.tokens_per_seq) == shape]
        rows = []
        for sequence in sequences[: max(entry.batch for entry in entries)]:
            count = self._takes(sequence, entries[0])
            if self._grant(sequence, sequence.position + count):
                rows.append(self._row(sequence, count))
        return Batch(self._smallest(entries, len(rows), 0), tuple(rows)) if rows else None

    def shortest_decode(self, sequences: int) -> Entry:
        """The decode entry that so many sequences at once, or as many as run at once, begin with or soon reach."""
        return self._smallest(self._decode, min(sequences, self.manifest.ladder.max_batch), 1)

    def upcoming(self, batch: Batch) -> Batch | None:
        """The decode step that follows the decode step `batch` if its rows go on; ids not known yet stand as 0.

        None where that cannot be told without giving out pages, or where the entry would be another one.
        """
        entry = batch.entry
        if entry.kind != Kind.DECODE or any(row.end >= len(row.pages) * self._page_size for row in batch.rows):
            return None
        if max(row.end for row in batch.rows) >= entry.context:
            return None
        return Batch(entry, tuple([row._replace(start=row.end, tokens=(0,)) for row in batch.rows]))

    @staticmethod
    def _smallest(entries: list[Entry], rows: int, positions: int) -> Entry:
        return next(entry for entry in entries if entry.batch >= rows and entry.context >= positions)

    def _row(self, sequence: Sequence, count: int) -> Row:
        start = sequence.position
        tokens = tuple(sequence.tokens[start : start + count])
        return Row(sequence.index, start, tokens, sequence.pages, sequence.ring, last=count == sequence.pending)

    def advance(self, batch: Batch, picks: Seq[int | None], eos_ids: frozenset[int]) -> list[Sequence]:
        """Record a step: `picks[i]` is the next token of row i where its logits were needed.

        Returns the sequences that ended, freed. A generated id in the model's refused tokens ends its sequence and is
        not among the generated ids; an EOS id ends it and is.
        """
        running = {sequence.index: sequence for sequence in self._running}
        ended = []
        for row, pick in zip(batch.rows, picks, strict=True):
            sequence = running[row.sequence]
            sequence.position = row.end
            if not row.last or pick is None:
                continue
            if pick in self._refused:
                sequence.reason = Reason.REFUSED_TOKEN
            else:
                sequence.tokens.append(pick)
                if pick in eos_ids:
                    sequence.reason = Reason.EOS
                elif len(sequence.generated) == sequence.max_new:
                    sequence.reason = Reason.CONTEXT if sequence.fills_context else Reason.LENGTH
            if sequence.reason is not None:
                ended.append(sequence)
        for sequence in ended:
            self._release(sequence)
        return ended

    def end(self, sequence: Sequence, reason: str) -> None:
        """End a live sequence from outside (cancelled, a stop string); idempotent."""
        if sequence.reason is None:
            sequence.reason = reason
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            return
        self._running.remove(sequence)
        self._pages.free(sequence.pages)
        self._ring_pages.free(sequence.ring)
