"""The plugin room on every CPU plugin of this machine: compile, run, donate, serialise, zero-copy, errors, leaks."""

from __future__ import annotations

import ctypes
import functools
import gc
import mmap
import os
import random
import struct
import tempfile
import unittest
from collections.abc import Callable
from typing import Any

from tests.support import cpu_plugins
from tlaloc_serve.errors import HandleClosed, PjrtError
from tlaloc_serve.pjrt.client import Client, live
from tlaloc_serve.pjrt.compile_options import compile_options
from tlaloc_serve.pjrt.host import HostView
from tlaloc_serve.pjrt.plugin import Plugin

_ALIAS = " {tf.aliasing_output = 0 : i32}"
# (pool, x) -> (pool + x, x transposed)
_STEP = """
module @step {{
  func.func public @main(%pool: tensor<2x3xf32>{alias}, %x: tensor<2x3xf32>) -> (tensor<2x3xf32>, tensor<3x2xf32>) {{
    %0 = stablehlo.add %pool, %x : tensor<2x3xf32>
    %1 = stablehlo.transpose %x, dims = [1, 0] : (tensor<2x3xf32>) -> tensor<3x2xf32>
    return %0, %1 : tensor<2x3xf32>, tensor<3x2xf32>
  }}
}}
"""
_TYPES = (("f32", (2, 3)), ("f32", (3, 2)))


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def on_every_plugin(test: Callable[[Any, Client], None]) -> Callable[[Any], None]:
    """Run a test method with a client of each plugin, in a subtest that ends with nothing live."""

    @functools.wraps(test)
    def run(self: Any) -> None:
        for path in cpu_plugins():
            gc.collect()
            before = dict(live)
            with self.subTest(plugin=path):
                with Client(Plugin.open(path), {"cpu_device_count": 1}) as client:
                    test(self, client)
                gc.collect()
                self.assertEqual(live, before)

    return run


class DescribeTest(unittest.TestCase):
    @on_every_plugin
    def test_names_itself(self, client: Client) -> None:
        self.assertEqual(client.platform_name, "cpu")
        self.assertEqual(len(client.devices), 1)
        self.assertEqual((client.devices[0].id, client.devices[0].kind), (0, "cpu"))
        self.assertIn("Cpu", client.devices[0].description)
        self.assertEqual(client.plugin.api_version[0], 0)
        self.assertGreaterEqual(client.plugin.api_version[1], 81)
        stats = client.devices[0].memory_stats()
        self.assertTrue(stats is None or stats["bytes_in_use"] >= 0)
        version = client.plugin.attributes()["stablehlo_current_version"]
        assert isinstance(version, tuple)
        self.assertEqual((len(version), version[0]), (3, 1))

    def test_unknown_create_option_is_refused_or_ignored(self) -> None:
        for path in cpu_plugins():
            plugin = Plugin.open(path)
            with self.subTest(plugin=path):
                if plugin.api_version >= (0, 115):
                    with self.assertRaisesRegex(PjrtError, "INVALID_ARGUMENT.*no_such_option"):
                        Client(plugin, {"no_such_option": 1})
                else:
                    Client(plugin, {"no_such_option": 1}).close()

    def test_number_of_devices_is_an_option(self) -> None:
        for path in cpu_plugins():
            with self.subTest(plugin=path), Client(Plugin.open(path), {"cpu_device_count": 3}) as client:
                self.assertEqual([device.id for device in client.devices], [0, 1, 2])
                with client.buffer_from_host(floats(1), "f32", (1,), device=client.devices[2]) as buffer:
                    self.assertEqual(buffer.to_bytes(), floats(1))


