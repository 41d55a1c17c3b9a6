"""A client of one plugin: its devices, and the way to compile, to load a compiled program and to fill a buffer.

Rules. The client is the last thing to be closed: it closes what is left of its children first. One thread owns a
client and everything made from it. A program's bytes and options are handed over as they are; nothing is guessed.
"""

from __future__ import annotations

import ctypes
import time
import warnings
import weakref
from collections.abc import Mapping
from typing import NoReturn

from tlaloc_serve.errors import OutOfMemory, PjrtError, PluginError, RequestError
from tlaloc_serve.pjrt import abi
from tlaloc_serve.pjrt.buffer import Buffer, Event
from tlaloc_serve.pjrt.executable import Executable
from tlaloc_serve.pjrt.execution import Execution
from tlaloc_serve.pjrt.handles import Handle, live
from tlaloc_serve.pjrt.host import HostView, element_type, int64_array, nbytes_of
from tlaloc_serve.pjrt.plugin import Plugin, text_at

__all__ = ["Buffer", "Client", "Device", "Event", "Executable", "Execution", "live"]

# Below this a copy made during the call is cheaper than keeping track of the host memory.
_COPY_DURING_CALL_BYTES = 64 * 1024
# Children in the order they must go: work in flight, arrays, programs.
_CLOSING_ORDER = ("events", "buffers", "executions", "executables")


# How long a client that closes waits for the plugin to be done with lent memory: a step in flight takes no longer.
_LENT_SECONDS = 30.0
_kept: list[HostView] = []  # memory that a plugin never gave back


class Device:
    """One addressable device. `id` is the plugin's number for it, `kind` its model, `description` a line of text."""

    def __init__(self, client: Client, handle: int):
        self._client = client
        self._handle = handle
        plugin = client.plugin
        get = abi.PJRT_Device_GetDescription_Args(device=handle)
        plugin.call("PJRT_Device_GetDescription", get)
        described = get.device_description
        number = abi.PJRT_DeviceDescription_Id_Args(device_description=described)
        plugin.call("PJRT_DeviceDescription_Id", number)
        kind = abi.PJRT_DeviceDescription_Kind_Args(device_description=described)
        plugin.call("PJRT_DeviceDescription_Kind", kind)
        text = abi.PJRT_DeviceDescription_ToString_Args(device_description=described)
        plugin.call("PJRT_DeviceDescription_ToString", text)
        self.id: int = number.id
        self.kind: str = text_at(kind.device_kind, kind.device_kind_size)
        self.description: str = text_at(text.to_string, text.to_string_size)

    def memory_stats(self) -> dict[str, int] | None:
        """Bytes in use, limits and peaks under the names of `abi.MEMORY_STATS`; None where the plugin keeps none."""
        self._client._alive()
        if not self._client.plugin.has("PJRT_Device_MemoryStats"):
            return None
        args = abi.PJRT_Device_MemoryStats_Args(device=self._handle)
        try:
            self._client.plugin.call("PJRT_Device_MemoryStats", args)
        except PjrtError as error:
            if error.code == abi.UNIMPLEMENTED:
                return None
            raise
        known = {name for name in abi.MEMORY_STATS[1:] if getattr(args, f"{name}_is_set")}
        return {name: getattr(args, name) for name in abi.MEMORY_STATS if name == "bytes_in_use" or name in known}

    def __repr__(self) -> str:
        return f"device {self.id} ({self.kind})"


