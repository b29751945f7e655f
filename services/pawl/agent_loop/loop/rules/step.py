"""One step of a run: the difference between two states, as committed to the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import loop_state
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.fact import Command, OwnerEvent
from pawl.agent_loop.loop.rules.loop_state import JobCursor
from pawl.agent_loop.loop.rules.message import Message
from pawl.agent_loop.loop.rules.run import (
    Delegation,
    Goal,
    GoalCriterion,
    JobProgress,
    Notice,
    PinnedTool,
    Run,
    RunFailure,
)
from pawl.agent_loop.loop.rules.state import State
from pawl.chassis.ids import CallId, CommandId, RunId
from pawl.values import ENDED, LeaseAction, RunState, StopCause, Usage, WaitKind

T = TypeVar("T")

# Target size of a step. Items that would exceed it wait for the next step. Items that cannot wait, such as the model's
# answer, have limits of their own that let the step fit into a message.
BYTES_MAX: Final = 2 * 1024 * 1024

_encode: Final = msgspec.msgpack.Encoder().encode


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """Changes to write atomically. None or an empty value means that there is no change."""

    events: tuple[OwnerEvent, ...] = ()
    messages: tuple[Message, ...] = ()
    calls: tuple[Call, ...] = ()
    state: RunState | None = None
    waits: tuple[WaitKind, ...] = ()
    failure: RunFailure | None = None
    stop_cause: StopCause | None = None
    round: int | None = None
    usage: Usage | None = None
    # Only set with `usage`.
    delegated_usage: Usage | None = None
    # Only set with `usage`: the model whose calls changed it.
    model: str = ""
    # Only set with `usage`.
    tokens_needed: int = 0
    # Only set with `usage`: tokens of the run's own model calls since the last step.
    tokens_used: int = 0
    budget_run_id: RunId = RunId("")
    output_text: str | None = None
    # Only set with `output_text`.
    output_json: bytes = b""
    # Only set with `output_text`.
    missed_iterations: int = 0
    # Only set with `output_text`.
    job_progress: JobProgress | None = None
    # Only set with `output_text`: the raised limits of the run's goal.
    goal_limits: Goal | None = None
    active_seconds: float | None = None
    tools: tuple[PinnedTool, ...] = ()
    loop_state: bytes | None = None
    consumed_command_ids: tuple[CommandId, ...] = ()
    lease_action: LeaseAction = LeaseAction.KEEP
    wake_time: float | None = None
    # All of them, if the step adds any.
    unstopped_call_ids: tuple[CallId, ...] = ()
    # The current end of the log. Required if the step's messages refer to the seqs of the step's own events.
    after_seq: int | None = None
    # Runs for the calls that this step delegates.
    delegations: tuple[Delegation, ...] = ()
    entered_notices: tuple[Notice, ...] = ()
    tells_iteration: int = 0
    # True if a job's open call has progressed.
    has_progressed: bool = False
    # Number of events that nodes have taken, so that the run no longer keeps them.
    events_taken: int = 0
    # True if a model should write the conversation's title now that the run has answered.
    asks_title: bool = False
    # The context of the run's first span. Set only in the first step after the span has started.
    trace: str = ""

    @property
    def changes_nothing(self) -> bool:
        return replace(self, active_seconds=None, budget_run_id=RunId("")) == Step()


def size_bytes(entry: Call | Command) -> int:
    return len(_encode(entry))


def fitting(sizes: Sequence[int], bytes_max: int) -> int:
    """Return how many entries, counted from the first, fit into one step.

    If there are any entries, at least one counts as fitting.
    """
    total = 0
    for count, size in enumerate(sizes):
        total += size
        if count and total > bytes_max:
            return count
    return len(sizes)


def between(
    base: State,
    after: State,
    events: Sequence[OwnerEvent],
    *,
    lease_action: LeaseAction = LeaseAction.KEEP,
    wake_time: float | None = None,
) -> Step:
    old, new = base.run, after.run
    # The ledger sets CANCELLING itself, in the transaction that accepts the cancellation.
    moved = new.state is not RunState.CANCELLING and (new.state, new.waits) != (old.state, old.waits)
    messages = after.messages[_kept(base, after) :]
    changes_output = _output(new) != _output(old)
    changes_usage = (new.usage, new.tokens_needed) != (old.usage, old.tokens_needed)
    names_own_seqs = any(message.last_output_seq > old.last_seq for message in messages)
    return Step(
        events=tuple(events),
        messages=messages,
        calls=tuple(call for call_id, call in after.calls.items() if base.calls.get(call_id) != call),
        state=new.state if moved else None,
        waits=new.waits if moved else (),
        failure=new.failure,
        stop_cause=new.stop_cause if moved and new.state is RunState.CANCELLED else None,
        round=_changed(old.round, new.round),
        usage=new.usage if changes_usage else None,
        delegated_usage=new.delegated_usage if changes_usage and new.delegated_usage != Usage() else None,
        model=base.model if changes_usage else "",
        tokens_needed=new.tokens_needed if changes_usage else 0,
        tokens_used=after.run.own_tokens - base.run.own_tokens,
        budget_run_id=new.budget_run_id,
        output_text=new.output_text if changes_output else None,
        output_json=new.output_json if changes_output else b"",
        missed_iterations=new.missed_iterations if changes_output else 0,
        job_progress=new.job_progress if changes_output else None,
        goal_limits=_raised_limits(new) if changes_output else None,
        active_seconds=after.active_seconds,
        tools=new.tools if new.tools != old.tools else (),
        loop_state=loop_state.write(after.loop) if after.loop != base.loop else None,
        consumed_command_ids=after.consumed,
        lease_action=lease_action,
        wake_time=wake_time,
        unstopped_call_ids=_changed(old.unstopped_call_ids, new.unstopped_call_ids) or (),
        after_seq=old.last_seq if names_own_seqs else None,
        delegations=after.delegations,
        entered_notices=after.entered,
        events_taken=after.events_taken,
        has_progressed=_advances(after) > _advances(base),
        tells_iteration=0 if new.state in ENDED else after.tells_iteration,
    )


def committed(after: State, last_seq: int, shared_tokens_left: int | None) -> State:
    """Return the ledger's state after it has accepted the step that leads to `after`.

    `last_seq` is 0 if the step had no events. The messages get the same numbers here as in the ledger, because only the
    active run's worker appends to a conversation.
    """
    known = len(after.messages)
    while known and not after.messages[known - 1].number:
        known -= 1
    last = after.messages[known - 1].number if known else 0
    added = (replace(message, number=number) for number, message in enumerate(after.messages[known:], last + 1))
    run = replace(after.run, last_seq=max(last_seq, after.run.last_seq), active_seconds=after.active_seconds)
    written = replace(
        after, run=run, messages=(*after.messages[:known], *added), consumed=(), delegations=(), entered=()
    )
    return with_shared_budget(replace(written, tells_iteration=0, events_taken=0), shared_tokens_left)


def with_shared_budget(state: State, left: int | None) -> State:
    return replace(state, shared_tokens_max=None if left is None else left + state.run.own_tokens)


def _advances(state: State) -> int:
    cursor = state.loop.cursor
    return cursor.advances if isinstance(cursor, JobCursor) else 0


def _output(run: Run) -> tuple[object, ...]:
    return run.output_text, run.output_json, run.missed_iterations, run.job_progress, run.goal


def _raised_limits(run: Run) -> Goal | None:
    """Return a goal with only its limits set. The ledger already has the other fields."""
    goal = run.goal
    if goal is None:
        return None
    return Goal(aim="", criterion=GoalCriterion(), attempts_max=goal.attempts_max, deadline_time=goal.deadline_time)


def _kept(base: State, after: State) -> int:
    known = len(base.messages)
    if after.messages[:known] == base.messages:
        return known
    ids = {id(message) for message in base.messages}
    return next((n for n, message in enumerate(after.messages) if id(message) not in ids), len(after.messages))


def _changed(old: T, new: T) -> T | None:
    return new if new != old else None
