"""The compile cache: what is a hit, what is a miss, and that nothing on the disk can do more than cost a compile."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import tempfile
import threading
import time
import unittest
from collections.abc import Iterator
from unittest import mock

from tests.fakes import FakePjrt, Program
from tlaloc_serve.engine import fingerprint
from tlaloc_serve.engine.compiler import Compiler, Default, encodings, writes_flat_pool
from tlaloc_serve.engine.executables import ExecutableCache, Stored
from tlaloc_serve.errors import PjrtError, RequestError
from tlaloc_serve.pjrt import abi
from tlaloc_serve.pjrt.client import Client, live
from tlaloc_serve.pjrt.library import file_state

KEY, OTHER = "a" * 64, "b" * 64
STORED = Stored(bytes(range(256)) * 40, {"options": {"x": True}})
BODY, CHANGED = b"module one", b"module two"
OLD = 10 * 10**9  # a file this many nanoseconds old is settled


class Folder(unittest.TestCase):
    """A test with an empty folder of its own."""

    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.cache = ExecutableCache(self.folder / "executables")

    def files(self) -> list[pathlib.Path]:
        return sorted(self.cache.folder.glob("*.executable")) if self.cache.folder.is_dir() else []


class OnDisk(Folder):
    def test_what_is_stored_is_what_is_loaded(self) -> None:
        self.assertIsNone(self.cache.load(KEY))
        self.cache.store(KEY, STORED)
        self.assertEqual(self.cache.load(KEY), STORED)
        self.assertIsNone(self.cache.load(OTHER))
        self.assertIsNone(self.cache.warning)
        self.assertEqual(self.files()[0].stat().st_mode & 0o077, 0)

    def test_a_flipped_bit_anywhere_is_a_miss_and_is_removed(self) -> None:
        self.cache.store(KEY, STORED)
        whole = self.files()[0].read_bytes()
        places = [*range(80), *range(80, len(whole), 97), len(whole) - 1]
        for at in places:
            damaged = bytearray(whole)
            damaged[at] ^= 1 << at % 8
            self.files()[0].write_bytes(damaged) if self.files() else self.cache._path(KEY).write_bytes(damaged)
            self.assertIsNone(self.cache.load(KEY), at)
            self.assertEqual(self.files(), [], at)

    def test_cut_short_or_longer_is_a_miss(self) -> None:
        self.cache.store(KEY, STORED)
        whole = self.files()[0].read_bytes()
        for data in (*(whole[:size] for size in (0, 1, 19, 20, 51, 52, 55, 56, 70, len(whole) - 1)), whole + b"x"):
            self.cache._path(KEY).write_bytes(data)
            self.assertIsNone(self.cache.load(KEY), len(data))
            self.assertEqual(self.files(), [])

    def test_an_entry_under_another_name_is_foreign(self) -> None:
        self.cache.store(KEY, STORED)
        self.files()[0].rename(self.cache._path(OTHER))
        self.assertIsNone(self.cache.load(OTHER))
        self.assertEqual(self.files(), [])

    def test_neither_a_link_nor_a_fifo_nor_a_folder_is_an_entry(self) -> None:
        self.cache.store(OTHER, STORED)
        path = self.cache._path(KEY)
        path.symlink_to(self.cache._path(OTHER))
        self.assertIsNone(self.cache.load(KEY))
        self.assertFalse(path.is_symlink())
        os.mkfifo(path)
        self.assertIsNone(self.cache.load(KEY))
        self.assertFalse(path.exists())
        path.mkdir()
        self.assertIsNone(self.cache.load(KEY))
        self.cache.store(KEY, STORED)
        self.assertIn("not kept", self.cache.warning or "")
        self.assertEqual(self.cache.load(OTHER), STORED)

    def test_an_entry_of_another_user_is_not_run(self) -> None:
        self.cache.store(KEY, STORED)
        with mock.patch("os.geteuid", return_value=os.geteuid() + 1):
            self.assertIsNone(self.cache.load(KEY))

    def test_the_least_recently_used_go_first(self) -> None:
        keys = [f"{number}" * 64 for number in range(4)]
        self.cache.store(keys[0], STORED)
        size = self.files()[0].stat().st_size
        self.cache.max_bytes = 3 * size
        for number, key in enumerate(keys[1:3], 1):
            self.cache.store(key, STORED)
            os.utime(self.cache._path(key), ns=(0, number))
        os.utime(self.cache._path(keys[0]), ns=(0, 0))
        self.assertEqual(self.cache.load(keys[0]), STORED)  # used: it is the newest now
        self.cache.store(keys[3], STORED)
        self.assertEqual([self.cache.load(key) is not None for key in keys], [True, False, True, True])
        self.assertLessEqual(sum(path.stat().st_size for path in self.files()), self.cache.max_bytes)

    def test_a_program_beyond_the_limit_is_not_kept(self) -> None:
        self.cache.max_bytes = 1000
        self.cache.store(KEY, STORED)
        self.assertEqual(self.files(), [])
        self.assertIn("TLALOC_CACHE_MAX_BYTES", self.cache.warning or "")

    def test_what_killed_writers_left_is_removed(self) -> None:
        self.cache.folder.mkdir()
        old, young = self.cache.folder / ".writing-old", self.cache.folder / ".writing-young"
        for path in (old, young):
            path.write_bytes(b"half")
        os.utime(old, (0, 0))
        self.cache.store(KEY, STORED)
        self.assertFalse(old.exists())
        self.assertTrue(young.exists())

    def test_a_full_disk_is_one_warning_and_leaves_nothing(self) -> None:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with mock.patch("os.fdopen", side_effect=_fdopen_that_writes_a_little(full)):
            self.cache.store(KEY, STORED)
        self.assertIn("No space left on device", self.cache.warning or "")
        self.assertEqual(list(self.cache.folder.iterdir()), [])
        self.assertIsNone(self.cache.load(KEY))

    def test_a_folder_that_cannot_be_made_or_written(self) -> None:
        (self.folder / "file").write_bytes(b"")
        for folder in (self.folder / "file" / "executables", pathlib.Path("/proc/no/such")):
            cache = ExecutableCache(folder)
            self.assertIsNone(cache.load(KEY))
            cache.store(KEY, STORED)
            self.assertIn("not kept", cache.warning or "")

    def test_a_read_only_folder_still_gives_hits(self) -> None:
        self.cache.store(KEY, STORED)
        denied = PermissionError(errno.EACCES, "Permission denied")
        with mock.patch("tempfile.mkstemp", side_effect=denied), mock.patch("os.utime", side_effect=denied):
            self.assertEqual(self.cache.load(KEY), STORED)
            self.cache.store(OTHER, STORED)
        self.assertIn("Permission denied", self.cache.warning or "")

    def test_writers_and_readers_at_once(self) -> None:
        """A reader sees a whole entry or none, also while a small limit makes writers remove each other's."""
        self.cache.store(KEY, STORED)
        size = self.files()[0].stat().st_size
        wrong: list[object] = []

        def work(number: int) -> None:
            cache = ExecutableCache(self.cache.folder, 2 * size)
            for turn in range(40):
                key = f"{(number + turn) % 4:x}" * 64
                found = cache.load(key)
                if found is None:
                    cache.store(key, Stored(STORED.payload, {"options": {}, "key": key}))
                elif found.facts.get("key", key) != key or found.payload != STORED.payload:
                    wrong.append(found.facts)
                if cache.warning:
                    wrong.append(cache.warning)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(wrong, [])

    def test_where_the_folder_is_and_how_large_it_may_get(self) -> None:
        cache = ExecutableCache.of_user({"TLALOC_CACHE_DIR": "/x", "TLALOC_CACHE_MAX_BYTES": "5"})
        self.assertEqual((str(cache.folder), cache.max_bytes), ("/x/executables", 5))
        self.assertEqual(ExecutableCache.of_user({"HOME": "/h"}).folder, pathlib.Path("/h/.cache/tlaloc/executables"))
        with self.assertRaisesRegex(RequestError, "TLALOC_CACHE_MAX_BYTES.*1 GiB"):
            ExecutableCache.of_user({"TLALOC_CACHE_MAX_BYTES": "1 GiB"})


