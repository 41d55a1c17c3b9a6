"""Compare the tokenizer with the `tokenizers` package over many generated texts and id lists.

Two steps, so that the second runs on a bare interpreter of any version:

    ORACLE_PYTHON tests/tokenizer_differential.py ask --out DIR [--count 20000] [--seed 1] FILE...
    python3 tests/tokenizer_differential.py check DIR
    ORACLE_PYTHON tests/tokenizer_differential.py golden --out FILE BYTE_LEVEL_FILE BYTE_FALLBACK_FILE

`ask` needs the `tokenizers` package. For each tokenizer.json, and for variants of it that set flags and components the
file itself does not use, it writes DIR/NAME.jsonl: the file, then one case a line with the package's answer. `check`
answers the same cases with `tlaloc_serve` and prints what differs; exit status 1 if anything does. Texts with code
points that the checking interpreter's Unicode database does not know are counted apart where a class decides the cuts.
`golden` writes the package's answers over the variants of two files cut down to a few merges, for the host tests.
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import random
import sys
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from tlaloc_serve.artifact.text.bpe import BYTE_ALPHABET  # noqa: E402
from tlaloc_serve.artifact.text.normalize import build_normalizer  # noqa: E402
from tlaloc_serve.artifact.text.pretokenize import PATTERNS, build_pretokenizer  # noqa: E402
from tlaloc_serve.artifact.tokenizer import Tokenizer  # noqa: E402

WORDS = """
    the of and to in is you that it he was for on are as with his they I at be this have from or one had by word but
    not what all were we when your can said there use an each which she do how their if will up other about out many
    don't it's they're I'VE we'll you'd I'm x'S 'T it\u2019s rock'n'roll O'Neill 1234567 3.14159 2\u00bd \u0663\u0664
    self.x foo_bar camelCase HTTPServer x==y a->b // /* */ <html> {"k": [1, 2]} e\u0301 \u00e9 \u212b \u1e9b\u0323
    \u4e16\u754c \u6771\u4eac \uc548\ub155 \u0645\u0631\u062d\u0628\u0627 \u043c\u0438\u0440 \u0939\u093f\u0928\u094d
    \U0001f600 \U0001f469\u200d\U0001f4bb \u2581 \u2581\u2581x \u0120 <0x41> <unk> <s> </s> '\u017f \ufb01 \u0130
