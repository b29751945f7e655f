"""JobService: users see background jobs, and only authorized callers stop them (ASYNC-7)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pawl.agent.v1 import agent_pb2, jobs_pb2, operator_pb2, types_pb2
from pawl.errors import PermissionDenied
from pawl.event.v1 import call_pb2, run_pb2, waiting_pb2
from pawl.job.v1 import ledger_pb2
from pawl.values import RunState, Series
from tests.fakes.manual_clock import ManualClock
from tests.fakes.registry import FakeChecker
from tests.rpc.agent_loop.asking import reason
from tests.rpc.agent_loop.conftest import APPROVER, BOSS, FOREIGN_BOSS, ME
from tests.rpc.agent_loop.ledger import YOU, PlayedLedger
from tests.rpc.refusals import raises
from tests.rpc.stubs import AgentServiceAsyncStub, JobServiceAsyncStub, OperatorServiceAsyncStub

SERIES = run_pb2.Job(tool_name="probe", arguments_json=b"{}", interval_seconds=60, iterations_max=5)


async def add_job(ledger: PlayedLedger, number: int, *, of: str = "conv_1") -> str:
    run_id = f"job_{number}"
    await ledger.add_run(run_id, conversation_id=f"conv_of_{run_id}")
    ledger.put_run(
        run_id,
        reports_to=of,
        parent_run_id="run_1",
        parent_call_id="call_1",
        options=run_pb2.Run(job=SERIES).SerializeToString(),
    )
    return run_id


pytestmark = pytest.mark.usefixtures("run")


async def listed(jobs: JobServiceAsyncStub, metadata: Any = ME, **wanted: Any) -> list[str]:
    return [job.job_id for job in (await jobs.ListJobs(jobs_pb2.ListJobsRequest(**wanted), metadata=metadata)).jobs]


async def test_user_starts_a_job_that_reports_to_a_conversation(
    jobs: JobServiceAsyncStub, ledger: PlayedLedger, checker: FakeChecker
) -> None:
    """ASYNC-1: the user may set the fields that a model may set.

    A repeated request returns the same job, even if its tool has changed.
    """
    request = jobs_pb2.StartJobRequest(
        request_id="s1",
        conversation_id="conv_1",
        tool_name="probe",
        arguments_json=b'{"n": 1}',
        interval_seconds=60,
        duration_minutes=10,
        reports=run_pb2.JOB_REPORTS_DIGEST,
        report_seconds=120,
        until=run_pb2.JobCondition(pointer="/up", equals_json=b"true"),
        when=run_pb2.JobMonitor(
            condition=run_pb2.JobCondition(expression="value.n > 1"), pause_seconds=5, hold_seconds=9
        ),
        failures_told=7,
        labels={"team": "ops"},
    )
    job = (await jobs.StartJob(request, metadata=ME)).job
    assert (job.conversation_id, job.state, job.parent_run_id) == ("conv_1", run_pb2.RUN_STATE_QUEUED, "")
    definition = job.definition
    assert (definition.arguments_json, definition.iterations_max, definition.timeout_seconds) == (b'{"n":1}', 11, 7200)
    assert definition.end_time.ToSeconds() - definition.begin_time.ToSeconds() == 600
    assert (definition.reports, definition.report_seconds, definition.failures_told) == (
        run_pb2.JOB_REPORTS_DIGEST,
        120,
        7,
    )
    assert (definition.until.equals_json, definition.when.firings_max, definition.when.hold_seconds) == (
        b"true",
        1000,
        9,
    )
    assert checker.jobs_of == [("conv_1", job.job_id)]
    run = ledger.runs[job.job_id].run
    assert (dict(run.labels), list(run.user_roles)) == ({"team": "ops"}, ["member"])
    assert await listed(jobs, conversation_id="conv_1") == [job.job_id]
    checker.gone.add("probe")
    assert (await jobs.StartJob(request, metadata=ME)).job.job_id == job.job_id
    request.arguments_json = b'{"n": 2}'
    assert await reason(jobs.StartJob(request, metadata=ME)) == "REQUEST_ID_REUSED"
    request.request_id = "s2"
    assert await reason(jobs.StartJob(request, metadata=ME)) == "TOOL_NOT_FOUND"


async def test_job_shows_its_task_progress_and_next_run(
    jobs: JobServiceAsyncStub, ledger: PlayedLedger, clock: ManualClock
) -> None:
    job_id = await add_job(ledger, 1)
    for number, state in enumerate((call_pb2.CALL_STATE_SUCCEEDED, call_pb2.CALL_STATE_FAILED), 1):
        await ledger.add_call(f"iteration_{number}", state, run_id=job_id, tool_name="probe")
    due = datetime.fromtimestamp(clock.now(), UTC) + timedelta(seconds=30)
    output = run_pb2.Run(output_text='{"up": true}').SerializeToString()
    waits = (run_pb2.WAIT_KIND_TIME,)
    await ledger.change(job_id, RunState.WAITING, waits=waits, claim_at=due, worker_id=None, output=output)

    job = (await jobs.GetJob(jobs_pb2.GetJobRequest(job_id=job_id), metadata=ME)).job
    assert (job.job_id, job.conversation_id, job.parent_run_id, job.parent_call_id) == (
        *(job_id, "conv_1"),
        *("run_1", "call_1"),
    )
    assert (job.definition, job.state, job.iterations, job.failures) == (SERIES, run_pb2.RUN_STATE_WAITING, 2, 1)
    assert (job.last_result, job.waiting.reason) == ('{"up": true}', waiting_pb2.WAIT_REASON_TIME)
    assert (job.next_time.ToDatetime(tzinfo=UTC), job.HasField("end_time")) == (due, False)
    (same,) = (await jobs.ListJobs(jobs_pb2.ListJobsRequest(conversation_id="conv_1"), metadata=ME)).jobs
    assert same == job


async def test_job_shows_its_progress_its_expected_end_and_why_it_was_not_stopped(
    jobs: JobServiceAsyncStub, ledger: PlayedLedger
) -> None:
    once = run_pb2.Job(tool_name="probe", arguments_json=b"{}", estimated_minutes=10)
    once.begin_time.FromSeconds(1_900_000_000)
    job_id = await add_job(ledger, 1)
    ledger.put_run(job_id, options=run_pb2.Run(job=once).SerializeToString())

    async def shown() -> jobs_pb2.BackgroundJob:
        (listed_job,) = (await jobs.ListJobs(jobs_pb2.ListJobsRequest(conversation_id="conv_1"), metadata=ME)).jobs
        job = (await jobs.GetJob(jobs_pb2.GetJobRequest(job_id=job_id), metadata=ME)).job
        assert (listed_job.progress, listed_job.expected_end_time) == (job.progress, job.expected_end_time)
        return job

    job = await shown()
    assert (job.HasField("progress"), job.expected_end_time.ToSeconds()) == (False, 1_900_000_600)
    progress = run_pb2.JobProgress(fraction=0.25, message="page 3")
    progress.start_time.FromSeconds(1_900_000_000)
    progress.time.FromSeconds(1_900_000_300)
    ledger.put_run(job_id, output=run_pb2.Run(job_progress=progress).SerializeToString())
    job = await shown()
    assert (job.progress, job.expected_end_time.ToSeconds(), job.not_stopped) == (progress, 1_900_001_200, "")

    ledger.put_run(
        job_id,
        state=RunState.CANCELLED,
        output=run_pb2.Run(output_text='{"error":"probe keeps running"}', job_progress=progress).SerializeToString(),
        unstopped=run_pb2.Run(unstopped_call_ids=["call_9"]).SerializeToString(),
    )
    job = await shown()
    assert (job.not_stopped, job.progress, job.HasField("expected_end_time")) == (
        "probe keeps running",
        progress,
        False,
    )


@pytest.mark.parametrize(
    ("fields", "reads"),
    [
        ({"report_percents": [25, 50]}, ([25, 50], 0)),
        ({"report_seconds": 600}, ([], 600)),
        ({}, "INVALID_FIELD"),
        ({"report_percents": [50, 25]}, "INVALID_FIELD"),
        ({"report_percents": [25], "report_seconds": 600}, "INVALID_FIELD"),
        ({"report_seconds": 59}, "INVALID_FIELD"),
        ({"report_percents": [25], "interval_seconds": 5, "iterations_max": 2}, "INVALID_FIELD"),
    ],
)
async def test_user_starts_a_single_call_that_reports_its_progress(
    jobs: JobServiceAsyncStub, fields: dict[str, Any], reads: Any
) -> None:
    request = jobs_pb2.StartJobRequest(
        conversation_id="conv_1",
        tool_name="probe",
        arguments_json=b"{}",
        reports=run_pb2.JOB_REPORTS_PROGRESS,
        **fields,
    )
    if isinstance(reads, str):
        assert await reason(jobs.StartJob(request, metadata=ME)) == reads
        return
    definition = (await jobs.StartJob(request, metadata=ME)).job.definition
    assert definition.reports == run_pb2.JOB_REPORTS_PROGRESS
    assert (list(definition.report_percents), definition.report_seconds) == reads


async def test_job_is_paused_and_resumed(jobs: JobServiceAsyncStub, ledger: PlayedLedger) -> None:
    job_id = await add_job(ledger, 1)
    pause = jobs_pb2.PauseJobRequest(request_id="p1", job_id=job_id)
    for _ in range(2):
        assert (await jobs.PauseJob(pause, metadata=ME)).job.job_id == job_id
    await jobs.PauseJob(jobs_pb2.PauseJobRequest(request_id="p2", job_id=job_id), metadata=ME)
    await ledger.change(job_id, RunState.WAITING, waits=(run_pb2.WAIT_KIND_PAUSED,), claim_at=None, worker_id=None)
    waiting = (await jobs.GetJob(jobs_pb2.GetJobRequest(job_id=job_id), metadata=ME)).job.waiting
    assert (waiting.reason, list(waiting.user_ids)) == (waiting_pb2.WAIT_REASON_PAUSED, ["me"])
    await jobs.ResumeJob(jobs_pb2.ResumeJobRequest(request_id="r1", job_id=job_id), metadata=ME)
    assert [command.pause.resumes for command in ledger.commands] == [False, False, True]
    reused = jobs_pb2.ResumeJobRequest(request_id="p1", job_id=job_id)
    assert await reason(jobs.ResumeJob(reused, metadata=ME)) == "REQUEST_ID_REUSED"


async def test_cancelling_a_run_reports_its_jobs_or_stops_them(
    stub: AgentServiceAsyncStub, jobs: JobServiceAsyncStub, ledger: PlayedLedger, clock: ManualClock
) -> None:
    """These include the jobs of its delegated runs."""
    for number in (1, 2, 3, 4):
        await clock.advance(1)
        await add_job(ledger, number)
    await ledger.finish("job_3")
    ledger.put_run("job_4", parent_run_id="run_of_before")
    above = [run_pb2.RunAbove(run_id="run_1", conversation_id="conv_1"), run_pb2.RunAbove(run_id="run_agent")]
    ledger.put_run("job_2", parent_run_id="run_agent", options=run_pb2.Run(job=SERIES, above=above).SerializeToString())
    open_ones, stopped = ["job_2", "job_1"], {"job_1", "job_2", "run_1"}

    async def named(**asked: Any) -> list[str]:
        request = agent_pb2.CancelRunRequest(run_id="run_1", **asked)
        return [job.job_id for job in (await stub.CancelRun(request, metadata=ME)).jobs]

    assert [await named(request_id="r1") for _ in range(2)] == 2 * [open_ones]
    assert await listed(jobs, open_only=True) == ["job_4", *open_ones]
    assert [await named(request_id="r2", cancel_jobs=True) for _ in range(2)] == 2 * [open_ones]
    for run_id in ("job_1", "job_2", "job_4", "run_1"):
        run = (await stub.GetRun(agent_pb2.GetRunRequest(run_id=run_id), metadata=ME)).run
        assert (run.state == run_pb2.RUN_STATE_CANCELLING) == (run_id in stopped)
    assert await named(request_id="r3", cancel_jobs=True) == []
    assert (await stub.CancelRun(agent_pb2.CancelRunRequest(run_id="job_4", cancel_jobs=True), metadata=ME)).jobs == []


async def test_only_operators_can_end_all_open_jobs_of_their_store(
    jobs: JobServiceAsyncStub, operators: OperatorServiceAsyncStub, ledger: PlayedLedger, clock: ManualClock
) -> None:
    """ASYNC-7: the jobs of all users end, but no other runs. The logs of the jobs name the operator."""
    await ledger.add_run("run_2", YOU, conversation_id="conv_2")
    for number, of in ((1, "conv_1"), (2, "conv_2"), (3, "conv_1")):
        await clock.advance(1)
        await add_job(ledger, number, of=of)
    ledger.put_run("job_2", user_id="you")
    await ledger.finish("job_3")
    end = operator_pb2.EndJobsRequest(request_id="e1", reason="on fire")
    await raises(PermissionDenied, *(operators.EndJobs(end, metadata=nobody) for nobody in (ME, APPROVER)))
    for boss, ended in ((FOREIGN_BOSS, []), (BOSS, ["job_2", "job_1"]), (BOSS, ["job_2", "job_1"])):
        assert list((await operators.EndJobs(end, metadata=boss)).job_ids) == ended
    for job_id in ("job_1", "job_2"):
        run = ledger.runs[job_id].run
        assert (run.state, run.stop_cause) == (run_pb2.RUN_STATE_CANCELLING, run_pb2.STOP_CAUSE_OPERATOR)
    assert ledger.runs["run_1"].run.state != run_pb2.RUN_STATE_CANCELLING
    assert ledger.commands == 2 * [
        ledger_pb2.Command(cancel=ledger_pb2.CancelCommand(cause=run_pb2.STOP_CAUSE_OPERATOR, reason="on fire"))
    ]


async def test_stopping_jobs_are_reported_only_by_the_request_that_stopped_them(
    jobs: JobServiceAsyncStub, ledger: PlayedLedger, clock: ManualClock
) -> None:
    """ASYNC-7: a repeated request reports the same jobs."""

    async def stopped(request_id: str) -> list[str]:
        request = jobs_pb2.StopJobsRequest(request_id=request_id, conversation_id="conv_1")
        return [job.job_id for job in (await jobs.StopJobs(request, metadata=ME)).jobs]

    await add_job(ledger, 1)
    assert await stopped("r1") == ["job_1"]
    job = (await jobs.GetJob(jobs_pb2.GetJobRequest(job_id="job_1"), metadata=ME)).job
    assert job.state == run_pb2.RUN_STATE_CANCELLING
    await clock.advance(1)
    await add_job(ledger, 2)
    assert await stopped("r2") == ["job_2"]
    assert [await stopped(request_id) for request_id in ("r1", "r3", "")] == [["job_1"], [], []]


async def test_repeated_request_reports_the_jobs_that_it_ended(
    jobs: JobServiceAsyncStub, operators: OperatorServiceAsyncStub, ledger: PlayedLedger, clock: ManualClock
) -> None:
    """ASYNC-7: no other request reports these jobs."""

    async def ended(request_id: str, reason: str = "on fire") -> list[str]:
        end = operator_pb2.EndJobsRequest(request_id=request_id, reason=reason)
        return list((await operators.EndJobs(end, metadata=BOSS)).job_ids)

    for number in (1, 2):
        await clock.advance(1)
        await add_job(ledger, number)
    await jobs.StopJob(jobs_pb2.StopJobRequest(job_id="job_2", request_id="s1"), metadata=ME)
    assert await ended("e1") == ["job_1"]
    assert [await ended(request_id) for request_id in ("e2", "e2", "", "s1")] == [[], [], [], []]
    await clock.advance(1)
    await add_job(ledger, 3)
    assert await ended("e1") == ["job_3", "job_1"], "it continues from its last state"
    for job_id in ("job_1", "job_2", "job_3"):
        await ledger.change(job_id, RunState.CANCELLED)
    assert [await ended(request_id) for request_id in ("e1", "e2")] == [["job_3", "job_1"], []]
    again = operator_pb2.EndJobsRequest(request_id="e1", reason="another")
    assert await reason(operators.EndJobs(again, metadata=BOSS)) == "REQUEST_ID_REUSED"


async def test_job_started_with_a_key_finds_or_creates_the_conversation(
    jobs: JobServiceAsyncStub, checker: FakeChecker
) -> None:
    request = jobs_pb2.StartJobRequest(conversation_key="build", tool_name="probe")
    first, second = [(await jobs.StartJob(request, metadata=ME)).job for _ in range(2)]
    assert first.conversation_id == second.conversation_id != ""
    assert first.job_id != second.job_id
    assert [told for told, _ in checker.jobs_of] == 2 * [first.conversation_id], "rules apply from the first call"
    both = jobs_pb2.StartJobRequest(conversation_key="build", conversation_id="conv_1", tool_name="probe")
    assert await reason(jobs.StartJob(both, metadata=ME)) == "INVALID_FIELD"


async def test_editing_a_series_without_an_end_keeps_its_deadline(
    stub: AgentServiceAsyncStub, ledger: PlayedLedger, clock: ManualClock
) -> None:
    """ASYNC-4, HITL-2: changing the interval of a watch job must not remove its deadline."""
    end_time = clock.now() + 600
    end = datetime.fromtimestamp(end_time, UTC)
    shown = Series(digest="shown", interval_seconds=60, iterations_max=5, end_time=end_time)
    await add_job(ledger, 1)
    for number, edited_end in enumerate([None, end + timedelta(hours=1)]):
        waits = call_pb2.CALL_STATE_AWAITING_APPROVAL
        await ledger.add_call(f"call_{number}", waits, run_id="job_1", tool_name="probe", series=shown)
        edited = call_pb2.Series(interval_seconds=5, iterations_max=4)
        if edited_end is not None:
            edited.end_time.FromDatetime(edited_end)
        decision = types_pb2.CallDecision(
            call_id=f"call_{number}",
            kind=call_pb2.DECISION_KIND_EDIT,
            digest="shown",
            arguments_json=b"{}",
            for_series=True,
            edited_series=edited,
        )
        await stub.Decide(agent_pb2.DecideRequest(run_id="job_1", decision=decision), metadata=APPROVER)
        assert ledger.commands[-1].decision.edited_series.end_time.ToDatetime(tzinfo=UTC) == (edited_end or end)
