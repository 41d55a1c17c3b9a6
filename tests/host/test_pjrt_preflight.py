"""Asking a plugin from a child process: hangs, crashes, chatter, what is remembered; and choosing among candidates."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import unittest
from typing import Any
from unittest import mock

from tests import elf
from tests.support import REPO
from tlaloc_serve.errors import PjrtError, PluginError, RequestError
from tlaloc_serve.pjrt import cache, locate, preflight, probe
from tlaloc_serve.pjrt.plugin import AbiMismatch
from tlaloc_serve.pjrt.preflight import Choice, NothingToRunOn, choose, survey
from tlaloc_serve.pjrt.probe import ProbeResult

GOOD = {
    "reason": "ok",
    "message": "ok",
    "api_version": [0, 81],
    "platform_name": "cpu",
    "platform_version": "1",
    "devices": [[0, "cpu"]],
    "memory": None,
    "attributes": {"xla_version": 2},
}


class Case(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        self.cache = self.folder / "cache"
        self.environ = {"HOME": str(self.folder), "TLALOC_CACHE_DIR": str(self.cache), "PATH": os.environ["PATH"]}

    def file(self, data: bytes = b"", name: str = "plugin.so") -> str:
        path = self.folder / name
        path.write_bytes(data)
        return str(path)

    def probe(self, path: str, timeout_s: float = 20.0, log: str | None = None) -> ProbeResult:
        return probe.probe(path, "cpu", timeout_s, self.environ, log)

    def child(self, script: str) -> None:
        """Replace the child by a script; it finds the answer's descriptor in `answer` and the plugin in `path`."""
        start = "import os, sys, json, time\nanswer, path = int(sys.argv[1]), sys.argv[2]\n"

        def command(path: str, kind: str, answer: int) -> list[str]:
            return [sys.executable, "-I", "-S", "-c", start + script, str(answer), path]

        patch = mock.patch.object(probe, "_command", command)
        patch.start()
        self.addCleanup(patch.stop)

    def good_child(self) -> None:
        self.child(f"open(path + '.asked', 'a').write('x')\nos.write(answer, json.dumps({GOOD!r}).encode())")

    def times_asked(self, path: str) -> int:
        asked = pathlib.Path(path + ".asked")
        return len(asked.read_text()) if asked.exists() else 0


