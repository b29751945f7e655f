"""A user starts a job: the run is made on the way of a message, and reports to where that would go (ASYNC-1)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from msgspec.structs import replace

from pawl.chassis.ids import RunId, RunKey
from pawl.errors import RequestIdReused, TooManyJobs
from pawl.job_store.ledger.rules import delegation, jobs, turn
from pawl.job_store.ledger.rules.events import RunChanged
from pawl.job_store.ledger.rules.rows import ConversationRow, QueueKey
from pawl.job_store.ledger.rules.submit import Submit, Submitted
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork


class StartJob(Submit, frozen=True, kw_only=True):
    """Begin the job `run_id`, which reports to the conversation to which its message would go.

    The message stands in a conversation of its own. It waits for nobody's turn, and its place is one of the background:
    `store_places` are those, and `store_queue_max` wait for one of them.
    """

    run_id: RunId
    job: Callable[[datetime], bytes]
    """The job as it starts at a time, behind the options of the run."""
    is_silent: bool
    """True if it reports nothing, not even its end."""

    @property
    def row_keys(self) -> RowKeys:
        """The rows it needs."""
        queue = QueueKey(self.store_id, in_background=True)
        return replace(
            super().row_keys,
            runs=(RunKey(self.store_id, self.run_id),),
            queues=((queue, self.store_queue_max, self.store_places),),
        )

    def _deliver(self, unit: UnitOfWork, conversation: ConversationRow) -> Submitted:
        """Create the run; the conversation counts it.

        Raises:
            TooManyJobs: the user has as many there as allowed.
            QueueFull: too many wait in the store.
            RequestIdReused: the run is there, of a request that is not remembered any more.
        """
        if unit.runs.get(RunKey(self.store_id, self.run_id)) is not None:
            raise RequestIdReused
        if conversation.background.open_jobs_of(self.user_id) >= jobs.OPEN_MAX:
            raise TooManyJobs
        self.check_queue(unit, in_background=True)
        conversation = jobs.count_begun(unit, conversation, self.run_id, self.user_id)
        # No list of conversations has one that does the work of another one.
        own = delegation.own_conversation(
            unit, conversation.key, user_id=self.user_id, made_title=self.made_title, parent_run_id=self.run_id
        )
        budget = (self.token_budget, self.token_ceiling)
        options = self.options + self.job(unit.now)
        run = turn.queued(own, self.run_id, self.message, options, budget, now=unit.now)
        run = replace(
            self.signed(run), reports_to=conversation.conversation_id, in_background=True, silent=self.is_silent
        )
        return Submitted(run=turn.give(unit, own, run, before=(RunChanged(from_state=None, run=run),)), steered=False)
