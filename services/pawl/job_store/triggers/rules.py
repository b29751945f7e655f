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

# Maximum number of triggers per user.
TRIGGERS_MAX: Final = 100
DEBOUNCE_SECONDS_MAX: Final = 3600
# Later events can postpone an event by at most this many times the debounce time.
DEBOUNCES_MAX: Final = 10
POINTER_CHARACTERS_MAX: Final = 256
DATA_BYTES_MAX: Final = 256 * 1024
# How long event ids are remembered.
EVENTS_SECONDS: Final = 3 * 86400.0
FORMER_SECRETS_MAX: Final = 4
# How long a replaced secret stays valid.
FORMER_SECRET_TIME: Final = timedelta(days=1)
POLL_SECONDS_RANGE: Final = range(15, 3601)
# How long a process may read a mailbox without renewing its lease.
MAILBOX_LEASE_TIME: Final = timedelta(seconds=30)
# Maximum number of mailboxes per process.
LEASED_MAX: Final = 200
# A trigger pauses automatically once its mailbox has been unreachable for this long.
UNREACHABLE_TIME: Final = timedelta(hours=12)
# After a longer gap between reports, UNREACHABLE_TIME starts again. Failing polls are up to an hour apart.
UNREACHABLE_GAP_TIME: Final = timedelta(hours=2)
# The interval between writes of the counts of refused webhooks.
REFUSALS_TIME: Final = timedelta(minutes=1)
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
    store_id: StoreId
    trigger_id: str


class MailPosition(msgspec.Struct, frozen=True, kw_only=True):
    uid_validity: int
    uid: int


class EventKey(msgspec.Struct, frozen=True, order=True, gc=False):
    store_id: StoreId
    trigger_id: str
    event_id: str


class LaneKey(msgspec.Struct, frozen=True, order=True, gc=False):
    store_id: StoreId
    trigger_id: str
    lane: str


class Authentication(IntEnum):
    SIGNATURE = 1
    BEARER = 2


class WebhookSource(msgspec.Struct, frozen=True, kw_only=True):
    authentication: Authentication = Authentication.SIGNATURE


class MailboxSource(msgspec.Struct, frozen=True, kw_only=True):
    """A mailbox whose e-mails are the events. Zero and empty values mean the defaults."""

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
    def folder_key(self) -> tuple[object, ...]:
        return self.host, self.port, self.plaintext, self.username, self.folder


