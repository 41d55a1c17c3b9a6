"""Compare the GGUF half with llama.cpp, and write the golden ids of the host tests. Needs llama-cpp-python.

    ORACLE_PYTHON tests/gguf_differential.py blocks [--count N]
    ORACLE_PYTHON tests/gguf_differential.py tokens [--count N] [FILE.gguf...]
    ORACLE_PYTHON tests/gguf_differential.py golden --out tests/golden_gguf_tokenizers.json

`blocks` dequantises random blocks of every type with ggml's C and with this package. `tokens` encodes random texts with
llama.cpp and with the tokenizer.json that this package writes, for every pre-tokenizer it knows and for real files.
Both print what differs and end with status 1 if anything does.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import pathlib
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import llama_cpp  # noqa: E402

from tests.gguf_vocab import USER_DEFINED, metadata, retyped, tiny_bytes, tiny_pieces  # noqa: E402
from tests.gguf_writer import gguf  # noqa: E402
from tests.quant_blocks import SCALES_AT, blocks  # noqa: E402
from tests.support import load_json, shared  # noqa: E402
from tlaloc_serve.artifact.tokenizer import Tokenizer  # noqa: E402
from tlaloc_serve.export.dequantise import dequantise  # noqa: E402
from tlaloc_serve.export.gguf import BLOCKS, GgufFile  # noqa: E402
from tlaloc_serve.export.gguf_tokenizer import _PRE, gguf_frontend  # noqa: E402

TEXTS = [
    "", "Hello world", " leading and trailing ", "two  spaces, three   spaces\n\n\ttab\r\n", "It's I'LL don't we've",
    "1234567 and 12,345.678", "x\u00b2 \u00bd \u2167 \u0663\u0664\u0665", "\u00e9 \u00c9 e\u0301 \u00df \ufb01",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u041c\u0418\u0420",
    "\u4e2d\u6587\u5b57\u7b26 \u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e",
    "\U0001f642\U0001f44d\U0001f3fd\u200d\u2764\ufe0f",
    "a\u00a0b\u3000c\u0085d", "<|im_start|>user\nhi<|im_end|>", "<s>a</s> b<unk>c", "aaaaaaaaaa ababababab     ",
    "def f(x):\n    return x**2  # comment", "\x00\x01\x1c", "\u2581\u2581 a\u2581b", "<0x0A><0xE4>",
    "The capital of France is", "?!...---==>", "i\u2019m na\u00efve \u2014 \u201cquoted\u201d",
    "mixedCASEWords snake_case camelCase",
    "the user's  the chat   the</s> the chat<|im_start|>abab ab a 123 1234", "x =   12",
    " is\u00e1\u0420\u041fthe \u0438\u0441B\u0438\u0416 aa\u00c9\u4e2d\u00c0",  # cases of other scripts within a word
]  # fmt: skip
CASES = {
    "llama-bpe": ("llama3_style", "llama-bpe"), "qwen2": ("qwen2_style", "qwen2"), "smollm": ("smollm2", "smollm"),
    "gpt-2": ("smollm2", "gpt-2"), "smaug-bpe": ("llama3_style", "smaug-bpe"), "tekken": ("llama3_style", "tekken"),
    "spm": ("llama2_style", None), "spm-no-prefix": ("llama2_style", None), "tiny bytes": ("tiny", "smollm"),
    "tiny pieces": ("tiny", None),
}  # fmt: skip
_SHELL = {
    "general.architecture": "llama", "llama.context_length": 512, "llama.embedding_length": 64, "llama.block_count": 1,
    "llama.feed_forward_length": 64, "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
}  # fmt: skip


class Oracle:
    """llama.cpp's tokenizer for a GGUF file."""

    def __init__(self, path: str):
        self.model = llama_cpp.Llama(path, vocab_only=True, verbose=False)
        self.vocab = self.model._model.vocab

    def encode(self, text: str, special: bool) -> list[int]:
        return list(self.model.tokenize(text.encode(), add_bos=special, special=special))

    def ends(self) -> list[int]:
        count = llama_cpp.llama_vocab_n_tokens(self.vocab)
        return [token for token in range(count) if llama_cpp.llama_vocab_is_eog(self.vocab, token)]

    def adds_bos(self) -> bool:
        return bool(llama_cpp.llama_vocab_get_add_bos(self.vocab))