""".split()  # noqa: SIM905
SPACES = [
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    " \n",
    "\n ",
    "\u00a0",
    "\u3000",
    "\u2028",
    "\x85",
    "\x1c",
    "\x1f",
    "\u200b",
    "\ufeff",
    "\x0b",
    "\x0c",
    " " * 9,
    "\t\t \n \n",
]


def texts(rng: random.Random, count: int, special: list[str], longest: int) -> Iterator[str]:
    """`count` texts or a few more: blocks of Unicode, scripts mixed, white space, special tokens, long words."""
    yield from ["", *SPACES, *WORDS, *special]
    for length in (1000, 5000, longest):
        yield "a" * length
        yield "".join(rng.choice("etaoinshrdlu") for _ in range(length))
        yield "".join(rng.choice("\u4e00\u754c\u00e9z\U0001f600") for _ in range(length))
        yield " " * length + "x"
        yield "1234567890" * (length // 10)
    planes = [*range(0xD800), *range(0xE000, 0x32400), *range(0xE0000, 0xE0200), 0xF0000, 0x10FFFF]
    for start in range(0, len(planes), 128):
        block = [chr(code) for code in planes[start : start + 128]]
        yield "".join(block)
        yield " ".join(block)
        yield "a".join(rng.sample(block, min(24, len(block))))
    chars = [chr(code) for code in planes if unicodedata.category(chr(code)) not in ("Cn", "Co")]
    marks = [char for char in chars if unicodedata.combining(char)]
    bases = [char for char in chars if unicodedata.decomposition(char)]
    for _ in range(count):
        yield _mixed(rng, chars, marks, bases, special)


def _mixed(rng: random.Random, chars: list[str], marks: list[str], bases: list[str], special: list[str]) -> str:
    parts = []
    for _ in range(rng.randint(1, 14)):
        kind = rng.random()
        if kind < 0.40:
            parts.append(rng.choice(WORDS))
        elif kind < 0.68:
            parts.append(rng.choice(SPACES))
        elif kind < 0.78:
            parts.append("".join(rng.choice(chars) for _ in range(rng.randint(1, 5))))
        elif kind < 0.86:
            base = unicodedata.normalize("NFD", rng.choice(bases)) if rng.random() < 0.5 else rng.choice("aeoxN")
            parts.append(base + "".join(rng.choice(marks) for _ in range(rng.randint(0, 4))))
        elif kind < 0.92:
            parts.append("".join(chr(rng.randint(0x20, 0x7E)) for _ in range(rng.randint(1, 12))))
        elif special and kind < 0.97:
            parts.append(rng.choice(special))
        else:
            parts.append(rng.choice("abcXYZ019'.,!?\n ") * rng.randint(1, 40))
    return "".join(parts)


def id_lists(rng: random.Random, count: int, size: int, byte_ids: list[int]) -> Iterator[list[int]]:
    """Random ids, some past the vocabulary, and runs of tokens that stand for single bytes, mostly not UTF-8."""
    for _ in range(count):
        ids = [rng.randrange(size + 3) for _ in range(rng.randint(0, 12))]
        for _ in range(rng.randint(0, 3)):
            at = rng.randint(0, len(ids))
            ids[at:at] = [rng.choice(byte_ids) for _ in range(rng.randint(1, 6))]
        yield ids


def variants(spec: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The file itself, and copies of it with flags and components that real files of these families use."""
    yield "plain", spec
    byte_level = "ByteLevel" in json.dumps(spec["pre_tokenizer"])
    added = copy.deepcopy(spec)
    words = ["<a>", "<a>b", "in", "Zq", "\u00e9", "[X Y]", "  ", "e\u0301"]
    for index, content in enumerate(words):
        if any(token["content"] == content for token in added["added_tokens"]) or content in added["model"]["vocab"]:
            continue
        new = len(added["model"]["vocab"]) + sum(
            token["content"] not in added["model"]["vocab"] for token in added["added_tokens"]
        )
        added["added_tokens"].append(
            {
                "id": new,
                "content": content,
                "special": index == 0,
                "normalized": index % 3 == 1,
                "single_word": index in (2, 3),
                "lstrip": index in (0, 4),
                "rstrip": index in (1, 4),
            }
        )
    yield "added", added
    flags = copy.deepcopy(added)
    for index, token in enumerate(flags["added_tokens"]):
        token.update(lstrip=index % 2 == 0, rstrip=index % 3 == 0, normalized=index % 4 < 2, single_word=index % 5 == 0)
    yield "flags", flags
    if byte_level:
        for name, pre in _byte_level_pretokenizers():
            yield name, {**spec, "pre_tokenizer": pre}
        return
    for scheme in ("always", "first", "never"):
        for split in (True, False):
            mark = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": scheme, "split": split}
            yield (
                f"metaspace-{scheme}-{split}",
                {**added, "normalizer": None, "pre_tokenizer": mark, "decoder": {**mark}},
            )
    for behavior in ("Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"):
        for invert in (False, True):
            pre = {"type": "Split", "pattern": {"String": "\u2581"}, "behavior": behavior, "invert": invert}
            yield f"split-{behavior}-{invert}", {**spec, "pre_tokenizer": pre}
    for name, drop in (("unknown", ["\u754c", "e"]), ("no-byte", ["<0xE4>", "\u2581"])):
        for fuse in (True, False):
            lossy = copy.deepcopy(spec)
            for token in drop:
                lossy["model"]["vocab"].pop(token, None)
            vocab = lossy["model"]["vocab"]
            lossy["model"]["merges"] = [
                pair
                for pair in lossy["model"]["merges"]
                if all(part in vocab for part in (*_pair(pair), "".join(_pair(pair))))
            ]
            lossy["model"].update(fuse_unk=fuse, byte_fallback=name == "no-byte")
            lossy["added_tokens"] = []
            lossy["post_processor"] = None
            yield f"{name}-{fuse}", lossy


def _pair(merge: str | list[str]) -> list[str]:
    return merge.split(" ") if isinstance(merge, str) else merge


def _byte_level_pretokenizers() -> Iterator[tuple[str, dict[str, Any]]]:
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    for pattern, name in PATTERNS.items():
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        yield name, {"type": "Sequence", "pretokenizers": [split, last]}
        removed = {**split, "behavior": "Removed", "invert": True}
        yield name + "-removed", {"type": "Sequence", "pretokenizers": [removed, last]}
    for single in (True, False):
        digits = {"type": "Digits", "individual_digits": single}
        whole = {**last, "use_regex": True, "add_prefix_space": single}
        yield f"digits-{single}", {"type": "Sequence", "pretokenizers": [digits, whole]}


