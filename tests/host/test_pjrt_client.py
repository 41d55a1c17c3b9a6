"""Clients, buffers and executions against the in-memory plugin: lifetimes, donation, errors, host memory."""

from __future__ import annotations

import ctypes
import gc
import mmap
import random
import struct
import tempfile
import unittest
import warnings
from collections.abc import Collection
from typing import Any
from unittest import mock

from tests.fakes import FakePjrt, Program
from tlaloc_serve.errors import HandleClosed, OutOfMemory, PjrtError, PluginError, RequestError
from tlaloc_serve.pjrt import abi
from tlaloc_serve.pjrt.client import Buffer, Client, Executable, Execution, live
from tlaloc_serve.pjrt.transfer import Download

F2 = ("f32", (2,))


def floats(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def add_one(inputs: list[bytes]) -> list[bytes]:
    """Two results: the first input plus one, and the second as it is."""
    values = struct.unpack("<2f", inputs[0])
    return [floats(*(value + 1 for value in values)), inputs[1]]


STEP = {b"step": Program([F2, F2], add_one, aliases=(0,)), b"pure": Program([F2, F2], add_one)}


class Case(unittest.TestCase):
    """Every test ends with nothing live, in the fake and in our own count."""

    def setUp(self) -> None:
        gc.collect()
        self.before = dict(live)
        self.addCleanup(lambda: self.assertEqual(live, self.before))

    def open(self, **options: Any) -> tuple[FakePjrt, Client]:
        fake = FakePjrt(programs=STEP, **options)
        client = Client(fake.plugin())
        self.addCleanup(fake.check)
        self.addCleanup(client.close)
        return fake, client

    def compile(self, client: Client, code: bytes = b"step") -> Executable:
        program = client.compile(code, b"")
        self.addCleanup(program.close)
        return program

    def execution(self, program: Executable, donated: Collection[int] = ()) -> Execution:
        execution = program.execution(2, donated, [F2, F2])
        self.addCleanup(execution.close)
        return execution

    def buffer(self, client: Client, *values: float) -> Buffer:
        buffer = client.buffer_from_host(floats(*values), *F2)
        self.addCleanup(buffer.close)
        return buffer

    def step(self, client: Client, code: bytes = b"step") -> tuple[Execution, Buffer, Buffer]:
        execution = self.execution(self.compile(client, code), STEP[code].aliases)
        first, second = (self.buffer(client, base, base + 1) for base in (1, 10))
        execution.bind(0, first)
        execution.bind(1, second)
        return execution, first, second


class ClientTest(Case):
    def test_describes_itself(self) -> None:
        _, client = self.open(devices=2, platform="cpu")
        self.assertEqual((client.platform_name, client.platform_version), ("cpu", "1"))
        self.assertEqual([(device.id, device.kind) for device in client.devices], [(0, "fake kind"), (1, "fake kind")])
        self.assertEqual(client.devices[1].description, "FakeDevice(id=1)")

    def test_options_reach_the_plugin_with_their_types(self) -> None:
        fake = FakePjrt()
        given = {"preallocate": False, "memory_fraction": 0.5, "count": -3, "allocator": "bfc"}
        with Client(fake.plugin(), given):
            self.assertEqual(fake.created_options, {**given, "allocator": b"bfc"})
        fake.check()

    def test_no_device_is_a_plugin_error_and_leaves_no_client(self) -> None:
        fake = FakePjrt(devices=0)
        with self.assertRaisesRegex(PluginError, "no addressable device"):
            Client(fake.plugin())
        fake.check()
        self.assertEqual(live, self.before)

    def test_failed_creation_leaves_nothing(self) -> None:
        for call in ("PJRT_Client_Create", "PJRT_Client_PlatformName", "PJRT_Device_GetDescription"):
            fake = FakePjrt(errors={call: [(9, "No visible GPU devices.")]})
            with self.assertRaises(PjrtError) as caught, warnings.catch_warnings():
                warnings.simplefilter("error")
                Client(fake.plugin())
            self.assertEqual((caught.exception.call, caught.exception.detail), (call, "No visible GPU devices."))
            fake.check()
            self.assertEqual(live, self.before)

    def test_memory_statistics(self) -> None:
        _, client = self.open(stats={"bytes_in_use": 5, "bytes_limit": 100})
        self.assertEqual(client.devices[0].memory_stats(), {"bytes_in_use": 5, "bytes_limit": 100})
        for absent in ({}, {"null": {"PJRT_Device_MemoryStats"}}):
            self.assertIsNone(self.open(**absent)[1].devices[0].memory_stats())

    def test_close_takes_the_children_along(self) -> None:
        fake, client = self.open()
        execution, first, second = self.step(client)
        execution.run()
        client.close()
        for handle in (first, second, execution):
            self.assertTrue(handle.closed)
            handle.close()
        fake.check()
        with self.assertRaises(HandleClosed):
            first.to_bytes()
        with self.assertRaises(HandleClosed):
            execution.run()
        with self.assertRaises(HandleClosed):
            client.compile(b"step", b"")
        with self.assertRaises(HandleClosed):
            client.buffer_from_host(floats(1, 2), *F2)
        with self.assertRaises(HandleClosed):
            client.devices[0].memory_stats()
        with self.assertRaises(HandleClosed), client:
            self.fail("entered a closed client")

    def test_children_close_in_order(self) -> None:
        fake, client = self.open()
        program = self.compile(client)
        buffer = self.buffer(client, 1, 2)
        event = buffer.start_read(bytearray(8))
        self.addCleanup(event.close)
        self.assertFalse(program.closed)
        fake.calls.clear()
        client.close()
        self.assertEqual(
            [call for call in fake.calls if call.endswith("_Destroy")],
            [
                "PJRT_Event_Destroy",
                "PJRT_Buffer_Destroy",
                "PJRT_Executable_Destroy",
                "PJRT_LoadedExecutable_Destroy",
                "PJRT_Client_Destroy",
            ],
        )

    def test_forgotten_handles_warn_and_are_destroyed(self) -> None:
        fake, client = self.open()
        for make in (lambda: client.buffer_from_host(floats(1, 2), *F2), lambda: client.compile(b"step", b"")):
            with self.assertWarns(ResourceWarning) as caught:
                make()
                gc.collect()
            self.assertIn("was never closed", str(caught.warning))
        client.close()
        fake.check()

    def test_forgotten_client_and_children_go_in_an_order_that_is_safe(self) -> None:
        fake = FakePjrt(programs=STEP)
        with self.assertWarns(ResourceWarning):
            ring: list[Any] = [Client(fake.plugin())]
            program = ring[0].compile(b"step", b"")
            ring += [program, program.execution(2, (), [F2, F2]), ring[0].buffer_from_host(floats(1, 2), *F2), ring]
            del ring, program
            gc.collect()
        fake.check()

    def test_closed_handles_do_not_warn(self) -> None:
        _, client = self.open()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            client.buffer_from_host(floats(1, 2), *F2).close()
            gc.collect()

    def test_rejected_program(self) -> None:
        _, client = self.open()
        with self.assertRaisesRegex(PjrtError, "PJRT_Client_Compile: INVALID_ARGUMENT: cannot parse b'nonsense'"):
            client.compile(b"nonsense", b"")

    def test_out_of_memory_says_what_was_asked_and_what_there_is(self) -> None:
        _, client = self.open(
            errors={"PJRT_Client_BufferFromHostBuffer": [(abi.RESOURCE_EXHAUSTED, "no room")]},
            stats={"bytes_in_use": 70, "bytes_limit": 100},
        )
        with self.assertRaises(OutOfMemory) as caught:
            client.buffer_from_host(floats(1, 2), *F2)
        self.assertIn("no room (asked for 8 bytes, bytes_in_use 70, bytes_limit 100)", str(caught.exception))

    def test_serialised_program(self) -> None:
        fake, client = self.open()
        with client.compile(b"step", b"") as program:
            self.assertEqual((program.name, program.num_outputs), ("fake_program", 2))
            self.assertIsNone(program.fingerprint())
            blob = program.serialize()
        with client.deserialize(blob) as program:
            self.assertEqual(program.output_types(), (F2, F2))
        self.assertEqual(fake.calls.count("PJRT_Executable_Destroy"), 2)

    def test_old_plugin_cannot_replace_the_options_of_a_serialised_program(self) -> None:
        _, client = self.open(version=(0, abi.DESERIALIZE_OPTIONS_MINOR - 1))
        with self.assertRaisesRegex(PluginError, "0.71 or newer"):
            client.deserialize(b"step", b"options")


class BufferTest(Case):
    def test_round_trip_of_every_kind_of_host_memory(self) -> None:
        _, client = self.open()
        data = floats(1.5, -2)
        for host in (data, bytearray(data), memoryview(data), (ctypes.c_float * 2)(1.5, -2)):
            with client.buffer_from_host(host, *F2) as buffer:
                self.assertEqual((buffer.dtype, buffer.dims, buffer.nbytes), ("f32", (2,), 8))
                self.assertEqual(buffer.to_bytes(), data)

    def test_scalars_and_empty_arrays(self) -> None:
        _, client = self.open()
        with client.buffer_from_host(b"\7\0\0\0", "i32", ()) as buffer:
            self.assertEqual(buffer.to_bytes(), b"\7\0\0\0")
        with client.buffer_from_host(b"", "f32", (0, 4)) as buffer:
            self.assertEqual((buffer.nbytes, buffer.to_bytes()), (0, b""))

    def test_wrong_sizes_and_types_are_refused_before_the_plugin_sees_them(self) -> None:
        fake, client = self.open()
        with self.assertRaisesRegex(RequestError, r"f32\[2\], got 7 bytes, want 8"):
            client.buffer_from_host(bytes(7), *F2)
        with self.assertRaisesRegex(RequestError, "dtype: unknown, got 'float'"):
            client.buffer_from_host(bytes(8), "float", (2,))
        with self.assertRaisesRegex(RequestError, "host memory.*C-contiguous"):
            client.buffer_from_host(memoryview(bytes(16))[::2], "u8", (8,))
        with self.assertRaisesRegex(RequestError, "host memory"):
            client.buffer_from_host([1.0, 2.0], *F2)
        self.assertNotIn("PJRT_Client_BufferFromHostBuffer", fake.calls)

    def test_reads_into_the_wrong_memory_are_refused(self) -> None:
        _, client = self.open()
        with client.buffer_from_host(floats(1, 2), *F2) as buffer:
            with self.assertRaisesRegex(RequestError, "got 4 bytes, want 8"):
                buffer.read_into(bytearray(4))
            with self.assertRaisesRegex(RequestError, "writable"):
                buffer.read_into(bytes(8))
            for offset, size in ((-1, 2), (7, 2), (0, 9)):
                with self.assertRaisesRegex(RequestError, "outside the buffer"):
                    buffer.read_range(offset, bytearray(size))
            part = bytearray(4)
            buffer.read_range(4, part)
            self.assertEqual(part, floats(2))

    def test_plugin_without_range_reads(self) -> None:
        _, client = self.open(null={"PJRT_Buffer_CopyRawToHost"})
        with client.buffer_from_host(floats(1, 2), *F2) as buffer:
            self.assertFalse(buffer.can_read_range)
            with self.assertRaisesRegex(PluginError, "PJRT_Buffer_CopyRawToHost"):
                buffer.read_range(0, bytearray(4))

    def test_read_that_fails_on_the_device(self) -> None:
        fake, client = self.open(errors={"read": [(13, "lost")]})
        with client.buffer_from_host(floats(1, 2), *F2) as buffer, self.assertRaisesRegex(PjrtError, "INTERNAL: lost"):
            buffer.to_bytes()
        fake.errors["read"] = [(13, "lost again")]
        memory = bytearray(8)
        with client.buffer_from_host(floats(1, 2), *F2) as buffer:
            buffer.start_read(memory).close()
        memory.append(0)  # no longer pinned

    def test_memory_is_pinned_while_a_read_is_in_flight(self) -> None:
        _, client = self.open()
        memory = bytearray(8)
        with client.buffer_from_host(floats(1, 2), *F2) as buffer:
            event = buffer.start_read(memory)
            with self.assertRaises(BufferError):
                memory.append(0)
            self.assertTrue(event.is_ready())
            event.wait()
            memory.append(0)
            event.close()
            with self.assertRaises(HandleClosed):
                event.wait()

    def test_close_is_idempotent_and_use_after_it_is_refused(self) -> None:
        fake, client = self.open()
        buffer = self.buffer(client, 1, 2)
        buffer.close()
        buffer.close()
        self.assertTrue(buffer.closed)
        self.assertFalse(buffer.donated)
        self.assertEqual(fake.calls.count("PJRT_Buffer_Destroy"), 1)
        for use in (buffer.to_bytes, buffer.is_deleted, buffer.pointer_on_device):
            with self.assertRaisesRegex(HandleClosed, r"buffer f32\[2\]: used after close"):
                use()

    def test_small_arrays_are_copied_during_the_call(self) -> None:
        fake, client = self.open(slow_host=True)
        with client.buffer_from_host(bytes(64), "u8", (64,)):
            self.assertEqual(fake.semantics, [abi.IMMUTABLE_ONLY_DURING_CALL])

    def test_large_memory_is_pinned_until_its_transfer_is_over(self) -> None:
        fake, client = self.open(slow_host=True)
        memory = bytearray(1 << 17)
        buffer = client.buffer_from_host(memory, "u8", (1 << 17,))
        self.assertEqual(fake.semantics, [abi.IMMUTABLE_UNTIL_TRANSFER_COMPLETES])
        with self.assertRaises(BufferError):
            memory.append(0)
        fake.finish_transfers()
        client.buffer_from_host(b"\0", "u8", (1,)).close()  # the next one sweeps up
        memory.append(0)
        buffer.close()

    def test_closing_waits_for_a_transfer_that_is_not_over(self) -> None:
        fake, client = self.open(slow_host=True)
        memory = bytearray(1 << 17)
        client.buffer_from_host(memory, "u8", (1 << 17,)).close()
        memory.append(0)
        self.assertIn("PJRT_Event_Await", fake.calls)

    def test_zero_copy_pins_a_read_only_mapping_until_close(self) -> None:
        fake, client = self.open()
        with tempfile.TemporaryFile() as file:
            file.write(floats(1, 2))
            file.flush()
            mapping = mmap.mmap(file.fileno(), 8, access=mmap.ACCESS_READ)
        buffer = client.buffer_from_host(mapping, *F2, zero_copy=True)
        self.assertEqual(fake.semantics, [abi.IMMUTABLE_ZERO_COPY])
        fake.finish_transfers()  # a plugin that copied after all says so early: the contract stays the same
        client.buffer_from_host(b"\0", "u8", (1,)).close()
        with self.assertRaises(BufferError):
            mapping.close()
        buffer.close()
        mapping.close()

    def test_client_closes_zero_copy_buffers_before_it_waits_for_their_memory(self) -> None:
        fake, client = self.open()
        memory = bytearray(floats(1, 2))
        buffer = client.buffer_from_host(memory, *F2, zero_copy=True)
        client.close()
        self.assertTrue(buffer.closed)
        memory.append(0)
        fake.check()

    def test_donated_zero_copy_memory_is_let_go_when_new_contents_arrive(self) -> None:
        _, client = self.open()
        memory = bytearray(floats(1, 2))
        execution, _, _ = self.step(client)
        pool = client.buffer_from_host(memory, *F2, zero_copy=True)
        self.addCleanup(pool.close)
        execution.bind(0, pool)
        execution.run()
        with self.assertRaises(BufferError):
            memory.append(0)
        execution.give([(0, pool)])
        memory.append(0)

    def test_donatable_memory_is_pinned_until_the_last_result_in_it_is_closed(self) -> None:
        for closes_first in ("pool", "execution", "client"):
            with self.subTest(closes_first):
                fake, client = self.open()
                memory = bytearray(floats(1, 2))
                execution, _, _ = self.step(client)
                pool = client.buffer_from_host(memory, *F2, zero_copy=True, donatable=True)
                self.assertEqual(fake.semantics[-1], abi.MUTABLE_ZERO_COPY)
                execution.bind(0, pool)
                for _ in range(3):
                    execution.run()
                    execution.give([(0, pool)])
                execution.run()  # and the result is still the execution's
                client.take_back()
                with self.assertRaises(BufferError):
                    memory.append(0)
                if closes_first == "client":
                    client.close()
                else:
                    first, then = (pool, execution) if closes_first == "pool" else (execution, pool)
                    first.close()
                    then.close()
                    client.take_back()
                memory.append(0)
                with self.assertRaisesRegex(RequestError, "writable"):
                    self.open()[1].buffer_from_host(bytes(8), *F2, zero_copy=True, donatable=True)

    def test_an_interrupt_while_lent_memory_is_taken_back(self) -> None:
        fake, client = self.open()
        for _ in range(3):
            client.buffer_from_host(bytearray(8), *F2, zero_copy=True, donatable=True).close()
        call = client.plugin.call

        def interrupted(name: str, args: abi.Struct) -> None:
            call(name, args)
            if name == "PJRT_Event_Destroy":
                raise KeyboardInterrupt

        with mock.patch.object(client.plugin, "call", interrupted), self.assertRaises(KeyboardInterrupt):
            client.take_back()
        client.take_back()  # the fake fails on an event that is used after it was destroyed
        client.close()
        live["events"] = self.before["events"]  # the count lags by the one that was interrupted
        fake.check()

    def test_lent_memory_that_never_comes_back_does_not_hang_the_close(self) -> None:
        fake, client = self.open()
        buffer = client.buffer_from_host(bytearray(8), *F2, zero_copy=True, donatable=True)
        array = fake._get(buffer._handle, "buffer")
        array.host_event = None  # so that closing does not fire it
        with (
            mock.patch("tlaloc_serve.pjrt.client._LENT_SECONDS", 0.01),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            client.close()
        self.assertEqual([item.category for item in caught], [ResourceWarning])


class ExecutionTest(Case):
    def test_outputs_are_taken_and_given(self) -> None:
        fake, client = self.open()
        execution, pool, other = self.step(client)
        for number in range(1, 4):
            execution.run()
            self.assertTrue(pool.donated)
            execution.give([(0, pool)])
            self.assertFalse(pool.donated)
            with execution.take(1) as taken:
                self.assertEqual(taken.to_bytes(), floats(10, 11))
            execution.wait()
            self.assertEqual(pool.to_bytes(), floats(1 + number, 2 + number))
        self.assertEqual(fake.non_donatable, [1])
        self.assertEqual(fake.arrays(), 2)
        self.assertEqual(live["buffers"] - self.before["buffers"], 2)

    def test_without_donation_every_input_is_listed(self) -> None:
        fake, client = self.open()
        execution, first, _ = self.step(client, b"pure")
        execution.run()
        self.assertEqual(fake.non_donatable, [0, 1])
        self.assertFalse(first.donated)
        self.assertEqual(first.to_bytes(), floats(1, 2))

    def test_outputs_nobody_took_are_destroyed_by_the_next_run(self) -> None:
        fake, client = self.open()
        execution, _, _ = self.step(client, b"pure")
        for _ in range(5):
            execution.run()
            self.assertEqual(fake.arrays(), 4)
        execution.close()
        self.assertEqual(fake.arrays(), 2)

    def test_donated_buffer_refuses_every_use(self) -> None:
        fake, client = self.open()
        execution, first, _ = self.step(client)
        execution.run()
        runs = fake.calls.count("PJRT_LoadedExecutable_Execute")
        for use in (first.to_bytes, first.pointer_on_device, lambda: execution.bind(0, first)):
            with self.assertRaisesRegex(HandleClosed, "used after it was donated"):
                use()
        with self.assertRaisesRegex(HandleClosed, r"argument 0, buffer f32\[2\], was donated"):
            execution.run()
        self.assertEqual(fake.calls.count("PJRT_LoadedExecutable_Execute"), runs)
        self.assertTrue(first.is_deleted())
        self.assertFalse(first.closed)
        first.close()
        self.assertTrue(first.closed)
        self.assertFalse(first.donated)

    def test_closed_or_unbound_arguments_are_named(self) -> None:
        fake, client = self.open()
        execution, _, second = self.step(client)
        second.close()
        with self.assertRaisesRegex(HandleClosed, "argument 1, buffer.*is closed"):
            execution.run()
        fresh = self.execution(self.compile(client))
        with self.assertRaisesRegex(HandleClosed, "argument 0 is not bound"):
            fresh.run()
        self.assertNotIn("PJRT_LoadedExecutable_Execute", fake.calls)

    def test_failed_run_has_consumed_its_donated_inputs(self) -> None:
        fake, client = self.open()
        fake.errors["PJRT_LoadedExecutable_Execute"] = [(13, "device fell off")]
        execution, first, second = self.step(client)
        with self.assertRaisesRegex(PjrtError, "PJRT_LoadedExecutable_Execute: INTERNAL: device fell off"):
            execution.run()
        self.assertTrue(first.donated)
        self.assertFalse(second.donated)
        with self.assertRaisesRegex(HandleClosed, "output 0 was already taken, or no run produced it"):
            execution.take(0)
        self.assertEqual((fake.errors_made, fake.errors_destroyed), (1, 1))

    def test_interrupt_as_the_call_returns_leaves_nothing_behind(self) -> None:
        fake, client = self.open()
        execution, first, _ = self.step(client)
        execute = execution._execute

        def interrupted(args: int) -> None:
            execute(args)
            raise KeyboardInterrupt

        execution._execute = interrupted
        with self.assertRaises(KeyboardInterrupt):
            execution.run()
        self.assertTrue(first.donated)
        self.assertEqual(live["buffers"] - self.before["buffers"], 4)
        execution.close()
        self.assertEqual(fake.arrays(), 2)
        self.assertEqual(live["buffers"] - self.before["buffers"], 2)

    def test_failure_on_the_device_surfaces_in_wait(self) -> None:
        _, client = self.open(errors={"complete": [(abi.RESOURCE_EXHAUSTED, "late")]})
        execution, _, _ = self.step(client)
        execution.run()
        with self.assertRaises(OutOfMemory):
            execution.wait()
        execution.wait()  # nothing is left to wait for

    def test_an_output_is_taken_once(self) -> None:
        _, client = self.open()
        execution, first, _ = self.step(client)
        with self.assertRaises(HandleClosed):
            execution.take(0)
        execution.run()
        execution.take(1).close()
        with self.assertRaises(HandleClosed):
            execution.take(1)
        with self.assertRaises(HandleClosed):
            execution.take(2)
        execution.give([(0, first)])
        with self.assertRaises(HandleClosed):
            execution.give([(0, first)])
        self.assertEqual(first.to_bytes(), floats(2, 3))

    def test_a_held_argument_is_used_until_it_is_closed(self) -> None:
        fake, client = self.open()
        execution, pool, weight = self.step(client)
        execution.hold((1, weight))
        with self.assertRaisesRegex(RequestError, "argument 0 is donated by every run"):
            execution.hold((0, pool))
        for number in range(2):
            execution.run()
            execution.give([(0, pool)])
            self.assertEqual(pool.to_bytes(), floats(2 + number, 3 + number))
        other = self.buffer(client, 5, 6)
        execution.bind(1, other)  # no longer held
        weight.close()
        execution.run()
        execution.give([(0, pool)])
        with execution.take(1) as taken:
            self.assertEqual(taken.to_bytes(), floats(5, 6))
        execution.hold((1, other))
        other.close()
        runs = fake.calls.count("PJRT_LoadedExecutable_Execute")
        with self.assertRaisesRegex(HandleClosed, "argument 1, buffer.*is closed"):
            execution.run()
        self.assertEqual(fake.calls.count("PJRT_LoadedExecutable_Execute"), runs)

    def test_a_held_buffer_that_gets_new_contents(self) -> None:
        _, client = self.open()
        execution, pool, weight = self.step(client)
        reader = self.execution(self.compile(client, b"pure"))
        reader.hold((0, pool), (1, weight))
        execution.run()
        with self.assertRaisesRegex(HandleClosed, "argument 0.*was donated"):
            reader.run()
        execution.give([(0, pool)])
        reader.run()
        with reader.take(0) as taken:
            self.assertEqual(taken.to_bytes(), floats(3, 4))

    def test_two_executions_that_give_to_one_pool(self) -> None:
        """Each sees what the other gave, in whatever order they run; one that ends leaves the other right."""
        fake, client = self.open()
        one, pool, weight = self.step(client)
        two = self.execution(self.compile(client), STEP[b"step"].aliases)
        two.bind(0, pool)
        two.hold((1, weight))
        pairs = [[(0, pool)], [(0, pool)]]
        order = random.Random(3)
        for number in range(40):
            which = order.randrange(2)
            (one, two)[which].run()
            (one, two)[which].give(pairs[which])
            self.assertEqual(pool.to_bytes(), floats(2 + number, 3 + number))
        two.run()
        with self.assertRaisesRegex(HandleClosed, "argument 0.*was donated"):
            one.run()
        two.give(pairs[1])
        pool.close()
        for execution in (one, two):
            with self.assertRaisesRegex(HandleClosed, "argument 0, buffer.*is closed"):
                execution.run()
        fresh = self.buffer(client, 7, 8)
        for execution in (one, two):
            execution.bind(0, fresh)
            execution.run()
            execution.give([(0, fresh)])
        self.assertEqual(fresh.to_bytes(), floats(9, 10))
        self.assertEqual(fake.arrays(), 2 + 2)  # the fresh pool and the weight; each execution's second output

    def test_a_run_that_nobody_waits_for_makes_no_event(self) -> None:
        _, client = self.open()
        execution, _, _ = self.step(client, b"pure")
        before = live["events"]
        execution.run(awaited=False)
        self.assertEqual(live["events"], before)
        execution.wait()
        execution.run()
        self.assertEqual(live["events"], before + 1)

    def test_what_a_download_reads(self) -> None:
        fake, client = self.open()
        execution, _, _ = self.step(client, b"pure")
        download = Download(client, *F2)
        for number in (1, 10):
            execution.bind(0, self.buffer(client, number, number))
            execution.run(awaited=False)
            with execution.take(0) as taken:
                download.read(taken)
            self.assertEqual(bytes(download.memory), floats(number + 1, number + 1))
            with self.assertRaises(HandleClosed):
                download.read(taken)
        fake.errors["PJRT_Buffer_ToHostBuffer"] = [(13, "device fell off")]
        with self.buffer(client, 1, 2) as buffer, self.assertRaisesRegex(PjrtError, "device fell off"):
            download.read(buffer)
        self.assertEqual(live["events"], self.before["events"])

    def test_given_to_the_wrong_or_a_closed_buffer(self) -> None:
        _, client = self.open()
        execution, first, second = self.step(client)
        execution.run()
        with client.buffer_from_host(bytes(8), "i32", (2,)) as wrong, self.assertRaisesRegex(RequestError, "given to"):
            execution.give([(0, wrong)])
        second.close()
        with self.assertRaises(HandleClosed):
            execution.give([(1, second)])
        execution.give([(0, first)])

    def test_outputs_must_be_the_programs_own(self) -> None:
        _, client = self.open()
        program = self.compile(client)
        with self.assertRaisesRegex(RequestError, "number of outputs, got 1, want 2"):
            program.execution(2, (), [F2])
        with self.assertRaisesRegex(RequestError, "type of output 1"):
            program.execution(2, (), [F2, ("f32", (3,))])
        with self.assertRaisesRegex(RequestError, r"donated inputs, got \[2\]"):
            program.execution(2, [2], [F2, F2])

    def test_number_of_outputs_is_checked_where_their_types_cannot_be(self) -> None:
        _, client = self.open(null={"PJRT_Executable_OutputElementTypes"})
        program = self.compile(client)
        with self.assertRaisesRegex(RequestError, "number of outputs"):
            program.execution(2, (), [F2])
        program.execution(2, (), [F2, F2]).close()

    def test_buffers_of_another_client_and_wrong_indices(self) -> None:
        _, client = self.open()
        _, other = self.open()
        execution, first, _ = self.step(client)
        foreign = self.buffer(other, 1, 2)
        with self.assertRaisesRegex(RequestError, "another client"):
            execution.bind(0, foreign)
        for index in (-1, 2):
            with self.assertRaisesRegex(RequestError, "argument index"):
                execution.bind(index, first)

    def test_closing_the_program_closes_its_executions(self) -> None:
        _, client = self.open()
        program = self.compile(client)
        execution = self.execution(program)
        program.close()
        with self.assertRaises(HandleClosed):
            execution.run()
        with self.assertRaises(HandleClosed):
            program.serialize()


if __name__ == "__main__":
    unittest.main()
