"""The tokenizer in a GGUF file's metadata as a HuggingFace tokenizer.json, and what else a frontend needs.

Rules: the ids are those of llama.cpp, whose source the constants below come from (`llama-vocab.cpp`); what it would
take from a default that the file does not name is refused. Deterministic bytes.

Where llama.cpp and transformers differ, this follows llama.cpp:
- `smollm` cuts every digit off by itself before anything else, as the model's own tokenizer.json does; transformers'
  reading of such a GGUF file keeps runs of digits together.
- `qwen2` text is not normalized to NFC.
- In a SentencePiece model a space goes before the text and again after every special token.
- The tokens that end a text are found by their names as well as by the ids in the file.
- `tekken` tells upper from lower case in ASCII only, where Mistral's own tokenizer does in every script.
One thing stays as HuggingFace has it, because a tokenizer.json cannot say otherwise: among special texts that overlap
in a prompt the leftmost wins (llama.cpp: the longest).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.frontend import DEFAULT_PROMPT, FrontendFiles, spells

PREFIX = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)  # token types
LONGEST_PIECE = 256  # characters; every way to cut a piece in two is tried
_MARK = "\u2581"  # what SentencePiece writes for a space

_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_NOT_LOWER, _NOT_UPPER = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"  # letters
_LLAMA3 = _WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN2 = _WORDS + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_TEKKEN = (rf"[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}*{_NOT_UPPER}+|[^\r\n\p{{L}}\p{{N}}]?{_NOT_LOWER}+{_NOT_UPPER}*"
           r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL)  # fmt: skip


@dataclass(frozen=True)
class _Pre:
    """What a `tokenizer.ggml.pre` stands for: a pattern to split by, or GPT-2's (None), after single digits or not."""

    pattern: str | None = None
    digits: bool = False
    ignore_merges: bool = False  # a whole word of the vocabulary is that token, whatever the merges give
    add_bos: bool = False  # unless the file says otherwise


_PRE = {
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "pixtral"), _Pre(_LLAMA3, ignore_merges=True, add_bos=True)),
    **dict.fromkeys(("smaug-bpe", "dbrx"), _Pre(_LLAMA3)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), _Pre(_QWEN2)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _Pre(digits=True)),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "mpt"), _Pre()),
    "tekken": _Pre(_TEKKEN, ignore_merges=True, add_bos=True),
}

