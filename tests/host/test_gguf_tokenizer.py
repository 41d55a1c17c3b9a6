"""The tokenizer of a GGUF file: the ids of llama.cpp (llama-cpp-python 0.3.36) for the tokenizer.json that is written.

The golden file has, for each vocabulary of `tests.gguf_vocab`, what llama.cpp gives for the metadata made from it:
`plain` without special tokens or their parsing, `special` with both.
"""

from __future__ import annotations

import json
import pathlib
import unittest
from typing import Any

from tests.gguf_vocab import CONTROL, NORMAL, PREFIX, USER_DEFINED, metadata, plain, retyped, tiny_bytes, tiny_pieces
from tests.gguf_writer import F32, Typed
from tests.support import load_json, shared
from tlaloc_serve.artifact.tokenizer import Tokenizer
from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.gguf_tokenizer import gguf_frontend

GOLDEN = load_json(pathlib.Path(__file__).resolve().parents[1] / "golden_gguf_tokenizers.json")


def bytes_metadata(**more: Any) -> dict[str, Any]:
    return retyped(metadata(tiny_bytes(), "smollm", **more), "user", USER_DEFINED)


def pieces_metadata(**more: Any) -> dict[str, Any]:
    return retyped(metadata(tiny_pieces(), None, **more), "chat", USER_DEFINED)


def tokenizer_of(values: dict[str, Any], where: str) -> bytes:
    """The tokenizer.json that an export writes for a file with this metadata."""
    data = gguf_frontend(values, where).tokenizer
    assert data is not None
    return data


def document(values: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(tokenizer_of(plain(values), "file.gguf")))


class LlamaCppIds(unittest.TestCase):
    def check(self, name: str, values: dict[str, Any]) -> None:
        golden = GOLDEN["cases"][name]
        frontend = gguf_frontend(plain(values), "file.gguf")
        assert frontend.tokenizer is not None
        tokenizer = Tokenizer.from_bytes(frontend.tokenizer, name)
        for text, raw, special in zip(GOLDEN["texts"], golden["plain"], golden["special"], strict=True):
            with self.subTest(name, text=text):
                self.assertEqual(tokenizer.encode(text, add_special=False), raw)
                self.assertEqual(tokenizer.encode(text, parse_special=True), special)
        self.assertEqual(sorted(frontend.eos_token_ids), golden["end"])
        self.assertEqual(frontend.add_bos, golden["add_bos"])

    def test_tiny_vocabularies(self) -> None:
        self.check("tiny bytes", bytes_metadata())
        self.check("tiny pieces", pieces_metadata())

    def test_vocabularies_of_the_families(self) -> None:
        for name, golden in GOLDEN["cases"].items():
            if not name.startswith("tiny"):
                source = load_json(shared("checkpoints", "tokenizers", golden["folder"], "tokenizer.json"))
                prefix = {"add_space_prefix": False} if name == "spm-no-prefix" else {}
                self.check(name, metadata(source, golden["pre"], **prefix))

    def test_smollm_splits_digits_and_gpt2_does_not(self) -> None:
        at = GOLDEN["texts"].index("x =   12")  # spaces before a digit are a piece of their own, or lose one to it
        smollm, gpt2 = (GOLDEN["cases"][name]["plain"][at] for name in ("smollm", "gpt-2"))
        self.assertNotEqual(smollm, gpt2)

    def test_text_comes_back(self) -> None:
        for values in (bytes_metadata(), pieces_metadata(), pieces_metadata(add_space_prefix=False)):
            tokenizer = Tokenizer.from_bytes(tokenizer_of(plain(values), "file.gguf"), "file.gguf")
            for text in GOLDEN["texts"]:
                # A mark reads as a space again, and a space goes behind a token in the middle of a text.
                if "\u2581" not in text and "chat" not in text:
                    self.assertEqual(tokenizer.decode(tokenizer.encode(text, add_special=False)), text)


class Document(unittest.TestCase):
    def test_same_bytes_each_time(self) -> None:
        for values in (bytes_metadata(), pieces_metadata()):
            one, other = (tokenizer_of(plain(values), "file.gguf") for _ in range(2))
            self.assertEqual(one, other)

    def test_added_tokens_by_type(self) -> None:
        added = {token["content"]: token["special"] for token in document(bytes_metadata())["added_tokens"]}
        self.assertEqual(added, {"user": False, "<|im_end|>": True, "<|endoftext|>": True})

    def test_a_token_that_ends_a_text_is_special_whatever_its_type(self) -> None:
        values = retyped(bytes_metadata(), "<|im_end|>", NORMAL)
        self.assertIn("<|im_end|>", [token["content"] for token in document(values)["added_tokens"]])

    def test_bos_and_eos_around_a_text(self) -> None:
        values = plain(bytes_metadata(add_bos_token=True, add_eos_token=True, bos_token_id=5, eos_token_id=6))
        tokenizer = Tokenizer.from_bytes(tokenizer_of(values, "file.gguf"), "file.gguf")
        self.assertEqual(tokenizer.encode("")[0], 5)
        self.assertEqual(tokenizer.encode("")[-1], 6)
        self.assertIsNone(document(bytes_metadata(add_bos_token=False))["post_processor"])

    def test_first_of_two_equal_merges_counts(self) -> None:
        merges = bytes_metadata()[PREFIX + "merges"]
        self.assertEqual(
            document(bytes_metadata(merges=[*merges, merges[0]]))["model"]["merges"],
            document(bytes_metadata())["model"]["merges"],
        )


