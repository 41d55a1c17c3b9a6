"""What the bodies of an export are for, and the formulations that follow: one row a target, the reasons beside it.

`generic` has to be right everywhere and slow nowhere. The forms that pay on XLA:CPU do, measured on three plugins, and
no other form was found that beats them there, so that `cpu` is the same. They make work for a library of matrix
products: `gpu` has none of them. Nobody has run it on a GPU; on the CPU plugins it gives the same ids.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """The choices of one target.

    most_grouped_rows: XLA:CPU reads a weight about once when it is the left side of a batched product, and slower, from
    two rows on far slower, when it is the right side of a plain one: 2 to 32 rows take 0.45 to 0.75 of the time (bf16:
    0.9), one row the same. Beyond that the plain product wins (prefill: 0.6 of the grouped time at 512 rows).
    widens_weights: XLA:CPU turns a bf16 product of one row into a loop that widens the whole weight every step; an f32
    product with a widened piece of the weight takes 0.5 to 0.9 of the f32 weight's time. An i8 weight is widened for
    any number of rows (one row: 0.25 to 0.65 of the f32 weight's time, several: about the same). Where this does not
    hold, bf16 is multiplied by bf16, and an i8 weight, which bf16 holds exactly, too.
    keeps_turns: XLA:CPU draws what is cheap into every place that uses it, the cosines and sines of rotary embedding
    among it: each layer computes them again, 1 to 5 % of a step. A barrier behind them prevents that.
    most_block_diagonal_heads: block-diagonal attention reads K and V as they lie in the pool, at the price of KV times
    the arithmetic. Above so many KV heads the arithmetic costs more than the transposes that it saves.
    """

    name: str
    most_grouped_rows: int
    widens_weights: bool
    keeps_turns: bool
    most_block_diagonal_heads: int


GENERIC = Target("generic", most_grouped_rows=32, widens_weights=True, keeps_turns=True, most_block_diagonal_heads=8)
CPU = Target("cpu", most_grouped_rows=32, widens_weights=True, keeps_turns=True, most_block_diagonal_heads=8)
GPU = Target("gpu", most_grouped_rows=0, widens_weights=False, keeps_turns=False, most_block_diagonal_heads=0)
TARGETS = {target.name: target for target in (CPU, GPU, GENERIC)}
