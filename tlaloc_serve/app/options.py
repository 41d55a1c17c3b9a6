"""Flags about prompts, picking and stopping: their types, their groups in --help, and the objects they become.

Rule: a value that does not read as what its flag takes (ids, a number, ID=VALUE) is a usage error, exit 2. A value that
reads and that no model or this model can take (a temperature below 0, an id outside the vocabulary, a stop string too
long) is refused like any other request, exit 1.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace

from tlaloc_serve.app.stream import MAX_STOP_LENGTH, StopStrings
from tlaloc_serve.app.text import PlainText, Prompt, TextOptions, UserMessage
from tlaloc_serve.artifact.chat import TEMPLATES
from tlaloc_serve.engine.sampling import SamplingParams
from tlaloc_serve.errors import RequestError

# More than this on standard input is no prompt: the longest contexts take a fraction of it.
MAX_INPUT_BYTES = 16 << 20
_STDIN = "-"


def add_prompt_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts", "Several run as one batch, in the order given.")
    add = group.add_argument
    add(
        "--prompt",
        action="append",
        type=ids,
        default=[],
        metavar="IDS",
        dest="prompts",
        help="token ids, as in 1,2",
    )
    add(
        "--text",
        action="append",
        type=PlainText,
        default=[],
        metavar="TEXT",
        dest="prompts",
        help="a text to continue; - reads standard input, without its last line end",
    )
    add(
        "--chat",
        action="append",
        type=UserMessage,
        default=[],
        metavar="TEXT",
        dest="prompts",
        help="a user's message to answer; - reads standard input",
    )
    add("--system", metavar="TEXT", help="the system message of every --chat")
    add(
        "--chat-template",
        metavar="NAME",
        help=f"instead of the model's own, one of {', '.join(sorted(TEMPLATES))}",
    )
    add("--parse-special", action="store_true", help="let the texts of special tokens inside --text be those tokens")
    add("--tokenizer", metavar="FILE", help="a tokenizer.json (default: the artifact's, else the checkpoint cache's)")


def add_stop_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("stopping", "Generation also ends where the compiled context is full.")
    add = group.add_argument
    add("--max-new", type=positive, metavar="N", help="new tokens a prompt (default: 16, or what the context leaves)")
    add(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help=f"end before this text, at most {MAX_STOP_LENGTH} characters; may be repeated. The generated ids hold the "
        "tokens that completed it, the completion does not",
    )
    add("--ignore-eos", action="store_true", help="go on after the model's end-of-sequence ids")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling", "Greedy unless a temperature is given.")
    add = group.add_argument
    add("--temperature", type=number, default=0.0, metavar="X", help="0 is greedy (default)")
    add("--top-k", type=whole, default=0, metavar="N", help="keep the N likeliest tokens (default: 0, all)")
    add("--top-p", type=number, default=1.0, metavar="X", help="keep the likeliest that make up X (default: 1, all)")
    add("--min-p", type=number, default=0.0, metavar="X", help="drop those below X times the likeliest (default: 0)")
    add("--seed", type=whole, metavar="N", help="the same seed gives the same ids (default: drawn and shown)")
    add("--repetition-penalty", type=number, default=1.0, metavar="X", help="for ids in prompt and output (default: 1)")
    add("--presence-penalty", type=number, default=0.0, metavar="X", help="for ids in the output (default: 0)")
    add("--frequency-penalty", type=number, default=0.0, metavar="X", help="for each of their occurrences (default: 0)")
    add(
        "--logit-bias",
        action="append",
        type=bias,
        default=[],
        metavar="ID=VALUE",
        help="add to the logit of a token; may be repeated",
    )


def text_options(options: argparse.Namespace) -> TextOptions:
    """Raises RequestError for a stop string that cannot be one, and for chat flags without a chat."""
    if not any(isinstance(prompt, UserMessage) for prompt in options.prompts):
        for flag, value in (("--system", options.system), ("--chat-template", options.chat_template)):
            if value is not None:
                raise RequestError(flag, "there is no --chat that it could be for")
    return TextOptions(
        tokenizer=options.tokenizer,
        system=options.system,
        template=options.chat_template,
        parse_special=options.parse_special,
        show_special=options.show_special,
        stops=StopStrings(options.stop),
    )


def sampling_params(options: argparse.Namespace, vocab_size: int) -> SamplingParams:
    """Raises RequestError for a value out of range."""
    if options.seed is not None and options.seed < 0:
        raise RequestError("--seed", "out of range", got=options.seed, want="0 or more")
    biases: dict[int, float] = {}
    for token, value in options.logit_bias:
        if token in biases:
            raise RequestError("--logit-bias", f"token {token} is given twice", want="one value a token")
        if not 0 <= token < vocab_size:
            raise RequestError("--logit-bias", "outside the vocabulary", got=token, want=f"0 to {vocab_size - 1}")
        biases[token] = value
    return SamplingParams(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        seed=options.seed,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        logit_bias=biases,
    )


def read_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts with standard input in the place of `-`. Raises RequestError where it cannot be a prompt."""
    read: list[Prompt] = []
    taken = False
    for prompt in prompts:
        if not isinstance(prompt, list) and prompt.text == _STDIN:
            if taken:
                raise RequestError("standard input", "can be read once, and two prompts ask for it", todo="give one -")
            prompt, taken = replace(prompt, text=_read_stdin()), True
        read.append(prompt)
    return read


def _read_stdin() -> str:
    """Standard input as text without its last line end, which `echo` and editors put there."""
    where = "standard input"
    if sys.stdin is None:
        raise RequestError(where, "is closed", want="a text")
    data = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    if len(data) > MAX_INPUT_BYTES:
        raise RequestError(where, "too long for a prompt", want=f"at most {MAX_INPUT_BYTES >> 20} MiB")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            where,
            f"not UTF-8 at byte {error.start}",
            got=f"0x{data[error.start]:02x} ({error.reason})",
            want="UTF-8 text",
            todo="convert it, as with iconv -t UTF-8",
        ) from None
    return text[:-2] if text.endswith("\r\n") else text.removesuffix("\n")


def ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"want token ids separated by commas, as in 1,2; got {text!r}") from None


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"want a whole number, at least 1; got {text!r}")
    return int(text)


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"want a whole number; got {text!r}") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"want a number; got {text!r}") from None


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"want seconds, more than 0; got {text!r}")
    return value


def bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"want a token id and a number, as in 42=-1.5; got {text!r}") from None
