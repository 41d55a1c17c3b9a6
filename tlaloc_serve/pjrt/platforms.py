"""What differs between platforms: how a plugin file tells which one it is for, and how its client is created.

Rules. A GPU client is never created without its allocator options, since by its own default it takes three quarters
of the memory. A TPU client takes no options. A CPU client is asked for one device where it understands that.
"""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Mapping

from tlaloc_serve.errors import PjrtError, RequestError
from tlaloc_serve.pjrt import abi
from tlaloc_serve.pjrt.client import Client
from tlaloc_serve.pjrt.plugin import Plugin

# In the order in which `auto` tries them.
PLATFORMS = ("cuda", "rocm", "tpu", "cpu")
MEMORY_FRACTION = "TLALOC_PJRT_MEMORY_FRACTION"
PREALLOCATE = "TLALOC_PJRT_PREALLOCATE"

Options = Mapping[str, bool | int | float | str]

_KIND = re.compile(r"(?:^|[^a-z]|lib)(cuda|rocm|gpu|tpu|cpu)(?![a-z])")
_BOOLEANS = {"1": True, "true": True, "0": False, "false": False}


def kind_of(path: str | os.PathLike[str]) -> str | None:
    """The platform that the last two parts of `path` name (`libtpu.so`, `xla_cuda12/plugin.so`), or None.

    `gpu` counts as cuda: what follows from it, the allocator options, is the same for rocm.
    """
    for part in reversed(pathlib.PurePath(path).parts[-2:]):
        found = _KIND.search(part.lower())
        if found:
            return "cuda" if found[1] == "gpu" else found[1]
    return None


def client_options(kind: str, environ: Mapping[str, str]) -> Options:
    """Create options of a client of platform `kind`. RequestError when a variable that they come from is malformed."""
    if kind in ("cuda", "rocm"):
        return {"preallocate": _preallocate(environ), "memory_fraction": _memory_fraction(environ)}
    if kind == "cpu":
        return {"cpu_device_count": 1}
    return {}


def open_client(path: str | os.PathLike[str], platform: str, environ: Mapping[str, str]) -> Client:
    """A client of the plugin in `path`, with the create options of what it is.

    Its own path decides what it is; where that says nothing, `platform` (one of PLATFORMS or `auto`) does. Where both
    say nothing the GPU's options are tried first, and dropped only when the plugin says that it does not know them.
    Raises what Plugin.open and Client raise.
    """
    kind = kind_of(path) or (platform if platform in PLATFORMS else None)
    options = client_options(kind or "cuda", environ)
    plugin = Plugin.open(path)
    try:
        return Client(plugin, options)
    except PjrtError as error:
        unknown = error.code == abi.INVALID_ARGUMENT and any(name in error.detail for name in options)
        if not unknown or kind in ("cuda", "rocm"):
            raise
    return Client(plugin)


def _memory_fraction(environ: Mapping[str, str]) -> float:
    text = environ.get(MEMORY_FRACTION, "")
    try:
        fraction = float(text) if text else 0.5
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise RequestError(
            MEMORY_FRACTION,
            "not a fraction of the device's memory",
            got=repr(text),
            want="a number above 0 and up to 1",
            todo="correct or unset it",
        )
    return fraction


def _preallocate(environ: Mapping[str, str]) -> bool:
    text = environ.get(PREALLOCATE, "")
    value = _BOOLEANS.get(text.lower()) if text else False
    if value is None:
        raise RequestError(
            PREALLOCATE, "not a yes or no", got=repr(text), want=", ".join(_BOOLEANS), todo="correct or unset it"
        )
    return value
