"""What the tokenizer refuses, by file and component: damage, other models, unknown components, bad vocabularies."""

from __future__ import annotations

import copy
import json
import pathlib
import random
import tempfile
import unittest
from collections.abc import Callable
from typing import Any

from tests.support import load_json
from tlaloc_serve.artifact.tokenizer import Tokenizer
from tlaloc_serve.errors import TokenizerError

SMALL = load_json(pathlib.Path(__file__).with_name("tokenizer_golden.json"))


def small(name: str, family: int = 0) -> dict[str, Any]:
    """A copy of a small file: the byte-level one, or (family 1) the one with byte fallback."""
    case = [case for case in SMALL["cases"] if case["name"] == name][family]
    return copy.deepcopy({**case["file"], "model": SMALL["models"][case["model"]]})


class Refusals(unittest.TestCase):
    def refused(self, file: object, *said: str) -> None:
        data = file if isinstance(file, bytes) else json.dumps(file).encode()
        with self.assertRaises(TokenizerError) as caught:
            Tokenizer.from_bytes(data, "tok.json")
        for words in ("tok.json", *said):
            self.assertIn(words, str(caught.exception))

    def changed(self, change: Callable[[dict[str, Any]], object], *said: str, family: int = 0) -> None:
        file = small("plain", family)
        Tokenizer.from_bytes(json.dumps(file).encode(), "tok.json")  # the file itself is good
        change(file)
        self.refused(file, *said)

    def test_damaged_files(self) -> None:
        data = json.dumps(small("plain")).encode()
        for size in (0, 1, 100, len(data) // 2, len(data) - 1):
            self.refused(data[:size], "not a complete JSON file")
        self.refused(b"\xff\xfe" + data, "not a complete JSON file")
        self.refused(b"[" * 100_000, "not a complete JSON file")
        self.refused(b"[]", "not a JSON object")
        self.refused(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git-lfs pointer")

    def test_files_that_cannot_be_read(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for path in (pathlib.Path(folder, "absent.json"), pathlib.Path(folder)):
                with self.assertRaises(TokenizerError) as caught:
                    Tokenizer.from_file(path)
                self.assertIn(str(path), str(caught.exception))

    def test_the_root(self) -> None:
        self.changed(lambda f: f.update(version="2.0"), "version")
        self.changed(lambda f: f.update(truncation={"max_length": 8}), "truncation")
        self.changed(lambda f: f.update(padding={"strategy": "BatchLongest"}), "padding")
        self.changed(lambda f: f.update(extra=1), "extra")

    def test_models(self) -> None:
        for kind in ("Unigram", "WordPiece", "WordLevel", "Novel"):
            self.changed(lambda f, kind=kind: f["model"].update(type=kind), "model", kind, "BPE")
        self.changed(lambda f: f.pop("model"), "model")
        self.changed(lambda f: f["model"].update(dropout=0.1), "dropout")
        self.changed(lambda f: f["model"].update(continuing_subword_prefix="##"), "continuing_subword_prefix")
        self.changed(lambda f: f["model"].update(end_of_word_suffix="</w>"), "end_of_word_suffix")
        self.changed(lambda f: f["model"].update(novelty=True), "novelty")

    def test_vocabularies(self) -> None:
        def twice(file: dict[str, Any]) -> None:
            file["model"]["vocab"]["a"] = file["model"]["vocab"]["b"]

        self.changed(twice, "model", "'a'", "'b'", "same id")
        for bad in (-1, 1.0, "7", None, True, 1 << 40):
            self.changed(lambda f, bad=bad: f["model"]["vocab"].update(a=bad), "id of token 'a'")
        self.changed(lambda f: f["model"].update(vocab=[]), "vocab")
        self.changed(lambda f: f["model"]["vocab"].update({"\ud800": 9999}), "surrogate")

    def test_merges(self) -> None:
        def with_merge(merge: object) -> Callable[[dict[str, Any]], object]:
            return lambda f: f["model"]["merges"].append(merge)

        self.changed(with_merge(["a", ""]), "merges[60]", "''")
        self.changed(with_merge(["a", "never seen"]), "merges[60]", "'never seen'")
        self.changed(with_merge(["z", "q"]), "merges[60]", "'zq'")
        for bad in (["a"], ["a", "b", "c"], "a b", "ab", 7, None, [1, 2], [["a"], "b"], {}):
            self.changed(with_merge(bad), "merges[60]")
        self.changed(lambda f: f["model"].update(merges=["a b c"]), "merges[0]")
        self.changed(lambda f: f["model"].update(merges=["a b", ["a", "b"]]), "merges")
        self.changed(lambda f: f["model"].update(merges="a b"), "merges")
        self.changed(lambda f: f["model"].pop("merges"), "merges")

    def test_a_merge_whose_result_is_its_own_part_is_cyclic(self) -> None:
        for merge in (["a", ""], ["", "a"], ["", ""]):

            def cycle(file: dict[str, Any], merge: list[str] = merge) -> None:
                file["model"]["vocab"][""] = 5000
                file["model"]["merges"].append(merge)

            self.changed(cycle, "merges[60]", "cyclic")

    def test_normalizers(self) -> None:
        for kind in ("NFKC", "NFD", "Lowercase", "Precompiled", "BertNormalizer", "Novel"):
            inner = {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": kind}]}
            self.changed(lambda f, kind=kind: f.update(normalizer={"type": kind}), "normalizer", kind)
            self.changed(lambda f, inner=inner: f.update(normalizer=inner), "normalizers[1]", kind)
        regex = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
        self.changed(lambda f: f.update(normalizer=regex), "normalizer", " {2,}")
        self.changed(lambda f: f.update(normalizer={"prepend": "x"}), "type")

    def test_pretokenizers(self) -> None:
        for kind in ("Whitespace", "BertPreTokenizer", "Punctuation", "UnicodeScripts", "Novel"):
            self.changed(lambda f, kind=kind: f.update(pre_tokenizer={"type": kind}), "pre_tokenizer", kind)
        split = {"type": "Split", "pattern": {"Regex": r"\p{Han}+|."}, "behavior": "Isolated", "invert": False}
        self.changed(lambda f: f.update(pre_tokenizer=split), "pre_tokenizer", r"\\p{Han}+|.", "llama-3")
        known = small("llama-3")["pre_tokenizer"]["pretokenizers"][0]
        for change in (
            {"behavior": "Removed"},
            {"behavior": "Contiguous"},
            {"behavior": "Novel"},
            {"pattern": {"String": ""}},
            {"pattern": "x"},
            {"novelty": 1},
        ):
            self.changed(lambda f, change=change: f.update(pre_tokenizer={**known, **change}), "pre_tokenizer")
        after = {
            "type": "Sequence",
            "pretokenizers": [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}, {"type": "Digits"}],
        }
        self.changed(lambda f: f.update(pre_tokenizer=after), "pretokenizers[1]", "Digits", "after ByteLevel")

    def test_metaspace(self) -> None:
        mark = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "first", "split": True}
        self.changed(lambda f: f.update(pre_tokenizer=mark), "first", family=1)  # behind the Prepend normalizer
        self.changed(lambda f: f.update(pre_tokenizer={**mark, "prepend_scheme": "last"}), "prepend_scheme", family=1)
        self.changed(lambda f: f.update(pre_tokenizer={**mark, "replacement": "ab"}), "replacement", family=1)
        self.changed(lambda f: f.update(pre_tokenizer={**mark, "add_prefix_space": False}), "never", family=1)

    def test_post_processors(self) -> None:
        for kind in ("BertProcessing", "RobertaProcessing", "Novel"):
            self.changed(lambda f, kind=kind: f.update(post_processor={"type": kind}), "post_processor", kind)
        good = small("plain", 1)["post_processor"]
        self.changed(lambda f: f.update(post_processor={**good, "single": []}), "sequence A", family=1)
        self.changed(lambda f: f.update(post_processor={**good, "special_tokens": {}}), "<s>", family=1)

    def test_decoders(self) -> None:
        for kind in ("WordPiece", "BPEDecoder", "CTC", "Novel"):
            self.changed(lambda f, kind=kind: f.update(decoder={"type": kind}), "decoder", kind)
        strip = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
        self.changed(lambda f: f.update(decoder=strip), "decoder", "stop")
        fused = {"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}
        self.changed(lambda f: f.update(decoder=fused), "decoders[1]", "ByteFallback", "behind Fuse")

    def test_added_tokens(self) -> None:
        self.changed(lambda f: f["added_tokens"][0].update(id=7), "added_tokens[0]", "id")
        self.changed(lambda f: f["added_tokens"][0].update(content=7), "added_tokens[0]", "content")
        self.changed(lambda f: f["added_tokens"][0].update(special="yes"), "added_tokens[0]", "special")
        self.changed(lambda f: f["added_tokens"][0].update(novelty=1), "added_tokens[0]", "novelty")
        self.changed(lambda f: f.update(added_tokens={}), "added_tokens")
        self.changed(lambda f: f["added_tokens"][-1].update(content="a"), "'a'")

    def test_an_unknown_token_that_is_not_there(self) -> None:
        file = small("unknown-True", 0)
        file["model"]["unk_token"] = "<none>"
        tokenizer = Tokenizer.from_bytes(json.dumps(file).encode(), "tok.json")
        tokenizer.encode("abc")
        with self.assertRaises(TokenizerError) as caught:
            tokenizer.encode("\u754c")
        self.assertIn("<none>", str(caught.exception))


class Corrupted(unittest.TestCase):
    def test_any_changed_byte_opens_or_is_refused_by_name(self) -> None:
        """Seeded: no damage may come out as another exception than TokenizerError."""
        rng = random.Random(11)
        data = json.dumps(small("added", 1)).encode()
        opened = 0
        for _ in range(300):
            broken = bytearray(data)
            for _ in range(rng.randint(1, 3)):
                broken[rng.randrange(len(broken))] = rng.choice(b'"{}[],:0a\\ \xff')
            try:
                tokenizer = Tokenizer.from_bytes(bytes(broken), "tok.json")
                tokenizer.decode(tokenizer.encode("in the <a> beginning"))
                opened += 1
            except TokenizerError:
                pass
        self.assertGreater(opened, 0)


if __name__ == "__main__":
    unittest.main()
