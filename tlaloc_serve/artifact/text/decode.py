"""Tokens back to text, one token at a time: the decoders of a tokenizer.json as a chain of stages.

Rules: a stage takes a token's text and gives what it can already tell, and the rest when the stream ends. Decoding a
whole list is the same chain run to its end, so streaming cannot differ from it. A stage keeps no more than it must to
be exact: an unfinished character, or a run of byte tokens, whose bytes are shown as one text only if all of them are
valid together. Behind Fuse a chain works on pieces of one long token; stages say which of the two they do.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from tlaloc_serve.artifact.text.bpe import BYTE_ALPHABET
from tlaloc_serve.artifact.text.component import Component, flatten
from tlaloc_serve.artifact.text.pretokenize import metaspace_scheme

_TO_BYTE = {ord(char): byte for byte, char in enumerate(BYTE_ALPHABET)}
_IN_ALPHABET = re.compile(f"[{re.escape(BYTE_ALPHABET)}]*")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2}|\+[0-9A-Fa-f])>")


class Stage(Protocol):
    def push(self, token: str) -> Iterable[str]:
        """What this token adds to the output, as tokens for the next stage."""

    def finish(self) -> Iterable[str]:
        """What was kept back."""


class _Each:
    """A stage without memory: one token in, one out."""

    def __init__(self, change: Callable[[str], str]):
        self._change = change

    def push(self, token: str) -> Iterable[str]:
        return (self._change(token),)

    def finish(self) -> Iterable[str]:
        return ()


class _Spaced:
    """No decoder: tokens joined by single spaces."""

    def __init__(self) -> None:
        self._gap = ""

    def push(self, token: str) -> Iterable[str]:
        token, self._gap = self._gap + token, " "
        return (token,)

    def finish(self) -> Iterable[str]:
        return ()


class _Metaspace:
    """Marks become spaces; the first token loses its marks unless the scheme is `never`."""

    def __init__(self, mark: str, drops_first: bool, fused: bool):
        self._mark, self._fused = mark, fused
        self._drops = drops_first

    def push(self, token: str) -> Iterable[str]:
        drops, self._drops = self._drops, self._drops and self._fused
        return (token.replace(self._mark, "" if drops else " "),)

    def finish(self) -> Iterable[str]:
        return ()


class _StripStart:
    """Drop up to `count` leading `content` characters of the one fused token."""

    def __init__(self, content: str, count: int):
        self._content, self._left = content, count

    def push(self, token: str) -> Iterable[str]:
        if self._left:
            rest = _strip_start(self._content, self._left, token)
            self._left = self._left - (len(token) - len(rest)) if not rest else 0
            token = rest
        return (token,)

    def finish(self) -> Iterable[str]:
        return ()


class _ByteFallback:
    """A run of byte tokens `<0x..>` is its UTF-8 text, or one U+FFFD a byte if the run as a whole is not valid."""

    def __init__(self) -> None:
        self._run = bytearray()

    def push(self, token: str) -> Iterable[str]:
        match = _BYTE_TOKEN.fullmatch(token)
        if match:
            self._run.append(int(match.group(1), 16))
            return ()
        return (*self.finish(), token)

    def finish(self) -> Iterable[str]:
        if not self._run:
            return ()
        run = bytes(self._run)
        self._run.clear()
        try:
            return (run.decode("utf-8"),)
        except UnicodeDecodeError:
            return ("\ufffd",) * len(run)


class _ByteLevel:
    """Characters of the byte alphabet become bytes, bytes become text; a token with any other character is as it is."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: str) -> Iterable[str]:
        return (self._utf8.decode(_to_bytes(token)),)

    def finish(self) -> Iterable[str]:
        return (self._utf8.decode(b"", final=True),)


class _FusedByteLevel:
    """ByteLevel behind Fuse, for a vocabulary not all in the byte alphabet: one odd character anywhere turns the
    whole text raw, so nothing can be told before the end."""

    def __init__(self) -> None:
        self._parts: list[str] = []

    def push(self, token: str) -> Iterable[str]:
        self._parts.append(token)
        return ()

    def finish(self) -> Iterable[str]:
        whole = "".join(self._parts)
        self._parts.clear()
        return (_to_bytes(whole).decode("utf-8", "replace"),)


