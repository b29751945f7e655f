"""Rules for deliveries: links, limits, the retry schedule, and the decision before each attempt."""

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
from pawl.chassis.rpc.trace_context import TRACEPARENT_KEY
from pawl.notifier.channels.rules import KEY_GONE, UNCONFIRMED, Channel, ChannelId
from pawl.notifier.inbox.rules import Draft, EventId, Inbox, NotificationId, NotificationKind
from pawl.notifier.preferences.rules import Preferences, quiet_until


def link_to(draft: Draft, public_url: str) -> str:
    """Return the URL of the console page for the draft's call or run, or an empty string if there is no such page.

    The result is also empty without `public_url`, the address at which browsers reach the gateway.
    """
    if not public_url:
        return ""
    if draft.call_id:
        return f"{public_url}/inbox?call={draft.call_id}"
    return f"{public_url}/runs/{draft.run_id}" if draft.run_id else ""


def unsubscribe_link(public_url: str, store_id: StoreId, token: str) -> str:
    """Return the URL of an e-mail channel's unsubscribe page, or an empty string without `public_url`."""
    return f"{public_url}/unsubscribe/{store_id}/{token}" if public_url else ""


DeliveryId = NewType("DeliveryId", str)
KeyT = TypeVar("KeyT", bound=Hashable)

TITLE_CHARACTERS_MAX: Final = 200
# Counts as the host of every e-mail, because one server sends them all. Webhooks have their own hosts.
EMAIL_HOST: Final = "mailto:"
# Maximum number of e-mails to one user per hour. Further e-mails are delayed.
EMAILS_MAX_AN_HOUR: Final = 60
_EMAIL_PAUSE: Final = timedelta(minutes=5)
# Type of an e-mail with a confirmation code.
CODE: Final = "channel.code"
# Type of a test delivery.
TEST: Final = "channel.test"
# How many of a channel's test deliveries are kept when another one is created.
TESTS_KEPT: Final = 20

# When attempts are due, in seconds after the first one.
AGES: Final = (0.0, 5.0, 300.0, 1800.0, 7200.0, 18000.0, 36000.0, 50400.0, 72000.0, 86400.0)
# Pauses are randomly shortened or extended by up to this fraction.
JITTER: Final = 0.1
_PAUSES: Final = tuple(after - before for before, after in pairwise(AGES))
# Longest wait that a receiver can request with Retry-After. A longer pause in the schedule still applies.
RETRY_AFTER_SECONDS_MAX: Final = _PAUSES[-1]


# A dead delivery disables its channel if nothing has been delivered for this long.
FAILING_MAX: Final = timedelta(days=3)

# Maximum number of concurrent attempts by one process: per host, per user, per store, and in total.
TRIES_MAX_AT_ONCE: Final[Mapping[str, int]] = {"host": 16, "user": 32, "store": 64, "all": 128}

# Maximum number of concurrent attempts by one process to a channel whose last attempt failed.
FAILING_TRIES_MAX: Final = 1

_OK: Final = range(200, 300)
_GONE: Final = 410
_LATER: Final = frozenset({429, 503})


class DeliveryState(StrEnum):
    """States of a delivery. The values are stored."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    DEAD = "dead"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    delivery_id: DeliveryId
    channel_id: ChannelId
    inbox: Inbox
    host: str
    # True if the last attempt on its channel failed.
    is_failing: bool

    @property
    def slots(self) -> Mapping[str, Hashable]:
        """Slots that an attempt occupies. The keys are the same as in TRIES_MAX_AT_ONCE."""
        return {"host": self.host, "user": self.inbox, "store": self.inbox.store_id, "all": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """An attempt that a process has claimed. `secrets` sign it, newest first."""

    candidate: Candidate
    url: str
    secrets: Sequence[bytes]
    type: str
    body: str
    # Number of attempts so far, including this one.
    tries: int
    # End of the claim. It also identifies the claim, because a later claim ends later.
    claim_until: datetime
    # The user and the credential that last saved the channel.
    saved_by: Principal
    # True if an earlier claim expired without a recorded outcome. This attempt represents it and is not sent.
    is_lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of an attempt: an HTTP status, or an error if there was no status."""

    status: int = 0
    error: str = ""
    latency_seconds: float = 0.0
    # The wait that the receiver requested; None if it requested none.
    retry_after_seconds: float | None = None
    # True if a retry cannot succeed.
    is_final: bool = False
    # False if the receiver was not at fault. The attempt then does not count as a failure of the channel.
    is_receivers: bool = True

    @property
    def wait_seconds(self) -> float:
        """The delay in seconds that the receiver requested (with status 429 or 503) before the next attempt, or 0."""
        return min(self.retry_after_seconds or 0.0, RETRY_AFTER_SECONDS_MAX) if self.status in _LATER else 0.0

    @property
    def is_success(self) -> bool:
        return self.status in _OK

    @property
    def is_gone(self) -> bool:
        """True if the receiver requests that the channel be disabled."""
        return self.status == _GONE

    @property
    def message(self) -> str:
        """The reason why the attempt failed, or an empty string if it did not fail."""
        return "" if self.is_success else self.error or f"the receiver answered {self.status}"


