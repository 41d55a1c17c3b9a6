"""A model and a ladder to an artifact directory: weights, bodies, programs, manifest.

Rules: whatever is wrong with the options, the config or the tensors is refused before the first byte is written; the
frontend's files are read while the weights are written, and a refusal then leaves as little behind. The same checkpoint
and options give the same bytes, whatever the machine, the time and the Python.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from tlaloc_serve.artifact.manifest import (
    Entry,
    Exporter,
    Frontend,
    Ladder,
    Manifest,
    Model,
    TensorSource,
    TensorType,
    TokenizerFile,
    Weight,
    program_bytes,
)
from tlaloc_serve.artifact.writer import ArtifactWriter, check_destination
from tlaloc_serve.errors import ExportError
from tlaloc_serve.export import reference
from tlaloc_serve.export.checkpoint import Checkpoint, check_pieces
from tlaloc_serve.export.entries import Boundary, Point, boundary, ladder_points, make_entry
from tlaloc_serve.export.layout import Planned, plan_weights
from tlaloc_serve.export.llama import llama_body
from tlaloc_serve.export.staging import Job, Staged
from tlaloc_serve.export.target import GENERIC, TARGETS, Target
from tlaloc_serve.export.workers import Workers, core_count

EXPORTER_NAME = "tlaloc-serve"
EXPORTER_VERSION = "0.2.0"
DEFAULT_BATCHES = (1, 2, 4)
DEFAULT_CONTEXTS = (64, 128, 256, 512)
DEFAULT_BLOCK_SIZE = 16
# Scores of a prefill call take heads x tokens x context numbers a layer: more tokens a call would cost gigabytes.
DEFAULT_PREFILL_CHUNK = 512
WEIGHT_DTYPES = {"f32": "f32", "bf16": "bf16", "int8": "i8"}
_WEIGHTS = "weights"  # the folder
_SPARE_BYTES = 16 << 20  # of disk, for bodies and manifest

Graph = Callable[[Boundary, Point], str]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class ExportOptions:
    """What a user chooses; None means the default that follows from the checkpoint.

    `batch` and `context` are the ladder, strictly ascending; `num_blocks` the pages of a pool, scratch page included;
    `prefill_chunk` the most tokens a sequence that one prefill call takes; `layers` exports the first layers only;
    `target` is a key of `TARGETS`.
    """

    batch: tuple[int, ...] = DEFAULT_BATCHES
    context: tuple[int, ...] | None = None
    block_size: int = DEFAULT_BLOCK_SIZE
    num_blocks: int | None = None
    layers: int | None = None
    weights: str = "f32"
    prefill_chunk: int = DEFAULT_PREFILL_CHUNK
    target: str = GENERIC.name


@dataclass(frozen=True)
class Plan:
    """A checked export: nothing in it can be refused any more, except by the disk."""

    checkpoint: Checkpoint
    model: Model
    ladder: Ladder
    points: tuple[Point, ...]
    weights: tuple[Planned, ...]
    target: Target


def plan_export(checkpoint: Checkpoint, options: ExportOptions) -> Plan:
    """Check the options against the checkpoint. Raises ExportError naming the flag or the tensor."""
    config = checkpoint.config
    layers = config.num_layers if options.layers is None else options.layers
    if not 1 <= layers <= config.num_layers:
        raise ExportError("--layers", "not usable", got=layers, want=f"1 to {config.num_layers}")
    if options.weights not in WEIGHT_DTYPES:
        raise ExportError("--weights", "not usable", got=options.weights, want=" or ".join(WEIGHT_DTYPES))
    if options.target not in TARGETS:
        raise ExportError("--target", "not usable", got=options.target, want=" or ".join(TARGETS))
    if options.prefill_chunk < 1:
        raise ExportError("--prefill-chunk", "not usable", got=options.prefill_chunk, want="at least 1")
    ladder = _ladder(options, config.max_positions)
    blocks = ladder.max_context // ladder.block_size
    num_blocks = 1 + ladder.max_batch * blocks if options.num_blocks is None else options.num_blocks
    if num_blocks < 1 + blocks:
        raise ExportError(
            "--num-blocks",
            f"too small for one sequence of {ladder.max_context} tokens and the scratch page",
            got=num_blocks,
            want=f"at least {1 + blocks}",
        )
    dtype = WEIGHT_DTYPES[options.weights]
    weights = plan_weights(config, layers, checkpoint.tensors, dtype, checkpoint.where)
    check_pieces(checkpoint, [part.tensor for weight in weights for part in weight.parts])
    model = Model(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_layers=layers,
        num_blocks=num_blocks,
        block_size=ladder.block_size,
        dtype=dtype,
        kv_dtype="f32",
        kv_pool_dims=(num_blocks, ladder.block_size, config.num_kv_heads, config.head_dim),
    )
    points = ladder_points(ladder, options.prefill_chunk)
    return Plan(checkpoint, model, ladder, points, weights, TARGETS[options.target])


def _ladder(options: ExportOptions, max_positions: int) -> Ladder:
    size = options.block_size
    if size < 1:
        raise ExportError("--block-size", "not usable", got=size, want="at least 1")
    context = options.context
    if context is None:
        context = tuple(rung for rung in DEFAULT_CONTEXTS if rung <= max_positions)
        context = context or (max_positions // size * size,)
    for flag, rungs in (("--batch", options.batch), ("--context", context)):
        if not rungs or rungs[0] < 1 or any(a >= b for a, b in zip(rungs, rungs[1:], strict=False)):
            raise ExportError(flag, "not a ladder", got=list(rungs), want="positive numbers, each larger than the last")
    for rung in context:
        if rung % size:
            raise ExportError(
                "--context", "not a whole number of pages", got=rung, want=f"a multiple of --block-size {size}"
            )
        if rung > max_positions:
            raise ExportError(
                "--context",
                "more positions than the model has",
                got=rung,
                want=f"at most max_position_embeddings {max_positions}",
            )
    return Ladder(size, options.batch, context)


def export_checkpoint(plan: Plan, out: str, progress: Progress | None = None) -> Manifest:
    """Write the artifact of `plan` to the directory `out`. Raises ExportError; then `out` is as it was.

    `progress` is called with (bytes of weights written, bytes in all), first with 0 written.
    """
    checkpoint, model = plan.checkpoint, plan.model
    check_destination(pathlib.Path(os.path.realpath(out)))
    types = [slot for weight in plan.weights for slot in weight.slots]
    _check_space(out, sum(tensor.byte_length for _, tensor in types))
    report = progress or (lambda done, total: None)
    with ArtifactWriter(out) as writer:
        jobs = _jobs(writer, plan)
        with Workers(jobs, core_count()) as workers:
            frontend = _write_frontend(writer, checkpoint)
            graph = partial(llama_body, checkpoint.config, model.num_layers, model.block_size, plan.target)
            bodies = [_write_body(writer, model, point, types, graph) for point in plan.points]
            table = _weight_table(plan, jobs, _collect(jobs, workers, report))
        model_hash = _content_address(plan, table)
        manifest = Manifest(
            schema=2,
            model_name=checkpoint.name,
            model_hash=model_hash,
            model=model,
            ladder=plan.ladder,
            weights_format="staged",
            weights_path=_WEIGHTS,
            weights=table,
            entries=_write_programs(writer, model, model_hash, bodies),
            frontend=frontend,
            exporter=Exporter(EXPORTER_NAME, EXPORTER_VERSION, plan.target.name),
        )
        writer.commit(manifest)
    return manifest


def _check_space(out: str, needed: int) -> None:
    place = pathlib.Path(os.path.realpath(out)).parent
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if needed + _SPARE_BYTES > free:
        raise ExportError(
            out,
            "no space left for the artifact",
            got=f"{free} bytes free on that disk",
            want=f"{needed + _SPARE_BYTES}",
            todo="free some space or choose another --out",
        )


def _jobs(writer: ArtifactWriter, plan: Plan) -> list[Job]:
    writer.make_folder(_WEIGHTS)
    tensors = plan.checkpoint.tensors
    numbers = itertools.count()
    jobs = []
    for weight in plan.weights:
        paths = [os.path.join(writer.folder, _WEIGHTS, f"{next(numbers):04d}_{name}.bin") for name, _ in weight.slots]
        jobs.append(Job(paths[0], weight.type, tuple(tensors[part.tensor] for part in weight.parts), *paths[1:]))
    return jobs


def _collect(jobs: Sequence[Job], workers: Workers, progress: Progress) -> dict[int, Staged]:
    """The results of the jobs by index, with a report after each. Raises the first ExportError."""
    results: dict[int, Staged] = {}
    done, total = 0, sum(job.type.byte_length for job in jobs)
    progress(0, total)
    for index, staged in workers.results():
        results[index] = staged
        done += jobs[index].type.byte_length
        progress(done, total)
    return results


def _weight_table(plan: Plan, jobs: Sequence[Job], results: dict[int, Staged]) -> tuple[Weight, ...]:
    table = []
    for index, (planned, job) in enumerate(zip(plan.weights, jobs, strict=True)):
        sources = tuple(
            TensorSource(os.path.basename(piece.path), piece.tensor, piece.offset, piece.byte_length)
            for piece in job.pieces
        )
        staged = results[index]
        files = ((job.path, staged.sha256), (job.scales_path, staged.scales_sha256))
        for (name, tensor), (path, sha256) in zip(planned.slots, files, strict=False):
            error = float(f"{staged.error:.3g}") if tensor.dtype == "i8" else None
            path = f"{_WEIGHTS}/{os.path.basename(path)}"
            table.append(Weight(name, path, tensor, tensor.byte_length, sha256, sources, staged.source_sha256, error))
    return tuple(table)


def _content_address(plan: Plan, table: Sequence[Weight]) -> str:
    """The model's name, its size in short, and 16 digits of a SHA-256 over its architecture and its weights."""
    config = plan.checkpoint.config
    content = [asdict(config), [[weight.name, str(weight.type), weight.sha256] for weight in table]]
    digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode("ascii")).hexdigest()
    size = f"L{plan.model.num_layers}:h{config.hidden_size}:v{config.vocab_size}"
    return f"{config.family}:{plan.checkpoint.name}:{size}:{digest[:16]}"