class TriggerDefinition(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    text: str
    agent: str = ""
    labels: Mapping[str, str] = {}
    conversation_key: str = ""
    conversation_pointer: str = ""
    concurrency_pointer: str = ""
    debounce_seconds: int = 0
    overlap: Overlap = Overlap.ALLOW
    workflow: str = ""
    input_json: bytes = b""
    webhook: WebhookSource | None = None
    mailbox: MailboxSource | None = None


class FormerSecret(msgspec.Struct, frozen=True):
    secret: bytes
    until: datetime


class TriggerRow(StarterRow, frozen=True, kw_only=True):
    """A trigger.

    Changes that affect how events are handled increment `generation`. Firings do not.

    `former_secrets` are newest first. `claim_at` is the end of the mailbox lease, or None for webhooks and during a
    pause. `last_uid` is the UID of the last delivered message. `unreachable_report_time` is when the mailbox was last
    reported as unreachable. `refused_count` counts webhooks whose key or signature is invalid, or whose signature is
    too old.
    """

    trigger_id: str
    definition: TriggerDefinition
    secret: bytes = b""
    former_secrets: tuple[FormerSecret, ...] = ()
    claim_at: datetime | None = None
    uid_validity: int = 0
    last_uid: int = 0
    unreachable_time: datetime | None = None
    unreachable_report_time: datetime | None = None
    unreachable_reason: str = ""
    refused_count: int = 0
    refused_time: datetime | None = None
    refused_reason: str = ""

    @property
    def key(self) -> TriggerKey:
        return TriggerKey(self.store_id, self.trigger_id)

    def secrets(self, now: datetime) -> tuple[bytes, ...]:
        return (self.secret, *(former.secret for former in self.former_secrets if former.until > now))


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
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
        return EventKey(self.store_id, self.trigger_id, self.event_id)

    @property
    def fire(self) -> FireRow:
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
    """A lane of events that are handled one at a time, with the last event's run and the waiting event.

    `event_id` is empty if no event is waiting. If `awaits_run` is set, the event is waiting for that run to end.
    Otherwise, it is waiting until a certain time. `first_time` is when the waiting event arrived or, if it has replaced
    others, when the first of these arrived.
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
        return LaneKey(self.store_id, self.trigger_id, self.lane)

    @property
    def waiting(self) -> EventKey:
        return EventKey(self.store_id, self.trigger_id, self.event_id)


# Returns the changed trigger from the current one (if any), the number of triggers that its user has, and the time.
TriggerChange: TypeAlias = Callable[[TriggerRow | None, int, datetime], TriggerRow]


def check(requested: TriggerDefinition) -> None:
    """Validate a definition.

    Raises:
        InvalidField: The definition is invalid. The metadata names the field.
    """
    if requested.mailbox is not None:
        _check_mailbox(requested.mailbox)
    elif requested.webhook is None:
        raise InvalidField("set either `webhook` or `mailbox`", field="definition.webhook")
    if requested.text.count(PLACEHOLDER) > 1:
        raise InvalidField(f"text may contain {PLACEHOLDER} only once", field="definition.text")
    if requested.conversation_key and requested.conversation_pointer:
        message = "set conversation_key or conversation_pointer, not both"
        raise InvalidField(message, field="definition.conversation_pointer")
    for name in ("conversation_pointer", "concurrency_pointer"):
        _check_pointer(getattr(requested, name), f"definition.{name}")
    if requested.debounce_seconds > DEBOUNCE_SECONDS_MAX:
        raise InvalidField(
            f"debounce_seconds must be at most {DEBOUNCE_SECONDS_MAX}, got {requested.debounce_seconds}",
            field="definition.debounce_seconds",
        )


def _check_mailbox(requested: MailboxSource) -> None:
    polled = POLL_SECONDS_RANGE
    problems = {
        "host": "" if _HOST.fullmatch(requested.host) else "must be a server's name or address",
        "port": "" if requested.port <= _PORT_MAX else f"must be at most {_PORT_MAX}",
        "username": "" if _NAME.fullmatch(requested.username) else "must be 1 to 256 printable ASCII characters",
        "password_secret": ""
        if 1 <= len(requested.password_secret) <= SECRET_CHARACTERS_MAX
        else "must be the name of a secret",
        "folder": "" if not requested.folder or _FOLDER.fullmatch(requested.folder) else "must be ASCII without quotes",
        "poll_seconds": ""
        if requested.poll_seconds in {0, *polled}
        else f"must be between {polled[0]} and {polled[-1]}",
        "authserv_id": ""
        if not requested.authserv_id or _TOKEN.fullmatch(requested.authserv_id)
        else "must name a server",
        "senders": ""
        if len(requested.senders) <= SENDERS_MAX and all(map(_SENDER.fullmatch, requested.senders))
        else f"must be at most {SENDERS_MAX} addresses, or domains like @example.com",
    }
    for name, problem in problems.items():
        if problem:
            raise InvalidField(f"mailbox.{name} {problem}", field=f"definition.mailbox.{name}")
    if not requested.authserv_id and not requested.senders:
        message = "mailbox.authserv_id, mailbox.senders or both are required, to identify trusted senders"
        raise InvalidField(message, field="definition.mailbox.authserv_id")


def _check_pointer(pointer: str, field: str) -> None:
    if len(pointer) > POINTER_CHARACTERS_MAX:
        raise InvalidField(
            f"{field} must be at most {POINTER_CHARACTERS_MAX} characters, got {len(pointer)}", field=field
        )
    rest = pointer.replace("~0", "").replace("~1", "")
    if (pointer and not pointer.startswith("/")) or "~" in rest:
        raise InvalidField(f"{field} must be a JSON pointer such as /order/id", field=field)


def filled_in(requested: TriggerDefinition) -> TriggerDefinition:
    """Return a definition with its mailbox defaults filled in, and the folder INBOX in upper case (RFC 9051, 5.1)."""
    mailbox = requested.mailbox
    if mailbox is None:
        return requested
    folder = mailbox.folder if mailbox.folder.upper() not in {"", "INBOX"} else "INBOX"
    port = mailbox.port or (143 if mailbox.plaintext else 993)
    return replace(requested, mailbox=replace(mailbox, host=mailbox.host.lower(), port=port, folder=folder))


def put(
    row: TriggerRow | None,
    requested: TriggerDefinition,
    owner: Owner,
    now: datetime,
    *,
    new_id: str,
    secret: bytes,
    count: int,
    must_exist: bool,
) -> TriggerRow:
    """Return the trigger that results from saving `requested`. If `row` is None, create it with `new_id` and `secret`.

    `count` is the number of triggers that the user has.

    Raises:
        TriggerNotFound: The request updates a trigger that does not exist.
        TriggerExists: The request creates a trigger, but a different one with this name exists.
        InvalidField: The request changes a webhook to a mailbox, or a mailbox to a webhook.
        TooLarge: The user has too many triggers.
    """
    if row is None:
        if must_exist:
            raise TriggerNotFound
        if count >= TRIGGERS_MAX:
            raise TooLarge(f"you already have {TRIGGERS_MAX} triggers, which is the maximum: delete one first")
        fields: dict[str, Any] = asdict(owner)
        made = TriggerRow(
            **fields, trigger_id=new_id, name=requested.name, definition=requested, create_time=now, secret=secret
        )
        return _readable(made, now)
    if not must_exist:
        if requested != row.definition:
            raise TriggerExists
        return row
    old = row.definition.mailbox
    if (requested.mailbox is None) != (old is None):
        raise InvalidField(
            "a trigger cannot change between webhook and mailbox: create another one", field="definition.mailbox"
        )
    changed = saved(row, requested, owner)
    if changed is row or requested.mailbox is None:
        return changed
    if old is not None and old.folder_key != requested.mailbox.folder_key:
        changed = replace(changed, uid_validity=0, last_uid=0)
    return _readable(changed, now)


def _readable(row: TriggerRow, now: datetime) -> TriggerRow:
    if row.definition.mailbox is None:
        return row
    claim_at = None if row.pause_time is not None else now
    return replace(_reachable(row), claim_at=claim_at)


def _reachable(row: TriggerRow) -> TriggerRow:
    return replace(row, unreachable_time=None, unreachable_report_time=None, unreachable_reason="")


def reported(row: TriggerRow, position: MailPosition | None, reason: str, now: datetime) -> TriggerRow:
    """Return a trigger after a report about its mailbox. If `reason` is not empty, the mailbox was unreachable.

    If the mailbox has assigned new UIDs, reading continues after `position`.
    """
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
    note = f"the mailbox was unreachable for 12 hours: {reason}"[:REASON_CHARACTERS_MAX]
    return paused(row, note, now, automatic=True)


def paused(row: TriggerRow, note: str, now: datetime, *, automatic: bool = False) -> TriggerRow:
    return replace(schedules.marked_paused(row, note, now, automatic=automatic), claim_at=None)


def saved(row: TriggerRow, requested: TriggerDefinition, owner: Owner) -> TriggerRow:
    """Return a trigger with a new definition or credential. Waiting events remain."""
    if requested == row.definition and owner == schedules.owner_of(row):
        return row
    return replace(row, **asdict(owner), definition=requested, generation=row.generation + 1)


def resumed(row: TriggerRow, owner: Owner, now: datetime) -> TriggerRow:
    """Return a resumed trigger.

    If it was not paused, only its owner changes.

    Raises:
        PermissionDenied: The trigger has a mailbox, and the owner is no longer an admin.
    """
    if row.definition.mailbox is not None and Role.ADMIN not in owner.user_roles:
        raise PermissionDenied(
            f"triggers with a mailbox use one of the store's passwords: this requires the {Role.ADMIN} role"
        )
    if row.pause_time is None:
        return saved(row, row.definition, owner)
    return _readable(schedules.unpaused(row, owner), now)


def rotated(row: TriggerRow, secret: bytes, now: datetime) -> TriggerRow:
    """Return a trigger with a new secret.

    The previous secret stays valid for a day.

    Raises:
        InvalidField: The trigger has no secret.
    """
    if row.definition.webhook is None:
        raise InvalidField("only triggers with a webhook have a secret", field="name")
    former = (FormerSecret(row.secret, now + FORMER_SECRET_TIME), *row.former_secrets)
    former = tuple(each for each in former if each.until > now)[:FORMER_SECRETS_MAX]
    return replace(row, secret=secret, former_secrets=former, generation=row.generation + 1)
