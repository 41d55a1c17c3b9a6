"""serve.py with text, on a real plugin and small exported models: completions, streams, stop strings, sampling."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import pty
import signal
import subprocess
import sys
import tempfile
import unittest
from typing import Any

from tests.support import REPO, cpu_plugins, load_json, shared
from tlaloc_serve.artifact.tokenizer import Tokenizer
from tlaloc_serve.export.checkpoint import open_checkpoint
from tlaloc_serve.export.write import ExportOptions, export_checkpoint, plan_export

NAMES = ("llama3_rope", "llama_gqa_untied", "qwen2")
_folder = tempfile.TemporaryDirectory()


def setUpModule() -> None:
    unittest.addModuleCleanup(_folder.cleanup)
    for name in NAMES:
        plan = plan_export(open_checkpoint(shared("checkpoints", name)), ExportOptions(batch=(1, 4), context=(64,)))
        export_checkpoint(plan, str(path_of(name)))


def path_of(name: str) -> pathlib.Path:
    return pathlib.Path(_folder.name, name)


def command(name: str, *arguments: str) -> list[str]:
    program = [sys.executable, "-X", "dev", str(REPO / "serve.py"), "--plugin", cpu_plugins()[0]]
    return [*program, "--artifact", str(path_of(name)), *arguments]


def environ() -> dict[str, str]:
    return {**os.environ, "TLALOC_CACHE_DIR": str(path_of("cache"))}


class Text(unittest.TestCase):
    def serve(self, name: str, *arguments: str, code: int = 0, data: str = "") -> str:
        result = subprocess.run(
            command(name, *arguments), input=data.encode(), env=environ(), capture_output=True, timeout=120, check=False
        )
        self.assertEqual((result.returncode, result.stderr.decode()), (code, ""), result.stdout)
        return result.stdout.decode()

    def sequences(self, name: str, *arguments: str, data: str = "") -> list[dict[str, Any]]:
        run: dict[str, Any] = json.loads(self.serve(name, *arguments, "--json", data=data))["run"]
        return list(run["sequences"])

    def streamed(self, name: str, *arguments: str) -> str:
        """The text between the header and the footer of a run that streams."""
        out = self.serve(name, *arguments, "--stream")
        self.assertNotIn("  step ", out)
        _, _, rest = out.partition("pages x 16)\n\n")
        text, _, _ = rest.rpartition("\n\ngenerated ")
        return text

    def completion(self, name: str, *arguments: str) -> dict[str, Any]:
        return self.sequences(name, *arguments)[0]


class Completions(Text):
    def test_ids_texts_and_order(self) -> None:
        """Texts among ids: each gets its tokenizer's ids, and what transformers generates for a prompt stays."""
        for name in NAMES:
            case = load_json(shared("checkpoints", name, "golden.json"))["cases"][1]
            golden = ",".join(map(str, case["prompt"]))
            want = case["generated"][:20]
            tokenizer = Tokenizer.from_file(path_of(name) / "tokenizer.json")
            one, two, three = self.sequences(
                name, "--text", " a b", "--prompt", golden, "--text", "-", "--max-new", "20", data="x\ny\n"
            )
            self.assertEqual((one["prompt"], three["prompt"]), (tokenizer.encode(" a b"), tokenizer.encode("x\ny")))
            self.assertEqual((two["prompt"], two["generated"]), (case["prompt"], want))
            for sequence in (one, two, three):
                whole = tokenizer.decode(sequence["all"])
                self.assertTrue(whole.startswith(sequence["text"] + sequence["completion"]))
                self.assertEqual((sequence["text"] + sequence["completion"]).rstrip("\ufffd"), whole.rstrip("\ufffd"))

    def test_the_table_of_steps_and_the_text_in_a_pipe(self) -> None:
        want = self.completion("qwen2", "--text", "a b", "--max-new", "4")
        out = self.serve("qwen2", "--text", "a b", "--max-new", "4")
        for line in (
            f"  tokenizer    {path_of('qwen2') / 'tokenizer.json'} (the artifact's own, hash checked), 368 tokens",
            f"generated      {want['generated']}",
            "text           'a b'",
            f"completion     {want['completion']!r}",
            "ended          length",
            "  step 0 ",
        ):
            self.assertIn(line, out)

    def test_a_stream_is_the_completion(self) -> None:
        for name in NAMES:
            arguments = ("--text", "Hello, w\u00f6rld", "--max-new", "40", "--ignore-eos")
            completion = self.completion(name, *arguments)["completion"]
            self.assertEqual(self.streamed(name, *arguments), completion.removesuffix("\n"))
            shown = self.completion(name, *arguments, "--show-special")["completion"]
            self.assertEqual(self.streamed(name, *arguments, "--show-special"), shown.removesuffix("\n"))

    def test_several_texts_stream_one_after_the_other(self) -> None:
        arguments = ("--text", "a", "--prompt", "5,6", "--text", "b c", "--max-new", "12")
        texts = [sequence["completion"] for sequence in self.sequences("llama3_rope", *arguments)]
        want = "\n".join(f"[{number}]\n{text}" + "\n" * (text[-1:] != "\n") for number, text in enumerate(texts))
        self.assertEqual(self.streamed("llama3_rope", *arguments) + "\n", want)

    def test_the_default_prompt(self) -> None:
        path = path_of("qwen2") / "tlaloc-serving.json"
        manifest = json.loads(path.read_bytes())
        manifest["frontend"]["defaultPrompt"] = "Hi there"
        other = path.with_name("tlaloc-serving-default.json")
        other.write_text(json.dumps(manifest))
        out = self.serve("qwen2", "--artifact", str(other), "--max-new", "2")
        self.assertIn("text           'Hi there'", out)

    def test_a_chat(self) -> None:
        arguments = ("--chat", "Hi<|im_end|>", "--system", "Be brief.", "--chat-template", "chatml", "--max-new", "3")
        facts = json.loads(self.serve("qwen2", *arguments, "--json"))
        self.assertEqual(facts["text"]["chatTemplate"], "chatml")
        ids = facts["run"]["sequences"][0]["prompt"]
        self.assertEqual((ids.count(362), ids.count(363)), (3, 2))
        self.assertIn("  chat         template chatml", self.serve("qwen2", *arguments))

    def test_ids_alone_need_no_tokenizer(self) -> None:
        bare = path_of("qwen2") / "tlaloc-serving-bare.json"
        manifest = json.loads((path_of("qwen2") / "tlaloc-serving.json").read_bytes())
        manifest["frontend"]["tokenizer"] = None
        bare.write_text(json.dumps(manifest))
        out = self.serve("qwen2", "--artifact", str(bare), "--prompt", "5", "--max-new", "2")
        for word in ("tokenizer", "completion", "'"):
            self.assertNotIn(f"\n{word}", out)


