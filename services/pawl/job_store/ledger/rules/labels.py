"""Labels as the ledger keeps them: a line for each, with the mark of its owner, so that one index serves all users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pawl.chassis.ids import StoreId, UserId
from pawl.job_store.ledger.rules.search import mark

_BREAK: Final = "\n"
"""No label has one: `check_labels` refuses it."""


def lines(store_id: StoreId, user_id: UserId, labels: Mapping[str, str]) -> list[str]:
    """Return the line of each label, sorted."""
    if not labels:
        return []
    owner = mark(store_id, user_id)
    return [f"{owner}{key}={value}" for key, value in sorted(labels.items())]


def written(store_id: StoreId, user_id: UserId, labels: Mapping[str, str]) -> str:
    """Return the text that is kept; empty for no labels."""
    return _BREAK.join(lines(store_id, user_id, labels))


def read(text: str) -> dict[str, str]:
    """Return the labels of a text that was written."""
    if not text:
        return {}
    # A mark ends with the first colon, a key with the first equals sign behind it.
    pairs = (line.partition(":")[2].partition("=") for line in text.split(_BREAK))
    return {key: value for key, _, value in pairs}
