"""Who decides a gated call, how many it takes, and what happens when nobody does (HITL-4, D6, D7)."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.chassis.ids import CallId
from pawl.errors import IllegalTransition, RequestIdReused
from pawl.job_store.domain.command import Decide, Receipt
from pawl.job_store.domain.states import CallState, CommandOutcome, DecisionKind, DecisionRight
from tests.unit.job_store.world import DIGEST, EDITED_DIGEST, World, change

EDIT: dict[str, Any] = {"arguments": b'{"to":"bob"}', "edited_digest": EDITED_DIGEST}


def gated(world: World, required: int = 1, **fields: Any) -> str:
    """A run of ann with a call `call` that needs the approval of so many people."""
    run_id = world.begin()
    waits = change("call", CallState.AWAITING_APPROVAL, digest=DIGEST, approvals_required=required, **fields)
    world.commit(run_id, calls=(waits,))
    return run_id


def decide(
    world: World,
    run_id: str,
    user_id: str,
    kind: DecisionKind = DecisionKind.APPROVE,
    right: DecisionRight = DecisionRight.STORE,
    **fields: Any,
) -> Receipt:
    values: dict[str, Any] = {"digest": DIGEST, "arguments": b"", "edited_digest": "", "reason": ""}
    command_id = fields.pop("command_id", f"cmd_{user_id}_{world.number()}")
    command = Decide(call_id=CallId("call"), kind=kind, right=right, **(values | fields))
    return world.send(run_id, command, command_id, user_id=user_id)


def said(receipt: Receipt) -> tuple[str, str]:
    return receipt.outcome.name, receipt.reason


TAKEN = ("ACCEPTED", "")


def test_an_approver_decides_calls_of_other_users() -> None:
    world = World()
    run_id = gated(world)
    assert said(decide(world, run_id, "cyd")) == TAKEN
    decision = world.call("call").decision
    assert decision is not None
    assert decision.user_id == "cyd"


@pytest.mark.parametrize("right", [DecisionRight.OWN_RUNS, DecisionRight.QUESTIONS])
def test_without_the_right_a_run_of_another_user_is_not_there(right: DecisionRight) -> None:
    world = World()
    run_id = gated(world)
    assert said(decide(world, run_id, "cyd", right=right)) == ("UNKNOWN", "RUN_NOT_FOUND")


def test_an_approver_knows_nothing_of_calls_of_others_that_need_no_approval() -> None:
    world = World()
    run_id = world.begin()
    world.commit(run_id, calls=(change("call", CallState.ASKED),))
    assert said(decide(world, run_id, "cyd", DecisionKind.ANSWER)) == ("UNKNOWN", "RUN_NOT_FOUND")


def test_a_user_without_the_right_answers_questions_only() -> None:
    world = World()
    run_id = gated(world)
    refused = decide(world, run_id, "ann", right=DecisionRight.QUESTIONS)
    assert said(refused) == ("REFUSED", "PERMISSION_DENIED")
    world = World()
    run_id = world.begin()
    world.commit(run_id, calls=(change("call", CallState.ASKED),))
    assert said(decide(world, run_id, "ann", DecisionKind.ANSWER, DecisionRight.QUESTIONS)) == TAKEN


def test_two_people_are_needed_and_whoever_started_the_run_is_none_of_them() -> None:
    world = World()
    run_id = gated(world, 2)
    for kind in DecisionKind:
        assert said(decide(world, run_id, "ann", kind)) == ("REFUSED", "PERMISSION_DENIED")
    assert said(decide(world, run_id, "cyd")) == TAKEN
    call = world.call("call")
    assert (call.decision, call.reserved_by) == (None, "")
    assert [approval.user_id for approval in call.approvals] == ["cyd"]
    assert world.event_types(run_id)[-1] == "tool.awaiting_approval"
    assert said(decide(world, run_id, "dan", command_id="second")) == TAKEN
    world.commit(run_id, calls=(change("call", CallState.RUNNABLE, digest=DIGEST),), consumed=("second",))
    assert [approval.user_id for approval in world.call("call").approvals] == ["cyd", "dan"]


@pytest.mark.parametrize("state", [CallState.RUNNABLE, CallState.RUNNING, CallState.OFFERED])
def test_with_one_approval_of_two_it_does_not_start(state: CallState) -> None:
    world = World()
    run_id = gated(world, 2)
    decide(world, run_id, "cyd")
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(change("call", state, digest=DIGEST),))


def test_a_person_counts_once() -> None:
    world = World()
    run_id = gated(world, 3)
    assert said(decide(world, run_id, "cyd")) == TAKEN
    assert said(decide(world, run_id, "cyd")) == ("LATE", "ALREADY_DECIDED")
    assert said(decide(world, run_id, "dan")) == TAKEN
    assert said(decide(world, run_id, "dan")) == ("LATE", "ALREADY_DECIDED")
    assert world.call("call").decision is None


def test_a_lost_answer_to_an_approval_can_be_asked_for_again() -> None:
    world = World()
    run_id = gated(world, 2)
    assert decide(world, run_id, "cyd", command_id="mine").outcome is CommandOutcome.ACCEPTED
    assert decide(world, run_id, "cyd", command_id="mine").outcome is CommandOutcome.DUPLICATE
    assert len(world.call("call").approvals) == 1


def test_a_request_id_belongs_to_whoever_used_it_first() -> None:
    """Otherwise the second person's approval would be taken for a repetition, and be lost."""
    world = World()
    run_id = gated(world, 2)
    decide(world, run_id, "cyd", command_id="same")
    with pytest.raises(RequestIdReused):
        decide(world, run_id, "dan", command_id="same")


