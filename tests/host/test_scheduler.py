"""Pages, admission, batching: integers in, integers out."""

from __future__ import annotations

import json
import random
import unittest
from types import SimpleNamespace
from typing import Any

from tests.support import load_json, shared
from tlaloc_serve.artifact.manifest import Manifest
from tlaloc_serve.artifact.parse import parse_manifest
from tlaloc_serve.engine.pages import PageAllocator, page_of, pages_for, slot_of
from tlaloc_serve.engine.scheduler import Reason, Scheduler
from tlaloc_serve.errors import CapacityError, RequestError


def manifest(name: str) -> Manifest:
    path = shared("artifacts", name, "tlaloc-serving.json")
    return parse_manifest(path.read_bytes(), str(path))


class Pages(unittest.TestCase):
    def test_the_scratch_page_is_never_given_out(self) -> None:
        pool = PageAllocator("pool", 5)
        self.assertEqual(sorted(pool.allocate(4)), [1, 2, 3, 4])
        with self.assertRaisesRegex(CapacityError, "pool.*0 of 4"):
            pool.allocate(1)

    def test_a_page_has_one_owner(self) -> None:
        pool = PageAllocator("pool", 5)
        pages = pool.allocate(2)
        pool.free(pages)
        for wrong in (pages, [0], [5], [-1]):
            with self.assertRaises(CapacityError):
                pool.free(wrong)

    def test_slots(self) -> None:
        self.assertEqual([slot_of(position, (7, 3), 4) for position in range(8)], [28, 29, 30, 31, 12, 13, 14, 15])
        # In a ring of three pages, block 3 lives where block 0 lived.
        self.assertEqual([page_of(block, (5, 6, 9)) for block in range(5)], [5, 6, 9, 5, 6])
        self.assertEqual([pages_for(tokens, 16) for tokens in (1, 16, 17, 32)], [1, 1, 2, 2])


class Checking(unittest.TestCase):
    def test_the_default_length(self) -> None:
        scheduler = Scheduler(manifest("window-v3"))
        self.assertEqual([s.max_new for s in scheduler.check([[1], [1] * 60])], [16, 5])
        self.assertEqual([s.fills_context for s in scheduler.check([[1], [1] * 60])], [False, True])

    def test_refusals(self) -> None:
        scheduler = Scheduler(manifest("window-v3"))
        for prompts, max_new, words in (
            ([], None, "there is none"),
            ([[1], []], None, "prompt 1: empty"),
            ([[64]], None, "outside the vocabulary, got 64, want 0 to 63"),
            ([[True]], None, "outside the vocabulary"),
            ([["1"]], None, "outside the vocabulary"),
            ([[62]], None, "image_token_id"),
            ([[1]], 0, "at least 1"),
            ([[1]], True, "at least 1"),
            ([[1]], 65, "max_new at most 64"),
            ([[1] * 65], None, "at most 64"),
        ):
            with self.subTest(words), self.assertRaisesRegex((RequestError, CapacityError), words):
                scheduler.check(prompts, max_new)
        self.assertEqual(scheduler.live, ())

    def test_a_sequence_larger_than_the_pool(self) -> None:
        document: Any = load_json(shared("artifacts", "reference-v2", "tlaloc-serving.json"))
        small = parse_manifest(_with_pages(document, 2), "manifest")
        with self.assertRaisesRegex(CapacityError, "2 pages, want at most 1"):
            Scheduler(small).check([[1, 2]], 2)


def _with_pages(document: Any, pages: int) -> bytes:
    text = json.dumps(document)
    text = text.replace('"numBlocks": 6', f'"numBlocks": {pages}').replace("[6, 2, 2, 2]", f"[{pages}, 2, 2, 2]")
    return text.encode()


