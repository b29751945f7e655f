"""Inputs of workflows that schedules and triggers start."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pawl.agent_loop.loop.rules.expression import ExpressionError
from pawl.agent_loop.workflows import expressions
from pawl.chassis import strict_json
from pawl.errors import InvalidArguments, InvalidField, InvalidJson
from pawl.event.v1.schedule_pb2 import ScheduleDefinition
from pawl.event.v1.trigger_pb2 import TriggerDefinition

BYTES_MAX: Final = 16 * 1024
_OF_RUNS: Final = ("text", "agent", "conversation_key", "conversation_pointer")
_SCHEDULE: Final[expressions.Names] = {"schedule": frozenset({"name", "time"})}
_TRIGGER: Final[expressions.Names] = {"event": None}


def check(definition: ScheduleDefinition | TriggerDefinition) -> bool:
    """Validate a definition that starts a workflow. Return whether all firings have the same input.

    Raises:
        InvalidField: A field is set that only applies to runs without a workflow, or the input is invalid.
        TooLarge: The input is too large.
    """
    for name in _OF_RUNS:
        if getattr(definition, name, ""):
            raise InvalidField(f"{name} is not allowed with workflow", field=f"definition.{name}")
    try:
        template = _template(definition)
    except InvalidJson as error:
        raise InvalidField(f"input: {error.message}", field="definition.input_json") from None
    if not isinstance(template, dict):
        raise InvalidField("input must be a JSON object", field="definition.input_json")
    names = _SCHEDULE if isinstance(definition, ScheduleDefinition) else _TRIGGER
    if faults := expressions.check(template, names, "input"):
        raise InvalidField("; ".join(map(str, faults)), field="definition.input_json")
    try:
        expressions.render(template, {})
    except ExpressionError:
        return False
    return True


def rendered(definition: ScheduleDefinition | TriggerDefinition, scope: Mapping[str, Any]) -> bytes:
    """Return the input with its expressions replaced by their values.

    Raises:
        InvalidArguments: An expression fails.
    """
    try:
        return strict_json.dumps_canonical(expressions.render(_template(definition), scope))
    except ExpressionError as error:
        raise InvalidArguments(f"input: {error}") from None


def _template(definition: ScheduleDefinition | TriggerDefinition) -> Any:
    if definition.input_json:
        return strict_json.loads(definition.input_json, bytes_max=BYTES_MAX)
    return {} if isinstance(definition, ScheduleDefinition) else {"event": "${event}"}
