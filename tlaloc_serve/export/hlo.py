"""A deterministic emitter of textual StableHLO: one module, one function `@main`, values numbered in order.

Rules: every op is one of the StableHLO specification, in the spelling that plugins since PJRT API 0.81 parse (the
pretty form, and the generic form for gather and scatter, which have no other). Result types are computed here, and an
operand that does not fit is an `ExportError` at export rather than a compile error on the serving machine. The text
depends on the calls and nothing else, so the same calls give the same bytes on every run and every Python.
"""

from __future__ import annotations

import math
import operator
import re
import struct
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from tlaloc_serve.artifact.manifest import TensorType
from tlaloc_serve.errors import ExportError

NEGATIVE_INFINITY = "0xFF800000"
_BEYOND_F32 = float.fromhex("0x1.ffffffp+127")  # rounds to infinity; what is smaller does not
_FLOAT = ("f32", "bf16", "f16", "f64")


class Value(NamedTuple):
    """An SSA value of the body: its name (`%12`) and its type. A tuple, since a model's bodies have 100,000 of them."""

    name: str
    type: TensorType

    @property
    def dims(self) -> tuple[int, ...]:
        return self.type.dims

    @property
    def dtype(self) -> str:
        return self.type.dtype


def round_f32(number: float) -> float:
    """`number` rounded to the nearest f32. A number beyond its range raises ExportError."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", number))[0])
    except OverflowError:
        raise ExportError("constant", "a number does not fit in f32", got=number) from None


def f32_text(number: float) -> str:
    """The shortest decimal that reads back as the f32 nearest to `number`, in the syntax of an MLIR float literal."""
    value = round_f32(number)
    if not math.isfinite(value):
        raise ExportError("constant", "a number is not finite", got=number)
    return _f32_text(struct.pack("<f", value))


@lru_cache(maxsize=4096)
def _f32_text(bits: bytes) -> str:
    """By bits, since 0.0 and -0.0 are one key to a cache."""
    value = float(struct.unpack("<f", bits)[0])
    for digits in range(1, 10):
        text = f"{value:.{digits}g}"
        if abs(float(text)) < _BEYOND_F32 and round_f32(float(text)) == value:
            break
    mantissa, mark, exponent = text.partition("e")
    return (mantissa if "." in mantissa else mantissa + ".0") + mark + exponent


@lru_cache(maxsize=4096)
def mlir_type(tensor: TensorType) -> str:
    """`tensor<2x8xf32>`; a scalar is `tensor<f32>`."""
    return "tensor<" + "".join(f"{dim}x" for dim in tensor.dims) + tensor.dtype + ">"


def _list(numbers: Sequence[int]) -> str:
    return "[" + ", ".join(map(str, numbers)) + "]"


@dataclass(frozen=True)
class _Section:
    """Ops that were emitted once, as a text with gaps for the numbers of their values.

    The numbers to choose from are, in this order: those of the `count` values that the ops made, of the operands, and
    of the values from before that every repetition `shares`. `fill` picks each gap's number from them.
    """

    text: tuple[str, ...]
    count: int
    shares: tuple[str, ...]
    fill: Callable[[Sequence[str]], tuple[str, ...]]
    results: tuple[tuple[int, TensorType], ...]

    @classmethod
    def of(
        cls, text: str, first: int, count: int, operands: Sequence[Value], results: Sequence[Value]
    ) -> _Section | None:
        """None where the text has not the two gaps that the shortest way to fill them takes."""
        text_and_numbers = re.split(r"(?<=%)(\d+)", text)
        made = [str(number) for number in range(first, first + count)]
        given = [operand.name[1:] for operand in operands]
        shares = tuple(sorted(set(text_and_numbers[1::2]) - {*made, *given}))
        places = {number: place for place, number in reversed(list(enumerate((*made, *given, *shares))))}
        gaps = [places[number] for number in text_and_numbers[1::2]]
        if len(gaps) < 2:
            return None
        kept = tuple((places[result.name[1:]], result.type) for result in results)
        return cls(tuple(text_and_numbers[0::2]), count, shares, operator.itemgetter(*gaps), kept)


class Body:
    """The text of one entry under construction. Parameters first, then ops, then `finish`."""

    def __init__(self) -> None:
        self._parameters: list[str] = []
        self._lines: list[str] = []
        self._count = 0
        self._constants: dict[tuple[str, TensorType], Value] = {}
        self._sections: dict[Hashable, _Section] = {}

    def _next(self, tensor: TensorType) -> Value:
        value = Value(f"%{self._count}", tensor)
        self._count += 1
        return value

    def _emit(self, tensor: TensorType, text: str) -> Value:
        value = self._next(tensor)
        self._lines.append(f"    {value.name} = {text}")
        return value

    def _refuse(self, op: str, what: str, *operands: Value) -> ExportError:
        return ExportError(f"body op {op}", what, got=" and ".join(str(operand.type) for operand in operands))

    def parameter(self, tensor: TensorType, alias: int | None = None) -> Value:
        """The next argument of `@main`. `alias` is the output that may take over its buffer when it is donated."""
        value = self._next(tensor)
        attribute = "" if alias is None else f" {{tf.aliasing_output = {alias} : i32}}"
        self._parameters.append(f"{value.name}: {mlir_type(tensor)}{attribute}")
        return value

    def section(
        self, key: Hashable, operands: Sequence[Value], emit: Callable[[], Sequence[Value]]
    ) -> tuple[Value, ...]:
        """The results of `emit()`. Where the same `key` came before, its text is repeated with the new operands.

        Two sections of one key and the same types of operands must be the same ops on them and on values that both
        share. That is so for a model's layers, which are then written in a tenth of the time.
        """
        key = (key, tuple(operand.type for operand in operands))
        known = self._sections.get(key)
        if known is not None:
            return self._repeat(known, operands)
        line, first, constants = len(self._lines), self._count, len(self._constants)
        results = tuple(emit())
        if len(self._constants) == constants:  # else a second one would lack the constants that this one made
            text = "\n".join(self._lines[line:])
            section = _Section.of(text, first, self._count - first, operands, results)
            if section is not None:
                self._sections[key] = section
        return results

    def _repeat(self, known: _Section, operands: Sequence[Value]) -> tuple[Value, ...]:
        made = map(str, range(self._count, self._count + known.count))
        numbers = [*made, *[operand.name[1:] for operand in operands], *known.shares]
        parts = [""] * (2 * len(known.text) - 1)
        parts[0::2] = known.text
        parts[1::2] = known.fill(numbers)
        self._lines.append("".join(parts))
        self._count += known.count
        return tuple([Value("%" + numbers[place], tensor) for place, tensor in known.results])

    def finish(self, results: Sequence[Value]) -> str:
        """The module's text, ending in a newline."""
        types = ", ".join(mlir_type(value.type) for value in results)
        names = ", ".join(value.name for value in results)
        head = f"module {{\n  func.func @main({', '.join(self._parameters)}) -> ({types}) {{\n"
        return head + "\n".join(self._lines) + f"\n    return {names} : {types}\n  }}\n}}\n"

    # Constants. A splat is emitted once a type and reused.

    def _constant(self, text: str, tensor: TensorType) -> Value:
        key = (text, tensor)
        if key not in self._constants:
            self._constants[key] = self._emit(tensor, f"stablehlo.constant dense<{text}> : {mlir_type(tensor)}")
        return self._constants[key]

    def splat(self, number: float | str, tensor: TensorType) -> Value:
        """A constant tensor with one number everywhere; a str is taken as the literal itself."""
        if isinstance(number, str):
            text = number
        else:
            text = f32_text(number) if tensor.dtype in _FLOAT else str(int(number))
        return self._constant(text, tensor)

    def constant(self, numbers: Sequence[float], tensor: TensorType) -> Value:
        """A constant tensor from its numbers in row-major order."""
        if len(numbers) != math.prod(tensor.dims):
            raise ExportError("body op constant", "wrong count of numbers", got=len(numbers), want=str(tensor))
        write = f32_text if tensor.dtype in _FLOAT else lambda number: str(int(number))
        parts = [write(number) for number in numbers]
        for dim in reversed(tensor.dims):
            parts = ["[" + ", ".join(parts[at : at + dim]) + "]" for at in range(0, len(parts), dim)]
        return self._constant(parts[0], tensor)

    # Elementwise ops.

    def unary(self, op: str, x: Value) -> Value:
        """`op` is one of: negate, exponential, logistic, rsqrt, cosine, sine."""
        return self._emit(x.type, f"stablehlo.{op} {x.name} : {mlir_type(x.type)}")

    def binary(self, op: str, a: Value, b: Value) -> Value:
        """`op` is one of: add, subtract, multiply, divide, remainder, maximum, and, or."""
        if a.type != b.type:
            raise self._refuse(op, "operands differ in type", a, b)
        return self._emit(a.type, f"stablehlo.{op} {a.name}, {b.name} : {mlir_type(a.type)}")

    def scale(self, op: str, a: Value, number: float) -> Value:
        """`binary` with a splat of `number` on the right."""
        return self.binary(op, a, self.splat(number, a.type))

    def compare(self, direction: str, a: Value, b: Value) -> Value:
        """i1 of `a direction b` for signed integers; `direction` is EQ, LT, LE, GT or GE."""
        if a.type != b.type:
            raise self._refuse("compare", "operands differ in type", a, b)
        operand = mlir_type(a.type)
        result = TensorType("i1", a.dims)
        text = f"stablehlo.compare {direction}, {a.name}, {b.name}, SIGNED : ({operand}, {operand})"
        return self._emit(result, f"{text} -> {mlir_type(result)}")

    def select(self, where: Value, a: Value, b: Value) -> Value:
        if a.type != b.type or where.type != TensorType("i1", a.dims):
            raise self._refuse("select", "operands differ in type", where, a, b)
        text = f"stablehlo.select {where.name}, {a.name}, {b.name} : {mlir_type(where.type)}, {mlir_type(a.type)}"
        return self._emit(a.type, text)

    def convert(self, x: Value, dtype: str) -> Value:
        """`x` in another dtype; itself where it has it already."""
        if x.dtype == dtype:
            return x
        result = TensorType(dtype, x.dims)
        return self._emit(result, f"stablehlo.convert {x.name} : ({mlir_type(x.type)}) -> {mlir_type(result)}")

    # Shape ops.

    def round_to_bf16(self, x: Value) -> Value:
        """x f32 with each number rounded to the nearest bf16; it stays f32, and no compiler may leave it out."""
        return self._emit(x.type, f"stablehlo.reduce_precision {x.name}, format = e8m7 : {mlir_type(x.type)}")

    def iota(self, axis: int, tensor: TensorType) -> Value:
        return self._emit(tensor, f"stablehlo.iota dim = {axis} : {mlir_type(tensor)}")

    def reshape(self, x: Value, *dims: int) -> Value:
        if math.prod(dims) != math.prod(x.dims):
            raise self._refuse("reshape", f"{list(dims)} has another size", x)
        if dims == x.dims:
            return x
        result = TensorType(x.dtype, dims)
        return self._emit(result, f"stablehlo.reshape {x.name} : ({mlir_type(x.type)}) -> {mlir_type(result)}")

    def broadcast(self, x: Value, dims: Sequence[int], axes: Sequence[int]) -> Value:
        """`x` repeated to `dims`; `axes[i]` is the axis of the result that axis i of `x` becomes."""
        fits = len(axes) == len(x.dims) and all(x.dims[i] in (1, dims[axis]) for i, axis in enumerate(axes))
        if not fits:
            raise self._refuse("broadcast_in_dim", f"does not go to {list(dims)} along axes {list(axes)}", x)
        result = TensorType(x.dtype, tuple(dims))
        text = f"stablehlo.broadcast_in_dim {x.name}, dims = {_list(axes)} : ({mlir_type(x.type)})"
        return self._emit(result, f"{text} -> {mlir_type(result)}")

    def transpose(self, x: Value, *order: int) -> Value:
        result = TensorType(x.dtype, tuple(x.dims[axis] for axis in order))
        text = f"stablehlo.transpose {x.name}, dims = {_list(order)} : ({mlir_type(x.type)})"
        return self._emit(result, f"{text} -> {mlir_type(result)}")

    def slice(self, x: Value, axis: int, start: int, stop: int) -> Value:
        """`x` cut to [start, stop) along one axis; itself where that is all of it."""
        if not 0 <= start < stop <= x.dims[axis]:
            raise self._refuse("slice", f"[{start}:{stop}] is outside axis {axis}", x)
        if (start, stop) == (0, x.dims[axis]):
            return x
        ranges = [f"0:{dim}" for dim in x.dims]
        ranges[axis] = f"{start}:{stop}"
        result = TensorType(x.dtype, (*x.dims[:axis], stop - start, *x.dims[axis + 1 :]))
        text = f"stablehlo.slice {x.name} [{', '.join(ranges)}] : ({mlir_type(x.type)}) -> {mlir_type(result)}"
        return self._emit(result, text)

    def concatenate(self, parts: Sequence[Value], axis: int) -> Value:
        size = sum(part.dims[axis] for part in parts)
        result = TensorType(parts[0].dtype, (*parts[0].dims[:axis], size, *parts[0].dims[axis + 1 :]))
        types = ", ".join(mlir_type(part.type) for part in parts)
        names = ", ".join(part.name for part in parts)
        return self._emit(result, f"stablehlo.concatenate {names}, dim = {axis} : ({types}) -> {mlir_type(result)}")

    def barrier(self, x: Value) -> Value:
        """x itself, which the compiler may not fuse into what uses it."""
        return self._emit(x.type, f"stablehlo.optimization_barrier {x.name} : {mlir_type(x.type)}")

    def barrier_of_two(self, a: Value, b: Value) -> tuple[Value, Value]:
        """a and b themselves; what uses one of the results may not run before both are there."""
        pair = self._next(a.type).name
        types = f"{mlir_type(a.type)}, {mlir_type(b.type)}"
        self._lines.append(f"    {pair}:2 = stablehlo.optimization_barrier {a.name}, {b.name} : {types}")
        return Value(f"{pair}#0", a.type), Value(f"{pair}#1", b.type)

    # Contractions, reductions, gather and scatter.

    def dot(
        self,
        a: Value,
        b: Value,
        contract: tuple[int, int],
        batch: tuple[Sequence[int], Sequence[int]] = ((), ()),
    ) -> Value:
        """The sum over one axis of each operand, accumulated in f32; result axes are batch, rest of a, rest of b.

        f32 operands ask for full precision, which a GPU would otherwise trade for speed. Operands of both kinds
        (f32, bf16) give f32.
        """
        over_a, over_b = a.dims[contract[0]], b.dims[contract[1]]
        pairs = list(zip(*batch, strict=True))
        if a.dtype != b.dtype or over_a != over_b or any(a.dims[i] != b.dims[j] for i, j in pairs):
            raise self._refuse("dot_general", f"axes {contract} and {batch} do not match", a, b)
        rest_a = [dim for axis, dim in enumerate(a.dims) if axis != contract[0] and axis not in batch[0]]
        rest_b = [dim for axis, dim in enumerate(b.dims) if axis != contract[1] and axis not in batch[1]]
        result = TensorType("f32", (*(a.dims[axis] for axis in batch[0]), *rest_a, *rest_b))
        batching = f"batching_dims = {_list(batch[0])} x {_list(batch[1])}, " if batch[0] else ""
        precision = ", precision = [HIGHEST, HIGHEST]" if a.dtype == "f32" else ""
        text = f"stablehlo.dot_general {a.name}, {b.name}, {batching}contracting_dims = "
        text += f"[{contract[0]}] x [{contract[1]}]{precision} : ({mlir_type(a.type)}, {mlir_type(b.type)})"
        return self._emit(result, f"{text} -> {mlir_type(result)}")

    def reduce(self, op: str, x: Value, axis: int) -> Value:
        """`op` is add or maximum."""
        start = self.splat(0.0 if op == "add" else NEGATIVE_INFINITY, TensorType(x.dtype, ()))
        result = TensorType(x.dtype, (*x.dims[:axis], *x.dims[axis + 1 :]))
        text = f"stablehlo.reduce({x.name} init: {start.name}) applies stablehlo.{op} across dimensions = [{axis}]"
        types = f"({mlir_type(x.type)}, {mlir_type(start.type)}) -> {mlir_type(result)}"
        return self._emit(result, f"{text} : {types}")

    def take_rows(self, table: Value, rows: Value) -> Value:
        """`table[rows]` along axis 0: [R, ...] and i32 [...] to [..., ...]. An index out of range is clamped."""
        depth = len(rows.dims)
        offsets = list(range(depth, depth + len(table.dims) - 1))
        sizes = ", ".join(map(str, (1, *table.dims[1:])))
        numbers = f"offset_dims = {_list(offsets)}, collapsed_slice_dims = [0], start_index_map = [0]"
        numbers += f", index_vector_dim = {depth}"
        result = TensorType(table.dtype, (*rows.dims, *table.dims[1:]))
        text = f'"stablehlo.gather"({table.name}, {rows.name}) <{{dimension_numbers = #stablehlo.gather<{numbers}>'
        text += f", slice_sizes = array<i64: {sizes}>}}> : ({mlir_type(table.type)}, {mlir_type(rows.type)})"
        return self._emit(result, f"{text} -> {mlir_type(result)}")

    def write_slots(self, pool: Value, places: Value, rows: Value) -> Value:
        """`pool` [P, S, ...] with `pool[places[i, 0], places[i, 1]] = rows[i]`; a place out of range is dropped.

        `places` is i32 [N, 2], `rows` is [N, ...].
        """
        if rows.dims[1:] != pool.dims[2:] or places.dims != (rows.dims[0], 2):
            raise self._refuse("scatter", "rows do not fit the pool", pool, places, rows)
        window = _list(range(1, len(rows.dims)))
        numbers = f"update_window_dims = {window}, inserted_window_dims = [0, 1]"
        numbers += ", scatter_dims_to_operand_dims = [0, 1], index_vector_dim = 1"
        result = self._next(pool.type)
        scalar = mlir_type(TensorType(pool.dtype, ()))
        types = ", ".join(mlir_type(value.type) for value in (pool, places, rows))
        self._lines += [
            f'    {result.name} = "stablehlo.scatter"({pool.name}, {places.name}, {rows.name}) '
            f"<{{scatter_dimension_numbers = #stablehlo.scatter<{numbers}>, unique_indices = false}}> ({{",
            f"    ^bb0(%old: {scalar}, %new: {scalar}):",
            f"      stablehlo.return %new : {scalar}",
            f"    }}) : ({types}) -> {mlir_type(pool.type)}",
        ]
        return result
