"""Child runs, which execute other runs' calls.

A child starts with its parent's step and is cancelled with its call.

`stop.end` reports the end of a child run to its parent.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import DEFAULT_AGENT, CallId, ConversationId, RunId, RunKey, UserId
from pawl.errors import IllegalTransition
from pawl.job_store.ledger.rules import jobs, stop, turn
from pawl.job_store.ledger.rules.events import RunChanged
from pawl.job_store.ledger.rules.rows import CallRow, ConversationKey, ConversationRow, RunRow
from pawl.job_store.ledger.rules.states import RunProgram
from pawl.job_store.ledger.rules.unit_of_work import UnitOfWork
from pawl.values import CallState, RunState, StopCause


class Delegation(msgspec.Struct, frozen=True, kw_only=True):
    """A new run `run_id`, which executes the call `call_id`.

    `message` and `options` are opaque.

    The run's agent is `agent_name`, and its conversation has the title `made_title`. A job (`is_job`) continues after
    the parent run ends, and reports to the root conversation. If `is_silent` is set, the job reports nothing, not even
    its end.
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
    is_silent: bool = False
    labels: Mapping[str, str] = {}
    program: RunProgram = RunProgram.DEFAULT
    traceparent: str = ""


def start(unit: UnitOfWork, parent: RunRow, delegation: Delegation) -> None:
    """Create the child run, in its own conversation, for the user of the parent run and with the parent's credential.

    Workers may claim the child run immediately. If a run above `parent` is being stopped, but `parent` has not been
    cancelled yet, a new job is CANCELLED immediately.

    Raises:
        IllegalTransition: The run already exists, the user has too many open jobs, or the conversation that the job
            reports to was removed.
    """
    if unit.runs.get(RunKey(parent.store_id, delegation.run_id)) is not None:
        raise IllegalTransition(f"run {delegation.run_id} already exists")
    if delegation.is_job:
        reported_to = unit.conversations.get(ConversationKey(parent.store_id, parent.jobs_conversation_id))
        if reported_to is None:
            raise IllegalTransition(f"conversation {parent.jobs_conversation_id} was removed")
        jobs.add_open_job(unit, reported_to, delegation.run_id, parent.user_id, agents_above=parent.agents_down_to)
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
        reports_to=parent.jobs_conversation_id if delegation.is_job else ConversationId(""),
        root_conversation_id=ConversationId("") if delegation.is_job else parent.jobs_conversation_id,
        agents_above=parent.agents_down_to,
        generation=parent.generation if delegation.is_job else 0,
        in_background=parent.in_background or delegation.is_job,
        silent=delegation.is_silent,
        labels=delegation.labels,
        program=delegation.program,
        trace=delegation.traceparent,
    )
    above = (unit.runs.get(RunKey(parent.store_id, run_id)) for run_id in (parent.parent_run_id, *parent.agents_above))
    is_late = delegation.is_job and any(each and each.state is RunState.CANCELLING for each in above)
    run = replace(run, silent=run.silent or is_late)
    run = turn.give(unit, conversation, run, before=(RunChanged(from_state=None, run=run),))
    if is_late:
        stop.request(unit, run, StopCause.PARENT)


def own_conversation(
    unit: UnitOfWork, above: ConversationKey, *, user_id: UserId, made_title: str, parent_run_id: RunId
) -> ConversationRow:
    """Create a conversation for a run that works for the conversation `above`. It is erased together with `above`."""
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


def cancel_child(unit: UnitOfWork, call: CallRow, cancel: bytes) -> None:
    """Stop the child run of `call`.

    If a job above the call was stopped, also stop the jobs that the child run has started. The parent settles the call
    without waiting for the child run. `cancel` is the command for the runs' owners.
    """
    run = unit.runs.get(RunKey(call.store_id, call.child_run_id))
    is_done = call.state is not CallState.DELEGATED or call.reserved_by
    if not is_done and run is not None:
        stop.command(unit, run, StopCause.PARENT, cancel)
        if run.in_background:
            stop.jobs_below(unit, run, cancel)
