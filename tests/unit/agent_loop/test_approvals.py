"""Approvals by several people, and requests and questions that nobody sees to, in the loop (HITL-1, HITL-4)."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pawl.agent_loop.app import approvers
from pawl.agent_loop.app.drive import Left
from pawl.agent_loop.app.public_values import DecisionRight
from pawl.agent_loop.domain import options, proposals
from pawl.agent_loop.domain.call import CallResult, CallState, DecisionKind
from pawl.agent_loop.domain.command import ToolResult, TopUp
from pawl.agent_loop.domain.limits import Limits
from pawl.agent_loop.domain.run import ApprovalExpiryPolicy, RunOptions, RunState, WaitKind
from pawl.agent_loop.domain.state import MODEL
from pawl.agent_loop.domain.tool import Disposition, Verdict
from pawl.chassis.auth import Principal
from pawl.chassis.ids import CallId, StoreId, UserId
from pawl.errors import InvalidField, PermissionDenied
from tests.fakes.loop_world import World
from tests.fakes.model import calls, says
from tests.unit.agent_loop.scenario import VERDICTS
from tests.unit.agent_loop.simulation import Simulation, answer


def started(*names: str, asked: RunOptions | None = None) -> Simulation:
    """A run whose model asked for these calls."""
    run = Simulation([answer(*names)], asked or RunOptions())
    run.turn()
    run.model_answers()
    return run


def test_an_edit_that_others_have_to_approve_is_shown_again() -> None:
    """D6: the editor's approval counts for the edited call, and the model is told of the edit."""
    run = started("gated", asked=RunOptions(approvals_required=2))
    run.decides(run.calls[0], DecisionKind.EDIT)
    call = run.calls[0]
    assert call.state is CallState.AWAITING_APPROVAL
    assert call.approval is not None
    assert (call.approval.digest, call.arguments_json) == ("e", b'{"edited":true}')
    assert [decided.kind for decided in call.approval.approvals] == [DecisionKind.EDIT]
    assert run.started == []
    run.decides(run.calls[0], DecisionKind.APPROVE)
    assert run.started == [call.call_id]
    run.ends(call.call_id)
    result = run.calls[0].result
    assert result is not None
    assert "A reviewer edited this call" in result.note


def test_a_request_is_escalated_once() -> None:
    run = started("gated", asked=RunOptions(approval_expiry_policy=ApprovalExpiryPolicy.ESCALATE))
    run.passes(900)
    call = run.calls[0]
    assert call.state is CallState.AWAITING_APPROVAL
    assert call.approval is not None
    assert call.approval.escalated
    assert (run.run.state, run.run.waits) == (RunState.WAITING, (WaitKind.APPROVAL,))
    states = []
    for seconds in (899, 1):
        run.passes(seconds)
        states.append(run.calls[0].state)
    assert states == [CallState.AWAITING_APPROVAL, CallState.EXPIRED]
    assert MODEL in run.under_way


def test_a_question_with_a_default_is_answered_by_it_in_its_own_time() -> None:
    """HITL-1: the model is told that nobody answered."""
    run = started("ask_by_default")
    states = []
    for seconds in (59, 1):
        run.passes(seconds)
        states.append(run.calls[0].state)
    assert states == [CallState.ASKED, CallState.SUCCEEDED]
    call = run.calls[0]
    assert call.result is not None
    assert call.result.content_json == b'{"answer":"blue"}'
    assert "Nobody answered" in call.result.note
    assert MODEL in run.under_way


def test_several_questions_each_get_their_own_answer() -> None:
    """HITL-1, C3"""
    run = started("ask", "ask_by_default", "ask")
    run.decides(run.calls[2], DecisionKind.ANSWER)
    run.decides(run.calls[0], DecisionKind.REJECT)
    assert MODEL not in run.under_way
    run.passes(60)
    states = [call.state for call in run.calls]
    assert states == [CallState.REJECTED, CallState.SUCCEEDED, CallState.SUCCEEDED]
    assert MODEL in run.under_way


@pytest.mark.parametrize(("tool", "run", "required"), [(0, 0, 1), (2, 0, 2), (0, 3, 3), (2, 3, 3), (4, 3, 4)])
def test_the_largest_number_of_approvals_holds(tool: int, run: int, required: int) -> None:
    """D6"""
    call = replace(started("gated").calls[0], state=CallState.PROPOSED)
    verdict = Verdict(call_id=CallId(""), disposition=Disposition.APPROVE, digest="d", approvals_required=tool)
    judged = proposals.judged(call, verdict, RunOptions(approvals_required=run), 0.0)
    assert judged.approval is not None
    assert judged.approval.approvals_required == required


def test_a_run_may_ask_for_more_approvals_than_the_deployment_and_not_for_fewer() -> None:
    defaults = options.RunDefaults(model="m", approvals_required=2)
    for asked, required in ((0, 2), (1, 2), (3, 3)):
        assert options.complete(options.AskedOptions(approvals_required=asked), defaults).approvals_required == required
    with pytest.raises(InvalidField):
        options.complete(options.AskedOptions(approvals_required=6), defaults)


@pytest.mark.parametrize(
    ("roles", "right"),
    [
        ((), DecisionRight.OWN_RUNS),
        (("member",), DecisionRight.QUESTIONS),
        (("viewer", "operator"), DecisionRight.QUESTIONS),
        (("member", "approver"), DecisionRight.STORE),
        (("admin",), DecisionRight.STORE),
    ],
)
def test_the_role_says_what_somebody_may_decide(roles: tuple[str, ...], right: DecisionRight) -> None:
    """HITL-4, OPS-1"""
    caller = Principal(store_id=StoreId("acme"), user_id=UserId("ann"), roles=frozenset(roles))
    assert approvers.decision_right(caller) is right
    if right is not DecisionRight.STORE:
        with pytest.raises(PermissionDenied):
            approvers.require_approver(caller)


async def test_a_log_that_grows_before_every_step_is_no_reason_to_fail_a_run_that_several_people_approve() -> None:
    """As with front ends that tell how far they are. Each approval is in the log: the step must know all of it."""

    world = World(VERDICTS, [calls('mail {"n":1}', 'show {"n":1}', 'show {"n":2}'), says("Sent.")])
    options = RunOptions(approvals_required=2, limits=Limits(total_tokens_max=1_000_000))
    key = world.ledger.submit("hello", options)
    assert await world.drive() is Left.PARKED
    _, shown, _ = world.ledger.calls(key)
    result = CallResult(content_json=b'"shown"')
    await world.ledger.send(key, ToolResult(call_id=shown.call_id, result=result))
    grown = 0

    async def fault(name: str, done: bool) -> None:
        nonlocal grown
        if name == "CommitRun" and not done and grown < 50:
            grown += 1
            await world.ledger.send(key, TopUp(tokens=1))

    world.ledger.fault = fault
    assert await world.drive() is Left.PARKED
    assert grown == 50
    assert [call.state for call in world.ledger.calls(key)][:2] == [
        CallState.AWAITING_APPROVAL,
        CallState.SUCCEEDED,
    ]
