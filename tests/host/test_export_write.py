"""A whole export without a plugin: what is in the artifact, and what a refusal or a crash leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Iterator
from typing import Any
from unittest import mock

from tests import tiny_checkpoint as tiny
from tests.support import shared
from tlaloc_serve.artifact.manifest import MANIFEST_NAME, Manifest
from tlaloc_serve.artifact.store import open_artifact
from tlaloc_serve.errors import ExportError
from tlaloc_serve.export import staging, workers
from tlaloc_serve.export.checkpoint import open_checkpoint
from tlaloc_serve.export.write import ExportOptions, export_checkpoint, plan_export

SMALL = {"batch": (1, 2), "context": (16, 32)}
RENAME = os.rename


def contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@contextlib.contextmanager
def forking() -> Iterator[None]:
    """Two children for any work, whatever threads the test run has."""
    with (
        mock.patch.object(workers, "_WORTH_A_CHILD", 0),
        mock.patch.object(workers, "_may_fork", return_value=True),
        mock.patch("tlaloc_serve.export.write.core_count", return_value=2),
    ):
        yield


class Case(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name)
        self.checkpoint = tiny.write(self.root / "tiny-model")
        self.out = self.root / "out" / "artifact"

    def export(self, **options: Any) -> Manifest:
        plan = plan_export(open_checkpoint(str(self.checkpoint)), ExportOptions(**{**SMALL, **options}))
        return export_checkpoint(plan, str(self.out))

    def refused(self, *words: str, **options: Any) -> None:
        """The export is refused with these words, and nothing is written."""
        with self.assertRaises(ExportError) as caught:
            self.export(**options)
        for word in words:
            self.assertIn(word, str(caught.exception))
        self.assertFalse(self.out.parent.exists(), "something was written")


class Artifact(Case):
    def test_opens_with_every_hash_verified(self) -> None:
        self.export()
        artifact = open_artifact(self.out, verify_weights=True)
        manifest = artifact.manifest
        self.assertEqual(manifest.schema_version, "tlaloc-serving-v2")
        self.assertEqual(
            [entry.id for entry in manifest.entries],
            [f"{kind}_b{b}_c{c}" for kind in ("decode", "prefill") for b in (1, 2) for c in (16, 32)],
        )
        self.assertEqual(manifest.model.num_blocks, 1 + 2 * 32 // 16)
        for entry in manifest.entries:
            pools = range(5, 9)
            self.assertEqual(artifact.body(entry).signature.aliases, {index: index - 4 for index in pools})
            self.assertEqual([slot.name for slot in entry.inputs[9:]], [weight.name for weight in manifest.weights])

    def test_weights_are_the_tensors_byte_for_byte(self) -> None:
        manifest = self.export()
        self.assertEqual(
            [weight.name for weight in manifest.weights[:6]],
            ["embedTokens", "inputNorm0", "qkvProj0", "oProj0", "postAttnNorm0", "gateUpProj0"],
        )
        self.assertEqual([weight.name for weight in manifest.weights[-2:]], ["finalNorm", "lmHead"])
        by_name = tiny.tensors()
        used = []
        for weight in manifest.weights:
            parts = [by_name[source.tensor] for source in weight.sources]
            used += [source.tensor for source in weight.sources]
            self.assertEqual((self.out / weight.path).read_bytes(), b"".join(part[2] for part in parts))
            self.assertEqual(weight.source_sha256, hashlib.sha256(b"".join(part[2] for part in parts)).hexdigest())
            for source, part in zip(weight.sources, parts, strict=True):
                stored = (self.checkpoint / source.file).read_bytes()[source.offset :][: source.byte_length]
                self.assertEqual(stored, part[2])
        self.assertEqual(sorted(used), sorted(by_name))
        qkv = next(weight for weight in manifest.weights if weight.name == "qkvProj1")
        self.assertEqual(qkv.type.dims, (16 + 8 + 8, 16))
        self.assertEqual([source.tensor.split(".")[-2] for source in qkv.sources], ["q_proj", "k_proj", "v_proj"])

    def test_mixed_dtypes_are_widened(self) -> None:
        mixed = tiny.tensors(dtypes=("BF16", "F32", "F16"))
        tiny.write(self.checkpoint, content=mixed)
        manifest = self.export()
        exact = tiny.tensors()
        for weight in manifest.weights:
            want = b"".join(exact[source.tensor][2] for source in weight.sources)
            self.assertEqual((self.out / weight.path).read_bytes(), want, weight.name)
            stored = b"".join(mixed[source.tensor][2] for source in weight.sources)
            self.assertEqual(weight.source_sha256, hashlib.sha256(stored).hexdigest())

    def test_bf16_weights(self) -> None:
        for dtypes in (("F32",), ("BF16",), ("F16", "BF16", "F32")):
            tiny.write(self.checkpoint, content=tiny.tensors(dtypes=dtypes))
            manifest = self.export(weights="bf16")
            exact = tiny.tensors()
            for weight in manifest.weights:
                data = b"".join(exact[source.tensor][2] for source in weight.sources)
                dtype = "f32" if "Norm" in weight.name else "bf16"
                self.assertEqual(weight.type.dtype, dtype)
                want = data if dtype == "f32" else tiny.narrow(data, "BF16")
                self.assertEqual((self.out / weight.path).read_bytes(), want, weight.name)
            self.assertEqual(manifest.model.dtype, "bf16")

    def test_a_tied_head_is_stored_once(self) -> None:
        config = {**tiny.CONFIG, "tie_word_embeddings": True}
        content = tiny.tensors()
        for stored in (False, True):
            with self.subTest(stored=stored):
                if stored:
                    content["lm_head.weight"] = content["model.embed_tokens.weight"]
                else:
                    del content["lm_head.weight"]
                tiny.write(self.checkpoint, config, content)
                self.assertNotIn("lmHead", [weight.name for weight in self.export().weights])
        del content["lm_head.weight"]
        tiny.write(self.checkpoint, {k: v for k, v in config.items() if k != "tie_word_embeddings"}, content)
        self.assertNotIn("lmHead", [weight.name for weight in self.export().weights])

    def test_the_same_bytes_every_time(self) -> None:
        self.export()
        first = contents(self.out)
        os.utime(self.checkpoint / "model.safetensors", (1, 1))
        self.export()
        self.assertEqual(contents(self.out), first)

    def test_children_write_what_the_process_itself_writes(self) -> None:
        self.export()
        first = contents(self.out)
        with forking(), mock.patch("tlaloc_serve.export.workers._Child", wraps=workers._Child) as child:
            self.export()
        self.assertEqual(child.call_count, 2)
        self.assertEqual(contents(self.out), first)

    def test_the_model_hash_follows_weights_and_architecture(self) -> None:
        first = self.export().model_hash
        self.assertRegex(first, r"^llama:tiny-model:L2:h16:v40:[0-9a-f]{16}$")
        self.assertEqual(self.export(context=(16,)).model_hash, first)
        content = tiny.tensors()
        dtype, dims, data = content["model.norm.weight"]
        content["model.norm.weight"] = (dtype, dims, data[:-1] + bytes([data[-1] ^ 1]))
        tiny.write(self.checkpoint, content=content)
        changed = self.export().model_hash
        tiny.write(self.checkpoint, {**tiny.CONFIG, "rope_theta": 5e5})
        self.assertEqual(len({first, changed, self.export().model_hash}), 3)

    def test_first_layers_only(self) -> None:
        manifest = self.export(layers=1)
        self.assertEqual(manifest.model.num_layers, 1)
        self.assertNotIn("qkvProj1", [weight.name for weight in manifest.weights])
        self.assertEqual(manifest.entries[0].outputs[-1].name, "valueCache0Out")

    def test_the_target_is_recorded(self) -> None:
        for more, target in (({}, "generic"), ({"target": "gpu"}, "gpu")):
            exporter = self.export(**more).exporter
            self.assertEqual(exporter and exporter.target, target)

    def test_prefill_chunk(self) -> None:
        manifest = self.export(prefill_chunk=20)
        self.assertEqual([entry.id for entry in manifest.entries[4:6]], ["prefill_b1_c16", "prefill_b1_c32_t20"])
        open_artifact(self.out)

    def test_default_ladder_ends_where_the_model_ends(self) -> None:
        self.assertEqual(self.export(context=None).ladder.context, (64, 128))
        tiny.write(self.checkpoint, {**tiny.CONFIG, "max_position_embeddings": 40})
        self.assertEqual(self.export(context=None).ladder.context, (32,))


class Refused(Case):
    def test_options(self) -> None:
        for words, options in (
            (("--context", "60", "--block-size 16"), {"context": (60,), "block_size": 16}),
            (("--context", "144", "max_position_embeddings 128"), {"context": (64, 144)}),
            (("--context", "not a ladder"), {"context": (32, 16)}),
            (("--batch", "not a ladder"), {"batch": (1, 1)}),
            (("--batch", "not a ladder"), {"batch": (0, 1)}),
            (("--block-size",), {"block_size": 0}),
            (("--num-blocks", "32 tokens", "got 2", "at least 3"), {"num_blocks": 2}),
            (("--layers", "got 3", "1 to 2"), {"layers": 3}),
            (("--layers",), {"layers": 0}),
            (("--weights", "f64"), {"weights": "f64"}),
            (("--prefill-chunk",), {"prefill_chunk": 0}),
            (("--target", "tpu", "gpu"), {"target": "tpu"}),
        ):
            with self.subTest(words):
                self.refused(*words, **options)

    def test_tensors_that_are_missing_or_too_many(self) -> None:
        for name in ("model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight"):
            content = tiny.tensors()
            del content[name]
            tiny.write(self.checkpoint, content=content)
            self.refused(name, "missing tensor")
        for name in (
            "model.layers.0.self_attn.q_proj.bias",
            "model.layers.2.mlp.up_proj.weight",
            "score.weight",
            "model.layers.0.block_sparse_moe.gate.weight",
            "model.layers.0.self_attn.q_norm.weight",
        ):
            content = tiny.tensors()
            content[name] = ("F32", (16,), bytes(64))
            tiny.write(self.checkpoint, content=content)
            self.refused(str(self.checkpoint / "model.safetensors"), name, "no use for")

    def test_buffers_are_left_out(self) -> None:
        content = tiny.tensors()
        content["model.layers.0.self_attn.rotary_emb.inv_freq"] = ("F32", (2,), bytes(8))
        tiny.write(self.checkpoint, content=content)
        self.export()

    def test_shapes_that_disagree_with_the_config(self) -> None:
        for key, value, tensor in (
            ("vocab_size", 41, "model.embed_tokens.weight"),
            ("intermediate_size", 25, "gate_proj"),
            ("num_key_value_heads", 4, "k_proj"),
            ("head_dim", 8, "q_proj"),
        ):
            with self.subTest(key):
                tiny.write(self.checkpoint, {**tiny.CONFIG, key: value}, tiny.tensors())
                self.refused("model.safetensors", tensor, "shape disagrees with the config")

    def test_dtypes_that_are_no_weights(self) -> None:
        content = tiny.tensors()
        content["model.norm.weight"] = ("I64", (16,), bytes(128))
        tiny.write(self.checkpoint, content=content)
        self.refused("model.norm.weight", "I64", "F32 or F16 or BF16")
        content["model.norm.weight"] = ("F8_E4M3", (16,), bytes(16))
        tiny.write(self.checkpoint, content=content)
        self.refused("model.norm.weight", "F8_E4M3")

    def test_a_tied_head_that_differs(self) -> None:
        tiny.write(self.checkpoint, {**tiny.CONFIG, "tie_word_embeddings": True})
        self.refused("lm_head.weight", "differs from model.embed_tokens.weight")

    def test_no_checkpoint(self) -> None:
        (self.checkpoint / "config.json").unlink()
        self.refused("config.json", "no such file")
        (self.checkpoint / "model.gguf").write_bytes(b"GGUF")
        self.refused("--checkpoint", "model.gguf")
        shutil.rmtree(self.checkpoint)
        self.refused(str(self.checkpoint), "no such checkpoint")
        self.checkpoint.write_bytes(b"not a gguf file")
        self.refused(str(self.checkpoint), "not a GGUF file")

    def test_no_space(self) -> None:
        free = mock.Mock(free=1000)
        with mock.patch("shutil.disk_usage", return_value=free):
            self.refused("no space left", "1000 bytes free")


class Crash(Case):
    """The destination is as it was, and no folder is left beside it."""

    def left(self) -> list[str]:
        return sorted(path.name for path in self.out.parent.iterdir()) if self.out.parent.exists() else []

    def test_a_disk_that_fills_up(self) -> None:
        real, budget = os.write, [9000]

        def write(target: int, data: memoryview) -> int:
            budget[0] -= len(data)
            if budget[0] < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(target, data)

        for before in ([], ["artifact"]):
            budget[0] = 9000
            with mock.patch.object(staging.os, "write", write), self.assertRaises(ExportError) as caught:
                self.export()
            self.assertIn("No space left on device", str(caught.exception))
            self.assertIn("choose another --out", str(caught.exception))
            self.assertEqual(self.left(), before)
            self.export()
        open_artifact(self.out, verify_weights=True)

    def test_a_disk_that_fills_up_at_the_bodies_or_the_manifest(self) -> None:
        real = pathlib.Path.write_bytes
        for suffix in (".mlir", MANIFEST_NAME, "decode_b1_c16.json"):

            def write(path: pathlib.Path, data: bytes, suffix: str = suffix) -> int:
                if path.name.endswith(suffix):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real(path, data)

            with mock.patch.object(pathlib.Path, "write_bytes", write), self.assertRaises(ExportError):
                self.export()
            self.assertEqual(self.left(), [])

    def test_ctrl_c(self) -> None:
        for children in (False, True):
            plan = plan_export(open_checkpoint(str(self.checkpoint)), ExportOptions(**SMALL))
            with forking() if children else contextlib.nullcontext(), self.assertRaises(KeyboardInterrupt):
                export_checkpoint(plan, str(self.out), mock.Mock(side_effect=[None, None, KeyboardInterrupt]))
            self.assertEqual(self.left(), [])

    def test_a_child_that_dies(self) -> None:
        def killed(job: staging.Job, room: bytearray) -> staging.Staged:
            os.kill(os.getpid(), signal.SIGKILL)
            raise AssertionError

        with (
            forking(),
            mock.patch("tlaloc_serve.export.workers.stage", killed),
            self.assertRaises(ExportError) as caught,
        ):
            self.export()
        self.assertIn("the process that wrote this weight ended", str(caught.exception))
        self.assertEqual(self.left(), [])

    def test_no_child_can_be_started(self) -> None:
        with forking(), mock.patch("tlaloc_serve.export.workers.os.fork", side_effect=OSError(errno.EAGAIN, "no")):
            self.export()
        open_artifact(self.out, verify_weights=True)

    def test_more_jobs_than_a_pipe_holds(self) -> None:
        with forking(), mock.patch.object(workers, "_MOST_NUMBERS", 3):
            self.export()
        open_artifact(self.out, verify_weights=True)

    def test_a_disk_without_room_to_set_aside(self) -> None:
        for code, words in ((errno.ENOSPC, "choose another --out"), (errno.EOPNOTSUPP, None)):
            refusal = OSError(code, os.strerror(code))
            with mock.patch.object(staging.os, "posix_fallocate", side_effect=refusal):
                if words is None:
                    self.export()
                    open_artifact(self.out, verify_weights=True)
                    continue
                self.refused(words)

    def test_an_error_in_a_child_is_raised_here(self) -> None:
        plan = plan_export(open_checkpoint(str(self.checkpoint)), ExportOptions(**SMALL))
        os.truncate(self.checkpoint / "model.safetensors", 4000)
        with forking(), self.assertRaises(ExportError) as caught:
            export_checkpoint(plan, str(self.out))
        self.assertIn(str(self.checkpoint / "model.safetensors"), str(caught.exception))
        self.assertIn("has become shorter", str(caught.exception))

    def test_no_child_outlives_the_export(self) -> None:
        with forking():
            self.export()
        with self.assertRaises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)

    def test_a_checkpoint_that_shrinks_while_it_is_read(self) -> None:
        plan = plan_export(open_checkpoint(str(self.checkpoint)), ExportOptions(**SMALL))
        os.truncate(self.checkpoint / "model.safetensors", 4000)
        with self.assertRaises(ExportError) as caught:
            export_checkpoint(plan, str(self.out))
        self.assertIn("has become shorter", str(caught.exception))
        self.assertEqual(self.left(), [])

    def test_the_last_move_fails(self) -> None:
        self.export()
        before = contents(self.out)

        def rename(source: Any, target: Any) -> None:
            if ".tmp-" in str(source):
                raise OSError(errno.EIO, "broken")
            RENAME(source, target)

        with mock.patch("tlaloc_serve.artifact.writer.os.rename", rename), self.assertRaises(ExportError):
            self.export(context=(16,))
        self.assertEqual(contents(self.out), before)
        self.assertEqual(self.left(), ["artifact"])

    def test_what_dead_exports_left_is_cleared(self) -> None:
        self.export()
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        alive = self.out.with_name(f".artifact.tmp-{os.getppid()}")
        for name in (f".artifact.tmp-{dead.pid}", alive.name, ".other.tmp-1", ".artifact.tmp-x"):
            (self.out.parent / name).mkdir()
        self.export()
        self.assertEqual(self.left(), sorted(["artifact", alive.name, ".other.tmp-1", ".artifact.tmp-x"]))

    def test_an_artifact_that_was_moved_away_comes_back(self) -> None:
        """A replacement killed between its two moves: the old artifact is beside, and nothing has its name."""
        self.export()
        before = contents(self.out)
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        os.rename(self.out, self.out.with_name(f".artifact.old-{dead.pid}"))
        with (
            mock.patch.object(staging.os, "write", side_effect=OSError(errno.ENOSPC, "full")),
            self.assertRaises(ExportError),
        ):
            self.export()
        self.assertEqual(contents(self.out), before)


class Destination(Case):
    def test_over_an_artifact(self) -> None:
        self.export()
        self.export(context=(16,))
        self.assertEqual(open_artifact(self.out).manifest.ladder.context, (16,))
        self.assertEqual([path.name for path in self.out.parent.iterdir()], ["artifact"])

    def test_into_an_empty_directory_or_through_a_link(self) -> None:
        real = self.root / "elsewhere"
        real.mkdir()
        self.out.parent.mkdir()
        self.out.symlink_to(real)
        self.export()
        self.assertTrue(self.out.is_symlink())
        open_artifact(real)

    def test_over_anything_else(self) -> None:
        def refused(*words: str) -> None:
            before = contents(self.out.parent)
            with self.assertRaises(ExportError) as caught:
                self.export()
            for word in (str(self.out), *words):
                self.assertIn(word, str(caught.exception))
            self.assertEqual(contents(self.out.parent), before)

        self.out.mkdir(parents=True)
        (self.out / "thesis.tex").write_text("years of work")
        refused("no artifact")
        (self.out / MANIFEST_NAME).write_text("{}")
        refused("no artifact")
        (self.out / MANIFEST_NAME).write_text(json.dumps({"schemaVersion": "tlaloc-serving-v2"}))
        refused("thesis.tex")
        shutil.rmtree(self.out)
        self.out.write_text("a file")
        refused("no directory")

    def test_below_a_file(self) -> None:
        (self.root / "out").write_text("a file where the parent should be")
        for out in (self.out, self.out / "deeper" / "still"):
            self.out = out
            with self.assertRaises(ExportError) as caught:
                self.export()
            self.assertTrue(str(caught.exception).startswith(f"{self.root / 'out'}: is no directory"), caught.exception)
            self.assertIn(str(out), str(caught.exception))

    def test_a_place_that_cannot_be_written(self) -> None:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with mock.patch.object(pathlib.Path, "mkdir", side_effect=full), self.assertRaises(ExportError) as caught:
            self.export()
        self.assertIn(f"{self.out}: cannot be written", str(caught.exception))

    def test_only_the_parents_that_it_made_are_removed(self) -> None:
        self.out = self.root / "kept" / "made" / "too" / "artifact"
        (self.root / "kept").mkdir()
        (self.checkpoint / "tokenizer.json").write_text("{")
        with self.assertRaises(ExportError):
            self.export()
        self.assertEqual(list((self.root / "kept").iterdir()), [])


class Frontend(Case):
    def write(self, name: str, document: object) -> None:
        text = document if isinstance(document, str) else json.dumps(document)
        (self.checkpoint / name).write_text(text)

    def test_nothing_known(self) -> None:
        frontend = self.export().frontend
        self.assertEqual((frontend.tokenizer, frontend.add_bos, frontend.default_prompt), (None, None, None))
        self.assertEqual((frontend.bos_token_id, frontend.eos_token_ids), (1, (2,)))

    def test_eos_ids_of_both_files(self) -> None:
        self.write("generation_config.json", {"eos_token_id": [7, 3]})
        self.assertEqual(self.export().frontend.eos_token_ids, (7, 3, 2))
        self.write("generation_config.json", {"eos_token_id": None})
        self.assertEqual(self.export().frontend.eos_token_ids, (2,))
        for bad in (40, -1, "2", 2.0, True, [[2]]):
            self.write("generation_config.json", {"eos_token_id": bad})
            with self.assertRaises(ExportError) as caught:
                self.export()
            self.assertIn("generation_config.json: eos_token_id", str(caught.exception))

    def test_bos_policy(self) -> None:
        added = [{"id": 5, "content": "<s>"}, {"id": 6, "content": "</s>"}]
        first = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]}
        last = {"type": "TemplateProcessing", "single": [{"Sequence": {"id": "A"}}, {"SpecialToken": {"id": "</s>"}}]}
        for settings, processor, want in (
            ({}, None, (False, 1)),
            ({}, first, (True, 5)),
            ({}, last, (False, 1)),
            ({}, {"type": "Sequence", "processors": [{"type": "ByteLevel"}, first]}, (True, 5)),
            ({"add_bos_token": False, "bos_token": "<s>"}, first, (False, 5)),
            ({"add_bos_token": True, "bos_token": {"content": "<s>"}}, None, (True, 5)),
            ({"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>"}, None, (True, 5)),
            ({"tokenizer_class": "Qwen2Tokenizer", "bos_token": None}, None, (False, 1)),
        ):
            self.write("tokenizer.json", {"added_tokens": added, "post_processor": processor, "model": {"vocab": {}}})
            self.write("tokenizer_config.json", settings)
            frontend = self.export().frontend
            self.assertEqual((frontend.add_bos, frontend.bos_token_id), want, (settings, processor))

    def test_tokenizer_is_copied_and_pinned(self) -> None:
        for vocab, prompt in (
            (
                {"The": 0, "\u0120capital": 1, "\u0120of": 2, "\u0120France": 3, "\u0120is": 4},
                "The capital of France is",
            ),
            (
                {"\u2581The": 0, "\u2581capital": 1, "\u2581of": 2, "\u2581France": 3, "\u2581is": 4},
                "The capital of France is",
            ),
            ({"The": 0, "\u0120capital": 1}, None),
        ):
            self.write("tokenizer.json", {"model": {"vocab": vocab}})
            frontend = self.export().frontend
            self.assertEqual(frontend.default_prompt, prompt)
            data = (self.checkpoint / "tokenizer.json").read_bytes()
            self.assertEqual(open_artifact(self.out).tokenizer, data)

    def test_chat_template(self) -> None:
        self.write("tokenizer_config.json", {"chat_template": "{{ a }}"})
        self.assertEqual(self.export().frontend.chat_template, "{{ a }}")
        named = [{"name": "tool_use", "template": "{{ t }}"}, {"name": "default", "template": "{{ d }}"}]
        self.write("tokenizer_config.json", {"chat_template": named})
        self.assertEqual(self.export().frontend.chat_template, "{{ d }}")
        self.write("chat_template.jinja", "{{ file }}")
        self.assertEqual(self.export().frontend.chat_template, "{{ file }}")

    def test_damaged_files_are_named(self) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
            for text in ("{", "[]", "version https://git-lfs.github.com/spec/v1\n"):
                self.write(name, text)
                self.refused(name)
            (self.checkpoint / name).unlink()

    def test_odd_shapes_inside_a_tokenizer_are_no_crash(self) -> None:
        for document in (
            {"post_processor": []},
            {"post_processor": {"type": "Sequence", "processors": 3}},
            {"post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": []}}]}},
            {"added_tokens": [{"id": "x", "content": []}, 3]},
            {"model": []},
            {"model": {"vocab": []}},
        ):
            self.write("tokenizer.json", document)
            self.write("tokenizer_config.json", {"bos_token": ["<s>"], "chat_template": 3, "tokenizer_class": []})
            self.export()

    def test_the_checkpoints_of_transformers(self) -> None:
        want = {
            "llama3_rope": (True, 368, (369, 376, 377)),
            "llama_gqa_untied": (True, 1, (2,)),
            "qwen2": (False, 361, (363, 361)),
            "llama_bias": (None, 1, (2,)),
        }
        for name, facts in want.items():
            frontend = open_checkpoint(str(shared("checkpoints", name))).frontend
            self.assertEqual((frontend.add_bos, frontend.bos_token_id, frontend.eos_token_ids), facts, name)


class Staging(unittest.TestCase):
    def test_interleaved_heads_are_put_back(self) -> None:
        """Rows as llama.cpp's converter writes them: reshape(heads, 2, half, cols).swapaxes(1, 2)."""
        heads, half, columns = 3, 4, 5
        rows = [
            struct.pack("<5f", *[100 * row + column for column in range(columns)]) for row in range(heads * 2 * half)
        ]
        mixed = [
            rows[head * 2 * half + side * half + index]
            for head in range(heads)
            for index in range(half)
            for side in (0, 1)
        ]
        with tempfile.TemporaryDirectory() as folder:
            source, target = os.path.join(folder, "source"), os.path.join(folder, "target")
            pathlib.Path(source).write_bytes(b"head" + b"".join(mixed))
            dims = (heads * 2 * half, columns)
            piece = staging.Piece(source, "w", "F32", dims, 4, 4 * dims[0] * columns, head_rows=2 * half)
            staged = staging.stage(staging.Job(target, staging.TensorType("f32", dims), (piece,)))
            self.assertEqual(pathlib.Path(target).read_bytes(), b"".join(rows))
            self.assertEqual(staged.sha256, hashlib.sha256(b"".join(rows)).hexdigest())
            self.assertEqual(staged.source_sha256, hashlib.sha256(b"".join(mixed)).hexdigest())
            plain = dataclasses.replace(piece, head_rows=0)
            self.assertTrue(staging.same_bytes(plain, plain))
            self.assertFalse(staging.same_bytes(plain, dataclasses.replace(plain, offset=0)))


if __name__ == "__main__":
    unittest.main()
