"""Everything a person reads of a run, made from one object of facts, so that text and `--json` cannot disagree.

`facts` functions turn live objects into plain JSON values; `..._lines` functions turn those values into text. Pure.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
import unicodedata
from collections.abc import Iterator, Mapping
from typing import Any

from tlaloc_serve.artifact.manifest import Ladder
from tlaloc_serve.artifact.store import Artifact
from tlaloc_serve.engine.compiler import Compilation
from tlaloc_serve.engine.generate import Engine, Finished, RunReport, Step
from tlaloc_serve.engine.sampling import SamplingParams

FRAMEWORKS = ("jax", "torch", "numpy", "transformers")
_LABEL = 14
_ORIGINS = {"given": "named", "artifact": "the artifact's own, hash checked", "cache": "from the checkpoint cache"}
_SAMPLING = {
    "temperature": "temperature",
    "topK": "top-k",
    "topP": "top-p",
    "minP": "min-p",
    "repetitionPenalty": "repetition penalty",
    "presencePenalty": "presence penalty",
    "frequencyPenalty": "frequency penalty",
    "logitBias": "logit bias",
}

Facts = dict[str, Any]


def runtime_facts(plugin: str, api_version: tuple[int, int], requested: str, plugin_log: str | None) -> Facts:
    """The entire runtime of this process. Frameworks are asked for in the import system, never imported."""
    return {
        "plugin": plugin,
        "pluginApi": ".".join(map(str, api_version)),
        "pluginLog": plugin_log,
        "requestedPlatform": requested,
        "python": {"executable": sys.executable, "version": platform.python_version()},
        "frameworks": {name: importlib.util.find_spec(name) is not None for name in FRAMEWORKS},
    }


def artifact_facts(artifact: Artifact, path: str) -> Facts:
    manifest = artifact.manifest
    return {
        "path": path,
        "model": manifest.model_name,
        "hash": manifest.model_hash,
        "schema": manifest.schema_version,
        "layers": manifest.model.num_layers,
        "vocab": manifest.model.vocab_size,
        "entries": len(manifest.entries),
        "weights": {
            "format": manifest.weights_format,
            "files": len(manifest.weights),
            "bytes": manifest.weight_bytes(),
            "hashesVerified": artifact.weights_verified,
        },
    }


def engine_facts(engine: Engine, requested: str) -> Facts:
    """What the live client answers. `mismatch` says so when that is not the platform that was asked for."""
    found = engine.platform
    mismatch = None
    if requested not in ("auto", found):
        mismatch = f"{requested} was asked for, and the plugin's client is on {found}"
    return {
        "platform": found,
        "platformVersion": engine.client.platform_version,
        "devices": [str(device.description) for device in engine.client.devices],
        "mismatch": mismatch,
    }


def sampling_facts(params: SamplingParams) -> Facts:
    return {
        "temperature": params.temperature,
        "topK": params.top_k,
        "topP": params.top_p,
        "minP": params.min_p,
        "repetitionPenalty": params.repetition_penalty,
        "presencePenalty": params.presence_penalty,
        "frequencyPenalty": params.frequency_penalty,
        "logitBias": {str(token): value for token, value in sorted(params.logit_bias.items())},
    }


_UNCHANGED = sampling_facts(SamplingParams())


def picks_word(params: SamplingParams) -> str:
    """What the picks of these parameters are called in `step_facts`."""
    return "argmax" if params.temperature == 0 and params.plain else "picked"


def step_facts(step: Step, picks: str = "argmax") -> Facts:
    """`picks` says what a row's pick is: `argmax` of the logits as they are, or `picked` otherwise."""
    return {
        "step": step.number,
        "entry": step.entry,
        "rows": [
            {
                "sequence": row.sequence,
                "source": "gen" if row.generated else "prompt",
                "tokens": list(row.tokens),
                picks: row.argmax,
            }
            for row in step.rows
        ],
        "ms": round(step.seconds * 1e3, 3),
        "compileMs": round(step.compile_seconds * 1e3, 3),
        "cached": step.cached,
    }


def compilation_facts(item: Compilation) -> Facts:
    return {
        "name": item.what,
        "cached": item.cached,
        "ms": round(item.seconds * 1e3, 3),
        "options": dict(item.options),
        "reasons": dict(item.reasons),
    }


