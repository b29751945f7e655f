"""Triggers, and the events that fire them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from enum import IntEnum
from typing import Any, Final, TypeAlias

import msgspec
from msgspec.structs import asdict, replace

from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import ConversationId, RunId, StoreId
from pawl.errors import InvalidField, PermissionDenied, TooLarge, TriggerExists, TriggerNotFound
from pawl.job_store.schedules import rules as schedules
from pawl.job_store.schedules.rules import FireOutcome, FireRow, Owner, StarterRow
from pawl.values import Overlap

TRIGGERS_MAX: Final = 100
"""Most triggers of a user."""
DEBOUNCE_SECONDS_MAX: Final = 3600
DEBOUNCES_MAX: Final = 10
"""Events that go on coming are put off so often."""
POINTER_CHARACTERS_MAX: Final = 256
DATA_BYTES_MAX: Final = 256 * 1024
EVENTS_SECONDS: Final = 3 * 86400.0
"""The time for which it is known that an event came."""
FORMER_SECRETS_MAX: Final = 4
FORMER_SECRET_TIME: Final = timedelta(days=1)
"""The time for which a secret that was replaced still counts."""
POLL_SECONDS_RANGE: Final = range(15, 3601)
MAILBOX_LEASE_TIME: Final = timedelta(seconds=30)
"""The time for which one process reads a mailbox unless it renews its lease."""
LEASED_MAX: Final = 200
"""Most mailboxes of one process."""
UNREACHABLE_TIME: Final = timedelta(hours=12)
"""A trigger whose mailbox could not be read for so long pauses itself."""
UNREACHABLE_GAP_TIME: Final = timedelta(hours=2)
"""After a longer time without a report that time starts again. Polls that fail are up to an hour apart."""
REFUSALS_TIME: Final = timedelta(minutes=1)
"""The time between two writes of deliveries that were refused."""
REASON_CHARACTERS_MAX: Final = 300
SECRET_CHARACTERS_MAX: Final = 64
SENDERS_MAX: Final = 100
_PORT_MAX: Final = 65535
_HOST: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,252})|[0-9A-Fa-f:.]{2,45}")
_NAME: Final = re.compile(r"[ -~]{1,256}")
_FOLDER: Final = re.compile(r"[ !#-\[\]-~]{1,256}")
_TOKEN: Final = re.compile(r"[A-Za-z0-9._-]{1,253}")
_SENDER: Final = re.compile(r"[!-~]{0,64}@[A-Za-z0-9.-]{1,253}")
PLACEHOLDER: Final = "{{event}}"


class TriggerKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The key of a trigger."""

    store_id: StoreId
    trigger_id: str


class MailPosition(msgspec.Struct, frozen=True, kw_only=True):
    """A position in a folder, by the UIDs of IMAP."""

    uid_validity: int
    uid: int


class EventKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The key of an event."""

    store_id: StoreId
    trigger_id: str
    event_id: str


class LaneKey(msgspec.Struct, frozen=True, order=True, gc=False):
    """The key of a lane."""

    store_id: StoreId
    trigger_id: str
    lane: str


class Authentication(IntEnum):
    """The way in which the sender of a webhook shows that it may fire a trigger."""

    SIGNATURE = 1
    BEARER = 2


class WebhookSource(msgspec.Struct, frozen=True, kw_only=True):
    """Webhooks as events."""

    authentication: Authentication = Authentication.SIGNATURE


class MailboxSource(msgspec.Struct, frozen=True, kw_only=True):
    """Mails as events. 0 and empty stand for the defaults."""

    host: str
    port: int = 0
    plaintext: bool = False
    username: str
    password_secret: str
    folder: str = ""
    poll_seconds: int = 0
    authserv_id: str = ""
    senders: tuple[str, ...] = ()

    @property
    def place(self) -> tuple[object, ...]:
        """The folder whose mails have positions of their own."""
        return self.host, self.port, self.plaintext, self.username, self.folder


class TriggerDefinition(msgspec.Struct, frozen=True, kw_only=True):
    """The work of a trigger, and which events fire it."""

    name: str
    text: str
    agent: str = ""
    labels: Mapping[str, str] = {}
    conversation_key: str = ""
    conversation_pointer: str = ""
    concurrency_pointer: str = ""
    debounce_seconds: int = 0
    overlap: Overlap = Overlap.ALLOW
    webhook: WebhookSource | None = None
    mailbox: MailboxSource | None = None


class FormerSecret(msgspec.Struct, frozen=True):
    """A secret that counts until some time."""

    secret: bytes
    until: datetime


class TriggerRow(StarterRow, frozen=True, kw_only=True):
    """A trigger. What can make it judge an event otherwise has a `generation` of its own: a fire has none."""

    trigger_id: str
    definition: TriggerDefinition
    secret: bytes = b""
    former_secrets: tuple[FormerSecret, ...] = ()
    """The newest first."""
    claim_at: datetime | None = None
    """The end of the lease of its mailbox; None for webhooks and while it pauses."""
    uid_validity: int = 0
    last_uid: int = 0
    """The last mail that was delivered."""
    unreachable_time: datetime | None = None
    unreachable_report_time: datetime | None = None
    """The last report that its mailbox cannot be read."""
    unreachable_reason: str = ""
    refused_count: int = 0
    """Webhooks without a good signature or key."""
    refused_time: datetime | None = None
    refused_reason: str = ""

    @property
    def key(self) -> TriggerKey:
        """The key of the trigger."""
        return TriggerKey(self.store_id, self.trigger_id)

    def secrets(self, now: datetime) -> tuple[bytes, ...]:
        """Return the secrets that count now."""
        return (self.secret, *(former.secret for former in self.former_secrets if former.until > now))


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """An event that came, and what became of it."""

    store_id: StoreId
    trigger_id: str
    event_id: str
    receive_time: datetime
    fire_time: datetime
    outcome: FireOutcome
    reason: str = ""
    run_id: RunId = RunId("")
    conversation_id: ConversationId = ConversationId("")

    @property
    def key(self) -> EventKey:
        """The key of the event."""
        return EventKey(self.store_id, self.trigger_id, self.event_id)

    @property
    def fire(self) -> FireRow:
        """The event as a fire of its trigger."""
        return FireRow(
            due_time=self.receive_time,
            fire_time=self.fire_time,
            outcome=self.outcome,
            reason=self.reason,
            run_id=self.run_id,
            conversation_id=self.conversation_id,
            event_id=self.event_id,
        )


class LaneRow(msgspec.Struct, frozen=True, kw_only=True):
    """The events of a trigger that wait for each other: the run of the last one, and the one that waits.

    `event_id` is empty if none does; it `awaits_run` if that is to end, else a time. `first_time` is when the first of
    those came in whose place it waits.
    """

    store_id: StoreId
    trigger_id: str
    lane: str
    last_run_id: RunId = RunId("")
    event_id: str = ""
    data: bytes = b""
    conversation_key: str = ""
    awaits_run: bool = False
    first_time: datetime | None = None
    claim_at: datetime | None = None
    update_time: datetime

    @property
    def key(self) -> LaneKey:
        """The key of the lane."""
        return LaneKey(self.store_id, self.trigger_id, self.lane)

    @property
    def waiting(self) -> EventKey:
        """The key of the event that waits, if one does."""
        return EventKey(self.store_id, self.trigger_id, self.event_id)


TriggerChange: TypeAlias = Callable[[TriggerRow | None, int, datetime], TriggerRow]
"""A trigger as it becomes, from how it is, how many triggers its user has, and the time."""


def check(asked: TriggerDefinition) -> None:
    """Return if a trigger can be like that.

    Raises:
        InvalidField: it cannot; the field is named.
    """
    if asked.mailbox is not None:
        _check_mailbox(asked.mailbox)
    elif asked.webhook is None:
        raise InvalidField("say what fires it: `webhook` or `mailbox`", field="definition.webhook")
    if asked.text.count(PLACEHOLDER) > 1:
        raise InvalidField(f"{PLACEHOLDER} stands in the text more than once", field="definition.text")
    if asked.conversation_key and asked.conversation_pointer:
        message = "give conversation_key or conversation_pointer, not both"
        raise InvalidField(message, field="definition.conversation_pointer")
    for name in ("conversation_pointer", "concurrency_pointer"):
        _check_pointer(getattr(asked, name), f"definition.{name}")
    if asked.debounce_seconds > DEBOUNCE_SECONDS_MAX:
        raise InvalidField(
            f"debounce_seconds may be at most {DEBOUNCE_SECONDS_MAX} s", field="definition.debounce_seconds"
        )


def _check_mailbox(asked: MailboxSource) -> None:
    polled = POLL_SECONDS_RANGE
    problems = {
        "host": "" if _HOST.fullmatch(asked.host) else "must be the name or address of a server",
        "port": "" if asked.port <= _PORT_MAX else f"is at most {_PORT_MAX}",
        "username": "" if _NAME.fullmatch(asked.username) else "must be 1 to 256 characters of ASCII, none a control",
        "password_secret": "" if 1 <= len(asked.password_secret) <= SECRET_CHARACTERS_MAX else "must name a secret",
        "folder": "" if not asked.folder or _FOLDER.fullmatch(asked.folder) else "must be ASCII without quotes",
        "poll_seconds": "" if asked.poll_seconds in {0, *polled} else f"is from {polled[0]} to {polled[-1]}",
        "authserv_id": "" if not asked.authserv_id or _TOKEN.fullmatch(asked.authserv_id) else "must name a server",
        "senders": ""
        if len(asked.senders) <= SENDERS_MAX and all(map(_SENDER.fullmatch, asked.senders))
        else f"must be addresses, or domains like @example.com, at most {SENDERS_MAX}",
    }
    for name, problem in problems.items():
        if problem:
            raise InvalidField(f"mailbox.{name} {problem}", field=f"definition.mailbox.{name}")
    if not asked.authserv_id and not asked.senders:
        message = "say whose mails count: give mailbox.authserv_id, mailbox.senders or both"
        raise InvalidField(message, field="definition.mailbox.authserv_id")


def _check_pointer(pointer: str, field: str) -> None:
    if len(pointer) > POINTER_CHARACTERS_MAX:
        raise InvalidField(f"{field} has at most {POINTER_CHARACTERS_MAX} characters", field=field)
    rest = pointer.replace("~0", "").replace("~1", "")
    if (pointer and not pointer.startswith("/")) or "~" in rest:
        raise InvalidField(f"{field} is no JSON pointer such as /order/id", field=field)


def filled_in(asked: TriggerDefinition) -> TriggerDefinition:
    """Return a definition with the defaults of its mailbox. INBOX has no case (RFC 9051, 5.1)."""
    mailbox = asked.mailbox
    if mailbox is None:
        return asked
    folder = mailbox.folder if mailbox.folder.upper() not in {"", "INBOX"} else "INBOX"
    port = mailbox.port or (143 if mailbox.plaintext else 993)
    return replace(asked, mailbox=replace(mailbox, host=mailbox.host.lower(), port=port, folder=folder))


def put(
    row: TriggerRow | None,
    asked: TriggerDefinition,
    owner: Owner,
    now: datetime,
    *,
    new_id: str,
    secret: bytes,
    count: int,
    must_exist: bool,
) -> TriggerRow:
    """Return a trigger as it is once `asked` is saved, made with id and secret if there is none; `count` the user has.

    Raises:
        TriggerNotFound: there is none, and it must exist.
        TriggerExists: there is another one, and it is to be made.
        InvalidField: other events are to fire it.
        TooLarge: the user has too many.
    """
    if row is None:
        if must_exist:
            raise TriggerNotFound
        if count >= TRIGGERS_MAX:
            raise TooLarge(f"you have {TRIGGERS_MAX} triggers, which is the most: delete one")
        fields: dict[str, Any] = asdict(owner)
        made = TriggerRow(
            **fields, trigger_id=new_id, name=asked.name, definition=asked, create_time=now, secret=secret
        )
        return _readable(made, now)
    if not must_exist:
        if asked != row.definition:
            raise TriggerExists
        return row
    old = row.definition.mailbox
    if (asked.mailbox is None) != (old is None):
        raise InvalidField("a trigger stays with what fires it: make another one", field="definition.mailbox")
    changed = saved(row, asked, owner)
    if changed is row or asked.mailbox is None:
        return changed
    if old is not None and old.place != asked.mailbox.place:
        changed = replace(changed, uid_validity=0, last_uid=0)
    return _readable(changed, now)


def _readable(row: TriggerRow, now: datetime) -> TriggerRow:
    """Return a trigger whose mailbox any process may lease."""
    if row.definition.mailbox is None:
        return row
    claim_at = None if row.pause_time is not None else now
    return replace(_reachable(row), claim_at=claim_at)


def _reachable(row: TriggerRow) -> TriggerRow:
    return replace(row, unreachable_time=None, unreachable_report_time=None, unreachable_reason="")


def reported(row: TriggerRow, position: MailPosition | None, reason: str, now: datetime) -> TriggerRow:
    """Return a trigger whose mailbox can be read, from `position` on if its UIDs are new, or cannot for a reason."""
    if row.pause_time is not None:
        return row
    if not reason:
        if position is not None and position.uid_validity != row.uid_validity:
            row = replace(row, uid_validity=position.uid_validity, last_uid=position.uid)
        return _reachable(row)
    reason, since, last = reason[:REASON_CHARACTERS_MAX], row.unreachable_time, row.unreachable_report_time
    if since is None or last is None or now - last > UNREACHABLE_GAP_TIME:
        since = now
    row = replace(row, unreachable_time=since, unreachable_report_time=now, unreachable_reason=reason)
    if now - since < UNREACHABLE_TIME:
        return row
    note = f"its mailbox could not be read for 12 hours: {reason}"[:REASON_CHARACTERS_MAX]
    return paused(row, note, now, by_itself=True)


def paused(row: TriggerRow, note: str, now: datetime, *, by_itself: bool = False) -> TriggerRow:
    """Return a trigger that takes no events, with a new note if it was paused before."""
    return replace(schedules.halted(row, note, now, by_itself=by_itself), claim_at=None)


def saved(row: TriggerRow, asked: TriggerDefinition, owner: Owner) -> TriggerRow:
    """Return a trigger with a new definition, or credential. What waits goes on waiting."""
    if asked == row.definition and owner == schedules.owner_of(row):
        return row
    return replace(row, **asdict(owner), definition=asked, generation=row.generation + 1)


def resumed(row: TriggerRow, owner: Owner, now: datetime) -> TriggerRow:
    """Return a trigger that goes on; one that was not paused with the credential.

    Raises:
        PermissionDenied: it has a mailbox, and the owner is no admin any more.
    """
    if row.definition.mailbox is not None and Role.ADMIN not in owner.user_roles:
        raise PermissionDenied(f"the password of a mailbox belongs to the store: this needs the role {Role.ADMIN}")
    if row.pause_time is None:
        return saved(row, row.definition, owner)
    return _readable(schedules.going_on(row, owner), now)


def rotated(row: TriggerRow, secret: bytes, now: datetime) -> TriggerRow:
    """Return a trigger with another secret; for a time the one before counts, too.

    Raises:
        InvalidField: it has none.
    """
    if row.definition.webhook is None:
        raise InvalidField("it has no webhook, and so no secret", field="name")
    former = (FormerSecret(row.secret, now + FORMER_SECRET_TIME), *row.former_secrets)
    former = tuple(each for each in former if each.until > now)[:FORMER_SECRETS_MAX]
    return replace(row, secret=secret, former_secrets=former, generation=row.generation + 1)
