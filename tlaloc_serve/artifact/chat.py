"""Chats as prompts: the named templates in wide use, written in Python instead of Jinja.

Rules: an artifact's template is recognised by the SHA-256 of its Jinja text, never by what it looks like; an unknown
one is refused, and a name may be given instead. A template gives parts, each with whether it is the template's own
markup or somebody's words, so that `Tokenizer.encode_parts` takes special tokens from the markup alone. Prompts made
here already hold BOS where their template has it: encode them with `add_special=False`. Messages with tool calls, and
contents that are not text, are not implemented.
"""

from __future__ import annotations

import datetime
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tlaloc_serve.errors import RequestError, TokenizerError


@dataclass(frozen=True)
class Message:
    """One turn. `role` is system, user or assistant."""

    role: str
    content: str


Part = tuple[str, bool]  # text, and whether it is markup
_Turns = Callable[[Sequence[Message], bool, str, str], Iterator[Part]]  # messages, add_generation_prompt, bos, eos


@dataclass(frozen=True)
class ChatTemplate:
    """`bos` and `eos` are the texts of those tokens in the family that the template was made for."""

    name: str
    turns: _Turns
    bos: str = ""
    eos: str = ""

    def parts(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[Part]:
        """The prompt as `(text, is markup)`. Raises RequestError for roles the template has no place for."""
        if not messages:
            raise RequestError("messages", "the chat is empty", want="at least one message")
        for index, message in enumerate(messages):
            if message.role not in ("system", "user", "assistant"):
                raise RequestError(
                    f"messages[{index}].role", "unknown role", got=repr(message.role), want="system, user or assistant"
                )
        return [part for part in self.turns(messages, add_generation_prompt, self.bos, self.eos) if part[0]]

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """The prompt as one text: what the Jinja template gives for the same messages."""
        return "".join(text for text, _ in self.parts(messages, add_generation_prompt))


def choose_template(where: str, text: str | None, name: str | None = None) -> ChatTemplate:
    """The template called `name` if one is given, else the one whose Jinja text is `text`.

    `where` is where `text` comes from. Raises TokenizerError for a template that is not known or not served yet.
    """
    names = ", ".join(sorted(TEMPLATES))
    if name is not None:
        where, found = f"chat template {name!r}", name
    elif text is None:
        raise TokenizerError(where, "no chat template", todo=f"name one: {names}")
    else:
        found = _HASHES.get(hashlib.sha256(text.encode("utf-8")).hexdigest(), "")
    if found in _LATER:
        raise TokenizerError(where, f"{found} is not served until its model family is", want=names)
    if found not in TEMPLATES:
        first = (text or "").split("\n", 1)[0]
        got = None if name is not None else repr(first if len(first) <= 100 else first[:97] + "...")
        raise TokenizerError(where, "unknown chat template", got=got, want=names, todo="name one that fits the model")
    return TEMPLATES[found]


def _system_first(messages: Sequence[Message]) -> tuple[str | None, Sequence[Message]]:
    """A leading system message's content, and the messages after it."""
    if messages[0].role == "system":
        return messages[0].content, messages[1:]
    return None, messages


def _alternating(messages: Sequence[Message]) -> Sequence[Message]:
    """Check that user and assistant take turns, the user first."""
    for index, message in enumerate(messages):
        if message.role != ("user", "assistant")[index % 2]:
            raise RequestError(
                "messages",
                "roles must alternate, user first, after a system message if the template takes one",
                got=f"{message.role} as turn {index + 1}",
            )
    return messages


def _chatml(messages: Sequence[Message], open_reply: bool, bos: str, eos: str) -> Iterator[Part]:
    for message in messages:
        yield f"<|im_start|>{message.role}\n", True
        yield message.content, False
        yield "<|im_end|>\n", True
    if open_reply:
        yield "<|im_start|>assistant\n", True


def _chatml_with_system(default: str) -> _Turns:
    """ChatML where a chat without a system message gets `default` as one."""

    def turns(messages: Sequence[Message], open_reply: bool, bos: str, eos: str) -> Iterator[Part]:
        if messages[0].role != "system":
            messages = [Message("system", default), *messages]
        return _chatml(messages, open_reply, bos, eos)

    return turns


def _qwen3(messages: Sequence[Message], open_reply: bool, bos: str, eos: str) -> Iterator[Part]:
    """ChatML without the thoughts of earlier replies; the reply after the last question shows its own."""
    questions = [i for i, m in enumerate(messages) if m.role == "user" and not _is_tool_response(m.content)]
    last_question = questions[-1] if questions else len(messages) - 1
    turns = []
    for index, message in enumerate(messages):
        content = message.content
        if message.role == "assistant":
            thoughts, marker, reply = content.rpartition("</think>")
            if marker:
                content = reply.lstrip("\n")
                thoughts = thoughts.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
            if index > last_question and (thoughts or index == len(messages) - 1):
                thoughts, content = thoughts.strip("\n"), content.lstrip("\n")
                content = f"<think>\n{thoughts}\n</think>\n\n{content}"
        turns.append(Message(message.role, content))
    return _chatml(turns, open_reply, bos, eos)


def _is_tool_response(content: str) -> bool:
    return content.startswith("<tool_response>") and content.endswith("</tool_response>")


def _zephyr(messages: Sequence[Message], open_reply: bool, bos: str, eos: str) -> Iterator[Part]:
    for message in messages:
        yield f"<|{message.role}|>\n", True
        yield message.content, False
        yield f"{eos}\n", True
    if open_reply:
        yield "<|assistant|>\n", True


def _llama2(messages: Sequence[Message], open_reply: bool, bos: str, eos: str) -> Iterator[Part]:
    system, messages = _system_first(messages)
    for index, message in enumerate(_alternating(messages)):
        content = message.content
        if index == 0 and system is not None:
            content = f"<<SYS>>\n{system}\n<</SYS>>\n\n{content}"
        if message.role == "user":
            yield f"{bos}[INST] ", True
            yield content.strip(), False
            yield " [/INST]", True
        else:
            yield f" {content.strip()} ", False
            yield eos, True


def _llama3(messages: Sequence[Message], open_reply: bool, bos: str, eos: str) -> Iterator[Part]:
    yield bos, True
    for message in messages:
        yield f"<|start_header_id|>{message.role}<|end_header_id|>\n\n", True
        yield message.content.strip(), False
        yield "<|eot_id|>", True
    if open_reply:
        yield "<|start_header_id|>assistant<|end_header_id|>\n\n", True


def _llama3_dated(date: Callable[[], str]) -> _Turns:
    """Llama 3 whose system message is always there and starts with two dates."""

    def turns(messages: Sequence[Message], open_reply: bool, bos: str, eos: str) -> Iterator[Part]:
        system, messages = _system_first(messages)
        dates = f"Cutting Knowledge Date: December 2023\nToday Date: {date()}\n\n"
        yield f"{bos}<|start_header_id|>system<|end_header_id|>\n\n{dates}", True
        yield (system or "").strip(), False
        yield "<|eot_id|>", True
        yield from _llama3(messages, open_reply, "", eos)

    return turns


def _today() -> str:
    return datetime.datetime.now().strftime("%d %b %Y")


def _mistral(after_reply: str) -> _Turns:
    """The first Mistral templates, without a system message; `after_reply` stands behind a reply's EOS."""

    def turns(messages: Sequence[Message], open_reply: bool, bos: str, eos: str) -> Iterator[Part]:
        yield bos, True
        for message in _alternating(messages):
            if message.role == "user":
                yield "[INST] ", True
                yield message.content, False
                yield " [/INST]", True
            else:
                yield message.content, False
                yield eos + after_reply, True

    return turns


def _mixtral(messages: Sequence[Message], open_reply: bool, bos: str, eos: str) -> Iterator[Part]:
    """The later template of Mixtral: a system message goes in front of the first question."""
    system, messages = _system_first(messages)
    yield bos, True
    for index, message in enumerate(_alternating(messages)):
        if message.role == "user":
            yield " [INST] ", True
            yield f"{system}\n\n" if index == 0 and system is not None else "", False
            yield message.content, False
            yield " [/INST]", True
        else:
            yield f" {message.content}", False
            yield eos, True


def _mistral_nemo(messages: Sequence[Message], open_reply: bool, bos: str, eos: str) -> Iterator[Part]:
    """Mistral Nemo: no spaces, and a system message goes in front of the question that ends the chat."""
    system, messages = _system_first(messages)
    yield bos, True
    for index, message in enumerate(_alternating(messages)):
        if message.role == "user":
            yield "[INST]", True
            yield f"{system}\n\n" if index == len(messages) - 1 and system is not None else "", False
            yield message.content, False
            yield "[/INST]", True
        else:
            yield message.content, False
            yield eos, True


TEMPLATES = {
    template.name: template
    for template in (
        ChatTemplate("chatml", _chatml),
        ChatTemplate(
            "smollm2", _chatml_with_system("You are a helpful AI assistant named SmolLM, trained by Hugging Face")
        ),
        ChatTemplate("qwen2", _chatml_with_system("You are a helpful assistant.")),
        ChatTemplate(
            "qwen2.5", _chatml_with_system("You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
        ),
        ChatTemplate("qwen3", _qwen3),
        ChatTemplate("zephyr", _zephyr, eos="</s>"),
        ChatTemplate("llama-2", _llama2, bos="<s>", eos="</s>"),
        ChatTemplate("llama-3", _llama3, bos="<|begin_of_text|>"),
        ChatTemplate("llama-3.1", _llama3_dated(lambda: "26 Jul 2024"), bos="<|begin_of_text|>"),
        ChatTemplate("llama-3.2", _llama3_dated(_today), bos="<|begin_of_text|>"),
        ChatTemplate("mistral-v0.1", _mistral(" "), bos="<s>", eos="</s>"),
        ChatTemplate("mistral", _mistral(""), bos="<s>", eos="</s>"),
        ChatTemplate("mixtral", _mixtral, bos="<s>", eos="</s>"),
        ChatTemplate("mistral-nemo", _mistral_nemo, bos="<s>", eos="</s>"),
    )
}
_LATER = ("gemma",)
# SHA-256 of a Jinja text -> the template that renders it.
_HASHES = {
    "153280e3ff55d19da1398bdb3914ee2a51b80429bfaedde11d7d216c39db80f3": "chatml",
    "58c1a1f04baa7adaeaba1f90267c3d57d9396f0c1f0129bdde9e76d3c6784af7": "chatml",
    "64f85b198065d0fba2a81f37e10ed68161ce2c19a754c7100e67e0ca2ee9c326": "chatml",
    "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788": "smollm2",
    "793202280c0910ab26bc6eb57c8212c2417324c6d8c4efd0d10d59092ab3e3eb": "qwen2",
    "cd8e9439f0570856fd70470bf8889ebd8b5d1107207f67a5efb46e342330527f": "qwen2.5",
    "87a2728cb8dc9fe424d624542f6060ec05a1d285ebbec578bb078900e33396b5": "qwen3",
    "a55ee1b1660128b7098723e0abcd92caa0788061051c62d51cbe87d9cf1974d8": "qwen3",
    "66291cf0045c2425a3a667cf3cbb7af2b11f09e025c02f97245323ab79119362": "zephyr",
    "e8d5b5a546d3f19df16a5320c614fab05bdc4edd50e850f1afd947b503ea41cf": "llama-2",
    "ba03a121d097859c7b5b9cd03af99aafe95275210d2876f642ad9929a150f122": "llama-3",
    "e10ca381b1ccc5cf9db52e371f3b6651576caee0a630b452e2816b2d404d4b65": "llama-3.1",
    "5816fce10444e03c2e9ee1ef8a4a1ea61ae7e69e438613f3b17b69d0426223a4": "llama-3.2",
    "7e995b379ec01747807246483647cd99030abf331653f1119e16d7ac041a3495": "mistral-v0.1",
    "26a59556925c987317ce5291811ba3b7f32ec4c647c400c6cc7e3a9993007ba7": "mistral",
    "796853172235ab3aaa4810013ddfe2eab481bda3306dad4f700c00d436eed596": "mixtral",
    "7a29791b46bd731f43fbe4994f23c7b689daaa36c4d0294485fab19825a2ec5d": "mistral-nemo",
    "ecd6ae513fe103f0eb62e8ab5bfa8d0fe45c1074fa398b089c93a7e70c15cfd6": "gemma",
    "7de1c58e208eda46e9c7f86397df37ec49883aeece39fb961e0a6b24088dd3c4": "gemma",
    "19acd33317c8f50293a85a53c141f282e4175da3da68473c30967c4ef9e366d0": "gemma",
}
