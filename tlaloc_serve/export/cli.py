"""Export a checkpoint, or the reference graph, to an artifact directory. Reads no plugin and runs no model.

Exit codes: 0 done; 1 an error, said in one line on stderr; 2 a flag is wrong; 130 Ctrl-C; 141 done, but the reader of
the output went away. After 1, 2 and 130 the directory is as it was before.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from tlaloc_serve.errors import ExportError
from tlaloc_serve.export import reference
from tlaloc_serve.export.checkpoint import open_checkpoint
from tlaloc_serve.export.report import Facts, export_facts, export_lines, size_text
from tlaloc_serve.export.target import TARGETS
from tlaloc_serve.export.write import (
    DEFAULT_BATCHES,
    DEFAULT_BLOCK_SIZE,
    DEFAULT_PREFILL_CHUNK,
    WEIGHT_DTYPES,
    ExportOptions,
    export_checkpoint,
    export_reference,
    plan_export,
)

OK, ERROR, USAGE, INTERRUPTED, PIPE_CLOSED = 0, 1, 2, 130, 141
# Where a checkpoint is looked for when none is named.
CACHED_CHECKPOINT = "~/.cache/tlaloc-checkpoints/TinyLlama__TinyLlama-1.1B-Chat-v1.0"
_PROGRESS_SECONDS = 2.0  # between two lines where stderr is no terminal


def main(arguments: Sequence[str], default_root: str = "build") -> int:
    """Run an export and return its exit code. Without `--out` it goes to a folder of the model's name in
    `default_root`."""
    parser = _parser(default_root)
    given = parser.parse_args(arguments)
    if given.reference:
        _refuse_with_reference(parser, given)
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        facts = _export(given, default_root)
    except ExportError as error:
        print(f"error: {error}", file=sys.stderr)
        return USAGE if error.where.startswith("--") else ERROR
    except OSError as error:
        print(f"error: {error.filename or 'export'}: {error.strerror or error}", file=sys.stderr)
        return ERROR
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous)
    try:
        print(json.dumps(facts, indent=1) if given.json else "\n".join(export_lines(facts)), flush=True)
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit; give it somewhere to write.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    return OK


def _terminate(number: int, frame: FrameType | None) -> None:
    """On SIGTERM leave through the context managers, so that the unfinished folder is removed."""
    sys.exit(128 + number)


def _parser(default_root: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--reference", action="store_true", help="export the reference decode graph")
    source.add_argument(
        "--checkpoint",
        metavar="DIR_OR_FILE",
        help=f"a HuggingFace folder or a .gguf file (default: {CACHED_CHECKPOINT} if it holds one, else the reference)",
    )
    parser.add_argument("--out", metavar="DIR", help=f"the artifact's directory (default: {default_root}/NAME)")
    parser.add_argument("--layers", type=int, metavar="N", help="export the first N layers only")
    batches = ",".join(map(str, DEFAULT_BATCHES))
    parser.add_argument("--batch", type=_ladder, metavar="1,2,4", help=f"batch sizes to compile (default: {batches})")
    parser.add_argument(
        "--context",
        type=_ladder,
        metavar="64,512",
        help="context lengths to compile (default: 64,128,256,512, as far as the model goes)",
    )
    parser.add_argument("--block-size", type=int, metavar="16", help=f"tokens a page (default: {DEFAULT_BLOCK_SIZE})")
    parser.add_argument(
        "--num-blocks",
        type=int,
        metavar="N",
        help="pages of a KV pool (default: what the largest batch at the largest context needs, and the scratch page)",
    )
    parser.add_argument(
        "--weights", choices=tuple(WEIGHT_DTYPES), help="dtype of the matrices (default: f32); int8 has a scale a row"
    )
    parser.add_argument(
        "--prefill-chunk",
        type=int,
        metavar="N",
        help="tokens a sequence that one prefill call takes (default: the entry's context, at most "
        f"{DEFAULT_PREFILL_CHUNK})",
    )
    parser.add_argument("--target", choices=TARGETS, help="what the bodies are for (default: generic)")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON")
    return parser


def _ladder(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"not a list of numbers: {text!r}") from None


def _options(given: argparse.Namespace) -> dict[str, object]:
    """The options that were given on the command line."""
    names = ("layers", "batch", "context", "block_size", "num_blocks", "weights", "prefill_chunk", "target")
    return {name: getattr(given, name) for name in names if getattr(given, name) is not None}


def _refuse_with_reference(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    for name in _options(given):
        parser.error(f"--{name.replace('_', '-')} does not go with --reference, whose ladder is fixed")


def _export(given: argparse.Namespace, default_root: str) -> Facts:
    begin = time.perf_counter()
    path = given.checkpoint
    if path is None and not given.reference:
        cached = pathlib.Path(CACHED_CHECKPOINT).expanduser()
        if (cached / "config.json").exists():
            path = str(cached)
        elif _options(given):
            raise ExportError(
                "--checkpoint",
                f"none is named, and {cached} holds none",
                todo="name one, or leave the other flags out to export the reference",
            )
    if path is None:
        out = os.path.abspath(given.out or os.path.join(default_root, reference.NAME))
        manifest = export_reference(out)
        source = "in-body constants from a fixed LCG (so two exports are byte-identical)"
        return export_facts(manifest, out, time.perf_counter() - begin, source, reference.MODEL.num_layers)
    checkpoint = open_checkpoint(path)
    out = os.path.abspath(given.out or os.path.join(default_root, checkpoint.name))
    plan = plan_export(checkpoint, ExportOptions(**_options(given)))  # type: ignore[arg-type]
    manifest = export_checkpoint(plan, out, _Progress())
    source = f"{manifest.model.dtype}, {len(checkpoint.tensors)} tensors read from the checkpoint's {checkpoint.source}"
    return export_facts(manifest, out, time.perf_counter() - begin, source, checkpoint.config.num_layers)


class _Progress:
    """A line on stderr: rewritten in place on a terminal, one every few seconds elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._said = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        text = f"weights {size_text(done)} of {size_text(total)}"
        if self._terminal:
            print(f"\r{text}  ", end="\r\033[K" if done == total else "", file=sys.stderr, flush=True)
        elif time.monotonic() - self._said >= _PROGRESS_SECONDS:
            self._said = time.monotonic()
            print(text, file=sys.stderr, flush=True)
