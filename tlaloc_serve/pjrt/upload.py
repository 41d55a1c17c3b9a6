"""A small array that is sent to the device again and again: the hot path's inputs.

Rules. `memory` belongs to the caller between two sends. The plugin copies it during the call, so it may be written
again at once. The Buffer stays the same object, and stays bound, while its handle changes with every send.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from tlaloc_serve.pjrt import abi
from tlaloc_serve.pjrt.buffer import Buffer
from tlaloc_serve.pjrt.handles import live
from tlaloc_serve.pjrt.host import element_type, int64_array, nbytes_of

if TYPE_CHECKING:
    from tlaloc_serve.pjrt.client import Client


class Upload:
    """Host memory of `dtype` and `dims` and the device buffer that `send` fills from it.

    The args structs are built once: a send costs about 10 us of Python where `buffer_from_host` costs 25 and more.
    """

    def __init__(self, client: Client, dtype: str, dims: tuple[int, ...]):
        self.memory = (ctypes.c_char * max(1, nbytes_of(dtype, dims)))()
        self.buffer: Buffer = client.buffer_from_host(self.memory, dtype, dims)
        self._check = client.plugin.check
        self._dims = int64_array(dims)
        self._args = abi.PJRT_Client_BufferFromHostBuffer_Args(
            struct_size=abi.struct_size(abi.PJRT_Client_BufferFromHostBuffer_Args),
            client=client._alive(),
            data=ctypes.addressof(self.memory),
            type=element_type(dtype)[0],
            dims=ctypes.addressof(self._dims),
            num_dims=len(dims),
            host_buffer_semantics=abi.IMMUTABLE_ONLY_DURING_CALL,
            device=client.devices[0]._handle,
        )
        self._event = abi.PJRT_Event_Destroy_Args(struct_size=abi.struct_size(abi.PJRT_Event_Destroy_Args))
        self._old = abi.PJRT_Buffer_Destroy_Args(struct_size=abi.struct_size(abi.PJRT_Buffer_Destroy_Args))
        self._calls = (
            (client.plugin.function("PJRT_Client_BufferFromHostBuffer"), ctypes.addressof(self._args)),
            (client.plugin.function("PJRT_Event_Destroy"), ctypes.addressof(self._event)),
            (client.plugin.function("PJRT_Buffer_Destroy"), ctypes.addressof(self._old)),
        )

    def send(self) -> None:
        """Make what stands in `memory` the contents of `buffer`. Raises PjrtError, and HandleClosed after close()."""
        (make, make_args), (drop_event, event_args), (drop_old, old_args) = self._calls
        self._old.buffer = self.buffer._alive()
        error = make(make_args)
        if error:
            self._check("PJRT_Client_BufferFromHostBuffer", error)
        self.buffer._handle = self._args.buffer
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
