"""`tokenize` and `detokenize` as a user runs them: every golden case, bad lines, a pipe, a conversation."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import unicodedata
import unittest

from tests.support import REPO, load_json, shared

NAMES = ("smollm2", "llama2_style", "llama3_style", "qwen2_style")


def command(*arguments: str, tokenizer: str = "smollm2") -> list[str]:
    path = str(shared("checkpoints", "tokenizers", tokenizer, "tokenizer.json"))
    return [sys.executable, "-m", "tlaloc_serve", arguments[0], "--tokenizer", path, "--jsonl", *arguments[1:]]


def run(data: bytes, *arguments: str, tokenizer: str = "smollm2") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command(*arguments, tokenizer=tokenizer), input=data, cwd=REPO, capture_output=True, timeout=60, check=False
    )


def lines(values: list[object]) -> bytes:
    return b"".join(json.dumps(value, ensure_ascii=False).encode() + b"\n" for value in values)


class Golden(unittest.TestCase):
    def answers(self, data: bytes, *arguments: str, tokenizer: str) -> list[object]:
        result = run(data, *arguments, tokenizer=tokenizer)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertTrue(result.stdout.isascii())
        return [json.loads(line) for line in result.stdout.splitlines()]

    def test_every_case(self) -> None:
        for name in NAMES:
            golden = load_json(shared("checkpoints", "tokenizers", name, "golden_public.json"))
            cases, decode = golden["cases"], golden["decode_cases"]
            texts = lines([case["text"] for case in cases])
            plain = self.answers(texts, "tokenize", "--no-special", "--parse-special", tokenizer=name)
            self.assertEqual(plain, [case["ids"] for case in cases])
            full = self.answers(texts, "tokenize", "--parse-special", tokenizer=name)
            self.assertEqual(full, [case["ids_with_special"] for case in cases])
            ids = lines([*full, *(case["ids"] for case in decode)])
            for flags, key, decode_key in (
                ([], "decoded_skip_special", "decoded_skip_special"),
                (["--show-special"], "decoded_with_special", "decoded"),
            ):
                want = [case[key] for case in cases] + [case[decode_key] for case in decode]
                self.assertEqual(self.answers(ids, "detokenize", *flags, tokenizer=name), want)

    def test_special_texts_stay_text_unless_parsed(self) -> None:
        data = lines(["<|im_start|>"])
        self.assertEqual(self.answers(data, "tokenize", "--parse-special", tokenizer="smollm2"), [[1]])
        self.assertNotIn(1, self.answers(data, "tokenize", tokenizer="smollm2")[0])


class Lines(unittest.TestCase):
    def test_a_bad_line_is_named_and_those_before_it_are_answered(self) -> None:
        for bad, words in (
            (b'"a\xff"\n', "line 2: not UTF-8 at byte 2, got 0xff"),
            (b'"a\n', "line 2: not JSON"),
            (b"\n", "line 2: not JSON"),
            (b"[1]\n", "line 2: not a text, got list"),
            (b'"\\ud800"\n', "line 2: text: lone surrogate U+D800"),
            (b"[" * 100_000 + b"\n", "line 2: "),
        ):
            with self.subTest(bad[:20]):
                result = run(b'"a"\n' + bad + b'"a"\n', "tokenize")
                self.assertEqual((result.returncode, result.stdout), (1, b"[81]\n"))
                self.assertTrue(result.stderr.decode().startswith(f"error: {words}"), result.stderr)
        for bad in (b'"a"', b"[1, -1]", b"[1.0]", b"[true]", b"[[1]]", b"{}", b"7"):
            with self.subTest(bad):
                result = run(b"[81]\n" + bad, "detokenize")
                self.assertEqual((result.returncode, result.stdout), (1, b'"a"\n'))
                self.assertIn(b"error: line 2: not a list of token ids", result.stderr)

    def test_usage(self) -> None:
        for arguments in (["tokenize"], ["tokenize", "--jsonl"], ["detokenize", "--tokenizer", "f"]):
            result = subprocess.run(
                [sys.executable, "-m", "tlaloc_serve", *arguments], cwd=REPO, capture_output=True, check=False
            )
            self.assertEqual(result.returncode, 2)
        result = subprocess.run(
            [sys.executable, "-m", "tlaloc_serve", "tokenize", "--tokenizer", "/nowhere", "--jsonl"],
            cwd=REPO, capture_output=True, check=False,
        )  # fmt: skip
        self.assertEqual((result.returncode, result.stdout), (1, b""))

    def test_each_line_is_answered_at_once(self) -> None:
        for name, question, answer in (("tokenize", b'"a"\n', b"[81]\n"), ("detokenize", b"[81]\n", b'"a"\n')):
            with subprocess.Popen(command(name), cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                for _ in range(3):
                    process.stdin.write(question)  # type: ignore[union-attr]
                    process.stdin.flush()  # type: ignore[union-attr]
                    self.assertEqual(process.stdout.readline(), answer)  # type: ignore[union-attr]
                process.stdin.close()  # type: ignore[union-attr]
                self.assertEqual(process.wait(timeout=30), 0)

    def test_a_reader_that_goes_away(self) -> None:
        with tempfile.NamedTemporaryFile() as file:
            file.write(b'"a"\n' * 100_000)
            file.flush()
            text = " ".join(command("tokenize"))
            result = subprocess.run(
                ["bash", "-c", f"set -o pipefail; {text} < {file.name} | head -1"],
                cwd=REPO, capture_output=True, timeout=60, check=False,
            )  # fmt: skip
        self.assertEqual((result.returncode, result.stdout, result.stderr), (141, b"[81]\n", b""))

    def test_a_full_disk(self) -> None:
        with open("/dev/full", "wb") as full:
            result = subprocess.run(
                command("tokenize"), input=b'"a"\n', cwd=REPO, stdout=full, stderr=subprocess.PIPE, check=False
            )
        self.assertEqual(result.returncode, 1)
        self.assertEqual(result.stderr, b"error: input or output: No space left on device\n")

    def test_characters_unknown_to_this_interpreter_are_counted(self) -> None:
        unknown = next(chr(code) for code in range(0x30000, 0x40000) if unicodedata.category(chr(code)) == "Cn")
        result = run(lines([f"a{unknown}b{unknown}", "c", unknown]), "tokenize")
        self.assertEqual(result.returncode, 0)
        self.assertEqual(len(result.stdout.splitlines()), 3)
        self.assertIn(f"warning: 3 characters are not in this interpreter's Unicode {unicodedata.unidata_version} "
                      f"(U+{ord(unknown):04X})", result.stderr.decode())  # fmt: skip
        self.assertEqual(run(lines(["abc \u4e16"]), "tokenize").stderr, b"")


if __name__ == "__main__":
    unittest.main()
