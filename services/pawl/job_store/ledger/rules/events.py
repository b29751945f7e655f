"""Entries of a run's log as values. `ledger/rpc/events.py` defines their wire format."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar, Final, TypeAlias

import msgspec

from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.job_store.ledger.rules import call_table, run_table
from pawl.job_store.ledger.rules.rows import CallRow, MessageRow, RunRow
from pawl.job_store.ledger.rules.states import OperatorAct
from pawl.job_store.schedules.rules import FireRow
from pawl.values import CallState, RunState, WaitKind

_OPEN: Final = frozenset({RunState.RUNNING, RunState.WAITING})
# What a job waits for between iterations.
_QUIET: Final = frozenset({WaitKind.TIME, WaitKind.AGENT})


class RunChanged(msgspec.Struct, frozen=True, kw_only=True):
    """The run changed its state or its waits, or was created (`from_state` is then None).

    `from_waits` lists the waits before the change.
    """

    from_state: RunState | None
    from_waits: tuple[int, ...] = ()
    run: RunRow

    @property
    def type(self) -> str:
        return run_table.EVENT_TYPES[self.run.state]

    @property
    def lifecycle_type(self) -> str:
        """The life-cycle event type. Pauses and resumes of jobs are reported, but individual iterations are not."""
        if not self.run.reports_to:
            return self.type
        if _is_quiet(self.from_state, self.from_waits) and _is_quiet(self.run.state, self.run.waits):
            return ""
        if WaitKind.PAUSED in self.run.waits:
            return "job.paused"
        is_resumed = WaitKind.PAUSED in self.from_waits and self.run.state in _OPEN
        return "job.resumed" if is_resumed else self.type


def _is_quiet(state: RunState | None, waits: tuple[int, ...]) -> bool:
    return state in _OPEN and _QUIET.issuperset(waits)


class CallChanged(msgspec.Struct, frozen=True, kw_only=True):
    """A call changed its state or its holder, or was created (`from_state` is then None)."""

    from_state: CallState | None
    call: CallRow
    duration_seconds: float = 0.0

    @property
    def type(self) -> str:
        """The event type for the call's state. While a client holds the call, it is `tool.executing`."""
        return call_table.EVENT_TYPES[CallState.RUNNING if self.call.is_leased else self.call.state]


class MessageAdded(msgspec.Struct, frozen=True, kw_only=True):
    type: ClassVar[str] = "message.added"
    message: MessageRow
    user_id: UserId


class ToolProgressed(msgspec.Struct, frozen=True, kw_only=True):
    type: ClassVar[str] = "tool.progress"
    call: CallRow
    fraction: float | None
    message: str


class ToppedUp(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens were added to the budget. `token_budget` is the new total."""

    type: ClassVar[str] = "run.topped_up"
    tokens: int
    token_budget: int
    user_id: UserId


class OwnerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event from the owner of the run about output, a round, progress or a warning."""

    type: str
    body: bytes


class OperatorActed(msgspec.Struct, frozen=True, kw_only=True):
    """An operator acted on the run. `call_id` is set for RESOLVED."""

    type: ClassVar[str] = "operator.acted"
    user_id: UserId
    act: OperatorAct
    call_id: CallId = CallId("")
    reason: str = ""


class StarterFired(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule or a trigger (see `starter`) has fired. This event is not in the log of any run."""

    starter: str
    name: str
    user_id: UserId
    fire: FireRow

    @property
    def type(self) -> str:
        return f"{self.starter}.fired"


EventBody: TypeAlias = (
    RunChanged | CallChanged | MessageAdded | ToolProgressed | OwnerEvent | OperatorActed | ToppedUp | StarterFired
)


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of a run's log.

    `attempt` is the epoch of the worker that wrote the event, or 0 if no worker wrote it.

    An event with `seq` 0 is not in any log, and need not have a run. Only the life cycle reports it.
    """

    store_id: StoreId
    conversation_id: ConversationId
    run_id: RunId
    seq: int
    time: datetime
    attempt: int
    event_id: str
    type: str
    body: EventBody

    @property
    def lifecycle_type(self) -> str:
        """The life-cycle event type. It is empty if the life cycle does not report the event.

        The life cycle reports changes to runs, and firings of schedules and triggers. It also reports the start and end
        of approval requests and of questions to other users.
        """
        match self.body:
            case RunChanged():
                return self.body.lifecycle_type
            case StarterFired():
                return self.type
            case CallChanged(call=call) if call.state is CallState.AWAITING_APPROVAL:
                return "run.awaiting_approval"
            case CallChanged(from_state=CallState.AWAITING_APPROVAL):
                return "run.approval_settled"
            case CallChanged(call=call) if call.asks_another and call.state is CallState.ASKED:
                return "run.awaiting_answer"
            case CallChanged(from_state=CallState.ASKED, call=call) if call.asks_another:
                return "run.answer_settled"
            case _:
                return ""
