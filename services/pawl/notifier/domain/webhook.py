"""Webhooks of users, and what becomes of a delivery after each try."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from itertools import pairwise
from typing import Final, NewType, TypeVar

import msgspec

from pawl.errors import InvalidField
from pawl.notifier.domain.notification import Draft, EventId, Inbox, NotificationId, NotificationKind

WebhookId = NewType("WebhookId", str)
DeliveryId = NewType("DeliveryId", str)
PlaceT = TypeVar("PlaceT", bound=Hashable)

WEBHOOKS_MAX: Final = 10
"""Webhooks of one user."""
NAME_CHARACTERS_MAX: Final = 200
TITLE_CHARACTERS_MAX: Final = 200
URL_CHARACTERS_MAX: Final = 2048
FORMER_SECRETS_MAX: Final = 4
FORMER_SECRET_SECONDS: Final = 86400.0
"""The time for which a secret that was replaced still signs."""
TEST: Final = "webhook.test"
"""The type of a test."""
TESTS_KEPT: Final = 20
"""Tests of one webhook that stay when another one is made."""

AGES: Final = (0.0, 5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)
"""The times at which tries are due, in seconds after the first one."""
JITTER: Final = 0.1
"""The part of a pause by which it may be shorter or longer."""
_PAUSES: Final = tuple(after - before for before, after in pairwise(AGES))

FAILING_MAX: Final = timedelta(days=3)
"""The time without success after which a delivery that is given up disables its webhook."""

TRIES_MAX_AT_ONCE: Final[Mapping[str, int]] = {"host": 16, "user": 32, "store": 64, "all": 128}
"""Tries of one process at the same time: to one host, of one user, of one store, and of all."""

FAILING_TRIES_MAX: Final = 1
"""Tries of one process at the same time to a webhook whose last one failed."""

_OK: Final = range(200, 300)
_GONE: Final = 410


class DeliveryState(StrEnum):
    """The states of a delivery. The values are stored."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Webhook:
    """A place where a user is told. Without `kinds` it is told everything."""

    webhook_id: WebhookId
    name: str
    url: str
    kinds: tuple[NotificationKind, ...] = ()
    enabled: bool = True
    disable_reason: str = ""
    create_time: datetime | None = None
    failing_since_time: datetime | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WebhookDelivery:
    """A message to a webhook, as its user sees it. `number` is that of its notification, 0 for a test."""

    delivery_id: DeliveryId
    webhook_id: WebhookId
    type: str
    number: int
    state: DeliveryState
    tries: int
    create_time: datetime
    try_time: datetime | None = None
    next_try_time: datetime | None = None
    status: int = 0
    latency_milliseconds: int = 0
    last_error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A delivery that is due."""

    delivery_id: DeliveryId
    webhook_id: WebhookId
    inbox: Inbox
    host: str
    is_failing: bool
    """True if the last try for its webhook failed."""

    @property
    def places(self) -> Mapping[str, Hashable]:
        """The places that a try of it takes, by the names of TRIES_MAX_AT_ONCE."""
        return {"host": self.host, "user": self.inbox, "store": self.inbox.store_id, "all": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A try of a delivery that a process has claimed; `secrets` sign it, the newest first."""

    candidate: Candidate
    url: str
    secrets: Sequence[bytes]
    type: str
    body: str
    tries: int
    """Tries so far, this one included."""
    claim_until: datetime
    """The end of the claim, which stands for it: who claims it later has another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a try: a status, or an error where there was none."""

    status: int = 0
    error: str = ""
    latency_seconds: float = 0.0

    @property
    def is_success(self) -> bool:
        """True if the receiver has the message."""
        return self.status in _OK

    @property
    def is_gone(self) -> bool:
        """True if the receiver wants no more of the webhook."""
        return self.status == _GONE

    @property
    def message(self) -> str:
        """The reason why it failed; empty if it did not."""
        return "" if self.is_success else self.error or f"the receiver answered {self.status}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision on a delivery and its webhook. `retry_seconds` is there while the delivery waits."""

    state: DeliveryState
    retry_seconds: float | None = None
    disable_reason: str = ""


