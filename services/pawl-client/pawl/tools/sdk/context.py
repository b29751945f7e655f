"""The context of a tool call: its identity, and operations such as progress, checkpoints, secrets and questions."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from pawl.chassis.ids import DEFAULT_AGENT
from pawl.chassis.process.tasks import Handover, save_nothing
from pawl.chassis.strict_json import JsonValue, dumps_canonical
from pawl.errors import InvalidJson
from pawl.tools.rules.definition import CHECKPOINT_BYTES_MAX, check_question
from pawl.tools.sdk.completion import CompletionToken
from pawl.tools.sdk.values import plain
from pawl.values import Question, QuestionKind


class ToolError(Exception):
    """An error that is meant for the model. The model reads its text, so it must not contain secrets.

    The model sees only the type of any other exception.
    """


class SecretNotFound(ToolError):
    """Raised when the deployment has no secret with this name. The model sees the name, but never a value."""


class QuestionDeclined(ToolError):
    """Raised when the user declines a question or does not answer in time, or when the question is withdrawn."""


class Superseded(ToolError):
    """Raised when a newer execution of the call has started, or when its conversation was erased. Do not catch it."""


class ResultTooLarge(ToolError):
    """Raised when the tool's return value is too large to transfer from the process that ran it."""


class OutcomeUnknown(Exception):
    """Raised when it is unknown whether the call took effect, for example because its process died during the call."""


class ToolCancelled(Exception):
    """Raised by `ToolContext.check_cancelled` if the call was cancelled or has timed out."""


def _no_secret(name: str) -> str:
    raise SecretNotFound(f"no secret named {name!r} is configured")


async def _nobody_to_ask(_question: Question) -> str:
    raise ToolError("only async tools that run in the registry can ask the user questions")


def _nobody_to_complete() -> CompletionToken:
    raise ToolError("completion tokens are available only to tools whose function runs in the registry")