class MisbehaviourTest(Case):
    def test_hanging_plugin_is_one_line_after_the_time_limit(self) -> None:
        began = time.monotonic()
        result = self.probe(self.file(elf.shared_object(elf.HANG)), timeout_s=1.5)
        self.assertLess(time.monotonic() - began, 10)
        self.assertEqual(result.reason, "timeout")
        self.assertIn("no answer within 1.5 s while loading and initialising it", result.message)
        self.assertIn(result.log, result.message)
        self.assertNotIn("\n", result.message)

    def test_the_whole_group_is_killed(self) -> None:
        self.child(
            "import subprocess\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
            "open(path + '.pid', 'w').write(str(child.pid))\ntime.sleep(60)"
        )
        path = self.file()
        self.assertEqual(self.probe(path, timeout_s=3.0).reason, "timeout")
        pid = int(pathlib.Path(path + ".pid").read_text())
        deadline = time.monotonic() + 5
        while _runs(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.assertFalse(_runs(pid))

    def test_crash_names_the_signal_and_the_last_line_it_wrote(self) -> None:
        result = self.probe(self.file(elf.shared_object(elf.complain_and_trap(b"first\nno such luck\n"))))
        self.assertEqual(result.reason, "crash")
        self.assertIn("died of SIGILL while loading and initialising it: no such luck; what it wrote", result.message)
        self.assertEqual(pathlib.Path(result.log).read_text(), "first\nno such luck\n")
        self.assertEqual(pathlib.Path(result.log).parent, self.cache / "logs")
        self.assertEqual(list(self.folder.glob("core*")), [])

    def test_crash_without_a_word(self) -> None:
        result = self.probe(self.file(elf.shared_object(elf.TRAP)))
        self.assertIn("died of SIGILL while loading and initialising it; what it wrote is in", result.message)

    def test_exit_without_an_answer(self) -> None:
        self.child("os.write(2, b'giving up\\n'); os._exit(3)")
        self.assertIn("ended with exit code 3 while starting: giving up", self.probe(self.file()).message)
        self.child("os._exit(0)")
        self.assertEqual(self.probe(self.file()).reason, "crash")

    def test_chatter_does_not_reach_the_answer(self) -> None:
        self.child(
            "os.write(1, b'{\"reason\": \"load\"}\\n'); os.write(2, b'noise\\n')\n"
            f"os.write(answer, b'not json\\n[1]\\n' + json.dumps({GOOD!r}).encode() + b'\\n')"
        )
        result = self.probe(self.file())
        self.assertTrue(result.ok)
        self.assertIn("noise", pathlib.Path(result.log).read_text())

    def test_load_failures_are_told_apart(self) -> None:
        for data, reason, part in (
            (b"text", "load", "not a shared library"),
            (elf.shared_object(), "load", "no function GetPjrtApi"),
            (elf.shared_object(elf.RETURN_NULL, needed="libnot_there.so.7"), "load", "libnot_there.so.7"),
        ):
            path = self.file(data)
            result = self.probe(path)
            self.assertEqual(result.reason, reason)
            self.assertIn(part, result.message)
            self.assertFalse(result.message.startswith(path), "the path is in the result anyway")

    def test_reasons(self) -> None:
        for error, reason in (
            (AbiMismatch("p", "too old"), "abi"),
            (PluginError("p", "no such file"), "load"),
            (PluginError("p", "the cpu client has no addressable device"), "no_device"),
            (PjrtError("PJRT_Client_Create", 9, "FAILED_PRECONDITION", "No visible GPU devices."), "no_device"),
            (PjrtError("PJRT_Client_Create", 13, "INTERNAL", "CUDA_ERROR_NO_DEVICE"), "no_device"),
            (PjrtError("PJRT_Client_Create", 2, "UNKNOWN", "no CUDA-capable device is detected"), "no_device"),
            (PjrtError("PJRT_Client_Create", 8, "RESOURCE_EXHAUSTED", "out of memory"), "error"),
            (PjrtError("PJRT_Client_Create", 3, "INVALID_ARGUMENT", "unknown option"), "error"),
            (PjrtError("PJRT_Plugin_Initialize", 9, "FAILED_PRECONDITION", "no"), "error"),
            (RequestError("X", "malformed"), "error"),
        ):
            self.assertEqual(probe._reason(error), reason, str(error))

    def test_interpreter_that_cannot_be_started(self) -> None:
        with mock.patch.object(sys, "executable", str(self.folder / "absent")):
            result = self.probe(self.file())
        self.assertEqual(result.reason, "error")
        self.assertIn("cannot start", result.message)

    def test_works_from_an_isolated_interpreter_anywhere(self) -> None:
        script = (
            f"import sys; sys.path.insert(0, {str(REPO)!r})\n"
            "from tlaloc_serve.pjrt.preflight import probe\n"
            f"print(probe(sys.argv[1], 'cpu', 20, {self.environ!r}).message)"
        )
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", script, self.file(b"text")],
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=True,
        )
        self.assertIn("not a shared library", done.stdout)


def _runs(pid: int) -> bool:
    """Whether the process is there and not just waiting to be collected."""
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


