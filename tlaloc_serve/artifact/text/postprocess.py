"""What the post-processor of a tokenizer.json puts around the ids of one text: TemplateProcessing, or nothing.

ByteLevel is accepted and does nothing: it moves offsets only, and this package gives ids without offsets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tlaloc_serve.artifact.text.component import Component, flatten


def build_template(where: str, value: object) -> Callable[[list[int]], list[int]]:
    """Ids of a text -> ids with the special tokens around it. Null adds none. Raises TokenizerError."""
    before: list[int] = []
    after: list[int] = []
    for component in [] if value is None else flatten(Component.of(where, value), "processors"):
        if component.type == "ByteLevel":
            component.only("add_prefix_space", "trim_offsets", "use_regex")
        elif component.type == "TemplateProcessing":
            component.only("single", "pair", "special_tokens")
            first, last = _single(component)
            before, after = first + before, after + last
        else:
            raise component.refuse(
                f"post-processor {component.type!r} is not implemented",
                want="Sequence, TemplateProcessing or ByteLevel",
            )
    return functools.partial(_around, before, after)


def _around(before: list[int], after: list[int], ids: list[int]) -> list[int]:
    return before + ids + after


def _single(component: Component) -> tuple[list[int], list[int]]:
    """The ids before and after sequence A in the template for one text."""
    tokens = Component.of(f"{component.where}.special_tokens", component.fields.get("special_tokens"))
    sides: list[list[int]] = [[]]
    for piece in component.children("single"):
        if set(piece.fields) == {"SpecialToken"}:
            name = Component.of(f"{piece.where}.SpecialToken", piece.fields["SpecialToken"]).text("id")
            sides[-1] += _ids(Component.of(f"{tokens.where}.{name}", tokens.fields.get(name)))
        elif set(piece.fields) == {"Sequence"}:
            if Component.of(f"{piece.where}.Sequence", piece.fields["Sequence"]).text("id") != "A":
                raise piece.refuse("the template for one text uses another sequence than A")
            sides.append([])
        else:
            raise piece.refuse("template piece", got=", ".join(piece.fields), want="SpecialToken or Sequence")
    if len(sides) != 2:
        raise component.refuse("sequence A in the template for one text", got=f"{len(sides) - 1} times", want="once")
    return sides[0], sides[1]


def _ids(special: Component) -> list[int]:
    ids = special.fields.get("ids")
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise special.refuse("field 'ids'", got=repr(ids), want="a list of ids")
    return ids
