"""The delivery of webhooks, and the firing of what has waited: whatever becomes of one event, the others fire."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from pawl.agent_loop.app.messages import Messages
from pawl.agent_loop.app.public_values import Delivery, DueTrigger, Overlap, ScheduledMessage, TriggerEvent
from pawl.agent_loop.app.starting import Starting
from pawl.agent_loop.app.starting_ports import MailboxReader, TriggerLedger
from pawl.agent_loop.app.triggers import BODY_BYTES_MAX, Triggers
from pawl.agent_loop.domain import checks
from pawl.chassis.auth import Principal
from pawl.chassis.ids import IdSource, RequestId, StoreId, UserId
from pawl.errors import AgentNotFound, DependencyUnavailable, InvalidField, Overloaded, TooLarge
from tests.fakes.manual_clock import ManualClock
from tests.unit.agent_loop.test_schedules import Checks

ANN = Principal(store_id=StoreId("acme"), user_id=UserId("ann"))
NO_ID = RequestId("")


def due(text: str = "look", **fields: Any) -> DueTrigger:
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


class Ledger:
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


def triggers_of(ledger: Ledger, clock: ManualClock, **refusals: Exception) -> Triggers:
    starting = Starting(cast("Messages", Checks(refusals)), lambda _: False)
    reader = cast("MailboxReader", None)
    return Triggers(
        ledger=cast("TriggerLedger", ledger), reader=reader, starting=starting, clock=clock, ids=IdSource(clock)
    )


async def delivered(trigger: DueTrigger, clock: ManualClock, body: bytes = b"{}", **headers: str) -> tuple[Any, Any]:
    ledger = Ledger(trigger)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    await triggers_of(ledger, clock).deliver_webhook(ANN, "trg_1", named, body, NO_ID)
    ((event, message, _),) = ledger.fired
    return event, message


async def test_the_event_is_in_the_message_as_data(clock: ManualClock) -> None:
    event, message = await delivered(
        due("Look at {{event}} and pay."), clock, b'{"n": 1}', Webhook_Id="msg_1", Content_Type="application/json"
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
        _, message = await delivered(due("t" * 16 * 1024), clock, body)
        assert len(message.text.encode()) <= checks.MESSAGE_BYTES_MAX
        assert '"cut_from_bytes"' in message.text


async def test_what_is_too_much_is_refused(clock: ManualClock) -> None:
    triggers = triggers_of(Ledger(due()), clock)
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
    trigger = due(conversation_pointer="/order", concurrency_pointer="/shop", overlap=Overlap.QUEUE)
    first, _ = await delivered(trigger, clock, b'{"order": 1, "shop": "a"}')
    second, message = await delivered(trigger, clock, b'{"order": 1, "shop": "b"}')
    other, _ = await delivered(trigger, clock, b'{"order": "1"}')
    without, _ = await delivered(trigger, clock, b"no json")
    assert first.conversation_key == second.conversation_key == message.conversation_key
    assert first.conversation_key.startswith("trigger:trg_1:")
    assert other.conversation_key != first.conversation_key
    assert (without.conversation_key, without.lane, other.lane) == ("", "", "")
    assert len({first.lane, second.lane, ""}) == 3
    plain, _ = await delivered(due(conversation_key="mine", debounce_seconds=5), clock)
    assert (plain.conversation_key, plain.lane) == ("mine", "")


async def test_a_trigger_that_changes_is_checked_again_under_the_same_event(clock: ManualClock) -> None:
    ledger = Ledger(due(), changes=2)
    fired = await triggers_of(ledger, clock).deliver_webhook(ANN, "trg_1", {}, b"", NO_ID)
    assert fired.fire is not None
    assert len(ledger.fired) == 3
    assert len({event.event_id for event, *_ in ledger.fired}) == 1
    ledger = Ledger(due())
    await triggers_of(ledger, clock).deliver_webhook(ANN, "trg_1", {}, b"", RequestId("req"))
    assert ledger.fired[0][0].event_id == "req"
    with pytest.raises(DependencyUnavailable):
        await triggers_of(Ledger(due(), changes=99), clock).deliver_webhook(ANN, "trg_1", {}, b"", NO_ID)


async def test_what_has_waited_fires_and_one_that_cannot_be_fired_now_keeps_none_from_it(clock: ManualClock) -> None:
    event = TriggerEvent(event_id="e", lane="", data=b"{}", conversation_key="key")
    waiting = [[(due("gone{{event}}"), event), (due("busy{{event}}"), event), (due("good{{event}}"), event)]]
    ledger = Ledger(due(), waiting=waiting)
    triggers = triggers_of(ledger, clock, **{"gone{}": AgentNotFound(), "busy{}": Overloaded()})
    firing = asyncio.create_task(triggers.fire_forever())
    await clock.advance(0.5)
    firing.cancel()
    await asyncio.gather(firing, return_exceptions=True)
    said = [(message.text if message else "", refusal.partition(":")[0]) for _, message, refusal in ledger.fired]
    assert sorted(said) == [("", "AGENT_NOT_FOUND"), ("good{}", "")]
