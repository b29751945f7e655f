"""A strict parser for untrusted JSON, such as tool arguments, results and files.

The parser is stricter than RFC 8259, so that all readers get the same value. It rejects input that parsers interpret
differently (duplicate keys, NaN, lone surrogates, integers beyond 64 bits), and values that stores do not accept (NUL,
deep nesting).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final, TypeAlias

import msgspec

from pawl.errors import InvalidJson, TooLarge

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

# Levels of arrays and objects; a scalar has depth 0.
DEPTH_MAX: Final = 32
# Arrays and objects. Each of them costs every reader a hundred times as much as its two bytes of text.
CONTAINERS_MAX: Final = 25_000
INTEGER_MIN: Final = -(2**63)
INTEGER_MAX: Final = 2**64 - 1

_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_LONG_NUMBER: Final = re.compile(rb"[0-9]{19}")
_CONTAINERS: Final = frozenset({list, dict})
_KINDS: Final = frozenset({type(None), bool, int, float, str, list, dict})
_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder(order="sorted").encode


def loads(data: bytes, *, bytes_max: int) -> JsonValue:
    """Parse exactly one JSON value in UTF-8, with only white space around it.

    A number without a fraction or an exponent is an int. Any other number is a float.

    Raises:
        TooLarge: `data` is longer than `bytes_max`.
        InvalidJson: `data` is not strict JSON. The message contains the reason and the position.
    """
    if len(data) > bytes_max:
        raise TooLarge(f"JSON of {len(data)} bytes is over the limit of {bytes_max}")
    if data.count(b"[") + data.count(b"{") > CONTAINERS_MAX:
        plain = _STRING.sub(b"", data)
        if plain.count(b"[") + plain.count(b"{") > CONTAINERS_MAX:
            raise InvalidJson(_TOO_MANY)
    try:
        value: JsonValue = _decode(data)
    except RecursionError:
        raise InvalidJson(_TOO_DEEP) from None
    except UnicodeDecodeError:
        raise InvalidJson("JSON must be UTF-8 without lone surrogates") from None
    except msgspec.ValidationError:
        raise InvalidJson("a number is outside the range of a double") from None
    except msgspec.DecodeError as error:
        raise InvalidJson(str(error).removeprefix("JSON is malformed: ")) from None
    keys = _count_keys(value)
    # The decoder keeps the last of two equal keys, so the value has fewer keys than the text has colons outside
    # strings. Colons inside strings only add to the count.
    if data.count(b":") != keys and _STRING.sub(b"", data).count(b":") != keys:
        raise InvalidJson("an object has the same key twice")
    # The decoder rejects lone surrogates and numbers out of range. The rest is rare, so search the bytes first.
    if b"\\u0000" in data or _LONG_NUMBER.search(data):
        _check(value)
    return value


def dumps_canonical(value: JsonValue) -> bytes:
    """Return the canonical text of `value`. Equal values result in equal bytes in every process.

    As in RFC 8785, the text is UTF-8 without white space, with sorted keys and only the escapes that JSON requires.
    Unlike in RFC 8785, keys are sorted by code point, integers keep all their digits (up to 64 bits), and a float stays
    a float (`1.0`, the shortest text that reads back the same). Therefore, 1 and 1.0 are different values.

    Raises:
        InvalidJson: `value` contains something that `loads` would refuse.
    """
    _check(value)
    return _encode(value)


_TOO_MANY: Final = f"more than {CONTAINERS_MAX} arrays and objects"
_TOO_DEEP: Final = f"nested deeper than {DEPTH_MAX} levels"


def _levels(value: JsonValue) -> Iterator[list[Any]]:
    """Yield the arrays and objects of each level, outermost first. Raises InvalidJson beyond the limits."""
    level: list[Any] = [value] if type(value) in _CONTAINERS else []
    depth = count = 0
    while level:
        depth, count = depth + 1, count + len(level)
        if depth > DEPTH_MAX:
            raise InvalidJson(_TOO_DEEP)
        if count > CONTAINERS_MAX:
            raise InvalidJson(_TOO_MANY)
        yield level
        level = [item for item in _items(level) if type(item) in _CONTAINERS]


def _items(level: list[Any]) -> Iterator[Any]:
    return chain.from_iterable(each.values() if type(each) is dict else each for each in level)


def _count_keys(value: JsonValue) -> int:
    """Return the number of keys at all levels. Raises InvalidJson beyond the limits."""
    return sum(len(each) for level in _levels(value) for each in level if type(each) is dict)


def _check(value: JsonValue) -> None:
    """Raise InvalidJson unless `loads` could return `value`."""
    _check_scalars([value])
    for level in _levels(value):
        _check_scalars(list(_items(level)))
        keys = list(chain.from_iterable(each for each in level if type(each) is dict))
        if set(map(type, keys)) - {str}:
            raise InvalidJson("the keys of an object must be strings")
        _check_text("".join(keys))


def _check_scalars(items: list[Any]) -> None:
    # A subclass (an IntEnum, a str subclass) would not round-trip, so compare types instead of using isinstance.
    kinds = set(map(type, items))
    if unknown := kinds - _KINDS:
        raise InvalidJson(f"a value of type {min(kind.__name__ for kind in unknown)} is not JSON")
    if str in kinds:
        _check_text("".join(item for item in items if type(item) is str))
    if int in kinds:
        numbers = [item for item in items if type(item) is int]
        if min(numbers) < INTEGER_MIN or max(numbers) > INTEGER_MAX:
            raise InvalidJson("an integer does not fit in 64 bits")
    if float in kinds and not all(math.isfinite(item) for item in items if type(item) is float):
        raise InvalidJson("NaN and Infinity are not JSON")


def storable(text: str) -> str:
    """Return `text` in a form that stores accept. Remove NUL, and replace each lone surrogate with U+FFFD.

    Surrogate pairs are joined. If nothing needs to change, the same object is returned.
    """
    if "\0" in text:
        text = text.replace("\0", "")
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _check_text(text: str) -> None:
    if "\0" in text:
        raise InvalidJson("a string contains NUL")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidJson("a string contains a lone surrogate") from None
