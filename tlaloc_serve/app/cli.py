"""The command line: which command, which exit code, and Ctrl-C.

Exit codes: 0 done, or SKIP because this machine has nothing to run on; 1 an error; 2 the command line itself is wrong;
130 interrupted by Ctrl-C; 141 the reader of the output went away. What goes wrong is one line on stderr, `error: ...`.
A command without a name is `serve`, so `serve.py --artifact DIR` and `tlaloc-serve --artifact DIR` are the same.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import inspect
import io
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tlaloc_serve.errors import TlalocError

OK, ERROR, USAGE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141

# Command -> module, what adds its flags, what runs it. Only the module that is asked for is loaded.
_COMMANDS = {
    "serve": ("serve", "add_arguments", "run"),
    "bench": ("bench", "add_arguments", "run"),
    "plugins": ("plugins", "add_arguments", "run"),
    "tokenize": ("tokenize", "add_tokenize_arguments", "run_tokenize"),
    "detokenize": ("tokenize", "add_detokenize_arguments", "run_detokenize"),
}


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line: a screen full of usage would hide what is wrong."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"error: {message}; --help lists the flags and the commands\n")


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code. Errors of this package become one line on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A character that the output's encoding lacks is no reason to end.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return _run(arguments)
    except TlalocError as error:
        print(f"error: {error}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        _discard_output()
        return PIPE_CLOSED
    except OSError as error:
        _discard_output()
        print(f"error: {error.filename or 'input or output'}: {error.strerror or error}", file=sys.stderr)
        return ERROR


def _run(arguments: Sequence[str]) -> int:
    name, rest = (arguments[0], arguments[1:]) if arguments and arguments[0] in _COMMANDS else ("serve", arguments)
    add_arguments, run, description = _command(name)
    parser = _Parser(
        prog=f"tlaloc-serve {name}",
        description=inspect.cleandoc(description),
        epilog=f"commands: {', '.join(_COMMANDS)} (serve when none is named)\n"
        "exit codes: 0 done or SKIP, 1 error, 2 usage, 130 Ctrl-C, 141 the reader of the output went away",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    return run(parser.parse_args(rest))


def _command(
    name: str,
) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int], str]:
    module_name, add_arguments, run = _COMMANDS[name]
    module = importlib.import_module(f"tlaloc_serve.app.{module_name}")
    description = getattr(module, run).__doc__ or module.__doc__ or ""
    return getattr(module, add_arguments), getattr(module, run), description


def _discard_output() -> None:
    """The interpreter flushes stdout once more at exit; give it somewhere to write."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def console() -> None:
    """Entry point of the console script."""
    # A start makes hundreds of thousands of objects that stay; looking for garbage among them took a fifth of its time.
    gc.set_threshold(100_000)
    sys.exit(main(sys.argv[1:]))
