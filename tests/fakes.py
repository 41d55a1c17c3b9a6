"""An in-memory PJRT plugin made of ctypes callbacks, to put the C side of a conversation under a test's control.

Rules. Handles are numbers that the fake hands out and checks: a double destroy, a use after destroy, a wrong
`struct_size` or an argument list that is too short is recorded in `faults`, and `check()` raises them. Errors are
counted when made and when destroyed. What a test does not script works, so a test says only what it is about.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tlaloc_serve.pjrt import abi
from tlaloc_serve.pjrt.plugin import Plugin

_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_VOID_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_TABLE_SLOTS = 118  # functions in the header of API 0.81


class FakeError(Exception):
    """Raised in a handler to make its call return a PJRT_Error."""

    def __init__(self, code: int, message: str):
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass
class Program:
    """What a fake executable does. `aliases` are the inputs that it consumes where it may."""

    outputs: Sequence[tuple[str, tuple[int, ...]]]
    run: Callable[[list[bytes]], list[bytes]]
    aliases: Collection[int] = ()


@dataclass
class Array:
    data: bytes
    dtype: int
    dims: tuple[int, ...]
    deleted: bool = False
    mutable: bool = False  # whether donation hands its host memory on
    host_event: dict[str, Any] | None = None  # of a zero-copy buffer: fires when the buffer is destroyed


@dataclass
class FakePjrt:
    """A plugin. `version`, `struct_size`, `missing` and `null` shape its table, `programs` what it compiles.

    `errors` scripts failures: call name to a list of (code, message), one used up by each call.
    `slow_host` leaves done-with-host-buffer events unfired until `finish_transfers()`.
    """

    version: tuple[int, int] = (0, 81)
    struct_size: int = abi.FUNCTIONS_OFFSET + abi.POINTER_SIZE * _TABLE_SLOTS
    null: Collection[str] = ()
    devices: int = 1
    platform: str = "fake"
    programs: Mapping[bytes, Program] = field(default_factory=dict)
    errors: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    slow_host: bool = False
    stats: Mapping[str, int] | None = None

    def __post_init__(self) -> None:
        self.faults: list[str] = []
        self.calls: list[str] = []
        self.created_options: dict[str, object] = {}
        self.semantics: list[int] = []
        self.non_donatable: list[int] = []
        self.errors_made = self.errors_destroyed = 0
        self._numbers = itertools.count(0x1000, 0x10)
        self._live: dict[int, tuple[str, Any]] = {}
        self._keep: list[Any] = []
        self._table = (ctypes.c_char * (abi.FUNCTIONS_OFFSET + abi.POINTER_SIZE * _TABLE_SLOTS))()
        self.address = ctypes.addressof(self._table)
        ctypes.c_size_t.from_address(self.address).value = self.struct_size
        header = abi.PJRT_Api_Version.from_address(self.address + 16)
        header.major_version, header.minor_version = self.version
        for name, index in abi.SLOTS.items():
            if name not in self.null:
                self._install(name, index)

    def plugin(self) -> Plugin:
        return Plugin("fake.so", self.address)

    def check(self) -> None:
        """Raise what the callbacks found wrong, and any error or handle that was not destroyed."""
        problems = list(self.faults)
        if self.errors_made != self.errors_destroyed:
            problems.append(f"{self.errors_made} errors made, {self.errors_destroyed} destroyed")
        problems += [f"{kind} {handle:#x} never destroyed" for handle, (kind, _) in self._live.items()]
        if problems:
            raise AssertionError("; ".join(problems))

    def arrays(self) -> int:
        """How many buffers are live."""
        return sum(kind == "buffer" for kind, _ in self._live.values())

    def finish_transfers(self) -> None:
        """Fire every done-with-host-buffer event that is still pending."""
        for kind, state in self._live.values():
            if kind == "event":
                state["ready"] = True

    # The machinery.

    def _install(self, name: str, index: int) -> None:
        kind = getattr(abi, f"{name}_Args")
        handler = getattr(self, name.removeprefix("PJRT_"))

        def call(address: int) -> int | None:
            try:
                args = kind.from_address(address)
                if args.struct_size != abi.struct_size(kind):
                    self.faults.append(f"{name}: struct_size {args.struct_size}, want {abi.struct_size(kind)}")
                self.calls.append(name)
                scripted = self.errors.get(name)
                if scripted:
                    raise FakeError(*scripted.pop(0))
                handler(args)
            except FakeError as error:
                self.errors_made += 1
                return self._new("error", error)
            except Exception as error:  # a callback cannot raise into C: check() does it
                self.faults.append(f"{name}: {error!r}")
            return None

        callback = (_VOID_CALLBACK if name in abi.VOID_FUNCTIONS else _CALLBACK)(call)
        self._keep.append(callback)
        pointer = ctypes.cast(callback, ctypes.c_void_p).value
        ctypes.c_void_p.from_address(self.address + abi.FUNCTIONS_OFFSET + abi.POINTER_SIZE * index).value = pointer

    def _new(self, kind: str, state: Any = None) -> int:
        handle = next(self._numbers)
        self._live[handle] = (kind, state)
        return handle

    def _get(self, handle: int | None, kind: str) -> Any:
        found = self._live.get(handle or 0)
        if found is None or found[0] != kind:
            raise AssertionError(f"{handle and hex(handle)} is not a live {kind}")
        return found[1]

    def _destroy(self, handle: int | None, kind: str) -> Any:
        state = self._get(handle, kind)
        del self._live[handle or 0]
        return state

    def _text(self, text: str) -> tuple[int, int]:
        data = ctypes.create_string_buffer(text.encode())
        self._keep.append(data)
        return ctypes.addressof(data), len(text.encode())

    # The calls, one a slot.

    def Error_Destroy(self, args: Any) -> None:
        self._destroy(args.error, "error")
        self.errors_destroyed += 1

    def Error_Message(self, args: Any) -> None:
        args.message, args.message_size = self._text(self._get(args.error, "error").message)

    def Error_GetCode(self, args: Any) -> None:
        args.code = self._get(args.error, "error").code

    def Plugin_Initialize(self, args: Any) -> None:
        pass

    def Plugin_Attributes(self, args: Any) -> None:
        values = (abi.PJRT_NamedValue * 2)()
        numbers = (ctypes.c_int64 * 3)(1, 13, 3)
        for value, name in zip(values, (b"xla_version", b"stablehlo_current_version"), strict=True):
            value.name, value.name_size, value.value_size = name, len(name), 1
        values[0].type, values[0].int64_value = abi.NAMED_INT64, 2
        values[1].type, values[1].value_size = abi.NAMED_INT64_LIST, 3
        values[1].int64_array_value = ctypes.addressof(numbers)
        self._keep += [values, numbers]
        args.attributes, args.num_attributes = ctypes.addressof(values), 2

    def Event_Destroy(self, args: Any) -> None:
        self._destroy(args.event, "event")

    def Event_IsReady(self, args: Any) -> None:
        args.is_ready = self._get(args.event, "event")["ready"]

    def Event_Await(self, args: Any) -> None:
        state = self._get(args.event, "event")
        if state["with_buffer"] and not state["ready"]:
            raise AssertionError("waits for ever: this event fires when its buffer is destroyed")
        state["ready"] = True
        if state["error"] is not None:
            raise FakeError(*state["error"])

    def _event(self, ready: bool = True, error: tuple[int, str] | None = None) -> int:
        return self._new("event", {"ready": ready, "error": error, "with_buffer": False})

    def Client_Create(self, args: Any) -> None:
        values = (abi.PJRT_NamedValue * args.num_options).from_address(args.create_options)
        self.created_options = {value.name.decode(): _option(value) for value in values}
        args.client = self._new("client")

    def Client_Destroy(self, args: Any) -> None:
        self._destroy(args.client, "client")
        left = [kind for kind, _ in self._live.values() if kind != "error"]
        if left:
            self.faults.append(f"client destroyed before {left}")

    def Client_PlatformName(self, args: Any) -> None:
        args.platform_name, args.platform_name_size = self._text(self.platform)

    def Client_PlatformVersion(self, args: Any) -> None:
        args.platform_version, args.platform_version_size = self._text("1")

    def Client_AddressableDevices(self, args: Any) -> None:
        pointers = (ctypes.c_void_p * max(1, self.devices))(*range(8, 8 + self.devices))
        self._keep.append(pointers)
        args.addressable_devices, args.num_addressable_devices = ctypes.addressof(pointers), self.devices

    def Device_GetDescription(self, args: Any) -> None:
        args.device_description = args.device

    def DeviceDescription_Id(self, args: Any) -> None:
        args.id = args.device_description - 8

    def DeviceDescription_Kind(self, args: Any) -> None:
        args.device_kind, args.device_kind_size = self._text("fake kind")

    def DeviceDescription_ToString(self, args: Any) -> None:
        args.to_string, args.to_string_size = self._text(f"FakeDevice(id={args.device_description - 8})")

    def Device_MemoryStats(self, args: Any) -> None:
        if self.stats is None:
            raise FakeError(abi.UNIMPLEMENTED, "no statistics")
        for name, value in self.stats.items():
            setattr(args, name, value)
            if name != "bytes_in_use":
                setattr(args, f"{name}_is_set", True)

    def Client_Compile(self, args: Any) -> None:
        program = abi.PJRT_Program.from_address(args.program)
        code = ctypes.string_at(program.code, program.code_size)
        if code not in self.programs:
            raise FakeError(abi.INVALID_ARGUMENT, f"cannot parse {code!r}")
        args.executable = self._new("loaded", self.programs[code])

    def Executable_DeserializeAndLoad(self, args: Any) -> None:
        args.loaded_executable = self._new("loaded", self.programs[args.serialized_executable])

    def LoadedExecutable_GetExecutable(self, args: Any) -> None:
        args.executable = self._new("program", self._get(args.loaded_executable, "loaded"))

    def LoadedExecutable_Destroy(self, args: Any) -> None:
        self._destroy(args.executable, "loaded")

    def Executable_Destroy(self, args: Any) -> None:
        self._destroy(args.executable, "program")

    def Executable_Name(self, args: Any) -> None:
        args.executable_name, args.executable_name_size = self._text("fake_program")

    def Executable_NumOutputs(self, args: Any) -> None:
        args.num_outputs = len(self._get(args.executable, "program").outputs)

    def Executable_Fingerprint(self, args: Any) -> None:
        raise FakeError(abi.UNIMPLEMENTED, "no fingerprint")

    def Executable_OutputElementTypes(self, args: Any) -> None:
        outputs = self._get(args.executable, "program").outputs
        codes = (ctypes.c_int * max(1, len(outputs)))(*(abi.DTYPES[dtype][0] for dtype, _ in outputs))
        self._keep.append(codes)
        args.output_types, args.num_output_types = ctypes.addressof(codes), len(outputs)

    def Executable_OutputDimensions(self, args: Any) -> None:
        outputs = self._get(args.executable, "program").outputs
        flat = [size for _, dims in outputs for size in dims]
        sizes = (ctypes.c_int64 * max(1, len(flat)))(*flat)
        ranks = (ctypes.c_size_t * max(1, len(outputs)))(*(len(dims) for _, dims in outputs))
        self._keep += [sizes, ranks]
        args.num_outputs, args.dims, args.dim_sizes = len(outputs), ctypes.addressof(sizes), ctypes.addressof(ranks)

    def Executable_Serialize(self, args: Any) -> None:
        program = self._get(args.executable, "program")
        code = next(code for code, known in self.programs.items() if known is program)
        data = ctypes.create_string_buffer(code, len(code))
        blob = self._new("serialized", data)
        deleter = _DELETER(lambda handle: self._destroy(handle, "serialized") and None)
        self._keep.append(deleter)
        args.serialized_bytes, args.serialized_bytes_size = ctypes.addressof(data), len(code)
        args.serialized_executable = blob
        args.serialized_executable_deleter = ctypes.cast(deleter, ctypes.c_void_p).value

    def LoadedExecutable_Execute(self, args: Any) -> None:
        program = self._get(args.executable, "loaded")
        options = abi.PJRT_ExecuteOptions.from_address(args.options)
        if options.struct_size != abi.struct_size(abi.PJRT_ExecuteOptions):
            self.faults.append(f"ExecuteOptions: struct_size {options.struct_size}")
        count = options.num_non_donatable_input_indices
        self.non_donatable = list((ctypes.c_int64 * count).from_address(options.non_donatable_input_indices))
        inputs = _pointers(args.argument_lists, args.num_args)
        arrays = [self._get(handle, "buffer") for handle in inputs]
        if any(array.deleted for array in arrays):
            raise FakeError(abi.INVALID_ARGUMENT, "buffer has been deleted or donated")
        results = program.run([array.data for array in arrays])
        donated = set(program.aliases) - set(self.non_donatable)
        for index in donated:
            arrays[index].deleted = True
        listed = ctypes.c_void_p.from_address(args.output_lists).value or 0
        slots = (ctypes.c_void_p * len(results)).from_address(listed)
        for index, (data, (dtype, dims)) in enumerate(zip(results, program.outputs, strict=True)):
            array = Array(data, abi.DTYPES[dtype][0], dims)
            source = program.aliases[index] if index < len(program.aliases) else None
            if source in donated and arrays[source].mutable:  # its memory lives on in this output
                array.host_event, array.mutable, arrays[source].host_event = arrays[source].host_event, True, None
            slots[index] = self._new("buffer", array)
        if args.device_complete_events:
            error = self.errors["complete"].pop(0) if self.errors.get("complete") else None
            ctypes.c_void_p.from_address(args.device_complete_events).value = self._event(error=error)

    def Client_BufferFromHostBuffer(self, args: Any) -> None:
        dims = tuple((ctypes.c_int64 * args.num_dims).from_address(args.dims))
        size = dict(abi.DTYPES.values())[args.type] * math.prod(dims)
        self.semantics.append(args.host_buffer_semantics)
        args.done_with_host_buffer = self._event(ready=not self.slow_host)
        array = Array(ctypes.string_at(args.data, size), args.type, dims)
        if args.host_buffer_semantics in (abi.IMMUTABLE_ZERO_COPY, abi.MUTABLE_ZERO_COPY):
            array.mutable = args.host_buffer_semantics == abi.MUTABLE_ZERO_COPY
            array.host_event = self._get(args.done_with_host_buffer, "event")
            array.host_event.update(ready=False, with_buffer=True)
        args.buffer = self._new("buffer", array)

    def Buffer_Destroy(self, args: Any) -> None:
        array = self._destroy(args.buffer, "buffer")
        if array.host_event is not None:
            array.host_event["ready"] = True

    def Buffer_IsDeleted(self, args: Any) -> None:
        args.is_deleted = self._get(args.buffer, "buffer").deleted

    def Buffer_ToHostBuffer(self, args: Any) -> None:
        data = self._get(args.src, "buffer").data
        if args.dst_size != len(data):
            raise FakeError(abi.INVALID_ARGUMENT, f"dst_size {args.dst_size}, want {len(data)}")
        ctypes.memmove(args.dst, data, len(data))
        args.event = self._event(error=self.errors["read"].pop(0) if self.errors.get("read") else None)

    def Buffer_CopyRawToHost(self, args: Any) -> None:
        data = self._get(args.buffer, "buffer").data
        ctypes.memmove(args.dst, data[args.offset : args.offset + args.transfer_size], args.transfer_size)
        args.event = self._event()

    def Buffer_UnsafePointer(self, args: Any) -> None:
        args.buffer_pointer = args.buffer


def _pointers(lists: int, count: int) -> list[int | None]:
    first = ctypes.c_void_p.from_address(lists).value or 0
    return list((ctypes.c_void_p * count).from_address(first))


def _option(value: Any) -> object:
    field_of = {
        abi.NAMED_STRING: "string_value",
        abi.NAMED_INT64: "int64_value",
        abi.NAMED_FLOAT: "float_value",
        abi.NAMED_BOOL: "bool_value",
    }
    return getattr(value, field_of[value.type])
