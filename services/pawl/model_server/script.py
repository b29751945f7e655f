"""Scripted answers, including faults, that replace the rules.

Steps are tried in order, and the first one that matches and is not used up determines the reply. If no step matches,
the rules answer. The types in this module describe replies for the rules, the script file and the wire format. They
reject unknown fields, so that a misspelt field is reported with its position.
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
    """A tool call by the model.

    `arguments` is a JSON object, which is sent as compact JSON, or a string, which is sent unchanged. A string can be
    invalid JSON or empty.
    """

    name: str
    arguments: dict[str, Any] | str = msgspec.field(default_factory=dict)


class Fault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fault after `after_chunks` chunks of a stream. With 0, `hang` and `reset` come before the response head.

    `status` answers with an HTTP error whose `body` is JSON, or text that is sent unchanged. `hang` stops sending.
    `reset` resets the connection. `drop` closes it in the middle of the HTTP body. `truncate` ends the body cleanly,
    but without a finish reason, usage or `[DONE]`. `garble` sends a chunk that is not JSON and continues.
    `error_object` sends an error inside the stream and ends it. `empty_stream` ends the stream before its first chunk.
    """

    type: Literal["status", "hang", "reset", "drop", "truncate", "garble", "error_object", "empty_stream"]
    after_chunks: NotNegative = 1
    status: Annotated[int, msgspec.Meta(ge=400, le=599)] = 500
    body: Any = msgspec.UNSET
    retry_after: float | None = None


class Reply(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One answer from the model.

    Its parts are sent in this order: role, reasoning, text, tool calls, finish reason, usage, `[DONE]`. By default,
    `finish_reason` depends on the content. Text and arguments are sent in pieces of `chunk_characters`.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: str = ""
    chunk_characters: Positive = 12
    chunk_delay: Seconds = 0.0
    fault: Fault | None = None


# Maximum number of distinct requests that are counted. The oldest are dropped first.
REQUESTS_COUNTED_MAX = 10_000


class ScriptError(ValueError):
    """Raised when the script is invalid. The message contains the problem and its position."""


class When(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conditions of a step. All of them must be met.

    `user_contains` must occur in the last user message, ignoring case. `round` is the number of assistant messages
    after that message. It is 0 for the first model call for the prompt, and 1 for the call with the first results.
    """

    user_contains: str = ""
    round: int | None = None


class Step(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reply with its conditions.

    `times` limits how often the step is used for each distinct list of messages. If it is 2, the third attempt at a
    request gets the next step. A step with neither `when` nor `times` is used once.
    """

    reply: Reply
    when: When | None = None
    times: Positive | None = None


class Script(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    steps: tuple[Step, ...] = ()


def parse_script(text: bytes | str) -> Script:
    """Parse a script. Raise ScriptError with the position of the first mistake."""
    try:
        return msgspec.json.decode(text, type=Script)
    except msgspec.MsgspecError as error:
        raise ScriptError(f"The script is not valid: {error}") from error


def load_script(path: Path) -> Script:
    """Read a script file. Raise ScriptError if it cannot be read or is invalid."""
    try:
        return parse_script(path.read_bytes())
    except OSError as error:
        raise ScriptError(f"The script {path} cannot be read: {error.strerror}.") from error
    except ScriptError as error:
        raise ScriptError(f"{path}: {error}") from error


class Player:
    def __init__(self, script: Script) -> None:
        self.script = script
        self._uses: OrderedDict[tuple[int, str], int] = OrderedDict()

    def choose(self, request: ChatRequest) -> Reply | None:
        """Return the reply of the first matching step and count its use, or None if no step matches."""
        for number, step in enumerate(self.script.steps):
            if matches(step.when, request) and self._use(number, step, request):
                return step.reply
        return None

    def _use(self, number: int, step: Step, request: ChatRequest) -> bool:
        is_once = step.when is None and step.times is None
        if step.times is None and not is_once:
            return True
        counted = "" if is_once else hashlib.sha256(msgspec.json.encode(request.messages)).hexdigest()
        used = self._uses.get((number, counted), 0)
        if used >= (step.times or 1):
            return False
        self._uses[number, counted] = used + 1
        if len(self._uses) > REQUESTS_COUNTED_MAX:
            self._uses.popitem(last=False)
        return True


def matches(when: When | None, request: ChatRequest) -> bool:
    if when is None:
        return True
    is_asked = when.user_contains.lower() in request.prompt.lower()
    return is_asked and (when.round is None or when.round == request.round)
