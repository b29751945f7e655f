"""Runs that do calls of other runs: each begins with the step of its caller, and is given up with its call.

The end of such a run is told by `stop.end`.
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import DEFAULT_AGENT, CallId, ConversationId, RunId, RunKey, UserId
from pawl.errors import IllegalTransition
from pawl.job_store.ledger.rules import jobs, stop, turn
from pawl.job_store.ledger.rules.events import RunChanged
from pawl.job_store.ledger.rules.rows import CallRow, ConversationKey, ConversationRow, RunRow
from pawl.job_store.ledger.rules.unit_of_work import UnitOfWork
from pawl.values import CallState, StopCause


class Delegation(msgspec.Struct, frozen=True, kw_only=True):
    """The run `run_id`, to be created, does the call `call_id`. Opaque: `message` and `options`, as of any new run.

    Its conversation has the title `made_title`, and the agent `agent_name` drives it.
    """

    call_id: CallId
    run_id: RunId
    message: bytes
    options: bytes
    token_budget: int = 0
    token_ceiling: int = 0
    made_title: str = ""
    agent_name: str = DEFAULT_AGENT
    is_job: bool = False
    """True if it goes on when the run that calls ends, and reports to the conversation of that."""
    is_silent: bool = False
    """True if it reports nothing, not even its end."""


def begin(unit: UnitOfWork, parent: RunRow, delegation: Delegation) -> None:
    """Create the run, of the same user and credential, in a conversation of its own; workers may claim it.

    Raises:
        IllegalTransition: there is a run of that id, or it would be one job too many.
    """
    if unit.runs.get(RunKey(parent.store_id, delegation.run_id)) is not None:
        raise IllegalTransition(f"run {delegation.run_id} is there already")
    if delegation.is_job:
        jobs.count_begun(unit, unit.conversation_of(parent), delegation.run_id, parent.user_id)
    conversation = own_conversation(
        unit,
        ConversationKey(parent.store_id, parent.conversation_id),
        user_id=parent.user_id,
        made_title=delegation.made_title,
        parent_run_id=parent.run_id,
    )
    budget = (delegation.token_budget, delegation.token_ceiling)
    run = turn.queued(conversation, delegation.run_id, delegation.message, delegation.options, budget, now=unit.now)
    run = replace(
        run,
        parent_run_id=parent.run_id,
        parent_call_id=delegation.call_id,
        budget_run_id=turn.budget_below(parent),
        agent_name=delegation.agent_name,
        credential_id=parent.credential_id,
        delegate_user_id=parent.delegate_user_id,
        people=parent.people,
        steered_by=parent.steered_by,
        reports_to=parent.conversation_id if delegation.is_job else ConversationId(""),
        generation=parent.generation if delegation.is_job else 0,
        in_background=parent.in_background or delegation.is_job,
        silent=delegation.is_silent,
    )
    turn.give(unit, conversation, run, before=(RunChanged(from_state=None, run=run),))


def own_conversation(
    unit: UnitOfWork, above: ConversationKey, *, user_id: UserId, made_title: str, parent_run_id: RunId
) -> ConversationRow:
    """Make the conversation of a run that works for the conversation `above`; it is erased with that."""
    return unit.put_conversation(
        ConversationRow(
            store_id=above.store_id,
            conversation_id=ConversationId(unit.ids.new("conv")),
            user_id=user_id,
            create_time=unit.now,
            update_time=unit.now,
            made_title=made_title,
            parent_run_id=parent_run_id,
            parent_conversation_id=above.conversation_id,
        )
    )


def give_up(unit: UnitOfWork, call: CallRow, cancel: bytes) -> None:
    """Stop the run that does `call`, which its caller settles without waiting for it.

    `cancel` is what its owner reads of it: what it does now would else go on to its end.
    """
    run = unit.runs.get(RunKey(call.store_id, call.child_run_id))
    is_done = call.state is not CallState.DELEGATED or call.reserved_by
    if not is_done and run is not None:
        stop.command(unit, run, StopCause.PARENT, cancel)
