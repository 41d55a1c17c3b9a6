"""Runs staging jobs side by side: one child interpreter a core, fed by a thread each.

Converting holds the interpreter lock, so threads alone would use one core. The children are plain interpreters that
read pickled jobs from a pipe, rather than forks or `multiprocessing`: they share no state with a caller that may have
threads and devices, they end when the pipe closes whatever becomes of the parent, and Ctrl-C reaches the parent only.
Where no child can be started the job runs in the thread.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.staging import Job, Staged, stage

_BOOT = "import sys; sys.path.insert(0, sys.argv[1]); from tlaloc_serve.export.staging import serve; serve()"
_ROOT = str(pathlib.Path(__file__).resolve().parents[2])
_WORTH_A_CHILD = 8 << 20  # bytes of output; below that a child takes longer to start than the work


class Workers:
    """A context manager over the children. Leaving it kills those that still work."""

    def __init__(self, count: int):
        self._count = count
        self._local = threading.local()
        self._children: list[subprocess.Popen[bytes]] = []
        self._closed = False
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(count)
        self._small = False

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True
            children = list(self._children)
        self._pool.shutdown(wait=False, cancel_futures=True)
        for child in children:
            child.kill()  # a thread that waits for it goes on
        self._pool.shutdown(wait=True)
        for child in children:
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    with contextlib.suppress(OSError):  # what a dead child did not read is still in its buffer
                        pipe.close()

    def submit(self, jobs: Sequence[Job]) -> dict[Future[Staged], int]:
        """Begin the jobs, large ones first. Returns each one's future with the index of its job."""
        order = sorted(range(len(jobs)), key=lambda index: -jobs[index].type.byte_length)
        self._small = sum(job.type.byte_length for job in jobs) < _WORTH_A_CHILD
        return {self._pool.submit(self._run, jobs[index]): index for index in order}

    def _run(self, job: Job) -> Staged:
        child = None if self._small or self._count < 2 else self._child()
        if child is None or child.stdin is None or child.stdout is None:
            return stage(job)
        try:
            pickle.dump(job, child.stdin)
            child.stdin.flush()
            result = pickle.load(child.stdout)
        except (OSError, EOFError, ValueError, pickle.UnpicklingError):
            what = "the process that wrote this weight ended"
            raise ExportError(job.path, what, got=f"status {child.poll()}") from None
        if isinstance(result, Staged):
            return result
        raise ExportError(*result)

    def _child(self) -> subprocess.Popen[bytes] | None:
        """This thread's child, started at its first job; None where there can be none."""
        if not hasattr(self._local, "child"):
            command = [sys.executable, "-I", "-c", _BOOT, _ROOT]
            with self._lock:
                if self._closed:
                    raise ExportError("export", "stopped")
                try:
                    child = subprocess.Popen(
                        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
                    )
                except (OSError, ValueError):
                    self._local.child = None
                else:
                    self._local.child = child
                    self._children.append(child)
        child_or_none: subprocess.Popen[bytes] | None = self._local.child
        return child_or_none


def core_count() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
