"""A gated call starts only as shown and after approval, and a grant is one approval for a series (HITL-3, I9, I10)."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from msgspec.structs import replace

from pawl.chassis.ids import CallId, UserId
from pawl.errors import IllegalTransition, InboxChanged, InvalidField, RunNotFound
from pawl.job_store.ledger.rules.calls import CallChange
from pawl.job_store.ledger.rules.command import Receipt, Steer
from pawl.job_store.ledger.rules.decisions import Decide
from pawl.job_store.ledger.rules.events import CallChanged
from pawl.values import CallState, DecisionKind, DecisionRight, Series
from tests.tables import for_each
from tests.unit.job_store.world import DIGEST, EDITED_DIGEST, World, change, delegation

STARTS = (CallState.RUNNABLE, CallState.RUNNING, CallState.OFFERED)
EDITED: dict[str, Any] = {"digest": EDITED_DIGEST, "arguments": b'{"to":"bob"}'}


def gated(world: World, required: int = 1, *, who: dict[str, Any] = {}, **fields: Any) -> str:  # noqa: B006
    """Return a run whose call awaits `required` approvals."""
    run_id = world.start_run(**who)
    waits = change("call", CallState.AWAITING_APPROVAL, digest=DIGEST, approvals_required=required, **fields)
    world.commit(run_id, calls=(waits,))
    return run_id


def start_call(world: World, run_id: str, state: CallState = CallState.RUNNING, *consumed: str, **fields: Any) -> None:
    world.commit(run_id, calls=(change("call", state, **({"digest": DIGEST} | fields)),), consumed=consumed)


@for_each("state", STARTS)
def test_a_gated_call_starts_only_in_the_step_that_consumes_its_approval(state: Any) -> None:
    """I9, I10: no earlier step can start the call."""
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
    """For such a call, both events are sent: its start and its end."""
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


@pytest.mark.parametrize(
    ("kind", "end"), [(DecisionKind.REJECT, CallState.REJECTED), (DecisionKind.ANSWER, CallState.SUCCEEDED)]
)
def test_a_rejected_or_answered_call_does_not_start(world: World, kind: DecisionKind, end: CallState) -> None:
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


def test_a_step_that_gates_a_started_call_or_repeats_an_attempt_is_refused(
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


SERIES = Series(digest="c" * 64, interval_seconds=60.0, iterations_max=3)
OTHER = replace(SERIES, digest="d" * 64)


def asked(world: World, **fields: Any) -> str:
    """Return a run whose first call awaits approval of itself or of its series."""
    run_id = world.start_run()
    world.commit(run_id, calls=(iteration_call("call_1", CallState.AWAITING_APPROVAL, 1, **fields),))
    return run_id


def iteration_call(call_id: str, state: CallState, number: int, **fields: Any) -> CallChange:
    return change(call_id, state, **({"digest": DIGEST, "series": SERIES, "round": number} | fields))


def decide(world: World, run_id: str, user_id: str = "cyd", call_id: str = "call_1", **fields: Any) -> Receipt:
    values: dict[str, Any] = {
        "kind": DecisionKind.APPROVE,
        "digest": SERIES.digest,
        "for_series": True,
        "arguments": b"",
        "edited_digest": "",
        "reason": "",
        "right": DecisionRight.STORE,
    }
    command = Decide(call_id=CallId(call_id), **(values | fields))
    return world.send(run_id, command, f"by_{user_id}_{world.number()}", user_id=user_id)


def started(world: World, run_id: str, **fields: Any) -> None:
    commands = tuple(command.command_id for command in world.unit.inbox(world.run(run_id)))
    world.commit(run_id, calls=(iteration_call("call_1", CallState.RUNNABLE, 1, **fields),), consumed=commands)


def granted(world: World) -> str:
    run_id = asked(world)
    assert decide(world, run_id).reason == ""
    started(world, run_id)
    return run_id


def test_calls_in_a_granted_series_start_once_each_up_to_the_limit(world: World) -> None:
    run_id = granted(world)
    for number in (2, 3):
        for state, attempt in ((CallState.RUNNABLE, 1), (CallState.RUNNING, 1), (CallState.RUNNING, 2)):
            world.commit(run_id, calls=(iteration_call(f"call_{number}", state, number, attempt=attempt),))
    grant = world.run(run_id).grant
    assert grant is not None
    assert (grant.call_id, grant.uses, [each.user_id for each in grant.approvals]) == ("call_1", 3, ["cyd"])
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(iteration_call("call_4", CallState.RUNNABLE, 4),))


@pytest.mark.parametrize(
    "other",
    [
        {"arguments": b'{"to":"eve"}'},
        {"tool_name": "other"},
        {"tool_version": 2},
        {"series": OTHER},
        {"series": None},
        {"series": replace(SERIES, iterations_max=4)},
        {"round": 1},
    ],
)
def test_other_calls_cannot_start_under_a_grant(world: World, other: dict[str, Any]) -> None:
    run_id = granted(world)
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(iteration_call("call_2", CallState.RUNNABLE, 2, **other),))
    assert world.run(run_id).grant.uses == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(("given_by", "enough"), [(("cyd",), 1), (("cyd", "dan"), 2)])
def test_a_grant_covers_calls_only_as_long_as_it_has_enough_approvals(
    world: World, given_by: tuple[str, ...], enough: int
) -> None:
    """I9: the current number of required approvals counts, not the number at the first call."""
    run_id = asked(world, approvals_required=len(given_by))
    assert [decide(world, run_id, user_id).reason for user_id in given_by] == [""] * len(given_by)
    started(world, run_id, approvals_required=len(given_by))
    world.commit(run_id, calls=(iteration_call("call_2", CallState.RUNNABLE, 2, approvals_required=enough),))
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(iteration_call("call_3", CallState.RUNNABLE, 3, approvals_required=enough + 1),))
    assert world.run(run_id).grant.uses == 2  # type: ignore[union-attr]


def test_a_grant_covers_the_edited_series(world: World) -> None:
    """The edit changes the call, the count and the interval of the job from then on."""
    run_id = asked(world)
    edited = replace(OTHER, interval_seconds=5.0, iterations_max=2)
    what: dict[str, Any] = {"arguments": b'{"to":"bob"}', "edited_digest": EDITED_DIGEST, "edited_series": edited}
    assert decide(world, run_id, kind=DecisionKind.EDIT, **what).reason == ""
    for wrong in ({"series": SERIES}, {"series": edited, "arguments": b"{}"}, {"series": None}):
        with pytest.raises(IllegalTransition):
            started(world, run_id, **({"digest": EDITED_DIGEST, "arguments": b'{"to":"bob"}'} | wrong))
    shown: dict[str, Any] = {"digest": EDITED_DIGEST, "arguments": b'{"to":"bob"}', "series": edited}
    started(world, run_id, **shown)
    for number, end in ((2, nullcontext()), (3, pytest.raises(IllegalTransition))):
        with end:
            world.commit(run_id, calls=(iteration_call(f"call_{number}", CallState.RUNNABLE, number, **shown),))
    grant = world.run(run_id).grant
    assert grant is not None
    assert (grant.arguments, grant.series.interval_seconds) == (b'{"to":"bob"}', 5.0)


def test_approving_one_call_does_not_grant_the_series(world: World) -> None:
    run_id = asked(world)
    assert decide(world, run_id, for_series=False, digest=DIGEST).reason == ""
    started(world, run_id)
    assert world.run(run_id).grant is None
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(iteration_call("call_2", CallState.RUNNABLE, 2),))


def test_a_series_grant_needs_an_offer_and_matching_approvals() -> None:
    world, other = World(), World()
    assert decide(other, asked(other, series=None)).reason == "GRANT_NOT_OFFERED"
    run_id = asked(world, approvals_required=2)
    once: dict[str, Any] = {"for_series": False, "digest": DIGEST}
    for user_id, how, reason in (("cyd", {}, ""), ("dan", once, "DIGEST_MISMATCH"), ("dan", {}, "")):
        assert decide(world, run_id, user_id, **how).reason == reason


# Approvals: who may decide a gated call, how many are needed, and escalation (HITL-4, D6, D7).


CALL = CallId("call")
EDIT: dict[str, Any] = {"arguments": b'{"to":"bob"}', "edited_digest": EDITED_DIGEST}


def decided(
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


ACCEPTED = ("ACCEPTED", "")
REFUSED = ("REFUSED", "PERMISSION_DENIED")
AGAIN = ("LATE", "ALREADY_DECIDED")


def test_two_users_other_than_the_starter_must_approve(world: World) -> None:
    run_id = gated(world, 2)
    assert {decided(world, run_id, "ann", kind) for kind in DecisionKind} == {REFUSED}
    assert decided(world, run_id, "cyd") == ACCEPTED
    call = world.call("call")
    assert (call.decision, call.reserved_by, [approval.user_id for approval in call.approvals]) == (None, "", ["cyd"])
    assert world.event_types(run_id)[-1] == "tool.awaiting_approval"
    assert decided(world, run_id, "dan", command_id="second") == ACCEPTED
    start_call(world, run_id, CallState.RUNNABLE, "second")
    assert [approval.user_id for approval in world.call("call").approvals] == ["cyd", "dan"]


def by(user_id: str, key: str = "", *people: str, shop: bool = False) -> dict[str, Any]:
    """Return a caller with a key that `people` created, or with a shop's delegate key."""
    return {"user_id": user_id, "credential_id": key, "people": people, "delegate_user_id": "shop" if shop else ""}


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


