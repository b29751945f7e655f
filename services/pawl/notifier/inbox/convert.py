"""Between the domain and pawl.notify.v1."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import check_id
from pawl.chassis.rpc.translate import Translator, Unknown
from pawl.errors import InvalidField, InvalidPageToken
from pawl.notifier.inbox.rules import Inbox, Notification
from pawl.notify.v1 import notify_pb2

PAGE_DEFAULT: Final = 50
PAGE_MAX: Final = 200
IDS_MAX: Final = 200

_OWN: Final = Translator(lambda unknown: ValueError(f"{unknown.value} is none of ours"))
MESSAGE: Final = _OWN.struct(Notification, notify_pb2.Notification)
"""Between a notification and its message."""


def _refused(unknown: Unknown) -> InvalidField:
    return InvalidField(f"{unknown.field}: {unknown.value} is not known", field=unknown.field)


WIRE: Final = Translator(_refused)
"""Between what users say and its messages."""

_TOKEN: Final = re.compile(r"(all|unread)-([0-9]{1,18})")


def caller_inbox() -> Inbox:
    """Return whose inbox the caller's is."""
    return Inbox.of(require_user())


def page_size(requested: int) -> int:
    """Return how many a page has.

    Raises:
        InvalidField: more than 200 were asked for.
    """
    if requested > PAGE_MAX:
        raise InvalidField(f"page_size must be 0 to {PAGE_MAX}", field="page_size")
    return requested or PAGE_DEFAULT


def page_token(last: Notification, *, only_unread: bool) -> str:
    """Return the token of the page after `last`."""
    return f"{_filter(only_unread=only_unread)}-{last.number}"


def read_page_token(token: str, *, only_unread: bool) -> int | None:
    """Return the number before which the page begins; None for the first page.

    Raises:
        InvalidPageToken: it was made by another method or for another filter.
    """
    if not token:
        return None
    match = _TOKEN.fullmatch(token)
    if match is None or match[1] != _filter(only_unread=only_unread):
        raise InvalidPageToken
    return int(match[2])


def several_ids(ids: Collection[str], field: str) -> list[str]:
    """Return the ids of several things.

    Raises:
        InvalidField: none, or more than 200.
        InvalidId: one is no id.
    """
    if not 1 <= len(ids) <= IDS_MAX:
        raise InvalidField(f"{field} must have 1 to {IDS_MAX} ids", field=field)
    return [check_id(value, field) for value in ids]


def _filter(*, only_unread: bool) -> str:
    return "unread" if only_unread else "all"
