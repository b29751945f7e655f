"""The reading of mailboxes: whatever becomes of one, the others are read, and each mail is an event of its trigger."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace as replaced
from typing import Any, cast

import pytest
from msgspec.structs import replace

from pawl.agent_loop.app.mailboxes import Mailboxes
from pawl.agent_loop.app.messages import Messages
from pawl.agent_loop.app.public_values import (
    Delivery,
    DueMailbox,
    DueTrigger,
    IncomingMail,
    MailboxView,
    MailPlace,
    TriggerEvent,
)
from pawl.agent_loop.app.starting import Starting
from pawl.agent_loop.app.starting_ports import MailboxReader, TriggerLedger
from pawl.agent_loop.app.triggers import Triggers
from pawl.chassis.ids import IdSource, StoreId
from pawl.errors import DependencyUnavailable, InvalidField, MailboxUnreachable, PermissionDenied
from tests.fakes.manual_clock import ManualClock
from tests.unit.agent_loop.test_schedules import Checks
from tests.unit.agent_loop.test_triggers import ANN, due

PLACE = MailPlace(uid_validity=7, uid=10)


def mail(uid: int, refusal: str = "") -> IncomingMail:
    return IncomingMail(uid=uid, refusal=refusal, data_json=json.dumps({"from": "a@b.example", "text": "hi"}).encode())


def mailbox(name: str, store: str = "acme") -> DueMailbox:
    caller = replaced(due().caller, store_id=StoreId(store))
    return DueMailbox(trigger=replace(due(), caller=caller, name=name, mailbox=name, folder_id="f0"), place=PLACE)


class Ledger:
    """Gives mailboxes once, of each store one; takes down what is said of them; `gone` mails find another trigger."""

    def __init__(self, *names: str, gone: Sequence[int] = ()) -> None:
        self.due = list(map(mailbox, names))
        self._gone = gone
        self.fired: list[tuple[str, int, str, Any]] = []
        self.noted: list[tuple[str, MailPlace | None, str, bool]] = []
        self.put: list[MailPlace | None] = []

    async def claim_mailboxes(
        self, mailboxes_max: int, *, busy_stores: Sequence[StoreId] = ()
    ) -> tuple[Sequence[DueMailbox], float]:
        found: dict[str, DueMailbox] = {}
        left = []
        for each in self.due:
            store = each.trigger.caller.store_id
            if {store} & {*busy_stores, *found} or len(found) == mailboxes_max:
                left.append(each)
            else:
                found[store] = each
        self.due = left
        return list(found.values()), 0.0 if found else 1.0

    async def note_mailbox(self, trigger: DueTrigger, place: MailPlace | None, *, reason: str, has_more: bool) -> None:
        self.noted.append((trigger.name, place, reason, has_more))

    async def fire_trigger(
        self, trigger: DueTrigger, event: TriggerEvent, message: Any, *, mail: MailPlace, skipped: str = "", **_: Any
    ) -> Delivery:
        self.fired.append((event.event_id, mail.uid, skipped, message))
        return Delivery(fire=None if mail.uid in self._gone else event, duplicate=False)

    async def put_trigger(
        self, caller: object, definition: object, place: MailPlace | None = None, *, must_exist: bool
    ) -> tuple[object, str]:
        self.put.append(place)
        return definition, ""


class Reader:
    """Has the mailboxes of some names; one that hangs does so until it is told to answer."""

    def __init__(self, **views: MailboxView | Exception | None) -> None:
        self._views = views
        self.asked: list[tuple[MailPlace, int, str]] = []
        self.hanging = 0
        self.answered = asyncio.Event()

    async def read_mailbox(
        self, caller: object, mailbox: Any, place: MailPlace, *, mails_max: int, documents_prefix: str = ""
    ) -> MailboxView:
        self.asked.append((place, mails_max, documents_prefix))
        view = self._views[mailbox]
        if isinstance(view, Exception):
            raise view
        if view is None:
            self.hanging += 1
            try:
                await self.answered.wait()
            finally:
                self.hanging -= 1
        return view or MailboxView(place=PLACE)


def parts(ledger: Ledger, reader: Reader, clock: ManualClock) -> tuple[Triggers, Mailboxes]:
    port, box = cast("TriggerLedger", ledger), cast("MailboxReader", reader)
    starting = Starting(cast("Messages", Checks({})), lambda _: False)
    triggers = Triggers(ledger=port, reader=box, starting=starting, clock=clock, ids=IdSource(clock))
    return triggers, Mailboxes(ledger=port, reader=box, triggers=triggers, clock=clock)


async def played(ledger: Ledger, reader: Reader, clock: ManualClock) -> None:
    reading = asyncio.create_task(parts(ledger, reader, clock)[1].read_forever())
    await clock.advance(0.5)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def test_each_mail_is_an_event_and_one_of_others_is_skipped(clock: ManualClock) -> None:
    view = MailboxView(place=MailPlace(uid_validity=7, uid=12), mails=(mail(11), mail(12, "not you")), has_more=True)
    ledger, reader = Ledger("in"), Reader(**{"in": view})
    await played(ledger, reader, clock)
    assert reader.asked == [(PLACE, 10, "mail/in/f0.")]
    (first, second) = ledger.fired
    assert (first[:3], second[:3]) == (("f0.7.11", 11, ""), ("f0.7.12", 12, "not you"))
    assert '"source":"mail"' in first[3].text
    assert '"data":{"from":"a@b.example","text":"hi"}' in first[3].text
    assert second[3] is None
    assert ledger.noted == [("in", None, "", True)]


@pytest.mark.parametrize("error", [MailboxUnreachable("no answer"), InvalidField("not allowed", field="host")])
async def test_what_is_wrong_with_a_mailbox_is_noted_and_others_are_read(clock: ManualClock, error: Exception) -> None:
    good = MailboxView(place=PLACE)
    ledger = Ledger("bad", "away", "faulty", "good")
    reader = Reader(bad=error, away=DependencyUnavailable(), faulty=RuntimeError("a fault"), good=good)
    await played(ledger, reader, clock)
    assert sorted(ledger.noted) == [("bad", None, str(error), False), ("good", None, "", False)]


async def some_time(clock: ManualClock) -> None:
    """Let time pass in so many steps that each look that ends is seen."""
    for _ in range(100):
        await clock.advance(0.05)


async def test_servers_that_hang_hold_up_their_own_store_and_no_other(clock: ManualClock) -> None:
    """However many there are of it, and also for mailboxes of others that are due later."""
    ledger, reader = Ledger(*["hanging"] * 20), Reader(hanging=None, good=MailboxView(place=PLACE))
    ledger.due += [mailbox("good", "other")] * 2
    reading = asyncio.create_task(parts(ledger, reader, clock)[1].read_forever())
    await some_time(clock)
    assert (reader.hanging, [name for name, *_ in ledger.noted]) == (4, ["good", "good"])
    ledger.due += [mailbox("hanging", "third")] * 20
    await some_time(clock)
    assert reader.hanging == 4 + 2
    ledger.due.append(mailbox("good", "other"))
    await some_time(clock)
    assert len(ledger.noted) == 3
    reader.answered.set()
    await some_time(clock)
    assert (len(ledger.noted), ledger.due) == (43, [])
    reader.answered.clear()
    ledger.due.append(mailbox("hanging"))
    await some_time(clock)
    assert reader.hanging == 1
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert reader.hanging == 0, "who stops reads no mailbox any more"


async def test_mails_with_other_numbers_are_read_from_their_end_on(clock: ManualClock) -> None:
    other = MailPlace(uid_validity=8, uid=3)
    ledger = Ledger("in")
    await played(ledger, Reader(**{"in": MailboxView(place=other)}), clock)
    assert (ledger.fired, ledger.noted) == ([], [("in", other, "", False)])


async def test_only_an_admin_makes_one_and_only_of_a_mailbox_that_answers(clock: ManualClock) -> None:
    ledger, reader = Ledger(), Reader(good=MailboxView(place=PLACE), bad=MailboxUnreachable())
    triggers, _ = parts(ledger, reader, clock)
    message = due().message
    with pytest.raises(PermissionDenied):
        await triggers.save(ANN, object(), message, "good", must_exist=False)
    admin = replaced(ANN, rights=frozenset({"admin"}))
    with pytest.raises(MailboxUnreachable):
        await triggers.save(admin, object(), message, "bad", must_exist=False)
    assert ledger.put == []
    await triggers.save(admin, object(), message, "good", must_exist=False)
    await triggers.save(ANN, object(), message, None, must_exist=False)
    assert ledger.put == [PLACE, None]
