"""An accelerator, when there is one: `python3 -m tests device`. Fails where none answers, so it is run by hand."""

from __future__ import annotations

import unittest

import tlaloc_serve
from tests.support import REPO, ids, load_json, shared

PLATFORMS = ("cuda", "rocm", "tpu")


class Accelerator(unittest.TestCase):
    def test_the_committed_reference_decodes(self) -> None:
        with tlaloc_serve.open(REPO / "examples" / "reference") as engine:
            self.assertIn(engine.platform, PLATFORMS)
            self.assertEqual(ids(engine, [[1, 2]], 2), [[9, 7]])

    def test_the_golden_ids_alone_and_batched(self) -> None:
        goldens = {"reference-v1": "reference", "reference-v2-aliased": "reference", "window-v3": "window-v3"}
        for name, golden in goldens.items():
            cases = load_json(shared("artifacts", f"{golden}.golden.json"))
            with self.subTest(name), tlaloc_serve.open(shared("artifacts", name), verify_weights=True) as engine:
                self.assertIn(engine.platform, PLATFORMS)
                for case in cases:
                    self.assertEqual(ids(engine, [case["prompt"]], len(case["generated"])), [case["generated"]])
                length = min(len(case["generated"]) for case in cases)
                got = ids(engine, [case["prompt"] for case in cases], length)
                self.assertEqual(got, [case["generated"][:length] for case in cases])


if __name__ == "__main__":
    unittest.main()
