"""The KV pools: what stands in pages that nobody owns never shows, and nothing leaks however long it runs."""

from __future__ import annotations

import array
import contextlib
import gc
import struct
import unittest
from unittest import mock

from tests.support import cpu_plugins, engine_on, ids, load_json, shared
from tlaloc_serve.engine.generate import Engine
from tlaloc_serve.errors import EngineBroken, HandleClosed, OutOfMemory
from tlaloc_serve.pjrt.client import live
from tlaloc_serve.pjrt.transfer import Upload

NAN, HUGE = struct.pack("<f", float("nan")), struct.pack("<f", 1e30)


def poison(engine: Engine, scratch: bytes, unused: bytes, first_unused: int) -> None:
    """Fill page 0 of every pool with `scratch` and the pages from `first_unused` on with `unused` (f32 patterns)."""
    for _ in engine._runner.stage():
        pass
    for name, pool in list(engine._runner.pools.items()):
        pages, *rest = pool.dims
        page = len(array.array("f", pool.to_bytes())) // pages
        zeros = bytes(4 * page * (first_unused - 1))
        data = scratch * page + zeros + unused * page * (pages - first_unused)
        fresh = engine.client.buffer_from_host(data, pool.dtype, pool.dims)
        engine._runner.pools[name] = engine._runner._stack.enter_context(fresh)


class Poison(unittest.TestCase):
    """The bodies multiply masked lanes by zero, and 0 x NaN is NaN: so NaN can only stand in pages that no table names.

    Page 0, which pads every table, holds the huge finite values; the contract keeps it from ever being written.
    """

    def check(self, scratch: bytes, unused: bytes, first_unused: dict[str, int], batched: bool) -> None:
        for name, golden, max_new in (("reference-v2-aliased", "reference", 1), ("window-v3", "window-v3", 12)):
            cases = load_json(shared("artifacts", f"{golden}.golden.json"))[:3]
            expected = [case["generated"][:max_new] for case in cases]
            for plugin in cpu_plugins():
                with self.subTest(plugin=plugin, artifact=name), engine_on(plugin, shared("artifacts", name)) as engine:
                    poison(engine, scratch, unused, first_unused[name])
                    self.assertEqual(ids(engine, [cases[0]["prompt"]], max_new), expected[:1])
                    if batched:
                        self.assertEqual(ids(engine, [case["prompt"] for case in cases], max_new), expected)

    def test_huge_values_in_every_page(self) -> None:
        self.check(HUGE, HUGE, {"reference-v2-aliased": 1, "window-v3": 1}, batched=True)

    def test_nan_in_the_pages_of_nobody(self) -> None:
        # The one sequence takes the lowest pages: 1 and 2, and 1 to 5 with its ring in 1 to 3.
        self.check(HUGE, NAN, {"reference-v2-aliased": 3, "window-v3": 6}, batched=False)


class Interrupted(unittest.TestCase):
    """A request that fails, or is interrupted, anywhere among its uploads leaves nothing that a later one would see."""

    def test_an_upload_that_fails(self) -> None:
        send = Upload.send
        cases = load_json(shared("artifacts", "window-v3.golden.json"))[:2]
        prompts, want = [case["prompt"] for case in cases], [case["generated"][:8] for case in cases]
        with engine_on(cpu_plugins()[0], shared("artifacts", "window-v3")) as engine:
            for failure in (KeyboardInterrupt(), OutOfMemory("PJRT_Client_BufferFromHostBuffer", 8, "", "injected")):
                for early in (False, True):
                    for number in range(24):
                        left = number

                        def broken(upload: Upload, failure: BaseException = failure, early: bool = early) -> None:
                            nonlocal left
                            left -= 1
                            if left == -1 and early:
                                raise failure
                            send(upload)
                            if left == -1:
                                raise failure

                        with (
                            mock.patch.object(Upload, "send", broken),
                            contextlib.suppress(type(failure), EngineBroken),
                        ):
                            ids(engine, prompts, 8)
                        if engine._runner._broken is not None:
                            self.fail("an upload comes before the pools are donated, or while nothing can be lost")
                        with self.subTest(failure=failure, number=number, early=early):
                            self.assertEqual(ids(engine, prompts, 8), want)

    def test_a_closed_engine_says_so(self) -> None:
        with engine_on(cpu_plugins()[0], shared("artifacts", "window-v3")) as engine:
            begun = engine.generate([[3]], 8)
            next(begun)
            engine._runner.close()
            for again in (begun, engine.generate([[3]], 1)):
                with self.assertRaisesRegex(HandleClosed, "engine: used after close"):
                    list(again)


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096


class Leak(unittest.TestCase):
    """2,000 decode steps: the number of live handles stays what it was, and memory stops growing after warm-up."""

    def test_two_thousand_steps(self) -> None:
        case = load_json(shared("artifacts", "window-v3.golden.json"))[1]
        with engine_on(cpu_plugins()[0], shared("artifacts", "window-v3")) as engine:
            ids(engine, [case["prompt"]], 40)
            for name in ("warm-up", "measured"):
                steps = 0
                before, memory = dict(live), resident_bytes()
                while steps < (400 if name == "warm-up" else 2000):
                    self.assertEqual(ids(engine, [case["prompt"]], 40), [case["generated"]])
                    steps += len(engine.report.steps)
                gc.collect()
                self.assertEqual(dict(live), before)
            self.assertLess(resident_bytes() - memory, 2 << 20)

    def test_closing_destroys_everything(self) -> None:
        before = dict(live)
        with engine_on(cpu_plugins()[0], shared("artifacts", "reference-v2")) as engine:
            ids(engine, [[1, 2]], 2)
            self.assertGreater(live["buffers"], before["buffers"])
        self.assertEqual(dict(live), before)


if __name__ == "__main__":
    unittest.main()
