r"""Unicode classes for the standard library's `re`, which has no `\p{L}`: made from `unicodedata`, on first use.

Rules: a class is written as the inside of a bracket expression. It is made for text up to a highest code point
(`tier`), because `re` searches the ranges above U+FFFF one after the other, and because text that is pure ASCII
then needs no table worth the name. A code point that the interpreter's Unicode database does not know has category
Cn, hence is neither letter, number nor space; `unassigned` counts those, because a newer database may class them
otherwise.
"""

from __future__ import annotations

import functools
import re
import sys
import unicodedata

# White_Space of the Unicode database, which has not changed since version 6.3. `str.isspace` and `\s` of `re`
# also take U+001C to U+001F, which are not White_Space.
SPACES = (
    "\t\n\v\f\r \u0085\u00a0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)
_SPACE_CLASS = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"

ASCII, BMP, ALL = 0x7F, 0xFFFF, sys.maxunicode
_ABOVE_BMP = re.compile("[\U00010000-\U0010ffff]")

# The contractions of the Llama 3 family of patterns, case-insensitive: U+017F folds to s.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CONTRACTIONS_RE = "'(?:[sS\u017f]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"

# Alphabetic code points outside the letters, letter numbers and marks: circled and squared Latin letters.
_ALPHABETIC_SYMBOLS = r"\u24b6-\u24e9\U0001f130-\U0001f149\U0001f150-\U0001f169\U0001f170-\U0001f189"

_TOKEN = re.compile(re.escape(_CONTRACTIONS) + r"|\\p\{(\w+)\}|\\.|\[\^?|.", re.DOTALL)


def tier(text: str) -> int:
    """The lowest of ASCII, BMP and ALL that holds every code point of `text`."""
    if text.isascii():
        return ASCII
    return ALL if _ABOVE_BMP.search(text) else BMP


@functools.cache
def _class_bodies(highest: int) -> dict[str, str]:
    """General category -> body of a bracket expression, over the code points 0 to `highest`."""
    bodies: dict[str, list[str]] = {}
    categories = list(map(unicodedata.category, map(chr, range(highest + 1))))
    start = 0
    for code, category in enumerate(categories):
        if code == highest or categories[code + 1] != category:
            bodies.setdefault(category, []).append(f"\\U{start:08x}-\\U{code:08x}")
            start = code + 1
    return {category: "".join(ranges) for category, ranges in bodies.items()}


def class_body(name: str, highest: int) -> str:
    r"""The inside of a bracket expression for `\p{name}`; `name` is a general category or its first letter."""
    bodies = _class_bodies(highest)
    return "".join(bodies[category] for category in sorted(bodies) if category.startswith(name))


@functools.cache
def compile_pattern(pattern: str, highest: int) -> re.Pattern[str]:
    r"""Translate a split pattern written for Oniguruma, with `\p{..}` and `\s` as Unicode has them, into `re`.

    Only what the patterns in `pretokenize.PATTERNS` use is translated. The result is right on text without code
    points above `highest`.
    """
    out: list[str] = []
    in_brackets = False
    for match in _TOKEN.finditer(pattern):
        token, name = match.group(), match.group(1)
        if token == _CONTRACTIONS:
            token = _CONTRACTIONS_RE
        elif name or token == r"\s":
            body = class_body(name, highest) if name else _SPACE_CLASS
            token = body if in_brackets else f"[{body}]"
        elif token == r"\S":
            token = f"[^{_SPACE_CLASS}]"
        elif token in ("[", "[^"):
            in_brackets = True
        elif token == "]":
            in_brackets = False
        out.append(token)
    return re.compile("".join(out))


@functools.cache
def word_pattern() -> re.Pattern[str]:
    r"""One word character as the `single_word` flag of an added token means it: `\w` of Unicode TR 18, annex C."""
    body = "".join(class_body(name, ALL) for name in ("L", "M", "Nd", "Nl", "Pc"))
    return re.compile(f"[{body}\u200c\u200d{_ALPHABETIC_SYMBOLS}]")


@functools.cache
def _unassigned_pattern() -> re.Pattern[str]:
    return re.compile(f"[{class_body('Cn', ALL)}]")


def unassigned(text: str) -> dict[int, int]:
    """Code point -> number of times, for the code points of `text` that the interpreter's database does not know.

    Noncharacters are left out: they stay unassigned for ever.
    """
    counts: dict[int, int] = {}
    if not text.isascii():
        for char in _unassigned_pattern().findall(text):
            code = ord(char)
            if code & 0xFFFE != 0xFFFE and not 0xFDD0 <= code <= 0xFDEF:
                counts[code] = counts.get(code, 0) + 1
    return counts
