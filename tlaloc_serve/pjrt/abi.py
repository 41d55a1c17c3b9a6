"""The part of the PJRT C ABI that this package uses, as data: structs, function slots, type and error codes.

Rules. Names are the C header's own. A struct's size is the header's: offset of the last field plus that field's size,
never `ctypes.sizeof`, which adds tail padding. Slots are indices into the function table that follows the version in
`PJRT_Api`; the order is that of API 0.81 and, by the ABI's promise, of every later minor version of major 0.
Pointers are plain integers (`c_void_p`), so Python holds no pointer objects that could outlive what they point to.
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p

MAJOR = 0
# 0.57 rearranged the fields of PJRT_Api, so nothing older has the table below.
MIN_MINOR = 57
# The first minor version whose PJRT_Executable_DeserializeAndLoad takes compile options.
DESERIALIZE_OPTIONS_MINOR = 71

FUNCTIONS_OFFSET = 40  # struct_size, extension_start and the 24 bytes of PJRT_Api_Version come first
POINTER_SIZE = 8

SLOTS: dict[str, int] = {
    "PJRT_Error_Destroy": 0,
    "PJRT_Error_Message": 1,
    "PJRT_Error_GetCode": 2,
    "PJRT_Plugin_Initialize": 3,
    "PJRT_Plugin_Attributes": 4,
    "PJRT_Event_Destroy": 5,
    "PJRT_Event_IsReady": 6,
    "PJRT_Event_Await": 8,
    "PJRT_Client_Create": 10,
    "PJRT_Client_Destroy": 11,
    "PJRT_Client_PlatformName": 12,
    "PJRT_Client_PlatformVersion": 14,
    "PJRT_Client_AddressableDevices": 16,
    "PJRT_Client_Compile": 20,
    "PJRT_Client_BufferFromHostBuffer": 22,
    "PJRT_DeviceDescription_Id": 23,
    "PJRT_DeviceDescription_Kind": 26,
    "PJRT_DeviceDescription_ToString": 28,
    "PJRT_Device_GetDescription": 29,
    "PJRT_Device_MemoryStats": 34,
    "PJRT_Executable_Destroy": 40,
    "PJRT_Executable_Name": 41,
    "PJRT_Executable_NumOutputs": 44,
    "PJRT_Executable_Serialize": 49,
    "PJRT_LoadedExecutable_Destroy": 50,
    "PJRT_LoadedExecutable_GetExecutable": 51,
    "PJRT_LoadedExecutable_Execute": 55,
    "PJRT_Executable_DeserializeAndLoad": 56,
    "PJRT_Buffer_Destroy": 58,
    "PJRT_Buffer_IsDeleted": 68,
    "PJRT_Buffer_ToHostBuffer": 70,
    "PJRT_Buffer_UnsafePointer": 73,
    "PJRT_Executable_OutputElementTypes": 90,
    "PJRT_Executable_OutputDimensions": 91,
    "PJRT_Executable_Fingerprint": 94,
    "PJRT_Buffer_CopyRawToHost": 100,
}

# Functions that return nothing; every other one returns a PJRT_Error pointer, NULL for success.
VOID_FUNCTIONS = frozenset({"PJRT_Error_Destroy", "PJRT_Error_Message"})

# The element types whose host form is whole bytes: name, PJRT_Buffer_Type, bytes an element.
DTYPES: dict[str, tuple[int, int]] = {
    "pred": (1, 1),
    "i8": (2, 1),
    "i16": (3, 2),
    "i32": (4, 4),
    "i64": (5, 8),
    "u8": (6, 1),
    "u16": (7, 2),
    "u32": (8, 4),
    "u64": (9, 8),
    "f16": (10, 2),
    "f32": (11, 4),
    "f64": (12, 8),
    "bf16": (13, 2),
    "f8e5m2": (16, 1),
    "f8e4m3fn": (17, 1),
}
DTYPE_NAMES: dict[int, str] = {code: name for name, (code, _) in DTYPES.items()}

ERROR_CODES: dict[int, str] = {
    1: "CANCELLED",
    2: "UNKNOWN",
    3: "INVALID_ARGUMENT",
    4: "DEADLINE_EXCEEDED",
    5: "NOT_FOUND",
    6: "ALREADY_EXISTS",
    7: "PERMISSION_DENIED",
    8: "RESOURCE_EXHAUSTED",
    9: "FAILED_PRECONDITION",
    10: "ABORTED",
    11: "OUT_OF_RANGE",
    12: "UNIMPLEMENTED",
    13: "INTERNAL",
    14: "UNAVAILABLE",
    15: "DATA_LOSS",
    16: "UNAUTHENTICATED",
}
INVALID_ARGUMENT = 3
NOT_FOUND = 5
RESOURCE_EXHAUSTED = 8
FAILED_PRECONDITION = 9
UNIMPLEMENTED = 12
UNAVAILABLE = 14

# PJRT_HostBufferSemantics
IMMUTABLE_ONLY_DURING_CALL = 0
IMMUTABLE_UNTIL_TRANSFER_COMPLETES = 1
IMMUTABLE_ZERO_COPY = 2
MUTABLE_ZERO_COPY = 3

# PJRT_Buffer_MemoryLayout_Type
LAYOUT_TILED = 0

# PJRT_NamedValue_Type
NAMED_STRING = 0
NAMED_INT64 = 1
NAMED_INT64_LIST = 2
NAMED_FLOAT = 3
NAMED_BOOL = 4


class Struct(ctypes.Structure):
    """What every versioned struct starts with. The caller sets `struct_size` before it hands the struct over."""

    _fields_ = [("struct_size", c_size_t), ("extension_start", c_void_p)]


@functools.cache
def struct_size(struct: type[Struct]) -> int:
    """Bytes up to and including the last field: what the header calls `<name>_STRUCT_SIZE`."""
    last = getattr(struct, struct._fields_[-1][0])
    return int(last.offset + last.size)


# The fields as the header lists them, packed: a table, not code.
# fmt: off


class PJRT_Api_Version(Struct):
    _fields_ = [("major_version", c_int), ("minor_version", c_int)]


class PJRT_Error_Destroy_Args(Struct):
    _fields_ = [("error", c_void_p)]


class PJRT_Error_Message_Args(Struct):
    _fields_ = [("error", c_void_p), ("message", c_void_p), ("message_size", c_size_t)]


class PJRT_Error_GetCode_Args(Struct):
    _fields_ = [("error", c_void_p), ("code", c_int)]


class NamedValueUnion(ctypes.Union):
    _fields_ = [
        ("string_value", c_char_p), ("int64_value", c_int64), ("int64_array_value", c_void_p),
        ("float_value", c_float), ("bool_value", c_bool),
    ]


class PJRT_NamedValue(Struct):
    _anonymous_ = ("value",)
    _fields_ = [
        ("name", c_char_p), ("name_size", c_size_t), ("type", c_int), ("value", NamedValueUnion),
        ("value_size", c_size_t),
    ]


class PJRT_Plugin_Initialize_Args(Struct):
    """Nothing beyond what every struct starts with."""


class PJRT_Plugin_Attributes_Args(Struct):
    _fields_ = [("attributes", c_void_p), ("num_attributes", c_size_t)]


class PJRT_Event_Destroy_Args(Struct):
    _fields_ = [("event", c_void_p)]


class PJRT_Event_IsReady_Args(Struct):
    _fields_ = [("event", c_void_p), ("is_ready", c_bool)]


class PJRT_Event_Await_Args(Struct):
    _fields_ = [("event", c_void_p)]


class PJRT_Client_Create_Args(Struct):
    _fields_ = [
        ("create_options", c_void_p), ("num_options", c_size_t), ("kv_get_callback", c_void_p),
        ("kv_get_user_arg", c_void_p), ("kv_put_callback", c_void_p), ("kv_put_user_arg", c_void_p),
        ("client", c_void_p), ("kv_try_get_callback", c_void_p), ("kv_try_get_user_arg", c_void_p),
    ]


class PJRT_Client_Destroy_Args(Struct):
    _fields_ = [("client", c_void_p)]


class PJRT_Client_PlatformName_Args(Struct):
    _fields_ = [("client", c_void_p), ("platform_name", c_void_p), ("platform_name_size", c_size_t)]


class PJRT_Client_PlatformVersion_Args(Struct):
    _fields_ = [("client", c_void_p), ("platform_version", c_void_p), ("platform_version_size", c_size_t)]


class PJRT_Client_AddressableDevices_Args(Struct):
    _fields_ = [("client", c_void_p), ("addressable_devices", c_void_p), ("num_addressable_devices", c_size_t)]


class PJRT_Program(Struct):
    _fields_ = [("code", c_void_p), ("code_size", c_size_t), ("format", c_char_p), ("format_size", c_size_t)]


class PJRT_Client_Compile_Args(Struct):
    _fields_ = [
        ("client", c_void_p), ("program", c_void_p), ("compile_options", c_char_p),
        ("compile_options_size", c_size_t), ("executable", c_void_p),
    ]


class PJRT_Buffer_MemoryLayout_Tiled(Struct):
    _fields_ = [
        ("minor_to_major", c_void_p), ("minor_to_major_size", c_size_t), ("tile_dims", c_void_p),
        ("tile_dim_sizes", c_void_p), ("num_tiles", c_size_t),
    ]


class PJRT_Buffer_MemoryLayout(Struct):
    """The header's union holds a tiled or a strided layout; only the tiled one, which is the larger, is used here."""

    _fields_ = [("tiled", PJRT_Buffer_MemoryLayout_Tiled), ("type", c_int)]


