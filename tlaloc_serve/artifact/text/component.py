"""One JSON object of a tokenizer.json together with the place it stands, so that every refusal names both.

A field that is not known is refused: an option this package does not implement must not be passed over in silence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tlaloc_serve.errors import TokenizerError


@dataclass(frozen=True)
class Component:
    """`where` is file and path inside it (`tokenizer.json: decoder.decoders[0]`), `fields` the object itself."""

    where: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, where: str, value: object) -> Component:
        """Check that `value` is a JSON object. Raises TokenizerError."""
        if not isinstance(value, dict):
            raise TokenizerError(where, "not a JSON object", got=type(value).__name__)
        return cls(where, value)

    @property
    def type(self) -> str:
        return self.text("type")

    def refuse(self, what: str, *, got: object = None, want: object = None, todo: str | None = None) -> TokenizerError:
        """The error to raise about this component."""
        return TokenizerError(self.where, what, got=got, want=want, todo=todo)

    def only(self, *known: str) -> None:
        """Refuse a field that is neither `type` nor one of `known`."""
        for key in self.fields:
            if key != "type" and key not in known:
                raise self.refuse(f"field {key!r} of {self.fields.get('type', 'this object')} is not implemented")

    def text(self, key: str) -> str:
        value = self.fields.get(key)
        if not isinstance(value, str):
            raise self.refuse(f"field {key!r}", got=_show(value), want="a string")
        return value

    def character(self, key: str) -> str:
        value = self.text(key)
        if len(value) != 1:
            raise self.refuse(f"field {key!r}", got=repr(value), want="one character")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """A boolean; absent or null is `default`."""
        value = self.fields.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(f"field {key!r}", got=_show(value), want="true or false")
        return value

    def count(self, key: str) -> int:
        value = self.fields.get(key)
        if type(value) is not int or value < 0:
            raise self.refuse(f"field {key!r}", got=_show(value), want="an integer >= 0")
        return value

    def children(self, key: str) -> list[Component]:
        """A list of objects, each knowing its own place."""
        return components(f"{self.where}.{key}", self.fields.get(key))

    def pattern(self) -> tuple[str, str]:
        """`("String" | "Regex", text)` of a Split or Replace component."""
        value = self.fields.get("pattern")
        if isinstance(value, dict) and len(value) == 1:
            [(kind, text)] = value.items()
            if kind in ("String", "Regex") and isinstance(text, str) and text:
                return kind, text
        raise self.refuse("field 'pattern'", got=_show(value), want='{"String": text} or {"Regex": text}, not empty')


def components(where: str, value: object) -> list[Component]:
    """Check that `value` is a list of JSON objects. Raises TokenizerError."""
    if not isinstance(value, list):
        raise TokenizerError(where, "not a list", got=_show(value))
    return [Component.of(f"{where}[{i}]", item) for i, item in enumerate(value)]


def flatten(component: Component, key: str) -> list[Component]:
    """A component or, if it is a `Sequence`, its members under `key`, however deep they nest."""
    if component.type != "Sequence":
        return [component]
    component.only(key)
    return [leaf for child in component.children(key) for leaf in flatten(child, key)]


def _show(value: object) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