@pytest.mark.parametrize(("required", "starter", "decisions"), APPROVERS)
def test_approvals_by_the_same_person_count_once(
    world: World, required: int, starter: dict[str, Any], decisions: list[tuple[dict[str, Any], tuple[str, str]]]
) -> None:
    """HITL-4: another name, or another key made by the same person, does not count as a second person."""
    run_id = gated(world, required, who=starter)
    assert [(who, decided(world, run_id, **who)) for who, _ in decisions] == decisions


def test_users_who_steer_a_run_or_created_the_steering_key_cannot_approve(world: World) -> None:
    run_id = world.start_run(credential_id="k1", people=("ann", "zed"))
    world.send(run_id, Steer(), credential_id="k2", people=("ann", "olga"), delegate_user_id="shop")
    world.commit(run_id, calls=(change("call", CallState.AWAITING_APPROVAL, digest=DIGEST, approvals_required=2),))
    assert world.run(run_id).steered_by == ("olga", "shop")
    for who in (by("olga", "k3"), by("cyd", "k3", "olga"), by("shop", "k3"), by("zed", "k3")):
        assert {decided(world, run_id, kind=kind, **who) for kind in DecisionKind} == {REFUSED}
    assert decided(world, run_id, "cyd", credential_id="k4") == ACCEPTED