class Frontend(unittest.TestCase):
    def test_what_a_frontend_needs(self) -> None:
        values = {**plain(bytes_metadata(eot_token_id=7)), "tokenizer.chat_template": "{{ x }}"}
        frontend = gguf_frontend(values, "file.gguf")
        ids = document(bytes_metadata())["model"]["vocab"]
        self.assertEqual(frontend.eos_token_ids[:2], (ids["<|im_end|>"], 7))
        self.assertEqual((frontend.bos_token_id, frontend.add_bos), (ids["<|im_start|>"], False))
        self.assertEqual((frontend.chat_template, frontend.default_prompt), ("{{ x }}", None))

    def test_default_prompt_where_the_vocabulary_spells_it(self) -> None:
        values = metadata(load_json(shared("checkpoints", "tokenizers", "smollm2", "tokenizer.json")), "smollm")
        self.assertEqual(gguf_frontend(plain(values), "file.gguf").default_prompt, "The capital of France is")

    def test_no_tokenizer(self) -> None:
        for values in ({}, {PREFIX + "model": "none"}, {PREFIX + "model": "no_vocab"}):
            frontend = gguf_frontend(values, "file.gguf")
            self.assertEqual((frontend.tokenizer, frontend.eos_token_ids, frontend.add_bos), (None, (), None))


class Refusals(unittest.TestCase):
    def refuse(self, values: dict[str, Any], message: str) -> None:
        with self.assertRaisesRegex(ExportError, "file.gguf: tokenizer.ggml." + message):
            gguf_frontend(plain(values), "file.gguf")

    def test_models_and_pre_tokenizers(self) -> None:
        self.refuse(bytes_metadata(model="bert"), "model: tokenizer not supported, got bert, want gpt2 or llama")
        self.refuse(bytes_metadata(pre="deepseek-llm"), "pre: pre-tokenizer not supported, got deepseek-llm")
        self.refuse(bytes_metadata(pre="default"), "pre: pre-tokenizer not supported, got default")
        values = bytes_metadata()
        del values[PREFIX + "pre"]
        self.refuse(values, "pre: pre-tokenizer not supported, want one of")

    def test_vocabulary(self) -> None:
        tokens = bytes_metadata()[PREFIX + "tokens"]
        self.refuse({PREFIX + "model": "gpt2", PREFIX + "pre": "gpt-2"}, "tokens: missing key")
        self.refuse(bytes_metadata(tokens=[*tokens[:-1], "a"]), "tokens: a token stands in it twice, got 'a'")
        self.refuse(bytes_metadata(merges=["q z"]), "merges: merge 0 is not two tokens .* got 'q z'")
        self.refuse(bytes_metadata(merges=["th"]), "merges: merge 0 is not two tokens")
        self.refuse(bytes_metadata(merges=None), "merges: missing key")
        values = bytes_metadata()
        values[PREFIX + "token_type"] = Typed(5, [CONTROL])
        self.refuse(values, f"token_type: not a number a token, want {len(tokens)} numbers")

    def test_ids_and_flags(self) -> None:
        size = len(bytes_metadata()[PREFIX + "tokens"])
        for key in ("bos_token_id", "eos_token_id", "eot_token_id", "fim_pad_token_id"):
            self.refuse(bytes_metadata(**{key: size}), f"{key}: not a token id, got {size}, want 0 to {size - 1}")
        self.refuse(bytes_metadata(add_bos_token=1), "add_bos_token: not usable, got 1, want true or false")
        self.refuse(bytes_metadata(add_bos_token=True, bos_token_id=None), "bos_token_id: missing key, and add_bos")

    def test_sentencepiece(self) -> None:
        values = pieces_metadata()
        scores = values[PREFIX + "scores"].value
        tokens = values[PREFIX + "tokens"]
        at = tokens.index("\u2581t")
        tied = [*scores[: at + 1], scores[at], *scores[at + 2 :]]
        self.refuse(pieces_metadata(scores=Typed(F32, tied)), "scores: two tokens have one score")
        self.refuse(pieces_metadata(scores=Typed(F32, scores[:-1])), "scores: not a number a token")
        self.refuse(pieces_metadata(scores=Typed(F32, [float("nan"), *scores[1:]])), "scores: not a number a token")
        self.refuse(pieces_metadata(scores=["x"] * len(scores)), "scores: not a number a token")
        self.refuse(pieces_metadata(scores=None), "scores: missing key")
        longer = ["a" * 257 if token == "ab" else token for token in tokens]
        self.refuse(pieces_metadata(tokens=longer), f"tokens: token {tokens.index('ab')} is too long, got 257")
        renamed = ["<0x0a>" if token == "<0x0A>" else token for token in tokens]
        self.refuse(pieces_metadata(tokens=renamed), "tokens: a byte has no token, got no <0x0A>")


if __name__ == "__main__":
    unittest.main()
