"""JobService: what goes on in the background is shown to its user, and stopped by nobody else (ASYNC-7)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from pawl.agent.v1 import jobs_pb2 as pb
from pawl.agent_loop.domain.command import Cancel, Pause
from pawl.agent_loop.domain.run import RunState, StopCause
from pawl.event.v1 import call_pb2, run_pb2, waiting_pb2
from tests.fakes.manual_clock import ManualClock
from tests.rpc.agent_loop.conftest import ME, STRANGERS
from tests.rpc.agent_loop.errors import failure, reason
from tests.rpc.agent_loop.ledger import PlayedLedger

if TYPE_CHECKING:
    from pawl.agent.v1.jobs_pb2_grpc import JobServiceAsyncStub

SERIES = run_pb2.Job(tool_name="probe", arguments_json=b"{}", interval_seconds=60, iterations_max=5)


async def add_job(ledger: PlayedLedger, number: int, *, of: str = "conv_1") -> str:
    """Let the first run have begun a job that reports to its conversation."""
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


@pytest.fixture(autouse=True)
async def _run(ledger: PlayedLedger) -> None:
    await ledger.add_run()


async def listed(jobs: JobServiceAsyncStub, metadata: Any = ME, **wanted: Any) -> list[str]:
    return [job.job_id for job in (await jobs.ListJobs(pb.ListJobsRequest(**wanted), metadata=metadata)).jobs]


async def test_a_long_series_counts_the_iterations_that_are_not_kept(
    jobs: JobServiceAsyncStub, ledger: PlayedLedger
) -> None:
    job_id = await add_job(ledger, 1)
    await ledger.add_call("iteration_5001", call_pb2.CALL_STATE_SUCCEEDED, run_id=job_id, tool_name="probe")
    ledger.put_run(job_id, trimmed_rounds=5000, trimmed_failures=3)
    job = (await jobs.GetJob(pb.GetJobRequest(job_id=job_id), metadata=ME)).job
    assert (job.iterations, job.failures, job.trimmed_iterations) == (5001, 3, 5000)


async def test_a_job_says_what_it_does_how_far_it_is_and_when_it_goes_on(
    jobs: JobServiceAsyncStub, ledger: PlayedLedger, clock: ManualClock
) -> None:
    job_id = await add_job(ledger, 1)
    for number, state in enumerate((call_pb2.CALL_STATE_SUCCEEDED, call_pb2.CALL_STATE_FAILED), 1):
        await ledger.add_call(f"iteration_{number}", state, run_id=job_id, tool_name="probe")
    due = datetime.fromtimestamp(clock.now(), UTC) + timedelta(seconds=30)
    output = run_pb2.Run(output_text='{"up": true}').SerializeToString()
    waits = (run_pb2.WAIT_KIND_TIME,)
    await ledger.change(job_id, RunState.WAITING, waits=waits, claim_at=due, worker_id=None, output=output)

    job = (await jobs.GetJob(pb.GetJobRequest(job_id=job_id), metadata=ME)).job
    assert (job.job_id, job.conversation_id, job.parent_run_id, job.parent_call_id) == (
        *(job_id, "conv_1"),
        *("run_1", "call_1"),
    )
    assert (job.definition, job.state, job.iterations, job.failures) == (SERIES, run_pb2.RUN_STATE_WAITING, 2, 1)
    assert (job.last_result, job.waiting.reason) == ('{"up": true}', waiting_pb2.WAIT_REASON_TIME)
    assert job.next_time.ToDatetime(tzinfo=UTC) == due
    assert not job.HasField("end_time")
    (same,) = (await jobs.ListJobs(pb.ListJobsRequest(conversation_id="conv_1"), metadata=ME)).jobs
    assert same == job


async def test_jobs_are_listed_by_conversation_and_while_they_are_open(
    jobs: JobServiceAsyncStub, ledger: PlayedLedger, clock: ManualClock
) -> None:
    await ledger.add_run("run_2", conversation_id="conv_2")
    for number, of in ((1, "conv_1"), (2, "conv_2"), (3, "conv_1")):
        await clock.advance(1)
        await add_job(ledger, number, of=of)
    await ledger.finish("job_1")
    assert await listed(jobs) == ["job_3", "job_2", "job_1"]
    assert await listed(jobs, open_only=True) == ["job_3", "job_2"]
    assert await listed(jobs, conversation_id="conv_1") == ["job_3", "job_1"]
    assert await listed(jobs, conversation_id="conv_1", open_only=True) == ["job_3"]
    page = await jobs.ListJobs(pb.ListJobsRequest(page_size=2), metadata=ME)
    assert await listed(jobs, page_size=2, page_token=page.next_page_token) == ["job_1"]
    assert await failure(jobs.ListJobs(pb.ListJobsRequest(page_token="?"), metadata=ME)) is not None


async def test_a_job_that_was_stopped_is_cancelled_and_one_that_had_ended_stays_as_it_is(
    jobs: JobServiceAsyncStub, ledger: PlayedLedger
) -> None:
    job_id = await add_job(ledger, 1)
    request = pb.StopJobRequest(request_id="r1", job_id=job_id, reason="enough")
    stopped = (await jobs.StopJob(request, metadata=ME)).job
    assert (stopped.state, stopped.stop_cause) == (run_pb2.RUN_STATE_CANCELLING, run_pb2.STOP_CAUSE_USER)
    assert (await jobs.StopJob(request, metadata=ME)).job.state == run_pb2.RUN_STATE_CANCELLING
    assert ledger.commands == [Cancel(cause=StopCause.USER, reason="enough")]
    other = pb.StopJobRequest(request_id="r1", job_id=job_id, reason="other")
    assert await reason(jobs.StopJob(other, metadata=ME)) == "REQUEST_ID_REUSED"
    await ledger.finish(await add_job(ledger, 2))
    ended = await jobs.StopJob(pb.StopJobRequest(job_id="job_2"), metadata=ME)
    assert ended.job.state == run_pb2.RUN_STATE_COMPLETED


async def test_a_job_is_paused_and_resumed(jobs: JobServiceAsyncStub, ledger: PlayedLedger) -> None:
    job_id = await add_job(ledger, 1)
    pause = pb.PauseJobRequest(request_id="p1", job_id=job_id)
    for _ in range(2):
        assert (await jobs.PauseJob(pause, metadata=ME)).job.job_id == job_id
    await jobs.PauseJob(pb.PauseJobRequest(request_id="p2", job_id=job_id), metadata=ME)
    await ledger.change(job_id, RunState.WAITING, waits=(run_pb2.WAIT_KIND_PAUSED,), claim_at=None, worker_id=None)
    waiting = (await jobs.GetJob(pb.GetJobRequest(job_id=job_id), metadata=ME)).job.waiting
    assert (waiting.reason, list(waiting.user_ids)) == (waiting_pb2.WAIT_REASON_PAUSED, ["me"])
    await jobs.ResumeJob(pb.ResumeJobRequest(request_id="r1", job_id=job_id), metadata=ME)
    assert ledger.commands == [Pause(), Pause(), Pause(resumes=True)]
    reused = pb.ResumeJobRequest(request_id="p1", job_id=job_id)
    assert await reason(jobs.ResumeJob(reused, metadata=ME)) == "REQUEST_ID_REUSED"
    assert await reason(jobs.PauseJob(pb.PauseJobRequest(job_id="run_1"), metadata=ME)) == "RUN_NOT_FOUND"
    await ledger.finish(job_id)
    assert await reason(jobs.PauseJob(pb.PauseJobRequest(job_id=job_id), metadata=ME)) == "RUN_ENDED"
    assert await reason(jobs.ResumeJob(pb.ResumeJobRequest(job_id=job_id), metadata=ME)) == "RUN_ENDED"


async def test_all_open_jobs_of_a_conversation_are_stopped_and_named(
    jobs: JobServiceAsyncStub, ledger: PlayedLedger, clock: ManualClock
) -> None:
    await ledger.add_run("run_2", conversation_id="conv_2")
    for number, of in ((1, "conv_1"), (2, "conv_2"), (3, "conv_1"), (4, "conv_1")):
        await clock.advance(1)
        await add_job(ledger, number, of=of)
    await ledger.finish("job_3")
    request = pb.StopJobsRequest(request_id="r1", conversation_id="conv_1")
    for _ in range(2):
        assert [job.job_id for job in (await jobs.StopJobs(request, metadata=ME)).jobs] == ["job_4", "job_1"]
    assert len(ledger.commands) == 2
    assert (await jobs.GetJob(pb.GetJobRequest(job_id="job_2"), metadata=ME)).job.state == run_pb2.RUN_STATE_QUEUED


@pytest.mark.parametrize("stranger", STRANGERS)
async def test_jobs_of_others_and_runs_that_are_none_are_not_found(
    jobs: JobServiceAsyncStub, ledger: PlayedLedger, stranger: Any
) -> None:
    """The same words for what is another's and for what is not there."""
    job_id = await add_job(ledger, 1)
    for whose, named in ((stranger, job_id), (ME, "run_1"), (ME, "nothing")):
        assert await reason(jobs.GetJob(pb.GetJobRequest(job_id=named), metadata=whose)) == "RUN_NOT_FOUND"
        assert await reason(jobs.StopJob(pb.StopJobRequest(job_id=named), metadata=whose)) == "RUN_NOT_FOUND"
        assert await reason(jobs.PauseJob(pb.PauseJobRequest(job_id=named), metadata=whose)) == "RUN_NOT_FOUND"
        assert await reason(jobs.ResumeJob(pb.ResumeJobRequest(job_id=named), metadata=whose)) == "RUN_NOT_FOUND"
    assert await listed(jobs, stranger) == await listed(jobs, stranger, conversation_id="conv_1") == []
    stop = pb.StopJobsRequest(conversation_id="conv_1")
    assert await reason(jobs.StopJobs(stop, metadata=stranger)) == "CONVERSATION_NOT_FOUND"
    assert ledger.commands == []
