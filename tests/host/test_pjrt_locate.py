"""Where a plugin is looked for: places, their order, what counts, and the text for a machine that has none."""

from __future__ import annotations

import pathlib
import tempfile
import unittest
from unittest import mock

from tlaloc_serve.pjrt import locate
from tlaloc_serve.pjrt.locate import PLUGIN_PATH, fix_text, resolution_text, search, skip_text
from tlaloc_serve.pjrt.platforms import PLATFORMS, kind_of

PACKAGES = "lib/python3.11/site-packages"

# Word for word what the product's description shows for a machine without a CUDA plugin.
CUDA_SKIP = """\
SKIP: no PJRT cuda plugin found, so there is nothing to run on.
PJRT cuda plugin resolution — where Tlaloc looked:
  1. $TLALOC_PJRT_PLUGIN_PATH: not set
  2. no jax_plugins/*cuda*/*.so under any searched root. Roots searched: $VIRTUAL_ENV (not set), ~/.local/venvs/*, \
~/.venv, ~/venv, ~/.local, /usr/local, /usr, and this interpreter's site-packages — each at \
lib{,64}/python3.*/{site,dist}-packages/jax_plugins/*cuda*/*.so
Fix: export TLALOC_PJRT_PLUGIN_PATH=/path/to/the/plugin.so, or `pip install jax[cuda12]` into a venv under \
~/.local/venvs/ (or activate it)."""


