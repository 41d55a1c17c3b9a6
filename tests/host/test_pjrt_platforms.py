"""With which options a client is created on each platform, and the bytes of the compile options."""

from __future__ import annotations

import unittest
from collections.abc import Mapping
from unittest import mock

from tests.fakes import FakePjrt
from tlaloc_serve.errors import PjrtError, RequestError
from tlaloc_serve.pjrt.compile_options import compile_options
from tlaloc_serve.pjrt.platforms import MEMORY_FRACTION, PREALLOCATE, client_options, open_client
from tlaloc_serve.pjrt.plugin import Plugin

GPU_DEFAULTS = {"preallocate": False, "memory_fraction": 0.5}


class OptionsTest(unittest.TestCase):
    def test_defaults(self) -> None:
        wanted = {"cuda": GPU_DEFAULTS, "rocm": GPU_DEFAULTS, "tpu": {}, "cpu": {"cpu_device_count": 1}}
        for kind, options in wanted.items():
            self.assertEqual(client_options(kind, {}), options)

    def test_variables(self) -> None:
        for fraction, preallocate, options in (
            ("0.25", "true", {"preallocate": True, "memory_fraction": 0.25}),
            ("1", "0", {"preallocate": False, "memory_fraction": 1.0}),
            ("", "", GPU_DEFAULTS),
            ("1e-1", "FALSE", {"preallocate": False, "memory_fraction": 0.1}),
        ):
            found = client_options("cuda", {MEMORY_FRACTION: fraction, PREALLOCATE: preallocate})
            self.assertEqual(found, options)
            self.assertIsInstance(found["memory_fraction"], float)

    def test_malformed_variables_are_refused_by_name(self) -> None:
        for name, values in (
            (MEMORY_FRACTION, ("0", "-0.5", "1.5", "half", "nan", "inf", "50%")),
            (PREALLOCATE, ("yes", "2", "maybe", " ")),
        ):
            for value in values:
                with self.assertRaisesRegex(RequestError, f"^{name}: .*{value!r}"):
                    client_options("rocm", {name: value})
                client_options("cpu", {name: value})


class OpenTest(unittest.TestCase):
    def opened(self, fake: FakePjrt, path: str, platform: str, environ: Mapping[str, str] | None = None) -> object:
        """The options the client was made with."""
        with mock.patch.object(Plugin, "open", lambda path: fake.plugin()):
            open_client(path, platform, environ or {}).close()
        fake.check()
        return fake.created_options

    def test_the_file_decides_before_the_request(self) -> None:
        for path, platform, options in (
            ("xla_cuda_plugin.so", "cpu", GPU_DEFAULTS),
            ("libtpu.so", "cuda", {}),
            ("libpjrt_cpu.so", "cuda", {"cpu_device_count": 1}),
            ("plugin.so", "rocm", GPU_DEFAULTS),
            ("plugin.so", "tpu", {}),
            ("plugin.so", "auto", GPU_DEFAULTS),
        ):
            self.assertEqual(self.opened(FakePjrt(), path, platform), options, (path, platform))

    def test_unknown_option_is_dropped_where_nothing_says_gpu(self) -> None:
        for path, platform in (("plugin.so", "auto"), ("libpjrt_cpu.so", "cpu")):
            name = "memory_fraction" if platform == "auto" else "cpu_device_count"
            fake = FakePjrt(errors={"PJRT_Client_Create": [(3, f"Unexpected option name: {name}")]})
            self.assertEqual(self.opened(fake, path, platform), {})

    def test_a_gpu_client_is_never_created_without_them(self) -> None:
        for path, platform in (("xla_cuda_plugin.so", "auto"), ("plugin.so", "cuda"), ("plugin.so", "rocm")):
            fake = FakePjrt(errors={"PJRT_Client_Create": [(3, "Unexpected option name: memory_fraction")]})
            with self.assertRaises(PjrtError):
                self.opened(fake, path, platform)
            self.assertEqual(fake.calls.count("PJRT_Client_Create"), 1)

    def test_other_failures_are_not_retried(self) -> None:
        for code, text in ((9, "memory_fraction"), (3, "something else")):
            fake = FakePjrt(errors={"PJRT_Client_Create": [(code, text)]})
            with self.assertRaises(PjrtError):
                self.opened(fake, "plugin.so", "auto")
            self.assertEqual(fake.calls.count("PJRT_Client_Create"), 1)


class CompileOptionsTest(unittest.TestCase):
    """Expected bytes are written by hand from the wire format: tag = field << 3 | type, then the value."""

    def test_one_device(self) -> None:
        any_device = "08" + "ff" * 9 + "01"  # field 1: -1 as a ten-byte varint
        self.assertEqual(compile_options().hex(), "1a0f" + any_device + "2001" + "2801")

    def test_one_device_by_number(self) -> None:
        self.assertEqual(compile_options(2, 300, 5).hex(), "1a07" + "0805" + "2002" + "28ac02")

    def test_overrides_of_every_type_in_the_order_of_their_names(self) -> None:
        given = {"c": 1.0, "b": 3, "a": True, "d": "hi"}
        entries = [
            "0a0161" + "1202" + "1001",
            "0a0162" + "1202" + "1803",
            "0a0163" + "1209" + "21000000000000f03f",
            "0a0164" + "1204" + "0a026869",
        ]
        expected = "".join(f"3a{len(entry) // 2:02x}{entry}" for entry in entries)
        plain = compile_options().hex()
        self.assertEqual(compile_options(overrides=given).hex(), plain + expected)
        self.assertEqual(compile_options(overrides={}).hex(), plain)

    def test_negative_integer(self) -> None:
        self.assertTrue(compile_options(overrides={"a": -2}).hex().endswith("18fe" + "ff" * 8 + "01"))


if __name__ == "__main__":
    unittest.main()
