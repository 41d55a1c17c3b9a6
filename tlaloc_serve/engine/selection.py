"""The small programs that select on the device, so that an id or a short list a row crosses to the host.

They are compiled by the runtime, once for each (batch, vocabulary, dtype) of an artifact's logits, when first needed.
NaN is looked for explicitly: the maximum that XLA:CPU computes skips NaN.
"""

from __future__ import annotations

from tlaloc_serve.artifact.manifest import TensorType

# How many candidates a sampled row brings over. Enough that top-p and plain draws seldom need the whole row, and one
# TopK call of XLA:CPU costs about the same for 16 as for 64.
CANDIDATES = 64
# What the argmax of a row with a NaN is.
NAN_ROW = -1


def argmax_body(logits: TensorType) -> bytes:
    """StableHLO for `logits [B, 1, V]` -> `i32 [B, 1]`: the lowest index among the largest values of each row.

    A row that holds a NaN gives `NAN_ROW`. The shape is that of a decode step's token ids.
    """
    text = _Text(logits)
    largest = text.spread(text.reduce("maximum", text.rows, text.constant("0xFF800000", "f32"), "f32"), "f32")
    equal = text.compare("EQ", text.rows, largest)
    ids = text.select(equal, text.iota(), text.constants(text.v))
    bad = text.compare("NE", text.rows, text.rows)
    marked = text.select(bad, text.constants(NAN_ROW), ids)
    first = text.reduce("minimum", marked, text.constant(str(text.v), "i32"), "i32")
    column = text.add(f"stablehlo.reshape {first} : (tensor<{text.b}xi32>) -> tensor<{text.b}x1xi32>")
    return text.module("", column, f"tensor<{text.b}x1xi32>")


def candidates_body(logits: TensorType, count: int) -> bytes:
    """StableHLO for `logits [B, 1, V]`, `temperature f32 [B]` -> `i32 [B, 2 * count + 1]`.

    A row holds the bits of the `count` largest logits (f32, descending), their ids, and the bits of the f32 sum over
    the vocabulary of exp((logit - largest) / temperature). Ties keep the lower id first. A NaN makes the sum NaN.
    """
    text = _Text(logits)
    values, ids = text.sorted_descending(count)
    largest = text.spread(text.reduce("maximum", text.rows, text.constant("0xFF800000", "f32"), "f32"), "f32")
    below = text.binary("subtract", text.rows, largest)
    scaled = text.binary("divide", below, text.spread("%temperature", "f32"))
    weights = text.add(f"stablehlo.exponential {scaled} : {text.kind('f32')}")
    mass = text.reduce("add", weights, text.constant("0.0", "f32"), "f32")
    column = text.add(f"stablehlo.reshape {mass} : (tensor<{text.b}xf32>) -> tensor<{text.b}x1xf32>")
    result = f"tensor<{text.b}x{2 * count + 1}xi32>"
    part, one = f"tensor<{text.b}x{count}xi32>", f"tensor<{text.b}x1xi32>"
    packed = text.add(
        f"stablehlo.concatenate {text.bits(values, count)}, {ids}, {text.bits(column, 1)}, dim = 1 : "
        f"({part}, {part}, {one}) -> {result}"
    )
    return text.module(f", %temperature: tensor<{text.b}xf32>", packed, result)


class _Text:
    """The lines of one function over `rows`, the logits as f32 [B, V]; each method adds lines and names their value."""

    def __init__(self, logits: TensorType):
        self.b, _, self.v = logits.dims
        self._source = f"tensor<{self.b}x1x{self.v}x{logits.dtype}>"
        self._lines: list[str] = []
        wide = f"tensor<{self.b}x1x{self.v}xf32>"
        as_f32 = self.add(f"stablehlo.convert %logits : ({self._source}) -> {wide}")
        self.rows = self.add(f"stablehlo.reshape {as_f32} : ({wide}) -> {self.kind('f32')}")

    def kind(self, dtype: str) -> str:
        return f"tensor<{self.b}x{self.v}x{dtype}>"

    def add(self, operation: str, results: int = 1) -> str:
        name = f"%{len(self._lines)}"
        self._lines.append(f"    {name}{f':{results}' if results > 1 else ''} = {operation}")
        return name

    def constant(self, value: str, dtype: str) -> str:
        return self.add(f"stablehlo.constant dense<{value}> : tensor<{dtype}>")

    def constants(self, value: int) -> str:
        return self.add(f"stablehlo.constant dense<{value}> : {self.kind('i32')}")

    def iota(self) -> str:
        return self.add(f"stablehlo.iota dim = 1 : {self.kind('i32')}")

    def compare(self, how: str, left: str, right: str) -> str:
        kind = self.kind("f32")
        return self.add(f"stablehlo.compare {how}, {left}, {right}, FLOAT : ({kind}, {kind}) -> {self.kind('i1')}")

    def select(self, where: str, yes: str, no: str) -> str:
        return self.add(f"stablehlo.select {where}, {yes}, {no} : {self.kind('i1')}, {self.kind('i32')}")

    def binary(self, operation: str, left: str, right: str) -> str:
        return self.add(f"stablehlo.{operation} {left}, {right} : {self.kind('f32')}")

    def reduce(self, operation: str, values: str, init: str, dtype: str) -> str:
        """Over the vocabulary: [B, V] -> [B]."""
        return self.add(
            f"stablehlo.reduce({values} init: {init}) applies stablehlo.{operation} across dimensions = [1] : "
            f"({self.kind(dtype)}, tensor<{dtype}>) -> tensor<{self.b}x{dtype}>"
        )

    def spread(self, value: str, dtype: str) -> str:
        """Over the vocabulary: [B] -> [B, V]."""
        return self.add(
            f"stablehlo.broadcast_in_dim {value}, dims = [0] : (tensor<{self.b}x{dtype}>) -> {self.kind(dtype)}"
        )

    def bits(self, value: str, width: int) -> str:
        shape = f"tensor<{self.b}x{width}x"
        return self.add(f"stablehlo.bitcast_convert {value} : ({shape}f32>) -> {shape}i32>")

    def sorted_descending(self, count: int) -> tuple[str, str]:
        """The `count` largest of each row and their ids; XLA turns this sort and slice into one TopK call."""
        kinds = f"({self.kind('f32')}, {self.kind('i32')})"
        ordered = self.add(
            f'"stablehlo.sort"({self.rows}, {self.iota()}) <{{dimension = 1 : i64, is_stable = true}}> ({{\n'
            "     ^bb0(%x: tensor<f32>, %y: tensor<f32>, %i: tensor<i32>, %j: tensor<i32>):\n"
            "       %c = stablehlo.compare GT, %x, %y, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>\n"
            "       stablehlo.return %c : tensor<i1>\n"
            f"     }}) : {kinds} -> {kinds}",
            results=2,
        )
        first, second = (
            self.add(
                f"stablehlo.slice {ordered}#{number} [0:{self.b}, 0:{count}] : "
                f"({self.kind(dtype)}) -> tensor<{self.b}x{count}x{dtype}>"
            )
            for number, dtype in enumerate(("f32", "i32"))
        )
        return first, second

    def module(self, parameters: str, result: str, kind: str) -> bytes:
        body = "\n".join([*self._lines, f"    return {result} : {kind}"])
        head = f"  func.func @main(%logits: {self._source}{parameters}) -> {kind} {{"
        return f"module {{\n{head}\n{body}\n  }}\n}}\n".encode()
