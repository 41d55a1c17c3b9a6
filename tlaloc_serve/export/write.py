"""A model and a ladder to an artifact directory: bodies, programs, manifest. The weights are staged before.

Nothing here knows a model: the graph comes as a function from a ladder point to StableHLO text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from tlaloc_serve.artifact.manifest import Entry, Exporter, Manifest, Model, TensorType, program_json
from tlaloc_serve.artifact.writer import ArtifactWriter
from tlaloc_serve.export import reference
from tlaloc_serve.export.entries import Boundary, Point, boundary, ladder_points, make_entry

EXPORTER_NAME = "tlaloc-serve"
EXPORTER_VERSION = "0.1.0"
TARGET = "generic"

Graph = Callable[[Boundary, Point], str]


def write_entries(
    writer: ArtifactWriter,
    model: Model,
    model_hash: str,
    points: Sequence[Point],
    weights: Sequence[tuple[str, TensorType]],
    graph: Graph,
) -> tuple[Entry, ...]:
    """Write the body and the program file of every point. Returns the manifest's entries, in the same order."""
    entries = []
    for point in points:
        slots = boundary(model, point, weights)
        entry = make_entry(model, model_hash, point, slots, writer.write_body(graph(slots, point)))
        writer.write(entry.program_path, json.dumps(program_json(entry), separators=(",", ":")).encode("ascii"))
        entries.append(entry)
    return tuple(entries)


def export_reference(out: str) -> Manifest:
    """Write the reference decode graph to the directory `out`. Raises ExportError."""
    with ArtifactWriter(out) as writer:
        points = ladder_points(reference.LADDER, None, prefill=False)
        entries = write_entries(writer, reference.MODEL, reference.HASH, points, (), reference.reference_body)
        manifest = Manifest(
            schema=2,
            model_name=reference.NAME,
            model_hash=reference.HASH,
            model=reference.MODEL,
            ladder=reference.LADDER,
            weights_format="embedded",
            weights_path=None,
            weights=(),
            entries=entries,
            exporter=Exporter(EXPORTER_NAME, EXPORTER_VERSION, TARGET),
        )
        writer.commit(manifest)
    return manifest
