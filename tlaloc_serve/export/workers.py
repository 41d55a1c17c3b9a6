"""Runs staging jobs side by side: a thread a core, each with a forked child that does its jobs.

Converting holds the interpreter lock, so threads alone would use one core. A child does nothing but read pickled jobs
from a pipe and write files; it ignores Ctrl-C, which is the parent's to act on, and ends when the pipe closes, whatever
becomes of the parent. A process may only be forked safely while it has one thread: where it has more, and for little
work, the jobs run in the threads themselves.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NoReturn

from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.staging import Job, Staged, stage

_WORTH_A_CHILD = 8 << 20  # bytes of output; below that the work is done before a child has begun


class _Child:
    """A forked process that stages one job after the other."""

    def __init__(self) -> None:
        jobs, self._jobs = os.pipe()
        self._results, results = os.pipe()
        self.pid = os.fork()
        if not self.pid:
            os.close(self._jobs)
            os.close(self._results)
            _serve(jobs, results)
        os.close(jobs)
        os.close(results)

    def run(self, job: Job) -> Staged:
        """Have the child do the job. Raises its ExportError, or one that says that the child is gone."""
        try:
            with open(self._jobs, "wb", closefd=False) as pipe:
                pickle.dump(job, pipe)
            with open(self._results, "rb", closefd=False) as pipe:  # one result is all it can hold
                result = pickle.load(pipe)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            raise ExportError(job.path, "the process that wrote this weight ended") from None
        if isinstance(result, Staged):
            return result
        raise ExportError(*result)

    def close(self) -> None:
        """Kill the child and wait for it."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)
        os.close(self._jobs)
        os.close(self._results)


class Workers:
    """A context manager over the threads and their children. Leaving it kills those that still work."""

    def __init__(self, count: int):
        self._pool = ThreadPoolExecutor(count)
        self._count = count
        self._children: list[_Child] = []
        self._idle: queue.SimpleQueue[_Child] = queue.SimpleQueue()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGKILL)  # the thread that waits for it goes on
        self._pool.shutdown(wait=True)
        for child in self._children:
            child.close()

    def submit(self, jobs: Sequence[Job]) -> dict[Future[Staged], int]:
        """Begin the jobs, large ones first. Returns each one's future with the index of its job. Once only."""
        if self._count > 1 and sum(job.type.byte_length for job in jobs) >= _WORTH_A_CHILD and _may_fork():
            with contextlib.suppress(OSError):  # no more processes or pipes: those that there are will do
                while len(self._children) < self._count:
                    self._children.append(_Child())
        for child in self._children:
            self._idle.put(child)
        order = sorted(range(len(jobs)), key=lambda index: -jobs[index].type.byte_length)
        return {self._pool.submit(self._run, jobs[index]): index for index in order}

    def _run(self, job: Job) -> Staged:
        if not self._children:
            return stage(job)
        child = self._idle.get()
        try:
            return child.run(job)
        finally:
            self._idle.put(child)


def core_count() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _may_fork() -> bool:
    """Whether this process has one thread, those of native libraries included."""
    if not sys.platform.startswith("linux") or threading.active_count() != 1:
        return False
    try:
        return len(os.listdir("/proc/self/task")) == 1
    except OSError:
        return False


def _serve(jobs: int, results: int) -> NoReturn:
    """A child's life: a pickled Job in; a pickled Staged out, or the (where, what) of an ExportError."""
    status = 1
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with open(jobs, "rb") as source, open(results, "wb") as target:
            while True:
                try:
                    job = pickle.load(source)
                except EOFError:
                    break
                try:
                    result: object = stage(job)
                except ExportError as error:
                    result = (error.where, str(error)[len(error.where) + 2 :])
                pickle.dump(result, target)
                target.flush()
        status = 0
    finally:
        os._exit(status)  # nothing of the parent's is cleaned up here
