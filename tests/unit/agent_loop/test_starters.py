"""Schedules, webhooks and e-mails that start runs, and the instructions of these runs.

One failure never stops the others.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace as replaced
from datetime import UTC, datetime, timedelta
from typing import Any, cast

import pytest
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent.v1.trigger_pb2 import DeliverMailRequest
from pawl.agent.v1.workflow_pb2 import StartWorkflowRequest
from pawl.agent_loop.api.messages import Messages
from pawl.agent_loop.loop.rules import checks
from pawl.agent_loop.loop.spans import first_span
from pawl.agent_loop.schedules.rpc import ScheduleServicer, fire_note
from pawl.agent_loop.schedules.starting import ClaimPause, Starting
from pawl.agent_loop.triggers.rpc import BODY_BYTES_MAX, TriggerServicer
from pawl.agent_loop.workflows.starting import WorkflowStarting
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import IdSource, RequestId, RunId, StoreId, UserId
from pawl.chassis.rpc.trace_context import current_traceparent, set_traceparent
from pawl.errors import (
    AgentNotFound,
    DependencyUnavailable,
    InvalidArguments,
    InvalidField,
    Overloaded,
    PawlError,
    PermissionDenied,
    TooLarge,
    WorkflowNotFound,
)
from pawl.event.v1.schedule_pb2 import SCHEDULE_OVERLAP_ALLOW, SCHEDULE_OVERLAP_QUEUE, ScheduleDefinition, ScheduleFire
from pawl.event.v1.trigger_pb2 import MailboxSource, MailPosition, TriggerDefinition
from pawl.job.v1.ledger_pb2 import SubmitMessageRequest
from pawl.job.v1.schedules_pb2 import (
    ClaimSchedulesRequest,
    ClaimSchedulesResponse,
    DueSchedule,
    FireScheduleRequest,
    FireScheduleResponse,
    GetDueScheduleRequest,
    GetDueScheduleResponse,
    ScheduleOwner,
)
from pawl.job.v1.triggers_pb2 import (
    CheckMailboxRequest,
    CheckMailboxResponse,
    CheckWebhookRequest,
    CheckWebhookResponse,
    ClaimedEvent,
    ClaimEventsRequest,
    ClaimEventsResponse,
    DueTrigger,
    FireTriggerRequest,
    FireTriggerResponse,
    TriggerEvent,
)
from tests.fakes.manual_clock import ManualClock, VirtualClock, run_in_virtual_time
from tests.tables import for_each

ANN = Principal(store_id=StoreId("acme"), user_id=UserId("ann"))


def owner(credential_id: str = "") -> ScheduleOwner:
    return ScheduleOwner(store_id=ANN.store_id, user_id=ANN.user_id, credential_id=credential_id)


def due(text: str, credential_id: str = "") -> DueSchedule:
    return DueSchedule(owner=owner(credential_id), definition=ScheduleDefinition(text=text))


class ScheduleBook:
    def __init__(self, *batches: Sequence[DueSchedule] | PawlError, wait_seconds: float = 1.0) -> None:
        self._batches = list(batches)
        self._wait_seconds = wait_seconds
        self.fired: list[tuple[str, str]] = []

    async def ClaimSchedules(self, request: ClaimSchedulesRequest) -> ClaimSchedulesResponse:
        batch = self._batches.pop(0) if self._batches else ()
        if isinstance(batch, PawlError):
            raise batch
        return ClaimSchedulesResponse(schedules=batch, wait_seconds=0.0 if self._batches else self._wait_seconds)

    async def GetDueSchedule(self, request: GetDueScheduleRequest) -> GetDueScheduleResponse:
        return GetDueScheduleResponse(due=due(request.name))

    async def FireSchedule(self, request: FireScheduleRequest) -> FireScheduleResponse:
        text = request.due.definition.text
        if text == "away":
            raise DependencyUnavailable
        self.fired.append((text, request.refusal))
        return FireScheduleResponse(fire=None if text == "stale" else ScheduleFire())


async def forward(method: str, request: bytes) -> bytes:
    raise AssertionError


class Checks:
    def __init__(self, refusals: dict[str, Exception]) -> None:
        self._refusals = refusals

    async def checked(self, caller: Principal, request_id: RequestId, message: Any, *, must_exist: bool) -> Any:
        if message.text in self._refusals:
            raise self._refusals[message.text]
        return SubmitMessageRequest(text=message.text, conversation_key=message.conversation_key), None


class Workflows:
    """The workflow `digest`, whose input must not be empty."""

    async def submission(self, caller: Principal, asked: StartWorkflowRequest) -> Any:
        refusal: PawlError | None = WorkflowNotFound() if asked.name == "gone" else None
        if asked.input_json == b"{}":
            refusal = InvalidArguments("input: it is empty")
        return SubmitMessageRequest(text=asked.input_json.decode(), conversation_key=asked.name), refusal


def starting_with(checks: Checks, is_gone: Callable[[Principal], bool] = lambda _: False) -> Starting:
    return Starting(cast("Messages", checks), cast("WorkflowStarting", Workflows()), is_gone)


def firing_of(ledger: ScheduleBook, checks: Checks, clock: ManualClock) -> ScheduleServicer:
    stub: Any = ledger
    starting = starting_with(checks, lambda caller: caller.credential_id == "file-gone")
    return ScheduleServicer(stub, starting, clock, forward)


async def run_for(clock: ManualClock, forever: Coroutine[Any, Any, None], seconds: float = 0.5) -> None:
    running = asyncio.create_task(forever)
    await clock.advance(seconds)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def played(ledger: ScheduleBook, clock: ManualClock, seconds: float, **refusals: Exception) -> None:
    await run_for(clock, firing_of(ledger, Checks(refusals), clock).fire_forever(), seconds)


def test_any_change_ends_the_pause_between_claims_a_second_after_the_last_claim() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        pause = ClaimPause(VirtualClock())

        async def waited(seconds: float, change_after: float | None = None) -> float:
            start = loop.time()
            pause.claiming()
            if change_after is not None:
                loop.call_later(change_after, pause.note_change)
            await pause.wait(seconds)
            return round(loop.time() - start, 2)

        pauses = [(5.0, None, 5.0), (5.0, 0.1, 1.0), (5.0, 3.0, 3.0), (0.4, 0.1, 0.4), (0.0, None, 0.01)]
        for seconds, change_after, expected in pauses:
            assert await waited(seconds, change_after) == expected, (seconds, change_after)

    run_in_virtual_time(main())


async def test_a_schedule_that_cannot_start_is_refused_with_a_reason(clock: ManualClock) -> None:
    """One reason is that the schedule belongs to a deleted key of a file."""
    ledger = ScheduleBook([due("gone"), due("wrong"), due("look", "file-gone"), due("good")])
    await played(ledger, clock, 0.5, gone=AgentNotFound(), wrong=InvalidField("no", field="text"))
    assert {text: refusal.partition(":")[0] for text, refusal in ledger.fired} == {
        "gone": "AGENT_NOT_FOUND",
        "wrong": "INVALID_FIELD",
        "look": "PERMISSION_DENIED",
        "good": "",
    }


@pytest.mark.parametrize("error", [DependencyUnavailable(), Overloaded(), RuntimeError("a fault")])
async def test_a_transient_error_never_refuses_a_run(clock: ManualClock, error: Exception) -> None:
    ledger = ScheduleBook([due("bad"), due("away"), due("good")], [due("bad")], [due("later")])
    await played(ledger, clock, 0.5, bad=error)
    assert ledger.fired == [("good", ""), ("later", "")]


@pytest.mark.parametrize(("seconds", "fired"), [(0.5, []), (1.5, [("good", "")])])
async def test_an_unavailable_ledger_is_retried(clock: ManualClock, seconds: float, fired: list[Any]) -> None:
    ledger = ScheduleBook(DependencyUnavailable(), [due("good")])
    await played(ledger, clock, seconds)
    assert ledger.fired == fired


async def test_many_due_schedules_fire_even_if_one_of_them_changes_constantly(clock: ManualClock) -> None:
    ledger = ScheduleBook([due(f"{number}") for number in range(64)], [due("one more")])
    await played(ledger, clock, 20)
    assert len({*ledger.fired}) == len(ledger.fired) == 65
    with pytest.raises(DependencyUnavailable):
        await firing_of(ledger, Checks({}), clock).trigger(ANN, "stale", RequestId("r"))
    assert len(ledger.fired) > 66


async def test_each_past_scheduled_time_has_its_own_request_id(clock: ManualClock) -> None:
    times = [datetime(2026, 1, day, tzinfo=UTC) for day in (1, 2)]

    class Past(ScheduleBook):
        def __init__(self) -> None:
            super().__init__()
            self.requests: list[tuple[datetime, str]] = []

        async def GetDueSchedule(self, request: GetDueScheduleRequest) -> GetDueScheduleResponse:
            response = GetDueScheduleResponse(due=due(request.name))
            for time in times:
                response.past_times.add().FromDatetime(time)
            return response

        async def FireSchedule(self, request: FireScheduleRequest) -> FireScheduleResponse:
            assert "(a backfill)" in request.message.options.instructions
            self.requests.append((request.backfill_time.ToDatetime(tzinfo=UTC), request.request_id))
            return FireScheduleResponse(fire=ScheduleFire())

    ledger = Past()
    schedules = firing_of(ledger, Checks({}), clock)
    for request_id in ("r", "r", "other", ""):
        assert len(await schedules.backfill(ANN, "x", Timestamp(), Timestamp(), RequestId(request_id))) == 2
    assert (ledger.requests[:2], len(set(ledger.requests))) == (ledger.requests[2:4], 6)
    assert ledger.requests[6:] == [(time, "") for time in times]


async def test_a_firing_has_its_own_trace_with_a_link(clock: ManualClock) -> None:
    """The firing links to the request that fires the schedule. Without one, it links to the previous firing's run."""
    caller = f"00-{'a' * 32}-{'b' * 16}-01"

    class Calls(Checks):
        async def checked(self, caller: Principal, request_id: RequestId, message: Any, *, must_exist: bool) -> Any:
            return SubmitMessageRequest(text=message.text, traceparent=current_traceparent()), None

    starting = Starting(
        cast("Messages", Calls({})), cast("WorkflowStarting", Workflows()), lambda _: False, traces=True
    )
    links = []
    for given in ("", caller):
        set_traceparent(given)
        message, _ = await starting.message(ANN, ScheduleDefinition(text="x"), {}, last_run_id=RunId("run_1"))
        assert message is not None
        assert not message.traceparent
        links.append(message.trace_link)
    assert links == [first_span(RunId("run_1")), caller]


