"""What is read from a message of the life cycle."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from pawl.chassis.ids import CallId, RunId, StoreId
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.notifier.adapters.lifecycle import read_change
from pawl.notifier.app.ports import PoisonEvent
from pawl.notifier.domain.announcement import (
    ApprovalAsked,
    ApprovalSettled,
    RunChange,
    StarterPaused,
    Wait,
    draft_pause,
    over_by,
)

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
    change = read_change(SUBJECT, event().SerializeToString())
    assert isinstance(change, RunChange)
    assert (change.event_id, change.type, change.run_id) == ("evt_1", "run.waiting", "run_1")
    assert (change.inbox.store_id, change.inbox.user_id) == ("acme", "ann")
    assert change.waits == {Wait.ANSWER, Wait.TOOL_RESULT}
    assert change.time == datetime(2026, 5, 1, tzinfo=UTC)


def test_what_operators_are_wanted_for_and_did_is_read() -> None:
    message = event()
    message.run_changed.run.attention.reason = run_pb2.ATTENTION_REASON_QUARANTINED
    message.run_changed.run.stop_cause = run_pb2.STOP_CAUSE_OPERATOR
    change = read_change(SUBJECT, message.SerializeToString())
    assert isinstance(change, RunChange)
    assert (change.quarantined, change.ended_by_operator, change.superseded) == (True, True, False)


def test_a_job_does_a_call_for_its_conversation_whoever_has_begun_it() -> None:
    """So its end is told there, and not in the inbox, too."""
    message = event()
    message.run_changed.run.reports_to_conversation_id = "conv_2"
    change = read_change(SUBJECT, message.SerializeToString())
    assert isinstance(change, RunChange)
    assert change.does_call


@pytest.mark.parametrize(
    ("reports", "heard_by"),
    [(run_pb2.JOB_REPORTS_END, "conv_2"), (run_pb2.JOB_REPORTS_EVERY, "conv_2"), (run_pb2.JOB_REPORTS_NONE, "")],
)
def test_a_job_is_read_with_whom_it_tells(reports: run_pb2.JobReports.ValueType, heard_by: str) -> None:
    message = event()
    message.run_changed.run.job.tool_name = "book_flight"
    message.run_changed.run.job.reports = reports
    message.run_changed.run.reports_to_conversation_id = "conv_2"
    change = read_change(SUBJECT, message.SerializeToString())
    assert isinstance(change, RunChange)
    assert (change.job, change.reports_to) == ("book_flight", heard_by)


def test_a_wait_of_a_later_version_is_passed_over() -> None:
    message = event()
    message.run_changed.run.waits.append(99)  # type: ignore[arg-type]  # as an open enum allows
    change = read_change(SUBJECT, message.SerializeToString())
    assert isinstance(change, RunChange)
    assert change.waits == {Wait.ANSWER, Wait.TOOL_RESULT}


def test_another_event_is_no_change_of_a_run() -> None:
    message = event()
    message.warning.reason = "FINAL_ROUND"
    assert read_change(SUBJECT, message.SerializeToString()) is None


@pytest.mark.parametrize(
    "data",
    [
        b"\xff\xff\xff",
        event(user_id="").SerializeToString(),
        event(user_id="a.b").SerializeToString(),
        event(user_id="x" * 65).SerializeToString(),
    ],
    ids=["garbage", "no user", "dotted user", "long user"],
)
def test_bytes_that_make_no_sense_are_poison(data: bytes) -> None:
    with pytest.raises(PoisonEvent):
        read_change(SUBJECT, data)


def test_an_event_of_another_store_than_its_subject_is_poison() -> None:
    """I13."""
    with pytest.raises(PoisonEvent):
        read_change(SUBJECT, event(store_id="other").SerializeToString())


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
    return message


def test_a_call_that_awaits_an_approval_is_read_whole() -> None:
    found = read_change("pawl.v1.acme.lifecycle.awaiting_approval", asked().SerializeToString())
    assert isinstance(found, ApprovalAsked)
    assert (found.event_id, found.store_id, found.run_id, found.call_id) == ("evt_1", "acme", "run_1", "call_1")
    assert (found.user_id, found.tool_name, found.preview) == ("ann", "send_email", "category SENSITIVE")
    assert (found.approved_by, found.escalated) == ({"bob"}, True)


def test_another_change_of_a_call_asks_for_nothing() -> None:
    message = asked(call_pb2.CALL_STATE_RUNNING)
    assert read_change(SUBJECT, message.SerializeToString()) is None


def test_a_call_that_awaits_an_approval_no_more_is_read() -> None:
    message = asked(call_pb2.CALL_STATE_RUNNABLE)
    message.call_changed.from_state = call_pb2.CALL_STATE_AWAITING_APPROVAL
    found = read_change(SUBJECT, message.SerializeToString())
    time = datetime(2026, 5, 1, tzinfo=UTC)
    ids = (StoreId("acme"), RunId("run_1"), CallId("call_1"))
    assert found == ApprovalSettled(time=time, store_id=ids[0], run_id=ids[1], call_id=ids[2])


def test_a_call_of_nobody_is_poison() -> None:
    message = asked()
    message.call_changed.call.user_id = ""
    with pytest.raises(PoisonEvent):
        read_change(SUBJECT, message.SerializeToString())


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
