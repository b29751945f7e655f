"""Approvals: who may decide a gated call, how many are needed, and escalation (HITL-4, D6, D7)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.chassis.ids import CallId, UserId
from pawl.errors import IllegalTransition
from pawl.job_store.ledger.rules.command import Steer
from pawl.job_store.ledger.rules.decisions import Decide
from pawl.values import CallState, DecisionKind, DecisionRight
from tests.unit.job_store.world import DIGEST, EDITED_DIGEST, World, change, delegation

CALL = CallId("call")
EDIT: dict[str, Any] = {"arguments": b'{"to":"bob"}', "edited_digest": EDITED_DIGEST}


def gated(world: World, required: int = 1, **who: Any) -> str:
    run_id = world.start_run(**who)
    waits = change("call", CallState.AWAITING_APPROVAL, digest=DIGEST, approvals_required=required)
    world.commit(run_id, calls=(waits,))
    return run_id


def decide(
    world: World,
    run_id: str,
    user_id: str,
    kind: DecisionKind = DecisionKind.APPROVE,
    digest: str = DIGEST,
    *,
    right: DecisionRight = DecisionRight.STORE,
    **who: Any,
) -> tuple[str, str]:
    edit = EDIT if kind is DecisionKind.EDIT else {"arguments": b"", "edited_digest": ""}
    command = Decide(call_id=CALL, kind=kind, right=right, digest=digest, reason="", **edit)
    receipt = world.send(run_id, command, who.pop("command_id", ""), user_id=user_id, **who)
    return receipt.outcome.name, receipt.reason


def starts(world: World, run_id: str, *consumed: str) -> None:
    world.commit(run_id, calls=(change("call", CallState.RUNNABLE, digest=DIGEST),), consumed=consumed)


ACCEPTED = ("ACCEPTED", "")
REFUSED = ("REFUSED", "PERMISSION_DENIED")
AGAIN = ("LATE", "ALREADY_DECIDED")


def test_two_approvals_are_needed_from_users_other_than_the_starter(world: World) -> None:
    run_id = gated(world, 2)
    for kind in DecisionKind:
        assert decide(world, run_id, "ann", kind) == REFUSED
    assert decide(world, run_id, "cyd") == ACCEPTED
    call = world.call("call")
    assert (call.decision, call.reserved_by) == (None, "")
    assert [approval.user_id for approval in call.approvals] == ["cyd"]
    assert world.event_types(run_id)[-1] == "tool.awaiting_approval"
    assert decide(world, run_id, "dan", command_id="second") == ACCEPTED
    starts(world, run_id, "second")
    assert [approval.user_id for approval in world.call("call").approvals] == ["cyd", "dan"]


def by(user_id: str, key: str = "", *people: str, shop: bool = False) -> dict[str, Any]:
    """Return a caller with a key that `people` created, or with a shop's delegate key."""
    delegate = "shop" if shop else ""
    return {"user_id": user_id, "credential_id": key, "people": people, "delegate_user_id": delegate}


# Required approvals, starter, and each further decision with its outcome.
APPROVERS: list[tuple[int, dict[str, Any], list[tuple[dict[str, Any], tuple[str, str]]]]] = [
    (3, by("ann"), [(by("cyd"), ACCEPTED), (by("cyd"), AGAIN), (by("dan"), ACCEPTED), (by("dan"), AGAIN)]),
    (2, by("ann", "k1"), [(by("cyd", "k1"), REFUSED), (by("cyd", "k2"), ACCEPTED), (by("dan", "k2"), REFUSED)]),
    (2, by("ann", "k1", shop=True), [(by("cyd", "k2", shop=True), REFUSED), (by("shop", "k3"), REFUSED)]),
    (
        2,
        by("ann"),
        [(by("cyd", "k2", shop=True), ACCEPTED), (by("dan", "k3", shop=True), REFUSED), (by("shop", "k4"), REFUSED)],
    ),
    (
        2,
        by("ann"),
        [
            (by("olga", "k1", "olga"), ACCEPTED),
            (by("cyd", "k2", "cyd", "olga"), REFUSED),
            (by("dan", "k3", "dan"), ACCEPTED),
        ],
    ),
    (
        2,
        by("ann"),
        [(by("cyd", "k1", "olga"), ACCEPTED), (by("dan", "k2", "olga"), REFUSED), (by("olga", "k3"), REFUSED)],
    ),
    (2, by("ann", "k1", "olga"), [(by("olga", "k2"), REFUSED), (by("cyd", "k3", "olga"), REFUSED)]),
    (2, by("ann", "local"), [(by("cyd", "local"), ACCEPTED), (by("dan", "local"), ACCEPTED)]),
    (2, by("ann"), [(by("cyd"), ACCEPTED), (by("dan"), ACCEPTED)]),
    (1, by("ann", "k1"), [(by("cyd", "k1"), ACCEPTED)]),
]


