"""A gated call starts only as what was shown, and only after it was approved (HITL-3, I9, I10)."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.errors import IllegalTransition, InboxChanged, InvalidField
from pawl.job_store.domain import call_table
from pawl.job_store.domain.events import CallChanged
from pawl.job_store.domain.states import CallState, DecisionKind
from tests.unit.job_store.world import DIGEST, EDITED_DIGEST, World, change

STARTS = [CallState.RUNNABLE, CallState.RUNNING, CallState.OFFERED]


def gated(world: World, **fields: Any) -> str:
    """A run with a call `call` that awaits an approval."""
    run_id = world.begin()
    world.commit(run_id, calls=(change("call", CallState.AWAITING_APPROVAL, digest=DIGEST, **fields),))
    return run_id


@pytest.mark.parametrize("state", STARTS)
def test_without_a_decision_it_does_not_start(state: CallState) -> None:
    world = World()
    run_id = gated(world)
    for digest in (DIGEST, ""):
        with pytest.raises(IllegalTransition):
            world.commit(run_id, calls=(change("call", state, digest=digest),))


@pytest.mark.parametrize("state", STARTS)
def test_it_cannot_be_created_as_started(state: CallState) -> None:
    world = World()
    run_id = world.begin()
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(change("call", state, digest=DIGEST),))


def test_only_a_call_that_reads_is_created_with_its_end() -> None:
    """And then both are told: that it began, and how it ended."""
    world = World()
    run_id = world.begin()
    wrong: list[dict[str, Any]] = [{}, {"only_reads": True, "attempt": 0}, {"only_reads": True, "digest": DIGEST}]
    for fields in wrong:
        with pytest.raises(IllegalTransition):
            world.commit(run_id, calls=(change("call", CallState.SUCCEEDED, **fields),))
    for call_id, state in (("call", CallState.SUCCEEDED), ("other", CallState.FAILED)):
        world.commit(run_id, calls=(change(call_id, state, only_reads=True),))
        call = world.call(call_id)
        assert call.start_time == call.end_time is not None
        bodies = [event.body for event in world.unit.events.rows if isinstance(event.body, CallChanged)]
        told = [(body.from_state, body.call.state) for body in bodies if body.call.call_id == call_id]
        assert told == [(None, CallState.RUNNING), (CallState.RUNNING, state)]


@pytest.mark.parametrize("state", STARTS)
def test_an_approved_call_starts_in_the_step_that_consumes_the_approval(state: CallState) -> None:
    world = World()
    run_id = gated(world)
    world.decide(run_id, "call", DecisionKind.APPROVE, "yes")
    with pytest.raises(InboxChanged):
        world.commit(run_id, calls=(change("call", state, digest=DIGEST),))
    world.commit(run_id, calls=(change("call", state, digest=DIGEST),), consumed=("yes",))
    assert world.call("call").state is state
    decision = world.call("call").decision
    assert decision is not None
    assert decision.user_id == "ann"


def test_a_decision_is_consumed_only_with_its_call() -> None:
    world = World()
    run_id = gated(world)
    world.decide(run_id, "call", DecisionKind.APPROVE, "yes")
    with pytest.raises(IllegalTransition):
        world.commit(run_id, consumed=("yes",))


@pytest.mark.parametrize(
    "other",
    [{"arguments": b'{"to":"eve"}'}, {"tool_name": "other"}, {"tool_version": 2}, {"digest": EDITED_DIGEST}],
)
def test_an_approved_call_cannot_become_another_one(other: dict[str, object]) -> None:
    world = World()
    run_id = gated(world)
    world.decide(run_id, "call", DecisionKind.APPROVE, "yes")
    started = change("call", CallState.RUNNING, **({"digest": DIGEST} | other))
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(started,), consumed=("yes",))


def test_an_edited_call_starts_with_the_edited_arguments_and_no_others() -> None:
    world = World()
    run_id = gated(world)
    edit = {"arguments": b'{"to":"bob"}', "edited_digest": EDITED_DIGEST}
    world.decide(run_id, "call", DecisionKind.EDIT, "edit", **edit)
    for wrong in (
        {"digest": DIGEST},
        {"digest": EDITED_DIGEST},
        {"digest": EDITED_DIGEST, "arguments": b'{"to":"eve"}'},
        {"digest": EDITED_DIGEST, "arguments": b'{"to":"bob"}', "tool_name": "other"},
    ):
        with pytest.raises(IllegalTransition):
            world.commit(run_id, calls=(change("call", CallState.RUNNING, **wrong),), consumed=("edit",))
    right = {"digest": EDITED_DIGEST, "arguments": b'{"to":"bob"}'}
    world.commit(run_id, calls=(change("call", CallState.RUNNABLE, **right),), consumed=("edit",))
    world.commit(run_id, calls=(change("call", CallState.RUNNING, **right),))
    world.commit(run_id, calls=(change("call", CallState.SUCCEEDED, **right),))


@pytest.mark.parametrize("kind", [DecisionKind.REJECT, DecisionKind.ANSWER])
def test_a_rejected_or_answered_call_does_not_start(kind: DecisionKind) -> None:
    world = World()
    run_id = gated(world)
    world.decide(run_id, "call", kind, "no")
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(change("call", CallState.RUNNING, digest=DIGEST),), consumed=("no",))
    end = CallState.REJECTED if kind is DecisionKind.REJECT else CallState.SUCCEEDED
    world.commit(run_id, calls=(change("call", end, digest=DIGEST),), consumed=("no",))


@pytest.mark.parametrize("state", [CallState.AWAITING_APPROVAL, CallState.OFFERED, CallState.ASKED])
def test_what_waits_for_somebody_is_not_answered_by_the_owner(state: CallState) -> None:
    world = World()
    run_id = world.begin()
    digest = DIGEST if state is CallState.AWAITING_APPROVAL else ""
    world.commit(run_id, calls=(change("call", state, digest=digest),))
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(change("call", CallState.SUCCEEDED, digest=digest),))


def test_an_approval_needs_a_digest() -> None:
    world = World()
    run_id = world.begin()
    with pytest.raises(InvalidField):
        world.commit(run_id, calls=(change("call", CallState.AWAITING_APPROVAL),))


def test_a_call_does_not_become_gated_on_its_way() -> None:
    world = World()
    run_id = world.begin()
    world.commit(run_id, calls=(change("call", CallState.PROPOSED),))
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(change("call", CallState.RUNNABLE, digest=DIGEST),))


def offered(world: World) -> str:
    """A run with an approved front-end call `call` that is offered, with a fallback."""
    run_id = gated(world, fallback_tool_name="backend")
    world.decide(run_id, "call", DecisionKind.APPROVE, "yes")
    offer = change("call", CallState.OFFERED, digest=DIGEST, fallback_tool_name="backend")
    world.commit(run_id, calls=(offer,), consumed=("yes",))
    return run_id


def test_the_fallback_of_an_approved_call_is_gated_on_its_own() -> None:
    world = World()
    run_id = offered(world)
    again = change("call", CallState.AWAITING_APPROVAL, digest=EDITED_DIGEST, tool_name="backend")
    world.commit(run_id, calls=(again,))
    assert world.call("call").decision is None
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(change("call", CallState.RUNNING, digest=EDITED_DIGEST, tool_name="backend"),))


def test_an_ungated_fallback_may_start_but_no_other_tool() -> None:
    world = World()
    run_id = offered(world)
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(change("call", CallState.RUNNING, tool_name="other"),))
    world.commit(run_id, calls=(change("call", CallState.RUNNING, tool_name="backend"),))


@pytest.mark.parametrize(("state", "after"), sorted(call_table.ONCE_BEGUN))
def test_only_a_call_whose_tool_has_begun_goes_on_after_a_question(state: CallState, after: CallState) -> None:
    for begins in (False, True):
        world = World()
        run_id = world.begin()
        if begins:
            world.commit(run_id, calls=(change("call", CallState.RUNNING),))
        world.commit(run_id, calls=(change("call", state),))
        if begins:
            world.commit(run_id, calls=(change("call", after, attempt=2),))
        else:
            with pytest.raises(IllegalTransition):
                world.commit(run_id, calls=(change("call", after, attempt=2),))


def test_an_answer_to_a_tool_that_asks_leaves_the_approval_of_the_call_as_it_is() -> None:
    world = World()
    run_id = gated(world)
    world.decide(run_id, "call", DecisionKind.APPROVE, "yes")
    world.commit(run_id, calls=(change("call", CallState.RUNNING, digest=DIGEST),), consumed=("yes",))
    world.commit(run_id, calls=(change("call", CallState.ASKED, digest=DIGEST),))
    world.decide(run_id, "call", DecisionKind.ANSWER, "red")
    again = change("call", CallState.RUNNING, digest=DIGEST, attempt=2)
    world.commit(run_id, calls=(again,), consumed=("red",))
