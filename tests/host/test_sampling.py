"""Sampling against the exact distribution, computed here from the definition and nothing of the package."""

from __future__ import annotations

import math
import random
import unittest
from array import array
from collections import Counter

from tlaloc_serve.engine.sampling import Candidates, Sampler, SamplingParams
from tlaloc_serve.errors import RequestError

DRAWS = 20_000


def row_of(size: int, seed: int = 3, spread: float = 2.0) -> array[float]:
    generator = random.Random(seed)
    return array("f", [generator.gauss(0, spread) for _ in range(size)])


def candidates(row: array[float], temperature: float, count: int) -> Candidates:
    """What the device would give: the `count` largest, ties to the lower id, and the mass over the whole row."""
    ids = sorted(range(len(row)), key=lambda token: (-row[token], token))[:count]
    mass = sum(math.exp((value - row[ids[0]]) / (temperature or 1.0)) for value in row)
    return Candidates(ids, [row[token] for token in ids], mass, lambda: row)


def exact(row: array[float], params: SamplingParams) -> dict[int, float]:
    """The definition: softmax at the temperature, then top-k, top-p and min-p, each on what the one before left."""
    kept = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if params.top_k:
        kept = kept[: params.top_k]
    weights = {token: math.exp(row[token] / params.temperature) for token in kept}
    if params.top_p < 1:
        total, reached, count = sum(weights.values()), 0.0, 0
        for token in kept:
            if reached >= params.top_p * total:
                break
            reached, count = reached + weights[token], count + 1
        kept = kept[:count]
    kept = [token for token in kept if weights[token] >= params.min_p * weights[kept[0]]]
    total = sum(weights[token] for token in kept)
    return {token: weights[token] / total for token in kept}


