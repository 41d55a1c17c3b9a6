"""Exported checkpoints against transformers: every golden case, every way to run a prompt, and the logits.

The golden files were written by transformers in f32. Compiling is nearly all the time that this takes, and XLA compiles
on one core, so the engines run in a thread a core: each thread opens, uses and closes its own, and the tests look at
what they found.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import shutil
import tempfile
import unittest
from array import array
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from tests.support import cpu_plugins, engine_on, ids, load_json, shared
from tlaloc_serve.artifact.manifest import Kind, Manifest
from tlaloc_serve.engine.generate import Engine
from tlaloc_serve.engine.scheduler import Scheduler
from tlaloc_serve.export.checkpoint import open_checkpoint
from tlaloc_serve.export.entries import Point
from tlaloc_serve.export.layout import scale_name
from tlaloc_serve.export.workers import core_count
from tlaloc_serve.export.write import ExportOptions, export_checkpoint, export_reference, plan_export
from tlaloc_serve.pjrt.platforms import open_client

BATCH, CONTEXT, CHUNK = 4, 128, 7
NAMES = ("llama3_rope", "llama_bias", "llama_explicit_head_dim", "llama_gqa_untied", "llama_linear_rope",
         "llama_mha_tied", "llama_sharded", "mistral_sliding", "qwen2", "qwen3")  # fmt: skip
# Together they have every op and every way through the graph; the other plugins and the other target run these.
VARIED = ("llama_bias", "llama_mha_tied", "mistral_sliding", "qwen3")
# With bf16 every product rounds both its factors to 8 bits, and each logit is a sum of such sums: it comes out wrong
# by some units of 2^-8 of the largest one. A step's id has to agree where f32 puts it further ahead than 4 units.
BF16_MARGIN = 4 * 2.0**-8
ALONE, TOGETHER = False, True

Way = tuple[int | None, bool]  # tokens of a prefill call, or decode steps only; each prompt alone, or all as one batch
EVERY_WAY: tuple[Way, ...] = tuple((tokens, how) for tokens in (None, CONTEXT, CHUNK) for how in (ALONE, TOGETHER))
Logits = list[list["array[float]"]]  # of each case, after each token

_folder = tempfile.TemporaryDirectory()
_pool = ThreadPoolExecutor(core_count())


def setUpModule() -> None:
    unittest.addModuleCleanup(_folder.cleanup)
    unittest.addModuleCleanup(_pool.shutdown, cancel_futures=True)
    for plugin in cpu_plugins():
        with open_client(plugin, "cpu", os.environ):  # loaded before there is more than one thread
            pass


@dataclasses.dataclass(frozen=True)
class Task:
    """One engine's work: the golden prompts in some ways, and prompts with their golden ids fed for the logits."""

    name: str
    weights: str = "f32"
    target: str = "generic"
    plugin: int = 0
    ways: tuple[Way, ...] = ()
    forced: tuple[bool, ...] = ()


@dataclasses.dataclass(frozen=True)
class Found:
    """What a task found: generated ids by way, logits of every step by whether the prompts were one batch."""

    ids: dict[Way, list[list[int]]]
    logits: dict[bool, Logits]


def exact(name: str) -> Task:
    """The task whose results most tests look at."""
    return Task(name, ways=EVERY_WAY, forced=(TOGETHER,))


@functools.cache
def begun(task: Task) -> Future[Found]:
    return _pool.submit(run, task, exported(task.name, task.weights, task.target))


def results(tasks: Iterable[Task]) -> list[tuple[Task, Found]]:
    futures = [(task, begun(task)) for task in tasks]
    return [(task, future.result()) for task, future in futures]


def run(task: Task, artifact: pathlib.Path) -> Found:
    golden = cases(task.name)
    prompts = [case["prompt"] for case in golden]
    forced = [case["prompt"] + case["generated"] for case in golden]
    found = Found({}, {})
    with engine_on(cpu_plugins()[task.plugin], artifact) as engine:
        for way in task.ways:
            tokens, together = way
            only(engine, tokens)
            found.ids[way] = ids(engine, prompts, 24) if together else [ids(engine, [it], 24)[0] for it in prompts]
        only(engine, None)
        for together in task.forced:
            found.logits[together] = (
                logits_of(engine, forced) if together else [logits_of(engine, [it])[0] for it in forced]
            )
    return found


def cases(name: str) -> list[dict[str, Any]]:
    return list(load_json(shared("checkpoints", name, "golden.json"))["cases"])


