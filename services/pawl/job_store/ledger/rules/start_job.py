"""Starts a user's job: like submitting a message, but the run only reports to the conversation (ASYNC-1)."""

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
    """Start the run `run_id`, which reports to the conversation that its message would otherwise go to.

    If `run_id` is empty, the ledger makes one.

    The message is in a conversation of its own, so the run waits for no other run. It uses a background slot:
    `store_slots` and `store_queue_max` are the limits for background runs. `job` encodes the job for a given start
    time; the result is appended to the run's options. If `is_silent`, the job reports nothing, not even its end.
    """

    run_id: RunId
    job: Callable[[datetime], bytes]
    is_silent: bool

    @property
    def row_keys(self) -> RowKeys:
        queue = QueueKey(self.store_id, in_background=True)
        return replace(
            super().row_keys,
            runs=(RunKey(self.store_id, self.run_id),) if self.run_id else (),
            queues=((queue, self.store_queue_max, self.store_slots),),
        )

    def _deliver(self, unit: UnitOfWork, conversation: ConversationRow) -> Submitted:
        """Create the run and count it as an open job of the conversation.

        Raises:
            TooManyJobs: The user has too many open jobs in the conversation.
            QueueFull: Too many jobs wait in the store.
            RequestIdReused: The run exists, but its request is no longer remembered.
        """
        run_id = self.run_id or RunId(unit.ids.new("run"))
        if unit.runs.get(RunKey(self.store_id, run_id)) is not None:
            raise RequestIdReused
        if conversation.background.open_jobs_of(self.user_id) >= jobs.OPEN_MAX:
            raise TooManyJobs
        self.check_queue(unit, in_background=True)
        conversation = jobs.add_open_job(unit, conversation, run_id, self.user_id)
        # The parent run keeps the conversation out of all lists, as for delegated runs.
        own = delegation.own_conversation(
            unit, conversation.key, user_id=self.user_id, made_title=self.made_title, parent_run_id=run_id
        )
        budget = (self.token_budget, self.token_ceiling)
        options = self.options + self.job(unit.now)
        run = turn.queued(own, run_id, self.message, options, budget, now=unit.now)
        run = replace(
            self.signed(run), reports_to=conversation.conversation_id, in_background=True, silent=self.is_silent
        )
        return Submitted(run=turn.give(unit, own, run, before=(RunChanged(from_state=None, run=run),)), steered=False)
