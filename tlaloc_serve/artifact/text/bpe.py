"""Byte pair encoding of one piece of text at a time, with the words seen lately remembered.

Rules: a piece starts as its characters (or, byte-level, one character for each UTF-8 byte). The adjacent pair with the
lowest merge rank, leftmost first, becomes one symbol, until no pair has a rank: a heap of pairs over a linked list, so
a long word costs n log n. Everything is checked when the file is read; encoding cannot fail but for an unknown
character where the file promises an `unk_token` that is not in its vocabulary.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from typing import Any

from tlaloc_serve.artifact.text.component import Component
from tlaloc_serve.errors import TokenizerError

_CACHED_WORDS = 1 << 16
_CACHED_WORD_LENGTH = 256  # characters; longer words are encoded anew each time
_MARK = "\u2581"  # what SentencePiece writes for a space


def _byte_alphabet() -> str:
    """The character that stands for each byte, 0 to 255: GPT-2's table, in which printable Latin-1 is itself."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


BYTE_ALPHABET = _byte_alphabet()


class _Words(dict[str, list[int]]):
    """Piece -> ids. A miss is encoded; when the table is full it starts again empty."""

    def __init__(self, model: Bpe):
        super().__init__()
        self._model = model

    def __missing__(self, piece: str) -> list[int]:
        ids = self._model.encode_piece(piece)
        if len(piece) <= _CACHED_WORD_LENGTH:
            if len(self) >= _CACHED_WORDS:
                self.clear()
            self[piece] = ids
        return ids


class Bpe:
    """The `model` object of a tokenizer.json. `vocab` is token -> id."""

    def __init__(self, component: Component, *, byte_level: bool):
        """Raises TokenizerError for another model, an option that is not implemented, a bad vocabulary or merge."""
        fields = component.fields
        _check_model(component)
        self._where = component.where
        self._byte_level = byte_level
        self._unk_token = component.text("unk_token") if fields.get("unk_token") is not None else None
        self._fuse_unk = component.flag("fuse_unk", False)
        self._byte_fallback = component.flag("byte_fallback", False)
        self._ignore_merges = component.flag("ignore_merges", False)
        self.vocab = _read_vocab(component)
        self._factor = max(self.vocab.values(), default=0) + 1
        self._ranks, self._products = _read_merges(component, self.vocab, self._factor)
        self._words = _Words(self)
        self._cut = None if byte_level else self._safe_cut(component)

    def encode(self, pieces: list[str]) -> list[int]:
        """Ids of the pieces, one after the other."""
        words = self._words
        if self._cut is not None:
            pieces = [word for piece in pieces for word in self._cut_safely(piece)]
        return [token for piece in pieces for token in words[piece]]

    def encode_piece(self, piece: str) -> list[int]:
        """Ids of one piece, without the memory of earlier ones."""
        if self._byte_level:
            piece = piece.encode("utf-8").decode("latin-1").translate(BYTE_ALPHABET)
        if self._ignore_merges:
            whole = self.vocab.get(piece)
            if whole is not None:
                return [whole]
        return self._merge(self._symbols(piece))

    def _symbols(self, piece: str) -> list[int]:
        """The ids a piece starts as: characters, bytes of characters that are not in the vocabulary, or unknowns.

        An unknown is put down when the next known character comes, so byte tokens may overtake it; the
        `tokenizers` package does the same.
        """
        get = self.vocab.get
        found = [get(char) for char in piece]
        if None not in found:
            return found  # type: ignore[return-value]
        symbols: list[int] = []
        unknown: list[int] = []
        for char, token in zip(piece, found, strict=True):
            if token is not None:
                symbols += unknown
                unknown = []
                symbols.append(token)
                continue
            as_bytes = self._fallback(char)
            if as_bytes is not None:
                symbols += as_bytes
            elif self._unk_token is not None and not (self._fuse_unk and unknown):
                symbols += unknown
                unknown = [self._unk_id(char)]
        return symbols + unknown

    def _fallback(self, char: str) -> list[int] | None:
        """The byte tokens of a character, or None where the vocabulary lacks one of them."""
        if not self._byte_fallback:
            return None
        tokens = [self.vocab.get(f"<0x{byte:02X}>") for byte in char.encode("utf-8")]
        return None if None in tokens else tokens  # type: ignore[return-value]

    def _unk_id(self, char: str) -> int:
        token = self.vocab.get(self._unk_token or "")
        if token is None:
            raise TokenizerError(
                self._where, f"no token for {char!r}, and unk_token {self._unk_token!r} is not in the vocabulary either"
            )
        return token

    def _merge(self, symbols: list[int]) -> list[int]:
        """Merge pairs in place until none has a rank. A heap entry is rank * length + position, so ties go left."""
        ranks, factor, count = self._ranks, self._factor, len(symbols)
        heap = []
        for at in range(count - 1):
            rank = ranks.get(symbols[at] * factor + symbols[at + 1])
            if rank is not None:
                heap.append(rank * count + at)
        if not heap:
            return symbols
        heapify(heap)
        after = list(range(1, count + 1))
        before = list(range(-1, count))
        while heap:
            rank, at = divmod(heappop(heap), count)
            right = after[at]
            # The pair may be gone: its left symbol merged away (-1), or either side has grown since.
            if right >= count or symbols[at] < 0 or ranks.get(symbols[at] * factor + symbols[right]) != rank:
                continue
            merged = symbols[at] = self._products[rank]
            symbols[right] = -1
            right = after[at] = after[right]
            before[right] = at
            left = before[at]
            if left >= 0:
                rank_left = ranks.get(symbols[left] * factor + merged)
                if rank_left is not None:
                    heappush(heap, rank_left * count + left)
            if right < count:
                rank_right = ranks.get(merged * factor + symbols[right])
                if rank_right is not None:
                    heappush(heap, rank_right * count + at)
        return [token for token in symbols if token >= 0]

    def _safe_cut(self, component: Component) -> re.Pattern[str] | None:
        """Where a text without a pre-tokenizer may be cut into words with no change to the result.

        If no token made by a merge holds a space mark behind another character, no merge ever crosses the
        boundary before such a mark, and a mark that is in the vocabulary also ends a run of unknowns.
        """
        crossing = re.compile(f"[^{_MARK}]{_MARK}")
        made = set(self._products)
        if _MARK not in self.vocab or any(id_ in made and crossing.search(t) for t, id_ in self.vocab.items()):
            return None
        return re.compile(f"{_MARK}+[^{_MARK}]*|[^{_MARK}]+")

    def _cut_safely(self, piece: str) -> Iterable[str]:
        if self._cut is None or (self._ignore_merges and piece in self.vocab):
            return (piece,)
        return self._cut.findall(piece)


