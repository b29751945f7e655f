"""A command that is not taken, and the reasons that commands about a call have in common."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from pawl.errors import AlreadyDecided, CallNotPending, DeadlinePassed, PawlError
from pawl.job_store.ledger.rules.rows import CallRow
from pawl.values import CommandOutcome, DecisionKind


class Refused(Exception):
    """A command is not taken; `error` says why."""

    def __init__(self, outcome: CommandOutcome, error: PawlError) -> None:
        self.outcome = outcome
        self.error = error
        super().__init__(error.reason)


_DONE: Final = {
    DecisionKind.APPROVE: "approved",
    DecisionKind.EDIT: "edited and approved",
    DecisionKind.REJECT: "rejected",
    DecisionKind.ANSWER: "answered",
}


class Replaced(Refused):
    """A command of a session that lost the call to another of its client. Not kept: that one may send it again."""


def check_open(call: CallRow) -> None:
    """Refuse a command about a call that is settled, decided or reserved by an earlier command."""
    if call.state.is_terminal or call.reserved_by:
        check_undecided(call)
        raise Refused(CommandOutcome.LATE, CallNotPending())


def check_undecided(call: CallRow | None) -> None:
    """Refuse a command about a call that somebody has decided."""
    if call is not None and call.decision is not None:
        did = _DONE[call.decision.kind]
        raise Refused(
            CommandOutcome.LATE, AlreadyDecided(f"{call.tool_name} was {did} before, by {call.decision.user_id}")
        )


def check_deadline(call: CallRow, now: datetime) -> None:
    """Refuse a command about a call that had to be answered before `now`."""
    if call.deadline_time is not None and call.deadline_time <= now:
        raise Refused(CommandOutcome.LATE, DeadlinePassed())