class PJRT_Client_BufferFromHostBuffer_Args(Struct):
    _fields_ = [
        ("client", c_void_p), ("data", c_void_p), ("type", c_int), ("dims", c_void_p), ("num_dims", c_size_t),
        ("byte_strides", c_void_p), ("num_byte_strides", c_size_t), ("host_buffer_semantics", c_int),
        ("device", c_void_p), ("memory", c_void_p), ("device_layout", c_void_p), ("done_with_host_buffer", c_void_p),
        ("buffer", c_void_p),
    ]


class PJRT_DeviceDescription_Id_Args(Struct):
    _fields_ = [("device_description", c_void_p), ("id", c_int)]


class PJRT_DeviceDescription_Kind_Args(Struct):
    _fields_ = [("device_description", c_void_p), ("device_kind", c_void_p), ("device_kind_size", c_size_t)]


class PJRT_DeviceDescription_ToString_Args(Struct):
    _fields_ = [("device_description", c_void_p), ("to_string", c_void_p), ("to_string_size", c_size_t)]


class PJRT_Device_GetDescription_Args(Struct):
    _fields_ = [("device", c_void_p), ("device_description", c_void_p)]


# Every one after bytes_in_use is followed by a flag `<name>_is_set`.
MEMORY_STATS = (
    "bytes_in_use",
    "peak_bytes_in_use",
    "num_allocs",
    "largest_alloc_size",
    "bytes_limit",
    "bytes_reserved",
    "peak_bytes_reserved",
    "bytes_reservable_limit",
    "largest_free_block_bytes",
    "pool_bytes",
    "peak_pool_bytes",
)


