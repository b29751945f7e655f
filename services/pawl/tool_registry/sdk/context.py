"""The context of a tool: what it is told about the call it serves, and what it can do meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from pawl.chassis.ids import DEFAULT_AGENT
from pawl.chassis.process.tasks import Handover, kept
from pawl.chassis.strict_json import JsonValue, dumps_canonical
from pawl.errors import InvalidJson
from pawl.tool_registry.rules.definition import check_question
from pawl.tool_registry.rules.execution import CHECKPOINT_BYTES_MAX
from pawl.tool_registry.sdk.completion import CompletionToken
from pawl.tool_registry.sdk.values import plain
from pawl.values import Question, QuestionKind


class ToolError(Exception):
    """An error that is meant for the model: its text goes there, so it holds no secret.

    Any other exception reaches the model as its type only.
    """


class SecretNotFound(ToolError):
    """The deployment has no secret of that name. The model sees the name, never a value."""


class QuestionDeclined(ToolError):
    """Nobody answers the question: it was refused, withdrawn, or its time is over."""


class Superseded(ToolError):
    """Another execution of the call has begun since, or nothing of its conversation is kept any more. Let it pass."""


class ResultTooLarge(ToolError):
    """The value that the tool returned is too large to be passed on from where it ran."""


class OutcomeUnknown(Exception):
    """Nobody knows whether the call had its effect, for example because what ran it went away in the middle."""


class ToolCancelled(Exception):
    """The call was cancelled or ran out of time; raised by `ToolContext.check_cancelled`."""


def _no_secret(name: str) -> str:
    raise SecretNotFound(f"no secret named {name!r} is configured")


async def _nobody_to_ask(_question: Question) -> str:
    raise ToolError("only async tools that run in the registry can ask their user something")


def _nobody_to_complete() -> CompletionToken:
    raise ToolError("there is no completion token here: only in a registry that runs the function of the tool itself")


_NEVER: Final = datetime.max.replace(tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolContext:
    """The call that a tool serves. A parameter annotated with this class gets it.

    Safe to use from any thread. Every field has a default, so that a test of a
    tool can make one.
    """

    store_id: str = "local"
    user_id: str = "me"
    conversation_id: str = "conversation"
    run_id: str = "run"
    call_id: str = "call"
    attempt: int = 1
    """Executions of this call begun so far, this one included, and those that may have been begun and were lost."""
    deadline: datetime = _NEVER
    """The time at which it is cancelled for taking too long."""
    agent_name: str = DEFAULT_AGENT
    """The agent of its run."""
    last_checkpoint: JsonValue = None
    """The newest value that earlier executions of this call have kept by `checkpoint`; None if they kept none."""
    _cancelled: threading.Event = field(default_factory=threading.Event)
    # Nobody listens in a test of the function itself.
    _report: Callable[[float | None, str], None] = lambda _fraction, _message: None
    _find_secret: Callable[[str], str] = _no_secret
    _ask: Callable[[Question], Awaitable[str]] = _nobody_to_ask
    _begin: Callable[[], None] = lambda: None
    _save: Callable[[bytes], Future[None]] = kept
    _token: Callable[[], CompletionToken] = _nobody_to_complete
    _begins_again: Callable[[], bool] = lambda: False

    @property
    def begins_again(self) -> bool:
        """True if it is cancelled for another process to begin it again: what goes on elsewhere for it is to go on."""
        return self._begins_again()

    @property
    def idempotency_key(self) -> str:
        """The same for every execution of this call, and for no other call."""
        return self.call_id

    @property
    def cancelled(self) -> bool:
        """True if the result is not wanted any more. A sync tool should look now and then."""
        return self._cancelled.is_set()

    def check_cancelled(self) -> None:
        """Return if the result is still wanted.

        Raises:
            ToolCancelled: it is not; let it pass.
        """
        if self._cancelled.is_set():
            raise ToolCancelled

    def wait_cancelled(self, timeout_seconds: float) -> bool:
        """Wait in a sync tool, in place of time.sleep; returns early, with True, when cancelled."""
        return self._cancelled.wait(timeout_seconds)

    def mark_begun(self) -> None:
        """Say that the call may have its effect from now on.

        For what runs tools, and for sources that hand calls on: a call that ends
        before this is said not to have been begun.
        """
        self._begin()

    def progress(self, fraction: float | None = None, message: str = "") -> None:
        """Say how far it is, from 0 to 1 if known, and what it does, for people.

        Never blocks. Only the newest is kept, and shown at most ten times a second.
        """
        self._report(fraction, message)

    def checkpoint(self, value: Any) -> Handover:
        """Keep how far the call is: an execution that begins it again finds the newest value in `last_checkpoint`.

        To be awaited in an async tool; in a sync one it returns when the value is kept,
        which survives the end of every process then. It is JSON of at most 16 KiB.

        Raises:
            Superseded: this execution is not the newest one of the call any more.
            ToolCancelled: the result is not wanted any more.
            ToolError: the value is no JSON, or too large.
        """
        return Handover(self._save(checkpoint_content(value)))

    def completion_token(self) -> CompletionToken:
        """Return the token by which somebody outside completes the call; always the same one.

        To be awaited in an async tool. Give it away, then return `Awaited()`: the call
        goes on waiting without the tool, until its deadline. Whoever completes it first
        gives it its end, also while the tool still runs.

        Raises:
            ToolError: calls of this tool cannot be completed from outside.
        """
        return self._token()

    def secret(self, name: str) -> str:
        """Return the secret of that name, that of the call's store before the deployment's common one.

        Its value is taken out of what the tool returns and reports.

        Raises:
            SecretNotFound: there is none.
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
        """Ask the user something in mid-call, and return the answer: one of `options`, or free text.

        An answer that does not fit the schema is refused when it is given
        (`answer_schema_json` of pawl.event.v1.Question says how it is read). That
        is a help for the user and no promise to the tool.

        For async tools only. Time stands still for the call meanwhile, which may be
        days. A READ_ONLY or IDEMPOTENT tool is not kept waiting: it is run again from
        its start when the answer is there, and must ask the same questions in the
        same order, which are then answered at once. The others wait where they are:
        if their process ends before the answer comes, nobody knows whether they had
        their effect, so ask before it.

        Raises:
            QuestionDeclined: nobody answers. Let it pass, or go on without.
            ToolError: the question is none (an empty text, too many options).
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
    """Return the JSON of a checkpoint.

    Raises:
        ToolError: the value is none, or too large.
    """
    try:
        content = dumps_canonical(plain(value))
    except (TypeError, ValueError, RecursionError, InvalidJson) as error:
        raise ToolError(f"a checkpoint must be JSON: {error}") from None
    if len(content) > CHECKPOINT_BYTES_MAX:
        raise ToolError(f"a checkpoint of {len(content)} bytes is over the limit of {CHECKPOINT_BYTES_MAX}: keep less")
    return content
