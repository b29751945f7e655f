"""Notifications and inboxes."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import Final, NewType, Self

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId

EventId = NewType("EventId", str)
NotificationId = NewType("NotificationId", str)


class NotificationKind(StrEnum):
    """Kinds of notifications. The values are stored."""

    RUN_COMPLETED = "run_completed"
    RUN_FAILED = "run_failed"
    RUN_CANCELLED = "run_cancelled"
    RUN_EXPIRED = "run_expired"
    INPUT_NEEDED = "input_needed"
    ATTENTION_NEEDED = "attention_needed"
    APPROVAL_NEEDED = "approval_needed"
    CHANNEL_DISABLED = "channel_disabled"
    JOB_ENDED = "job_ended"
    DECISION_NEEDED = "decision_needed"


# Notifications about a call of another user, whose conversation is private.
OF_OTHERS: Final = frozenset({NotificationKind.APPROVAL_NEEDED, NotificationKind.DECISION_NEEDED})


@dataclass(frozen=True, slots=True, kw_only=True)
class NotificationKinds:
    """Kinds of notifications. Empty means all."""

    kinds: tuple[NotificationKind, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbox:
    """The notifications of one user in a store."""

    store_id: StoreId
    user_id: UserId

    @classmethod
    def of(cls, caller: Principal) -> Self:
        return cls(store_id=caller.store_id, user_id=caller.user_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A notification before it has a number in its inbox.

    `notification_id` is derived from the event, so the same event always produces the same draft. `call_id` is the call
    to decide on, and `channel_id` is the disabled channel. Both may be empty.
    """

    inbox: Inbox
    notification_id: NotificationId
    kind: NotificationKind
    event_id: EventId
    title: str
    create_time: datetime
    body: str = ""
    run_id: RunId = RunId("")
    conversation_id: ConversationId = ConversationId("")
    call_id: CallId = CallId("")
    channel_id: str = ""
    traceparent: str = ""


def shown(draft: Draft) -> Draft:
    """Return a draft as channels show it. If it is about another user's call, it has no conversation id.

    In that case, the conversation belongs to the other user. The inbox still stores the conversation id, so that
    erasing the conversation also erases the notification.
    """
    if draft.kind in OF_OTHERS:
        return replace(draft, conversation_id=ConversationId(""))
    return draft


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedNeed:
    """A need for user action that no longer exists. It applies to notifications created before `time`.

    If `call_id` is set, that call had to be approved. Otherwise, the run itself needed the user. With `run_ended`, the
    approvals of all the run's calls are no longer needed either.
    """

    store_id: StoreId
    run_id: RunId
    time: datetime
    call_id: CallId = CallId("")
    run_ended: bool = False


class PoisonEvent(Exception):
    """Raised for an event that cannot be parsed, or whose values cannot be stored."""


def notification_id(event_id: EventId) -> NotificationId:
    """Return the id of the notification about an event. Deterministic, and valid for any event id."""
    return NotificationId(f"ntf_{hashlib.sha256(event_id.encode()).hexdigest()[:40]}")