def _check_model(component: Component) -> None:
    fields = component.fields
    # Files of before 2020 have no type; only BPE has merges.
    kind = component.type if "type" in fields or "merges" not in fields else "BPE"
    if kind != "BPE":
        raise component.refuse(f"model type {kind!r} is not implemented", want="BPE")
    component.only(
        "dropout",
        "unk_token",
        "continuing_subword_prefix",
        "end_of_word_suffix",
        "fuse_unk",
        "byte_fallback",
        "ignore_merges",
        "vocab",
        "merges",
    )
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if fields.get(key):
            raise component.refuse(f"option {key} = {fields[key]!r} is not implemented")


def _read_vocab(component: Component) -> dict[str, int]:
    vocab = component.fields.get("vocab")
    if not isinstance(vocab, dict):
        raise component.refuse("field 'vocab'", got=type(vocab).__name__, want="an object of token: id")
    ids = vocab.values()
    fine = set(map(type, ids)) <= {int} and (not vocab or (min(ids) >= 0 and max(ids) < 1 << 31))
    for token, number in () if fine else vocab.items():
        if type(number) is not int or not 0 <= number < 1 << 31:
            raise component.refuse(f"id of token {token!r}", got=repr(number), want="an integer from 0 to 2^31 - 1")
    if len(set(vocab.values())) != len(vocab):
        owners: dict[int, str] = {}
        for token, number in vocab.items():
            if number in owners:
                raise component.refuse(f"tokens {owners[number]!r} and {token!r} have the same id {number}")
            owners[number] = token
    try:
        "".join(vocab).encode("utf-8")
    except UnicodeEncodeError:
        raise component.refuse("a token of the vocabulary holds a lone surrogate, which is not text") from None
    return vocab


def _read_merges(component: Component, vocab: dict[str, int], factor: int) -> tuple[dict[int, int], list[int]]:
    """`(left id * factor + right id -> rank, rank -> id of the merged token)`, from either spelling of the list."""
    merges: list[Any] | None = component.fields.get("merges")
    if not isinstance(merges, list):
        raise component.refuse("field 'merges'", got=type(merges).__name__, want="a list")
    want: type[str] | type[list[Any]] = list
    if merges and isinstance(merges[0], str):
        want = str
        merges = [merge for merge in merges if not (isinstance(merge, str) and merge.startswith("#version"))]
    found = _read_merges_at_once(merges, want, vocab, factor)
    if found is not None:
        return found
    ranks: dict[int, int] = {}
    products: list[int] = []
    for rank, merge in enumerate(merges):
        try:
            if type(merge) is not want:
                raise TypeError
            left, right = _parts(merge)
            ranks[vocab[left] * factor + vocab[right]] = rank
            products.append(vocab[left + right])
        except (KeyError, TypeError, ValueError):
            raise _bad_merge(component, rank, merge, vocab) from None
        if not left or not right:
            raise component.refuse(f"merges[{rank}] is cyclic: its result {left + right!r} is one of its own parts")
    return ranks, products


def _read_merges_at_once(
    merges: list[Any], want: type, vocab: dict[str, int], factor: int
) -> tuple[dict[int, int], list[int]] | None:
    """As the loop of `_read_merges` in a third of its time; None where something is wrong that the loop will name."""
    if set(map(type, merges)) != {want}:
        return None
    parts = [merge.split(" ") for merge in merges] if want is str else merges
    if set(map(len, parts)) != {2}:
        return None
    lefts, rights = ([part[side] for part in parts] for side in (0, 1))
    try:
        if "" in lefts or "" in rights:
            return None
        id_of = vocab.__getitem__
        products = list(map(id_of, map(operator.add, lefts, rights)))
        keys = map(operator.add, map(factor.__mul__, map(id_of, lefts)), map(id_of, rights))
        return dict(zip(keys, range(len(parts)), strict=True)), products
    except (KeyError, TypeError):
        return None


def _parts(merge: Any) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _bad_merge(component: Component, rank: int, merge: object, vocab: dict[str, int]) -> TokenizerError:
    parts: object = _parts(merge)
    if isinstance(parts, list) and len(parts) == 2 and all(isinstance(part, str) for part in parts):
        missing = [token for token in (*parts, "".join(parts)) if token not in vocab]
        if missing:
            return component.refuse(f"merges[{rank}] {merge!r} needs {missing[0]!r}, which is not in the vocabulary")
    return component.refuse(
        f"merges[{rank}]", got=repr(merge), want='all of them "left right", or all of them ["left", "right"]'
    )
