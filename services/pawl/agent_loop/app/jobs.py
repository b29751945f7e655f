"""The jobs of a user: runs that report to one of the user's conversations."""

from __future__ import annotations

from typing import Final

from pawl.agent_loop.app.inbox import Inbox
from pawl.agent_loop.app.public_ports import PublicLedger
from pawl.agent_loop.app.public_values import Page, PageAsked, RunFilter, RunView
from pawl.agent_loop.domain.run import ENDED, RunState
from pawl.chassis.auth import Principal
from pawl.chassis.ids import ConversationId, RequestId, RunId
from pawl.errors import RunNotFound

_OPEN: Final = tuple(state for state in RunState if state not in ENDED)
_STOPPED: Final = frozenset({RunState.CANCELLING, RunState.CANCELLED})


class Jobs:
    """Shows, pauses and stops jobs."""

    def __init__(self, *, ledger: PublicLedger, inbox: Inbox) -> None:
        self._ledger = ledger
        self._inbox = inbox

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

        Raises:
            ConversationNotFound, ConversationErased, RequestIdReused, TooLarge, InvalidField
        """
        await self._ledger.get_conversation(caller, conversation_id)
        stopped: list[RunView] = []
        page = PageAsked(page_size=0, page_token="")
        while True:
            found = await self.list(caller, conversation_id, page, open_only=True)
            jobs = [await self.stop(caller, request_id, job.run_id, reason) for job in found.items]
            stopped += (job for job in jobs if job.state in _STOPPED)
            if not found.next_page_token:
                return tuple(stopped)
            page = PageAsked(page_size=0, page_token=found.next_page_token)
