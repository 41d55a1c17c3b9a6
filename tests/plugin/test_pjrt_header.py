"""abi.py against the C header that a plugin package ships: sizes, offsets, the order of the table, every code.

The header is read as text with a small parser of our own, and laid out by C's rules. A field that either side lacks
is a failure, and so is a construct that the parser does not understand.
"""

from __future__ import annotations

import os
import pathlib
import re
import unittest

from tests.support import cpu_plugins
from tlaloc_serve.pjrt import abi
from tlaloc_serve.pjrt.locate import own_packages

_HEADER = "include/pjrt_c_api.h"
_SCALARS = {"size_t": 8, "int64_t": 8, "uint64_t": 8, "intptr_t": 8, "uintptr_t": 8, "int": 4, "float": 4, "bool": 1}
_FIELD = re.compile(r"(?P<type>[\w\s*]*[\s*])(?P<name>\w+)$")


def header_path() -> pathlib.Path:
    """$TLALOC_TEST_PJRT_HEADER, or the header of an installed xla-cpu-pjrt; none is a failure."""
    named = os.environ.get("TLALOC_TEST_PJRT_HEADER")
    places = [pathlib.Path(named)] if named else []
    places += [folder / "xla_plugins/xla_cpu_pjrt" / _HEADER for folder in own_packages()]
    places += [pathlib.Path(plugin).parent / _HEADER for plugin in cpu_plugins()]
    for place in places:
        if place.is_file():
            return place
    raise AssertionError(f"no pjrt_c_api.h: install xla-cpu-pjrt, which ships it; looked at {list(map(str, places))}")


