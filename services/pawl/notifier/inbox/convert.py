"""Requests of pawl.notify.v1, checked."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import check_id
from pawl.chassis.rpc.translate import Translator
from pawl.errors import InvalidField
from pawl.notifier.inbox.rules import Inbox

PAGE_DEFAULT: Final = 50
PAGE_MAX: Final = 200
IDS_MAX: Final = 200


WIRE: Final = Translator(
    lambda unknown: InvalidField(f"{unknown.field}: {unknown.value} is not known", field=unknown.field)
)
"""Between what users say and its messages."""


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


def several_ids(ids: Collection[str], field: str) -> list[str]:
    """Return the ids of several things.

    Raises:
        InvalidField: none, or more than 200.
        InvalidId: one is no id.
    """
    if not 1 <= len(ids) <= IDS_MAX:
        raise InvalidField(f"{field} must have 1 to {IDS_MAX} ids", field=field)
    return [check_id(value, field) for value in ids]
