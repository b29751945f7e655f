"""Triggers of users, and the events that fire them.

The ledger says who may fire a trigger and makes the run; what the run is to be like is worked out here, as for a run
that its user starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from msgspec.structs import replace

from pawl.agent_loop.app.public_values import (
    Delivery,
    DueTrigger,
    IncomingMail,
    MailPlace,
    ScheduledMessage,
    TriggerEvent,
)
from pawl.agent_loop.app.starting import NOTE_BYTES_MAX, PASSING, TEXT_BYTES_MAX, Starting
from pawl.agent_loop.app.starting_ports import MailboxReader, TriggerLedger
from pawl.agent_loop.domain import checks, outside
from pawl.chassis import logs, mailbox_place
from pawl.chassis.auth import Principal
from pawl.chassis.clock import Clock
from pawl.chassis.ids import IdSource, RequestId
from pawl.errors import DependencyUnavailable, InvalidField, TooLarge, TriggerNotFound
from pawl.values import Overlap

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
    """Keeps triggers, and fires them. Documents are as the contract has them."""

    def __init__(
        self, *, ledger: TriggerLedger, reader: MailboxReader, starting: Starting, clock: Clock, ids: IdSource
    ) -> None:
        self._ledger = ledger
        self._reader = reader
        self._starting = starting
        self._clock = clock
        self._ids = ids

    async def save(
        self,
        caller: Principal,
        definition: object,
        template: ScheduledMessage,
        mailbox: object,
        *,
        must_exist: bool,
    ) -> tuple[object, str]:
        """Make a trigger of the caller, or change one, if a run could be started so now; return a new secret, too.

        A `mailbox` has to be there; None for none.

        Raises:
            MailboxUnreachable: it does not answer as it should.
            PermissionDenied: the caller is no admin, whose are the secrets of the store.
            AgentNotFound, InvalidField, InvalidId, TooLarge: no run could be.
            TriggerExists, TriggerNotFound
        """
        place: MailPlace | None = None
        if mailbox is not None:
            mailbox_place.check_may_read(caller.rights)
        await self._starting.check(caller, template)
        if mailbox is not None:
            start = MailPlace(uid_validity=0, uid=0)
            place = (await self._reader.read_mailbox(caller, mailbox, start, mails_max=0)).place
        return await self._ledger.put_trigger(caller, definition, place, must_exist=must_exist)

    async def get(self, caller: Principal, name: str) -> object:
        """Return a trigger of the caller.

        Raises:
            TriggerNotFound
        """
        return await self._ledger.get_trigger(caller, name)

    async def list(self, caller: Principal) -> Sequence[object]:
        """Return the triggers of the caller, by name."""
        return await self._ledger.list_triggers(caller)

    async def pause(self, caller: Principal, name: str, note: str = "", *, paused: bool) -> object:
        """Pause a trigger of the caller, or have it go on.

        Raises:
            TriggerNotFound, InvalidField, TooLarge
            PermissionDenied: a trigger with a mailbox goes on, and the caller is no admin.
        """
        checks.text(note, "note", bytes_max=NOTE_BYTES_MAX, may_be_empty=True)
        return await self._ledger.pause_trigger(caller, name, note, paused=paused)

    async def delete(self, caller: Principal, name: str) -> None:
        """Remove a trigger of the caller.

        Raises:
            TriggerNotFound
        """
        await self._ledger.delete_trigger(caller, name)

    async def rotate(self, caller: Principal, name: str) -> str:
        """Give a trigger of the caller another secret, and return it.

        Raises:
            TriggerNotFound, InvalidField
        """
        return await self._ledger.rotate_trigger_secret(caller, name)

    async def deliver_webhook(
        self, caller: Principal, trigger_id: str, headers: Mapping[str, str], body: bytes, request_id: RequestId
    ) -> Delivery:
        """Fire a trigger of the caller's store with a webhook, once.

        Raises:
            TriggerNotFound, BadSignature, WebhookTooOld, TriggerPaused, InvalidField, TooLarge
            DependencyUnavailable: the trigger changed all the time, or the ledger is away.
        """
        headers = _checked(headers, body)
        data = outside.read_body(body)
        event_id = ""
        for _ in range(_TRIES_MAX):
            due, webhook_id = await self._ledger.check_webhook(caller, trigger_id, headers, body)
            event_id = event_id or webhook_id or request_id or self._ids.new("evt")
            source = {"source": "webhook", "content_type": headers.get("content-type", "")[:200]}
            event = self._event(due, event_id, source, data)
            fired = await self._fire(due, event)
            if fired.fire is not None:
                return fired
        raise DependencyUnavailable("the trigger changes at this moment: try again")

    async def deliver_mail(self, due: DueTrigger, uid_validity: int, mail: IncomingMail) -> bool:
        """Fire a trigger with a mail, unless that was done before; False if the trigger is not as it was.

        Raises:
            TriggerNotFound
        """
        event_id = f"{due.folder_id}.{uid_validity}.{mail.uid}"
        event = self._event(due, event_id, {"source": "mail"}, outside.read_body(mail.data_json))
        place = MailPlace(uid_validity=uid_validity, uid=mail.uid)
        if mail.refusal:
            event = replace(event, lane=None, data=b"")
            fired = await self._ledger.fire_trigger(due, event, None, mail=place, skipped=mail.refusal)
        else:
            fired = await self._fire(due, event, mail=place)
        return fired.duplicate or fired.fire is not None

    async def fire_forever(self) -> None:
        """Fire the events that have waited, as long as this process serves."""
        while True:
            wait_seconds = await self._fire_waiting()
            if wait_seconds:
                await self._clock.sleep(max(wait_seconds, _WAIT_SECONDS_MIN))

    async def _fire_waiting(self) -> float:
        """Fire events that have waited; return the seconds until there may be more."""
        try:
            claimed, wait_seconds = await self._ledger.claim_events(_CLAIMED_MAX)
        except PASSING:
            return _AWAY_SECONDS
        await asyncio.gather(*(self._fire_surely(due, event) for due, event in claimed))
        return wait_seconds

    async def _fire_surely(self, due: DueTrigger, event: TriggerEvent) -> None:
        """Fire an event; if that fails now, it will be claimed again."""
        try:
            await self._fire(due, event, claimed=True)
        except (*PASSING, TriggerNotFound) as error:
            _log.info("trigger.not_fired", store=due.caller.store_id, reason=error.reason)
        except Exception:  # noqa: BLE001  # one event keeps no other one from firing
            _log.exception("trigger.not_fired", store=due.caller.store_id)

    async def _fire(
        self, due: DueTrigger, event: TriggerEvent, *, claimed: bool = False, mail: MailPlace | None = None
    ) -> Delivery:
        text = outside.put_into(due.message.text, event.data)
        # One that has waited fires as its trigger is now.
        key = event.conversation_key if due.conversation_pointer else due.message.conversation_key
        asked = replace(due.message, text=text, conversation_key=key)
        message, refusal = await self._starting.message(due.caller, asked)
        return await self._ledger.fire_trigger(due, event, message, refusal=refusal, claimed=claimed, mail=mail)

    def _event(self, due: DueTrigger, event_id: str, source: dict[str, str], data: dict[str, Any]) -> TriggerEvent:
        time = datetime.fromtimestamp(int(self._clock.now()), UTC)
        told = {**source, "trigger": due.name, "event_id": event_id, "receive_time": time.isoformat()}
        parsed = data.get("data")
        key = due.message.conversation_key
        if due.conversation_pointer:
            pointed = outside.pointed_at(parsed, due.conversation_pointer)
            # Of this trigger alone: no event gets into another conversation of its user.
            key = f"trigger:{due.trigger_id}:{pointed}" if pointed else ""
        lane: str | None = None
        if due.debounce_seconds or due.overlap is not Overlap.ALLOW:
            lane = (outside.pointed_at(parsed, due.concurrency_pointer) or "") if due.concurrency_pointer else ""
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
