"""Rules for notifications about run events. Users are notified about their runs, and approvers about calls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.chassis.strict_json import storable
from pawl.chassis.visible import shortened, undecided, visible
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.notifier.inbox.rules import Draft, EventId, Inbox, NotificationKind, ResolvedNeed, notification_id

TITLE_BYTES_MAX: Final = 200
BODY_BYTES_MAX: Final = 2048

# Reasons for waiting that users are notified about, in order, with the wording that users see.
_WAITS: Final = {
    run_pb2.WAIT_KIND_APPROVAL: "your approval",
    run_pb2.WAIT_KIND_ANSWER: "your answer",
    run_pb2.WAIT_KIND_TOOL_RESULT: "a front end to run a tool",
    run_pb2.WAIT_KIND_BUDGET: "more tokens: its budget is nearly used up",
    run_pb2.WAIT_KIND_AGENT_QUOTA: "the next day: its agent has used up today's tokens",
    run_pb2.WAIT_KIND_STORE_DAILY_TOKENS: "the next day: its store has used up today's tokens",
    run_pb2.WAIT_KIND_STORE_MONTHLY_TOKENS: "the next month: its store has used up this month's tokens",
    run_pb2.WAIT_KIND_USER_DAILY_TOKENS: "the next day: you have used up today's tokens",
    run_pb2.WAIT_KIND_USER_MONTHLY_TOKENS: "the next month: you have used up this month's tokens",
}
_NOT_NOTIFIED: Final = frozenset(
    {
        run_pb2.WAIT_KIND_AGENT,
        run_pb2.WAIT_KIND_TIME,
        run_pb2.WAIT_KIND_PAUSED,
        run_pb2.WAIT_KIND_COMPLETION,
        run_pb2.WAIT_KIND_PROVIDER,
        run_pb2.WAIT_KIND_EVENT,
        run_pb2.WAIT_KIND_JOB,
        run_pb2.WAIT_KIND_PERSON,
        run_pb2.WAIT_KIND_RATE,
    }
)
_ENDED: Final = frozenset({"run.completed", "run.failed", "run.cancelled", "run.expired"})
_AWAITING: Final = call_pb2.CALL_STATE_AWAITING_APPROVAL


def asks(event: event_pb2.RunEvent) -> bool:
    """Return whether a call starts waiting for other users, because it was proposed, edited or escalated."""
    return _asks_in(event.call_changed.call, event.call_changed.call.state)


def concerns_others(event: event_pb2.RunEvent) -> bool:
    """Return whether a call starts or stops waiting for other users."""
    return asks(event) or _asks_in(event.call_changed.call, event.call_changed.from_state)


def _asks_in(call: call_pb2.Call, state: call_pb2.CallState.ValueType) -> bool:
    is_question_to_another = state == call_pb2.CALL_STATE_ASKED and call.asked_user_id not in {"", call.user_id}
    return state == _AWAITING or is_question_to_another


def drafts_of(event: event_pb2.RunEvent, approvers: Collection[UserId]) -> list[Draft]:
    """Return the notifications for an event, usually none. `approvers` are the approvers of its store."""
    match event.WhichOneof("kind"):
        case "run_changed":
            draft = _of_run(event)
            return [draft] if draft is not None else []
        case "call_changed" if asks(event):
            return _requests(event, approvers)
        case "starter_paused":
            paused, starter = event.starter_paused, event.type.partition(".")[0]
            title = f"Your {starter} {paused.name} has paused itself: {paused.note}"
            body = f"See why: pawl {starter}s show {paused.name}"
            return [_draft(event, UserId(paused.user_id), NotificationKind.ATTENTION_NEEDED, title, body)]
    return []


def job_end_of(event: event_pb2.RunEvent) -> Draft | None:
    """Return the notification to send if the conversation cannot report a job's end, or None if none is needed.

    A user who stopped the job is not notified.
    """
    run = event.run_changed.run
    if run.job.reports == run_pb2.JOB_REPORTS_NONE or not run.reports_to_conversation_id:
        return None
    ends = {
        "run.completed": "completed",
        "run.failed": f"failed: {run.failure.message or 'the reason is in its log'}",
        "run.expired": "expired: no answer in time",
        "run.cancelled": "was ended by an operator" if run.stop_cause == run_pb2.STOP_CAUSE_OPERATOR else "",
    }
    end = ends.get(event.type, "")
    if not end:
        return None
    title = f"{run.job.tool_name} in the background {end}"
    draft = _draft(event, UserId(run.user_id), NotificationKind.JOB_ENDED, title, _body(run.output_text))
    return replace(draft, conversation_id=ConversationId(run.reports_to_conversation_id))


def need_resolved_by(event: event_pb2.RunEvent) -> ResolvedNeed | None:
    """Return the need that an event resolves, or None. If the need persists, the user is notified again."""
    is_run = event.HasField("run_changed")
    if not is_run and not concerns_others(event):
        return None
    return ResolvedNeed(
        store_id=StoreId(event.store_id),
        run_id=RunId(event.run_id),
        time=_time(event),
        call_id=CallId(event.call_changed.call.call_id),
        run_ended=is_run and event.type in _ENDED,
    )


def _of_run(event: event_pb2.RunEvent) -> Draft | None:
    """Return the notification for a run's user.

    Return None if a newer message replaced the run, if a child run or job has ended, or if a job turn has no output.
    """
    run = event.run_changed.run
    is_of_call = bool(run.parent_run_id or run.reports_to_conversation_id)
    is_silent = run.generation > 0 and not run.output_text and event.type == "run.completed"
    if is_silent or (is_of_call and event.type in _ENDED):
        return None
    user_id, body = UserId(run.user_id), _body(run.output_text)
    match event.type:
        case "run.completed":
            return _draft(event, user_id, NotificationKind.RUN_COMPLETED, f"{_what(run)} completed", body)
        case "run.failed":
            title = f"{_what(run)} failed: {run.failure.message or 'the reason is in its log'}"
            return _draft(event, user_id, NotificationKind.RUN_FAILED, title, body)
        case "run.cancelled" if run.stop_cause != run_pb2.STOP_CAUSE_SUPERSEDED:
            by_operator = run.stop_cause == run_pb2.STOP_CAUSE_OPERATOR
            title = f"{_what(run)} {'ended by an operator' if by_operator else 'cancelled'}"
            return _draft(event, user_id, NotificationKind.RUN_CANCELLED, title, body)
        case "run.expired":
            title = f"{_what(run)} expired: no answer in time"
            return _draft(event, user_id, NotificationKind.RUN_EXPIRED, title, body)
        case "run.waiting":
            return _wait(event, run)
        case "run.needs_attention":
            return _draft(event, user_id, NotificationKind.ATTENTION_NEEDED, _attention(run), body)
    return None


def _what(run: run_pb2.Run) -> str:
    return f"Workflow {run.workflow.name}" if run.HasField("workflow") else "Run"


def _wait(event: event_pb2.RunEvent, run: run_pb2.Run) -> Draft | None:
    waits = [text for wait, text in _WAITS.items() if wait in run.waits]
    if not waits and not _NOT_NOTIFIED.isdisjoint(run.waits):
        return None
    end = undecided() if run_pb2.WAIT_KIND_APPROVAL in run.waits else ""
    title = f"{_what(run)} is waiting for {' and '.join(waits) or 'input'}"
    return _draft(event, UserId(run.user_id), NotificationKind.INPUT_NEEDED, title, _body(run.output_text, end))


def _attention(run: run_pb2.Run) -> str:
    if run.attention.reason == run_pb2.ATTENTION_REASON_QUARANTINED:
        return "Run stopped: its workers died repeatedly. An operator must investigate"
    return "Run stopped: it is unknown whether a call took effect. An operator must decide"


def _requests(event: event_pb2.RunEvent, approvers: Collection[UserId]) -> list[Draft]:
    """Return the notifications about a call for approvers who have not approved it yet.

    Users are notified about calls of their own runs when the run starts waiting, and again if there is no decision in
    time. Other approvers do not see the conversation. See `shown`.
    """
    call = event.call_changed.call
    if call.asked_user_id:
        what = "asks you a question" if call.state == call_pb2.CALL_STATE_ASKED else "awaits your approval"
        title = f"{call.user_id}'s workflow {what}"
        drafts = [_request(event, UserId(call.asked_user_id), NotificationKind.DECISION_NEEDED, title)]
        return drafts if call.asked_user_id != call.user_id else []
    knowing = {call.user_id, *(approval.user_id for approval in call.approval.approvals)}
    late = ": no decision in time" if call.approval.escalated else ""
    # A workflow's approval has no tool. Its call is named "approval".
    what = "workflow" if call.approval.cause == "workflow" else call.tool_name
    title = f"{call.user_id}'s {what} {'still ' if late else ''}awaits your approval{late}"
    others = dict.fromkeys(user_id for user_id in approvers if user_id not in knowing)
    drafts = [_request(event, user_id, NotificationKind.APPROVAL_NEEDED, title) for user_id in others]
    if late:
        title = f"Run is still waiting for an approval of {call.tool_name}{late}"
        drafts.append(_request(event, UserId(call.user_id), NotificationKind.INPUT_NEEDED, title))
    return drafts


def _request(event: event_pb2.RunEvent, user_id: UserId, kind: NotificationKind, title: str) -> Draft:
    call = event.call_changed.call
    expire_time = call.deadline_time.ToDatetime(tzinfo=UTC) if call.HasField("deadline_time") else None
    text = call.question.question or call.approval.preview or call.approval.cause
    body = _body(text, undecided(expire_time, is_extended=call.approval.escalated))
    # Each user receives a separate notification about the event.
    own_id = notification_id(EventId(f"{event.event_id}/{user_id}"))
    return replace(_draft(event, user_id, kind, title, body), notification_id=own_id, call_id=CallId(call.call_id))


def _draft(event: event_pb2.RunEvent, user_id: UserId, kind: NotificationKind, title: str, body: str) -> Draft:
    return Draft(
        inbox=Inbox(store_id=StoreId(event.store_id), user_id=user_id),
        notification_id=notification_id(EventId(event.event_id)),
        kind=kind,
        run_id=RunId(event.run_id),
        conversation_id=ConversationId(event.conversation_id),
        event_id=EventId(event.event_id),
        title=shortened(visible(" ".join(storable(title).split())), TITLE_BYTES_MAX),
        body=body,
        create_time=_time(event),
    )


def _time(event: event_pb2.RunEvent) -> datetime:
    return event.time.ToDatetime(tzinfo=UTC)


def _body(text: str, end: str = "") -> str:
    """Return the text, truncated so that `end` fits in full."""
    end = f"\n\n{end}" if end else ""
    return (shortened(visible(storable(text).strip()), BODY_BYTES_MAX - len(end)) + end).lstrip()
