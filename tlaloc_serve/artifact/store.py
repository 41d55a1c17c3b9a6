"""Open an artifact directory: containment, sizes, hashes. The bytes that were hashed are the bytes handed out.

Everything a plugin will be given is checked here, before anyone looks for a plugin. Bodies and the tokenizer are
read and hashed once and kept; weights are mapped on demand (read-only, private), so a weight's bytes exist once in
memory, in the page cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import pathlib
import stat
import time
from dataclasses import dataclass

from tlaloc_serve.artifact.body import Signature, check_signature, parse_signature
from tlaloc_serve.artifact.manifest import MANIFEST_NAME, Entry, Manifest, Weight, program_bytes
from tlaloc_serve.artifact.parse import parse_manifest, program_types
from tlaloc_serve.errors import ArtifactError

# A manifest or a body larger than this is not one: the largest real ones are a few MB.
_MAX_TEXT_BYTES = 1 << 30


_MADV_POPULATE_READ = 22  # of Linux's <asm-generic/mman-common.h>
_SLICE = 4 << 20  # bytes; a fraction of a millisecond where they are in memory
_AHEAD_SECONDS = 0.3  # 1 GB of page cache takes a tenth of a second


@dataclass(frozen=True)
class Body:
    """One StableHLO module: `data` is what was hashed and what gets compiled."""

    hash: str
    data: bytes
    signature: Signature


class Artifact:
    """An opened artifact. Holds the bodies in memory and no file open; `map_weight` maps one weight at a time.

    `weights_verified` says whether the hash of every weight was found right.
    """

    def __init__(
        self,
        root: pathlib.Path,
        manifest: Manifest,
        bodies: dict[str, Body],
        tokenizer: bytes | None,
    ):
        self.root = root
        self.manifest = manifest
        self.tokenizer = tokenizer
        self.weights_verified = False
        self._bodies = bodies
        self._mapped: dict[str, mmap.mmap] = {}

    def body(self, entry: Entry) -> Body:
        return self._bodies[entry.body_hash]

    def map_weight(self, weight: Weight) -> mmap.mmap:
        """The weight's bytes, mapped read-only and page-aligned. Raises ArtifactError if the file changed since."""
        return self._mapped.pop(weight.name, None) or _map(self.root, weight, f"weights.table {weight.name}")

    def check_weight(self, weight: Weight, data: mmap.mmap) -> None:
        """Hash the mapped bytes of a weight, without the interpreter lock. Raises ArtifactError for another hash."""
        digest = hashlib.sha256(data).hexdigest()
        if digest != weight.sha256:
            raise ArtifactError(
                self.root / weight.path,
                weight.name,
                "its bytes are not the ones that were exported",
                got=f"SHA-256 {digest}",
                want=weight.sha256,
                todo="copy or export the artifact again",
            )

    def check_weights(self) -> None:
        """Hash every weight. Raises the first one's ArtifactError."""
        from concurrent.futures import ThreadPoolExecutor  # 15 ms that most starts need not spend

        def check(weight: Weight) -> None:
            with _map(self.root, weight, f"weights.table {weight.name}") as data:
                self.check_weight(weight, data)

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for _ in pool.map(check, self.manifest.weights):
                pass
        self.weights_verified = True

    def map_ahead(self) -> None:
        """Map every weight for the `map_weight` to come, with its pages entered into the page table where Linux can.

        So the first step does not meet each page with a fault. Left out where the weights are more than half of this
        machine's memory, since pages would go as others come. No other thread runs Python during a slice: what is not
        in memory is left to the first step after `_AHEAD_SECONDS`.
        """
        deadline = time.monotonic() + _AHEAD_SECONDS
        if 2 * self.manifest.weight_bytes() > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"):
            return
        for weight in self.manifest.weights:
            data = self.map_weight(weight)
            with contextlib.suppress(OSError):  # before Linux 5.14
                for start in range(0, len(data), _SLICE):
                    if time.monotonic() < deadline:
                        data.madvise(_MADV_POPULATE_READ, start, min(_SLICE, len(data) - start))
            self._mapped[weight.name] = data


def open_artifact(path: str | os.PathLike[str], *, verify_weights: bool = False) -> Artifact:
    """Open and check the artifact at `path`; `path` may also name a manifest file inside one.

    Checks the manifest, every body's hash and signature, every program file, the tokenizer's hash and the size of every
    weight; with `verify_weights` the hash of every weight too. Raises ArtifactError with the file and the field.
    """
    given = pathlib.Path(path)
    root, name = (given.parent, given.name) if given.suffix == ".json" else (given, MANIFEST_NAME)
    if not root.is_dir():
        what = "not a directory" if root.exists() else "no such directory"
        raise ArtifactError(root, "", what, todo="name an artifact: a directory with a " + MANIFEST_NAME)
    if not os.path.lexists(root / name):
        raise ArtifactError(
            root, "", f"not an artifact: there is no {name} in it", todo="name the directory an export wrote"
        )
    root = root.resolve()
    source = str(given if given.suffix == ".json" else given / name)
    manifest = parse_manifest(_read(root, name, "", None, source), source)
    bodies: dict[str, Body] = {}
    for index, entry in enumerate(manifest.entries):
        _check_program(root, entry, f"entries[{index}]")
        if entry.body_hash not in bodies:
            bodies[entry.body_hash] = _read_body(root, entry, f"entries[{index}].bodyPath")
        check_signature(bodies[entry.body_hash].signature, entry, str(root / entry.body_path))
    tokenizer = None
    if manifest.frontend.tokenizer is not None:
        file = manifest.frontend.tokenizer
        tokenizer = _read(root, file.path, "frontend.tokenizer", file.sha256, source, file.byte_length)
    for index, weight in enumerate(manifest.weights):
        _check_size(_locate(root, weight.path, f"weights.table[{index}].path", source), weight)
    artifact = Artifact(root, manifest, bodies, tokenizer)
    if verify_weights:
        artifact.check_weights()
    return artifact


