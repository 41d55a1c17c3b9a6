"""What crosses to the host of a step's logits: an id a row, candidates a row, or, when asked for, a whole row.

Owns the selection programs, one for each (logits type, purpose), and the host memory they are read into.
"""

from __future__ import annotations

import contextlib
import functools
import struct
from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tlaloc_serve.artifact.manifest import TensorType
from tlaloc_serve.engine.sampling import Candidates, Row
from tlaloc_serve.engine.selection import CANDIDATES, argmax_body, candidates_body
from tlaloc_serve.pjrt.client import Buffer, Client, Executable, Execution
from tlaloc_serve.pjrt.transfer import Download

Compile = Callable[[bytes, str], Executable]


class Chosen(NamedTuple):
    """The greedy id of each row: `buffer` i32 [B, 1] on the device, `ids` the same on the host."""

    buffer: Buffer
    ids: list[int]


class LogitsReader:
    """Selects on the device and reads the selection. `compile` turns a body and its name into an executable."""

    def __init__(self, client: Client, compile: Compile):
        self.compiles = 0
        self._client = client
        self._compile = compile
        self._chosen: Chosen | None = None
        self._programs: dict[tuple[TensorType, str], tuple[Execution, Download]] = {}
        self._stack = contextlib.ExitStack()

    def close(self) -> None:
        """Destroy the programs and what they chose; idempotent."""
        self.forget()
        self._programs.clear()
        self._stack.close()

    def greedy(self, logits: Buffer, kind: TensorType) -> Chosen:
        """The argmax of each row of `logits`, or NAN_ROW for a row that holds a NaN. Valid until the next call."""
        execution, memory = self._program(kind, "argmax")
        execution.bind(0, logits)
        self.forget()
        execution.run(awaited=False)
        buffer = execution.take(0)
        self._chosen = Chosen(buffer, [])
        memory.read(buffer)
        self._chosen.ids.extend(memory.data.cast("i"))
        return self._chosen

    def forget(self) -> None:
        """Destroy what `greedy` chose last."""
        if self._chosen is not None:
            self._chosen.buffer.close()
            self._chosen = None

    def candidates(self, logits: Buffer, kind: TensorType, temperatures: Sequence[float | None]) -> list[Candidates]:
        """The largest logits of each row with a temperature; those of the other rows come along, with mass at 1.0."""
        batch, _, vocab = kind.dims
        execution, memory = self._program(kind, "candidates")
        heat = array("f", [temperature or 1.0 for temperature in temperatures] + [1.0] * (batch - len(temperatures)))
        with self._client.buffer_from_host(heat, "f32", (batch,)) as temperature:
            execution.bind(0, logits)
            execution.bind(1, temperature)
            execution.run(awaited=False)
            with execution.take(0) as buffer:
                memory.read(buffer)
        ints, floats = memory.data.cast("i"), memory.data.cast("f")
        count = min(CANDIDATES, vocab)
        found = []
        for number in range(len(temperatures)):
            begin = number * (2 * count + 1)
            middle, end = begin + count, begin + 2 * count
            row = functools.partial(self.row, logits, kind, number)
            found.append(Candidates(list(ints[middle:end]), list(floats[begin:middle]), floats[end], row))
        return found

    @staticmethod
    def row(logits: Buffer, kind: TensorType, number: int) -> Row:
        """One row of `logits` as f32 [vocab]; alone where the plugin can read a part of a buffer."""
        size = logits.nbytes // logits.dims[0]
        if logits.can_read_range:
            data = bytearray(size)
            logits.read_range(number * size, data)
        else:
            whole = bytearray(logits.nbytes)
            logits.read_into(whole)
            data = whole[number * size : (number + 1) * size]
        return _as_f32(data, kind.dtype)

    def _program(self, kind: TensorType, purpose: str) -> tuple[Execution, Download]:
        program = self._programs.get((kind, purpose))
        if program is None:
            batch, _, vocab = kind.dims
            count = min(CANDIDATES, vocab)
            if purpose == "argmax":
                body, arguments = argmax_body(kind), 1
                dims = (batch, 1)
            else:
                body, arguments, dims = candidates_body(kind, count), 2, (batch, 2 * count + 1)
            executable = self._stack.enter_context(self._compile(body, f"the {purpose} over {kind}"))
            execution = self._stack.enter_context(executable.execution(arguments, frozenset(), [("i32", dims)]))
            program = self._programs[kind, purpose] = (execution, Download(self._client, "i32", dims))
            self.compiles += 1
        return program


def _as_f32(data: bytearray, dtype: str) -> Row:
    if dtype == "f16":
        return array("f", struct.unpack(f"<{len(data) // 2}e", data))
    if dtype == "bf16":
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = data[0::2], data[1::2]
        data = wide
    row = array("f")
    row.frombytes(data)
    return row