def test_one_rejection_rejects() -> None:
    world = World()
    run_id = gated(world, 2)
    decide(world, run_id, "cyd")
    assert said(decide(world, run_id, "dan", DecisionKind.REJECT)) == TAKEN
    assert said(decide(world, run_id, "eve")) == ("LATE", "ALREADY_DECIDED")


def test_an_edit_begins_the_count_anew_and_is_the_first_approval() -> None:
    world = World()
    run_id = gated(world, 2)
    decide(world, run_id, "cyd")
    assert said(decide(world, run_id, "dan", DecisionKind.EDIT, command_id="edit", **EDIT)) == TAKEN
    edited = change(
        "call", CallState.AWAITING_APPROVAL, digest=EDITED_DIGEST, arguments=EDIT["arguments"], approvals_required=1
    )
    with pytest.raises(IllegalTransition):
        starts = change("call", CallState.RUNNING, digest=EDITED_DIGEST, arguments=EDIT["arguments"])
        world.commit(run_id, calls=(starts,), consumed=("edit",))
    world.commit(run_id, calls=(edited,), consumed=("edit",))
    call = world.call("call")
    assert [approval.user_id for approval in call.approvals] == ["dan"]
    assert (call.decision, call.approvals_required) == (None, 2)
    # What was approved before was another call.
    assert said(decide(world, run_id, "eve")) == ("REFUSED", "DIGEST_MISMATCH")
    assert said(decide(world, run_id, "dan", digest=EDITED_DIGEST)) == ("LATE", "ALREADY_DECIDED")
    assert said(decide(world, run_id, "cyd", digest=EDITED_DIGEST, command_id="last")) == TAKEN
    starts = change("call", CallState.RUNNING, digest=EDITED_DIGEST, arguments=EDIT["arguments"])
    world.commit(run_id, calls=(starts,), consumed=("last",))


def test_a_request_is_escalated_once_and_stays_what_it_was() -> None:
    world = World()
    run_id = gated(world, 2)
    decide(world, run_id, "cyd")
    again = change("call", CallState.AWAITING_APPROVAL, digest=DIGEST, escalated=True)
    other = change("call", CallState.AWAITING_APPROVAL, digest=EDITED_DIGEST, escalated=True)
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(other,))
    world.commit(run_id, calls=(again,))
    call = world.call("call")
    assert call.escalated
    assert [approval.user_id for approval in call.approvals] == ["cyd"]
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(again,))


def test_only_a_question_with_a_default_is_settled_by_nobody() -> None:
    for has_default in (True, False):
        world = World()
        run_id = world.begin()
        world.commit(run_id, calls=(change("call", CallState.ASKED, has_default=has_default),))
        settled = change("call", CallState.SUCCEEDED, result=b"", has_default=has_default)
        if has_default:
            world.commit(run_id, calls=(settled,))
        else:
            with pytest.raises(IllegalTransition):
                world.commit(run_id, calls=(settled,))
