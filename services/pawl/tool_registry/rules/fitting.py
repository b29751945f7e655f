"""Makes arguments match a schema without losing information, by adding defaults and coercing values.

Models write "440" instead of 440, 5.0 instead of 5, "true" instead of true, or a string instead of a list. A value that
can be read in exactly one way is coerced, and the change is reported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Final

from pawl.chassis.strict_json import INTEGER_MAX, INTEGER_MIN, JsonValue, dumps_canonical, loads
from pawl.errors import InvalidJson, TooLarge
from pawl.tools.rules.pointers import resolve

_INTEGER: Final = re.compile(r"-?(?:0|[1-9][0-9]{0,19})", re.ASCII)
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,3})?", re.ASCII)
_EXACT_FLOAT: Final = 2.0**53
_NUMBER_CHARACTERS_MAX: Final = 40
_SHOWN_CHARACTERS_MAX: Final = 40
_TEXT_BYTES_MAX: Final = 256 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    value: JsonValue
    adjustments: tuple[str, ...]


def fit(schema: Mapping[str, Any], value: JsonValue, *, defaults: bool = True, coerce: bool = True) -> Fitted:
    """Return `value`, with the defaults added and, if `coerce` is set, with wrong types converted.

    Without `coerce`, only defaults are added to a valid value. This never raises. A value that does not match the
    schema is left unchanged, and the validator reports it.
    """
    walk = _Walk(root=schema, defaults=defaults, coerce=coerce)
    fitted = walk.visit(schema, value, "")
    return Fitted(value=fitted, adjustments=tuple(walk.adjustments))


@dataclass(slots=True, kw_only=True)
class _Walk:
    root: Mapping[str, Any]
    defaults: bool
    coerce: bool
    adjustments: list[str] = field(default_factory=list)

    def visit(self, schema: Any, value: JsonValue, path: str) -> JsonValue:
        schema = resolve(self.root, schema)
        if not isinstance(schema, dict):
            return value
        value = self._read(schema, value, path)
        for part in _list(schema, "allOf"):
            value = self.visit(part, value, path)
        for word in ("anyOf", "oneOf"):
            branch = self._branch(_list(schema, word), value)
            if branch is not None:
                value = self.visit(branch, value, path)
        if isinstance(value, dict):
            return self._object(schema, value, path)
        if isinstance(value, list):
            return self._array(schema, value, path)
        return value

    def _object(self, schema: dict[str, Any], value: dict[str, JsonValue], path: str) -> JsonValue:
        properties = schema.get("properties")
        properties = properties if isinstance(properties, dict) else {}
        others = schema.get("additionalProperties")
        fitted = {
            name: self.visit(properties.get(name, others), item, f"{path}.{name}" if path else name)
            for name, item in value.items()
        }
        for name, part in properties.items() if self.defaults else ():
            part = resolve(self.root, part)  # noqa: PLW2901
            if name not in fitted and isinstance(part, dict) and "default" in part:
                fitted[name] = part["default"]
        return fitted

    def _array(self, schema: dict[str, Any], value: list[JsonValue], path: str) -> JsonValue:
        first = _list(schema, "prefixItems")
        rest = schema.get("items")
        return [
            self.visit(first[number] if number < len(first) else rest, item, f"{path}[{number}]")
            for number, item in enumerate(value)
        ]

    def _branch(self, branches: list[Any], value: JsonValue) -> Any:
        fitting = [branch for branch in branches if self._fits(branch, value)]
        if fitting or not self.coerce:
            return fitting[0] if len(fitting) == 1 else None
        readable = [branch for branch in branches if self._fits(branch, self._trial(branch, value))]
        return readable[0] if len(readable) == 1 else None

    def _trial(self, branch: Any, value: JsonValue) -> JsonValue:
        # Check only the outermost level, because looking deeper at each level would take exponential time.
        schema = resolve(self.root, branch)
        if not isinstance(schema, dict):
            return value
        return _Walk(root=self.root, defaults=False, coerce=True)._read(schema, value, "")  # noqa: SLF001  # its own

    def _fits(self, schema: Any, value: JsonValue) -> bool:
        """Return whether a value has an allowed type and matches `const` and `enum`.

        The validator checks everything else.
        """
        schema = resolve(self.root, schema)
        if not isinstance(schema, dict):
            return bool(schema)
        if "const" in schema:
            return bool(schema["const"] == value)
        if isinstance(schema.get("enum"), list):
            return value in schema["enum"]
        types = _types(schema)
        if types and not _has_type(value, types):
            return False
        inner = _list(schema, "anyOf") or _list(schema, "oneOf")
        return not inner or any(self._fits(part, value) for part in inner)

    def _read(self, schema: dict[str, Any], value: JsonValue, path: str) -> JsonValue:
        types = _types(schema)
        if isinstance(value, float) and "integer" in types and "number" not in types:
            return self._adjusted(path, value, _whole(value))
        if not self.coerce or not types or _has_type(value, types):
            return value
        return self._adjusted(path, value, _coerced(value, types, self._fits, schema))

    def _adjusted(self, path: str, old: JsonValue, new: JsonValue) -> JsonValue:
        if type(new) is not type(old):
            self.adjustments.append(f"{path or 'arguments'}: {_shown(old)} was read as {_shown(new)}")
        return new


def _coerced(value: JsonValue, types: frozenset[str], fits: Any, schema: dict[str, Any]) -> JsonValue:
    """Return `value` converted to one of `types` if that loses no information.

    Otherwise, return it unchanged.
    """
    if isinstance(value, str):
        read = _from_text(value.strip(), types)
        if read is not None:
            return read
    elif isinstance(value, int) and not isinstance(value, bool) and "string" in types:
        return str(value)
    if types == {"array"} and not isinstance(value, dict | list) and value is not None:
        # Accept a single item instead of a list, but not a malformed list.
        is_torn = isinstance(value, str) and value.lstrip().startswith("[")
        return [value] if not is_torn and fits(schema.get("items", True), value) else value
    return value


def _from_text(text: str, types: frozenset[str]) -> JsonValue:
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if types & {"integer", "number"}:
        number = _number(text)
        if isinstance(number, int) or (number is not None and "number" in types):
            return number
    if types & {"array", "object"} and text[:1] in ("[", "{"):
        try:
            read = loads(text.encode(), bytes_max=_TEXT_BYTES_MAX)
        except (InvalidJson, TooLarge, UnicodeEncodeError):
            return None
        return read if _has_type(read, types) else None
    return None


def _number(text: str) -> int | float | None:
    """Return the number in `text`. If it is not a JSON number, or 64 bits would change its value, return None."""
    if _INTEGER.fullmatch(text):
        number = int(text)
        return number if INTEGER_MIN <= number <= INTEGER_MAX else None
    if len(text) > _NUMBER_CHARACTERS_MAX or not _NUMBER.fullmatch(text):
        return None
    exact = float(text)
    return exact if Decimal(text) == Decimal(repr(exact)) else None


def _whole(value: float) -> JsonValue:
    return int(value) if value.is_integer() and abs(value) <= _EXACT_FLOAT else value


def _types(schema: dict[str, Any]) -> frozenset[str]:
    types = schema.get("type")
    if isinstance(types, str):
        return frozenset({types})
    return frozenset(types) if isinstance(types, list) else frozenset()


def _has_type(value: JsonValue, types: frozenset[str]) -> bool:
    match value:
        case None:
            return "null" in types
        case bool():
            return "boolean" in types
        case int():
            return bool(types & {"integer", "number"})
        case float():
            return "number" in types
        case str():
            return "string" in types
        case list():
            return "array" in types
        case _:
            return "object" in types


def _list(schema: dict[str, Any], word: str) -> list[Any]:
    parts = schema.get(word)
    return parts if isinstance(parts, list) else []


def _shown(value: JsonValue) -> str:
    text = dumps_canonical(value).decode()
    return text if len(text) <= _SHOWN_CHARACTERS_MAX else f"{text[: _SHOWN_CHARACTERS_MAX - 3]}..."