class PJRT_Device_MemoryStats_Args(Struct):
    _fields_ = [
        ("device", c_void_p),
        ("bytes_in_use", c_int64),
        *(field for name in MEMORY_STATS[1:] for field in ((name, c_int64), (f"{name}_is_set", c_bool))),
    ]


class PJRT_Executable_Destroy_Args(Struct):
    _fields_ = [("executable", c_void_p)]


class PJRT_LoadedExecutable_Destroy_Args(Struct):
    _fields_ = [("executable", c_void_p)]


class PJRT_LoadedExecutable_GetExecutable_Args(Struct):
    _fields_ = [("loaded_executable", c_void_p), ("executable", c_void_p)]


class PJRT_Executable_Name_Args(Struct):
    _fields_ = [("executable", c_void_p), ("executable_name", c_void_p), ("executable_name_size", c_size_t)]


class PJRT_Executable_NumOutputs_Args(Struct):
    _fields_ = [("executable", c_void_p), ("num_outputs", c_size_t)]


class PJRT_Executable_OutputElementTypes_Args(Struct):
    _fields_ = [("executable", c_void_p), ("output_types", c_void_p), ("num_output_types", c_size_t)]


class PJRT_Executable_OutputDimensions_Args(Struct):
    _fields_ = [("executable", c_void_p), ("num_outputs", c_size_t), ("dims", c_void_p), ("dim_sizes", c_void_p)]


