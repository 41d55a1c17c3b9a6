"""Compiled programs: what can be asked of one, writing it to bytes, and making the argument block that runs it.

Rules. An Executable holds the loaded program and the plain one behind it, which answers questions, and destroys both.
Closing it closes its executions. A serialised program is for the same plugin file on the same kind of machine only.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tlaloc_serve.errors import PjrtError, PluginError
from tlaloc_serve.pjrt import abi
from tlaloc_serve.pjrt.execution import Execution
from tlaloc_serve.pjrt.handles import Handle, live
from tlaloc_serve.pjrt.plugin import text_at

if TYPE_CHECKING:
    from tlaloc_serve.pjrt.client import Client

_DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Executable(Handle):
    """A program loaded on the client's devices. `name` is the module's, `num_outputs` the number of its results."""

    kind = "executables"

    def __init__(self, client: Client, handle: int):
        """Takes over `handle`, a PJRT_LoadedExecutable."""
        self._client = client
        self._executions: weakref.WeakSet[Execution] = weakref.WeakSet()
        self._handle = handle
        self._program: int | None = None  # the PJRT_Executable: what can be asked about the program
        live["executables"] += 1
        client._adopt(self)
        try:
            self._describe()
        except BaseException:
            self.close()
            raise

    def _describe(self) -> None:
        plugin = self._client.plugin
        get = abi.PJRT_LoadedExecutable_GetExecutable_Args(loaded_executable=self._handle)
        plugin.call("PJRT_LoadedExecutable_GetExecutable", get)
        self._program = get.executable
        name = abi.PJRT_Executable_Name_Args(executable=self._program)
        plugin.call("PJRT_Executable_Name", name)
        self.name: str = text_at(name.executable_name, name.executable_name_size)
        outputs = abi.PJRT_Executable_NumOutputs_Args(executable=self._program)
        plugin.call("PJRT_Executable_NumOutputs", outputs)
        self.num_outputs: int = outputs.num_outputs

    def output_types(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        """(dtype, dims) of each result; a dtype this package does not know reads `type <code>`.

        Raises PluginError where the plugin lacks the calls.
        """
        self._alive()
        plugin = self._client.plugin
        types = abi.PJRT_Executable_OutputElementTypes_Args(executable=self._program)
        plugin.call("PJRT_Executable_OutputElementTypes", types)
        shapes = abi.PJRT_Executable_OutputDimensions_Args(executable=self._program)
        plugin.call("PJRT_Executable_OutputDimensions", shapes)
        count = self.num_outputs
        if types.num_output_types != count or shapes.num_outputs != count:
            raise PluginError(
                plugin.path,
                f"{self.name}: types of the results",
                got=f"{types.num_output_types} types and {shapes.num_outputs} shapes",
                want=f"{count}",
            )
        if not count:
            return ()
        codes = (ctypes.c_int * count).from_address(types.output_types)
        ranks = tuple((ctypes.c_size_t * count).from_address(shapes.dim_sizes))
        flat = tuple((ctypes.c_int64 * sum(ranks)).from_address(shapes.dims)) if sum(ranks) else ()
        result = []
        at = 0
        for code, rank in zip(codes, ranks, strict=True):
            result.append((abi.DTYPE_NAMES.get(code, f"type {code}"), flat[at : at + rank]))
            at += rank
        return tuple(result)

    def serialize(self) -> bytes:
        """The compiled program, for `Client.deserialize` of the same plugin file on the same kind of machine."""
        self._alive()
        args = abi.PJRT_Executable_Serialize_Args(executable=self._program)
        self._client.plugin.call("PJRT_Executable_Serialize", args)
        try:
            return ctypes.string_at(args.serialized_bytes, args.serialized_bytes_size)
        finally:
            if args.serialized_executable_deleter:
                _DELETER(args.serialized_executable_deleter)(args.serialized_executable)

    def fingerprint(self) -> str | None:
        """The plugin's fingerprint of the program; None where it has none."""
        self._alive()
        plugin = self._client.plugin
        if not plugin.has("PJRT_Executable_Fingerprint"):
            return None
        args = abi.PJRT_Executable_Fingerprint_Args(executable=self._program)
        try:
            plugin.call("PJRT_Executable_Fingerprint", args)
        except PjrtError as error:
            if error.code == abi.UNIMPLEMENTED:
                return None
            raise
        return text_at(args.executable_fingerprint, args.executable_fingerprint_size)

    def execution(
        self, num_args: int, donated: Collection[int], outputs: Sequence[tuple[str, tuple[int, ...]]]
    ) -> Execution:
        """The argument block of this program: `num_args` inputs, those in `donated` consumed, `outputs` its results."""
        self._alive()
        execution = Execution(self._client, self, num_args, donated, outputs)
        self._executions.add(execution)
        return execution

    def close(self) -> None:
        if self._handle is None:
            return
        for execution in list(self._executions):
            execution.close()
        handle, self._handle = self._handle, None
        program, self._program = self._program, None
        live["executables"] -= 1
        plugin = self._client.plugin
        if program is not None:
            plugin.call("PJRT_Executable_Destroy", abi.PJRT_Executable_Destroy_Args(executable=program))
        plugin.call("PJRT_LoadedExecutable_Destroy", abi.PJRT_LoadedExecutable_Destroy_Args(executable=handle))
        self._client._disown()

    def __repr__(self) -> str:
        return f"executable {getattr(self, 'name', '')}".rstrip()
