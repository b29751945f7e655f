"""Trims open jobs. A job keeps its latest iterations, while older calls and events are removed.

A mark records the round and the log position at the end of a round. After a fixed number of rounds, everything before
the mark is removed and a new mark is set. Trims are therefore rare and bounded, and need no search.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import RunKey
from pawl.job_store.ledger.rules.rows import RunRow

# A job keeps at least this many iterations, and at most twice as many.
ITERATIONS_KEPT: Final = 100


class Trim(msgspec.Struct, frozen=True, kw_only=True):
    run: RunKey
    round: int
    seq: int


def after_round(before: RunRow, run: RunRow, kept: int) -> tuple[RunRow, Trim | None]:
    """Return the run after a step, with a new mark if needed. Also return which rows to remove, or None.

    `before` is the run before the step. At that point, all earlier rounds were complete, because a job starts a round
    only after the previous one has ended.
    """
    if not run.reports_to or run.program or run.round == before.round or before.round - run.mark_round < kept:
        return run, None
    marked = replace(run, mark_round=before.round, mark_seq=before.last_seq)
    if not run.mark_round:
        return marked, None
    trim = Trim(run=run.key, round=run.mark_round, seq=run.mark_seq)
    return replace(marked, trimmed_rounds=trim.round, trimmed_log_seq=trim.seq), trim
