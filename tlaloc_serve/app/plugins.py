"""Show every place a PJRT plugin may be, what was there, and what each plugin can do; or fetch one for the CPU."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator

from tlaloc_serve.app.report import size_text
from tlaloc_serve.app.serve import add_plugin_arguments
from tlaloc_serve.pjrt.cache import cache_folder
from tlaloc_serve.pjrt.fetch import fetch
from tlaloc_serve.pjrt.preflight import ProbeResult, Survey, survey


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--fetch", choices=("cpu",), help="download a CPU plugin (pinned, hash checked) into the cache")
    parser.add_argument("--json", action="store_true", help="print the same facts as one JSON object on stdout")
    add_plugin_arguments(parser)


def run(options: argparse.Namespace) -> int:
    if options.fetch:
        path = fetch(options.fetch, cache_folder(os.environ), log=_to_stderr)
        print(json.dumps({"plugin": str(path)}) if options.json else f"plugin  {path}")
        return 0
    found = survey(options.platform, options.plugin, options.preflight_timeout, log=options.plugin_log)
    if options.json:
        print(json.dumps(found.to_dict()))
    else:
        for line in survey_lines(found):
            print(line)
    return 0


def _to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def survey_lines(found: Survey) -> Iterator[str]:
    """What a person reads of a survey: for each platform the places, then the plugins. Roots share one pattern."""
    for part in found.platforms:
        yield part.search.platform
        pattern = ""
        for place in part.search.places:
            if not place.root:
                yield f"  {place.name}: " + (f"{place.where} ({place.state})" if place.where else place.state)
                continue
            if place.where != pattern:
                pattern = place.where
                yield f"  {pattern} of"
            yield f"    {place.name:<34} {place.state}"
        for answer in part.probes:
            yield from probe_lines(answer)


def probe_lines(answer: ProbeResult) -> Iterator[str]:
    version = ".".join(map(str, answer.api_version)) if answer.api_version else "unknown"
    yield f"  plugin      {answer.path}"
    yield f"    API       {version}"
    if not answer.ok:
        yield f"    unusable  {answer.message}"
        return
    yield f"    platform  {answer.platform_name} ({answer.platform_version})"
    yield f"    devices   {len(answer.devices)}: {', '.join(f'{number} {kind}' for number, kind in answer.devices)}"
    limit = (answer.memory or {}).get("bytes_limit")
    yield f"    memory    {size_text(limit) if limit else 'not reported by the plugin'}"
