"""Measure an artifact: tokens a second of prefill and decode, time to the first token, and what they stand on.

Every test runs once uncounted, then as often as asked, greedily and without regard to end-of-sequence ids; a token's
time holds all that a user waits for, the choice of the token too. Prompts are made up. The time to the first token is
that of `serve`, from the start of its process to the line with the token, with 5 prompt tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tlaloc_serve.app import bench_report
from tlaloc_serve.app.bandwidth import read_bandwidth
from tlaloc_serve.app.options import positive
from tlaloc_serve.app.report import Facts, artifact_facts, compilation_facts
from tlaloc_serve.app.serve import (
    add_compile_arguments,
    add_plugin_arguments,
    artifact_directory,
    compiler_for,
    print_skip,
)
from tlaloc_serve.artifact.manifest import Entry, Role
from tlaloc_serve.artifact.store import Artifact, open_artifact
from tlaloc_serve.engine.generate import Engine, Step
from tlaloc_serve.errors import CapacityError, TlalocError
from tlaloc_serve.pjrt.plugin import Plugin
from tlaloc_serve.pjrt.preflight import Choice, NothingToRunOn, choose, redirect_stderr

_FIRST_TOKEN_PROMPT = 5
_WARM_STARTS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--artifact", metavar="DIR", help="the directory an export wrote (default: the reference under examples/)")
    add("-p", "--n-prompt", type=_counts, default=[128, 512], metavar="N,N", help="prompt lengths (default: 128,512)")
    add("-n", "--n-gen", type=_counts, default=[64], metavar="N,N", help="tokens to generate (default: 64)")
    add("-b", "--batch", type=_counts, default=[1, 4, 8], metavar="N,N", help="sequences at once (default: 1,4,8)")
    add("-r", "--repetitions", type=positive, default=5, metavar="N", help="counted runs of each test (default: 5)")
    add("-o", "--output", choices=("md", "json", "csv"), default="md", help="how to print (default: md)")
    add("--no-first-token", action="store_true", help="do not start `serve` to time its first token")
    add_plugin_arguments(parser)
    add_compile_arguments(parser)


def run(options: argparse.Namespace) -> int:
    directory = artifact_directory(options.artifact)
    begin = time.perf_counter()
    artifact = open_artifact(directory)
    load_seconds = time.perf_counter() - begin
    choice = choose(options.platform, options.plugin, options.preflight_timeout, log=options.plugin_log)
    if isinstance(choice, NothingToRunOn):
        return print_skip(choice, directory, options.output == "json")
    # Before this process grows: the most memory a child ever had counts what it inherits at its start.
    first_token = {} if options.no_first_token else _first_token(options, directory, choice, artifact)
    with contextlib.ExitStack() as stack:
        stack.enter_context(redirect_stderr(choice.path, log=options.plugin_log))
        clock = HostClock(Plugin.open(choice.path))
        begin = time.perf_counter()
        client = stack.enter_context(choice.open_client())
        client_seconds = time.perf_counter() - begin
        engine = stack.enter_context(Engine(artifact, client, compiler=compiler_for(client, options)))
        begin = time.perf_counter()
        for _ in engine.stage():
            pass
        staging_seconds = time.perf_counter() - begin
        facts: Facts = {
            "artifact": artifact_facts(artifact, str(directory)),
            "plugin": choice.path,
            "pluginApi": ".".join(map(str, client.plugin.api_version)),
            "platform": engine.platform,
            "loadMs": _ms(load_seconds),
            "clientMs": _ms(client_seconds),
            "stagingMs": _ms(staging_seconds),
            "firstToken": first_token,
        }
        facts.update(_measure(engine, clock, options))
    bench_report.show(facts, options.output)
    return 0


def _measure(engine: Engine, clock: HostClock, options: argparse.Namespace) -> Facts:
    """Every test that fits, between two measurements of the bandwidth."""
    before = read_bandwidth(engine.client)
    rows, skipped, programs = [], [], []
    warnings: list[str] = []
    for batch in options.batch:
        for kind, count in [("pp", n) for n in options.n_prompt] + [("tg", n) for n in options.n_gen]:
            _say(f"{kind}{count} batch {batch}")
            try:
                test = Test(engine, clock, kind, count, batch)
                test.run()  # uncounted: compiles, and makes pages and caches warm
            except CapacityError as error:
                skipped.append({"test": f"{kind}{count}", "batch": batch, "reason": str(error)})
                continue
            programs += [compilation_facts(item) for item in engine.report.compilations]
            warnings = list(engine.report.warnings)
            for _ in range(options.repetitions):
                test.counted.append(test.run())
            rows.append(test)
    bandwidth = max(before, read_bandwidth(engine.client), key=lambda found: found.bytes_per_second)
    _say("")
    return {
        "bandwidth": {"gbPerSecond": round(bandwidth.bytes_per_second / 1e9, 2), "how": bandwidth.how},
        "peakRssBytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "programs": programs,
        "warnings": warnings,
        "rows": [test.facts(bandwidth.bytes_per_second) for test in rows],
        "skipped": skipped,
    }


class HostClock:
    """Wall seconds that the device waits for the host between two steps; to be made before anything is compiled.

    A gap begins when an awaited transfer, the step's ids, has arrived and ends when the next program is called. What
    the host does while the device works is not in it.
    """

    def __init__(self, plugin: Plugin):
        self.gaps: list[float] = []
        self._arrived: float | None = None
        plugin.wrap("PJRT_LoadedExecutable_Execute", self._execute)
        plugin.wrap("PJRT_Event_Await", self._await)

    def _execute(self, function: Callable[[int], int | None]) -> Callable[[int], int | None]:
        def call(address: int) -> int | None:
            if self._arrived is not None:
                self.gaps.append(time.perf_counter() - self._arrived)
                self._arrived = None
            return function(address)

        return call

    def _await(self, function: Callable[[int], int | None]) -> Callable[[int], int | None]:
        def call(address: int) -> int | None:
            result = function(address)
            self._arrived = time.perf_counter()
            return result

        return call


@dataclass(frozen=True)
class Counted:
    """One run: its wall seconds, and the seconds that the device waited for the host before each step but the first."""

    seconds: float
    steps: int
    host_seconds: tuple[float, ...]
    entries: tuple[str, ...]


@dataclass
class Test:
    """`pp` counts the prompt's tokens up to the first new one, `tg` new tokens after a prompt of one.

    Raises CapacityError where the artifact does not hold the test.
    """

    engine: Engine
    clock: HostClock
    kind: str
    count: int
    batch: int
    counted: list[Counted] = field(default_factory=list)

    def __post_init__(self) -> None:
        largest = self.engine.artifact.manifest.ladder.max_batch
        if self.batch > largest:
            what = "has no entry for so many sequences at once"
            raise CapacityError("the artifact's ladder", what, got=self.batch, want=f"at most {largest}")

    def run(self) -> Counted:
        length, new = (self.count, 1) if self.kind == "pp" else (1, self.count)
        prompts = [_prompt(self.engine.artifact, length, number) for number in range(self.batch)]
        entries: list[str] = []
        self.clock.gaps.clear()
        begin = time.perf_counter()
        for event in self.engine.generate(prompts, new, eos_ids=()):
            if isinstance(event, Step):
                entries.append(event.entry)
        seconds = time.perf_counter() - begin
        return Counted(seconds, len(entries), tuple(self.clock.gaps[-len(entries) :][1:]), tuple(entries))

    def facts(self, bandwidth: float) -> Facts:
        """Tokens a second over all sequences. The host's share is given for decode alone, as is the bandwidth's."""
        speeds = [self.batch * self.count / run.seconds for run in self.counted]
        median = statistics.median(speeds)
        host = [seconds for run in self.counted for seconds in run.host_seconds]
        decode = self.kind == "tg"
        facts: Facts = {
            "test": f"{self.kind}{self.count}",
            "batch": self.batch,
            "tokensPerSecond": {
                "median": round(median, 2),
                "min": round(min(speeds), 2),
                "max": round(max(speeds), 2),
            },
            "ms": _ms(statistics.median(run.seconds for run in self.counted)),
            "steps": self.counted[0].steps,
            "entries": sorted(set(self.counted[0].entries)),
            "hostMicroseconds": round(statistics.median(host) * 1e6, 1) if decode and host else None,
            "weightBytesPerStep": None,
            "bandwidthShare": None,
        }
        weights = max(_weight_bytes(entry) for entry in self._entries())
        if decode and weights:
            facts["weightBytesPerStep"] = weights
            facts["bandwidthShare"] = round(weights * median / self.batch / bandwidth, 3)
        return facts

    def _entries(self) -> list[Entry]:
        used = set(self.counted[0].entries)
        return [entry for entry in self.engine.artifact.manifest.entries if entry.id in used]


def _weight_bytes(entry: Entry) -> int:
    """The bytes of the weights that an entry takes. Of an embedding table that is not the head too, few are read."""
    return sum(slot.type.byte_length for slot in entry.inputs if slot.role == Role.WEIGHT)


def _prompt(artifact: Artifact, length: int, number: int) -> list[int]:
    """Made-up ids that the model takes, others for each `number`."""
    model = artifact.manifest.model
    refused = {token.id for token in model.refused_tokens}
    allowed = [token for token in range(min(model.vocab_size, 4096)) if token not in refused]
    return [allowed[(7919 * (place + 1) + 104729 * number) % len(allowed)] for place in range(length)]


def _first_token(options: argparse.Namespace, directory: pathlib.Path, choice: Choice, artifact: Artifact) -> Facts:
    """Milliseconds from the start of `serve` to its first token, without the compile cache and with it."""
    _say("first token")
    ids = ",".join(map(str, _prompt(artifact, _FIRST_TOKEN_PROMPT, 0)))
    arguments = ["--artifact", str(directory), "--prompt", ids, "--max-new", "1", "--plugin", choice.path]
    if options.plugin_log:
        arguments += ["--plugin-log", options.plugin_log]
    arguments += [f"--xla-option={name}={value}" for name, value in options.xla_option]
    cold, rss = _start_serve([*arguments, "--no-compile-cache"])
    facts: Facts = {"promptTokens": _FIRST_TOKEN_PROMPT, "coldMs": _ms(cold), "warmMs": None, "peakRssBytes": rss}
    if not options.no_compile_cache:
        _start_serve(arguments)  # uncounted: after it everything is in the cache
        warm = [_start_serve(arguments) for _ in range(_WARM_STARTS)]
        facts["warmMs"] = _ms(statistics.median(seconds for seconds, _ in warm))
        facts["peakRssBytes"] = max(rss for _, rss in warm)
    return facts


def _start_serve(arguments: Sequence[str]) -> tuple[float, int]:
    """Seconds until the last step's line, and the most memory (bytes) that process had."""
    root = str(pathlib.Path(__file__).resolve().parents[2])
    code = f"import sys; sys.path.insert(0, {root!r}); from tlaloc_serve.app.cli import console; console()"
    command = [sys.executable, "-c", code, "serve", *arguments]
    begin = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            seconds = 0.0
            for line in child.stdout or ():
                if line.startswith("  step "):
                    seconds = time.perf_counter() - begin
            _, status, usage = os.wait4(child.pid, 0)
            child.returncode = os.waitstatus_to_exitcode(status)
        except BaseException:
            child.kill()
            raise
    if child.returncode or not seconds:
        raise TlalocError("bench", f"`serve` ended with exit code {child.returncode} before its first token")
    return seconds, usage.ru_maxrss * 1024


def _counts(text: str) -> list[int]:
    return [positive(part) for part in text.split(",")]


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def _say(what: str) -> None:
    """What is being measured, on a terminal; nothing to take it away."""
    if sys.stderr is not None and sys.stderr.isatty():
        print(f"\r\x1b[K{what and f'bench: {what}'}", end="", file=sys.stderr, flush=True)
