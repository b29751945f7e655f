"""The ledger's triggers."""

from __future__ import annotations

from collections.abc import Mapping

import grpc

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import StoreId
from pawl.chassis.rpc.client import translated
from pawl.event.v1.trigger_pb2 import MailPosition
from pawl.job.v1 import triggers_pb2 as pb
from pawl.job.v1 import triggers_pb2_grpc
from pawl.job.v1.ledger_pb2 import SubmitMessageRequest


class TriggerLedger:
    """pawl.job.v1.TriggerLedgerService over a channel to job-store. It makes no retries."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = triggers_pb2_grpc.TriggerLedgerServiceStub(channel)

    async def check_webhook(
        self, caller: Principal, trigger_id: str, headers: Mapping[str, str], body: bytes
    ) -> pb.CheckWebhookResponse:
        request = pb.CheckWebhookRequest(store_id=caller.store_id, trigger_id=trigger_id, headers=headers, body=body)
        return await translated(self._stub.CheckWebhook(request))

    async def check_mailbox(self, store_id: StoreId, trigger_id: str, generation: int) -> pb.CheckMailboxResponse:
        request = pb.CheckMailboxRequest(store_id=store_id, trigger_id=trigger_id, generation=generation)
        return await translated(self._stub.CheckMailbox(request))

    async def claim_events(self, events_max: int) -> pb.ClaimEventsResponse:
        return await translated(self._stub.ClaimEvents(pb.ClaimEventsRequest(events_max=events_max)))

    async def fire(
        self,
        due: pb.DueTrigger,
        event: pb.TriggerEvent,
        message: SubmitMessageRequest | None,
        *,
        refusal: str = "",
        claimed: bool = False,
        mail: MailPosition | None = None,
        skipped: str = "",
    ) -> pb.FireTriggerResponse:
        request = pb.FireTriggerRequest(
            due=due,
            event=event,
            claimed=claimed,
            message=message,
            refusal=refusal,
            mail=mail,
            skipped=skipped,
        )
        return await translated(self._stub.FireTrigger(request))