# Texts that llama.cpp takes for the end of a text or a turn, whatever their type in the file, ...
_ENDS = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
}  # fmt: skip
# ... and those of fill-in-the-middle that also end it: padding, repository, file separator. The first one found counts.
_FILL_ENDS = (
    ("fim_pad_token_id", ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]")),
    ("fim_rep_token_id", ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>")),
    ("fim_sep_token_id", ("<|file_sep|>",)),
)


class _Vocabulary:
    """The checked metadata. Errors name the file and the key."""

    def __init__(self, metadata: Mapping[str, Any], where: str):
        self.metadata = metadata
        self.where = where
        self.kind = self.get("model")
        if self.kind not in ("gpt2", "llama"):
            raise self.refuse("model", "tokenizer not supported", got=self.kind, want="gpt2 or llama")
        self.pre = _Pre(add_bos=True) if self.kind == "llama" else self._pre()
        tokens = self.get("tokens")
        if not isinstance(tokens, list) or not tokens:
            raise self.refuse("tokens", "missing key" if tokens is None else "not usable", want="a list of strings")
        self.tokens: list[str] = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            twice = next(token for index, token in enumerate(self.tokens) if self.ids[token] != index)
            raise self.refuse("tokens", "a token stands in it twice", got=repr(twice))
        self.types = self._types()

    def get(self, key: str) -> Any:
        return self.metadata.get(PREFIX + key)

    def refuse(self, key: str, what: str, **more: Any) -> ExportError:
        return ExportError(f"{self.where}: {PREFIX}{key}", what, **more)

    def _pre(self) -> _Pre:
        name = self.get("pre")
        if name not in _PRE:
            raise self.refuse(
                "pre",
                "pre-tokenizer not supported",
                got=name,
                want=f"one of {', '.join(_PRE)}",
                todo="convert the model again with a converter that names its pre-tokenizer",
            )
        return _PRE[name]

    def _types(self) -> list[int]:
        types = self.get("token_type")
        if types is None:
            types = [_NORMAL] * len(self.tokens)
        kinds = self.numbers("token_type", types)
        return [_CONTROL if token in _ENDS else int(kind) for token, kind in zip(self.tokens, kinds, strict=True)]

    def numbers(self, key: str, values: Any) -> list[float]:
        """A finite number for each token."""
        numbers = [] if isinstance(values, (str, bool, int, float)) else list(values)
        if len(numbers) != len(self.tokens) or not all(type(x) in (int, float) and isfinite(x) for x in numbers):
            raise self.refuse(key, "not a number a token", want=f"{len(self.tokens)} numbers")
        return numbers

    def flag(self, key: str, otherwise: bool) -> bool:
        value = self.get(key)
        if value is None:
            return otherwise
        if not isinstance(value, bool):
            raise self.refuse(key, "not usable", got=value, want="true or false")
        return value

    def id(self, key: str, otherwise: int | None = None) -> int | None:
        value = self.get(key)
        if value is None:
            return otherwise
        if type(value) is not int or not 0 <= value < len(self.tokens):
            raise self.refuse(key, "not a token id", got=value, want=f"0 to {len(self.tokens) - 1}")
        return value

    @property
    def bos(self) -> int | None:
        return self.id("bos_token_id", 1 if self.kind == "llama" else None)

    @property
    def eos(self) -> int | None:
        return self.id("eos_token_id", 2 if self.kind == "llama" else None)


def gguf_frontend(metadata: Mapping[str, Any], where: str) -> FrontendFiles:
    """Tokenizer, BOS, EOS ids and chat template of a GGUF file; all empty where it says it has no tokenizer.

    Raises ExportError naming the key.
    """
    if metadata.get(PREFIX + "model") in (None, "none", "no_vocab"):
        return FrontendFiles(None, None, None, (), None, None)
    vocabulary = _Vocabulary(metadata, where)
    document = _document(vocabulary)
    template = metadata.get("tokenizer.chat_template")
    return FrontendFiles(
        tokenizer=_bytes(document),
        bos_token_id=vocabulary.bos,
        add_bos=vocabulary.flag("add_bos_token", vocabulary.pre.add_bos),
        eos_token_ids=_end_ids(vocabulary),
        chat_template=template if isinstance(template, str) and template else None,
        default_prompt=DEFAULT_PROMPT if spells(document, DEFAULT_PROMPT) else None,
    )


def _bytes(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode("utf-8")


def _document(vocabulary: _Vocabulary) -> dict[str, Any]:
    spm = vocabulary.kind == "llama"
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(vocabulary),
        "normalizer": _spm_normalizer(vocabulary) if spm else None,
        "pre_tokenizer": None if spm else _pre_tokenizer(vocabulary.pre),
        "post_processor": _post_processor(vocabulary),
        "decoder": _spm_decoder(vocabulary) if spm else _byte_level(use_regex=True),
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": spm,
            "ignore_merges": vocabulary.pre.ignore_merges,
            "vocab": vocabulary.ids,
            "merges": _spm_merges(vocabulary) if spm else _merges(vocabulary),
        },
    }


def _added_tokens(vocabulary: _Vocabulary) -> list[dict[str, Any]]:
    """The tokens that are looked for in a text as they stand; control and unknown ones only where that is asked for."""
    return [
        {"id": index, "content": token, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": kind != _USER_DEFINED}
        for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)
    ]  # fmt: skip


def _byte_level(*, use_regex: bool) -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def _pre_tokenizer(pre: _Pre) -> dict[str, Any]:
    steps: list[dict[str, Any]] = []
    if pre.digits:
        steps.append({"type": "Digits", "individual_digits": True})
    if pre.pattern is not None:
        steps.append({"type": "Split", "pattern": {"Regex": pre.pattern}, "behavior": "Isolated", "invert": False})
    return {"type": "Sequence", "pretokenizers": [*steps, _byte_level(use_regex=pre.pattern is None)]}


