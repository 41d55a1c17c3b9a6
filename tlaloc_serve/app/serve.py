"""Continue prompts with an artifact, on the first plugin that has a device.

The artifact is checked before a plugin is looked for, and the request before anything is said about a plugin: neither
can become a SKIP, which says where was looked when there is nothing to run on. Reading a tokenizer takes a tenth of a
second of Python and loading a program as long of the plugin, so the two are done at the same time.
A value that does not read as a number, ids or ID=VALUE is a usage error (2); one that reads but that no model, or this
one, can take is refused (1).
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
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from tlaloc_serve.app import report
from tlaloc_serve.app.options import (
    add_prompt_arguments,
    add_sampling_arguments,
    add_stop_arguments,
    read_prompts,
    sampling_params,
    seconds,
    text_options,
)
from tlaloc_serve.app.screen import LiveText, Progress, print_lines
from tlaloc_serve.app.text import PlainText, Prompt, Text, UserMessage, open_text
from tlaloc_serve.artifact.store import Artifact, open_artifact
from tlaloc_serve.engine.compiler import Compiler
from tlaloc_serve.engine.executables import ExecutableCache
from tlaloc_serve.engine.generate import Engine, Finished, Staged, Step, Token
from tlaloc_serve.engine.sampling import SamplingParams
from tlaloc_serve.engine.scheduler import Reason, Scheduler
from tlaloc_serve.errors import RequestError, TlalocError
from tlaloc_serve.pjrt.client import Client
from tlaloc_serve.pjrt.platforms import PLATFORMS
from tlaloc_serve.pjrt.preflight import NothingToRunOn, choose, redirect_stderr

_INTERRUPTED = 130
REFERENCE = pathlib.Path(__file__).resolve().parents[2] / "examples" / "reference"
_REFERENCE_PROMPT = [1, 2]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--artifact", metavar="DIR", help="the directory an export wrote (default: the reference under examples/)")
    add("--verify-weights", action="store_true", help="hash every weight file as it is staged, not just the bodies")
    add("--json", action="store_true", help="print the same facts as one JSON object on stdout")
    add(
        "--stream",
        action=argparse.BooleanOptionalAction,
        help="the completion as it is generated, or the table of steps (default: the text on a terminal where a "
        "prompt is text, else the table); several completions come one after the other",
    )
    add("--show-special", action="store_true", help="show special tokens in texts")
    add_plugin_arguments(parser)
    add_compile_arguments(parser)
    add_prompt_arguments(parser)
    add_stop_arguments(parser)
    add_sampling_arguments(parser)


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
        type=seconds,
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
    about_text = text_options(options)
    directory = artifact_directory(options.artifact)
    artifact = open_artifact(directory)
    sampling = sampling_params(options, artifact.manifest.model.vocab_size)
    given = read_prompts(options.prompts) or _default_prompts(artifact, options.artifact is None)
    needs = _needs_text(options, given)

    def read_request() -> tuple[Text, list[list[int]]]:
        text = open_text(artifact, about_text, needs)
        prompts = text.encode_all(given)
        Scheduler(artifact.manifest).check(prompts, options.max_new)
        return text, prompts

    with contextlib.ExitStack() as stack:
        try:
            choice = choose(options.platform, options.plugin, options.preflight_timeout, log=options.plugin_log)
            if isinstance(choice, NothingToRunOn):
                if options.verify_weights:
                    artifact.check_weights()
                read_request()
                return print_skip(choice, directory, options.json)
            log = stack.enter_context(redirect_stderr(choice.path, log=options.plugin_log))
            client = stack.enter_context(choice.open_client())
            engine = stack.enter_context(
                Engine(artifact, client, compiler=compiler_for(client, options), verify_weights=options.verify_weights)
            )
        except TlalocError:
            read_request()  # what is wrong with the request is wrong on every machine: that is told first
            raise
        load = engine.find(len(given))  # before there is another thread: it would have to wait for that one
        ahead = engine.platform == "cpu" and not options.verify_weights
        request = _Meanwhile(read_request, artifact.map_ahead if ahead else None)
        if load is not None:
            load()
        text, prompts = request.result()
        if options.verify_weights:  # the report says that it was done, so it is done before
            _show_staging(engine)
        facts = {
            "runtime": report.runtime_facts(choice.path, client.plugin.api_version, options.platform, log or None),
            "artifact": report.artifact_facts(artifact, str(directory)),
            "text": text.facts(),
            "engine": report.engine_facts(engine, options.platform),
            "tried": [answer.to_dict() for answer in choice.tried],
        }
        stack.enter_context(_cancel_on_interrupt(engine))
        return _Run(engine, options, sampling, prompts, text, _streams(options, given)).show(facts)
    raise AssertionError("unreachable")


def _show_staging(engine: Engine) -> None:
    progress = Progress()
    for event in engine.stage():
        progress.show(event.done, event.total)
    progress.clear()


class _Meanwhile:
    """Runs `work`, then `more`, in a thread while this one waits for the plugin; `result` is that of `work`."""

    def __init__(self, work: Callable[[], tuple[Text, list[list[int]]]], more: Callable[[], None] | None):
        self._work, self._more = work, more
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._done = self._work()
            if self._more is not None:
                self._more()
            self._error: BaseException | None = None
        except BaseException as error:  # raised where it is waited for
            self._error = error

    def result(self) -> tuple[Text, list[list[int]]]:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._done


def _needs_text(options: argparse.Namespace, prompts: Sequence[Prompt]) -> str | None:
    """The flag that asks for a tokenizer, if one does."""
    if options.json and options.stream:
        raise RequestError("--stream", "does not go with --json, which prints one object at the end")
    for flag, kind in (("--chat", UserMessage), ("--text", PlainText)):
        if any(isinstance(prompt, kind) for prompt in prompts):
            return flag
    return "--stop" if options.stop else "--stream" if options.stream else None


def _streams(options: argparse.Namespace, prompts: Sequence[Prompt]) -> bool:
    """Whether the completions are shown as they come, instead of the table of steps."""
    if options.stream is not None or options.json or sys.stdout is None:
        return bool(options.stream) and sys.stdout is not None
    return sys.stdout.isatty() and not all(isinstance(prompt, list) for prompt in prompts)


class _Run:
    """One run: the engine's events become lines, texts and facts."""

    def __init__(
        self,
        engine: Engine,
        options: argparse.Namespace,
        sampling: SamplingParams,
        prompts: list[list[int]],
        text: Text,
        streams: bool,
    ):
        self._engine = engine
        self._options = options
        self._sampling = sampling
        self._prompts = prompts
        self._streams = [text.stream(prompt) for prompt in prompts]
        self._live = LiveText(len(prompts), sys.stdout) if streams else None
        self._say = (lambda lines: None) if options.json else print_lines

    def show(self, facts: report.Facts) -> int:
        """Decode and print all there is to read of it; the exit code. `facts` are known before the first step."""
        self._say(report.header_lines(facts))
        self._decode()
        facts["run"] = self._facts()
        self._say(report.footer_lines(facts["run"], self._live is not None))
        if self._options.json:
            print(json.dumps(facts))
        cancelled = any(sequence["reason"] == Reason.CANCELLED for sequence in facts["run"]["sequences"])
        return _INTERRUPTED if cancelled else 0

    def _decode(self) -> None:
        events = self._engine.generate(
            self._prompts,
            self._options.max_new,
            sampling=self._sampling,
            eos_ids=() if self._options.ignore_eos else None,
            pick_all=report.picks_word(self._sampling) == "argmax",
        )
        progress = Progress()
        with self._live or contextlib.nullcontext():
            for event in events:
                if isinstance(event, Staged):
                    progress.show(event.done, event.total)
                elif isinstance(event, Step):
                    progress.clear()
                    self._on_step(event)
                else:
                    self._on_text(event)

    def _on_step(self, step: Step) -> None:
        if step.number == 0:
            self._say(report.request_lines(self._facts(), self._engine.artifact.manifest.ladder))
        if self._live is None:
            facts = report.step_facts(step, report.picks_word(self._sampling))
            self._say(report.step_lines(facts, len(self._prompts) > 1))

    def _on_text(self, event: Token | Finished) -> None:
        """Turn a generated id, or a sequence's end, into text; stop the sequence where that completes a stop string."""
        stream = self._streams[event.sequence]
        if stream is None:
            return
        text = stream.push(event.id) if isinstance(event, Token) else stream.finish()
        if isinstance(event, Token) and stream.stopped:
            self._engine.stop(event.sequence)
        if self._live is not None:
            self._live.add(event.sequence, text)
            if isinstance(event, Finished):
                self._live.end(event.sequence)

    def _facts(self) -> report.Facts:
        facts = report.run_facts(self._engine.report, self._options.max_new is not None, self._sampling)
        for sequence, stream in zip(facts["sequences"], self._streams, strict=True):
            sequence["text"] = stream and stream.prompt_text
            sequence["completion"] = stream and stream.text
            # The last id can complete a stop string that its decoder gives out only at the end.
            if stream and stream.stopped and sequence["reason"] in (Reason.LENGTH, Reason.CONTEXT, Reason.EOS):
                sequence["reason"] = Reason.STOP
        return facts


