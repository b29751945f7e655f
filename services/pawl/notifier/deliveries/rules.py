"""Links to the gateway: to the pages that show what people are told of, and to that which ends e-mails."""

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

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import StoreId
from pawl.notifier.channels.rules import KEY_GONE, UNCONFIRMED, Channel, ChannelId
from pawl.notifier.inbox.rules import Draft, EventId, Inbox, NotificationId, NotificationKind
from pawl.notifier.preferences.rules import Preferences, quiet_until


def link_to(draft: Draft, public_url: str) -> str:
    """Return the address of the page on which a browser sees the call or the run of a draft; empty if there is none.

    Without `public_url`, under which browsers reach the gateway, there is none.
    """
    if not public_url:
        return ""
    if draft.call_id:
        return f"{public_url}/inbox?call={draft.call_id}"
    return f"{public_url}/runs/{draft.run_id}" if draft.run_id else ""


def unsubscribe_link(public_url: str, store_id: StoreId, token: str) -> str:
    """Return the address of the page that ends e-mails of a channel; empty without `public_url`."""
    return f"{public_url}/unsubscribe/{store_id}/{token}" if public_url else ""


DeliveryId = NewType("DeliveryId", str)
PlaceT = TypeVar("PlaceT", bound=Hashable)

TITLE_CHARACTERS_MAX: Final = 200
EMAIL_PLACE: Final = "mailto:"
"""The place, beside the hosts of webhooks, that tries by e-mail take: all go to one server."""
EMAILS_MAX_AN_HOUR: Final = 60
"""E-mails that a user is sent; further ones wait."""
_EMAIL_PAUSE: Final = timedelta(minutes=5)
CODE: Final = "channel.code"
"""The type of an e-mail with a code."""
TEST: Final = "channel.test"
"""The type of a test."""
TESTS_KEPT: Final = 20
"""Tests of one channel that stay when another one is made."""

AGES: Final = (0.0, 5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)
"""The times at which tries are due, in seconds after the first one."""
JITTER: Final = 0.1
"""The part of a pause by which it may be shorter or longer."""
_PAUSES: Final = tuple(after - before for before, after in pairwise(AGES))
RETRY_AFTER_SECONDS_MAX: Final = _PAUSES[-1]
"""The longest wait that a receiver can ask for; where the schedule has a longer one, that."""


FAILING_MAX: Final = timedelta(days=3)
"""The time without success after which a delivery that is given up disables its channel."""

TRIES_MAX_AT_ONCE: Final[Mapping[str, int]] = {"host": 16, "user": 32, "store": 64, "all": 128}
"""Tries of one process at the same time: to one host, of one user, of one store, and of all."""

FAILING_TRIES_MAX: Final = 1
"""Tries of one process at the same time to a channel whose last one failed."""

_OK: Final = range(200, 300)
_GONE: Final = 410
_LATER: Final = frozenset({429, 503})


class DeliveryState(StrEnum):
    """The states of a delivery. The values are stored."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    DEAD = "dead"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A delivery that is due."""

    delivery_id: DeliveryId
    channel_id: ChannelId
    inbox: Inbox
    host: str
    is_failing: bool
    """True if the last try for its channel failed."""

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
    saved_by: Principal
    """Its user, with the credential that saved the channel last."""
    is_lost: bool = False
    """True if another claim of it is over, and nobody wrote what came of that: it is this try, which is not sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of a try: a status, or an error where there was none."""

    status: int = 0
    error: str = ""
    latency_seconds: float = 0.0
    retry_after_seconds: float | None = None
    """The wait that the receiver asks for."""
    is_final: bool = False
    """True if there is no use in trying again."""
    is_receivers: bool = True
    """False if the receiver had no part in it, so that it is no failure of the channel."""

    @property
    def wait_seconds(self) -> float:
        """The shortest wait before the next try, if the receiver is one that may ask for it; else 0."""
        return min(self.retry_after_seconds or 0.0, RETRY_AFTER_SECONDS_MAX) if self.status in _LATER else 0.0

    @property
    def is_success(self) -> bool:
        """True if the receiver has the message."""
        return self.status in _OK

    @property
    def is_gone(self) -> bool:
        """True if the receiver wants no more of the channel."""
        return self.status == _GONE

    @property
    def message(self) -> str:
        """The reason why it failed; empty if it did not."""
        return "" if self.is_success else self.error or f"the receiver answered {self.status}"


