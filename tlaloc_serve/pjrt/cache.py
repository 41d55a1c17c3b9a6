"""The user's cache folder: fetched plugins, what preflight remembers, and the logs that plugins write.

Rules. Everything in it can be deleted at any time. A folder that cannot be written to is never an error here: nothing
is remembered then, and logs go to the folder for temporary files. Files appear whole (written aside, then renamed).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
from collections.abc import Mapping

from tlaloc_serve.errors import RequestError

CACHE_DIR = "TLALOC_CACHE_DIR"
# A log that has grown past this is started afresh by the next process that opens it.
_LOG_LIMIT_BYTES = 1 << 20


def home(environ: Mapping[str, str]) -> pathlib.Path:
    """The user's home folder: $HOME, or what the system says where that is not set."""
    return pathlib.Path(environ.get("HOME") or os.path.expanduser("~"))


def cache_folder(environ: Mapping[str, str]) -> pathlib.Path:
    """$TLALOC_CACHE_DIR, or ~/.cache/tlaloc. It need not exist."""
    named = environ.get(CACHE_DIR)
    return pathlib.Path(named) if named else home(environ) / ".cache" / "tlaloc"


def file_key(path: str | os.PathLike[str]) -> str:
    """A short name for a file's real path, the same in every process."""
    return hashlib.sha256(os.fsencode(os.path.realpath(path))).hexdigest()[:16]


def write_whole(path: pathlib.Path, data: bytes) -> None:
    """Write `data` to `path` so that a reader sees all of it or what was there before. Raises OSError."""
    import tempfile  # 5 ms that a start which writes nothing need not spend

    path.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=".writing-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
        os.replace(aside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(aside)
        raise


def open_log(plugin: str | os.PathLike[str], environ: Mapping[str, str], named: str | None = None) -> tuple[int, str]:
    """A descriptor that appends to the log file of `plugin`, and the file's path. The caller closes it.

    `named` is the file that the user wants it in; RequestError when that cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
    if named is not None:
        try:
            return os.open(named, flags, 0o600), named
        except OSError as error:
            raise RequestError(
                "--plugin-log",
                f"cannot write to {named}",
                got=error.strerror,
                todo="name another file, or - for the screen",
            ) from None
    path = cache_folder(environ) / "logs" / f"{pathlib.PurePath(plugin).stem}-{file_key(plugin)}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, flags, 0o600)
        if os.fstat(handle).st_size > _LOG_LIMIT_BYTES:
            os.ftruncate(handle, 0)
        return handle, str(path)
    except OSError:
        pass
    import tempfile

    try:
        return tempfile.mkstemp(prefix="tlaloc-plugin-", suffix=".log")
    except OSError:
        return os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), os.devnull
