"""Which messages of the life cycle become notifications, and what these say (NOTE-1)."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId, is_id
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.notifier.adapters.lifecycle import read_change
from pawl.notifier.app.ports import PoisonEvent
from pawl.notifier.domain.announcement import (
    BODY_BYTES_MAX,
    TITLE_BYTES_MAX,
    ApprovalAsked,
    Over,
    RunChange,
    StarterPaused,
    draft_job_end,
    draft_notification,
    draft_pause,
    draft_requests,
    notification_id,
    over_by,
)
from pawl.notifier.domain.notification import EventId, Inbox, NotificationKind, shown
from pawl.values import WaitKind
from tests.tables import not_refused

CHANGE = RunChange(
    event_id=EventId("evt_1"),
    type="run.completed",
    time=datetime(2026, 5, 1, tzinfo=UTC),
    inbox=Inbox(store_id=StoreId("acme"), user_id=UserId("ann")),
    run_id=RunId("run_1"),
    conversation_id=ConversationId("conv_1"),
)


def of(event_type: str, **changes: Any) -> RunChange:
    return replace(CHANGE, type=f"run.{event_type}", **changes)


BOTH, TOKENS = frozenset({WaitKind.ANSWER, WaitKind.APPROVAL}), frozenset({WaitKind.BUDGET})


def test_an_event_that_concerns_the_user_is_told_with_its_reason_and_no_other() -> None:
    told = [
        (of("completed"), NotificationKind.RUN_COMPLETED, "Run completed"),
        (of("failed", failure_message="It is down."), NotificationKind.RUN_FAILED, "Run failed: It is down."),
        (of("cancelled"), NotificationKind.RUN_CANCELLED, "Run cancelled"),
        (of("cancelled", ended_by_operator=True), NotificationKind.RUN_CANCELLED, "Run ended by an operator"),
        (of("expired"), NotificationKind.RUN_EXPIRED, "Run expired"),
        (of("waiting", waits=BOTH), NotificationKind.INPUT_NEEDED, "Run waits for your approval and your answer"),
        (of("waiting", waits=TOKENS), NotificationKind.INPUT_NEEDED, "Run waits for more tokens"),
        (of("needs_attention"), NotificationKind.ATTENTION_NEEDED, "Run stopped: it is unknown whether"),
        (of("needs_attention", quarantined=True), NotificationKind.ATTENTION_NEEDED, "Run stopped: its workers died"),
    ]
    for change, kind, title in told:
        draft = draft_notification(replace(change, output_text="So far"))
        assert draft is not None
        assert (draft.kind, draft.title[: len(title)]) == (kind, title)
        assert ("If nobody decides in time" in draft.body) is (change.waits == BOTH)
        found = (draft.inbox, draft.run_id, draft.event_id, draft.create_time)
        assert found == (CHANGE.inbox, CHANGE.run_id, CHANGE.event_id, CHANGE.time)
    failed = draft_notification(of("failed", output_text="So far"))
    assert failed is not None
    assert failed.body == "So far"
    nobodys = [of(name) for name in ("queued", "running", "cancelling", "invented_later")]
    assert {draft_notification(change) for change in (*nobodys, of("cancelled", superseded=True))} == {None}


def test_the_same_event_gives_the_same_id_and_another_event_another() -> None:
    assert notification_id(EventId("e" * 64)) == notification_id(EventId("e" * 64))
    assert notification_id(EventId("e" * 63)) != notification_id(EventId("e" * 64))
    assert is_id(notification_id(EventId("e" * 64)))
    draft = draft_notification(CHANGE)
    assert draft is not None
    assert draft.notification_id == notification_id(CHANGE.event_id)


def test_texts_are_cut_by_bytes_on_a_character() -> None:
    draft = draft_notification(
        replace(CHANGE, type="run.failed", failure_message="ä\n" * 5000, output_text="\0\u202e" + "ü" * 5000)
    )
    assert draft is not None
    assert "\n" not in draft.title
    assert draft.body.startswith("<U+202E>ü"), "what hides is marked"
    assert TITLE_BYTES_MAX - 4 <= len(draft.title.encode()) <= TITLE_BYTES_MAX
    assert BODY_BYTES_MAX - 4 <= len(draft.body.encode()) <= BODY_BYTES_MAX
    assert draft.body.endswith("ü...")


def test_what_runs_are_to_each_other_is_told_to_nobody() -> None:
    """A run that does a call of another one: its end, and that the other waits for it (TOOL-7)."""
    for event_type in ("run.completed", "run.failed", "run.cancelled", "run.expired"):
        assert draft_notification(replace(CHANGE, type=event_type, does_call=True)) is None
    waiting = replace(CHANGE, type="run.waiting", waits=frozenset({WaitKind.AGENT}))
    assert draft_notification(waiting) is None
    needed = draft_notification(replace(waiting, waits=frozenset({WaitKind.APPROVAL}), does_call=True))
    assert needed is not None
    assert needed.kind is NotificationKind.INPUT_NEEDED


ENDED_JOB = replace(CHANGE, does_call=True, job="book_flight", reports_to=ConversationId("conv_2"), output_text="done")


def test_the_end_of_a_job_is_of_the_conversation_that_began_it() -> None:
    """ASYNC-5: and no job's end that nobody has to hear of is told."""
    rows = [
        (ENDED_JOB, "book_flight in the background completed"),
        (
            replace(ENDED_JOB, type="run.failed", failure_message="full"),
            "book_flight in the background failed: full",
        ),
        (replace(ENDED_JOB, type="run.expired"), "book_flight in the background expired: nobody answered in time"),
        (
            replace(ENDED_JOB, type="run.cancelled", ended_by_operator=True),
            "book_flight in the background was ended by an operator",
        ),
    ]
    for change, title in rows:
        draft = draft_job_end(change)
        assert draft is not None
        assert (draft.kind, draft.title, draft.body) == (NotificationKind.JOB_ENDED, title, "done")
        assert (draft.run_id, draft.conversation_id) == ("run_1", "conv_2")
        assert draft_notification(change) is None
    nobodys = [CHANGE, replace(ENDED_JOB, reports_to=ConversationId(""))]
    nobodys += [replace(ENDED_JOB, type=f"run.{name}") for name in ("cancelled", "waiting")]
    assert {draft_job_end(change) for change in nobodys} == {None}