# Webhook deliveries and delayed events: one failing event never stops the others.


NO_ID = RequestId("")


def due_trigger(text: str = "look", **fields: Any) -> DueTrigger:
    fields.setdefault("overlap", SCHEDULE_OVERLAP_ALLOW)
    return DueTrigger(
        owner=owner(),
        definition=TriggerDefinition(name="orders", text=text, **fields),
        trigger_id="trg_1",
    )


class EventBook:
    def __init__(self, trigger: DueTrigger | None, *, changes: int = 0, waiting: Sequence[Any] = ()) -> None:
        self._trigger = trigger
        self._changes = changes
        self._waiting = list(waiting)
        self.fired: list[tuple[TriggerEvent, Any, str]] = []
        self.last = FireTriggerRequest()

    async def CheckWebhook(self, request: CheckWebhookRequest) -> CheckWebhookResponse:
        return CheckWebhookResponse(due=self._trigger, event_id=request.headers.get("webhook-id", ""))

    async def CheckMailbox(self, request: CheckMailboxRequest) -> CheckMailboxResponse:
        return CheckMailboxResponse(due=self._trigger)

    async def FireTrigger(self, request: FireTriggerRequest) -> FireTriggerResponse:
        message = request.message if request.HasField("message") else None
        self.fired.append((request.event, message, request.refusal))
        self.last = request
        self._changes -= 1
        return FireTriggerResponse(fire=None if self._changes >= 0 else ScheduleFire(event_id=request.event.event_id))

    async def ClaimEvents(self, request: ClaimEventsRequest) -> ClaimEventsResponse:
        events = self._waiting.pop(0) if self._waiting else ()
        return ClaimEventsResponse(events=events, wait_seconds=0.0 if self._waiting else 1.0)


