"""What appears on the screen while a run goes on: progress, lines, and streamed text in the order of the prompts."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import TextIO

from tlaloc_serve.app.report import size_text

# What a terminal would obey: control characters but line feed and tab. Shown as an escape, as in \x1b.
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


class Progress:
    """One line on a terminal while weights are staged; silent where stderr is not one."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, done: int, total: int) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            self._shown = True
            text = f"staging {size_text(done)} of {size_text(total)}"
            # A line that wraps could not be written over.
            width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
            print(f"\r{text[: max(width, 0)]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._shown:
            self._shown = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


class LiveText:
    """The texts of a run's sequences as they come; a context manager that ends the last line.

    One text at a time, in the order of the prompts: what the others have so far waits for its turn. Several are
    headed by their numbers.
    """

    def __init__(self, count: int, out: TextIO):
        self._count = count
        self._out = out
        self._terminal = out.isatty()
        self._current = -1
        self._waiting = [""] * count
        self._ended = [False] * count
        self._open_line = False

    def __enter__(self) -> LiveText:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not isinstance(error, BrokenPipeError):
            self._end_line()

    def add(self, sequence: int, text: str) -> None:
        self._begin()
        if sequence == self._current:
            self._write(text)
        else:
            self._waiting[sequence] += text

    def end(self, sequence: int) -> None:
        """No text of this sequence follows."""
        self._begin()
        self._ended[sequence] = True
        while self._current < self._count and self._ended[self._current]:
            self._end_line()
            self._write("\n")
            self._next()

    def _begin(self) -> None:
        if self._current < 0:
            self._write("\n")
            self._next()

    def _next(self) -> None:
        self._current += 1
        if self._current < self._count:
            if self._count > 1:
                self._write(f"[{self._current}]\n")
            self._write(self._waiting[self._current])

    def _end_line(self) -> None:
        if self._open_line:
            self._write("\n")

    def _write(self, text: str) -> None:
        if text:
            self._open_line = not text.endswith("\n")
            self._out.write(text.translate(_CONTROLS) if self._terminal else text)
            self._out.flush()
