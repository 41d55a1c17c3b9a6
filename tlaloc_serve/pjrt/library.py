"""Loads the shared library of a plugin and finds its entry point.

Rules. The plain mistakes (nothing there, a folder, a text file, half a file) are named before the loader sees them:
it words them in its own way, and a file that is cut short would take the process down. A missing dependency is named
together with the plugin that needs it. The library is never unloaded.
"""

from __future__ import annotations

import ctypes
import os
import pathlib
import re
import struct
from typing import BinaryIO

from tlaloc_serve.errors import PluginError

_MISSING_LIBRARY = re.compile(r"^(?P<library>[^:\s]+): cannot open shared object file")
_NAME_IT = "name the plugin's .so file"
_PT_LOAD = 1

# Device, inode, size, and the times of the last change to the data and to the inode, in nanoseconds.
FileState = tuple[int, int, int, int, int]


def file_state(path: str) -> FileState | None:
    """What changes whenever the file `path` does, by whatever tool; None where there is none to ask."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def load(path: str) -> int:
    """Load the library `path` and return the address of its PJRT_Api. Raises PluginError when there is none."""
    _check_file(path)
    try:
        library = ctypes.CDLL(os.path.abspath(path), mode=ctypes.RTLD_LOCAL)
    except OSError as error:
        raise _load_error(path, str(error)) from None
    try:
        get_api = library.GetPjrtApi
    except AttributeError:
        raise PluginError(
            path, "a shared library, but not a PJRT plugin", got="no function GetPjrtApi", todo="name a PJRT plugin"
        ) from None
    get_api.restype = ctypes.c_void_p
    get_api.argtypes = ()
    api = get_api()
    if not api:
        raise PluginError(path, "GetPjrtApi returned nothing", todo="use another plugin")
    return int(api)


def _check_file(path: str) -> None:
    file = pathlib.Path(path)
    try:
        if not file.exists():
            raise PluginError(path, "no such file", todo=_NAME_IT)
        if not file.is_file():
            raise PluginError(path, "not a file", got="a folder" if file.is_dir() else "something else", todo=_NAME_IT)
        with file.open("rb") as stream:
            magic = stream.read(4)
            if magic != b"\x7fELF":
                raise PluginError(
                    path,
                    "not a shared library",
                    got=f"a file that starts with {magic!r}",
                    want="an ELF file",
                    todo=_NAME_IT,
                )
            size = os.fstat(stream.fileno()).st_size
            end = _loaded_end(stream)
    except (OSError, RuntimeError) as error:
        raise PluginError(path, "cannot be read", got=error, todo="check its permissions") from None
    if end > size:
        raise PluginError(path, "cut short", got=f"{size} bytes", want=f"at least {end}", todo="copy or fetch it again")


def _loaded_end(stream: BinaryIO) -> int:
    """How long a 64-bit little-endian ELF file must be to hold what is loaded from it; 64 if that cannot be read.

    Field offsets are those of Elf64_Ehdr (e_phoff 32, e_phentsize 54, e_phnum 56) and Elf64_Phdr (p_type 0,
    p_offset 8, p_filesz 32).
    """
    stream.seek(0)
    header = stream.read(64)
    if len(header) < 64 or header[4:6] != b"\x02\x01":
        return 64
    table, entry, count = struct.unpack_from("<Q14xHH", header, 32)
    end = int(table + entry * count)
    stream.seek(table)
    for _ in range(count):
        segment = stream.read(entry)
        if len(segment) < 40:
            break
        if struct.unpack_from("<I", segment)[0] == _PT_LOAD:
            offset, filesz = struct.unpack_from("<Q16xQ", segment, 8)
            end = max(end, offset + filesz)
    return end


def _load_error(path: str, text: str) -> PluginError:
    missing = _MISSING_LIBRARY.match(text)
    if missing and os.path.basename(missing["library"]) != os.path.basename(path):
        library = missing["library"]
        return PluginError(
            path,
            f"cannot be loaded, it needs the library {library}, which was not found",
            todo=f"install the package that has {library}, or add its folder to LD_LIBRARY_PATH",
        )
    return PluginError(path, "cannot be loaded", got=text, todo="check that the file is whole and for this machine")