class MemoryTest(Case):
    def test_good_answer_is_remembered_for_the_same_file_only(self) -> None:
        self.good_child()
        path = self.file(b"one")
        first, second = self.probe(path), self.probe(path)
        self.assertEqual((first.remembered, second.remembered, self.times_asked(path)), (False, True, 1))
        self.assertEqual((second.api_version, second.devices, second.platform_name), ((0, 81), ((0, "cpu"),), "cpu"))
        os.utime(path, ns=(1, 1))
        self.assertFalse(self.probe(path).remembered)
        self.file(b"another size")
        self.assertFalse(self.probe(path).remembered)
        self.assertFalse(probe.probe(path, "cpu", 20, self.environ, fresh=True).remembered)

    def test_link_and_file_are_one(self) -> None:
        self.good_child()
        path = self.file(b"one")
        link = self.folder / "link.so"
        link.symlink_to(path)
        self.probe(path)
        self.assertTrue(self.probe(str(link)).remembered)
        self.assertEqual(self.probe(str(link)).path, str(link))

    def test_bad_answers_are_not_remembered(self) -> None:
        for reason in ("no_device", "load", "error"):
            bad = {"reason": reason, "message": "m", "api_version": None}
            self.child(f"os.write(answer, json.dumps({bad!r}).encode())")
            self.assertEqual(self.probe(self.file()).reason, reason)
        self.assertFalse((self.cache / "preflight").exists())

    def test_damaged_records_are_ignored(self) -> None:
        self.good_child()
        path = self.file(b"one")
        self.probe(path)
        (record,) = (self.cache / "preflight").iterdir()
        whole = record.read_bytes()
        stored = json.loads(whole)
        damaged: list[bytes] = [whole[:size] for size in range(0, len(whole), 37)]
        damaged += [b"null", b"[]", b"3", b"\xff\xfe"]
        for key in stored["result"]:
            damaged.append(json.dumps({**stored, "result": {**stored["result"], key: None}}).encode())
            kept = {name: value for name, value in stored["result"].items() if name != key}
            damaged.append(json.dumps({**stored, "result": {**kept, "other": 1}}).encode())
        damaged.append(json.dumps({**stored, "file": {**stored["file"], "version": -1}}).encode())
        for data in damaged:
            record.write_bytes(data)
            result = probe._recall(record, path)
            if result is not None:  # a field that may be null was made null
                self.assertTrue(result.ok and result.api_version == (0, 81) and result.devices)
        record.write_bytes(damaged[1])
        self.assertFalse(self.probe(path).remembered)
        self.assertTrue(self.probe(path).remembered, "the damaged record was not replaced")

    def test_cache_folder_that_cannot_be_made(self) -> None:
        self.good_child()
        self.environ["TLALOC_CACHE_DIR"] = self.file(b"", "a-file") + "/below"
        path = self.file()
        result = self.probe(path)
        self.assertTrue(result.ok)
        self.assertFalse(self.probe(path).remembered)
        self.assertTrue(pathlib.Path(result.log).exists())
        os.unlink(result.log)


class LogTest(Case):
    def run_script(self, script: str) -> subprocess.CompletedProcess[str]:
        start = (
            "import os, sys\nfrom tlaloc_serve.pjrt import preflight, probe\n"
            f"environ = {self.environ!r}\nplugin = {str(self.folder / 'plugin.so')!r}\n"
        )
        command = [sys.executable, "-c", start + script]
        return subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)

    def test_native_stderr_goes_to_the_log_and_pythons_to_the_screen(self) -> None:
        done = self.run_script(
            "with preflight.redirect_stderr(plugin, environ) as path:\n"
            "    os.write(2, b'native\\n')\n    print('python', file=sys.stderr)\n"
            "os.write(2, b'native after\\n'); print('python after', file=sys.stderr); print(path)"
        )
        self.assertEqual(sorted(done.stderr.splitlines()), ["native after", "python", "python after"])
        self.assertEqual(pathlib.Path(done.stdout.strip()).read_text(), "native\n")

    def test_restored_after_an_exception(self) -> None:
        done = self.run_script(
            "try:\n    with preflight.redirect_stderr(plugin, environ):\n        raise KeyboardInterrupt\n"
            "except KeyboardInterrupt:\n    os.write(2, b'back\\n')"
        )
        self.assertEqual(done.stderr, "back\n")

    def test_a_dash_shows_everything(self) -> None:
        self.file(elf.shared_object(elf.complain_and_trap(b"shown\n")))
        done = self.run_script(
            "with preflight.redirect_stderr(plugin, environ, '-') as path:\n"
            "    os.write(2, b'native\\n')\n    print(repr(path))\n"
            "print(probe.probe(plugin, 'cpu', 20, environ, '-').message)"
        )
        self.assertEqual(sorted(done.stderr.splitlines()), ["native", "shown"])
        self.assertEqual(done.stdout, "''\ndied of SIGILL while loading and initialising it\n")

    def test_the_user_may_name_the_log(self) -> None:
        named = str(self.folder / "my.log")
        path = self.file(elf.shared_object(elf.complain_and_trap(b"probed\n")))
        self.assertIn(f"what it wrote is in {named}", self.probe(path, log=named).message)
        self.run_script(
            f"with preflight.redirect_stderr(plugin, environ, {named!r}) as path:\n"
            f"    os.write(2, b'native\\n'); assert path == {named!r}"
        )
        self.assertEqual(pathlib.Path(named).read_text(), "probed\nnative\n")
        for unusable in (str(self.folder), str(self.folder / "absent" / "my.log")):
            with self.assertRaisesRegex(RequestError, "--plugin-log: cannot write to"):
                self.probe(path, log=unusable)

    def test_a_replaced_sys_stderr_is_left_alone(self) -> None:
        done = self.run_script(
            "import io\nsys.stderr = io.StringIO()\nwith preflight.redirect_stderr(plugin, environ):\n"
            "    print('kept', file=sys.stderr)\nprint(sys.stderr.getvalue().strip())"
        )
        self.assertEqual(done.stdout, "kept\n")

    def test_log_starts_afresh_when_it_has_grown(self) -> None:
        handle, path = cache.open_log("x.so", self.environ)
        os.write(handle, bytes(cache._LOG_LIMIT_BYTES + 1))
        os.close(handle)
        os.close(cache.open_log("x.so", self.environ)[0])
        self.assertEqual(os.path.getsize(path), 0)


