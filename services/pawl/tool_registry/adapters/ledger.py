"""Runs and earlier calls, from the ledger."""

from __future__ import annotations

import grpc

from pawl.chassis.ids import DEFAULT_AGENT, CallKey, ConversationId, RunKey, StoreId, UserId
from pawl.chassis.rpc_client import translated
from pawl.errors import AgentNotFound, CallNotFound, ConversationNotFound, RunNotFound
from pawl.event.v1 import call_pb2, conversation_pb2
from pawl.job.v1 import agents_pb2, agents_pb2_grpc, ledger_pb2, ledger_pb2_grpc


class LedgerReads:
    """The ports StoredResults of read_result and RunReads of rules, over LedgerService."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._ledger = ledger_pb2_grpc.LedgerServiceStub(channel)
        self._agents = agents_pb2_grpc.AgentLedgerServiceStub(channel)

    async def has_run(self, run: RunKey, user_id: UserId) -> bool:
        request = ledger_pb2.GetRunRequest(store_id=run.store_id, user_id=user_id, run_id=run.run_id)
        try:
            await translated(self._ledger.GetRun(request))
        except RunNotFound:
            return False
        return True

    async def has_conversation(self, store_id: StoreId, user_id: UserId, conversation_id: ConversationId) -> bool:
        request = ledger_pb2.GetConversationRequest(store_id=store_id, user_id=user_id, conversation_id=conversation_id)
        try:
            found = (await translated(self._ledger.GetConversation(request))).conversation
        except ConversationNotFound:
            return False
        # Others may share theirs. A rule is about calls of its own user.
        return found.user_id == user_id or found.sharing == conversation_pb2.SHARING_WRITE

    async def gated_tool(self, key: CallKey, user_id: UserId) -> str | None:
        call = await self._call(key, user_id)
        return call.tool_name if call is not None and call.approval.digest else None

    async def has_agent(self, store_id: StoreId, name: str) -> bool:
        try:
            await translated(self._agents.GetAgent(agents_pb2.GetAgentRequest(store_id=store_id, name=name)))
        except AgentNotFound:
            return name == DEFAULT_AGENT
        return True

    async def _call(self, key: CallKey, user_id: UserId) -> call_pb2.Call | None:
        request = ledger_pb2.GetCallRequest(store_id=key.store_id, user_id=user_id, call_id=key.call_id)
        try:
            return (await translated(self._ledger.GetCall(request))).call
        except CallNotFound:
            return None

    async def read(self, key: CallKey, user_id: UserId, conversation_id: ConversationId) -> bytes | None:
        call = await self._call(key, user_id)
        if call is None:
            return None
        if call.conversation_id != conversation_id or not call.HasField("result"):
            return None
        return call.result.content_json
