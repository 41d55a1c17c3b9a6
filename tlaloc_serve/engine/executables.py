"""Compiled programs on disk: one file a program below the user's cache folder.

Rules. A file is believed only when its digest holds over everything in it and over the key that it is stored under;
anything else there (damaged, cut short, of another format, of another user) is a miss and is removed. Files appear
whole. Nothing that the disk does is an error: what cannot be kept is one warning, what cannot be read is a miss.
The least recently used go first when the folder outgrows its limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import stat
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tlaloc_serve.errors import RequestError
from tlaloc_serve.pjrt.cache import cache_folder, write_whole

MAX_BYTES = "TLALOC_CACHE_MAX_BYTES"
DEFAULT_MAX_BYTES = 1 << 30
FOLDER = "executables"

_SUFFIX = ".executable"
_MAGIC = b"tlaloc-executable-1\n"
_DIGEST_BYTES = 32
_FACTS_LENGTH = struct.Struct("<I")
_HEADER_BYTES = len(_MAGIC) + _DIGEST_BYTES + _FACTS_LENGTH.size
# What a writer that was killed leaves behind is removed when it is this old.
_ABANDONED_SECONDS = 3600.0


@dataclass(frozen=True)
class Stored:
    """A serialised program, and what its maker wants to know again when it is loaded (plain JSON values)."""

    payload: bytes
    facts: Mapping[str, Any]


class ExecutableCache:
    """Programs by key (64 hex digits) in `folder`, which need not exist. `warning` says why programs are not kept."""

    def __init__(self, folder: pathlib.Path, max_bytes: int = DEFAULT_MAX_BYTES):
        self.folder = folder
        self.max_bytes = max_bytes
        self.warning: str | None = None

    @classmethod
    def of_user(cls, environ: Mapping[str, str]) -> ExecutableCache:
        """The one below the user's cache folder. Raises RequestError for a malformed TLALOC_CACHE_MAX_BYTES."""
        text = environ.get(MAX_BYTES, "")
        if text and not text.isdecimal():
            raise RequestError(
                MAX_BYTES, "not a number of bytes", got=repr(text), want="a whole number", todo="correct or unset it"
            )
        return cls(cache_folder(environ) / FOLDER, int(text) if text else DEFAULT_MAX_BYTES)

    def load(self, key: str) -> Stored | None:
        """What was stored under `key`, or None. Marks it as used now."""
        path = self._path(key)
        try:
            data = _read_own(path)
        except FileNotFoundError:
            return None
        except OSError:
            self.discard(key)
            return None
        stored = None if data is None else _unpack(data, key)
        if stored is None:
            self.discard(key)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return stored

    def store(self, key: str, stored: Stored) -> None:
        """Keep `stored`, and make room for it; where that is impossible `warning` says so."""
        data = _pack(key, stored)
        if len(data) > self.max_bytes:
            self.warning = f"{self.folder}: a program of {len(data)} bytes is more than {MAX_BYTES} {self.max_bytes}"
            return
        try:
            write_whole(self._path(key), data)
            self._trim()
        except OSError as error:
            reason = error.strerror or str(error)
            self.warning = f"{self.folder}: {reason}; compiled programs are not kept for the next start"

    def discard(self, key: str) -> None:
        """Remove what is stored under `key`, if that is possible."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(key))

    def _path(self, key: str) -> pathlib.Path:
        return self.folder / (key + _SUFFIX)

    def _trim(self) -> None:
        """Remove the least recently used programs until the rest fits. Other processes may be doing the same."""
        found: list[tuple[int, int, str]] = []
        with os.scandir(self.folder) as listing:
            for item in listing:
                with contextlib.suppress(FileNotFoundError):
                    status = item.stat(follow_symlinks=False)
                    if item.name.endswith(_SUFFIX):
                        found.append((status.st_mtime_ns, status.st_size, item.path))
                    elif item.name.startswith(".writing-") and time.time() - status.st_mtime > _ABANDONED_SECONDS:
                        os.unlink(item.path)
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.max_bytes:
                break
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            total -= size


def _read_own(path: pathlib.Path) -> bytes | None:
    """The bytes of a regular file that belongs to this user, else None: what is in it will be run."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as stream:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            return None
        return stream.read()


def _digest(key: str, rest: memoryview | bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + rest).digest()


def _pack(key: str, stored: Stored) -> bytes:
    facts = json.dumps(stored.facts).encode()
    rest = _FACTS_LENGTH.pack(len(facts)) + facts + stored.payload
    return _MAGIC + _digest(key, rest) + rest


def _unpack(data: bytes, key: str) -> Stored | None:
    """What `_pack` packed under `key`, None for any other bytes."""
    body = len(_MAGIC) + _DIGEST_BYTES
    if len(data) < _HEADER_BYTES or not data.startswith(_MAGIC):
        return None
    if _digest(key, memoryview(data)[body:]) != data[len(_MAGIC) : body]:
        return None
    middle = _HEADER_BYTES + _FACTS_LENGTH.unpack_from(data, body)[0]
    return Stored(data[middle:], json.loads(data[_HEADER_BYTES:middle]))
