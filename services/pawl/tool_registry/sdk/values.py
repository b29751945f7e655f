"""From what a function returns to JSON."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import msgspec
import pydantic

from pawl.chassis.strict_json import JsonValue
from pawl.tool_registry.sdk.completion import Awaited

_NESTED: Final = (list, tuple, dict)
_WITH_TEXT: Final = (str, list, dict)


def plain(value: Any) -> JsonValue:
    """Return JSON for what a tool returned: dataclasses, structs, models, dates, enums and the like.

    Raises:
        TypeError: there is a value that JSON has no form for.
    """
    if isinstance(value, Awaited):
        raise TypeError("Awaited is no value: a tool returns it alone, after it has taken a completion token")
    return _lists(msgspec.to_builtins(value, enc_hook=_from_model, str_keys=True))


def _lists(value: Any) -> JsonValue:
    """Return `value` with lists in place of tuples, which are all the same to JSON."""
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
    """Return `value` with `[secret]` in place of each secret in its texts."""
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
    """Return `text` with `[secret]` in place of each secret."""
    for secret in secrets:
        text = text.replace(secret, "[secret]")
    return text
