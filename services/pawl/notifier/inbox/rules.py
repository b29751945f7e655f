"""A notification and the inbox it lies in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from typing import NewType, Self

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId

EventId = NewType("EventId", str)
NotificationId = NewType("NotificationId", str)


class NotificationKind(StrEnum):
    """The kinds of notification. The values are stored."""

    RUN_COMPLETED = "run_completed"
    RUN_FAILED = "run_failed"
    RUN_CANCELLED = "run_cancelled"
    RUN_EXPIRED = "run_expired"
    INPUT_NEEDED = "input_needed"
    ATTENTION_NEEDED = "attention_needed"
    APPROVAL_NEEDED = "approval_needed"
    CHANNEL_DISABLED = "channel_disabled"
    JOB_ENDED = "job_ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotificationKinds:
    """Kinds of notifications; none stands for all."""

    kinds: tuple[NotificationKind, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbox:
    """The notifications of one user of one store."""

    store_id: StoreId
    user_id: UserId

    @classmethod
    def of(cls, caller: Principal) -> Self:
        """Return the inbox of a caller."""
        return cls(store_id=caller.store_id, user_id=caller.user_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A notification before it has its place in the inbox.

    `notification_id` follows from the event, so the same event gives the same draft. `call_id` is the call that is to
    be decided about, `channel_id` the channel that was disabled; empty if none is.
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


def shown(draft: Draft) -> Draft:
    """Return a draft as its reader sees it: a call of somebody else without the conversation, by which it is erased."""
    if draft.kind is NotificationKind.APPROVAL_NEEDED:
        return replace(draft, conversation_id=ConversationId(""))
    return draft


@dataclass(frozen=True, slots=True, kw_only=True)
class Over:
    """A need that people were told of before `time`, and that is over: of a run, or to approve a call.

    Without `call_id` it is the run's own; with `run_ended` also that to approve calls of it.
    """

    store_id: StoreId
    run_id: RunId
    time: datetime
    call_id: CallId = CallId("")
    run_ended: bool = False


class PoisonEvent(Exception):
    """An event that cannot be read, or whose values cannot be stored."""


def notification_id(event_id: EventId) -> NotificationId:
    """Return the id of the notification about an event: always the same, whatever the form of the event's id."""
    return NotificationId(f"ntf_{hashlib.sha256(event_id.encode()).hexdigest()[:40]}")