def print_skip(nothing: NothingToRunOn, directory: pathlib.Path, as_json: bool) -> int:
    """Say that this machine has nothing to run on and where was looked; the exit code."""
    if as_json:
        tried = [answer.to_dict() for answer in nothing.tried]
        print(json.dumps({"skip": nothing.text, "artifact": str(directory), "tried": tried}))
    else:
        print(nothing.text)
        print(f"The artifact in {directory} was checked and is complete, whether or not this box can execute it.")
    return 0


def artifact_directory(given: str | None) -> pathlib.Path:
    """The directory that --artifact names, the reference artifact without it."""
    if given is not None:
        return pathlib.Path(given)
    if not REFERENCE.is_dir():
        raise RequestError(
            "--artifact",
            "not given, and there is no reference artifact beside this package",
            todo="name the directory an export wrote: --artifact DIR",
        )
    return REFERENCE


def _default_prompts(artifact: Artifact, is_reference: bool) -> list[Prompt]:
    if is_reference:
        return [_REFERENCE_PROMPT]
    if artifact.manifest.frontend.default_prompt is not None:
        return [PlainText(artifact.manifest.frontend.default_prompt)]
    raise RequestError("--prompt", "not given, and this artifact names no default", todo="give token ids: --prompt 1,2")


def _xla_option(text: str) -> tuple[str, str]:
    name, equals, value = text.removeprefix("--").partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"want NAME=VALUE, as in xla_cpu_enable_fast_math=false; got {text!r}")
    return name, value


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
