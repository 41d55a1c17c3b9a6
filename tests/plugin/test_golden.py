"""The real artifacts on every CPU plugin: the golden ids, alone and batched, by decode and by prefill."""

from __future__ import annotations

import array
import hashlib
import json
import pathlib
import shutil
import tempfile
import unittest
from typing import Any

from tests.support import close_held_engines, cpu_plugins, engine_on, held_engine, ids, load_json, shared
from tlaloc_serve.engine.generate import Engine, Step
from tlaloc_serve.engine.scheduler import Reason
from tlaloc_serve.errors import CapacityError, PjrtError, RequestError

REFERENCES = ("reference-v1", "reference-v2", "reference-v2-aliased")


def setUpModule() -> None:
    unittest.addModuleCleanup(close_held_engines)


def reference_golden() -> Any:
    return load_json(shared("artifacts", "reference.golden.json"))


def window_golden() -> Any:
    return load_json(shared("artifacts", "window-v3.golden.json"))


class Reference(unittest.TestCase):
    def test_every_case_alone_with_the_argmax_of_every_step(self) -> None:
        for plugin in cpu_plugins():
            for name in REFERENCES:
                with held_engine(plugin, name) as engine:
                    for case in reference_golden():
                        with self.subTest(plugin=plugin, artifact=name, prompt=case["prompt"]):
                            # The golden run takes one step more than it needs: its last argmax is nobody's input.
                            room = 4 - len(case["prompt"]) + 1
                            events = list(engine.generate([case["prompt"]], room, pick_all=True))
                            steps = [event for event in events if isinstance(event, Step)]
                            self.assertEqual([step.rows[0].argmax for step in steps], case["argmax_per_step"])
                            self.assertEqual(
                                ids(engine, [case["prompt"]], len(case["generated"]))[0], case["generated"]
                            )

    def test_golden_cases_run_padded_to_four_while_pages_last(self) -> None:
        """Three sequences of two pages each do not fit five pages, so the last one waits for its second page."""
        with held_engine(cpu_plugins()[0], "reference-v2") as engine:
            cases = [case for case in reference_golden() if len(case["prompt"]) == 2][:3]
            got = ids(engine, [case["prompt"] for case in cases], 2)
            self.assertEqual(got, [case["generated"] for case in cases])
            self.assertEqual(
                [(step.entry, len(step.rows)) for step in engine.report.steps],
                [("decode_b4_c2", 3), ("decode_b4_c2", 3), ("decode_b2_c4", 2), ("decode_b1_c4", 1)],
            )

    def test_three_prompts_run_padded_to_four_and_give_what_they_give_alone(self) -> None:
        for plugin in cpu_plugins():
            for name in REFERENCES:
                with self.subTest(plugin=plugin, artifact=name), held_engine(plugin, name) as engine:
                    cases = [case for case in reference_golden() if case["prompt"] in ([1, 2], [3], [5, 10])]
                    self.assertEqual(len(cases), 3)
                    got = ids(engine, [case["prompt"] for case in cases], 2)
                    self.assertEqual(got, [case["generated"][:2] for case in cases])
                    self.assertEqual(engine.report.steps[0].entry, "decode_b4_c2")
                    self.assertEqual(len(engine.report.steps[0].rows), 3)

    def test_prompts_of_all_lengths_beyond_the_largest_batch_run_in_turns(self) -> None:
        for plugin in cpu_plugins():
            with self.subTest(plugin=plugin), held_engine(plugin, "reference-v2-aliased") as engine:
                cases = reference_golden() * 2
                got = ids(engine, [case["prompt"] for case in cases], 1)
                self.assertEqual(got, [case["generated"][:1] for case in cases])

    def test_entries_compile_at_the_first_step_that_lands_on_them(self) -> None:
        with engine_on(cpu_plugins()[0], shared("artifacts", "reference-v2")) as engine:
            compiled = []
            for event in engine.generate([[1, 2]], 2):
                if isinstance(event, Step):
                    compiled.append((event.entry, event.compile_seconds > 0))
            self.assertEqual(compiled, [("decode_b1_c2", True), ("decode_b1_c2", False), ("decode_b1_c4", True)])
            self.assertEqual(engine.report.compiles, 2)
            ids(engine, [[1, 2]], 2)
            self.assertEqual(engine.report.compiles, 0)

    def test_logits_agree_between_plugins(self) -> None:
        rows: dict[str, list[array.array[float]]] = {}
        for plugin in cpu_plugins():
            for name in REFERENCES:
                with held_engine(plugin, name) as engine:
                    rows[f"{plugin} {name}"] = _all_logits(engine, [1, 2, 9])
        first = next(iter(rows.values()))
        self.assertEqual(len(first), 3)
        for which, others in rows.items():
            for mine, theirs in zip(first, others, strict=True):
                scale = max(map(abs, mine))
                for a, b in zip(mine, theirs, strict=True):
                    self.assertLessEqual(abs(a - b), 1e-5 * scale, which)


def _all_logits(engine: Engine, prompt: list[int]) -> list[array.array[float]]:
    """The logits of every position of one prompt, through decode steps."""
    scheduler, runner = engine._scheduler, engine._runner
    scheduler.submit(scheduler.check([prompt], 1))
    rows = []
    while (batch := scheduler.next_batch()) is not None:
        result = runner.step(batch, pick_all=True, keep_logits=True)
        assert result.logits is not None
        rows.append(result.logits[0])
        scheduler.advance(batch, result.picks, frozenset())
    return rows


