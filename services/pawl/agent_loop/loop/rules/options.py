"""Validates a run's options and fills in defaults."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import field

from pawl.agent_loop.loop.rules import checks
from pawl.agent_loop.loop.rules.limits import APPROVALS_MAX, CEILINGS, Limits
from pawl.agent_loop.loop.rules.run import Options, ResponseFormat, RunOptions, ToolChoiceMode
from pawl.chassis import strict_json
from pawl.errors import InvalidField, InvalidJson, InvalidSchema, TooLarge

INSTRUCTIONS_BYTES_MAX: Final = 64 * 1024
# Limit for a model's or tool's name.
NAME_CHARACTERS_MAX: Final = 256
TOOL_NAMES_MAX: Final = 1000
# Maximum number of models that a run can fall back to.
FALLBACKS_MAX: Final = 4
TEMPERATURE_MAX: Final = 2.0
# Limit for a response format's schema.
SCHEMA_BYTES_MAX: Final = 64 * 1024

_FORMAT_NAME: Final = re.compile(r"[A-Za-z0-9_-]{0,64}", re.ASCII)


class RunDefaults(msgspec.Struct, frozen=True, kw_only=True):
    """The deployment's defaults for options that a client does not set."""

    model: str
    instructions: str = ""
    limits: Limits = field(default_factory=Limits)
    # The highest values that a client may request.
    ceilings: Limits = CEILINGS
    approvals_required: int = 0
    without_background: bool = False


class AskedOptions(Options, frozen=True, kw_only=True):
    """Options that a client requests. `limits` contains only the fields that the request sets."""

    limits: Mapping[str, float] = field(default_factory=dict)


def complete(requested: AskedOptions, defaults: RunDefaults) -> RunOptions:
    """Return options with all defaults filled in.

    Raises:
        InvalidField, TooLarge: A value is out of range, or two values contradict each other.
        InvalidSchema: The response format's schema is not JSON. Only tool-registry checks the rest of the schema.
    """
    _check_names(requested)
    _check_tool_choice(requested)
    checks.text(requested.instructions, "options.instructions", bytes_max=INSTRUCTIONS_BYTES_MAX, may_be_empty=True)
    if requested.temperature is not None and not 0 <= requested.temperature <= TEMPERATURE_MAX:
        raise InvalidField("temperature must be between 0 and 2", field="options.temperature")
    if requested.approvals_required > APPROVALS_MAX:
        message = f"approvals_required must be at most {APPROVALS_MAX}"
        raise InvalidField(message, field="options.approvals_required")
    if requested.output_tokens_max == 0:
        raise InvalidField("output_tokens_max must be greater than 0", field="options.output_tokens_max")
    if requested.response_format is not None:
        _check_format(requested.response_format)
    settled = {
        "model": requested.model or defaults.model,
        "model_fallbacks": tuple(dict.fromkeys(requested.model_fallbacks)),
        "instructions": requested.instructions or defaults.instructions,
        "tool_names": tuple(dict.fromkeys(requested.tool_names)),
        "limits": defaults.limits.with_asked(requested.limits, defaults.ceilings),
        "approvals_required": max(requested.approvals_required, defaults.approvals_required),
        "without_background": requested.without_background or defaults.without_background,
    }
    return RunOptions(**msgspec.structs.asdict(requested) | settled)


def as_deployed(options: RunOptions, approvals_required: int) -> RunOptions:
    """Return a continuing run's options with at least the deployment's current approval minimum.

    A raised minimum applies to runs that continue. A lowered minimum does not.
    """
    if approvals_required <= max(1, options.approvals_required):
        return options
    return msgspec.structs.replace(options, approvals_required=approvals_required)


def _check_names(requested: AskedOptions) -> None:
    if len(requested.model_fallbacks) > FALLBACKS_MAX:
        raise InvalidField(f"model_fallbacks may have at most {FALLBACKS_MAX} models", field="options.model_fallbacks")
    if len(requested.tool_names) > TOOL_NAMES_MAX:
        raise InvalidField(f"tool_names may have at most {TOOL_NAMES_MAX} tools", field="options.tool_names")
    fields = {"model": filter(None, (requested.model,)), "model_fallbacks": requested.model_fallbacks}
    for option, names in {**fields, "tool_names": requested.tool_names}.items():
        if not all(0 < len(name) <= NAME_CHARACTERS_MAX and name.isprintable() for name in names):
            message = f"each name in {option} must have 1 to {NAME_CHARACTERS_MAX} printable characters"
            raise InvalidField(message, field=f"options.{option}")


def _check_format(form: ResponseFormat) -> None:
    if not _FORMAT_NAME.fullmatch(form.name):
        message = "response_format.name must be at most 64 characters, all of them A-Z, a-z, 0-9, _ or -"
        raise InvalidField(message, field="options.response_format.name")
    if not form.schema_json:
        raise InvalidField("response_format requires schema_json", field="options.response_format.schema_json")
    if len(form.schema_json) > SCHEMA_BYTES_MAX:
        message = f"response_format.schema_json must be at most {SCHEMA_BYTES_MAX} bytes"
        raise TooLarge(message, field="options.response_format.schema_json")
    try:
        strict_json.loads(form.schema_json, bytes_max=SCHEMA_BYTES_MAX)
    except InvalidJson as error:
        raise InvalidSchema(f"response_format.schema_json is not strict JSON: {error.message}") from None


def _check_tool_choice(requested: AskedOptions) -> None:
    choice = requested.tool_choice
    if (choice.mode is ToolChoiceMode.TOOL) != bool(choice.tool_name):
        raise InvalidField("tool_choice.tool_name requires MODE_TOOL", field="options.tool_choice.tool_name")
    if choice.mode in {ToolChoiceMode.TOOL, ToolChoiceMode.REQUIRED} and requested.without_tools:
        raise InvalidField(
            "tool_choice.mode requires tools, but without_tools is set", field="options.tool_choice.mode"
        )
    if choice.tool_name and requested.tool_names and choice.tool_name not in requested.tool_names:
        raise InvalidField("tool_choice.tool_name must be in tool_names", field="options.tool_choice.tool_name")
