"""What a compiled program depends on beside its body and its options: the plugin's bytes, the client, this machine.

Rules. A plugin is known by the SHA-256 of its file, not by its path or its time. What is remembered about a file holds
only for exactly that file (`file_state`), and is not written while the file is so young that a change to it could go
unnoticed. Where anything cannot be known there is no fingerprint, and then nothing may be kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import platform
import time

from tlaloc_serve.pjrt.cache import file_key, write_whole
from tlaloc_serve.pjrt.client import Client
from tlaloc_serve.pjrt.library import FileState, file_state

# The lines of /proc/cpuinfo that say which instructions there are and for which processor XLA tunes.
_CPU_LINES = (
    "vendor_id", "cpu family", "model", "model name", "stepping", "flags",
    "CPU implementer", "CPU architecture", "CPU variant", "CPU part", "Features",
)  # fmt: skip
_CPUINFO = pathlib.Path("/proc/cpuinfo")
# A change within one tick of the clock of the file system leaves its times as they were; a tick is at most 2 s.
_SETTLED_NS = 2_000_000_000
_RECORD_VERSION = 1


def fingerprint(client: Client, records: pathlib.Path) -> str | None:
    """A digest (hex) of what a program made by `client` on this machine depends on, or None when that is not known.

    `records` is a folder in which the digests of plugin files may be remembered.
    """
    plugin = plugin_digest(client.plugin.path, client.plugin.file_state, records)
    cpu = cpu_features()
    if plugin is None or cpu is None:
        return None
    parts = (
        plugin,
        client.plugin.api_version,
        client.platform_name,
        client.platform_version,
        [device.kind for device in client.devices],
        cpu,
        # XLA:CPU splits loops for the number of threads that it has.
        len(os.sched_getaffinity(0)),
        _xla_flags(),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def cpu_features() -> str | None:
    """The kinds of processor in this machine and their features, as text; None where the system does not say."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    kept = {line for line in lines if line.partition("\t")[0].partition(":")[0].strip() in _CPU_LINES}
    return "\n".join([platform.machine(), *sorted(kept)]) if kept else None


def _xla_flags() -> str:
    """XLA_FLAGS, with the contents of the file when it names one; XLA itself reads it so."""
    flags = os.environ.get("XLA_FLAGS", "")
    if flags and not flags.lstrip().startswith("--"):
        with contextlib.suppress(OSError):
            flags += "\n" + pathlib.Path(flags).read_text(encoding="utf-8", errors="replace")
    return flags


def plugin_digest(path: str, state: FileState | None, records: pathlib.Path) -> str | None:
    """The SHA-256 (hex) of the file `path`, None unless it is and stays the one in the state `state`.

    Hashing a CPU plugin takes 0.1 to 0.2 s, so the answer is remembered.
    """
    real = os.path.realpath(path)
    if state is None or file_state(real) != state:
        return None
    record = records / f"plugin-{file_key(path)}.json"
    wanted = {"version": _RECORD_VERSION, "path": real, "state": list(state)}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        known = json.loads(record.read_bytes())
        if known["file"] == wanted:
            return str(known["sha256"])
    digest = _hash_file(real)
    if digest is None or file_state(real) != state:
        return None
    if time.time_ns() - max(state[3], state[4]) > _SETTLED_NS:
        with contextlib.suppress(OSError):
            write_whole(record, json.dumps({"file": wanted, "sha256": digest}).encode())
    return digest


def _hash_file(path: str) -> str | None:
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as stream:
            memory = bytearray(1 << 20)
            while count := stream.readinto(memory):
                digest.update(memoryview(memory)[:count])
    except OSError:
        return None
    return digest.hexdigest()
