r"""Cutting normalized text into the pieces that BPE works on: the pre-tokenizers of a tokenizer.json.

Rules: Split, ByteLevel, Digits and Metaspace, alone or in a Sequence. A Split by regular expression is accepted only
if the expression is one of `PATTERNS`, which are known to translate into the standard library's `re` exactly; a
program that translated any expression would have to guess. ByteLevel must come last: its byte alphabet is applied to
whole pieces by the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tlaloc_serve.artifact.text.classes import compile_pattern, tier
from tlaloc_serve.artifact.text.component import Component, flatten

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NOT_LOWER, _NOT_UPPER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Every one of these matches at every position of every text, so its matches are the pieces, with no gaps.
PATTERNS = {
    GPT2: "gpt-2",
    _CONTRACTED + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL: "llama-3",
    _CONTRACTED + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL: "qwen-2",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL: "mistral-nemo",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}*{_NOT_UPPER}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}+{_NOT_UPPER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL: "tekken",
}
_DIGIT, _DIGITS = r"\p{N}|[^\p{N}]+", r"\p{N}+|[^\p{N}]+"

# Pieces in, pieces out; the flag says that the first piece stands at the very start of the text.
Stage = Callable[[list[str], bool], list[str]]


@dataclass(frozen=True)
class PreTokenizer:
    """`byte_level`: pieces go to the model in the byte alphabet. `classifies`: Unicode classes decide the cuts."""

    stages: tuple[Stage, ...]
    byte_level: bool
    classifies: bool

    def pieces(self, text: str, at_start: bool) -> list[str]:
        """Cut `text`, which is not empty; `at_start` says that the whole text begins with it. No empty pieces."""
        pieces = [text]
        for stage in self.stages:
            pieces = stage(pieces, at_start)
        return pieces


def build_pretokenizer(where: str, value: object, *, shifted: bool) -> PreTokenizer:
    """The pre-tokenizer of the file's `pre_tokenizer` field; null means none. Raises TokenizerError.

    `shifted`: the normalizer may have moved the start of the text, which Metaspace's scheme `first` cannot follow.
    """
    components = [] if value is None else flatten(Component.of(where, value), "pretokenizers")
    stages: list[Stage] = []
    byte_level = classifies = False
    for index, component in enumerate(components):
        kind = component.type
        if byte_level:
            raise component.refuse(f"pre-tokenizer {kind!r} after ByteLevel is not implemented")
        if kind == "ByteLevel":
            byte_level = True
            classifies = classifies or component.flag("use_regex", True)
            stages += _byte_level(component)
        elif kind == "Digits":
            component.only("individual_digits")
            classifies = True
            stages.append(_every(_DIGIT if component.flag("individual_digits", False) else _DIGITS))
        elif kind == "Split":
            stage, classified = _split(component)
            classifies = classifies or classified
            stages.append(stage)
        elif kind == "Metaspace":
            stages.append(_metaspace(component, first_is_known=index == 0 and not shifted))
        else:
            want = "Sequence, Split, ByteLevel, Digits or Metaspace"
            raise component.refuse(f"pre-tokenizer {kind!r} is not implemented", want=want)
    return PreTokenizer(tuple(stages), byte_level, classifies)


def _every(pattern: str) -> Stage:
    """Cut each piece into the matches of a pattern that leaves no gaps."""

    def stage(pieces: list[str], at_start: bool) -> list[str]:
        if len(pieces) == 1:
            return compile_pattern(pattern, tier(pieces[0])).findall(pieces[0])
        return [cut for piece in pieces for cut in compile_pattern(pattern, tier(piece)).findall(piece)]

    return stage


def _byte_level(component: Component) -> list[Stage]:
    component.only("add_prefix_space", "trim_offsets", "use_regex")
    stages: list[Stage] = []
    if component.flag("add_prefix_space", True):
        stages.append(lambda pieces, at_start: [piece if piece[0] == " " else " " + piece for piece in pieces])
    if component.flag("use_regex", True):
        stages.append(_every(GPT2))
    return stages


def _metaspace(component: Component, *, first_is_known: bool) -> Stage:
    component.only("replacement", "prepend_scheme", "add_prefix_space", "split", "str_rep")
    mark, scheme = metaspace_scheme(component)
    split = component.flag("split", True)
    if scheme == "first" and not first_is_known:
        raise component.refuse("Metaspace with prepend_scheme 'first' behind a step that moves the start of the text")

    def stage(pieces: list[str], at_start: bool) -> list[str]:
        out: list[str] = []
        for index, piece in enumerate(pieces):
            piece = piece.replace(" ", mark)
            if piece[0] != mark and (scheme == "always" or (scheme == "first" and at_start and index == 0)):
                piece = mark + piece
            out += _join(_literal(mark, piece), "MergedWithNext") if split else [piece]
        return out

    return stage


def metaspace_scheme(component: Component) -> tuple[str, str]:
    """`(replacement, prepend_scheme)` of a Metaspace; an old `add_prefix_space` beside it must agree."""
    scheme = component.fields.get("prepend_scheme", "always")
    if scheme not in ("always", "first", "never"):
        raise component.refuse("field 'prepend_scheme'", got=repr(scheme), want="always, first or never")
    if scheme != "never" and not component.flag("add_prefix_space", True):
        raise component.refuse("add_prefix_space false", got=f"prepend_scheme {scheme}", want="never")
    return component.character("replacement"), scheme


def _split(component: Component) -> tuple[Stage, bool]:
    component.only("pattern", "behavior", "invert")
    kind, pattern = component.pattern()
    behavior, invert = component.text("behavior"), component.flag("invert", False)
    if behavior not in ("Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"):
        raise component.refuse(f"Split behavior {behavior!r} is not implemented")
    if kind == "String":
        return _split_by_string(pattern, behavior, invert), False
    if pattern not in PATTERNS:
        raise component.refuse(
            f"Split by the regular expression {pattern!r} is not implemented",
            want="one of " + ", ".join(PATTERNS.values()),
        )
    if (behavior, invert) not in (("Isolated", False), ("Isolated", True), ("Removed", True)):
        raise component.refuse(
            f"Split by a regular expression with behavior {behavior!r} and invert {invert}",
            want="Isolated, or Removed with invert true",
        )
    return _every(pattern), True


def _split_by_string(pattern: str, behavior: str, invert: bool) -> Stage:
    def stage(pieces: list[str], at_start: bool) -> list[str]:
        out: list[str] = []
        for piece in pieces:
            spans = ((text, matched != invert) for text, matched in _literal(pattern, piece))
            out += _join(spans, behavior)
        return out

    return stage


def _literal(pattern: str, text: str) -> Iterator[tuple[str, bool]]:
    """Cover `text` with the occurrences of `pattern`, from the left, and what lies between: `(part, is match)`."""
    end = 0
    for match in re.finditer(re.escape(pattern), text):
        if match.start() > end:
            yield text[end : match.start()], False
        yield match.group(), True
        end = match.end()
    if end < len(text):
        yield text[end:], False


def _join(spans: Iterable[tuple[str, bool]], behavior: str) -> list[str]:
    """What becomes of the matches: a piece each, dropped, one piece a run, or joined to a neighbour."""
    if behavior == "Removed":
        return [text for text, matched in spans if not matched]
    if behavior == "Isolated":
        return [text for text, _ in spans]
    backwards = behavior == "MergedWithNext"
    out: list[str] = []
    before = False  # whether the span before this one, in walking order, was a match
    for text, matched in reversed(list(spans)) if backwards else spans:
        joins = matched == before if behavior == "Contiguous" else matched and not before
        if joins and out:
            out[-1] = text + out[-1] if backwards else out[-1] + text
        else:
            out.append(text)
        before = matched
    return out[::-1] if backwards else out