def _fdopen_that_writes_a_little(error: OSError) -> object:
    real = os.fdopen

    @contextlib.contextmanager
    def opened(handle: int, mode: str) -> Iterator[object]:
        with real(handle, mode) as stream:
            full = mock.Mock()
            full.write.side_effect = lambda data: (stream.write(data[:10]), stream.flush(), _raise(error))
            yield full

    return opened


def _raise(error: OSError) -> None:
    raise error


class PluginIdentity(Folder):
    """A plugin file is known by its bytes, whatever its path, its size and its times say."""

    def setUp(self) -> None:
        super().setUp()
        self.plugin = self.folder / "plugin.so"
        self.write(b"version 1")

    def write(self, data: bytes, *, settled: bool = True) -> None:
        self.plugin.write_bytes(data)
        self.settled = settled

    def digest(self) -> str | None:
        later = time.time_ns() + (OLD if self.settled else 0)
        with mock.patch("time.time_ns", return_value=later):
            return fingerprint.plugin_digest(str(self.plugin), file_state(str(self.plugin)), self.folder / "records")

    def hashed(self) -> mock.Mock:
        return mock.Mock(wraps=fingerprint._hash_file)

    def test_the_answer_is_remembered(self) -> None:
        first = self.digest()
        with mock.patch.object(fingerprint, "_hash_file", self.hashed()) as hashed:
            self.assertEqual(self.digest(), first)
        hashed.assert_not_called()

    def test_another_version_at_the_same_path_with_the_same_size_and_time(self) -> None:
        first = self.digest()
        times = self.plugin.stat()
        self.write(b"version 2")
        os.utime(self.plugin, ns=(times.st_atime_ns, times.st_mtime_ns))
        self.assertEqual(self.plugin.stat().st_mtime_ns, times.st_mtime_ns)
        second = self.digest()
        self.assertIsNotNone(second)
        self.assertNotEqual(second, first)

    def test_a_copy_put_in_its_place(self) -> None:
        first = self.digest()
        copy = self.folder / "copy.so"
        copy.write_bytes(b"version 2")
        os.replace(copy, self.plugin)
        self.assertNotEqual(self.digest(), first)

    def test_a_file_too_young_to_tell_a_change_is_hashed_again(self) -> None:
        self.write(b"version 1", settled=False)
        self.digest()
        with mock.patch.object(fingerprint, "_hash_file", self.hashed()) as hashed:
            self.digest()
        hashed.assert_called_once()

    def test_a_file_that_changes_meanwhile_has_no_identity(self) -> None:
        state = file_state(str(self.plugin))

        def hash_and_change(path: str) -> str | None:
            found = real(path)
            self.plugin.write_bytes(b"version 2")
            return found

        real = fingerprint._hash_file
        with mock.patch.object(fingerprint, "_hash_file", hash_and_change):
            self.assertIsNone(fingerprint.plugin_digest(str(self.plugin), state, self.folder))
        self.assertIsNone(fingerprint.plugin_digest(str(self.plugin), state, self.folder))
        self.assertIsNone(fingerprint.plugin_digest(str(self.plugin), None, self.folder))

    def test_damaged_records_are_hashed_over(self) -> None:
        first = self.digest()
        record = next((self.folder / "records").iterdir())
        for data in (b"", b"{}", b"[]", b"null", b'{"file": 1}', record.read_bytes()[:-9]):
            record.write_bytes(data)
            self.assertEqual(self.digest(), first, data)

    def test_the_processor_is_told_from_others(self) -> None:
        mine = fingerprint.cpu_features()
        self.assertIsNotNone(mine)
        info = fingerprint._CPUINFO.read_text(encoding="utf-8")
        other = self.folder / "cpuinfo"
        for old, new in (("avx2", "avx9"), ("model name", "model name\t: Other\nmodel name")):
            self.assertIn(old, info, "this test knows x86-64 only")
            other.write_text(info.replace(old, new), encoding="utf-8")
            with mock.patch.object(fingerprint, "_CPUINFO", other):
                self.assertNotEqual(fingerprint.cpu_features(), mine)
        other.write_text(info.replace("cpu MHz", "cpu MHz\t: 1\ncpu MHz"), encoding="utf-8")
        with mock.patch.object(fingerprint, "_CPUINFO", other):
            self.assertEqual(fingerprint.cpu_features(), mine)
        with mock.patch.object(fingerprint, "_CPUINFO", self.folder / "absent"):
            self.assertIsNone(fingerprint.cpu_features())

    def test_each_part_of_the_fingerprint_counts(self) -> None:
        def made(version: tuple[int, int] = (0, 81), devices: int = 1, platform: str = "fake", **environ: str) -> str:
            fake = FakePjrt(version=version, devices=devices, platform=platform)
            plugin = fake.plugin()
            plugin.path, plugin.file_state = str(self.plugin), file_state(str(self.plugin))
            with Client(plugin) as client, mock.patch.dict(os.environ, environ):
                found = fingerprint.fingerprint(client, self.folder / "records")
            self.assertIsNotNone(found)
            return found or ""

        same = made()
        self.assertEqual(made(), same)
        flags = self.folder / "flags"
        flags.write_text("--xla_a=1", encoding="utf-8")
        different = [
            made(version=(0, 90)), made(devices=2), made(platform="cpu"), made(XLA_FLAGS="--xla_a=1"),
            made(XLA_FLAGS=str(flags)),
        ]  # fmt: skip
        flags.write_text("--xla_a=2", encoding="utf-8")
        different.append(made(XLA_FLAGS=str(flags)))
        with mock.patch("os.sched_getaffinity", return_value=set(range(97))):
            different.append(made())
        self.write(b"version 2")
        different.append(made())
        self.assertEqual(len({same, *different}), len(different) + 1)


