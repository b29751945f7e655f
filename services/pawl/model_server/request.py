"""Parses chat-completions requests in OpenAI's format."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

# Job notices in the form in which agent-loop writes them (`loop.rules.history`): a header line, then a JSON array.
_NOTICES = re.compile(r"^\[Pawl reports [^\n]*:\]\n(\[[^\n]*\])\n*", re.MULTILINE)
# Quoted lines that follow a header in brackets with their source, and events from outside.
_QUOTED = re.compile(r"^\[[^\n]*:\]\n(?:> [^\n]*(?:\n|\Z))+\n*|\{\"event\":\{\"source\":[^\n]*$", re.MULTILINE)

Name = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
ImageAddress = Annotated[
    str, msgspec.Meta(pattern="^(https://|data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}$)")
]


class RefusedRequest(Exception):
    """Raised when a request violates the protocol. The client gets an error in OpenAI's format."""

    def __init__(self, message: str, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"  # noqa: PLR2004
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    text: str


class ImageUrl(msgspec.Struct):
    url: ImageAddress


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    image_url: ImageUrl


class Function(msgspec.Struct):
    name: Name
    arguments: str


class Call(msgspec.Struct):
    type: Literal["function"]
    id: Annotated[str, msgspec.Meta(min_length=1)]
    function: Function


class System(msgspec.Struct, tag_field="role", tag="system"):
    content: str | list[TextPart]


class Developer(msgspec.Struct, tag_field="role", tag="developer"):
    content: str | list[TextPart]


class User(msgspec.Struct, tag_field="role", tag="user"):
    content: str | list[TextPart | ImagePart]


class Assistant(msgspec.Struct, tag_field="role", tag="assistant"):
    content: str | list[TextPart] | None = None
    tool_calls: Annotated[tuple[Call, ...], msgspec.Meta(min_length=1)] = ()
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET


class ToolMessage(msgspec.Struct, tag_field="role", tag="tool"):
    tool_call_id: str
    content: str | list[TextPart]


Message: TypeAlias = System | Developer | User | Assistant | ToolMessage


class Parameters(msgspec.Struct):
    """Parts of a tool's arguments schema that this server reads."""

    type: Literal["object"] = "object"
    properties: dict[str, Any] = {}
    required: list[str] = []


class Tool(msgspec.Struct):
    name: Name
    parameters: Parameters = msgspec.field(default_factory=Parameters)


class OfferedTool(msgspec.Struct):
    type: Literal["function"]
    function: Tool


class Form(msgspec.Struct):
    """An answer format: a named JSON Schema."""

    name: Name
    schema: dict[str, Any] = {}
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Form | None = None


class ForcedFunction(msgspec.Struct):
    name: str


class ToolChoice(msgspec.Struct):
    function: ForcedFunction


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A tool call since the last user message. `content` is its result, or None if it has no result yet."""

    name: str
    content: str | None
    round: int


class ChatRequest(msgspec.Struct, kw_only=True):
    """One model call. `strict.check_request` checks OpenAI's rules that these types cannot express."""

    model: Annotated[str, msgspec.Meta(min_length=1)]
    messages: Annotated[tuple[Message, ...], msgspec.Meta(min_length=1)]
    tools: Annotated[tuple[OfferedTool, ...], msgspec.Meta(min_length=1, max_length=128)] = ()
    tool_choice: str | ToolChoice | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def prompt(self) -> str:
        """The text of the last user message, without quotes and job notices. Empty if there is no user message."""
        position = self._last_user()
        return "" if position is None else _QUOTED.sub("", _NOTICES.sub("", text_of(self.messages[position])))

    @property
    def notices(self) -> list[Mapping[str, Any]]:
        """Job notices since the last user message, in order."""
        since = self.messages[self._last_user() or 0 :]
        texts = (text_of(message) for message in since if isinstance(message, User))
        return [notice for text in texts for array in _NOTICES.findall(text) for notice in _read_notices(array)]

    @property
    def since_prompt(self) -> tuple[Message, ...]:
        position = self._last_user()
        return self.messages if position is None else self.messages[position + 1 :]

    @property
    def asks_title(self) -> bool:
        systems = (message for message in self.messages if isinstance(message, System))
        return any(text_of(message).startswith("Write a title for the conversation") for message in systems)

    @property
    def round(self) -> int:
        """The number of times that the model has answered since the last user message."""
        return sum(isinstance(message, Assistant) for message in self.since_prompt)

    @property
    def forced_tool(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, ToolChoice) else None

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        form = self.response_format.json_schema if self.response_format else None
        return form.schema if form else None

    @property
    def offered(self) -> list[Tool]:
        """Tools that may be called. Empty if `tool_choice` is "none"."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools]

    def tool(self, name: str) -> Tool | None:
        """Return an offered tool by name, or None if it is not offered.

        A name that ends in `*` matches the first tool with that prefix.
        """
        if name.endswith("*"):
            return next((tool for tool in self.offered if tool.name.startswith(name[:-1])), None)
        return next((tool for tool in self.offered if tool.name == name), None)

    def results(self) -> list[Result]:
        """Return the tool calls since the last user message, in order, with their results.

        A call's result must come before the next assistant message, because call ids may repeat after it.
        """
        found: list[Result] = []
        messages = self.since_prompt
        rounds = [position for position, message in enumerate(messages) if isinstance(message, Assistant)]
        for number, (start, end) in enumerate(pairwise([*rounds, len(messages)])):
            between = [message for message in messages[start:end] if isinstance(message, ToolMessage)]
            contents = {message.tool_call_id: text_of(message) for message in between}
            found += [
                Result(name=call.function.name, content=contents.get(call.id), round=number)
                for call in calls_of(messages[start])
            ]
        return found

    def _last_user(self) -> int | None:
        last = len(self.messages) - 1
        return next((i for i in range(last, -1, -1) if self._is_prompt(i)), None)

    def _is_prompt(self, position: int) -> bool:
        """Return whether a message starts a new prompt. Job notices directly after a tool result do not."""
        message = self.messages[position]
        if not isinstance(message, User):
            return False
        is_amid = position > 0 and isinstance(self.messages[position - 1], ToolMessage)
        return not is_amid or bool(_NOTICES.sub("", text_of(message)).strip())


def calls_of(message: Message) -> tuple[Call, ...]:
    return message.tool_calls if isinstance(message, Assistant) else ()


def text_of(message: Message) -> str:
    """Return the text of a message. Text parts are joined by newlines."""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in message.content or () if isinstance(part, TextPart) and part.text)


def _read_notices(array: str) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(array, type=list[dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError):
        return []


def read_request(data: bytes) -> ChatRequest:
    """Parse the body of POST /v1/chat/completions.

    Raises:
        RefusedRequest: The body is invalid.
    """
    try:
        return msgspec.json.decode(data, type=ChatRequest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RefusedRequest(f"Invalid request: {error}.") from error
