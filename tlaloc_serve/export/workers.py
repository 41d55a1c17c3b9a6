"""Runs staging jobs side by side, in forked children where that is safe and worth it, else in threads.

Converting holds the interpreter lock, so threads alone would use one core. A child inherits the jobs, takes the number
of the next one from a pipe that all children share, and reports each job in a line of JSON. It ignores Ctrl-C, which is
the parent's to act on, and ends when nobody reads its reports any more, whatever becomes of the parent. The parent is
free to do other work until it asks for the results.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NoReturn

from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.staging import CONVERT_BYTES, COPY_BYTES, Job, Staged, stage

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

_WORTH_A_CHILD = 8 << 20  # bytes of output; below that the work is done before a child has begun
_NUMBER = 4  # bytes of a job's number; a pipe's reads and writes of so few are never torn
_REPORT_SECONDS = 0.05  # so that the parent is not woken for every small weight
_MOST_NUMBERS = (1 << 16) // _NUMBER  # that a pipe holds with nobody reading


class _Child:
    """A forked process that stages the jobs whose numbers it reads from `numbers`, until there are none left."""

    def __init__(self, jobs: Sequence[Job], numbers: int) -> None:
        self.reports, reports = os.pipe()
        try:
            self.pid = os.fork()
        except OSError:
            os.close(self.reports)
            os.close(reports)
            raise
        if not self.pid:
            os.close(self.reports)
            _serve(jobs, numbers, reports)
        os.close(reports)
        self._begun = b""

    def lines(self) -> list[bytes] | None:
        """The reports that are there, at least a part of one, whole lines of them; None when the child has ended."""
        data = os.read(self.reports, 1 << 16)
        *lines, self._begun = (self._begun + data).split(b"\n")
        return lines if data else None

    def close(self) -> None:
        """Kill the child and wait for it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self.reports)


class Workers:
    """A context manager over the children or threads that do `jobs`, large ones first, from the moment it is made.

    Leaving it ends those that still work.
    """

    def __init__(self, jobs: Sequence[Job], count: int):
        self._jobs = jobs
        self._children: list[_Child] = []
        self._pool: ThreadPoolExecutor | None = None
        self._futures: dict[Future[Staged], int] = {}
        order = sorted(range(len(jobs)), key=lambda index: -jobs[index].type.byte_length)
        large = sum(job.type.byte_length for job in jobs) >= _WORTH_A_CHILD
        if count > 1 and large and len(jobs) <= _MOST_NUMBERS and _may_fork():
            self._fork(order, count)
        if not self._children:
            self._start_threads(order, count)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for child in self._children:
            child.close()
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def results(self) -> Iterator[tuple[int, Staged]]:
        """Each job's index and result, as they come. Raises the first job's ExportError, or one for a dead child."""
        if self._pool is None:
            yield from self._reports()
            return
        from concurrent.futures import as_completed

        for future in as_completed(self._futures):
            yield self._futures[future], future.result()

    def _fork(self, order: Sequence[int], count: int) -> None:
        with contextlib.suppress(OSError):  # no more processes or files: those that there are will do
            numbers, source = os.pipe()
            try:
                with open(source, "wb") as file:
                    file.write(b"".join(index.to_bytes(_NUMBER, "little") for index in order))
                while len(self._children) < count:
                    self._children.append(_Child(self._jobs, numbers))
            finally:
                os.close(numbers)

    def _start_threads(self, order: Sequence[int], count: int) -> None:
        from concurrent.futures import ThreadPoolExecutor  # 8 ms, which an export with children does not need

        self._pool = ThreadPoolExecutor(count)
        self._futures = {self._pool.submit(stage, self._jobs[index]): index for index in order}

    def _reports(self) -> Iterator[tuple[int, Staged]]:
        left = set(range(len(self._jobs)))
        working = {child.reports: child for child in self._children}
        while left:
            for ready in select.select(list(working), [], [])[0]:
                lines = working[ready].lines()
                if lines is None:
                    del working[ready]
                for line in lines or ():
                    index, staged, error = json.loads(line)
                    if error is not None:
                        raise ExportError(*error)
                    left.remove(index)
                    yield index, Staged(*staged)
            if left and not working:
                raise ExportError(self._jobs[min(left)].path, "the process that wrote this weight ended")


def core_count() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _may_fork() -> bool:
    """Whether this process has one thread, those of native libraries included: only then is a fork safe."""
    try:
        return sys.platform.startswith("linux") and len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _serve(jobs: Sequence[Job], numbers: int, reports: int) -> NoReturn:
    """A child's life. A report is [index, Staged, null], or [index, null, [where, what]] of an ExportError."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        said, room = time.monotonic(), bytearray(max(COPY_BYTES, CONVERT_BYTES))
        with open(reports, "wb") as target:
            while number := os.read(numbers, _NUMBER):
                index = int.from_bytes(number, "little")
                try:
                    report: list[object] = [index, stage(jobs[index], room), None]
                except ExportError as error:
                    report = [index, None, [error.where, str(error)[len(error.where) + 2 :]]]
                target.write(json.dumps(report).encode("ascii") + b"\n")
                if time.monotonic() - said >= _REPORT_SECONDS:
                    said = time.monotonic()
                    target.flush()
        status = 0
    finally:
        os._exit(status)  # nothing of the parent's is cleaned up here
