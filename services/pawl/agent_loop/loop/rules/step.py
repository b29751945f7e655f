"""One step of a run: what a commit writes, found as the difference of two states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import loop_state
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.fact import Command, OwnerEvent
from pawl.agent_loop.loop.rules.message import Message
from pawl.agent_loop.loop.rules.run import Delegation, Notice, PinnedTool, RunFailure
from pawl.agent_loop.loop.rules.state import State
from pawl.chassis.ids import CallId, CommandId, RunId
from pawl.values import ENDED, LeaseAction, RunState, StopCause, Usage, WaitKind

T = TypeVar("T")

BYTES_MAX: Final = 2 * 1024 * 1024
"""A step that brings something takes no further thing that makes it larger than this, as far as that can be chosen.

What goes along in any case, as the answer of the model, has bounds of its own: the whole fits into a message.
"""

_encode: Final = msgspec.msgpack.Encoder().encode


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """The changes to write, all or nothing; None and empty leave things as they are."""

    events: tuple[OwnerEvent, ...] = ()
    messages: tuple[Message, ...] = ()
    calls: tuple[Call, ...] = ()
    state: RunState | None = None
    waits: tuple[WaitKind, ...] = ()
    failure: RunFailure | None = None
    stop_cause: StopCause | None = None
    round: int | None = None
    usage: Usage | None = None
    tokens_needed: int = 0
    """Goes with `usage`."""
    tokens_used: int = 0
    """Goes with `usage`: the tokens of its own model calls since the last step."""
    budget_run_id: RunId = RunId("")
    output_text: str | None = None
    output_json: bytes = b""
    """Of the `output_text`, and only with it."""
    missed_iterations: int = 0
    """Goes with `output_text`."""
    active_seconds: float | None = None
    tools: tuple[PinnedTool, ...] = ()
    loop_state: bytes | None = None
    consumed_command_ids: tuple[CommandId, ...] = ()
    lease_action: LeaseAction = LeaseAction.KEEP
    wake_time: float | None = None
    unstopped_call_ids: tuple[CallId, ...] = ()
    """All of them, with a step that adds any."""
    after_seq: int | None = None
    """The seq at which the log must end now, for a step whose messages name seqs of its own events."""
    delegations: tuple[Delegation, ...] = ()
    """The runs that do the calls which this step delegates."""
    entered_notices: tuple[Notice, ...] = ()
    tells_iteration: int = 0
    asks_title: bool = False
    """True if a model is to make the title of the conversation, as the run has answered."""

    @property
    def changes_nothing(self) -> bool:
        """True if there is nothing that must become durable."""
        return replace(self, active_seconds=None, budget_run_id=RunId("")) == Step()


def size_bytes(entry: Call | Command) -> int:
    """Return about how much an entry adds to a step."""
    return len(_encode(entry))


def fitting(sizes: Sequence[int], bytes_max: int) -> int:
    """Return how many of some entries, the first ones, go into one step; one does in any case."""
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
    """Return the step that takes the ledger from `base`, which it has, to `after`."""
    old, new = base.run, after.run
    # CANCELLING is the ledger's own doing, in the transaction that takes the cancel.
    moved = new.state is not RunState.CANCELLING and (new.state, new.waits) != (old.state, old.waits)
    messages = after.messages[_kept(base, after) :]
    changes_output = (new.output_text, new.output_json, new.missed_iterations) != (
        old.output_text,
        old.output_json,
        old.missed_iterations,
    )
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
        tokens_needed=new.tokens_needed if changes_usage else 0,
        tokens_used=after.own_tokens - base.own_tokens,
        budget_run_id=new.budget_run_id,
        output_text=new.output_text if changes_output else None,
        output_json=new.output_json if changes_output else b"",
        missed_iterations=new.missed_iterations if changes_output else 0,
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
        tells_iteration=0 if new.state in ENDED else after.tells_iteration,
    )


def committed(after: State, last_seq: int, shared_tokens_left: int | None) -> State:
    """Return the state that the ledger has once it has taken a step that leads to `after`.

    `last_seq` is 0 if the step made no event. Messages get the numbers that the ledger gives: only the owner of the
    active run appends to a conversation.
    """
    last = max((message.number for message in after.messages), default=0)
    messages = []
    for message in after.messages:
        last += not message.number
        messages.append(message if message.number else replace(message, number=last))
    run = replace(after.run, last_seq=max(last_seq, after.run.last_seq), active_seconds=after.active_seconds)
    written = replace(after, run=run, messages=tuple(messages), consumed=(), delegations=(), entered=())
    return with_shared_budget(replace(written, tells_iteration=0), shared_tokens_left)


def with_shared_budget(state: State, left: int | None) -> State:
    """Return the state with the tokens left of the budget that the run uses."""
    return replace(state, shared_tokens_max=None if left is None else left + state.own_tokens)


def _kept(base: State, after: State) -> int:
    """Return how many messages at the beginning of `after` the ledger has: new ones stand at the end."""
    known = {id(message) for message in base.messages}
    return next((n for n, message in enumerate(after.messages) if id(message) not in known), len(after.messages))


def _changed(old: T, new: T) -> T | None:
    return new if new != old else None