ASKED = ApprovalAsked(
    event_id=EventId("evt_2"),
    time=datetime(2026, 5, 1, tzinfo=UTC),
    store_id=StoreId("acme"),
    user_id=UserId("ann"),
    run_id=RunId("run_1"),
    call_id=CallId("call_1"),
    conversation_id=ConversationId("conv_1"),
    tool_name="send_email",
    preview="An e-mail to bob",
    expire_time=datetime(2026, 5, 2, tzinfo=UTC),
)
APPROVERS = [UserId("ann"), UserId("bob"), UserId("eve"), UserId("bob")]


def test_approvers_are_told_of_calls_of_others_and_see_nothing_of_the_conversation() -> None:
    """HITL-4: their own runs they are told of with the run."""
    drafts = draft_requests(ASKED, APPROVERS)
    assert [draft.inbox.user_id for draft in drafts] == ["bob", "eve"]
    assert {draft.kind for draft in drafts} == {NotificationKind.APPROVAL_NEEDED}
    body = "An e-mail to bob\n\nIf nobody decides by 2026-05-02 00:00 UTC, it is escalated, or the call does not run."
    assert {(draft.title, draft.body) for draft in drafts} == {("send_email of ann awaits your approval", body)}
    (long,) = draft_requests(replace(ASKED, preview="ü" * 5000), APPROVERS[1:2])
    assert len(long.body.encode()) <= BODY_BYTES_MAX
    assert long.body.endswith(body[len("An e-mail to bob") :]), "what is cut is the preview"
    assert {(draft.run_id, draft.call_id, draft.conversation_id) for draft in drafts} == {("run_1", "call_1", "conv_1")}
    assert {shown(draft).conversation_id for draft in drafts} == {""}
    ids = [draft.notification_id for draft in drafts]
    assert ids == [draft.notification_id for draft in draft_requests(ASKED, APPROVERS)]
    assert len(set(ids)) == 2
    told_already = replace(ASKED, approved_by=frozenset({UserId("bob")}))
    assert [draft.inbox.user_id for draft in draft_requests(told_already, APPROVERS)] == ["eve"]
    assert draft_requests(ASKED, []) == []


