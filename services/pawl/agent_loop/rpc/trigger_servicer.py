"""pawl.agent.v1.TriggerService: requests to use cases, what they return to responses."""

from __future__ import annotations

from typing import cast

from pawl.agent.v1 import trigger_pb2 as pb
from pawl.agent.v1 import trigger_pb2_grpc
from pawl.agent_loop.app.public_values import ScheduledMessage
from pawl.agent_loop.app.triggers import Triggers
from pawl.chassis.auth import require_user
from pawl.chassis.ids import check_id
from pawl.chassis.rpc_kinds import Context
from pawl.event.v1 import schedule_pb2, trigger_pb2


class TriggerServicer(trigger_pb2_grpc.TriggerServiceServicer):
    """Serves users, and those who bring what comes from outside. Store and user come from their credential alone."""

    def __init__(self, triggers: Triggers) -> None:
        self._triggers = triggers

    async def CreateTrigger(self, request: pb.CreateTriggerRequest, context: Context) -> pb.CreateTriggerResponse:
        trigger, secret = await self._save(request.definition, must_exist=False)
        return pb.CreateTriggerResponse(trigger=trigger, secret=secret)

    async def UpdateTrigger(self, request: pb.UpdateTriggerRequest, context: Context) -> pb.UpdateTriggerResponse:
        trigger, _ = await self._save(request.definition, must_exist=True)
        return pb.UpdateTriggerResponse(trigger=trigger)

    async def _save(
        self, definition: trigger_pb2.TriggerDefinition, *, must_exist: bool
    ) -> tuple[trigger_pb2.Trigger, str]:
        check_id(definition.name, "definition.name")
        template = ScheduledMessage(
            text=definition.text,
            agent=definition.agent,
            labels=definition.labels,
            conversation_key=definition.conversation_key,
        )
        mailbox = definition.mailbox if definition.HasField("mailbox") else None
        saved, secret = await self._triggers.save(require_user(), definition, template, mailbox, must_exist=must_exist)
        return _trigger(saved), secret

    async def GetTrigger(self, request: pb.GetTriggerRequest, context: Context) -> pb.GetTriggerResponse:
        found = await self._triggers.get(require_user(), check_id(request.name, "name"))
        return pb.GetTriggerResponse(trigger=_trigger(found))

    async def ListTriggers(self, request: pb.ListTriggersRequest, context: Context) -> pb.ListTriggersResponse:
        return pb.ListTriggersResponse(triggers=map(_trigger, await self._triggers.list(require_user())))

    async def PauseTrigger(self, request: pb.PauseTriggerRequest, context: Context) -> pb.PauseTriggerResponse:
        name = check_id(request.name, "name")
        paused = await self._triggers.pause(require_user(), name, request.note, paused=True)
        return pb.PauseTriggerResponse(trigger=_trigger(paused))

    async def ResumeTrigger(self, request: pb.ResumeTriggerRequest, context: Context) -> pb.ResumeTriggerResponse:
        resumed = await self._triggers.pause(require_user(), check_id(request.name, "name"), paused=False)
        return pb.ResumeTriggerResponse(trigger=_trigger(resumed))

    async def DeleteTrigger(self, request: pb.DeleteTriggerRequest, context: Context) -> pb.DeleteTriggerResponse:
        await self._triggers.delete(require_user(), check_id(request.name, "name"))
        return pb.DeleteTriggerResponse()

    async def RotateTriggerSecret(
        self, request: pb.RotateTriggerSecretRequest, context: Context
    ) -> pb.RotateTriggerSecretResponse:
        secret = await self._triggers.rotate(require_user(), check_id(request.name, "name"))
        return pb.RotateTriggerSecretResponse(secret=secret)

    async def DeliverWebhook(self, request: pb.DeliverWebhookRequest, context: Context) -> pb.DeliverWebhookResponse:
        delivery = await self._triggers.deliver_webhook(
            require_user(),
            check_id(request.trigger_id, "trigger_id"),
            request.headers,
            request.body,
            check_id(request.request_id, "request_id", optional=True),
        )
        fire = cast("schedule_pb2.ScheduleFire", delivery.fire)
        return pb.DeliverWebhookResponse(fire=fire, duplicate=delivery.duplicate)


def _trigger(document: object) -> trigger_pb2.Trigger:
    return cast("trigger_pb2.Trigger", document)
