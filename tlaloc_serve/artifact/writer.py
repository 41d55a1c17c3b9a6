"""Write an artifact directory: beside its final name, the manifest last, moved into place at the end.

Rules: nothing that is not an artifact is ever overwritten. Until `commit` the destination is as it was; a crash, a
full disk or Ctrl-C leaves at most a folder `.NAME.tmp-PID` beside it, which the next export to that name removes. An
export that fails removes that folder itself, and the parents that it made.
Nothing is flushed to the disk, which would cost more than the writing: after a power cut a reader refuses a manifest or
a body that is damaged and a weight of the wrong size, and with `--verify-weights` one of the wrong content.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pathlib
import re
import shutil
from types import TracebackType

from tlaloc_serve.artifact.manifest import MANIFEST_NAME, SCHEMA_PREFIX, Manifest
from tlaloc_serve.errors import ExportError

_OWN_NAMES = re.compile(r"tlaloc-serving[\w.-]*\.json|bodies|programs|weights|tokenizer\.json")


def check_destination(path: pathlib.Path) -> None:
    """Refuse to write over anything but an artifact or an empty directory. Raises ExportError; touches nothing."""
    todo = "choose another --out, or remove it yourself"
    if not os.path.lexists(path):
        above = next(parent for parent in path.parents if parent.exists())
        if not above.is_dir():
            raise ExportError(str(above), f"is no directory, so that {path} cannot be made", todo=todo)
        return
    if not path.is_dir():
        raise ExportError(str(path), "is there already and is no directory", todo=todo)
    names = sorted(entry.name for entry in os.scandir(path))
    if not names:
        return
    if not _is_artifact(path):
        raise ExportError(str(path), f"is there already and is no artifact: no readable {MANIFEST_NAME}", todo=todo)
    foreign = [name for name in names if not _OWN_NAMES.fullmatch(name)]
    if foreign:
        raise ExportError(
            str(path), "an artifact, but it also holds what an export would delete", got=foreign[0], todo=todo
        )


def _is_artifact(path: pathlib.Path) -> bool:
    try:
        document = json.loads((path / MANIFEST_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(document, dict) and str(document.get("schemaVersion")).startswith(SCHEMA_PREFIX)


class ArtifactWriter:
    """A context manager: write into `folder`, then `commit`. Leaving without a commit removes all that was written."""

    def __init__(self, destination: str | os.PathLike[str]):
        self.destination = pathlib.Path(os.path.realpath(destination))
        if not self.destination.name:
            raise ExportError(str(destination), "is no place for an artifact", want="a directory name")
        self.folder = self._sibling("tmp", os.getpid())
        self._committed = False
        self._made: list[pathlib.Path] = []  # parents that were not there before, the innermost first

    def _sibling(self, kind: str, pid: int) -> pathlib.Path:
        return self.destination.with_name(f".{self.destination.name}.{kind}-{pid}")

    def __enter__(self) -> ArtifactWriter:
        check_destination(self.destination)
        self._made = [parent for parent in self.destination.parents if not parent.exists()]
        try:
            self.destination.parent.mkdir(parents=True, exist_ok=True)
            self._clear_stale()
            self.folder.mkdir()
        except OSError as error:
            raise write_failure(self.destination, error) from None
        self.make_folder("bodies")
        self.make_folder("programs")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # somebody else has put something there
                for parent in self._made:
                    parent.rmdir()

    def make_folder(self, name: str) -> None:
        """Make a folder under the folder."""
        try:
            (self.folder / name).mkdir()
        except OSError as error:
            raise write_failure(self.destination / name, error) from None

    def write(self, relative: str, data: bytes) -> None:
        """Write one file under the folder; its parent exists."""
        try:
            (self.folder / relative).write_bytes(data)
        except OSError as error:
            raise write_failure(self.destination / relative, error) from None

    def write_body(self, text: str) -> str:
        """Write a body under the name of its SHA-256, and return that hash."""
        data = text.encode("ascii")
        digest = hashlib.sha256(data).hexdigest()
        self.write(f"bodies/{digest}.mlir", data)
        return digest

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest, then move the folder to its final name. An artifact that was there is replaced."""
        data = json.dumps(manifest.to_json(), separators=(",", ":"), ensure_ascii=False).encode("utf-8")
        self.write(MANIFEST_NAME, data)
        try:
            self._move()
        except OSError as error:
            raise write_failure(self.destination, error) from None

    def _move(self) -> None:
        check_destination(self.destination)  # it may have changed in the meantime
        if not self.destination.is_dir():
            os.rename(self.folder, self.destination)
            self._committed = True
            return
        old = self._sibling("old", os.getpid())
        os.rename(self.destination, old)
        try:
            os.rename(self.folder, self.destination)
        except BaseException:
            os.rename(old, self.destination)
            raise
        self._committed = True
        shutil.rmtree(old, ignore_errors=True)

    def _clear_stale(self) -> None:
        """Finish what dead exports to this name left: put a moved-away artifact back, remove unfinished folders."""
        pattern = re.compile(rf"\.{re.escape(self.destination.name)}\.(tmp|old)-(\d+)")
        for entry in sorted(os.scandir(self.destination.parent), key=lambda entry: entry.name):
            match = pattern.fullmatch(entry.name)
            if match is None or not entry.is_dir(follow_symlinks=False) or _alive(int(match.group(2))):
                continue
            if match.group(1) == "old" and not os.path.lexists(self.destination):
                os.rename(entry.path, self.destination)
            else:
                shutil.rmtree(entry.path)


def write_failure(path: str | os.PathLike[str], error: OSError) -> ExportError:
    """An OSError from writing, as the error that names the file and what to do."""
    todo = "free some space or choose another --out" if error.errno in (28, 122) else None  # ENOSPC, EDQUOT
    return ExportError(str(path), f"cannot be written: {error.strerror}", todo=todo)


def _alive(pid: int) -> bool:
    if pid == os.getpid():
        return False  # an earlier process of this number: this one has not begun yet
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True