NOT_SENT: Final = Outcome(error=KEY_GONE, is_receivers=False)
"""The outcome of a try for a channel whose API key is gone: its channel is disabled."""
LOST: Final = Outcome(error="the notifier ended while it was tried, or could not write what came of it")
"""The outcome of a try that was lost: it counts, so that one which nobody survives is given up in the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision on a delivery and its channel. `retry_seconds` is there while the delivery waits."""

    state: DeliveryState
    retry_seconds: float | None = None
    disable_reason: str = ""


def judge(
    outcome: Outcome, *, tries: int, is_test: bool, enabled: bool, failing_since: datetime, now: datetime, chance: float
) -> Verdict:
    """Return what becomes of a delivery after a try. `chance` is from 0 to 1 and moves the next one."""
    if outcome.is_success:
        return Verdict(state=DeliveryState.DELIVERED)
    if outcome == NOT_SENT:
        return Verdict(state=DeliveryState.DEAD, disable_reason=KEY_GONE)
    if outcome.is_final:
        return _given_up(is_test=is_test, failing_since=failing_since, now=now)
    if outcome.is_gone:
        return Verdict(state=DeliveryState.DEAD, disable_reason="its receiver says that it is gone (status 410)")
    if enabled and not is_test and tries <= len(_PAUSES):
        pause = _PAUSES[tries - 1] * (1 - JITTER + 2 * JITTER * chance)
        return Verdict(state=DeliveryState.WAITING, retry_seconds=max(pause, outcome.wait_seconds))
    return _given_up(is_test=is_test, failing_since=failing_since, now=now)


