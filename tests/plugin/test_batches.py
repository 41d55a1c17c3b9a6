"""Each row of a batch gives what it gives alone, on every compiled batch size, at the widths of a real model.

Tiny models do not show everything: an XLA that mixed rows up from a batch of eight on did so only behind matrices of
real width. The weights are random; what is compared is the model with itself, alone and in company.
"""

from __future__ import annotations

import json
import pathlib
import random
import tempfile
import unittest
from array import array

from tests.support import cpu_plugins, engine_on
from tests.tiny_checkpoint import CONFIG, pack, shapes
from tlaloc_serve.engine.generate import Engine
from tlaloc_serve.export.checkpoint import open_checkpoint
from tlaloc_serve.export.write import ExportOptions, export_checkpoint, plan_export

# The widths of SmolLM2-135M.
REAL_WIDTHS = {
    **CONFIG, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
    "vocab_size": 512,
}  # fmt: skip
BATCHES = (1, 3, 8)
STEPS = 3


def write_checkpoint(folder: pathlib.Path) -> None:
    """Random bf16 weights of both signs, between 2^-7 and 2^-3 in size."""
    draw = random.Random(5)
    high = bytes((0x3C, 0x3D, 0xBC, 0xBD)[byte % 4] for byte in range(256))
    tensors = {}
    for name, dims in shapes(REAL_WIDTHS).items():
        count = 1
        for dim in dims:
            count *= dim
        data = bytearray(draw.randbytes(2 * count))
        data[1::2] = data[1::2].translate(high)
        tensors[name] = ("BF16", dims, bytes(data))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(REAL_WIDTHS))
    (folder / "model.safetensors").write_bytes(pack(tensors))


def last_logits(engine: Engine, prompts: list[list[int]]) -> list[array[float]]:
    """The logits of each prompt's last step, all prompts in one batch, after `STEPS` tokens of the model's own."""
    scheduler, runner = engine._scheduler, engine._runner
    scheduler.submit(scheduler.check(prompts, STEPS))
    rows: dict[int, array[float]] = {}
    while (batch := scheduler.next_batch()) is not None:
        result = runner.step(batch, keep_logits=True)
        assert result.logits is not None
        rows.update({row.sequence: logits for row, logits in zip(batch.rows, result.logits, strict=True)})
        scheduler.advance(batch, result.picks, frozenset())
    return [rows[number] for number in range(len(prompts))]


class Rows(unittest.TestCase):
    def check(self, weights: str, tolerance: float, plugins: tuple[str, ...]) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = pathlib.Path(name)
            write_checkpoint(folder / "checkpoint")
            options = ExportOptions(batch=BATCHES, context=(64,), weights=weights)
            export_checkpoint(
                plan_export(open_checkpoint(str(folder / "checkpoint")), options), str(folder / "artifact")
            )
            draw = random.Random(6)
            prompts = [[draw.randrange(512) for _ in range(draw.randint(2, 9))] for _ in range(BATCHES[-1])]
            for plugin in plugins:
                with engine_on(plugin, folder / "artifact") as engine:
                    alone = [last_logits(engine, [prompt])[0] for prompt in prompts]
                    for batch in BATCHES[1:]:
                        together = last_logits(engine, prompts[:batch])
                        for number, (mine, theirs) in enumerate(zip(alone, together, strict=False)):
                            with self.subTest(plugin=plugin, weights=weights, batch=batch, row=number):
                                scale = max(map(abs, mine))
                                worst = max(abs(a - b) for a, b in zip(mine, theirs, strict=True))
                                self.assertLess(worst, tolerance * scale)

    def test_f32_on_every_plugin(self) -> None:
        self.check("f32", 1e-4, cpu_plugins())

    def test_int8_on_every_plugin(self) -> None:
        self.check("int8", 1e-4, cpu_plugins())

    def test_bf16(self) -> None:
        # Another order of sums rounds some activations to the neighbouring bf16: a few units of 2^-8.
        self.check("bf16", 8 * 2.0**-8, cpu_plugins()[:1])


if __name__ == "__main__":
    unittest.main()
