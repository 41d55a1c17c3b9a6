"""Rotary position embedding: a checkpoint's spelling of it, and the inverse frequencies that follow.

Three keys have carried it over the years: `rope_theta` beside `rope_scaling` ({"type": ...}, later {"rope_type": ...})
and `rope_parameters` with everything inside, perhaps once a layer type. They may stand side by side as long as they
agree. Default, linear and llama3 scaling are folded into the inverse frequencies; every other kind, and every key of
a kind that is not known here, is refused by name, because it would change the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tlaloc_serve.errors import ExportError
from tlaloc_serve.export.hlo import round_f32

_KEYS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# Keys that may stand in any kind as long as they have this value, which changes nothing.
_NEUTRAL = {"partial_rotary_factor": 1.0}
DEFAULT_THETA = 10000.0


def read_rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """One flat description from a config: `rope_type`, `rope_theta` and the numbers of that type.

    Raises ExportError where two spellings disagree, and for a type or key that is not understood.
    """
    found: dict[str, tuple[Any, str]] = {}

    def put(key: str, value: Any, source: str) -> None:
        if key in found and found[key][0] != value:
            raise ExportError(f"{where}: {source}", f"disagrees with {found[key][1]}", got=value, want=found[key][0])
        found[key] = (value, source)

    for outer in ("rope_parameters", "rope_scaling"):
        for name, group in _groups(config.get(outer), f"{where}: {outer}"):
            for key, value in group.items():
                if value is not None:
                    put("rope_type" if key == "type" else key, value, f"{outer}{name}.{key}")
    if config.get("rope_theta") is not None:
        put("rope_theta", config["rope_theta"], "rope_theta")
    values = {key: value for key, (value, _) in found.items()}
    if values.get("rope_type") == "llama3" and "original_max_position_embeddings" not in values:
        for key in ("original_max_position_embeddings", "max_position_embeddings"):
            if config.get(key) is not None:
                values["original_max_position_embeddings"] = config[key]
                break
    return _checked(values, where)


def _groups(value: Any, where: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The dictionaries in a rope key: itself, or one a layer type."""
    if value is None:
        return []
    if not isinstance(value, dict):
        raise ExportError(where, "wrong type", got=type(value).__name__, want="an object or null")
    if value and all(isinstance(inner, dict) for inner in value.values()):
        return [(f".{name}", inner) for name, inner in value.items()]
    return [("", value)]


def _checked(values: dict[str, Any], where: str) -> dict[str, Any]:
    kind = values.setdefault("rope_type", "default")
    values.setdefault("rope_theta", DEFAULT_THETA)
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ExportError(f"{where}: rope_type", "not supported", got=kind, want=f"one of {', '.join(_KEYS)}")
    wanted = ("rope_theta", *_KEYS[kind])
    for key in wanted:
        if key not in values:
            raise ExportError(f"{where}: rope {key}", f"missing key of rope type {kind}")
        number = values[key]
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 < number < math.inf:
            raise ExportError(f"{where}: rope {key}", "not usable", got=repr(number), want="a positive number")
    for key, value in values.items():
        if key in _NEUTRAL and value == _NEUTRAL[key]:
            continue
        if key not in wanted and key != "rope_type":
            raise ExportError(f"{where}: rope {key}", f"not understood for rope type {kind}", got=repr(value))
    if kind == "llama3" and values["low_freq_factor"] >= values["high_freq_factor"]:
        raise ExportError(f"{where}: rope low_freq_factor", "not below high_freq_factor", got=values["low_freq_factor"])
    return {key: values[key] for key in ("rope_type", *wanted)}


def inverse_frequencies(rope: Mapping[str, Any], head_dim: int) -> tuple[float, ...]:
    """The head_dim / 2 angles a position in radians, each an f32.

    Rounded where transformers rounds (its tensors are f32, and a number over a tensor is the number times the
    reciprocal): at position 8000 one last place of f32 is 5e-4 radians. The llama3 formula is the one of
    `_compute_llama3_parameters` in transformers' modeling_rope_utils.
    """
    base = float(rope["rope_theta"])
    plain = [round_f32(1.0 / round_f32(base ** round_f32(index / head_dim))) for index in range(0, head_dim, 2)]
    if rope["rope_type"] == "linear":
        return tuple(round_f32(angle / rope["factor"]) for angle in plain)
    if rope["rope_type"] == "llama3":
        return tuple(_llama3(angle, rope) for angle in plain)
    return tuple(plain)


def _llama3(angle: float, rope: Mapping[str, Any]) -> float:
    """Slow the low frequencies by `factor`, keep the high ones, go from one to the other in between."""
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    wave = round_f32(round_f32(1 / angle) * round_f32(2 * math.pi))
    if wave > old / low:
        return round_f32(angle / rope["factor"])
    if wave < old / high:
        return angle
    turns = round_f32(round_f32(1 / wave) * old)
    smooth = round_f32(round_f32(turns - low) / (high - low))
    slowed = round_f32(round_f32(round_f32(1 - smooth) * angle) / rope["factor"])
    return round_f32(slowed + round_f32(smooth * angle))
