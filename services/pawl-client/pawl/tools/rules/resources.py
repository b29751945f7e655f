"""Resource keys, which identify the resources that a call uses. Calls that share a key run one at a time."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

from pawl.chassis.strict_json import JsonValue, dumps_canonical

TEMPLATE_CHARACTERS_MAX: Final = 256
KEY_CHARACTERS_MAX: Final = 512
KEYS_MAX: Final = 64
_VALUES_MAX: Final = 1000

_PLACEHOLDER: Final = re.compile(r"\{([^{}]*)\}")


def check_template(template: str, schema: Mapping[str, Any]) -> str:
    """Return the problem with a template such as `path:{path}`. Return an empty string if it is valid."""
    if not 1 <= len(template) <= TEMPLATE_CHARACTERS_MAX:
        return f"a template must be 1 to {TEMPLATE_CHARACTERS_MAX} characters"
    if re.search(r"[{}]", _PLACEHOLDER.sub("", template)):
        return f"{template!r} has an unmatched brace"
    names = _PLACEHOLDER.findall(template)
    if len(names) > 1:
        return f"{template!r} has more than one placeholder"
    properties = schema.get("properties")
    unknown = [name for name in names if not isinstance(properties, dict) or name not in properties]
    return f"{template!r} names {unknown[0]!r}, which is not an argument of the tool" if unknown else ""


def resource_keys(templates: tuple[str, ...], arguments: Mapping[str, JsonValue]) -> tuple[str, ...]:
    """Return a call's keys, sorted and without duplicates.

    The argument with a placeholder's name replaces the placeholder. Strings are inserted unchanged, and other values as
    canonical JSON. Each item of an array produces a separate key. A template whose argument is absent or null produces
    no keys. Long keys are hashed. If a template would produce more than KEYS_MAX keys, or its argument has more than a
    thousand items, the template itself is the only key.
    """
    keys: set[str] = set()
    for template in templates:
        made = set(_expand(template, arguments))
        keys |= made if len(made) <= KEYS_MAX else {template}
    return tuple(sorted(keys))


def _expand(template: str, arguments: Mapping[str, JsonValue]) -> list[str]:
    match = _PLACEHOLDER.search(template)
    if match is None:
        return [_short(template)]
    value = arguments.get(match[1])
    values = value if isinstance(value, list) else [value]
    if len(values) > _VALUES_MAX:
        return [template]
    return [
        _short(template[: match.start()] + _text(item) + template[match.end() :]) for item in values if item is not None
    ]


def _text(value: JsonValue) -> str:
    return value if isinstance(value, str) else dumps_canonical(value).decode()


def _short(key: str) -> str:
    if len(key) <= KEY_CHARACTERS_MAX:
        return key
    return f"{key[: KEY_CHARACTERS_MAX - 80]}:sha256:{hashlib.sha256(key.encode()).hexdigest()}"
