"""Runs and earlier calls, from the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import grpc

from pawl.chassis.ids import CallKey, CommandId, ConversationId, RunKey, StoreId, UserId
from pawl.chassis.rpc.client import translated
from pawl.errors import AgentNotFound, CallNotFound, ConversationNotFound, RunNotFound
from pawl.event.v1 import call_pb2, conversation_pb2, run_pb2
from pawl.job.v1 import agents_pb2, agents_pb2_grpc, ledger_pb2, ledger_pb2_grpc
from pawl.tool_registry.rules.jobs import Job

_ENDED: Final = tuple(state for state in run_pb2.RunState.values() if state >= run_pb2.RUN_STATE_COMPLETED)
_OPEN: Final = tuple(state for state in run_pb2.RunState.values() if state and state not in _ENDED)
_OPEN_MAX: Final = 50


class LedgerReads:
    """The runs, calls, jobs and agents of job-store, over LedgerService. All methods raise DependencyUnavailable."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._ledger = ledger_pb2_grpc.LedgerServiceStub(channel)
        self._agents = agents_pb2_grpc.AgentLedgerServiceStub(channel)

    async def has_run(self, run: RunKey, user_id: UserId) -> bool:
        """Return whether the user has that run, ended or not."""
        request = ledger_pb2.GetRunRequest(store_id=run.store_id, user_id=user_id, run_id=run.run_id)
        try:
            await translated(self._ledger.GetRun(request))
        except RunNotFound:
            return False
        return True

    async def has_conversation(self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId) -> bool:
        """Return whether that conversation is the user's.

        Raises:
            ConversationErased: the user has erased it.
        """
        request = ledger_pb2.GetConversationRequest(store_id=store_id, user_id=user_id, conversation_id=conversation_id)
        try:
            found = (await translated(self._ledger.GetConversation(request))).conversation
        except ConversationNotFound:
            return False
        # Others may share theirs. A rule is about calls of its own user.
        return found.user_id == user_id or found.sharing == conversation_pb2.SHARING_WRITE

    async def gated_tool(self, key: CallKey, user_id: UserId) -> str | None:
        """Return the tool of a call of the user that needed an approval; None if there is no such call."""
        call = await self._call(key, user_id)
        return call.tool_name if call is not None and call.approval.digest else None

    async def has_agent(self, store_id: StoreId, name: str) -> bool:
        """Return whether runs of the store can be those of that agent."""
        try:
            await translated(self._agents.GetAgent(agents_pb2.GetAgentRequest(store_id=store_id, name=name)))
        except AgentNotFound:
            return False
        return True

    async def takes_results(self, run: RunKey) -> bool:
        """Return whether the run is open and is not being stopped."""
        request = ledger_pb2.GetRunRequest(store_id=run.store_id, run_id=run.run_id)
        try:
            state = (await translated(self._ledger.GetRun(request))).run.state
        except RunNotFound:
            return False
        return state not in {*_ENDED, run_pb2.RUN_STATE_CANCELLING}

    async def note_completion(self, run: RunKey, key: CallKey) -> None:
        """Tell a run that its call was completed; one that is gone or has ended is told nothing."""
        request = ledger_pb2.NoteCompletionRequest(store_id=run.store_id, run_id=run.run_id, call_id=key.call_id)
        with suppress(RunNotFound):
            await translated(self._ledger.NoteCompletion(request))

    async def _call(self, key: CallKey, user_id: UserId) -> call_pb2.Call | None:
        request = ledger_pb2.GetCallRequest(store_id=key.store_id, user_id=user_id, call_id=key.call_id)
        try:
            return (await translated(self._ledger.GetCall(request))).call
        except CallNotFound:
            return None

    async def read(self, key: CallKey, user_id: UserId, conversation_id: ConversationId) -> bytes | None:
        """Return the result of a call of that conversation or its jobs, as JSON; None if there is none."""
        call = await self._call(key, user_id)
        if call is None or not call.HasField("result"):
            return None
        if call.conversation_id == conversation_id or await self._reports_to(call, user_id, conversation_id):
            return call.result.content_json
        return None

    async def _reports_to(self, call: call_pb2.Call, user_id: UserId, conversation_id: ConversationId) -> bool:
        """Return whether a call is one of a job that reports to a conversation."""
        request = ledger_pb2.GetRunRequest(store_id=call.store_id, user_id=user_id, run_id=call.run_id)
        try:
            run = (await translated(self._ledger.GetRun(request))).run
        except RunNotFound:
            return False
        return run.reports_to_conversation_id == conversation_id

    async def jobs(
        self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId, *, ended_max: int
    ) -> Sequence[Job]:
        """Return the open jobs of that conversation, then those that have ended; of both the newest first."""
        found: list[Job] = []
        for states, most in ((_OPEN, _OPEN_MAX), (_ENDED, ended_max)):
            request = ledger_pb2.ListJobsRequest(
                store_id=store_id,
                user_id=user_id,
                reports_to_conversation_id=conversation_id,
                states=states,
                page_size=most,
            )
            found += map(_job, (await translated(self._ledger.ListJobs(request))).runs)
        return found

    async def stop_job(
        self, key: RunKey, user_id: UserId, conversation_id: ConversationId, command_id: CommandId
    ) -> tuple[Job, bool] | None:
        """Return a job after a stop, and whether it was open before; None if that conversation has no such job."""
        request = ledger_pb2.StopJobRequest(
            store_id=key.store_id,
            user_id=user_id,
            conversation_id=conversation_id,
            run_id=key.run_id,
            command_id=command_id,
        )
        try:
            response = await translated(self._ledger.StopJob(request))
        except RunNotFound:
            return None
        return _job(response.run), response.stopped


def _job(run: run_pb2.Run) -> Job:
    return Job(
        job_id=run.run_id,
        tool=run.job.tool_name,
        state=_state(run),
        is_over=run.state in _ENDED,
        waits_for_time=list(run.waits) == [run_pb2.WAIT_KIND_TIME],
        begin_time=run.job.begin_time.ToMicroseconds() / 1e6,
        interval_seconds=run.job.interval_seconds,
        end_time=run.job.end_time.ToMicroseconds() / 1e6 if run.job.HasField("end_time") else None,
        iterations=run.round,
        result=run.output_text,
        error=run.failure.message,
    )


def _state(run: run_pb2.Run) -> str:
    """Return the name of the state of a run, or of what it waits for."""
    if run_pb2.WAIT_KIND_APPROVAL in run.waits:
        return "AWAITING_APPROVAL"
    if run_pb2.WAIT_KIND_PAUSED in run.waits:
        return "PAUSED"
    if run.state not in run_pb2.RunState.values():
        return "RUNNING"
    return run_pb2.RunState.Name(run.state).removeprefix("RUN_STATE_")