class StreamDecoder:
    """Text of one sequence as its tokens come. The parts joined are exactly what `decode` gives for all of them."""

    def __init__(self, stages: Iterable[Stage], token_text: Callable[[int], str | None]):
        self._stages = tuple(stages)
        self._token_text = token_text

    def push(self, token: int) -> str:
        """The text that this id adds; empty while a character is incomplete, or for an id that shows nothing."""
        text = self._token_text(token)
        return "" if text is None else "".join(self._through((text,), 0))

    def finish(self) -> str:
        """The text still held back. The decoder is then at its end."""
        out: list[str] = []
        for index, stage in enumerate(self._stages):
            out += self._through(stage.finish(), index + 1)
        return "".join(out)

    def _through(self, tokens: Iterable[str], first: int) -> Iterable[str]:
        for stage in self._stages[first:]:
            tokens = [out for token in tokens for out in stage.push(token)]
        return tokens


def build_decoder(where: str, value: object, tokens: Collection[str]) -> tuple[Callable[[], Stage], ...]:
    """Makers of the stages of the file's `decoder` field; null joins by spaces. `tokens` are all texts that can come.

    Raises TokenizerError for a decoder, or an order of decoders, that is not implemented.
    """
    if value is None:
        return (_Spaced,)
    components = flatten(Component.of(where, value), "decoders")
    makers: list[Callable[[], Stage]] = []
    fused = False
    for index, component in enumerate(components):
        if component.type == "Fuse":
            component.only()
            fused = True
        elif component.type == "ByteLevel":
            component.only("add_prefix_space", "trim_offsets", "use_regex")
            if not fused:
                makers.append(_ByteLevel)
            elif _only_byte_level_matters(components[:index], tokens):
                makers = [_ByteLevel]
            else:
                makers.append(_FusedByteLevel)
            fused = True
        else:
            makers.append(_stage(component, fused))
    return tuple(makers)


def _stage(component: Component, fused: bool) -> Callable[[], Stage]:
    kind = component.type
    if kind == "Metaspace":
        component.only("replacement", "prepend_scheme", "add_prefix_space", "split", "str_rep")
        mark, scheme = metaspace_scheme(component)
        return lambda: _Metaspace(mark, scheme != "never", fused)
    if kind == "ByteFallback" and not fused:
        component.only()
        return _ByteFallback
    if kind == "Replace":
        component.only("pattern", "content")
        how, pattern = component.pattern()
        content = component.text("content")
        if how != "String" or (fused and len(pattern) != 1):
            raise component.refuse(
                f"a Replace decoder with the {how.lower()} {pattern!r} is not implemented" + " behind Fuse" * fused
            )
        return lambda: _Each(lambda token: token.replace(pattern, content))
    if kind == "Strip":
        component.only("content", "start", "stop")
        char, start, stop = component.character("content"), component.count("start"), component.count("stop")
        if stop:
            raise component.refuse("field 'stop' of a Strip decoder", got=stop, want=0)
        if fused:
            return lambda: _StripStart(char, start)
        return lambda: _Each(lambda token: _strip_start(char, start, token))
    raise component.refuse(
        f"decoder {kind!r} is not implemented" + " behind Fuse" * fused,
        want="Sequence, ByteLevel, ByteFallback, Fuse, Strip, Replace or Metaspace",
    )


def _only_byte_level_matters(before: list[Component], tokens: Collection[str]) -> bool:
    """Whether the stages before a fused ByteLevel leave every text over these tokens as it is.

    So it is where all tokens are written in the byte alphabet, none is a byte token, and what the stages look for
    has a character outside the alphabet.
    """
    for component in before:
        if component.type == "Replace":
            looked_for = component.pattern()[1]
        elif component.type == "Strip":
            looked_for = component.text("content")
        elif component.type in ("ByteFallback", "Fuse"):
            continue
        else:
            return False
        if _IN_ALPHABET.fullmatch(looked_for):
            return False
    if any(token.startswith("<0x") and _BYTE_TOKEN.fullmatch(token) for token in tokens):
        return False
    return bool(_IN_ALPHABET.fullmatch("".join(tokens)))


def _strip_start(content: str, count: int, token: str) -> str:
    cut = 0
    while cut < min(count, len(token)) and token[cut] == content:
        cut += 1
    return token[cut:]


def _to_bytes(token: str) -> bytes:
    """Bytes of a token in the byte alphabet, or its own UTF-8 if one of its characters is not in it."""
    if _IN_ALPHABET.fullmatch(token):
        return token.translate(_TO_BYTE).encode("latin-1")
    return token.encode("utf-8")
