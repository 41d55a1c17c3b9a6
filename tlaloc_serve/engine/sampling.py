"""Picking the next token: greedily, or by a seeded draw from the exact distribution that the parameters describe.

The distribution is HuggingFace's: penalties and biases on the logits, then temperature, top-k, top-p, min-p, each on
what the one before left (`LogitsProcessor` classes of transformers). It is computed from the row's largest logits,
which the device selects (`Candidates`). Where those cannot decide it exactly (a flat row, a large top-k), the whole
row is asked for; the answer is the same, only slower. Ties go to the lower id.

A draw takes one number from the sequence's own generator, so neighbours in a batch never change it.
"""

from __future__ import annotations

import math
import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from tlaloc_serve.errors import RequestError

# The logits [vocab] of one row, f32.
Row: TypeAlias = "array[float]"


@dataclass(frozen=True)
class SamplingParams:
    """How to pick. The defaults are greedy.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 leave everything in. `repetition_penalty` divides the
    positive and multiplies the negative logits of every id seen in prompt or output (CTRL, arXiv 1909.05858);
    `presence_penalty` and `frequency_penalty` are subtracted once, and once an occurrence, for ids in the output
    (OpenAI's definition). `logit_bias` is added, by token id. `seed` None draws one from the system.

    Raises RequestError for a value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        finite = math.isfinite
        for name, value, fits, want in (
            ("temperature", self.temperature, finite(self.temperature) and self.temperature >= 0, "0 or more"),
            ("top_k", self.top_k, self.top_k >= 0, "0 (off) or more"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "more than 0, at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "0 to 1"),
            ("repetition_penalty", self.repetition_penalty, 0 < self.repetition_penalty < math.inf, "more than 0"),
            ("presence_penalty", self.presence_penalty, finite(self.presence_penalty), "a number"),
            ("frequency_penalty", self.frequency_penalty, finite(self.frequency_penalty), "a number"),
        ):
            if not fits:
                raise RequestError(name, "out of range", got=value, want=want)
        for token, bias in self.logit_bias.items():
            if token < 0 or not finite(bias):
                raise RequestError("logit_bias", f"cannot add to token {token}", got=bias, want="a finite number")

    def seeded(self) -> SamplingParams:
        """These parameters with a seed drawn from the system where they have none and need one."""
        if self.seed is not None or self.temperature == 0.0:
            return self
        return replace(self, seed=random.SystemRandom().getrandbits(32))

    @property
    def plain(self) -> bool:
        """Whether the logits are used as they are: no penalty, no bias."""
        no_penalty = self.repetition_penalty == 1.0 and not self.presence_penalty and not self.frequency_penalty
        return no_penalty and not self.logit_bias


@dataclass(frozen=True)
class Candidates:
    """The largest logits of one row, descending: `ids` and `logits`, and the whole row on demand.

    `mass` is the sum over the vocabulary of exp((logit - largest) / temperature), computed on the device for the
    temperature of the request; it is what turns a logit into a probability without the other logits.
    """

    ids: Sequence[int]
    logits: Sequence[float]
    mass: float
    row: Callable[[], Row]


class Sampler:
    """The picks of one sequence: its parameters, its random numbers, what it has seen."""

    def __init__(self, params: SamplingParams, prompt: Iterable[int]):
        self.params = params
        self._random = random.Random(params.seed)
        self._prompt = frozenset(prompt)
        self._counts: Counter[int] = Counter()

    @property
    def greedy(self) -> bool:
        """Whether the device's argmax is the pick: no draw, no changed logits."""
        return self.params.temperature == 0.0 and self.params.plain

    @property
    def temperature(self) -> float | None:
        """What a step's candidates are computed for; None for a greedy pick. Without a draw any temperature does."""
        return None if self.greedy else self.params.temperature or 1.0

    def seen(self, token: int) -> None:
        """Record a generated token."""
        self._counts[token] += 1

    def pick(self, candidates: Candidates) -> int:
        """The next token. Raises RequestError for a row without a distribution (NaN, +infinity, nothing finite)."""
        if math.isnan(candidates.mass) or not candidates.logits or not math.isfinite(candidates.logits[0]):
            raise RequestError("sampling", "the logits are no distribution", got="NaN or an infinite maximum")
        draw = None if self.params.temperature == 0.0 else self._random.random()
        if self.params.plain:
            picked = _from_sorted(self.params, candidates.ids, candidates.logits, candidates.mass, draw)
        else:
            picked = self._from_changed(candidates, draw)
        return self._from_row(candidates.row(), draw) if picked is None else picked

    def _from_changed(self, candidates: Candidates, draw: float | None) -> int | None:
        """A pick from candidates some of whose logits are changed; None when they cannot decide it.

        Ids outside the candidates that nothing changes stay below the last candidate, so what ends up above it is
        exact. The changed ids' own logits come from the row.
        """
        row = candidates.row()
        changes = {token: self._changed(token, row[token]) for token in self._touched(len(row))}
        pairs = [
            (token, logit)
            for token, logit in zip(candidates.ids, candidates.logits, strict=True)
            if token not in changes
        ]
        # What is missing stands below the last candidate, or ties with it and has a higher id.
        last = (-candidates.logits[-1], candidates.ids[-1])
        complete = len(candidates.ids) == len(row)
        pairs += [(token, logit) for token, logit in changes.items() if complete or (-logit, token) < last]
        if not pairs:
            return None
        pairs.sort(key=lambda pair: (-pair[1], pair[0]))
        mass = 0.0
        if draw is not None:
            temperature, top = self.params.temperature, pairs[0][1]
            mass = candidates.mass * math.exp((candidates.logits[0] - top) / temperature)
            for token, logit in changes.items():
                mass += math.exp((logit - top) / temperature) - math.exp((row[token] - top) / temperature)
        return _from_sorted(self.params, [pair[0] for pair in pairs], [pair[1] for pair in pairs], mass, draw)

    def _touched(self, vocab: int) -> set[int]:
        tokens = set(self._counts) | set(self.params.logit_bias)
        if self.params.repetition_penalty != 1.0:
            tokens |= self._prompt
        return {token for token in tokens if token < vocab}

    def _changed(self, token: int, logit: float) -> float:
        params, count = self.params, self._counts[token]
        if params.repetition_penalty != 1.0 and (count or token in self._prompt):
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        if count:
            logit -= params.presence_penalty + params.frequency_penalty * count
        return logit + params.logit_bias.get(token, 0.0)

    def _from_row(self, row: Row, draw: float | None) -> int:
        """The pick from the whole row: the slow, always exact way."""
        logits = list(row)
        if not self.params.plain:
            for token in self._touched(len(logits)):
                logits[token] = self._changed(token, logits[token])
        ids = sorted(range(len(logits)), key=lambda token: -logits[token])  # stable: ties go to the lower id
        values = [logits[token] for token in ids]
        mass = (
            0.0
            if draw is None
            else math.fsum(math.exp((value - values[0]) / self.params.temperature) for value in values)
        )
        picked = _from_sorted(self.params, ids, values, mass, draw, complete=True)
        return ids[0] if picked is None else picked


