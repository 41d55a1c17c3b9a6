"""Host memory as an address: any C-contiguous buffer object, read-only ones too, pinned while a plugin may touch it.

Rules. Nothing is copied. While a `HostView` is open the object behind it cannot be resized, unmapped or collected
(an mmap refuses `close()` with BufferError), so it is released only when the plugin is done with the memory.
"""

from __future__ import annotations

import ctypes
import functools
import math

from tlaloc_serve.errors import RequestError
from tlaloc_serve.pjrt import abi


class _PyBuffer(ctypes.Structure):
    """`Py_buffer` of CPython's stable ABI."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_SIMPLE = 0  # PyBUF_SIMPLE: plain bytes, C-contiguous, may be read-only
_WRITABLE = 1  # PyBUF_WRITABLE

_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.c_void_p, ctypes.c_int)
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.c_void_p,)
_release_buffer.restype = None

# What an empty buffer points at: some plugins refuse a NULL even for zero bytes.
_nothing = ctypes.create_string_buffer(64)


class HostView:
    """The memory of `data`: `address` and `nbytes`, valid until `release()`.

    Raises RequestError when `data` is not C-contiguous memory, or is read-only and `writable` was asked for.
    """

    def __init__(self, data: object, *, writable: bool = False):
        self._view: _PyBuffer | None = None
        view = _PyBuffer()
        try:
            _get_buffer(data, ctypes.addressof(view), _WRITABLE if writable else _SIMPLE)
        except (BufferError, TypeError, ValueError) as error:
            raise RequestError(
                "host memory",
                "cannot be used by a plugin",
                got=f"{type(data).__name__} ({error})",
                want=f"{'writable, ' if writable else ''}C-contiguous memory",
            ) from None
        self._view = view
        self.nbytes: int = view.len
        self.address: int = view.buf if view.buf and view.len else ctypes.addressof(_nothing)

    def release(self) -> None:
        """Let go of the memory; may be called more than once."""
        view, self._view = self._view, None
        if view is not None:
            _release_buffer(ctypes.addressof(view))

    def __del__(self) -> None:
        self.release()


def element_type(dtype: str) -> tuple[int, int]:
    """PJRT_Buffer_Type and bytes an element of `dtype`; RequestError for a name this package does not know."""
    try:
        return abi.DTYPES[dtype]
    except KeyError:
        raise RequestError("dtype", "unknown", got=repr(dtype), want=", ".join(abi.DTYPES)) from None


def nbytes_of(dtype: str, dims: tuple[int, ...]) -> int:
    """Bytes of a dense array of `dtype` and `dims`."""
    return element_type(dtype)[1] * math.prod(dims)


@functools.lru_cache(maxsize=1024)
def int64_array(values: tuple[int, ...]) -> ctypes.Array[ctypes.c_int64]:
    """A C array of `values`, shared by everybody who asks for the same ones: plugins only read it."""
    return (ctypes.c_int64 * max(1, len(values)))(*values)


@functools.lru_cache(maxsize=32)
def row_major(rank: int) -> abi.PJRT_Buffer_MemoryLayout:
    """The dense row-major layout of `rank` dimensions: the last one varies fastest, no tiles."""
    order = int64_array(tuple(reversed(range(rank))))
    tiled = abi.PJRT_Buffer_MemoryLayout_Tiled(
        struct_size=abi.struct_size(abi.PJRT_Buffer_MemoryLayout_Tiled),
        minor_to_major=ctypes.addressof(order),
        minor_to_major_size=rank,
    )
    layout = abi.PJRT_Buffer_MemoryLayout(
        struct_size=abi.struct_size(abi.PJRT_Buffer_MemoryLayout), tiled=tiled, type=abi.LAYOUT_TILED
    )
    layout.order = order  # the struct holds a bare address: keep what it points to
    return layout
