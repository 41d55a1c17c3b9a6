"""One PJRT plugin: open the file, negotiate the version, call a function by name, turn its error into an exception.

Rules. A file is opened once a process and never unloaded (unloading a plugin crashes at exit). `struct_size` and the
version are read before any offset into the function table; every slot is bounded by `struct_size`, and a slot that is
beyond it or NULL is a `PluginError` that names the call. A PJRT_Error is read once and destroyed once, always.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from typing import Any

from tlaloc_serve.errors import OutOfMemory, PjrtError, PluginError
from tlaloc_serve.pjrt import abi, library

_opened: dict[str, Plugin] = {}
_FUNCTION = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
_VOID_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class AbiMismatch(PluginError):
    """A PJRT plugin whose ABI this package cannot drive: another version, or a table too short to have one."""


class Plugin:
    """An initialised plugin. Use `Plugin.open`; one object a file and process, so it needs no closing.

    `path` is the file as it was asked for, `api_version` the plugin's own (major, minor). `file_state` tells the file
    that was loaded from any later one at that path; None where it is not known which file that was.
    """

    def __init__(self, path: str, api: int):
        """`api` is the address of a PJRT_Api. Raises PluginError for one that this package cannot drive."""
        self.path = path
        self.file_state: library.FileState | None = None
        self._api = api
        self._functions: dict[str, Any] = {}
        size = ctypes.c_size_t.from_address(api).value
        if size < abi.FUNCTIONS_OFFSET:
            raise AbiMismatch(
                path,
                "PJRT_Api is too short to hold a version",
                got=f"{size} bytes",
                want=f"at least {abi.FUNCTIONS_OFFSET}",
                todo="use another plugin",
            )
        self._struct_size = size
        version = abi.PJRT_Api_Version.from_address(api + 16)
        self.api_version: tuple[int, int] = (int(version.major_version), int(version.minor_version))
        self._check_version()
        self.call("PJRT_Plugin_Initialize", abi.PJRT_Plugin_Initialize_Args())

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Plugin:
        """The plugin in the file `path`, loaded at the first call and remembered by its real path.

        Raises PluginError when the file cannot be loaded, is not a PJRT plugin or has an ABI this package cannot
        drive, and PjrtError when its own initialisation fails.
        """
        path = os.fspath(path)
        real = os.path.realpath(path)
        plugin = _opened.get(real)
        if plugin is None:
            before = library.file_state(real)
            plugin = _opened[real] = cls(path, library.load(path))
            plugin.file_state = before if before == library.file_state(real) else None
        return plugin

    def _check_version(self) -> None:
        major, minor = self.api_version
        want = f"{abi.MAJOR}.{abi.MIN_MINOR} or a newer {abi.MAJOR}.x"
        if major != abi.MAJOR:
            raise AbiMismatch(
                self.path,
                "PJRT API of another major version",
                got=f"{major}.{minor}",
                want=want,
                todo="use another plugin",
            )
        if minor < abi.MIN_MINOR:
            raise AbiMismatch(
                self.path, "PJRT API too old", got=f"{major}.{minor}", want=want, todo="install a newer plugin"
            )

    def has(self, name: str) -> bool:
        """Whether the plugin provides the function `name` (its C name)."""
        return bool(self._slot(name))

    def function(self, name: str) -> Any:
        """The ctypes function of the slot `name`, taking the address of an args struct whose size is filled in.

        For hot paths, which bind once and hand a returned error to `check`. Raises PluginError when it is missing.
        """
        function = self._functions.get(name)
        if function is None:
            address = self._slot(name)
            if not address:
                major, minor = self.api_version
                raise AbiMismatch(
                    self.path,
                    f"the plugin (PJRT API {major}.{minor}) does not provide {name}",
                    todo="use a newer plugin",
                )
            prototype = _VOID_FUNCTION if name in abi.VOID_FUNCTIONS else _FUNCTION
            function = self._functions[name] = prototype(address)
        return function

    def wrap(self, name: str, wrapper: Callable[[Any], Any]) -> None:
        """Put `wrapper` around the function `name` for all that bind it from now on; for measuring."""
        self._functions[name] = wrapper(self.function(name))

    def call(self, name: str, args: abi.Struct) -> None:
        """Fill `args.struct_size`, call `name`, raise PjrtError (or OutOfMemory) when it returns an error."""
        args.struct_size = abi.struct_size(type(args))
        error = self.function(name)(ctypes.addressof(args))
        if error:
            self.check(name, error)

    def check(self, call: str, error: int | None) -> None:
        """Raise the PJRT_Error at address `error`, returned by `call`, after destroying it; 0 or None is success."""
        if not error:
            return
        try:
            code, detail = self._read_error(error)
        finally:
            destroy = abi.PJRT_Error_Destroy_Args(error=error)
            self.call("PJRT_Error_Destroy", destroy)
        kind = OutOfMemory if code == abi.RESOURCE_EXHAUSTED else PjrtError
        raise kind(call, code, abi.ERROR_CODES.get(code, f"code {code}"), detail)

    def _read_error(self, error: int) -> tuple[int, str]:
        message = abi.PJRT_Error_Message_Args(error=error)
        self.call("PJRT_Error_Message", message)
        code = abi.PJRT_Error_GetCode_Args(error=error)
        code.struct_size = abi.struct_size(abi.PJRT_Error_GetCode_Args)
        nested = self.function("PJRT_Error_GetCode")(ctypes.addressof(code))
        if nested:
            # An error about reading an error: its text adds nothing, but it is ours to free.
            self.call("PJRT_Error_Destroy", abi.PJRT_Error_Destroy_Args(error=nested))
            code.code = 2
        return int(code.code), text_at(message.message, message.message_size).strip()

    def attributes(self) -> dict[str, str | int | float | bool | tuple[int, ...]]:
        """What the plugin says about itself, such as `stablehlo_current_version`; empty where it says nothing."""
        if not self.has("PJRT_Plugin_Attributes"):
            return {}
        args = abi.PJRT_Plugin_Attributes_Args()
        self.call("PJRT_Plugin_Attributes", args)
        if not args.attributes:
            return {}
        values = (abi.PJRT_NamedValue * args.num_attributes).from_address(args.attributes)
        return dict(_named_value(value) for value in values)

    def _slot(self, name: str) -> int:
        """The address in slot `name`, 0 when it is NULL or beyond the struct the plugin handed out."""
        offset = abi.FUNCTIONS_OFFSET + abi.POINTER_SIZE * abi.SLOTS[name]
        if offset + abi.POINTER_SIZE > self._struct_size:
            return 0
        return ctypes.c_void_p.from_address(self._api + offset).value or 0


def text_at(address: int | None, size: int) -> str:
    """The UTF-8 text of `size` bytes at `address`; bytes that are not UTF-8 are replaced."""
    return ctypes.string_at(address, size).decode("utf-8", "replace") if address and size else ""


def _named_value(value: Any) -> tuple[str, str | int | float | bool | tuple[int, ...]]:
    name = ctypes.string_at(value.name, value.name_size).decode("utf-8", "replace")
    if value.type == abi.NAMED_STRING:
        return name, text_at(value.int64_array_value, value.value_size)
    if value.type == abi.NAMED_INT64:
        return name, int(value.int64_value)
    if value.type == abi.NAMED_INT64_LIST:
        size = value.value_size
        return name, tuple((ctypes.c_int64 * size).from_address(value.int64_array_value)) if size else ()
    if value.type == abi.NAMED_FLOAT:
        return name, float(value.float_value)
    if value.type == abi.NAMED_BOOL:
        return name, bool(value.bool_value)
    return name, f"(a value of unknown type {value.type})"