class PJRT_Executable_Fingerprint_Args(Struct):
    _fields_ = [
        ("executable", c_void_p), ("executable_fingerprint", c_void_p), ("executable_fingerprint_size", c_size_t),
    ]


class PJRT_Executable_Serialize_Args(Struct):
    _fields_ = [
        ("executable", c_void_p), ("serialized_bytes", c_void_p), ("serialized_bytes_size", c_size_t),
        ("serialized_executable", c_void_p), ("serialized_executable_deleter", c_void_p),
    ]


class PJRT_Executable_DeserializeAndLoad_Args(Struct):
    _fields_ = [
        ("client", c_void_p), ("serialized_executable", c_char_p), ("serialized_executable_size", c_size_t),
        ("loaded_executable", c_void_p), ("overridden_serialized_compile_options", c_char_p),
        ("overridden_serialized_compile_options_size", c_size_t),
    ]


class PJRT_ExecuteOptions(Struct):
    _fields_ = [
        ("send_callbacks", c_void_p), ("recv_callbacks", c_void_p), ("num_send_ops", c_size_t),
        ("num_recv_ops", c_size_t), ("launch_id", c_int), ("non_donatable_input_indices", c_void_p),
        ("num_non_donatable_input_indices", c_size_t), ("context", c_void_p), ("call_location", c_char_p),
        ("num_tasks", c_size_t), ("task_ids", c_void_p), ("incarnation_ids", c_void_p),
    ]


class PJRT_LoadedExecutable_Execute_Args(Struct):
    _fields_ = [
        ("executable", c_void_p), ("options", c_void_p), ("argument_lists", c_void_p), ("num_devices", c_size_t),
        ("num_args", c_size_t), ("output_lists", c_void_p), ("device_complete_events", c_void_p),
        ("execute_device", c_void_p),
    ]


class PJRT_Buffer_Destroy_Args(Struct):
    _fields_ = [("buffer", c_void_p)]


class PJRT_Buffer_IsDeleted_Args(Struct):
    _fields_ = [("buffer", c_void_p), ("is_deleted", c_bool)]


class PJRT_Buffer_ToHostBuffer_Args(Struct):
    _fields_ = [
        ("src", c_void_p), ("host_layout", c_void_p), ("dst", c_void_p), ("dst_size", c_size_t), ("event", c_void_p),
    ]


class PJRT_Buffer_CopyRawToHost_Args(Struct):
    _fields_ = [
        ("buffer", c_void_p), ("dst", c_void_p), ("offset", c_int64), ("transfer_size", c_int64), ("event", c_void_p),
    ]


class PJRT_Buffer_UnsafePointer_Args(Struct):
    _fields_ = [("buffer", c_void_p), ("buffer_pointer", c_size_t)]
