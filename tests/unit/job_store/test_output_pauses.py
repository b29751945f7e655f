"""Responses to durable steps of stores that have a limit of events per second (RES-3)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from pawl.chassis.ids import StoreId
from pawl.errors import DependencyUnavailable
from pawl.event.v1 import event_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.ledger.rpc.servicer import LedgerServicer
from pawl.job_store.ledger.rules.rows import LastCommit
from tests.fakes.manual_clock import run_in_virtual_time
from tests.tables import for_each

OUTPUT = event_pb2.RunEvent(output_delta=event_pb2.OutputDelta(text="x"))
OTHER = event_pb2.RunEvent(round_started=event_pb2.RoundStarted(round=1))
COMMITTED = LastCommit(
    commit_id="c1", epoch=1, first_seq=1, last_seq=2, commands_pending=False, time=datetime(2026, 1, 1, tzinfo=UTC)
)


async def counted(answer: float | Exception, events: list[Any], limit: int) -> tuple[pb.CommitRunResponse, list[int]]:
    """Commit a step. Return the response, and how many events were counted each time."""
    counts = list[int]()

    async def commit(*_: Any, **_options: Any) -> LastCommit:
        return COMMITTED

    async def count(store_id: StoreId, per_second: int, events: int) -> float:
        assert (store_id, per_second) == ("acme", limit)
        counts.append(events)
        if isinstance(answer, Exception):
            raise answer
        await asyncio.sleep(answer)
        return answer

    limits = SimpleNamespace(events_per_second=limit, of_runs={})
    ledger: Any = SimpleNamespace(group_commit=SimpleNamespace(run=commit), limits_of=lambda _: limits)
    request = pb.CommitRunRequest(store_id="acme", run_id="run", epoch=1, commit_id="c1", events=events)
    context: Any = None
    return await LedgerServicer(ledger, count).CommitRun(request, context), counts


@for_each(
    ("answer", "events", "limit", "pause_seconds", "counts"),
    [
        (0.5, [OUTPUT], 5, 0.5, [1]),
        (0.5, [OTHER, OUTPUT, OUTPUT], 5, 0.5, [3]),
        (0.5, [OTHER], 5, 0, []),
        (0.5, [], 5, 0, []),
        (0.5, [OUTPUT], 0, 0, []),
        (30.0, [OUTPUT], 5, 0, [1]),
        (DependencyUnavailable(), [OUTPUT], 5, 0, [1]),
        (OSError(), [OUTPUT], 5, 0, [1]),
    ],
)
def test_only_steps_with_output_are_counted_and_a_failed_count_fails_no_durable_step(
    answer: float | Exception, events: list[Any], limit: int, pause_seconds: float, counts: list[int]
) -> None:
    """A count that takes longer than a second has failed too."""
    response, counted_events = run_in_virtual_time(counted(answer, events, limit))
    assert (response.last_seq, counted_events) == (COMMITTED.last_seq, counts)
    assert response.output_pause_seconds == pytest.approx(pause_seconds)
