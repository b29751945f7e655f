"""Checks a call's arguments: parses, coerces, validates and canonicalises them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import jsonschema_rs
import msgspec

from pawl.chassis.strict_json import JsonValue, dumps_canonical, loads
from pawl.errors import InvalidJson, InvalidSchema, TooLarge
from pawl.tool_registry.rules.fitting import Fitted, fit
from pawl.tools.rules.definition import ARGUMENTS_BYTES_MAX, ToolDefinition
from pawl.tools.rules.schema import compile_schema, list_violations

# Largest product of schema weight and argument bytes that is checked in-process, which takes up to 30 ms of CPU time.
QUICK_WORK_MAX: Final = 25_000

_ADJUSTMENTS_SHOWN: Final = 10
_ROUND_BYTES: Final = 64
_COMPILED_MAX: Final = 64
_decode: Final[Callable[[bytes], Any]] = msgspec.json.decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    arguments: dict[str, JsonValue]
    canonical: bytes
    # A note for the model about coerced values. Can be empty.
    note: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A refusal of a call. Programs read `reason`, and the model reads `message`."""

    reason: str
    message: str


def refused(name: str, what: str, *, reason: str = "INVALID_ARGUMENTS") -> Refused:
    """Return a refusal whose message starts with "the arguments of <name>"."""
    return Refused(reason=reason, message=f"the arguments of {name} {what}")


def check_arguments(
    definition: ToolDefinition, validator: jsonschema_rs.Draft202012Validator, raw: bytes
) -> Accepted | Refused:
    """Return a call's canonical arguments, or a refusal that lists the violations.

    Valid arguments are only extended with defaults, provided that they remain valid. Invalid arguments are coerced if
    this loses no information. Empty input counts as an empty object.
    """
    name = definition.name
    try:
        written = loads(raw, bytes_max=ARGUMENTS_BYTES_MAX) if raw.strip() else {}
    except TooLarge:
        return refused(name, f"are {len(raw)} bytes, over the limit of {ARGUMENTS_BYTES_MAX}")
    except InvalidJson as error:
        return refused(name, f"are not strict JSON: {error.message}", reason="INVALID_JSON")
    if not isinstance(written, dict):
        return refused(name, "must be a JSON object")
    fitted = _fitted(definition, validator, written)
    violations = list_violations(definition.arguments_schema, validator, fitted.value)
    if violations:
        listed = "\n".join(f"- {line}" for line in violations)
        return refused(name, f"do not fit its schema:\n{listed}")
    return _accepted(name, fitted)


def is_quick(weight: float, raw: bytes) -> bool:
    """Return whether this process can check these arguments against a schema of this weight (`schema.weigh`)."""
    return weight * (len(raw) + _ROUND_BYTES) <= QUICK_WORK_MAX


def check_untrusted(
    name: str, schema: bytes, raw: bytes, newest: bytes | None, *, recursion: bool
) -> tuple[bytes, str] | Refused:
    """Run `check_arguments` and `fits_newest` in a helper process, which caches compiled schemas.

    Schemas are passed as JSON. If the arguments are accepted, return their canonical form and a note about coerced
    values.
    """
    definition = ToolDefinition(name=name, description="", arguments_schema=_decode(schema))
    checked = check_arguments(definition, _compiled(schema, recursion=recursion), raw)
    if isinstance(checked, Accepted) and newest is not None:
        checked = fits_newest(name, _compiled(newest, recursion=recursion), checked)
    return checked if isinstance(checked, Refused) else (checked.canonical, checked.note)


def schema_problem(schema: Mapping[str, Any]) -> str:
    """Return why an untrusted schema cannot be used, or "" if it can. Runs in a helper process."""
    try:
        compile_schema(schema)
    except InvalidSchema as error:
        return error.message
    return ""


def fits_newest(name: str, newest: jsonschema_rs.Draft202012Validator, accepted: Accepted) -> Accepted | Refused:
    """Return `accepted` if the newest version also accepts the arguments.

    A run uses the version with which it started, but only the newest version's function can run. Arguments for an older
    version must therefore match the newest schema too, without changes.
    """
    if newest.is_valid(accepted.arguments):
        return accepted
    return Refused(
        reason="INVALID_ARGUMENTS", message=f"{name} has changed since this run started and now takes other arguments"
    )


@functools.lru_cache(maxsize=_COMPILED_MAX)
def _compiled(schema: bytes, *, recursion: bool) -> jsonschema_rs.Draft202012Validator:
    return compile_schema(_decode(schema), recursion=recursion)


def _accepted(name: str, fitted: Fitted) -> Accepted | Refused:
    try:
        canonical = dumps_canonical(fitted.value)
    except InvalidJson as error:  # JSON parsed from a string can exceed the depth limit
        return refused(name, f"are not strict JSON: {error.message}", reason="INVALID_JSON")
    if len(canonical) > ARGUMENTS_BYTES_MAX or not isinstance(fitted.value, dict):
        return refused(name, f"are over the limit of {ARGUMENTS_BYTES_MAX} bytes, including defaults")
    return Accepted(arguments=fitted.value, canonical=canonical, note=_note(fitted.adjustments))


def _fitted(
    definition: ToolDefinition, validator: jsonschema_rs.Draft202012Validator, written: dict[str, JsonValue]
) -> Fitted:
    schema = definition.arguments_schema
    if not validator.is_valid(written):
        coerced = fit(schema, written)
        if validator.is_valid(coerced.value):
            return coerced
        # A default may be invalid, so report only violations in the caller's own values.
        plain = fit(schema, written, defaults=False)
        return plain if validator.is_valid(plain.value) else coerced
    filled = fit(schema, written, coerce=False)
    return filled if validator.is_valid(filled.value) else fit(schema, written, coerce=False, defaults=False)


def _note(adjustments: tuple[str, ...]) -> str:
    if not adjustments:
        return ""
    shown = "; ".join(adjustments[:_ADJUSTMENTS_SHOWN])
    more = len(adjustments) - _ADJUSTMENTS_SHOWN
    return f"Arguments were adjusted: {shown}" + (f"; and {more} more" if more > 0 else "")
