"""Everything a person reads of an export, made from one object of facts, so that text and `--json` cannot disagree."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

from tlaloc_serve.artifact.manifest import Kind, Manifest

_LABEL = 9

Facts = dict[str, Any]


def export_facts(manifest: Manifest, out: str, seconds: float, source: str, layers_of: int) -> Facts:
    """The facts of a finished export. `source` says where the weights came from; `layers_of` is the model's depth."""
    model, ladder = manifest.model, manifest.ladder
    return {
        "model": manifest.model_name,
        "hash": manifest.model_hash,
        "vocab": model.vocab_size,
        "hidden": model.hidden_size,
        "layers": model.num_layers,
        "layersOfModel": layers_of,
        "heads": model.num_heads,
        "kvHeads": model.num_kv_heads,
        "headDim": model.head_dim,
        "numBlocks": model.num_blocks,
        "blockSize": model.block_size,
        "weights": {"source": source, "dtype": model.dtype, "files": len(manifest.weights),
                    "bytes": manifest.weight_bytes(), "quantisation": _quantisation(manifest)},
        "target": manifest.exporter.target if manifest.exporter else None,
        "batch": list(ladder.batch),
        "context": list(ladder.context),
        "prefillTokens": sorted({entry.tokens_per_seq for entry in manifest.of_kind(Kind.PREFILL)}),
        "out": out,
        "seconds": round(seconds, 3),
        "inventory": _inventory(pathlib.Path(out)),
        "entries": [{"id": entry.id, "body": entry.body_path} for entry in manifest.entries],
        "frontend": {
            "tokenizer": manifest.frontend.tokenizer is not None,
            "eosTokenIds": list(manifest.frontend.eos_token_ids),
            "bosTokenId": manifest.frontend.bos_token_id,
            "addBos": manifest.frontend.add_bos,
            "defaultPrompt": manifest.frontend.default_prompt,
        },
        "serve": f"python3 serve.py --artifact {out}",
    }  # fmt: skip


def _quantisation(manifest: Manifest) -> Facts | None:
    """What quantising changed, in parts of the weights' own size; None where nothing is quantised."""
    errors = {w.name: w.quantisation_error for w in manifest.weights if w.quantisation_error is not None}
    if not errors:
        return None
    worst = max(errors, key=lambda name: errors[name])
    return {"medianError": sorted(errors.values())[len(errors) // 2], "largestError": errors[worst], "weight": worst}


def _inventory(folder: pathlib.Path) -> list[Facts]:
    """The top level of the directory: each file, and each folder with the number and size of its files."""
    rows = []
    for entry in sorted(os.scandir(folder), key=lambda entry: (not entry.is_dir(), entry.name)):
        if entry.is_dir():
            sizes = [item.stat().st_size for item in os.scandir(entry.path)]
            rows.append({"name": entry.name + "/", "files": len(sizes), "bytes": sum(sizes)})
        else:
            rows.append({"name": entry.name, "files": None, "bytes": entry.stat().st_size})
    return rows


def export_lines(facts: Facts) -> Iterator[str]:
    """The facts as the lines that an export prints."""
    yield _line("model", facts["model"])
    layers = f"layers {facts['layers']}"
    if facts["layersOfModel"] != facts["layers"]:
        layers += f" of {facts['layersOfModel']}"
    yield _line("", f"vocab {facts['vocab']}  hidden {facts['hidden']}  {layers}")
    yield _line("", f"{facts['heads']} heads / {facts['kvHeads']} kv-heads x headDim {facts['headDim']}")
    yield _line("KV pool", f"{facts['numBlocks']} pages x blockSize {facts['blockSize']}")
    yield _line("weights", facts["weights"]["source"])
    if facts["weights"]["quantisation"]:
        median, largest = (facts["weights"]["quantisation"][key] for key in ("medianError", "largestError"))
        worst = facts["weights"]["quantisation"]["weight"]
        text = f"a scale a row; rounding is {median:.2%} of a matrix (RMS, median), at most {largest:.2%} ({worst})"
        yield _line("", text)
    yield _line("target", facts["target"])
    batch, context = (_numbers(facts[key]) for key in ("batch", "context"))
    ladder = f"batch {batch} x context {context}, blockSize {facts['blockSize']}"
    if facts["prefillTokens"]:
        ladder += f"; prefill in calls of {_numbers(facts['prefillTokens'])} tokens"
    yield _line("ladder", ladder)
    yield _line("out", facts["out"])
    yield f"wrote the artifact in {facts['seconds']:.1f}s"
    yield ""
    yield facts["out"] + "/"
    for row in facts["inventory"]:
        count = "" if row["files"] is None else f"{row['files']} file" + ("" if row["files"] == 1 else "s")
        yield f"  {row['name']:<20} {count:>9}  {size_text(row['bytes']):>10}"
    yield ""
    yield _line("model", facts["model"])
    yield _line("hash", facts["hash"])
    entries = len(facts["entries"])
    yield f"{entries} compiled {'entry' if entries == 1 else 'entries'}:"
    width = max(len(entry["id"]) for entry in facts["entries"])
    for entry in facts["entries"]:
        yield f"  {entry['id']:<{width}} -> {entry['body']}"
    yield ""
    yield "Half one is done. Serve it:"
    yield f"  {facts['serve']}"


def _line(label: str, value: object) -> str:
    return f"{label:<{_LABEL}}{value}"


def _numbers(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else "{" + ",".join(map(str, numbers)) + "}"


def size_text(size: float) -> str:
    """Bytes in the largest unit that leaves a number of at least 1: `14.4 KiB`."""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
