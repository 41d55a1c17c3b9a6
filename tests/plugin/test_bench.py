"""`bench` as a user runs it: every form of output, what is skipped, and Ctrl-C. Figures are looked at, not judged."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from typing import Any

from tests.support import REPO, cpu_plugins, shared


class Bench(unittest.TestCase):
    cache = tempfile.TemporaryDirectory()

    @classmethod
    def tearDownClass(cls) -> None:
        cls.cache.cleanup()

    def command(self, *arguments: str, artifact: str = "window-v3") -> list[str]:
        return [
            sys.executable, "-X", "dev", "-m", "tlaloc_serve", "bench", "--artifact",
            str(shared("artifacts", artifact)), "--plugin", cpu_plugins()[0], *arguments,
        ]  # fmt: skip

    def start(self, *arguments: str, artifact: str = "window-v3") -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments, artifact=artifact),
            cwd=REPO, env={**os.environ, "TLALOC_CACHE_DIR": self.cache.name},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def bench(self, *arguments: str, artifact: str = "window-v3") -> tuple[str, str]:
        process = self.start(*arguments, artifact=artifact)
        out, err = process.communicate(timeout=180)
        self.assertEqual(process.returncode, 0, out + err)
        self.assertNotIn("Warning", err)
        return out, err

    def test_json(self) -> None:
        out, err = self.bench("-p", "8,60,500", "-n", "6", "-b", "1,2,4", "-r", "3", "-o", "json")
        facts: Any = json.loads(out)
        self.assertEqual(err, "")
        self.assertEqual(
            [(row["test"], row["batch"]) for row in facts["rows"]],
            [("pp8", 1), ("pp60", 1), ("tg6", 1), ("pp8", 2), ("pp60", 2), ("tg6", 2)],
        )
        skipped = {(row["test"], row["batch"]): row["reason"] for row in facts["skipped"]}
        self.assertEqual(list(skipped), [("pp500", 1), ("pp500", 2), ("pp8", 4), ("pp60", 4), ("pp500", 4), ("tg6", 4)])
        self.assertRegex(skipped["pp500", 1], "largest compiled context")
        self.assertRegex(skipped["tg6", 4], "ladder.*got 4, want at most 2")
        for row in facts["rows"]:
            speed = row["tokensPerSecond"]
            self.assertLessEqual(speed["min"], speed["median"])
            self.assertLessEqual(speed["median"], speed["max"])
            tokens = row["batch"] * int(row["test"][2:])
            self.assertAlmostEqual(speed["median"], tokens / row["ms"] * 1e3, delta=0.3 * speed["median"])
            decode = row["test"] == "tg6"
            self.assertGreaterEqual(row["steps"], 6 if decode else 1)
            kinds = {name.partition("_")[0] for name in row["entries"]}
            self.assertLessEqual(kinds, {"decode"} if decode else {"prefill", "decode"})  # the last few by decode steps
            self.assertIn("decode" if decode else "prefill", kinds)
            self.assertEqual(row["weightBytesPerStep"], facts["artifact"]["weights"]["bytes"] if decode else None)
            if decode:
                self.assertGreater(row["hostMicroseconds"], 5)
                self.assertLess(row["hostMicroseconds"] / 1e3, row["ms"])
        first = facts["firstToken"]
        self.assertLess(first["warmMs"], first["coldMs"])
        self.assertGreater(first["peakRssBytes"], 20 << 20)
        self.assertGreater(facts["bandwidth"]["gbPerSecond"], 0.1)
        programs = {item["name"]: item for item in facts["programs"]}
        self.assertIn("decode_b2_c16", programs)
        self.assertTrue(programs["prefill_b1_c16"]["cached"], "the first token's process has compiled it")

    def test_markdown_and_csv(self) -> None:
        arguments = ("-p", "3", "-n", "3", "-b", "1,9", "-r", "1", "--no-first-token", "--xla-option", "nope=1")
        out, err = self.bench(*arguments, artifact="reference-v2-aliased")
        table = [line for line in out.splitlines() if line.startswith("| ")]
        self.assertEqual(table[0].split(" | ")[2], "tokens/s")
        self.assertEqual([line.split(" | ")[0] for line in table[1:3]], ["| pp3", "| tg3"])
        self.assertIn("skipped tg3, batch 9: the artifact's ladder", out)
        self.assertIn("warning: the plugin has no compile option nope", out)
        self.assertNotIn("first token", out)
        self.assertEqual(err, "")
        out, err = self.bench(*arguments, "-o", "csv", artifact="reference-v2-aliased")
        rows = list(csv.DictReader(io.StringIO(out)))
        self.assertEqual([(row["test"], row["batch"]) for row in rows], [("pp3", "1"), ("tg3", "1")])
        self.assertGreater(float(rows[1]["tokens_per_s"]), 0)
        self.assertIn("skipped pp3, batch 9", err)

    def test_a_wrong_command_line(self) -> None:
        for arguments in (("-p", "0"), ("-b", "1,x"), ("-o", "xml"), ("-r", "0")):
            process = self.start(*arguments)
            _, err = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 2, err)

    def test_interrupt(self) -> None:
        """While a child is timed, and while the engine runs."""
        for more, seconds in (((), 1.5), (("--no-first-token", "-r", "100000"), 6.0)):
            process = self.start(*more, "-p", "8", "-n", "8", "-b", "1")
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=60)
            self.assertEqual(process.returncode, 130, out + err)
            self.assertNotIn("Traceback", err)
            self.assertNotIn("Warning", err)


if __name__ == "__main__":
    unittest.main()
