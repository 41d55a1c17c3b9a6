"""SmolLM2-135M as a user runs it: serve.py with every golden text and chat, against transformers' ids and texts.

    python3 -m tests.real_text ARTIFACT

ARTIFACT is an f32 export of that model with its tokenizer. Not part of the test suite, since the weights (0.5 GB) are
not in the repository. Each case runs once with --json and once with --stream, on the first CPU plugin found.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from tests.support import REPO, cpu_plugins, load_json, shared


def serve(artifact: str, *arguments: str) -> str:
    program = [sys.executable, str(REPO / "serve.py"), "--platform", "cpu", "--plugin", cpu_plugins()[0]]
    result = subprocess.run(
        [*program, "--artifact", artifact, *arguments], capture_output=True, timeout=300, check=False
    )
    if result.returncode:
        raise SystemExit(f"{arguments}: exit {result.returncode}\n{result.stderr.decode()}")
    return result.stdout.decode()


def flags(case: dict[str, Any]) -> list[str]:
    if "messages" not in case:
        return [f"--text={case['text']}"]
    system, user = (message["content"] for message in case["messages"])
    return ["--chat", user, "--system", system]


def differences(artifact: str, case: dict[str, Any]) -> list[str]:
    """What differs from the golden case, in words."""
    count = len(case["generated"])
    arguments = [*flags(case), "--max-new", str(count), "--show-special"]
    sequence = json.loads(serve(artifact, *arguments, "--json"))["run"]["sequences"][0]
    found = [
        f"{key}: {got!r}, want {want!r}"
        for key, got, want in (
            ("prompt", sequence["prompt"], case["ids"]),
            ("generated", sequence["generated"], case["generated"]),
            ("completion", sequence["completion"], case["completion"]),
        )
        if got != want
    ]
    if f"\n\n{case['completion']}\n" not in serve(artifact, *arguments, "--stream"):
        found.append("the stream is not the completion")
    return found


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    artifact = sys.argv[1]
    cases = load_json(shared("checkpoints", "smollm2", "golden_public.json"))["cases"]
    failed = 0
    for case in cases:
        begin = time.perf_counter()
        found = differences(artifact, case)
        failed += bool(found)
        print(f"{', '.join(case['kinds'])}: {'; '.join(found) or 'equal'} ({time.perf_counter() - begin:.1f} s)")
    text = serve(artifact, "--text", "The capital of France is", "--stream")
    if "\n\n Paris" not in text:
        failed += 1
        print(f"The capital of France is: no Paris\n{text}")
    print(f"{len(cases) + 1 - failed} of {len(cases) + 1} equal")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
