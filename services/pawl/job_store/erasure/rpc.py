"""Servicer for pawl.job.v1.ErasureService."""

from __future__ import annotations

from collections.abc import AsyncIterator

from pawl.chassis.identity.auth import current_principal
from pawl.chassis.ids import UserId, check_id
from pawl.chassis.rpc.kinds import Context
from pawl.job.v1 import erasure_pb2 as pb
from pawl.job.v1 import erasure_pb2_grpc
from pawl.job_store.erasure.erasing import Erasing
from pawl.job_store.erasure.rules import ErasureKey, part_of


class ErasureServicer(erasure_pb2_grpc.ErasureServiceServicer):
    def __init__(self, erasing: Erasing) -> None:
        self._erasing = erasing

    async def ListErasures(
        self, request: pb.ListErasuresRequest, context: Context
    ) -> AsyncIterator[pb.ListErasuresResponse]:
        part = part_of(current_principal().credential_id)
        async for key, items in self._erasing.due(part):
            yield pb.ListErasuresResponse(
                store_id=key.store_id,
                conversation_id=key.conversation_id,
                run_ids=items.run_ids,
                call_ids=items.call_ids,
                last=not items.has_more,
            )

    async def ConfirmErasure(self, request: pb.ConfirmErasureRequest, context: Context) -> pb.ConfirmErasureResponse:
        key = ErasureKey(
            store_id=check_id(request.store_id, "store_id"),
            conversation_id=check_id(request.conversation_id, "conversation_id"),
            user_id=UserId(""),
        )
        await self._erasing.erasures.done(key, part_of(current_principal().credential_id))
        return pb.ConfirmErasureResponse()
