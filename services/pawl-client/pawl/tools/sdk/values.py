"""Converts tools' return values to JSON, and masks secrets."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import msgspec
import pydantic

from pawl.chassis.strict_json import JsonValue
from pawl.tools.sdk.completion import Awaited

_NESTED: Final = (list, tuple, dict)
_WITH_TEXT: Final = (str, list, dict)


def plain(value: Any) -> JsonValue:
    """Convert a tool's return value to plain JSON values. Dataclasses, structs, models, dates and enums are supported.

    Raises:
        TypeError: A value has no JSON form.
    """
    if isinstance(value, Awaited):
        raise TypeError("Awaited cannot be part of a value: return it alone, after taking a completion token")
    return _lists(msgspec.to_builtins(value, enc_hook=_from_model, str_keys=True))


def _lists(value: Any) -> JsonValue:
    """Convert tuples to lists, at any depth."""
    if isinstance(value, list | tuple):
        return [_lists(item) if isinstance(item, _NESTED) else item for item in value]
    if isinstance(value, dict):
        return {key: _lists(item) for key, item in value.items()}
    plain_value: JsonValue = value
    return plain_value


def _from_model(value: Any) -> Any:
    if isinstance(value, pydantic.BaseModel):
        return value.model_dump(mode="json")
    raise TypeError(f"a value of type {type(value).__name__} is not JSON")


def without(secrets: Collection[str], value: JsonValue) -> JsonValue:
    """Replace each secret in the strings of `value` with `[secret]`."""
    if not secrets:
        return value
    match value:
        case str():
            return hide(secrets, value)
        case list():
            return [without(secrets, item) if isinstance(item, _WITH_TEXT) else item for item in value]
        case dict():
            return {hide(secrets, key): without(secrets, item) for key, item in value.items()}
        case _:
            return value


def hide(secrets: Collection[str], text: str) -> str:
    """Replace each secret in `text` with `[secret]`."""
    for secret in secrets:
        text = text.replace(secret, "[secret]")
    return text