def triggers_of(ledger: EventBook, clock: ManualClock, **refusals: Exception) -> TriggerServicer:
    starting = starting_with(Checks(refusals))
    stub: Any = ledger
    return TriggerServicer(stub, starting, clock, IdSource(clock), forward)


async def delivered(trigger: DueTrigger, clock: ManualClock, body: bytes = b"{}", **headers: str) -> tuple[Any, Any]:
    ledger = EventBook(trigger)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    await triggers_of(ledger, clock).deliver_webhook(ANN, "trg_1", named, body, NO_ID)
    ((event, message, _),) = ledger.fired
    return event, message


async def test_the_event_enters_the_message_as_data(clock: ManualClock) -> None:
    event, message = await delivered(
        due_trigger("Look at {{event}} and pay."),
        clock,
        b'{"n": 1}',
        Webhook_Id="msg_1",
        Content_Type="application/json",
    )
    before, line, after = message.text.partition(event.data.decode())
    assert (before, after, event.event_id, event.HasField("lane")) == ("Look at ", " and pay.", "msg_1", False)
    event_data = json.loads(line)["event"]
    assert all(event_data.pop(name) for name in ("receive_time", "note"))
    assert event_data == {
        "source": "webhook",
        "content_type": "application/json",
        "trigger": "orders",
        "event_id": "msg_1",
        "data": {"n": 1},
    }


