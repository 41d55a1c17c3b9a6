"""The boundary of a body: the types of `@main`, and which parameters XLA will alias. Reads text, compiles nothing.

The manifest says which pool an output replaces; only the body says whether XLA consumes the input doing so
(`tf.aliasing_output` on the parameter). A runtime that guessed wrong would use a freed buffer or leak a pool, so the
signature is read here and checked against the manifest before anything runs.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

from tlaloc_serve.artifact.manifest import DTYPE_BYTES, Entry, TensorType, tensor_type
from tlaloc_serve.errors import ArtifactError

_MAIN = re.compile(r"\bfunc\.func\s+(?:public\s+)?@main\s*\(")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)([a-z]\w*)>")
_PARAMETER = re.compile(r"%[\w$.]+\s*:\s*(tensor<[^>]*>)\s*(\{.*\})?(?:\s*loc\(.*\))?", re.DOTALL)
# A parameter or a result in its common form, up to the comma or the bracket behind it.
_PLAIN_PARAMETER = re.compile(r"\s*%[\w$.]+\s*:\s*(tensor<[^<>]*>)\s*(\{[^{}\"]*\})?\s*([,)])")
_PLAIN_RESULT = re.compile(r"\s*(tensor<[^<>]*>)\s*(\{[^{}\"]*\})?\s*([,)])")
_ALIAS = re.compile(r"tf\.aliasing_output\s*=\s*(\d+)")
# MLIR spells a few dtypes otherwise than the manifest does.
_MLIR_DTYPES = {"ui8": "u8", "ui16": "u16", "ui32": "u32", "ui64": "u64"}


@dataclass(frozen=True)
class Signature:
    """`aliases` maps the index of a parameter to the output that takes over its memory."""

    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]
    aliases: dict[int, int]


def parse_signature(text: str, source: str) -> Signature:
    """Read the signature of `@main` in a StableHLO module. Raises ArtifactError when it cannot be read."""
    main = _MAIN.search(text)
    if main is None:
        raise ArtifactError(source, "", "no `func.func @main(` in this body", want="textual StableHLO")
    plain = _plain(_PLAIN_PARAMETER, text, main.end())
    if plain is None:
        end = _closing(text, main.end() - 1, source)
        parameters = [_parameter(part, source) for part in _split(text[main.end() : end])]
    else:
        parameters, end = plain
    inputs = tuple(_tensor(type, source) for type, _ in parameters)
    aliases = {}
    for index, (_, attributes) in enumerate(parameters):
        alias = _ALIAS.search(attributes) if attributes else None
        if alias is not None:
            aliases[index] = int(alias.group(1))
    return Signature(inputs, _results(text, end + 1, source), aliases)


def _plain(pattern: re.Pattern[str], text: str, at: int) -> tuple[list[tuple[str, str]], int] | None:
    """(type, attributes) of each part of a list from `at` on, and where its bracket closes.

    None where a part is not in the common form; the slower way reads, or refuses, that.
    """
    parts: list[tuple[str, str]] = []
    while (match := pattern.match(text, at)) is not None:
        parts.append((match[1], match[2] or ""))
        if match[3] == ")":
            return parts, match.end() - 1
        at = match.end()
    return None


def _parameter(text: str, source: str) -> tuple[str, str]:
    match = _PARAMETER.fullmatch(text)
    if match is None:
        raise ArtifactError(source, "@main", "cannot read a parameter", got=text[:80])
    return match.group(1), match.group(2) or ""


def check_signature(signature: Signature, entry: Entry, source: str) -> None:
    """Compare a body with its entry in the manifest. Raises ArtifactError naming the slot that differs."""
    for side, slots, types in (("input", entry.inputs, signature.inputs), ("output", entry.outputs, signature.outputs)):
        if len(slots) != len(types):
            raise ArtifactError(
                source, "@main", f"number of {side}s differs from the manifest", got=len(types), want=len(slots)
            )
        for index, (slot, found) in enumerate(zip(slots, types, strict=True)):
            if slot.type is not found and slot.type != found:
                raise ArtifactError(
                    source,
                    f"@main {side} {index} ({slot.name})",
                    "differs from the manifest",
                    got=found,
                    want=slot.type,
                )
    pairs = set(entry.donation_pairs)
    for pair in signature.aliases.items():
        if pair not in pairs:
            raise ArtifactError(
                source, f"@main input {pair[0]}", "aliases an output that is not in donationPairs", got=list(pair)
            )


def _results(text: str, start: int, source: str) -> tuple[TensorType, ...]:
    arrow = re.compile(r"\s*->\s*").match(text, start)
    if arrow is None:
        raise ArtifactError(source, "@main", "returns nothing")
    if text[arrow.end()] != "(":
        parts = [text[arrow.end() : text.index("{", arrow.end())].strip()]
    elif (plain := _plain(_PLAIN_RESULT, text, arrow.end() + 1)) is not None:
        parts = [type for type, _ in plain[0]]
    else:
        end = _closing(text, arrow.end(), source)
        parts = [part.split("{")[0].strip() for part in _split(text[arrow.end() + 1 : end])]
    return tuple(_tensor(part, source) for part in parts)


def _tensor(text: str, source: str) -> TensorType:
    found = _read_tensor(text)
    if found is None:
        raise ArtifactError(
            source, "@main", "cannot read a type", got=text[:80], want="a ranked tensor of a known dtype"
        )
    return found


@functools.lru_cache(maxsize=4096)
def _read_tensor(text: str) -> TensorType | None:
    match = _TENSOR.fullmatch(text)
    dtype = match and _MLIR_DTYPES.get(match.group(2), match.group(2))
    if match is None or dtype not in DTYPE_BYTES:
        return None
    return tensor_type(dtype, tuple(int(dim) for dim in match.group(1).split("x")[:-1]))


def _closing(text: str, start: int, source: str) -> int:
    """The index of the bracket that closes the one at `start`; quoted strings are skipped."""
    depth = 0
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\]]').finditer(text, start):
        token = match.group()
        if token in "([{":
            depth += 1
        elif token in ")]}":
            depth -= 1
            if depth == 0:
                return match.start()
    raise ArtifactError(source, "@main", "the signature does not end")


def _split(text: str) -> list[str]:
    """Split at the commas that are outside all brackets and strings."""
    parts, depth, begin = [], 0, 0
    for match in re.compile(r'"(?:[^"\\]|\\.)*"|[(){}\[\]<>,]').finditer(text):
        token = match.group()
        if token in "([{<":
            depth += 1
        elif token in ")]}>":
            depth -= 1
        elif token == "," and depth == 0:
            parts.append(text[begin : match.start()].strip())
            begin = match.end()
    last = text[begin:].strip()
    return [*parts, last] if last else parts
