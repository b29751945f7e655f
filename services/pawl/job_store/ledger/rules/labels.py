"""Labels, stored as text with one line per label.

Each line starts with a mark that identifies the owner, so that one index serves all users.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.labels import RESERVED
from pawl.job_store.ledger.rules.search import mark

# `check_labels` refuses labels that contain it.
_BREAK: Final = "\n"


def of_workflow(name: str) -> dict[str, str]:
    """Return the label for listing the runs of a workflow. It is empty if `name` is empty."""
    return {f"{RESERVED}workflow": name} if name else {}


def of_goal(*, is_goal: bool) -> dict[str, str]:
    """Return the label for listing goal runs. It is empty for other runs."""
    return {f"{RESERVED}goal": "true"} if is_goal else {}


def lines(store_id: StoreId, user_id: UserId, labels: Mapping[str, str]) -> list[str]:
    """Return one line per label, sorted."""
    if not labels:
        return []
    owner = mark(store_id, user_id)
    return [f"{owner}{key}={value}" for key, value in sorted(labels.items())]


def written(store_id: StoreId, user_id: UserId, labels: Mapping[str, str]) -> str:
    """Return the labels as stored text, which is empty if there are none."""
    return _BREAK.join(lines(store_id, user_id, labels))


def read(text: str) -> dict[str, str]:
    if not text:
        return {}
    # A mark ends at the first colon, and a key ends at the first equals sign after it.
    pairs = (line.partition(":")[2].partition("=") for line in text.split(_BREAK))
    return {key: value for key, _, value in pairs}
