"""The changes of a run that are told to its user, and the calls that are told to who may approve them."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final, TypeAlias

from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.chassis.strict_json import storable
from pawl.chassis.visible import shortened, undecided, visible
from pawl.notifier.domain.notification import Draft, EventId, Inbox, NotificationId, NotificationKind
from pawl.values import WaitKind

TITLE_BYTES_MAX: Final = 200
BODY_BYTES_MAX: Final = 2048


_WAITS: Final = {
    WaitKind.APPROVAL: "your approval",
    WaitKind.ANSWER: "your answer",
    WaitKind.TOOL_RESULT: "a front end to run a tool",
    WaitKind.BUDGET: "more tokens: its budget has too few left",
    WaitKind.AGENT_QUOTA: "the next day: its agent has used up its tokens of this one",
}
"""What a user can do something about, or is told, in the words of the notification."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunChange:
    """A run has reached a state, as the life cycle tells it.

    `type` is that of the event (`run.completed`). `output_text` is the answer, partial
    unless the run completed.
    """

    event_id: EventId
    type: str
    time: datetime
    inbox: Inbox
    run_id: RunId
    conversation_id: ConversationId
    waits: AbstractSet[WaitKind] = frozenset()
    superseded: bool = False
    ended_by_operator: bool = False
    quarantined: bool = False
    failure_message: str = ""
    output_text: str = ""
    does_call: bool = False
    """True if it does a call of another run, which goes on with its end."""
    is_turn: bool = False
    """True if a job has begun it, and no message."""
    job: str = ""
    """The tool of a job; empty of what is none."""
    reports_to: ConversationId = ConversationId("")
    """The conversation that is told of the end of a job; empty if none is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApprovalAsked:
    """A call is put to people who may approve it: for the first time, edited, or once more, as nobody decided in time.

    `user_id` is whose run it is; `approved_by` are those who have approved it so far.
    """

    event_id: EventId
    time: datetime
    store_id: StoreId
    user_id: UserId
    run_id: RunId
    call_id: CallId
    conversation_id: ConversationId
    tool_name: str
    preview: str = ""
    approved_by: AbstractSet[UserId] = frozenset()
    escalated: bool = False
    expire_time: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """A need that people were told of before `time`, and that is over: that of a run, or that to approve a call.

    Without `call_id` it is the run's own; with `run_ended` also that to approve calls of it.
    """

    store_id: StoreId
    run_id: RunId
    time: datetime
    call_id: CallId = CallId("")
    run_ended: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StarterPaused:
    """A schedule or a trigger of a user has paused itself; `starter` says which of both."""

    event_id: EventId
    time: datetime
    inbox: Inbox
    starter: str
    name: str
    note: str


Change: TypeAlias = RunChange | ApprovalAsked | Over | StarterPaused

_ENDED: Final = frozenset({"run.completed", "run.failed", "run.cancelled", "run.expired"})


def draft_notification(change: RunChange) -> Draft | None:
    """Return what the user is told about `change`, or None: most changes concern nobody.

    A run that a newer message of its user replaced is not told: the user did it. Nor
    is what runs are to each other: that one waits for another, or has done its call; nor that the model had nothing to
    say of what a job came to.
    """
    says_nothing = change.is_turn and not change.output_text and change.type == "run.completed"
    if says_nothing or (change.does_call and change.type in _ENDED):
        return None
    match change.type:
        case "run.completed":
            return _draft(change, NotificationKind.RUN_COMPLETED, "Run completed")
        case "run.failed":
            reason = change.failure_message or "the reason is in its log"
            return _draft(change, NotificationKind.RUN_FAILED, f"Run failed: {reason}")
        case "run.cancelled" if not change.superseded:
            title = "Run ended by an operator" if change.ended_by_operator else "Run cancelled"
            return _draft(change, NotificationKind.RUN_CANCELLED, title)
        case "run.expired":
            return _draft(change, NotificationKind.RUN_EXPIRED, "Run expired: nobody answered in time")
        case "run.waiting" if not change.waits or not change.waits.isdisjoint(_WAITS):
            waits = " and ".join(words for wait, words in _WAITS.items() if wait in change.waits) or "input"
            draft = _draft(change, NotificationKind.INPUT_NEEDED, f"Run waits for {waits}")
            asks = WaitKind.APPROVAL in change.waits
            return replace(draft, body=_body(change.output_text, undecided())) if asks else draft
        case "run.needs_attention":
            return _draft(change, NotificationKind.ATTENTION_NEEDED, _attention(change))
        case _:
            return None


def draft_job_end(change: RunChange) -> Draft | None:
    """Return what a user is told of the end of a job if its conversation cannot speak of it; None if nobody need be.

    Who has stopped it knows.
    """
    ends = {
        "run.completed": "completed",
        "run.failed": f"failed: {change.failure_message or 'the reason is in its log'}",
        "run.expired": "expired: nobody answered in time",
        "run.cancelled": "was ended by an operator" if change.ended_by_operator else "",
    }
    end = ends.get(change.type, "") if change.reports_to else ""
    if not end:
        return None
    draft = _draft(change, NotificationKind.JOB_ENDED, f"{change.job} in the background {end}")
    return replace(draft, conversation_id=change.reports_to)


def draft_pause(paused: StarterPaused) -> Draft:
    """Return what a user is told whose schedule or trigger starts no runs any more."""
    return Draft(
        inbox=paused.inbox,
        notification_id=notification_id(paused.event_id),
        kind=NotificationKind.ATTENTION_NEEDED,
        event_id=paused.event_id,
        title=_line(f"Your {paused.starter} {paused.name} has paused itself: {paused.note}"),
        body=f"See why: pawl {paused.starter}s show {paused.name}",
        create_time=paused.time,
    )


def draft_requests(asked: ApprovalAsked, approvers: Collection[UserId]) -> list[Draft]:
    """Return what `approvers` of the store are told about a call, but for those who have approved it.

    Of their own runs users are told with the run that waits, and once more when nobody decided in time. Others see
    nothing of the conversation: see `shown`.
    """
    late = ": nobody decided in time" if asked.escalated else ""
    title = f"{asked.tool_name} of {asked.user_id} {'still ' if late else ''}awaits your approval{late}"
    others = dict.fromkeys(user_id for user_id in approvers if user_id not in {asked.user_id, *asked.approved_by})
    drafts = [_request(asked, user_id, NotificationKind.APPROVAL_NEEDED, title) for user_id in others]
    if asked.escalated:
        title = f"Run still waits for an approval of {asked.tool_name}{late}"
        drafts.append(_request(asked, asked.user_id, NotificationKind.INPUT_NEEDED, title))
    return drafts


def over_by(change: Change) -> Over | None:
    """Return the need that is over with a change, if one is: one that still is there is told anew."""
    if isinstance(change, StarterPaused | Over):
        return change if isinstance(change, Over) else None
    if isinstance(change, RunChange):
        ended = change.type in _ENDED
        return Over(store_id=change.inbox.store_id, run_id=change.run_id, time=change.time, run_ended=ended)
    return Over(store_id=change.store_id, run_id=change.run_id, time=change.time, call_id=change.call_id)


def _request(asked: ApprovalAsked, user_id: UserId, kind: NotificationKind, title: str) -> Draft:
    return Draft(
        inbox=Inbox(store_id=asked.store_id, user_id=user_id),
        # Of one event each user has a notification of their own.
        notification_id=notification_id(EventId(f"{asked.event_id}/{user_id}")),
        kind=kind,
        run_id=asked.run_id,
        conversation_id=asked.conversation_id,
        call_id=asked.call_id,
        event_id=asked.event_id,
        title=_line(title),
        body=_body(asked.preview, undecided(asked.expire_time)),
        create_time=asked.time,
    )


def _attention(change: RunChange) -> str:
    if change.quarantined:
        return "Run stopped: its workers died, and an operator must look at it"
    return "Run stopped: it is unknown whether a call had its effect, and an operator must say"


def notification_id(event_id: EventId) -> NotificationId:
    """Return the id of the notification about an event: always the same, whatever the form of the event's id."""
    return NotificationId(f"ntf_{hashlib.sha256(event_id.encode()).hexdigest()[:40]}")


def _draft(change: RunChange, kind: NotificationKind, title: str) -> Draft:
    return Draft(
        inbox=change.inbox,
        notification_id=notification_id(change.event_id),
        kind=kind,
        run_id=change.run_id,
        conversation_id=change.conversation_id,
        event_id=change.event_id,
        title=_line(title),
        body=_body(change.output_text),
        create_time=change.time,
    )


def _line(text: str) -> str:
    return shortened(visible(" ".join(storable(text).split())), TITLE_BYTES_MAX)


def _body(text: str, end: str = "") -> str:
    """Return the text, shortened so that `end` fits whole."""
    end = f"\n\n{end}" if end else ""
    return (shortened(visible(storable(text).strip()), BODY_BYTES_MAX - len(end)) + end).lstrip()
