"""The tokenizer against golden answers of the `tokenizers` package: ids, texts, and texts streamed token by token."""

from __future__ import annotations

import json
import pathlib
import time
import unicodedata
import unittest
from collections.abc import Sequence
from typing import Any

from tests.support import load_json, shared
from tlaloc_serve.artifact.tokenizer import Tokenizer
from tlaloc_serve.errors import TokenizerError

NAMES = ("smollm2", "llama2_style", "llama3_style", "qwen2_style")
# Written by tests/tokenizer_differential.py from what the package gives.
SMALL = load_json(pathlib.Path(__file__).with_name("tokenizer_golden.json"))


def streamed(tokenizer: Tokenizer, ids: Sequence[int], skip_special: bool) -> list[str]:
    stream = tokenizer.stream(skip_special=skip_special)
    return [*(stream.push(token) for token in ids), stream.finish()]


class Golden(unittest.TestCase):
    """The four tokenizers of the shared folder, every case of their golden files."""

    tokenizers: dict[str, Tokenizer]
    golden: dict[str, Any]

    @classmethod
    def setUpClass(cls) -> None:
        folder = shared("checkpoints", "tokenizers")
        cls.tokenizers = {name: Tokenizer.from_file(folder / name / "tokenizer.json") for name in NAMES}
        cls.golden = {name: load_json(folder / name / "golden_public.json") for name in NAMES}

    def test_ids(self) -> None:
        for name, tokenizer in self.tokenizers.items():
            self.assertGreater(len(self.golden[name]["cases"]), 100)
            for case in self.golden[name]["cases"]:
                with self.subTest(tokenizer=name, text=case["text"]):
                    plain = tokenizer.encode(case["text"], add_special=False, parse_special=True)
                    self.assertEqual(plain, case["ids"])
                    self.assertEqual(tokenizer.encode(case["text"], parse_special=True), case["ids_with_special"])

    def test_texts(self) -> None:
        for name, tokenizer in self.tokenizers.items():
            for case in self.golden[name]["cases"]:
                with self.subTest(tokenizer=name, text=case["text"]):
                    ids = case["ids_with_special"]
                    self.assertEqual(tokenizer.decode(case["ids"], skip_special=False), case["decoded"])
                    self.assertEqual(tokenizer.decode(ids, skip_special=False), case["decoded_with_special"])
                    self.assertEqual(tokenizer.decode(ids), case["decoded_skip_special"])

    def test_broken_bytes_and_special_ids(self) -> None:
        for name, tokenizer in self.tokenizers.items():
            for case in self.golden[name]["decode_cases"]:
                with self.subTest(tokenizer=name, ids=case["ids"]):
                    self.assertEqual(tokenizer.decode(case["ids"], skip_special=False), case["decoded"])
                    self.assertEqual(tokenizer.decode(case["ids"]), case["decoded_skip_special"])

    def test_streams(self) -> None:
        for name, tokenizer in self.tokenizers.items():
            cases = [
                (c["ids_with_special"], c["decoded_with_special"], c["decoded_skip_special"], True)
                for c in self.golden[name]["cases"]
            ]
            cases += [
                (c["ids"], c["decoded"], c["decoded_skip_special"], False) for c in self.golden[name]["decode_cases"]
            ]
            for ids, shown, skipped, whole in cases:
                with self.subTest(tokenizer=name, ids=ids):
                    self.assertEqual("".join(streamed(tokenizer, ids, False)), shown)
                    parts = streamed(tokenizer, ids, True)
                    self.assertEqual("".join(parts), skipped)
                    if whole and "\ufffd" not in skipped:
                        self.assertFalse([part for part in parts if "\ufffd" in part])

    def test_sizes_and_names(self) -> None:
        for name, tokenizer in self.tokenizers.items():
            self.assertEqual(tokenizer.vocab_size, self.golden[name]["vocab_size"])
        smollm2 = self.tokenizers["smollm2"]
        self.assertEqual(smollm2.token_to_id("<|im_end|>"), 2)
        self.assertEqual(smollm2.id_to_token(2), "<|im_end|>")
        self.assertEqual(smollm2.token_to_id("\u0120the"), smollm2.encode(" the")[0])
        self.assertIsNone(smollm2.token_to_id("no such token"))
        self.assertIsNone(smollm2.id_to_token(10**6))
        self.assertEqual(smollm2.special_ids, frozenset(range(17)))

    def test_special_texts_stay_text_unless_parsed(self) -> None:
        qwen = self.tokenizers["qwen2_style"]
        text = "<|im_start|>user<think>"
        plain, parsed = qwen.encode(text), qwen.encode(text, parse_special=True)
        self.assertNotIn(qwen.token_to_id("<|im_start|>"), plain)
        self.assertEqual(parsed[0], qwen.token_to_id("<|im_start|>"))
        self.assertEqual(plain[-1], qwen.token_to_id("<think>"))  # an added token that is not special
        self.assertEqual(qwen.decode(plain), text)

    def test_a_stream_gives_text_as_soon_as_it_is_certain(self) -> None:
        smollm2 = self.tokenizers["smollm2"]
        ids = smollm2.encode("The capital of France is")
        self.assertEqual(streamed(smollm2, ids, True), ["The", " capital", " of", " France", " is", ""])
        llama = self.tokenizers["llama2_style"]
        parts = streamed(llama, llama.encode("\u6771\u4eac x"), True)
        self.assertEqual("".join(parts), "\u6771\u4eac x")
        self.assertEqual(parts[-1], "")

    def test_unknown_ids_add_nothing(self) -> None:
        smollm2 = self.tokenizers["smollm2"]
        self.assertEqual(smollm2.decode([504, 10**6, 3575]), "The capital")

    def test_checkpoint_tokenizers_open(self) -> None:
        for name in ("llama3_rope", "llama_gqa_untied", "qwen2"):
            tokenizer = Tokenizer.from_file(shared("checkpoints", name, "tokenizer.json"))
            text = "Hello  w\u00f6rld \U0001f600\n"
            self.assertEqual(tokenizer.decode(tokenizer.encode(text)), text)