def case_metadata(name: str) -> dict[str, Any]:
    folder, pre = CASES[name]
    if folder == "tiny":
        source, token = (tiny_pieces(), "chat") if pre is None else (tiny_bytes(), "user")
        return retyped(metadata(source, pre), token, USER_DEFINED)
    more = {"add_space_prefix": False} if name == "spm-no-prefix" else {}
    return metadata(load_json(shared("checkpoints", "tokenizers", folder, "tokenizer.json")), pre, **more)


def golden(out: str) -> None:
    cases = {}
    for name, (folder, pre) in CASES.items():
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            file.write(gguf({**_SHELL, **case_metadata(name)}))
            file.flush()
            oracle = Oracle(file.name)
            plain, special = ([oracle.encode(text, kind) for text in TEXTS] for kind in (False, True))
        cases[name] = {"folder": folder, "pre": pre, "end": oracle.ends(), "add_bos": oracle.adds_bos(),
                       "plain": plain, "special": special}  # fmt: skip
    lines = [f"{json.dumps(name)}: {json.dumps(case, separators=(',', ':'))}" for name, case in cases.items()]
    text = f'{{\n"texts": {json.dumps(TEXTS)},\n"cases": {{\n' + ",\n".join(lines) + "\n}}\n"
    pathlib.Path(out).write_text(text, encoding="utf-8")


def random_texts(count: int) -> Iterator[str]:
    rng = random.Random(count)
    parts = [part for text in TEXTS for part in (text, *text.split(" "), *text)] + [" ", "  ", "\n"]
    for _ in range(count):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(1, 14)))
        if text:
            yield text


def tokens(count: int, files: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        source = load_json(shared("checkpoints", "tokenizers", "llama3_style", "tokenizer.json"))
        named = {pre: metadata(source, pre) for pre in _PRE}
        named.update((name, case_metadata(name)) for name in CASES)
        for name, values in named.items():
            files.append(os.path.join(folder, f"{name}.gguf"))
            pathlib.Path(files[-1]).write_bytes(gguf({**_SHELL, **values}))
        return sum(differences(path, count) for path in files)


def differences(path: str, count: int) -> int:
    with GgufFile.open(path) as file:
        frontend = gguf_frontend(file.metadata, path)
    tokenizer, oracle = Tokenizer.from_bytes(frontend.tokenizer or b"", path), Oracle(path)
    wrong = int(sorted(frontend.eos_token_ids) != oracle.ends()) + int(frontend.add_bos != oracle.adds_bos())
    shown = 0
    for text in random_texts(count):
        for special in (False, True):
            want, got = oracle.encode(text, special), tokenizer.encode(text, add_special=special, parse_special=special)
            wrong += want != got
            if want != got and shown < 3:
                shown += 1
                print(f"  {text!r}: llama.cpp {want}, here {got}")
    print(f"{os.path.basename(path)}: {wrong} differ")
    return wrong


def ggml_rows() -> dict[str, Callable[[bytes], bytes]]:
    library = ctypes.CDLL(os.path.join(os.path.dirname(llama_cpp.__file__), "lib", "libggml-base.so"))

    def rows(name: str) -> Callable[[bytes], bytes]:
        function = getattr(library, "dequantize_row_" + name.lower().replace("_k", "_K"))
        function.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64]

        def dequantised(data: bytes) -> bytes:
            count = len(data) // BLOCKS[name][1] * BLOCKS[name][0]
            out = ctypes.create_string_buffer(4 * count)
            function(data, out, count)
            return out.raw

        return dequantised

    return {name: rows(name) for name in SCALES_AT}


def compare_blocks(count: int) -> int:
    wrong = 0
    for name, oracle in ggml_rows().items():
        for kind in ("any", "tiny", "zero", "few"):
            data = blocks(name, kind, count)
            same = b"".join(dequantise(name, data, "f32")) == oracle(data)
            wrong += not same
            print(f"{name} {kind}: {'same' if same else 'DIFFERS'}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("blocks", "tokens", "golden"))
    parser.add_argument("files", nargs="*")
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--out", default="golden_gguf_tokenizers.json")
    given = parser.parse_intermixed_args()
    if given.what == "golden":
        golden(given.out)
        return 0
    return min(1, compare_blocks(given.count) if given.what == "blocks" else tokens(given.count, given.files))


if __name__ == "__main__":
    sys.exit(main())