class OnFake(Folder):
    """A compiler on a fake plugin whose file is a real one."""

    def setUp(self) -> None:
        super().setUp()
        self.plugin_file = self.folder / "plugin.so"
        self.plugin_file.write_bytes(b"version 1")
        program = Program([("f32", (1,))], lambda inputs: [bytes(4)])
        self.fake = FakePjrt(programs={BODY: program, CHANGED: Program([("f32", (1,))], lambda inputs: [bytes(4)])})

    @contextlib.contextmanager
    def compiler(self, **options: str) -> Iterator[Compiler]:
        """A new process, as far as the compiler can tell."""
        self.fake.calls.clear()
        plugin = self.fake.plugin()
        plugin.path, plugin.file_state = str(self.plugin_file), file_state(str(self.plugin_file))
        with Client(plugin) as client:
            yield Compiler(client, options, self.cache)
        self.fake.check()

    def compile(self, body: bytes = BODY, **options: str) -> tuple[bool, list[str]]:
        """Whether the program came from the disk, and the warnings; checked against the calls that were made."""
        with self.compiler(**options) as compiler:
            compiled = compiler.compile(body, "it")
            compiled.executable.close()
        self.assertEqual("Executable_DeserializeAndLoad" in self._calls(), compiled.compilation.cached)
        return compiled.compilation.cached, compiler.warnings

    def _calls(self) -> set[str]:
        return {call.removeprefix("PJRT_") for call in self.fake.calls}