class RunTest(unittest.TestCase):
    @on_every_plugin
    def test_steps_with_and_without_donation(self, client: Client) -> None:
        x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        for donated in ((0,), ()):
            code = _STEP.format(alias=_ALIAS if donated else "").encode()
            with (
                client.compile(code, compile_options()) as program,
                client.buffer_from_host(floats(*[0.0] * 6), "f32", (2, 3)) as pool,
                client.buffer_from_host(floats(*x), "f32", (2, 3)) as second,
                program.execution(2, donated, _TYPES) as execution,
            ):
                self.assertEqual((program.name, program.num_outputs), ("step", 2))
                self.assertEqual(program.output_types(), _TYPES)
                execution.bind(0, pool)
                execution.bind(1, second)
                for number in range(1, 6):
                    execution.run()
                    self.assertEqual(pool.donated, bool(donated))
                    self.assertEqual(pool.is_deleted(), bool(donated))
                    execution.give([(0, pool)])
                    with execution.take(1) as other:
                        self.assertEqual(other.to_bytes(), floats(1, 4, 2, 5, 3, 6))
                    self.assertEqual(pool.to_bytes(), floats(*(number * value for value in x)))
                    execution.wait()

    @on_every_plugin
    def test_donation_happens_in_place(self, client: Client) -> None:
        with (
            client.compile(_STEP.format(alias=_ALIAS).encode(), compile_options()) as program,
            client.buffer_from_host(floats(*range(6)), "f32", (2, 3)) as pool,
            client.buffer_from_host(floats(*range(6)), "f32", (2, 3)) as second,
            program.execution(2, [0], _TYPES) as execution,
        ):
            execution.bind(0, pool)
            execution.bind(1, second)
            before = pool.pointer_on_device()
            for _ in range(3):
                execution.run()
                execution.give([(0, pool)])
            execution.wait()
            self.assertEqual(pool.pointer_on_device(), before)

    @on_every_plugin
    def test_an_input_that_is_not_donated_survives_an_aliasing_program(self, client: Client) -> None:
        with (
            client.compile(_STEP.format(alias=_ALIAS).encode(), compile_options()) as program,
            client.buffer_from_host(floats(*range(6)), "f32", (2, 3)) as pool,
            program.execution(2, (), _TYPES) as execution,
        ):
            execution.bind(0, pool)
            execution.bind(1, pool)
            execution.run()
            execution.wait()
            self.assertFalse(pool.is_deleted())
            self.assertEqual(pool.to_bytes(), floats(*range(6)))
            with execution.take(0) as doubled:
                self.assertEqual(doubled.to_bytes(), floats(*range(0, 12, 2)))

    @on_every_plugin
    def test_wrong_arguments_are_an_error_and_the_client_lives_on(self, client: Client) -> None:
        with (
            client.compile(_STEP.format(alias="").encode(), compile_options()) as program,
            client.buffer_from_host(floats(*range(5)), "f32", (5,)) as wrong,
            program.execution(2, (), _TYPES) as execution,
            program.execution(1, (), _TYPES) as short,
        ):
            execution.bind(0, wrong)
            execution.bind(1, wrong)
            short.bind(0, wrong)
            for bad in (execution, short):
                with self.assertRaises(PjrtError) as caught:
                    bad.run()
                    bad.wait()
                self.assertEqual(caught.exception.code_name, "INVALID_ARGUMENT")
            with self.assertRaises(HandleClosed):
                execution.take(0)
            self.assertEqual(wrong.to_bytes(), floats(*range(5)))

    @on_every_plugin
    def test_rejected_programs_and_options(self, client: Client) -> None:
        unknown = _STEP.format(alias="").replace("stablehlo.add", "no.op").encode()
        for code in (b"", b"garbage", b"module {", unknown):
            with self.assertRaises(PjrtError) as caught:
                client.compile(code, compile_options())
            self.assertEqual(caught.exception.call, "PJRT_Client_Compile")
        code = _STEP.format(alias="").encode()
        for overrides in ({"no_such_option": True}, {"xla_cpu_enable_fast_math": "true"}):
            with self.assertRaisesRegex(PjrtError, "INVALID_ARGUMENT"):
                client.compile(code, compile_options(overrides=overrides))
        client.compile(code, compile_options(overrides={"xla_cpu_enable_fast_math": False})).close()

    @on_every_plugin
    def test_serialised_program_runs_as_before(self, client: Client) -> None:
        with client.compile(_STEP.format(alias=_ALIAS).encode(), compile_options()) as program:
            blob = program.serialize()
            self.assertTrue(program.fingerprint() is None or program.fingerprint())
        for options in (None, compile_options()):
            with (
                client.deserialize(blob, options) as program,
                client.buffer_from_host(floats(*range(6)), "f32", (2, 3)) as pool,
                client.buffer_from_host(floats(*[1] * 6), "f32", (2, 3)) as second,
                program.execution(2, [0], program.output_types()) as execution,
            ):
                execution.bind(0, pool)
                execution.bind(1, second)
                execution.run()
                execution.give([(0, pool)])
                self.assertEqual(pool.to_bytes(), floats(*range(1, 7)))
        for damaged in (b"", blob[: len(blob) // 2], bytes(len(blob))):
            with self.assertRaises(PjrtError):
                client.deserialize(damaged)


class HostMemoryTest(unittest.TestCase):
    @on_every_plugin
    def test_every_dtype_and_rank_comes_back_as_it_went(self, client: Client) -> None:
        rng = random.Random(7)
        sizes = {
            "pred": 1,
            "i8": 1,
            "u8": 1,
            "i16": 2,
            "u16": 2,
            "f16": 2,
            "bf16": 2,
            "i32": 4,
            "u32": 4,
            "f32": 4,
            "i64": 8,
            "u64": 8,
            "f64": 8,
            "f8e5m2": 1,
            "f8e4m3fn": 1,
        }
        for dtype, size in sizes.items():
            for dims in ((), (5,), (2, 3), (3, 1, 2, 2), (0, 4)):
                count = 1
                for extent in dims:
                    count *= extent
                data = bytes(count) if dtype == "pred" else rng.randbytes(count * size)
                with client.buffer_from_host(data, dtype, dims) as buffer:
                    self.assertEqual(buffer.to_bytes(), data, (dtype, dims))

    @on_every_plugin
    def test_an_mmapped_file_is_used_in_place_when_aligned_and_copied_when_not(self, client: Client) -> None:
        size = 1 << 20
        data = random.Random(11).randbytes(size + 4096)
        for offset, in_place in ((0, True), (64, True), (40, False)):
            with tempfile.TemporaryFile() as file:
                file.write(data)
                file.flush()
                mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            part = memoryview(mapping)[offset : offset + size]
            view = HostView(part)
            buffer = client.buffer_from_host(part, "u8", (size,), zero_copy=True)
            self.assertEqual(buffer.pointer_on_device() == view.address, in_place, offset)
            view.release()
            with self.assertRaises(BufferError):
                part.release()
            self.assertEqual(buffer.to_bytes(), data[offset : offset + size])
            buffer.close()
            part.release()
            mapping.close()

    @on_every_plugin
    def test_a_program_reads_zero_copy_weights(self, client: Client) -> None:
        memory = (ctypes.c_float * (6 + 16))()
        start = -ctypes.addressof(memory) % 64
        part = memoryview(memory).cast("B")[start : start + 24]
        part[:] = floats(*range(6))
        with (
            client.compile(_STEP.format(alias=_ALIAS).encode(), compile_options()) as program,
            client.buffer_from_host(part, "f32", (2, 3), zero_copy=True) as weight,
            client.buffer_from_host(part, "f32", (2, 3), zero_copy=True) as donated,
            program.execution(2, [0], _TYPES) as execution,
        ):
            execution.bind(0, donated)
            execution.bind(1, weight)
            execution.run()
            execution.give([(0, donated)])
            self.assertEqual(donated.to_bytes(), floats(*range(0, 12, 2)))
        self.assertEqual(bytes(part), floats(*range(6)), "immutable host memory was written to")

    @on_every_plugin
    def test_range_reads(self, client: Client) -> None:
        with client.buffer_from_host(bytes(range(200)), "u8", (200,)) as buffer:
            self.assertTrue(buffer.can_read_range)
            part = bytearray(7)
            buffer.read_range(100, part)
            self.assertEqual(part, bytes(range(100, 107)))

    @on_every_plugin
    def test_reads_into_every_kind_of_memory(self, client: Client) -> None:
        with client.buffer_from_host(floats(1, 2, 3), "f32", (3,)) as buffer:
            for memory in ((ctypes.c_float * 3)(), bytearray(12), memoryview(bytearray(12)), mmap.mmap(-1, 12)):
                with buffer.start_read(memory) as event:
                    event.wait()
                self.assertEqual(bytes(memoryview(memory).cast("B")), floats(1, 2, 3))


class LifetimeTest(unittest.TestCase):
    def test_closing_the_client_first(self) -> None:
        for path in cpu_plugins():
            with self.subTest(plugin=path):
                client = Client(Plugin.open(path))
                program = client.compile(_STEP.format(alias="").encode(), compile_options())
                buffer = client.buffer_from_host(floats(*range(6)), "f32", (2, 3))
                execution = program.execution(2, (), _TYPES)
                execution.bind(0, buffer)
                execution.bind(1, buffer)
                execution.run()
                client.close()
                for handle in (buffer, program, execution):
                    self.assertTrue(handle.closed)
                    handle.close()

    @on_every_plugin
    def test_a_thousand_steps_leave_nothing_behind(self, client: Client) -> None:
        with (
            client.compile(_STEP.format(alias=_ALIAS).encode(), compile_options()) as program,
            client.buffer_from_host(floats(*[0] * 6), "f32", (2, 3)) as pool,
            program.execution(2, [0], _TYPES) as execution,
        ):
            execution.bind(0, pool)
            settled = None
            for number in range(1000):
                with client.buffer_from_host(floats(*[1] * 6), "f32", (2, 3)) as x:
                    execution.bind(1, x)
                    execution.run()
                    execution.give([(0, pool)])
                    if number % 2:
                        with execution.take(1) as other:
                            other.to_bytes()
                if number == 1:
                    settled = dict(live)
            self.assertEqual(live, settled)
            self.assertEqual(pool.to_bytes(), floats(*[1000] * 6))

    def test_one_plugin_object_a_file(self) -> None:
        path = cpu_plugins()[0]
        with tempfile.TemporaryDirectory() as folder:
            link = f"{folder}/link.so"
            os.symlink(path, link)
            self.assertIs(Plugin.open(link), Plugin.open(path))


if __name__ == "__main__":
    unittest.main()
