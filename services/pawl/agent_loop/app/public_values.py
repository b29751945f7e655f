"""The values between the use cases that serve clients and their ports.

`document` fields hold a thing as the contract words it. The use cases pass them
on and never look inside, so a client sees all that the ledger said, also what
this version knows nothing about.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final, Generic, TypeVar

import msgspec

from pawl.chassis.auth import Principal
from pawl.chassis.ids import (
    ClientId,
    SessionId,
)
from pawl.values import Overlap

T = TypeVar("T")


class ClientSession(msgspec.Struct, frozen=True, kw_only=True):
    """One stream of a client: it holds offers, and gives back only its own."""

    client_id: ClientId = ClientId("")
    session_id: SessionId = SessionId("")


NOBODY: Final = ClientSession()
"""In place of a session, where something comes without a stream."""


class PageAsked(msgspec.Struct, frozen=True, kw_only=True):
    """The page of a list that is asked for: how much (0 leaves that to the ledger), and the token of the one before."""

    page_size: int
    page_token: str


class Page(msgspec.Struct, Generic[T], frozen=True, kw_only=True):
    """A page of a list; the token is empty after the last."""

    items: tuple[T, ...]
    next_page_token: str


class ErasureView(msgspec.Struct, frozen=True, kw_only=True):
    """The receipt of an erasure, and a page of what has left; documents are as the contract has them."""

    erasure: object
    left: Page[object]


class ScheduledMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The message with which the runs of a schedule begin, their agent and labels, and the key of one conversation."""

    text: str
    agent: str
    labels: Mapping[str, str]
    conversation_key: str


class DueSchedule(msgspec.Struct, frozen=True, kw_only=True):
    """A schedule that is to be fired: whose it is, what its runs are told, and the rest as the ledger has it.

    `expected_time` is the due time, None of one that is fired by hand. An empty `time_zone` is UTC.
    """

    caller: Principal
    message: ScheduledMessage
    document: object
    name: str = ""
    time_zone: str = ""
    expected_time: datetime | None = None


class DueTrigger(msgspec.Struct, frozen=True, kw_only=True):
    """A trigger that is to be fired: whose it is, what its runs are told, how events go together, and the whole of it.

    The text of the message is a template.
    """

    caller: Principal
    message: ScheduledMessage
    trigger_id: str
    name: str
    conversation_pointer: str
    concurrency_pointer: str
    debounce_seconds: int
    overlap: Overlap
    mailbox: object
    """As the contract has it; None for none."""
    folder_id: str
    """The folder of the mailbox, by which its mails differ from those of others; empty without one."""
    document: object


class TriggerEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event: those of a lane wait for each other. `data` is what its run is told of it."""

    event_id: str
    lane: str | None
    data: bytes
    conversation_key: str


class MailPlace(msgspec.Struct, frozen=True, kw_only=True):
    """A mail by its UID, or a place behind it."""

    uid_validity: int
    uid: int


class DueMailbox(msgspec.Struct, frozen=True, kw_only=True):
    """A mailbox that is to be read after a place, and the trigger whose it is."""

    trigger: DueTrigger
    place: MailPlace


class IncomingMail(msgspec.Struct, frozen=True, kw_only=True):
    """A mail: its data as JSON, and why it fires nothing, if so."""

    uid: int
    refusal: str
    data_json: bytes


class MailboxView(msgspec.Struct, frozen=True, kw_only=True):
    """The mails that were read, and the last one that is there, or was."""

    place: MailPlace
    mails: tuple[IncomingMail, ...] = ()
    has_more: bool = False


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """The fire of an event, as the contract has it; None if the trigger has changed. `duplicate` if it came before."""

    fire: object | None
    duplicate: bool
