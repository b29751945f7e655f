"""Results of earlier calls, from the ledger."""

from __future__ import annotations

import grpc
from pawl.job.v1 import ledger_pb2, ledger_pb2_grpc

from services.chassis.rpc_client import translating
from services.errors import CallNotFound


class LedgerResults:
    """The StoredResults port of read_result, over LedgerService.GetCall."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._ledger = ledger_pb2_grpc.LedgerServiceStub(channel)

    async def read(self, *, store_id: str, user_id: str, conversation_id: str, call_id: str) -> bytes | None:
        request = ledger_pb2.GetCallRequest(store_id=store_id, user_id=user_id, call_id=call_id)
        try:
            with translating():
                response = await self._ledger.GetCall(request)
        except CallNotFound:
            return None
        call = response.call
        if call.conversation_id != conversation_id or not call.HasField("result"):
            return None
        return call.result.content_json
