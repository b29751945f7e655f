"""The parts of one answer, faults included: the vocabulary shared by the rules, the script file and the wire.

These are values without behaviour. `wire` turns a `Reply` into bytes, `server` sends them. The same types validate the
script file, so a misspelt field is reported with its place instead of being ignored.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

NotNegative = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class ToolCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tool call as it goes over the wire.

    `arguments` may be a JSON object (sent as its compact text) or a string, which is sent exactly as written: that is
    how to send invalid JSON, or nothing at all.
    """

    name: str
    arguments: dict[str, Any] | str = msgspec.field(default_factory=dict)


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What goes wrong, after some chunks of a stream; before the headers with 0.

    `status` answers with an HTTP error instead: `body` is any JSON, or text sent unchanged. `hang` falls silent,
    `reset` aborts the connection, `drop` closes it in the middle of the HTTP body. `truncate` ends the body cleanly,
    but without finish reason, usage and `[DONE]`. `garble` sends a chunk that is not JSON and continues. `error_object`
    sends an error inside the stream and ends it. `empty_stream` ends without a chunk.
    """

    type: Literal["status", "hang", "reset", "drop", "truncate", "garble", "error_object", "empty_stream"]
    after_chunks: NotNegative = 1
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    body: Any = msgspec.UNSET
    retry_after: float | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer of the model.

    Sent in this order: role, reasoning, text, tool calls, finish reason, usage, `[DONE]`. `finish_reason` defaults to
    what fits the content; any text may be given. `chunk_characters` is the length of each piece of text and arguments.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = ""
    chunk_characters: Positive = 12
    chunk_delay: Seconds = 0.0
    fault: Fault | None = None
