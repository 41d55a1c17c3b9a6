"""Preflight and fetch with real plugins and the real pip."""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform
import tempfile
import unittest
import zipfile
from unittest import mock

from tests.support import cpu_plugins
from tlaloc_serve.errors import PluginError
from tlaloc_serve.pjrt import fetch as module
from tlaloc_serve.pjrt.fetch import PINS, Pin, fetch
from tlaloc_serve.pjrt.locate import PLUGIN_PATH
from tlaloc_serve.pjrt.platforms import kind_of
from tlaloc_serve.pjrt.plugin import Plugin
from tlaloc_serve.pjrt.preflight import Choice, choose, probe, survey

METADATA = """\
Metadata-Version: 2.1
Name: some-plugin
Version: 1.0
Requires-Dist: a-package-that-is-not-there
"""
WHEEL = """\
Wheel-Version: 1.0
Root-Is-Purelib: true
Tag: py3-none-any
"""


class ProbeTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.environ = {**os.environ, "TLALOC_CACHE_DIR": folder.name}

    def test_every_cpu_plugin_answers_and_is_remembered(self) -> None:
        for path in cpu_plugins():
            with self.subTest(plugin=path):
                result = probe(path, "cpu", 20.0, self.environ)
                self.assertEqual((result.reason, result.message), ("ok", "ok"))
                self.assertEqual(result.api_version, Plugin.open(path).api_version)
                self.assertEqual((result.platform_name, result.devices), ("cpu", ((0, "cpu"),)))
                self.assertIn("stablehlo_current_version", result.attributes or {})
                self.assertFalse(result.remembered)
                again = probe(path, "cpu", 20.0, self.environ)
                self.assertTrue(again.ok and again.remembered)
                self.assertEqual((again.api_version, again.devices), (result.api_version, result.devices))

    def test_choosing_among_the_plugins_of_this_machine(self) -> None:
        environ = {name: value for name, value in self.environ.items() if name != PLUGIN_PATH}
        result = choose("cpu", None, 20.0, environ)
        assert isinstance(result, Choice)
        self.assertEqual(result.path, cpu_plugins()[0])
        with result.open_client(environ) as client:
            self.assertEqual(client.platform_name, "cpu")

    def test_a_named_plugin_is_taken_under_every_request(self) -> None:
        path = cpu_plugins()[-1]
        for platform_name in ("auto", "cpu", "tpu"):
            result = choose(platform_name, path, 20.0, self.environ)
            assert isinstance(result, Choice)
            self.assertEqual((result.path, result.probe.platform_name), (path, "cpu"))

    def test_plugins_whose_device_this_machine_lacks(self) -> None:
        """For the files in $TLALOC_TEST_PJRT_NO_DEVICE (cuda, rocm, tpu), which are too big to be required here."""
        for path in filter(None, os.environ.get("TLALOC_TEST_PJRT_NO_DEVICE", "").split(os.pathsep)):
            with self.subTest(plugin=path):
                kind = kind_of(path)
                result = probe(path, kind or "auto", 4.0 if kind == "tpu" else 20.0, self.environ)
                self.assertEqual(result.reason, "timeout" if kind == "tpu" else "no_device", result.message)
                self.assertNotIn("\n", result.message)
                self.assertEqual(list(pathlib.Path(self.environ["TLALOC_CACHE_DIR"]).glob("preflight/*")), [])

    def test_half_a_plugin(self) -> None:
        path = os.path.join(self.environ["TLALOC_CACHE_DIR"], "half.so")
        with open(cpu_plugins()[0], "rb") as whole, open(path, "wb") as half:
            half.write(whole.read(1 << 20))
        with self.assertRaisesRegex(PluginError, "half.so: named by --plugin, cut short"):
            choose("cpu", path, 20.0, self.environ)

    def test_survey(self) -> None:
        environ = {name: value for name, value in self.environ.items() if name != PLUGIN_PATH}
        facts = survey("cpu", None, 20.0, environ).to_dict()["cpu"]
        self.assertEqual([plugin["path"] for plugin in facts["plugins"] if plugin["ok"]], list(cpu_plugins()))


class FetchTest(unittest.TestCase):
    def test_the_real_pip_downloads_the_pinned_wheel_and_no_other(self) -> None:
        content = b"\x7fELF" + bytes(5000)
        with tempfile.TemporaryDirectory() as folder:
            wheel = pathlib.Path(folder, "some_plugin-1.0-py3-none-any.whl")
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("some_plugin/plugin.so", content)
                archive.writestr("some_plugin-1.0.dist-info/METADATA", METADATA)
                archive.writestr("some_plugin-1.0.dist-info/WHEEL", WHEEL)
                archive.writestr("some_plugin-1.0.dist-info/RECORD", "")
            data = wheel.read_bytes()
            pin = Pin(
                "some-plugin",
                "1.0",
                platform.machine(),
                hashlib.sha256(data).hexdigest(),
                len(data),
                "some_plugin/plugin.so",
                hashlib.sha256(content).hexdigest(),
                len(content),
            )
            pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder, "PIP_REQUIRE_VIRTUALENV": "1"}
            cache = os.path.join(folder, "cache")
            with mock.patch.dict(PINS, {"cpu": pin}), mock.patch.dict(os.environ, pip):
                path = fetch("cpu", cache, lambda line: None)
                self.assertEqual(pathlib.Path(path).read_bytes(), content)
            other = Pin(**{**vars(pin), "wheel_sha256": "0" * 64, "version": "1.0"})
            with mock.patch.dict(PINS, {"cpu": other}), mock.patch.dict(os.environ, pip):
                os.unlink(path)
                with self.assertRaisesRegex(PluginError, "pip download some-plugin==1.0: failed"):
                    fetch("cpu", cache, lambda line: None)
        self.assertIs(module.PINS, PINS)


if __name__ == "__main__":
    unittest.main()
