"""Answers of a model beside the schema that was asked for; for helper processes, which bound what strangers wrote."""

from __future__ import annotations

import functools
from typing import Any, Final

import jsonschema_rs

from pawl.chassis.strict_json import dumps_canonical, loads
from pawl.errors import InvalidJson, InvalidSchema, TooLarge
from pawl.tool_registry.rules.schema import compile_schema, read_schema
from pawl.tool_registry.rules.violations import list_violations

OUTPUT_BYTES_MAX: Final = 256 * 1024
"""Most bytes of an answer in a form."""

_COMPILED_MAX: Final = 64


def output_schema_problem(schema_json: bytes) -> str:
    """Return why answers cannot be held to a schema; empty if they can."""
    try:
        _compiled(schema_json)
    except InvalidSchema as error:
        return error.message
    return ""


def check_output(schema_json: bytes, output: bytes) -> tuple[bytes, list[str]]:
    """Return the canonical JSON of an answer that fits, or everything that is wrong with it.

    Nothing is coerced and no default put in: what people were shown is the answer. To a schema that cannot be used
    nothing fits.
    """
    try:
        schema, validator = _compiled(schema_json)
        value = loads(output, bytes_max=OUTPUT_BYTES_MAX)
    except InvalidSchema as error:
        return b"", [f"answer: {error.message}"]
    except TooLarge:
        return b"", [f"answer: has {len(output)} bytes, the limit is {OUTPUT_BYTES_MAX}"]
    except InvalidJson as error:
        return b"", [f"answer: is not JSON and nothing else: {error.message}"]
    faults = list_violations(schema, validator, value)
    return (b"", [_of_answer(fault) for fault in faults]) if faults else (dumps_canonical(value), [])


def _of_answer(fault: str) -> str:
    """Return a fault of the whole of some arguments as one of an answer."""
    return f"answer: {fault.removeprefix('arguments: ')}" if fault.startswith("arguments: ") else fault


@functools.lru_cache(maxsize=_COMPILED_MAX)
def _compiled(schema_json: bytes) -> tuple[dict[str, Any], jsonschema_rs.Draft202012Validator]:
    schema = read_schema(schema_json, "the schema")
    try:
        return schema, compile_schema(schema)
    except InvalidSchema as error:
        raise InvalidSchema(error.message.replace("the arguments schema", "the schema")) from None
