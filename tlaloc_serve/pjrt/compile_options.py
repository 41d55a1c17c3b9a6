"""Writes a serialised CompileOptionsProto, the options that PJRT_Client_Compile takes.

Rules. Only the fields below are written, so the bytes are the same for the same arguments on every machine. Field
numbers are those of XLA's `xla/pjrt/proto/compile_options.proto`: executable_build_options 3 {device_ordinal 1,
num_replicas 4, num_partitions 5}, env_option_overrides 7, a map of name to {string 1, bool 2, int64 3, double 4}.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

_VARINT, _FIXED64, _LENGTH = 0, 1, 2


def compile_options(
    num_replicas: int = 1,
    num_partitions: int = 1,
    device_ordinal: int = -1,
    overrides: Mapping[str, bool | int | float | str] | None = None,
) -> bytes:
    """CompileOptionsProto for one program on `num_replicas` x `num_partitions` devices.

    `device_ordinal` -1 leaves the choice to the client. `overrides` are XLA debug options by name, without `--`;
    a flag's value must have its own type (a boolean flag refuses the string "true").
    """
    build = _integer(1, device_ordinal) + _integer(4, num_replicas) + _integer(5, num_partitions)
    message = _bytes(3, build)
    for name, value in sorted((overrides or {}).items()):
        message += _bytes(7, _bytes(1, name.encode()) + _bytes(2, _override(value)))
    return message


def _override(value: bool | int | float | str) -> bytes:
    if isinstance(value, bool):
        return _integer(2, int(value))
    if isinstance(value, int):
        return _integer(3, value)
    if isinstance(value, float):
        return _varint(4 << 3 | _FIXED64) + struct.pack("<d", value)
    return _bytes(1, value.encode())


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value & 0xFFFF_FFFF_FFFF_FFFF)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _LENGTH) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Base 128, least significant group first, the high bit set on all but the last."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
