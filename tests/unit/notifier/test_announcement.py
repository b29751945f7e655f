"""Which events become notifications, and what these say (NOTE-1)."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest

from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId, is_id
from pawl.notifier.domain.announcement import (
    BODY_BYTES_MAX,
    TITLE_BYTES_MAX,
    ApprovalAsked,
    ApprovalSettled,
    Over,
    RunChange,
    Wait,
    draft_job_end,
    draft_notification,
    draft_requests,
    notification_id,
    over_by,
)
from pawl.notifier.domain.notification import EventId, Inbox, NotificationKind, shown

CHANGE = RunChange(
    event_id=EventId("evt_1"),
    type="run.completed",
    time=datetime(2026, 5, 1, tzinfo=UTC),
    inbox=Inbox(store_id=StoreId("acme"), user_id=UserId("ann")),
    run_id=RunId("run_1"),
    conversation_id=ConversationId("conv_1"),
)


@pytest.mark.parametrize(
    ("event_type", "kind"),
    [
        ("run.completed", NotificationKind.RUN_COMPLETED),
        ("run.failed", NotificationKind.RUN_FAILED),
        ("run.cancelled", NotificationKind.RUN_CANCELLED),
        ("run.expired", NotificationKind.RUN_EXPIRED),
        ("run.waiting", NotificationKind.INPUT_NEEDED),
        ("run.needs_attention", NotificationKind.ATTENTION_NEEDED),
    ],
)
def test_an_event_that_concerns_the_user_is_told(event_type: str, kind: NotificationKind) -> None:
    draft = draft_notification(replace(CHANGE, type=event_type))
    assert draft is not None
    assert draft.kind is kind
    assert (draft.inbox, draft.run_id, draft.event_id, draft.create_time) == (
        CHANGE.inbox,
        CHANGE.run_id,
        CHANGE.event_id,
        CHANGE.time,
    )


@pytest.mark.parametrize("event_type", ["run.queued", "run.running", "run.cancelling", "run.invented_later"])
def test_an_event_that_needs_nobody_is_not_told(event_type: str) -> None:
    assert draft_notification(replace(CHANGE, type=event_type)) is None


def test_a_run_that_a_newer_message_replaced_is_not_told() -> None:
    assert draft_notification(replace(CHANGE, type="run.cancelled", superseded=True)) is None


@pytest.mark.parametrize(
    ("change", "title"),
    [
        (replace(CHANGE, type="run.needs_attention"), "Run stopped: it is unknown whether a call had its effect"),
        (replace(CHANGE, type="run.needs_attention", quarantined=True), "Run stopped: its workers died"),
        (replace(CHANGE, type="run.cancelled"), "Run cancelled"),
        (replace(CHANGE, type="run.cancelled", ended_by_operator=True), "Run ended by an operator"),
    ],
)
def test_a_user_is_told_why_an_operator_is_wanted_and_what_one_did(change: RunChange, title: str) -> None:
    draft = draft_notification(change)
    assert draft is not None
    assert draft.title.startswith(title)


def test_a_waiting_run_says_what_it_waits_for() -> None:
    change = replace(CHANGE, type="run.waiting", waits=frozenset({Wait.ANSWER, Wait.APPROVAL}))
    draft = draft_notification(change)
    assert draft is not None
    assert draft.title == "Run waits for your approval and your answer"


def test_a_failed_run_says_why_and_keeps_its_partial_text() -> None:
    change = replace(CHANGE, type="run.failed", failure_message="The model server is down.", output_text="So far")
    draft = draft_notification(change)
    assert draft is not None
    assert (draft.title, draft.body) == ("Run failed: The model server is down.", "So far")


def test_the_same_event_gives_the_same_id_and_another_event_another() -> None:
    assert notification_id(EventId("e" * 64)) == notification_id(EventId("e" * 64))
    assert notification_id(EventId("e" * 63)) != notification_id(EventId("e" * 64))
    assert is_id(notification_id(EventId("e" * 64)))
    draft = draft_notification(CHANGE)
    assert draft is not None
    assert draft.notification_id == notification_id(CHANGE.event_id)


def test_texts_are_cut_by_bytes_on_a_character() -> None:
    draft = draft_notification(
        replace(CHANGE, type="run.failed", failure_message="ä\n" * 5000, output_text="\0" + "ü" * 5000)
    )
    assert draft is not None
    assert "\n" not in draft.title
    assert "\0" not in draft.body
    assert TITLE_BYTES_MAX - 4 <= len(draft.title.encode()) <= TITLE_BYTES_MAX
    assert BODY_BYTES_MAX - 4 <= len(draft.body.encode()) <= BODY_BYTES_MAX
    assert draft.body.endswith("ü...")


def test_what_runs_are_to_each_other_is_told_to_nobody() -> None:
    """A run that does a call of another one: its end, and that the other waits for it (TOOL-7)."""
    for event_type in ("run.completed", "run.failed", "run.cancelled", "run.expired"):
        assert draft_notification(replace(CHANGE, type=event_type, does_call=True)) is None
    waiting = replace(CHANGE, type="run.waiting", waits_for_nobody=True)
    assert draft_notification(waiting) is None
    needed = draft_notification(replace(waiting, waits=frozenset({Wait.APPROVAL}), does_call=True))
    assert needed is not None
    assert needed.kind is NotificationKind.INPUT_NEEDED


ENDED_JOB = replace(CHANGE, does_call=True, job="book_flight", reports_to=ConversationId("conv_2"), output_text="done")


@pytest.mark.parametrize(
    ("change", "title"),
    [
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
    ],
    ids=["completed", "failed", "expired", "ended by an operator"],
)
def test_the_end_of_a_job_is_of_the_conversation_that_began_it(change: RunChange, title: str) -> None:
    """ASYNC-5."""
    draft = draft_job_end(change)
    assert draft is not None
    assert (draft.kind, draft.title, draft.body) == (NotificationKind.JOB_ENDED, title, "done")
    assert (draft.run_id, draft.conversation_id) == ("run_1", "conv_2")
    assert draft_notification(change) is None


@pytest.mark.parametrize(
    "change",
    [
        CHANGE,
        replace(ENDED_JOB, reports_to=ConversationId("")),
        replace(ENDED_JOB, type="run.cancelled"),
        replace(ENDED_JOB, type="run.waiting"),
    ],
    ids=["no job", "a job that tells nobody", "a job that its user stopped", "a job that goes on"],
)
def test_what_is_no_end_of_a_job_that_somebody_must_hear_of_is_not_told_as_one(change: RunChange) -> None:
    assert draft_job_end(change) is None


def test_a_run_that_waits_for_tokens_is_told() -> None:
    draft = draft_notification(replace(CHANGE, type="run.waiting", waits=frozenset({Wait.BUDGET})))
    assert draft is not None
    assert draft.title == "Run waits for more tokens: its budget has too few left"


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
)
APPROVERS = [UserId("ann"), UserId("bob"), UserId("eve"), UserId("bob")]


def test_approvers_are_told_of_calls_of_others_and_see_nothing_of_the_conversation() -> None:
    """HITL-4: their own runs they are told of with the run."""
    drafts = draft_requests(ASKED, APPROVERS)
    assert [draft.inbox.user_id for draft in drafts] == ["bob", "eve"]
    assert {draft.kind for draft in drafts} == {NotificationKind.APPROVAL_NEEDED}
    assert {(draft.title, draft.body) for draft in drafts} == {
        ("send_email of ann awaits your approval", "An e-mail to bob")
    }
    assert {(draft.run_id, draft.call_id, draft.conversation_id) for draft in drafts} == {("run_1", "call_1", "conv_1")}
    assert {shown(draft).conversation_id for draft in drafts} == {""}
    ids = [draft.notification_id for draft in drafts]
    assert ids == [draft.notification_id for draft in draft_requests(ASKED, APPROVERS)]
    assert len(set(ids)) == 2


def test_who_has_approved_is_not_told_again() -> None:
    drafts = draft_requests(replace(ASKED, approved_by=frozenset({UserId("bob")})), APPROVERS)
    assert [draft.inbox.user_id for draft in drafts] == ["eve"]


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


def test_without_approvers_nobody_is_told() -> None:
    assert draft_requests(ASKED, []) == []


def test_a_change_of_a_run_ends_what_it_was_waited_for_and_its_end_approvals_too() -> None:
    over = Over(store_id=StoreId("acme"), run_id=RunId("run_1"), time=CHANGE.time, run_ended=True)
    assert over_by(CHANGE) == over
    assert over_by(replace(CHANGE, type="run.running")) == replace(over, run_ended=False)


def test_a_request_for_approval_and_its_end_end_the_ones_before_of_that_call_alone() -> None:
    over = Over(store_id=StoreId("acme"), run_id=RunId("run_1"), time=CHANGE.time, call_id=CallId("call_1"))
    settled = ApprovalSettled(
        time=CHANGE.time, store_id=StoreId("acme"), run_id=RunId("run_1"), call_id=CallId("call_1")
    )
    assert over_by(settled) == over
