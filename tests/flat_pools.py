"""Bodies that write their KV pools as older exporters did, at the size of a real model, and how long a step takes.

    python3 -m tests.flat_pools [--layers 30] [--rounds 40]

Prints, for every CPU plugin, milliseconds of a step (least and median) at 64 and at 1,024 pages: as the compiler
compiles such a body, and with its default option taken away. The body is the KV side of a decode step only (9 heads, 3
KV heads of 64, batch 1, context 64): what a real step does beside it does not depend on the number of pages.
"""

from __future__ import annotations

import argparse
import array
import contextlib
import os
import statistics
import time
from collections.abc import Sequence

from tests.support import cpu_plugins
from tlaloc_serve.engine.compiler import Compiler
from tlaloc_serve.pjrt.platforms import open_client

PAGE, KV_HEADS, GROUP, DIM, BLOCKS = 16, 3, 3, 64, 4
CONTEXT = PAGE * BLOCKS
WITHOUT_DEFAULT = {"xla_disable_hlo_passes": ""}

_LAYER = """
    %k{l} = stablehlo.slice %h{l} [0:1, 0:3, 0:64] : (tensor<1x9x64xf32>) -> tensor<1x3x64xf32>
    %v{l} = stablehlo.slice %h{l} [0:1, 3:6, 0:64] : (tensor<1x9x64xf32>) -> tensor<1x3x64xf32>
    %kf{l} = stablehlo.reshape %kp{l} : (tensor<{pool}>) -> tensor<{flat}>
    %kw{l} = "stablehlo.scatter"(%kf{l}, %slot, %k{l}) <{{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1, 2], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>, unique_indices = false}}> ({{
     ^bb0(%old: tensor<f32>, %new: tensor<f32>):
       stablehlo.return %new : tensor<f32>
     }}) : (tensor<{flat}>, tensor<1xi32>, tensor<1x3x64xf32>) -> tensor<{flat}>
    %ko{l} = stablehlo.reshape %kw{l} : (tensor<{flat}>) -> tensor<{pool}>
    %vf{l} = stablehlo.reshape %vp{l} : (tensor<{pool}>) -> tensor<{flat}>
    %vw{l} = "stablehlo.scatter"(%vf{l}, %slot, %v{l}) <{{scatter_dimension_numbers = #stablehlo.scatter<update_window_dims = [1, 2], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>, unique_indices = false}}> ({{
     ^bb0(%old: tensor<f32>, %new: tensor<f32>):
       stablehlo.return %new : tensor<f32>
     }}) : (tensor<{flat}>, tensor<1xi32>, tensor<1x3x64xf32>) -> tensor<{flat}>
    %vo{l} = stablehlo.reshape %vw{l} : (tensor<{flat}>) -> tensor<{pool}>
    %kg{l} = "stablehlo.gather"(%ko{l}, %table) <{{dimension_numbers = #stablehlo.gather<offset_dims = [2, 3, 4], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 2>, slice_sizes = array<i64: 1, 16, 3, 64>}}> : (tensor<{pool}>, tensor<1x4xi32>) -> tensor<1x4x16x3x64xf32>
    %ks{l} = stablehlo.reshape %kg{l} : (tensor<1x4x16x3x64xf32>) -> tensor<1x64x3x64xf32>
    %vg{l} = "stablehlo.gather"(%vo{l}, %table) <{{dimension_numbers = #stablehlo.gather<offset_dims = [2, 3, 4], collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 2>, slice_sizes = array<i64: 1, 16, 3, 64>}}> : (tensor<{pool}>, tensor<1x4xi32>) -> tensor<1x4x16x3x64xf32>
    %vs{l} = stablehlo.reshape %vg{l} : (tensor<1x4x16x3x64xf32>) -> tensor<1x64x3x64xf32>
    %q{l} = stablehlo.reshape %h{l} : (tensor<1x9x64xf32>) -> tensor<1x3x3x64xf32>
    %s{l} = stablehlo.dot_general %q{l}, %ks{l}, batching_dims = [0, 1] x [0, 2], contracting_dims = [3] x [3] : (tensor<1x3x3x64xf32>, tensor<1x64x3x64xf32>) -> tensor<1x3x3x64xf32>
    %e{l} = stablehlo.tanh %s{l} : tensor<1x3x3x64xf32>
    %a{l} = stablehlo.dot_general %e{l}, %vs{l}, batching_dims = [0, 1] x [0, 2], contracting_dims = [3] x [1] : (tensor<1x3x3x64xf32>, tensor<1x64x3x64xf32>) -> tensor<1x3x3x64xf32>
    %r{l} = stablehlo.reshape %a{l} : (tensor<1x3x3x64xf32>) -> tensor<1x9x64xf32>
    %h{next} = stablehlo.add %h{l}, %r{l} : tensor<1x9x64xf32>"""  # noqa: E501


