"""Client methods for triggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pawl.agent.v1 import trigger_pb2 as pb
from pawl.client.schedules import ScheduleVerbs
from pawl.event.v1 import trigger_pb2


class TriggerVerbs(ScheduleVerbs):
    async def create_trigger(self, definition: trigger_pb2.TriggerDefinition) -> tuple[trigger_pb2.Trigger, str]:
        """Create a trigger. Return it with its webhook secret, which is empty if the trigger already existed."""
        response = await self.again(self.triggers.CreateTrigger, pb.CreateTriggerRequest(definition=definition))
        return response.trigger, response.secret

    async def update_trigger(self, definition: trigger_pb2.TriggerDefinition) -> trigger_pb2.Trigger:
        """Replace the definition of the trigger with the same name."""
        return (await self.again(self.triggers.UpdateTrigger, pb.UpdateTriggerRequest(definition=definition))).trigger

    async def get_trigger(self, name: str) -> trigger_pb2.Trigger:
        """Return a trigger with its last 20 firings."""
        return (await self.again(self.triggers.GetTrigger, pb.GetTriggerRequest(name=name))).trigger

    async def list_triggers(self) -> Sequence[trigger_pb2.Trigger]:
        """Return your triggers, sorted by name, without their firings."""
        return (await self.again(self.triggers.ListTriggers, pb.ListTriggersRequest())).triggers

    async def pause_trigger(self, name: str, note: str = "") -> trigger_pb2.Trigger:
        """Pause a trigger. It rejects new events during the pause. Queued events keep waiting."""
        return (await self.again(self.triggers.PauseTrigger, pb.PauseTriggerRequest(name=name, note=note))).trigger

    async def resume_trigger(self, name: str) -> trigger_pb2.Trigger:
        """Resume a trigger with this client's credential."""
        return (await self.again(self.triggers.ResumeTrigger, pb.ResumeTriggerRequest(name=name))).trigger

    async def rotate_trigger_secret(self, name: str) -> str:
        """Rotate a trigger's webhook secret and return the new one. Earlier secrets stay valid for a day."""
        return (await self.triggers.RotateTriggerSecret(pb.RotateTriggerSecretRequest(name=name))).secret

    async def delete_trigger(self, name: str) -> None:
        """Delete a trigger. Its runs continue. Not retried, because a second attempt would raise TriggerNotFound."""
        await self.triggers.DeleteTrigger(pb.DeleteTriggerRequest(name=name))

    async def deliver_webhook(
        self, trigger_id: str, headers: Mapping[str, str], body: bytes, *, request_id: str = ""
    ) -> pb.DeliverWebhookResponse:
        """Deliver a received webhook to its trigger. Requires the gateway role.

        The response reports whether the webhook is a duplicate.
        """
        request = pb.DeliverWebhookRequest(trigger_id=trigger_id, headers=headers, body=body, request_id=request_id)
        return await self.once(self.triggers.DeliverWebhook, request)
