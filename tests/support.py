"""What the tests share: where the real artifacts and checkpoints are, and the CPU plugins of this machine."""

from __future__ import annotations

import json
import os
import pathlib
import unittest
from typing import Any

REPO = pathlib.Path(__file__).resolve().parents[1]
SHARED = pathlib.Path(os.environ.get("TLALOC_TEST_SHARED") or REPO.parent / "shared")


def shared(*parts: str) -> pathlib.Path:
    """A path under the folder of real artifacts and checkpoints.

    That folder is not part of the repository. Where it is absent the test that asks is skipped,
    except under CI=true, where its absence is a failure.
    """
    if not SHARED.is_dir():
        if os.environ.get("CI") == "true":
            raise AssertionError(f"CI needs the real artifacts and checkpoints, and {SHARED} is not there")
        raise unittest.SkipTest(f"the real artifacts and checkpoints are not at {SHARED}")
    return SHARED.joinpath(*parts)


def load_json(path: pathlib.Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))
