"""pawl.agent.v1.TriggerService: requests to use cases, what they return to responses."""

from __future__ import annotations

from pawl.agent.v1 import trigger_pb2 as pb
from pawl.agent.v1 import trigger_pb2_grpc
from pawl.agent_loop.adapters.trigger_ledger import TriggerLedgerClient
from pawl.agent_loop.app.starting import NOTE_BYTES_MAX
from pawl.agent_loop.app.triggers import Triggers
from pawl.agent_loop.domain import checks
from pawl.chassis.auth import require_user
from pawl.chassis.ids import check_id
from pawl.chassis.rpc_kinds import Context
from pawl.event.v1.trigger_pb2 import TriggerDefinition
from pawl.job.v1.triggers_pb2 import PutTriggerResponse


class TriggerServicer(trigger_pb2_grpc.TriggerServiceServicer):
    """Serves users, and those who bring what comes from outside. Store and user come from their credential alone."""

    def __init__(self, triggers: Triggers, ledger: TriggerLedgerClient) -> None:
        self._triggers = triggers
        self._ledger = ledger

    async def CreateTrigger(self, request: pb.CreateTriggerRequest, context: Context) -> pb.CreateTriggerResponse:
        saved = await self._save(request.definition, must_exist=False)
        return pb.CreateTriggerResponse(trigger=saved.trigger, secret=saved.secret)

    async def UpdateTrigger(self, request: pb.UpdateTriggerRequest, context: Context) -> pb.UpdateTriggerResponse:
        saved = await self._save(request.definition, must_exist=True)
        return pb.UpdateTriggerResponse(trigger=saved.trigger)

    async def _save(self, definition: TriggerDefinition, *, must_exist: bool) -> PutTriggerResponse:
        check_id(definition.name, "definition.name")
        return await self._triggers.save(require_user(), definition, must_exist=must_exist)

    async def GetTrigger(self, request: pb.GetTriggerRequest, context: Context) -> pb.GetTriggerResponse:
        found = await self._ledger.get(require_user(), check_id(request.name, "name"))
        return pb.GetTriggerResponse(trigger=found)

    async def ListTriggers(self, request: pb.ListTriggersRequest, context: Context) -> pb.ListTriggersResponse:
        return pb.ListTriggersResponse(triggers=await self._ledger.list(require_user()))

    async def PauseTrigger(self, request: pb.PauseTriggerRequest, context: Context) -> pb.PauseTriggerResponse:
        name = check_id(request.name, "name")
        checks.text(request.note, "note", bytes_max=NOTE_BYTES_MAX, may_be_empty=True)
        paused = await self._ledger.pause(require_user(), name, request.note, paused=True)
        return pb.PauseTriggerResponse(trigger=paused)

    async def ResumeTrigger(self, request: pb.ResumeTriggerRequest, context: Context) -> pb.ResumeTriggerResponse:
        resumed = await self._ledger.pause(require_user(), check_id(request.name, "name"), paused=False)
        return pb.ResumeTriggerResponse(trigger=resumed)

    async def DeleteTrigger(self, request: pb.DeleteTriggerRequest, context: Context) -> pb.DeleteTriggerResponse:
        await self._ledger.delete(require_user(), check_id(request.name, "name"))
        return pb.DeleteTriggerResponse()

    async def RotateTriggerSecret(
        self, request: pb.RotateTriggerSecretRequest, context: Context
    ) -> pb.RotateTriggerSecretResponse:
        secret = await self._ledger.rotate(require_user(), check_id(request.name, "name"))
        return pb.RotateTriggerSecretResponse(secret=secret)

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