GOLDEN_TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  the  in in  inn",
    "I'll DON'T it's 'S '\u017f",
    "x1234567 12 \u0663\u00bd",
    "\n\n \n\tx\r\n ",
    "a\u0301 e\u0301 \u212b \u1e9b\u0323",
    "\u4e16\u754c \u754c",
    "<a> <a>b<a>",
    "Zq Zqs  Zq ",
    "\U0001f600\U0001f469\u200d\U0001f4bb",
    "<s>x</s> <unk>",
    "\u2581x\u2581\u2581 y",
    "[X Y] [X Y]",
    "tail  ",
    "HTTPServer fooBar",
    "\x1c\x1f\x85\u00a0\u3000x",
    "<0x41>",
    "e e ee \u00e9\u00e9",
    "a\u0898\u0301b",
    "\U00011935\U00011930",
    "<|endoftext|> in<|im_end|>",
]


def golden(out: pathlib.Path, files: list[str]) -> None:
    """Write small tokenizers and the package's answers over `GOLDEN_TEXTS`."""
    import tokenizers

    models: dict[str, Any] = {}
    cases: list[dict[str, Any]] = []
    for file in files:
        for name, spec in variants(_cut_down(json.loads(pathlib.Path(file).read_text(encoding="utf-8")))):
            oracle = tokenizers.Tokenizer.from_str(json.dumps(spec))
            model = json.dumps(spec["model"], sort_keys=True)
            key = next((known for known, value in models.items() if value == model), f"model{len(models)}")
            models[key] = model
            answers = [_encode_case(oracle, text) for text in GOLDEN_TEXTS]
            for answer in answers:
                answer.pop("pieces", None)
            rest = {field: value for field, value in spec.items() if field != "model"}
            cases.append({"name": name, "model": key, "file": rest, "answers": answers})
    parsed = {key: json.loads(value) for key, value in models.items()}
    lines = ",\n".join(json.dumps(case, sort_keys=True) for case in cases)
    out.write_text(f'{{"models": {json.dumps(parsed, sort_keys=True)},\n"cases": [\n{lines}\n]}}\n', encoding="ascii")


def _cut_down(spec: dict[str, Any]) -> dict[str, Any]:
    """The same tokenizer with its alphabet, its byte tokens and its first few merges only."""
    model = spec["model"]
    model["merges"] = model["merges"][:60]
    made = ["".join(_pair(pair)) for pair in model["merges"]]
    keep = [token for token in model["vocab"] if len(token) == 1 or token.startswith("<")]
    keep += [token for token in made if token not in keep]
    model["vocab"] = {token: index for index, token in enumerate(keep)}
    fresh = len(keep)
    for token in spec["added_tokens"]:
        token["id"] = model["vocab"].get(token["content"], fresh)
        fresh += token["id"] == fresh
    return spec