class Compiling(OnFake):
    """When a program comes from the disk."""

    def test_the_second_start_loads(self) -> None:
        self.assertEqual(self.compile(), (False, []))
        self.assertEqual(self.compile(), (True, []))
        self.assertNotIn("Client_Compile", self._calls())

    def test_what_is_loaded_ahead_is_loaded_once_and_never_compiled(self) -> None:
        with self.compiler() as compiler:
            self.assertIsNone(compiler.find(BODY))
        self.assertFalse(self._calls() & {"Client_Compile", "Executable_DeserializeAndLoad"})
        self.compile()
        with self.compiler() as compiler:
            load = compiler.find(BODY)
            assert load is not None
            self.assertNotIn("Executable_DeserializeAndLoad", self._calls())
            load()
            loaded = compiler.compile(BODY, "it")
            self.assertEqual((loaded.compilation.cached, len(compiler.log)), (True, 1))
            loaded.executable.close()
            self.assertEqual(self.fake.calls.count("PJRT_Executable_DeserializeAndLoad"), 1)
            load()  # and nobody asks for it
            compiler.close()
            compiler.close()
            self.assertEqual(live["executables"], 0)
        self.assertNotIn("Client_Compile", self._calls())
        self.fake.errors["PJRT_Executable_DeserializeAndLoad"] = [(13, "not mine")]
        with self.compiler() as compiler:
            load = compiler.find(BODY)
            assert load is not None
            load()
            self.assertIsNone(compiler.find(BODY))  # what the plugin does not load is removed

    def test_what_makes_a_miss(self) -> None:
        self.compile()
        self.assertFalse(self.compile(CHANGED)[0])
        self.assertFalse(self.compile(some_option="1")[0])
        self.assertTrue(self.compile(some_option="1")[0])
        self.assertFalse(self.compile(some_option="2")[0])
        self.plugin_file.write_bytes(b"version 2")
        self.assertFalse(self.compile()[0])
        self.assertTrue(self.compile()[0])

    def test_a_program_that_the_plugin_does_not_load_is_compiled_and_replaced(self) -> None:
        self.compile()
        before = self.files()
        self.fake.errors["PJRT_Executable_DeserializeAndLoad"] = [(abi.INVALID_ARGUMENT, "bad blob")]
        with self.compiler() as compiler:
            compiled = compiler.compile(BODY, "it")
            compiled.executable.close()
        self.assertFalse(compiled.compilation.cached)
        self.assertEqual(self.files(), before)
        self.assertTrue(self.compile()[0])

    def test_a_plugin_that_cannot_serialise_is_one_warning(self) -> None:
        self.fake.errors["PJRT_Executable_Serialize"] = [(abi.UNIMPLEMENTED, "not here")] * 2
        with self.compiler() as compiler:
            for body in (BODY, CHANGED):
                compiler.compile(body, "it").executable.close()
        self.assertEqual(len(compiler.warnings), 1)
        self.assertRegex(compiler.warnings[0], "compile cache.*not here")
        self.assertEqual(self.files(), [])

    def test_a_plugin_file_that_is_not_known_is_one_warning(self) -> None:
        with self.compiler() as compiler:
            self.plugin_file.write_bytes(b"version 2")  # after it was loaded
            for body in (BODY, CHANGED):
                compiler.compile(body, "it").executable.close()
        self.assertRegex("|".join(compiler.warnings), "^compile cache: off, .*cannot be identified$")
        self.assertEqual(self.files(), [])

    def test_a_disk_that_fails_is_a_warning_and_the_program_runs(self) -> None:
        self.cache.folder.write_bytes(b"")
        cached, warnings = self.compile()
        self.assertFalse(cached)
        self.assertEqual(len(warnings), 1)
        self.assertIn("not kept", warnings[0])

    def test_no_cache(self) -> None:
        with self.compiler() as compiler:
            plain = Compiler(compiler._client)
            plain.compile(BODY, "it").executable.close()
        self.assertEqual(self.files(), [])
        self.assertNotIn("Executable_Serialize", self._calls())

    def test_a_body_that_is_refused_names_what_it_is(self) -> None:
        with self.compiler() as compiler, self.assertRaisesRegex(PjrtError, r"cannot compile it \(bodies/x\.mlir\)"):
            compiler.compile(b"nonsense", "it", "bodies/x.mlir")