# Outcome for a channel whose API key was deleted. The channel is disabled.
NOT_SENT: Final = Outcome(error=KEY_GONE, is_receivers=False)
# Outcome of a lost attempt. It counts, so that a delivery that crashes every process is eventually given up.
LOST: Final = Outcome(error="the notifier stopped during the attempt, or could not record its outcome")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision about a delivery and its channel. `retry_seconds` is set if the delivery will be retried."""

    state: DeliveryState
    retry_seconds: float | None = None
    disable_reason: str = ""


def judge(
    outcome: Outcome, *, tries: int, is_test: bool, enabled: bool, failing_since: datetime, now: datetime, chance: float
) -> Verdict:
    """Return the verdict on a delivery after an attempt. `chance` (between 0 and 1) varies the next pause."""
    if outcome.is_success:
        return Verdict(state=DeliveryState.DELIVERED)
    if outcome == NOT_SENT:
        return Verdict(state=DeliveryState.DEAD, disable_reason=KEY_GONE)
    if outcome.is_final:
        return _dead(is_test=is_test, failing_since=failing_since, now=now)
    if outcome.is_gone:
        return Verdict(state=DeliveryState.DEAD, disable_reason="the receiver answered 410 (gone)")
    if enabled and not is_test and tries <= len(_PAUSES):
        pause = _PAUSES[tries - 1] * (1 - JITTER + 2 * JITTER * chance)
        return Verdict(state=DeliveryState.WAITING, retry_seconds=max(pause, outcome.wait_seconds))
    return _dead(is_test=is_test, failing_since=failing_since, now=now)


def _dead(*, is_test: bool, failing_since: datetime, now: datetime) -> Verdict:
    has_failed_long = not is_test and now - failing_since >= FAILING_MAX
    reason = f"nothing could be delivered for {FAILING_MAX.days} days" if has_failed_long else ""
    return Verdict(state=DeliveryState.DEAD, disable_reason=reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A due delivery, with everything that determines whether it is sent now."""

    type: str
    # False if its e-mail address is not confirmed.
    is_confirmed: bool
    # True if the confirmation code has been used or has expired.
    code_is_void: bool
    # E-mails sent to the user within the last hour. 0 for webhooks.
    emails: int
    # True if the user requested the delivery, as a test or by resending it.
    is_requested: bool
    # True if an attempt was lost and must be counted.
    was_claimed: bool
    enabled: bool
    is_muted: bool
    is_read: bool
    # True if the need that the notification reports has been resolved.
    is_resolved: bool
    # True if the user has watched the run since the notification was created.
    is_watched: bool
    after_seconds: int
    tries: int
    create_time: datetime
    # True if the first attempt was delayed, for example by quiet hours.
    was_delayed: bool
    preferences: Preferences


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    state: DeliveryState = DeliveryState.WAITING
    reason: str = ""
    until_time: datetime | None = None

    @property
    def sends(self) -> bool:
        return self.state is DeliveryState.WAITING and self.until_time is None


