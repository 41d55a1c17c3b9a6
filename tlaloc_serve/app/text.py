"""The text side of a run: which tokenizer, prompts to ids, ids to text.

Rules: the tokenizer is the file that was named, else the artifact's own, else the one in the checkpoint cache under the
model's name; one whose size cannot be the model's is refused. BOS goes before a prompt once, as the artifact says; a
chat's template has its own. A run of token ids needs no tokenizer, and shows no text where there is none to be had.
"""

from __future__ import annotations

import os
import pathlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tlaloc_serve.app.stream import StopStrings, TextStream
from tlaloc_serve.artifact.chat import ChatTemplate, Message, choose_template
from tlaloc_serve.artifact.store import Artifact
from tlaloc_serve.artifact.tokenizer import Tokenizer
from tlaloc_serve.errors import RequestError, TokenizerError

CHECKPOINT_CACHE = "~/.cache/tlaloc-checkpoints"
# Models round their vocabulary up, by 1,024 ids or 5 %, whichever is more. Fewer tokens are another model's tokenizer.
_PADDING_IDS = 1024
_PADDING_SHARE = 20


@dataclass(frozen=True)
class PlainText:
    """A prompt as text."""

    text: str


@dataclass(frozen=True)
class UserMessage:
    """A prompt as the user's message of a chat."""

    text: str


Prompt = list[int] | PlainText | UserMessage


@dataclass(frozen=True)
class TextOptions:
    """What a run says about text. `system` and `template` are for chats; `tokenizer` names a file."""

    tokenizer: str | None = None
    system: str | None = None
    template: str | None = None
    parse_special: bool = False
    show_special: bool = False
    stops: StopStrings = field(default_factory=lambda: StopStrings(()))


@dataclass(frozen=True)
class Source:
    """Where a tokenizer came from. `origin` is given, artifact or cache; `missing` counts ids of the model without a
    token."""

    path: str
    origin: str
    size: int
    missing: int