def _post_processor(vocabulary: _Vocabulary) -> dict[str, Any] | None:
    """BOS and EOS around a text, as the file's flags have it."""
    around: list[list[int]] = []
    for flag, key, token, default in (("add_bos_token", "bos_token_id", vocabulary.bos, vocabulary.pre.add_bos),
                                      ("add_eos_token", "eos_token_id", vocabulary.eos, False)):  # fmt: skip
        wanted = vocabulary.flag(flag, default)
        if wanted and token is None:
            raise vocabulary.refuse(key, f"missing key, and {flag} is true")
        around.append([token] if wanted and token is not None else [])
    if around == [[], []]:
        return None
    before, after = ([{"SpecialToken": {"id": vocabulary.tokens[i], "type_id": 0}} for i in ids] for ids in around)
    return {
        "type": "TemplateProcessing",
        "single": [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after],
        "pair": [*before, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}, *after],
        "special_tokens": {
            vocabulary.tokens[i]: {"id": vocabulary.tokens[i], "ids": [i], "tokens": [vocabulary.tokens[i]]}
            for i in around[0] + around[1]
        },
    }


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """The file's merges as pairs. A pair that stands twice keeps its first rank."""
    merges = vocabulary.get("merges")
    if not isinstance(merges, list):
        raise vocabulary.refuse("merges", "missing key" if merges is None else "not usable", want="a list of strings")
    pairs: dict[tuple[str, str], None] = {}
    for index, merge in enumerate(merges):
        at = merge.find(" ", 1)
        left, right = merge[: max(at, 0)], merge[at + 1 :]
        if any(token not in vocabulary.ids for token in (left, right, left + right)):
            raise vocabulary.refuse(
                "merges", f"merge {index} is not two tokens of the vocabulary that make a third", got=repr(merge)
            )
        pairs.setdefault((left, right))
    return list(pairs)


def _spm_merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Merges that build every token from two others, in the order of llama.cpp's queue: the best score first.

    It breaks ties of score by place in the text, which ranks cannot: two tokens of one score are refused.
    """
    scores = _scores(vocabulary)
    merges: list[tuple[float, int, str, str]] = []
    owner: dict[float, str] = {}
    for index, token in enumerate(vocabulary.tokens):
        if len(token) > LONGEST_PIECE:
            raise vocabulary.refuse("tokens", f"token {index} is too long", got=len(token), want=f"<= {LONGEST_PIECE}")
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        pairs = [pair for pair in splits if pair[0] in vocabulary.ids and pair[1] in vocabulary.ids]
        if pairs and owner.setdefault(scores[index], token) != token:
            raise vocabulary.refuse(
                "scores",
                "two tokens have one score, so the order of their merges is not known",
                got=f"{owner[scores[index]]!r} and {token!r}",
            )
        merges += [(-scores[index], -len(left), left, right) for left, right in pairs]
    return [(left, right) for _, _, left, right in sorted(merges)]


def _scores(vocabulary: _Vocabulary) -> list[float]:
    scores = vocabulary.get("scores")
    if scores is None:
        raise vocabulary.refuse("scores", "missing key")
    missing = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocabulary.ids]
    if missing:
        raise vocabulary.refuse("tokens", "a byte has no token", got=f"no {missing[0]}")
    return vocabulary.numbers("scores", scores)


def _spm_normalizer(vocabulary: _Vocabulary) -> dict[str, Any]:
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
    if not vocabulary.flag("add_space_prefix", True):
        return replace
    return {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": _MARK}, replace]}


def _spm_decoder(vocabulary: _Vocabulary) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if vocabulary.flag("add_space_prefix", True):
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {"type": "Sequence", "decoders": steps}


def _end_ids(vocabulary: _Vocabulary) -> tuple[int, ...]:
    """The ids at which llama.cpp ends a text, the file's EOS first."""
    ends = [vocabulary.eos, vocabulary.id("eot_token_id"), vocabulary.id("eom_token_id")]
    ends += sorted(vocabulary.ids[token] for token in _ENDS if token in vocabulary.ids)
    for key, texts in _FILL_ENDS:
        found = [vocabulary.ids[text] for text in texts if text in vocabulary.ids]
        ends.append(vocabulary.id(key, found[0] if found else None))
    return tuple(dict.fromkeys(end for end in ends if end is not None))