@for_each("body", [b"a" * BODY_BYTES_MAX, b"\x01" * BODY_BYTES_MAX, b"\xff" * BODY_BYTES_MAX])
async def test_the_largest_body_still_fits_into_a_message(clock: ManualClock, body: bytes) -> None:
    _, message = await delivered(due_trigger("t" * 16 * 1024), clock, body)
    assert len(message.text.encode()) <= checks.MESSAGE_BYTES_MAX
    assert '"cut_from_bytes"' in message.text


async def test_oversized_deliveries_are_refused(clock: ManualClock) -> None:
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


async def test_json_pointers_determine_the_conversation_and_lane(clock: ManualClock) -> None:
    trigger = due_trigger(conversation_pointer="/order", concurrency_pointer="/shop", overlap=SCHEDULE_OVERLAP_QUEUE)
    first, _ = await delivered(trigger, clock, b'{"order": 1, "shop": "a"}')
    second, message = await delivered(trigger, clock, b'{"order": 1, "shop": "b"}')
    other, _ = await delivered(trigger, clock, b'{"order": "1"}')
    without, _ = await delivered(trigger, clock, b"no json")
    assert first.conversation_key == second.conversation_key == message.conversation_key != other.conversation_key
    assert first.conversation_key.startswith("trigger:trg_1:")
    assert (without.conversation_key, without.lane, other.lane) == ("", "", "")
    assert len({first.lane, second.lane, ""}) == 3
    plain, _ = await delivered(due_trigger(conversation_key="mine", debounce_seconds=5), clock)
    assert (plain.conversation_key, plain.lane) == ("mine", "")


async def test_a_changed_trigger_is_checked_again_for_the_same_event(clock: ManualClock) -> None:
    ledger = EventBook(due_trigger(), changes=2)
    assert (await triggers_of(ledger, clock).deliver_webhook(ANN, "trg_1", {}, b"", NO_ID)).HasField("fire")
    assert (len(ledger.fired), len({event.event_id for event, *_ in ledger.fired})) == (3, 1)
    ledger = EventBook(due_trigger())
    await triggers_of(ledger, clock).deliver_webhook(ANN, "trg_1", {}, b"", RequestId("req"))
    assert ledger.fired[0][0].event_id == "req"
    with pytest.raises(DependencyUnavailable):
        await triggers_of(EventBook(due_trigger(), changes=99), clock).deliver_webhook(ANN, "trg_1", {}, b"", NO_ID)


