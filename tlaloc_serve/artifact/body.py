"""The boundary of a body: the types of `@main`, and which parameters XLA will alias. Reads text, compiles nothing.

The manifest says which pool an output replaces; only the body says whether XLA consumes the input doing so
(`tf.aliasing_output` on the parameter). A runtime that guessed wrong would use a freed buffer or leak a pool, so the
signature is read here and checked against the manifest before anything runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tlaloc_serve.artifact.manifest import DTYPE_BYTES, Entry, TensorType
from tlaloc_serve.errors import ArtifactError

_MAIN = re.compile(r"\bfunc\.func\s+(?:public\s+)?@main\s*\(")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)([a-z]\w*)>")
_PARAMETER = re.compile(r"%[\w$.]+\s*:\s*(tensor<[^>]*>)\s*(\{.*\})?(?:\s*loc\(.*\))?", re.DOTALL)
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
    end = _closing(text, main.end() - 1, source)
    inputs: list[TensorType] = []
    aliases: dict[int, int] = {}
    for parameter in _split(text[main.end() : end]):
        match = _PARAMETER.fullmatch(parameter)
        if match is None:
            raise ArtifactError(source, "@main", "cannot read a parameter", got=parameter[:80])
        alias = _ALIAS.search(match.group(2) or "")
        if alias is not None:
            aliases[len(inputs)] = int(alias.group(1))
        inputs.append(_tensor(match.group(1), source))
    return Signature(tuple(inputs), tuple(_results(text, end + 1, source)), aliases)


def check_signature(signature: Signature, entry: Entry, source: str) -> None:
    """Compare a body with its entry in the manifest. Raises ArtifactError naming the slot that differs."""
    for side, slots, types in (("input", entry.inputs, signature.inputs), ("output", entry.outputs, signature.outputs)):
        if len(slots) != len(types):
            raise ArtifactError(
                source, "@main", f"number of {side}s differs from the manifest", got=len(types), want=len(slots)
            )
        for index, (slot, found) in enumerate(zip(slots, types, strict=True)):
            if slot.type != found:
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


def _results(text: str, start: int, source: str) -> list[TensorType]:
    arrow = re.compile(r"\s*->\s*").match(text, start)
    if arrow is None:
        raise ArtifactError(source, "@main", "returns nothing")
    if text[arrow.end()] == "(":
        end = _closing(text, arrow.end(), source)
        parts = _split(text[arrow.end() + 1 : end])
    else:
        parts = [text[arrow.end() : text.index("{", arrow.end())].strip()]
    return [_tensor(part.split("{")[0].strip(), source) for part in parts]


def _tensor(text: str, source: str) -> TensorType:
    match = _TENSOR.fullmatch(text)
    dtype = match and _MLIR_DTYPES.get(match.group(2), match.group(2))
    if match is None or dtype not in DTYPE_BYTES:
        raise ArtifactError(
            source, "@main", "cannot read a type", got=text[:80], want="a ranked tensor of a known dtype"
        )
    return TensorType(dtype, tuple(int(dim) for dim in match.group(1).split("x")[:-1]))


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