def test_a_request_that_is_escalated_is_told_to_all_and_to_the_user() -> None:
    """D6."""
    drafts = draft_requests(replace(ASKED, escalated=True), APPROVERS)
    assert [(draft.inbox.user_id, draft.title) for draft in drafts] == [
        ("bob", "send_email of ann still awaits your approval: nobody decided in time"),
        ("eve", "send_email of ann still awaits your approval: nobody decided in time"),
        ("ann", "Run still waits for an approval of send_email: nobody decided in time"),
    ]
    assert drafts[-1].kind is NotificationKind.INPUT_NEEDED
    assert shown(drafts[-1]).conversation_id == "conv_1"


def test_a_change_of_a_run_ends_what_it_was_waited_for_and_its_end_approvals_too() -> None:
    over = Over(store_id=StoreId("acme"), run_id=RunId("run_1"), time=CHANGE.time, run_ended=True)
    assert over_by(CHANGE) == over
    assert over_by(replace(CHANGE, type="run.running")) == replace(over, run_ended=False)
    settled = Over(time=CHANGE.time, store_id=over.store_id, run_id=over.run_id, call_id=CallId("call_1"))
    assert over_by(settled) == replace(over, run_ended=False, call_id=CallId("call_1")), "of that call alone"


SUBJECT = "pawl.v1.acme.lifecycle.waiting"


def event(store_id: str = "acme", user_id: str = "ann") -> event_pb2.RunEvent:
    message = event_pb2.RunEvent(
        store_id=store_id, conversation_id="conv_1", run_id="run_1", event_id="evt_1", seq=3, type="run.waiting"
    )
    message.time.FromDatetime(datetime(2026, 5, 1, tzinfo=UTC))
    run = message.run_changed.run
    run.user_id = user_id
    run.state = run_pb2.RUN_STATE_WAITING
    run.waits.extend([run_pb2.WAIT_KIND_ANSWER, run_pb2.WAIT_KIND_TOOL_RESULT])
    return message


def test_a_change_of_a_run_is_read_whole() -> None:
    """Also what operators are wanted for and did; a wait of a later version is passed over."""
    message = event()
    run = message.run_changed.run
    run.waits.append(99)  # type: ignore[arg-type]  # as an open enum allows
    run.attention.reason, run.stop_cause = run_pb2.ATTENTION_REASON_QUARANTINED, run_pb2.STOP_CAUSE_OPERATOR
    change = read_change(SUBJECT, message.SerializeToString())
    assert isinstance(change, RunChange)
    assert (change.event_id, change.type, change.run_id) == ("evt_1", "run.waiting", "run_1")
    assert (change.inbox.store_id, change.inbox.user_id) == ("acme", "ann")
    assert change.waits == {WaitKind.ANSWER, WaitKind.TOOL_RESULT}
    assert change.time == datetime(2026, 5, 1, tzinfo=UTC)
    assert (change.quarantined, change.ended_by_operator, change.superseded) == (True, True, False)
    message.warning.reason = "FINAL_ROUND"
    assert read_change(SUBJECT, message.SerializeToString()) is None, "another event is no change of a run"


def test_a_job_is_read_with_whom_it_tells() -> None:
    """It does a call for its conversation: so its end is told there, and not in the inbox, too."""
    for reports, heard_by in [
        (run_pb2.JOB_REPORTS_END, "conv_2"),
        (run_pb2.JOB_REPORTS_EVERY, "conv_2"),
        (run_pb2.JOB_REPORTS_NONE, ""),
    ]:
        message = event()
        run = message.run_changed.run
        run.job.tool_name, run.job.reports, run.reports_to_conversation_id = "book_flight", reports, "conv_2"
        change = read_change(SUBJECT, message.SerializeToString())
        assert isinstance(change, RunChange)
        assert (change.job, change.reports_to, change.does_call) == ("book_flight", heard_by, True)


