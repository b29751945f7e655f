"""The prefix of a run's history that its worker may cache, so that the next load returns only newer messages.

A history consists of a conversation's messages after the newest summary, and their calls. Its prefix consists of the
oldest messages. The prefix ends before the loaded run, and before any run with an open call, an image or another user's
message.

Messages and ended calls never change, and new messages have higher numbers. Therefore, only in these cases can a full
load differ from the cached prefix plus newer messages:

* Messages were removed, or no longer belong to a fork: their count differs.
* The newest summary was replaced or removed: `summarised_to_number` differs.
* Another user's messages appeared or disappeared up to the end of the prefix: `own_count` differs.
* The run belongs to another user: `own_count` differs.
* A refused or old image is omitted: no run with an image is in the prefix.
* Results are omitted because newer results are large: the whole history is loaded. (Calls that a run makes after its
  conversation was forked do not count here. A full load could then omit results that the cached prefix has.)
* A restored database has different messages with the same numbers: the ID of the last message differs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

import msgspec

from pawl.chassis.ids import RunId
from pawl.job_store.ledger.rules.rows import CallRow, MessageRow


class HistoryPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """A prefix of a history. `result_bytes` is the total size of all call results in its runs."""

    last_number: int
    last_message_id: str
    message_count: int
    summarised_to_number: int
    result_bytes: int


class PrefixCounts(msgspec.Struct, frozen=True, kw_only=True):
    """Counts of a history's messages up to the last message of a prefix.

    `end_number` is the last number that the newest summary covers. `own_count` counts the messages of the run's user.
    `last_message_id` is None if the prefix's last message does not exist.
    """

    end_number: int
    message_count: int
    own_count: int
    last_message_id: str | None


def is_valid(known: HistoryPrefix, found: PrefixCounts) -> bool:
    """Return whether the history still starts with the prefix `known`. `found` contains its current counts."""
    return found == PrefixCounts(
        end_number=known.summarised_to_number,
        message_count=known.message_count,
        own_count=known.message_count,
        last_message_id=known.last_message_id,
    )


def grown(
    known: HistoryPrefix | None,
    messages: Sequence[MessageRow],
    calls: Collection[CallRow],
    changing: Collection[RunId],
) -> HistoryPrefix | None:
    """Return the prefix `known`, extended by the first of the newer `messages`, or None if the result would be empty.

    The result ends before the first message of a run in `changing`.
    """
    added = list(takewhile(lambda message: message.run_id not in changing, messages))
    if not added:
        return known
    run_ids = {message.run_id for message in added}
    result_bytes = sum(len(call.result or b"") for call in calls if call.run_id in run_ids)
    return HistoryPrefix(
        last_number=added[-1].number,
        last_message_id=added[-1].message_id,
        message_count=len(added) + (known.message_count if known else 0),
        summarised_to_number=known.summarised_to_number if known else max(each.summarised_to for each in messages),
        result_bytes=result_bytes + (known.result_bytes if known else 0),
    )