def _locate(root: pathlib.Path, relative: str, field: str, source: str) -> pathlib.Path:
    """The regular file `relative` names, guaranteed to lie inside `root` after following links."""
    if not relative or "\0" in relative or os.path.isabs(relative) or ".." in pathlib.PurePosixPath(relative).parts:
        raise ArtifactError(
            source,
            field,
            "the path may not leave the artifact",
            got=repr(relative),
            want="a relative path without `..`",
        )
    try:
        resolved = (root / relative).resolve(strict=True)
        status = os.stat(resolved)
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else "a loop of symbolic links"
        raise ArtifactError(
            root / relative,
            field,
            f"cannot be read: {reason}",
            todo="the artifact is incomplete: copy or export it again",
        ) from None
    if not resolved.is_relative_to(root):
        raise ArtifactError(
            root / relative,
            field,
            "a symbolic link leaves the artifact",
            got=str(resolved),
            want=f"a file below {root}",
        )
    if not stat.S_ISREG(status.st_mode):
        raise ArtifactError(root / relative, field, "not a regular file")
    return resolved


def _read(
    root: pathlib.Path, relative: str, field: str, sha256: str | None, source: str, length: int | None = None
) -> bytes:
    path = _locate(root, relative, field, source)
    size = path.stat().st_size
    if length is not None and size != length:
        raise ArtifactError(root / relative, field, "wrong size", got=f"{size} bytes", want=f"{length} bytes")
    if size > _MAX_TEXT_BYTES:
        raise ArtifactError(root / relative, field, "too large for what it should be", got=f"{size} bytes")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ArtifactError(root / relative, field, f"cannot be read: {error.strerror}") from None
    if sha256 is not None:
        digest = hashlib.sha256(data).hexdigest()
        if digest != sha256:
            raise ArtifactError(
                root / relative,
                field,
                "its bytes are not the ones that were exported",
                got=f"SHA-256 {digest}",
                want=sha256,
                todo="copy or export the artifact again",
            )
    return data


def _read_body(root: pathlib.Path, entry: Entry, field: str) -> Body:
    data = _read(root, entry.body_path, field, entry.body_hash, str(root))
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise ArtifactError(root / entry.body_path, field, "not UTF-8 text", want="textual StableHLO") from None
    return Body(entry.body_hash, data, parse_signature(text, str(root / entry.body_path)))


def _check_program(root: pathlib.Path, entry: Entry, field: str) -> None:
    path = root / entry.program_path
    data = _read(root, entry.program_path, f"{field}.programPath", None, str(root))
    if data == program_bytes(entry):  # as this package writes it: there is nothing to parse
        return
    program = program_types(data, str(path))
    expected = {
        "bodyHash": entry.body_hash,
        "inputs": tuple(slot.type for slot in entry.inputs),
        "outputs": tuple(slot.type for slot in entry.outputs),
    }
    for key, want in expected.items():
        if program[key] != want:
            got = program[key]
            if isinstance(want, tuple) and len(got) == len(want):
                index = next(i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b)
                key, got, want = f"{key}[{index}]", got[index], want[index]
            elif isinstance(want, tuple):
                got, want = f"{len(got)} of them", str(len(want))
            raise ArtifactError(path, key, "the program file disagrees with the manifest", got=got, want=want)


def _check_size(path: pathlib.Path, weight: Weight) -> None:
    size = path.stat().st_size
    if size != weight.byte_length:
        raise ArtifactError(
            path,
            weight.name,
            "the weight file has the wrong size",
            got=f"{size} bytes",
            want=f"{weight.byte_length} bytes",
            todo="copy or export the artifact again",
        )


def _map(root: pathlib.Path, weight: Weight, field: str) -> mmap.mmap:
    path = _locate(root, weight.path, field, str(root))
    try:
        with open(path, "rb") as file:
            # The size once more, of the very file that gets mapped: reading past its end would be a bus error.
            if os.fstat(file.fileno()).st_size != weight.byte_length:
                _check_size(path, weight)
            return mmap.mmap(file.fileno(), weight.byte_length, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    except OSError as error:
        raise ArtifactError(path, weight.name, f"cannot be mapped: {error.strerror}") from None
