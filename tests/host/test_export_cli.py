"""examples/export.py: what it prints, where it writes, which exit code."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from unittest import mock

from tests import tiny_checkpoint as tiny
from tests.support import REPO
from tlaloc_serve.artifact.store import open_artifact
from tlaloc_serve.export import cli


class Cli(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.checkpoint = tiny.write(self.root / "tiny-model")
        self.home = mock.patch.dict(os.environ, HOME=folder.name)
        self.home.start()
        self.addCleanup(self.home.stop)

    def run_cli(self, *arguments: str) -> tuple[int, str, str]:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = cli.main(arguments, str(self.root / "build"))
            except SystemExit as stop:
                code = int(stop.code or 0)
        return code, out.getvalue(), err.getvalue()

    def test_a_checkpoint(self) -> None:
        code, out, err = self.run_cli("--checkpoint", str(self.checkpoint), "--context", "16,32", "--batch", "1,2")
        self.assertEqual((code, err), (0, ""))
        artifact = self.root / "build" / "tiny-model"
        for line in (
            "model    tiny-model",
            "         vocab 40  hidden 16  layers 2",
            "         4 heads / 2 kv-heads x headDim 4",
            "KV pool  5 pages x blockSize 16",
            "ladder   batch {1,2} x context {16,32}, blockSize 16; prefill in calls of {16,32} tokens",
            f"out      {artifact}",
            "8 compiled entries:",
            f"  python3 serve.py --artifact {artifact}",
        ):
            self.assertIn(line, out.splitlines())
        self.assertRegex(out, r"wrote the artifact in \d+\.\ds")
        self.assertRegex(out, r"\n  weights/ +15 files +20\.\d KiB\n")
        self.assertRegex(out, r"\n  tlaloc-serving\.json +\d+\.\d KiB\n")
        for entry in open_artifact(artifact).manifest.entries:
            self.assertRegex(out, rf"\n  {entry.id} +-> {entry.body_path}\n")

    def test_json_says_the_same(self) -> None:
        arguments = (
            "--checkpoint",
            str(self.checkpoint),
            "--layers",
            "1",
            "--out",
            str(self.root / "x"),
            "--context",
            "64",
        )
        text = self.run_cli(*arguments)[1]
        code, out, _ = self.run_cli(*arguments, "--json")
        facts = json.loads(out)
        self.assertEqual((code, facts["layers"], facts["layersOfModel"], facts["context"]), (0, 1, 2, [64]))
        self.assertIn("layers 1 of 2", text)
        self.assertIn(facts["hash"], text)
        self.assertEqual(facts["frontend"]["eosTokenIds"], [2])
        sizes = {row["name"]: row["bytes"] for row in facts["inventory"]}
        self.assertEqual(sizes["tlaloc-serving.json"], (self.root / "x" / "tlaloc-serving.json").stat().st_size)

    def test_without_a_checkpoint(self) -> None:
        code, out, _ = self.run_cli()
        self.assertEqual(code, 0)
        self.assertIn("model    tlaloc-reference-decode", out)
        cached = pathlib.Path(cli.CACHED_CHECKPOINT).expanduser()
        self.assertTrue(str(cached).startswith(str(self.root)))
        code, _, err = self.run_cli("--batch", "1")
        self.assertEqual(code, 2)
        self.assertIn(str(cached), err)
        tiny.write(cached)
        self.assertIn("model    TinyLlama__TinyLlama-1.1B-Chat-v1.0", self.run_cli("--context", "16")[1])
        self.assertIn("model    tlaloc-reference-decode", self.run_cli("--reference")[1])

    def test_exit_codes(self) -> None:
        for code, words, arguments in (
            (2, "--block-size 16", ["--context", "60"]),
            (2, "--num-blocks", ["--num-blocks", "1"]),
            (2, "not a list of numbers", ["--context", "64;128"]),
            (2, "invalid choice", ["--weights", "int3"]),
            (2, "unrecognized", ["--bathc", "1"]),
            (1, "is no directory", ["--out", str(self.checkpoint / "config.json")]),
            (1, "is no artifact", ["--out", str(self.checkpoint)]),
        ):
            with self.subTest(arguments):
                got, out, err = self.run_cli("--checkpoint", str(self.checkpoint), *arguments)
                self.assertEqual((got, out), (code, ""))
                self.assertIn(words, err)
                self.assertNotIn("Traceback", err)
                self.assertFalse((self.root / "build").exists())
        self.assertEqual(self.run_cli("--reference", "--layers", "2")[0], 2)
        self.assertEqual(self.run_cli("--reference", "--checkpoint", "x")[0], 2)
        code, _, err = self.run_cli("--checkpoint", str(self.root / "nowhere"))
        self.assertEqual(code, 1)
        self.assertIn("nowhere: no such checkpoint", err)

    def test_ctrl_c(self) -> None:
        with mock.patch.object(cli, "export_checkpoint", side_effect=KeyboardInterrupt):
            self.assertEqual(self.run_cli("--checkpoint", str(self.checkpoint))[0], 130)

    def test_progress_on_long_work(self) -> None:
        with mock.patch.object(cli, "_PROGRESS_SECONDS", 0.0):
            code, out, err = self.run_cli("--checkpoint", str(self.checkpoint), "--context", "16")
        self.assertEqual(code, 0)
        self.assertRegex(err, r"^weights 0 B of 20\.\d KiB\n(weights .*\n)+$")
        self.assertNotIn("weights 0 B", out)


class Process(unittest.TestCase):
    """The script itself, as a process: signals and a closed pipe."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)

    def start(self, checkpoint: pathlib.Path) -> subprocess.Popen[str]:
        command = [
            sys.executable,
            str(REPO / "examples" / "export.py"),
            "--checkpoint",
            str(checkpoint),
            "--out",
            str(self.root / "out" / "a"),
        ]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def test_a_signal_leaves_nothing(self) -> None:
        config = {**tiny.CONFIG, "hidden_size": 1024, "vocab_size": 32768, "intermediate_size": 1024}
        content = {name: ("F16", dims, b"\0\x3c" * (count(dims))) for name, dims in tiny.shapes(config).items()}
        checkpoint = tiny.write(self.root / "large", config, content)
        for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 128 + signal.SIGTERM)):
            with self.start(checkpoint) as process:
                deadline = time.monotonic() + 20
                while not list(self.root.glob("out/.a.tmp-*/weights/*")) and time.monotonic() < deadline:
                    time.sleep(0.002)
                process.send_signal(number)
                out, err = process.communicate(timeout=30)
                self.assertEqual((process.returncode, out), (code, ""), err)
                self.assertNotIn("Traceback", err)
            self.assertFalse((self.root / "out").exists())

    def test_a_reader_that_goes_away(self) -> None:
        with self.start(tiny.write(self.root / "tiny")) as process:
            assert process.stdout is not None and process.stderr is not None
            process.stdout.close()
            self.assertEqual(process.stderr.read(), "")
            self.assertEqual(process.wait(), 141)
        open_artifact(self.root / "out" / "a")


def count(dims: tuple[int, ...]) -> int:
    return dims[0] * (dims[1] if len(dims) > 1 else 1)


if __name__ == "__main__":
    unittest.main()