class Batches(unittest.TestCase):
    foreseen = 0  # batches that were told before the step ahead of them

    def drive(self, scheduler: Scheduler, prompts: list[list[int]], lengths: list[int]) -> list[Any]:
        """Run with made-up picks to the end, checking what must hold of every batch; returns the batches."""
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            sequences = scheduler.check([prompt], length)
            sequences[0].index = number
            scheduler.submit(sequences)
        written: dict[int, int] = {}
        batches: list[Any] = []
        upcoming = None
        while (batch := scheduler.next_batch()) is not None:
            if upcoming is not None and [row.sequence for row in batch.rows] == [row.sequence for row in upcoming.rows]:
                self.assertIs(upcoming.entry, batch.entry)
                self.assertEqual(
                    [row[:2] + row[3:5] for row in upcoming.rows], [row[:2] + row[3:5] for row in batch.rows]
                )
                self.foreseen += 1
            upcoming = scheduler.upcoming(batch)
            batches.append(batch)
            entry = batch.entry
            self.assertLessEqual(1, len(batch.rows))
            self.assertLessEqual(len(batch.rows), entry.batch)
            owned: set[int] = set()
            for row in batch.rows:
                self.assertEqual(row.start, written.get(row.sequence, 0))
                self.assertLessEqual(row.end, entry.context)
                self.assertLessEqual(len(row.tokens), entry.tokens_per_seq)
                self.assertGreaterEqual(len(row.pages), pages_for(row.end, scheduler.manifest.model.block_size))
                self.assertFalse(owned & set(row.pages), "two sequences own one page")
                owned |= set(row.pages)
                written[row.sequence] = row.end
            self.assertNotIn(0, owned)
            scheduler.advance(batch, [row.sequence % 5 + 1 if row.last else None for row in batch.rows], frozenset())
        for number, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            # Every position but the last generated one was written, once.
            self.assertEqual(written[number], len(prompt) + length - 1)
        self.assertEqual(scheduler._pages.available, scheduler._pages.capacity)
        self.assertEqual(scheduler._ring_pages.available, scheduler._ring_pages.capacity)
        return batches

    def test_the_smallest_ladder_point_that_fits(self) -> None:
        batches = self.drive(Scheduler(manifest("reference-v2")), [[1, 2]], [3])
        self.assertEqual([batch.entry.id for batch in batches], ["decode_b1_c2"] * 2 + ["decode_b1_c4"] * 2)

    def test_prefill_takes_a_prompt_in_one_call_and_a_single_token_by_decode(self) -> None:
        batches = self.drive(Scheduler(manifest("window-v3")), [[1] * 9], [2])
        self.assertEqual([batch.entry.id for batch in batches], ["prefill_b1_c16", "decode_b1_c16"])
        self.assertEqual(self.drive(Scheduler(manifest("window-v3")), [[1]], [1])[0].entry.id, "decode_b1_c16")

    def test_random_loads_always_end_and_return_every_page(self) -> None:
        generator = random.Random(7)
        for name in ("reference-v2", "window-v3"):
            most = manifest(name).ladder.max_context
            for _ in range(40):
                prompts, lengths = [], []
                for _ in range(generator.randint(1, 9)):
                    prompts.append([generator.randrange(11) for _ in range(generator.randint(1, most))])
                    lengths.append(generator.randint(1, most - len(prompts[-1]) + 1))
                with self.subTest(name=name, prompts=prompts, lengths=lengths):
                    self.drive(Scheduler(manifest(name)), prompts, lengths)
        self.assertGreater(self.foreseen, 100)

    def test_a_few_tokens_go_through_decode_steps_where_those_cost_less(self) -> None:
        text = json.dumps(load_json(shared("artifacts", "window-v3", "tlaloc-serving.json")))
        for platform, tokens, steps in (("cpu", 1, 1), ("cpu", 2, 1), ("cuda", 2, 1), ("", 2, 1)):
            batches = self.drive(Scheduler(parse_manifest(text.encode(), "manifest"), platform), [[1] * tokens], [1])
            self.assertEqual(len(batches), steps, (platform, tokens))
        wide = SimpleNamespace(tokens_per_seq=64, context=64, batch=1)
        for platform, pending, prefills in (("cpu", 5, False), ("cpu", 6, True), ("cuda", 2, True), ("", 2, True)):
            scheduler = Scheduler(manifest("window-v3"), platform)
            scheduler._prefill = [wide]  # type: ignore[list-item]
            scheduler._window = None
            sequence = scheduler.check([[1] * pending], 1)[0]
            self.assertEqual(scheduler._prefill_shape(sequence) is not None, prefills, (platform, pending))

    def test_ends(self) -> None:
        scheduler = Scheduler(manifest("window-v3"))
        scheduler.submit(scheduler.check([[1], [2]], 5))
        batch = scheduler.next_batch()
        self.assertIsNotNone(batch)
        ended = scheduler.advance(batch, [9, 63], frozenset({9}))  # type: ignore[arg-type]
        self.assertEqual([(s.reason, s.generated) for s in ended], [(Reason.EOS, (9,)), (Reason.REFUSED_TOKEN, ())])
        self.assertEqual(scheduler.live, ())
        scheduler.submit(scheduler.check([[1], [2], [3]], 5))
        scheduler.next_batch()
        for sequence in scheduler.live:
            scheduler.end(sequence, Reason.CANCELLED)
            scheduler.end(sequence, Reason.STOP)
            self.assertEqual(sequence.reason, Reason.CANCELLED)
        self.assertIsNone(scheduler.next_batch())


if __name__ == "__main__":
    unittest.main()