class Small(unittest.TestCase):
    """Every flag and component, on small files: added tokens, Metaspace, Split, Digits, unknowns, byte fallback."""

    def test_all(self) -> None:
        self.assertGreater(len(SMALL["cases"]), 30)
        for case in SMALL["cases"]:
            file = {**case["file"], "model": SMALL["models"][case["model"]]}
            tokenizer = Tokenizer.from_bytes(json.dumps(file).encode(), case["name"])
            for answer in case["answers"]:
                with self.subTest(file=case["name"], text=answer["text"]):
                    self.assertEqual(tokenizer.encode(answer["text"], parse_special=True), answer["parsed"])
                    self.assertEqual(tokenizer.encode(answer["text"], add_special=False), answer["ids"])
                    self.assertEqual(tokenizer.decode(answer["parsed"], skip_special=False), answer["decoded"])
                    self.assertEqual(tokenizer.decode(answer["parsed"]), answer["skipped"])
                    self.assertEqual("".join(streamed(tokenizer, answer["parsed"], True)), answer["skipped"])

    def test_a_token_whose_spaces_were_taken_already_is_dropped(self) -> None:
        """Found by the differential run: `rstrip` of one token takes the white space that is the next token."""
        case = SMALL["cases"][0]
        file = {**case["file"], "model": SMALL["models"][case["model"]]}
        flags = {"special": False, "normalized": False, "single_word": False}
        file["added_tokens"] = [
            *file["added_tokens"],
            {"id": 323, "content": "<a>", "lstrip": False, "rstrip": True, **flags},
            {"id": 324, "content": "  ", "lstrip": True, "rstrip": False, **flags},
        ]
        tokenizer = Tokenizer.from_bytes(json.dumps(file).encode(), "spaces")
        x, y = tokenizer.token_to_id("x"), tokenizer.token_to_id("y")
        for text, want in (("x<a>  ", [x, 323]), ("x<a>  y", [x, 323, y]), ("x  <a> y", [x, 324, 323, y])):
            self.assertEqual(tokenizer.encode(text), want, text)

    def test_both_spellings_of_merges(self) -> None:
        case = SMALL["cases"][0]
        model = SMALL["models"][case["model"]]
        self.assertIsInstance(model["merges"][0], list)
        joined = {**model, "merges": ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]}
        tokenizer = Tokenizer.from_bytes(json.dumps({**case["file"], "model": joined}).encode(), "joined")
        for answer in case["answers"]:
            self.assertEqual(tokenizer.encode(answer["text"], parse_special=True), answer["parsed"])


