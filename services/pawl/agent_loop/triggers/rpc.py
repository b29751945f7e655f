"""pawl.agent.v1.TriggerService: what needs agents. Its other methods are forwarded to job-store."""

from __future__ import annotations

from typing import Final

from pawl.agent.v1 import trigger_pb2 as pb
from pawl.agent_loop.triggers.triggers import Triggers
from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import check_id
from pawl.chassis.rpc.kinds import Context
from pawl.chassis.rpc.server import Forward

_SERVICE: Final = "/pawl.agent.v1.TriggerService"


class TriggerServicer:
    """Serves users, and those who bring what comes from outside. Store and user come from their credential alone."""

    def __init__(self, triggers: Triggers, forward: Forward) -> None:
        self._triggers = triggers
        self._forward = forward

    async def CreateTrigger(self, request: pb.CreateTriggerRequest, context: Context) -> pb.CreateTriggerResponse:
        await self._triggers.check(require_user(), request.definition)
        response = await self._forward(f"{_SERVICE}/CreateTrigger", request.SerializeToString())
        return pb.CreateTriggerResponse.FromString(response)

    async def UpdateTrigger(self, request: pb.UpdateTriggerRequest, context: Context) -> pb.UpdateTriggerResponse:
        await self._triggers.check(require_user(), request.definition)
        response = await self._forward(f"{_SERVICE}/UpdateTrigger", request.SerializeToString())
        return pb.UpdateTriggerResponse.FromString(response)

    async def DeliverWebhook(self, request: pb.DeliverWebhookRequest, context: Context) -> pb.DeliverWebhookResponse:
        fired = await self._triggers.deliver_webhook(
            require_user(),
            check_id(request.trigger_id, "trigger_id"),
            request.headers,
            request.body,
            check_id(request.request_id, "request_id", optional=True),
        )
        return pb.DeliverWebhookResponse(fire=fired.fire, duplicate=fired.duplicate)

    async def DeliverMail(self, request: pb.DeliverMailRequest, context: Context) -> pb.DeliverMailResponse:
        check_id(request.trigger_id, "trigger_id")
        fired = await self._triggers.deliver_mail(require_user().store_id, request)
        fire = fired.fire if fired.HasField("fire") else None
        return pb.DeliverMailResponse(fire=fire, duplicate=fired.duplicate)
