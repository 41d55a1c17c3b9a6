"""Streamed text and stop strings: every golden text one token at a time, cut where `str.find` says it has to be."""

from __future__ import annotations

import random
import time
import unittest
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tests.support import load_json, shared
from tlaloc_serve.app.stream import MAX_STOP_LENGTH, MAX_STOPS, StopMatcher, StopStrings, TextStream
from tlaloc_serve.artifact.tokenizer import Tokenizer
from tlaloc_serve.errors import RequestError

NAMES = ("smollm2", "llama2_style", "llama3_style", "qwen2_style")
NO_STOPS = StopStrings(())


def cut(text: str, stops: Iterable[str]) -> tuple[str, bool]:
    """The oracle: the text before the stop string that ends first, the longest of those that end there."""
    ends = [(text.find(stop) + len(stop), -len(stop)) for stop in stops if stop in text]
    if not ends:
        return text, False
    end, length = min(ends)
    return text[: end + length], True


def matched(parts: Iterable[str], stops: StopStrings) -> tuple[list[str], bool]:
    matcher = StopMatcher(stops)
    out = [matcher.push(part) for part in parts]
    return [*out, matcher.finish()], matcher.stopped


def streamed(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], stops: StopStrings = NO_STOPS,
             show_special: bool = False) -> tuple[list[str], TextStream]:  # fmt: skip
    stream = TextStream(tokenizer, prompt, stops, show_special=show_special)
    parts = []
    for token in ids:
        parts.append(stream.push(token))
        if stream.stopped:
            break
    return [*parts, stream.finish()], stream


