"""A checkpoint of either kind, opened: its config, where each tensor is, and what a frontend needs.

Opening reads headers and small files only, and the frontend's files not before they are asked for: a tokenizer takes
longer to read than all the rest. Tensors are named as transformers names them.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial

from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.config import ModelConfig, read_config
from tlaloc_serve.export.frontend import FrontendFiles, read_frontend
from tlaloc_serve.export.hlo import round_f32
from tlaloc_serve.export.jsonfile import read_json_object
from tlaloc_serve.export.layout import EMBED, HEAD
from tlaloc_serve.export.safetensors import read_checkpoint
from tlaloc_serve.export.staging import Piece, same_bytes

_WEIGHT_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True)
class Checkpoint:
    """`where` is the folder or file, `source` says what it is in a few words, `tensors` is by transformers' names."""

    name: str
    where: str
    source: str
    config: ModelConfig
    tensors: dict[str, Piece]
    open_frontend: Callable[[], FrontendFiles]

    @cached_property
    def frontend(self) -> FrontendFiles:
        """The frontend's files, read when first asked for. Raises ExportError where one of them is damaged."""
        return self.open_frontend()


def open_checkpoint(path: str) -> Checkpoint:
    """Open a HuggingFace folder or a GGUF file. Raises ExportError naming the file and the reason."""
    given = pathlib.Path(path)
    if given.is_dir():
        return _open_folder(given)
    if not given.exists():
        raise ExportError(path, "no such checkpoint", want="a folder with config.json, or a .gguf file")
    return _open_gguf(given)


def _open_folder(folder: pathlib.Path) -> Checkpoint:
    config_path = folder / "config.json"
    if not config_path.exists():
        files = sorted(entry.name for entry in folder.glob("*.gguf"))
        todo = f"name the file: --checkpoint {folder / files[0]}" if files else "is this a checkpoint's folder?"
        raise ExportError(str(config_path), "no such file", todo=todo)
    document = read_json_object(config_path)
    config = read_config(document, str(config_path))
    tensors = {}
    for name, tensor in read_checkpoint(folder).items():
        tensors[name] = Piece(tensor.path, name, tensor.dtype, tensor.dims, tensor.offset, tensor.byte_length)
    return Checkpoint(
        name=folder.resolve().name,
        where=str(folder),
        source="safetensors",
        config=config,
        tensors=tensors,
        open_frontend=partial(read_frontend, folder, document, config.vocab_size),
    )


def _open_gguf(path: pathlib.Path) -> Checkpoint:
    # Here, because a safetensors checkpoint needs none of these: they are a twentieth of what its export takes.
    from tlaloc_serve.export.gguf import GgufFile
    from tlaloc_serve.export.gguf_model import model_config, model_pieces, rope_divisors
    from tlaloc_serve.export.gguf_tokenizer import gguf_frontend

    where = str(path)
    with GgufFile.open(path) as file:
        config = read_config(model_config(file), where)
        divisors = rope_divisors(file, config.head_dim)
        if divisors is not None:
            turned = tuple(round_f32(a / b) for a, b in zip(config.inverse_frequencies, divisors, strict=True))
            config = replace(config, inverse_frequencies=turned)
        return Checkpoint(
            name=path.resolve().stem,
            where=where,
            source="GGUF",
            config=config,
            tensors=model_pieces(file),
            open_frontend=partial(gguf_frontend, file.metadata, where),
        )


def check_pieces(checkpoint: Checkpoint, names: list[str]) -> None:
    """Refuse tensors among `names` that cannot become weights, and a stored head that a tied one contradicts."""
    for name in names:
        piece = checkpoint.tensors[name]
        if checkpoint.source == "safetensors" and piece.type_name not in _WEIGHT_DTYPES:
            raise ExportError(
                f"{piece.path}: {name}",
                "dtype not supported for a weight",
                got=piece.type_name,
                want=" or ".join(_WEIGHT_DTYPES),
            )
    if HEAD in checkpoint.tensors and HEAD not in names:
        head, embed = checkpoint.tensors[HEAD], checkpoint.tensors[EMBED]
        if not same_bytes(head, embed):
            raise ExportError(
                f"{head.path}: {HEAD}",
                f"differs from {EMBED}, and tie_word_embeddings is true",
                todo="set tie_word_embeddings to false if the head is meant to be used",
            )
