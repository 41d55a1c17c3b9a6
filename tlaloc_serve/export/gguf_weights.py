"""Writes the weights of a GGUF file as an artifact's weight files, on every core.

Rules: a weight file is the rows of its parts one after the other, dequantised to one dtype, with llama.cpp's row
order undone; its SHA-256 is taken while it is written. A worker is a fresh interpreter that gets its files as JSON on
stdin and reports a line for each, so it needs nothing of the caller's main module or threads; it maps the part of the
GGUF file it reads and writes the weight file itself, so no weight crosses a pipe. Where no process can be made, the
same function runs here. A worker holds a few MiB, and for q and k of `llama` the packed tensor.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import prod

from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.dequantise import dequantise
from tlaloc_serve.export.gguf import BLOCKS
from tlaloc_serve.export.gguf_model import Part, part_rows

WORTH_A_PROCESS = 4_000_000  # weights; below, starting an interpreter takes longer than the work
MOST_PROCESSES = 8
_ROOT = str(pathlib.Path(__file__).resolve().parents[2])  # the folder that holds the package
_WORKER = "import sys; sys.path.insert(0, sys.argv[1]); from tlaloc_serve.export.gguf_weights import work; work()"


@dataclass(frozen=True)
class WeightFile:
    """One file to write: `parts` after each other, as "f32" or "bf16"."""

    path: str
    dtype: str
    parts: tuple[Part, ...]

    @property
    def count(self) -> int:
        """Elements."""
        return sum(prod(part.dims) for part in self.parts)


def write_weights(files: Sequence[WeightFile], processes: int | None = None) -> Iterator[tuple[int, str]]:
    """Writes every file; gives (index in `files`, SHA-256 in hex) as each is done, in no fixed order.

    `processes` is by default the cores this process may use. Raises ExportError for a part that cannot be read or
    dequantised and for a file that cannot be written; the other workers are then stopped.
    """
    if processes is None:
        processes = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    processes = min(processes, sum(file.count for file in files) // WORTH_A_PROCESS + 1)
    if processes > 1 and sys.executable:
        try:
            workers = _start(_share(files, processes))
        except OSError:
            workers = []
        if workers:
            yield from _collect(workers)
            return
    for index, file in enumerate(files):
        yield index, write_weight(file)


def write_weight(file: WeightFile) -> str:
    """Writes one file and gives its SHA-256 in hex. Raises ExportError."""
    digest = hashlib.sha256()
    try:
        with open(file.path, "wb") as out:
            for part in file.parts:
                for chunk in part_chunks(part, file.dtype):
                    out.write(chunk)
                    digest.update(chunk)
    except OSError as error:
        raise ExportError(file.path, "cannot be written", got=error.strerror or error) from error
    return digest.hexdigest()


def part_chunks(part: Part, dtype: str) -> Iterator[bytes | bytearray]:
    """The bytes of one tensor in transformers' row order, as `dtype`, in chunks. Raises ExportError naming it."""
    where = f"{part.path}: {part.source}"
    rows = part_rows(part)
    block, _ = BLOCKS[part.type_name]
    if rows is not None and (part.dims[-1] if len(part.dims) > 1 else 1) % block:
        raise ExportError(where, "rows that must be moved are not whole blocks", got=list(part.dims), want=block)
    with _mapped(part, where) as data:
        if rows is None:
            packed: bytes | memoryview = data
        else:
            size = part.nbytes // part.dims[0]
            packed = b"".join([data[row * size : row * size + size] for row in rows])
        try:
            yield from dequantise(part.type_name, packed, dtype)
        except ExportError as error:
            raise ExportError(where, str(error)) from error


@contextmanager
def _mapped(part: Part, where: str) -> Iterator[memoryview]:
    """The packed bytes of a part, mapped for as long as they are read."""
    begin = part.offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
    try:
        with open(part.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            if part.offset + part.nbytes > size:
                raise ExportError(where, "the file has become shorter", got=size, want=part.offset + part.nbytes)
            mapping = mmap.mmap(file.fileno(), part.offset + part.nbytes - begin, access=mmap.ACCESS_READ, offset=begin)
    except OSError as error:
        raise ExportError(where, "cannot be read", got=error.strerror or error) from error
    with mapping, memoryview(mapping) as whole, whole[part.offset - begin :] as data:
        yield data


def _share(files: Sequence[WeightFile], processes: int) -> list[list[tuple[int, WeightFile]]]:
    """The files with their indices, largest first, each to the process with the least to do."""
    shares: list[list[tuple[int, WeightFile]]] = [[] for _ in range(processes)]
    loads = [0] * processes
    for index, file in sorted(enumerate(files), key=lambda item: (-item[1].count, item[0])):
        least = loads.index(min(loads))
        shares[least].append((index, file))
        loads[least] += file.count
    return [share for share in shares if share]


def _start(shares: list[list[tuple[int, WeightFile]]]) -> list[subprocess.Popen[bytes]]:
    """A worker for each share, its files sent. Raises OSError where a process cannot be made; none is left then."""
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for share in shares:
            command = [sys.executable, "-c", _WORKER, _ROOT]
            worker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            workers.append(worker)
            jobs = json.dumps([{"index": index, **asdict(file)} for index, file in share])
            if worker.stdin is not None:
                worker.stdin.write(jobs.encode())
                worker.stdin.close()
    except OSError:
        _stop(workers)
        raise
    return workers


def _stop(workers: list[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()
        if worker.stdout is not None:
            worker.stdout.close()


def _collect(workers: list[subprocess.Popen[bytes]]) -> Iterator[tuple[int, str]]:
    """What the workers report, as it comes, until each has ended well."""
    reports: queue.Queue[bytes | int] = queue.Queue()  # a line, or the exit status of a worker that has ended

    def listen(worker: subprocess.Popen[bytes]) -> None:
        for line in worker.stdout or ():
            reports.put(line)
        reports.put(worker.wait())

    listeners = [threading.Thread(target=listen, args=(worker,), daemon=True) for worker in workers]
    for listener in listeners:
        listener.start()
    running = len(workers)
    try:
        while running:
            report = reports.get()
            if isinstance(report, int):
                running -= 1
                if report:
                    raise ExportError("GGUF worker", "a process that converts weights died",
                                      got=f"exit status {report}", todo="is there memory enough?")
                continue
            done = json.loads(report)
            if "where" in done:
                raise ExportError(done["where"], done["what"])
            yield done["index"], done["sha256"]
    finally:
        for worker in workers:
            worker.kill()
        for listener in listeners:
            listener.join()
        _stop(workers)


def work() -> None:
    """A worker: files as JSON on stdin, a line of JSON on stdout for each that is written, or for the first error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which stops its workers
    for job in json.load(sys.stdin):
        parts = tuple(Part(**{**part, "dims": tuple(part["dims"])}) for part in job["parts"])
        try:
            report = {"index": job["index"], "sha256": write_weight(WeightFile(job["path"], job["dtype"], parts))}
        except ExportError as error:
            report = {"where": error.where, "what": str(error).removeprefix(f"{error.where}: ")}
        print(json.dumps(report), flush=True)
        if "where" in report:
            return
