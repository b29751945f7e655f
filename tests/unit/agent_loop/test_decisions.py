"""TOOL-6: decisions about calls are in the audit chain before they take effect."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator

import msgspec
import pytest
from msgspec.structs import replace

from pawl.agent_loop.loop.drive import Drive, DriveEnd
from pawl.agent_loop.loop.ports import CallContext
from pawl.agent_loop.loop.rules import options, proposals
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.fact import Decide, Steer
from pawl.agent_loop.loop.rules.run import ApprovalExpiryPolicy, RunOptions
from pawl.agent_loop.loop.rules.state import MODEL
from pawl.agent_loop.loop.rules.tool import ExecutionPiece, Verdict
from pawl.chassis.ids import CallId, CallKey, RunKey
from pawl.errors import (
    InvalidField,
)
from pawl.values import CallState, DecisionKind, Disposition, Execution, RunState, WaitKind
from tests.fakes.loop_world import World
from tests.fakes.model import calls, says
from tests.fakes.registry import FakeRegistry
from tests.unit.agent_loop.scenario import DIGEST, VERDICTS, present
from tests.unit.agent_loop.simulation import Simulation, started


class Witness(FakeRegistry):
    async def execute(self, context: CallContext, execution: Execution) -> AsyncGenerator[ExecutionPiece, None]:
        assert not execution.approved_digest or execution.call_id in {decision.call_id for decision in self.decisions}
        async for piece in super().execute(context, execution):
            yield piece


def with_registry(world: World, registry: FakeRegistry) -> World:
    world.registry = registry
    world.dependencies = dataclasses.replace(world.dependencies, registry=registry)
    return world


@pytest.mark.parametrize(
    ("decision", "state", "arguments"),
    [
        (Decide(call_id=CallId(""), kind=DecisionKind.REJECT, reason="no"), CallState.REJECTED, b'{"n":1}'),
        (
            Decide(call_id=CallId(""), kind=DecisionKind.EDIT, arguments_json=b'{"n":2}', edited_digest=DIGEST),
            CallState.SUCCEEDED,
            b'{"n":2}',
        ),
        (Decide(call_id=CallId(""), kind=DecisionKind.ANSWER, answer="blue"), CallState.SUCCEEDED, b'{"n":1}'),
    ],
    ids=["rejected", "edited", "answered"],
)
async def test_every_kind_of_decision_is_recorded(decision: Decide, state: CallState, arguments: bytes) -> None:
    world = with_registry(World(VERDICTS, [calls('mail {"n":1}'), says("Done.")]), Witness(VERDICTS))
    key = world.ledger.submit("hello")
    assert await world.drive() is DriveEnd.PARKED
    (mail,) = world.ledger.calls(key)
    await world.ledger.send(key, replace(decision, call_id=mail.call_id))
    world.registry.unreachable = 3
    await world.finish(key)
    assert world.ledger.calls(key)[0].state is state
    recorded = [(note.call_id, note.kind, note.arguments_json) for note in world.registry.decisions]
    assert recorded == [(mail.call_id, decision.kind, arguments)]


async def held(world: World, key: RunKey, tool_name: str = "show") -> Call:
    (call,) = (call for call in world.ledger.calls(key) if call.tool_name == tool_name)
    calls, call_key = world.ledger.tables.calls, CallKey(key.store_id, CallId(call.call_id))
    calls[call_key] = msgspec.structs.replace(calls[call_key], start_time=world.ledger.time())
    await asyncio.sleep(2.0)
    return call


async def test_a_call_that_was_claimed_just_before_its_withdrawal_is_recorded() -> None:
    """The client leases the call after the worker has read the run and before the step that withdraws the call."""
    scripts = [calls('look {"n":1}', 'show {"n":1}'), says("Done.")]
    world = with_registry(World(VERDICTS, scripts), FakeRegistry(VERDICTS))
    world.registry.seconds = 60.0
    key = world.ledger.submit("hello")
    drive = Drive(await world.claim(), world.dependencies)
    driving = asyncio.create_task(drive.run())
    await asyncio.sleep(10.0)

    async def claim_before_the_step(name: str, done: bool) -> None:
        if name == "CommitRun" and not done:
            world.ledger.fault = None
            await held(world, key)

    world.ledger.fault = claim_before_the_step
    await world.ledger.send(key, Steer(text="in blue, please"))
    drive.wake()
    await driving
    assert [(note.tool_name, note.state) for note in world.registry.returned] == [("show", CallState.CANCELLED)]


# Approvals by several people, and requests and questions that time out (HITL-1, HITL-4).


def test_an_edited_call_still_requires_the_remaining_approvals() -> None:
    """D6: the editor's approval counts for the edited call, and the model sees that it was edited."""
    run = started(("gated",), options=RunOptions(approvals_required=2))
    run.decides(run.calls[0], DecisionKind.EDIT)
    call, approval = run.calls[0], present(run.calls[0].approval)
    assert (call.state, call.arguments_json) == (CallState.AWAITING_APPROVAL, b'{"edited":true}')
    assert (approval.digest, [decided.kind for decided in approval.approvals]) == ("e", [DecisionKind.EDIT])
    assert run.started == []
    run.decides(run.calls[0], DecisionKind.APPROVE)
    assert run.started == [call.call_id]
    run.ends(call.call_id)
    assert "A reviewer edited this call" in present(run.calls[0].result).note


