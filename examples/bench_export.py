#!/usr/bin/env python3
"""How fast an export is, and how much memory it takes. Prints one JSON line a measurement.

    python3 examples/bench_export.py [--safetensors DIR] [--gguf FILE] [--work DIR] [--repeat 5] [--no-serve]

`copy`       an f32 safetensors checkpoint against `cp` of the same file, in turns, medians. `process` is the whole
             command with the start of the interpreter, `export` what the command itself counts. Before each of them
             stands a copy that does not count and is removed, so that both find free memory of the same kind (a
             virtual machine's first touch of a page costs more than the copying), and an artifact is emptied, not
             removed: ext4 passes by every file that was removed in the last minute when it makes a new one. The ratios
             mean something only where `cp` runs at the speed of memory (GB/s): a file that is too large for the kernel
             to hold back is written at the disk's speed, by `cp` too
`gguf`       seconds for a GGUF file
`tinyllama`  a random bf16 checkpoint of TinyLlama-1.1B's shape, made here (2.2 GB), to an f32 artifact (4.4 GB), which
             is then served for a few steps unless --no-serve
Without --safetensors a random f32 checkpoint of SmolLM2-135M's shape is made (0.5 GB). `peak_rss_mb` adds up the peaks
of the exporter and its children; the limit that goes with it is 2.5 times the largest tensor and 150 MiB.
Everything is written below --work (default: a temporary folder here), which needs about 8 GB free.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import random
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
MIB = 1 << 20
# Compiled modules are kept, as they are wherever nobody forbids it: compiling them takes as long as loading Python.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}

TINYLLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": 32000,
             "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32,
             "num_key_value_heads": 4, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
             "tie_word_embeddings": False, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
SMOLLM2 = {
    **TINYLLAMA,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    kv = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        for name, dims in (
            ("input_layernorm", (hidden,)), ("self_attn.q_proj", (hidden, hidden)), ("self_attn.k_proj", (kv, hidden)),
            ("self_attn.v_proj", (kv, hidden)), ("self_attn.o_proj", (hidden, hidden)),
            ("post_attention_layernorm", (hidden,)), ("mlp.gate_proj", (wide, hidden)), ("mlp.up_proj", (wide, hidden)),
            ("mlp.down_proj", (hidden, wide)),
        ):  # fmt: skip
            found[f"model.layers.{layer}.{name}.weight"] = dims
    found["model.norm.weight"] = (hidden,)
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], hidden)
    return found


def make_checkpoint(folder: pathlib.Path, config: dict[str, Any], dtype: str) -> int:
    """A checkpoint of random numbers around 0, norms 1. Returns the number of tensors."""
    width = {"F32": 4, "BF16": 2}[dtype]
    noise = bytearray(random.Random(1).randbytes(4 * MIB))
    top = bytes((0x3C, 0xBC, 0x3B, 0xBB)[byte & 3] for byte in range(256))  # sign and exponent: 2^-8 to 2^-7 in size
    noise[width - 1 :: width] = bytes(noise[width - 1 :: width]).translate(top)
    one = struct.pack("<f", 1.0)[4 - width :]
    header, at = {}, 0
    for name, dims in shapes(config).items():
        size = width * dims[0] * (dims[1] if len(dims) > 1 else 1)
        header[name] = {"dtype": dtype, "shape": list(dims), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, record in header.items():
            left = record["data_offsets"][1] - record["data_offsets"][0]
            if "norm" in name:
                file.write(one * (left // width))
                continue
            while left:
                left -= file.write(memoryview(noise)[: min(left, len(noise))])
    return len(header)


def export(checkpoint: pathlib.Path, out: pathlib.Path, *options: str, watched: bool = True) -> dict[str, Any]:
    """Run the export as a process of its own. Returns wall seconds, the facts it printed, and the peak memory, which
    is only known where it was `watched`: that takes some of a core."""
    command = [sys.executable, str(HERE / "export.py"), "--checkpoint", str(checkpoint), "--out", str(out), "--json"]
    begin = time.perf_counter()
    process = subprocess.Popen([*command, *options], stdout=subprocess.PIPE, env=ENVIRONMENT)
    peaks: dict[str, int] = {}
    done = threading.Event()
    watcher = threading.Thread(target=watch, args=(process.pid, peaks, done))
    if watched:
        watcher.start()
    output = process.communicate()[0]
    seconds = time.perf_counter() - begin
    done.set()
    if watched:
        watcher.join()
    if process.returncode:
        raise SystemExit(f"the export of {checkpoint} failed")
    return {"seconds": seconds, "facts": json.loads(output), "peak_rss_mb": round(sum(peaks.values()) / 1024)}


def watch(pid: int, peaks: dict[str, int], done: threading.Event) -> None:
    """Note the peak resident memory (KiB) of a process and its children, again and again until `done`."""
    while not done.wait(0.02):
        try:
            children = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            for thread in os.listdir(f"/proc/{pid}/task"):
                children += pathlib.Path(f"/proc/{pid}/task/{thread}/children").read_text().split()
        except OSError:
            continue
        for number in {str(pid), *children}:
            try:
                status = pathlib.Path(f"/proc/{number}/status").read_text()
            except OSError:
                continue
            peak = next((line for line in status.splitlines() if line.startswith("VmHWM")), "VmHWM: 0")
            peaks[number] = int(peak.split()[1])


def largest_tensor(facts: dict[str, Any]) -> int:
    """Bytes of the largest tensor of the checkpoint as it is in the artifact."""
    return max(4 * facts["vocab"] * facts["hidden"], *(path.stat().st_size for path in weights(facts)))


def weights(facts: dict[str, Any]) -> list[pathlib.Path]:
    return list(pathlib.Path(facts["out"], "weights").iterdir())


def rss(result: dict[str, Any]) -> dict[str, Any]:
    largest = largest_tensor(result["facts"]) / MIB
    return {"peak_rss_mb": result["peak_rss_mb"], "limit_mb": round(2.5 * largest + 150)}


def say(name: str, **facts: Any) -> None:
    print(json.dumps({"measure": name, **facts, "load": os.getloadavg()[0]}), flush=True)


def copy(source: pathlib.Path, target: pathlib.Path) -> float:
    """Seconds that `cp` takes. The copy is removed."""
    begin = time.perf_counter()
    subprocess.run(["cp", str(source), str(target)], check=True)
    seconds = time.perf_counter() - begin
    target.unlink()
    return seconds


def bench_copy(checkpoint: pathlib.Path, work: pathlib.Path, repeat: int) -> None:
    source = checkpoint / "model.safetensors"
    size = source.stat().st_size
    options = ("--batch", "1", "--context", "64")
    result = export(checkpoint, work / "artifact", *options)
    copies, exports, inner = [], [], []
    for turn in range(repeat):
        copy(source, work / "copy")
        copies.append(copy(source, work / "copy"))
        copy(source, work / "copy")
        timed = export(checkpoint, work / f"artifact-{turn}", *options, watched=False)
        exports.append(timed["seconds"])
        inner.append(timed["facts"]["seconds"])
        for path in weights(timed["facts"]):
            os.truncate(path, 0)
    cp, whole, own = (size / MIB / statistics.median(times) for times in (copies, exports, inner))
    say("copy", mb=round(size / MIB), cp_mb_s=round(cp), export_mb_s=round(own), process_mb_s=round(whole),
        of_cp=round(own / cp, 2), process_of_cp=round(whole / cp, 2), **rss(result))  # fmt: skip


def bench_gguf(gguf: pathlib.Path, work: pathlib.Path) -> None:
    result = export(gguf, work / "gguf-artifact")
    say("gguf", seconds=round(result["seconds"], 2), **rss(result))
    shutil.rmtree(work / "gguf-artifact")


def bench_tinyllama(work: pathlib.Path, serve: bool) -> None:
    begin = time.perf_counter()
    count = make_checkpoint(work / "tinyllama", TINYLLAMA, "BF16")
    made = time.perf_counter() - begin
    out = work / "tinyllama-artifact"
    result = export(work / "tinyllama", out, "--batch", "1", "--context", "64")
    size = sum(path.stat().st_size for path in weights(result["facts"]))
    say("tinyllama", tensors=count, made_s=round(made, 1), seconds=round(result["seconds"], 1),
        artifact_mb=round(size / MIB), widened_mb_s=round(size / 1e6 / result["seconds"]), **rss(result))  # fmt: skip
    if serve:
        command = [sys.executable, str(HERE.parent / "serve.py"), "--artifact", str(out), "--prompt", "1,450,7483",
                   "--max-new", "4", "--ignore-eos", "--json"]  # fmt: skip
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        run = json.loads(done.stdout).get("run")
        if run is None:
            raise SystemExit("nothing to serve it on: python3 -m tlaloc_serve plugins --fetch cpu, or --no-serve")
        say("tinyllama served", generated=run["sequences"][0]["generated"], median_step_ms=run["medianStepMs"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--safetensors", type=pathlib.Path, help="an f32 checkpoint folder with one model.safetensors")
    parser.add_argument("--gguf", type=pathlib.Path)
    parser.add_argument("--work", type=pathlib.Path, default=HERE / "build")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--no-serve", action="store_true")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.work, prefix="bench-") as folder:
        work = pathlib.Path(folder)
        if given.safetensors is None:
            given.safetensors = work / "smollm2"
            make_checkpoint(given.safetensors, SMOLLM2, "F32")
        bench_copy(given.safetensors, work, given.repeat)
        if given.gguf is not None:
            bench_gguf(given.gguf, work)
        bench_tinyllama(work, not given.no_serve)


if __name__ == "__main__":
    main()