def judge(
    outcome: Outcome, *, tries: int, is_test: bool, enabled: bool, failing_since: datetime, now: datetime, chance: float
) -> Verdict:
    """Return what becomes of a delivery after a try. `chance` is from 0 to 1 and moves the next one."""
    if outcome.is_success:
        return Verdict(state=DeliveryState.DELIVERED)
    if outcome.is_gone:
        return Verdict(state=DeliveryState.DEAD, disable_reason="its receiver says that it is gone (status 410)")
    if enabled and not is_test and tries <= len(_PAUSES):
        pause = _PAUSES[tries - 1] * (1 - JITTER + 2 * JITTER * chance)
        return Verdict(state=DeliveryState.WAITING, retry_seconds=pause)
    has_failed_long = not is_test and now - failing_since >= FAILING_MAX
    reason = f"nothing could be delivered for {FAILING_MAX.days} days" if has_failed_long else ""
    return Verdict(state=DeliveryState.DEAD, disable_reason=reason)


def choose(candidates: Sequence[Candidate], at_work: Sequence[Candidate]) -> list[Candidate]:
    """Return those that may be tried now, beside those at work, in their order."""
    taken = Counter(place for each in at_work for place in each.places.items())
    tried = Counter(each.webhook_id for each in at_work)
    chosen: list[Candidate] = []
    for candidate in candidates:
        places = list(candidate.places.items())
        has_room = all(taken[name, place] < TRIES_MAX_AT_ONCE[name] for name, place in places)
        if has_room and not (candidate.is_failing and tried[candidate.webhook_id] >= FAILING_TRIES_MAX):
            tried[candidate.webhook_id] += 1
            taken.update(places)
            chosen.append(candidate)
    return chosen


def crowded(places: Iterable[PlaceT], name: str) -> list[PlaceT]:
    """Return the places of those at work at which nothing more may be tried now, by a name of TRIES_MAX_AT_ONCE."""
    return [place for place, count in Counter(places).items() if count >= TRIES_MAX_AT_ONCE[name]]


def type_of(kind: NotificationKind) -> str:
    """Return the type of messages that tell a kind: `run.completed`."""
    return kind.replace("_", ".")


def body_of(draft: Draft) -> str:
    """Return the body that tells a notification: JSON, always the same."""
    data = {
        "notification_id": draft.notification_id,
        "store_id": draft.inbox.store_id,
        "user_id": draft.inbox.user_id,
        "run_id": draft.run_id,
        "conversation_id": draft.conversation_id,
        "call_id": draft.call_id,
        "webhook_id": draft.webhook_id,
        "event_id": draft.event_id,
        "title": draft.title,
        "body": draft.body,
    }
    return _body(type_of(draft.kind), draft.create_time, {name: value for name, value in data.items() if value})


def body_of_test(inbox: Inbox, webhook_id: WebhookId, now: datetime) -> str:
    """Return the body of a test."""
    return _body(TEST, now, {"store_id": inbox.store_id, "user_id": inbox.user_id, "webhook_id": webhook_id})


def _body(kind: str, time: datetime, data: Mapping[str, str]) -> str:
    return msgspec.json.encode({"type": kind, "timestamp": time.astimezone(UTC), "data": data}).decode()


def notice(inbox: Inbox, webhook: Webhook, delivery_id: DeliveryId, now: datetime) -> Draft:
    """Return what a user is told of a webhook that was disabled."""
    digest = hashlib.sha256(f"{webhook.webhook_id}/{delivery_id}/{now.isoformat()}".encode()).hexdigest()
    told = f" was disabled: {webhook.disable_reason}"
    name = (webhook.name or webhook.webhook_id)[: TITLE_CHARACTERS_MAX - len("Webhook ") - len(told)]
    return Draft(
        inbox=inbox,
        notification_id=NotificationId(f"ntf_{digest[:40]}"),
        kind=NotificationKind.WEBHOOK_DISABLED,
        webhook_id=webhook.webhook_id,
        event_id=EventId(delivery_id),
        title=f"Webhook {name}{told}",
        create_time=now,
    )


def checked(webhook: Webhook) -> Webhook:
    """Return a webhook that a user asked for, if it has a meaning; its URL is judged elsewhere.

    Raises:
        InvalidField: it has none.
    """
    if len(webhook.name) > NAME_CHARACTERS_MAX or not webhook.name.isprintable():
        raise InvalidField(f"name must be at most {NAME_CHARACTERS_MAX} printable characters", field="webhook.name")
    if not 0 < len(webhook.url) <= URL_CHARACTERS_MAX:
        raise InvalidField(f"url must have 1 to {URL_CHARACTERS_MAX} characters", field="webhook.url")
    if len(set(webhook.kinds)) != len(webhook.kinds):
        raise InvalidField("kinds must differ from each other", field="webhook.kinds")
    return webhook
