"""Picks the plugin to run on, after asking each candidate from a child process; and keeps plugin logs off the screen.

Rules. A plugin that the user named and that is broken is an error. One that a search found and that does not work is
a recorded reason, and the search goes on. Nothing left to run on is a result, `NothingToRunOn`, not an error.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tlaloc_serve.errors import PluginError, RequestError
from tlaloc_serve.pjrt import cache, platforms
from tlaloc_serve.pjrt.client import Client
from tlaloc_serve.pjrt.locate import Search, search, skip_text
from tlaloc_serve.pjrt.probe import ProbeResult, probe

__all__ = [
    "Choice",
    "NothingToRunOn",
    "PlatformSurvey",
    "ProbeResult",
    "Survey",
    "choose",
    "probe",
    "redirect_stderr",
    "survey",
]


@dataclass(frozen=True)
class Choice:
    """The plugin to run on. `platform` is what the search was for (`auto` for a plugin that was named), `probe` the
    plugin's answer; `tried` are the answers of the candidates before it that did not do."""

    platform: str
    path: str
    probe: ProbeResult
    place: str
    tried: tuple[ProbeResult, ...] = ()

    def open_client(self, environ: Mapping[str, str] | None = None) -> Client:
        """A client in this process, with the create options of the plugin's platform."""
        return platforms.open_client(self.path, self.platform, os.environ if environ is None else environ)


@dataclass(frozen=True)
class NothingToRunOn:
    """This machine has no plugin with a device. `text` is the whole SKIP message; `tried` are the answers behind it."""

    text: str
    tried: tuple[ProbeResult, ...] = ()


@dataclass(frozen=True)
class PlatformSurvey:
    """One platform: where was looked, and what every plugin found there answered."""

    search: Search
    probes: tuple[ProbeResult, ...]


@dataclass(frozen=True)
class Survey:
    """Every platform's search and answers."""

    platforms: tuple[PlatformSurvey, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same facts as plain JSON values."""
        return {
            part.search.platform: {
                "places": [asdict(place) for place in part.search.places],
                "plugins": [result.to_dict() for result in part.probes],
            }
            for part in self.platforms
        }


def choose(
    platform: str = "auto",
    explicit: str | None = None,
    timeout_s: float = 20.0,
    environ: Mapping[str, str] | None = None,
    *,
    log: str | None = None,
) -> Choice | NothingToRunOn:
    """The first plugin with a device: of `platform`, or for `auto` of cuda, rocm, tpu and cpu in that order.

    `explicit` is the file given with `--plugin`; it, or the one that TLALOC_PJRT_PLUGIN_PATH names, is the only
    candidate, and with `auto` its own client says what platform that is. Raises PluginError when a named plugin is
    broken, RequestError for a malformed variable.
    """
    environ = os.environ if environ is None else environ
    tried: list[ProbeResult] = []
    searches = _searches(platform, explicit, environ)
    for result in searches:
        for candidate in result.candidates:
            kind = platforms.kind_of(candidate.path) or result.platform
            platforms.client_options(kind, environ)  # a malformed variable is refused here, not in a child
            answer = probe(candidate.path, result.platform, timeout_s, environ, log)
            if answer.ok:
                return Choice(result.platform, candidate.path, answer, candidate.place, tuple(tried))
            if result.named and answer.reason != "no_device":
                raise PluginError(candidate.path, f"named by {candidate.place}, {answer.message}")
            tried.append(answer)
    return NothingToRunOn(skip_text(searches, {answer.path: answer.message for answer in tried}), tuple(tried))


def _searches(platform: str, explicit: str | None, environ: Mapping[str, str]) -> list[Search]:
    """The searches to go through; one alone when the user named the plugin."""
    if platform not in (*platforms.PLATFORMS, "auto"):
        raise RequestError("--platform", "unknown", got=repr(platform), want=", ".join(("auto", *platforms.PLATFORMS)))
    if platform != "auto":
        return [search(platform, explicit, environ)]
    searches = [search(name, explicit, environ) for name in platforms.PLATFORMS]
    named = [result for result in searches if result.named]
    if not named:
        return searches
    path = named[0].candidates[0].path
    kind = platforms.kind_of(path) or "auto"
    return [Search(kind, named[0].candidates, named[0].places, named=True)]


def survey(
    platform: str = "auto",
    explicit: str | None = None,
    timeout_s: float = 20.0,
    environ: Mapping[str, str] | None = None,
    *,
    log: str | None = None,
) -> Survey:
    """Look where `choose` looks and ask every plugin found there, each file once, whatever is remembered."""
    environ = os.environ if environ is None else environ
    answers: dict[str, ProbeResult] = {}
    parts = []
    for result in _searches(platform, explicit, environ):
        for candidate in result.candidates:
            if candidate.path not in answers:
                answers[candidate.path] = probe(candidate.path, result.platform, timeout_s, environ, log, fresh=True)
        parts.append(PlatformSurvey(result, tuple(answers[candidate.path] for candidate in result.candidates)))
    return Survey(tuple(parts))


@contextlib.contextmanager
def redirect_stderr(plugin: str, environ: Mapping[str, str] | None = None, log: str | None = None) -> Iterator[str]:
    """Send what native code writes to stderr into the log of `plugin`, and yield that file's path.

    Python's own `sys.stderr` still reaches the screen. `log` names another file (RequestError when it cannot be
    written); with `-` nothing is redirected and the path is empty.
    """
    if log == "-":
        yield ""
        return
    python_stderr = sys.stderr
    if python_stderr is not None:
        python_stderr.flush()
    handle, path = cache.open_log(plugin, os.environ if environ is None else environ, log)
    screen = os.dup(2)
    try:
        os.dup2(handle, 2)
        with _reopened(python_stderr, screen):
            yield path
    finally:
        os.dup2(screen, 2)
        os.close(screen)
        os.close(handle)


@contextlib.contextmanager
def _reopened(stream: Any, screen: int) -> Iterator[None]:
    """While this lasts, sys.stderr writes to the descriptor `screen`, if it was writing to descriptor 2 before."""
    try:
        ours = stream is not None and stream.fileno() == 2
    except (OSError, ValueError, AttributeError):
        ours = False
    if not ours:
        yield
        return
    with open(os.dup(screen), "w", buffering=1, encoding=stream.encoding, errors=stream.errors) as reopened:
        sys.stderr = reopened
        try:
            yield
        finally:
            sys.stderr = stream
