"""The prefix of a run's history that its worker may keep, so that the next run is loaded with the newer messages only.

A run's history consists of its conversation's messages after the newest summary, and their calls. The prefix consists
of its oldest messages, up to the first run that is current, or has an open call, an image or another user's message.
It is therefore whole runs of the run's user, without images, whose calls have all ended. Messages and ended calls never
change, and new messages have higher numbers. So these are all the ways in which the same history, loaded again, can
differ from a kept prefix followed by what is loaded now, and why it does not:

* Erasure or retention has removed messages, or they are no longer part of a fork: fewer of them are counted.
* A newer summary replaces them, or the summary was removed: `summarised_to_number` differs.
* Another user's messages appear or disappear: those after the prefix are loaded now. If any are counted up to its end,
  the prefix is not valid.
* Another user runs: none of the messages is that user's own.
* A refused image is left out, or an old one because of newer ones: all images are loaded now, and so are all messages
  of their runs.
* Large results are left out because of newer ones: then the whole history is loaded again. (A run may go on after the
  point at which its conversation was forked. If its later calls would push out results, the kept history has more.)
* The database was restored from a backup and has different messages with the same numbers: the ID of the last message
  differs, because it was written after them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import takewhile

import msgspec

from pawl.chassis.ids import RunId
from pawl.job_store.ledger.rules.rows import CallRow, MessageRow


class HistoryPrefix(msgspec.Struct, frozen=True, kw_only=True):
    """Identifies a prefix. `result_bytes` is the total size of the results of the calls of its runs."""

    last_number: int
    last_message_id: str
    message_count: int
    summarised_to_number: int
    result_bytes: int


class PrefixCounts(msgspec.Struct, frozen=True, kw_only=True):
    """The messages between the newest summary of a history's author and the last message of a prefix.

    `end_number` is the last number that the summary covers, and `own_count` counts the author's messages.
    `last_message_id` is None if the prefix's last message does not exist.
    """

    end_number: int
    message_count: int
    own_count: int
    last_message_id: str | None


def is_valid(known: HistoryPrefix, found: PrefixCounts) -> bool:
    """Return whether the history still starts with a prefix, given the counts up to its last message."""
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
    """Return the prefix of a history that consists of `known`, `messages` and their calls; None if there is none.

    `changing` are the runs that cannot be part of a prefix.
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
