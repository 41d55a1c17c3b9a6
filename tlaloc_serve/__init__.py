"""Serve a compiled language model from a directory and one PJRT plugin, with the standard library only.

    with tlaloc_serve.open("artifact", platform="cpu") as engine:
        for event in engine.generate([[1, 2]], max_new=2):
            ...

The rooms, and who may import whom (a test holds this):

    errors        the error tree; imports nothing
    pjrt          the C ABI of a plugin, and nothing about models
    artifact      the directory on disk and its text side (tokenizer, chat), and nothing about devices
    engine        pages, inputs, scheduler, runner, generate: an artifact and a client become tokens
    export        half one: a checkpoint becomes an artifact; imports artifact and errors only
    app           the command line and everything a person reads

`artifact` and `pjrt` meet in `engine.runner` and here, nowhere else.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tlaloc_serve.engine.generate import Engine

__version__ = "0.1.0"
__all__ = ["open"]


def open(
    path: str | os.PathLike[str],
    *,
    platform: str = "auto",
    plugin: str | None = None,
    verify_weights: bool = False,
    preflight_timeout: float = 20.0,
    compile_cache: bool = True,
    xla_options: Mapping[str, str] | None = None,
) -> Engine:
    """Open the artifact at `path` on the first plugin that has a device; the engine is a context manager.

    `platform` is auto, cuda, rocm, tpu or cpu; `plugin` names the plugin file. The artifact is checked before a plugin
    is looked for. `preflight_timeout` bounds, in seconds, the child process that opens a plugin the first time.
    With `verify_weights` the weights are staged now and hashed on the way.
    Compiled programs are kept below the user's cache folder and used again, unless `compile_cache` is False.
    `xla_options` are XLA debug options by name, their values as text.

    Raises ArtifactError for a damaged artifact, PluginError when the plugin is broken or this machine has none with a
    device, PjrtError when the plugin refuses a client. Nothing is printed; a plugin may write to stderr.
    """
    from tlaloc_serve.artifact.store import open_artifact
    from tlaloc_serve.engine.compiler import Compiler
    from tlaloc_serve.engine.executables import ExecutableCache
    from tlaloc_serve.engine.generate import Engine
    from tlaloc_serve.errors import PluginError
    from tlaloc_serve.pjrt.preflight import NothingToRunOn, choose

    artifact = open_artifact(path)
    choice = choose(platform, plugin, preflight_timeout)
    if isinstance(choice, NothingToRunOn):
        if verify_weights:
            artifact.check_weights()
        raise PluginError(f"platform {platform}", f"nothing to run on\n{choice.text}")
    with contextlib.ExitStack() as stack:
        client = stack.enter_context(choice.open_client())
        compiler = Compiler(client, xla_options, ExecutableCache.of_user(os.environ) if compile_cache else None)
        engine = Engine(artifact, client, stack.pop_all(), compiler=compiler, verify_weights=verify_weights)
        stack.enter_context(engine)
        if verify_weights:
            for _ in engine.stage():
                pass
        stack.pop_all()
        return engine
