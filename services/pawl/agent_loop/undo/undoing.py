"""Undo, for users: what it would do, asking for it, and what it has come to."""

from __future__ import annotations

from dataclasses import replace

from pawl.agent_loop.api.ledger import PublicLedger, submission
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules.options import AskedOptions, RunDefaults, complete
from pawl.agent_loop.loop.rules.run import Undo
from pawl.agent_loop.undo import rules as undo
from pawl.agent_loop.undo.planning import sources
from pawl.agent_loop.undo.rules import CallUndo
from pawl.chassis.identity.auth import Principal
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import CallId, RequestId, RunId, UserId
from pawl.chassis.process import logs
from pawl.errors import CallNotFound, InvalidField, RunNotEnded, RunNotFound
from pawl.event.v1 import run_pb2
from pawl.values import ENDED, MessagePolicy

_log = logs.get_logger(__name__)


class Undoing:
    """Undoes runs. Needs the user of the run, or an admin of its store; to all others there is no such run."""

    def __init__(self, *, ledger: PublicLedger, defaults: RunDefaults) -> None:
        self._ledger = ledger
        self._defaults = defaults

    async def preview(self, caller: Principal, run_id: RunId, call_id: CallId) -> tuple[CallUndo, ...]:
        """Return what undoing a run, or one call of it, would do, in that order. Changes nothing.

        Raises:
            RunNotFound, CallNotFound, RunNotEnded
        """
        owner, _ = await self._ended_run(caller, run_id)
        return await self._judged(owner, run_id, call_id)

    async def start(self, caller: Principal, request_id: RequestId, run_id: RunId, call_id: CallId) -> run_pb2.Run:
        """Create the run that undoes; durable when this returns. Idempotent by request id.

        Raises:
            RunNotFound, CallNotFound, RunNotEnded, QueueFull, RequestIdReused
        """
        owner, run = await self._ended_run(caller, run_id)
        if call_id:
            await self._judged(owner, run_id, call_id)
        # What needed two people is not taken back by one.
        asked = AskedOptions(approvals_required=run.options.approvals_required)
        message = submission(
            owner,
            asked_options=asked,
            options=complete(asked, self._defaults),
            request_id=request_id,
            conversation_id=run.conversation_id,
            conversation_must_exist=True,
            text=undo.request_text(run_id, call_id),
            policy=MessagePolicy.QUEUE,
            undo=wire.UNDO.fields(Undo(run_id=run_id, call_id=call_id, user_id=caller.user_id)),
        )
        created = (await self._ledger.submit_message(message)).run
        _log.info("run.undo", store=caller.store_id, user=caller.user_id, undone=run_id, run=created.run_id)
        return created

    async def report(self, caller: Principal, run_id: RunId) -> tuple[CallUndo, ...]:
        """Return what an undo has come to so far, call by call, in its order.

        Raises:
            RunNotFound
            InvalidField: the run is no undo.
        """
        owner, run = await self._run(caller, run_id)
        if not run.HasField("undo"):
            raise InvalidField("the run is no undo", field="run_id")
        return await self._judged(owner, RunId(run.undo.run_id), CallId(run.undo.call_id), run_id)

    async def _judged(
        self, owner: Principal, run_id: RunId, call_id: CallId, undo_run_id: RunId = RunId("")
    ) -> tuple[CallUndo, ...]:
        found = undo.in_order(await sources(self._ledger.channel, owner.store_id, owner.user_id, run_id), call_id)
        if call_id and not found:
            raise CallNotFound
        return tuple(undo.judged(source, undo_run_id) for source in found)

    async def _ended_run(self, caller: Principal, run_id: RunId) -> tuple[Principal, run_pb2.Run]:
        owner, run = await self._run(caller, run_id)
        if run.state not in ENDED:
            raise RunNotEnded
        return owner, run

    async def _run(self, caller: Principal, run_id: RunId) -> tuple[Principal, run_pb2.Run]:
        """Return a run that the caller may undo, and the user whose run it is, in whose name it is undone."""
        try:
            return caller, await self._ledger.get_run(caller, run_id)
        except RunNotFound:
            if Role.ADMIN not in caller.roles:
                raise
        run = (await self._ledger.get_run_as_service(caller, run_id)).run
        # Whoever asks for it has started it, and is none of those who approve what it does.
        owner = replace(
            caller, user_id=UserId(run.user_id), delegate_user_id=caller.user_id, roles=frozenset(run.user_roles)
        )
        return owner, run