class Text(unittest.TestCase):
    def setUp(self) -> None:
        self.tokenizer = Tokenizer.from_file(shared("checkpoints", "tokenizers", "qwen2_style", "tokenizer.json"))

    def test_a_lone_surrogate_is_refused_with_its_place(self) -> None:
        for text in ("ab\ud800", "\udfffx", "\ude00\ud83d"):
            with self.subTest(text=ascii(text)), self.assertRaises(TokenizerError) as caught:
                self.tokenizer.encode(text)
            self.assertIn("surrogate", str(caught.exception))

    def test_code_points_unknown_to_the_interpreter_are_counted(self) -> None:
        unknown = next(
            code
            for code in range(0x30000, 0x40000)
            if unicodedata.category(chr(code)) == "Cn" and code & 0xFFFE != 0xFFFE
        )
        self.assertEqual(self.tokenizer.unassigned("abc \u4e16\U0001f600\ufdd0\uffff"), {})
        self.assertEqual(self.tokenizer.unassigned(f"a{chr(unknown)}b{chr(unknown)}"), {unknown: 2})
        llama = Tokenizer.from_file(shared("checkpoints", "tokenizers", "llama2_style", "tokenizer.json"))
        self.assertEqual(llama.unassigned(chr(unknown)), {})  # no class decides anything there

    def test_a_cached_word_and_a_full_cache_change_nothing(self) -> None:
        words = " ".join(f"w{i}x" for i in range(70_000))
        first = self.tokenizer.encode(words)
        self.assertEqual(self.tokenizer.encode(words), first)
        self.assertEqual(self.tokenizer.decode(first), words)


class Cost(unittest.TestCase):
    """Far from the measured figures, so that only a change of kind fails: a quadratic merge, a word not remembered."""

    @classmethod
    def setUpClass(cls) -> None:
        start = time.perf_counter()
        cls.tokenizer = Tokenizer.from_file(shared("checkpoints", "tokenizers", "smollm2", "tokenizer.json"))
        cls.load_seconds = time.perf_counter() - start

    def best(self, text: str) -> float:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            self.tokenizer.encode(text)
            times.append(time.perf_counter() - start)
        return min(times)

    def test_loading(self) -> None:
        self.assertLess(self.load_seconds, 2.0)

    def test_english(self) -> None:
        text = "The quick brown fox doesn't jump over 12 lazy dogs, and so on.\n" * 8000
        self.assertGreater(len(text) / self.best(text), 1e6)

    def test_a_long_word_costs_n_log_n(self) -> None:
        for unit in ("a", "abcdefghij", "\u4e16", " "):
            with self.subTest(unit=unit):
                self.assertLess(self.best((unit * 5000)[:5000]), 0.05)
                self.assertLess(self.best((unit * 100_000)[:100_000]), 3.0)

    def test_a_push_does_not_get_dearer(self) -> None:
        stream = self.tokenizer.stream()
        ids = self.tokenizer.encode("word " * 100) * 400
        start = time.perf_counter()
        for token in ids:
            stream.push(token)
        self.assertLess((time.perf_counter() - start) / len(ids), 100e-6)


if __name__ == "__main__":
    unittest.main()
