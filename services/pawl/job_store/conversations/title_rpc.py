"""Servicer for pawl.job.v1.TitleService."""

from __future__ import annotations

from typing import Final

from pawl.chassis.ids import ConversationId, check_id
from pawl.chassis.rpc.kinds import Context
from pawl.errors import InvalidField
from pawl.job.v1 import titles_pb2 as pb
from pawl.job.v1 import titles_pb2_grpc
from pawl.job_store.conversations.store.titles import PostgresTitles
from pawl.job_store.ledger.rpc.messages import checked_usage

TITLES_MAX: Final = 16
_ATTEMPTS_MAX: Final = 2**15


class TitleServicer(titles_pb2_grpc.TitleServiceServicer):
    def __init__(self, titles: PostgresTitles) -> None:
        self._titles = titles

    async def ClaimTitles(self, request: pb.ClaimTitlesRequest, context: Context) -> pb.ClaimTitlesResponse:
        if not 1 <= request.titles_max <= TITLES_MAX:
            raise InvalidField(
                f"titles_max must be between 1 and {TITLES_MAX}, got {request.titles_max}", field="titles_max"
            )
        return pb.ClaimTitlesResponse(tasks=await self._titles.claim(titles_max=request.titles_max))

    async def SetTitle(self, request: pb.SetTitleRequest, context: Context) -> pb.SetTitleResponse:
        store_id = check_id(request.store_id, "store_id")
        conversation_id = ConversationId(check_id(request.conversation_id, "conversation_id"))
        attempt = min(request.attempt, _ATTEMPTS_MAX - 1)
        used = checked_usage(request.usage)
        await self._titles.put(store_id, conversation_id, attempt, request.text, model=request.model, used=used)
        return pb.SetTitleResponse()
