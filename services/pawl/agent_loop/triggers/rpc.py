"""Serves pawl.agent.v1.TriggerService and fires triggers for events.

The ledger decides who may fire a trigger and creates the run. This module prepares the run's message, as if the user
had started the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from pawl.agent.v1 import trigger_pb2 as pb
from pawl.agent_loop.loop.rules import checks
from pawl.agent_loop.schedules.starting import RETRYABLE, TEXT_BYTES_MAX, ClaimPause, Starting, caller_of, fire_safely
from pawl.agent_loop.triggers import rules as outside
from pawl.chassis.identity.auth import Principal, require_user
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import IdSource, RequestId, StoreId, check_id
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.client import translated
from pawl.chassis.rpc.kinds import Context
from pawl.errors import DependencyUnavailable, InvalidField, PermissionDenied, TooLarge
from pawl.event.v1.schedule_pb2 import SCHEDULE_OVERLAP_ALLOW
from pawl.event.v1.trigger_pb2 import MailPosition, TriggerDefinition
from pawl.job.v1 import triggers_pb2, triggers_pb2_grpc
from pawl.job.v1.triggers_pb2 import DueTrigger, FireTriggerResponse, TriggerEvent
from pawl.server.rpc.server import Forward

_SERVICE: Final = "/pawl.agent.v1.TriggerService"
BODY_BYTES_MAX: Final = 256 * 1024
HEADERS_MAX: Final = 100
HEADERS_BYTES_MAX: Final = 16 * 1024
_LINE_BYTES_MAX: Final = checks.MESSAGE_BYTES_MAX - TEXT_BYTES_MAX - 16
_CLAIMED_MAX: Final = 64
_ATTEMPTS_MAX: Final = 8
_RETRY_SECONDS: Final = 1.0


class TriggerServicer:
    """Fires triggers. `stub` calls job-store, which stores the triggers.

    The methods here need agents or parse untrusted data. `forward` passes the others to job-store.
    """

    def __init__(
        self,
        stub: triggers_pb2_grpc.TriggerLedgerServiceAsyncStub,
        starting: Starting,
        clock: Clock,
        ids: IdSource,
        forward: Forward,
    ) -> None:
        self._stub = stub
        self._forward = forward
        self._starting = starting
        self._clock = clock
        self._ids = ids
        self._pause = ClaimPause(clock)

    async def CreateTrigger(self, request: pb.CreateTriggerRequest, context: Context) -> pb.CreateTriggerResponse:
        await self.check(require_user(), request.definition)
        response = await self._forward(f"{_SERVICE}/CreateTrigger", request.SerializeToString())
        return pb.CreateTriggerResponse.FromString(response)

    async def UpdateTrigger(self, request: pb.UpdateTriggerRequest, context: Context) -> pb.UpdateTriggerResponse:
        await self.check(require_user(), request.definition)
        response = await self._forward(f"{_SERVICE}/UpdateTrigger", request.SerializeToString())
        return pb.UpdateTriggerResponse.FromString(response)

    async def DeliverWebhook(self, request: pb.DeliverWebhookRequest, context: Context) -> pb.DeliverWebhookResponse:
        fired = await self.deliver_webhook(
            require_user(),
            check_id(request.trigger_id, "trigger_id"),
            request.headers,
            request.body,
            check_id(request.request_id, "request_id", optional=True),
        )
        return pb.DeliverWebhookResponse(fire=fired.fire, duplicate=fired.duplicate)

    async def DeliverMail(self, request: pb.DeliverMailRequest, context: Context) -> pb.DeliverMailResponse:
        check_id(request.trigger_id, "trigger_id")
        fired = await self.deliver_mail(require_user().store_id, request)
        fire = fired.fire if fired.HasField("fire") else None
        return pb.DeliverMailResponse(fire=fire, duplicate=fired.duplicate)

    async def check(self, caller: Principal, definition: TriggerDefinition) -> None:
        """Check that the caller may have this trigger, and that the trigger can currently start a run.

        Raises:
            PermissionDenied: The trigger has a mailbox, whose password belongs to the store, but the caller is not an
                admin.
            AgentNotFound, InvalidField, InvalidId, TooLarge: A run cannot be started.
        """
        if definition.HasField("mailbox") and Role.ADMIN not in caller.rights:
            raise PermissionDenied(
                f"definition.mailbox requires the {Role.ADMIN} role, because its password belongs to the store"
            )
        await self._starting.check(caller, definition)

    async def deliver_webhook(
        self, caller: Principal, trigger_id: str, headers: Mapping[str, str], body: bytes, request_id: RequestId
    ) -> FireTriggerResponse:
        """Fire a trigger of the caller's store for a webhook. A repeated delivery does not fire the trigger again.

        Raises:
            TriggerNotFound, BadSignature, WebhookTooOld, TriggerPaused, InvalidField, TooLarge
            DependencyUnavailable: The trigger changed repeatedly, or the ledger is unavailable.
        """
        headers = _checked(headers, body)
        data = outside.read_body(body)
        event_id = ""
        request = triggers_pb2.CheckWebhookRequest(
            store_id=caller.store_id, trigger_id=trigger_id, headers=headers, body=body
        )
        for _ in range(_ATTEMPTS_MAX):
            checked = await translated(self._stub.CheckWebhook(request))
            event_id = event_id or checked.event_id or request_id or self._ids.new("evt")
            source = {"source": "webhook", "content_type": headers.get("content-type", "")[:200]}
            fired = await self._fire(checked.due, self._event(checked.due, event_id, source, data))
            if fired.HasField("fire"):
                return fired
        raise DependencyUnavailable("the trigger is being changed: try again later")

    async def deliver_mail(self, store_id: StoreId, mail: pb.DeliverMailRequest) -> FireTriggerResponse:
        """Fire a trigger for an e-mail, unless an e-mail at the same or a later position has already been delivered.

        Raises:
            TriggerNotFound
        """
        request = triggers_pb2.CheckMailboxRequest(
            store_id=store_id, trigger_id=mail.trigger_id, generation=mail.generation
        )
        checked = await translated(self._stub.CheckMailbox(request))
        if not checked.HasField("due"):
            return FireTriggerResponse()
        if mail.skipped:
            event = TriggerEvent(event_id=mail.event_id)
            fire = triggers_pb2.FireTriggerRequest(
                due=checked.due, event=event, mail=mail.position, skipped=mail.skipped
            )
            return await translated(self._stub.FireTrigger(fire))
        event = self._event(checked.due, mail.event_id, {"source": "mail"}, outside.read_body(mail.data_json))
        return await self._fire(checked.due, event, mail=mail.position)

    async def fire_forever(self) -> None:
        while True:
            self._pause.claiming()
            wait_seconds = await self._fire_waiting()
            if wait_seconds:
                await self._pause.wait(wait_seconds)

    async def _fire_waiting(self) -> float:
        """Fire triggers for waiting events. Return the number of seconds until more events may be due."""
        try:
            response = await translated(
                self._stub.ClaimEvents(triggers_pb2.ClaimEventsRequest(events_max=_CLAIMED_MAX))
            )
        except RETRYABLE:
            return _RETRY_SECONDS
        await asyncio.gather(
            *(
                fire_safely("trigger", each.due.owner, self._fire(each.due, each.event, claimed=True))
                for each in response.events
            )
        )
        return response.wait_seconds

    async def _fire(
        self, due: DueTrigger, event: TriggerEvent, *, claimed: bool = False, mail: MailPosition | None = None
    ) -> FireTriggerResponse:
        requested = TriggerDefinition()
        requested.CopyFrom(due.definition)
        if not requested.workflow:
            requested.text = outside.put_into(requested.text, event.data)
        if requested.conversation_pointer:  # Otherwise, an event uses the trigger's current key.
            requested.conversation_key = event.conversation_key
        scope = msgspec.json.decode(event.data) if requested.workflow else {}
        message, refusal = await self._starting.message(caller_of(due.owner), requested, scope)
        if message is not None:
            message.labels.update(outside.mail_labels(event.data))
        request = triggers_pb2.FireTriggerRequest(
            due=due, event=event, claimed=claimed, message=message, refusal=refusal, mail=mail
        )
        response = await translated(self._stub.FireTrigger(request))
        self._pause.note_change()  # The event may have to wait.
        return response

    def _event(self, due: DueTrigger, event_id: str, source: dict[str, str], data: dict[str, Any]) -> TriggerEvent:
        definition = due.definition
        time = datetime.fromtimestamp(int(self._clock.now()), UTC)
        event_fields = {**source, "trigger": definition.name, "event_id": event_id, "receive_time": time.isoformat()}
        parsed = data.get("data")
        key = definition.conversation_key
        if definition.conversation_pointer:
            pointed = outside.pointed_at(parsed, definition.conversation_pointer)
            # Prefix the key with the trigger, so that an event cannot enter any of its user's other conversations.
            key = f"trigger:{due.trigger_id}:{pointed}" if pointed else ""
        lane: str | None = None
        if definition.debounce_seconds or definition.overlap != SCHEDULE_OVERLAP_ALLOW:
            pointer = definition.concurrency_pointer
            lane = (outside.pointed_at(parsed, pointer) or "") if pointer else ""
        line = outside.line(event_fields, data, bytes_max=_LINE_BYTES_MAX)
        return TriggerEvent(event_id=event_id, lane=lane, data=line, conversation_key=key)


def _checked(headers: Mapping[str, str], body: bytes) -> Mapping[str, str]:
    if len(body) > BODY_BYTES_MAX:
        raise TooLarge(f"body must be at most {BODY_BYTES_MAX} bytes", field="body")
    if len(headers) > HEADERS_MAX or sum(len(name) + len(value) for name, value in headers.items()) > HEADERS_BYTES_MAX:
        raise TooLarge(
            f"headers may have at most {HEADERS_MAX} entries and {HEADERS_BYTES_MAX} characters in total",
            field="headers",
        )
    lower = {name.lower(): value for name, value in headers.items()}
    if len(lower) < len(headers):
        raise InvalidField("headers must not repeat a name", field="headers")
    return lower
