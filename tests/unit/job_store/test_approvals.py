"""Who decides a gated call, how many it takes, and what happens when nobody does (HITL-4, D6, D7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.chassis.ids import CallId, CommandId, UserId
from pawl.errors import IllegalTransition, QueueFull, RequestIdReused
from pawl.job_store.domain.command import Receipt, Steer
from pawl.job_store.domain.decisions import Decide
from pawl.job_store.domain.inbox import Limits
from pawl.job_store.domain.states import CallState, CommandOutcome, DecisionKind, DecisionRight, MessagePolicy, RunState
from tests.unit.job_store.world import DIGEST, EDITED_DIGEST, World, change, delegation

EDIT: dict[str, Any] = {"arguments": b'{"to":"bob"}', "edited_digest": EDITED_DIGEST}


def gated(
    world: World,
    required: int = 1,
    *,
    credential_id: str = "",
    delegate_user_id: str = "",
    people: tuple[str, ...] = (),
    **fields: Any,
) -> str:
    """A run of ann with a call `call` that needs the approval of so many people."""
    run_id = world.begin(credential_id=credential_id, delegate_user_id=delegate_user_id, people=people)
    waits = change("call", CallState.AWAITING_APPROVAL, digest=DIGEST, approvals_required=required, **fields)
    world.commit(run_id, calls=(waits,))
    return run_id


def decide(
    world: World,
    run_id: str,
    user_id: str,
    kind: DecisionKind = DecisionKind.APPROVE,
    right: DecisionRight = DecisionRight.STORE,
    *,
    credential_id: str = "",
    delegate_user_id: str = "",
    people: tuple[str, ...] = (),
    **fields: Any,
) -> Receipt:
    values: dict[str, Any] = {"digest": DIGEST, "arguments": b"", "edited_digest": "", "reason": ""}
    command_id = fields.pop("command_id", f"cmd_{user_id}_{world.number()}")
    command = Decide(call_id=CallId("call"), kind=kind, right=right, **(values | fields))
    who: dict[str, Any] = {"user_id": user_id, "credential_id": credential_id, "delegate_user_id": delegate_user_id}
    who["people"] = people
    return world.send(run_id, command, command_id, **who)


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


def test_the_credential_that_started_the_run_decides_nothing_whoever_it_says_that_it_is() -> None:
    world = World()
    run_id = gated(world, 2, credential_id="key_1")
    for kind in DecisionKind:
        refused = decide(world, run_id, "cyd", kind, credential_id="key_1")
        assert said(refused) == ("REFUSED", "PERMISSION_DENIED")
        assert "your credential started the run" in refused.message
    assert said(decide(world, run_id, "cyd", credential_id="key_2")) == TAKEN


def test_a_credential_approves_once_whoever_it_says_that_it_is() -> None:
    world = World()
    run_id = gated(world, 3, credential_id="key_1")
    assert said(decide(world, run_id, "cyd", credential_id="key_2")) == TAKEN
    refused = decide(world, run_id, "dan", credential_id="key_2")
    assert said(refused) == ("REFUSED", "PERMISSION_DENIED")
    assert "your credential has approved this call" in refused.message
    assert said(decide(world, run_id, "cyd", credential_id="key_3")) == ("LATE", "ALREADY_DECIDED")
    assert said(decide(world, run_id, "dan", credential_id="key_3")) == TAKEN
    given = [(approval.user_id, approval.credential_id) for approval in world.call("call").approvals]
    assert given == [("cyd", "key_2"), ("dan", "key_3")]


def test_a_delegate_approves_nothing_that_it_started_for_somebody_also_with_another_key() -> None:
    world = World()
    run_id = gated(world, 2, credential_id="key_1", delegate_user_id="shop")
    for user_id in ("cyd", "shop"):
        refused = decide(world, run_id, user_id, credential_id="key_2", delegate_user_id="shop")
        assert said(refused) == ("REFUSED", "PERMISSION_DENIED")
    assert said(decide(world, run_id, "shop", credential_id="key_3")) == ("REFUSED", "PERMISSION_DENIED")
    assert said(decide(world, run_id, "cyd", credential_id="key_4")) == TAKEN


def test_a_delegate_approves_once_with_all_its_keys_and_names() -> None:
    world = World()
    run_id = gated(world, 2, credential_id="key_1")
    assert said(decide(world, run_id, "cyd", credential_id="key_2", delegate_user_id="shop")) == TAKEN
    refused = decide(world, run_id, "dan", credential_id="key_3", delegate_user_id="shop")
    assert said(refused) == ("REFUSED", "PERMISSION_DENIED")
    assert said(decide(world, run_id, "shop", credential_id="key_4")) == ("REFUSED", "PERMISSION_DENIED")
    assert world.call("call").decision is None
    assert said(decide(world, run_id, "dan", credential_id="key_5")) == TAKEN
    assert world.call("call").decision is not None


def test_who_makes_a_key_for_somebody_does_not_approve_a_second_time_with_it() -> None:
    """Nor who makes one with that one: all come from the same hands."""
    world = World()
    run_id = gated(world, 2)
    made = {"cyd": ("cyd", "olga"), "dan": ("dan", "olga")}
    assert said(decide(world, run_id, "olga", credential_id="key_1", people=("olga",))) == TAKEN
    for user_id, people in made.items():
        refused = decide(world, run_id, user_id, credential_id=f"key_of_{user_id}", people=people)
        assert said(refused) == ("REFUSED", "PERMISSION_DENIED")
        assert "with a key that somebody else has made acts who made it" in refused.message
    assert world.call("call").decision is None
    assert said(decide(world, run_id, "dan", credential_id="key_5", people=("dan",))) == TAKEN
    assert world.call("call").decision is not None


def test_keys_that_one_person_has_made_are_one_approval() -> None:
    world = World()
    run_id = gated(world, 2)
    assert said(decide(world, run_id, "cyd", credential_id="key_1", people=("cyd", "olga"))) == TAKEN
    refused = decide(world, run_id, "dan", credential_id="key_2", people=("dan", "olga"))
    assert said(refused) == ("REFUSED", "PERMISSION_DENIED")
    assert said(decide(world, run_id, "olga", credential_id="key_3")) == ("REFUSED", "PERMISSION_DENIED")


def test_who_made_the_key_that_started_the_run_approves_nothing_of_it() -> None:
    world = World()
    run_id = gated(world, 2, credential_id="key_1", people=("ann", "olga"))
    refused = decide(world, run_id, "olga", credential_id="key_2", people=("olga",))
    assert said(refused) == ("REFUSED", "PERMISSION_DENIED")
    refused = decide(world, run_id, "cyd", credential_id="key_3", people=("cyd", "olga"))
    assert said(refused) == ("REFUSED", "PERMISSION_DENIED")
    assert said(decide(world, run_id, "cyd", credential_id="key_4", people=("cyd",))) == TAKEN


STEERS: dict[str, Callable[[World, str, dict[str, Any]], object]] = {
    "command": lambda world, run_id, who: world.send(run_id, Steer(), **who),
    "message": lambda world, _, who: world.submit(MessagePolicy.STEER, **who),
}


@pytest.mark.parametrize("steer", STEERS.values(), ids=STEERS)
def test_who_made_the_key_that_steers_the_run_approves_nothing_of_it(
    steer: Callable[[World, str, dict[str, Any]], object],
) -> None:
    world = World()
    run_id = world.begin(credential_id="key_1", people=("ann", "zed"))
    steer(world, run_id, {"credential_id": "key_2", "people": ("ann", "olga"), "delegate_user_id": "shop"})
    waits = change("call", CallState.AWAITING_APPROVAL, digest=DIGEST, approvals_required=2)
    world.commit(run_id, calls=(waits,))
    assert world.run(run_id).steered_by == ("olga", "shop")
    for user_id, people in {"olga": ("olga",), "cyd": ("cyd", "olga"), "shop": (), "zed": ()}.items():
        for kind in DecisionKind:
            refused = decide(world, run_id, user_id, kind, credential_id="key_3", people=people)
            assert said(refused) == ("REFUSED", "PERMISSION_DENIED")
    assert "neither started nor steered" in refused.message
    assert said(decide(world, run_id, "cyd", credential_id="key_4")) == TAKEN
    assert said(decide(world, run_id, "dan", credential_id="key_5", command_id="second")) == TAKEN
    world.commit(run_id, calls=(change("call", CallState.RUNNABLE, digest=DIGEST),), consumed=("second",))


def test_a_message_takes_back_no_approval_that_was_given_before() -> None:
    """It has not shaped the call; and its owner, who goes on by the approval, must not be refused."""
    world = World()
    run_id = gated(world, 2)
    assert said(decide(world, run_id, "olga")) == TAKEN
    assert said(decide(world, run_id, "dan", command_id="second")) == TAKEN
    world.send(run_id, Steer(), people=("olga",))
    world.commit(run_id, calls=(change("call", CallState.RUNNABLE, digest=DIGEST),), consumed=("second",))


def test_who_steers_a_run_above_or_below_has_steered_the_run() -> None:
    world = World()
    run_id = world.begin()
    world.send(run_id, Steer(), people=("olga",))
    calls = (change("call", CallState.DELEGATED, child_run_id="run_below"),)
    world.commit(run_id, calls=calls, delegations=(delegation("call", "run_below"),))
    assert world.run("run_below").steered_by == ("olga",)
    world.send("run_below", Steer(), people=("cyd",))
    assert world.run(run_id).steered_by == ("olga",)
    world.claim("run_below")
    world.commit("run_below", state=RunState.RUNNING)
    inbox = tuple(command.command_id for command in world.unit.inbox(world.run("run_below")))
    world.commit("run_below", state=RunState.COMPLETED, consumed=inbox)
    assert world.run(run_id).steered_by == ("cyd", "olga")


def test_a_run_takes_messages_of_so_many_people() -> None:
    world = World()
    run_id = world.begin(people=("zed",))
    limits = Limits(people_max=2)
    for user_id in ("olga", "zed", "cyd", "olga"):
        world.send(run_id, Steer(), people=(user_id,), inbox_limits=limits)
    with pytest.raises(QueueFull, match="queue this one"):
        world.send(run_id, Steer(), people=("dan",), inbox_limits=limits)
    assert world.run(run_id).steered_by == ("cyd", "olga")
    assert world.send(run_id, Steer(), inbox_limits=limits).outcome is CommandOutcome.ACCEPTED


@pytest.mark.parametrize("people", [("cyd", "olga"), ("dan", "cyd")])
def test_approvals_of_the_same_people_do_not_let_it_start(people: tuple[str, ...]) -> None:
    """However they got there: they are counted again before the call begins."""
    world = World()
    run_id = gated(world, 2)
    decide(world, run_id, "cyd", credential_id="key_1", people=("cyd", "olga"))
    decide(world, run_id, "dan", credential_id="key_2", command_id="second")
    call = world.call("call")
    first, second = call.approvals
    second = replace(second, people=tuple(UserId(user_id) for user_id in people))
    world.unit.put_call(replace(call, approvals=(first, second)))
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(change("call", CallState.RUNNABLE, digest=DIGEST),), consumed=("second",))


@pytest.mark.parametrize("credential_id", ["", "local"])
def test_what_tells_nobody_apart_is_no_reason_to_refuse(credential_id: str) -> None:
    """Nothing is known of what was before; and the key of a machine belongs to everybody on it."""
    world = World()
    run_id = gated(world, 2, credential_id=credential_id)
    assert said(decide(world, run_id, "cyd", credential_id=credential_id)) == TAKEN
    assert said(decide(world, run_id, "dan", credential_id=credential_id, command_id="second")) == TAKEN
    world.commit(run_id, calls=(change("call", CallState.RUNNABLE, digest=DIGEST),), consumed=("second",))


def test_where_one_approval_is_enough_it_may_be_by_the_credential_that_started_the_run() -> None:
    world = World()
    run_id = gated(world, credential_id="key_1")
    assert said(decide(world, run_id, "cyd", credential_id="key_1")) == TAKEN


def test_a_run_that_does_a_call_keeps_the_credential_of_the_run_that_calls() -> None:
    world = World()
    run_id = world.begin(credential_id="key_1", delegate_user_id="shop")
    world.commit(
        run_id,
        calls=(change("call", CallState.DELEGATED, child_run_id="run_below"),),
        delegations=(delegation("call", "run_below"),),
    )
    below = world.run("run_below")
    assert (below.user_id, below.credential_id, below.delegate_user_id) == ("ann", "key_1", "shop")


_WHO = st.tuples(st.sampled_from(["ann", "bob", "cyd", "dan", "eve"]), st.sampled_from(["key_1", "key_2", "key_3"]))
_DECISIONS = st.lists(st.tuples(_WHO, st.sampled_from([DecisionKind.APPROVE, DecisionKind.EDIT])), max_size=12)


@given(required=st.integers(2, 4), started_with=st.sampled_from(["", "key_0", "key_1"]), decisions=_DECISIONS)
def test_a_call_starts_only_with_as_many_users_and_as_many_credentials_as_it_needs(
    required: int, started_with: str, decisions: list[tuple[tuple[str, str], DecisionKind]]
) -> None:
    """HITL-4: so no sequence of decisions by one credential is enough, under whatever names."""
    world = World()
    run_id = gated(world, required, credential_id=started_with)
    shown: dict[str, Any] = {"digest": DIGEST, "arguments": b"{}"}
    for (user_id, credential_id), kind in decisions:
        more = EDIT if kind is DecisionKind.EDIT else {}
        who = {"credential_id": credential_id, "command_id": f"cmd_{world.number()}"}
        receipt = decide(world, run_id, user_id, kind, **{"digest": shown["digest"]} | more | who)
        if kind is DecisionKind.EDIT and receipt.outcome is CommandOutcome.ACCEPTED:
            shown = {"digest": EDITED_DIGEST, "arguments": EDIT["arguments"]}
            again = change("call", CallState.AWAITING_APPROVAL, **shown)
            world.commit(run_id, calls=(again,), consumed=(who["command_id"],))
    approvals = world.call("call").approvals
    users = {approval.user_id for approval in approvals} - {"ann"}
    credentials = {approval.credential_id for approval in approvals} - {started_with}
    starts = change("call", CallState.RUNNABLE, **shown)
    consumed = [command.command_id for command in world.unit.inbox(world.run(run_id))]
    if min(len(users), len(credentials)) < required:
        with pytest.raises(IllegalTransition):
            world.commit(run_id, calls=(starts,), consumed=tuple(consumed))
    else:
        world.commit(run_id, calls=(starts,), consumed=tuple(consumed))


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


def test_the_life_cycle_tells_when_a_call_is_put_to_people_and_when_it_is_no_more() -> None:
    """NOTE-2."""
    world = World()
    run_id = gated(world)
    decide(world, run_id, "cyd", command_id="cmd")
    world.commit(run_id, calls=(change("call", CallState.RUNNABLE, digest=DIGEST),), consumed=(CommandId("cmd"),))
    told = [event.lifecycle_type for event in world.unit.events.rows if event.lifecycle_type.startswith("run.a")]
    assert told == ["run.awaiting_approval", "run.approval_settled"]
