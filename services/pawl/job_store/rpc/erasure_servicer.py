"""pawl.job.v1.ErasureService: translates, nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from pawl.chassis.auth import current_principal
from pawl.chassis.ids import UserId, check_id
from pawl.chassis.rpc_kinds import Context
from pawl.event.v1 import call_pb2, conversation_pb2
from pawl.job.v1 import erasure_pb2 as pb
from pawl.job.v1 import erasure_pb2_grpc
from pawl.job_store.app.erasing import Erasing
from pawl.job_store.app.pages import Id, next_token, page_size, read_token
from pawl.job_store.domain.erasure import ErasureKey, ErasureReceipt, LeftCall, part_of
from pawl.job_store.rpc.messages import timestamp


class ErasureServicer(erasure_pb2_grpc.ErasureServiceServicer):
    """Serves erasures: to users, and to the services that have a part in them."""

    def __init__(self, erasing: Erasing) -> None:
        self._erasing = erasing

    async def EraseConversation(
        self, request: pb.EraseConversationRequest, context: Context
    ) -> pb.EraseConversationResponse:
        key = _key(request, check_id(request.user_id, "user_id"))
        rows_max = page_size(request.page_size)
        selection = (key.store_id, key.user_id, key.conversation_id)
        after = read_token(request.page_token, "EraseConversation", selection, tuple[Id, Id]) or ("", "")
        receipt = await self._erasing.erase(key)
        page = await self._erasing.left(key, after=after, rows_max=rows_max)
        token = next_token("EraseConversation", selection, page, lambda call: (call.run_id, call.call_id))
        return pb.EraseConversationResponse(
            erasure=_erasure(receipt), left_calls=map(_left_call, page.rows), next_page_token=token
        )

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
        await self._erasing.confirm(_key(request, UserId("")), part_of(current_principal().credential_id))
        return pb.ConfirmErasureResponse()


def call_kind(spec: bytes) -> tuple[int, int]:
    """Return the execution context and the effect class that the opaque rest of a call says."""
    call = call_pb2.Call.FromString(spec)
    # What is imported has begun elsewhere.
    return (0, 0) if call.imported else (call.context, call.effect_class)


def _key(request: Any, user_id: UserId) -> ErasureKey:
    return ErasureKey(
        store_id=check_id(request.store_id, "store_id"),
        conversation_id=check_id(request.conversation_id, "conversation_id"),
        user_id=user_id,
    )


def _erasure(receipt: ErasureReceipt) -> conversation_pb2.Erasure:
    return conversation_pb2.Erasure(
        conversation_id=receipt.conversation_id,
        erase_time=timestamp(receipt.erase_time),
        end_time=None if receipt.end_time is None else timestamp(receipt.end_time),
        waits_for=receipt.waits_for,
    )


def _left_call(call: LeftCall) -> conversation_pb2.LeftCall:
    return conversation_pb2.LeftCall(
        run_id=call.run_id,
        call_id=call.call_id,
        tool_name=call.tool_name,
        effect_class=call.effect_class,  # type: ignore[arg-type]  # the same numbers
        state=call.state.value,  # type: ignore[arg-type]  # the same numbers
        start_time=None if call.start_time is None else timestamp(call.start_time),
    )