class Text:
    """The text side of one run. Made by `open_text`; without a tokenizer only token ids go through it."""

    def __init__(self, artifact: Artifact, options: TextOptions, found: tuple[Tokenizer, Source] | None, note: str):
        """`note` says why a run of token ids shows no text, and is empty otherwise."""
        self._note = note
        self._artifact = artifact
        self._options = options
        self._tokenizer = None if found is None else found[0]
        self._source = None if found is None else found[1]
        self._template: ChatTemplate | None = None
        self._unassigned: Counter[int] = Counter()

    def encode_all(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Prompts as ids. Raises RequestError for text that gives no token, TokenizerError for text it cannot encode
        and for a chat without a known template."""
        return [prompt if isinstance(prompt, list) else self._encode(prompt) for prompt in prompts]

    def stream(self, prompt: Sequence[int]) -> TextStream | None:
        """What turns a sequence's generated ids into text; None without a tokenizer."""
        if self._tokenizer is None:
            return None
        return TextStream(self._tokenizer, prompt, self._options.stops, show_special=self._options.show_special)

    def facts(self) -> dict[str, Any]:
        """Which tokenizer and chat template were used, as JSON values."""
        source = self._source
        return {
            "tokenizer": source and {"path": source.path, "origin": source.origin, "tokens": source.size,
                                     "idsWithoutToken": source.missing},
            "note": self._note or None,
            "chatTemplate": self._template and self._template.name,
            "stop": list(self._options.stops.texts),
            "unassigned": {f"U+{code:04X}": count for code, count in sorted(self._unassigned.items())},
        }  # fmt: skip

    def _encode(self, prompt: PlainText | UserMessage) -> list[int]:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError("--text", "there is no tokenizer")
        self._unassigned.update(tokenizer.unassigned(prompt.text))
        if isinstance(prompt, UserMessage):
            return self._encode_chat(tokenizer, prompt.text)
        ids = self._with_bos(tokenizer, prompt.text)
        if not ids:
            raise RequestError("--text", "gives no token", got=repr(prompt.text), want="at least one token")
        return ids

    def _with_bos(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Ids of `text` with the tokenizer's special tokens, except that the artifact decides about BOS."""
        frontend = self._artifact.manifest.frontend
        ids = tokenizer.encode(text, parse_special=self._options.parse_special)
        bos = frontend.bos_token_id
        if bos is None:
            return ids
        by_tokenizer = tokenizer.encode("")[:1] == [bos]
        if by_tokenizer:
            ids = ids[1:]
        wanted = by_tokenizer if frontend.add_bos is None else frontend.add_bos
        return [bos, *ids] if wanted and ids[:1] != [bos] else ids

    def _encode_chat(self, tokenizer: Tokenizer, user: str) -> list[int]:
        options, manifest = self._options, self._artifact.manifest
        template = choose_template(
            f"{self._artifact.root}: frontend.chatTemplate", manifest.frontend.chat_template, options.template
        )
        self._template = template
        messages = [Message("user", user)]
        if options.system is not None:
            self._unassigned.update(tokenizer.unassigned(options.system))
            messages.insert(0, Message("system", options.system))
        parts = template.parts(messages)
        markup = "".join(text for text, is_markup in parts if is_markup)
        for token in (template.bos, template.eos):
            if token and token in markup and tokenizer.token_to_id(token) is None:
                raise TokenizerError(
                    f"chat template {template.name!r}",
                    f"uses the token {token}, which this tokenizer does not have",
                    todo="name the model's own template with --chat-template",
                )
        return tokenizer.encode_parts(parts, add_special=False)


def open_text(artifact: Artifact, options: TextOptions, needed_by: str | None = None) -> Text:
    """Find and load the tokenizer. `needed_by` is a flag that cannot do without one.

    Raises RequestError where there is none and one is needed, TokenizerError for one that cannot be used. A run that
    needs none, and did not name it, goes on without: then the note says what is wrong with it.
    """
    try:
        found = _find(artifact, options.tokenizer)
    except TokenizerError as error:
        if needed_by is not None or options.tokenizer is not None:
            raise
        return Text(artifact, options, None, str(error))
    if found is None and needed_by is not None:
        raise RequestError(
            needed_by,
            f"there is no tokenizer: the artifact carries none, nor has {_cached(artifact.manifest.model_name)} one",
            todo="name it with --tokenizer FILE, or give token ids: --prompt 1,2",
        )
    return Text(artifact, options, found, "")


def _find(artifact: Artifact, given: str | None) -> tuple[Tokenizer, Source] | None:
    if given is not None:
        return _checked(artifact, Tokenizer.from_file(given), given, "given")
    if artifact.tokenizer is not None:
        file = artifact.manifest.frontend.tokenizer
        path = str(artifact.root / (file.path if file else "tokenizer.json"))
        return _checked(artifact, Tokenizer.from_bytes(artifact.tokenizer, path), path, "artifact")
    cached = _cached(artifact.manifest.model_name)
    if cached.is_file():
        return _checked(artifact, Tokenizer.from_file(cached), str(cached), "cache")
    return None


def _cached(model_name: str) -> pathlib.Path:
    """Where the checkpoint cache keeps the tokenizer of a model: its name with `__` for `/` is a folder there."""
    folder = model_name.replace("/", "__").replace("\0", "")
    return pathlib.Path(os.path.expanduser(CHECKPOINT_CACHE), folder.lstrip(".") or "_", "tokenizer.json")


def _checked(artifact: Artifact, tokenizer: Tokenizer, path: str, origin: str) -> tuple[Tokenizer, Source]:
    vocab, size = artifact.manifest.model.vocab_size, tokenizer.vocab_size
    if size > vocab:
        raise TokenizerError(path, "the tokenizer has ids that the model does not", got=size, want=f"at most {vocab}")
    padding = max(_PADDING_IDS, vocab // _PADDING_SHARE)
    if vocab - size > padding:
        raise TokenizerError(
            path,
            "another model's tokenizer",
            got=f"{size} tokens",
            want=f"{vocab} as the model, or up to {padding} fewer",
        )
    return tokenizer, Source(path, origin, size, vocab - size)
