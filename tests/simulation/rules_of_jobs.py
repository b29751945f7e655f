"""Invariants of jobs, checked on the rows after each transaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from pawl.chassis.ids import RunKey
from pawl.errors import ConversationBusy
from pawl.job_store.ledger.rules.rows import ConversationKey, ConversationRow, RunRow
from pawl.job_store.ledger.rules.submit import Submit, Submitted
from pawl.job_store.ledger.rules.unit_of_work import UnitOfWork

_OPEN_MAX = 10


def miscounted(runs: Iterable[RunRow], conversation: ConversationRow) -> str:
    """Return an error if the number of open jobs of a conversation is wrong, otherwise an empty string (ASYNC-7)."""
    jobs = (run for run in runs if run.reports_to == conversation.conversation_id)
    count = Counter(run.user_id for run in jobs if not run.state.is_terminal)
    noted = Counter(each.user_id for each in conversation.background.open_jobs)
    if count == noted and max(count.values(), default=0) <= _OPEN_MAX:
        return ""
    return f"{conversation.conversation_id} has {count} open jobs, but records {noted}"


def jobs_with_several_notices(conversation: ConversationRow) -> str:
    """Return an error if a job has several pending iteration notices, otherwise an empty string (ASYNC-5)."""
    notices = conversation.background.notices
    waiting = Counter(each.run_id for each in notices if each.occasion and not each.entered_by)
    jobs = [run_id for run_id, count in waiting.items() if count > 1]
    return f"{conversation.conversation_id}: several iterations of {jobs} have pending notices" if jobs else ""


def concurrent_runs(runs: Iterable[RunRow], conversation: ConversationRow) -> str:
    """Return an error if a conversation has several active runs or records another one, else "" (LOOP-13)."""
    active = [
        run.run_id
        for run in runs
        if run.conversation_id == conversation.conversation_id
        and run.queued_message is None
        and not run.state.is_terminal
    ]
    is_well = active == ([] if conversation.active_run_id is None else [conversation.active_run_id])
    return "" if is_well else f"{conversation.conversation_id}: {active} are active, and {conversation.active_run_id}"


def unstarted_turn(unit: UnitOfWork, operation: Any) -> RunRow | None:
    if not isinstance(operation, Submit):
        return None
    conversation = unit.conversations.get(ConversationKey(operation.store_id, operation.conversation_id))
    if conversation is None or conversation.active_run_id is None:
        return None
    active = unit.runs.get(RunKey(operation.store_id, conversation.active_run_id))
    is_own = active is not None and active.is_turn and active.user_id == operation.user_id
    is_unstarted = active is not None and active.last_commit is None and active.worker_id is None
    return active if is_own and is_unstarted else None


def delayed_message(unit: UnitOfWork, turn: RunRow, outcome: Any) -> str:
    """Return an error if a turn that has not started delayed a user's message, otherwise an empty string (ASYNC-5)."""
    if isinstance(outcome, ConversationBusy) and not unit.conversation_of(turn).queue:
        return f"a message was refused for {turn.run_id}, which had not started"
    after = unit.runs.get(turn.key)
    is_new = isinstance(outcome, Submitted) and outcome.run.conversation_id == turn.conversation_id
    if is_new and outcome.run.queued_message is not None and after is not None and not after.state.is_terminal:
        return f"run {outcome.run.run_id} waits for {turn.run_id}, which had not started"
    return ""
