"""Activates a conversation's runs one at a time, in order (LOOP-13)."""

from __future__ import annotations

from datetime import datetime

from msgspec.structs import replace

from pawl.chassis.ids import RunId, RunKey
from pawl.errors import Internal
from pawl.job_store.ledger.rules import log, run_table
from pawl.job_store.ledger.rules.events import EventBody, MessageAdded
from pawl.job_store.ledger.rules.rows import ConversationRow, MessageRow, RunRow
from pawl.job_store.ledger.rules.unit_of_work import UnitOfWork, Wakeup


def queued(
    conversation: ConversationRow,
    run_id: RunId,
    message: bytes,
    options: bytes,
    budget: tuple[int, int],
    *,
    now: datetime,
) -> RunRow:
    """Return a new run that is not active yet. `budget` is its token budget and the ceiling for top-ups."""
    return RunRow(
        store_id=conversation.store_id,
        run_id=run_id,
        conversation_id=conversation.conversation_id,
        user_id=conversation.user_id,
        state=run_table.INITIAL,
        token_budget=budget[0],
        token_ceiling=budget[1],
        queued_message=message,
        options=options,
        create_time=now,
        update_time=now,
        state_time=now,
    )


def budget_below(run: RunRow) -> RunId:
    """Return the `budget_run_id` of the runs that this run starts, or an empty id if this run has no budget."""
    return run.budget_run_id or (run.run_id if run.token_budget else RunId(""))


def give(
    unit: UnitOfWork,
    conversation: ConversationRow,
    run: RunRow,
    *,
    before: tuple[EventBody, ...] = (),
    claim_at: datetime | None = None,
) -> RunRow:
    """Activate `run`: add its message to the conversation, and let workers claim the run from `claim_at` on.

    The events in `before` are written to the log first. A run started by job notices has no message.
    """
    if run.queued_message is None:
        raise Internal("a run cannot be activated twice")
    conversation = conversation.without(run.run_id, now=unit.now)
    unit.work_ready = True
    if run.is_turn:
        unit.put_conversation(replace(conversation, active_run_id=run.run_id))
        return log.write(unit, replace(run, queued_message=None, claim_at=claim_at or unit.now), before)
    message = MessageRow(
        store_id=run.store_id,
        conversation_id=run.conversation_id,
        number=conversation.last_number + 1,
        message_id=unit.ids.new("msg"),
        run_id=run.run_id,
        summarised_to=0,
        body=run.queued_message,
        create_time=unit.now,
        user_id=conversation.author(run.user_id),
    )
    unit.messages.add([message])
    unit.put_conversation(replace(conversation, active_run_id=run.run_id, last_number=message.number))
    run = replace(run, queued_message=None, claim_at=claim_at or unit.now)
    return log.write(unit, run, [*before, MessageAdded(message=message, user_id=run.user_id)])


def leave(unit: UnitOfWork, run: RunRow) -> RunRow | None:
    """Remove an ended run from its conversation. If it was active, activate the next run.

    Return the run that is now active if an interrupting message is waiting behind it. Otherwise, return None.
    """
    conversation = unit.conversation_of(run)
    if conversation.active_run_id != run.run_id:
        unit.put_conversation(conversation.without(run.run_id, now=unit.now))
        return None
    if not conversation.queue:
        unit.put_conversation(replace(conversation, active_run_id=None, update_time=unit.now))
        return None
    following = unit.runs.get(RunKey(run.store_id, conversation.queue[0]))
    if following is None:
        raise Internal("the conversation's next run is not loaded")
    following = give(unit, conversation, following)
    return following if unit.conversation_of(following).interrupting else None


def wake(unit: UnitOfWork, run: RunRow) -> RunRow:
    """Make a worker read the inbox of `run`: notify the worker that holds the run, or make the run claimable now.

    Queued runs, turns that start later and quarantined runs are not woken. Their inboxes are read once they run.
    """
    if run.is_quarantined:
        return run
    if run.worker_id is not None:
        unit.wakeups.add([Wakeup(worker_id=run.worker_id, run=run.key)])
        return run
    is_to_wait = run.is_turn and run.is_queued
    if run.queued_message is not None or (run.claim_at is not None and (is_to_wait or run.claim_at <= unit.now)):
        return run
    unit.work_ready = True
    return unit.put_run(replace(run, claim_at=unit.now))
