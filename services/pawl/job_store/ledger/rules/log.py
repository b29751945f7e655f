"""Writes events. Only this module assigns their seq, time, id and type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec.structs import replace

from pawl.chassis.ids import ConversationId, StoreId
from pawl.job_store.ledger.rules.events import Event, EventBody, RunChanged, StarterFired
from pawl.job_store.ledger.rules.rows import RunRow
from pawl.job_store.ledger.rules.unit_of_work import UnitOfWork
from pawl.job_store.schedules.rules import FireOutcome, FireRow, ScheduleRow, StarterRow

_OUTPUT: Final = "output.delta"


def write(unit: UnitOfWork, run: RunRow, bodies: Sequence[EventBody], *, attempt: int = 0) -> RunRow:
    """Append `bodies` to the log of `run`, in order, and store the run. Return the run with its new `last_seq`.

    The run inside a RunChanged gets the seq and time of its event.
    """
    seq, state_time = run.last_seq, run.state_time
    events = []
    for body in bodies:
        seq += 1
        if isinstance(body, RunChanged):
            state_time = unit.now
            shown = replace(body.run, last_seq=seq, update_time=unit.now)
            body = replace(body, run=shown)  # noqa: PLW2901  # same event
        events.append(
            Event(
                store_id=run.store_id,
                conversation_id=run.conversation_id,
                run_id=run.run_id,
                seq=seq,
                time=unit.now,
                attempt=attempt,
                event_id=unit.ids.new("evt"),
                type=body.type,
                body=body,
            )
        )
    unit.events.add(events)
    update_time = unit.now if events else run.update_time
    return unit.put_run(replace(run, last_seq=seq, update_time=update_time, state_time=state_time))


def changed_conversations(unit: UnitOfWork) -> frozenset[tuple[StoreId, ConversationId]]:
    """Return the conversations that the operations of `unit` changed, not counting the output of runs."""
    rows = [*unit.conversations.created(), *(row for _, row in unit.conversations.changed())]
    changed = {(row.store_id, row.conversation_id) for row in rows}
    changed |= {(event.store_id, event.conversation_id) for event in unit.events.rows if event.type != _OUTPUT}
    return frozenset(changed)


def write_fire(unit: UnitOfWork, starter: StarterRow, fire: FireRow) -> None:
    """Add a life-cycle event for the outcome of a firing. Firings that are waiting are reported later."""
    if fire.outcome is FireOutcome.WAITING:
        return
    name = "schedule" if isinstance(starter, ScheduleRow) else "trigger"
    body = StarterFired(starter=name, name=starter.name, user_id=starter.user_id, fire=fire)
    event = Event(
        store_id=starter.store_id,
        conversation_id=fire.conversation_id,
        run_id=fire.run_id,
        seq=0,
        time=unit.now,
        attempt=0,
        event_id=unit.ids.new("evt"),
        type=body.type,
        body=body,
    )
    unit.off_log.add([event])