def plan(due: Due, now: datetime) -> Plan:
    if due.was_claimed:
        return Plan()
    if due.type == CODE:
        return Plan(state=DeliveryState.SKIPPED, reason="the code is no longer valid") if due.code_is_void else Plan()
    if not due.is_confirmed:
        return Plan(state=DeliveryState.SKIPPED, reason=UNCONFIRMED)
    if due.is_requested:
        return Plan(until_time=_next_email(due, now))
    if not due.enabled:
        return Plan(state=DeliveryState.DEAD, reason="the channel was disabled")
    if due.is_muted:
        return Plan(state=DeliveryState.SKIPPED, reason="its conversation is muted")
    if due.preferences.kinds and due.type not in map(type_of, due.preferences.kinds):
        return Plan(state=DeliveryState.SKIPPED, reason="the user's preferences exclude its kind")
    if (due.after_seconds or due.was_delayed) and (reason := _obsolete_reason(due)):
        return Plan(state=DeliveryState.SKIPPED, reason=reason)
    first_time = due.create_time + timedelta(seconds=due.after_seconds)
    if due.tries == 0 and first_time > now:
        return Plan(until_time=first_time)
    return Plan(until_time=quiet_until(due.preferences.quiet, now) or _next_email(due, now))


def _obsolete_reason(due: Due) -> str:
    if due.is_read:
        return "it was read"
    if due.is_resolved:
        return "the user's action is no longer needed"
    return "the run was watched" if due.is_watched else ""


def _next_email(due: Due, now: datetime) -> datetime | None:
    return now + _EMAIL_PAUSE if due.emails >= EMAILS_MAX_AN_HOUR else None


def choose(candidates: Sequence[Candidate], in_progress: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates that may be attempted now, in order, given the attempts in progress."""
    taken = Counter(slot for each in in_progress for slot in each.slots.items())
    tried = Counter(each.channel_id for each in in_progress)
    chosen: list[Candidate] = []
    for candidate in candidates:
        slots = list(candidate.slots.items())
        has_room = all(taken[name, key] < TRIES_MAX_AT_ONCE[name] for name, key in slots)
        if has_room and not (candidate.is_failing and tried[candidate.channel_id] >= FAILING_TRIES_MAX):
            tried[candidate.channel_id] += 1
            taken.update(slots)
            chosen.append(candidate)
    return chosen


def crowded(keys: Iterable[KeyT], name: str) -> list[KeyT]:
    """Return the keys that have no free slot. `name` is a key in TRIES_MAX_AT_ONCE."""
    return [key for key, count in Counter(keys).items() if count >= TRIES_MAX_AT_ONCE[name]]


def type_of(kind: NotificationKind) -> str:
    """Return the message type of a notification kind, such as `run.completed`."""
    return kind.replace("_", ".")


def body_of(draft: Draft, public_url: str = "") -> str:
    """Return a notification's JSON body, including a link if there is a `public_url`. Deterministic."""
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
        TRACEPARENT_KEY: draft.traceparent,
    }
    return _body(type_of(draft.kind), draft.create_time, {name: value for name, value in data.items() if value})


def body_of_own(kind: str, inbox: Inbox, channel_id: ChannelId, now: datetime) -> str:
    """Return the body of a delivery that has no notification: a TEST or a CODE."""
    return _body(kind, now, {"store_id": inbox.store_id, "user_id": inbox.user_id, "channel_id": channel_id})


def _body(kind: str, time: datetime, data: Mapping[str, str]) -> str:
    return msgspec.json.encode({"type": kind, "timestamp": time.astimezone(UTC), "data": data}).decode()


def notice(inbox: Inbox, channel: Channel, delivery_id: DeliveryId, now: datetime) -> Draft:
    digest = hashlib.sha256(f"{channel.channel_id}/{delivery_id}/{now.isoformat()}".encode()).hexdigest()
    problem = f" was disabled: {channel.disable_reason}"
    name = (channel.name or channel.channel_id)[: TITLE_CHARACTERS_MAX - len("Channel ") - len(problem)]
    return Draft(
        inbox=inbox,
        notification_id=NotificationId(f"ntf_{digest[:40]}"),
        kind=NotificationKind.CHANNEL_DISABLED,
        channel_id=channel.channel_id,
        event_id=EventId(delivery_id),
        title=f"Channel {name}{problem}",
        create_time=now,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnDelivery:
    """A delivery that has no notification: a TEST, or a CODE derived from `secret`."""

    delivery_id: DeliveryId
    channel_id: ChannelId
    create_time: datetime
    secret: bytes
