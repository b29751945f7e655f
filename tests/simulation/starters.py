"""In-memory rows of triggers, events and lanes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pawl.chassis.ids import RunKey
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork
from pawl.job_store.triggers.rules import EventKey, EventRow, LaneKey, LaneRow, TriggerKey, TriggerRow
from pawl.values import Overlap


class Fired(NamedTuple):
    """A run that an event started. `beside` is the previous run of its lane, which was still open if `is_busy`."""

    event_id: str
    run_id: str
    overlap: Overlap
    beside: str
    is_busy: bool


@dataclass
class TriggerTables:
    triggers: dict[TriggerKey, TriggerRow] = field(default_factory=dict)
    events: dict[EventKey, EventRow] = field(default_factory=dict)
    lanes: dict[LaneKey, LaneRow] = field(default_factory=dict)
    fired: list[Fired] = field(default_factory=list)

    def load(self, unit: UnitOfWork, named: Sequence[RowKeys]) -> RowKeys:
        for key in dict.fromkeys(key for keys in named for key in keys.triggers):
            if key in self.triggers:
                unit.triggers.load(key, self.triggers[key])
        wanted = dict.fromkeys(key for keys in named for key in keys.trigger_events)
        for lane_key in dict.fromkeys(key for keys in named for key in keys.lanes):
            if lane_key in self.lanes:
                lane = self.lanes[lane_key]
                unit.lanes.load(lane_key, lane)
                wanted.update({lane.waiting: None} if lane.event_id else {})
        for event_key in wanted:
            if event_key in self.events:
                unit.trigger_events.load(event_key, self.events[event_key])
        last = [RunKey(row.store_id, row.last_run_id) for _, row in unit.triggers.items() if row.last_run_id]
        before = tuple(RunKey(row.store_id, row.last_run_id) for _, row in unit.lanes.items() if row.last_run_id)
        # Runs of lanes may be stopped.
        return RowKeys(runs=(*last, *before), ends=before, calls_of=before, commands_of=before)

    def store(self, unit: UnitOfWork) -> None:
        started = {row.run_id: row for _, row in unit.trigger_events.items() if row.run_id}
        for before, after in unit.lanes.changed():
            if after.last_run_id != before.last_run_id and after.last_run_id in started:
                self._note(unit, before, started[after.last_run_id])
        self.triggers.update(unit.triggers.items())
        self.events.update(unit.trigger_events.items())
        self.lanes.update(unit.lanes.items())

    def _note(self, unit: UnitOfWork, before: LaneRow, event: EventRow) -> None:
        run = unit.runs.get(RunKey(before.store_id, before.last_run_id))
        is_busy = run is not None and not run.state.is_terminal
        overlap = self.triggers[TriggerKey(event.store_id, event.trigger_id)].definition.overlap
        self.fired.append(Fired(event.event_id, event.run_id, overlap, before.last_run_id, is_busy))

    def remove(self, key: TriggerKey) -> None:
        del self.triggers[key]
        for lane in [lane for lane in self.lanes.values() if TriggerKey(lane.store_id, lane.trigger_id) == key]:
            del self.lanes[lane.key]
