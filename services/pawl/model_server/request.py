"""A chat-completions request as the rest of this package sees it."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Message = dict[str, Any]

# What jobs tell: a line that says so, and an array of JSON.
_NOTICES = re.compile(r"^\[Pawl tells [^\n]*:\]\n(\[[^\n]*\])\n*", re.MULTILINE)
# Lines that are quoted, and the one in brackets that says whose they are; and what came from outside.
_QUOTED = re.compile(r"^\[[^\n]*:\]\n(?:> [^\n]*(?:\n|\Z))+\n*|\{\"event\":\{\"source\":[^\n]*$", re.MULTILINE)


class RefusedRequest(Exception):
    """The request breaks the protocol; the client gets this as an error in OpenAI's shape."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status

    def body(self) -> dict[str, Any]:
        """The error object as OpenAI sends it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"  # noqa: PLR2004
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool the model may call: its name and the JSON Schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the top-level arguments."""
        found = self.parameters.get("properties")
        return found if isinstance(found, dict) else {}

    @property
    def required(self) -> Sequence[str]:
        """The names of the arguments that must be given."""
        found = self.parameters.get("required")
        return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One tool call made since the last user message, with what came back (None: nothing yet)."""

    name: str
    arguments: str
    content: str | None
    round: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One model call, read but not judged: `strict` says whether OpenAI would take it."""

    model: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    tool_choice: Any = None
    response_format: Any = None
    reasoning_effort: Any = None
    stream: bool = False
    include_usage: bool = False

    @property
    def prompt(self) -> str:
        """The text of the last user message, without what it quotes of others and what jobs tell; empty if none."""
        position = self._last_user()
        return "" if position is None else _QUOTED.sub("", _NOTICES.sub("", text_of(self.messages[position])))

    @property
    def notices(self) -> tuple[Mapping[str, Any], ...]:
        """The notices of jobs that came with the last user message or after it, in order."""
        since = self.messages[self._last_user() or 0 :]
        texts = (text_of(message) for message in since if message.get("role") == "user")
        found = (_read_notices(text) for told in texts for text in _NOTICES.findall(told))
        return tuple(notice for array in found for notice in array)

    @property
    def since_prompt(self) -> tuple[Message, ...]:
        """The messages after the last one of the user."""
        position = self._last_user()
        return self.messages if position is None else self.messages[position + 1 :]

    @property
    def asks_title(self) -> bool:
        """True if it is to name a conversation."""
        systems = (message for message in self.messages if message.get("role") == "system")
        return any(text_of(message).startswith("Write a title for the conversation") for message in systems)

    @property
    def round(self) -> int:
        """The number of answers of the model since the last user message."""
        return sum(message.get("role") == "assistant" for message in self.since_prompt)

    @property
    def has_images(self) -> bool:
        """True if a message shows an image."""
        contents = (message.get("content") for message in self.messages)
        parts = (part for content in contents if isinstance(content, list) for part in content)
        return any(isinstance(part, dict) and part.get("type") == "image_url" for part in parts)

    @property
    def forced_tool(self) -> str | None:
        """The tool the caller insists on, if it names one."""
        choice = self.tool_choice
        function = choice.get("function") if isinstance(choice, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        return name if isinstance(name, str) else None

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """The JSON Schema that the answer is to fit, if one is asked for."""
        form = self.response_format
        asked = form.get("json_schema") if isinstance(form, dict) else None
        schema = asked.get("schema") if isinstance(asked, dict) else None
        return schema if isinstance(schema, dict) else None

    def tool(self, name: str) -> Tool | None:
        """The offered tool of that name; None also when the caller forbids tools."""
        if self.tool_choice == "none":
            return None
        return next((tool for tool in self.tools if tool.name == name), None)

    def results(self) -> list[Result]:
        """The tool calls since the last user message, in order, each with its result.

        A call's result is looked for before the next assistant message only, because ids may come again later.
        """
        found: list[Result] = []
        messages = self.since_prompt
        rounds = [position for position, message in enumerate(messages) if message.get("role") == "assistant"]
        for number, (start, end) in enumerate(pairwise([*rounds, len(messages)])):
            contents = {str(message.get("tool_call_id")): text_of(message) for message in messages[start + 1 : end]}
            found.extend(
                Result(name=name, arguments=arguments, content=contents.get(call_id), round=number)
                for call_id, name, arguments in calls_of(messages[start])
            )
        return found

    def _last_user(self) -> int | None:
        last = len(self.messages) - 1
        return next((i for i in range(last, -1, -1) if self._is_prompt(i)), None)

    def _is_prompt(self, position: int) -> bool:
        """Return whether a message begins something new: notices amid the calls for a prompt do not."""
        message, before = self.messages[position], self.messages[position - 1] if position else {}
        if message.get("role") != "user":
            return False
        return before.get("role") != "tool" or bool(_NOTICES.sub("", text_of(message)).strip())


def calls_of(message: Message) -> Iterator[tuple[str, str, str]]:
    """Yields id, name and arguments of each tool call of an assistant message; what is malformed comes out empty."""
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        function = function if isinstance(function, dict) else {}
        identity = call.get("id") if isinstance(call, dict) else None
        yield str(identity or ""), str(function.get("name") or ""), str(function.get("arguments") or "")


def _read_notices(text: str) -> Sequence[Mapping[str, Any]]:
    try:
        notices: list[dict[str, Any]] = msgspec.json.decode(text, type=list[dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError):
        return []
    return notices


def text_of(message: Message) -> str:
    """The text of a message, whether it is given as a string or in parts, each of which begins a line."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "\n".join(str(part["text"]) for part in parts if isinstance(part, dict) and part.get("text"))


def read_request(data: bytes) -> ChatRequest:
    """Reads the body of POST /v1/chat/completions. Raises RefusedRequest if it is not even of the right shape."""
    try:
        body = msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RefusedRequest("We could not parse the JSON body of your request.") from error
    if not isinstance(body, dict):
        raise RefusedRequest("The body of the request must be a JSON object.")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise RefusedRequest("you must provide a model parameter", param="model")
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedRequest(
            "Missing required parameter: 'messages'.", param="messages", code="missing_required_parameter"
        )
    for number, message in enumerate(messages):
        if not isinstance(message, dict):
            raise RefusedRequest("Invalid type: expected an object.", param=f"messages.[{number}]", code="invalid_type")
    options = body.get("stream_options")
    return ChatRequest(
        model=model,
        messages=tuple(messages),
        tools=tuple(_read_tools(body.get("tools"))),
        tool_choice=body.get("tool_choice"),
        response_format=body.get("response_format"),
        reasoning_effort=body.get("reasoning_effort"),
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _read_tools(tools: object) -> Iterator[Tool]:
    if tools is None:
        return
    if not isinstance(tools, list) or not tools:
        raise RefusedRequest("Invalid 'tools': expected a non-empty array.", param="tools", code="invalid_type")
    for number, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or tool.get("type") != "function":
            raise RefusedRequest(f"Invalid 'tools[{number}]': expected a function.", param=f"tools[{number}].type")
        name = function.get("name")
        parameters = function.get("parameters", {})
        if not isinstance(name, str):
            raise RefusedRequest(
                f"Missing required parameter: 'tools[{number}].function.name'.",
                param=f"tools[{number}].function.name",
                code="missing_required_parameter",
            )
        if not isinstance(parameters, dict):
            raise RefusedRequest(
                f"Invalid schema for function '{name}': the schema must be an object.",
                param=f"tools[{number}].function.parameters",
                code="invalid_function_parameters",
            )
        yield Tool(name=name, parameters=parameters)
