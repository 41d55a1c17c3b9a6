"""The command line where no plugin is involved: usage, broken artifacts, SKIP. Each in a process of its own."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from tests.support import REPO, shared
from tlaloc_serve.app.cli import main


def base_interpreter() -> str:
    """The interpreter that a virtual environment was made from: it has no packages of the tests' own."""
    return getattr(sys, "_base_executable", None) or sys.executable


class CommandLine(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.home = pathlib.Path(folder.name)

    def run_cli(self, *arguments: str, script: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        """serve.py on a machine with an empty home: nothing is installed, nothing is cached."""
        environ = {
            "HOME": str(self.home),
            "TLALOC_CACHE_DIR": str(self.home / "cache"),
            "PATH": os.environ["PATH"],
            **variables,
        }
        program = [str(REPO / "serve.py")] if script else ["-m", "tlaloc_serve"]
        return subprocess.run(
            [base_interpreter(), *program, *arguments],
            cwd=REPO,
            env=environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def check(self, result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        for word in words:
            self.assertIn(word, result.stdout + result.stderr)

    def artifact(self) -> str:
        return str(shared("artifacts", "window-v3"))

    def test_nothing_to_run_on_is_a_skip_that_says_where_it_looked(self) -> None:
        result = self.run_cli("--artifact", self.artifact(), "--prompt", "1,2")
        self.check(
            result, 0, "TLALOC_PJRT_PLUGIN_PATH: not set", "plugins --fetch cpu", "site-packages", "fetched plugins"
        )
        self.assertTrue(result.stdout.startswith("SKIP: no PJRT plugin found (cuda, rocm, tpu, cpu)"))
        for platform in ("cuda", "rocm", "tpu", "cpu"):
            self.assertIn(f"PJRT {platform} plugin resolution", result.stdout)

    def test_the_skip_of_one_platform(self) -> None:
        result = self.run_cli("--artifact", self.artifact(), "--prompt", "1,2", "--platform", "cuda")
        self.check(result, 0, "PJRT cuda plugin resolution", "1. $TLALOC_PJRT_PLUGIN_PATH: not set",
                   "jax_plugins/*cuda*/*.so", "~/.local/venvs/*, ~/.venv, ~/venv, ~/.local, /usr/local, /usr",
                   "Fix: export TLALOC_PJRT_PLUGIN_PATH=/path/to/the/plugin.so")  # fmt: skip
        self.assertTrue(result.stdout.startswith("SKIP: no PJRT cuda plugin found, so there is nothing to run on."))
        self.assertNotIn("PJRT cpu plugin resolution", result.stdout)

    def test_the_skip_as_json(self) -> None:
        result = self.run_cli("--artifact", self.artifact(), "--prompt", "1,2", "--json")
        self.check(result, 0)
        self.assertTrue(json.loads(result.stdout)["skip"].startswith("SKIP:"))

    def test_a_broken_artifact_is_an_error_and_never_a_skip(self) -> None:
        broken = self.home / "artifact"
        shutil.copytree(self.artifact(), broken, copy_function=shutil.copyfile)
        body = next((broken / "bodies").iterdir())
        broken.joinpath("bodies").chmod(0o755)
        body.write_bytes(body.read_bytes() + b" ")
        result = self.run_cli("--artifact", str(broken), "--prompt", "1,2")
        self.check(result, 1, "error:", body.name)
        self.assertEqual(result.stdout, "")
        body.write_bytes(body.read_bytes()[:-1])
        weight = next((broken / "weights").iterdir())
        broken.joinpath("weights").chmod(0o755)
        weight.write_bytes(bytes(weight.stat().st_size))
        self.check(self.run_cli("--artifact", str(broken), "--prompt", "1,2"), 0, "SKIP:")
        result = self.run_cli("--artifact", str(broken), "--prompt", "1,2", "--verify-weights")
        self.check(result, 1, "error:", weight.name, "not the ones that were exported")
        self.assertNotIn("SKIP", result.stdout)
        self.check(self.run_cli("--artifact", str(self.home), "--prompt", "1"), 1, "not an artifact")
        self.check(self.run_cli("--artifact", str(self.home / "none"), "--prompt", "1"), 1, "no such directory")
        self.check(self.run_cli("--artifact", str(body), "--prompt", "1"), 1, "not a directory")

    def test_a_broken_plugin_that_was_named_is_an_error(self) -> None:
        text = self.home / "cuda_plugin.so"
        text.write_text("not a library")
        arguments = ("--artifact", self.artifact(), "--prompt", "1,2")
        self.check(self.run_cli(*arguments, "--plugin", str(text)), 1, "error:", str(text))
        self.check(self.run_cli(*arguments, "--plugin", str(self.home / "none.so")), 1, "error:", "none.so")
        self.check(self.run_cli(*arguments, "--plugin", ""), 1, "error: --plugin: names no file")
        self.check(self.run_cli(*arguments, TLALOC_PJRT_PLUGIN_PATH=str(text)), 1, "error:", "TLALOC_PJRT_PLUGIN_PATH")

    def test_usage(self) -> None:
        for arguments, words in (
            (["--prompt", ""], ["--prompt", "token ids separated by commas"]),
            (["--prompt", "1,x"], ["--prompt", "'1,x'"]),
            (["--prompt", "1,,2"], ["--prompt"]),
            (["--max-new", "0", "--prompt", "1"], ["--max-new", "at least 1"]),
            (["--max-new", "-3", "--prompt", "1"], ["--max-new"]),
            (["--platform", "gpu", "--prompt", "1"], ["--platform", "gpu"]),
            (["--preflight-timeout", "soon", "--prompt", "1"], ["--preflight-timeout"]),
            (["--no-such-flag"], ["--no-such-flag"]),
        ):
            with self.subTest(arguments):
                result = self.run_cli("--artifact", self.artifact(), *arguments)
                self.check(result, 2, "error:", *words)
                self.assertEqual(result.stderr.count("\n"), 1, "one line, not a screen full of usage")

    def test_ctrl_c_while_a_command_is_being_loaded(self) -> None:
        screen = io.StringIO()
        with mock.patch("importlib.import_module", side_effect=KeyboardInterrupt), contextlib.redirect_stderr(screen):
            self.assertEqual(main(["plugins"]), 130)
        self.assertEqual(screen.getvalue(), "interrupted\n")

    def test_requests_that_the_artifact_cannot_take(self) -> None:
        for arguments, words in (
            (["--prompt", "64"], ["outside the vocabulary", "0 to 63"]),
            (["--prompt", "-1"], ["outside the vocabulary"]),
            (["--prompt", "1,62"], ["62", "image_token_id"]),
            (["--prompt", "1", "--prompt", "63"], ["prompt 1", "video_token_id"]),
            (["--prompt", "1,2", "--max-new", "64"], ["max_new at most 63"]),
            (["--prompt", ",".join(["1"] * 65)], ["65 tokens", "at most 64"]),
            (["--text", "hello"], ["no tokenizer"]),
            ([], ["--prompt"]),
        ):
            with self.subTest(arguments):
                self.check(self.run_cli("--artifact", self.artifact(), *arguments), 1, "error:", *words)

    def test_help_names_every_flag(self) -> None:
        for script in (True, False):
            result = self.run_cli(*([] if script else ["serve"]), "--help", script=script)
            self.check(
                result, 0, "--artifact", "--prompt", "--max-new", "--platform", "--plugin", "--verify-weights", "--json"
            )
        self.check(self.run_cli("plugins", "--help", script=False), 0, "--fetch")

    def test_plugins_prints_every_place(self) -> None:
        result = self.run_cli("plugins", script=False)
        self.check(result, 0, "cuda", "rocm", "tpu", "cpu", "$TLALOC_PJRT_PLUGIN_PATH", "site-packages")
        document = json.loads(self.run_cli("plugins", "--json", script=False).stdout)
        self.assertEqual(list(document), ["cuda", "rocm", "tpu", "cpu"])
        self.assertTrue(all(platform["places"] for platform in document.values()))
        self.assertEqual(self.run_cli("plugins", "--platform", "tpu").stdout.split()[0], "tpu")


if __name__ == "__main__":
    unittest.main()
