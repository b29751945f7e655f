"""Conditions on iteration results. Jobs use them to monitor values without a model (ASYNC-4)."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from pawl.agent_loop.loop.rules import expression
from pawl.agent_loop.loop.rules.expression import ExpressionError

_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,6}", re.ASCII)
_POINTER: Final = re.compile(r"(/[^/]{0,200}){0,16}")
_EQUALS_BYTES_MAX: Final = 1024
_NUMBER_MAX: Final = 1e300
# Larger values are not kept until the next iteration.
KEPT_BYTES_MAX: Final = 3 * 1024
_encode: Final = msgspec.json.Encoder(order="sorted").encode


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    sha256: str
    # None if there is no value, or if it is too large.
    value: Any = None
    is_too_large: bool = False


class Condition(msgspec.Struct, frozen=True, kw_only=True):
    """A condition on a result: a threshold, an equal value, a change or a CEL expression. Exactly one is set."""

    # A JSON pointer (RFC 6901); empty for the whole result.
    pointer: str = ""
    below: float | None = None
    above: float | None = None
    equals_json: bytes = b""
    changed: bool = False
    # A CEL expression.
    expression: str = ""

    def is_met(self, content: Any, before: Seen | None = None, fired: int = 0) -> bool:
        """Return whether a parsed result meets the condition.

        A missing value never meets a threshold or equals a value.

        `before` is the previous iteration's value, or None for the first iteration.

        Raises:
            ExpressionError: The expression cannot be evaluated for this value.
        """
        found = find(content, self.pointer)
        if self.expression:
            return self._holds(found, before, fired)
        if self.changed:
            return before is not None and before.sha256 != _digest(found)
        if self.equals_json:
            wanted = msgspec.json.decode(self.equals_json)
            return _kind(found) is _kind(wanted) and bool(found == wanted)
        if isinstance(found, bool) or not isinstance(found, int | float):
            return False
        return (self.below is not None and found < self.below) or (self.above is not None and found > self.above)

    def seen(self, content: Any) -> Seen | None:
        """Return the part of a parsed result to store for the next iteration.

        Return None if the condition does not need it.
        """
        names_previous = bool(self.expression) and expression.names_previous(self.expression)
        if not self.changed and not names_previous:
            return None
        found = find(content, self.pointer)
        is_too_large = len(msgspec.json.encode(found)) > KEPT_BYTES_MAX
        return Seen(sha256=_digest(found), value=None if is_too_large else found, is_too_large=is_too_large)

    def _holds(self, found: Any, before: Seen | None, fired: int) -> bool:
        if before is not None and before.is_too_large:
            raise ExpressionError(
                f"previous was over {KEPT_BYTES_MAX} bytes and was not stored: set a path to select a part of it"
            )
        previous = None if before is None else before.value
        return expression.evaluate(self.expression, value=found, previous=previous, fired=fired)


def _kind(value: Any) -> type:
    """Return the value's JSON type. 20 and 20.0 have the same type. true is not a number."""
    return float if type(value) is int else type(value)


def _number(written: str) -> int | float:
    """Parse a float. If it is integral and fits into 64 bits, return an integer."""
    value = float(written)
    return int(value) if value.is_integer() and -(2**63) <= value < 2**64 else value


_decode: Final = msgspec.json.Decoder(float_hook=_number).decode


def _digest(value: Any) -> str:
    """Return a digest that is equal for equal values.

    An integer and an equal float, such as 20 and 20.0, count as equal unless they are very large.
    """
    encoded = _encode(value)
    if len(encoded) <= expression.VALUE_BYTES_MAX:
        encoded = _encode(_decode(encoded))
    return hashlib.sha256(encoded).hexdigest()[:16]


def find(data: Any, pointer: str) -> Any:
    """Return the value at a JSON pointer (RFC 6901), or None if it does not exist."""
    for step in pointer.split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(data, dict) and name in data:
            data = data[name]
        elif isinstance(data, list) and _INDEX.fullmatch(name) and int(name) < len(data):
            data = data[int(name)]
        else:
            return None
    return data


def written(condition: Condition) -> dict[str, Any]:
    """Return the condition in the form that `read` parses. An ambiguous or empty condition stays invalid."""
    kinds = {
        "below": condition.below,
        "above": condition.above,
        "equals": _value(condition.equals_json) if condition.equals_json else None,
        "changed": condition.changed or None,
        "cel": condition.expression or None,
    }
    spec = {kind: value for kind, value in kinds.items() if value is not None}
    return {"path": condition.pointer, **spec} if condition.pointer else spec


def _value(data: bytes) -> Any:
    """Decode JSON. Invalid JSON becomes an empty list, which is also invalid in a condition."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []


def read(spec: object) -> Condition | None:
    """Parse a condition such as `"value < 20"` or `{"path": "/price", "below": 20}`. Return None if it is invalid.

    Raises:
        ExpressionError: The CEL expression is not allowed.
    """
    if isinstance(spec, str):
        spec = {"cel": spec}
    if not isinstance(spec, Mapping):
        return None
    spec = dict(spec)
    pointer = spec.pop("path", "")
    if len(spec) != 1 or not isinstance(pointer, str) or not _POINTER.fullmatch(pointer):
        return None
    ((kind, value),) = spec.items()
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and abs(value) <= _NUMBER_MAX and kind == "below":
        return Condition(pointer=pointer, below=float(value))
    if is_number and abs(value) <= _NUMBER_MAX and kind == "above":
        return Condition(pointer=pointer, above=float(value))
    if kind == "changed" and value is True:
        return Condition(pointer=pointer, changed=True)
    if kind == "cel" and isinstance(value, str):
        expression.check(value)
        return Condition(pointer=pointer, expression=value)
    if kind == "equals" and isinstance(value, str | int | float | bool):
        wanted = msgspec.json.encode(value)
        return Condition(pointer=pointer, equals_json=wanted) if len(wanted) <= _EQUALS_BYTES_MAX else None
    return None
