#!/usr/bin/env python3
"""Microseconds a decode step spends in Python: outside PJRT_LoadedExecutable_Execute and the awaited transfers.

    python3 examples/bench_host.py --artifact DIR [--steps 400] [--batch 1] [--plugin FILE]

Prints one JSON line: the median, and the 10th and 90th percentile, over the steps that compiled nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tlaloc_serve.artifact.store import open_artifact  # noqa: E402
from tlaloc_serve.engine.generate import Engine, Step  # noqa: E402
from tlaloc_serve.pjrt.locate import search  # noqa: E402
from tlaloc_serve.pjrt.platforms import open_client  # noqa: E402
from tlaloc_serve.pjrt.plugin import Plugin  # noqa: E402

NATIVE = ("PJRT_LoadedExecutable_Execute", "PJRT_Event_Await")


class NativeClock:
    """Adds up the seconds inside the named functions of a plugin."""

    def __init__(self, plugin: Plugin):
        self.seconds = 0.0
        for name in NATIVE:
            plugin._functions[name] = self._timed(plugin.function(name))

    def _timed(self, function: Callable[[int], int | None]) -> Callable[[int], int | None]:
        def call(address: int) -> int | None:
            begin = time.perf_counter()
            result = function(address)
            self.seconds += time.perf_counter() - begin
            return result

        return call


def measure(artifact: str, plugin: str, steps: int, batch: int) -> list[float]:
    """Seconds of host work a step, settled steps only."""
    clock = NativeClock(Plugin.open(plugin))
    host: list[float] = []
    with open_client(plugin, "cpu", os.environ) as client, Engine(open_artifact(artifact), client) as engine:
        room = engine.artifact.manifest.ladder.max_context
        while len(host) < steps:
            begin, native = time.perf_counter(), clock.seconds
            for event in engine.generate([[1]] * batch, room, eos_ids=()):
                if isinstance(event, Step):
                    now = time.perf_counter()
                    if not event.compile_seconds and event.number:
                        host.append(now - begin - (clock.seconds - native))
                    begin, native = time.perf_counter(), clock.seconds
    return host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--artifact", required=True)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--plugin", help="default: the first CPU plugin that a search finds")
    options = parser.parse_args()
    plugin = options.plugin or next(iter(search("cpu", None, os.environ).candidates)).path
    host = sorted(measure(options.artifact, plugin, options.steps, options.batch))
    tenth = len(host) // 10
    micros = {name: round(value * 1e6, 1) for name, value in (
        ("median_us", statistics.median(host)), ("p10_us", host[tenth]), ("p90_us", host[-1 - tenth]))}  # fmt: skip
    print(
        json.dumps(
            {"artifact": options.artifact, "plugin": plugin, "batch": options.batch, "steps": len(host), **micros}
        )
    )


if __name__ == "__main__":
    main()
