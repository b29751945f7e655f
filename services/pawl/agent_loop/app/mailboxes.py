"""The mailboxes of triggers: read when it is time, each mail an event."""

from __future__ import annotations

import asyncio
from typing import Final

from pawl.agent_loop.app.public_values import DueMailbox
from pawl.agent_loop.app.starting import PASSING
from pawl.agent_loop.app.starting_ports import MailboxReader, TriggerLedger
from pawl.agent_loop.app.triggers import Triggers
from pawl.chassis import logs
from pawl.chassis.clock import Clock
from pawl.chassis.ids import StoreId
from pawl.chassis.shares import Places
from pawl.chassis.tasks import end
from pawl.errors import InvalidField, MailboxUnreachable, TriggerNotFound

MAILS_MAX: Final = 10
MAILBOXES_MAX: Final = 8
"""Mailboxes that are read at the same time, of which a store has its share."""
_WAIT_SECONDS_MIN: Final = 0.05
_AWAY_SECONDS: Final = 1.0

_log = logs.get_logger(__name__)


class Mailboxes:
    """Reads what is due, and has each mail fire its trigger. Slow servers hold up their own store, and no other."""

    def __init__(self, *, ledger: TriggerLedger, reader: MailboxReader, triggers: Triggers, clock: Clock) -> None:
        self._ledger = ledger
        self._reader = reader
        self._triggers = triggers
        self._clock = clock
        self._places = Places(MAILBOXES_MAX)
        self._looks: dict[asyncio.Task[None], StoreId] = {}

    async def read_forever(self) -> None:
        """Read mailboxes that are due, as long as this process serves."""
        try:
            while True:
                wait_seconds = await self._begin()
                await self._pause(max(wait_seconds, _WAIT_SECONDS_MIN))
        finally:
            await end(self._looks)

    async def _begin(self) -> float:
        """Begin to read mailboxes for which there is a place; return after how many seconds there may be more."""
        if not self._places.free:
            return _AWAY_SECONDS
        busy = {store for store in self._looks.values() if not self._places.has_room(store)}
        try:
            due, wait_seconds = await self._ledger.claim_mailboxes(self._places.free, busy_stores=sorted(busy))
        except PASSING:
            return _AWAY_SECONDS
        for each in due:
            store = each.trigger.caller.store_id
            look = asyncio.create_task(self._read_surely(each), name="mailbox")
            self._looks[look] = store
            look.add_done_callback(self._looks.pop)
            self._places.take(store)
            self._places.leave_after(look, store)
        return wait_seconds

    async def _pause(self, seconds: float) -> None:
        """Return after so many seconds, or once a look has ended: there is a place then."""
        pause = asyncio.ensure_future(self._clock.sleep(seconds))
        try:
            await asyncio.wait({pause, *self._looks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()

    async def _read_surely(self, due: DueMailbox) -> None:
        """Read a mailbox; if it cannot be said how that went, it will be claimed again."""
        store = due.trigger.caller.store_id
        try:
            await self._read(due)
        except (*PASSING, TriggerNotFound) as error:
            _log.info("mailbox.not_read", store=store, reason=error.reason)
        except Exception:  # noqa: BLE001  # one mailbox keeps no other one from being read
            _log.exception("mailbox.not_read", store=store)

    async def _read(self, due: DueMailbox) -> None:
        trigger = due.trigger
        try:
            found = await self._reader.read_mailbox(
                trigger.caller,
                trigger.mailbox,
                due.place,
                mails_max=MAILS_MAX,
                documents_prefix=f"mail/{trigger.name}/{trigger.folder_id}.",
            )
        except (MailboxUnreachable, InvalidField) as error:
            _log.warning("mailbox.unreachable", store=trigger.caller.store_id, reason=error.message)
            await self._ledger.note_mailbox(trigger, None, reason=error.message, has_more=False)
            return
        validity = found.place.uid_validity
        if validity != due.place.uid_validity:
            _log.warning("mailbox.numbered_anew", store=trigger.caller.store_id)
            await self._ledger.note_mailbox(trigger, found.place, reason="", has_more=False)
            return
        for mail in found.mails:
            if not await self._triggers.deliver_mail(trigger, validity, mail):
                return  # The trigger is another one now, or paused: the mail is read again.
        await self._ledger.note_mailbox(trigger, None, reason="", has_more=found.has_more)
