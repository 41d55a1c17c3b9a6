"""The house rules that a program can hold: who imports whom, only the standard library, the top level."""

from __future__ import annotations

import ast
import pathlib
import re
import sys
import unittest

from tests.support import REPO

PACKAGE = REPO / "tlaloc_serve"
# Room -> what it may import of the package. `engine` modules also keep their own order, below.
ROOMS = {
    "errors": set(),
    "pjrt": {"errors"},
    "artifact": {"errors"},
    "engine": {"errors", "artifact", "pjrt"},
    "export": {"errors", "artifact"},
    "app": {"errors", "artifact", "engine", "pjrt"},
    "__init__": {"errors", "artifact", "engine", "pjrt"},
    "__main__": {"app"},
}
# In `engine`, a module imports only what stands before it; those before `runner` know no device.
ENGINE_ORDER = (
    "pages", "sampling", "scheduler", "selection", "executables", "fingerprint", "compiler", "logits", "inputs",
    "runner", "generate",
)  # fmt: skip
WITHOUT_DEVICES = {"pages", "sampling", "scheduler", "selection"}
TOP_LEVEL = {"tlaloc_serve", "serve.py", "tests", "pyproject.toml", "README.md", "examples", "LICENSE"}


def imports(path: pathlib.Path) -> set[str]:
    """Every module that a file imports, anywhere in it, as absolute dotted names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                raise AssertionError(f"{path}:{node.lineno}: relative import")
            found |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


class Architecture(unittest.TestCase):
    def modules(self) -> list[tuple[str, pathlib.Path, set[str]]]:
        rows = []
        for path in sorted(PACKAGE.rglob("*.py")):
            parts = path.relative_to(PACKAGE).with_suffix("").parts
            rows.append((parts[0], path, imports(path)))
        self.assertGreater(len(rows), 30)
        return rows

    def test_only_the_standard_library(self) -> None:
        for _, path, names in self.modules():
            for name in names:
                self.assertIn(name.split(".")[0], {*sys.stdlib_module_names, "tlaloc_serve"}, path)

    def test_rooms_import_only_what_they_may(self) -> None:
        for room, path, names in self.modules():
            for name in names:
                target = name.split(".")[1] if name.startswith("tlaloc_serve.") else ""
                if target in ROOMS:
                    self.assertIn(target, ROOMS[room] | {room}, f"{path} imports {name}")

    def test_the_engine_keeps_its_order(self) -> None:
        for room, path, names in self.modules():
            if room != "engine" or path.stem == "__init__":
                continue
            self.assertIn(path.stem, ENGINE_ORDER, "a new module needs its place in ENGINE_ORDER")
            before = ENGINE_ORDER[: ENGINE_ORDER.index(path.stem)]
            for name in names:
                if name.startswith("tlaloc_serve.engine."):
                    self.assertIn(name.split(".")[2], before, f"{path} imports {name}")
                if path.stem in WITHOUT_DEVICES:
                    self.assertFalse(name.startswith("tlaloc_serve.pjrt"), f"{path} imports {name}")

    def test_no_runtime_dependency(self) -> None:
        text = (REPO / "pyproject.toml").read_text(encoding="utf-8")
        self.assertEqual(re.findall(r"(?m)^dependencies = (.*)$", text), ["[]"])
        self.assertNotIn("optional-dependencies", text)

    def test_the_top_level_holds_only_what_was_agreed(self) -> None:
        names = {path.name for path in REPO.iterdir() if not path.name.startswith(".")}
        built = {name for name in names if name.endswith(".egg-info")} | {"build", "dist", "__pycache__"}
        self.assertEqual(names - built, TOP_LEVEL)

    def test_no_input_is_checked_with_assert(self) -> None:
        for _, path, _ in self.modules():
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                self.assertNotIsInstance(node, ast.Assert, f"{path}:{getattr(node, 'lineno', 0)}")


if __name__ == "__main__":
    unittest.main()