class Golden(unittest.TestCase):
    tokenizers: dict[str, Tokenizer]
    golden: dict[str, Any]

    @classmethod
    def setUpClass(cls) -> None:
        folder = shared("checkpoints", "tokenizers")
        cls.tokenizers = {name: Tokenizer.from_file(folder / name / "tokenizer.json") for name in NAMES}
        cls.golden = {name: load_json(folder / name / "golden_public.json") for name in NAMES}

    def cases(self) -> Iterator[tuple[str, Tokenizer, dict[str, Any]]]:
        for name, tokenizer in self.tokenizers.items():
            self.assertGreater(len(self.golden[name]["cases"]), 100)
            for case in self.golden[name]["cases"]:
                yield name, tokenizer, case

    def test_a_stream_is_the_golden_text(self) -> None:
        for name, tokenizer, case in self.cases():
            with self.subTest(tokenizer=name, text=case["text"][:80]):
                parts, stream = streamed(tokenizer, (), case["ids_with_special"])
                self.assertEqual("".join(parts), case["decoded_skip_special"])
                self.assertEqual(stream.text, case["decoded_skip_special"])
                parts, _ = streamed(tokenizer, (), case["ids_with_special"], show_special=True)
                self.assertEqual("".join(parts), case["decoded_with_special"])
                if "\ufffd" not in case["decoded_with_special"]:
                    self.assertFalse([part for part in parts if "\ufffd" in part])

    def test_a_completion_is_what_it_adds_to_its_prompt(self) -> None:
        """Cut the ids anywhere into prompt and completion: the two texts are the whole text, with no space between."""
        for name, tokenizer, case in self.cases():
            ids, whole = case["ids_with_special"], case["decoded_skip_special"]
            for place in range(len(ids) + 1) if len(ids) < 150 else (1, 777):
                with self.subTest(tokenizer=name, text=case["text"][:80], place=place):
                    before = tokenizer.decode(ids[:place])
                    parts, stream = streamed(tokenizer, ids[:place], ids[place:])
                    self.assertEqual(stream.prompt_text, before)
                    if whole.startswith(before):
                        self.assertEqual("".join(parts), whole[len(before) :])
                    else:  # cut inside a character, which the completion then shows whole
                        self.assertIn("\ufffd", before)
                        self.assertEqual(before.rstrip("\ufffd") + "".join(parts), whole)

    def test_broken_bytes(self) -> None:
        for name, tokenizer in self.tokenizers.items():
            for case in self.golden[name]["decode_cases"]:
                with self.subTest(tokenizer=name, ids=case["ids"]):
                    text = "".join(streamed(tokenizer, (), case["ids"])[0])
                    rest = case["decoded_skip_special"].removeprefix(text)
                    self.assertEqual(text + rest, case["decoded_skip_special"])
                    self.assertEqual(rest.strip("\ufffd"), "")  # only what an unfinished character left behind

    def test_stop_strings_at_every_place(self) -> None:
        """One token at a time, a stop string at each place of each text: also across tokens and inside characters."""
        tried = 0
        for name, tokenizer, case in self.cases():
            text = case["decoded_skip_special"]
            stream = tokenizer.stream()
            parts = [*(stream.push(token) for token in case["ids_with_special"]), stream.finish()]
            for start in range(len(text)) if len(text) < 400 else (0, 1, 2500, 4999):
                for length in {1, 2, 3, 8, min(len(text) - start, MAX_STOP_LENGTH)}:
                    stop = text[start : start + length]
                    out, stopped = matched(parts, StopStrings([stop]))
                    if ("".join(out), stopped) != (text[: text.index(stop)], True):
                        self.fail(f"{name}: {stop!r} in {text!r}: {out}")
                    tried += 1
        self.assertGreater(tried, 50_000)

    def test_stop_strings_at_every_token_boundary(self) -> None:
        """The same through the whole stream, with what a prompt holds back and the ids that are fed."""
        for name, tokenizer, case in self.cases():
            ids, whole = case["ids_with_special"], case["decoded_skip_special"]
            texts = [tokenizer.decode(ids[:place]) for place in range(len(ids) + 1)] if len(ids) < 150 else []
            for place, before in enumerate(texts):
                stop = whole[max(0, len(before) - 2) : len(before) + 2]
                if not stop:
                    continue
                with self.subTest(tokenizer=name, text=case["text"][:80], stop=stop):
                    parts, stream = streamed(tokenizer, (), ids, StopStrings([stop]))
                    self.assertEqual(("".join(parts), stream.stopped), cut(whole, [stop]))
                    missing = stop + "\x00"  # its first half is there, and has to come out in the end
                    parts, stream = streamed(tokenizer, ids[:place], ids[place:], StopStrings([missing]))
                    same, _ = streamed(tokenizer, ids[:place], ids[place:])
                    self.assertEqual(("".join(parts), stream.stopped), ("".join(same), False))


class Special(unittest.TestCase):
    def setUp(self) -> None:
        self.tokenizer = Tokenizer.from_file(shared("checkpoints", "tokenizers", "smollm2", "tokenizer.json"))

    def test_a_special_token_as_a_stop_string_stops_whether_shown_or_not(self) -> None:
        ids = [*self.tokenizer.encode("The capital"), 2, *self.tokenizer.encode(" of")]
        for show in (False, True):
            parts, stream = streamed(self.tokenizer, (), ids, StopStrings(["<|im_end|>"]), show)
            self.assertEqual(("".join(parts), stream.text, stream.stopped), ("The capital",) * 2 + (True,))

    def test_what_is_held_back_comes_out_before_a_special_stop(self) -> None:
        ids = [*self.tokenizer.encode("The cap"), 2]
        parts, stream = streamed(self.tokenizer, (), ids, StopStrings(["<|im_end|>", "caps"]))
        self.assertEqual(("".join(parts), stream.stopped), ("The cap", True))

    def test_the_end_of_a_character_is_not_shown_alone(self) -> None:
        ids = self.tokenizer.encode("ab\U0001f370")
        for count in range(1, len(ids)):
            parts, _ = streamed(self.tokenizer, (), ids[:count])
            self.assertNotIn("\ufffd", "".join(parts))

    def test_a_character_that_a_prompt_began_is_shown_whole(self) -> None:
        ids = self.tokenizer.encode("ab\U0001f370c")
        for count in range(1, len(ids)):
            with self.subTest(count=count):
                before = self.tokenizer.decode(ids[:count]).rstrip("\ufffd")
                parts, _ = streamed(self.tokenizer, ids[:count], ids[count:])
                self.assertEqual(before + "".join(parts), "ab\U0001f370c")


