"""The compiler and its cache on every CPU plugin: the same ids from a loaded program as from a compiled one."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator

from tests.flat_pools import WITHOUT_DEFAULT, flat_body, step_seconds
from tests.support import REPO, cpu_plugins, ids, load_json, shared
from tlaloc_serve.artifact.store import open_artifact
from tlaloc_serve.engine.compiler import Compiler, writes_flat_pool
from tlaloc_serve.engine.executables import ExecutableCache
from tlaloc_serve.engine.generate import Engine
from tlaloc_serve.errors import RequestError
from tlaloc_serve.pjrt.platforms import open_client

ARTIFACTS = (
    ("reference-v1", "reference"),
    ("reference-v2", "reference"),
    ("reference-v2-aliased", "reference"),
    ("window-v3", "window-v3"),
)
OPTION = "xla_disable_hlo_passes"


class Cached(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = self.new_folder()

    def new_folder(self) -> pathlib.Path:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        return pathlib.Path(folder.name)

    @contextlib.contextmanager
    def engine(self, plugin: str, artifact: str, **options: str) -> Iterator[Engine]:
        """As a process of its own would make it, apart from the plugin that stays loaded."""
        opened = open_artifact(shared("artifacts", artifact))
        with open_client(plugin, "cpu", os.environ) as client:
            compiler = Compiler(client, options, ExecutableCache(self.folder / "executables"))
            with Engine(opened, client, compiler=compiler) as engine:
                yield engine

    def files(self) -> list[pathlib.Path]:
        return sorted((self.folder / "executables").glob("*.executable"))


class Golden(Cached):
    def test_every_case_with_a_cache_hit(self) -> None:
        for plugin in cpu_plugins():
            for artifact, golden in ARTIFACTS:
                cases = load_json(shared("artifacts", f"{golden}.golden.json"))
                self.folder = self.new_folder()  # v1 and v2 of the reference have the same bodies
                for start in ("cold", "warm"):
                    with self.subTest(plugin=plugin, artifact=artifact), self.engine(plugin, artifact) as engine:
                        made = hits = 0
                        for case in cases:
                            found = ids(engine, [case["prompt"]], len(case["generated"]))
                            self.assertEqual(found, [case["generated"]], start)
                            made += engine.report.compiles
                            hits += engine.report.cache_hits
                            self.assertEqual(engine.report.warnings, [])
                        self.assertGreater(made, 1)
                        self.assertEqual(hits, made if start == "warm" else 0)

    def test_a_loaded_program_updates_the_pools_in_place(self) -> None:
        for plugin in cpu_plugins():
            with self.engine(plugin, "window-v3") as engine:
                ids(engine, [[35]], 2)
            with self.engine(plugin, "window-v3") as engine:
                ids(engine, [[35]], 2)
                pools = engine._runner.pools.values()
                before = [pool.pointer_on_device() for pool in pools]
                ids(engine, [[35]], 2)
                self.assertEqual([pool.pointer_on_device() for pool in pools], before)
                self.assertTrue(all(item.cached for item in engine._runner.compiler.log))

    def test_with_the_options_on_and_off(self) -> None:
        for plugin in cpu_plugins():
            for (artifact, golden), options in zip(ARTIFACTS[2:], ({OPTION: "fusion"}, WITHOUT_DEFAULT), strict=True):
                cases = load_json(shared("artifacts", f"{golden}.golden.json"))[:2]
                with (
                    self.subTest(plugin=plugin, options=options, artifact=artifact),
                    self.engine(plugin, artifact, **options) as engine,
                ):
                    for case in cases:
                        self.assertEqual(ids(engine, [case["prompt"]], len(case["generated"])), [case["generated"]])
                    self.assertEqual(dict(engine._runner.compiler.log[0].options), options)


class Damage(Cached):
    def test_damaged_entries_are_compiled_again(self) -> None:
        case = load_json(shared("artifacts", "reference.golden.json"))[0]
        plugin = cpu_plugins()[0]
        with self.engine(plugin, "reference-v2-aliased") as engine:
            ids(engine, [case["prompt"]], len(case["generated"]))
        for number, path in enumerate(self.files()):
            data = bytearray(path.read_bytes())
            data[len(data) * (number + 1) // 9] ^= 0x10
            path.write_bytes(data[: len(data) - number % 2])
        with self.engine(plugin, "reference-v2-aliased") as engine:
            self.assertEqual(ids(engine, [case["prompt"]], len(case["generated"])), [case["generated"]])
            self.assertEqual((engine.report.cache_hits, engine.report.warnings), (0, []))
        with self.engine(plugin, "reference-v2-aliased") as engine:
            self.assertEqual(ids(engine, [case["prompt"]], len(case["generated"])), [case["generated"]])
            self.assertEqual(engine.report.cache_hits, engine.report.compiles)

    def test_an_entry_of_another_plugin_is_never_used(self) -> None:
        """Every plugin's entries under every other's names: all misses, and the ids stay right."""
        case = load_json(shared("artifacts", "reference.golden.json"))[0]
        entries: dict[str, list[pathlib.Path]] = {}
        for plugin in cpu_plugins():
            before = set(self.files())
            with self.engine(plugin, "reference-v2-aliased") as engine:
                ids(engine, [case["prompt"]], len(case["generated"]))
                self.assertEqual(engine.report.cache_hits, 0)
            entries[plugin] = sorted(set(self.files()) - before)
        first, *others = cpu_plugins()
        for other in others:
            for name, foreign in zip(entries[first], entries[other], strict=True):
                shutil.copy(foreign, name)
            with self.engine(first, "reference-v2-aliased") as engine:
                self.assertEqual(ids(engine, [case["prompt"]], len(case["generated"])), [case["generated"]])
                self.assertEqual(engine.report.cache_hits, 0)


class Options(Cached):
    def test_what_is_not_known_and_what_has_another_type(self) -> None:
        for plugin in cpu_plugins():
            options = {
                "no_such_option": "1",
                "xla_cpu_enable_fast_math": "0",
                "xla_dump_hlo_as_text": "false",
                "xla_dump_hlo_pass_re": "true",
                "xla_backend_optimization_level": "2",
            }
            for _ in range(2):
                with self.engine(plugin, "reference-v2-aliased", **options) as engine:
                    self.assertEqual(ids(engine, [[1, 2]], 2), [[9, 7]])
                    [warning] = engine.report.warnings
                    self.assertIn("no_such_option", warning)
                    applied = engine.report.compilations[0].options
                    self.assertIs(applied["xla_cpu_enable_fast_math"], False)
                    self.assertEqual(applied["xla_dump_hlo_pass_re"], "true")
                    self.assertEqual(applied[OPTION], "scatter_expander")

    def test_a_value_that_no_option_takes(self) -> None:
        for plugin in cpu_plugins():
            refused = self.assertRaisesRegex(RequestError, "xla_backend_optimization_level.*'high'.*int32")
            with self.engine(plugin, "reference-v2", xla_backend_optimization_level="high") as engine, refused:
                ids(engine, [[1, 2]], 2)

    def test_the_default_goes_to_the_bodies_of_the_older_style_alone(self) -> None:
        for artifact, _ in ARTIFACTS:
            opened = open_artifact(shared("artifacts", artifact))
            for entry in opened.manifest.entries:
                self.assertTrue(writes_flat_pool(opened.body(entry).data), entry.id)
        reference = open_artifact(REPO / "examples" / "reference")
        for entry in reference.manifest.entries:
            self.assertFalse(writes_flat_pool(reference.body(entry).data), entry.id)
        plugin = cpu_plugins()[0]
        with self.engine(plugin, "window-v3") as engine:
            ids(engine, [[35]], 2)
            for item in engine.report.compilations:
                entry = item.what.startswith(("decode", "prefill"))
                self.assertEqual(dict(item.options), {OPTION: "scatter_expander"} if entry else {})
                self.assertEqual(list(item.reasons), [OPTION] if entry else [])

    def test_without_it_a_step_grows_with_the_pools(self) -> None:
        """Least of several rounds, and far from the measured factors, so that a busy machine does not matter."""
        self.assertTrue(writes_flat_pool(flat_body(64, 1)))
        for plugin in cpu_plugins():
            with self.subTest(plugin=plugin):
                fast, slow = map(min, step_seconds(plugin, 4, 6, [(1024, {}), (1024, WITHOUT_DEFAULT)]))
                self.assertLess(8 * fast, slow)


class Processes(Cached):
    def serve(self, plugin: str, *more: str) -> subprocess.Popen[str]:
        command = [
            sys.executable, str(REPO / "serve.py"), "--artifact", str(shared("artifacts", "reference-v2-aliased")),
            "--prompt", "1,2", "--max-new", "2", "--plugin", plugin, "--json", *more,
        ]  # fmt: skip
        environ = {**os.environ, "TLALOC_CACHE_DIR": str(self.folder)}
        return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def facts(self, process: subprocess.Popen[str]) -> dict[str, object]:
        out, err = process.communicate(timeout=120)
        self.assertEqual(process.returncode, 0, err)
        run: dict[str, object] = json.loads(out)["run"]
        return run

    def test_two_at_once_then_a_third(self) -> None:
        plugin = cpu_plugins()[0]
        both = [self.serve(plugin), self.serve(plugin)]
        runs = [self.facts(process) for process in both] + [self.facts(self.serve(plugin))]
        for run in runs:
            self.assertEqual(run["sequences"][0]["generated"], [9, 7])  # type: ignore[index]
            self.assertEqual(run["warnings"], [])
        self.assertEqual((runs[2]["compiles"], runs[2]["cacheHits"]), (2, 2))
        self.assertTrue(all(item["cached"] for item in runs[2]["executables"]))  # type: ignore[attr-defined]

    def test_no_compile_cache_and_options_on_the_command_line(self) -> None:
        plugin = cpu_plugins()[0]
        run = self.facts(self.serve(plugin, "--no-compile-cache", "--xla-option=--xla_nope=1"))
        self.assertEqual(run["warnings"], ["the plugin has no compile option xla_nope; compiled without it"])
        self.assertEqual((run["cacheHits"], self.files()), (0, []))

    def test_a_copy_of_the_plugin_at_another_path_is_the_same_plugin(self) -> None:
        plugin = min(cpu_plugins(), key=os.path.getsize)
        copy = self.folder / "plugin_cpu.so"
        self.facts(self.serve(plugin))
        shutil.copy(plugin, copy)
        self.assertEqual(self.facts(self.serve(str(copy)))["cacheHits"], 2)
        with copy.open("r+b") as stream:  # another version at the same path: of the same size, at the same time
            status = copy.stat()
            stream.seek(0, os.SEEK_END)
            stream.seek(stream.tell() - 1)
            last = stream.read(1)
            stream.seek(-1, os.SEEK_END)
            stream.write(bytes([last[0] ^ 1]))
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        self.assertEqual(self.facts(self.serve(str(copy)))["cacheHits"], 0)


if __name__ == "__main__":
    unittest.main()