_NEVER: Final = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """The context of a call. A tool receives it in the parameter that is annotated with this class.

    Safe to use from any thread. All fields have defaults, so that tests can create a context.
    """

    store_id: str = "local"
    user_id: str = "me"
    conversation_id: str = "conversation"
    run_id: str = "run"
    call_id: str = "call"
    # Number of executions of this call, including this one and any lost ones that may have started.
    attempt: int = 1
    # Time at which the call times out.
    deadline: datetime = _NEVER
    # The run's agent.
    agent_name: str = DEFAULT_AGENT
    # The latest value that an earlier execution of this call saved with `checkpoint`, or None.
    last_checkpoint: JsonValue = None
    # W3C `traceparent` of the call, to send with the tool's own requests; empty if there is none.
    traceparent: str = ""
    _cancelled: threading.Event = field(default_factory=threading.Event)
    # In tests that call the function directly, progress is discarded.
    _report: Callable[[float | None, str], None] = lambda _fraction, _message: None
    _find_secret: Callable[[str], str] = _no_secret
    _ask: Callable[[Question], Awaitable[str]] = _nobody_to_ask
    _begin: Callable[[], None] = lambda: None
    _save: Callable[[bytes], Future[None]] = save_nothing
    _token: Callable[[], CompletionToken] = _nobody_to_complete
    _will_restart: Callable[[], bool] = lambda: False
    _note_checkpoint: Callable[[], None] = lambda: None

    @property
    def will_restart(self) -> bool:
        """True if another process will restart the cancelled call. Leave work that runs elsewhere running."""
        return self._will_restart()

    @property
    def idempotency_key(self) -> str:
        """A key that is the same for every execution of this call and unique in the store."""
        return self.call_id

    @property
    def cancelled(self) -> bool:
        """True if the result is no longer needed. Sync tools should check this regularly."""
        return self._cancelled.is_set()

    def check_cancelled(self) -> None:
        """Raise ToolCancelled if the result is no longer needed. Do not catch the exception."""
        if self._cancelled.is_set():
            raise ToolCancelled

    def wait_cancelled(self, timeout_seconds: float) -> bool:
        """Wait in a sync tool, like `time.sleep`. Return True as soon as the call is cancelled, and False otherwise."""
        return self._cancelled.wait(timeout_seconds)

    def mark_started(self) -> None:
        """Report that the call may take effect from now on.

        Used by runners and by sources that forward calls. A call that ends earlier is reported as never started.
        """
        self._begin()

    def note_checkpoint(self) -> None:
        """Report that a checkpoint was stored elsewhere. Used by sources that forward calls."""
        self._note_checkpoint()

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        """Report progress to users: a message and, if it is known, a fraction between 0 and 1.

        Never blocks. Pawl keeps only the newest report and shows at most ten a second.
        """
        self._report(fraction, message)

    def checkpoint(self, value: Any) -> Handover:
        """Save progress. An execution that restarts the call finds the latest value in `last_checkpoint`.

        In an async tool, await this. In a sync tool, it returns once the value is saved. The saved value survives the
        end of any process. It must be JSON of at most 16 KiB.

        Raises:
            Superseded: A newer execution of the call has started, or its conversation was erased.
            ToolCancelled: The result is no longer needed.
            ToolError: The value is not JSON or too large.
        """
        return Handover(self._save(checkpoint_content(value)))

    def completion_token(self) -> CompletionToken:
        """Return a token for completing the call externally. The token is the same throughout an execution.

        In an async tool, await this. Hand the token out, and then return `Awaited()`. The call stays open until its
        deadline. The first completion ends the call, even while the tool is still running.

        Raises:
            ToolError: Calls of this tool cannot be completed externally.
        """
        return self._token()

    def secret(self, name: str) -> str:
        """Return a secret by name: the store's own secret or, if there is none, the deployment's common secret.

        If the value has at least 4 characters, it is masked in everything that the tool returns and reports.

        Raises:
            SecretNotFound: There is no secret with this name.
        """
        return self._find_secret(name)

    async def ask(
        self,
        question: str,
        *,
        why: str = "",
        kind: str = "clarification",
        options: Sequence[str] = (),
        answer_schema_json: bytes = b"",
    ) -> str:
        """Ask the user a question during the call. Return one of `options` or free text.

        Pawl refuses answers that do not match `answer_schema_json` (pawl.event.v1.Question describes how answers are
        parsed). The check is a convenience for users. The tool should still validate the answer.

        Only async tools can call this. The timeout is paused until the answer arrives, which may take days.

        A READ_ONLY or IDEMPOTENT tool does not wait. It is run again from the start once the answer has arrived. It
        must then ask the same questions in the same order. If a question was already answered, this returns
        immediately. Other tools wait here. If their process ends before the answer arrives, the outcome is UNKNOWN.
        Therefore, ask before any side effect.

        Raises:
            QuestionDeclined: No answer will come. Let the error propagate, or continue without an answer.
            ToolError: The question is invalid (for example, it is empty or has too many options).
        """
        if kind not in set(QuestionKind):
            raise ToolError(f"kind must be one of {', '.join(QuestionKind)}, got {kind:.100}")
        asked = Question(
            question=question,
            why=why,
            kind=QuestionKind(kind),
            options=tuple(options),
            answer_schema_json=answer_schema_json,
        )
        problem = check_question(asked)
        if problem:
            raise ToolError(problem)
        return await self._ask(asked)


def checkpoint_content(value: Any) -> bytes:
    """Return a checkpoint as JSON.

    Raises:
        ToolError: The value is not JSON or too large.
    """
    try:
        content = dumps_canonical(plain(value))
    except (TypeError, ValueError, RecursionError, InvalidJson) as error:
        raise ToolError(f"a checkpoint must be JSON: {error}") from None
    if len(content) > CHECKPOINT_BYTES_MAX:
        raise ToolError(f"the checkpoint is {len(content)} bytes, over the limit of {CHECKPOINT_BYTES_MAX}: save less")
    return content