class Options(OnFake):
    """What the plugin says about an option decides what is done with it; the words are those of XLA."""

    def refuse(self, *messages: str) -> None:
        self.fake.errors["PJRT_Client_Compile"] = [(abi.INVALID_ARGUMENT, message) for message in messages]

    def test_one_that_the_plugin_does_not_know_is_a_warning_that_a_hit_repeats(self) -> None:
        self.refuse("No such compile option: 'nope'")
        cached, warnings = self.compile(nope="1", other="2")
        self.assertFalse(cached)
        self.assertEqual(warnings, ["the plugin has no compile option nope; compiled without it"])
        self.assertEqual(self.compile(nope="1", other="2"), (True, warnings))

    def test_a_default_with_an_older_name(self) -> None:
        """The older name where the plugin lacks the new one or its value; neither where the user has set either."""
        row = Default("fake", "new", "A", "it helps", lambda body: True, instead=("old", "false"))
        unknown, wrong = "No such compile option: '{}'", "While setting option {}, 'A' is not a valid enum value"
        with mock.patch("tlaloc_serve.engine.compiler.DEFAULTS", (row,)):
            for refusals, given, used in (
                ([], {}, {"new": "A"}),
                ([unknown.format("new")], {}, {"old": False}),
                ([wrong.format("new")], {}, {"old": False}),
                ([wrong.format("new"), unknown.format("old")], {}, {}),
                ([], {"old": "true"}, {"old": True}),
                ([], {"new": "B"}, {"new": "B"}),
            ):
                with self.subTest(refusals=refusals, given=given), self.compiler(**given) as compiler:
                    compiler._cache = None
                    self.fake.errors["PJRT_Client_Compile"] = [(3, text) for text in refusals]
                    compiled = compiler.compile(BODY, "it")
                    compiled.executable.close()
                    self.assertEqual(compiled.compilation.options, used)
                    self.assertEqual(set(compiled.compilation.reasons), set(used) - set(given))
                    self.assertEqual(len(compiler.warnings), int(not used))

    def test_the_plugin_is_asked_once(self) -> None:
        self.refuse("No such compile option: 'nope'")
        with self.compiler(nope="1") as compiler:
            for body in (BODY, CHANGED):
                compiler.compile(body, "it").executable.close()
        self.assertEqual(self.fake.calls.count("PJRT_Client_Compile"), 3)

    def test_a_value_of_the_wrong_type_is_tried_otherwise(self) -> None:
        wrong = "While setting option flag, '1' is not a valid {} value."
        for kind, text, refusals, want in (
            ("string", "true", 1, "true"), ("string", "12", 1, "12"), ("bool", "1", 2, True), ("bool", "0", 2, False),
            ("float", "1", 1, "1"),
        ):  # fmt: skip
            self.refuse(*[wrong.format(kind)] * refusals)
            with self.compiler(flag=text) as compiler:
                compiled = compiler.compile(BODY, "it")
                compiled.executable.close()
            found = compiled.compilation.options["flag"]
            self.assertEqual((found, type(found)), (want, type(want)), (kind, text))
            self.cache.discard(self.files()[0].stem)

    def test_a_value_that_nothing_helps_is_an_error(self) -> None:
        self.refuse(*["While setting option flag, 'x' is not a valid int32 value."] * 9)
        with self.compiler(flag="x") as compiler, self.assertRaisesRegex(RequestError, "flag.*'x', want int32"):
            compiler.compile(BODY, "it")
        self.fake.errors.clear()

    def test_an_error_about_something_else_is_not_taken_for_an_option(self) -> None:
        for message in (
            "No such compile option: 'theirs'",
            "While setting option theirs, '1' is not a valid bool value.",
        ):
            self.refuse(message)
            with self.compiler(flag="x") as compiler, self.assertRaises(PjrtError):
                compiler.compile(BODY, "it")

    def test_encodings(self) -> None:
        for text, want in (
            ("true", (True, "true")), ("false", (False, "false")), ("1", (1, "1", True)), ("-7", (-7, "-7")),
            ("007", (7, "007")), ("1.5", (1.5, "1.5")), ("1e3", (1000.0, "1e3")), ("True", ("True",)), ("", ("",)),
            ("1_0", ("1_0",)), ("nan", ("nan",)), (str(2**63), (float(2**63), str(2**63))), ("a=b", ("a=b",)),
        ):  # fmt: skip
            found = encodings(text)
            self.assertEqual([(value, type(value)) for value in found], [(value, type(value)) for value in want])


