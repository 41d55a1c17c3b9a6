"""The reusable argument block that runs a compiled program.

Rules. An `Execution` is built once an entry: its C arrays live as long as it does and a step only writes the pointers
of arguments that change. Between two steps a model's weights have emptied the caches, so each object that a step
touches is fetched from memory: what can stay as it is, a step does not look at.
Inputs it was told are donated are consumed by every run, failed or not; all others are listed as not donatable.
Outputs belong to the execution until they are taken or given away; the next run destroys what is left.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from tlaloc_serve.errors import HandleClosed, OutOfMemory, RequestError
from tlaloc_serve.pjrt import abi
from tlaloc_serve.pjrt.buffer import Buffer
from tlaloc_serve.pjrt.handles import Handle, live
from tlaloc_serve.pjrt.host import int64_array

if TYPE_CHECKING:
    from tlaloc_serve.pjrt.client import Client
    from tlaloc_serve.pjrt.executable import Executable


class _Unbound:
    """Stands in an argument list for an argument that nobody bound."""

    _handle: int | None = None


_UNBOUND = _Unbound()


class Execution(Handle):
    """One program's inputs and outputs, reused by every run. Made by `Executable.execution`.

    Raises RequestError when `outputs` are not the program's own, since the plugin writes as many pointers as it has.
    """

    kind = "executions"

    def __init__(
        self,
        client: Client,
        executable: Executable,
        num_args: int,
        donated: Collection[int],
        outputs: Sequence[tuple[str, tuple[int, ...]]],
    ):
        self._client = client
        self._executable = executable
        self._specs = [(dtype, tuple(dims)) for dtype, dims in outputs]
        self._donated = sorted(set(donated))
        self._check(num_args)
        self._bound: list[Buffer | _Unbound] = [_UNBOUND] * num_args
        self._moving = tuple(range(num_args))  # the arguments that are not held
        self._held_are_written = True  # False once a held buffer was closed or got another handle
        self._given: Sequence[tuple[int, Buffer]] = ()
        self._given_arguments: tuple[int | None, ...] = ()
        self._others = self._moving  # the moving arguments that are not given to
        self._gave_at = -1  # the client's count of moves after this object's last `give`
        self._arguments = (ctypes.c_void_p * max(1, num_args))()
        self._outputs = (ctypes.c_void_p * max(1, len(outputs)))()  # NULL where somebody has taken the output
        self._all_taken = bytes(self._outputs)
        self._complete = (ctypes.c_void_p * 1)()
        self._lists = (ctypes.c_void_p * 2)(ctypes.addressof(self._arguments), ctypes.addressof(self._outputs))
        kept = tuple(index for index in range(num_args) if index not in set(self._donated))
        self._kept = int64_array(kept)
        self._options = abi.PJRT_ExecuteOptions(
            struct_size=abi.struct_size(abi.PJRT_ExecuteOptions),
            non_donatable_input_indices=ctypes.addressof(self._kept),
            num_non_donatable_input_indices=len(kept),
        )
        self._args = abi.PJRT_LoadedExecutable_Execute_Args(
            struct_size=abi.struct_size(abi.PJRT_LoadedExecutable_Execute_Args),
            executable=executable._alive(),
            options=ctypes.addressof(self._options),
            argument_lists=ctypes.addressof(self._lists),
            num_devices=1,
            num_args=num_args,
            output_lists=ctypes.addressof(self._lists) + abi.POINTER_SIZE,
        )
        self._complete_address = ctypes.addressof(self._complete)
        self._args_address = ctypes.addressof(self._args)
        self._destroy_args = abi.PJRT_Buffer_Destroy_Args(struct_size=abi.struct_size(abi.PJRT_Buffer_Destroy_Args))
        self._destroy_address = ctypes.addressof(self._destroy_args)
        self._execute = client.plugin.function("PJRT_LoadedExecutable_Execute")
        self._destroy = client.plugin.function("PJRT_Buffer_Destroy")
        self._handle = self._args.executable
        client._adopt(self)

    def _check(self, num_args: int) -> None:
        executable = self._executable
        outside = [index for index in self._donated if not 0 <= index < num_args]
        if outside:
            raise RequestError(repr(executable), "donated inputs", got=outside, want=f"indices under {num_args}")
        if len(self._specs) != executable.num_outputs:
            raise RequestError(
                repr(executable),
                "number of outputs",
                got=len(self._specs),
                want=f"{executable.num_outputs}, as compiled",
            )
        plugin = self._client.plugin
        if not (plugin.has("PJRT_Executable_OutputElementTypes") and plugin.has("PJRT_Executable_OutputDimensions")):
            return
        for index, (given, compiled) in enumerate(zip(self._specs, executable.output_types(), strict=True)):
            if given != compiled:
                raise RequestError(
                    repr(executable), f"type of output {index}", got=given, want=f"{compiled}, as compiled"
                )

    def bind(self, index: int, buffer: Buffer) -> None:
        """Use `buffer` as argument `index` from the next run on. A bound Buffer may get new contents in between."""
        self._check_argument(index, buffer)
        if index not in self._moving:
            self._moving = tuple(sorted((*self._moving, index)))
        elif index in self._others:
            self._bound[index] = buffer
            return
        self._bound[index] = buffer
        self._find_given()

    def hold(self, *arguments: tuple[int, Buffer]) -> None:
        """As `bind` for each (index, buffer), for buffers that keep their contents: a run does not look at them again.

        A donated input cannot be held. Closing a held buffer makes the next run refuse, as with a bound one.
        """
        for index, buffer in arguments:
            self._check_argument(index, buffer)
            if index in self._donated:
                raise RequestError(repr(self._executable), f"argument {index} is donated by every run", todo="bind it")
            self._bound[index] = buffer
            self._arguments[index] = buffer._alive()
            buffer._holders = (*buffer._holders, weakref.ref(self))
        held = {index for index, _ in arguments}
        self._moving = tuple(index for index in self._moving if index not in held)
        self._find_given()

    def _check_argument(self, index: int, buffer: Buffer) -> None:
        if buffer._client is not self._client:
            raise RequestError(repr(self._executable), f"argument {index} is a buffer of another client")
        if not 0 <= index < len(self._bound):
            raise RequestError(repr(self._executable), "argument index", got=index, want=f"under {len(self._bound)}")
        buffer._alive()

    def run(self, awaited: bool = True) -> None:
        """Execute with the bound buffers; the outputs may still be in flight when it returns.

        `wait` waits for them after an `awaited` run; otherwise reading an output does. Raises HandleClosed, naming the
        argument, when one is unbound, closed or donated (nothing is run then), and PjrtError when the plugin refuses or
        fails; the donated inputs are gone after that too.
        """
        self._alive()
        self._drop_results()
        bound, arguments = self._bound, self._arguments
        # What the last `give` wrote still stands in the arguments where no buffer has been given to or closed since.
        moving = self._others if self._gave_at == self._client._moves else self._moving
        handles = [bound[index]._handle for index in moving]
        if None in handles or not self._held_are_written:
            self._raise_dead_argument()
            for index in set(range(len(bound))) - set(self._moving):
                arguments[index] = bound[index]._handle
            self._held_are_written = True
        for index, handle in zip(moving, handles, strict=True):
            arguments[index] = handle
        self._args.device_complete_events = self._complete_address if awaited else None
        error = None
        try:
            error = self._execute(self._args_address)
        finally:  # an interrupt may arrive as the call returns
            self._client._moves += bool(self._donated)
            for index in self._donated:
                buffer = bound[index]
                if isinstance(buffer, Buffer) and buffer._handle is not None:
                    buffer._spent = buffer._handle
                    buffer._handle = None
                    if buffer._holders:
                        buffer._tell_holders()
            if not error:
                live["buffers"] += len(self._specs) if bytes(self._outputs) != self._all_taken else 0
                live["events"] += self._complete[0] is not None
        if error:
            self._fail(error)

    def wait(self) -> None:
        """Block until the device has finished the last run; raises PjrtError when it failed there."""
        self._alive()
        event = self._complete[0]
        if event is not None:
            try:
                self._client.plugin.call("PJRT_Event_Await", abi.PJRT_Event_Await_Args(event=event))
            finally:
                self._drop_event()

    def take(self, index: int) -> Buffer:
        """Output `index` of the last run as a Buffer of its own."""
        handle = self._pull(index)
        live["buffers"] -= 1  # counted by run(); the Buffer counts it again
        return Buffer(self._client, handle, *self._specs[index])

    def give(self, pairs: Sequence[tuple[int, Buffer]]) -> None:
        """Make output `index` of the last run the contents of `buffer`, for each (index, buffer) of `pairs`.

        What the buffer had before is destroyed. So an array that is updated every step, a pool, stays one Buffer that
        stays bound. `pairs` is checked once: pass the same object every step, and do not change it.
        """
        if pairs is not self._given:
            self._check_given(pairs)
        self._client._moves += 1
        outputs, destroy, args, address = self._outputs, self._destroy, self._destroy_args, self._destroy_address
        for (index, buffer), argument in zip(pairs, self._given_arguments, strict=True):
            old = buffer._handle if buffer._spent is None else buffer._spent
            if old is None:
                raise HandleClosed(repr(buffer), "given an output after close()")
            new = outputs[index]
            if new is None:
                raise self._no_output(index)
            # The handle changes hands without a call in between, where an interrupt could lose it.
            buffer._handle = new
            outputs[index] = None
            buffer._spent = None
            if argument is not None:
                self._arguments[argument] = buffer._handle
            args.buffer = old
            live["buffers"] -= 1
            error = destroy(address)
            if error:
                self._client.plugin.check("PJRT_Buffer_Destroy", error)
            if buffer._host is not None:
                buffer._release_host()
            if buffer._holders:
                buffer._tell_holders()
        self._gave_at = self._client._moves

    def _check_given(self, pairs: Sequence[tuple[int, Buffer]]) -> None:
        for index, buffer in pairs:
            if not 0 <= index < len(self._specs) or buffer._spec != self._specs[index]:
                want = f"a buffer of {self._specs[index]}" if 0 <= index < len(self._specs) else "an output"
                raise RequestError(repr(self._executable), f"output {index} given to {buffer!r}", want=want)
            buffer._moves = True
        self._given = pairs
        self._find_given()

    def _find_given(self) -> None:
        """Which arguments are bound to the buffers that are given to."""
        places = {id(buffer): index for index, buffer in enumerate(self._bound)}
        self._given_arguments = tuple(places.get(id(buffer)) for _, buffer in self._given)
        self._others = tuple(index for index in self._moving if index not in self._given_arguments)
        self._gave_at = -1

    def _pull(self, index: int) -> int:
        """The handle of output `index`, which is no longer this object's to destroy."""
        self._alive()
        handle = self._outputs[index] if 0 <= index < len(self._specs) else None
        if handle is None:
            raise self._no_output(index)
        self._outputs[index] = None
        return handle

    def _no_output(self, index: int) -> HandleClosed:
        return HandleClosed(repr(self), f"output {index} was already taken, or no run produced it")

    def _destroy_buffer(self, handle: int) -> None:
        self._destroy_args.buffer = handle
        live["buffers"] -= 1
        error = self._destroy(self._destroy_address)
        if error:
            self._client.plugin.check("PJRT_Buffer_Destroy", error)

    def _drop_results(self) -> None:
        """Destroy what is left of the last run. The arrays say what that is, also after an interrupted one."""
        if bytes(self._outputs) != self._all_taken:
            for index, handle in enumerate(self._outputs):
                if handle is not None:
                    self._outputs[index] = None
                    self._destroy_buffer(handle)
        if self._complete[0] is not None:
            self._drop_event()

    def _drop_event(self) -> None:
        event, self._complete[0] = self._complete[0], None
        live["events"] -= 1
        self._client.plugin.call("PJRT_Event_Destroy", abi.PJRT_Event_Destroy_Args(event=event))

    def _raise_dead_argument(self) -> None:
        for index, buffer in enumerate(self._bound):
            if buffer._handle is None:
                what = f"argument {index} is not bound"
                if isinstance(buffer, Buffer):
                    state = "was donated and not given new contents" if buffer.donated else "is closed"
                    what = f"argument {index}, {buffer!r}, {state}"
                raise HandleClosed(repr(self), what)

    def _fail(self, error: int) -> None:
        for index in range(len(self._specs)):
            self._outputs[index] = None
        self._complete[0] = None
        try:
            self._client.plugin.check("PJRT_LoadedExecutable_Execute", error)
        except OutOfMemory as out:
            self._client.out_of_memory(out)

    def close(self) -> None:
        """Destroy the outputs that nobody took; the bound buffers are not this object's and stay as they are."""
        if self._handle is None:
            return
        self._drop_results()
        self._handle = None
        self._bound = []
        self._client._disown()

    def __repr__(self) -> str:
        return f"execution of {self._executable!r}"
