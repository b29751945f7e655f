"""Serves pawl.agent.v1.JobService. A job is a run that reports to one of its user's conversations."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from pawl.agent.v1 import jobs_pb2, jobs_pb2_grpc
from pawl.agent.v1.agent_pb2 import StartRunRequest
from pawl.agent_loop.api import convert
from pawl.agent_loop.api.inbox import Inbox
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.messages import Messages, unless_refused
from pawl.agent_loop.api.operator_rpc import STOPPED
from pawl.agent_loop.api.replies import is_taken, run_after
from pawl.agent_loop.jobs import convert as convert_jobs
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.loop.rules import background, checks, jobs
from pawl.agent_loop.loop.rules.background import RequestedTerms
from pawl.agent_loop.loop.rules.run import Job, Run
from pawl.chassis.identity.auth import Principal, require_user
from pawl.chassis.ids import ConversationId, IdSource, RequestId, RunId, check_id
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.kinds import Context
from pawl.errors import InvalidArguments, InvalidField, PermissionDenied, RunNotFound, ToolNotFound
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.values import ENDED

_OPEN: Final = tuple(state for state in run_pb2.RunState.values() if state and state not in ENDED)
_REFUSED: Final = (InvalidArguments, InvalidField, PermissionDenied, ToolNotFound)


class JobServicer(jobs_pb2_grpc.JobServiceServicer):
    """Starts, returns, pauses and stops jobs. The credential determines store and user."""

    def __init__(
        self,
        *,
        ledger: PublicLedger,
        inbox: Inbox,
        messages: Messages,
        registry: RegistryClient,
        clock: Clock,
        ids: IdSource,
    ) -> None:
        self._ledger = ledger
        self._inbox = inbox
        self._messages = messages
        self._registry = registry
        self._clock = clock
        self._ids = ids

    async def StartJob(self, request: jobs_pb2.StartJobRequest, context: Context) -> jobs_pb2.StartJobResponse:
        caller, request_id = require_user(), convert.request_id(request)
        requested, requested_sha256 = convert_jobs.requested_job(request)
        terms, now = background.requested_terms(requested), self._clock.now()
        job = jobs.new_job(terms, requested.tool_name, requested.arguments_json or b"{}", now)
        message = StartRunRequest(
            conversation_id=requested.conversation_id,
            text=jobs.title(job),
            conversation_key=requested.conversation_key,
            agent=requested.agent,
            labels=requested.labels,
        )
        checked, refusal = await self._messages.checked(
            caller, request_id, message, must_exist=bool(requested.conversation_id)
        )
        submission = pb.StartJobRequest(
            message=checked,
            run_id=self._run_id(caller, request_id),
            new_conversation_id=self._ids.new("conv"),
            asked_sha256=requested_sha256,
        )
        if refusal is None:
            try:
                job = await self._admitted(caller, submission, job, terms, now)
            except _REFUSED as error:
                refusal = error
        submission.job.CopyFrom(wire.JOB.write(job))
        started = await unless_refused(submission.message, refusal, lambda: self._ledger.start_job(submission))
        return jobs_pb2.StartJobResponse(job=convert_jobs.job(started))

    async def _admitted(
        self, caller: Principal, submission: pb.StartJobRequest, job: Job, terms: RequestedTerms, now: float
    ) -> Job:
        message, tool_name = submission.message, job.tool_name
        options = wire.OPTIONS.read(message.options)
        if options.without_background:
            raise PermissionDenied("background calls are switched off for the deployment or the agent")
        # A run of `default` may specify its own tool names.
        has_tools = bool(options.tool_names) or options.without_tools
        if message.asked_agent and has_tools and tool_name not in options.tool_names:
            raise InvalidField(
                f"the agent {message.asked_agent} does not have the tool {tool_name:.100}", field="tool_name"
            )
        reports_to = ConversationId(message.conversation_id)
        if message.conversation_key:
            reports_to = await self._ledger.conversation_with_key(caller, message.conversation_key)
        run = Run(
            store_id=caller.store_id,
            user_id=caller.user_id,
            conversation_id=ConversationId(submission.new_conversation_id),
            run_id=RunId(submission.run_id),
            options=options,
            user_roles=tuple(sorted(caller.roles)),
            credential_id=caller.credential_id,
            delegate_user_id=caller.delegate_user_id,
            agent=wire.AGENT.read(message.agent) if message.HasField("agent") else None,
            job=job,
            reports_to_conversation_id=reports_to or ConversationId(submission.new_conversation_id),
        )
        return jobs.admitted(job, terms, await self._registry.check_job(caller, run, now))

    def _run_id(self, caller: Principal, request_id: RequestId) -> RunId:
        """Return the id for a requested job.

        A repeated request gets the same id, so its call is checked only once.
        """
        if not request_id:
            return RunId(self._ids.new("run"))
        named = f"{caller.store_id}:{caller.user_id}:{request_id}".encode()
        return RunId(f"run_{hashlib.sha256(named).hexdigest()[:32]}")

    async def GetJob(self, request: jobs_pb2.GetJobRequest, context: Context) -> jobs_pb2.GetJobResponse:
        job_id = RunId(check_id(request.job_id, "job_id"))
        return jobs_pb2.GetJobResponse(job=convert_jobs.job(await self._job(require_user(), job_id)))

    async def ListJobs(self, request: jobs_pb2.ListJobsRequest, context: Context) -> jobs_pb2.ListJobsResponse:
        wanted = pb.ListJobsRequest(
            reports_to_conversation_id=check_id(request.conversation_id, "conversation_id", optional=True),
            states=_OPEN if request.open_only else (),
            page_size=checks.page_size(request.page_size),
            page_token=request.page_token,
        )
        page = await self._ledger.list_jobs(require_user(), wanted)
        return jobs_pb2.ListJobsResponse(jobs=map(convert_jobs.job, page.runs), next_page_token=page.next_page_token)

    async def StopJob(self, request: jobs_pb2.StopJobRequest, context: Context) -> jobs_pb2.StopJobResponse:
        request_id, (caller, job_id) = convert.request_id(request), await self._named(request)
        reply = await self._inbox.cancel(caller, request_id, job_id, request.reason)
        run_after(reply, RunNotFound, also_late=True)
        return jobs_pb2.StopJobResponse(job=convert_jobs.job(await self._ledger.get_run(caller, job_id)))

    async def PauseJob(self, request: jobs_pb2.PauseJobRequest, context: Context) -> jobs_pb2.PauseJobResponse:
        return jobs_pb2.PauseJobResponse(job=await self._pause(request, resumes=False))

    async def ResumeJob(self, request: jobs_pb2.ResumeJobRequest, context: Context) -> jobs_pb2.ResumeJobResponse:
        return jobs_pb2.ResumeJobResponse(job=await self._pause(request, resumes=True))

    async def _pause(
        self, request: jobs_pb2.PauseJobRequest | jobs_pb2.ResumeJobRequest, *, resumes: bool
    ) -> jobs_pb2.BackgroundJob:
        request_id, (caller, job_id) = convert.request_id(request), await self._named(request)
        run_after(await self._inbox.pause(caller, request_id, job_id, resumes=resumes), RunNotFound)
        return convert_jobs.job(await self._ledger.get_run(caller, job_id))

    async def StopJobs(self, request: jobs_pb2.StopJobsRequest, context: Context) -> jobs_pb2.StopJobsResponse:
        caller, request_id = require_user(), convert.request_id(request)
        conversation_id = check_id(request.conversation_id, "conversation_id")
        await self._ledger.get_conversation(caller, ConversationId(conversation_id))
        wanted = pb.ListJobsRequest(reports_to_conversation_id=conversation_id)
        stopped = await self._stop(caller, request_id, wanted, request.reason)
        return jobs_pb2.StopJobsResponse(jobs=map(convert_jobs.job, stopped))

    async def _named(self, request: Any) -> tuple[Principal, RunId]:
        """Return the caller and the id of the requested job.

        Raises:
            RunNotFound: The job does not exist.
        """
        caller, job_id = require_user(), RunId(check_id(request.job_id, "job_id"))
        await self._job(caller, job_id)
        return caller, job_id

    async def _job(self, caller: Principal, job_id: RunId) -> run_pb2.Run:
        run = await self._ledger.get_run(caller, job_id)
        if not run.reports_to_conversation_id:
            raise RunNotFound("the run is not a job")
        return run

    async def of_run(self, caller: Principal, run: run_pb2.Run) -> Sequence[run_pb2.Run]:
        """Return the open jobs that were started by the run or the delegated runs below it, newest first."""
        wanted = pb.ListJobsRequest(reports_to_conversation_id=_reported_to(run), states=_OPEN)
        return [job for job in (await self._ledger.list_jobs(caller, wanted)).runs if _is_above(run, job)]

    async def stop_of_run(
        self, caller: Principal, request_id: RequestId, run: run_pb2.Run, reason: str
    ) -> Sequence[run_pb2.Run]:
        """Stop the open jobs that `of_run` returns, like StopJobs. Return the stopped jobs.

        Raises:
            RequestIdReused, TooLarge, InvalidField
        """
        if not run.conversation_id:
            return ()
        wanted = pb.ListJobsRequest(reports_to_conversation_id=_reported_to(run))
        return await self._stop(caller, request_id, wanted, reason, below=run)

    async def _stop(
        self,
        caller: Principal,
        request_id: RequestId,
        wanted: pb.ListJobsRequest,
        reason: str,
        *,
        below: run_pb2.Run | None = None,
    ) -> Sequence[run_pb2.Run]:
        stopped: list[run_pb2.Run] = []
        request_id = request_id or RequestId(self._ids.new("req"))
        wanted.stopped_by_command_id = request_id
        wanted.states.extend(_OPEN)
        while True:
            found = await self._ledger.list_jobs(caller, wanted)
            for job in found.runs:
                if below is not None and not _is_above(below, job):
                    continue
                reply = await self._inbox.cancel(caller, request_id, RunId(job.run_id), reason)
                if not is_taken(reply):
                    continue  # The job has ended.
                with suppress(RunNotFound):  # The job was removed in the meantime.
                    after = await self._ledger.get_run(caller, RunId(job.run_id))
                    stopped += [after] if after.state in STOPPED else []
            wanted.page_token = found.next_page_token
            if not wanted.page_token:
                return stopped


def _reported_to(run: run_pb2.Run) -> str:
    """Return the conversation to which a run's jobs report, which is the root run's conversation."""
    root = run.above[0].conversation_id if run.above else ""
    return root or run.reports_to_conversation_id or run.conversation_id


def _is_above(run: run_pb2.Run, job: run_pb2.Run) -> bool:
    return run.run_id in {job.parent_run_id, *(each.run_id for each in job.above)}