class Header:
    """The structs and enums of the header's text."""

    def __init__(self, text: str):
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)
        self.text = text
        self.bodies = {match[1]: match[2] for match in re.finditer(r"\bstruct (PJRT_\w+) \{(.*?)\n\}", text, re.DOTALL)}
        self.enums = {match[2]: match[1] for match in re.finditer(r"typedef enum \{(.*?)\} (\w+);", text, re.DOTALL)}
        self.functions = set(re.findall(r"typedef [\w\s*]+?\(\*(\w+)\)\(", text))

    def constants(self, enum: str) -> dict[str, int]:
        values: dict[str, int] = {}
        following = 0
        for entry in filter(None, (part.strip() for part in self.enums[enum].split(","))):
            name, _, given = (part.strip() for part in entry.partition("="))
            following = int(given) if given else following
            values[name] = following
            following += 1
        return values

    def fields(self, struct: str) -> list[tuple[str, int, int]]:
        """(name, offset, size) of every field; an unnamed union is one field called `union`."""
        body, placed, at = self.bodies[struct], [], 0
        body, unions = (
            re.sub(r"union \{.*?\};", "union UNION;", body, flags=re.DOTALL),
            re.findall(r"union \{(.*?)\};", body, re.DOTALL),
        )
        for statement in filter(None, (" ".join(part.split()) for part in body.split(";"))):
            if statement == "union UNION":
                name, (size, align) = "union", self._union(unions.pop(0))
            else:
                name, (size, align) = self._field(statement)
            at = (at + align - 1) // align * align
            placed.append((name, at, size))
            at += size
        return placed

    def size(self, struct: str) -> int:
        _, offset, size = self.fields(struct)[-1]
        return offset + size

    def _union(self, body: str) -> tuple[int, int]:
        members = [self._field(" ".join(part.split()))[1] for part in body.split(";") if part.strip()]
        align = max(align for _, align in members)
        size = max(size for size, _ in members)
        return (size + align - 1) // align * align, align

    def _field(self, statement: str) -> tuple[str, tuple[int, int]]:
        pointer = re.match(r"[\w\s*]+\(\*(\w+)\)\(", statement)
        if pointer:
            return pointer[1], (8, 8)
        match = _FIELD.match(statement)
        if match is None:
            raise AssertionError(f"cannot parse the field {statement!r}")
        kind = re.sub(r"\bconst\b|\bstruct\b", "", match["type"]).strip()
        if "*" in kind or kind in self.functions:
            return match["name"], (8, 8)
        if kind in _SCALARS:
            return match["name"], (_SCALARS[kind], _SCALARS[kind])
        if kind in self.enums:
            return match["name"], (4, 4)
        if kind in self.bodies:
            return match["name"], ((self.size(kind) + 7) // 8 * 8, 8)
        raise AssertionError(f"unknown type in the field {statement!r}")


class HeaderTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls) -> None:
        cls.header = Header(header_path().read_text(encoding="utf-8"))

    def test_every_struct_has_the_headers_fields_offsets_and_size(self) -> None:
        structs = [value for name, value in vars(abi).items() if name.startswith("PJRT_") and isinstance(value, type)]
        self.assertGreater(len(structs), 35)
        for struct in structs:
            name = struct.__name__
            fields = []
            for base in reversed(struct.__mro__):
                for field, *_ in vars(base).get("_fields_", ()):
                    place = getattr(struct, field)
                    fields.append((field, place.offset, place.size))
            union = {"PJRT_NamedValue": "value", "PJRT_Buffer_MemoryLayout": "tiled"}.get(name)
            fields = [("union" if field == union else field, offset, size) for field, offset, size in fields]
            self.assertEqual(fields, self.header.fields(name), name)
            self.assertEqual(abi.struct_size(struct), self.header.size(name), name)

    def test_named_value_union(self) -> None:
        body = re.search(r"union \{(.*?)\};", self.header.bodies["PJRT_NamedValue"], re.DOTALL)
        assert body is not None
        names = [part.split()[-1].lstrip("*") for part in body[1].split(";") if part.strip()]
        self.assertEqual([name for name, _ in abi.NamedValueUnion._fields_], names)

    def test_order_of_the_table(self) -> None:
        order = re.findall(r"_PJRT_API_STRUCT_FIELD\((PJRT_\w+)\);", self.header.text)
        self.assertGreater(len(order), 100)
        self.assertEqual(abi.SLOTS, {name: order.index(name) for name in abi.SLOTS})
        first = self.header.text.index("_PJRT_API_STRUCT_FIELD(PJRT_Error_Destroy)")
        head = self.header.text[self.header.text.index("typedef struct PJRT_Api {") : first]
        self.assertEqual(
            " ".join(head.split()),
            "typedef struct PJRT_Api { size_t struct_size; PJRT_Extension_Base* extension_start; "
            "PJRT_Api_Version pjrt_api_version;",
        )
        self.assertEqual(abi.FUNCTIONS_OFFSET, 16 + self.header.size("PJRT_Api_Version"))

    def test_void_functions(self) -> None:
        void = set(re.findall(r"typedef void (PJRT_\w+)\(", self.header.text))
        self.assertEqual(abi.VOID_FUNCTIONS, void & set(abi.SLOTS))

    def test_codes(self) -> None:
        types = self.header.constants("PJRT_Buffer_Type")
        spelled = {"i": "S", "u": "U"}
        for name, (code, _) in abi.DTYPES.items():
            theirs = spelled[name[0]] + name[1:] if name[0] in spelled else name.upper()
            self.assertEqual(code, types[f"PJRT_Buffer_Type_{theirs}"], name)
        errors = self.header.constants("PJRT_Error_Code")
        self.assertEqual(
            abi.ERROR_CODES, {code: name.removeprefix("PJRT_Error_Code_") for name, code in errors.items() if code}
        )
        for ours in (
            "INVALID_ARGUMENT",
            "NOT_FOUND",
            "RESOURCE_EXHAUSTED",
            "FAILED_PRECONDITION",
            "UNIMPLEMENTED",
            "UNAVAILABLE",
        ):
            self.assertEqual(getattr(abi, ours), errors[f"PJRT_Error_Code_{ours}"])
        semantics = self.header.constants("PJRT_HostBufferSemantics")
        for ours, theirs in (
            (abi.IMMUTABLE_ONLY_DURING_CALL, "kImmutableOnlyDuringCall"),
            (abi.IMMUTABLE_UNTIL_TRANSFER_COMPLETES, "kImmutableUntilTransferCompletes"),
            (abi.IMMUTABLE_ZERO_COPY, "kImmutableZeroCopy"),
        ):
            self.assertEqual(ours, semantics[f"PJRT_HostBufferSemantics_{theirs}"])
        layouts = self.header.constants("PJRT_Buffer_MemoryLayout_Type")
        self.assertEqual(abi.LAYOUT_TILED, layouts["PJRT_Buffer_MemoryLayout_Type_Tiled"])
        values = self.header.constants("PJRT_NamedValue_Type")
        self.assertEqual(
            [abi.NAMED_STRING, abi.NAMED_INT64, abi.NAMED_INT64_LIST, abi.NAMED_FLOAT, abi.NAMED_BOOL],
            [values[f"PJRT_NamedValue_k{name}"] for name in ("String", "Int64", "Int64List", "Float", "Bool")],
        )

    def test_the_parser_sees_a_missing_field(self) -> None:
        text = self.header.text.replace("  int launch_id;\n", "")
        self.assertNotEqual(Header(text).fields("PJRT_ExecuteOptions"), self.header.fields("PJRT_ExecuteOptions"))


if __name__ == "__main__":
    unittest.main()
