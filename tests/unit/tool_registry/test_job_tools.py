"""The tools list_jobs and stop_job (ASYNC-6)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from pawl.chassis.ids import CommandId, ConversationId, RunKey, StoreId, UserId
from pawl.tool_registry.adapters.ledger import LedgerReads
from pawl.tool_registry.builtin.jobs import job_tools
from pawl.tool_registry.domain.jobs import Job
from pawl.tool_registry.sdk.context import ToolContext, ToolError
from tests.fakes.manual_clock import ManualClock
from tests.tables import for_each

MINUTE = 60.0
JOB = Job(
    job_id="run_1",
    tool="look",
    state="WAITING",
    is_over=False,
    waits_for_time=True,
    begin_time=1000 * MINUTE,
    interval_seconds=MINUTE,
    end_time=None,
    iterations=3,
    result="{}",
    error="",
)


class SomeJobs(LedgerReads):
    """The jobs of one conversation of one user."""

    def __init__(self, *jobs: Job) -> None:
        self.jobs_by_id = {job.job_id: job for job in jobs}
        self.commands: list[CommandId] = []

    async def jobs(
        self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId, *, ended_max: int
    ) -> Sequence[Job]:
        assert (store_id, user_id, conversation_id, ended_max) == ("local", "me", "conversation", 10)
        return list(self.jobs_by_id.values())

    async def stop_job(
        self, key: RunKey, user_id: UserId, conversation_id: ConversationId, command_id: CommandId
    ) -> tuple[Job, bool] | None:
        assert (key.store_id, user_id, conversation_id) == ("local", "me", "conversation")
        self.commands.append(command_id)
        job = self.jobs_by_id.get(key.run_id)
        return None if job is None else (job, not job.is_over or job.state == "CANCELLED")


def call(jobs: SomeJobs, name: str, now: float = 1000 * MINUTE, **arguments: object) -> Any:
    tools = {tool.name: tool for tool in job_tools(jobs, ManualClock(now))}
    return asyncio.run(tools[name](ToolContext(), **arguments))


def test_a_series_is_shown_with_its_iterations_and_the_next_time() -> None:
    (shown,) = call(SomeJobs(JOB), "list_jobs", now=1002.5 * MINUTE)
    assert shown == {
        "job_id": "run_1",
        "tool": "look",
        "state": "WAITING",
        "begun": "1970-01-01T16:40:00+00:00",
        "iterations": 3,
        "interval_seconds": 60.0,
        "next": "1970-01-01T16:43:00+00:00",
        "result": "{}",
    }


@for_each(
    "job",
    [
        replace(JOB, waits_for_time=False),
        replace(JOB, interval_seconds=0.0),
        replace(JOB, end_time=1002.9 * MINUTE),
    ],
)
def test_no_next_time_is_shown_where_none_is_known(job: Job) -> None:
    (shown,) = call(SomeJobs(job), "list_jobs", now=1002.5 * MINUTE)
    assert "next" not in shown


def test_a_stop_says_what_is_so() -> None:
    """It is never said of a job of others, or of one that was over, that it was stopped."""
    over = replace(JOB, job_id="run_2", state="COMPLETED", is_over=True)
    ended = replace(JOB, job_id="run_3", state="CANCELLED", is_over=True)
    jobs = SomeJobs(replace(JOB, state="CANCELLING"), over, ended)
    stopping, late, stopped = (call(jobs, "stop_job", job_id=job_id) for job_id in ("run_1", "run_2", "run_3"))
    assert stopping["state"] == "CANCELLING"
    assert (late["state"], late["note"]) == ("COMPLETED", "It was over already: nothing was stopped.")
    assert (stopped["state"], stopped["note"]) == ("CANCELLED", "It is over, and nothing more of it runs.")
    with pytest.raises(ToolError, match="no job 'run_4'"):
        call(jobs, "stop_job", job_id="run_4")
    assert jobs.commands == ["call"] * 4, "the same call stops once, however often it runs"
