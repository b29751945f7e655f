"""Reads and updates the runs, calls, jobs and agents in job-store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import grpc

from pawl.chassis.ids import CallKey, CommandId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.chassis.rpc.client import translated
from pawl.errors import AgentNotFound, CallNotFound, ConversationNotFound, PawlError, RunNotFound
from pawl.event.v1 import call_pb2, conversation_pb2, run_pb2
from pawl.job.v1 import agents_pb2, agents_pb2_grpc, ledger_pb2, ledger_pb2_grpc

ENDED: Final = tuple(state for state in run_pb2.RunState.values() if state >= run_pb2.RUN_STATE_COMPLETED)
_OPEN: Final = tuple(state for state in run_pb2.RunState.values() if state and state not in ENDED)
_OPEN_MAX: Final = 50

T = TypeVar("T")


class LedgerReads:
    """Reads and updates data in job-store. All methods can raise DependencyUnavailable."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._ledger = ledger_pb2_grpc.LedgerServiceStub(channel)
        self._agents = agents_pb2_grpc.AgentLedgerServiceStub(channel)

    async def has_run(self, run: RunKey, user_id: UserId) -> bool:
        """Return whether the user has a run with this id, open or ended."""
        request = ledger_pb2.GetRunRequest(store_id=run.store_id, user_id=user_id, run_id=run.run_id)
        return await _found(self._ledger.GetRun(request), RunNotFound) is not None

    async def has_conversation(self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId) -> bool:
        """Return whether the user may write to the conversation.

        Raises:
            ConversationErased: The conversation was erased.
        """
        request = ledger_pb2.GetConversationRequest(store_id=store_id, user_id=user_id, conversation_id=conversation_id)
        found = await _found(self._ledger.GetConversation(request), ConversationNotFound)
        # Another user's conversation counts only if it is shared with write access.
        return found is not None and (
            found.conversation.user_id == user_id or found.conversation.sharing == conversation_pb2.SHARING_WRITE
        )

    async def gated_tool(self, key: CallKey, user_id: UserId) -> str | None:
        """Return the tool name of a user's call that needed approval, or None if there is no such call."""
        call = await self._call(key, user_id)
        return call.tool_name if call is not None and call.approval.digest else None

    async def has_agent(self, store_id: StoreId, name: str) -> bool:
        request = agents_pb2.GetAgentRequest(store_id=store_id, name=name)
        return await _found(self._agents.GetAgent(request), AgentNotFound) is not None

    async def takes_results(self, run: RunKey) -> bool:
        """Return whether the run is open and not being cancelled."""
        request = ledger_pb2.GetRunRequest(store_id=run.store_id, run_id=run.run_id)
        found = await _found(self._ledger.GetRun(request), RunNotFound)
        return found is not None and found.run.state not in {*ENDED, run_pb2.RUN_STATE_CANCELLING}

    async def labels(self, run: RunKey) -> Mapping[str, str]:
        """Return the labels of the root run above a run, or of the run itself if it is a root run.

        The result is empty if the run does not exist.
        """
        request = ledger_pb2.GetRunRequest(store_id=run.store_id, run_id=run.run_id)
        found = await _found(self._ledger.GetRun(request), RunNotFound)
        if found is not None and found.run.above:
            return await self.labels(RunKey(run.store_id, RunId(found.run.above[0].run_id)))
        return found.run.labels if found is not None else {}

    async def note_completion(self, run: RunKey, key: CallKey) -> None:
        """Notify a run that its call was completed. Has no effect if there is no such run."""
        request = ledger_pb2.NoteCompletionRequest(store_id=run.store_id, run_id=run.run_id, call_id=key.call_id)
        with suppress(RunNotFound):
            await translated(self._ledger.NoteCompletion(request))

    async def _call(self, key: CallKey, user_id: UserId) -> call_pb2.Call | None:
        request = ledger_pb2.GetCallRequest(store_id=key.store_id, user_id=user_id, call_id=key.call_id)
        found = await _found(self._ledger.GetCall(request), CallNotFound)
        return None if found is None else found.call

    async def read(
        self, key: CallKey, user_id: UserId, conversation_id: ConversationId, caller_run_id: RunId
    ) -> bytes | None:
        """Return the JSON result of a call in the conversation or one of its jobs, or None if it has no result.

        If the caller is a delegated run, this includes the jobs below that run.
        """
        call = await self._call(key, user_id)
        if call is None or not call.HasField("result"):
            return None
        if call.conversation_id != conversation_id:
            request = ledger_pb2.GetRunRequest(store_id=call.store_id, user_id=user_id, run_id=call.run_id)
            found = await _found(self._ledger.GetRun(request), RunNotFound)
            if found is None or not found.run.reports_to_conversation_id:
                return None
            is_below = any(each.run_id == caller_run_id for each in found.run.above)
            if found.run.reports_to_conversation_id != conversation_id and not is_below:
                return None
        return call.result.content_json

    async def jobs(
        self,
        store_id: StoreId,
        user_id: UserId,
        conversation_id: ConversationId,
        caller_run_id: RunId,
        *,
        ended_max: int,
    ) -> Sequence[run_pb2.Run]:
        """Return the caller's open jobs, followed by its ended jobs. Both are sorted newest first.

        These are the jobs of the caller's conversation or, if the caller is a delegated run, the jobs that it started.
        """
        of_conversation = ledger_pb2.ListJobsRequest(reports_to_conversation_id=conversation_id)
        for wanted in (of_conversation, ledger_pb2.ListJobsRequest(parent_run_id=caller_run_id)):
            wanted.store_id, wanted.user_id = store_id, user_id
            found: list[run_pb2.Run] = []
            for states, most in ((_OPEN, _OPEN_MAX), (ENDED, ended_max)):
                request = ledger_pb2.ListJobsRequest(states=states, page_size=most)
                request.MergeFrom(wanted)
                found += (await translated(self._ledger.ListJobs(request))).runs
            if found:
                return found
        return ()

    async def stop_job(
        self,
        key: RunKey,
        user_id: UserId,
        conversation_id: ConversationId,
        caller_run_id: RunId,
        command_id: CommandId,
    ) -> tuple[run_pb2.Run, bool] | None:
        """Stop a job of the conversation, or one that the caller started.

        Return the job, and whether it was still open. Return None if there is no such job.
        """
        request = ledger_pb2.StopJobRequest(
            store_id=key.store_id,
            user_id=user_id,
            conversation_id=conversation_id,
            run_id=key.run_id,
            command_id=command_id,
            caller_run_id=caller_run_id,
        )
        found = await _found(self._ledger.StopJob(request), RunNotFound)
        return None if found is None else (found.run, found.stopped)


async def _found(call: grpc.aio.UnaryUnaryCall[Any, T], absent: type[PawlError]) -> T | None:
    try:
        return await translated(call)
    except absent:
        return None