@functools.cache
def exported(name: str, weights: str = "f32", target: str = "generic", config: str = "config.json") -> pathlib.Path:
    """The artifact of a checkpoint: batch 1 and 4, prefill of a whole context and of a chunk."""
    source = shared("checkpoints", name)
    if config != "config.json":
        copy = pathlib.Path(_folder.name, f"{name}-{config}")
        shutil.copytree(source, copy, copy_function=shutil.copyfile)
        (copy / "config.json").unlink()
        shutil.copyfile(source / config, copy / "config.json")
        source = copy
    out = pathlib.Path(_folder.name, f"{name}-{weights}-{target}-{config}.artifact")
    options = ExportOptions(batch=(1, BATCH), context=(CONTEXT,), weights=weights, target=target)
    plan = plan_export(open_checkpoint(str(source)), options)
    chunks = tuple(Point(Kind.PREFILL, batch, CONTEXT, CHUNK) for batch in (1, BATCH))
    export_checkpoint(dataclasses.replace(plan, points=plan.points + chunks), str(out))
    return out


def only(engine: Engine, prefill_tokens: int | None) -> None:
    """From now on the engine schedules as if the artifact had these prefill entries only, or none."""
    manifest: Manifest = engine.artifact.manifest
    entries = tuple(
        entry for entry in manifest.entries if entry.kind == Kind.DECODE or entry.tokens_per_seq == prefill_tokens
    )
    engine._scheduler = Scheduler(dataclasses.replace(manifest, entries=entries))


def logits_of(engine: Engine, prompts: list[list[int]]) -> Logits:
    """The logits after each token of each prompt, all prompts as one batch, whatever each step would have picked."""
    scheduler, runner = engine._scheduler, engine._runner
    scheduler.submit(scheduler.check(prompts, 1))
    found: Logits = [[] for _ in prompts]
    while (batch := scheduler.next_batch()) is not None:
        result = runner.step(batch, pick_all=True, keep_logits=True)
        for row, logits in zip(batch.rows, result.logits or (), strict=True):
            found[row.sequence].append(array("f", logits))
        scheduler.advance(batch, result.picks, frozenset())
    return found


class Golden(unittest.TestCase):
    def check(self, tasks: Iterable[Task]) -> None:
        """Every way of every task gives the golden ids."""
        for task, found in results(tasks):
            want = [case["generated"] for case in cases(task.name)]
            for way in task.ways:
                with self.subTest(task=task, way=way):
                    self.assertEqual(found.ids[way], want)

    def check_bf16(self, task: Task) -> None:
        """A bf16 task gives the golden ids wherever f32's margin decides them."""
        golden = cases(task.name)
        (_, f32), (_, bf16) = results((exact(task.name), task))
        decided = steps = 0
        for number, case in enumerate(golden):
            for step, want in enumerate(case["generated"], len(case["prompt"]) - 1):
                logits = f32.logits[TOGETHER][number][step]
                second, first = sorted(logits)[-2:]
                self.assertEqual(logits.index(first), want)
                steps += 1
                if first - second > BF16_MARGIN * max(map(abs, logits)):
                    decided += 1
                    for together in task.forced:
                        rounded = bf16.logits[together][number][step]
                        self.assertEqual(rounded.index(max(rounded)), want, f"{task}, case {number}, step {step}")
        self.assertGreater(decided, 0.7 * steps, f"{task}: the rule decides too little to mean anything")

    def test_every_case_every_way(self) -> None:
        self.check(exact(name) for name in NAMES)

    def test_varied_checkpoints_on_the_other_plugins(self) -> None:
        others = range(1, len(cpu_plugins()))
        self.check(Task(name, plugin=plugin, ways=((CHUNK, TOGETHER),)) for plugin in others for name in VARIED)

    def test_bodies_for_a_gpu(self) -> None:
        """They are another text of the same model, which any plugin can run."""
        self.check(Task(name, target="gpu", ways=((None, ALONE), (CHUNK, TOGETHER))) for name in VARIED)
        self.check_bf16(Task("llama_bias", "bf16", "gpu", forced=(ALONE,)))

    def test_the_other_spelling_of_the_config(self) -> None:
        """The bodies are the same to the last byte, so that the runs above hold for both."""
        for name in NAMES:
            one, other = exported(name), exported(name, config="config.alt_spelling.json")
            bodies = [{path.name for path in (folder / "bodies").iterdir()} for folder in (one, other)]
            weights = [
                [row["sha256"] for row in load_json(folder / "tlaloc-serving.json")["weights"]["table"]]
                for folder in (one, other)
            ]
            self.assertEqual(bodies[0], bodies[1], name)
            self.assertEqual(weights[0], weights[1], name)

    def test_logits_of_the_first_step(self) -> None:
        for task, found in results(map(exact, NAMES)):
            for case, logits in zip(cases(task.name), found.logits[TOGETHER], strict=True):
                got, want = logits[len(case["prompt"]) - 1], case["last_logits_first_step"]
                scale = max(map(abs, want))
                error = max(abs(a - b) for a, b in zip(got, want, strict=True)) / scale
                self.assertLess(error, 1e-4, f"{task.name}, prompt of {len(case['prompt'])}")

    def test_bf16_agrees_where_the_margin_allows(self) -> None:
        tasks = [Task(name, "bf16", forced=(ALONE, TOGETHER) if name in VARIED else (TOGETHER,)) for name in NAMES]
        results(tasks)
        for task in tasks:
            self.check_bf16(task)

    def test_bf16_halves_the_artifact(self) -> None:
        sizes = [sum(path.stat().st_size for path in (exported("llama_bias", dtype) / "weights").iterdir())
                 for dtype in ("f32", "bf16")]  # fmt: skip
        self.assertLess(sizes[1], 0.51 * sizes[0])


