"""A small array that crosses again and again: the hot path's inputs (`Upload`) and what it reads back (`Download`).

Rules. `memory` belongs to the caller between two calls; the plugin is done with it when a call returns. The args
structs are built once, so that a call costs about 10 us of Python where the ways for all arrays cost 25 to 60. The
Buffer of an Upload stays the same object, and stays bound, while its handle changes with every send.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from tlaloc_serve.pjrt import abi
from tlaloc_serve.pjrt.buffer import Buffer
from tlaloc_serve.pjrt.handles import live
from tlaloc_serve.pjrt.host import element_type, int64_array, nbytes_of, row_major

if TYPE_CHECKING:
    from tlaloc_serve.pjrt.client import Client


def _calls(client: Client, *structs: abi.Struct) -> list[tuple[Any, int]]:
    """For each args struct the function that takes it, and its address. The structs must outlive their use."""
    for args in structs:
        args.struct_size = abi.struct_size(type(args))
    names = [type(args).__name__.removesuffix("_Args") for args in structs]
    return [(client.plugin.function(name), ctypes.addressof(args)) for name, args in zip(names, structs, strict=True)]


class Upload:
    """Host memory of `dtype` and `dims` and the device buffer that `send` fills from it."""

    def __init__(self, client: Client, dtype: str, dims: tuple[int, ...]):
        self.memory = (ctypes.c_char * max(1, nbytes_of(dtype, dims)))()
        self.buffer: Buffer = client.buffer_from_host(self.memory, dtype, dims)
        self._check = client.plugin.check
        self._dims = int64_array(dims)
        self._args = abi.PJRT_Client_BufferFromHostBuffer_Args(
            client=client._alive(),
            data=ctypes.addressof(self.memory),
            type=element_type(dtype)[0],
            dims=ctypes.addressof(self._dims),
            num_dims=len(dims),
            host_buffer_semantics=abi.IMMUTABLE_ONLY_DURING_CALL,
            device=client.devices[0]._handle,
        )
        self._event = abi.PJRT_Event_Destroy_Args()
        self._old = abi.PJRT_Buffer_Destroy_Args()
        self._calls = _calls(client, self._args, self._event, self._old)

    def send(self) -> None:
        """Make what stands in `memory` the contents of `buffer`. Raises PjrtError, and HandleClosed after close()."""
        (make, make_args), (drop_event, event_args), (drop_old, old_args) = self._calls
        self._old.buffer = self.buffer._alive()
        error = make(make_args)
        if error:
            self._check("PJRT_Client_BufferFromHostBuffer", error)
        self.buffer._handle = self._args.buffer
        if self.buffer._holders:
            self.buffer._tell_holders()
        live["buffers"] += 1
        if self._args.done_with_host_buffer:
            self._event.event = self._args.done_with_host_buffer
            error = drop_event(event_args)
            if error:
                self._check("PJRT_Event_Destroy", error)
        live["buffers"] -= 1
        error = drop_old(old_args)
        if error:
            self._check("PJRT_Buffer_Destroy", error)

    def close(self) -> None:
        """Destroy the buffer; idempotent."""
        self.buffer.close()


class Download:
    """Host memory of `dtype` and `dims`, which `read` fills from a buffer; `data` is a view of its bytes."""

    def __init__(self, client: Client, dtype: str, dims: tuple[int, ...]):
        self.memory = (ctypes.c_char * max(1, nbytes_of(dtype, dims)))()
        self.data = memoryview(self.memory).cast("B")
        self._check = client.plugin.check
        self._layout = row_major(len(dims))
        self._args = abi.PJRT_Buffer_ToHostBuffer_Args(
            host_layout=ctypes.addressof(self._layout),
            dst=ctypes.addressof(self.memory),
            dst_size=nbytes_of(dtype, dims),
        )
        self._await = abi.PJRT_Event_Await_Args()
        self._drop = abi.PJRT_Event_Destroy_Args()
        self._calls = _calls(client, self._args, self._await, self._drop)

    def read(self, buffer: Buffer) -> None:
        """Copy `buffer` (of this dtype and dims) to `memory`, dense and row-major, when what makes it is done.

        Raises PjrtError, also for the work that makes it, and HandleClosed.
        """
        (start, start_args), (wait, wait_args), (drop, drop_args) = self._calls
        self._args.src = buffer._alive()
        self._args.event = None
        try:
            error = start(start_args)
            if error:
                self._check("PJRT_Buffer_ToHostBuffer", error)
        finally:  # an interrupt may arrive as a call returns: the memory is the plugin's until it is done
            failed = None
            if self._args.event:
                self._await.event = self._drop.event = self._args.event
                failed = wait(wait_args)
                drop(drop_args)
        if failed:
            self._check("PJRT_Event_Await", failed)