class Case(unittest.TestCase):
    """An empty home; the system's folders and this interpreter's are empty ones below it."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        self.home = self.folder / "home"
        self.system = (self.folder / "usr-local", self.folder / "usr")
        self.libtpu = self.folder / "system-lib" / "libtpu.so"
        self.own = self.folder / "own"
        for patch in (
            mock.patch.object(locate, "SYSTEM_ROOTS", self.system),
            mock.patch.object(locate, "SYSTEM_LIBTPU", (self.libtpu,)),
            mock.patch.object(locate, "own_packages", lambda: [self.own]),
        ):
            patch.start()
            self.addCleanup(patch.stop)
        self.environ = {"HOME": str(self.home)}

    def put(self, *parts: str | pathlib.Path) -> str:
        path = pathlib.Path(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        return str(path)

    def paths(self, platform: str, explicit: str | None = None) -> list[str]:
        return [candidate.path for candidate in search(platform, explicit, self.environ).candidates]


class OrderTest(Case):
    def test_roots_in_the_order_of_the_description(self) -> None:
        name = "jax_plugins/xla_cuda12/xla_cuda_plugin.so"
        self.environ["VIRTUAL_ENV"] = str(self.folder / "active")
        expected = [
            self.put(self.folder, "active", PACKAGES, name),
            self.put(self.home, ".local/venvs/one", PACKAGES, name),
            self.put(self.home, ".venv", PACKAGES, name),
            self.put(self.home, "venv", PACKAGES, name),
            self.put(self.home, ".local", PACKAGES, name),
            self.put(self.system[0], "lib/python3.12/dist-packages", name),
            self.put(self.system[1], "lib64/python3.9/site-packages", name),
            self.put(self.own, name),
        ]
        self.assertEqual(self.paths("cuda"), expected)
        self.assertEqual(self.paths("rocm"), [])

    def test_newer_first_within_a_root(self) -> None:
        for version in ("3.9", "3.12"):
            for cuda in ("12", "13"):
                self.put(self.home, f".venv/lib/python{version}/site-packages/jax_plugins/xla_cuda{cuda}/plugin.so")
        found = [(path.split("python")[1].split("/")[0], path.split("xla_cuda")[1][:2]) for path in self.paths("cuda")]
        self.assertEqual(found, [("3.12", "13"), ("3.12", "12"), ("3.9", "13"), ("3.9", "12")])

    def test_where_the_cpu_packages_put_theirs(self) -> None:
        folder = self.home / ".venv" / PACKAGES
        xla = self.put(folder, "xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so")
        fast = self.put(folder, "fastatomstruct_xla_cpu/libpjrt_cpu.so")
        lammps = self.put(folder, "lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so")
        fetched = self.put(self.home, ".cache/tlaloc/plugins/cpu/some-1.0/plugin.so")
        self.put(self.home, ".cache/tlaloc/plugins/cpu/.fetching-x/plugin.so")
        self.assertEqual(self.paths("cpu"), [lammps, fast, xla, fetched])

    def test_cache_folder_can_be_named(self) -> None:
        self.environ["TLALOC_CACHE_DIR"] = str(self.folder / "cache")
        fetched = self.put(self.folder, "cache/plugins/cpu/some-1.0/plugin.so")
        self.assertEqual(self.paths("cpu"), [fetched])

    def test_libtpu(self) -> None:
        installed = self.put(self.home, "venv", PACKAGES, "libtpu/libtpu.so")
        self.put(self.libtpu)
        self.assertEqual(self.paths("tpu"), [installed, str(self.libtpu)])

    def test_a_file_counts_once_and_a_folder_never(self) -> None:
        real = self.put(self.home, ".venv", PACKAGES, "libtpu/libtpu.so")
        (self.home / ".venv/lib64").symlink_to("lib")
        (self.home / "venv" / PACKAGES / "libtpu/libtpu.so").mkdir(parents=True)
        self.assertEqual(self.paths("tpu"), [real])

    def test_nothing_is_imported(self) -> None:
        folder = self.own / "jax_plugins" / "xla_cuda12"
        self.put(folder, "xla_cuda_plugin.so")
        (folder / "__init__.py").write_text("raise SystemExit('imported')")
        self.assertEqual(len(self.paths("cuda")), 1)


class NamedTest(Case):
    def test_option_wins_over_variable_and_roots(self) -> None:
        self.put(self.own, "jax_plugins/xla_cuda12/plugin.so")
        self.environ[PLUGIN_PATH] = "/from/variable.so"
        result = search("cuda", "/from/option.so", self.environ)
        self.assertTrue(result.named)
        self.assertEqual([(one.path, one.place) for one in result.candidates], [("/from/option.so", "--plugin")])

    def test_variable_wins_over_roots(self) -> None:
        self.put(self.own, "jax_plugins/xla_cuda12/plugin.so")
        self.environ[PLUGIN_PATH] = "/from/variable.so"
        self.assertEqual(self.paths("cuda"), ["/from/variable.so"])

    def test_what_the_variable_counts_for(self) -> None:
        for name, counts in (
            ("/x/libtpu.so", {"tpu"}),
            ("/x/xla_cuda_plugin.so", {"cuda", "rocm", "cpu"}),
            ("/x/output/plugin.so", {"cuda", "rocm", "cpu"}),
            ("/x/pjrt_c_api_tpu_plugin.so", {"tpu"}),
        ):
            self.environ[PLUGIN_PATH] = name
            self.assertEqual({platform for platform in PLATFORMS if self.paths(platform)}, counts, name)

    def test_variable_that_does_not_count_is_said_to(self) -> None:
        self.environ[PLUGIN_PATH] = "/x/libtpu.so"
        text = skip_text([search("cuda", None, self.environ)], {})
        self.assertIn("$TLALOC_PJRT_PLUGIN_PATH: /x/libtpu.so (a tpu plugin, which does not count for cuda)", text)
        self.environ[PLUGIN_PATH] = "/x/plugin.so"
        text = skip_text([search("tpu", None, self.environ)], {})
        self.assertIn("/x/plugin.so (not a tpu plugin, which does not count for tpu)", text)

    def test_empty_variable_is_not_set(self) -> None:
        self.environ[PLUGIN_PATH] = ""
        self.assertFalse(search("cpu", None, self.environ).named)


class TextTest(Case):
    def test_cuda_text_is_the_descriptions(self) -> None:
        with (
            mock.patch.object(locate, "SYSTEM_ROOTS", (pathlib.Path("/usr/local"), pathlib.Path("/usr"))),
            mock.patch.object(locate, "_packages", lambda roots: []),
        ):
            self.assertEqual(skip_text([search("cuda", None, self.environ)], {}), CUDA_SKIP)

    def test_cpu_text_names_the_fetch_command(self) -> None:
        text = skip_text([search("cpu", None, self.environ)], {})
        self.assertIn("Fix: python3 -m tlaloc_serve plugins --fetch cpu", text)
        self.assertIn(f"fetched plugins: {self.home}/.cache/tlaloc/plugins/cpu/*/*.so (nothing there)", text)

    def test_every_platform_has_its_section(self) -> None:
        text = skip_text([search(platform, None, self.environ) for platform in PLATFORMS], {})
        first, *rest = text.splitlines()
        self.assertEqual(first, "SKIP: no PJRT plugin found (cuda, rocm, tpu, cpu), so there is nothing to run on.")
        for platform in PLATFORMS:
            self.assertIn(f"PJRT {platform} plugin resolution — where Tlaloc looked:", rest)
            self.assertIn(f"Fix: {fix_text(platform)}", rest)

    def test_found_plugins_are_listed_with_what_became_of_them(self) -> None:
        path = self.put(self.home, ".venv", PACKAGES, "jax_plugins/xla_cuda12/plugin.so")
        text = skip_text([search("cuda", None, self.environ)], {path: "no device: none visible"})
        self.assertIn("SKIP: no PJRT cuda plugin found that works here", text)
        self.assertIn(f"  2. ~/.venv: {path}: no device: none visible", text)
        self.assertIn("  3. nothing under the other roots: $VIRTUAL_ENV (not set), ~/.local/venvs/*, ~/venv", text)
        self.assertIn("Fix: check that the cuda device and its driver are there.", text)

    def test_named_plugin_without_a_device(self) -> None:
        result = search("tpu", "/x/libtpu.so", self.environ)
        self.assertEqual(
            resolution_text(result, {"/x/libtpu.so": "no device"}).splitlines()[1:],
            [
                "  1. --plugin: /x/libtpu.so: no device",
                "Fix: check that the tpu device and its driver are there, or name another plugin.",
            ],
        )


class KindTest(unittest.TestCase):
    def test_kind_by_the_last_parts_of_the_path(self) -> None:
        for path, kind in (
            ("/v/jax_plugins/xla_cuda12/xla_cuda_plugin.so", "cuda"),
            ("/v/jax_plugins/xla_cuda13/plugin.so", "cuda"),
            ("/v/jax_plugins/xla_rocm7/xla_rocm_plugin.so", "rocm"),
            ("/lib/libtpu.so", "tpu"),
            ("/v/xla_plugins/xla_cpu_pjrt/xla_cpu_pjrt.so", "cpu"),
            ("/v/fastatomstruct_xla_cpu/libpjrt_cpu.so", "cpu"),
            ("/v/lammps_jax_pjrt_cpu/pjrt_c_api_cpu_plugin.so", "cpu"),
            ("/v/pjrt_c_api_gpu_plugin.so", "cuda"),
            ("/cuda/a/b/plugin.so", None),
            ("/x/output/plugin.so", None),
            ("/x/barracuda/plugin.so", None),
            ("plugin.so", None),
        ):
            self.assertEqual(kind_of(path), kind, path)


if __name__ == "__main__":
    unittest.main()
