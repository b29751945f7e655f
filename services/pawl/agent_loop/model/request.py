"""A model call: what is asked, the pieces that come back, and how it can fail."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from typing import Any, Final, Protocol, TypeAlias

import msgspec

from pawl.agent_loop.loop.rules.run import FailureClass
from pawl.values import Usage


class ModelRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a model.

    `messages`, `tools`, `tool_choice`, `response_format` and `reasoning_effort` are
    in the form of the chat-completions protocol and go to the model server as they
    are; None leaves a field out.
    """

    model: str
    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str | Mapping[str, Any] | None = None
    temperature: float | None = None
    output_tokens_max: int | None = None
    response_format: Mapping[str, Any] | None = None
    reasoning_effort: str | None = None
    headers_timeout_seconds: float = 30.0
    idle_timeout_seconds: float = 45.0
    deadline_seconds: float = 120.0
    """The rest of the round's active time, from the start of the call."""


class TextPiece(msgspec.Struct, frozen=True, kw_only=True):
    """More of the answer's text."""

    text: str


class ReasoningPiece(msgspec.Struct, frozen=True, kw_only=True):
    """More of the model's reasoning."""

    text: str


class CallPiece(msgspec.Struct, frozen=True, kw_only=True):
    """More of a tool call. Any field may be missing; see `Assembly` for what belongs together."""

    index: int | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    fields_json: bytes = b""
    """More of its fields that Pawl does not know: a JSON object in the form of a call; empty for none."""


class RefusalPiece(msgspec.Struct, frozen=True, kw_only=True):
    """More of a refusal."""

    text: str


class ProviderState(msgspec.Struct, frozen=True, kw_only=True):
    """More fields of the message that Pawl does not know: a JSON object. The server gets them back byte for byte."""

    fields_json: bytes


class UsageReport(Usage, frozen=True, kw_only=True):
    """Usage of this call so far. A later report replaces an earlier one.

    `prompt_bytes` is the size of the prompt whose tokens the model server did report, else 0.
    """

    model_calls: int = 1
    prompt_bytes: int = 0


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The model server says that the answer is complete. `reason` is informative only."""

    reason: str


Piece: TypeAlias = TextPiece | ReasoningPiece | CallPiece | RefusalPiece | ProviderState | UsageReport | Finished

ROUND_TIMEOUT: Final = "ROUND_TIMEOUT"
NETWORK: Final = "NETWORK"
CONTENT_FILTER: Final = "CONTENT_FILTER"
EMPTY_ANSWER: Final = "EMPTY_ANSWER"
HEADERS_TIMEOUT: Final = "HEADERS_TIMEOUT"
UNAVAILABLE: Final = "PROVIDER_UNAVAILABLE"
"""It was not asked: it has not answered many calls in a row."""
_OUTAGES: Final = frozenset({NETWORK, HEADERS_TIMEOUT, UNAVAILABLE})

CUT_OFF: Final = frozenset({"length", "max_tokens", "model_length", "max_output_tokens"})
"""Finish reasons, in small letters, of an answer that reached a limit before its end."""


class Problem(msgspec.Struct, frozen=True, kw_only=True):
    """The failure of a model call, which is made again, if `retryable`, after at least `retry_after_seconds`.

    `reason` goes into RoundRetrying. `message` is one sentence for the user and holds no secret.
    """

    reason: str
    message: str
    failure_class: FailureClass = FailureClass.PROVIDER
    retryable: bool = True
    retry_after_seconds: float | None = None
    refuses_content: bool = False
    """True if the model server does not take what the request says, and not for its length."""

    @property
    def is_outage(self) -> bool:
        """True if the model server cannot be reached or cannot answer now, whatever the request."""
        return self.retryable and (self.reason in _OUTAGES or self.reason.startswith("HTTP_"))


class ModelError(Exception):
    """A model call failed. Nothing is retried below this error: whoever catches it decides, by its problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(f"{problem.reason}: {problem.message}")


class ModelPort(Protocol):
    """A model server."""

    def stream(self, request: ModelRequest) -> AsyncGenerator[Piece, None]:
        """Call the model and give the pieces of its answer as they come.

        Consume it inside `contextlib.aclosing`: that closes the connection when
        the consumer is cancelled or stops early. A stream that ends normally is
        whole, and one `Finished` is among its last pieces; every other end
        raises. Deadlines count only while the next piece is awaited. Its texts may
        have NUL and lone surrogates, which `Assembly` and `Coalescer` replace.

        Raises:
            ModelError: the call failed; pieces given before are void if it is
                made again.
        """
