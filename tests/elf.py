"""Tiny ELF shared objects made without a compiler, for the ways in which opening a plugin can fail."""

from __future__ import annotations

import platform
import struct

_PAGE = 0x1000
_MACHINES = {"x86_64": 62, "aarch64": 183}

# What GetPjrtApi does, for each machine.
HANG = {"x86_64": b"\xeb\xfe", "aarch64": struct.pack("<I", 0x14000000)}
TRAP = {"x86_64": b"\x0f\x0b", "aarch64": struct.pack("<I", 0)}
RETURN_NULL = {"x86_64": b"\x31\xc0\xc3", "aarch64": struct.pack("<2I", 0xD2800000, 0xD65F03C0)}


def complain_and_trap(text: bytes) -> dict[str, bytes]:
    """Write `text` (under 256 bytes) to stderr by a system call, then trap."""
    size = len(text)
    x86 = bytes.fromhex("b801000000 bf02000000 488d350a000000") + b"\xba" + struct.pack("<I", size)
    x86 += bytes.fromhex("0f05 0f0b 90")
    # mov x8, #64; mov x0, #2; adr x1, +16; mov x2, #size; svc #0; udf #0
    arm = struct.pack("<6I", 0xD2800808, 0xD2800040, 0x10000081, 0xD2800002 | size << 5, 0xD4000001, 0)
    return {"x86_64": x86 + text, "aarch64": arm + text}


def shared_object(code: dict[str, bytes] | None = None, needed: str | None = None) -> bytes:
    """A library with the function GetPjrtApi when `code` is given, that needs the library `needed`."""
    machine = platform.machine()
    names = b"\0GetPjrtApi\0" + (needed or "").encode() + b"\0"
    headers = 64 + 4 * 56
    dynamic_at, dynamic_size = headers, 7 * 16
    symbols_at = dynamic_at + dynamic_size
    hash_at = symbols_at + 2 * 24
    names_at = hash_at + 6 * 4
    entries = [(5, names_at), (10, len(names)), (6, symbols_at), (11, 24), (4, hash_at)]
    entries.append((1, 12) if needed else (0, 0))
    entries.append((0, 0))
    dynamic = b"".join(struct.pack("<QQ", *entry) for entry in entries)
    # A global function in some section; section 0 would make it one that this library wants from another.
    symbol = struct.pack("<IBBHQQ", 1, 0x12, 0, 1 if code else 0, _PAGE if code else 0, 16)
    table = struct.pack("<6I", 1, 2, 1, 0, 0, 0)  # one bucket that starts at symbol 1, two chain entries
    data = dynamic + bytes(24) + symbol + table + names
    ident = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = ident + struct.pack("<HHIQQQIHHHHHH", 3, _MACHINES[machine], 1, 0, 64, 0, 0, 64, 56, 4, 0, 0, 0)
    body = code[machine] if code else b"\0"
    size = headers + len(data)
    segments = [
        (1, 6, 0, 0, size, _PAGE),  # PT_LOAD, read and write: the loader relocates the dynamic section in place
        (1, 5, _PAGE, _PAGE, len(body), _PAGE),  # PT_LOAD, read and execute
        (2, 6, dynamic_at, dynamic_at, dynamic_size, 8),  # PT_DYNAMIC
        (0x6474E551, 6, 0, 0, 0, 16),  # PT_GNU_STACK: no executable stack
    ]
    for kind, flags, offset, address, length, align in segments:
        header += struct.pack("<IIQQQQQQ", kind, flags, offset, address, address, length, length, align)
    return (header + data).ljust(_PAGE, b"\0") + body