def _write_frontend(writer: ArtifactWriter, checkpoint: Checkpoint) -> Frontend:
    files = checkpoint.frontend
    tokenizer = None
    if files.tokenizer is not None:
        writer.write("tokenizer.json", files.tokenizer)
        digest = hashlib.sha256(files.tokenizer).hexdigest()
        tokenizer = TokenizerFile("tokenizer.json", len(files.tokenizer), digest)
    return Frontend(
        tokenizer, files.bos_token_id, files.add_bos, files.eos_token_ids, files.chat_template, files.default_prompt
    )


@dataclass(frozen=True)
class _Body:
    """A body that is written: its ladder point, its boundary and the hash of its bytes."""

    point: Point
    slots: Boundary
    sha256: str


def _write_body(
    writer: ArtifactWriter, model: Model, point: Point, weights: Sequence[tuple[str, TensorType]], graph: Graph
) -> _Body:
    slots = boundary(model, point, weights)
    return _Body(point, slots, writer.write_body(graph(slots, point)))


def _write_programs(
    writer: ArtifactWriter, model: Model, model_hash: str, bodies: Sequence[_Body]
) -> tuple[Entry, ...]:
    """Write the program file of every body. Returns the manifest's entries, in the same order."""
    entries = []
    for body in bodies:
        entry = make_entry(model, model_hash, body.point, body.slots, body.sha256)
        writer.write(entry.program_path, program_bytes(entry))
        entries.append(entry)
    return tuple(entries)


def export_reference(out: str) -> Manifest:
    """Write the reference decode graph to the directory `out`. Raises ExportError."""
    with ArtifactWriter(out) as writer:
        points = ladder_points(reference.LADDER, None)
        bodies = [_write_body(writer, reference.MODEL, point, (), reference.reference_body) for point in points]
        manifest = Manifest(
            schema=2,
            model_name=reference.NAME,
            model_hash=reference.HASH,
            model=reference.MODEL,
            ladder=reference.LADDER,
            weights_format="embedded",
            weights_path=None,
            weights=(),
            entries=_write_programs(writer, reference.MODEL, reference.HASH, bodies),
            exporter=Exporter(EXPORTER_NAME, EXPORTER_VERSION, GENERIC.name),
        )
        writer.commit(manifest)
    return manifest
