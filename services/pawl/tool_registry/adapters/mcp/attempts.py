"""What comes next after an attempt at a call of an MCP tool failed: another one, or the end of the call."""

from __future__ import annotations

from typing import Final

from pawl.chassis.strict_json import JsonValue
from pawl.tool_registry.domain.definition import EffectClass, ToolDefinition
from pawl.tool_registry.sdk.context import OutcomeUnknown, ResultTooLarge, ToolError
from pawl.tool_registry.sdk.outcome import doubt

ATTEMPTS_MAX: Final = 3
ASKED_MAX: Final = 3
"""How often in a row a server may fail to say how a task is. A server that is unavailable does not count."""
PAUSE_SECONDS: Final = 2.0
PAUSE_SECONDS_MAX: Final = 60.0
_TASK: Final = "mcp_task"
# JSON-RPC's invalid request, method not found and invalid params: of a task, that the server does not know it.
_UNKNOWN: Final = frozenset({-32600, -32601, -32602})
_INTERNAL_ERROR: Final = -32603


class Fault(Exception):
    """An attempt at a call brought no result; the text says why."""


class Lost(Fault):
    """The connection ended in the middle of it; `never_ran` if the server cannot have run the call."""

    def __init__(self, problem: str, *, never_ran: bool = False) -> None:
        super().__init__(problem)
        self.never_ran = never_ran


class Cancelled(Fault):
    """The server cancelled the task that does the call."""


class Refused(Fault):
    """The server answered with an error of the protocol, in its own words."""

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


class TooLarge(Fault):
    """The server sent more than can be read, and this was its only call."""


class Garbled(Fault):
    """The server answered with something that is no result."""


class Attempts:
    """The attempts at one call.

    A call that has started a task, `task_id`, asks for it at each attempt, also if an earlier execution started it.
    Other calls are made again only if that does no harm.
    """

    def __init__(self, definition: ToolDefinition, checkpoint: JsonValue) -> None:
        self._definition = definition
        self._was_begun = checkpoint is not None
        self._left = ATTEMPTS_MAX
        self._asked_in_vain = 0
        self._status = ""
        self._pause_seconds = PAUSE_SECONDS
        found = checkpoint.get(_TASK) if isinstance(checkpoint, dict) else None
        self.task_id = found if isinstance(found, str) else ""

    @property
    def may_repeat(self) -> bool:
        """True if it does no harm to make the call again, whatever happened to it."""
        return self._definition.effect in {EffectClass.READ_ONLY, EffectClass.IDEMPOTENT}

    def unasked(self, error: ToolError) -> ToolError | OutcomeUnknown:
        """Return the end of a call whose server cannot be asked about it."""
        return OutcomeUnknown() if self._was_begun or self.task_id else error

    def asks(self) -> None:
        """Note that the server is about to be asked how the task is."""
        self._status = ""

    def saw(self, status: str) -> None:
        """Note how the task is. Earlier faults are over while it works or waits for the user."""
        self._status = status
        if status in {"working", "input_required"}:
            self._asked_in_vain, self._pause_seconds = 0, PAUSE_SECONDS

    def pause_seconds(self) -> float:
        """Return how long to wait before the next question about a task: longer every time."""
        pause, self._pause_seconds = self._pause_seconds, min(2 * self._pause_seconds, PAUSE_SECONDS_MAX)
        return pause

    def again(self, fault: Fault) -> None:
        """Return if there is to be another attempt after a fault.

        Raises:
            ToolError, ResultTooLarge, OutcomeUnknown: the end of the call.
        """
        name = self._definition.name
        match fault:
            case TooLarge():
                raise ResultTooLarge(f"{name} cannot be read: {fault}{doubt(self._definition)}")
            case Garbled() if self.may_repeat:
                raise ToolError(f"the server of {name} answered with what is no result")
            case Garbled():
                raise OutcomeUnknown
            case Cancelled() if not self.may_repeat:
                raise ToolError(str(fault))
            case Refused(code=code) if not self.task_id or self._status == "failed":
                # What broke may have broken after the effect.
                more = doubt(self._definition) if code == _INTERNAL_ERROR else ""
                raise ToolError(f"{name} was refused by its server: {fault}{more}")
            case Lost() | Refused() if self.task_id and not self._is_unknown(fault):
                self._asked_in_vain += 1
                if self._asked_in_vain < ASKED_MAX:
                    return
        if not self.may_repeat and not (isinstance(fault, Lost) and fault.never_ran and not self.task_id):
            raise OutcomeUnknown
        self.task_id, self._asked_in_vain = "", 0
        self._left -= 1
        if not self._left:
            raise ToolError(f"the server of {name} has no result: {fault}")

    def _is_unknown(self, fault: Fault) -> bool:
        """Return whether the server has said that it does not know the task."""
        return isinstance(fault, Refused) and not self._status and fault.code in _UNKNOWN


def checkpoint_of(task_id: str) -> dict[str, JsonValue]:
    """Return the checkpoint of a call that a task does."""
    return {_TASK: task_id}
