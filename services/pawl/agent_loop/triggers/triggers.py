"""Triggers of users, and the events that fire them.

The ledger says who may fire a trigger and makes the run; what the run is to be like is worked out here, as for a run
that its user starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final

from pawl.agent.v1.trigger_pb2 import DeliverMailRequest
from pawl.agent_loop.loop.rules import checks
from pawl.agent_loop.schedules.ledger import caller_of
from pawl.agent_loop.schedules.starting import PASSING, TEXT_BYTES_MAX, Starting
from pawl.agent_loop.triggers import rules as outside
from pawl.agent_loop.triggers.ledger import TriggerLedger
from pawl.chassis.identity.auth import Principal
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import IdSource, RequestId, StoreId
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.errors import DependencyUnavailable, InvalidField, PermissionDenied, TooLarge, TriggerNotFound
from pawl.event.v1.schedule_pb2 import SCHEDULE_OVERLAP_ALLOW
from pawl.event.v1.trigger_pb2 import MailPosition, TriggerDefinition
from pawl.job.v1.triggers_pb2 import DueTrigger, FireTriggerResponse, TriggerEvent

BODY_BYTES_MAX: Final = 256 * 1024
HEADERS_MAX: Final = 100
HEADERS_BYTES_MAX: Final = 16 * 1024
_LINE_BYTES_MAX: Final = checks.MESSAGE_BYTES_MAX - TEXT_BYTES_MAX - 16
_CLAIMED_MAX: Final = 64
_TRIES_MAX: Final = 8
_WAIT_SECONDS_MIN: Final = 0.01
_AWAY_SECONDS: Final = 1.0

_log = logs.get_logger(__name__)


class Triggers:
    """Fires triggers. job-store keeps them."""

    def __init__(self, *, ledger: TriggerLedger, starting: Starting, clock: Clock, ids: IdSource) -> None:
        self._ledger = ledger
        self._starting = starting
        self._clock = clock
        self._ids = ids

    async def check(self, caller: Principal, definition: TriggerDefinition) -> None:
        """Return if the caller may have such a trigger, and a run could be started so now.

        Raises:
            PermissionDenied: it has a mailbox, whose password belongs to the store, and the caller is no admin.
            AgentNotFound, InvalidField, InvalidId, TooLarge: no run could be.
        """
        if definition.HasField("mailbox") and Role.ADMIN not in caller.rights:
            raise PermissionDenied(f"the password of a mailbox belongs to the store: this needs the role {Role.ADMIN}")
        await self._starting.check(caller, definition)

    async def deliver_webhook(
        self, caller: Principal, trigger_id: str, headers: Mapping[str, str], body: bytes, request_id: RequestId
    ) -> FireTriggerResponse:
        """Fire a trigger of the caller's store with a webhook, once.

        Raises:
            TriggerNotFound, BadSignature, WebhookTooOld, TriggerPaused, InvalidField, TooLarge
            DependencyUnavailable: the trigger changed all the time, or the ledger is away.
        """
        headers = _checked(headers, body)
        data = outside.read_body(body)
        event_id = ""
        for _ in range(_TRIES_MAX):
            checked = await self._ledger.check_webhook(caller, trigger_id, headers, body)
            event_id = event_id or checked.event_id or request_id or self._ids.new("evt")
            source = {"source": "webhook", "content_type": headers.get("content-type", "")[:200]}
            fired = await self._fire(checked.due, self._event(checked.due, event_id, source, data))
            if fired.HasField("fire"):
                return fired
        raise DependencyUnavailable("the trigger changes at this moment: try again")

    async def deliver_mail(self, store_id: StoreId, mail: DeliverMailRequest) -> FireTriggerResponse:
        """Fire a trigger with a mail, unless one at or after its position was delivered before.

        Raises:
            TriggerNotFound
        """
        checked = await self._ledger.check_mailbox(store_id, mail.trigger_id, mail.generation)
        if not checked.HasField("due"):
            return FireTriggerResponse()
        if mail.skipped:
            event = TriggerEvent(event_id=mail.event_id)
            return await self._ledger.fire(checked.due, event, None, mail=mail.position, skipped=mail.skipped)
        event = self._event(checked.due, mail.event_id, {"source": "mail"}, outside.read_body(mail.data_json))
        return await self._fire(checked.due, event, mail=mail.position)

    async def fire_forever(self) -> None:
        """Fire the events that have waited, as long as this process serves."""
        while True:
            wait_seconds = await self._fire_waiting()
            if wait_seconds:
                await self._clock.sleep(max(wait_seconds, _WAIT_SECONDS_MIN))

    async def _fire_waiting(self) -> float:
        """Fire events that have waited; return the seconds until there may be more."""
        try:
            response = await self._ledger.claim_events(_CLAIMED_MAX)
        except PASSING:
            return _AWAY_SECONDS
        await asyncio.gather(*(self._fire_surely(each.due, each.event) for each in response.events))
        return response.wait_seconds

    async def _fire_surely(self, due: DueTrigger, event: TriggerEvent) -> None:
        """Fire an event; if that fails now, it will be claimed again."""
        try:
            await self._fire(due, event, claimed=True)
        except (*PASSING, TriggerNotFound) as error:
            _log.info("trigger.not_fired", store=due.owner.store_id, reason=error.reason)
        except Exception:  # noqa: BLE001  # one event keeps no other one from firing
            _log.exception("trigger.not_fired", store=due.owner.store_id)

    async def _fire(
        self, due: DueTrigger, event: TriggerEvent, *, claimed: bool = False, mail: MailPosition | None = None
    ) -> FireTriggerResponse:
        asked = TriggerDefinition()
        asked.CopyFrom(due.definition)
        asked.text = outside.put_into(asked.text, event.data)
        if asked.conversation_pointer:  # Without one, an event that has waited fires as its trigger is now.
            asked.conversation_key = event.conversation_key
        message, refusal = await self._starting.message(caller_of(due.owner), asked)
        return await self._ledger.fire(due, event, message, refusal=refusal, claimed=claimed, mail=mail)

    def _event(self, due: DueTrigger, event_id: str, source: dict[str, str], data: dict[str, Any]) -> TriggerEvent:
        definition = due.definition
        time = datetime.fromtimestamp(int(self._clock.now()), UTC)
        told = {**source, "trigger": definition.name, "event_id": event_id, "receive_time": time.isoformat()}
        parsed = data.get("data")
        key = definition.conversation_key
        if definition.conversation_pointer:
            pointed = outside.pointed_at(parsed, definition.conversation_pointer)
            # Of this trigger alone: no event gets into another conversation of its user.
            key = f"trigger:{due.trigger_id}:{pointed}" if pointed else ""
        lane: str | None = None
        if definition.debounce_seconds or definition.overlap != SCHEDULE_OVERLAP_ALLOW:
            pointer = definition.concurrency_pointer
            lane = (outside.pointed_at(parsed, pointer) or "") if pointer else ""
        line = outside.line(told, data, bytes_max=_LINE_BYTES_MAX)
        return TriggerEvent(event_id=event_id, lane=lane, data=line, conversation_key=key)


def _checked(headers: Mapping[str, str], body: bytes) -> Mapping[str, str]:
    """Return headers with names in lower case, if they and the body are within bounds."""
    if len(body) > BODY_BYTES_MAX:
        raise TooLarge(f"a webhook has at most {BODY_BYTES_MAX} bytes", field="body")
    if len(headers) > HEADERS_MAX or sum(len(name) + len(value) for name, value in headers.items()) > HEADERS_BYTES_MAX:
        raise TooLarge(f"there are at most {HEADERS_MAX} headers, of {HEADERS_BYTES_MAX} characters", field="headers")
    lower = {name.lower(): value for name, value in headers.items()}
    if len(lower) < len(headers):
        raise InvalidField("a header is there twice", field="headers")
    return lower
