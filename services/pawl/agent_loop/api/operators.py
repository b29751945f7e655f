"""The acts of a store's operators on its runs, whoever they belong to (settled point 9)."""

from __future__ import annotations

import asyncio
from typing import Final

from pawl.agent_loop.api.ledger import PublicLedger
from pawl.agent_loop.api.replies import Reply, is_taken, run_after
from pawl.agent_loop.loop.rules import checks
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import IdSource, RequestId, RunId
from pawl.chassis.process import logs
from pawl.errors import AttentionNotNeeded, RunNotFound
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2 as pb
from pawl.values import CommandOutcome, RunState

STOPPED: Final[frozenset[int]] = frozenset({RunState.CANCELLING, RunState.CANCELLED})
"""The states of a run that somebody has stopped."""

_log = logs.get_logger(__name__)


async def send(ledger: PublicLedger, caller: Principal, run_id: RunId, command: pb.Command, *, act: str) -> Reply:
    """Send what an operator does about a run, and write down who did it. The log of the run says it too, if taken."""
    reply = await ledger.send_command(caller, run_id, command, as_operator=True)
    outcome = CommandOutcome(reply.outcome).name
    _log.info("operator.acted", act=act, store=caller.store_id, user=caller.user_id, run=run_id, outcome=outcome)
    return reply


class Operators:
    """Mends the runs of a store that need attention."""

    def __init__(self, *, ledger: PublicLedger, ids: IdSource) -> None:
        self._ledger = ledger
        self._ids = ids

    async def redrive(self, caller: Principal, request_id: RequestId, run_id: RunId, reason: str) -> run_pb2.Run:
        """Let a quarantined run go on; return it.

        Raises:
            RunNotFound, RunEnded, InvalidField, TooLarge
            AttentionNotNeeded: it is not quarantined.
        """
        redrive = pb.RedriveCommand(reason=_reason(reason))
        command = pb.Command(command_id=request_id or self._ids.new("cmd"), redrive=redrive)
        reply = await send(self._ledger, caller, run_id, command, act="redriven")
        return run_after(reply, AttentionNotNeeded if reply.HasField("run") else RunNotFound)

    async def end(self, caller: Principal, request_id: RequestId, run_id: RunId, reason: str) -> run_pb2.Run:
        """Stop a run of any user of the store; return it. One that has ended stays as it is.

        Raises:
            RunNotFound, InvalidField, TooLarge
        """
        return run_after(await self._end(caller, request_id, run_id, reason), RunNotFound, also_late=True)

    async def end_jobs(self, caller: Principal, request_id: RequestId, reason: str) -> tuple[RunId, ...]:
        """Stop the jobs of all users of the store that are open now; return their ids, the newest first.

        Those that the same request has stopped before are among them, also if they have ended.

        Raises:
            RequestIdReused, InvalidField, TooLarge
        """
        _reason(reason)
        request_id = request_id or RequestId(self._ids.new("req"))
        wanted = pb.ListRunsRequest(running_jobs_of_store=True, stopped_by_command_id=request_id)
        stopped: list[RunId] = []
        while True:
            found = await self._ledger.list_runs(caller, wanted)
            replies = await asyncio.gather(
                *(self._end(caller, request_id, RunId(job.run_id), reason) for job in found.runs)
            )
            # Of those that were not taken, the job has ended or was removed meanwhile.
            ended = (reply.run for reply in replies if is_taken(reply) and reply.HasField("run"))
            stopped += (RunId(job.run_id) for job in ended if job.state in STOPPED)
            wanted.page_token = found.next_page_token
            if not wanted.page_token:
                return tuple(stopped)

    async def _end(self, caller: Principal, request_id: RequestId, run_id: RunId, reason: str) -> Reply:
        cancel = pb.CancelCommand(cause=run_pb2.STOP_CAUSE_OPERATOR, reason=_reason(reason))
        command = pb.Command(command_id=request_id or self._ids.new("cmd"), cancel=cancel)
        return await send(self._ledger, caller, run_id, command, act="ended")


def _reason(reason: str) -> str:
    return checks.text(reason, "reason", bytes_max=checks.REASON_BYTES_MAX, may_be_empty=True)
