"""Added tokens: texts that become one id before any other rule looks at them.

Rules: tokens with `normalized` false are cut out of the raw text first; what lies between is normalized, and the others
are cut out of that. The longest token at the leftmost place wins. `lstrip` and `rstrip` take the white space at their
side with them; `single_word` wants no word character next to the token. A match that is then turned down (a special
token outside trusted text, or part of a word) still uses up its text, as it does in the `tokenizers` package, whose
`encode_special_tokens` trusts nothing. Only a match that runs into trusted text gives up what lies there.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tlaloc_serve.artifact.text.classes import SPACES, word_pattern
from tlaloc_serve.artifact.text.component import Component, components
from tlaloc_serve.artifact.text.normalize import Normalizer

# Start and end of a stretch of text in which special tokens count; several are in order, with text between them.
Span = tuple[int, int]


@dataclass(frozen=True)
class AddedToken:
    """`content` as the file has it; `form` is what is looked for and what decoding gives: the normalized content."""

    id: int
    content: str
    form: str
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class AddedTokens:
    """The `added_tokens` list of a tokenizer.json, checked against the model's vocabulary."""

    def __init__(self, where: str, value: object, vocab: dict[str, int], normalizer: Normalizer):
        """Raises TokenizerError for a bad entry, or an id that is not the one the `tokenizers` package would give."""
        self._normalizer = normalizer
        self.by_content: dict[str, AddedToken] = {}
        self.by_id: dict[int, AddedToken] = {}
        self.special_contents: set[str] = set()
        taken = set(vocab.values())
        next_id = len(vocab)
        for component in [] if value is None else components(where, value):
            token = _read(component, normalizer)
            if not token.content:
                continue
            known = self.by_content.get(token.content)
            want = known.id if known else vocab.get(token.content)
            if want is None:
                want, next_id = next_id, next_id + 1
                if want in taken:
                    raise component.refuse(f"added token {token.content!r} would get the id {want} of another token")
            if token.id != want:
                raise component.refuse(
                    f"id of added token {token.content!r}",
                    got=token.id,
                    want=f"{want}, as the vocabulary and the tokens before it have it",
                )
            if token.special:
                self.special_contents.add(token.content)
            self.by_content[token.content] = self.by_id[token.id] = token
        self._raw = _finder([token for token in self.by_id.values() if not token.normalized])
        self._normal = _finder([token for token in self.by_id.values() if token.normalized])

    def split(self, text: str, trusted: Sequence[Span]) -> Iterator[int | tuple[str, bool]]:
        """Ids of added tokens, and the normalized texts between them with whether the whole text begins there.

        Special tokens are found inside the `trusted` spans only; those that match normalized text, where places have
        moved, only if all of `text` is one such span.
        """
        all_trusted = list(trusted) == [(0, len(text))]
        for part in self._cut(text, self._raw, True, trusted):
            if isinstance(part, int):
                yield part
            else:
                normal = self._normalizer.apply(part[0])
                yield from self._cut(normal, self._normal, part[1], [(0, len(normal))] if all_trusted else [])

    def _cut(
        self, text: str, finder: _Finder | None, at_start: bool, trusted: Sequence[Span]
    ) -> Iterator[int | tuple[str, bool]]:
        """`split` for one kind of token. Gives no empty texts."""
        if not text:
            return
        if finder is None or not (trusted or finder.has_plain):
            yield text, at_start
            return
        end = place = 0
        while match := finder.pattern.search(text, place):
            token = finder.tokens[match.group()]
            start, place = match.span()
            if token.content in self.special_contents:
                inside, place = _in_one_span(trusted, start, place)
                if not inside:
                    continue
            stop = place
            if token.single_word and _touches_word(text, start, stop):
                continue
            if token.lstrip:
                while start > end and text[start - 1] in SPACES:
                    start -= 1
                start = max(start, end)
            if token.rstrip:
                while stop < len(text) and text[stop] in SPACES:
                    stop += 1
            if start > end:
                yield text[end:start], at_start and end == 0
            if start < stop:  # not if the token before has taken all of it as white space
                yield token.id
            end = stop
        if end < len(text):
            yield text[end:], at_start and end == 0


def _in_one_span(spans: Sequence[Span], start: int, stop: int) -> tuple[bool, int]:
    """Whether a match lies inside one span, and where the search goes on."""
    after = bisect_right(spans, start, key=lambda span: span[0])
    if after and stop <= spans[after - 1][1]:
        return True, stop
    return False, min(stop, spans[after][0]) if after < len(spans) else stop


@dataclass(frozen=True)
class _Finder:
    """`pattern` finds the longest of `tokens` (by their form); `has_plain`: one of them is not special."""

    pattern: re.Pattern[str]
    tokens: dict[str, AddedToken]
    has_plain: bool


def _finder(tokens: list[AddedToken]) -> _Finder | None:
    if not tokens:
        return None
    forms = sorted((token.form for token in tokens), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, forms)))
    return _Finder(pattern, {token.form: token for token in tokens}, not all(token.special for token in tokens))


def _read(component: Component, normalizer: Normalizer) -> AddedToken:
    component.only("id", "content", "single_word", "lstrip", "rstrip", "normalized", "special")
    content = component.text("content")
    normalized = component.flag("normalized", True)
    form = normalizer.apply(content) if normalized else content
    if content and not form:
        raise component.refuse(f"added token {content!r} is empty once normalized")
    return AddedToken(
        id=component.count("id"),
        content=content,
        form=form,
        single_word=component.flag("single_word", False),
        lstrip=component.flag("lstrip", False),
        rstrip=component.flag("rstrip", False),
        normalized=normalized,
        special=component.flag("special", False),
    )


def _touches_word(text: str, start: int, stop: int) -> bool:
    word = word_pattern()
    return bool((start > 0 and word.match(text, start - 1)) or (stop < len(text) and word.match(text, stop)))
