"""Every error this package raises on purpose, in one tree. Imports nothing.

A message reads `where: what, got X, want Y; what to do`, so one line tells a user which file or flag
is at fault, what was there, and how to go on. `got`, `want` and `todo` are left out where they say nothing.
"""

from __future__ import annotations


class TlalocError(Exception):
    """Base of the tree. `where` is a path, a flag, a call: the place a user can go and look at."""

    def __init__(self, where: str, what: str, *, got: object = None, want: object = None, todo: str | None = None):
        self.where = where
        self.what = what
        message = f"{where}: {what}"
        if got is not None:
            message += f", got {got}"
        if want is not None:
            message += f", want {want}"
        if todo is not None:
            message += f"; {todo}"
        super().__init__(message)


class PluginError(TlalocError):
    """A PJRT plugin that cannot be used: no such file, not a plugin, wrong ABI, a call it lacks, a crash."""


class PjrtError(TlalocError):
    """A PJRT call returned an error. `call` is its C name, `code` the absl status code, `detail` the plugin's text."""

    def __init__(self, call: str, code: int, code_name: str, detail: str):
        self.call = call
        self.code = code
        self.code_name = code_name
        self.detail = detail
        super().__init__(call, f"{code_name}: {detail}")


class OutOfMemory(PjrtError):
    """The device (or the host allocator of the plugin) has no room: RESOURCE_EXHAUSTED."""


class HandleClosed(TlalocError):
    """A device handle was used after `close()`, or after it was donated to an execution."""


class ArtifactError(TlalocError):
    """The artifact directory is not what its manifest says, or not an artifact. `field` names the manifest's key."""

    def __init__(
        self,
        path: object,
        field: str,
        what: str,
        *,
        got: object = None,
        want: object = None,
        todo: str | None = None,
    ):
        self.path = str(path)
        self.field = field
        super().__init__(f"{path}: {field}" if field else str(path), what, got=got, want=want, todo=todo)


class CapacityError(TlalocError):
    """No ladder point or no page holds what was asked for."""


class RequestError(TlalocError):
    """The caller's fault: a token id, a length, a flag that this model cannot take."""


class EngineBroken(TlalocError):
    """A step failed after the pools were donated, so their contents are gone: the engine must be opened again."""


class TokenizerError(TlalocError):
    """A tokenizer.json that is damaged or uses a component that is not implemented, or text it cannot encode."""


class ExportError(TlalocError):
    """A checkpoint that cannot be turned into an artifact, or a place the artifact cannot be written to."""
