"""A gated call starts only as shown and after approval, and a grant is one approval for a series (HITL-3, I9, I10)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.chassis.ids import CallId
from pawl.errors import IllegalTransition, InboxChanged, InvalidField, RunNotFound
from pawl.job_store.ledger.rules.calls import CallChange
from pawl.job_store.ledger.rules.command import Receipt
from pawl.job_store.ledger.rules.decisions import Decide
from pawl.job_store.ledger.rules.events import CallChanged
from pawl.values import CallState, DecisionKind, DecisionRight, Series
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


SERIES = Series(digest="c" * 64, interval_seconds=60.0, iterations_max=3)
OTHER = replace(SERIES, digest="d" * 64)


def asked(world: World, **fields: Any) -> str:
    """Return a run whose first call awaits approval, of the call or of its series."""
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
        world.commit(run_id, calls=(iteration_call(f"call_{number}", CallState.RUNNABLE, number),))
        world.commit(run_id, calls=(iteration_call(f"call_{number}", CallState.RUNNING, number, attempt=1),))
        world.commit(run_id, calls=(iteration_call(f"call_{number}", CallState.RUNNING, number, attempt=2),))
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
def test_no_other_call_starts_under_a_grant(world: World, other: dict[str, Any]) -> None:
    run_id = granted(world)
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(iteration_call("call_2", CallState.RUNNABLE, 2, **other),))
    assert world.run(run_id).grant.uses == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(("given_by", "enough"), [(("cyd",), 1), (("cyd", "dan"), 2)])
def test_a_grant_covers_calls_only_while_it_has_enough_approvals(given_by: tuple[str, ...], enough: int) -> None:
    """I9: the current number of required approvals counts, not the number at the first call."""
    world = World()
    run_id = asked(world, approvals_required=len(given_by))
    for user_id in given_by:
        assert decide(world, run_id, user_id).reason == ""
    started(world, run_id, approvals_required=len(given_by))
    world.commit(run_id, calls=(iteration_call("call_2", CallState.RUNNABLE, 2, approvals_required=enough),))
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(iteration_call("call_3", CallState.RUNNABLE, 3, approvals_required=enough + 1),))
    assert world.run(run_id).grant.uses == 2  # type: ignore[union-attr]


def test_a_grant_covers_the_series_as_edited(world: World) -> None:
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
    world.commit(run_id, calls=(iteration_call("call_2", CallState.RUNNABLE, 2, **shown),))
    with pytest.raises(IllegalTransition):
        world.commit(run_id, calls=(iteration_call("call_3", CallState.RUNNABLE, 3, **shown),))
    grant = world.run(run_id).grant
    assert grant is not None
    assert (grant.arguments, grant.series.interval_seconds) == (b'{"to":"bob"}', 5.0)


@given(steps=st.lists(st.sampled_from(["granted", "asks", "grant", "once", "again", "other"]), min_size=1, max_size=14))
def test_no_sequence_of_operations_starts_an_unapproved_call(steps: list[str]) -> None:
    """Each started call has its own approval, or a matching grant with uses left."""
    world = World()
    run_id = world.start_run()
    number, allowed, uses, waiting = 0, False, 0, ""
    for step in steps:
        if step in {"granted", "other"}:
            number += 1
            shown = {"series": OTHER} if step == "other" else {}
            may = step == "granted" and allowed and uses < SERIES.iterations_max
            try:
                world.commit(run_id, calls=(iteration_call(f"call_{number}", CallState.RUNNABLE, number, **shown),))
            except IllegalTransition:
                assert not may
            else:
                assert may
                uses += 1
        elif step == "asks":
            number += 1
            waiting = f"call_{number}"
            world.commit(run_id, calls=(iteration_call(waiting, CallState.AWAITING_APPROVAL, number),))
            allowed = False
        elif step in {"grant", "once"} and waiting:
            for_series = step == "grant"
            digest = SERIES.digest if for_series else DIGEST
            assert not decide(world, run_id, call_id=waiting, for_series=for_series, digest=digest).reason
            commands = tuple(command.command_id for command in world.unit.inbox(world.run(run_id)))
            world.commit(run_id, calls=(iteration_call(waiting, CallState.RUNNABLE, number),), consumed=commands)
            allowed = allowed or for_series
            uses += for_series
            waiting = ""
        else:
            grant = world.run(run_id).grant
            assert (grant.uses if grant else 0) == uses


def test_a_series_grant_needs_an_offer_and_matching_approvals(world: World) -> None:
    assert decide(world, asked(world, series=None)).reason == "GRANT_NOT_OFFERED"
    world = World()
    run_id = asked(world, approvals_required=2)
    assert decide(world, run_id, "cyd").reason == ""
    assert decide(world, run_id, "dan", for_series=False, digest=DIGEST).reason == "DIGEST_MISMATCH"
    assert decide(world, run_id, "dan").reason == ""
