"""The one parser of JSON that comes from outside: tool arguments, results, files.

Stricter than RFC 8259, so that every reader of the same bytes sees the same
value: what parsers disagree about is refused (duplicate keys, NaN, lone
surrogates, integers beyond 64 bits), and so is what later stores cannot hold
(NUL, deep nesting).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Final, TypeAlias

import msgspec

from services.errors import InvalidJson, TooLarge

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"

DEPTH_MAX: Final = 32
"""Levels of arrays and objects; a scalar alone has depth 0."""
INTEGER_MIN: Final = -(2**63)
INTEGER_MAX: Final = 2**64 - 1

_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"')
_LONG_NUMBER: Final = re.compile(rb"[0-9]{19}")
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
    keys = _count_keys(value, DEPTH_MAX)
    # The decoder keeps the last of two equal keys. Then the value has fewer keys
    # than the text has colons outside strings; colons in strings can only add.
    if data.count(b":") != keys and _STRING.sub(b"", data).count(b":") != keys:
        raise InvalidJson("an object has the same key twice")
    # The decoder refuses lone surrogates and numbers out of range itself. The rest
    # is rare enough to look for in the bytes first.
    if b"\\u0000" in data or _LONG_NUMBER.search(data):
        _check(value, DEPTH_MAX)
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
    _check(value, DEPTH_MAX)
    return _encode(value)


_TOO_DEEP: Final = f"nested deeper than {DEPTH_MAX} levels"


def _count_keys(value: JsonValue, depth: int) -> int:
    """Return the number of keys in `value`, at all levels; raises InvalidJson."""
    kind = type(value)
    if kind is not dict and kind is not list:
        return 0
    if depth == 0:
        raise InvalidJson(_TOO_DEEP)
    keys = 0
    items: Iterable[JsonValue] = ()
    if isinstance(value, dict):
        keys = len(value)
        items = value.values()
    elif isinstance(value, list):
        items = value
    for item in items:
        if type(item) is dict or type(item) is list:
            keys += _count_keys(item, depth - 1)
    return keys


def _check(value: JsonValue, depth: int) -> None:
    """Raise InvalidJson unless `value` is one that `loads` could return."""
    # Subclasses (an IntEnum, a str with its own rules) are not what a reader would
    # get back, so types are compared, not tested with isinstance.
    kind = type(value)
    if value is None or kind is bool:
        return
    if isinstance(value, str) and kind is str:
        _check_text(value)
    elif isinstance(value, int) and kind is int:
        if not INTEGER_MIN <= value <= INTEGER_MAX:
            raise InvalidJson("an integer does not fit in 64 bits")
    elif isinstance(value, float) and kind is float:
        if not math.isfinite(value):
            raise InvalidJson("NaN and Infinity are not JSON")
    elif depth == 0 and kind in {dict, list}:
        raise InvalidJson(_TOO_DEEP)
    elif isinstance(value, list) and kind is list:
        for item in value:
            _check(item, depth - 1)
    elif isinstance(value, dict) and kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise InvalidJson("the keys of an object must be strings")
            _check_text(key)
            _check(item, depth - 1)
    else:
        raise InvalidJson(f"a value of type {kind.__name__} is not JSON")


def _check_text(text: str) -> None:
    if "\0" in text:
        raise InvalidJson("a string contains NUL")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidJson("a string contains a lone surrogate") from None
