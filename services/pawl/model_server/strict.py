"""Strict mode: refuses what OpenAI refuses, so that a history that real providers would reject fails in tests too.

The rules and the wording follow the errors of OpenAI's API for chat completions.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pawl.model_server.request import Message, RefusedRequest, calls_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    from pawl.model_server.request import ChatRequest, Tool

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
TOOLS_MAX = 128
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
FORMATS = ("text", "json_object", "json_schema")
PARTS = ("text", "image_url", "input_audio", "file")
_URL = re.compile(r"^(https://|data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}$)")
_NAME = re.compile(r"^[a-zA-Z0-9_-]{1,64}$")
_TOOL_MESSAGES_MISSING = (
    "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
    "The following tool_call_ids did not have response messages: {ids}"
)
_TOOL_MESSAGE_ORPHANED = (
    "Invalid parameter: messages with role 'tool' must be a response to a preceding message with 'tool_calls'."
)


def check_request(request: ChatRequest, *, reasoning_echo: bool = False) -> None:
    """Raises RefusedRequest for the first thing OpenAI would refuse.

    With `reasoning_echo` also a tool-call message that does not carry its `reasoning_content` back is refused, as some
    DeepSeek models do.
    """
    _check_tools(request)
    _check_effort(request.reasoning_effort)
    _check_format(request)
    for number, message in enumerate(request.messages):
        _check_message(number, message)
        if reasoning_echo and message.get("tool_calls") and "reasoning_content" not in message:
            raise RefusedRequest(
                "Missing `reasoning_content` field in the assistant message with tool calls.",
                param=f"messages.[{number}].reasoning_content",
            )
    _check_results(request.messages)


def _check_tools(request: ChatRequest) -> None:
    if len(request.tools) > TOOLS_MAX:
        raise RefusedRequest(f"Invalid 'tools': at most {TOOLS_MAX} tools are allowed.", param="tools")
    seen: set[str] = set()
    for number, tool in enumerate(request.tools):
        place = f"tools[{number}].function"
        _check_name(tool.name, f"{place}.name")
        if tool.name in seen:
            raise RefusedRequest(f"Tool names must be unique: '{tool.name}'.", param="tools")
        seen.add(tool.name)
        problem = _schema_problem(tool)
        if problem:
            raise RefusedRequest(
                f"Invalid schema for function '{tool.name}': {problem}.",
                param=f"{place}.parameters",
                code="invalid_function_parameters",
            )
    if request.tool_choice is not None and not request.tools:
        raise RefusedRequest(
            "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are specified.",
            param="tool_choice",
        )
    if request.forced_tool is not None and request.forced_tool not in seen:
        raise RefusedRequest(
            f"Tool choice '{request.forced_tool}' not found in 'tools' parameter.", param="tool_choice"
        )


def _check_effort(effort: object) -> None:
    if effort is not None and effort not in EFFORTS:
        raise RefusedRequest(
            f"Invalid value: '{effort}'. Supported values are: {', '.join(repr(name) for name in EFFORTS)}.",
            param="reasoning_effort",
            code="invalid_value",
        )


def _check_format(request: ChatRequest) -> None:
    form = request.response_format
    if form is None:
        return
    kind = form.get("type") if isinstance(form, dict) else None
    if kind not in FORMATS:
        raise RefusedRequest(
            f"Invalid value: '{kind}'. Supported values are: {', '.join(repr(name) for name in FORMATS)}.",
            param="response_format.type",
            code="invalid_value",
        )
    if kind != "json_schema":
        return
    asked, place = form.get("json_schema"), "response_format.json_schema"
    if not isinstance(asked, dict) or not isinstance(asked.get("name"), str):
        raise RefusedRequest(
            f"Missing required parameter: '{place}.name'.", param=f"{place}.name", code="missing_required_parameter"
        )
    _check_name(asked["name"], f"{place}.name")
    problem = _form_problem(request.answer_schema, is_strict=asked.get("strict") is True)
    if problem:
        raise RefusedRequest(
            f"Invalid schema for response_format '{asked['name']}': {problem}.", param="response_format"
        )


def _form_problem(schema: Mapping[str, Any] | None, *, is_strict: bool) -> str:
    if schema is None or schema.get("type") != "object":
        return "schema must be a JSON Schema of 'type: \"object\"'"
    if not is_strict:
        return ""
    if schema.get("additionalProperties") is not False:
        return "'additionalProperties' is required to be supplied and to be false"
    names, required = schema.get("properties", {}), schema.get("required", [])
    missing = [name for name in names if name not in required]
    return f"'required' is required to include every key in properties. Missing '{missing[0]}'" if missing else ""


def _schema_problem(tool: Tool) -> str:
    if tool.parameters and tool.parameters.get("type") != "object":
        return "schema must be a JSON Schema of 'type: \"object\"'"
    undeclared = [name for name in tool.required if name not in tool.properties]
    return f"'required' names unknown properties: {undeclared}" if undeclared else ""


def _check_name(name: str, place: str) -> None:
    if not _NAME.match(name):
        raise RefusedRequest(
            f"Invalid '{place}': string does not match pattern. Expected '^[a-zA-Z0-9_-]+$'.",
            param=place,
            code="invalid_value",
        )


def _check_message(number: int, message: Message) -> None:
    place = f"messages.[{number}]"
    role = message.get("role")
    if role not in ROLES:
        raise RefusedRequest(
            f"Invalid value: '{role}'. Supported values are: {', '.join(repr(name) for name in ROLES)}.",
            param=f"{place}.role",
            code="invalid_value",
        )
    content = message.get("content")
    if not isinstance(content, str | list | None):
        raise RefusedRequest(
            f"Invalid type for '{place}.content': expected a string or an array of objects.",
            param=f"{place}.content",
            code="invalid_type",
        )
    for position, part in enumerate(content if isinstance(content, list) else ()):
        _check_part(f"{place}.content.[{position}]", role, part)
    if content is None and not (role == "assistant" and ("tool_calls" in message or message.get("refusal"))):
        raise RefusedRequest(
            f"Invalid value for 'content': expected a string, got null. ({place}.content)", param=f"{place}.content"
        )
    if "tool_calls" in message:
        _check_calls(place, message)


def _check_part(place: str, role: object, part: object) -> None:
    kind = part.get("type") if isinstance(part, dict) else None
    allowed = PARTS if role == "user" else PARTS[:1]
    if not isinstance(part, dict) or kind not in allowed:
        raise RefusedRequest(
            f"Invalid value: '{kind}'. Supported values are: {', '.join(repr(name) for name in allowed)}.",
            param=f"{place}.type",
            code="invalid_value",
        )
    if kind == "text" and not isinstance(part.get("text"), str):
        raise RefusedRequest(f"Missing required parameter: '{place}.text'.", param=f"{place}.text")
    image = part.get("image_url")
    if kind == "image_url" and not (isinstance(image, dict) and _URL.match(str(image.get("url")))):
        raise RefusedRequest(
            f"Invalid '{place}.image_url.url'. Expected a base64-encoded data URL with an image MIME type.",
            param=f"{place}.image_url.url",
            code="invalid_value",
        )


def _check_calls(place: str, message: Message) -> None:
    calls = message["tool_calls"]
    if not isinstance(calls, list) or not calls:
        raise RefusedRequest(
            f"Invalid '{place}.tool_calls': empty array. Expected an array with minimum length 1.",
            param=f"{place}.tool_calls",
            code="empty_array",
        )
    ids: set[str] = set()
    for position, (identity, name, _arguments) in enumerate(calls_of(message)):
        at = f"{place}.tool_calls[{position}]"
        if not identity or calls[position].get("type") != "function":
            raise RefusedRequest(f"Missing required parameter: '{at}.id' or '{at}.type'.", param=at)
        if identity in ids:
            raise RefusedRequest(f"Duplicate value for 'tool_call_id' of '{identity}' in {place}.", param=f"{at}.id")
        ids.add(identity)
        _check_name(name, f"{at}.function.name")
        if not isinstance(calls[position]["function"].get("arguments"), str):
            raise RefusedRequest(
                f"Missing required parameter: '{at}.function.arguments'.", param=f"{at}.function.arguments"
            )


def _check_results(messages: Sequence[Message]) -> None:
    """Each tool call is followed by exactly one tool message with its id before any other message."""
    expected: list[str] = []
    answered: set[str] = set()
    asked_at = 0
    for number, message in enumerate([*messages, {"role": "end"}]):
        if message.get("role") == "tool":
            identity = message.get("tool_call_id")
            if identity in answered:
                raise RefusedRequest(
                    f"Duplicate value for 'tool_call_id' of '{identity}'.", param=f"messages.[{number}]"
                )
            if identity not in expected:
                raise RefusedRequest(_TOOL_MESSAGE_ORPHANED, param=f"messages.[{number}].role")
            answered.add(str(identity))
            continue
        missing = [identity for identity in expected if identity not in answered]
        if missing:
            raise RefusedRequest(
                _TOOL_MESSAGES_MISSING.format(ids=", ".join(missing)), param=f"messages.[{asked_at}].role"
            )
        expected = [identity for identity, _name, _arguments in calls_of(message)]
        answered = set()
        asked_at = number
