"""The verbs of a client for triggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pawl.agent.v1 import trigger_pb2 as pb
from pawl.client.schedules import ScheduleVerbs
from pawl.event.v1 import trigger_pb2


class TriggerVerbs(ScheduleVerbs):
    """A suite that starts runs by itself, as its users see it."""

    async def create_trigger(self, definition: trigger_pb2.TriggerDefinition) -> tuple[trigger_pb2.Trigger, str]:
        """Make a trigger; return the secret of its webhook, too, which is empty if the trigger was there."""
        response = await self.again(self.triggers.CreateTrigger, pb.CreateTriggerRequest(definition=definition))
        return response.trigger, response.secret

    async def update_trigger(self, definition: trigger_pb2.TriggerDefinition) -> trigger_pb2.Trigger:
        """Put a definition in the place of the one that the trigger of its name has."""
        return (await self.again(self.triggers.UpdateTrigger, pb.UpdateTriggerRequest(definition=definition))).trigger

    async def get_trigger(self, name: str) -> trigger_pb2.Trigger:
        """Return a trigger of yours with its last twenty fires."""
        return (await self.again(self.triggers.GetTrigger, pb.GetTriggerRequest(name=name))).trigger

    async def list_triggers(self) -> Sequence[trigger_pb2.Trigger]:
        """Return your triggers by name, without their fires."""
        return (await self.again(self.triggers.ListTriggers, pb.ListTriggersRequest())).triggers

    async def pause_trigger(self, name: str, note: str = "") -> trigger_pb2.Trigger:
        """Pause a trigger: it takes no events, and what waits goes on waiting."""
        return (await self.again(self.triggers.PauseTrigger, pb.PauseTriggerRequest(name=name, note=note))).trigger

    async def resume_trigger(self, name: str) -> trigger_pb2.Trigger:
        """Have a trigger go on, with the credential of this client."""
        return (await self.again(self.triggers.ResumeTrigger, pb.ResumeTriggerRequest(name=name))).trigger

    async def rotate_trigger_secret(self, name: str) -> str:
        """Give a trigger another secret, and return it; for a day those before count, too."""
        return (await self.triggers.RotateTriggerSecret(pb.RotateTriggerSecretRequest(name=name))).secret

    async def delete_trigger(self, name: str) -> None:
        """Delete a trigger; its runs go on. Not made again by itself: the second time it is not found."""
        await self.triggers.DeleteTrigger(pb.DeleteTriggerRequest(name=name))

    async def deliver_webhook(
        self, trigger_id: str, headers: Mapping[str, str], body: bytes, *, request_id: str = ""
    ) -> pb.DeliverWebhookResponse:
        """Bring a webhook as it came in to its trigger, with the role gateway; say whether it came before."""
        request = pb.DeliverWebhookRequest(trigger_id=trigger_id, headers=headers, body=body, request_id=request_id)
        return await self.once(self.triggers.DeliverWebhook, request)
