"""Pausing jobs in the ledger (ASYNC-6)."""

from __future__ import annotations

import pytest

from pawl.errors import InboxChanged
from pawl.job_store.ledger.rules.command import Cancel, Pause
from pawl.values import CallState, CommandOutcome, RunState, StopCause
from tests.unit.job_store.desk import desk_with_a_job
from tests.unit.job_store.world import change


def test_no_iteration_starts_after_an_accepted_pause() -> None:
    """Refused even for a read that has already run; running calls may still end."""
    desk, job = desk_with_a_job()
    desk.take(job)
    desk.commit(job, calls=(change("first", CallState.RUNNING),))
    assert desk.send(job, Pause(), "one").outcome is CommandOutcome.ACCEPTED
    desk.commit(job, calls=(change("first", CallState.SUCCEEDED),))
    for second in (
        change("second", CallState.RUNNING),
        change("second", CallState.SUCCEEDED, only_reads=True, attempt=1),
    ):
        with pytest.raises(InboxChanged):
            desk.commit(job, calls=(second,))
    desk.commit(job, consumed=("one",))
    assert desk.send(job, Pause()).outcome is CommandOutcome.ACCEPTED, "pausing again is allowed"


def test_only_a_running_job_can_be_paused() -> None:
    desk, job = desk_with_a_job()
    assert desk.send(desk.runs[0].run_id, Pause()).reason == "RUN_ENDED"
    asked = desk.submit().run.run_id
    assert desk.send(asked, Pause()).reason == "RUN_NOT_FOUND"
    desk.take(job)
    desk.send(job, Cancel(cause=StopCause.USER))
    assert desk.send(job, Pause()).reason == "RUN_ENDED"
    desk.end(job, RunState.CANCELLED)
    assert desk.send(job, Pause()).reason == "RUN_ENDED"
