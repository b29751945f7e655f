"""Hints on background parameters, for models and clients that use another system's names for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from msgspec.structs import replace

from pawl.agent_loop.loop.rules.background import FLAG, TOOL, has_own
from pawl.agent_loop.loop.rules.jobs import IN_BACKGROUND, background_denial
from pawl.agent_loop.loop.rules.run import Run
from pawl.agent_loop.loop.rules.tool import ProposedCall, Tool, Verdict
from pawl.chassis import strict_json
from pawl.chassis.ids import CallId
from pawl.errors import InvalidJson, TooLarge
from pawl.values import Disposition

_FOR_MODEL: Final = (
    f'To run the call in the background, add "{FLAG}": true instead. To repeat it, also add "_interval" '
    '(seconds) and "_duration" (minutes), "_stopAfter" (times) or both.'
)
# For models that use the tool `in_background`.
_FOR_TOOL: Final = (
    f"To run the call in the background, use {TOOL} instead. To repeat it, set interval (seconds) and duration "
    "(minutes), stop_after (times) or both."
)
# For StartJob.
_FOR_REQUEST: Final = (
    "The call already runs in the background. To repeat it, set the job's interval_seconds with duration_minutes,"
    " iterations_max or both instead."
)

_NAME_CHARACTERS_MAX: Final = 40
# Names used by other systems, and misspellings of Pawl's names, in lower case.
_OTHERS: Final = re.compile(
    r"(?:is|run|execute|in|as){0,2}(?:async|background)(?:job)?|asynchronous|nonblocking|detach(?:ed)?"
    r"|(?:poll|polling|check|repeat)?interval(?:s|secs|seconds|ms|minutes)?|(?:repeat)?every(?:seconds)?"
    r"|(?:max)?duration(?:mins|minutes|seconds)?|(?:max)?iterations(?:max)?|repeatcount"
    r"|stopafter|delayfirst|estimatedminutes"
)


def for_model(
    run: Run, calls: Iterable[ProposedCall], verdicts: Mapping[CallId, Verdict], tools: Iterable[Tool], *, as_tool: bool
) -> dict[CallId, Verdict]:
    """Return the verdicts. If a schema refuses another system's background parameters, add a hint for the model.

    There are no hints if the run may not start background calls.
    """
    hinted = dict(verdicts)
    if background_denial(run):
        return hinted
    schemas = {tool.name: tool.arguments_schema_json for tool in tools}
    for call in calls:
        verdict, schema = verdicts[call.call_id], schemas.get(call.tool_name, b"")
        hinted[call.call_id] = _hinted(verdict, call.arguments_json, schema, _FOR_TOOL if as_tool else _FOR_MODEL)
    return hinted


def for_request(verdict: Verdict, arguments_json: bytes, schema_json: bytes) -> Verdict:
    """Return the verdict on the call of a requested job, with a hint as in `for_model`."""
    return _hinted(verdict, arguments_json, schema_json, _FOR_REQUEST)


def _hinted(verdict: Verdict, arguments_json: bytes, schema_json: bytes, hint: str) -> Verdict:
    is_about_arguments = verdict.disposition is Disposition.REFUSE and verdict.error_reason == "INVALID_ARGUMENTS"
    may_run = not verdict.without_background and verdict.context in IN_BACKGROUND and not has_own(schema_json)
    if not (is_about_arguments and may_run and _has_refused(_object(arguments_json), _object(schema_json))):
        return verdict
    return replace(verdict, error_message=f"{verdict.error_message}\n{hint}")


def _has_refused(arguments: dict[str, Any], schema: dict[str, Any]) -> bool:
    known = schema.get("properties", {})
    return schema.get("additionalProperties") is False and any(
        name not in known and _is_other(name) for name in arguments
    )


def _is_other(name: str) -> bool:
    return len(name) <= _NAME_CHARACTERS_MAX and bool(_OTHERS.fullmatch(re.sub("[^a-z]", "", name.lower())))


def _object(written: bytes) -> dict[str, Any]:
    try:
        value = strict_json.loads(written, bytes_max=len(written))
    except (InvalidJson, TooLarge):
        return {}
    return value if isinstance(value, dict) else {}
