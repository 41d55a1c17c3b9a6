"""Asks a plugin what it can do, from a child process with a time limit.

Rules. A plugin that hangs, aborts or crashes costs the child, never this process, and becomes one line. The answer
travels through a file of its own, which the plugin's chatter on stdout and stderr cannot reach; that chatter goes to
a log file that the line names. An answer is remembered, by the file's path, size and time, only when it was good.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import resource
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from tlaloc_serve.errors import PjrtError, PluginError, TlalocError
from tlaloc_serve.pjrt import abi, cache
from tlaloc_serve.pjrt.platforms import open_client
from tlaloc_serve.pjrt.plugin import AbiMismatch, Plugin

if TYPE_CHECKING:
    import subprocess

# Raised whenever this package asks more of a plugin than the version that remembered an answer did.
_RECORD_VERSION = 1
_TAIL_BYTES = 4096
_NO_DEVICE_CODES = (abi.FAILED_PRECONDITION, abi.NOT_FOUND, abi.UNAVAILABLE)
_NO_DEVICE = re.compile(
    r"no (visible |supported |available |\w+-capable )?(gpu|tpu|cuda|rocm|device|accelerator)|"
    r"NO_DEVICE|driver version is insufficient|libcuda",
    re.IGNORECASE,
)
_CHILD = "import sys; sys.path.insert(0, sys.argv[1]); from tlaloc_serve.pjrt import probe; probe.child(sys.argv[2:])"


@dataclass(frozen=True)
class ProbeResult:
    """What a plugin answered. `reason` is ok, no_device, load, abi, crash, timeout or error; `message` is one line.

    `devices` are (id, kind); `memory` is the first device's memory statistics in bytes, where it keeps any.
    `log` names the file with what the plugin wrote, empty where it was shown on the screen.
    """

    path: str
    reason: str
    message: str
    api_version: tuple[int, int] | None = None
    platform_name: str = ""
    platform_version: str = ""
    devices: tuple[tuple[int, str], ...] = ()
    memory: Mapping[str, int] | None = None
    attributes: Mapping[str, Any] | None = None
    seconds: float = 0.0
    log: str = ""
    remembered: bool = False

    @property
    def ok(self) -> bool:
        return self.reason == "ok"

    def to_dict(self) -> dict[str, Any]:
        """The same facts as plain JSON values."""
        return {**asdict(self), "ok": self.ok}


def probe(
    path: str,
    kind: str,
    timeout_s: float = 20.0,
    environ: Mapping[str, str] | None = None,
    log: str | None = None,
    *,
    fresh: bool = False,
) -> ProbeResult:
    """Open the plugin `path` and a client of it in a child process that is killed after `timeout_s` seconds.

    `kind` is the platform it was asked for, see `open_client`. What the plugin writes goes to its log in the cache
    folder, to the file `log`, or to the screen when that is `-`. `fresh` asks again although a good answer is
    remembered. Never raises for what the plugin does; RequestError when the file `log` cannot be written.
    """
    environ = os.environ if environ is None else environ
    record = cache.cache_folder(environ) / "preflight" / f"{cache.file_key(path)}.json"
    if not fresh and (known := _recall(record, path)) is not None:
        return known
    began = time.monotonic()
    if log == "-":
        result = _ask(path, kind, timeout_s, environ, 2, "")
    else:
        handle, name = cache.open_log(path, environ, log)
        try:
            result = _ask(path, kind, timeout_s, environ, handle, name)
        finally:
            os.close(handle)
    result = replace(result, seconds=round(time.monotonic() - began, 3))
    if result.ok:
        _remember(record, result)
    return result


def _ask(path: str, kind: str, timeout_s: float, environ: Mapping[str, str], handle: int, log: str) -> ProbeResult:
    # A start that remembers the answer need not load these, 9 ms.
    import subprocess
    import tempfile

    written = os.lseek(handle, 0, os.SEEK_END) if log else 0
    with tempfile.TemporaryFile() as answer:
        command = _command(path, kind, answer.fileno())
        try:
            process = subprocess.Popen(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=handle,
                pass_fds=[answer.fileno()],
                start_new_session=True,
            )
        except OSError as error:
            return ProbeResult(path, "error", f"cannot start {command[0]!r} to ask the plugin: {error.strerror}")
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                _kill_group(process)
        answer.seek(0)
        lines = answer.read().decode("utf-8", "replace").splitlines()
    return _read_answer(path, lines, code, timeout_s, log, written)


def _command(path: str, kind: str, answer: int) -> list[str]:
    """The child: this interpreter, isolated from the user's environment, with this package's folder on its path."""
    package_root = str(pathlib.Path(__file__).resolve().parents[2])
    return [sys.executable, "-I", "-S", "-c", _CHILD, package_root, str(answer), path, kind]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_answer(
    path: str, lines: list[str], code: int | None, timeout_s: float, log: str, written: int
) -> ProbeResult:
    """The child's last line is its answer; the lines before say what it was doing."""
    parts = [part for part in map(_parsed, lines) if part is not None]
    stage = next((part["stage"] for part in reversed(parts) if "stage" in part), "starting")
    seen = f"; what it wrote is in {log}" if log else ""
    if code is None:
        return ProbeResult(path, "timeout", f"no answer within {timeout_s:g} s while {stage}{seen}", log=log)
    if code == 0 and parts and "reason" in parts[-1]:
        fields = parts[-1]
        if fields["reason"] == "error":
            fields["message"] += seen
        version, devices = fields.get("api_version"), fields.get("devices", ())
        fields["api_version"] = tuple(version) if version else None
        fields["devices"] = tuple((device[0], device[1]) for device in devices)
        return ProbeResult(path=path, log=log, **fields)
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    last = _last_line(log, written) if log else ""
    return ProbeResult(path, "crash", f"{how} while {stage}{f': {last}' if last else ''}{seen}", log=log)


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _last_line(log: str, written: int) -> str:
    """The last line that came into `log` after its first `written` bytes."""
    try:
        with open(log, "rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(written if written <= size else 0, size - _TAIL_BYTES))
            lines = stream.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def child(arguments: list[str]) -> None:
    """The child's whole life: `arguments` are the answer's descriptor, the plugin and the platform asked for."""
    answer, path, platform = int(arguments[0]), arguments[1], arguments[2]
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a plugin that aborts leaves no core file behind

    def say(**fields: Any) -> None:
        os.write(answer, json.dumps(fields).encode() + b"\n")

    plugin: Plugin | None = None
    try:
        say(stage="loading and initialising it")
        plugin = Plugin.open(path)
        say(stage="opening a client")
        facts = _facts(plugin, platform)
        say(stage="closing the client")
        facts.pop("client").close()
        say(reason="ok", message="ok", **facts)
    except TlalocError as error:
        version = plugin.api_version if plugin else None
        say(reason=_reason(error), message=_text(error, path), api_version=version)
    sys.stdout.flush()
    os._exit(0)  # without the exit handlers of a plugin, which are no part of the question


def _facts(plugin: Plugin, platform: str) -> dict[str, Any]:
    client = open_client(plugin.path, platform, os.environ)
    return {
        "client": client,
        "api_version": plugin.api_version,
        "platform_name": client.platform_name,
        "platform_version": client.platform_version,
        "devices": [(device.id, device.kind) for device in client.devices],
        "memory": client.devices[0].memory_stats(),
        "attributes": plugin.attributes(),
    }


def _reason(error: TlalocError) -> str:
    if isinstance(error, AbiMismatch):
        return "abi"
    if isinstance(error, PluginError):
        return "no_device" if "no addressable device" in error.what else "load"
    if isinstance(error, PjrtError) and error.call == "PJRT_Client_Create":
        missing = error.code in _NO_DEVICE_CODES or _NO_DEVICE.search(error.detail)
        return "no_device" if missing else "error"
    return "error"


def _text(error: TlalocError, path: str) -> str:
    """One line, without the path, which the result has anyway."""
    return " ".join(str(error).removeprefix(f"{path}: ").split())


def _identity(path: str) -> dict[str, Any]:
    facts = os.stat(path)
    return {
        "version": _RECORD_VERSION,
        "path": os.path.realpath(path),
        "size": facts.st_size,
        "mtime_ns": facts.st_mtime_ns,
    }


def _recall(record: pathlib.Path, path: str) -> ProbeResult | None:
    """The remembered good answer for exactly this file; None when there is none that can be read."""
    try:
        stored = json.loads(record.read_bytes())
        if stored["file"] != _identity(path):
            return None
        fields = stored["result"]
        fields["path"] = path
        fields["api_version"] = (int(fields["api_version"][0]), int(fields["api_version"][1]))
        fields["devices"] = tuple((int(device[0]), str(device[1])) for device in fields["devices"])
        result = ProbeResult(**{**fields, "remembered": True})
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return None
    return result if result.ok else None


def _remember(record: pathlib.Path, result: ProbeResult) -> None:
    stored = {"file": _identity(result.path), "result": asdict(result)}
    with contextlib.suppress(OSError):
        cache.write_whole(record, json.dumps(stored).encode())
