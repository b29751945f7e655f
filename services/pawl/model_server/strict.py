"""Refuses requests that OpenAI refuses, so that tests catch histories that real providers would reject.

The error messages resemble the messages of OpenAI's chat-completions API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from pawl.model_server.request import Assistant, RefusedRequest, ToolMessage, calls_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pawl.model_server.request import ChatRequest, Form, Message, ResponseFormat

_TOOL_MESSAGES_MISSING = (
    "An assistant message with 'tool_calls' must be followed by tool messages responding to each 'tool_call_id'. "
    "The following tool_call_ids did not have response messages: {ids}"
)
_TOOL_MESSAGE_ORPHANED = (
    "Invalid parameter: messages with role 'tool' must be a response to a preceding message with 'tool_calls'."
)


def check_request(request: ChatRequest, *, reasoning_echo: bool = False) -> None:
    """Check OpenAI's rules that the types of a request cannot express.

    With `reasoning_echo`, also refuse assistant messages that have tool calls but no `reasoning_content`, as some
    DeepSeek models do.

    Raises:
        RefusedRequest: OpenAI would refuse the request.
    """
    _check_tools(request)
    if request.response_format is not None:
        _check_format(request.response_format)
    for message in request.messages:
        if isinstance(message, Assistant):
            _check_answer(message, reasoning_echo=reasoning_echo)
    _check_results(request.messages)


def _check_tools(request: ChatRequest) -> None:
    names = [tool.function.name for tool in request.tools]
    if len(set(names)) < len(names):
        raise RefusedRequest("Tool names must be unique.")
    for tool in request.tools:
        parameters = tool.function.parameters
        undeclared = [name for name in parameters.required if name not in parameters.properties]
        if undeclared:
            problem = f"'required' names unknown properties: {undeclared}"
            raise RefusedRequest(f"Invalid schema for function '{tool.function.name}': {problem}.")
    if request.tool_choice is not None and not names:
        raise RefusedRequest("'tool_choice' is only allowed when 'tools' are specified.")
    if request.forced_tool is not None and request.forced_tool not in names:
        raise RefusedRequest(f"Tool choice '{request.forced_tool}' not found in 'tools' parameter.")


def _check_format(asked: ResponseFormat) -> None:
    form = asked.json_schema
    if asked.type != "json_schema":
        return
    if form is None:
        raise RefusedRequest("Missing required parameter: 'response_format.json_schema'.")
    if problem := _form_problem(form):
        raise RefusedRequest(f"Invalid schema for response_format '{form.name}': {problem}.")


def _form_problem(form: Form) -> str:
    if form.schema.get("type") != "object":
        return "schema must be a JSON Schema of 'type: \"object\"'"
    if not form.strict:
        return ""
    if form.schema.get("additionalProperties") is not False:
        return "'additionalProperties' is required to be supplied and to be false"
    missing = [name for name in form.schema.get("properties", {}) if name not in form.schema.get("required", [])]
    return f"'required' is required to include every key in properties. Missing '{missing[0]}'" if missing else ""


def _check_answer(message: Assistant, *, reasoning_echo: bool) -> None:
    if message.content is None and not message.tool_calls:
        raise RefusedRequest("Invalid value for 'content': expected a string, got null.")
    ids = [call.id for call in message.tool_calls]
    if len(set(ids)) < len(ids):
        raise RefusedRequest(f"Duplicate value for 'tool_call_id' among {ids}.")
    if reasoning_echo and ids and message.reasoning_content is msgspec.UNSET:
        raise RefusedRequest("Missing `reasoning_content` field in the assistant message with tool calls.")


def _check_results(messages: Sequence[Message]) -> None:
    expected: list[str] = []
    answered: set[str] = set()
    for message in (*messages, None):
        if isinstance(message, ToolMessage):
            if message.tool_call_id in answered:
                raise RefusedRequest(f"Duplicate value for 'tool_call_id' of '{message.tool_call_id}'.")
            if message.tool_call_id not in expected:
                raise RefusedRequest(_TOOL_MESSAGE_ORPHANED)
            answered.add(message.tool_call_id)
            continue
        missing = [identity for identity in expected if identity not in answered]
        if missing:
            raise RefusedRequest(_TOOL_MESSAGES_MISSING.format(ids=", ".join(missing)))
        expected = [call.id for call in calls_of(message)] if message is not None else []
        answered = set()
