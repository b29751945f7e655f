"""pawl.job.v1.TitleService: translates, nothing else."""

from __future__ import annotations

from typing import Final

from pawl.chassis.ids import ConversationId, check_id
from pawl.chassis.rpc.kinds import Context
from pawl.errors import InvalidField
from pawl.event.v1 import message_pb2
from pawl.job.v1 import titles_pb2 as pb
from pawl.job.v1 import titles_pb2_grpc
from pawl.job_store.conversations.store.titles import PostgresTitles
from pawl.job_store.ledger.rpc.messages import used_of
from pawl.job_store.ledger.rules.titles import Said

TITLES_MAX: Final = 16
_ATTEMPTS_MAX: Final = 2**15


class TitleServicer(titles_pb2_grpc.TitleServiceServicer):
    """Serves those who ask models for titles."""

    def __init__(self, titles: PostgresTitles) -> None:
        self._titles = titles

    async def ClaimTitles(self, request: pb.ClaimTitlesRequest, context: Context) -> pb.ClaimTitlesResponse:
        if not 1 <= request.titles_max <= TITLES_MAX:
            raise InvalidField(f"titles_max is from 1 to {TITLES_MAX}", field="titles_max")
        tasks = await self._titles.claim(titles_max=request.titles_max)
        return pb.ClaimTitlesResponse(tasks=tasks)

    async def SetTitle(self, request: pb.SetTitleRequest, context: Context) -> pb.SetTitleResponse:
        store_id = check_id(request.store_id, "store_id")
        conversation_id = ConversationId(check_id(request.conversation_id, "conversation_id"))
        attempt = min(request.attempt, _ATTEMPTS_MAX - 1)
        await self._titles.put(store_id, conversation_id, attempt, request.text, used_of(request.usage))
        return pb.SetTitleResponse()


def said(body: bytes) -> Said:
    """Return what a message says, and which model has written it."""
    message = message_pb2.Message.FromString(body)
    return Said(text=message.text, model=message.model)
