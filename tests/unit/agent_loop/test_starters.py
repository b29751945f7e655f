"""The firing of schedules that are due: whatever becomes of one, the others fire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace as replaced
from datetime import UTC, datetime
from typing import Any, cast

import pytest
from msgspec.structs import replace

from pawl.agent_loop.app.mailboxes import Mailboxes
from pawl.agent_loop.app.messages import Messages
from pawl.agent_loop.app.public_values import (
    Delivery,
    DueMailbox,
    DueSchedule,
    DueTrigger,
    IncomingMail,
    MailboxView,
    MailPlace,
    Overlap,
    ScheduledMessage,
    TriggerEvent,
)
from pawl.agent_loop.app.schedules import Schedules
from pawl.agent_loop.app.starting import Starting
from pawl.agent_loop.app.starting_ports import MailboxReader, ScheduleLedger, TriggerLedger
from pawl.agent_loop.app.triggers import BODY_BYTES_MAX, Triggers
from pawl.agent_loop.domain import checks
from pawl.chassis.auth import Principal
from pawl.chassis.ids import CredentialId, IdSource, RequestId, StoreId, UserId
from pawl.errors import (
    AgentNotFound,
    DependencyUnavailable,
    InvalidField,
    MailboxUnreachable,
    Overloaded,
    PawlError,
    PermissionDenied,
    TooLarge,
)
from tests.fakes.manual_clock import ManualClock

ANN = Principal(store_id=StoreId("acme"), user_id=UserId("ann"))


def due(text: str) -> DueSchedule:
    message = ScheduledMessage(text=text, agent="", labels={}, conversation_key="")
    return DueSchedule(caller=ANN, message=message, document=None)


class ScheduleBook:
    """Gives each batch of schedules once, and takes down what is fired."""

    def __init__(self, *batches: Sequence[DueSchedule] | PawlError, wait_seconds: float = 1.0) -> None:
        self._batches = list(batches)
        self._wait_seconds = wait_seconds
        self.fired: list[tuple[str, str]] = []

    async def claim_schedules(self, schedules_max: int) -> tuple[Sequence[DueSchedule], float]:
        batch = self._batches.pop(0) if self._batches else ()
        if isinstance(batch, PawlError):
            raise batch
        return batch, self._wait_seconds if not self._batches else 0.0

    async def get_schedule(self, caller: Principal, name: str) -> tuple[object, DueSchedule]:
        return None, due(name)

    async def fire_schedule(
        self,
        one: DueSchedule,
        message: object,
        *,
        refusal: str = "",
        request_id: RequestId,
        backfill_time: datetime | None = None,
    ) -> Any:
        if one.message.text == "away":
            raise DependencyUnavailable
        self.fired.append((one.message.text, refusal))
        return one if one.message.text != "stale" else None


class Checks:
    """Refuses messages by their text."""

    def __init__(self, refusals: dict[str, Exception]) -> None:
        self._refusals = refusals

    async def checked(self, caller: Principal, request_id: RequestId, message: Any, *, must_exist: bool) -> Any:
        if message.text in self._refusals:
            raise self._refusals[message.text]
        return message, None


def firing_of(ledger: ScheduleBook, checks: Checks, clock: ManualClock) -> Schedules:
    return Schedules(
        ledger=cast("ScheduleLedger", ledger),
        starting=Starting(cast("Messages", checks), lambda caller: caller.credential_id == "file-gone"),
        clock=clock,
    )


async def for_a_while(clock: ManualClock, forever: Coroutine[Any, Any, None], seconds: float = 0.5) -> None:
    """Run what has no end for so long."""
    running = asyncio.create_task(forever)
    await clock.advance(seconds)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def played(ledger: ScheduleBook, clock: ManualClock, seconds: float, **refusals: Exception) -> None:
    await for_a_while(clock, firing_of(ledger, Checks(refusals), clock).fire_forever(), seconds)


async def test_what_cannot_be_started_is_refused_with_its_reason(clock: ManualClock) -> None:
    ledger = ScheduleBook([due("gone"), due("wrong"), due("good")])
    await played(ledger, clock, 0.5, gone=AgentNotFound(), wrong=InvalidField("no", field="text"))
    reasons = {text: refusal.partition(":")[0] for text, refusal in ledger.fired}
    assert reasons == {"gone": "AGENT_NOT_FOUND", "wrong": "INVALID_FIELD", "good": ""}


async def test_with_a_key_that_is_gone_from_its_file_nothing_is_started(clock: ManualClock) -> None:
    gone = Principal(store_id=ANN.store_id, user_id=ANN.user_id, credential_id=CredentialId("file-gone"))
    ledger = ScheduleBook([replace(due("look"), caller=gone), due("see")])
    await played(ledger, clock, 0.5)
    assert {text: refusal.partition(":")[0] for text, refusal in ledger.fired} == {
        "look": "PERMISSION_DENIED",
        "see": "",
    }


@pytest.mark.parametrize("error", [DependencyUnavailable(), Overloaded(), RuntimeError("a fault")])
async def test_what_says_nothing_about_a_schedule_refuses_no_run(clock: ManualClock, error: Exception) -> None:
    ledger = ScheduleBook([due("bad"), due("away"), due("good")], [due("bad")], [due("later")])
    await played(ledger, clock, 0.5, bad=error)
    assert ledger.fired == [("good", ""), ("later", "")]


async def test_a_ledger_that_is_away_is_asked_again(clock: ManualClock) -> None:
    ledger = ScheduleBook(DependencyUnavailable(), [due("good")])
    await played(ledger, clock, 0.5)
    assert ledger.fired == []
    ledger = ScheduleBook(DependencyUnavailable(), [due("good")])
    await played(ledger, clock, 1.5)
    assert ledger.fired == [("good", "")]


async def test_many_due_at_once_all_fire_and_one_that_keeps_changing_does_not(clock: ManualClock) -> None:
    ledger = ScheduleBook([due(f"{number}") for number in range(64)], [due("one more")])
    await played(ledger, clock, 20)
    assert len({*ledger.fired}) == len(ledger.fired) == 65
    with pytest.raises(DependencyUnavailable):
        await firing_of(ledger, Checks({}), clock).trigger(ANN, "stale", RequestId("r"))
    assert len(ledger.fired) > 66


async def test_each_due_time_of_the_past_has_a_request_of_its_own(clock: ManualClock) -> None:
    times = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2)]

    class Past(ScheduleBook):
        def __init__(self) -> None:
            super().__init__()
            self.requests: list[tuple[datetime | None, RequestId]] = []

        async def past_times(self, caller: Principal, name: str, begin: datetime, end: datetime) -> Sequence[datetime]:
            return times

        async def fire_schedule(
            self, *_: object, request_id: RequestId, backfill_time: datetime | None = None, **__: object
        ) -> Any:
            self.requests.append((backfill_time, request_id))
            return backfill_time

    ledger = Past()
    schedules = firing_of(ledger, Checks({}), clock)
    for request_id in ("r", "r", "other", ""):
        assert await schedules.backfill(ANN, "x", times[0], times[1], RequestId(request_id)) == times
    assert ledger.requests[:2] == ledger.requests[2:4]
    assert len(set(ledger.requests)) == 6
    assert ledger.requests[6:] == [(time, "") for time in times]


# The delivery of webhooks, and the firing of what has waited: whatever becomes of one event, the others fire.


NO_ID = RequestId("")


def due_trigger(text: str = "look", **fields: Any) -> DueTrigger:
    message = ScheduledMessage(text=text, agent="", labels={}, conversation_key=fields.pop("conversation_key", ""))
    defaults: dict[str, Any] = {
        "conversation_pointer": "",
        "concurrency_pointer": "",
        "debounce_seconds": 0,
        "overlap": Overlap.ALLOW,
        "mailbox": None,
        "folder_id": "",
    }
    return DueTrigger(
        caller=ANN, message=message, trigger_id="trg_1", name="orders", document=None, **(defaults | fields)
    )


class EventBook:
    """Takes down what is fired; the first `changes` times the trigger has changed."""

    def __init__(self, trigger: DueTrigger, *, changes: int = 0, waiting: Sequence[Any] = ()) -> None:
        self._trigger = trigger
        self._changes = changes
        self._waiting = list(waiting)
        self.fired: list[tuple[TriggerEvent, Any, str]] = []

    async def check_webhook(
        self, caller: Principal, trigger_id: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[DueTrigger, str]:
        return self._trigger, headers.get("webhook-id", "")

    async def fire_trigger(
        self, trigger: DueTrigger, event: TriggerEvent, message: Any, *, refusal: str = "", **rest: Any
    ) -> Delivery:
        self.fired.append((event, message, refusal))
        self._changes -= 1
        return Delivery(fire=None if self._changes >= 0 else event, duplicate=False)

    async def claim_events(self, events_max: int) -> tuple[Sequence[Any], float]:
        return (self._waiting.pop(0) if self._waiting else ()), 0.0 if self._waiting else 1.0


def triggers_of(ledger: EventBook, clock: ManualClock, **refusals: Exception) -> Triggers:
    starting = Starting(cast("Messages", Checks(refusals)), lambda _: False)
    reader = cast("MailboxReader", None)
    return Triggers(
        ledger=cast("TriggerLedger", ledger), reader=reader, starting=starting, clock=clock, ids=IdSource(clock)
    )


async def delivered(trigger: DueTrigger, clock: ManualClock, body: bytes = b"{}", **headers: str) -> tuple[Any, Any]:
    ledger = EventBook(trigger)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    await triggers_of(ledger, clock).deliver_webhook(ANN, "trg_1", named, body, NO_ID)
    ((event, message, _),) = ledger.fired
    return event, message


async def test_the_event_is_in_the_message_as_data(clock: ManualClock) -> None:
    event, message = await delivered(
        due_trigger("Look at {{event}} and pay."),
        clock,
        b'{"n": 1}',
        Webhook_Id="msg_1",
        Content_Type="application/json",
    )
    before, line, after = message.text.partition(event.data.decode())
    assert (before, after, event.event_id, event.lane) == ("Look at ", " and pay.", "msg_1", None)
    told = json.loads(line)["event"]
    assert told.pop("receive_time")
    assert told.pop("note")
    assert told == {
        "source": "webhook",
        "content_type": "application/json",
        "trigger": "orders",
        "event_id": "msg_1",
        "data": {"n": 1},
    }


async def test_the_largest_body_makes_a_message_that_is_not_too_large(clock: ManualClock) -> None:
    for body in (b"a" * BODY_BYTES_MAX, b"\x01" * BODY_BYTES_MAX, b"\xff" * BODY_BYTES_MAX):
        _, message = await delivered(due_trigger("t" * 16 * 1024), clock, body)
        assert len(message.text.encode()) <= checks.MESSAGE_BYTES_MAX
        assert '"cut_from_bytes"' in message.text


async def test_what_is_too_much_is_refused(clock: ManualClock) -> None:
    triggers = triggers_of(EventBook(due_trigger()), clock)
    wrong: list[tuple[dict[str, str], bytes, type[Exception]]] = [
        ({}, b"a" * (BODY_BYTES_MAX + 1), TooLarge),
        ({f"h{number}": "" for number in range(101)}, b"", TooLarge),
        ({"h": "a" * 16 * 1024}, b"", TooLarge),
        ({"Webhook-Id": "a", "webhook-id": "b"}, b"", InvalidField),
    ]
    for headers, body, error in wrong:
        with pytest.raises(error):
            await triggers.deliver_webhook(ANN, "trg_1", headers, body, NO_ID)


async def test_conversation_and_lane_are_those_of_the_values_in_the_data(clock: ManualClock) -> None:
    trigger = due_trigger(conversation_pointer="/order", concurrency_pointer="/shop", overlap=Overlap.QUEUE)
    first, _ = await delivered(trigger, clock, b'{"order": 1, "shop": "a"}')
    second, message = await delivered(trigger, clock, b'{"order": 1, "shop": "b"}')
    other, _ = await delivered(trigger, clock, b'{"order": "1"}')
    without, _ = await delivered(trigger, clock, b"no json")
    assert first.conversation_key == second.conversation_key == message.conversation_key
    assert first.conversation_key.startswith("trigger:trg_1:")
    assert other.conversation_key != first.conversation_key
    assert (without.conversation_key, without.lane, other.lane) == ("", "", "")
    assert len({first.lane, second.lane, ""}) == 3
    plain, _ = await delivered(due_trigger(conversation_key="mine", debounce_seconds=5), clock)
    assert (plain.conversation_key, plain.lane) == ("mine", "")


async def test_a_trigger_that_changes_is_checked_again_under_the_same_event(clock: ManualClock) -> None:
    ledger = EventBook(due_trigger(), changes=2)
    fired = await triggers_of(ledger, clock).deliver_webhook(ANN, "trg_1", {}, b"", NO_ID)
    assert fired.fire is not None
    assert len(ledger.fired) == 3
    assert len({event.event_id for event, *_ in ledger.fired}) == 1
    ledger = EventBook(due_trigger())
    await triggers_of(ledger, clock).deliver_webhook(ANN, "trg_1", {}, b"", RequestId("req"))
    assert ledger.fired[0][0].event_id == "req"
    with pytest.raises(DependencyUnavailable):
        await triggers_of(EventBook(due_trigger(), changes=99), clock).deliver_webhook(ANN, "trg_1", {}, b"", NO_ID)


async def test_what_has_waited_fires_and_one_that_cannot_be_fired_now_keeps_none_from_it(clock: ManualClock) -> None:
    event = TriggerEvent(event_id="e", lane="", data=b"{}", conversation_key="key")
    waiting = [[(due_trigger(name + "{{event}}"), event) for name in ("gone", "busy", "good")]]
    ledger = EventBook(due_trigger(), waiting=waiting)
    triggers = triggers_of(ledger, clock, **{"gone{}": AgentNotFound(), "busy{}": Overloaded()})
    await for_a_while(clock, triggers.fire_forever())
    said = [(message.text if message else "", refusal.partition(":")[0]) for _, message, refusal in ledger.fired]
    assert sorted(said) == [("", "AGENT_NOT_FOUND"), ("good{}", "")]


# The reading of mailboxes: whatever becomes of one, the others are read, and each mail is an event of its trigger.


PLACE = MailPlace(uid_validity=7, uid=10)


def mail(uid: int, refusal: str = "") -> IncomingMail:
    return IncomingMail(uid=uid, refusal=refusal, data_json=json.dumps({"from": "a@b.example", "text": "hi"}).encode())


def mailbox(name: str, store: str = "acme") -> DueMailbox:
    caller = replaced(due_trigger().caller, store_id=StoreId(store))
    return DueMailbox(
        trigger=replace(due_trigger(), caller=caller, name=name, mailbox=name, folder_id="f0"), place=PLACE
    )


class MailboxBook:
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


def parts(ledger: MailboxBook, reader: Reader, clock: ManualClock) -> tuple[Triggers, Mailboxes]:
    port, box = cast("TriggerLedger", ledger), cast("MailboxReader", reader)
    starting = Starting(cast("Messages", Checks({})), lambda _: False)
    triggers = Triggers(ledger=port, reader=box, starting=starting, clock=clock, ids=IdSource(clock))
    return triggers, Mailboxes(ledger=port, reader=box, triggers=triggers, clock=clock)


async def mails_read(ledger: MailboxBook, reader: Reader, clock: ManualClock) -> None:
    await for_a_while(clock, parts(ledger, reader, clock)[1].read_forever())


async def test_each_mail_is_an_event_and_one_of_others_is_skipped(clock: ManualClock) -> None:
    view = MailboxView(place=MailPlace(uid_validity=7, uid=12), mails=(mail(11), mail(12, "not you")), has_more=True)
    ledger, reader = MailboxBook("in"), Reader(**{"in": view})
    await mails_read(ledger, reader, clock)
    assert reader.asked == [(PLACE, 10, "mail/in/f0.")]
    (first, second) = ledger.fired
    assert (first[:3], second[:3]) == (("f0.7.11", 11, ""), ("f0.7.12", 12, "not you"))
    assert '"source":"mail"' in first[3].text
    assert '"data":{"from":"a@b.example","text":"hi"}' in first[3].text
    assert second[3] is None
    assert ledger.noted == [("in", None, "", True)]
    ledger = MailboxBook("in", gone=(11,))
    await mails_read(ledger, reader, clock)
    assert (len(ledger.fired), ledger.noted) == (1, []), "a trigger that has changed has its mails read again"


@pytest.mark.parametrize("error", [MailboxUnreachable("no answer"), InvalidField("not allowed", field="host")])
async def test_what_is_wrong_with_a_mailbox_is_noted_and_others_are_read(clock: ManualClock, error: Exception) -> None:
    good = MailboxView(place=PLACE)
    ledger = MailboxBook("bad", "away", "faulty", "good")
    reader = Reader(bad=error, away=DependencyUnavailable(), faulty=RuntimeError("a fault"), good=good)
    await mails_read(ledger, reader, clock)
    assert sorted(ledger.noted) == [("bad", None, str(error), False), ("good", None, "", False)]


async def some_time(clock: ManualClock) -> None:
    """Let time pass in so many steps that each look that ends is seen."""
    for _ in range(100):
        await clock.advance(0.05)


async def test_servers_that_hang_hold_up_their_own_store_and_no_other(clock: ManualClock) -> None:
    """However many there are of it, and also for mailboxes of others that are due later."""
    ledger, reader = MailboxBook(*["hanging"] * 20), Reader(hanging=None, good=MailboxView(place=PLACE))
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
    ledger = MailboxBook("in")
    await mails_read(ledger, Reader(**{"in": MailboxView(place=other)}), clock)
    assert (ledger.fired, ledger.noted) == ([], [("in", other, "", False)])


async def test_only_an_admin_makes_one_and_only_of_a_mailbox_that_answers(clock: ManualClock) -> None:
    ledger, reader = MailboxBook(), Reader(good=MailboxView(place=PLACE), bad=MailboxUnreachable())
    triggers, _ = parts(ledger, reader, clock)
    message = due_trigger().message
    with pytest.raises(PermissionDenied):
        await triggers.save(ANN, object(), message, "good", must_exist=False)
    admin = replaced(ANN, rights=frozenset({"admin"}))
    with pytest.raises(MailboxUnreachable):
        await triggers.save(admin, object(), message, "bad", must_exist=False)
    assert ledger.put == []
    await triggers.save(admin, object(), message, "good", must_exist=False)
    await triggers.save(ANN, object(), message, None, must_exist=False)
    assert ledger.put == [PLACE, None]
