"""Opening a plugin: what a file may be, which versions are spoken, which slots exist, who frees an error."""

from __future__ import annotations

import pathlib
import tempfile
import unittest

from tests import elf
from tests.fakes import FakePjrt
from tlaloc_serve.errors import OutOfMemory, PjrtError, PluginError
from tlaloc_serve.pjrt import abi
from tlaloc_serve.pjrt.plugin import AbiMismatch, Plugin


class LoadTest(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def refused(self, path: pathlib.Path, *parts: str) -> str:
        with self.assertRaises(PluginError) as caught:
            Plugin.open(path)
        text = str(caught.exception)
        for part in (str(path), *parts):
            self.assertIn(part, text)
        return text

    def file(self, data: bytes, name: str = "plugin.so") -> pathlib.Path:
        path = self.folder / name
        path.write_bytes(data)
        return path

    def test_missing_file(self) -> None:
        self.refused(self.folder / "absent.so", "no such file")

    def test_folder(self) -> None:
        self.refused(self.folder, "not a file", "a folder")

    def test_text_file(self) -> None:
        self.refused(self.file(b"#!/bin/sh\nexit 0\n"), "not a shared library", "want an ELF file")

    def test_empty_file(self) -> None:
        self.refused(self.file(b""), "not a shared library")

    def test_truncated_library(self) -> None:
        whole = elf.shared_object(elf.RETURN_NULL)
        for size in (20, 64, 100, 300, 4096, len(whole) - 1):
            self.refused(self.file(whole[:size]), "cut short", f"got {size} bytes")

    def test_library_without_the_entry_point(self) -> None:
        self.refused(self.file(elf.shared_object()), "not a PJRT plugin", "GetPjrtApi")

    def test_entry_point_that_returns_nothing(self) -> None:
        self.refused(self.file(elf.shared_object(elf.RETURN_NULL)), "GetPjrtApi returned nothing")

    def test_missing_dependency_names_both(self) -> None:
        path = self.file(elf.shared_object(elf.RETURN_NULL, needed="libnot_there.so.7"))
        self.refused(path, "libnot_there.so.7", "was not found", "LD_LIBRARY_PATH")

    def test_unreadable_file(self) -> None:
        path = self.file(elf.shared_object(elf.RETURN_NULL))
        link = self.folder / "loop.so"
        link.symlink_to(link)
        self.refused(link)
        self.assertTrue(path.exists())


class VersionTest(unittest.TestCase):
    def refused(self, fake: FakePjrt, *parts: str) -> None:
        with self.assertRaises(AbiMismatch) as caught:
            fake.plugin()
        for part in parts:
            self.assertIn(part, str(caught.exception))
        self.assertEqual(fake.calls, [], "a call was made although the ABI is refused")

    def test_speaks_the_oldest_and_newer_ones(self) -> None:
        for minor in (abi.MIN_MINOR, 81, 106, 115, 9999):
            plugin = FakePjrt(version=(0, minor)).plugin()
            self.assertEqual(plugin.api_version, (0, minor))

    def test_initialises_once(self) -> None:
        fake = FakePjrt()
        fake.plugin()
        self.assertEqual(fake.calls, ["PJRT_Plugin_Initialize"])

    def test_refuses_another_major(self) -> None:
        self.refused(FakePjrt(version=(1, 81)), "another major version", "got 1.81")

    def test_refuses_an_older_minor(self) -> None:
        self.refused(FakePjrt(version=(0, abi.MIN_MINOR - 1)), "too old", f"got 0.{abi.MIN_MINOR - 1}")

    def test_refuses_a_table_without_a_version(self) -> None:
        for size in (0, 8, abi.FUNCTIONS_OFFSET - 1):
            self.refused(FakePjrt(struct_size=size), "too short", f"got {size} bytes")


class SlotTest(unittest.TestCase):
    def test_null_slot_is_named(self) -> None:
        fake = FakePjrt(null={"PJRT_Client_Create"})
        plugin = fake.plugin()
        self.assertFalse(plugin.has("PJRT_Client_Create"))
        with self.assertRaisesRegex(PluginError, r"fake\.so.*PJRT API 0\.81.*PJRT_Client_Create"):
            plugin.call("PJRT_Client_Create", abi.PJRT_Client_Create_Args())
        self.assertEqual(fake.calls, ["PJRT_Plugin_Initialize"])

    def test_slot_beyond_the_table_is_named(self) -> None:
        last = abi.SLOTS["PJRT_Executable_Fingerprint"]
        end = abi.FUNCTIONS_OFFSET + abi.POINTER_SIZE * last
        for size, there in ((end, False), (end + abi.POINTER_SIZE - 1, False), (end + abi.POINTER_SIZE, True)):
            plugin = FakePjrt(struct_size=size).plugin()
            self.assertEqual(plugin.has("PJRT_Executable_Fingerprint"), there)
            self.assertFalse(plugin.has("PJRT_Buffer_CopyRawToHost"))
            with self.assertRaisesRegex(PluginError, "PJRT_Buffer_CopyRawToHost"):
                plugin.function("PJRT_Buffer_CopyRawToHost")

    def test_table_that_ends_before_the_first_function(self) -> None:
        with self.assertRaisesRegex(AbiMismatch, "PJRT_Plugin_Initialize"):
            FakePjrt(struct_size=abi.FUNCTIONS_OFFSET).plugin()


class ErrorTest(unittest.TestCase):
    def raised(self, code: int, text: str) -> PjrtError:
        fake = FakePjrt(errors={"PJRT_Client_Destroy": [(code, text)]})
        plugin = fake.plugin()
        with self.assertRaises(PjrtError) as caught:
            plugin.call("PJRT_Client_Destroy", abi.PJRT_Client_Destroy_Args())
        self.assertEqual((fake.errors_made, fake.errors_destroyed), (1, 1))
        fake.check()
        return caught.exception

    def test_error_is_read_and_destroyed_once(self) -> None:
        error = self.raised(abi.INVALID_ARGUMENT, "no such thing")
        self.assertEqual((error.call, error.code, error.code_name), ("PJRT_Client_Destroy", 3, "INVALID_ARGUMENT"))
        self.assertEqual(str(error), "PJRT_Client_Destroy: INVALID_ARGUMENT: no such thing")

    def test_out_of_memory_has_its_own_class(self) -> None:
        self.assertIsInstance(self.raised(abi.RESOURCE_EXHAUSTED, "out"), OutOfMemory)
        self.assertNotIsInstance(self.raised(13, "inside"), OutOfMemory)

    def test_code_nobody_knows(self) -> None:
        self.assertEqual(self.raised(77, "new").code_name, "code 77")

    def test_text_that_is_not_ascii_or_empty(self) -> None:
        self.assertEqual(self.raised(2, "dé\u0301jà ☃").detail, "dé\u0301jà ☃")
        self.assertEqual(self.raised(2, "").detail, "")

    def test_error_destroyed_once_when_reading_it_fails(self) -> None:
        fake = FakePjrt(errors={"PJRT_Client_Destroy": [(3, "first")], "PJRT_Error_GetCode": [(13, "second")]})
        with self.assertRaisesRegex(PjrtError, "UNKNOWN: first"):
            fake.plugin().call("PJRT_Client_Destroy", abi.PJRT_Client_Destroy_Args())
        self.assertEqual((fake.errors_made, fake.errors_destroyed), (2, 2))
        fake.check()

    def test_failing_initialisation(self) -> None:
        fake = FakePjrt(errors={"PJRT_Plugin_Initialize": [(9, "no driver")]})
        with self.assertRaisesRegex(PjrtError, "PJRT_Plugin_Initialize: FAILED_PRECONDITION: no driver"):
            fake.plugin()
        fake.check()


class AttributesTest(unittest.TestCase):
    def test_reads_them(self) -> None:
        attributes = FakePjrt().plugin().attributes()
        self.assertEqual(attributes, {"xla_version": 2, "stablehlo_current_version": (1, 13, 3)})

    def test_plugin_without_the_call(self) -> None:
        self.assertEqual(FakePjrt(null={"PJRT_Plugin_Attributes"}).plugin().attributes(), {})


if __name__ == "__main__":
    unittest.main()
