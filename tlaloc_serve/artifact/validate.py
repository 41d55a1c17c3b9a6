"""Whether the parts of a parsed manifest agree with each other. Pure.

The shapes follow from the model, the ladder and the entry's (B = batch, C = context, T = tokens a sequence):

    TOKEN_IDS, POSITIONS             i32 [B, T]
    BLOCK_TABLES, WINDOW_...         i32 [B, C / blockSize]
    SEQ_LENS                         i32 [B]
    SLOT_MAPPING, WINDOW_...         i32 [B * T]
    KV_POOL_IN/OUT                   kvDtype [numBlocks, blockSize, numKvHeads, headDim], key then value a layer
    LOGITS                           f32, bf16 or f16 [B, 1, vocabSize]
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from tlaloc_serve.artifact.manifest import POOL_OUTPUT_OF, Entry, Kind, Manifest, Role, Slot, TensorType, tensor_type
from tlaloc_serve.errors import ArtifactError

# `b1`, `c64`, `t1`, `w8r3n13`, `dtf32`, `kvbf16`; other segments (names, hashes) say nothing that could be compared.
_CACHE_KEY_SEGMENT = re.compile(r"[bct]\d+|w\d+r\d+n\d+|(?:dt|kv)(?:f|bf|i|u)\d+")
_CACHE_KEY_PART = re.compile(r"(dt|kv|[bctwrn])((?:f|bf|i|u)?\d+)")


class _Checker:
    def __init__(self, manifest: Manifest, source: str):
        self.manifest = manifest
        self.source = source
        self.weights = {weight.name: weight.type for weight in manifest.weights}

    def refuse(
        self, field: str, what: str, *, got: object = None, want: object = None, todo: str | None = None
    ) -> NoReturn:
        raise ArtifactError(self.source, field, what, got=got, want=want, todo=todo)

    def equal(
        self, field: str, got: object, want: object, what: str = "disagrees with the rest of the manifest"
    ) -> None:
        if got != want:
            self.refuse(field, what, got=got, want=want)

    def model(self) -> None:
        model, ladder = self.manifest.model, self.manifest.ladder
        if model.num_heads % model.num_kv_heads:
            self.refuse(
                "model.numKvHeads",
                "does not divide numHeads",
                got=model.num_kv_heads,
                want=f"a divisor of {model.num_heads}",
            )
        dims = (model.num_blocks, model.block_size, model.num_kv_heads, model.head_dim)
        self.equal("model.kvPoolDims", model.kv_pool_dims, dims)
        if model.num_blocks < 2:
            self.refuse("model.numBlocks", "no page beside the scratch page", got=model.num_blocks, want="at least 2")
        for i, token in enumerate(model.refused_tokens):
            if token.id >= model.vocab_size:
                self.refuse(
                    f"model.refusedTokens[{i}].id",
                    "outside the vocabulary",
                    got=token.id,
                    want=f"below {model.vocab_size}",
                )
        self.equal("bucketLadder.blockSize", ladder.block_size, model.block_size)
        for name, rungs in (("batch", ladder.batch), ("context", ladder.context)):
            if not rungs or any(a >= b for a, b in zip(rungs, rungs[1:], strict=False)):
                self.refuse(f"bucketLadder.{name}", "not strictly ascending", got=list(rungs))
        for context in ladder.context:
            if context % ladder.block_size:
                self.refuse(
                    "bucketLadder.context",
                    "not a whole number of pages",
                    got=context,
                    want=f"a multiple of {ladder.block_size}",
                )
        if model.windowed_kv is not None:
            self.window()
        for name, ids in (
            ("eosTokenIds", self.manifest.frontend.eos_token_ids),
            ("bosTokenId", [i for i in (self.manifest.frontend.bos_token_id,) if i is not None]),
        ):
            for token_id in ids:
                if token_id >= model.vocab_size:
                    self.refuse(
                        f"frontend.{name}", "outside the vocabulary", got=token_id, want=f"below {model.vocab_size}"
                    )

    def window(self) -> None:
        model = self.manifest.model
        window = model.windowed_kv
        if window is None:
            return
        dims = (window.num_blocks, model.block_size, model.num_kv_heads, model.head_dim)
        self.equal("model.windowedKv.kvPoolDims", window.kv_pool_dims, dims)
        layers = window.layers
        if (
            not layers
            or any(a >= b for a, b in zip(layers, layers[1:], strict=False))
            or layers[-1] >= model.num_layers
        ):
            self.refuse(
                "model.windowedKv.layers",
                "not ascending layers of the model",
                got=list(layers),
                want=f"below {model.num_layers}",
            )
        if window.ring_pages * model.block_size < window.window:
            self.refuse(
                "model.windowedKv.ringPages",
                f"the ring is shorter than the window of {window.window} tokens",
                got=f"{window.ring_pages} pages x {model.block_size} = {window.ring_pages * model.block_size} tokens",
                want=f"at least {-(-window.window // model.block_size)} pages",
                todo="export it again with a longer ring",
            )
        if window.num_blocks < 1 + window.ring_pages:
            self.refuse(
                "model.windowedKv.numBlocks",
                "does not hold one ring and the scratch page",
                got=window.num_blocks,
                want=f"at least {1 + window.ring_pages}",
            )

    def table(self) -> None:
        for i, weight in enumerate(self.manifest.weights):
            field = f"weights.table[{i}]"
            self.equal(
                f"{field}.byteLength", weight.byte_length, weight.type.byte_length, f"is not the size of {weight.type}"
            )
        for what, names in (
            ("name", [weight.name for weight in self.manifest.weights]),
            ("path", [weight.path for weight in self.manifest.weights]),
        ):
            twice = _first_repeated(names)
            if twice is not None:
                self.refuse(f"weights.table[{names.index(twice)}].{what}", "is there twice", got=twice)

    def entries(self) -> None:
        manifest = self.manifest
        if not manifest.entries:
            self.refuse("entries", "no entry")
        if manifest.schema == 1 and manifest.of_kind(Kind.PREFILL):
            self.refuse("entries", "prefill entries need tlaloc-serving-v2", got=manifest.schema_version)
        for i, entry in enumerate(manifest.entries):
            self.entry(entry, f"entries[{i}]")
        twice = _first_repeated([entry.id for entry in manifest.entries])
        if twice is not None:
            self.refuse("entries", "a ladder point is there twice", got=twice)
        decode = {(entry.batch, entry.context) for entry in manifest.of_kind(Kind.DECODE)}
        for batch in manifest.ladder.batch:
            for context in manifest.ladder.context:
                if (batch, context) not in decode:
                    self.refuse("entries", "a ladder point without a decode entry", want=f"decode_b{batch}_c{context}")

    def entry(self, entry: Entry, field: str) -> None:
        ladder = self.manifest.ladder
        if entry.batch not in ladder.batch:
            self.refuse(f"{field}.batch", "not on the ladder", got=entry.batch, want=f"one of {list(ladder.batch)}")
        if entry.context not in ladder.context:
            self.refuse(
                f"{field}.context", "not on the ladder", got=entry.context, want=f"one of {list(ladder.context)}"
            )
        self.equal(f"{field}.maxBlocksPerSeq", entry.max_blocks_per_seq, entry.context // ladder.block_size)
        most = 1 if entry.kind == Kind.DECODE else entry.context
        if entry.tokens_per_seq > most:
            self.refuse(
                f"{field}.tokensPerSeq",
                f"too many for a {entry.kind} entry",
                got=entry.tokens_per_seq,
                want=f"at most {most}",
            )
        self.equal(f"{field}.entryPoint", entry.entry_point, "main", "PJRT runs the function `main` only")
        self.equal(f"{field}.bodyPath", entry.body_path, f"bodies/{entry.body_hash}.mlir", "is not named by bodyHash")
        self.cache_key(entry, field)
        self.inputs(entry, field)
        self.outputs(entry, field)
        self.donation(entry, field)

    def cache_key(self, entry: Entry, field: str) -> None:
        """The key repeats what the body was compiled for, the window among it, which no shape shows."""
        model = self.manifest.model
        wanted = {
            "b": entry.batch,
            "c": entry.context,
            "t": entry.tokens_per_seq,
            "dt": model.dtype,
            "kv": model.kv_dtype,
        }
        if model.windowed_kv is not None:
            wanted |= {
                "w": model.windowed_kv.window,
                "r": model.windowed_kv.ring_pages,
                "n": model.windowed_kv.num_blocks,
            }
        for segment in entry.cache_key.split("/"):
            for name, value in _CACHE_KEY_PART.findall(segment) if _CACHE_KEY_SEGMENT.fullmatch(segment) else ():
                if str(wanted.get(name, value)) != value:
                    self.refuse(f"{field}.cacheKey", f"`{name}` disagrees with the rest", got=value, want=wanted[name])

    def inputs(self, entry: Entry, field: str) -> None:
        model = self.manifest.model
        batch, tokens, blocks = entry.batch, entry.tokens_per_seq, entry.max_blocks_per_seq
        pool = tensor_type(model.kv_dtype, model.kv_pool_dims)
        want = {
            Role.TOKEN_IDS: (tensor_type("i32", (batch, tokens)), 1),
            Role.POSITIONS: (tensor_type("i32", (batch, tokens)), 1),
            Role.BLOCK_TABLES: (tensor_type("i32", (batch, blocks)), 1),
            Role.SEQ_LENS: (tensor_type("i32", (batch,)), 1),
            Role.SLOT_MAPPING: (tensor_type("i32", (batch * tokens,)), 1),
            Role.KV_POOL_IN: (pool, 2 * model.num_layers),
        }
        if model.windowed_kv is not None:
            window = model.windowed_kv
            want[Role.KV_POOL_IN] = (pool, 2 * (model.num_layers - len(window.layers)))
            want[Role.WINDOW_BLOCK_TABLES] = (tensor_type("i32", (batch, blocks)), 1)
            want[Role.WINDOW_SLOT_MAPPING] = (tensor_type("i32", (batch * tokens,)), 1)
            want[Role.WINDOW_KV_POOL_IN] = (tensor_type(model.kv_dtype, window.kv_pool_dims), 2 * len(window.layers))
        self.slots(entry.inputs, f"{field}.inputs", want)

    def outputs(self, entry: Entry, field: str) -> None:
        model = self.manifest.model
        logits = next((slot.type for slot in entry.outputs if slot.role == Role.LOGITS), None)
        if logits is not None and logits.dtype not in ("f32", "bf16", "f16"):
            self.refuse(f"{field}.outputs", "logits of an unknown kind", got=logits, want="f32, bf16 or f16")
        dtype = logits.dtype if logits is not None else "f32"
        pool = tensor_type(model.kv_dtype, model.kv_pool_dims)
        want = {
            Role.LOGITS: (tensor_type(dtype, (entry.batch, 1, model.vocab_size)), 1),
            Role.KV_POOL_OUT: (pool, 2 * model.num_layers),
        }
        if model.windowed_kv is not None:
            window = model.windowed_kv
            want[Role.KV_POOL_OUT] = (pool, 2 * (model.num_layers - len(window.layers)))
            want[Role.WINDOW_KV_POOL_OUT] = (tensor_type(model.kv_dtype, window.kv_pool_dims), 2 * len(window.layers))
        self.slots(entry.outputs, f"{field}.outputs", want)

    def slots(self, slots: Sequence[Slot], field: str, want: dict[str, tuple[TensorType, int]]) -> None:
        for i, slot in enumerate(slots):
            if slot.role == Role.WEIGHT and field.endswith("inputs"):
                if slot.name not in self.weights:
                    self.refuse(f"{field}[{i}].name", "no such weight in weights.table", got=slot.name)
                weight = self.weights[slot.name]
                if slot.type is not weight:
                    self.equal(f"{field}[{i}].type", slot.type, weight, f"disagrees with the weight {slot.name}")
            elif slot.role not in want:
                self.refuse(
                    f"{field}[{i}].role",
                    "not a role this entry can have",
                    got=slot.role,
                    want=f"one of {', '.join(want)}",
                )
            elif slot.type is not want[slot.role][0]:
                self.equal(f"{field}[{i}].type", slot.type, want[slot.role][0], f"wrong type for {slot.role}")
        counts = Counter(slot.role for slot in slots)
        for role, (_, number) in want.items():
            if counts[role] != number:
                self.refuse(field, f"wrong number of {role} slots", got=counts[role], want=number)
        twice = _first_repeated([slot.name for slot in slots])
        if twice is not None:
            self.refuse(field, "two slots of one name", got=twice)

    def donation(self, entry: Entry, field: str) -> None:
        field = f"{field}.donationPairs"
        for i, (source, target) in enumerate(entry.donation_pairs):
            if not (0 <= source < len(entry.inputs) and 0 <= target < len(entry.outputs)):
                self.refuse(f"{field}[{i}]", "no such slot", got=[source, target])
            wanted = POOL_OUTPUT_OF.get(entry.inputs[source].role)
            if wanted is None or entry.outputs[target].role != wanted:
                self.refuse(f"{field}[{i}]", "does not pair a pool with its own kind of output", got=[source, target])
        pools_in = [i for i, slot in enumerate(entry.inputs) if slot.role in POOL_OUTPUT_OF]
        pools_out = [i for i, slot in enumerate(entry.outputs) if slot.role != Role.LOGITS]
        pairs = list(zip(pools_in, pools_out, strict=True))
        # Pools go key then value, layers ascending, on both sides, so the n-th pool in is the n-th pool out.
        if sorted(entry.donation_pairs) != pairs:
            self.refuse(
                field, "does not pair every pool with its successor", got=sorted(entry.donation_pairs), want=pairs
            )


def validate(manifest: Manifest, source: str) -> None:
    """Check a parsed manifest against itself. Raises ArtifactError naming the first field that disagrees."""
    checker = _Checker(manifest, source)
    checker.model()
    checker.table()
    checker.entries()
    pools = {tuple((s.name, s.role) for s in entry.inputs if s.role in POOL_OUTPUT_OF) for entry in manifest.entries}
    if len(pools) > 1:
        checker.refuse("entries", "the entries do not share one list of pools")


def _first_repeated(names: list[str]) -> str | None:
    return next((name for name, count in Counter(names).items() if count > 1), None)
