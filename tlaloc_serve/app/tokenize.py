"""The commands `tokenize` and `detokenize`: JSON lines in, JSON lines out.

Rules: one line in, one line out, written at once, so that the commands can stand in a pipe and answer a question at a
time. Output is ASCII, with JSON's escapes for the rest. The first line that cannot be taken ends the run with its
number; the lines before it have been answered.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator

from tlaloc_serve.app.report import unassigned_text
from tlaloc_serve.artifact.tokenizer import Tokenizer
from tlaloc_serve.errors import RequestError, TokenizerError


def add_tokenize_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common_arguments(parser, "a JSON string a line on standard input, its ids as a JSON array a line out")
    parser.add_argument("--no-special", action="store_true", help="leave out the tokenizer's own BOS and the like")
    parser.add_argument("--parse-special", action="store_true", help="let the texts of special tokens be those tokens")


def add_detokenize_arguments(parser: argparse.ArgumentParser) -> None:
    _add_common_arguments(parser, "a JSON array of ids a line on standard input, its text as a JSON string a line out")
    parser.add_argument("--show-special", action="store_true", help="show special tokens in the texts")


def _add_common_arguments(parser: argparse.ArgumentParser, jsonl: str) -> None:
    parser.add_argument("--tokenizer", required=True, metavar="FILE", help="a tokenizer.json")
    parser.add_argument("--jsonl", required=True, action="store_true", help=jsonl)


def run_tokenize(options: argparse.Namespace) -> int:
    """Turn texts into ids.

    Characters newer than this interpreter's Unicode database are counted and reported on stderr at the end: the ids
    next to them may differ from those of a newer one.
    """
    tokenizer = Tokenizer.from_file(options.tokenizer)
    unassigned: Counter[int] = Counter()
    try:
        for where, text in _lines():
            if not isinstance(text, str):
                raise RequestError(where, "not a text", got=type(text).__name__, want="a JSON string")
            try:
                ids = tokenizer.encode(text, add_special=not options.no_special, parse_special=options.parse_special)
            except TokenizerError as error:
                raise RequestError(where, str(error)) from None
            unassigned.update(tokenizer.unassigned(text))
            print(json.dumps(ids), flush=True)
    finally:
        if unassigned:
            counts = {f"U+{code:04X}": count for code, count in sorted(unassigned.items())}
            print(f"warning: {unassigned_text(counts)}", file=sys.stderr)
    return 0


def run_detokenize(options: argparse.Namespace) -> int:
    """Turn ids into texts. An id without a token adds nothing; bytes that are no UTF-8 become U+FFFD."""
    tokenizer = Tokenizer.from_file(options.tokenizer)
    for where, ids in _lines():
        if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
            raise RequestError(where, "not a list of token ids", want="a JSON array of whole numbers, 0 or more")
        print(json.dumps(tokenizer.decode(ids, skip_special=not options.show_special)), flush=True)
    return 0


def _lines() -> Iterator[tuple[str, object]]:
    """Each line of standard input, as its name for errors and its JSON value."""
    if sys.stdin is None:
        raise RequestError("standard input", "is closed", want="JSON lines")
    for number, line in enumerate(sys.stdin.buffer, 1):
        where = f"line {number}"
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise RequestError(where, f"not UTF-8 at byte {error.start}", got=f"0x{line[error.start]:02x}") from None
        except (ValueError, RecursionError) as error:
            raise RequestError(where, f"not JSON: {error}") from None
        yield where, value
