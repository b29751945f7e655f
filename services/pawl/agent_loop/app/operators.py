"""The acts of a store's operators on its runs, whoever they belong to (settled point 9)."""

from __future__ import annotations

import asyncio

from pawl.agent_loop.app.public_ports import PublicLedger
from pawl.agent_loop.app.public_values import PageAsked, PublicCommand, RedriveCommand, Reply, RunFilter, RunView
from pawl.agent_loop.domain import checks
from pawl.agent_loop.domain.command import Cancel
from pawl.chassis import logs
from pawl.chassis.auth import Principal
from pawl.chassis.ids import CommandId, IdSource, RequestId, RunId
from pawl.errors import AttentionNotNeeded, RunNotFound
from pawl.values.run import RunState, StopCause

_log = logs.get_logger(__name__)


async def send(
    ledger: PublicLedger, caller: Principal, run_id: RunId, command_id: CommandId, command: PublicCommand, *, act: str
) -> Reply:
    """Send what an operator does about a run, and write down who did it. The log of the run says it too, if taken."""
    reply = await ledger.send_command(caller, run_id, command_id, command, as_operator=True)
    _log.info(
        "operator.acted", act=act, store=caller.store_id, user=caller.user_id, run=run_id, outcome=reply.outcome.name
    )
    return reply


class Operators:
    """Mends the runs of a store that need attention."""

    def __init__(self, *, ledger: PublicLedger, ids: IdSource) -> None:
        self._ledger = ledger
        self._ids = ids

    async def redrive(self, caller: Principal, request_id: RequestId, run_id: RunId, reason: str) -> RunView:
        """Let a quarantined run go on; return it.

        Raises:
            RunNotFound, RunEnded, InvalidField, TooLarge
            AttentionNotNeeded: it is not quarantined.
        """
        command = RedriveCommand(reason=_reason(reason))
        reply = await send(
            self._ledger, caller, run_id, CommandId(request_id or self._ids.new("cmd")), command, act="redriven"
        )
        return reply.run_after(AttentionNotNeeded if reply.run is not None else RunNotFound)

    async def end(self, caller: Principal, request_id: RequestId, run_id: RunId, reason: str) -> RunView:
        """Stop a run of any user of the store; return it. One that has ended stays as it is.

        Raises:
            RunNotFound, InvalidField, TooLarge
        """
        return (await self._end(caller, request_id, run_id, reason)).run_after(RunNotFound, also_late=True)

    async def end_jobs(self, caller: Principal, request_id: RequestId, reason: str) -> tuple[RunId, ...]:
        """Stop the jobs of all users of the store that are open now; return their ids, the newest first.

        Those that the same request has stopped before are among them, also if they have ended.

        Raises:
            RequestIdReused, InvalidField, TooLarge
        """
        _reason(reason)
        request_id = request_id or RequestId(self._ids.new("req"))
        wanted, token = RunFilter(running_jobs_of_store=True, stopped_by_command_id=CommandId(request_id)), ""
        stopped: list[RunId] = []
        while True:
            found = await self._ledger.list_runs(caller, wanted, PageAsked(page_size=0, page_token=token))
            replies = await asyncio.gather(*(self._end(caller, request_id, job.run_id, reason) for job in found.items))
            # Of those that were not taken, the job has ended or was removed meanwhile.
            ended = (reply.run for reply in replies if reply.taken and reply.run is not None)
            stopped += (job.run_id for job in ended if job.state in {RunState.CANCELLING, RunState.CANCELLED})
            token = found.next_page_token
            if not token:
                return tuple(stopped)

    async def _end(self, caller: Principal, request_id: RequestId, run_id: RunId, reason: str) -> Reply:
        command = Cancel(cause=StopCause.OPERATOR, reason=_reason(reason))
        command_id = CommandId(request_id or self._ids.new("cmd"))
        return await send(self._ledger, caller, run_id, command_id, command, act="ended")


def _reason(reason: str) -> str:
    return checks.text(reason, "reason", bytes_max=checks.REASON_BYTES_MAX, may_be_empty=True)
