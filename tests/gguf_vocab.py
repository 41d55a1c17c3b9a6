"""Tokenizer metadata of a GGUF file from a tokenizer.json, as a converter writes it: the input of the golden ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.gguf_writer import F32, I32, Typed
from tlaloc_serve.artifact.text.bpe import BYTE_ALPHABET

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
PREFIX = "tokenizer.ggml."


def metadata(document: Mapping[str, Any], pre: str | None, /, **more: Any) -> dict[str, Any]:
    """Byte-level with the pre-tokenizer `pre`, SentencePiece for None; `more` are further `tokenizer.ggml.*` keys."""
    ids = dict(document["model"]["vocab"])
    added = {entry["content"]: entry["id"] for entry in document["added_tokens"]}
    ids.update(added)
    tokens = sorted(ids, key=ids.__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in document["model"]["merges"]]
    types = [CONTROL if token in added else NORMAL for token in tokens]
    values: dict[str, Any] = {"tokens": tokens}
    if pre is None:
        rank: dict[str, int] = {}
        for index, merge in enumerate(merges):
            rank.setdefault(merge.replace(" ", ""), index)
        types = [BYTE if token.startswith("<0x") else kind for token, kind in zip(tokens, types, strict=True)]
        types[tokens.index("<unk>")] = UNKNOWN
        scores = [-float(rank.get(token, len(rank) + index)) for index, token in enumerate(tokens)]
        values.update(model="llama", scores=Typed(F32, scores), bos_token_id=1, eos_token_id=2)
    else:
        values.update(model="gpt2", pre=pre, merges=merges)
        values["bos_token_id"] = ids.get("<|begin_of_text|>", ids.get("<|im_start|>"))
        values["eos_token_id"] = ids.get("<|end_of_text|>", ids.get("<|im_end|>"))
    values["token_type"] = Typed(I32, types)
    values.update(more)
    return {PREFIX + key: value for key, value in values.items() if value is not None}


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata as the reader gives it."""
    return {key: value.value if isinstance(value, Typed) else value for key, value in values.items()}


def retyped(values: Mapping[str, Any], token: str, kind: int) -> dict[str, Any]:
    """The same metadata with one token of another type."""
    types = list(values[PREFIX + "token_type"].value)
    types[values[PREFIX + "tokens"].index(token)] = kind
    return {**values, PREFIX + "token_type": Typed(I32, types)}


def tiny_bytes() -> dict[str, Any]:
    """A byte-level document of a few merges, runnable without any file."""
    merges = ["t h", "th e", "\u0120 the", "\u0120 a", "1 2", "12 3", "\u00c3 \u00a9", "\u0120 \u0120", "' s", "a a"]
    made = [merge.replace(" ", "") for merge in merges]
    tokens = list(dict.fromkeys([*BYTE_ALPHABET, *made, "user", "<|im_start|>"]))
    vocab = {token: index for index, token in enumerate(tokens)}
    added = [{"content": token, "id": len(vocab) + at} for at, token in enumerate(("<|im_end|>", "<|endoftext|>"))]
    return {"model": {"vocab": vocab, "merges": merges}, "added_tokens": added}


def tiny_pieces() -> dict[str, Any]:
    """A SentencePiece document of a few pieces, runnable without any file."""
    merges = ["\u2581 t", "h e", "\u2581t he", "\u2581 \u2581", "\u2581\u2581 \u2581\u2581", "a b", "ab ab", "\u2581 a"]
    special = ["<unk>", "<s>", "</s>"]
    pieces = [merge.replace(" ", "") for merge in merges]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "\u2581", *"theab", "chat"]
    vocab = {token: index for index, token in enumerate(tokens)}
    added = [{"content": token, "id": vocab[token]} for token in special]
    return {"model": {"vocab": vocab, "merges": merges}, "added_tokens": added}
