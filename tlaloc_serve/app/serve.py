"""Decode an artifact greedily on the first plugin that has a device.

The artifact is checked before a plugin is looked for. With nothing to run on, a SKIP says where was looked.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from tlaloc_serve.app import report
from tlaloc_serve.app.text import Text
from tlaloc_serve.artifact.store import Artifact, open_artifact
from tlaloc_serve.engine.compiler import Compiler
from tlaloc_serve.engine.executables import ExecutableCache
from tlaloc_serve.engine.generate import Engine, Staged, Step
from tlaloc_serve.engine.scheduler import Reason, Scheduler
from tlaloc_serve.errors import RequestError
from tlaloc_serve.pjrt.client import Client
from tlaloc_serve.pjrt.platforms import PLATFORMS
from tlaloc_serve.pjrt.preflight import NothingToRunOn, choose, redirect_stderr

_INTERRUPTED = 130
REFERENCE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "reference"
_REFERENCE_PROMPT = [1, 2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--artifact", metavar="DIR", help="the directory an export wrote (default: the reference under examples/)")
    add(
        "--prompt",
        action="append",
        type=_ids,
        default=[],
        metavar="IDS",
        dest="prompts",
        help="token ids, as in 1,2; several --prompt run as one batch",
    )
    add(
        "--text",
        action="append",
        type=_text,
        default=[],
        dest="prompts",
        metavar="TEXT",
        help="a prompt as text, encoded with the artifact's own tokenizer",
    )
    add("--max-new", type=_positive, metavar="N", help="new tokens a prompt (default: 16, or what the context leaves)")
    add("--ignore-eos", action="store_true", help="go on after the model's end-of-sequence ids")
    add("--verify-weights", action="store_true", help="hash every weight file, not just the bodies")
    add("--json", action="store_true", help="print the same facts as one JSON object on stdout")
    add_plugin_arguments(parser)
    add_compile_arguments(parser)


def add_plugin_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that choose a plugin, shared by the commands that open one."""
    add = parser.add_argument
    add(
        "--platform",
        choices=("auto", *PLATFORMS),
        default="auto",
        help="auto takes the first of cuda, rocm, tpu, cpu that has a plugin and a device",
    )
    add("--plugin", metavar="FILE", help="the plugin's .so (default: $TLALOC_PJRT_PLUGIN_PATH, then a search)")
    add("--plugin-log", metavar="FILE", help="where the plugin's own stderr goes; - shows it on the screen")
    add(
        "--preflight-timeout",
        type=_seconds,
        default=20.0,
        metavar="S",
        help="how long a plugin may take to open the first time, in seconds (default: 20)",
    )


