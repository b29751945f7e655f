"""The script: what the server shall say instead of following its rules, and how often.

Steps are tried from the top; the first that matches and is not used up gives the reply. A request that no step takes
goes to the rules.

The parts of one answer, faults included: the vocabulary shared by the rules, the script file and the wire.

These are values without behaviour. `wire` turns a `Reply` into bytes, `server` sends them. The same types validate the
script file, so a misspelt field is reported with its place instead of being ignored.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

if TYPE_CHECKING:
    from pawl.model_server.request import ChatRequest


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


REQUESTS_COUNTED_MAX = 10_000
"""The number of different requests remembered to count repetitions; the oldest are forgotten first."""


class ScriptError(ValueError):
    """The script cannot be used. The text says what is wrong and where."""


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The requests that a step is for. Everything that is given must hold.

    `user_contains` looks for a piece of text in the last user message, ignoring case. `round` counts the assistant
    messages after it: 0 is the first model call for this prompt, 1 the call with the first results.
    """

    user_contains: str = ""
    round: int | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reply and when to give it.

    `times` limits how often, for each distinct list of messages: with 2, each request fails twice and its third attempt
    gets the next step, however many conversations run at once. Without `when` and `times` a step is used once in all.
    """

    reply: Reply
    when: When | None = None
    times: Positive | None = None


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole script file."""

    steps: tuple[Step, ...] = ()


def parse_script(text: bytes | str) -> Script:
    """Reads a script from JSON. Raises ScriptError with the place of the first mistake."""
    try:
        return msgspec.json.decode(text, type=Script)
    except msgspec.MsgspecError as error:
        raise ScriptError(f"The script is not valid: {error}") from error


def load_script(path: Path) -> Script:
    """Reads a script file. Raises ScriptError, also when the file cannot be read."""
    try:
        return parse_script(path.read_bytes())
    except OSError as error:
        raise ScriptError(f"The script {path} cannot be read: {error.strerror}.") from error
    except ScriptError as error:
        raise ScriptError(f"{path}: {error}") from error


class Player:
    """Plays one script: chooses the step for a request and counts its uses."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self._uses: OrderedDict[tuple[int, str], int] = OrderedDict()

    def choose(self, request: ChatRequest) -> Reply | None:
        """Returns the reply of the first step that takes this request and counts the use; None if there is none."""
        for number, step in enumerate(self.script.steps):
            if matches(step.when, request) and self._use(number, step, request):
                return step.reply
        return None

    def _use(self, number: int, step: Step, request: ChatRequest) -> bool:
        once_in_all = step.when is None and step.times is None
        if step.times is None and not once_in_all:
            return True
        counted = "" if once_in_all else hashlib.sha256(msgspec.json.encode(request.messages)).hexdigest()
        used = self._uses.get((number, counted), 0)
        if used >= (step.times or 1):
            return False
        self._uses[number, counted] = used + 1
        if len(self._uses) > REQUESTS_COUNTED_MAX:
            self._uses.popitem(last=False)
        return True


def matches(when: When | None, request: ChatRequest) -> bool:
    """Return whether a step with this condition is meant for this request."""
    if when is None:
        return True
    is_asked = when.user_contains.lower() in request.prompt.lower()
    return is_asked and (when.round is None or when.round == request.round)
