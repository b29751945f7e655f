"""Trimming jobs while they are open: a series keeps its last iterations, older ones go with their calls and events.

A mark stands at the end of a round: how many rounds there were, and where the log was. When as many more have passed
as are kept, what lies before the mark goes, and a new one is set. So it happens once in so many iterations, takes with
it as many, and nothing is looked for.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import RunKey
from pawl.job_store.ledger.rules.rows import RunRow

ITERATIONS_KEPT: Final = 100
"""Fewest iterations of a job that are kept; there may be twice as many."""


class Trim(msgspec.Struct, frozen=True, kw_only=True):
    """The settled calls of a run up to a round, and its events up to a seq, which are removed."""

    run: RunKey
    round: int
    seq: int


def after_round(before: RunRow, run: RunRow, kept: int) -> tuple[RunRow, Trim | None]:
    """Return a run that is in a new round since `before`, and what is removed of it now, if anything.

    `before` is as it was when all calls of its rounds had been made: a job begins one once the last one has ended.
    """
    if not run.reports_to or run.round == before.round or before.round - run.mark_round < kept:
        return run, None
    marked = replace(run, mark_round=before.round, mark_seq=before.last_seq)
    if not run.mark_round:
        return marked, None
    trim = Trim(run=run.key, round=run.mark_round, seq=run.mark_seq)
    return replace(marked, trimmed_rounds=trim.round, trimmed_log_seq=trim.seq), trim