async def test_waiting_events_fire_even_if_one_of_them_cannot(clock: ManualClock) -> None:
    event = TriggerEvent(event_id="e", lane="", data=b"{}", conversation_key="key")
    names = ("gone", "busy", "good")
    waiting = [[ClaimedEvent(due=due_trigger(name + "{{event}}"), event=event) for name in names]]
    ledger = EventBook(due_trigger(), waiting=waiting)
    triggers = triggers_of(ledger, clock, **{"gone{}": AgentNotFound(), "busy{}": Overloaded()})
    await run_for(clock, triggers.fire_forever())
    outcomes = [(message.text if message else "", refusal.partition(":")[0]) for _, message, refusal in ledger.fired]
    assert sorted(outcomes) == [("", "AGENT_NOT_FOUND"), ("good{}", "")]


# Mail deliveries.


async def test_an_email_becomes_the_data_of_its_run_or_is_skipped(clock: ManualClock) -> None:
    ledger = EventBook(due_trigger())
    triggers = triggers_of(ledger, clock)
    position = MailPosition(uid_validity=7, uid=11)
    mail = DeliverMailRequest(trigger_id="trg_1", event_id="f0.7.11", position=position)
    mail.data_json = b'{"text":"hi","message_id":"<2@x>","thread":"<1@x>"}'
    assert (await triggers.deliver_mail(ANN.store_id, mail)).HasField("fire")
    ((event, message, _),) = ledger.fired
    assert (event.event_id, ledger.last.mail) == ("f0.7.11", position)
    assert all(part in message.text for part in ('"source":"mail"', '"data":{"text":"hi",'))
    assert dict(message.labels) == {"pawl.mail_id": "<2@x>", "pawl.mail_thread": "<1@x>"}
    mail.skipped = "not you"
    await triggers.deliver_mail(ANN.store_id, mail)
    assert (ledger.fired[1][1], ledger.last.skipped, ledger.fired[1][0].data) == (None, "not you", b"")
    changed = EventBook(None)
    response = await triggers_of(changed, clock).deliver_mail(ANN.store_id, mail)
    assert (response.HasField("fire"), changed.fired) == (False, [])


async def test_only_an_admin_saves_a_trigger_with_a_mailbox(clock: ManualClock) -> None:
    ledger = EventBook(None)
    mailbox = TriggerDefinition(name="orders", text="look", mailbox=MailboxSource(host="mx.example"))
    with pytest.raises(PermissionDenied):
        await triggers_of(ledger, clock).check(ANN, mailbox)
    await triggers_of(ledger, clock).check(replaced(ANN, rights=frozenset({"admin"})), mailbox)
    await triggers_of(ledger, clock).check(ANN, TriggerDefinition(name="orders", text="look"))


TIME = datetime(2026, 7, 6, 7, 0, tzinfo=UTC)


def report(time: datetime | None = TIME, time_zone: str = "Europe/Berlin") -> DueSchedule:
    due = DueSchedule(definition=ScheduleDefinition(name="report", time_zone=time_zone))
    if time is not None:
        due.expected_time.FromDatetime(time)
    return due


def test_a_scheduled_run_sees_its_delay_and_its_scheduled_time_with_the_time_zone() -> None:
    local, later = "2026-07-06T09:00:00+02:00 (Europe/Berlin)", TIME + timedelta(minutes=5)
    rows: list[tuple[DueSchedule, datetime, datetime | None, str]] = [
        (report(), TIME, None, f"due at {local}."),
        (report(), later, None, f"due at {local} and is 300 seconds late."),
        (report(None), later, TIME, f"for the past scheduled time {local} (a backfill)."),
        (report(None, ""), TIME, None, "manually at 2026-07-06T07:00:00+00:00 (UTC)."),
    ]
    for fired, now, backfill_time, sentence in rows:
        text = fire_note(fired, now, backfill_time)
        assert text.startswith("This run belongs to the schedule report. ")
        assert text.endswith(sentence)