def answer(path: str, reason: str) -> ProbeResult:
    return ProbeResult(path, reason, f"{reason} said", (0, 81), "cpu" if reason == "ok" else "")


class ChooseTest(Case):
    """Candidates and answers are scripted; what is judged is who is asked, in which order, and what comes of it."""

    def choose(
        self, answers: dict[str, str], platform: str = "auto", explicit: str | None = None
    ) -> Choice | NothingToRunOn:
        self.asked: list[str] = []

        def ask(path: str, kind: str, timeout_s: float, *rest: object, **more: object) -> ProbeResult:
            self.asked.append(path)
            return answer(path, answers[path])

        patterns = {name: (f"{name}/*.so",) for name in locate.PATTERNS}
        own = self.folder / "own"
        for path in answers:
            if not path.startswith("/"):
                (own / path).parent.mkdir(parents=True, exist_ok=True)
                (own / path).touch()
        full = {str(own / path) if not path.startswith("/") else path: reason for path, reason in answers.items()}
        answers = full
        with (
            mock.patch.object(locate, "PATTERNS", patterns),
            mock.patch.object(locate, "SYSTEM_ROOTS", ()),
            mock.patch.object(locate, "SYSTEM_LIBTPU", ()),
            mock.patch.object(locate, "own_packages", lambda: [own]),
            mock.patch.object(preflight, "probe", ask),
        ):
            result = choose(platform, explicit, 20.0, self.environ)
        self.asked = [path.removeprefix(f"{own}/") for path in self.asked]
        return result

    def test_auto_takes_the_first_platform_with_a_plugin_and_a_device(self) -> None:
        result = self.choose({"cuda/a.so": "no_device", "tpu/libtpu.so": "timeout", "cpu/a.so": "ok"})
        assert isinstance(result, Choice)
        self.assertEqual(self.asked, ["cuda/a.so", "tpu/libtpu.so", "cpu/a.so"])
        self.assertEqual((result.platform, result.path.rsplit("/", 2)[1]), ("cpu", "cpu"))
        self.assertEqual([tried.reason for tried in result.tried], ["no_device", "timeout"])

    def test_every_candidate_of_a_platform_is_tried(self) -> None:
        result = self.choose({"cuda/b.so": "crash", "cuda/a.so": "ok", "cpu/a.so": "ok"})
        assert isinstance(result, Choice)
        self.assertEqual((result.platform, self.asked), ("cuda", ["cuda/b.so", "cuda/a.so"]))

    def test_a_platform_asked_for_is_the_only_one_tried(self) -> None:
        result = self.choose({"cuda/a.so": "no_device", "cpu/a.so": "ok"}, "cuda")
        assert isinstance(result, NothingToRunOn)
        self.assertEqual(self.asked, ["cuda/a.so"])
        self.assertTrue(result.text.startswith("SKIP: no PJRT cuda plugin found that works here"))
        self.assertIn("no_device said", result.text)

    def test_nothing_anywhere(self) -> None:
        result = self.choose({})
        assert isinstance(result, NothingToRunOn)
        self.assertTrue(result.text.startswith("SKIP: no PJRT plugin found (cuda, rocm, tpu, cpu)"))
        self.assertNotIsInstance(result, Exception)

    def test_every_failure_of_found_plugins_is_in_the_text(self) -> None:
        result = self.choose({f"cpu/{reason}.so": reason for reason in ("load", "abi", "crash", "timeout", "error")})
        assert isinstance(result, NothingToRunOn)
        for reason in ("load", "abi", "crash", "timeout", "error"):
            self.assertIn(f"{reason}.so: {reason} said", result.text)

    def test_broken_named_plugin_is_an_error(self) -> None:
        for reason in ("load", "abi", "crash", "timeout", "error"):
            for platform in ("auto", "cuda", "cpu"):
                with self.assertRaisesRegex(PluginError, f"^/x/p.so: named by --plugin, {reason} said"):
                    self.choose({"/x/p.so": reason, "cpu/a.so": "ok"}, platform, "/x/p.so")
                self.environ[locate.PLUGIN_PATH] = "/x/p.so"
                with self.assertRaisesRegex(PluginError, r"^/x/p.so: named by \$TLALOC_PJRT_PLUGIN_PATH"):
                    self.choose({"/x/p.so": reason, "cpu/a.so": "ok"}, platform)
                del self.environ[locate.PLUGIN_PATH]

    def test_named_plugin_without_a_device_is_nothing_to_run_on(self) -> None:
        for platform in ("auto", "tpu"):
            result = self.choose({"/x/libtpu.so": "no_device", "cpu/a.so": "ok"}, platform, "/x/libtpu.so")
            assert isinstance(result, NothingToRunOn)
            self.assertIn("PJRT tpu plugin resolution", result.text)
            self.assertEqual(self.asked, ["/x/libtpu.so"])

    def test_named_plugin_decides_under_auto(self) -> None:
        result = self.choose({"/x/p.so": "ok", "cuda/a.so": "ok"}, "auto", "/x/p.so")
        assert isinstance(result, Choice)
        self.assertEqual((result.path, result.platform, result.place), ("/x/p.so", "auto", "--plugin"))

    def test_variable_of_a_tpu_plugin_does_not_stop_other_platforms(self) -> None:
        self.environ[locate.PLUGIN_PATH] = "/x/libtpu.so"
        result = self.choose({"/x/libtpu.so": "ok", "cpu/a.so": "ok"}, "cpu")
        assert isinstance(result, Choice)
        self.assertEqual(self.asked, ["cpu/a.so"])

    def test_malformed_variable_and_unknown_platform(self) -> None:
        self.environ["TLALOC_PJRT_MEMORY_FRACTION"] = "lots"
        with self.assertRaisesRegex(RequestError, "TLALOC_PJRT_MEMORY_FRACTION"):
            self.choose({"cuda/a.so": "ok"})
        self.assertIsInstance(self.choose({"cpu/a.so": "ok"}, "cpu"), Choice)
        with self.assertRaisesRegex(RequestError, "--platform: unknown, got 'gpu'"):
            self.choose({}, "gpu")

    def test_missing_named_file_end_to_end(self) -> None:
        with self.assertRaisesRegex(PluginError, "absent.so: named by --plugin, no such file"):
            choose("cpu", str(self.folder / "absent.so"), 20.0, self.environ)