class Ends(Text):
    def test_why_each_sequence_ended(self) -> None:
        case = next(
            case
            for case in load_json(shared("checkpoints", "llama_gqa_untied", "golden.json"))["cases"]
            if case["generated"][-1] == 2
        )
        prompt = ",".join(map(str, case["prompt"]))
        ended = self.completion("llama_gqa_untied", "--prompt", prompt, "--max-new", "24")
        self.assertEqual((ended["generated"], ended["reason"]), (case["generated"], "eos"))
        past = self.completion("llama_gqa_untied", "--prompt", prompt, "--max-new", "24", "--ignore-eos")
        self.assertEqual((len(past["generated"]), past["reason"]), (24, "length"))
        full = self.completion("llama_gqa_untied", "--prompt", ",".join(["5"] * 60), "--ignore-eos")
        self.assertEqual((len(full["generated"]), full["reason"]), (5, "context"))

    def test_a_stop_string_anywhere_in_the_completion(self) -> None:
        arguments = ("--text", "Hello", "--max-new", "24", "--ignore-eos")
        for name in NAMES:
            whole = self.completion(name, *arguments)
            text = whole["completion"]
            tokenizer = Tokenizer.from_file(path_of(name) / "tokenizer.json")
            for start in range(1, len(text) - 3, max(1, len(text) // 3)):
                stop = text[start : start + 3]
                with self.subTest(name, stop=stop):
                    one = self.completion(name, *arguments, "--stop", stop, "--stop", "not there")
                    self.assertEqual((one["completion"], one["reason"]), (text[: text.index(stop)], "stop"))
                    count = len(one["generated"])
                    self.assertEqual(one["generated"], whole["generated"][:count])
                    before = tokenizer.decode(one["prompt"])
                    self.assertIn(stop, tokenizer.decode(one["all"]).removeprefix(before))
                    self.assertEqual(self.streamed(name, *arguments, "--stop", stop), one["completion"].rstrip("\n"))

    def test_a_stop_in_one_sequence_leaves_the_others_alone(self) -> None:
        arguments = ("--text", "Hello", "--text", "b c", "--max-new", "16", "--ignore-eos")
        first, second = self.sequences("llama3_rope", *arguments)
        stop = first["completion"][2:8]
        self.assertNotIn(stop, second["completion"])
        one, two = self.sequences("llama3_rope", *arguments, "--stop", stop)
        self.assertEqual((one["reason"], two["reason"]), ("stop", "length"))
        self.assertEqual((one["completion"], two["generated"]), (first["completion"][:2], second["generated"]))


class Sampling(Text):
    FLAGS = ("--temperature", "1.5", "--top-k", "50", "--top-p", "0.95", "--max-new", "12", "--ignore-eos")

    def test_a_seed_gives_the_same_ids_alone_and_among_others(self) -> None:
        alone = self.completion("qwen2", "--text", "Hello", *self.FLAGS, "--seed", "7")
        again = self.sequences(
            "qwen2", "--text", "b", "--prompt", "9,8,7", "--text", "Hello", *self.FLAGS, "--seed", "7"
        )
        self.assertEqual(again[2]["generated"], alone["generated"])
        self.assertEqual([sequence["seed"] for sequence in again], [7, 7, 7])
        others = [self.completion("qwen2", "--text", "Hello", *self.FLAGS, "--seed", str(n)) for n in (8, 9)]
        self.assertGreater(len({tuple(one["generated"]) for one in (alone, *others)}), 1)

    def test_a_drawn_seed_is_shown_and_repeats_the_run(self) -> None:
        facts = json.loads(self.serve("qwen2", "--text", "Hello", *self.FLAGS, "--json"))
        sequence = facts["run"]["sequences"][0]
        self.assertIsInstance(sequence["seed"], int)
        again = self.serve("qwen2", "--text", "Hello", *self.FLAGS, "--seed", str(sequence["seed"]))
        self.assertIn(f"generated      {sequence['generated']}\n", again)
        self.assertIn(f"sampling       temperature 1.5, top-k 50, top-p 0.95, seed {sequence['seed']}\n", again)
        self.assertIn(f" -> picked {sequence['generated'][0]} ", again)
        self.assertNotIn("greedy", again)
        self.assertEqual((facts["run"]["sampling"]["topK"], facts["run"]["sampling"]["minP"]), (50, 0.0))

    def test_a_bias_decides(self) -> None:
        one = self.completion("qwen2", "--text", "Hello", "--max-new", "3", "--logit-bias", "42=1000")
        self.assertEqual((one["generated"], one["seed"]), ([42] * 3, None))
        two = self.completion("qwen2", "--text", "Hello", "--max-new", "3", "--logit-bias", "42=1000",
                              "--logit-bias", "43=900", "--frequency-penalty", "150")  # fmt: skip
        self.assertEqual(two["generated"], [42, 43, 42])


class Terminal(Text):
    def run_in_terminal(self, name: str, *arguments: str, interrupt_at: str | None = None) -> tuple[int, str]:
        """The exit code and the screen's bytes, with line ends as the program wrote them."""
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            command(name, *arguments), env=environ(), stdin=theirs, stdout=theirs, stderr=theirs
        ) as process:
            os.close(theirs)
            seen = b""
            with contextlib.suppress(OSError):  # Linux ends a pty with EIO
                while part := os.read(ours, 4096):
                    seen += part
                    if interrupt_at is not None and interrupt_at.encode() in seen:
                        process.send_signal(signal.SIGINT)
                        interrupt_at = None
            code = process.wait(timeout=120)
        os.close(ours)
        return code, seen.decode().replace("\r\n", "\n")

    def test_a_text_streams_and_ids_show_the_table(self) -> None:
        want = self.completion("llama3_rope", "--text", "Hello", "--max-new", "20")["completion"]
        code, screen = self.run_in_terminal("llama3_rope", "--text", "Hello", "--max-new", "20")
        self.assertEqual(code, 0)
        self.assertIn(f"\n\n{_visible(want)}\n", screen)
        self.assertNotIn("  step ", screen)
        self.assertIn("\nended          length\n", screen)
        for arguments in (("--prompt", "5"), ("--text", "Hello", "--no-stream")):
            code, screen = self.run_in_terminal("llama3_rope", *arguments, "--max-new", "2")
            self.assertIn("  step 0 ", screen)
            self.assertIn("\ncompletion     ", screen)

    def test_interrupt_ends_the_text_with_a_line_end(self) -> None:
        # While the decode entry compiles, right after the first id.
        fresh = path_of("cache")
        for file in fresh.rglob("*"):
            if file.is_file() and "preflight" not in file.parts:
                file.unlink()
        code, screen = self.run_in_terminal("qwen2", "--text", "Hello", "--max-new", "60", "--ignore-eos",
                                            interrupt_at="greedy decode ")  # fmt: skip
        self.assertEqual(code, 130, screen)
        self.assertRegex(screen, r"\n\ngenerated      \[")
        self.assertIn("\nended          cancelled\n", screen)
        self.assertNotIn("Traceback", screen)
        self.assertTrue(screen.endswith("\n"))


def _visible(text: str) -> str:
    return "".join(char if char in "\n\t" or not ("\0" <= char < " " or "\x7f" <= char < "\xa0") else
                   f"\\x{ord(char):02x}" for char in text)  # fmt: skip


if __name__ == "__main__":
    unittest.main()
