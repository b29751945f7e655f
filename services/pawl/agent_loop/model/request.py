"""A model call: its request, the pieces of its answer, and its errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from pawl.agent_loop.loop.rules.run import FailureClass
from pawl.chassis.ids import StoreId
from pawl.values import Usage

_OUTAGE_SECONDS_MIN: Final = 30.0


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call to a model.

    `messages`, `tools`, `tool_choice`, `response_format` and `reasoning_effort` are in chat-completions format and are
    sent unchanged. Fields that are None are omitted.
    """

    model: str
    store_id: StoreId = StoreId("")
    # Name of the model server; empty for the default one.
    server: str = ""
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    temperature: float | None = None
    output_tokens_max: int | None = None
    response_format: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    headers_timeout_seconds: float = 30.0
    idle_timeout_seconds: float = 45.0
    # The round's remaining active time, from the start of the call.
    deadline_seconds: float = 120.0

    def shows_outage(self, problem: Problem) -> bool | None:
        """Return whether the failed call shows that the server cannot answer any request.

        Return None if this is unknown. Clients choose timeouts, so a short timeout proves nothing.
        """
        if problem.reason == ROUND_TIMEOUT:
            return None
        if problem.reason == HEADERS_TIMEOUT:
            return self.headers_timeout_seconds >= _OUTAGE_SECONDS_MIN or None
        return problem.retryable and (problem.reason == NETWORK or problem.reason.startswith("HTTP_5"))


class TextPiece(msgspec.Struct, frozen=True, kw_only=True):
    text: str


class ReasoningPiece(msgspec.Struct, frozen=True, kw_only=True):
    text: str


class CallPiece(msgspec.Struct, frozen=True, kw_only=True):
    """A fragment of a tool call. Any field may be missing. See `Assembly` for how fragments are matched."""

    index: int | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    # Unknown fields, as a JSON object that is structured like a call; empty if there are none.
    fields_json: bytes = b""


class RefusalPiece(msgspec.Struct, frozen=True, kw_only=True):
    text: str


class ProviderState(msgspec.Struct, frozen=True, kw_only=True):
    """Unknown fields of the message, as a JSON object. They are sent back to the server byte for byte."""

    fields_json: bytes


class UsageReport(Usage, frozen=True, kw_only=True):
    """The usage of a model call so far. A later report replaces an earlier one.

    `prompt_bytes` is the prompt's size if the model server reported its tokens, and otherwise 0.
    """

    model_calls: int = 1
    prompt_bytes: int = 0


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """The model server has accepted the request. `request_sha256` is the SHA-256 of the request's body, in hex."""

    request_sha256: str = ""
    output_tokens_max: int | None = None


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The end of the answer, as the model server reported it. `reason` is informational."""

    reason: str


Piece: TypeAlias = Sent | TextPiece | ReasoningPiece | CallPiece | RefusalPiece | ProviderState | UsageReport | Finished

ROUND_TIMEOUT: Final = "ROUND_TIMEOUT"
NETWORK: Final = "NETWORK"
CONTENT_FILTER: Final = "CONTENT_FILTER"
EMPTY_ANSWER: Final = "EMPTY_ANSWER"
HEADERS_TIMEOUT: Final = "HEADERS_TIMEOUT"
# The server was not called, because too many calls in a row failed with an outage.
UNAVAILABLE: Final = "PROVIDER_UNAVAILABLE"
# The store's model server is not in the limits file of this agent-loop.
SERVER_UNKNOWN: Final = "MODEL_SERVER_UNKNOWN"
_OUTAGES: Final = frozenset({NETWORK, HEADERS_TIMEOUT, UNAVAILABLE})
_NOT_SENT: Final = frozenset({NETWORK, UNAVAILABLE, SERVER_UNKNOWN})

# Lower-case finish reasons of an answer that reached a limit.
CUT_OFF: Final = frozenset({"length", "max_tokens", "model_length", "max_output_tokens"})


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of a model call. If `retryable` is set, the call can be retried after `retry_after_seconds`.

    `reason` is used in RoundRetrying. `message` is one sentence for the user and contains no secret.
    """

    reason: str
    message: str
    failure_class: FailureClass = FailureClass.PROVIDER
    retryable: bool = True
    retry_after_seconds: float | None = None
    # True if the server refused the request's content for a reason other than its length.
    refuses_content: bool = False

    @property
    def outcome(self) -> str:
        """The outcome of the call in metrics: `timeout`, or the failure class in lower case."""
        return "timeout" if self.reason.endswith("_TIMEOUT") else self.failure_class.lower()

    @property
    def is_outage(self) -> bool:
        """True if the model server is unreachable or cannot answer now, regardless of the request."""
        return self.retryable and (self.reason in _OUTAGES or self.reason.startswith("HTTP_"))

    @property
    def is_free(self) -> bool:
        """True if no model received the prompt, so the call cost no tokens."""
        return self.reason in _NOT_SENT or self.reason.startswith("HTTP_")


class ModelError(Exception):
    """Raised when a model call has failed. Lower layers do not retry. The caller decides what to do."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(f"{problem.reason}: {problem.message}")


class ModelPort(Protocol):
    def stream(self, request: ModelRequest) -> AsyncGenerator[Piece, None]:
        """Call the model and yield the pieces of its answer as they arrive.

        Use it inside `contextlib.aclosing`, which closes the connection when the consumer is cancelled or stops early.
        A stream that ends normally is complete, and one of its last pieces is `Finished`. Deadlines count only while
        the consumer awaits a piece. Text may contain NUL and lone surrogates, which `Assembly` and `Coalescer` replace.

        Raises:
            ModelError: The call failed. Discard its pieces if the call is retried.
        """
