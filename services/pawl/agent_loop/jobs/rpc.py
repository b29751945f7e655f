"""pawl.agent.v1.JobService: requests to use cases, what they return to responses."""

from __future__ import annotations

from pawl.agent.v1 import jobs_pb2 as pb
from pawl.agent.v1 import jobs_pb2_grpc
from pawl.agent_loop.api import convert
from pawl.agent_loop.jobs import convert as convert_jobs
from pawl.agent_loop.jobs.jobs import Jobs
from pawl.agent_loop.loop.rules import checks
from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import ConversationId, RunId, check_id
from pawl.chassis.rpc.kinds import Context
from pawl.job.v1 import ledger_pb2


class JobServicer(jobs_pb2_grpc.JobServiceServicer):
    """Serves users. Store and user come from their credential alone."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    async def StartJob(self, request: pb.StartJobRequest, context: Context) -> pb.StartJobResponse:
        asked, digest = convert_jobs.asked(request)
        job = await self._jobs.start(require_user(), convert.request_id(request), asked, digest)
        return pb.StartJobResponse(job=convert_jobs.job(job))

    async def GetJob(self, request: pb.GetJobRequest, context: Context) -> pb.GetJobResponse:
        return pb.GetJobResponse(job=convert_jobs.job(await self._jobs.get(require_user(), _job_id(request))))

    async def ListJobs(self, request: pb.ListJobsRequest, context: Context) -> pb.ListJobsResponse:
        wanted = ledger_pb2.ListJobsRequest(
            reports_to_conversation_id=check_id(request.conversation_id, "conversation_id", optional=True),
            page_size=checks.page_size(request.page_size),
            page_token=request.page_token,
        )
        page = await self._jobs.list(require_user(), wanted, open_only=request.open_only)
        return pb.ListJobsResponse(jobs=map(convert_jobs.job, page.runs), next_page_token=page.next_page_token)

    async def StopJob(self, request: pb.StopJobRequest, context: Context) -> pb.StopJobResponse:
        request_id = convert.request_id(request)
        job = await self._jobs.stop(require_user(), request_id, _job_id(request), request.reason)
        return pb.StopJobResponse(job=convert_jobs.job(job))

    async def PauseJob(self, request: pb.PauseJobRequest, context: Context) -> pb.PauseJobResponse:
        job = await self._jobs.pause(require_user(), convert.request_id(request), _job_id(request))
        return pb.PauseJobResponse(job=convert_jobs.job(job))

    async def ResumeJob(self, request: pb.ResumeJobRequest, context: Context) -> pb.ResumeJobResponse:
        job = await self._jobs.pause(require_user(), convert.request_id(request), _job_id(request), resumes=True)
        return pb.ResumeJobResponse(job=convert_jobs.job(job))

    async def StopJobs(self, request: pb.StopJobsRequest, context: Context) -> pb.StopJobsResponse:
        request_id = convert.request_id(request)
        conversation_id = ConversationId(check_id(request.conversation_id, "conversation_id"))
        jobs = await self._jobs.stop_all(require_user(), request_id, conversation_id, request.reason)
        return pb.StopJobsResponse(jobs=map(convert_jobs.job, jobs))


def _job_id(request: pb.GetJobRequest | pb.StopJobRequest | pb.PauseJobRequest | pb.ResumeJobRequest) -> RunId:
    return RunId(check_id(request.job_id, "job_id"))