class Client(Handle):
    """A live client. `platform_name` and `platform_version` are its own answer, `devices` the addressable ones.

    `options` are the plugin's create options by name. Raises PjrtError when the plugin refuses to make a client and
    PluginError when the client has no addressable device.
    """

    kind = "clients"

    def __init__(self, plugin: Plugin, options: Mapping[str, bool | int | float | str] | None = None):
        self.plugin = plugin
        self._children: weakref.WeakSet[Handle] = weakref.WeakSet()
        self._open_children = 0
        self._moves = 0  # how often a buffer that executions give outputs to was given one, donated or closed
        self._abandoned = False
        self._transfers: list[Buffer] = []  # buffers whose host memory the plugin may still be reading
        self._lent: list[tuple[int | None, HostView]] = []  # memory that donation hands on, and the event of its return
        values = _named_values(options or {})
        args = abi.PJRT_Client_Create_Args(create_options=ctypes.addressof(values), num_options=len(options or {}))
        plugin.call("PJRT_Client_Create", args)
        self._handle = args.client
        live["clients"] += 1
        try:
            self._describe()
        except BaseException:
            self.close()
            raise

    def _describe(self) -> None:
        name = abi.PJRT_Client_PlatformName_Args(client=self._handle)
        self.plugin.call("PJRT_Client_PlatformName", name)
        self.platform_name: str = text_at(name.platform_name, name.platform_name_size)
        version = abi.PJRT_Client_PlatformVersion_Args(client=self._handle)
        self.plugin.call("PJRT_Client_PlatformVersion", version)
        self.platform_version: str = text_at(version.platform_version, version.platform_version_size)
        listed = abi.PJRT_Client_AddressableDevices_Args(client=self._handle)
        self.plugin.call("PJRT_Client_AddressableDevices", listed)
        count = listed.num_addressable_devices
        if not count:
            raise PluginError(
                self.plugin.path,
                f"the {self.platform_name} client has no addressable device",
                todo="check the device and its driver",
            )
        pointers = (ctypes.c_void_p * count).from_address(listed.addressable_devices)
        self.devices: tuple[Device, ...] = tuple(Device(self, pointer) for pointer in pointers if pointer)

    def compile(self, code: bytes, options: bytes, format: str = "mlir") -> Executable:
        """Compile the program `code` (textual or serialised StableHLO for `mlir`) and load it.

        `options` is a serialised CompileOptionsProto, see `compile_options`. Raises PjrtError when XLA rejects it.
        """
        name = format.encode()
        text = HostView(code)
        program = abi.PJRT_Program(
            struct_size=abi.struct_size(abi.PJRT_Program),
            code=text.address,
            code_size=text.nbytes,
            format=name,
            format_size=len(name),
        )
        args = abi.PJRT_Client_Compile_Args(
            client=self._alive(),
            program=ctypes.addressof(program),
            compile_options=options,
            compile_options_size=len(options),
        )
        try:
            self.plugin.call("PJRT_Client_Compile", args)
        except OutOfMemory as error:
            self.out_of_memory(error)
        finally:
            text.release()
        return Executable(self, args.executable)

    def deserialize(self, blob: bytes, options: bytes | None = None) -> Executable:
        """Load what `Executable.serialize` wrote. `options` replace the compile options that it was made with.

        Only a blob of the same plugin file and the same machine may be loaded: a plugin may not check either.
        """
        if options is not None and self.plugin.api_version < (abi.MAJOR, abi.DESERIALIZE_OPTIONS_MINOR):
            raise PluginError(
                self.plugin.path,
                "compile options for a serialised program",
                got="PJRT API {}.{}".format(*self.plugin.api_version),
                want=f"{abi.MAJOR}.{abi.DESERIALIZE_OPTIONS_MINOR} or newer",
                todo="compile it instead",
            )
        args = abi.PJRT_Executable_DeserializeAndLoad_Args(
            client=self._alive(), serialized_executable=blob, serialized_executable_size=len(blob)
        )
        if options is not None:
            args.overridden_serialized_compile_options = options
            args.overridden_serialized_compile_options_size = len(options)
        self.plugin.call("PJRT_Executable_DeserializeAndLoad", args)
        return Executable(self, args.loaded_executable)

    def buffer_from_host(
        self,
        data: object,
        dtype: str,
        dims: tuple[int, ...],
        *,
        device: Device | None = None,
        zero_copy: bool = False,
        donatable: bool = False,
    ) -> Buffer:
        """A buffer on `device` (the first one by default) with the contents of `data`, dense and row-major.

        `data` is any C-contiguous buffer object of exactly the right size, read-only ones too. It must not change
        while the plugin may read it: with `zero_copy` until the buffer is closed (the plugin may then use that memory
        in place; CPU plugins do when it is aligned to 64 bytes, and copy it otherwise), without it until the transfer
        is over. The object is pinned for as long. With `zero_copy` and `donatable` a program that the buffer is donated
        to may also write its result there: the memory, which has to be writable, is the plugin's until the last such
        result is closed, and is pinned until then. Raises RequestError for a wrong size or dtype, OutOfMemory.
        """
        code = element_type(dtype)[0]
        view = HostView(data, writable=zero_copy and donatable)
        if view.nbytes != nbytes_of(dtype, dims):
            raise RequestError(
                "buffer_from_host",
                f"host memory for {dtype}{list(dims)}",
                got=f"{view.nbytes} bytes",
                want=f"{nbytes_of(dtype, dims)}",
            )
        if zero_copy:
            semantics = abi.MUTABLE_ZERO_COPY if donatable else abi.IMMUTABLE_ZERO_COPY
        elif view.nbytes <= _COPY_DURING_CALL_BYTES:
            semantics = abi.IMMUTABLE_ONLY_DURING_CALL
        else:
            semantics = abi.IMMUTABLE_UNTIL_TRANSFER_COMPLETES
        args = abi.PJRT_Client_BufferFromHostBuffer_Args(
            client=self._alive(),
            data=view.address,
            type=code,
            dims=ctypes.addressof(int64_array(dims)),
            num_dims=len(dims),
            host_buffer_semantics=semantics,
            device=(device or self.devices[0])._handle,
        )
        try:
            self.plugin.call("PJRT_Client_BufferFromHostBuffer", args)
        except OutOfMemory as error:
            self.out_of_memory(error, view.nbytes)
        if semantics == abi.MUTABLE_ZERO_COPY:
            self._lent.append((args.done_with_host_buffer, view))
            live["events"] += bool(args.done_with_host_buffer)
            return Buffer(self, args.buffer, dtype, dims)
        return self._keep_host(args, view, dtype, dims, zero_copy)

    def _keep_host(
        self,
        args: abi.PJRT_Client_BufferFromHostBuffer_Args,
        view: HostView,
        dtype: str,
        dims: tuple[int, ...],
        zero_copy: bool,
    ) -> Buffer:
        done = args.done_with_host_buffer
        event = Event(self, done, view, owned=True) if done else None
        buffer = Buffer(self, args.buffer, dtype, dims, event)
        if self._transfers:
            self._transfers = [earlier for earlier in self._transfers if not earlier._host_is_done()]
        # A zero-copy buffer keeps its memory until it is closed, whatever the event says before.
        if not zero_copy and not buffer._host_is_done():
            self._transfers.append(buffer)
        return buffer

    def take_back(self, wait: bool = False) -> None:
        """Let go of the memory of donatable zero-copy buffers that the plugin is done with; with `wait`, of all of it.

        Waiting is for the close, when every buffer is destroyed. What the plugin still holds after `_LENT_SECONDS`
        stays pinned for good, with a ResourceWarning: waiting longer could last for ever.
        """
        deadline = time.monotonic() + (_LENT_SECONDS if wait else 0.0)
        for lent in list(self._lent):
            event, view = lent
            while event and not self._is_over(event) and time.monotonic() < deadline:
                time.sleep(0.001)
            over = not event or self._is_over(event)
            if not wait and not (event and over):
                continue
            if not over:
                _kept.append(view)
            self._lent.remove(lent)  # before the event is destroyed: whatever comes now must not find it again
            if not over:
                warnings.warn("the plugin holds on to memory that was lent to it", ResourceWarning, stacklevel=2)
            if event:
                self.plugin.call("PJRT_Event_Destroy", abi.PJRT_Event_Destroy_Args(event=event))
                live["events"] -= 1
            if over:
                view.release()

    def _is_over(self, event: int) -> bool:
        ready = abi.PJRT_Event_IsReady_Args(event=event)
        self.plugin.call("PJRT_Event_IsReady", ready)
        return bool(ready.is_ready)

    def out_of_memory(self, error: OutOfMemory, asked: int | None = None) -> NoReturn:
        """Raise `error` again with what was asked for (bytes) and what the device says it has."""
        facts = [] if asked is None else [f"asked for {asked} bytes"]
        stats = self.devices[0].memory_stats() or {}
        facts += [f"{name} {stats[name]}" for name in ("bytes_in_use", "bytes_limit") if name in stats]
        detail = f"{error.detail} ({', '.join(facts)})" if facts else error.detail
        raise OutOfMemory(error.call, error.code, error.code_name, detail) from None

    def _adopt(self, child: Handle) -> None:
        self._children.add(child)
        self._open_children += 1

    def _disown(self) -> None:
        """A child has destroyed its handle."""
        self._open_children -= 1
        if self._abandoned and not self._open_children:
            self.close()

    def _abandon(self) -> None:
        # The collector finalises a client and its forgotten children in any order: the last of them closes it.
        self._abandoned = True
        if not self._open_children:
            self.close()

    def close(self) -> None:
        """Close every child that is still open, then the client."""
        if self._handle is None:
            return
        self._transfers.clear()
        for child in sorted(self._children, key=lambda child: _CLOSING_ORDER.index(child.kind)):
            child.close()
        self.take_back(wait=True)
        handle, self._handle = self._handle, None
        live["clients"] -= 1
        self.plugin.call("PJRT_Client_Destroy", abi.PJRT_Client_Destroy_Args(client=handle))

    def __repr__(self) -> str:
        return f"client of {self.plugin.path}"


def _named_values(options: Mapping[str, bool | int | float | str]) -> ctypes.Array[abi.PJRT_NamedValue]:
    """The create options as C structs; the byte strings they point to stay alive with the array."""
    values = (abi.PJRT_NamedValue * max(1, len(options)))()
    for value, (name, option) in zip(values, options.items(), strict=False):
        value.struct_size = abi.struct_size(abi.PJRT_NamedValue)
        value.name = name.encode()
        value.name_size = len(name.encode())
        value.value_size = 1
        if isinstance(option, bool):
            value.type, value.bool_value = abi.NAMED_BOOL, option
        elif isinstance(option, int):
            value.type, value.int64_value = abi.NAMED_INT64, option
        elif isinstance(option, float):
            value.type, value.float_value = abi.NAMED_FLOAT, option
        else:
            text = option.encode()
            value.type, value.string_value, value.value_size = abi.NAMED_STRING, text, len(text)
    return values