def test_bytes_that_make_no_sense_are_poison() -> None:
    """I13: also an event of another store than its subject."""
    nobodys = asked()
    nobodys.call_changed.call.user_id = ""
    messages = [*(event(user_id=user) for user in ("", "a.b", "x" * 65)), event(store_id="other"), nobodys]
    data = [b"\xff\xff\xff", *(message.SerializeToString() for message in messages)]
    assert not_refused(PoisonEvent, lambda each: read_change(SUBJECT, each), data) == []


def asked(state: call_pb2.CallState.ValueType = call_pb2.CALL_STATE_AWAITING_APPROVAL) -> event_pb2.RunEvent:
    message = event_pb2.RunEvent(
        store_id="acme", conversation_id="conv_1", run_id="run_1", event_id="evt_1", type="tool.awaiting_approval"
    )
    message.time.FromDatetime(datetime(2026, 5, 1, tzinfo=UTC))
    call = message.call_changed.call
    call.call_id, call.user_id, call.tool_name, call.state = "call_1", "ann", "send_email", state
    call.approval.cause = "category SENSITIVE"
    call.approval.approvals.add(user_id="bob")
    call.approval.escalated = True
    call.deadline_time.FromDatetime(datetime(2026, 5, 2, tzinfo=UTC))
    return message


def test_a_call_that_awaits_an_approval_is_read_whole() -> None:
    found = read_change("pawl.v1.acme.lifecycle.awaiting_approval", asked().SerializeToString())
    assert isinstance(found, ApprovalAsked)
    assert (found.event_id, found.store_id, found.run_id, found.call_id) == ("evt_1", "acme", "run_1", "call_1")
    assert (found.user_id, found.tool_name, found.preview) == ("ann", "send_email", "category SENSITIVE")
    assert (found.approved_by, found.escalated) == ({"bob"}, True)
    assert found.expire_time == datetime(2026, 5, 2, tzinfo=UTC)


def test_a_call_that_awaits_an_approval_no_more_is_read() -> None:
    message = asked(call_pb2.CALL_STATE_RUNNABLE)
    message.call_changed.from_state = call_pb2.CALL_STATE_AWAITING_APPROVAL
    found = read_change(SUBJECT, message.SerializeToString())
    time = datetime(2026, 5, 1, tzinfo=UTC)
    ids = (StoreId("acme"), RunId("run_1"), CallId("call_1"))
    message.call_changed.from_state = call_pb2.CALL_STATE_RUNNING
    assert read_change(SUBJECT, message.SerializeToString()) is None
    assert found == Over(time=time, store_id=ids[0], run_id=ids[1], call_id=ids[2])


def test_that_a_trigger_has_paused_itself_is_told_to_its_user() -> None:
    """NOTE-1. It concerns no run, so nothing of any run is over with it."""
    message = event_pb2.RunEvent(store_id="acme", event_id="evt_1", type="trigger.paused")
    message.time.FromDatetime(datetime(2026, 5, 1, tzinfo=UTC))
    message.starter_paused.CopyFrom(event_pb2.StarterPaused(name="orders\n", user_id="ann", note="10 fires failed"))
    change = read_change("pawl.v1.acme.lifecycle.trigger_paused", message.SerializeToString())
    assert isinstance(change, StarterPaused)
    draft = draft_pause(change)
    assert draft.title == "Your trigger orders has paused itself: 10 fires failed"
    assert (draft.inbox.user_id, draft.run_id, draft.conversation_id) == ("ann", "", "")
    assert over_by(change) is None
    message.starter_paused.user_id = "a.b"
    with pytest.raises(PoisonEvent):
        read_change("pawl.v1.acme.lifecycle.trigger_paused", message.SerializeToString())