class SurveyTest(Case):
    def test_every_place_and_every_answer_as_plain_values(self) -> None:
        with (
            mock.patch.object(locate, "SYSTEM_ROOTS", ()),
            mock.patch.object(locate, "own_packages", list),
            mock.patch.object(locate, "SYSTEM_LIBTPU", ()),
        ):
            facts = self.facts()
            self.assertEqual(list(facts), ["cuda", "rocm", "tpu", "cpu"])
            self.assertEqual([place["state"] for place in facts["cpu"]["places"][1:]], ["nothing there"] * 7)
            self.assertEqual(list(self.facts("tpu")), ["tpu"], "the platform that was asked for, no other")

    def test_a_named_plugin_is_asked_once_and_shown_once(self) -> None:
        path = self.file(b"text", "named_cuda.so")
        for facts in (self.facts(explicit=path), self.facts(**{locate.PLUGIN_PATH: path})):
            self.assertEqual(list(facts), ["cuda"])
            self.assertEqual([answer["path"] for answer in facts["cuda"]["plugins"]], [path])
            self.assertEqual(facts["cuda"]["plugins"][0]["reason"], "load")
            self.assertFalse(facts["cuda"]["plugins"][0]["ok"])
        facts = self.facts("tpu", **{locate.PLUGIN_PATH: path})
        self.assertIn("not a tpu plugin", facts["tpu"]["places"][0]["state"])

    def facts(self, platform: str = "auto", explicit: str | None = None, **variables: str) -> dict[str, Any]:
        result = survey(platform, explicit, 20.0, {**self.environ, **variables})
        return dict(json.loads(json.dumps(result.to_dict())))


if __name__ == "__main__":
    unittest.main()