@functools.cache
def dequantised(name: str) -> pathlib.Path:
    """The f32 artifact of a checkpoint with the weights of its int8 artifact, each number times its row's scale."""
    out = pathlib.Path(_folder.name, f"{name}-dequantised.artifact")
    shutil.copytree(exported(name), out, copy_function=shutil.copyfile)
    quantised = exported(name, "int8")
    files = {row["name"]: row for row in load_json(quantised / "tlaloc-serving.json")["weights"]["table"]}
    for row in load_json(out / "tlaloc-serving.json")["weights"]["table"]:
        if files[row["name"]]["dtype"] != "i8":
            continue
        values = array("b", (quantised / files[row["name"]]["path"]).read_bytes())
        factors = array("f", (quantised / files[scale_name(row["name"])]["path"]).read_bytes())
        inner = row["dims"][1]
        wide = array("f", [value * factors[place // inner] for place, value in enumerate(values)])
        (out / row["path"]).write_bytes(wide.tobytes())
    return out


class Int8(unittest.TestCase):
    """int8 is exact: the f32 model of the rounded weights, at every batch size, on every plugin."""

    def check(self, name: str, plugins: Iterable[str], target: str = "generic", tolerance: float = 1e-4) -> None:
        prompts = [case["prompt"] for case in cases(name)]
        other = dequantised(name)
        for plugin in plugins:
            with engine_on(plugin, exported(name, "int8", target)) as engine, engine_on(plugin, other) as plain:
                for tokens in (None, CHUNK):
                    only(engine, tokens)
                    only(plain, tokens)
                    for batch in ([prompts[0]], prompts[:BATCH]):
                        got, want = logits_of(engine, batch), logits_of(plain, batch)
                        for number, (mine, theirs) in enumerate(zip(got, want, strict=True)):
                            for step, (a, b) in enumerate(zip(mine, theirs, strict=True)):
                                error = max(abs(x - y) for x, y in zip(a, b, strict=True)) / max(map(abs, b))
                                with self.subTest(name=name, plugin=plugin, tokens=tokens, case=number, step=step):
                                    self.assertLess(error, tolerance)

    def test_a_tied_model_on_every_plugin(self) -> None:
        self.check("llama_mha_tied", cpu_plugins())

    def test_biases_and_norms(self) -> None:
        self.check("llama_bias", cpu_plugins()[:1])
        self.check("qwen3", cpu_plugins()[:1])

    def test_bodies_for_a_gpu(self) -> None:
        """They round what goes into a product to bf16, as bf16 does: a few units of 2^-8."""
        self.check("llama_mha_tied", cpu_plugins()[:1], "gpu", 8 * 2.0**-8)

    def test_the_sizes_and_what_is_reported(self) -> None:
        table = load_json(exported("llama_bias", "int8") / "tlaloc-serving.json")["weights"]["table"]
        wide = load_json(exported("llama_bias") / "tlaloc-serving.json")["weights"]["table"]
        size, whole = (sum(row["byteLength"] for row in rows) for rows in (table, wide))
        self.assertLess(size, 0.3 * whole)
        for row in table:
            self.assertEqual("quantisationError" in row, row["dtype"] == "i8")
            self.assertLess(row.get("quantisationError", 0.0), 0.02)


class Reference(unittest.TestCase):
    def test_golden_ids(self) -> None:
        out = pathlib.Path(_folder.name, "reference")
        export_reference(str(out))
        for plugin in cpu_plugins():
            with engine_on(plugin, out) as engine:
                for case in json.loads(shared("artifacts", "reference.golden.json").read_text()):
                    with self.subTest(plugin=plugin, prompt=case["prompt"]):
                        got = ids(engine, [case["prompt"]], len(case["generated"]))
                        self.assertEqual(got, [case["generated"]])


if __name__ == "__main__":
    unittest.main()
