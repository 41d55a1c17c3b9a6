"""What a checkpoint says to a frontend: tokenizer, BOS policy, EOS ids, chat template. Reads its small JSON files.

EOS: the ids of generation_config.json, then those of config.json that it lacks, since either may stop a model.
BOS: `add_bos_token` of tokenizer_config.json where it is set; else whether the post-processor of tokenizer.json puts
a special token first; else the habit of the Llama tokenizer class; without a tokenizer it is not known.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.jsonfile import parse_json_object, read_bytes, read_json_object

DEFAULT_PROMPT = "The capital of France is"
# How the two kinds of vocabulary spell a word with the space before it.
_SPACES = ("\u0120", "\u2581")
_CLASSES_WITH_BOS = ("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast")


@dataclass(frozen=True)
class FrontendFiles:
    """The frontend's part of the manifest before anything is written; `tokenizer` is the bytes of tokenizer.json."""

    tokenizer: bytes | None
    bos_token_id: int | None
    add_bos: bool | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    default_prompt: str | None


def read_frontend(folder: pathlib.Path, config: Mapping[str, Any], vocab_size: int) -> FrontendFiles:
    """Read the frontend's files of a HuggingFace folder; all of them may be absent. Raises ExportError."""
    data = read_bytes(folder / "tokenizer.json") if (folder / "tokenizer.json").exists() else None
    tokenizer = None if data is None else parse_json_object(data, str(folder / "tokenizer.json"))
    settings = _optional(folder / "tokenizer_config.json")
    generation = _optional(folder / "generation_config.json")
    eos: list[int] = []
    for document, name in ((generation, "generation_config.json"), (config, "config.json")):
        eos += [i for i in _ids(document, "eos_token_id", str(folder / name), vocab_size) if i not in eos]
    add_bos, bos = _bos(tokenizer, settings)
    if bos is None:
        for document, name in ((config, "config.json"), (generation, "generation_config.json")):
            ids = _ids(document, "bos_token_id", str(folder / name), vocab_size)
            if ids:
                bos = ids[0]
                break
    return FrontendFiles(
        tokenizer=data,
        bos_token_id=bos,
        add_bos=add_bos if bos is not None or add_bos is None else False,
        eos_token_ids=tuple(eos),
        chat_template=_chat_template(folder, settings),
        default_prompt=DEFAULT_PROMPT if tokenizer is not None and spells(tokenizer, DEFAULT_PROMPT) else None,
    )


def spells(tokenizer: Mapping[str, Any], text: str) -> bool:
    """Whether each word of `text` is one token of the vocabulary, so that no subword split has to be known."""
    model = tokenizer.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict):
        return False
    first, *rest = text.split(" ")
    for space in _SPACES:
        if all(space + word in vocab for word in rest) and (first in vocab or space + first in vocab):
            return True
    return False


def _optional(path: pathlib.Path) -> dict[str, Any]:
    return read_json_object(path) if path.exists() else {}


def _ids(document: Mapping[str, Any], key: str, where: str, vocab_size: int) -> list[int]:
    """A token id or a list of them, as a list."""
    value = document.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ExportError(f"{where}: {key}", "not a token id", got=repr(token), want=f"0 to {vocab_size - 1}")
    return list(ids)


def _bos(tokenizer: Mapping[str, Any] | None, settings: Mapping[str, Any]) -> tuple[bool | None, int | None]:
    """Whether a prompt gets a BOS, and its id as the tokenizer has it."""
    named = settings.get("bos_token")
    text = _text(named.get("content") if isinstance(named, dict) else named)
    added = {} if tokenizer is None else _added_tokens(tokenizer)
    explicit = settings.get("add_bos_token")
    if isinstance(explicit, bool):
        return explicit, added.get(text)
    if tokenizer is None:
        return None, None
    template = _template(tokenizer.get("post_processor"))
    if template is not None:
        return template[0], added.get(template[1], added.get(text))
    return settings.get("tokenizer_class") in _CLASSES_WITH_BOS, added.get(text)


def _added_tokens(tokenizer: Mapping[str, Any]) -> dict[str | None, int]:
    added = tokenizer.get("added_tokens")
    entries = [entry for entry in added if isinstance(entry, dict)] if isinstance(added, list) else []
    return {
        entry["content"]: entry["id"]
        for entry in entries
        if isinstance(entry.get("content"), str) and type(entry.get("id")) is int
    }


def _template(processor: Any) -> tuple[bool, str | None] | None:
    """(BOS first?, its text) of the TemplateProcessing in a post-processor; None where there is none."""
    if not isinstance(processor, dict):
        return None
    if processor.get("type") == "Sequence":
        inner = processor.get("processors")
        found = [_template(part) for part in inner] if isinstance(inner, list) else []
        return next((template for template in found if template is not None), None)
    if processor.get("type") != "TemplateProcessing":
        return None
    single = processor.get("single")
    first = single[0] if isinstance(single, list) and single and isinstance(single[0], dict) else {}
    special = first.get("SpecialToken")
    return (True, _text(special.get("id"))) if isinstance(special, dict) else (False, None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _chat_template(folder: pathlib.Path, settings: Mapping[str, Any]) -> str | None:
    """The default template's text: chat_template.jinja, else the key of tokenizer_config.json (a list has names)."""
    path = folder / "chat_template.jinja"
    if path.exists():
        try:
            return read_bytes(path).decode("utf-8") or None
        except UnicodeDecodeError:
            raise ExportError(str(path), "is no UTF-8 text") from None
    value = settings.get("chat_template")
    if isinstance(value, list):
        entries = [entry for entry in value if isinstance(entry, dict) and entry.get("name") == "default"]
        value = entries[0].get("template") if entries else None
    return value if isinstance(value, str) and value else None
