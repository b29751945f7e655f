"""The one parser of JSON that comes from outside: tool arguments, results, files.

Stricter than RFC 8259, so that every reader of the same bytes sees the same
value: what parsers disagree about is refused (duplicate keys, NaN, lone
surrogates, integers beyond 64 bits), and so is what later stores cannot hold
(NUL, deep nesting).
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

DEPTH_MAX: Final = 32
"""Levels of arrays and objects; a scalar alone has depth 0."""
CONTAINERS_MAX: Final = 25_000
"""Arrays and objects. Each costs a hundred times as much as its two bytes, for everybody who looks at the value."""
INTEGER_MIN: Final = -(2**63)
INTEGER_MAX: Final = 2**64 - 1

_STRING: Final = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"')
_LONG_NUMBER: Final = re.compile(rb"[0-9]{19}")
_CONTAINERS: Final = frozenset({list, dict})
_KINDS: Final = frozenset({type(None), bool, int, float, str, list, dict})
_decode: Final = msgspec.json.Decoder().decode
_encode: Final = msgspec.json.Encoder(order="sorted").encode


def loads(data: bytes, *, bytes_max: int) -> JsonValue:
    """Parse exactly one JSON value, UTF-8, with nothing but white space around it.

    A number without fraction and exponent is an int, any other a float.

    Raises:
        TooLarge: `data` is over `bytes_max`.
        InvalidJson: `data` is not strict JSON; the message says where and why.
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
    # The decoder keeps the last of two equal keys. Then the value has fewer keys
    # than the text has colons outside strings; colons in strings can only add.
    if data.count(b":") != keys and _STRING.sub(b"", data).count(b":") != keys:
        raise InvalidJson("an object has the same key twice")
    # The decoder refuses lone surrogates and numbers out of range itself. The rest
    # is rare enough to look for in the bytes first.
    if b"\\u0000" in data or _LONG_NUMBER.search(data):
        _check(value)
    return value


def dumps_canonical(value: JsonValue) -> bytes:
    """Return the one text of `value`: equal values give equal bytes, in every process.

    Like RFC 8785: UTF-8, no white space, keys sorted, only the escapes JSON
    needs. Unlike it, keys sort by code point, integers keep all their digits
    (up to 64 bits) and a float is always written as one (`1.0`, the shortest
    text that reads back the same), so 1 and 1.0 are two values.

    Raises:
        InvalidJson: `value` holds what `loads` would refuse.
    """
    _check(value)
    return _encode(value)


_TOO_MANY: Final = f"more than {CONTAINERS_MAX} arrays and objects"
_TOO_DEEP: Final = f"nested deeper than {DEPTH_MAX} levels"


def _levels(value: JsonValue) -> Iterator[list[Any]]:
    """Return the arrays and objects of each level, from the outside in; raises InvalidJson where there are too many."""
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
    """Return what is in arrays and objects."""
    return chain.from_iterable(each.values() if type(each) is dict else each for each in level)


def _count_keys(value: JsonValue) -> int:
    """Return the number of keys in `value`, at all levels; raises InvalidJson."""
    return sum(len(each) for level in _levels(value) for each in level if type(each) is dict)


def _check(value: JsonValue) -> None:
    """Raise InvalidJson unless `value` is one that `loads` could return."""
    _check_scalars([value])
    for level in _levels(value):
        _check_scalars(list(_items(level)))
        keys = list(chain.from_iterable(each for each in level if type(each) is dict))
        if set(map(type, keys)) - {str}:
            raise InvalidJson("the keys of an object must be strings")
        _check_text("".join(keys))


def _check_scalars(items: list[Any]) -> None:
    # Subclasses (an IntEnum, a str with its own rules) are not what a reader would
    # get back, so types are compared, not tested with isinstance.
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
    """Return `text` as stores can hold it: without NUL, surrogate pairs joined, U+FFFD for each lone surrogate.

    Text that needs no change is returned as the same object.
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