def run_facts(report: RunReport, max_new_given: bool, sampling: SamplingParams) -> Facts:
    picks = picks_word(sampling)
    median = report.median_step_seconds
    return {
        "sequences": [_sequence_facts(report, number, max_new_given) for number in range(len(report.prompts))],
        "sampling": sampling_facts(sampling),
        "steps": [step_facts(step, picks) for step in report.steps],
        "compiles": report.compiles,
        "cacheHits": report.cache_hits,
        "pickCompiles": report.pick_compiles,
        "executables": [compilation_facts(item) for item in report.compilations],
        "warnings": list(report.warnings),
        "firstStepMs": round(report.steps[0].seconds * 1e3, 3) if report.steps else None,
        "medianStepMs": None if median is None else round(median * 1e3, 3),
    }


def _sequence_facts(report: RunReport, number: int, max_new_given: bool) -> Facts:
    finished = report.finished.get(number, Finished(number, (), "cancelled"))
    prompt = list(report.prompts[number])
    return {
        "prompt": prompt,
        "maxNew": report.max_new[number],
        "maxNewSource": "given" if max_new_given else "default",
        "seed": report.seeds[number],
        "generated": list(finished.generated),
        "all": prompt + list(finished.generated),
        "reason": finished.reason,
        "detail": finished.detail or None,
    }


def header_lines(facts: Facts) -> Iterator[str]:
    """What is known before the first step: runtime, artifact, engine."""
    runtime, artifact, engine = facts["runtime"], facts["artifact"], facts["engine"]
    yield "the entire runtime of this process:"
    yield _line("PJRT plugin", f"{runtime['plugin']} (PJRT API {runtime['pluginApi']})")
    yield _line("platform", f"{runtime['requestedPlatform']} (requested; the client's own answer is below)")
    yield _line("Python", f"{runtime['python']['executable']} ({runtime['python']['version']})")
    yield _line("frameworks", _frameworks(runtime["frameworks"]))
    if runtime["pluginLog"]:
        yield _line("plugin log", runtime["pluginLog"])
    for answer in facts["tried"]:
        yield _line("passed over", f"{answer['path']}: {answer['message']}")
    yield ""
    yield _line("artifact", artifact["path"], 0)
    yield _line("model", artifact["model"])
    yield _line("hash", artifact["hash"])
    yield _line("layers", f"{artifact['layers']}  vocab {artifact['vocab']}")
    yield _line("bodies", f"{_count(artifact['entries'], 'compiled entry', 'compiled entries')}, all re-hashed OK")
    yield _line("weights", _weights(artifact["weights"]))
    yield from _text_lines(facts["text"])
    devices = ", ".join(engine["devices"])
    yield _line("engine", f"ctypes on {engine['platform']} ({devices})", 0)
    if engine["mismatch"]:
        yield _line("MISMATCH", engine["mismatch"], 0)


def request_lines(facts: Facts, ladder: Ladder) -> Iterator[str]:
    """What is about to run, one line a prompt. `facts` are those of `run_facts`."""
    many, greedy = len(facts["sequences"]) > 1, facts["sampling"]["temperature"] == 0
    for number, sequence in enumerate(facts["sequences"]):
        label = f"decode [{number}]" if many else "greedy decode" if greedy else "decode"
        new = f"{sequence['maxNew']} new"
        if sequence["maxNewSource"] == "default":
            new += " (by default)"
        context = ladder.fit_context(len(sequence["prompt"]) + sequence["maxNew"] - 1) or ladder.max_context
        pages = f"{context} = {_count(context // ladder.block_size, 'page', 'pages')} x {ladder.block_size}"
        yield _line(label, f"prompt {sequence['prompt']} + {new} (compiled context {pages})", 0)
    changed = [f"{_SAMPLING[key]} {value}" for key, value in facts["sampling"].items() if value != _UNCHANGED[key]]
    seeds = [str(sequence["seed"]) for sequence in facts["sequences"] if sequence["seed"] is not None]
    if seeds:
        changed.append(f"seed {seeds[0]}" if len(set(seeds)) == 1 else f"seeds {', '.join(seeds)}")
    if changed:
        yield _line("sampling", ", ".join(changed), 0)


def step_lines(step: Facts, many: bool) -> Iterator[str]:
    """One line a live row. `many` puts the number of the prompt in front."""
    for row in step["rows"]:
        tokens = row["tokens"]
        what = f"token {tokens[0]}" if len(tokens) == 1 else f"{len(tokens)} tokens {tokens[0]}..{tokens[-1]}"
        which = f"[{row['sequence']}] " if many else ""
        picks = "argmax" if "argmax" in row else "picked"
        pick = "" if row[picks] is None else f" -> {picks} {row[picks]}"
        text = f"  step {step['step']:<3} {which}{row['source']:<6} {what}{pick}"
        how = "cached" if step["cached"] else "compiled"
        compiled = f"  ({how} {step['entry']})" if step["compileMs"] else ""
        yield f"{text:<56} {step['ms']:>8.1f} ms{compiled}"