class Matcher(unittest.TestCase):
    def test_random_texts_stops_and_splits(self) -> None:
        draw = random.Random(5)
        for _ in range(20_000):
            alphabet = "ab" if draw.random() < 0.7 else "abc\u00e9\U0001f370"
            text = "".join(draw.choices(alphabet, k=draw.randint(0, 30)))
            stops = ["".join(draw.choices(alphabet, k=draw.randint(1, 6))) for _ in range(draw.randint(1, 4))]
            places = sorted(draw.randint(0, len(text)) for _ in range(draw.randint(0, 8)))
            parts = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
            out, stopped = matched(parts, StopStrings(stops))
            self.assertEqual(("".join(out), stopped), cut(text, stops), (parts, stops))

    def test_text_goes_out_as_soon_as_it_is_certain(self) -> None:
        matcher = StopMatcher(StopStrings(["###", "END"]))
        self.assertEqual([matcher.push(part) for part in ("one #", "# two", " E", "N", "E", "ND x")],
                         ["one ", "## two", " ", "", "EN", ""])  # fmt: skip
        self.assertTrue(matcher.stopped)
        self.assertEqual((matcher.push("more"), matcher.finish()), ("", ""))

    def test_the_first_to_end_wins_and_of_those_the_longest(self) -> None:
        self.assertEqual(matched(["xabcd"], StopStrings(["abcd", "bc"])), (["xa", ""], True))
        self.assertEqual(matched(["xabc"], StopStrings(["bc", "abc"])), (["x", ""], True))

    def test_time_is_linear_in_the_text(self) -> None:
        """A stop string that almost matches everywhere, which costs a search that starts again n x m."""
        stops = StopStrings(["a" * (MAX_STOP_LENGTH - 1) + "b"])
        start = time.perf_counter()
        out, stopped = matched(["a" * 50] * 4000, stops)
        self.assertLess(time.perf_counter() - start, 2.0)
        self.assertEqual((len("".join(out)), stopped), (200_000, False))

    def test_many_long_ones_cost_what_one_does(self) -> None:
        draw = random.Random(7)
        stops = StopStrings("".join(draw.choices("ab", k=MAX_STOP_LENGTH)) for _ in range(MAX_STOPS))
        text = "".join(draw.choices("ab", k=100_000))
        start = time.perf_counter()
        out, _ = matched([text], stops)
        self.assertLess(time.perf_counter() - start, 1.0)
        self.assertEqual("".join(out), text)

    def test_what_no_stop_string_can_be(self) -> None:
        for texts, words in (
            ([""], ["stop", "empty"]),
            (["x" * 2**20], ["stop", "1048576 characters", f"at most {MAX_STOP_LENGTH}"]),
            (["ok", "x" * (MAX_STOP_LENGTH + 1)], [f"{MAX_STOP_LENGTH + 1} characters"]),
            (["a\udcff"], ["lone surrogate", r"'a\udcff'"]),
            ([str(number) for number in range(MAX_STOPS + 1)], [f"{MAX_STOPS + 1}", f"at most {MAX_STOPS}"]),
        ):
            with self.subTest(texts[0][:10]), self.assertRaises(RequestError) as caught:
                StopStrings(texts)
            for word in words:
                self.assertIn(word, str(caught.exception))
            self.assertLess(len(str(caught.exception)), 200)
        self.assertEqual(StopStrings(["x" * MAX_STOP_LENGTH]).texts, ("x" * MAX_STOP_LENGTH,))


if __name__ == "__main__":
    unittest.main()
