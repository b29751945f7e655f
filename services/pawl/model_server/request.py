"""A chat-completions request: its form as OpenAI has it, and what the rest of this package reads from it."""

from __future__ import annotations

import dataclasses
import re
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

# What jobs report: a line that says so, and an array of JSON.
_NOTICES = re.compile(r"^\[Pawl tells [^\n]*:\]\n(\[[^\n]*\])\n*", re.MULTILINE)
# Lines that are quoted, and the one in brackets that says whose they are; and what came from outside.
_QUOTED = re.compile(r"^\[[^\n]*:\]\n(?:> [^\n]*(?:\n|\Z))+\n*|\{\"event\":\{\"source\":[^\n]*$", re.MULTILINE)

Name = Annotated[str, msgspec.Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]
ImageAddress = Annotated[
    str, msgspec.Meta(pattern="^(https://|data:image/(png|jpeg|gif|webp);base64,[A-Za-z0-9+/]+={0,2}$)")
]


class RefusedRequest(Exception):
    """The request breaks the protocol; the client gets this as an error in OpenAI's shape."""

    def __init__(self, message: str, *, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status

    def body(self) -> dict[str, Any]:
        """The error object as OpenAI sends it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"  # noqa: PLR2004
        return {"error": {"message": self.message, "type": kind, "param": None, "code": self.code}}


class TextPart(msgspec.Struct, tag_field="type", tag="text"):
    """A part of a message that is text."""

    text: str


class ImageUrl(msgspec.Struct):
    """The address of an image, or the image itself in base64."""

    url: ImageAddress


class ImagePart(msgspec.Struct, tag_field="type", tag="image_url"):
    """A part of a message that is an image."""

    image_url: ImageUrl


class Function(msgspec.Struct):
    """The function that a call names, and its arguments as JSON."""

    name: Name
    arguments: str


class Call(msgspec.Struct):
    """A tool call of the model."""

    type: Literal["function"]
    id: Annotated[str, msgspec.Meta(min_length=1)]
    function: Function


class System(msgspec.Struct, tag_field="role", tag="system"):
    """The instructions."""

    content: str | list[TextPart]


class Developer(msgspec.Struct, tag_field="role", tag="developer"):
    """The instructions, as newer models have them."""

    content: str | list[TextPart]


class User(msgspec.Struct, tag_field="role", tag="user"):
    """A message of the user."""

    content: str | list[TextPart | ImagePart]


class Assistant(msgspec.Struct, tag_field="role", tag="assistant"):
    """An answer of the model."""

    content: str | list[TextPart] | None = None
    tool_calls: Annotated[tuple[Call, ...], msgspec.Meta(min_length=1)] = ()
    reasoning_content: str | msgspec.UnsetType | None = msgspec.UNSET


class ToolMessage(msgspec.Struct, tag_field="role", tag="tool"):
    """The result of a tool call."""

    tool_call_id: str
    content: str | list[TextPart]


Message: TypeAlias = System | Developer | User | Assistant | ToolMessage


class Parameters(msgspec.Struct):
    """The JSON Schema of a tool's arguments, as far as it is read."""

    type: Literal["object"] = "object"
    properties: dict[str, Any] = {}
    required: list[str] = []


class Tool(msgspec.Struct):
    """A tool that the model may call."""

    name: Name
    parameters: Parameters = msgspec.field(default_factory=Parameters)


class OfferedTool(msgspec.Struct):
    """A tool as a request offers it."""

    type: Literal["function"]
    function: Tool


class Form(msgspec.Struct):
    """The form of the answer: a JSON Schema with a name."""

    name: Name
    schema: dict[str, Any] = {}
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """The kind of answer that is asked for."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: Form | None = None


class ForcedFunction(msgspec.Struct):
    """The name of a tool that must be called."""

    name: str


class ToolChoice(msgspec.Struct):
    """The tool that must be called."""

    function: ForcedFunction


class StreamOptions(msgspec.Struct):
    """What a stream has beside the answer."""

    include_usage: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One tool call made since the last user message, with what came back (None: nothing yet)."""

    name: str
    content: str | None
    round: int


class ChatRequest(msgspec.Struct, kw_only=True):
    """One model call. `strict.check_request` says what else OpenAI would refuse."""

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
        """The text of the last user message, without what it quotes of others and what jobs report; empty if none."""
        position = self._last_user()
        return "" if position is None else _QUOTED.sub("", _NOTICES.sub("", text_of(self.messages[position])))

    @property
    def notices(self) -> list[Mapping[str, Any]]:
        """The notices of jobs that came with the last user message or after it, in order."""
        since = self.messages[self._last_user() or 0 :]
        texts = (text_of(message) for message in since if isinstance(message, User))
        return [notice for text in texts for array in _NOTICES.findall(text) for notice in _read_notices(array)]

    @property
    def since_prompt(self) -> tuple[Message, ...]:
        """The messages after the last one of the user."""
        position = self._last_user()
        return self.messages if position is None else self.messages[position + 1 :]

    @property
    def asks_title(self) -> bool:
        """True if it is to name a conversation."""
        systems = (message for message in self.messages if isinstance(message, System))
        return any(text_of(message).startswith("Write a title for the conversation") for message in systems)

    @property
    def round(self) -> int:
        """The number of answers of the model since the last user message."""
        return sum(isinstance(message, Assistant) for message in self.since_prompt)

    @property
    def forced_tool(self) -> str | None:
        """The tool that the caller insists on, if it names one."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, ToolChoice) else None

    @property
    def answer_schema(self) -> Mapping[str, Any] | None:
        """The JSON Schema that the answer is to fit, if one is asked for."""
        form = self.response_format.json_schema if self.response_format else None
        return form.schema if form else None

    @property
    def offered(self) -> list[Tool]:
        """The tools that may be called: none where the caller forbids them."""
        return [] if self.tool_choice == "none" else [tool.function for tool in self.tools]

    def tool(self, name: str) -> Tool | None:
        """The offered tool of that name; one that ends in `*` is the first that begins so."""
        if name.endswith("*"):
            return next((tool for tool in self.offered if tool.name.startswith(name[:-1])), None)
        return next((tool for tool in self.offered if tool.name == name), None)

    def results(self) -> list[Result]:
        """The tool calls since the last user message, in order, each with its result.

        A call's result is looked for before the next assistant message only, because ids may come again later.
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
        """Return whether a message begins something new: notices amid the calls for a prompt do not."""
        message = self.messages[position]
        if not isinstance(message, User):
            return False
        is_amid = position > 0 and isinstance(self.messages[position - 1], ToolMessage)
        return not is_amid or bool(_NOTICES.sub("", text_of(message)).strip())


def calls_of(message: Message) -> tuple[Call, ...]:
    """The tool calls of a message; only answers of the model have any."""
    return message.tool_calls if isinstance(message, Assistant) else ()


def text_of(message: Message) -> str:
    """The text of a message, whether it is given as a string or in parts, each of which begins a line."""
    if isinstance(message.content, str):
        return message.content
    return "\n".join(part.text for part in message.content or () if isinstance(part, TextPart) and part.text)


def _read_notices(array: str) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(array, type=list[dict[str, Any]])
    except (msgspec.MsgspecError, RecursionError):
        return []


def read_request(data: bytes) -> ChatRequest:
    """Read the body of POST /v1/chat/completions.

    Raises:
        RefusedRequest: it has another shape.
    """
    try:
        return msgspec.json.decode(data, type=ChatRequest)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RefusedRequest(f"Invalid request: {error}.") from error