def footer_lines(facts: Facts, streamed: bool) -> Iterator[str]:
    """What came out. `facts` are those of `run_facts`; what was `streamed` is not said again."""
    many = len(facts["sequences"]) > 1
    for number, sequence in enumerate(facts["sequences"]):
        which = f" [{number}]" if many else ""
        for key in ("generated",) if streamed else ("prompt", "generated", "all"):
            yield _line(f"{key}{which}", sequence[key], 0)
        for key in () if streamed else ("text", "completion"):
            if sequence[key] is not None:
                yield _line(f"{key}{which}", repr(sequence[key]), 0)
        detail = f": {sequence['detail']}" if sequence["detail"] else ""
        yield _line(f"ended{which}", f"{sequence['reason']}{detail}", 0)
    hits = f", {facts['cacheHits']} of them kept from an earlier run" if facts["cacheHits"] else ""
    yield _line("XLA compiles", f"{facts['compiles']} (one per distinct ladder point actually touched){hits}", 0)
    yield from _compile_lines(facts)
    if facts["firstStepMs"] is not None:
        holds = "what was left to stage" if facts["steps"][0]["cached"] else "what was left to stage, and compiling"
        yield _line("first step", f"{facts['firstStepMs']:.0f} ms ({holds})", 0)
        yield _line("median step", f"{facts['medianStepMs']:.2f} ms", 0)


def _text_lines(facts: Facts) -> Iterator[str]:
    """Which tokenizer, and what to know about the text. `facts` are those of `Text.facts`."""
    tokenizer = facts["tokenizer"]
    if tokenizer is not None:
        text = f"{tokenizer['path']} ({_ORIGINS[tokenizer['origin']]}), {tokenizer['tokens']} tokens"
        if tokenizer["idsWithoutToken"]:
            text += f"; {tokenizer['idsWithoutToken']} ids of the model have none"
        yield _line("tokenizer", text)
    if facts["note"]:
        yield _line("no text", facts["note"])
    if facts["chatTemplate"]:
        yield _line("chat", f"template {facts['chatTemplate']}")
    if facts["unassigned"]:
        yield _line("warning", unassigned_text(facts["unassigned"]))


def unassigned_text(counts: Mapping[str, int]) -> str:
    """A sentence about code points (`U+XXXX`) that are newer than this interpreter, or not assigned at all."""
    shown = ", ".join(list(counts)[:5]) + (", ..." if len(counts) > 5 else "")
    return (
        f"{_count(sum(counts.values()), 'character is', 'characters are')} not in this interpreter's Unicode "
        f"{unicodedata.unidata_version} ({shown}): if a newer one has them, ids next to them may differ"
    )


def _compile_lines(facts: Facts) -> Iterator[str]:
    """Where each program came from and what it was compiled with."""
    made = [
        f"{item['name']} {'cached' if item['cached'] else 'compiled'} {item['ms']:.0f} ms"
        for item in facts["executables"]
    ]
    if made:
        yield _line("programs", ", ".join(made), 0)
    users: dict[tuple[str, str], list[str]] = {}
    for item in facts["executables"]:
        for name, value in item["options"].items():
            reason = item["reasons"].get(name, "asked for")
            users.setdefault((f"{name}={value}", reason), []).append(item["name"])
    for (option, reason), names in users.items():
        yield _line("XLA option", f"{option} for {', '.join(names)}: {reason}", 0)
    for warning in facts["warnings"]:
        yield _line("warning", warning, 0)


def _line(label: str, text: object, indent: int = 2) -> str:
    return f"{' ' * indent}{label:<{_LABEL - indent}} {text}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _frameworks(found: dict[str, bool]) -> str:
    missing = ", ".join(name for name, there in found.items() if not there)
    present = ", ".join(name for name, there in found.items() if there)
    if not present:
        return f"none installed in this interpreter ({missing}: not found)"
    rest = f"; {missing}: not found" if missing else ""
    return f"{present} found in this interpreter, not imported{rest}"


def _weights(facts: Facts) -> str:
    if facts["format"] == "embedded":
        return "in-body constants (nothing staged)"
    verified = "every hash verified" if facts["hashesVerified"] else "sizes checked; --verify-weights checks hashes"
    files = _count(facts["files"], "staged operand file", "staged operand files")
    return f"{files}, {size_text(facts['bytes'])}, {verified}"


def size_text(count: int) -> str:
    """Bytes for a person: `540.2 MiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")
