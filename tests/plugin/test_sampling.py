"""Sampling on a real plugin: what the device selects is what the row says, and neighbours never matter."""

from __future__ import annotations

import math
import os
import random
import unittest
from array import array

from tests.support import close_held_engines, cpu_plugins, held_engine, ids
from tlaloc_serve.artifact.manifest import TensorType
from tlaloc_serve.engine.logits import LogitsReader
from tlaloc_serve.engine.sampling import SamplingParams
from tlaloc_serve.engine.selection import NAN_ROW
from tlaloc_serve.errors import EngineBroken, RequestError
from tlaloc_serve.pjrt.client import Client
from tlaloc_serve.pjrt.compile_options import compile_options
from tlaloc_serve.pjrt.platforms import open_client


def setUpModule() -> None:
    unittest.addModuleCleanup(close_held_engines)


def reader(client: Client) -> LogitsReader:
    return LogitsReader(client, lambda body, what: client.compile(body, compile_options()))


class Selection(unittest.TestCase):
    def rows(self, vocab: int) -> list[array[float]]:
        generator = random.Random(vocab)
        rows = [array("f", [generator.gauss(0, 3) for _ in range(vocab)]) for _ in range(3)]
        rows[1] = array("f", [float(generator.randrange(3)) for _ in range(vocab)])  # full of ties
        rows[2][vocab // 2] = -math.inf
        return rows

    def test_argmax_and_candidates_are_those_of_the_row(self) -> None:
        for plugin in cpu_plugins():
            with open_client(plugin, "cpu", os.environ) as client:
                for vocab in (11, 1000):
                    rows, kind = self.rows(vocab), TensorType("f32", (3, 1, vocab))
                    data = b"".join(row.tobytes() for row in rows)
                    selected = reader(client)
                    with (
                        self.subTest(plugin=plugin, vocab=vocab),
                        client.buffer_from_host(data, "f32", kind.dims) as logits,
                    ):
                        self.assertEqual(list(selected.greedy(logits, kind).ids), [row.index(max(row)) for row in rows])
                        found = selected.candidates(logits, kind, [0.5, None, 2.0])
                        for row, given, heat in zip(rows, found, (0.5, 1.0, 2.0), strict=True):
                            order = sorted(range(vocab), key=lambda token, row=row: (-row[token], token))[:64]
                            self.assertEqual(given.ids, order)
                            self.assertEqual(given.logits, [row[token] for token in order])
                            mass = math.fsum(math.exp((value - max(row)) / heat) for value in row)
                            self.assertAlmostEqual(given.mass / mass, 1.0, places=5)
                            self.assertEqual(given.row(), row)
                    selected.close()

    def test_nan_is_seen_wherever_it_stands(self) -> None:
        for plugin in cpu_plugins():
            with open_client(plugin, "cpu", os.environ) as client:
                kind = TensorType("f32", (1, 1, 100))
                selected = reader(client)
                for place in (0, 57, 99):
                    row = array("f", range(100))
                    row[place] = math.nan
                    with (
                        self.subTest(plugin=plugin, place=place),
                        client.buffer_from_host(row, "f32", kind.dims) as logits,
                    ):
                        self.assertEqual(selected.greedy(logits, kind).ids, [NAN_ROW])
                        self.assertTrue(math.isnan(selected.candidates(logits, kind, [1.0])[0].mass))
                selected.close()


class Generating(unittest.TestCase):
    def test_a_seed_gives_the_same_ids_whatever_the_batch(self) -> None:
        for plugin in cpu_plugins():
            with self.subTest(plugin=plugin), held_engine(plugin, "window-v3") as engine:
                hot = SamplingParams(temperature=1.5, seed=11)
                alone = ids(engine, [[35]], 20, sampling=hot)[0]
                self.assertEqual(ids(engine, [[35]], 20, sampling=hot)[0], alone)
                self.assertNotEqual(
                    ids(engine, [[35]], 20, sampling=SamplingParams(temperature=1.5, seed=12))[0], alone
                )
                others = [SamplingParams(temperature=0.7, top_k=5, seed=1), SamplingParams()]
                for neighbour in others:
                    self.assertEqual(ids(engine, [[3, 9], [35]], 20, sampling=[neighbour, hot])[1], alone)

    def test_top_k_one_is_greedy(self) -> None:
        with held_engine(cpu_plugins()[0], "window-v3") as engine:
            greedy = ids(engine, [[35]], 12)
            self.assertEqual(ids(engine, [[35]], 12, sampling=SamplingParams(temperature=2.0, top_k=1, seed=4)), greedy)

    def test_a_bias_of_minus_a_lot_keeps_an_id_out(self) -> None:
        with held_engine(cpu_plugins()[0], "window-v3") as engine:
            greedy = ids(engine, [[35]], 12)[0]
            got = ids(engine, [[35]], 12, sampling=SamplingParams(logit_bias={greedy[0]: -1e6}))[0]
            self.assertNotIn(greedy[0], got)

    def test_requests(self) -> None:
        with held_engine(cpu_plugins()[0], "window-v3") as engine:
            with self.assertRaisesRegex(RequestError, "logit_bias.*64.*0 to 63"):
                engine.generate([[1]], 1, sampling=SamplingParams(logit_bias={64: 1.0}))
            with self.assertRaisesRegex(RequestError, "got 2, want one, or 1"):
                engine.generate([[1]], 1, sampling=[SamplingParams(), SamplingParams()])

    def test_a_nan_in_a_pool_is_an_error_and_not_an_id(self) -> None:
        with held_engine(cpu_plugins()[0], "reference-v1") as engine:
            for _ in engine._runner.stage():
                pass
            name, pool = list(engine._runner.pools.items())[-1]  # a value pool: masked keys are never read
            data = array("f", [math.nan]) * (pool.nbytes // 4)
            engine._runner.pools[name] = engine.client.buffer_from_host(data, pool.dtype, pool.dims)
            self.addCleanup(engine._runner.pools[name].close)
            greedy, hot = SamplingParams(), SamplingParams(temperature=1.0, seed=1)
            for sampling, error, words in (
                ([greedy, greedy], EngineBroken, "sequence 0 .*hold a NaN"),
                ([hot, greedy], EngineBroken, "sequence 1 .*hold a NaN"),
                ([hot, hot], RequestError, "the logits are no distribution"),
            ):
                with self.subTest(words), self.assertRaisesRegex(error, words):
                    ids(engine, [[1], [2]], 2, sampling=sampling)


if __name__ == "__main__":
    unittest.main()
