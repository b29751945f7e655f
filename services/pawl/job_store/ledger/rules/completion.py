"""The news that a call has been completed from outside: its run asks tool-registry for the end."""

from __future__ import annotations

import msgspec

from pawl.chassis.ids import RunKey
from pawl.errors import RunNotFound
from pawl.job_store.ledger.rules import inbox, turn
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork


class NoteCompletion(msgspec.Struct, frozen=True, kw_only=True):
    """Tell a run that one of its calls was completed; `payload` is opaque: what its owner will read."""

    run: RunKey
    payload: bytes

    @property
    def row_keys(self) -> RowKeys:
        """The rows it needs."""
        return RowKeys(runs=(self.run,), commands_of=(self.run,))

    def apply(self, unit: UnitOfWork) -> None:
        """Put the news into the inbox, once while it is unread; a run that has ended wants none.

        Raises:
            RunNotFound: no such run.
        """
        run = unit.runs.get(self.run)
        if run is None:
            raise RunNotFound
        if run.state.is_terminal or any(command.payload == self.payload for command in unit.inbox(run)):
            return
        incoming = inbox.arrived(unit, run, name=inbox.COMPLETED, payload=self.payload)
        turn.wake(unit, inbox.accept(unit, run, incoming))
