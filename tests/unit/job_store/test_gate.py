"""A gated call starts only as shown, and only after approval (HITL-3, I9, I10)."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.errors import IllegalTransition, InboxChanged, InvalidField, RunNotFound
from pawl.job_store.ledger.rules.events import CallChanged
from pawl.values import CallState, DecisionKind
from tests.unit.job_store.world import DIGEST, EDITED_DIGEST, World, change

STARTS = (CallState.RUNNABLE, CallState.RUNNING, CallState.OFFERED)
EDITED: dict[str, Any] = {"digest": EDITED_DIGEST, "arguments": b'{"to":"bob"}'}


def gated(world: World, **fields: Any) -> str:
    run_id = world.start_run()
    world.commit(run_id, calls=(change("call", CallState.AWAITING_APPROVAL, digest=DIGEST, **fields),))
    return run_id


def start_call(world: World, run_id: str, state: CallState = CallState.RUNNING, *consumed: str, **fields: Any) -> None:
    world.commit(run_id, calls=(change("call", state, **({"digest": DIGEST} | fields)),), consumed=consumed)


def test_a_gated_call_starts_only_in_the_step_that_consumes_its_approval() -> None:
    """I9, I10: no step starts it before its approval."""
    for state in STARTS:
        world = World()
        run_id = world.start_run()
        with pytest.raises(IllegalTransition):
            start_call(world, run_id, state)
        world = World()
        run_id = gated(world)
        for digest in (DIGEST, ""):
            with pytest.raises(IllegalTransition):
                start_call(world, run_id, state, digest=digest)
        world.decide(run_id, "call", DecisionKind.APPROVE, "yes")
        with pytest.raises(InboxChanged):
            start_call(world, run_id, state)
        start_call(world, run_id, state, "yes")
        assert world.call("call").decision.user_id == "ann"  # type: ignore[union-attr]


def test_only_a_read_only_call_may_be_created_as_settled(world: World, run_id: str) -> None:
    """Then both events are sent: its start and its end."""
    wrong: list[dict[str, Any]] = [{}, {"only_reads": True, "attempt": 0}, {"only_reads": True, "digest": DIGEST}]
    for fields in wrong:
        with pytest.raises(IllegalTransition):
            world.commit(run_id, calls=(change("call", CallState.SUCCEEDED, **fields),))
    for call_id, state in (("call", CallState.SUCCEEDED), ("other", CallState.FAILED)):
        world.commit(run_id, calls=(change(call_id, state, only_reads=True),))
        call = world.call(call_id)
        assert call.start_time == call.end_time is not None
        bodies = [event.body for event in world.unit.events.rows if isinstance(event.body, CallChanged)]
        transitions = [(body.from_state, body.call.state) for body in bodies if body.call.call_id == call_id]
        assert transitions == [(None, CallState.RUNNING), (CallState.RUNNING, state)]


def test_an_approved_or_edited_call_starts_only_as_decided() -> None:
    """I9, I10: other arguments, tools, versions and digests are refused."""
    others: list[dict[str, Any]] = [
        {"arguments": b'{"to":"eve"}'},
        {"tool_name": "other"},
        {"tool_version": 2},
        {"digest": "ef" * 32},
    ]
    as_shown: list[dict[str, Any]] = [{"digest": DIGEST}, {"arguments": b"{}"}, {"digest": DIGEST, "arguments": b"{}"}]
    edit = {"arguments": EDITED["arguments"], "edited_digest": EDITED_DIGEST}
    rows: list[tuple[DecisionKind, dict[str, Any], dict[str, Any], list[dict[str, Any]]]] = [
        (DecisionKind.APPROVE, {}, {"digest": DIGEST}, others),
        (DecisionKind.EDIT, edit, EDITED, others + as_shown),
    ]
    for kind, decision, right, wrong in rows:
        world = World()
        run_id = gated(world)
        world.decide(run_id, "call", kind, "decided", **decision)
        for other in wrong:
            with pytest.raises(IllegalTransition):
                start_call(world, run_id, CallState.RUNNING, "decided", **(right | other))
        for state in (CallState.RUNNABLE, CallState.RUNNING, CallState.SUCCEEDED):
            start_call(world, run_id, state, *world.unread(run_id), **right)


def test_a_rejected_or_answered_call_does_not_start() -> None:
    for kind, end in ((DecisionKind.REJECT, CallState.REJECTED), (DecisionKind.ANSWER, CallState.SUCCEEDED)):
        world = World()
        run_id = gated(world)
        world.decide(run_id, "call", kind, "no")
        with pytest.raises(IllegalTransition):
            start_call(world, run_id, CallState.RUNNING, "no")
        start_call(world, run_id, end, "no")


def test_an_answer_to_a_tool_leaves_its_approval_unchanged(world: World) -> None:
    run_id = gated(world)
    world.decide(run_id, "call", DecisionKind.APPROVE, "yes")
    start_call(world, run_id, CallState.RUNNING, "yes")
    start_call(world, run_id, CallState.ASKED)
    world.decide(run_id, "call", DecisionKind.ANSWER, "red")
    start_call(world, run_id, CallState.RUNNING, "red", attempt=2)


def test_an_approved_front_end_call_starts_only_as_its_fallback(world: World) -> None:
    run_id = gated(world, fallback_tool_name="backend")
    world.decide(run_id, "call", DecisionKind.APPROVE, "yes")
    start_call(world, run_id, CallState.OFFERED, "yes", fallback_tool_name="backend")
    with pytest.raises(IllegalTransition):
        start_call(world, run_id, digest="", tool_name="other")
    start_call(world, run_id, digest="", tool_name="backend")


def test_a_step_cannot_gate_late_repeat_attempts_or_change_foreign_calls(
    world: World,
    run_id: str,
) -> None:
    world.commit(run_id, calls=(change("call", CallState.PROPOSED),))
    with pytest.raises(IllegalTransition):
        start_call(world, run_id, CallState.RUNNABLE)
    start_call(world, run_id, digest="", attempt=1)
    with pytest.raises(IllegalTransition):
        start_call(world, run_id, digest="", attempt=1)
    other = world.start_run(conversation_id="other")
    with pytest.raises(InvalidField):
        start_call(world, other, digest="", attempt=2)
    start_call(world, run_id, digest="", attempt=2)
    with pytest.raises(RunNotFound):
        world.commit("run_none", 1)
