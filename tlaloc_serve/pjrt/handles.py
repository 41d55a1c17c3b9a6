"""The one lifetime rule of every device handle.

`close()` may be called any number of times; a handle is a context manager; using it after `close()` raises
`HandleClosed`; a handle that is collected without having been closed says so with a `ResourceWarning` and is
destroyed then. A client closes what is left of its children before itself, so nothing outlives it.
"""

from __future__ import annotations

import sys
import warnings
from types import TracebackType
from typing import ClassVar, TypeVar

from tlaloc_serve.errors import HandleClosed

# Handles created minus handles destroyed, by kind. Donated and replaced buffers count until their handle is destroyed.
live: dict[str, int] = {"clients": 0, "executables": 0, "buffers": 0, "events": 0}

_Self = TypeVar("_Self", bound="Handle")


class Handle:
    """Base of Client, Executable, Buffer and Event. `_handle` is the C pointer, None once it cannot be used."""

    kind: ClassVar[str]
    _handle: int | None = None

    @property
    def closed(self) -> bool:
        """True once the handle is destroyed."""
        return self._handle is None

    def close(self) -> None:
        """Destroy the handle; nothing happens when that was done before."""
        raise NotImplementedError

    def _alive(self) -> int:
        """The C pointer, or HandleClosed."""
        if self._handle is None:
            raise HandleClosed(repr(self), "used after close()")
        return self._handle

    def __enter__(self: _Self) -> _Self:
        self._alive()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # At interpreter exit the modules that close() needs may be gone, and the process frees everything anyway.
        if self.closed or sys.is_finalizing():
            return
        warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)
        self._abandon()

    def _abandon(self) -> None:
        """What becomes of a handle that was collected without having been closed."""
        self.close()