def test_approvals_by_the_same_person_count_once() -> None:
    """HITL-4: another name, or another key made by the same person, does not count as a second person."""
    for required, starter, decisions in APPROVERS:
        world = World()
        run_id = gated(world, required, **starter)
        assert [decide(world, run_id, **who) for who, _ in decisions] == [outcome for _, outcome in decisions], (
            decisions
        )


def test_users_who_steer_a_run_or_created_the_steering_key_cannot_approve(world: World) -> None:
    run_id = world.start_run(credential_id="k1", people=("ann", "zed"))
    world.send(run_id, Steer(), credential_id="k2", people=("ann", "olga"), delegate_user_id="shop")
    world.commit(run_id, calls=(change("call", CallState.AWAITING_APPROVAL, digest=DIGEST, approvals_required=2),))
    assert world.run(run_id).steered_by == ("olga", "shop")
    for who in (by("olga", "k3"), by("cyd", "k3", "olga"), by("shop", "k3"), by("zed", "k3")):
        for kind in DecisionKind:
            assert decide(world, run_id, kind=kind, **who) == REFUSED
    assert decide(world, run_id, "cyd", credential_id="k4") == ACCEPTED


def test_approvals_are_checked_again_before_the_call_starts(world: World) -> None:
    """The check does not rely on the checks that were made when the approvals were stored."""
    run_id = gated(world, 2)
    decide(world, run_id, "cyd", credential_id="key_1", people=("cyd", "olga"))
    decide(world, run_id, "dan", credential_id="key_2", command_id="second")
    call = world.call("call")
    for people in (("cyd", "olga"), ("dan", "cyd")):
        second = replace(call.approvals[1], people=tuple(map(UserId, people)))
        world.unit.put_call(replace(call, approvals=(call.approvals[0], second)))
        with pytest.raises(IllegalTransition):
            starts(world, run_id, "second")


def test_a_message_does_not_revoke_earlier_approvals(world: World) -> None:
    """The message did not shape the call, and the run's owner must be able to continue with the approval."""
    run_id = gated(world, 2)
    assert decide(world, run_id, "olga") == ACCEPTED
    assert decide(world, run_id, "dan", command_id="second") == ACCEPTED
    world.send(run_id, Steer(), people=("olga",))
    starts(world, run_id, "second")


def test_a_child_run_keeps_the_credential_of_its_parent(world: World) -> None:
    run_id = world.start_run(credential_id="key_1", delegate_user_id="shop")
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
def test_a_call_starts_only_with_enough_distinct_users_and_credentials(
    required: int, started_with: str, decisions: list[tuple[tuple[str, str], DecisionKind]]
) -> None:
    """HITL-4: decisions with one credential are never enough, whatever users they name."""
    world = World()
    run_id = gated(world, required, credential_id=started_with)
    shown: dict[str, Any] = {"digest": DIGEST, "arguments": b"{}"}
    for (user_id, credential_id), kind in decisions:
        who: dict[str, Any] = {"credential_id": credential_id, "command_id": f"cmd_{world.number()}"}
        if decide(world, run_id, user_id, kind, shown["digest"], **who) == ACCEPTED and kind is DecisionKind.EDIT:
            shown = {"digest": EDITED_DIGEST, "arguments": EDIT["arguments"]}
            again = change("call", CallState.AWAITING_APPROVAL, **shown)
            world.commit(run_id, calls=(again,), consumed=(who["command_id"],))
    approvals = world.call("call").approvals
    users = {approval.user_id for approval in approvals} - {"ann"}
    credentials = {approval.credential_id for approval in approvals} - {started_with}
    consumed = tuple(command.command_id for command in world.unit.inbox(world.run(run_id)))
    may_start = min(len(users), len(credentials)) >= required
    with nullcontext() if may_start else pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(change("call", CallState.RUNNABLE, **shown),), consumed=consumed)


def test_an_edit_resets_the_count_and_is_the_first_approval(world: World) -> None:
    run_id = gated(world, 2)
    decide(world, run_id, "cyd")
    assert decide(world, run_id, "dan", DecisionKind.EDIT, command_id="edit") == ACCEPTED
    edited = change(
        "call", CallState.AWAITING_APPROVAL, digest=EDITED_DIGEST, arguments=EDIT["arguments"], approvals_required=1
    )
    running = change("call", CallState.RUNNING, digest=EDITED_DIGEST, arguments=EDIT["arguments"])
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(running,), consumed=("edit",))
    world.commit(run_id, calls=(edited,), consumed=("edit",))
    call = world.call("call")
    assert [approval.user_id for approval in call.approvals] == ["dan"]
    assert (call.decision, call.approvals_required) == (None, 2)
    # Earlier approvals were for another version of the call.
    assert decide(world, run_id, "eve") == ("REFUSED", "DIGEST_MISMATCH")
    assert decide(world, run_id, "dan", digest=EDITED_DIGEST) == AGAIN
    assert decide(world, run_id, "cyd", digest=EDITED_DIGEST, command_id="last") == ACCEPTED
    world.commit(run_id, calls=(running,), consumed=("last",))


