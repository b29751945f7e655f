"""Starts a user's job.

This is like submitting a message, except that the run is not part of the conversation and only reports to it (ASYNC-1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime

from msgspec.structs import replace

from pawl.chassis.ids import RunId, RunKey
from pawl.errors import RequestIdReused
from pawl.job_store.ledger.rules.rows import ConversationRow
from pawl.job_store.ledger.rules.slots import QueueKey
from pawl.job_store.ledger.rules.submit import Submit, Submitted
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork
from pawl.values import Feature


class StartJob(Submit, frozen=True, kw_only=True):
    """Start the job `run_id`. It reports to the conversation to which its message would otherwise be added.

    The message gets its own conversation, so the run does not wait for any other run. The job uses a background slot,
    so `store_slots` and `store_queue_max` are the limits for background runs. `job` returns the encoded job for a given
    start time. The encoded job is appended to the run's options. If `is_silent` is set, the job reports nothing, not
    even its end.
    """

    run_id: RunId
    job: Callable[[datetime], bytes]
    is_silent: bool

    @property
    def row_keys(self) -> RowKeys:
        queue = QueueKey(self.store_id, in_background=True)
        return replace(
            super().row_keys,
            runs=(RunKey(self.store_id, self.run_id),),
            queues=((queue, self.store_queue_max, self.store_slots),),
        )

    @property
    def needed(self) -> Sequence[Feature]:
        return (Feature.RUNS, Feature.BACKGROUND)

    def _deliver(self, unit: UnitOfWork, conversation: ConversationRow) -> Submitted:
        """Create the run.

        Raises:
            TooManyJobs, QueueFull: See `Submit.start_reported`.
            RequestIdReused: The run exists, but its request is no longer stored.
        """
        if unit.runs.get(RunKey(self.store_id, self.run_id)) is not None:
            raise RequestIdReused
        options = self.options + self.job(unit.now)
        return self.start_reported(unit, conversation, self.run_id, options, is_silent=self.is_silent)
