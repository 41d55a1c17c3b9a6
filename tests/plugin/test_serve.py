"""serve.py as a user runs it, on a real plugin: the report, JSON, several prompts, Ctrl-C, a closed pipe."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest
from typing import Any

import tlaloc_serve
from tests.support import REPO, cpu_plugins, load_json, shared
from tlaloc_serve.artifact.store import open_artifact
from tlaloc_serve.engine.generate import Engine, Finished
from tlaloc_serve.errors import ArtifactError
from tlaloc_serve.pjrt.platforms import open_client


class Serve(unittest.TestCase):
    cache = tempfile.TemporaryDirectory()

    @classmethod
    def tearDownClass(cls) -> None:
        cls.cache.cleanup()

    def command(self, *arguments: str) -> list[str]:
        # -X dev shows a handle that was forgotten as a ResourceWarning on stderr.
        return [sys.executable, "-X", "dev", str(REPO / "serve.py"), *arguments]

    def environ(self, **more: str) -> dict[str, str]:
        return {**os.environ, "TLALOC_CACHE_DIR": self.cache.name, **more}

    def serve(self, *arguments: str, code: int = 0, **more: str) -> subprocess.CompletedProcess[str]:
        result = subprocess.run(
            self.command(*arguments), env=self.environ(**more), capture_output=True, text=True, timeout=120, check=False
        )
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        self.assertNotIn("Traceback", result.stderr)
        self.assertNotIn("ResourceWarning", result.stderr)
        return result

    def artifact(self, name: str = "reference-v2-aliased") -> str:
        return str(shared("artifacts", name))

    def test_the_report(self) -> None:
        for plugin in cpu_plugins():
            text = self.serve(
                "--artifact", self.artifact(), "--prompt", "1,2", "--max-new", "2", "--plugin", plugin
            ).stdout
            for line in (
                "the entire runtime of this process:",
                f"  PJRT plugin  {plugin}",
                "  platform     auto (requested; the client's own answer is below)",
                f"  Python       {sys.executable}",
                "  frameworks   none installed in this interpreter (jax, torch, numpy, transformers: not found)",
                "  model        tlaloc-reference-decode",
                "  bodies       6 compiled entries, all re-hashed OK",
                "  weights      in-body constants (nothing staged)",
                "greedy decode  prompt [1, 2] + 2 new (compiled context 4 = 2 pages x 2)",
                "prompt         [1, 2]",
                "generated      [9, 7]",
                "all            [1, 2, 9, 7]",
                "XLA compiles   2 (one per distinct ladder point actually touched)",
            ):
                self.assertIn(line, text)
            self.assertRegex(text, r"engine +\w+ on cpu")
            self.assertRegex(text, r"step 0 +prompt token 1 -> argmax 2 +[\d.]+ ms")
            self.assertRegex(text, r"step 2 +gen +token 9 -> argmax 7 +[\d.]+ ms")
            self.assertNotIn("step 3", text)
            self.assertNotIn("MISMATCH", text)
            self.assertRegex(text, r"first step +\d+ ms")
            self.assertRegex(text, r"median step +[\d.]+ ms")

    def test_json_holds_the_same_facts_and_nothing_else_is_on_stdout(self) -> None:
        arguments = ("--artifact", self.artifact(), "--prompt", "1,2", "--prompt", "3", "--max-new", "2", "--json")
        facts: Any = json.loads(self.serve(*arguments, "--verify-weights").stdout)
        self.assertEqual([run["all"] for run in facts["run"]["sequences"]], [[1, 2, 9, 7], [3, 2, 6]])
        self.assertEqual(facts["engine"]["platform"], "cpu")
        self.assertEqual(facts["run"]["compiles"], 2)
        self.assertEqual({step["entry"] for step in facts["run"]["steps"]}, {"decode_b2_c2", "decode_b1_c4"})
        self.assertTrue(facts["artifact"]["weights"]["hashesVerified"])

    def test_a_damaged_weight_is_found_while_it_is_staged_and_nothing_runs(self) -> None:
        with tempfile.TemporaryDirectory() as name:
            copy = pathlib.Path(name, "artifact")
            shutil.copytree(self.artifact("window-v3"), copy, copy_function=shutil.copyfile)
            weight = copy / "weights" / "0003_kProj0.bin"
            data = bytearray(weight.read_bytes())
            data[7] ^= 1
            weight.chmod(0o644)
            weight.write_bytes(data)
            arguments = ("--artifact", str(copy), "--prompt", "35", "--max-new", "1")
            self.assertIn("--verify-weights checks hashes", self.serve(*arguments).stdout)
            for more in ((), ("--plugin", cpu_plugins()[-1])):
                result = self.serve(*arguments, "--verify-weights", *more, code=1)
                self.assertRegex(result.stderr, "0003_kProj0.bin.*not the ones that were exported")
                self.assertNotIn("step 0", result.stdout)
            with self.assertRaisesRegex(ArtifactError, "not the ones that were exported"):
                tlaloc_serve.open(copy, plugin=cpu_plugins()[0], verify_weights=True)
            client = open_client(cpu_plugins()[0], "cpu", os.environ)
            with client, Engine(open_artifact(copy), client, verify_weights=True) as engine:
                begun = engine.stage()
                next(begun)
                begun.close()
                for _ in range(2):  # neither a beginning nor a failure makes the next one pass
                    with self.assertRaisesRegex(ArtifactError, "not the ones that were exported"):
                        list(engine.generate([[35]], 1))
                self.assertFalse(engine.artifact.weights_verified)

    def test_auto_finds_the_cpu_plugin_and_the_log_is_kept_off_the_screen(self) -> None:
        result = self.serve("--artifact", self.artifact("window-v3"), "--prompt", "35", "--max-new", "3")
        self.assertIn("generated      [50, 33, 39]", result.stdout)
        self.assertEqual(result.stderr, "")
        log = next(line.split()[-1] for line in result.stdout.splitlines() if "plugin log" in line)
        self.assertTrue(pathlib.Path(log).is_file())

    def test_a_platform_that_the_client_is_not_is_a_mismatch(self) -> None:
        result = self.serve(
            "--artifact", self.artifact(), "--prompt", "1", "--platform", "cuda", "--plugin", cpu_plugins()[0]
        )
        self.assertRegex(result.stdout, r"MISMATCH +cuda was asked for.* cpu")

    def test_the_module_and_the_script_are_one_command(self) -> None:
        arguments = ["serve", "--artifact", self.artifact(), "--prompt", "1,2", "--max-new", "2", "--json"]
        command = [sys.executable, "-m", "tlaloc_serve", *arguments]
        result = subprocess.run(
            command, cwd=REPO, env=self.environ(), capture_output=True, text=True, timeout=120, check=True
        )
        self.assertEqual(json.loads(result.stdout)["run"]["sequences"][0]["generated"], [9, 7])

    def test_interrupt_ends_the_run_cleanly(self) -> None:
        arguments = ("--artifact", self.artifact("window-v3"), "--prompt", "60,9,25,41,3", "--max-new", "60")
        with subprocess.Popen(
            self.command(*arguments), env=self.environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            self.assertIsNotNone(process.stdout)
            for line in process.stdout or ():
                if "step 0" in line:
                    process.send_signal(signal.SIGINT)  # while the decode entry compiles
                    break
            rest, errors = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 130, rest + errors)
        self.assertIn("cancelled", rest)
        self.assertNotIn("Traceback", errors)
        self.assertNotIn("ResourceWarning", errors)

    def test_a_reader_that_goes_away(self) -> None:
        command = " ".join(self.command("--artifact", self.artifact(), "--prompt", "1,2")) + " | head -1"
        result = subprocess.run(
            ["bash", "-c", f"set -o pipefail; {command}"],
            env=self.environ(), capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        self.assertEqual(result.stdout, "the entire runtime of this process:\n")
        self.assertIn(result.returncode, (0, 141))
        self.assertEqual(result.stderr, "")


class Library(unittest.TestCase):
    def test_open_generates_events_and_prints_nothing(self) -> None:
        case = load_json(shared("artifacts", "window-v3.golden.json"))[0]
        with tlaloc_serve.open(shared("artifacts", "window-v3"), platform="cpu", plugin=cpu_plugins()[0]) as engine:
            self.assertEqual(engine.platform, "cpu")
            events = list(engine.generate([case["prompt"]], max_new=3))
        self.assertEqual(events[-1], Finished(0, tuple(case["generated"][:3]), "length"))
        engine.close()

    def test_open_checks_the_artifact_first(self) -> None:
        with self.assertRaises(ArtifactError):
            tlaloc_serve.open(shared("artifacts"), plugin="/nowhere/plugin.so")


if __name__ == "__main__":
    unittest.main()
