"""Device buffers and the events that say when work on them is done.

Rules. A Buffer is one PJRT_Buffer with the dtype and dims of its dense row-major host form. Donated to an execution,
it refuses every use but `close()` (or new contents, see `Execution.give`). Host memory that the plugin may still
touch is pinned by the Buffer or Event that stands for that work, and let go when the plugin says it is done.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import TYPE_CHECKING

from tlaloc_serve.errors import HandleClosed, PjrtError, PluginError, RequestError
from tlaloc_serve.pjrt import abi
from tlaloc_serve.pjrt.handles import Handle, live
from tlaloc_serve.pjrt.host import HostView, nbytes_of, row_major

if TYPE_CHECKING:
    from tlaloc_serve.pjrt.client import Client
    from tlaloc_serve.pjrt.execution import Execution


class Event(Handle):
    """Work in flight: `wait()` returns when it is done and raises the error it ended with.

    `view` is host memory that the work reads or writes; closing the event waits for the work before letting go of it.
    An event that belongs to a buffer (`owned`) is closed by it, after the buffer's own handle: until then it may not
    even fire.
    """

    kind = "events"

    def __init__(self, client: Client, handle: int, view: HostView | None = None, *, owned: bool = False):
        self._client = client
        self._view = view
        self._handle = handle
        live["events"] += 1
        self._owned = owned
        if not owned:
            client._adopt(self)

    def wait(self) -> None:
        """Block until the work is done; raises PjrtError when it failed."""
        args = abi.PJRT_Event_Await_Args(event=self._alive())
        self._client.plugin.call("PJRT_Event_Await", args)
        self._let_go()

    def is_ready(self) -> bool:
        """Whether the work is done, failed or not; never blocks."""
        args = abi.PJRT_Event_IsReady_Args(event=self._alive())
        self._client.plugin.call("PJRT_Event_IsReady", args)
        return bool(args.is_ready)

    def close(self) -> None:
        if self._handle is None:
            return
        if self._view is not None:
            try:
                self.wait()
            except PjrtError:
                self._let_go()  # failed work is finished work: nobody asked how it ended
        handle, self._handle = self._handle, None
        live["events"] -= 1
        self._client.plugin.call("PJRT_Event_Destroy", abi.PJRT_Event_Destroy_Args(event=handle))
        if not self._owned:
            self._client._disown()

    def _let_go(self) -> None:
        if self._view is not None:
            self._view.release()
            self._view = None

    def __repr__(self) -> str:
        return "event"


class Buffer(Handle):
    """An array on a device. `dtype` and `dims` describe it, `nbytes` is the size of its dense row-major host form."""

    kind = "buffers"
    _moves = False  # whether executions give outputs to it
    _holders: tuple[weakref.ref[Execution], ...] = ()  # the executions to tell when this is closed

    def __init__(self, client: Client, handle: int, dtype: str, dims: tuple[int, ...], host: Event | None = None):
        """Takes over `handle`; `host` is the done-with-host-memory event of a buffer made from host memory."""
        self._client = client
        self._spec = (dtype, dims)
        self._host = host
        self._spent: int | None = None  # the handle of a donated buffer: dead, but still to be destroyed
        self._handle = handle
        live["buffers"] += 1
        client._adopt(self)

    @property
    def dtype(self) -> str:
        return self._spec[0]

    @property
    def dims(self) -> tuple[int, ...]:
        return self._spec[1]

    @property
    def nbytes(self) -> int:
        return nbytes_of(*self._spec)

    @property
    def closed(self) -> bool:
        """True once the handle is destroyed. A donated buffer is not closed: it still has to be."""
        return self._handle is None and self._spent is None

    @property
    def donated(self) -> bool:
        """True from the execution that consumed this buffer until it is closed or given new contents."""
        return self._spent is not None

    def _alive(self) -> int:
        if self._handle is None:
            raise HandleClosed(repr(self), "used after it was donated" if self.donated else "used after close()")
        return self._handle

    def start_read(self, memory: object) -> Event:
        """Start copying the whole buffer into `memory` (writable, exactly `nbytes` bytes), dense and row-major.

        `memory` is pinned until the returned event has been waited for or closed.
        """
        view = HostView(memory, writable=True)
        if view.nbytes != self.nbytes:
            raise RequestError(
                repr(self), "read into memory of another size", got=f"{view.nbytes} bytes", want=f"{self.nbytes}"
            )
        args = abi.PJRT_Buffer_ToHostBuffer_Args(
            src=self._alive(),
            host_layout=ctypes.addressof(row_major(len(self.dims))),
            dst=view.address,
            dst_size=view.nbytes,
        )
        self._client.plugin.call("PJRT_Buffer_ToHostBuffer", args)
        return Event(self._client, args.event, view)

    def read_into(self, memory: object) -> None:
        """Copy the whole buffer into `memory` (writable, exactly `nbytes` bytes) and wait for it."""
        with self.start_read(memory) as event:
            event.wait()

    def to_bytes(self) -> bytes:
        """The dense row-major contents, little-endian as the device has them."""
        memory = bytearray(self.nbytes)
        self.read_into(memory)
        return bytes(memory)

    @property
    def can_read_range(self) -> bool:
        """Whether the plugin provides the call behind `read_range`; the call itself may still be refused."""
        return self._client.plugin.has("PJRT_Buffer_CopyRawToHost")

    def read_range(self, offset: int, memory: object) -> None:
        """Copy the bytes from `offset` on, as many as `memory` (writable) holds, in the device's own layout.

        Only meaningful where that layout is dense row-major, as it is on CPU and GPU. Raises PluginError when the
        plugin lacks the call, RequestError for a range outside the buffer.
        """
        if not self.can_read_range:
            raise PluginError(
                self._client.plugin.path,
                "the plugin does not provide PJRT_Buffer_CopyRawToHost",
                todo="read the whole buffer",
            )
        view = HostView(memory, writable=True)
        if offset < 0 or offset + view.nbytes > self.nbytes:
            raise RequestError(
                repr(self),
                "read outside the buffer",
                got=f"bytes {offset} to {offset + view.nbytes}",
                want=f"within 0 to {self.nbytes}",
            )
        args = abi.PJRT_Buffer_CopyRawToHost_Args(
            buffer=self._alive(), dst=view.address, offset=offset, transfer_size=view.nbytes
        )
        self._client.plugin.call("PJRT_Buffer_CopyRawToHost", args)
        with Event(self._client, args.event, view) as event:
            event.wait()

    def is_deleted(self) -> bool:
        """The plugin's own word on whether the contents are gone; may be asked of a donated buffer too."""
        args = abi.PJRT_Buffer_IsDeleted_Args(buffer=self._spent if self.donated else self._alive())
        self._client.plugin.call("PJRT_Buffer_IsDeleted", args)
        return bool(args.is_deleted)

    def pointer_on_device(self) -> int:
        """The address of the contents in the device's memory; it says whether a buffer was moved, no more."""
        args = abi.PJRT_Buffer_UnsafePointer_Args(buffer=self._alive())
        self._client.plugin.call("PJRT_Buffer_UnsafePointer", args)
        return int(args.buffer_pointer)

    def close(self) -> None:
        handle = self._handle if self._spent is None else self._spent
        if handle is None:
            return
        self._handle = self._spent = None
        self._client._moves += self._moves
        self._tell_holders()
        live["buffers"] -= 1
        try:
            self._client.plugin.call("PJRT_Buffer_Destroy", abi.PJRT_Buffer_Destroy_Args(buffer=handle))
        finally:
            self._release_host()
            self._client._disown()

    def _tell_holders(self) -> None:
        """The handle that executions hold has changed."""
        for holder in self._holders:
            execution = holder()
            if execution is not None:
                execution._held_are_written = False

    def _release_host(self) -> None:
        """Wait until the plugin is done with the host memory this buffer was made from, and let go of it."""
        if self._host is not None:
            host, self._host = self._host, None
            host.close()

    def _host_is_done(self) -> bool:
        """Let go of host memory whose transfer is over; True when there is none left to wait for."""
        if self._host is None:
            return True
        if not self._host.is_ready():
            return False
        self._release_host()
        return True

    def __repr__(self) -> str:
        return f"buffer {self.dtype}[{','.join(map(str, self.dims))}]"
