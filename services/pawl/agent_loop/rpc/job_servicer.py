"""pawl.agent.v1.JobService: requests to use cases, what they return to responses."""

from __future__ import annotations

from typing import Final, cast

from pawl.agent.v1 import jobs_pb2 as pb
from pawl.agent.v1 import jobs_pb2_grpc
from pawl.agent_loop.app.jobs import Jobs
from pawl.agent_loop.app.public_values import RunView
from pawl.agent_loop.rpc import convert, convert_jobs
from pawl.chassis.auth import require_user
from pawl.chassis.ids import ConversationId, RunId, check_id
from pawl.chassis.rpc_kinds import Context
from pawl.event.v1 import call_pb2, run_pb2, waiting_pb2

_SETTLED: Final = frozenset(
    {
        *(call_pb2.CALL_STATE_SUCCEEDED, call_pb2.CALL_STATE_FAILED, call_pb2.CALL_STATE_REJECTED),
        *(call_pb2.CALL_STATE_EXPIRED, call_pb2.CALL_STATE_CANCELLED, call_pb2.CALL_STATE_OUTCOME_UNKNOWN),
    }
)


class JobServicer(jobs_pb2_grpc.JobServiceServicer):
    """Serves users. Store and user come from their credential alone."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    async def StartJob(self, request: pb.StartJobRequest, context: Context) -> pb.StartJobResponse:
        asked, digest = convert_jobs.asked(request)
        job = await self._jobs.start(require_user(), convert.request_id(request), asked, digest)
        return pb.StartJobResponse(job=_job(job))

    async def GetJob(self, request: pb.GetJobRequest, context: Context) -> pb.GetJobResponse:
        return pb.GetJobResponse(job=_job(await self._jobs.get(require_user(), _job_id(request))))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsResponse:
        conversation_id = ConversationId(check_id(request.conversation_id, "conversation_id", optional=True))
        page = await self._jobs.list(
            require_user(), conversation_id, convert.page(request), open_only=request.open_only
        )
        return pb.ListJobsResponse(jobs=map(_job, page.items), next_page_token=page.next_page_token)

    async def StopJob(self, request: pb.StopJobRequest, context: Context) -> pb.StopJobResponse:
        request_id = convert.request_id(request)
        job = await self._jobs.stop(require_user(), request_id, _job_id(request), request.reason)
        return pb.StopJobResponse(job=_job(job))

    async def PauseJob(self, request: pb.PauseJobRequest, context: Context) -> pb.PauseJobResponse:
        job = await self._jobs.pause(require_user(), convert.request_id(request), _job_id(request))
        return pb.PauseJobResponse(job=_job(job))

    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Context) -> pb.ResumeJobResponse:
        job = await self._jobs.pause(require_user(), convert.request_id(request), _job_id(request), resumes=True)
        return pb.ResumeJobResponse(job=_job(job))

    async def StopJobs(self, request: pb.StopJobsRequest, context: Context) -> pb.StopJobsResponse:
        request_id = convert.request_id(request)
        conversation_id = ConversationId(check_id(request.conversation_id, "conversation_id"))
        jobs = await self._jobs.stop_all(require_user(), request_id, conversation_id, request.reason)
        return pb.StopJobsResponse(jobs=map(_job, jobs))


def _job_id(request: pb.GetJobRequest | pb.StopJobRequest | pb.PauseJobRequest | pb.ResumeJobRequest) -> RunId:
    return RunId(check_id(request.job_id, "job_id"))


def _job(view: RunView) -> pb.BackgroundJob:
    run = cast("run_pb2.Run", view.document)
    ended = {count.state: count.count for count in run.call_counts if count.state in _SETTLED}
    waits_for_time = run.waiting.reason == waiting_pb2.WAIT_REASON_TIME and run.waiting.HasField("deadline_time")
    return pb.BackgroundJob(
        job_id=run.run_id,
        conversation_id=run.reports_to_conversation_id,
        parent_run_id=run.parent_run_id,
        parent_call_id=run.parent_call_id,
        definition=run.job,
        state=run.state,
        iterations=run.trimmed_rounds + sum(ended.values()),
        failures=run.trimmed_failures + sum(ended.values()) - ended.get(call_pb2.CALL_STATE_SUCCEEDED, 0),
        create_time=run.create_time,
        end_time=run.end_time if run.HasField("end_time") else None,
        next_time=run.waiting.deadline_time if waits_for_time else None,
        last_result=run.output_text,
        failure=run.failure if run.HasField("failure") else None,
        stop_cause=run.stop_cause,
        waiting=run.waiting if run.HasField("waiting") else None,
        pending_calls=run.pending_calls,
        trimmed_iterations=run.trimmed_rounds,
        missed_iterations=run.missed_iterations,
    )