def ask(files: list[str], out: pathlib.Path, count: int, seed: int) -> None:
    """Write the package's answers."""
    import tokenizers

    out.mkdir(parents=True, exist_ok=True)
    for file in files:
        spec = json.loads(pathlib.Path(file).read_text(encoding="utf-8"))
        name = pathlib.Path(file).parent.name
        for variant, changed in variants(spec):
            path = out / f"{name}.{variant}.jsonl"
            if variant == "plain":
                _ask_one(tokenizers, changed, path, count, 100_000, seed)
            else:
                _ask_one(tokenizers, changed, path, count // 10, 2000, seed)


def _ask_one(tokenizers: Any, spec: dict[str, Any], path: pathlib.Path, count: int, longest: int, seed: int) -> None:
    rng = random.Random(seed)
    text = json.dumps(spec)
    oracle = tokenizers.Tokenizer.from_str(text)
    special = [token["content"] for token in spec["added_tokens"]]
    with path.open("w", encoding="ascii") as out:
        print(json.dumps({"tokenizers": tokenizers.__version__, "file": text}), file=out)
        for sample in texts(rng, count, special, longest):
            try:
                case = _encode_case(oracle, sample)
            except BaseException as error:  # a panic of the package is not an Exception
                if type(error).__name__ != "PanicException":
                    raise
                continue
            print(json.dumps(case), file=out)
        bytes_ = [token for token in (oracle.token_to_id(f"<0x{b:02X}>") for b in range(256)) if token is not None]
        size = oracle.get_vocab_size()
        for ids in id_lists(rng, count // 2, size, bytes_ or list(range(min(size, 300)))):
            case = {
                "decode": ids,
                "decoded": oracle.decode(ids, skip_special_tokens=False),
                "skipped": oracle.decode(ids),
            }
            print(json.dumps(case), file=out)


def _encode_case(oracle: Any, sample: str) -> dict[str, Any]:
    oracle.encode_special_tokens = False
    case: dict[str, Any] = {"text": sample, "parsed": oracle.encode(sample).ids}
    oracle.encode_special_tokens = True
    case["ids"] = oracle.encode(sample, add_special_tokens=False).ids
    case["decoded"] = oracle.decode(case["parsed"], skip_special_tokens=False)
    case["skipped"] = oracle.decode(case["parsed"])
    if oracle.pre_tokenizer is not None:
        plain = oracle.normalizer.normalize_str(sample) if oracle.normalizer else sample
        case["pieces"] = [piece for piece, _ in oracle.pre_tokenizer.pre_tokenize_str(plain)]
    return case


def check(folder: pathlib.Path, show: int) -> int:
    """Answer the cases, print a line a file, and say how many differ."""
    differing = 0
    for path in sorted(folder.glob("*.jsonl")):
        with path.open(encoding="ascii") as lines:
            file = json.loads(next(lines))["file"]
            tokenizer = Tokenizer.from_bytes(file.encode(), path.name)
            cut = _cutter(json.loads(file))
            count = newer = wrong = 0
            for line in lines:
                case = json.loads(line)
                count += 1
                difference = _compare(tokenizer, cut, case)
                if not difference:
                    continue
                if "text" in case and tokenizer.unassigned(case["text"]):
                    newer += 1
                    continue
                wrong += 1
                if wrong <= show:
                    print(f"{path.name}: {difference}")
        print(
            f"{path.name}: {count} cases, {wrong} differ, {newer} differ and hold code points unknown to Unicode "
            f"{unicodedata.unidata_version}",
            flush=True,
        )
        differing += wrong
    return differing


def _cutter(spec: dict[str, Any]) -> Callable[[str], list[str]]:
    """Text -> the pieces that the normalizer and the pre-tokenizer of a file make of it."""
    normalizer = build_normalizer("normalizer", spec["normalizer"])
    pretokenizer = build_pretokenizer("pre_tokenizer", spec["pre_tokenizer"], shifted=normalizer.shifts)

    def cut(text: str) -> list[str]:
        pieces = pretokenizer.pieces(normalizer.apply(text), True)
        if pretokenizer.byte_level:
            return [piece.encode("utf-8").decode("latin-1").translate(BYTE_ALPHABET) for piece in pieces]
        return pieces

    return cut


def _compare(tokenizer: Tokenizer, cut: Callable[[str], list[str]], case: dict[str, Any]) -> str:
    """What differs, or nothing."""
    answers: dict[str, Any] = {}
    if "text" in case:
        answers["parsed"] = tokenizer.encode(case["text"], parse_special=True)
        answers["ids"] = tokenizer.encode(case["text"], add_special=False)
    if case.get("pieces"):
        answers["pieces"] = cut(case["text"])
    ids = case.get("decode", case.get("parsed"))
    answers["decoded"] = tokenizer.decode(ids, skip_special=False)
    answers["skipped"] = tokenizer.decode(ids)
    for key, got in answers.items():
        if got != case[key]:
            source = ascii(case.get("text", ids))
            return f"{key} of {source[:200]}: got {ascii(got)[:200]}, want {ascii(case[key])[:200]}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    asking = commands.add_parser("ask", help="write the answers of the tokenizers package")
    asking.add_argument("files", nargs="+", metavar="FILE", help="a tokenizer.json")
    asking.add_argument("--out", required=True, type=pathlib.Path)
    asking.add_argument("--count", type=int, default=20_000, help="random texts for each file (a tenth for variants)")
    asking.add_argument("--seed", type=int, default=1)
    checking = commands.add_parser("check", help="compare tlaloc_serve with the answers")
    checking.add_argument("folder", type=pathlib.Path)
    checking.add_argument("--show", type=int, default=5, help="differences to print for each file")
    writing = commands.add_parser("golden", help="write the small golden file of the host tests")
    writing.add_argument("files", nargs=2, metavar="FILE")
    writing.add_argument("--out", required=True, type=pathlib.Path)
    options = parser.parse_args()
    if options.command == "golden":
        golden(options.out, options.files)
        return 0
    if options.command == "ask":
        ask(options.files, options.out, options.count, options.seed)
        return 0
    return 1 if check(options.folder, options.show) else 0


if __name__ == "__main__":
    sys.exit(main())