def chi_squared(counts: Counter[int], expected: dict[int, float]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells below five expected draws are pooled."""
    statistic, cells, pooled, pooled_count = 0.0, 0, 0.0, 0
    for token, probability in expected.items():
        want = probability * DRAWS
        if want < 5:
            pooled, pooled_count = pooled + want, pooled_count + counts[token]
            continue
        statistic, cells = statistic + (counts[token] - want) ** 2 / want, cells + 1
    if pooled >= 5:
        statistic, cells = statistic + (pooled_count - pooled) ** 2 / pooled, cells + 1
    return statistic, cells - 1


class Distribution(unittest.TestCase):
    def test_frequencies_match_alone_and_combined(self) -> None:
        row = row_of(300)
        for number, params in enumerate((
            SamplingParams(temperature=1.0),
            SamplingParams(temperature=0.6),
            SamplingParams(temperature=3.0),
            SamplingParams(temperature=1.0, top_k=7),
            SamplingParams(temperature=2.0, top_k=100),
            SamplingParams(temperature=1.0, top_p=0.7),
            SamplingParams(temperature=5.0, top_p=0.95),
            SamplingParams(temperature=1.0, min_p=0.05),
            SamplingParams(temperature=4.0, min_p=0.02),
            SamplingParams(temperature=0.8, top_k=40, top_p=0.9, min_p=0.03),
        )):  # fmt: skip
            with self.subTest(params=params):
                sampler = Sampler(SamplingParams(**{**params.__dict__, "seed": number}), [])
                given = candidates(row, params.temperature, 64)
                counts = Counter(sampler.pick(given) for _ in range(DRAWS))
                expected = exact(row, params)
                self.assertLessEqual(set(counts), set(expected))
                statistic, freedom = chi_squared(counts, expected)
                # Mean `freedom`, variance twice that: five standard deviations, with a fixed seed.
                self.assertLess(statistic, freedom + 5 * math.sqrt(2 * max(freedom, 1)))

    def test_a_short_list_and_the_whole_row_give_the_same_ids(self) -> None:
        row = row_of(500, seed=9, spread=1.0)
        for params in (
            SamplingParams(temperature=1.0, seed=5),
            SamplingParams(temperature=1.5, top_p=0.9, seed=6),
            SamplingParams(temperature=2.0, min_p=0.1, top_k=200, seed=7),
            SamplingParams(
                temperature=1.0, seed=8, repetition_penalty=1.3, frequency_penalty=0.5, logit_bias={3: 4.0, 499: -2.0}
            ),
            SamplingParams(seed=8, presence_penalty=2.5, logit_bias={7: 1.0}),
        ):
            with self.subTest(params=params):
                outputs = []
                for count in (8, 64, 500):
                    sampler = Sampler(params, [1, 2, 3])
                    given = candidates(row, params.temperature, count)
                    ids = []
                    for _ in range(200):
                        ids.append(sampler.pick(given))
                        sampler.seen(ids[-1])
                    outputs.append(ids)
                self.assertEqual(outputs[0], outputs[1])
                self.assertEqual(outputs[1], outputs[2])

    def test_the_same_seed_gives_the_same_ids(self) -> None:
        given = candidates(row_of(100), 1.0, 64)
        runs = []
        for seed in (1, 1, 2):
            sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), [])
            runs.append([sampler.pick(given) for _ in range(50)])
        self.assertEqual(runs[0], runs[1])
        self.assertNotEqual(runs[0], runs[2])


class Changes(unittest.TestCase):
    def pick(
        self,
        row: list[float],
        count: int = 2,
        prompt: tuple[int, ...] = (),
        seen: tuple[int, ...] = (),
        **params: object,
    ) -> int:
        sampler = Sampler(SamplingParams(**params), prompt)  # type: ignore[arg-type]
        for token in seen:
            sampler.seen(token)
        return sampler.pick(candidates(array("f", row), 0.0, count))

    def test_repetition_penalty_divides_positive_and_multiplies_negative_logits(self) -> None:
        self.assertEqual(self.pick([4.0, 3.0, 0.0], prompt=(0,), repetition_penalty=1.5), 1)
        self.assertEqual(self.pick([-1.0, -1.5, -9.0], seen=(0,), repetition_penalty=2.0), 1)
        self.assertEqual(self.pick([4.0, 3.0, 0.0], prompt=(0, 1), repetition_penalty=1.5), 0)

    def test_presence_and_frequency_count_the_output_only(self) -> None:
        self.assertEqual(self.pick([2.0, 1.5, 0.0], prompt=(0,), presence_penalty=1.0), 0)
        self.assertEqual(self.pick([2.0, 1.5, 0.0], seen=(0,), presence_penalty=1.0), 1)
        self.assertEqual(self.pick([2.0, 1.5, 0.0], seen=(0,), frequency_penalty=0.3), 0)
        self.assertEqual(self.pick([2.0, 1.5, 0.0], seen=(0, 0), frequency_penalty=0.3), 1)

    def test_bias_reaches_ids_that_the_device_did_not_list(self) -> None:
        self.assertEqual(self.pick([2.0, 1.5, 0.0, -1.0], logit_bias={3: 5.0}), 3)
        self.assertEqual(self.pick([2.0, 1.5, 1.0, -1.0], logit_bias={0: -9.0, 1: -9.0}), 2)

    def test_ties_go_to_the_lower_id(self) -> None:
        self.assertEqual(self.pick([1.0, 3.0, 3.0, 3.0], logit_bias={0: 2.0}), 0)
        self.assertEqual(self.pick([1.0, 3.0, 3.0, 3.0], logit_bias={0: 1.0}), 1)


class Bad(unittest.TestCase):
    def test_parameters_out_of_range(self) -> None:
        for name, value in (
            ("temperature", -1.0), ("temperature", math.nan), ("temperature", math.inf), ("top_k", -1),
            ("top_p", 0.0), ("top_p", 1.1), ("top_p", math.nan), ("min_p", -0.1), ("min_p", 2.0),
            ("repetition_penalty", 0.0), ("presence_penalty", math.inf), ("frequency_penalty", math.nan),
            ("logit_bias", {-1: 1.0}), ("logit_bias", {1: math.nan}),
        ):  # fmt: skip
            with self.subTest(name=name, value=value), self.assertRaisesRegex(RequestError, name):
                SamplingParams(**{name: value})  # type: ignore[arg-type]

    def test_rows_without_a_distribution(self) -> None:
        sampler = Sampler(SamplingParams(temperature=1.0, seed=1), [])
        for logits, mass in (
            ([math.nan, 1.0], math.nan),
            ([math.inf, 1.0], math.nan),
            ([-math.inf, -math.inf], math.nan),
        ):
            with self.subTest(logits), self.assertRaisesRegex(RequestError, "no distribution"):
                sampler.pick(Candidates([0, 1], logits, mass, lambda: array("f", [0.0])))

    def test_minus_infinity_is_never_drawn(self) -> None:
        row = array("f", [-math.inf, 0.0, 1.0, -math.inf])
        sampler = Sampler(SamplingParams(temperature=2.0, seed=1), [])
        counts = Counter(sampler.pick(candidates(row, 2.0, 3)) for _ in range(500))
        self.assertEqual(set(counts), {1, 2})


if __name__ == "__main__":
    unittest.main()