def states_after(run: Simulation, *seconds: float) -> list[CallState]:
    """Return the state of the first call after each of these times."""
    states = []
    for each in seconds:
        run.passes(each)
        states.append(run.calls[0].state)
    return states


def test_an_approval_request_is_escalated_once() -> None:
    run = started(("gated",), options=RunOptions(approval_expiry_policy=ApprovalExpiryPolicy.ESCALATE))
    run.passes(86_400)
    (call,) = run.calls
    assert (call.state, present(call.approval).escalated) == (CallState.AWAITING_APPROVAL, True)
    assert (run.run.state, run.run.waits) == (RunState.WAITING, (WaitKind.APPROVAL,))
    assert states_after(run, 86_399, 1) == [CallState.AWAITING_APPROVAL, CallState.EXPIRED]
    assert MODEL in run.under_way


def test_a_question_times_out_to_its_default_answer() -> None:
    """HITL-1: the model learns that the question timed out."""
    run = started(("ask_by_default",))
    assert states_after(run, 59, 1) == [CallState.ASKED, CallState.SUCCEEDED]
    result = present(run.calls[0].result)
    assert (result.content_json, "No answer arrived" in result.note) == (b'{"answer":"blue"}', True)
    assert MODEL in run.under_way


@pytest.mark.parametrize(("tool", "run", "required"), [(0, 0, 1), (2, 0, 2), (0, 3, 3), (2, 3, 3), (4, 3, 4)])
def test_the_highest_number_of_required_approvals_applies(tool: int, run: int, required: int) -> None:
    """D6: both the tool and the run may give a number."""
    call = replace(started(("gated",)).calls[0], state=CallState.PROPOSED)
    verdict = Verdict(call_id=CallId(""), disposition=Disposition.APPROVE, digest="d", approvals_required=tool)
    judged = proposals.apply_verdict(call, verdict, RunOptions(approvals_required=run), 0.0)
    assert present(judged.approval).approvals_required == required


def test_a_run_may_raise_the_number_of_required_approvals_but_not_lower_it() -> None:
    defaults = options.RunDefaults(model="m", approvals_required=2)
    for asked, required in ((0, 2), (1, 2), (3, 3)):
        assert options.complete(options.AskedOptions(approvals_required=asked), defaults).approvals_required == required
    with pytest.raises(InvalidField):
        options.complete(options.AskedOptions(approvals_required=6), defaults)
