"""A tokenizer.json as a tokenizer: the ids and texts that the `tokenizers` package gives, or a refusal by name.

Rules: everything in the file that this package does not implement is refused when the file is read, and nothing is
approximated. Encoding goes normalizer, added tokens, pre-tokenizer, BPE, post-processor, as the file has them; decoding
is `text.decode`. The Unicode classes are the interpreter's: where its database is older than the text, `unassigned`
counts the code points concerned.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterable

from tlaloc_serve.artifact.text.added import AddedTokens
from tlaloc_serve.artifact.text.bpe import Bpe
from tlaloc_serve.artifact.text.classes import unassigned
from tlaloc_serve.artifact.text.component import Component
from tlaloc_serve.artifact.text.decode import StreamDecoder, build_decoder
from tlaloc_serve.artifact.text.normalize import build_normalizer
from tlaloc_serve.artifact.text.postprocess import build_template
from tlaloc_serve.artifact.text.pretokenize import build_pretokenizer
from tlaloc_serve.errors import TokenizerError

_FIELDS = (
    "version",
    "truncation",
    "padding",
    "added_tokens",
    "normalizer",
    "pre_tokenizer",
    "post_processor",
    "decoder",
    "model",
)


class Tokenizer:
    """Text to ids and back. Reading is safe from several threads; a `StreamDecoder` belongs to one sequence."""

    def __init__(self, root: Component):
        """`root` is the file's whole object. Raises TokenizerError naming the file and the component."""
        root.only(*_FIELDS)
        fields, where = root.fields, root.where
        if fields.get("version") != "1.0":
            raise root.refuse("field 'version'", got=repr(fields.get("version")), want="'1.0'")
        for key in ("truncation", "padding"):
            if fields.get(key) is not None:
                raise root.refuse(
                    f"field {key!r} is set, which would change prompts in silence", todo="set it to null in the file"
                )
        normalizer = build_normalizer(f"{where}: normalizer", fields.get("normalizer"))
        self._pretokenizer = build_pretokenizer(
            f"{where}: pre_tokenizer", fields.get("pre_tokenizer"), shifted=normalizer.shifts
        )
        model = Component.of(f"{where}: model", fields.get("model"))
        self._model = Bpe(model, byte_level=self._pretokenizer.byte_level)
        self._added = AddedTokens(f"{where}: added_tokens", fields.get("added_tokens"), self._model.vocab, normalizer)
        self._template = build_template(f"{where}: post_processor", fields.get("post_processor"))
        self._texts = {token: text for text, token in self._model.vocab.items()}
        self._texts.update((token.id, token.form) for token in self._added.by_id.values())
        self._stages = build_decoder(f"{where}: decoder", fields.get("decoder"), self._texts.values())
        self.vocab_size = max(self._texts, default=-1) + 1
        self.special_ids = frozenset(self._added.by_content[text].id for text in self._added.special_contents)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Tokenizer:
        """Read a tokenizer.json. Raises TokenizerError."""
        try:
            with open(path, "rb") as file:
                data = file.read()
        except OSError as error:
            raise TokenizerError(str(path), f"cannot be read: {error.strerror or error}") from error
        return cls.from_bytes(data, str(path))

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Tokenizer:
        """The same from the file's bytes; `where` names them in errors."""
        if data.startswith(b"version https://git-lfs"):
            raise TokenizerError(where, "a git-lfs pointer, not the file itself", todo="fetch it with git lfs pull")
        try:
            root = json.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise TokenizerError(where, f"not a complete JSON file: {error}", todo="fetch it again") from error
        return cls(Component.of(where, root))

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Ids of `text`.

        `add_special` puts the post-processor's tokens (BOS and the like) around it. With `parse_special` the texts of
        special tokens inside `text` become those tokens; without it they are text like any other. Added tokens that
        are not special are always looked for. Raises TokenizerError for a lone surrogate.
        """
        return self.encode_parts([(text, parse_special)], add_special=add_special)

    def encode_parts(self, parts: Iterable[tuple[str, bool]], *, add_special: bool = True) -> list[int]:
        """Ids of the joined texts of `parts`, each with its own `parse_special`.

        The ids are those of the one joined text, except that special tokens are found only where a part allows
        them: a chat's markup counts, and the same characters in a user's message stay text.
        """
        whole = ""
        trusted: list[tuple[int, int]] = []
        for text, parse_special in parts:
            start, whole = len(whole), whole + text
            if parse_special and trusted and trusted[-1][1] == start:
                start = trusted.pop()[0]
            if parse_special:
                trusted.append((start, len(whole)))
        _check_surrogates(whole)
        ids: list[int] = []
        for part in self._added.split(whole, trusted):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += self._model.encode(self._pretokenizer.pieces(*part))
        return self._template(ids) if add_special else ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of `ids`. Ids without a token add nothing."""
        stream = self.stream(skip_special=skip_special)
        parts = [stream.push(token) for token in ids]
        return "".join(parts) + stream.finish()

    def stream(self, *, skip_special: bool = True) -> StreamDecoder:
        """A decoder for ids that come one at a time."""
        shown = self._shown_texts if skip_special else self._texts
        return StreamDecoder((make() for make in self._stages), shown.get)

    def token_to_id(self, token: str) -> int | None:
        added = self._added.by_content.get(token)
        return self._model.vocab.get(token) if added is None else added.id

    def id_to_token(self, token: int) -> str | None:
        """The token as the file writes it (in the byte alphabet, if it is byte-level)."""
        added = self._added.by_id.get(token)
        return self._texts.get(token) if added is None else added.content

    def unassigned(self, text: str) -> dict[int, int]:
        """Code point -> count, for those of `text` that the interpreter's Unicode database does not know.

        The ids around them may differ from those of a newer database. Empty where no Unicode class decides a cut.
        """
        return unassigned(text) if self._pretokenizer.classifies else {}

    @functools.cached_property
    def _shown_texts(self) -> dict[int, str]:
        """Id -> text without the special tokens, told by their text as the `tokenizers` package does."""
        special = self._added.special_contents
        return {token: text for token, text in self._texts.items() if text not in special}


def _check_surrogates(text: str) -> None:
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise TokenizerError(
                "text",
                f"lone surrogate U+{ord(text[error.start]):04X} at character {error.start}",
                todo="decode the input as UTF-8 first",
            ) from None
