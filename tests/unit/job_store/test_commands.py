"""Steps are fenced and idempotent; receipts are final and report the outcome (FE-2, HITL-3, HITL-6, I11).

Calls may be completed from outside, and one client at a time runs a front-end call (FE-2).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
from msgspec.structs import replace

from pawl.chassis.ids import CallId, CallKey, ClientId, RunId, RunKey, UserId
from pawl.errors import IllegalTransition, InboxChanged, LeaseLost, QueueFull, RunNotFound
from pawl.job_store.ledger.rules import inbox
from pawl.job_store.ledger.rules.command import Progress, Redrive, Steer, TopUp
from pawl.job_store.ledger.rules.events import OwnerEvent, ToppedUp
from pawl.job_store.ledger.rules.inbox import NoteCompletion
from pawl.job_store.ledger.rules.offers import ReleaseOffers, RenewOffers
from pawl.values import TOKENS_MAX, CallState, CommandOutcome, DecisionKind, LeaseAction, RunState, WaitKind
from tests.unit.job_store.world import DIGEST, EDITED_DIGEST, STORE, World, change

ACCEPTED, DUPLICATE, LATE = CommandOutcome.ACCEPTED, CommandOutcome.DUPLICATE, CommandOutcome.LATE
OUTPUT = OwnerEvent(type="output.delta", body=b"text")
PARKED: dict[str, Any] = {"state": RunState.WAITING, "waits": (1,), "lease": LeaseAction.PARK}
FITS, FULL = nullcontext(), pytest.raises(QueueFull, match="queue this message")


def waiting(world: World, state: CallState, **fields: object) -> str:
    run_id = world.start_run()
    digest = DIGEST if state is CallState.AWAITING_APPROVAL else ""
    world.commit(run_id, calls=(change("call", state, digest=digest, **fields),), **PARKED)
    return run_id


def test_a_stale_workers_writes_have_no_effect(world: World, run_id: str) -> None:
    """I4: the steps of its successor take effect."""
    world.advance(31)
    assert world.claim(run_id, "w2") == 2
    before = world.run(run_id)
    with pytest.raises(LeaseLost):
        world.commit(run_id, 1, events=(OUTPUT,))
    assert world.run(run_id) is before
    world.commit(run_id, 2, events=(OUTPUT,))


def test_a_repeated_last_step_returns_the_same_response(world: World, run_id: str) -> None:
    """I2: a worker may ask again for a lost response, even after the run was parked or taken over."""
    step: dict[str, Any] = {"commit_id": "step", "events": (OUTPUT, OUTPUT), "lease": LeaseAction.RELEASE}
    first = world.commit(run_id, 1, **step)
    assert (first.first_seq, first.last_seq) == (4, 5)
    world.claim(run_id, "w2")
    assert (world.commit(run_id, 1, **step), world.run(run_id).last_seq) == (first, 5)


def test_a_run_with_an_unread_message_or_top_up_does_not_end(world: World) -> None:
    """I1: the receipt was final, so the worker handles the command first."""
    for state, send in ((RunState.COMPLETED, world.steer), (RunState.EXPIRED, lambda run_id: top_up(world, run_id))):
        run_id = world.start_run(token_budget=100)
        send(run_id)
        with pytest.raises(InboxChanged):
            world.commit(run_id, state=state)
        world.commit(run_id, state=state, consumed=world.unread(run_id))


def test_nothing_starts_after_an_acknowledged_cancel(world: World, run_id: str) -> None:
    """I12: an owner that has not read the cancel must read its inbox. Then, steps that start something are refused."""
    world.commit(run_id, calls=(change("call", CallState.RUNNABLE),))
    world.cancel(run_id)
    steps: list[dict[str, Any]] = [
        {"calls": (change("new", CallState.PROPOSED),)},
        {"calls": (change("call", CallState.RUNNING),)},
        {"events": (OwnerEvent(type="round.started", body=b"round"),)},
        {"state": RunState.COMPLETED},
        {"state": RunState.WAITING, "waits": (1,)},
        {"state": RunState.RUNNING},
    ]
    for step in steps:
        for consumed, refusal in (((), InboxChanged), (world.unread(run_id), IllegalTransition)):
            with pytest.raises(refusal):
                world.commit(run_id, consumed=consumed, **step)
    world.commit(run_id, events=(OUTPUT,))
    over = change("call", CallState.CANCELLED)
    world.commit(run_id, calls=(over,), consumed=world.unread(run_id), state=RunState.CANCELLED)


def test_a_stopped_run_does_not_accept_decisions(world: World) -> None:
    """I12: an approval must not appear to start anything."""
    run_id = waiting(world, CallState.AWAITING_APPROVAL)
    receipt = world.cancel(run_id)
    assert (receipt.outcome, receipt.pending) == (ACCEPTED, ())
    late = [world.decide(run_id, "call", DecisionKind.APPROVE), world.steer(run_id)]
    assert [receipt.outcome for receipt in late] == [LATE, LATE]


def test_a_rewritten_call_keeps_the_time_at_which_it_started_to_wait(world: World, run_id: str) -> None:
    waits = CallState.AWAITING_APPROVAL
    begin, times = world.now, []
    for state, escalated in ((waits, False), (waits, True), (CallState.CANCELLED, False)):
        world.commit(run_id, calls=(change("call", state, digest=DIGEST, escalated=escalated),))
        times.append(world.call("call").state_time - begin)
        world.advance(60)
    assert times == [timedelta(), timedelta(), timedelta(seconds=120)]


def test_progress_renews_the_lease_and_is_rate_limited(world: World) -> None:
    """TOOL-8: skipped reports leave no trace."""
    run_id = waiting(world, CallState.OFFERED)
    world.lease(run_id, "call", "tab")

    def report(client_id: str) -> CommandOutcome:
        half = {"offer_epoch": 1, "fraction": 0.5, "message": "half"}
        return world.send(run_id, Progress(call_id=CallId("call"), client_id=ClientId(client_id), **half)).outcome  # type: ignore[arg-type]

    for _ in range(1000):
        assert report("tab") is ACCEPTED
        world.advance(0.001)
    assert 1 < world.event_types(run_id).count("tool.progress") <= 11
    assert (world.run(run_id).command_count <= 11, world.unread(run_id)) == (True, ())
    assert world.call("call").offer.expire_time > world.now + timedelta(seconds=29)  # type: ignore[union-attr, operator]
    assert report("other") is CommandOutcome.WRONG_HOLDER


def test_a_result_without_a_lease_is_accepted_if_no_client_holds_the_call(world: World) -> None:
    """FE-3: the client of the call may have vanished, so that its lease has expired."""
    run_id = waiting(world, CallState.OFFERED)
    world.lease(run_id, "call", "tab_1")
    world.advance(31)
    assert world.result(run_id, "call").outcome is ACCEPTED


def test_a_call_is_decided_on_once_and_only_as_shown(world: World) -> None:
    """I9: a repeated decision is a duplicate, and a different one is refused."""
    run_id = waiting(world, CallState.AWAITING_APPROVAL)
    for digest, reason in ((EDITED_DIGEST, "DIGEST_MISMATCH"), ("", "DIGEST_REQUIRED")):
        assert world.decide(run_id, "call", DecisionKind.APPROVE, digest=digest).reason == reason
    assert [world.decide(run_id, "call", DecisionKind.REJECT, "no").outcome for _ in range(2)] == [ACCEPTED, DUPLICATE]
    late = world.decide(run_id, "call", DecisionKind.APPROVE)
    assert (late.reason, late.message.partition(" ")[2]) == ("ALREADY_DECIDED", "was already rejected by ann")
    world.claim(run_id)
    world.commit(run_id, calls=(change("call", CallState.REJECTED, digest=DIGEST),), consumed=("no",))
    assert world.decide(run_id, "call", DecisionKind.APPROVE).reason == "ALREADY_DECIDED"


def test_a_decision_after_the_deadline_is_late(world: World) -> None:
    """HITL-4: database time decides, independently of the owner."""
    run_id = waiting(world, CallState.AWAITING_APPROVAL, deadline_time=world.now + timedelta(seconds=900))
    world.advance(900)
    assert world.decide(run_id, "call", DecisionKind.APPROVE).reason == "DEADLINE_PASSED"


def test_decisions_may_arrive_in_any_order_and_receipts_list_the_calls_still_pending(world: World, run_id: str) -> None:
    """HITL-1, HITL-6: a question is answered, not approved."""
    states = (CallState.AWAITING_APPROVAL, CallState.ASKED, CallState.OFFERED, CallState.RUNNABLE)
    digests = (DIGEST, "", "", "")
    named = zip("abcd", states, digests, range(4), strict=True)
    world.commit(run_id, calls=tuple(change(name, state, digest=digest, index=n) for name, state, digest, n in named))
    assert world.decide(run_id, "b", DecisionKind.APPROVE, digest="").outcome is CommandOutcome.REFUSED
    receipts = [
        world.result(run_id, "c"),
        world.decide(run_id, "b", DecisionKind.ANSWER, digest=""),
        world.decide(run_id, "a", DecisionKind.APPROVE),
    ]
    assert [[call.call_id for call in receipt.pending] for receipt in receipts] == [["a", "b"], ["a"], []]


def top_up(world: World, run_id: str, tokens: int = 50) -> Any:
    return world.send(run_id, TopUp(tokens=tokens), f"top_up_{run_id}_{tokens}")


def test_a_top_up_raises_the_budget_once_and_wakes_the_run(world: World) -> None:
    """I2, I18: a repeated top-up is a duplicate."""
    run_id = world.start_run(token_budget=100)
    world.commit(run_id, **PARKED)
    receipt = top_up(world, run_id)
    assert (receipt.outcome, top_up(world, run_id).outcome) == (ACCEPTED, DUPLICATE)
    assert (receipt.run.token_budget, world.run(run_id).token_budget) == (150, 150)
    assert world.unit.events.rows[-1].body == ToppedUp(tokens=50, token_budget=150, user_id=UserId("ann"))
    assert world.claim(run_id) == 2
    assert top_up(world, run_id, TOKENS_MAX).reason == "TOKEN_CEILING", "larger budgets overflow"


def test_topping_up_a_run_with_a_shared_budget_is_refused(world: World) -> None:
    run_id = world.start_run(token_budget=100)
    world.unit.put_run(replace(world.run(run_id), budget_run_id=RunId("run_top")))
    receipt = top_up(world, run_id)
    assert (receipt.outcome, receipt.reason) == (CommandOutcome.REFUSED, "NO_TOKEN_BUDGET")
    assert ("run_top" in receipt.message, world.run(run_id).token_budget) == (True, 100)


def test_the_token_ceiling_limits_top_ups_in_total(world: World) -> None:
    """I18: a smaller top-up is still accepted."""
    run_id = world.start_run(token_budget=100, token_ceiling=150)
    assert [top_up(world, run_id, tokens).reason for tokens in (30, 31, 20)] == ["", "TOKEN_CEILING", ""]
    assert world.run(run_id).token_budget == 150


def test_a_runs_unread_commands_are_limited(world: World) -> None:
    """I19: the limits cover top-ups, the number of people who send messages, and receipts of refused commands."""
    limits: dict[str, Any] = {"inbox_limits": inbox.Limits(commands_max=2, people_max=2, idle_receipts_max=3)}
    run_id = world.start_run(token_budget=100, people=("zed",))
    for user_id, end in (("olga", FITS), ("zed", FITS), ("cyd", FITS), ("dan", FULL)):
        with end:
            world.send(run_id, Steer(), people=(user_id,), inbox_limits=inbox.Limits(people_max=2))
    for end in (FITS, FITS, pytest.raises(QueueFull)):
        with end:
            world.send(run_id, TopUp(tokens=1), **limits)
    kept = world.run(run_id).command_count
    refused = [world.send(run_id, Redrive(), as_operator=True, **limits).outcome for _ in range(5)]
    assert refused == [CommandOutcome.REFUSED] * 5
    assert len(list(world.unit.commands.items())) == kept + 3


def note(world: World, run_id: str, payload: bytes = b"call_1") -> None:
    world.apply(NoteCompletion(run=RunKey(STORE, RunId(run_id)), payload=payload))


def unread(world: World, run_id: str) -> list[bytes]:
    return [command.payload for command in world.unit.inbox(world.run(run_id))]


def test_a_completion_wakes_a_parked_run_and_is_stored_once(world: World, run_id: str) -> None:
    world.commit(run_id, calls=(change("call_1", CallState.RUNNING),))
    world.commit(run_id, state=RunState.WAITING, waits=(WaitKind.COMPLETION,), lease=LeaseAction.PARK)
    assert world.run(run_id).claim_at is None
    for _ in range(3):
        note(world, run_id)
    assert (world.run(run_id).claim_at, unread(world, run_id)) == (world.now, [b"call_1"])
    note(world, run_id, b"call_2")
    assert unread(world, run_id) == [b"call_1", b"call_2"]


def test_a_run_that_parks_with_an_unread_completion_resumes_immediately(world: World, run_id: str) -> None:
    world.commit(run_id, calls=(change("call_1", CallState.RUNNING),))
    note(world, run_id)
    world.commit(run_id, state=RunState.WAITING, waits=(WaitKind.COMPLETION,), lease=LeaseAction.PARK)
    assert world.run(run_id).claim_at == world.now


def test_completions_of_ended_or_unknown_runs_are_not_stored(world: World, run_id: str) -> None:
    world.commit(run_id, state=RunState.COMPLETED)
    note(world, run_id)
    assert unread(world, run_id) == []
    with pytest.raises(RunNotFound):
        note(world, "run_nope")


def offered(world: World, **fields: object) -> str:
    run_id = world.start_run()
    world.commit(run_id, calls=(change("call", CallState.OFFERED, **fields),))
    return run_id


def key(run_id: str) -> tuple[tuple[RunKey, CallKey], ...]:
    return ((RunKey(STORE, RunId(run_id)), CallKey(STORE, CallId("call"))),)


def test_a_lease_is_renewed_only_for_its_holder(world: World) -> None:
    run_id = offered(world)
    world.lease(run_id, "call", "tab_1")
    world.advance(20)
    assert world.apply(RenewOffers(client_id=ClientId("tab_2"), lease_seconds=30, calls=key(run_id))) == ()
    held = world.apply(RenewOffers(client_id=ClientId("tab_1"), lease_seconds=30, calls=key(run_id)))
    assert [call.offer.expire_time for call in held] == [world.now + timedelta(seconds=30)]


def test_only_an_offered_call_can_be_leased(world: World) -> None:
    run_id = offered(world, deadline_time=world.now + timedelta(seconds=10))
    assert (world.lease(run_id, "none", "tab").call, world.lease("none", "call", "tab").call) == (None, None)
    world.advance(10)
    assert not world.lease(run_id, "call", "tab").granted


@pytest.mark.parametrize("settle", [lambda world, run_id: world.result(run_id, "call"), World.cancel])
def test_a_settled_call_cannot_be_leased(world: World, settle: Callable[[World, str], Any]) -> None:
    run_id = offered(world)
    settle(world, run_id)
    assert not world.lease(run_id, "call", "tab").granted


def test_a_call_offered_again_gets_a_higher_epoch(world: World) -> None:
    """A result under a lease of the first offer must be refused."""
    run_id = offered(world)
    world.lease(run_id, "call", "tab")
    world.commit(run_id, calls=(change("call", CallState.AWAITING_APPROVAL, digest=DIGEST),))
    world.decide(run_id, "call", DecisionKind.APPROVE, "yes")
    world.commit(run_id, calls=(change("call", CallState.OFFERED, digest=DIGEST),), consumed=("yes",))
    assert world.call("call").offer.client_id == ""  # type: ignore[union-attr]
    assert world.lease(run_id, "call", "tab").call.offer.epoch == 2  # type: ignore[union-attr]


def test_a_call_released_by_its_holder_is_offered_again(world: World) -> None:
    run_id = offered(world)
    world.lease(run_id, "call", "tab_1")
    released = [world.apply(ReleaseOffers(client_id=ClientId(f"tab_{tab}"), calls=key(run_id))) for tab in (2, 1, 1)]
    assert released == [0, 1, 0]
    assert world.lease(run_id, "call", "tab_2").granted
