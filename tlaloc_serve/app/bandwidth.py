"""How fast this machine's memory can be read: what a decode step, which reads every weight once, is held against.

On a CPU platform the C library's `memchr` looks for a byte that is not there, one thread a processor, each in its own
part of the memory; elsewhere the device sums the rows of an array. Either way the best of several passes counts, since
anything else that runs can only make one slower.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from dataclasses import dataclass

from tlaloc_serve.pjrt.client import Client
from tlaloc_serve.pjrt.compile_options import compile_options

_PASSES = 8
# Several times what the caches of a processor hold.
_HOST_BYTES = 256 << 20
_ROWS, _COLUMNS = 8192, 16384  # 512 MiB of f32
_ROW_SUMS = f"""module {{
  func.func @main(%x: tensor<{_ROWS}x{_COLUMNS}xf32>) -> tensor<{_ROWS}xf32> {{
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %sums = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [1] : (tensor<{_ROWS}x{_COLUMNS}xf32>, tensor<f32>) -> tensor<{_ROWS}xf32>
    return %sums : tensor<{_ROWS}xf32>
  }}
}}
"""  # noqa: E501


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second, and how they were read."""

    bytes_per_second: float
    how: str


def read_bandwidth(client: Client) -> Bandwidth:
    """Measure it for the memory that `client` computes on. Raises what compiling and executing raise."""
    return _host() if client.platform_name == "cpu" else _device(client)


def _host() -> Bandwidth:
    threads = len(os.sched_getaffinity(0))
    memory = mmap.mmap(-1, _HOST_BYTES)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # Written once: pages that never were are all the same one.
    ctypes.memset(start, 0, _HOST_BYTES)
    search = ctypes.CDLL(None).memchr
    search.argtypes, search.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p
    part = _HOST_BYTES // threads
    best = 0.0
    for _ in range(_PASSES):
        workers = [threading.Thread(target=search, args=(start + number * part, 1, part)) for number in range(threads)]
        begin = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, threads * part / (time.perf_counter() - begin))
    return Bandwidth(best, f"memchr over {_HOST_BYTES >> 20} MiB, {threads} threads, best of {_PASSES}")


def _device(client: Client) -> Bandwidth:
    best = 0.0
    size = 4 * _ROWS * _COLUMNS
    with (
        client.compile(_ROW_SUMS.encode(), compile_options()) as executable,
        executable.execution(1, (), [("f32", (_ROWS,))]) as sums,
        client.buffer_from_host(mmap.mmap(-1, size), "f32", (_ROWS, _COLUMNS)) as array,
    ):
        sums.bind(0, array)
        for _ in range(_PASSES):
            begin = time.perf_counter()
            sums.run()
            sums.wait()
            best = max(best, size / (time.perf_counter() - begin))
    return Bandwidth(best, f"sums of the rows of f32[{_ROWS},{_COLUMNS}] on the device, best of {_PASSES}")
