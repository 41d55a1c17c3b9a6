"""The normalizers of a tokenizer.json: Sequence, Prepend, Replace with a plain string, and NFC.

Rules: each takes a text and returns a text; the order is the file's. Any other normalizer is refused by name.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass

from tlaloc_serve.artifact.text.component import Component, flatten

# Combining marks, and members of composed characters, that entered Unicode after version 9. The `tokenizers`
# package normalizes by the tables of version 9, where these are unassigned: they neither move nor compose, and
# nothing composes across them. Complete up to Unicode 16.
_AFTER_UNICODE_9 = """
    7fd 897-89f 8ca-8d3 9fe c3c d3b-d3c eba 1715 1abf-1ace 1df6-1dfa a82c 105c0-105ff 10d24-10d27 10d69-10d6d
    10eab-10eac 10efc-10eff 10f46-10f50 10f82-10f85 11070 1133b 11380-113ff 1145e 11839-1183a 11930 11935
    11938 1193d-1193e 11943 119e0 11a34 11a47 11a99 11d42 11d44-11d45 11d97 11f41-11f42 11f5a 16100-1613f
    16d40-16d7f 16ff0-16ff1 1e08f 1e130-1e136 1e2ae 1e2ec-1e2ef 1e4ec-1e4ef 1e5ee-1e5ef
"""


@dataclass(frozen=True)
class Normalizer:
    """`apply` is the whole chain. `shifts`: it may add to or take from the front of a text."""

    apply: Callable[[str], str]
    shifts: bool


def build_normalizer(where: str, value: object) -> Normalizer:
    """The normalizer that the file's `normalizer` field describes; null means none. Raises TokenizerError."""
    steps: list[Callable[[str], str]] = []
    shifts = False
    for component in [] if value is None else flatten(Component.of(where, value), "normalizers"):
        step, shifting = _step(component)
        steps.append(step)
        shifts = shifts or shifting
    if not steps:
        return Normalizer(_same, False)
    return Normalizer(steps[0] if len(steps) == 1 else functools.partial(_chain, tuple(steps)), shifts)


def _step(component: Component) -> tuple[Callable[[str], str], bool]:
    kind = component.type
    if kind == "NFC":
        component.only()
        return nfc, False
    if kind == "Prepend":
        component.only("prepend")
        return functools.partial(_prepend, component.text("prepend")), True
    if kind == "Replace":
        component.only("pattern", "content")
        how, pattern = component.pattern()
        if how != "String":
            raise component.refuse(f"a Replace normalizer with the regular expression {pattern!r} is not implemented")
        content = component.text("content")
        return (lambda text: text.replace(pattern, content)), not content
    raise component.refuse(f"normalizer {kind!r} is not implemented", want="Sequence, Prepend, Replace or NFC")


def nfc(text: str) -> str:
    """Unicode normalization form C by the tables of Unicode 9, as the `tokenizers` package has it."""
    if text.isascii():
        return text
    newer = _after_unicode_9()
    if not newer.search(text):
        return unicodedata.normalize("NFC", text)
    return "".join(part if newer.match(part) else unicodedata.normalize("NFC", part) for part in newer.split(text))


@functools.cache
def _after_unicode_9() -> re.Pattern[str]:
    body = ""
    for item in _AFTER_UNICODE_9.split():
        first, _, last = item.partition("-")
        body += f"\\U{int(first, 16):08x}-\\U{int(last or first, 16):08x}"
    return re.compile(f"([{body}]+)")


def _same(text: str) -> str:
    return text


def _prepend(prefix: str, text: str) -> str:
    return prefix + text if text else text


def _chain(steps: tuple[Callable[[str], str], ...], text: str) -> str:
    for step in steps:
        text = step(text)
    return text