def _given_up(*, is_test: bool, failing_since: datetime, now: datetime) -> Verdict:
    has_failed_long = not is_test and now - failing_since >= FAILING_MAX
    reason = f"nothing could be delivered for {FAILING_MAX.days} days" if has_failed_long else ""
    return Verdict(state=DeliveryState.DEAD, disable_reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A delivery that is due, and what decides on whether it is sent now."""

    type: str
    is_confirmed: bool
    """False if it would go to an address that is not confirmed."""
    code_is_over: bool
    """True if a code is good for nothing any more."""
    emails: int
    """The e-mails that its user was sent within the last hour; 0 if it is none."""
    is_asked: bool
    """True if its user asked for it: a test, or one that is sent again."""
    was_claimed: bool
    """True if a try of it was lost, which is to be counted."""
    enabled: bool
    is_muted: bool
    is_read: bool
    is_over: bool
    """True if its user is needed no more for what it tells."""
    is_watched: bool
    """True if its user has confirmed since that they saw the run."""
    after_seconds: int
    tries: int
    create_time: datetime
    was_put_off: bool
    """True if it waited for its first try, for the end of quiet hours for example."""
    preferences: Preferences


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The plan for a delivery that is due: it is sent if it waits, and not until a time."""

    state: DeliveryState = DeliveryState.WAITING
    reason: str = ""
    until_time: datetime | None = None

    @property
    def sends(self) -> bool:
        """True if it is sent now."""
        return self.state is DeliveryState.WAITING and self.until_time is None


def plan(due: Due, now: datetime) -> Plan:
    """Return what is done with a delivery that is due."""
    if due.was_claimed:
        return Plan()
    if due.type == CODE:
        return Plan(state=DeliveryState.SKIPPED, reason="the code is no longer good") if due.code_is_over else Plan()
    if not due.is_confirmed:
        return Plan(state=DeliveryState.SKIPPED, reason=UNCONFIRMED)
    if due.is_asked:
        return Plan(until_time=_next_email(due, now))
    if not due.enabled:
        return Plan(state=DeliveryState.DEAD, reason="the channel was disabled")
    if due.is_muted:
        return Plan(state=DeliveryState.SKIPPED, reason="its conversation is muted")
    if due.preferences.kinds and due.type not in map(type_of, due.preferences.kinds):
        return Plan(state=DeliveryState.SKIPPED, reason="its kind is not wanted")
    if (due.after_seconds or due.was_put_off) and (reason := _of_no_use(due)):
        return Plan(state=DeliveryState.SKIPPED, reason=reason)
    first_time = due.create_time + timedelta(seconds=due.after_seconds)
    if due.tries == 0 and first_time > now:
        return Plan(until_time=first_time)
    return Plan(until_time=quiet_until(due.preferences.quiet, now) or _next_email(due, now))


def _of_no_use(due: Due) -> str:
    """Return why its user has no use any more for what was told to the inbox; empty if there is some."""
    if due.is_read:
        return "it was read"
    if due.is_over:
        return "nobody is needed any more"
    return "the run was watched" if due.is_watched else ""


def _next_email(due: Due, now: datetime) -> datetime | None:
    """Return when a delivery is looked at again, if its user was sent enough; None if it may be sent now."""
    return now + _EMAIL_PAUSE if due.emails >= EMAILS_MAX_AN_HOUR else None


def choose(candidates: Sequence[Candidate], at_work: Sequence[Candidate]) -> list[Candidate]:
    """Return those that may be tried now, beside those at work, in their order."""
    taken = Counter(place for each in at_work for place in each.places.items())
    tried = Counter(each.channel_id for each in at_work)
    chosen: list[Candidate] = []
    for candidate in candidates:
        places = list(candidate.places.items())
        has_room = all(taken[name, place] < TRIES_MAX_AT_ONCE[name] for name, place in places)
        if has_room and not (candidate.is_failing and tried[candidate.channel_id] >= FAILING_TRIES_MAX):
            tried[candidate.channel_id] += 1
            taken.update(places)
            chosen.append(candidate)
    return chosen


def crowded(places: Iterable[PlaceT], name: str) -> list[PlaceT]:
    """Return the places of those at work at which nothing more may be tried now, by a name of TRIES_MAX_AT_ONCE."""
    return [place for place, count in Counter(places).items() if count >= TRIES_MAX_AT_ONCE[name]]


def type_of(kind: NotificationKind) -> str:
    """Return the type of messages that tell a kind: `run.completed`."""
    return kind.replace("_", ".")


def body_of(draft: Draft, public_url: str = "") -> str:
    """Return the body that tells a notification: JSON, always the same; with a link if browsers have a way here."""
    data = {
        "notification_id": draft.notification_id,
        "store_id": draft.inbox.store_id,
        "user_id": draft.inbox.user_id,
        "run_id": draft.run_id,
        "conversation_id": draft.conversation_id,
        "call_id": draft.call_id,
        "channel_id": draft.channel_id,
        "event_id": draft.event_id,
        "title": draft.title,
        "body": draft.body,
        "url": link_to(draft, public_url),
    }
    return _body(type_of(draft.kind), draft.create_time, {name: value for name, value in data.items() if value})


def body_of_own(kind: str, inbox: Inbox, channel_id: ChannelId, now: datetime) -> str:
    """Return the body of what tells no notification: of a TEST or a CODE."""
    return _body(kind, now, {"store_id": inbox.store_id, "user_id": inbox.user_id, "channel_id": channel_id})


def _body(kind: str, time: datetime, data: Mapping[str, str]) -> str:
    return msgspec.json.encode({"type": kind, "timestamp": time.astimezone(UTC), "data": data}).decode()


def notice(inbox: Inbox, channel: Channel, delivery_id: DeliveryId, now: datetime) -> Draft:
    """Return what a user is told of a channel that was disabled."""
    digest = hashlib.sha256(f"{channel.channel_id}/{delivery_id}/{now.isoformat()}".encode()).hexdigest()
    told = f" was disabled: {channel.disable_reason}"
    name = (channel.name or channel.channel_id)[: TITLE_CHARACTERS_MAX - len("Channel ") - len(told)]
    return Draft(
        inbox=inbox,
        notification_id=NotificationId(f"ntf_{digest[:40]}"),
        kind=NotificationKind.CHANNEL_DISABLED,
        channel_id=channel.channel_id,
        event_id=EventId(delivery_id),
        title=f"Channel {name}{told}",
        create_time=now,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDelivery:
    """A delivery to a channel that is about no notification: a TEST, or a CODE that is made with the secret."""

    delivery_id: DeliveryId
    channel_id: ChannelId
    create_time: datetime
    secret: bytes
