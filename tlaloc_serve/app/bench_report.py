"""What `bench` prints, from one object of facts: a Markdown table for a README, JSON, or CSV. Pure but for `show`."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterator

from tlaloc_serve.app.report import Facts, size_text

_COLUMNS = ("test", "batch", "tokens/s", "min", "max", "ms a step", "host µs a step", "weights a step", "of bandwidth")


def show(facts: Facts, output: str) -> None:
    """Print in the form that was asked for; what was skipped goes to stderr where a form has no place for it."""
    if output == "json":
        print(json.dumps(facts))
    elif output == "csv":
        print(csv_text(facts), end="")
        for line in notes(facts):
            print(line, file=sys.stderr)
    else:
        for line in markdown_lines(facts):
            print(line)


def markdown_lines(facts: Facts) -> Iterator[str]:
    artifact, weights = facts["artifact"], facts["artifact"]["weights"]
    weights_text = f"weights {size_text(weights['bytes'])} ({weights['format']})"
    yield f"{artifact['model']}, {artifact['layers']} layers, {weights_text}"
    yield f"on {facts['platform']}, `{facts['plugin']}`, PJRT API {facts['pluginApi']}"
    yield ""
    yield f"| {' | '.join(_COLUMNS)} |"
    yield f"|{'---|' + '---:|' * (len(_COLUMNS) - 1)}"
    for row in facts["rows"]:
        yield f"| {' | '.join(_cells(row))} |"
    yield ""
    yield from _start_lines(facts)
    yield from notes(facts)


def _cells(row: Facts) -> Iterator[str]:
    speed = row["tokensPerSecond"]
    yield row["test"]
    yield str(row["batch"])
    for key in ("median", "min", "max"):
        yield f"{speed[key]:.1f}"
    yield f"{row['ms'] / row['steps']:.2f}"
    yield "" if row["hostMicroseconds"] is None else f"{row['hostMicroseconds']:.0f}"
    yield "" if row["weightBytesPerStep"] is None else size_text(row["weightBytesPerStep"])
    yield "" if row["bandwidthShare"] is None else f"{100 * row['bandwidthShare']:.0f} %"


def _start_lines(facts: Facts) -> Iterator[str]:
    """Everything before the first step, and the memory."""
    yield "| start | |"
    yield "|---|---:|"
    first = facts["firstToken"]
    if first:
        yield f"| first token, nothing compiled | {first['coldMs']:.0f} ms |"
        if first["warmMs"] is not None:
            yield f"| first token, compile cache warm | {first['warmMs']:.0f} ms |"
        yield f"| peak memory of that process | {size_text(first['peakRssBytes'])} |"
    yield f"| open and check the artifact | {facts['loadMs']:.0f} ms |"
    yield f"| open the client | {facts['clientMs']:.0f} ms |"
    yield f"| stage weights and pools | {facts['stagingMs']:.0f} ms |"
    for program in facts["programs"]:
        how = "from the cache" if program["cached"] else "compiled"
        yield f"| {program['name']}, {how} | {program['ms']:.0f} ms |"
    yield f"| peak memory of the benchmark | {size_text(facts['peakRssBytes'])} |"
    yield f"| read bandwidth ({facts['bandwidth']['how']}) | {facts['bandwidth']['gbPerSecond']:.1f} GB/s |"
    yield ""


def notes(facts: Facts) -> Iterator[str]:
    """What was not measured, and warnings."""
    for skipped in facts["skipped"]:
        yield f"skipped {skipped['test']}, batch {skipped['batch']}: {skipped['reason']}"
    for warning in facts["warnings"]:
        yield f"warning: {warning}"


def csv_text(facts: Facts) -> str:
    """One line a test; what holds for all of them is repeated on each."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    first, everywhere = facts["firstToken"], facts["artifact"]
    writer.writerow(
        ["model", "weight_bytes", "platform", "plugin", "plugin_api", "test", "batch", "tokens_per_s", "min", "max",
         "ms", "steps", "host_us_per_step", "weight_bytes_per_step", "bandwidth_share", "bandwidth_gb_per_s",
         "first_token_cold_ms", "first_token_warm_ms", "load_ms", "client_ms", "staging_ms", "peak_rss_bytes"]
    )  # fmt: skip
    for row in facts["rows"]:
        speed = row["tokensPerSecond"]
        writer.writerow(
            [everywhere["model"], everywhere["weights"]["bytes"], facts["platform"], facts["plugin"],
             facts["pluginApi"], row["test"], row["batch"], speed["median"], speed["min"], speed["max"], row["ms"],
             row["steps"], row["hostMicroseconds"], row["weightBytesPerStep"], row["bandwidthShare"],
             facts["bandwidth"]["gbPerSecond"], first.get("coldMs"), first.get("warmMs"), facts["loadMs"],
             facts["clientMs"], facts["stagingMs"], facts["peakRssBytes"]]
        )  # fmt: skip
    return out.getvalue()
