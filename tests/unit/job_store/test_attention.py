"""Runs whose workers die: counted, quarantined, let go on or ended by an operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from pawl.chassis.ids import CallId, RunId, RunKey
from pawl.errors import AttentionNotNeeded, CallNotPending, IllegalTransition, InboxChanged, InvalidField, LeaseLost
from pawl.job_store.domain.attention import CRASH_PAUSE, GRACE, Quarantine, ReportCrash
from pawl.job_store.domain.command import Cancel, Receipt, Redrive, Resolve
from pawl.job_store.domain.commit import NewMessage
from pawl.job_store.domain.events import OperatorActed
from pawl.job_store.domain.states import (
    AttentionReason,
    CallState,
    CommandOutcome,
    DecisionKind,
    LeaseAction,
    MessagePolicy,
    OperatorAct,
    RunState,
    StopCause,
)
from tests.unit.job_store.world import DIGEST, STORE, World, change

CRASHES_MAX = 3
OPERATOR = "olga"


@pytest.fixture
def world() -> World:
    return World()


def crash(world: World, run_id: str) -> None:
    """The worker of the run dies, and time passes."""
    assert world.run(run_id).worker_id is not None
    world.advance(30 + GRACE.total_seconds())


def sweep(world: World, *run_ids: str) -> int:
    runs = tuple(RunKey(STORE, RunId(run_id)) for run_id in run_ids)
    count: int = world.apply(Quarantine(runs=runs, crashes_max=CRASHES_MAX))
    return count


def quarantine(world: World, run_id: str) -> None:
    """Let the worker of a run die until nobody gets it any more."""
    while not world.run(run_id).is_quarantined:
        crash(world, run_id)
        if not sweep(world, run_id):
            world.claim(run_id, f"w{world.number()}")


def operate(world: World, run_id: str, command: Any, command_id: str = "") -> Receipt:
    return world.send(run_id, command, command_id, user_id=OPERATOR, as_operator=True)


def acts(world: World, run_id: str) -> list[OperatorActed]:
    return [
        event.body
        for event in world.unit.events.rows
        if event.run_id == run_id and isinstance(event.body, OperatorActed)
    ]


def test_a_run_is_quarantined_when_its_third_worker_has_died(world: World) -> None:
    """I20: what kills its workers does not do so for ever, and people see why."""
    run_id = world.begin()
    for crashes in (1, 2):
        crash(world, run_id)
        assert sweep(world, run_id) == 0
        world.claim(run_id, f"w{crashes + 1}")
        assert world.run(run_id).crashes == crashes
    epoch = world.run(run_id).epoch
    crash(world, run_id)
    assert sweep(world, run_id) == 1
    run = world.run(run_id)
    assert (run.state, run.crashes, run.claim_at, run.worker_id) == (RunState.NEEDS_ATTENTION, 3, None, None)
    assert run.attention is not None
    assert (run.attention.reason, run.attention.since_time) == (AttentionReason.QUARANTINED, world.now)
    assert world.event_types(run_id)[-1] == "run.needs_attention"
    assert sweep(world, run_id) == 0
    with pytest.raises(LeaseLost):
        world.commit(run_id, epoch, state=RunState.COMPLETED)


def test_a_worker_that_was_only_cut_off_may_come_back(world: World) -> None:
    run_id = world.begin()
    world.unit.put_run(replace(world.run(run_id), crashes=2))
    world.advance(31)
    assert sweep(world, run_id) == 0
    world.commit(run_id, loop_state=b"here I am")


@pytest.mark.parametrize(
    "progress",
    [
        {"messages": (NewMessage(message_id="", summarised_to=0, body=b"text"),)},
        {"calls": (change("call_1", CallState.SUCCEEDED),)},
        {"state": RunState.WAITING, "waits": (1,), "lease": LeaseAction.PARK},
    ],
    ids=["message", "settled call", "park"],
)
def test_progress_makes_crashes_forgotten(world: World, progress: dict[str, Any]) -> None:
    run_id = world.begin()
    world.commit(run_id, calls=(change("call_1", CallState.RUNNING),))
    world.unit.put_run(replace(world.run(run_id), crashes=2))
    world.commit(run_id, **progress)
    assert world.run(run_id).crashes == 0


def test_a_step_that_gets_nowhere_does_not_make_crashes_forgotten(world: World) -> None:
    """A run that dies after its first step each time is one that kills its workers."""
    run_id = world.begin()
    world.unit.put_run(replace(world.run(run_id), crashes=2))
    world.commit(run_id, state=RunState.RUNNING, round=1, loop_state=b"a model is called")
    world.commit(run_id, calls=(change("call_1", CallState.RUNNING),))
    assert world.run(run_id).crashes == 2


def test_a_run_that_its_worker_gives_back_rests_and_is_quarantined_at_the_third_time(world: World) -> None:
    run_id = world.begin()
    for worker in ("w2", "w3"):
        report = ReportCrash(run=world.run(run_id).key, epoch=world.run(run_id).epoch, crashes_max=CRASHES_MAX)
        assert world.apply(report) is False
        with pytest.raises(LeaseLost):
            world.apply(report)
        assert world.claim(run_id, worker) is None
        world.advance(CRASH_PAUSE.total_seconds())
        assert world.claim(run_id, worker) is not None
    report = ReportCrash(run=world.run(run_id).key, epoch=world.run(run_id).epoch, crashes_max=CRASHES_MAX)
    assert world.apply(report) is True
    assert world.run(run_id).is_quarantined


def test_a_run_that_was_handed_over_has_not_crashed(world: World) -> None:
    """OPS-5: deploys are no crashes."""
    run_id = world.begin()
    for _ in range(5):
        world.release(run_id)
        world.claim(run_id, f"w{world.number()}")
    assert world.run(run_id).crashes == 0


@pytest.mark.parametrize(
    "send", [World.steer, lambda world, run_id: world.decide(run_id, "call_1", DecisionKind.APPROVE)]
)
def test_commands_to_a_quarantined_run_are_kept_and_wake_nobody(
    world: World, send: Callable[[World, str], Receipt]
) -> None:
    """I1: and they have their effect when the run goes on."""
    run_id = world.begin()
    world.commit(run_id, calls=(change("call_1", CallState.AWAITING_APPROVAL, digest=DIGEST),))
    quarantine(world, run_id)
    assert send(world, run_id).outcome is CommandOutcome.ACCEPTED
    assert world.run(run_id).claim_at is None
    operate(world, run_id, Redrive())
    assert world.claim(run_id) is not None
    assert len(world.unit.inbox(world.run(run_id))) == 1


def test_an_operator_lets_a_run_go_on_and_the_log_says_who(world: World) -> None:
    run_id = world.begin()
    quarantine(world, run_id)
    assert operate(world, run_id, Redrive(reason="the tool is mended"), "c1").outcome is CommandOutcome.ACCEPTED
    run = world.run(run_id)
    assert (run.state, run.crashes, run.attention) == (RunState.QUEUED, 0, None)
    assert world.event_types(run_id)[-2:] == ["operator.acted", "run.queued"]
    (act,) = acts(world, run_id)
    assert (act.user_id, act.act, act.reason) == (OPERATOR, OperatorAct.REDRIVEN, "the tool is mended")
    assert operate(world, run_id, Redrive(reason="the tool is mended"), "c1").outcome is CommandOutcome.DUPLICATE
    world.claim(run_id)
    world.commit(run_id, state=RunState.WAITING, waits=(1,), lease=LeaseAction.PARK)


def test_only_a_quarantined_run_is_let_go_on(world: World) -> None:
    run_id = world.begin()
    receipt = operate(world, run_id, Redrive())
    assert (receipt.outcome, receipt.reason) == (CommandOutcome.REFUSED, AttentionNotNeeded.reason)


def test_a_run_that_was_stopped_and_quarantined_stays_stopped(world: World) -> None:
    """I12: nothing enters it, and it goes on only to its end."""
    run_id = world.begin()
    world.cancel(run_id)
    quarantine(world, run_id)
    later = world.submit(MessagePolicy.STEER)
    assert not later.steered
    assert later.run.run_id != run_id
    operate(world, run_id, Redrive())
    assert world.run(run_id).state is RunState.CANCELLING
    world.claim(run_id)
    world.commit(run_id, state=RunState.CANCELLED)
    assert world.run(later.run.run_id).claim_at == world.now


@pytest.mark.parametrize("by_operator", [True, False])
def test_a_quarantined_run_is_ended_by_a_worker_that_settles_it(world: World, by_operator: bool) -> None:
    run_id = world.begin()
    quarantine(world, run_id)
    if by_operator:
        operate(world, run_id, Cancel(cause=StopCause.OPERATOR, reason="hopeless"))
    else:
        world.cancel(run_id)
    run = world.run(run_id)
    assert (run.state, run.crashes, run.attention) == (RunState.CANCELLING, 0, None)
    assert [act.act for act in acts(world, run_id)] == [OperatorAct.ENDED] * by_operator
    assert world.claim(run_id) is not None


def test_a_quarantined_run_that_never_began_is_ended_without_a_worker(world: World) -> None:
    run_id = world.submit().run.run_id
    following = world.submit().run.run_id
    world.claim(run_id)
    quarantine(world, run_id)
    operate(world, run_id, Cancel(cause=StopCause.OPERATOR))
    assert world.run(run_id).state is RunState.CANCELLED
    assert world.claim(following) is not None


def test_a_run_that_goes_on_after_a_quarantine_is_stopped_by_its_worker(world: World) -> None:
    """It is QUEUED as one that never began, but its calls must be settled."""
    run_id = world.begin()
    world.commit(run_id, calls=(change("call_1", CallState.RUNNING),))
    quarantine(world, run_id)
    operate(world, run_id, Redrive())
    world.cancel(run_id)
    assert world.run(run_id).state is RunState.CANCELLING


def test_a_run_that_is_being_stopped_does_not_get_away_as_one_in_doubt(world: World) -> None:
    """I12: from there it could begin anything."""
    run_id = world.begin()
    world.commit(run_id, calls=(change("call_1", CallState.RUNNING),))
    stop = world.cancel(run_id)
    assert stop.run is not None
    commands = tuple(command.command_id for command in world.unit.inbox(stop.run))
    with pytest.raises(InboxChanged):
        world.commit(run_id, state=RunState.NEEDS_ATTENTION)
    with pytest.raises(IllegalTransition):
        world.commit(run_id, state=RunState.NEEDS_ATTENTION, consumed=commands)


def test_a_worker_that_stops_its_run_says_for_whom(world: World) -> None:
    """Else the run would be let go on after a quarantine as if nobody had stopped it."""
    run_id = world.begin()
    with pytest.raises(InvalidField):
        world.commit(run_id, state=RunState.CANCELLING)
    world.commit(run_id, state=RunState.CANCELLING, stop_cause=StopCause.USER)
    quarantine(world, run_id)
    operate(world, run_id, Redrive())
    assert world.run(run_id).state is RunState.CANCELLING


def test_an_operator_ends_a_healthy_run_of_another_user_and_its_log_says_so(world: World) -> None:
    run_id = world.begin()
    receipt = operate(world, run_id, Cancel(cause=StopCause.OPERATOR, reason="too dear"))
    assert receipt.outcome is CommandOutcome.ACCEPTED
    run = world.run(run_id)
    assert (run.state, run.stop_cause) == (RunState.CANCELLING, StopCause.OPERATOR)
    (act,) = acts(world, run_id)
    assert (act.user_id, act.act, act.reason) == (OPERATOR, OperatorAct.ENDED, "too dear")


def test_an_operator_says_what_became_of_the_call_of_another_user(world: World) -> None:
    """Settled point 9, and who said it stands in the log."""
    run_id = world.begin()
    world.commit(run_id, calls=(change("call_1", CallState.RUNNING),))
    world.commit(run_id, state=RunState.NEEDS_ATTENTION, lease=LeaseAction.PARK)
    attention = world.run(run_id).attention
    assert attention is not None
    assert attention.reason is AttentionReason.UNKNOWN_OUTCOME
    foreign = world.send(run_id, Resolve(call_id=CallId("call_1")), user_id=OPERATOR)
    assert foreign.outcome is CommandOutcome.UNKNOWN
    receipt = operate(world, run_id, Resolve(call_id=CallId("call_1")))
    assert receipt.outcome is CommandOutcome.ACCEPTED
    assert [(act.user_id, act.act, act.call_id) for act in acts(world, run_id)] == [
        (OPERATOR, OperatorAct.RESOLVED, "call_1")
    ]
    assert world.run(run_id).claim_at == world.now


def test_a_call_that_ran_when_its_worker_died_is_not_in_doubt(world: World) -> None:
    """I5: the registry may know what became of it; nobody is asked before it was."""
    run_id = world.begin()
    world.commit(run_id, calls=(change("call_1", CallState.RUNNING),))
    quarantine(world, run_id)
    receipt = operate(world, run_id, Resolve(call_id=CallId("call_1")))
    assert (receipt.outcome, receipt.reason) == (CommandOutcome.REFUSED, CallNotPending.reason)
    assert receipt.pending == ()


def test_a_run_in_doubt_can_be_quarantined_too(world: World) -> None:
    run_id = world.begin()
    world.commit(run_id, calls=(change("call_1", CallState.RUNNING),))
    world.commit(run_id, state=RunState.NEEDS_ATTENTION, lease=LeaseAction.PARK)
    operate(world, run_id, Resolve(call_id=CallId("call_1")))
    world.claim(run_id)
    quarantine(world, run_id)
    assert world.run(run_id).state is RunState.NEEDS_ATTENTION
    operate(world, run_id, Redrive())
    assert world.run(run_id).state is RunState.QUEUED
