"""Lets users preview and start an undo of a run, and read its results."""

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
    """Undoes runs. Only a run's user and the store's admins may do so. For anyone else, the run is not found."""

    def __init__(self, *, ledger: PublicLedger, defaults: RunDefaults) -> None:
        self._ledger = ledger
        self._defaults = defaults

    async def preview(self, caller: Principal, run_id: RunId, call_id: CallId) -> tuple[CallUndo, ...]:
        """Return what undoing a run, or one of its calls, would do. Calls are in undo order. Changes nothing.

        Raises:
            RunNotFound, CallNotFound, RunNotEnded
        """
        owner, _ = await self._ended_run(caller, run_id)
        return await self._outcomes(owner, run_id, call_id)

    async def start(self, caller: Principal, request_id: RequestId, run_id: RunId, call_id: CallId) -> run_pb2.Run:
        """Create the undo run and return once it is durable. Idempotent by request id.

        Raises:
            RunNotFound, CallNotFound, RunNotEnded, QueueFull, RequestIdReused
        """
        owner, run = await self._ended_run(caller, run_id)
        if call_id:
            await self._outcomes(owner, run_id, call_id)
        # Calls that needed two people's approval must not be undone by one person.
        requested = AskedOptions(approvals_required=run.options.approvals_required)
        message = submission(
            owner,
            asked_options=requested,
            options=complete(requested, self._defaults),
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
        """Return an undo's results so far, call by call, in undo order.

        Raises:
            RunNotFound
            InvalidField: The run is not an undo.
        """
        owner, run = await self._run(caller, run_id)
        if not run.HasField("undo"):
            raise InvalidField("run_id: the run is not an undo", field="run_id")
        return await self._outcomes(owner, RunId(run.undo.run_id), CallId(run.undo.call_id), run_id)

    async def _outcomes(
        self, owner: Principal, run_id: RunId, call_id: CallId, undo_run_id: RunId = RunId("")
    ) -> tuple[CallUndo, ...]:
        found = undo.in_order(await sources(self._ledger.channel, owner.store_id, owner.user_id, run_id), call_id)
        if call_id and not found:
            raise CallNotFound
        return tuple(undo.outcome_of(source, undo_run_id) for source in found)

    async def _ended_run(self, caller: Principal, run_id: RunId) -> tuple[Principal, run_pb2.Run]:
        owner, run = await self._run(caller, run_id)
        if run.state not in ENDED:
            raise RunNotEnded
        return owner, run

    async def _run(self, caller: Principal, run_id: RunId) -> tuple[Principal, run_pb2.Run]:
        try:
            return caller, await self._ledger.get_run(caller, run_id)
        except RunNotFound:
            if Role.ADMIN not in caller.roles:
                raise
        run = (await self._ledger.get_run_as_service(caller, run_id)).run
        # Record the caller as the delegate, so that they cannot approve the undo's calls.
        owner = replace(
            caller, user_id=UserId(run.user_id), delegate_user_id=caller.user_id, roles=frozenset(run.user_roles)
        )
        return owner, run
