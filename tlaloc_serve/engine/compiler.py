"""Turns a body into an executable: which compile options it gets, and whether a program on disk saves compiling it.

Rules. An option goes to the plugin only if it is in the table below, for a measured reason, or the user asked for it;
the user's word goes before the table's. An option that the plugin does not know is a named warning and the compile
goes on without it; a value that it does not take in any encoding is an error. A program from the disk is used only
under a key that covers everything it depends on; one that the plugin does not load is removed and compiled again.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from tlaloc_serve.engine.executables import ExecutableCache, Stored
from tlaloc_serve.engine.fingerprint import fingerprint
from tlaloc_serve.errors import PjrtError, PluginError, RequestError
from tlaloc_serve.pjrt.client import Client, Executable
from tlaloc_serve.pjrt.compile_options import compile_options

Value = bool | int | float | str

_UNKNOWN = re.compile(r"No such compile option: '([^']*)'")
_WRONG_TYPE = re.compile(r"While setting option (\S+), .* is not a valid (\w+) value")
_INTEGER = re.compile(r"-?[0-9]{1,19}")
_NUMBER = re.compile(r"-?[0-9]+\.?[0-9]*(?:[eE][-+]?[0-9]+)?")
# `%a = reshape %pool : [N, S, ...] -> [N * S, ...]`, and the scatter that writes into `%a`.
_FLAT_POOL = re.compile(
    rb"(%[\w$.]+) = stablehlo\.reshape %[\w$.]+ : \(tensor<(\d+)x(\d+)x(\d+x\d+x\w+)>\) -> tensor<(\d+)x\4>"
)
_WIDENING = re.compile(rb"stablehlo\.convert %[\w#]+ : \(tensor<\d+x\d+xi8>\) -> tensor<\d+x\d+xf32>")
_SCATTER = re.compile(rb'"?stablehlo\.scatter"?\s*\((%[\w$.]+)\s*,')


def writes_flat_pool(body: bytes) -> bool:
    """Whether `body` (textual StableHLO) updates a KV pool through `reshape, scatter, reshape back`."""
    written = set(_SCATTER.findall(body))
    return any(
        int(pages) * int(size) == int(slots)
        for name, pages, size, _, slots in (_FLAT_POOL.findall(body) if written else ())
        if name in written
    )


def widens_weights(body: bytes) -> bool:
    """Whether `body` widens i8 matrices to f32."""
    return _WIDENING.search(body) is not None


@dataclass(frozen=True)
class Default:
    """An option that helps the bodies for which `applies` on one platform, and why.

    `instead` is the name and the value by which older plugins know it: used where the plugin has no option `name`.
    """

    platform: str
    name: str
    value: str
    reason: str
    applies: Callable[[bytes], bool]
    instead: tuple[str, str] | None = None


# Measured with bodies at the size of SmolLM2-135M (30 layers, context 64, batch 1) on the three published CPU plugins.
DEFAULTS = (
    Default(
        "cpu",
        "xla_disable_hlo_passes",
        "scatter_expander",
        # With the expander the KV side of a step takes 60 ms at 64 pages and 500 to 600 ms at 1,024; without it 1 to
        # 2 ms at both (`python3 -m tests.flat_pools`).
        "this body writes its KV pools through a reshape, and the expanded scatter copies each pool twice a step",
        writes_flat_pool,
    ),
    Default(
        "cpu",
        "xla_cpu_scheduler_type",
        "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
        # 50 million i8 weights times 8 rows: 10 instead of 76 ms on PJRT 0.106, 18 instead of 76 ms on 0.81; no change
        # on 0.115.
        "this body widens i8 weights, and the default schedule widens all of them before the first product",
        widens_weights,
        instead=("xla_cpu_enable_concurrency_optimized_scheduler", "false"),
    ),
)


@dataclass(frozen=True)
class Compilation:
    """How one executable came to be. `options` are those it was compiled with, `seconds` what it took to have it.

    `reasons` says why the table of defaults chose an option, by its name.
    """

    what: str
    cached: bool
    seconds: float
    options: Mapping[str, Value]
    reasons: Mapping[str, str]


@dataclass(frozen=True)
class Compiled:
    """An executable, which the caller closes, and how it came to be."""

    executable: Executable
    compilation: Compilation


class _Ahead(NamedTuple):
    """A program from the disk, the options it was compiled with, and what it took to load it."""

    executable: Executable
    options: dict[str, Value]
    seconds: float


class Compiler:
    """Compiles for one client, and remembers what it did: `log` in order, `warnings` each once.

    `options` are the user's, by name without `--`, as text: `true` and `false` are booleans, a number is a number.
    """

    def __init__(self, client: Client, options: Mapping[str, str] | None = None, cache: ExecutableCache | None = None):
        self.log: list[Compilation] = []
        self.warnings: list[str] = []
        self._client = client
        self._options = dict(options or {})
        self._cache = cache
        self._fingerprint: str | None = None
        # By name and text of an option: which of its encodings to use, or None where the plugin has no such option.
        self._attempts: dict[tuple[str, str], int | None] = {}
        self._ahead: dict[str, _Ahead] = {}
        self._rows: dict[int, dict[str, Default]] = {}  # by the hash of a body: searching one takes 10 ms

    def close(self) -> None:
        """Destroy what was loaded ahead and never asked for; idempotent."""
        while self._ahead:
            self._ahead.popitem()[1].executable.close()

    def find(self, body: bytes) -> Callable[[], None] | None:
        """What loads the program of `body` for the `compile` that will ask for it; None where the disk has none.

        The loading is the plugin's work, during which another thread can run Python.
        """
        begin = time.perf_counter()
        key = self._key(body, self._wanted(body)[0])
        stored = self._cache.load(key) if self._cache is not None and key else None
        if key is None or stored is None:
            return None
        searched = time.perf_counter() - begin

        def load() -> None:
            if key in self._ahead:
                return
            begin = time.perf_counter() - searched
            loaded = self._deserialize(key, stored)
            if loaded is not None:
                self._ahead[key] = _Ahead(*loaded, time.perf_counter() - begin)

        return load

    def compile(self, body: bytes, what: str, source: str = "") -> Compiled:
        """The executable of `body`, from the disk where that is possible. `what` and `source` name it in messages.

        Raises PjrtError when the plugin rejects the body, OutOfMemory, and RequestError for an option's value.
        """
        begin = time.perf_counter()
        wanted, rows = self._wanted(body)
        key = self._key(body, wanted)
        ahead = self._ahead.pop(key, None) if key else None
        loaded = ahead[:2] if ahead else self._load(key) if key else None
        if loaded is not None:
            executable, options = loaded
            begin -= ahead.seconds if ahead else 0.0
        else:
            executable, options = self._compile(body, wanted, rows, f"{what} ({source})" if source else what)
            if key:
                self._store(key, executable, options)
        kept = {name: row.reason for name, row in rows.items() if name in options}
        for name in wanted.keys() - options.keys():
            instead = rows[name].instead if name in rows else None
            if instead is not None and instead[0] in options:
                kept[instead[0]] = rows[name].reason
            else:
                self._warn(f"the plugin has no compile option {name}; compiled without it")
        compilation = Compilation(what, loaded is not None, time.perf_counter() - begin, options, kept)
        self.log.append(compilation)
        return Compiled(executable, compilation)

    def _wanted(self, body: bytes) -> tuple[dict[str, str], dict[str, Default]]:
        """The options that this body should get, and the rows of those that come from the table, by name."""
        rows = self._rows.get(hash(body))
        if rows is None:
            rows = self._rows[hash(body)] = {
                row.name: row
                for row in DEFAULTS
                if row.platform == self._client.platform_name
                and row.name not in self._options
                and not (row.instead and row.instead[0] in self._options)
                and row.applies(body)
            }
        return {name: row.value for name, row in rows.items()} | self._options, rows

    def _compile(
        self, body: bytes, wanted: Mapping[str, str], rows: Mapping[str, Default], what: str
    ) -> tuple[Executable, dict[str, Value]]:
        """Compile with as many of the options as the plugin knows. A refused option costs a few milliseconds."""
        while True:
            texts = dict(self._known(wanted, rows))
            options = {name: encodings(text)[self._attempts.get((name, text)) or 0] for name, text in texts.items()}
            try:
                return self._client.compile(body, compile_options(overrides=options)), options
            except PjrtError as error:
                if not self._learn(error, texts):
                    detail = f"the plugin cannot compile {what}: {error.detail}"
                    raise type(error)(error.call, error.code, error.code_name, detail) from None

    def _known(self, wanted: Mapping[str, str], rows: Mapping[str, Default]) -> Iterator[tuple[str, str]]:
        """Name and text of the options that the plugin was not yet heard to lack, or of what stands for them."""
        for option in wanted.items():
            instead = rows[option[0]].instead if option[0] in rows else None
            for choice in (option, instead):
                if choice is not None and self._attempts.get(choice, 0) is not None:
                    yield choice
                    break

    def _learn(self, error: PjrtError, texts: Mapping[str, str]) -> bool:
        """Take from a refusal what to do with the option that it names; False when it names none of `texts`."""
        unknown = _UNKNOWN.search(error.detail)
        if unknown and unknown[1] in texts:
            self._attempts[unknown[1], texts[unknown[1]]] = None
            return True
        wrong = _WRONG_TYPE.search(error.detail)
        if not wrong or wrong[1] not in texts:
            return False
        option = wrong[1], texts[wrong[1]]
        attempt = (self._attempts.get(option) or 0) + 1
        if attempt == len(encodings(option[1])) and option[0] not in self._options:
            self._attempts[option] = None  # the table's value is not one of this plugin's
            return True
        if attempt == len(encodings(option[1])):
            where, got = f"compile option {option[0]}", repr(option[1])
            raise RequestError(where, "a value that the plugin does not take", got=got, want=wrong[2]) from None
        self._attempts[option] = attempt
        return True

    def _key(self, body: bytes, wanted: Mapping[str, str]) -> str | None:
        """What the program of `body` is stored under; None when programs cannot be kept."""
        if self._cache is None:
            return None
        if self._fingerprint is None:
            self._fingerprint = fingerprint(self._client, self._cache.folder)
            if self._fingerprint is None:
                self._cannot_keep("the plugin's file or this processor cannot be identified")
                return None
        digest = hashlib.sha256(self._fingerprint.encode())
        options = compile_options(overrides=wanted)
        digest.update(len(options).to_bytes(8, "little") + options + body)
        return digest.hexdigest()

    def _load(self, key: str) -> tuple[Executable, dict[str, Value]] | None:
        stored = self._cache.load(key) if self._cache is not None else None
        return None if stored is None else self._deserialize(key, stored)

    def _deserialize(self, key: str, stored: Stored) -> tuple[Executable, dict[str, Value]] | None:
        try:
            return self._client.deserialize(stored.payload), dict(stored.facts["options"])
        except (PjrtError, PluginError):
            if self._cache is not None:
                self._cache.discard(key)
            return None

    def _store(self, key: str, executable: Executable, options: Mapping[str, Value]) -> None:
        if self._cache is None:
            return
        try:
            payload = executable.serialize()
        except (PjrtError, PluginError) as error:
            self._cannot_keep(str(error))
            return
        self._cache.store(key, Stored(payload, {"options": dict(options)}))
        if self._cache.warning is not None:
            self._warn(f"compile cache: {self._cache.warning}")

    def _cannot_keep(self, reason: str) -> None:
        self._cache = None
        self._warn(f"compile cache: off, {reason}")

    def _warn(self, text: str) -> None:
        if text not in self.warnings:
            self.warnings.append(text)


def encodings(text: str) -> tuple[Value, ...]:
    """The values that the text of an option may stand for, the likeliest first.

    XLA reads a number, but no boolean, from a string too, and a flag that holds text takes nothing but a string.
    """
    if text in ("true", "false"):
        return text == "true", text
    if _INTEGER.fullmatch(text) and -(2**63) <= int(text) < 2**63:
        return (int(text), text, text == "1") if text in ("0", "1") else (int(text), text)
    if _NUMBER.fullmatch(text):
        return float(text), text
    return (text,)
