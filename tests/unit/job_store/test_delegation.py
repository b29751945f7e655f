"""Delegated runs (TOOL-7) in the ledger."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from pawl.chassis.ids import RunId, RunKey
from pawl.errors import IllegalTransition, InboxChanged, InvalidField
from pawl.job_store.ledger.rules import inbox, stop
from pawl.job_store.ledger.rules.attention import ReportCrash
from pawl.job_store.ledger.rules.calls import CallChange
from pawl.job_store.ledger.rules.command import Redrive
from pawl.values import CallState, LeaseAction, RunState, StopCause
from tests.unit.job_store.world import STORE, World, change, delegation

CHILD = "run_child"


def delegated(state: CallState = CallState.DELEGATED, **fields: Any) -> CallChange:
    return change("call", state, child_run_id=CHILD, **fields)


def parent_of_child(world: World) -> str:
    run_id = world.start_run()
    world.commit(
        run_id,
        calls=(delegated(),),
        delegations=(delegation("call", CHILD),),
        state=RunState.WAITING,
        waits=(60,),
        lease=LeaseAction.PARK,
    )
    return run_id


def test_the_budget_of_a_removed_run_is_empty(world: World, run_id: str) -> None:
    """LOOP-12: retention removes ended runs while their jobs are open."""
    world.unit.put_run(replace(world.run(run_id), budget_run_id=RunId("run_removed")))
    assert world.commit(run_id, tokens_used=5).shared_tokens_left == 0


def test_a_child_runs_end_enters_the_parents_inbox_once(world: World) -> None:
    parent = parent_of_child(world)
    world.claim(CHILD)
    end: dict[str, Any] = {"state": RunState.COMPLETED, "output": b"out", "usage": b"used", "commit_id": "end"}
    world.commit(CHILD, **end)
    world.commit(CHILD, **end)

    (command,) = world.unit.inbox(world.run(parent))
    ending = stop.read_ending(command.payload)
    assert (command.name, command.call_id) == (inbox.AGENT_ENDED, "call")
    assert (ending.run_id, ending.state, ending.output, ending.usage) == (CHILD, RunState.COMPLETED, b"out", b"used")
    assert world.call("call").reserved_by == command.command_id
    assert world.run(parent).claim_at == world.now, "it may still resume"
    world.claim(parent)
    with pytest.raises(InboxChanged):
        world.commit(parent, calls=(delegated(CallState.CANCELLED),))
    world.commit(parent, calls=(delegated(CallState.SUCCEEDED),), consumed=(command.command_id,))
    assert world.call("call").state is CallState.SUCCEEDED


def test_the_worker_of_a_child_run_is_notified_of_its_cancellation(world: World) -> None:
    """Otherwise its current work would continue to its natural end."""
    parent = parent_of_child(world)
    world.claim(CHILD)
    world.commit(CHILD, state=RunState.RUNNING)
    world.cancel(parent)
    world.claim(parent)
    world.commit(
        parent, calls=(delegated(CallState.CANCELLED),), consumed=world.unread(parent), child_cancel=b"give up"
    )
    child = world.run(CHILD)
    assert (child.state, child.stop_cause) == (RunState.CANCELLING, StopCause.PARENT)
    assert [(command.name, command.payload) for command in world.unit.inbox(child)] == [("cancel", b"give up")]
    assert world.unit.wakeups.rows[-1].run.run_id == CHILD


def test_a_quarantined_run_is_notified_of_its_childs_end_when_redriven(world: World) -> None:
    """Otherwise a run could wait forever for a child that has ended."""
    parent = parent_of_child(world)
    world.release(parent)
    epoch = world.claim(parent)
    world.apply(ReportCrash(run=RunKey(STORE, RunId(parent)), epoch=epoch or 0, crashes_max=1))
    world.claim(CHILD)
    world.commit(CHILD, state=RunState.COMPLETED)
    assert world.run(parent).claim_at is None
    world.send(parent, Redrive(), as_operator=True)
    assert world.run(parent).claim_at == world.now
    assert [command.name for command in world.unit.inbox(world.run(parent))] == [inbox.AGENT_ENDED]


def test_a_call_is_delegated_only_to_a_run_created_in_the_same_step(world: World, run_id: str) -> None:
    bare, itself = change("call", CallState.DELEGATED), change("call", CallState.DELEGATED, child_run_id=run_id)
    for calls, delegations, error in (
        ((delegated(),), (), InvalidField),
        ((bare,), (delegation("call", CHILD),), InvalidField),
        ((delegated(),), (delegation("call", "run_other"),), InvalidField),
        ((), (delegation("call", CHILD),), InvalidField),
        ((delegated(),), (delegation("call", run_id),), InvalidField),
        ((delegated(CallState.RUNNABLE),), (), IllegalTransition),
        ((itself,), (delegation("call", run_id),), IllegalTransition),
    ):
        with pytest.raises(error):
            world.commit(run_id, calls=calls, delegations=delegations)
    assert world.unit.runs.get(RunKey(STORE, RunId(CHILD))) is None
