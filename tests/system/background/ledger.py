"""Checks the ledger and the inbox of a store after a test, with the chaos checkers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from pawl.client import AsyncClient
from pawl.event.v1 import event_pb2
from pawl.notify.v1 import notify_pb2
from tests.chaos import checkers
from tests.chaos.history import History
from tests.chaos.record import Record
from tests.poll import until
from tests.simulation.checkers import LEDGER_CHECKERS
from tests.simulation.record import run_state
from tests.simulation.reference import ENDED

_CHECKERS: Final = (
    checkers.runs_do_not_fail,
    checkers.terminal_states_are_final,
    checkers.logs_have_no_gaps,
    checkers.earlier_owners_stop_writing,
    *LEDGER_CHECKERS,
)
# Checkers of things that happen a little later.
_IN_TIME: Final = (checkers.runs_end, checkers.every_run_end_is_notified, checkers.job_ends_are_reported)


async def check_ledger(pawl: AsyncClient) -> None:
    """Check the client's store after its runs have ended and their ends were reported."""
    record = await _read(pawl)

    async def is_quiet() -> bool:
        nonlocal record
        record = await _read(pawl)
        return not list(_wrong(record, _IN_TIME))

    with suppress(TimeoutError):
        await until(is_quiet)
    assert list(_wrong(record, _IN_TIME)) == []
    assert list(_wrong(record, _CHECKERS)) == []


def _wrong(record: Record, wanted: tuple[checkers.Checker, ...]) -> Iterator[str]:
    return (f"{checker.__name__}: {found}" for checker in wanted for found in checker(record))


async def _read(pawl: AsyncClient) -> Record:
    record = Record(history=History())
    record.runs = {run.run_id: run async for run in pawl.runs()}
    for run in record.runs.values():
        record.calls |= {call.call_id: call async for call in pawl.calls(run.run_id)}
        record.messages[run.conversation_id] = [message async for message in pawl.messages(run.conversation_id)]
        if run_state(run.state) in ENDED:
            record.logs[run.run_id] = [
                each async for each in pawl.watch(run.run_id) if isinstance(each, event_pb2.RunEvent)
            ]
    request = notify_pb2.ListNotificationsRequest()
    pages = [page async for page in pawl.pages(pawl.notifier.ListNotifications, request)]
    record.notifications["", ""] = [reported for page in pages for reported in page.notifications]
    return record
