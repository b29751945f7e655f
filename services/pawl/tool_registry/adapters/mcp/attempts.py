"""The state of one call of a tool of an MCP server: the task that does it, what has gone wrong, and what comes next."""

from __future__ import annotations

from typing import Final

from pawl.chassis.strict_json import JsonValue
from pawl.tool_registry.app.execution.outcome import doubt
from pawl.tool_registry.domain.definition import ToolDefinition
from pawl.tool_registry.sdk.context import OutcomeUnknown, ResultTooLarge, ToolError
from pawl.values import EffectClass

# The connection may break once, and once turn out to be another user's.
ATTEMPTS_MAX: Final = 3
LOOKS_FAILED_MAX: Final = 3
"""Of a task, in a row. A server that is away for a while is none."""
PAUSE_SECONDS: Final = 2.0
PAUSE_SECONDS_MAX: Final = 60.0
_TASK: Final = "mcp_task"
# JSON-RPC's invalid request, method not found and invalid params. With others a server, or what stands before it, says
# that it cannot answer now.
_UNKNOWN: Final = frozenset({-32600, -32601, -32602})
_INTERNAL_ERROR: Final = -32603
_REPEATABLE: Final = frozenset({EffectClass.READ_ONLY, EffectClass.IDEMPOTENT})


class Fault(Exception):
    """An attempt at a call brought no result."""


class Lost(Fault):
    """The connection ended in the middle of it.

    `never_ran`: the server has refused it unseen. `is_too_large`: it sent more than
    can be read, for this call or for another one of the connection.
    """

    def __init__(self, problem: str, *, never_ran: bool = False, is_too_large: bool = False) -> None:
        self.problem = problem
        self.never_ran = never_ran
        self.is_too_large = is_too_large
        super().__init__(problem)


class Gone(Fault):
    """The task that does it is lost: `end` is the end of a call that ends with it.

    `was_cancelled`: its server has cancelled it, or who began it left.
    """

    def __init__(self, problem: str, end: ToolError | OutcomeUnknown, *, was_cancelled: bool = False) -> None:
        self.problem = problem
        self.end = end
        self.was_cancelled = was_cancelled
        super().__init__(problem)


class InDoubt(Fault):
    """A question was declined that may have been this call's: alone on a connection it is asked."""


class Refused(Fault):
    """The server answered with an error of the protocol; the message is its own, and the code."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        self.code = code
        super().__init__(message)


class TooLarge(Fault):
    """The server sent more than can be read, and this was its only call."""


class Garbled(Fault):
    """The server answered with what is no result."""


class Attempts:
    """The attempts at one call.

    The first goes on where an earlier execution of it has come to: with the task `task_id`, if it has begun one.
    """

    def __init__(self, definition: ToolDefinition, checkpoint: JsonValue) -> None:
        self._definition = definition
        self._was_begun = checkpoint is not None
        self._left = ATTEMPTS_MAX
        found = checkpoint.get(_TASK) if isinstance(checkpoint, dict) else None
        self.task_id = found if isinstance(found, str) else ""
        self.is_alone = False
        """True if the next attempt is to have a connection for itself, so that it is known whose fault it is."""

    @property
    def may_repeat(self) -> bool:
        """True if it does no harm to make the call again, whatever became of it."""
        return self._definition.effect in _REPEATABLE

    def unasked(self, error: ToolError) -> ToolError | OutcomeUnknown:
        """Return the end of a call about which its server may not be asked any more."""
        return OutcomeUnknown() if self._was_begun else error

    def again(self, fault: Fault) -> None:
        """Return if the call is to be made again after a fault, from its beginning.

        Raises:
            ToolError, ResultTooLarge, OutcomeUnknown: its end, if it is not.
        """
        problem = self._passing(fault)
        self.task_id = ""
        self.is_alone = self.is_alone or (isinstance(fault, Lost) and fault.is_too_large)
        self._left -= 1
        if not self._left:
            raise ToolError(f"the server of {self._definition.name} {problem}")

    def _passing(self, fault: Fault) -> str:
        """Return what a fault is, in words, if another attempt may do better."""
        name = self._definition.name
        match fault:
            case Lost(problem=problem, never_ran=never_ran) if never_ran or self.may_repeat:
                return f"went away: {problem}"
            case Gone(problem=problem, was_cancelled=was_cancelled) if self.may_repeat and (
                self.task_id or not was_cancelled
            ):
                return f"went away: {problem}"
            case Gone(end=end):
                raise end
            case InDoubt():
                return "asked something, and did not say in which call"
            case TooLarge():
                raise ResultTooLarge(f"{name} cannot be read: {fault}{doubt(self._definition)}")
            case Refused(code=code):
                # Not so much a refusal: what broke may have broken behind the effect, or on the way back.
                more = doubt(self._definition) if code == _INTERNAL_ERROR else ""
                raise ToolError(f"{name} was refused by its server: {fault}{more}")
            case Garbled() if self.may_repeat:
                raise ToolError(f"the server of {name} answered with what is no result")
            case _:
                raise OutcomeUnknown


class Looks:
    """The looks at one task until it has ended: of what goes wrong with them, nothing repeats itself for ever."""

    def __init__(self, task_id: str) -> None:
        self.task_id = task_id
        self._failures = 0
        self._pause_seconds = PAUSE_SECONDS
        self._status = ""
        self.is_alone = False
        """True if the next one is to have a connection for itself, so that it is known whose fault it is."""

    def begin(self) -> None:
        """Note that the server is asked for the task."""
        self._status = ""

    def saw(self, status: str) -> None:
        """Note that the server said how the task is. While it works, what went wrong before is over."""
        self._status = status
        if status == "working":
            self._failures, self._pause_seconds = 0, PAUSE_SECONDS

    def pause_seconds(self) -> float:
        """Return how long to wait before the next one where nothing came of the last: longer every time."""
        pause, self._pause_seconds = self._pause_seconds, min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)
        return pause

    def lost(self, lost: Lost) -> None:
        """Return if the task is to be looked at again after a connection broke.

        While its user is asked something one may break as often as it likes: the deadline of the call ends that.

        Raises:
            Gone: it has broken too often.
        """
        self.is_alone = self.is_alone or lost.is_too_large
        if self._status != "input_required":
            self._failed(lost.problem)

    def refused(self, refused: Refused) -> None:
        """Return if the task is to be looked at again after its server refused to say how it is, or its result.

        Raises:
            Refused: that is the end to which the task has come.
            Gone: the server does not know it any more, or was asked too often.
        """
        if self._status == "failed":
            raise refused
        if not self._status and refused.code in _UNKNOWN:
            raise Gone("it does not know the task any more", OutcomeUnknown())
        self._failed(f"it says of the task: {refused}")

    def _failed(self, problem: str) -> None:
        self._failures += 1
        if self._failures == LOOKS_FAILED_MAX:
            raise Gone(problem, OutcomeUnknown())


def checkpoint_of(task_id: str) -> dict[str, JsonValue]:
    """Return the checkpoint of a call that a task does."""
    return {_TASK: task_id}
