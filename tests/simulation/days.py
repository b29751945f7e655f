"""The weeks after a simulation: nothing happens but the retention sweep, with a bus that stays away, or comes back.

Some conversations stay in use meanwhile, and begin with a summary of all that is in them.
One step of the sweep may fail for ever, as by a statement that takes too long.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from copy import copy
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from random import Random

from msgspec.structs import replace

from pawl.errors import DependencyUnavailable
from pawl.job_store.app.sweeps import RetentionPeriods, RetentionSweep
from pawl.job_store.domain.rows import ConversationKey, RunRow
from tests.fakes.virtual_time import VirtualClock
from tests.simulation.chance import Chance
from tests.simulation.store import Tables

_DAY = timedelta(days=1)
_KEEP = RetentionPeriods(
    requests_seconds=2 * _DAY.total_seconds(),
    unsent_seconds=_DAY.total_seconds(),
    sent_seconds=_DAY.total_seconds(),
    events_seconds=7 * _DAY.total_seconds(),
    conversations_seconds=30 * _DAY.total_seconds(),
    keys_seconds=90 * _DAY.total_seconds(),
    interval_seconds=600.0,
)
_STEPS = ("", "", "remove_requests", "remove_unsent", "remove_sent", "trim_logs", "remove_summarised")


class MemoryRetention:
    """See `ports.Retention`, over the tables of a simulation at a time of its own. The step `broken` always fails."""

    def __init__(self, tables: Tables, time: datetime, broken: str) -> None:
        self.tables = tables
        self.time = time
        self._broken = broken

    async def remove_requests(self, *, older_than_seconds: float, rows_max: int) -> int:
        begin = self._begin("remove_requests", older_than_seconds)
        old = [key for key, row in self.tables.requests.items() if row.create_time < begin][:rows_max]
        for key in old:
            del self.tables.requests[key]
        return len(old)

    async def remove_keys(self, *, older_than_seconds: float, rows_max: int) -> int:
        return 0

    async def remove_key_events(self, *, rows_max: int) -> int:
        return 0

    async def remove_usage(self, *, rows_max: int) -> int:
        return 0

    async def remove_trigger_events(self, *, older_than_seconds: float, rows_max: int) -> int:
        return 0

    async def remove_unsent(self, *, older_than_seconds: float, rows_max: int) -> int:
        begin = self._begin("remove_unsent", older_than_seconds)
        old = [key for key, (_, time) in self.tables.outbox.items() if time < begin][:rows_max]
        for key in old:
            del self.tables.outbox[key]
        return len(old)

    async def remove_sent(self, *, older_than_seconds: float, rows_max: int) -> int:
        self._begin("remove_sent", older_than_seconds)
        return 0

    async def trim_logs(self, *, older_than_seconds: float, events_max: int) -> int:
        begin = self._begin("trim_logs", older_than_seconds)
        untold = {key for key, _ in self.tables.outbox.values()}
        events = self.tables.events
        old = [row for row in self._ended_before(begin) if len(events[row.key]) > 1 and row.key not in untold][:100]
        for row in old:
            events[row.key] = events[row.key][-1:]
        return len(old)

    async def remove_summarised(self, *, older_than_seconds: float, rows_max: int) -> int:
        begin, tables = self._begin("remove_summarised", older_than_seconds), self.tables
        count = 0
        for key, messages in tables.messages.items():
            for summary in [row for row in messages if row.summarised_to and row.create_time < begin]:
                needed = {row.run_id for row in messages if row.number > summary.summarised_to}
                old = [run for run in self._ended_before(summary.create_time) if run.run_id not in needed]
                for run in [run for run in old if ConversationKey(run.store_id, run.conversation_id) == key]:
                    del tables.runs[run.key], tables.events[run.key]
                    count += 1
        return count

    async def remove_conversations(self, *, older_than_seconds: float, rows_max: int) -> int:
        begin, tables = self._begin("remove_conversations", older_than_seconds), self.tables
        idle = [row for row in tables.conversations.values() if row.active_run_id is None and row.update_time < begin]
        for row in idle[:rows_max]:
            del tables.conversations[row.key]
            for run in [run for run in tables.runs.values() if run.conversation_id == row.conversation_id]:
                del tables.runs[run.key], tables.events[run.key]
        return min(len(idle), rows_max)

    def _begin(self, step: str, older_than_seconds: float) -> datetime:
        if step == self._broken:
            raise DependencyUnavailable("a statement took too long")
        return self.time - timedelta(seconds=older_than_seconds)

    def _ended_before(self, begin: datetime) -> Iterator[RunRow]:
        return (row for row in self.tables.runs.values() if row.end_time is not None and row.end_time < begin)


async def what_is_old_goes(tables: Tables, chance: Chance) -> list[str]:
    """Let 40 days pass over a copy of the tables; return what is there that should have gone by then."""
    draw = chance.stream("days")
    broken, has_bus = draw.choice(_STEPS), draw.random() < 0.5
    copied = Tables(**{field.name: copy(getattr(tables, field.name)) for field in fields(Tables)})
    # No change was later, however the clock has jumped.
    times = [row.update_time for row in tables.conversations.values()]
    times += [row.end_time for row in tables.runs.values() if row.end_time is not None]
    begin = max(times, default=datetime.now(UTC)) + timedelta(seconds=1)
    retention = MemoryRetention(copied, begin, broken)
    sweep = RetentionSweep(retention, VirtualClock(), _KEEP)
    found = []
    used = _in_use(copied, begin, draw)
    for day in range(40):
        retention.time = begin + day * _DAY
        for key in used:
            copied.conversations[key] = replace(copied.conversations[key], update_time=retention.time)
        if has_bus:
            copied.outbox.clear()
        with suppress(DependencyUnavailable):
            # If it ends, it is started again.
            await sweep.sweep()
        waits_for_bus = broken == "remove_unsent" and not has_bus
        if day == 9 and broken != "trim_logs" and not waits_for_bus:
            found += [f"run {key.run_id} has its whole log" for key, log in copied.events.items() if len(log) > 1]
        if day == 9 and copied.outbox and not waits_for_bus:
            found.append(f"{len(copied.outbox)} events still wait for the bus")
    if set(copied.conversations) != used:
        found.append(f"{len(copied.conversations)} conversations are there, and {len(used)} of them in use")
    if copied.runs and broken != "remove_summarised":
        found.append(f"{len(copied.runs)} runs are still there")
    if copied.requests and broken != "remove_requests":
        found.append(f"{len(copied.requests)} requests are still there")
    return found


def _in_use(tables: Tables, time: datetime, draw: Random) -> set[ConversationKey]:
    """Return some conversations that have no active run and stay in use; each has a summary of all that is in it."""
    idle = [key for key, row in tables.conversations.items() if row.active_run_id is None and tables.messages.get(key)]
    used = set(draw.sample(idle, len(idle) // 2))
    for key in used:
        last = tables.messages[key][-1]
        summary = replace(last, number=last.number + 1, run_id="later", summarised_to=last.number, create_time=time)
        tables.messages[key] = [*tables.messages[key], summary]
    return used