class FlatPools(unittest.TestCase):
    """Which bodies write their pools through a reshape. The real ones are looked at in tests/plugin."""

    def body(self, **change: str) -> bytes:
        parts = {
            "reshape": "%s26 = stablehlo.reshape %5 : (tensor<6x2x2x2xf32>) -> tensor<12x2x2xf32>",
            "scatter": '%s27 = "stablehlo.scatter"(%s26, %4, %15) <{}> ({',
            **change,
        }
        return "\n".join(parts.values()).encode()

    def test_style(self) -> None:
        self.assertTrue(writes_flat_pool(self.body()))
        for change in (
            {"reshape": "%s26 = stablehlo.reshape %5 : (tensor<6x2x2x2xf32>) -> tensor<6x4x2xf32>"},
            {"reshape": "%s26 = stablehlo.reshape %5 : (tensor<6x2x2x2xf32>) -> tensor<12x4xf32>"},
            {"reshape": "%s20 = stablehlo.reshape %5 : (tensor<6x2x2x2xf32>) -> tensor<12x2x2xf32>"},
            {"scatter": '%s27 = "stablehlo.scatter"(%5, %4, %15) <{}> ({'},
            {"scatter": "%s27 = stablehlo.add %s26, %s26 : tensor<12x2x2xf32>"},
        ):
            self.assertFalse(writes_flat_pool(self.body(**change)), change)


if __name__ == "__main__":
    unittest.main()