def flat_body(pages: int, layers: int) -> bytes:
    """`h f32 [1, 9, 64]`, page table `i32 [1, 4]`, slot `i32 [1]`, two pools a layer -> `h`, the pools, aliased."""
    pool, flat = f"{pages}x16x3x64xf32", f"{pages * PAGE}x3x64xf32"
    names = [f"{side}p{number}" for number in range(layers) for side in "kv"]
    parameters = ", ".join(
        f"%{name}: tensor<{pool}> {{tf.aliasing_output = {index + 1} : i32}}" for index, name in enumerate(names)
    )
    lines = "".join(_LAYER.format(l=number, next=number + 1, pool=pool, flat=flat) for number in range(layers))
    results = ", ".join([f"%h{layers}"] + [f"%{side}o{number}" for number in range(layers) for side in "kv"])
    types = ", ".join(["tensor<1x9x64xf32>"] + [f"tensor<{pool}>"] * (2 * layers))
    head = "%h0: tensor<1x9x64xf32>, %table: tensor<1x4xi32>, %slot: tensor<1xi32>"
    return (
        f"module {{\n  func.func @main({head}, {parameters}) -> ({types}) {{{lines}\n    return {results} : {types}\n"
        "  }\n}\n"
    ).encode()


class Steps:
    """A body on a client of its own, ready to run: `seconds()` runs one step. Close it."""

    def __init__(self, plugin: str, pages: int, layers: int, options: dict[str, str]):
        pool = ("f32", (pages, PAGE, KV_HEADS, DIM))
        hidden = ("f32", (1, KV_HEADS * GROUP, DIM))
        small = (
            (array.array("f", [0.01] * (KV_HEADS * GROUP * DIM)), *hidden),
            (array.array("i", range(1, 1 + BLOCKS)), "i32", (1, BLOCKS)),
            (array.array("i", [PAGE]), "i32", (1,)),
        )
        zeros = bytes(4 * pages * PAGE * KV_HEADS * DIM)
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(open_client(plugin, "cpu", os.environ))
            compiled = Compiler(client, options).compile(flat_body(pages, layers), "flat")
            executable = stack.enter_context(compiled.executable)
            buffers = [stack.enter_context(client.buffer_from_host(*each)) for each in small]
            self._pools = [stack.enter_context(client.buffer_from_host(zeros, *pool)) for _ in range(2 * layers)]
            count = len(buffers) + len(self._pools)
            donated = range(len(buffers), count)
            self._run = stack.enter_context(executable.execution(count, donated, [hidden] + [pool] * (2 * layers)))
            for index, buffer in enumerate(buffers + self._pools):
                self._run.bind(index, buffer)
            self.close = stack.pop_all().close

    def seconds(self) -> float:
        begin = time.perf_counter()
        self._run.run()
        self._run.wait()
        taken = time.perf_counter() - begin
        self._run.give(list(enumerate(self._pools, 1)))
        return taken


def step_seconds(
    plugin: str, layers: int, rounds: int, arms: Sequence[tuple[int, dict[str, str]]]
) -> list[list[float]]:
    """Seconds of each of `rounds` steps for every arm (pages, options); the arms take turns, after two not counted."""
    with contextlib.ExitStack() as stack:
        steps = [
            stack.enter_context(contextlib.closing(Steps(plugin, pages, layers, options))) for pages, options in arms
        ]
        rows = [[step.seconds() for step in steps] for _ in range(rounds + 2)]
    return [list(column) for column in zip(*rows[2:], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=40)
    given = parser.parse_args()
    for plugin in cpu_plugins():
        print(plugin)
        for name, options in (("default", {}), ("without", WITHOUT_DEFAULT)):
            rows = step_seconds(plugin, given.layers, given.rounds, [(pages, options) for pages in (64, 1024)])
            least = [1e3 * min(row) for row in rows]
            median = [1e3 * statistics.median(row) for row in rows]
            print(
                f"  {name:8} least {least[0]:7.2f} {least[1]:7.2f} ms  x {least[1] / least[0]:5.2f}   "
                f"median {median[0]:7.2f} {median[1]:7.2f} ms  x {median[1] / median[0]:5.2f}"
            )


if __name__ == "__main__":
    main()
