"""What the tests share: where the real artifacts and checkpoints are, and the CPU plugins of this machine."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import unittest
from collections.abc import Iterator
from typing import Any

from tlaloc_serve.artifact.store import open_artifact
from tlaloc_serve.engine.generate import Engine
from tlaloc_serve.pjrt.locate import search
from tlaloc_serve.pjrt.platforms import open_client

REPO = pathlib.Path(__file__).resolve().parents[1]
SHARED = pathlib.Path(os.environ.get("TLALOC_TEST_SHARED") or REPO.parent / "shared")


def shared(*parts: str) -> pathlib.Path:
    """A path under the folder of real artifacts and checkpoints.

    That folder is not part of the repository. Where it is absent the test that asks is skipped,
    except under CI=true, where its absence is a failure.
    """
    if not SHARED.is_dir():
        if os.environ.get("CI") == "true":
            raise AssertionError(f"CI needs the real artifacts and checkpoints, and {SHARED} is not there")
        raise unittest.SkipTest(f"the real artifacts and checkpoints are not at {SHARED}")
    return SHARED.joinpath(*parts)


def load_json(path: pathlib.Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@functools.cache
def cpu_plugins() -> tuple[str, ...]:
    """Every CPU plugin a search finds, copies of one only once. None is a failure, never a skip.

    Under CI=true all three published plugins have to be there, since each speaks another version of the ABI.
    """
    found: dict[tuple[str, int], str] = {}
    for item in search("cpu", None, os.environ).candidates:
        # A package's file and the same one fetched into the cache folder have one name and one size.
        found.setdefault((os.path.basename(item.path), os.path.getsize(item.path)), item.path)
    if not found:
        raise AssertionError("tests/plugin needs a CPU plugin: python3 -m tlaloc_serve plugins --fetch cpu")
    if os.environ.get("CI") == "true" and len(found) < 3:
        raise AssertionError(f"CI needs the three published CPU plugins, and found only {list(found.values())}")
    return tuple(found.values())


@contextlib.contextmanager
def engine_on(plugin: str, artifact: pathlib.Path, **options: Any) -> Iterator[Engine]:
    """An engine for `artifact` on the plugin file `plugin`, with no preflight in between."""
    opened = open_artifact(artifact, **options)
    with open_client(plugin, "cpu", os.environ) as client, Engine(opened, client) as engine:
        yield engine


def ids(engine: Engine, prompts: list[list[int]], max_new: int, **options: Any) -> list[list[int]]:
    """The generated ids of every prompt."""
    for _ in engine.generate(prompts, max_new, **options):
        pass
    return [list(engine.report.finished[number].generated) for number in range(len(prompts))]


_held: dict[tuple[str, str], Engine] = {}


@contextlib.contextmanager
def held_engine(plugin: str, name: str) -> Iterator[Engine]:
    """The engine of the real artifact `name`, kept for the other tests of a module so that entries compile once."""
    if (plugin, name) not in _held:
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(engine_on(plugin, shared("artifacts", name)))
            _stacks.append(stack.pop_all())
            _held[plugin, name] = engine
    yield _held[plugin, name]


def close_held_engines() -> None:
    """For `unittest.addModuleCleanup`."""
    while _stacks:
        _stacks.pop().close()
    _held.clear()


_stacks: list[contextlib.ExitStack] = []
