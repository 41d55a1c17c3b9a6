"""SmolLM2-135M, exported from its GGUF and from its safetensors, against transformers' ids: every case, 32 tokens.

    python3 -m tests.real_model --gguf FILE --safetensors DIR [--weights f32|bf16]

Not part of the test suite, since the weights (0.5 GB) are not in the repository. Runs on every CPU plugin found. With
f32 every case has to agree; with bf16 a case may differ whose smallest margin is below 0.5.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import time

from tests.support import cpu_plugins, engine_on, ids, load_json, shared
from tlaloc_serve.export.checkpoint import open_checkpoint
from tlaloc_serve.export.write import ExportOptions, export_checkpoint, plan_export

BF16_MARGIN = 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=pathlib.Path, required=True)
    parser.add_argument("--safetensors", type=pathlib.Path, required=True)
    parser.add_argument("--weights", default="f32")
    given = parser.parse_args()
    golden = load_json(shared("checkpoints", "smollm2", "golden_public.json"))["cases"]
    wrong = 0
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for source in (given.gguf, given.safetensors):
            out = pathlib.Path(folder, source.name + ".artifact")
            begin = time.perf_counter()
            plan = plan_export(open_checkpoint(str(source)), ExportOptions(batch=(1, 8), weights=given.weights))
            export_checkpoint(plan, str(out))
            print(f"{source.name}: exported in {time.perf_counter() - begin:.1f} s")
            for plugin in cpu_plugins():
                with engine_on(plugin, out) as engine:
                    alone = [ids(engine, [case["ids"]], 32)[0] for case in golden]
                    together = ids(engine, [case["ids"] for case in golden], 32)
                for case, *found in zip(golden, alone, together, strict=True):
                    agrees = all(generated == case["generated"] for generated in found)
                    allowed = agrees or (given.weights == "bf16" and case["min_margin"] < BF16_MARGIN)
                    wrong += not allowed
                    verdict = "agrees" if agrees else "differs within the margin" if allowed else "DIFFERS"
                    print(f"  {pathlib.Path(plugin).parent.name}: {case['kinds'][0]}: {verdict}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
