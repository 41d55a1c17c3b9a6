"""Exported checkpoints against transformers: every golden case, every way to run a prompt, and the logits.

The golden files were written by transformers in f32. `forced` feeds a case's prompt and its golden ids as one prompt,
so that the logits of every step can be looked at whatever an earlier step picked.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import pathlib
import shutil
import tempfile
import unittest
from array import array
from typing import Any
from unittest import mock

from tests.support import cpu_plugins, engine_on, ids, load_json, shared
from tlaloc_serve.artifact.manifest import Kind, Manifest
from tlaloc_serve.engine.generate import Engine
from tlaloc_serve.engine.scheduler import Scheduler
from tlaloc_serve.export.checkpoint import open_checkpoint
from tlaloc_serve.export.entries import Point
from tlaloc_serve.export.write import ExportOptions, export_checkpoint, export_reference, plan_export

BATCH, CONTEXT, CHUNK = 4, 128, 7
NAMES = ("llama3_rope", "llama_bias", "llama_explicit_head_dim", "llama_gqa_untied", "llama_linear_rope",
         "llama_mha_tied", "llama_sharded", "mistral_sliding", "qwen2", "qwen3")  # fmt: skip
# With bf16 every product rounds both its factors to 8 bits, and each logit is a sum of such sums: it comes out wrong
# by some units of 2^-8 of the largest one. A step's id has to agree where f32 puts it further ahead than 4 units.
BF16_MARGIN = 4 * 2.0**-8

# Together they have every op and every way through the graph; the other plugins run these.
VARIED = ("llama_bias", "llama_mha_tied", "mistral_sliding", "qwen3")

_folder = tempfile.TemporaryDirectory()
_stack = contextlib.ExitStack()


def setUpModule() -> None:
    unittest.addModuleCleanup(_folder.cleanup)
    unittest.addModuleCleanup(_stack.close)


@functools.cache
def engine_of(name: str, weights: str = "f32") -> Engine:
    """An engine on the first plugin, kept for the other tests so that entries compile once."""
    return _stack.enter_context(engine_on(cpu_plugins()[0], exported(name, weights)))


def cases(name: str) -> list[dict[str, Any]]:
    return list(load_json(shared("checkpoints", name, "golden.json"))["cases"])


@functools.cache
def exported(name: str, weights: str = "f32", config: str = "config.json", again: bool = False) -> pathlib.Path:
    """The artifact of a checkpoint: batch 1 and 4, prefill of a whole context and of a chunk."""
    source = shared("checkpoints", name)
    if config != "config.json":
        copy = pathlib.Path(_folder.name, f"{name}-{config}")
        shutil.copytree(source, copy, copy_function=shutil.copyfile)
        (copy / "config.json").unlink()
        shutil.copyfile(source / config, copy / "config.json")
        source = copy
    out = pathlib.Path(_folder.name, f"{name}-{weights}-{config}-{again}.artifact")
    plan = plan_export(
        open_checkpoint(str(source)), ExportOptions(batch=(1, BATCH), context=(CONTEXT,), weights=weights)
    )
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


def forced(engine: Engine, prompts: list[list[int]]) -> list[list[array[float]]]:
    """The logits after each token of each prompt, by decode steps over all prompts as one batch."""
    only(engine, None)
    scheduler, runner = engine._scheduler, engine._runner
    scheduler.submit(scheduler.check(prompts, 1))
    found: list[list[array[float]]] = [[] for _ in prompts]
    while (batch := scheduler.next_batch()) is not None:
        result = runner.step(batch, pick_all=True, keep_logits=True)
        for row, logits in zip(batch.rows, result.logits or (), strict=True):
            found[row.sequence].append(array("f", logits))
        scheduler.advance(batch, result.picks, frozenset())
    return found


class Golden(unittest.TestCase):
    def check(self, engine: Engine, name: str, prefill_tokens: int | None, together: bool) -> None:
        golden = cases(name)
        prompts, want = [case["prompt"] for case in golden], [case["generated"] for case in golden]
        only(engine, prefill_tokens)
        with self.subTest(checkpoint=name, prefill=prefill_tokens, together=together):
            if together:
                self.assertEqual(ids(engine, prompts, 24), want)
            else:
                self.assertEqual([ids(engine, [prompt], 24)[0] for prompt in prompts], want)

    def test_every_case_every_way(self) -> None:
        for name in NAMES:
            for prefill_tokens in (None, CONTEXT, CHUNK):
                for together in (False, True):
                    self.check(engine_of(name), name, prefill_tokens, together)

    def test_varied_checkpoints_on_the_other_plugins(self) -> None:
        for plugin in cpu_plugins()[1:]:
            for name in VARIED:
                with engine_on(plugin, exported(name)) as engine:
                    self.check(engine, name, CHUNK, True)

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
        for name in NAMES:
            golden = cases(name)
            found = forced(engine_of(name), [case["prompt"] for case in golden])
            for case, logits in zip(golden, found, strict=True):
                want = case["last_logits_first_step"]
                scale = max(map(abs, want))
                error = max(abs(a - b) for a, b in zip(logits[-1], want, strict=True)) / scale
                self.assertLess(error, 1e-4, f"{name}, prompt of {len(case['prompt'])}")

    def test_bf16_agrees_where_the_margin_allows(self) -> None:
        for name in NAMES:
            golden = cases(name)
            prompts = [case["prompt"] + case["generated"] for case in golden]
            exact, rounded = (forced(engine_of(name, weights), prompts) for weights in ("f32", "bf16"))
            decided = steps = 0
            for number, case in enumerate(golden):
                for step, want in enumerate(case["generated"], len(case["prompt"]) - 1):
                    logits = exact[number][step]
                    second, first = sorted(logits)[-2:]
                    self.assertEqual(logits.index(first), want)
                    steps += 1
                    if first - second > BF16_MARGIN * max(map(abs, logits)):
                        decided += 1
                        picked = rounded[number][step].index(max(rounded[number][step]))
                        self.assertEqual(picked, want, f"{name}, case {number}, step {step}")
            self.assertGreater(decided, 0.7 * steps, f"{name}: the rule decides too little to mean anything")

    def test_attention_with_more_kv_heads_than_the_block_diagonal_form_is_for(self) -> None:
        with mock.patch("tlaloc_serve.export.paged.MOST_BLOCK_DIAGONAL_HEADS", 1):
            artifact = exported("llama_mha_tied", config="config.json", again=True)
        body = next(path for path in (artifact / "bodies").iterdir() if "tensor<4x4x1x1x128xf32>" in path.read_text())
        self.assertTrue(body.is_file(), "a decode body of batch 4 with grouped scores")
        with engine_on(cpu_plugins()[0], artifact) as engine:
            self.check(engine, "llama_mha_tied", None, True)

    def test_bf16_halves_the_artifact(self) -> None:
        sizes = [sum(path.stat().st_size for path in (exported("llama_bias", dtype) / "weights").iterdir())
                 for dtype in ("f32", "bf16")]  # fmt: skip
        self.assertLess(sizes[1], 0.51 * sizes[0])


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
