"""The jobs of a user: runs that report to one of the user's conversations."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from msgspec.structs import replace

from pawl.agent_loop.app.frames import UserMessage
from pawl.agent_loop.app.inbox import Inbox
from pawl.agent_loop.app.messages import Messages
from pawl.agent_loop.app.public_ports import CallChecker, PublicLedger
from pawl.agent_loop.app.public_values import NewJob, Page, PageAsked, RunFilter, RunView
from pawl.agent_loop.domain import background, jobs
from pawl.agent_loop.domain.background import AskedJob, Wish
from pawl.agent_loop.domain.options import AskedOptions
from pawl.agent_loop.domain.run import Job, Run
from pawl.chassis.auth import Principal
from pawl.chassis.clock import Clock
from pawl.chassis.ids import CommandId, ConversationId, IdSource, RequestId, RunId
from pawl.errors import InvalidArguments, InvalidField, PermissionDenied, RunNotFound, ToolExists, ToolNotFound
from pawl.values.run import ENDED, MessagePolicy, RunState

_ALL: Final = PageAsked(page_size=0, page_token="")
_OPEN: Final = tuple(state for state in RunState if state not in ENDED)
_REFUSED: Final = (InvalidArguments, InvalidField, PermissionDenied, ToolNotFound)
_STOPPED: Final = frozenset({RunState.CANCELLING, RunState.CANCELLED})


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

    async def start(self, caller: Principal, request_id: RequestId, asked: AskedJob, asked_sha256: bytes) -> RunView:
        """Create a job; durable when this returns. Idempotent by request id.

        Raises:
            InvalidField, TooLarge: it makes no sense, or is not for a run of the agent.
            ToolNotFound, InvalidArguments, PermissionDenied: its call may not be made, or not in the background.
            AgentNotFound, ConversationNotFound, ConversationErased, TooManyJobs, QueueFull,
                RequestIdReused
        """
        wish, now = background.asked(asked), self._clock.now()
        job = jobs.wished(wish, asked.tool_name, asked.arguments_json or b"{}", now)
        message = UserMessage(
            conversation_id=asked.conversation_id,
            text=jobs.title(job),
            options=AskedOptions(),
            policy=MessagePolicy.QUEUE,
            conversation_key=asked.conversation_key,
            agent=asked.agent,
            labels=asked.labels,
        )
        checked, refusal = await self._messages.checked(
            caller, request_id, message, must_exist=bool(asked.conversation_id)
        )
        begun = NewJob(
            message=checked,
            run_id=self._run_id(caller, request_id),
            new_conversation_id=ConversationId(self._ids.new("conv")),
            job=job,
            asked_sha256=asked_sha256,
        )
        if refusal is None:
            try:
                begun = replace(begun, job=await self._admitted(caller, begun, wish, now))
            except _REFUSED as error:
                refusal = error
        if refusal is None:
            return await self._ledger.start_job(caller, begun)
        # The same request may have come when it could be done.
        try:
            return await self._ledger.start_job(caller, replace(begun, message=replace(checked, only_repeat=True)))
        except ToolExists:
            raise refusal from None

    async def _admitted(self, caller: Principal, begun: NewJob, wish: Wish, now: float) -> Job:
        """Return the job of which the first call may be made, perhaps after an approval."""
        message = begun.message
        options, tool_name = message.options, begun.job.tool_name
        if options.without_background:
            raise PermissionDenied("the background is switched off here, or for the agent")
        # What a run of `default` calls is its own.
        has_tools = bool(options.tool_names) or options.without_tools
        if message.asked_agent and has_tools and tool_name not in options.tool_names:
            raise InvalidField(f"the agent {message.asked_agent} has not the tool {tool_name:.100}", field="tool_name")
        told = message.conversation_id
        if message.conversation_key:
            told = await self._ledger.conversation_with_key(caller, message.conversation_key)
        run = Run(
            store_id=caller.store_id,
            user_id=caller.user_id,
            conversation_id=begun.new_conversation_id,
            run_id=begun.run_id,
            options=message.options,
            user_roles=tuple(sorted(caller.roles)),
            credential_id=caller.credential_id,
            delegate_user_id=caller.delegate_user_id,
            agent=message.agent,
            job=begun.job,
            reports_to_conversation_id=told or begun.new_conversation_id,
        )
        return jobs.admitted(begun.job, wish, await self._checker.check_job(caller, run, now))

    def _run_id(self, caller: Principal, request_id: RequestId) -> RunId:
        """Return the id of the job of a request: of the same request the same, so that its call is checked once."""
        if not request_id:
            return RunId(self._ids.new("run"))
        named = f"{caller.store_id}:{caller.user_id}:{request_id}".encode()
        return RunId(f"run_{hashlib.sha256(named).hexdigest()[:32]}")

    async def get(self, caller: Principal, job_id: RunId) -> RunView:
        """Return a job.

        Raises:
            RunNotFound: there is none, or it is another run.
        """
        run = await self._ledger.get_run(caller, job_id)
        if not run.reports_to_conversation_id:
            raise RunNotFound("the run is no job")
        return run

    async def list(
        self, caller: Principal, conversation_id: ConversationId, page: PageAsked, *, open_only: bool
    ) -> Page[RunView]:
        """Return a page of jobs, the newest first, of one conversation if it is named.

        Raises:
            InvalidPageToken
        """
        states = _OPEN if open_only else ()
        wanted = RunFilter(jobs_only=True, reports_to_conversation_id=conversation_id, states=states)
        return await self._ledger.list_runs(caller, wanted, page)

    async def of_run(self, caller: Principal, run: RunView) -> Sequence[RunView]:
        """Return the open jobs that a run began, the newest first."""
        wanted = RunFilter(jobs_only=True, parent_run_id=run.run_id, states=_OPEN)
        return (await self._ledger.list_runs(caller, wanted, _ALL)).items

    async def stop_of_run(
        self, caller: Principal, request_id: RequestId, run: RunView, reason: str
    ) -> Sequence[RunView]:
        """Stop the open jobs that a run began; else as `stop_all`.

        Raises:
            RequestIdReused, TooLarge, InvalidField
        """
        if not run.conversation_id:
            return ()
        wanted = RunFilter(parent_run_id=run.run_id, reports_to_conversation_id=run.conversation_id)
        return await self._stop(caller, request_id, wanted, reason)

    async def stop(self, caller: Principal, request_id: RequestId, job_id: RunId, reason: str) -> RunView:
        """Stop a job and return it; one that has ended stays as it is.

        Raises:
            RunNotFound, RequestIdReused, TooLarge, InvalidField
        """
        await self.get(caller, job_id)
        reply = await self._inbox.cancel(caller, request_id, job_id, reason)
        reply.run_after(RunNotFound, also_late=True)
        return await self._ledger.get_run(caller, job_id)

    async def pause(self, caller: Principal, request_id: RequestId, job_id: RunId, *, resumes: bool = False) -> RunView:
        """Let no iteration of a job begin any more, or let it go on; return the job.

        Raises:
            RunNotFound, RunEnded, RequestIdReused, QueueFull
        """
        await self.get(caller, job_id)
        reply = await self._inbox.pause(caller, request_id, job_id, resumes=resumes)
        reply.run_after(RunNotFound)
        return await self._ledger.get_run(caller, job_id)

    async def stop_all(
        self, caller: Principal, request_id: RequestId, conversation_id: ConversationId, reason: str
    ) -> tuple[RunView, ...]:
        """Stop the jobs of a conversation that are open now, and return those that it stopped, the newest first.

        Those that another request has stopped, and that have not ended yet, are left out, also when it is sent again.

        Raises:
            ConversationNotFound, ConversationErased, RequestIdReused, TooLarge, InvalidField
        """
        await self._ledger.get_conversation(caller, conversation_id)
        return await self._stop(caller, request_id, RunFilter(reports_to_conversation_id=conversation_id), reason)

    async def _stop(
        self, caller: Principal, request_id: RequestId, wanted: RunFilter, reason: str
    ) -> tuple[RunView, ...]:
        stopped: list[RunView] = []
        request_id = request_id or RequestId(self._ids.new("req"))
        wanted = replace(wanted, jobs_only=True, states=_OPEN, stopped_by_command_id=CommandId(request_id))
        page = _ALL
        while True:
            found = await self._ledger.list_runs(caller, wanted, page)
            for job in found.items:
                reply = await self._inbox.cancel(caller, request_id, job.run_id, reason)
                if not reply.taken:
                    continue  # It has ended meanwhile.
                with suppress(RunNotFound):  # It was removed meanwhile.
                    after = await self._ledger.get_run(caller, job.run_id)
                    stopped += [after] if after.state in _STOPPED else []
            if not found.next_page_token:
                return tuple(stopped)
            page = PageAsked(page_size=0, page_token=found.next_page_token)