def _from_sorted(
    params: SamplingParams,
    ids: Sequence[int],
    logits: Sequence[float],
    mass: float,
    draw: float | None,
    complete: bool = False,
) -> int | None:
    """Pick from descending `logits`; `complete` says that nothing of the row is missing. None: they do not suffice."""
    if draw is None:
        return ids[0]
    weights = [math.exp((logit - logits[0]) / params.temperature) for logit in logits]
    count, total = len(weights), mass
    if params.top_k:
        if params.top_k <= count:
            count, total = params.top_k, math.fsum(weights[: params.top_k])
        elif not complete:
            return None
    left_out = not complete and count == len(weights) and total > math.fsum(weights) * (1 + 1e-9)
    if params.top_p < 1:
        reached, kept = 0.0, 0
        while kept < count and reached < params.top_p * total:
            reached += weights[kept]
            kept += 1
        if left_out and reached < params.top_p * total:
            return None
        count, total, left_out = kept, reached, False
    if params.min_p:
        kept = sum(weight >= params.min_p for weight in weights[:count])  # the largest weight is 1
        if left_out and kept == count:
            return None
        if kept < count or not left_out:
            count, total, left_out = kept, math.fsum(weights[:kept]), False
    point = draw * total
    for token, weight in zip(ids[:count], weights, strict=False):
        point -= weight
        if point < 0:
            return token
    # Either the draw fell on what is missing, or rounding left a last hair's breadth to the last token.
    return None if left_out else ids[count - 1]
