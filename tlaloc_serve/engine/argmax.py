"""The small program that picks greedily on the device, so that four bytes a row cross to the host, not a vocabulary.

It is compiled by the runtime once for each (batch, vocabulary, dtype) of an artifact's logits.
"""

from __future__ import annotations

from tlaloc_serve.artifact.manifest import TensorType

_MINUS_INFINITY = "0xFF800000"


def argmax_body(logits: TensorType) -> bytes:
    """StableHLO for `logits [B, 1, V]` -> `i32 [B]`: the lowest index among the largest values of each row.

    A row that holds a NaN gives V, which is no token id: the maximum of such a row is NaN, and nothing equals NaN.
    """
    batch, _, vocab = logits.dims
    source = f"tensor<{batch}x1x{vocab}x{logits.dtype}>"
    rows, ids, flags = (f"tensor<{batch}x{vocab}x{dtype}>" for dtype in ("f32", "i32", "i1"))
    lines = [
        f"%0 = stablehlo.convert %logits : ({source}) -> tensor<{batch}x1x{vocab}xf32>",
        f"%1 = stablehlo.reshape %0 : (tensor<{batch}x1x{vocab}xf32>) -> {rows}",
        f"%2 = stablehlo.constant dense<{_MINUS_INFINITY}> : tensor<f32>",
        f"%3 = stablehlo.reduce(%1 init: %2) applies stablehlo.maximum across dimensions = [1] : "
        f"({rows}, tensor<f32>) -> tensor<{batch}xf32>",
        f"%4 = stablehlo.broadcast_in_dim %3, dims = [0] : (tensor<{batch}xf32>) -> {rows}",
        f"%5 = stablehlo.compare EQ, %1, %4, FLOAT : ({rows}, {rows}) -> {flags}",
        f"%6 = stablehlo.iota dim = 1 : {ids}",
        f"%7 = stablehlo.constant dense<{vocab}> : {ids}",
        f"%8 = stablehlo.select %5, %6, %7 : {flags}, {ids}",
        f"%9 = stablehlo.constant dense<{vocab}> : tensor<i32>",
        f"%10 = stablehlo.reduce(%8 init: %9) applies stablehlo.minimum across dimensions = [1] : "
        f"({ids}, tensor<i32>) -> tensor<{batch}xi32>",
        f"return %10 : tensor<{batch}xi32>",
    ]
    text = "\n".join(f"    {line}" for line in lines)
    return f"module {{\n  func.func @main(%logits: {source}) -> tensor<{batch}xi32> {{\n{text}\n  }}\n}}\n".encode()