def test_lifecycle_events_report_open_and_settled_approvals(world: World) -> None:
    """NOTE-2: each opened or settled approval is reported once."""
    run_id = gated(world)
    decide(world, run_id, "cyd", command_id="cmd")
    starts(world, run_id, "cmd")
    lifecycle_types = [
        event.lifecycle_type for event in world.unit.events.rows if event.lifecycle_type.startswith("run.a")
    ]
    assert lifecycle_types == ["run.awaiting_approval", "run.approval_settled"]


def test_a_user_without_the_approver_right_can_only_answer_questions(world: World) -> None:
    run_id = gated(world)
    assert decide(world, run_id, "ann", right=DecisionRight.QUESTIONS) == REFUSED
    world = World()
    run_id = world.start_run()
    world.commit(run_id, calls=(change("call", CallState.ASKED),))
    assert decide(world, run_id, "ann", DecisionKind.ANSWER, right=DecisionRight.QUESTIONS) == ACCEPTED


def test_an_approval_is_escalated_once_and_otherwise_unchanged(world: World) -> None:
    run_id = gated(world, 2)
    decide(world, run_id, "cyd")
    for digest, refused in ((EDITED_DIGEST, True), (DIGEST, False), (DIGEST, True)):
        again = change("call", CallState.AWAITING_APPROVAL, digest=digest, escalated=True)
        with pytest.raises(IllegalTransition) if refused else nullcontext():
            world.commit(run_id, calls=(again,))
    call = world.call("call")
    assert (call.escalated, [approval.user_id for approval in call.approvals]) == (True, ["cyd"])


NONE, OWN, STORE = DecisionRight.QUESTIONS, DecisionRight.OWN_RUNS, DecisionRight.STORE
HIDDEN = ("UNKNOWN", "RUN_NOT_FOUND")
# Users with their rights. The run belongs to ann.
PEOPLE = [("ann", NONE), ("ann", OWN), ("ann", STORE), ("kim", NONE), ("kim", STORE), ("bob", STORE), ("eve", OWN)]
# Whom a call asks, and the outcome of a decision by each of PEOPLE.
ASKED_FOR_APPROVAL: dict[str | None, list[tuple[str, str]]] = {
    None: [REFUSED, ACCEPTED, ACCEPTED, HIDDEN, ACCEPTED, ACCEPTED, HIDDEN],
    "": [REFUSED, REFUSED, ACCEPTED, HIDDEN, ACCEPTED, ACCEPTED, HIDDEN],
    "ann": [ACCEPTED, ACCEPTED, ACCEPTED, HIDDEN, REFUSED, REFUSED, HIDDEN],
    "kim": [REFUSED, REFUSED, REFUSED, ACCEPTED, ACCEPTED, REFUSED, HIDDEN],
}
ASKED_A_QUESTION: dict[str | None, list[tuple[str, str]]] = {
    None: [ACCEPTED, ACCEPTED, ACCEPTED, HIDDEN, HIDDEN, HIDDEN, HIDDEN],
    "ann": [ACCEPTED, ACCEPTED, ACCEPTED, HIDDEN, HIDDEN, HIDDEN, HIDDEN],
    "kim": [REFUSED, REFUSED, REFUSED, ACCEPTED, ACCEPTED, HIDDEN, HIDDEN],
}


@pytest.mark.parametrize(
    ("state", "kind", "digest", "rows"),
    [
        (CallState.AWAITING_APPROVAL, DecisionKind.APPROVE, DIGEST, ASKED_FOR_APPROVAL),
        (CallState.ASKED, DecisionKind.ANSWER, "", ASKED_A_QUESTION),
    ],
)
def test_only_those_whom_a_call_asks_can_decide_on_it(
    state: CallState, kind: DecisionKind, digest: str, rows: dict[str | None, list[tuple[str, str]]]
) -> None:
    for asked, outcomes in rows.items():
        found = []
        for user_id, right in PEOPLE:
            world = World()
            run_id = world.start_run()
            world.commit(run_id, calls=(change("call", state, digest=digest, asked_user_id=asked),))
            found.append(decide(world, run_id, user_id, kind, digest, right=right))
        assert found == outcomes, asked


def test_whom_a_call_asks_does_not_change(world: World) -> None:
    run_id = world.start_run()
    asks = change("call", CallState.AWAITING_APPROVAL, digest=DIGEST, asked_user_id="kim")
    world.commit(run_id, calls=(asks,))
    world.commit(run_id, calls=(replace(asks, escalated=True, asked_user_id=UserId("ann")),))
    assert world.call("call").asked_user_id == "kim"