def add_compile_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that say how bodies are compiled, shared by the commands that run them."""
    parser.add_argument(
        "--xla-option",
        action="append",
        type=_xla_option,
        default=[],
        metavar="NAME=VALUE",
        help="an XLA debug option for every compile; repeatable",
    )
    parser.add_argument("--no-compile-cache", action="store_true", help="neither use nor keep compiled programs")


def compiler_for(client: Client, options: argparse.Namespace) -> Compiler:
    """The compiler that the flags of `add_compile_arguments` ask for."""
    cache = None if options.no_compile_cache else ExecutableCache.of_user(os.environ)
    return Compiler(client, dict(options.xla_option), cache)


def run(options: argparse.Namespace) -> int:
    directory = _artifact_directory(options.artifact)
    artifact = open_artifact(directory, verify_weights=options.verify_weights)
    text = Text(artifact)
    prompts = text.encode_all(options.prompts or _default_prompts(artifact, options.artifact is None))
    # A request that cannot run is an error whether or not this machine could run anything: never a SKIP.
    Scheduler(artifact.manifest).check(prompts, options.max_new)
    choice = choose(options.platform, options.plugin, options.preflight_timeout, log=options.plugin_log)
    if isinstance(choice, NothingToRunOn):
        return _skip(choice, directory, options.json)
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(redirect_stderr(choice.path, log=options.plugin_log))
        client = stack.enter_context(choice.open_client())
        engine = stack.enter_context(Engine(artifact, client, compiler=compiler_for(client, options)))
        facts = {
            "runtime": report.runtime_facts(choice.path, client.plugin.api_version, options.platform, log or None),
            "artifact": report.artifact_facts(artifact, str(directory)),
            "engine": report.engine_facts(engine, options.platform),
            "tried": [answer.to_dict() for answer in choice.tried],
        }
        stack.enter_context(_cancel_on_interrupt(engine))
        return _decode(engine, prompts, options, facts, text)
    raise AssertionError("unreachable")


def _decode(
    engine: Engine, prompts: list[list[int]], options: argparse.Namespace, facts: report.Facts, text: Text
) -> int:
    eos_ids = () if options.ignore_eos else None
    events = engine.generate(prompts, options.max_new, eos_ids=eos_ids, pick_all=True)
    say = (lambda lines: None) if options.json else _print_lines
    say(report.header_lines(facts))
    progress = _Progress()
    for event in events:
        if isinstance(event, Staged):
            progress.show(event.done, event.total)
        elif isinstance(event, Step):
            progress.clear()
            if event.number == 0:
                ladder = engine.artifact.manifest.ladder
                say(report.request_lines(report.run_facts(engine.report, options.max_new is not None), ladder))
            say(report.step_lines(report.step_facts(event), len(prompts) > 1))
    facts["run"] = report.run_facts(engine.report, options.max_new is not None)
    for sequence in facts["run"]["sequences"]:
        sequence.update(text.facts(sequence["prompt"], sequence["generated"]))
    say(report.footer_lines(facts["run"]))
    if options.json:
        print(json.dumps(facts))
    cancelled = any(sequence["reason"] == Reason.CANCELLED for sequence in facts["run"]["sequences"])
    return _INTERRUPTED if cancelled else 0


def _print_lines(lines: Iterator[str]) -> None:
    for line in lines:
        print(line, flush=True)


def _skip(nothing: NothingToRunOn, directory: pathlib.Path, as_json: bool) -> int:
    if as_json:
        tried = [answer.to_dict() for answer in nothing.tried]
        print(json.dumps({"skip": nothing.text, "artifact": str(directory), "tried": tried}))
    else:
        print(nothing.text)
        print(f"The artifact in {directory} was checked and is complete, whether or not this box can execute it.")
    return 0


def _artifact_directory(given: str | None) -> pathlib.Path:
    if given is not None:
        return pathlib.Path(given)
    if not REFERENCE.is_dir():
        raise RequestError(
            "--artifact",
            "not given, and there is no reference artifact beside this package",
            todo="name the directory an export wrote: --artifact DIR",
        )
    return REFERENCE


def _default_prompts(artifact: Artifact, is_reference: bool) -> list[list[int] | str]:
    if is_reference:
        return [_REFERENCE_PROMPT]
    if artifact.manifest.frontend.default_prompt is not None:
        return [artifact.manifest.frontend.default_prompt]
    raise RequestError("--prompt", "not given, and this artifact names no default", todo="give token ids: --prompt 1,2")


def _ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"want token ids separated by commas, as in 1,2; got {text!r}") from None
    return ids


def _text(text: str) -> str:
    return text


def _xla_option(text: str) -> tuple[str, str]:
    name, equals, value = text.removeprefix("--").partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"want NAME=VALUE, as in xla_cpu_enable_fast_math=false; got {text!r}")
    return name, value


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"want a whole number, at least 1; got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"want seconds, more than 0; got {text!r}")
    return seconds


@contextlib.contextmanager
def _cancel_on_interrupt(engine: Engine) -> Iterator[None]:
    """The first Ctrl-C ends the run at the next step boundary; a second one interrupts at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def cancel(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        engine.cancel()

    previous = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


class _Progress:
    """One line on a terminal while weights are staged; silent where stderr is not one."""

    def __init__(self) -> None:
        self._shown = False

    def show(self, done: int, total: int) -> None:
        if sys.stderr is not None and sys.stderr.isatty():
            self._shown = True
            print(
                f"\rstaging {report.size_text(done)} of {report.size_text(total)}", end="", file=sys.stderr, flush=True
            )

    def clear(self) -> None:
        if self._shown:
            self._shown = False
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
