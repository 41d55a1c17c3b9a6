"""The manifest's JSON text to `Manifest`. Pure: no file is opened here.

Strict where it matters and deaf where it must be: a key that is needed and missing, of the wrong type or out of
range is an `ArtifactError` that names it; a key nobody knows is ignored, because later exporters add some. A key
given twice is refused, since two readers could disagree about which one counts. `validate.py` then checks that
the parts agree with each other.
"""

from __future__ import annotations

import json
import marshal
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from tlaloc_serve.artifact.manifest import (
    DTYPE_BYTES,
    POOL_AXIS_ORDER,
    SCHEMA_PREFIX,
    SUPPORTED_SCHEMAS,
    UNIMPLEMENTED_SCHEMAS,
    Entry,
    Exporter,
    Frontend,
    Kind,
    Ladder,
    Manifest,
    Model,
    RefusedToken,
    Slot,
    TensorSource,
    TensorType,
    TokenizerFile,
    Weight,
    WindowedKv,
    tensor_type,
)
from tlaloc_serve.artifact.validate import validate
from tlaloc_serve.errors import ArtifactError

T = TypeVar("T")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 2**63 - 1  # what a PJRT dimension and a file offset can hold


class Record:
    """One JSON object with the path that leads to it, so that every refusal names the field."""

    def __init__(self, value: object, source: str, field: str):
        self.source = source
        self.field = field
        if not isinstance(value, dict):
            self.refuse("", "wrong type", got=_show(value), want="an object")
        self.values: dict[str, Any] = value

    def refuse(
        self, key: str, what: str, *, got: object = None, want: object = None, todo: str | None = None
    ) -> NoReturn:
        raise ArtifactError(self.source, self.at(key), what, got=got, want=want, todo=todo)

    def at(self, key: str) -> str:
        return f"{self.field}.{key}" if self.field and key else self.field or key

    def get(self, key: str) -> Any:
        if key not in self.values:
            self.refuse(key, "missing key")
        return self.values[key]

    def has(self, key: str) -> bool:
        """Whether an optional key is there with a value; null counts as absent."""
        return self.values.get(key) is not None

    def text(self, key: str, *, empty: bool = False) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            self.refuse(key, "wrong type", got=_show(value), want="a string")
        if not value and not empty:
            self.refuse(key, "empty string", want="text")
        return value

    def sha256(self, key: str) -> str:
        value = self.text(key)
        if not _SHA256.fullmatch(value):
            self.refuse(key, "not a SHA-256", got=_show(value), want="64 lower-case hex digits")
        return value

    def dtype(self, key: str) -> str:
        value = self.text(key)
        if value not in DTYPE_BYTES:
            self.refuse(key, "unknown dtype", got=_show(value), want=f"one of {' '.join(DTYPE_BYTES)}")
        return value

    def integer(self, key: str, least: int = 0) -> int:
        return self._integer(self.get(key), key, least)

    def integers(self, key: str, least: int = 0) -> tuple[int, ...]:
        return tuple(self._integer(item, f"{key}[{i}]", least) for i, item in enumerate(self.items(key)))

    def number(self, key: str) -> float:
        value = self.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
            self.refuse(key, "wrong type", got=_show(value), want="a number, at least 0")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if not isinstance(value, bool):
            self.refuse(key, "wrong type", got=_show(value), want="true or false")
        return value

    def items(self, key: str) -> list[Any]:
        value = self.get(key)
        if not isinstance(value, list):
            self.refuse(key, "wrong type", got=_show(value), want="a list")
        return value

    def record(self, key: str) -> Record:
        return Record(self.get(key), self.source, self.at(key))

    def records(self, key: str) -> list[Record]:
        return [Record(item, self.source, f"{self.at(key)}[{i}]") for i, item in enumerate(self.items(key))]

    def optional(self, key: str, read: Callable[[str], T]) -> T | None:
        return read(key) if self.has(key) else None

    def _integer(self, value: object, key: str, least: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            self.refuse(key, "wrong type", got=_show(value), want="an integer")
        if not least <= value <= _LARGEST:
            self.refuse(key, "out of range", got=value, want=f"at least {least}")
        return value


def _show(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= 60 else text[:57] + "..."


def load_object(data: bytes, source: str) -> Record:
    """`data` as one JSON object. Raises ArtifactError for anything that two JSON readers could read differently."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(items)
        if len(values) != len(items):
            keys = [key for key, _ in items]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ArtifactError(source, twice, "the key is there twice in one object")
        return values

    def constant(name: str) -> NoReturn:
        raise ArtifactError(source, "", "not JSON", got=name, want="a finite number")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except UnicodeDecodeError as error:
        raise ArtifactError(source, "", "not UTF-8", got=f"byte 0x{data[error.start]:02x} at {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactError(source, "", f"not JSON: {error}", todo="was the file cut short? Export it again") from None
    return Record(value, source, "")


def parse_manifest(data: bytes, source: str) -> Manifest:
    """Parse and validate a manifest. `source` is its path, for messages. Raises ArtifactError naming the field."""
    top = load_object(data, source)
    schema = _schema(top)
    weights = top.record("weights")
    table = tuple(_weight(record) for record in weights.records("table")) if weights.has("table") else ()
    slots: dict[bytes, Slot] = {}
    manifest = Manifest(
        schema=schema,
        model_name=top.text("modelName"),
        model_hash=top.text("modelHash"),
        model=_model(top.record("model"), schema),
        ladder=_ladder(top.record("bucketLadder")),
        weights_format=_weights_format(weights, table),
        weights_path=weights.optional("path", weights.text),
        weights=table,
        entries=tuple(_entry(record, slots) for record in top.records("entries")),
        frontend=_frontend(top.record("frontend")) if top.has("frontend") else Frontend(),
        exporter=_exporter(top.record("exporter")) if top.has("exporter") else None,
    )
    validate(manifest, source)
    return manifest


def _schema(top: Record) -> int:
    version = top.text("schemaVersion")
    known = [f"{SCHEMA_PREFIX}{number}" for number in SUPPORTED_SCHEMAS]
    for number, what in UNIMPLEMENTED_SCHEMAS.items():
        if version == f"{SCHEMA_PREFIX}{number}":
            top.refuse(
                "schemaVersion",
                f"{version} adds {what}, which this runtime does not implement",
                want=f"one of {', '.join(known)}",
                todo="serve it with a newer runtime",
            )
    if version not in known:
        top.refuse("schemaVersion", "unknown version", got=_show(version), want=f"one of {', '.join(known)}")
    return int(version[len(SCHEMA_PREFIX) :])


def _model(record: Record, schema: int) -> Model:
    for key, what in (
        ("kvQuant", "a quantised KV pool"),
        ("linearState", "linear-attention state"),
        ("mtpDraftTokens", "speculative decoding"),
        ("cudaKernels", "custom CUDA kernels"),
    ):
        if record.values.get(key) not in (None, [], 0):
            record.refuse(key, f"{what} is not implemented", got=_show(record.values[key]), want="null or no such key")
    order = record.items("kvPoolAxisOrder")
    if order != list(POOL_AXIS_ORDER):
        record.refuse("kvPoolAxisOrder", "unknown pool layout", got=_show(order), want=_show(list(POOL_AXIS_ORDER)))
    if record.has("windowedKv") and schema < 3:
        record.refuse("windowedKv", f"a windowed pool needs {SCHEMA_PREFIX}3", got=f"{SCHEMA_PREFIX}{schema}")
    return Model(
        vocab_size=record.integer("vocabSize", 1),
        hidden_size=record.integer("hiddenSize", 1),
        num_heads=record.integer("numHeads", 1),
        num_kv_heads=record.integer("numKvHeads", 1),
        head_dim=record.integer("headDim", 1),
        num_layers=record.integer("numLayers", 1),
        num_blocks=record.integer("numBlocks", 1),
        block_size=record.integer("blockSize", 1),
        dtype=record.dtype("dtype"),
        kv_dtype=record.dtype("kvDtype"),
        kv_pool_dims=record.integers("kvPoolDims", 1),
        windowed_kv=_windowed(record.record("windowedKv")) if record.has("windowedKv") else None,
        refused_tokens=tuple(
            RefusedToken(token.integer("id"), token.text("configKey")) for token in record.records("refusedTokens")
        )
        if record.has("refusedTokens")
        else (),
    )


def _windowed(record: Record) -> WindowedKv:
    return WindowedKv(
        window=record.integer("window", 1),
        layers=record.integers("layers"),
        num_blocks=record.integer("numBlocks", 1),
        ring_pages=record.integer("ringPages", 1),
        kv_pool_dims=record.integers("kvPoolDims", 1),
    )


def _ladder(record: Record) -> Ladder:
    return Ladder(record.integer("blockSize", 1), record.integers("batch", 1), record.integers("context", 1))


def _weights_format(record: Record, table: tuple[Weight, ...]) -> str:
    name = record.text("format")
    if name not in ("embedded", "staged"):
        record.refuse("format", "unknown format", got=_show(name), want="embedded or staged")
    if record.flag("embedded") != (name == "embedded"):
        record.refuse("embedded", "disagrees with weights.format", got=_show(record.values["embedded"]), want=name)
    if (name == "embedded") != (not table):
        record.refuse("table", f"disagrees with weights.format {name}", got=f"{len(table)} weights")
    return name


def _weight(record: Record) -> Weight:
    return Weight(
        name=record.text("name"),
        path=record.text("path"),
        type=parse_type(record),
        byte_length=record.integer("byteLength", 1),
        sha256=record.sha256("sha256"),
        sources=tuple(
            TensorSource(
                part.text("file"),
                part.text("tensor"),
                part.integer("offset"),
                part.integer("byteLength"),
            )
            for part in record.records("sources")
        )
        if record.has("sources")
        else (),
        source_sha256=record.optional("sourceSha256", record.sha256),
        quantisation_error=record.optional("quantisationError", record.number),
    )


def _entry(record: Record, slots: dict[bytes, Slot]) -> Entry:
    kind = record.text("kind")
    if kind not in (Kind.DECODE, Kind.PREFILL):
        record.refuse("kind", "unknown kind", got=_show(kind), want="decode or prefill")
    pairs = []
    for i, pair in enumerate(record.items("donationPairs")):
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(index) is int for index in pair)):
            record.refuse(f"donationPairs[{i}]", "wrong type", got=_show(pair), want="[input index, output index]")
        pairs.append((pair[0], pair[1]))
    return Entry(
        kind=kind,
        batch=record.integer("batch", 1),
        context=record.integer("context", 1),
        tokens_per_seq=record.integer("tokensPerSeq", 1),
        max_blocks_per_seq=record.integer("maxBlocksPerSeq", 1),
        cache_key=record.text("cacheKey"),
        entry_point=record.text("entryPoint"),
        body_path=record.text("bodyPath"),
        body_hash=record.sha256("bodyHash"),
        program_path=record.text("programPath"),
        inputs=tuple(_slot(item, record, f"inputs[{i}]", slots) for i, item in enumerate(record.items("inputs"))),
        outputs=tuple(_slot(item, record, f"outputs[{i}]", slots) for i, item in enumerate(record.items("outputs"))),
        donation_pairs=tuple(pairs),
    )


def _slot(value: object, entry: Record, key: str, known: dict[bytes, Slot]) -> Slot:
    """One slot. `known` has those read before by their bytes: every entry repeats the same weights and pools."""
    same = _bytes_of(value)
    slot = known.get(same)
    if slot is None:
        record = Record(value, entry.source, entry.at(key))
        slot = known[same] = Slot(record.text("name"), record.text("role"), parse_type(record.record("type")))
    return slot


def parse_type(record: Record) -> TensorType:
    """A `{dtype, dims, axisNames}` object; axis names carry no meaning for a reader."""
    return tensor_type(record.dtype("dtype"), record.integers("dims", 1))


def _types(record: Record, key: str) -> tuple[TensorType, ...]:
    """A list of types, each distinct one read once."""
    known: dict[bytes, TensorType] = {}
    found = []
    for i, value in enumerate(record.items(key)):
        same = _bytes_of(value)
        if same not in known:
            known[same] = parse_type(Record(value, record.source, record.at(f"{key}[{i}]")))
        found.append(known[same])
    return tuple(found)


def _bytes_of(value: Any) -> bytes:
    """Bytes that two JSON values share only when they are the same; `==` would call true and 1 the same."""
    try:
        return marshal.dumps(value, 2)  # the version before objects that are shared look different
    except ValueError:
        return b"nested too deep, %d" % id(value)


def _frontend(record: Record) -> Frontend:
    tokenizer = None
    if record.has("tokenizer"):
        file = record.record("tokenizer")
        tokenizer = TokenizerFile(file.text("path"), file.integer("byteLength", 1), file.sha256("sha256"))
    return Frontend(
        tokenizer=tokenizer,
        bos_token_id=record.optional("bosTokenId", record.integer),
        add_bos=record.optional("addBos", record.flag),
        eos_token_ids=record.integers("eosTokenIds") if record.has("eosTokenIds") else (),
        chat_template=record.optional("chatTemplate", record.text),
        default_prompt=record.optional("defaultPrompt", record.text),
    )


def _exporter(record: Record) -> Exporter:
    return Exporter(record.text("name"), record.text("version"), record.optional("target", record.text))


def program_types(data: bytes, source: str) -> Mapping[str, Any]:
    """What a program file claims: `name`, `bodyHash`, `inputs` and `outputs` as TensorTypes."""
    record = load_object(data, source)
    mesh = record.text("meshRequirement")
    if mesh != "single-device":
        record.refuse("meshRequirement", "not implemented", got=_show(mesh), want="single-device")
    if record.items("shardingSpec"):
        record.refuse("shardingSpec", "sharding is not implemented", want="an empty list")
    return {
        "name": record.text("name"),
        "bodyHash": record.sha256("bodyHash"),
        "inputs": _types(record, "inputs"),
        "outputs": _types(record, "outputs"),
    }
