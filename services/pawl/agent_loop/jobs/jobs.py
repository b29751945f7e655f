"""The jobs of a user: runs that report to one of the user's conversations."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from pawl.agent.v1.agent_pb2 import StartRunRequest
from pawl.agent_loop.api.inbox import Inbox
from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.messages import Messages
from pawl.agent_loop.api.operator_rpc import STOPPED
from pawl.agent_loop.api.ports import CallChecker
from pawl.agent_loop.api.replies import is_taken, run_after
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules import background, jobs
from pawl.agent_loop.loop.rules.background import AskedJob, Wish
from pawl.agent_loop.loop.rules.run import Job, Run
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import ConversationId, IdSource, RequestId, RunId
from pawl.chassis.process.clock import Clock
from pawl.errors import InvalidArguments, InvalidField, PermissionDenied, RunNotFound, ToolExists, ToolNotFound
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.values import ENDED

_OPEN: Final = tuple(state for state in run_pb2.RunState.values() if state and state not in ENDED)
_REFUSED: Final = (InvalidArguments, InvalidField, PermissionDenied, ToolNotFound)


class Jobs:
    """Starts, shows, pauses and stops jobs."""

    def __init__(
        self,
        *,
        ledger: PublicLedger,
        inbox: Inbox,
        messages: Messages,
        checker: CallChecker,
        clock: Clock,
        ids: IdSource,
    ) -> None:
        self._ledger = ledger
        self._inbox = inbox
        self._messages = messages
        self._checker = checker
        self._clock = clock
        self._ids = ids

    async def start(
        self, caller: Principal, request_id: RequestId, asked: AskedJob, asked_sha256: bytes
    ) -> run_pb2.Run:
        """Create a job; durable when this returns. Idempotent by request id.

        Raises:
            InvalidField, TooLarge: it makes no sense, or is not for a run of the agent.
            ToolNotFound, InvalidArguments, PermissionDenied: its call may not be made, or not in the background.
            AgentNotFound, ConversationNotFound, ConversationErased, TooManyJobs, QueueFull,
                RequestIdReused
        """
        wish, now = background.asked(asked), self._clock.now()
        job = jobs.wished(wish, asked.tool_name, asked.arguments_json or b"{}", now)
        message = StartRunRequest(
            conversation_id=asked.conversation_id,
            text=jobs.title(job),
            conversation_key=asked.conversation_key,
            agent=asked.agent,
            labels=asked.labels,
        )
        checked, refusal = await self._messages.checked(
            caller, request_id, message, must_exist=bool(asked.conversation_id)
        )
        begun = pb.StartJobRequest(
            message=checked,
            run_id=self._run_id(caller, request_id),
            new_conversation_id=self._ids.new("conv"),
            asked_sha256=asked_sha256,
        )
        if refusal is None:
            try:
                job = await self._admitted(caller, begun, job, wish, now)
            except _REFUSED as error:
                refusal = error
        begun.job.CopyFrom(wire.JOB.write(job))
        if refusal is None:
            return await self._ledger.start_job(begun)
        # The same request may have come when it could be done.
        begun.message.only_repeat = True
        try:
            return await self._ledger.start_job(begun)
        except ToolExists:
            raise refusal from None

    async def _admitted(self, caller: Principal, begun: pb.StartJobRequest, job: Job, wish: Wish, now: float) -> Job:
        """Return the job of which the first call may be made, perhaps after an approval."""
        message, tool_name = begun.message, job.tool_name
        options = wire.OPTIONS.read(message.options)
        if options.without_background:
            raise PermissionDenied("the background is switched off here, or for the agent")
        # What a run of `default` calls is its own.
        has_tools = bool(options.tool_names) or options.without_tools
        if message.asked_agent and has_tools and tool_name not in options.tool_names:
            raise InvalidField(f"the agent {message.asked_agent} has not the tool {tool_name:.100}", field="tool_name")
        told = ConversationId(message.conversation_id)
        if message.conversation_key:
            told = await self._ledger.conversation_with_key(caller, message.conversation_key)
        run = Run(
            store_id=caller.store_id,
            user_id=caller.user_id,
            conversation_id=ConversationId(begun.new_conversation_id),
            run_id=RunId(begun.run_id),
            options=options,
            user_roles=tuple(sorted(caller.roles)),
            credential_id=caller.credential_id,
            delegate_user_id=caller.delegate_user_id,
            agent=wire.AGENT.read(message.agent) if message.HasField("agent") else None,
            job=job,
            reports_to_conversation_id=told or ConversationId(begun.new_conversation_id),
        )
        return jobs.admitted(job, wish, await self._checker.check_job(caller, run, now))

    def _run_id(self, caller: Principal, request_id: RequestId) -> RunId:
        """Return the id of the job of a request: of the same request the same, so that its call is checked once."""
        if not request_id:
            return RunId(self._ids.new("run"))
        named = f"{caller.store_id}:{caller.user_id}:{request_id}".encode()
        return RunId(f"run_{hashlib.sha256(named).hexdigest()[:32]}")

    async def get(self, caller: Principal, job_id: RunId) -> run_pb2.Run:
        """Return a job.

        Raises:
            RunNotFound: there is none, or it is another run.
        """
        run = await self._ledger.get_run(caller, job_id)
        if not run.reports_to_conversation_id:
            raise RunNotFound("the run is no job")
        return run

    async def list(self, caller: Principal, wanted: pb.ListJobsRequest, *, open_only: bool) -> pb.ListJobsResponse:
        """Return a page of jobs, the newest first, of one conversation if it is named.

        Raises:
            InvalidPageToken
        """
        wanted.states.extend(_OPEN if open_only else ())
        return await self._ledger.list_jobs(caller, wanted)

    async def of_run(self, caller: Principal, run: run_pb2.Run) -> Sequence[run_pb2.Run]:
        """Return the open jobs that a run began, the newest first."""
        return (await self.list(caller, pb.ListJobsRequest(parent_run_id=run.run_id), open_only=True)).runs

    async def stop_of_run(
        self, caller: Principal, request_id: RequestId, run: run_pb2.Run, reason: str
    ) -> Sequence[run_pb2.Run]:
        """Stop the open jobs that a run began; else as `stop_all`.

        Raises:
            RequestIdReused, TooLarge, InvalidField
        """
        if not run.conversation_id:
            return ()
        wanted = pb.ListJobsRequest(parent_run_id=run.run_id, reports_to_conversation_id=run.conversation_id)
        return await self._stop(caller, request_id, wanted, reason)

    async def stop(self, caller: Principal, request_id: RequestId, job_id: RunId, reason: str) -> run_pb2.Run:
        """Stop a job and return it; one that has ended stays as it is.

        Raises:
            RunNotFound, RequestIdReused, TooLarge, InvalidField
        """
        await self.get(caller, job_id)
        reply = await self._inbox.cancel(caller, request_id, job_id, reason)
        run_after(reply, RunNotFound, also_late=True)
        return await self._ledger.get_run(caller, job_id)

    async def pause(
        self, caller: Principal, request_id: RequestId, job_id: RunId, *, resumes: bool = False
    ) -> run_pb2.Run:
        """Let no iteration of a job begin any more, or let it go on; return the job.

        Raises:
            RunNotFound, RunEnded, RequestIdReused, QueueFull
        """
        await self.get(caller, job_id)
        reply = await self._inbox.pause(caller, request_id, job_id, resumes=resumes)
        run_after(reply, RunNotFound)
        return await self._ledger.get_run(caller, job_id)

    async def stop_all(
        self, caller: Principal, request_id: RequestId, conversation_id: ConversationId, reason: str
    ) -> Sequence[run_pb2.Run]:
        """Stop the jobs of a conversation that are open now, and return those that it stopped, the newest first.

        Those that another request has stopped, and that have not ended yet, are left out, also when it is sent again.

        Raises:
            ConversationNotFound, ConversationErased, RequestIdReused, TooLarge, InvalidField
        """
        await self._ledger.get_conversation(caller, conversation_id)
        wanted = pb.ListJobsRequest(reports_to_conversation_id=conversation_id)
        return await self._stop(caller, request_id, wanted, reason)

    async def _stop(
        self, caller: Principal, request_id: RequestId, wanted: pb.ListJobsRequest, reason: str
    ) -> Sequence[run_pb2.Run]:
        stopped: list[run_pb2.Run] = []
        request_id = request_id or RequestId(self._ids.new("req"))
        wanted.stopped_by_command_id = request_id
        wanted.states.extend(_OPEN)
        while True:
            found = await self._ledger.list_jobs(caller, wanted)
            for job in found.runs:
                reply = await self._inbox.cancel(caller, request_id, RunId(job.run_id), reason)
                if not is_taken(reply):
                    continue  # It has ended meanwhile.
                with suppress(RunNotFound):  # It was removed meanwhile.
                    after = await self._ledger.get_run(caller, RunId(job.run_id))
                    stopped += [after] if after.state in STOPPED else []
            wanted.page_token = found.next_page_token
            if not wanted.page_token:
                return stopped
