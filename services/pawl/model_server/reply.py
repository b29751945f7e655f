"""The parts of one answer, faults included: the vocabulary shared by the rules, the script file and the wire.

These are values without behaviour. `wire` turns a `Reply` into bytes, `server` sends them. The same types validate the
script file, so a misspelt field is reported with its place instead of being ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

ReasoningField = Literal["reasoning_content", "reasoning", "both"]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
UsagePlace = Literal["end", "first", "every", "finish", "never"]


class _Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of everything below: immutable, keyword only, unknown fields refused."""


class ToolCall(_Value, frozen=True, kw_only=True):
    """One tool call as it goes over the wire, sound or broken.

    `arguments` may be a JSON object (sent as its compact text) or a string, which is sent exactly as written: that is
    how to send invalid JSON, or nothing at all. `index` defaults to the position in the reply; `null` leaves it out of
    every fragment and `id: ""` leaves out the id, as some servers do.
    """

    name: str
    arguments: dict[str, Any] | str = msgspec.field(default_factory=dict)
    id: str | msgspec.UnsetType = msgspec.UNSET
    index: int | msgspec.UnsetType | None = msgspec.UNSET


class Status(_Value, frozen=True, kw_only=True, tag="status"):
    """Answers with an HTTP error. `body` is any JSON, or text sent as it is; the default is OpenAI's error object."""

    status: Annotated[int, msgspec.Meta(ge=400, le=599)]
    body: Any = msgspec.UNSET
    retry_after: str | int | float | None = None


class HangBeforeHeaders(_Value, frozen=True, kw_only=True, tag="hang_before_headers"):
    """Takes the request and never answers."""


class Hang(_Value, frozen=True, kw_only=True, tag="hang"):
    """Falls silent after some chunks, with the connection open."""

    after_chunks: NotNegative = 1


class Reset(_Value, frozen=True, kw_only=True, tag="reset"):
    """Aborts the connection (RST) after some chunks; before the headers when `after_chunks` is 0."""

    after_chunks: NotNegative = 1


class Drop(_Value, frozen=True, kw_only=True, tag="drop"):
    """Closes the connection in the middle of the HTTP body."""

    after_chunks: NotNegative = 1


class Truncate(_Value, frozen=True, kw_only=True, tag="truncate"):
    """Ends the HTTP body cleanly, but without finish reason, usage and `[DONE]`."""

    after_chunks: NotNegative = 1


class Garble(_Value, frozen=True, kw_only=True, tag="garble"):
    """Puts a chunk that is not JSON after some chunks and goes on as if nothing had happened."""

    after_chunks: NotNegative = 1
    data: str = '{"choices": [{"delta": {"content": "…'


class ErrorObject(_Value, frozen=True, kw_only=True, tag="error_object"):
    """Sends an error object inside the stream after some chunks, then ends the body."""

    after_chunks: NotNegative = 1
    error: dict[str, Any] = msgspec.field(
        default_factory=lambda: {
            "message": "The server had an error.",
            "type": "server_error",
            "param": None,
            "code": 500,
        }
    )


class JsonInsteadOfStream(_Value, frozen=True, kw_only=True, tag="json_instead_of_stream"):
    """Answers a streaming request with one JSON completion."""


class EmptyStream(_Value, frozen=True, kw_only=True, tag="empty_stream"):
    """Answers with an event stream that ends at once; with `done`, after `[DONE]`."""

    done: bool = False


class NullChoices(_Value, frozen=True, kw_only=True, tag="null_choices"):
    """Puts a chunk whose `choices` is null after some chunks and goes on."""

    after_chunks: NotNegative = 1


Fault = (
    Status
    | HangBeforeHeaders
    | Hang
    | Reset
    | Drop
    | Truncate
    | Garble
    | ErrorObject
    | JsonInsteadOfStream
    | EmptyStream
    | NullChoices
)


class Reply(_Value, frozen=True, kw_only=True):
    """One answer of the model.

    Sent in this order: role, reasoning, text, refusal, tool calls, finish reason, usage, `[DONE]`. `finish_reason`
    defaults to what fits the content; any text may be given, and `null` leaves it out. `chunk_characters` is the length
    of each piece of text, and `argument_characters` of each piece of tool-call arguments. `keep_alive_comments` puts an
    SSE comment before every chunk.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    refusal: str = ""
    finish_reason: str | msgspec.UnsetType | None = msgspec.UNSET
    usage: UsagePlace = "end"
    usage_tokens: dict[str, Any] | None = None
    reasoning_field: ReasoningField | None = None
    chunk_characters: Positive = 12
    argument_characters: Positive = 8
    chunk_delay: Seconds = 0.0
    header_delay: Seconds = 0.0
    keep_alive_comments: bool = False
    done_marker: bool = True
    fault: Fault | None = None