class Window(unittest.TestCase):
    def test_prefill_and_decode_alone_and_as_one_batch(self) -> None:
        for plugin in cpu_plugins():
            with self.subTest(plugin=plugin), held_engine(plugin, "window-v3") as engine:
                cases = window_golden()
                for case in cases:
                    self.assertEqual(ids(engine, [case["prompt"]], 40)[0], case["generated"])
                    if len(case["prompt"]) > 1:
                        self.assertTrue(engine.report.steps[0].entry.startswith("prefill"))
                self.assertEqual(
                    ids(engine, [case["prompt"] for case in cases], 40), [case["generated"] for case in cases]
                )

    def test_decode_only(self) -> None:
        for plugin in cpu_plugins():
            with self.subTest(plugin=plugin), held_engine(plugin, "window-v3") as engine:
                prefill, engine._scheduler._prefill = engine._scheduler._prefill, []
                self.addCleanup(setattr, engine._scheduler, "_prefill", prefill)
                for case in window_golden():
                    self.assertEqual(ids(engine, [case["prompt"]], 40)[0], case["generated"])
                self.assertTrue(all(step.entry.startswith("decode") for step in engine.report.steps))

    def test_a_long_prompt_goes_in_calls_that_the_ring_can_take(self) -> None:
        for plugin in cpu_plugins():
            with self.subTest(plugin=plugin), held_engine(plugin, "window-v3") as engine:
                case = window_golden()[2]
                known = case["prompt"] + case["generated"]
                prompt, rest = known[:30], known[30:45]
                self.assertEqual(ids(engine, [prompt], len(rest))[0], rest)
                calls = [len(step.rows[0].tokens) for step in engine.report.steps if step.entry.startswith("prefill")]
                # 3 pages x 4 = 12 slots; later calls keep the window - 1 = 7 positions before them.
                self.assertEqual(calls, [12, 5, 5, 5, 3])

    def test_refused_tokens(self) -> None:
        with held_engine(cpu_plugins()[0], "window-v3") as engine:
            with self.assertRaisesRegex(RequestError, "62 .image_token_id"):
                engine.generate([[1, 62]])
            self.assertEqual(ids(engine, [[1, 2]], 8), [[13]])
            self.assertEqual(engine.report.finished[0].reason, Reason.REFUSED_TOKEN)
            self.assertIn("video_token_id", engine.report.finished[0].detail)


class Requests(unittest.TestCase):
    def test_what_does_not_fit_is_refused_before_anything_runs(self) -> None:
        with held_engine(cpu_plugins()[0], "reference-v2") as engine:
            for prompt, max_new, words in (
                ([1, 2], 4, "max_new at most 3"),
                ([1, 2, 3, 4, 5], 1, "largest compiled context"),
                ([1] * 4, None, None),
                ([11], 1, "outside the vocabulary"),
                ([-1], 1, "outside the vocabulary"),
                ([], 1, "empty"),
                ([1], 0, "at least 1"),
            ):
                with self.subTest(prompt=prompt, max_new=max_new):
                    if words is None:
                        self.assertEqual(len(ids(engine, [prompt], max_new)[0]), 1)
                        self.assertEqual(engine.report.finished[0].reason, Reason.CONTEXT)
                        continue
                    with self.assertRaisesRegex((RequestError, CapacityError), words):
                        engine.generate([prompt], max_new)
            self.assertEqual(engine.report.prompts, ((1, 1, 1, 1),))  # the last run that was not refused

    def test_a_second_run_waits_for_the_first(self) -> None:
        with held_engine(cpu_plugins()[0], "reference-v2") as engine:
            first = engine.generate([[1, 2]], 2)
            next(first)
            with self.assertRaisesRegex(RequestError, "another run is in progress"):
                next(engine.generate([[1]], 1))
            first.close()
            self.assertEqual(ids(engine, [[1, 2]], 2), [[9, 7]])

    def test_a_cancel_ends_every_sequence_at_the_next_step(self) -> None:
        with held_engine(cpu_plugins()[0], "window-v3") as engine:
            for event in engine.generate([[35], [60, 9, 25], [3]], 20):
                if isinstance(event, Step) and event.number == 4:
                    engine.cancel()
            self.assertEqual(len(engine.report.steps), 5)
            self.assertEqual([engine.report.finished[n].reason for n in range(3)], [Reason.CANCELLED] * 3)
            case = window_golden()[1]
            self.assertEqual(ids(engine, [case["prompt"]], 40)[0], case["generated"])

    def test_a_body_that_xla_rejects_names_entry_and_file(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            root = pathlib.Path(folder, "artifact")
            shutil.copytree(shared("artifacts", "reference-v2"), root, copy_function=shutil.copyfile)
            for path in [root, *root.rglob("*")]:
                path.chmod(0o755)
            manifest = json.loads((root / "tlaloc-serving.json").read_text())
            entry = manifest["entries"][0]
            body = (root / entry["bodyPath"]).read_bytes().replace(b"stablehlo.dot_general", b"stablehlo.no_such_op", 1)
            text = (
                (root / "tlaloc-serving.json").read_text().replace(entry["bodyHash"], hashlib.sha256(body).hexdigest())
            )
            (root / "tlaloc-serving.json").write_text(text)
            program = root / entry["programPath"]
            program.write_text(program.read_text().replace(entry["bodyHash"], hashlib.sha256(body).hexdigest()))
            (root / "bodies" / f"{hashlib.sha256(body).hexdigest()}.mlir").write_bytes(body)
            for plugin in cpu_plugins():
                words = self.assertRaisesRegex(PjrtError, "cannot compile decode_b1_c2.*bodies/")
                with self.subTest(plugin=plugin), engine_on(plugin, root) as engine, words:
                    ids(engine, [[1]], 1)


if __name__ == "__main__":
    unittest.main()