def test_approvals_are_checked_again_before_the_call_starts(world: World) -> None:
    """The check does not rely on the checks that were made when the approvals were stored."""
    run_id = gated(world, 2)
    decided(world, run_id, "cyd", credential_id="key_1", people=("cyd", "olga"))
    decided(world, run_id, "dan", credential_id="key_2", command_id="second")
    call = world.call("call")
    for people in (("cyd", "olga"), ("dan", "cyd")):
        second = replace(call.approvals[1], people=tuple(map(UserId, people)))
        world.unit.put_call(replace(call, approvals=(call.approvals[0], second)))
        with pytest.raises(IllegalTransition):
            start_call(world, run_id, CallState.RUNNABLE, "second")


def test_a_message_does_not_revoke_earlier_approvals(world: World) -> None:
    """The message did not shape the call, and the run's owner must be able to continue with the approval."""
    run_id = gated(world, 2)
    decided(world, run_id, "olga")
    decided(world, run_id, "dan", command_id="second")
    world.send(run_id, Steer(), people=("olga",))
    start_call(world, run_id, CallState.RUNNABLE, "second")


def test_a_child_run_keeps_the_credential_of_its_parent(world: World) -> None:
    world.commit(
        world.start_run(credential_id="key_1", delegate_user_id="shop"),
        calls=(change("call", CallState.DELEGATED, child_run_id="run_below"),),
        delegations=(delegation("call", "run_below"),),
    )
    below = world.run("run_below")
    assert (below.user_id, below.credential_id, below.delegate_user_id) == ("ann", "key_1", "shop")


def test_an_edit_resets_the_count_and_is_the_first_approval(world: World) -> None:
    run_id = gated(world, 2)
    decided(world, run_id, "cyd")
    assert decided(world, run_id, "dan", DecisionKind.EDIT, command_id="edit") == ACCEPTED
    edited = change(
        "call", CallState.AWAITING_APPROVAL, digest=EDITED_DIGEST, arguments=EDIT["arguments"], approvals_required=1
    )
    running = change("call", CallState.RUNNING, digest=EDITED_DIGEST, arguments=EDIT["arguments"])
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(running,), consumed=("edit",))
    world.commit(run_id, calls=(edited,), consumed=("edit",))
    call = world.call("call")
    assert ([each.user_id for each in call.approvals], call.decision, call.approvals_required) == (["dan"], None, 2)
    # Earlier approvals were for another version of the call.
    assert decided(world, run_id, "eve") == ("REFUSED", "DIGEST_MISMATCH")
    assert decided(world, run_id, "dan", digest=EDITED_DIGEST) == AGAIN
    assert decided(world, run_id, "cyd", digest=EDITED_DIGEST, command_id="last") == ACCEPTED
    world.commit(run_id, calls=(running,), consumed=("last",))


def test_lifecycle_events_report_open_and_settled_approvals(world: World) -> None:
    """NOTE-2: each opened or settled approval is reported once."""
    run_id = gated(world)
    decided(world, run_id, "cyd", command_id="cmd")
    start_call(world, run_id, CallState.RUNNABLE, "cmd")
    lifecycle_types = [
        event.lifecycle_type for event in world.unit.events.rows if event.lifecycle_type.startswith("run.a")
    ]
    assert lifecycle_types == ["run.awaiting_approval", "run.approval_settled"]


def test_a_user_without_the_approver_right_can_only_answer_questions(world: World, run_id: str) -> None:
    other = World()
    assert decided(other, gated(other), "ann", right=DecisionRight.QUESTIONS) == REFUSED
    world.commit(run_id, calls=(change("call", CallState.ASKED),))
    assert decided(world, run_id, "ann", DecisionKind.ANSWER, right=DecisionRight.QUESTIONS) == ACCEPTED


def test_an_approval_can_be_escalated_once_and_otherwise_does_not_change(world: World) -> None:
    run_id = gated(world, 2)
    decided(world, run_id, "cyd")
    for digest, refused in ((EDITED_DIGEST, True), (DIGEST, False), (DIGEST, True)):
        again = change("call", CallState.AWAITING_APPROVAL, digest=digest, escalated=True)
        with pytest.raises(IllegalTransition) if refused else nullcontext():
            world.commit(run_id, calls=(again,))
    call = world.call("call")
    assert (call.escalated, [approval.user_id for approval in call.approvals]) == (True, ["cyd"])
