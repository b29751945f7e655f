"""Crashed runs: counting, quarantine, redrive, and operators who end them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.ids import CallId, RunId, RunKey, StoreId
from pawl.errors import IllegalTransition, InboxChanged, InvalidField, LeaseLost
from pawl.job_store.erasure.erasing import JetStreamErasures
from pawl.job_store.ledger.rules.attention import GRACE, Quarantine, Silence
from pawl.job_store.ledger.rules.command import Cancel, Receipt, Redrive, Resolve
from pawl.job_store.ledger.rules.events import OperatorActed
from pawl.job_store.ledger.rules.states import AttentionReason, OperatorAct
from pawl.job_store.sweeps import watch_clock
from pawl.values import CallState, CommandOutcome, LeaseAction, RunState, StopCause
from tests.fakes.manual_clock import VirtualClock, run_in_virtual_time
from tests.unit.job_store.world import STORE, World, change

CRASHES_MAX = 3
OPERATOR = "olga"


def sweep(world: World, *run_ids: str) -> int:
    runs = tuple(RunKey(STORE, RunId(run_id)) for run_id in run_ids)
    count: int = world.apply(Quarantine(runs=runs, crashes_max=CRASHES_MAX))
    return count


def crash_and_sweep(world: World, run_id: str) -> int:
    assert world.run(run_id).worker_id is not None
    world.advance(30 + GRACE.total_seconds())
    return sweep(world, run_id)


def quarantine(world: World, run_id: str) -> None:
    while not world.run(run_id).is_quarantined:
        if not crash_and_sweep(world, run_id):
            world.claim(run_id, f"w{world.number()}")


def operate(world: World, run_id: str, command: Any, command_id: str = "") -> Receipt:
    return world.send(run_id, command, command_id, user_id=OPERATOR, as_operator=True)


def acts(world: World, run_id: str) -> list[tuple[str, OperatorAct, str, str]]:
    """Return the operator, act, reason and call of each act in the log."""
    bodies = [event.body for event in world.unit.events.rows if event.run_id == run_id]
    return [(body.user_id, body.act, body.reason, body.call_id) for body in bodies if isinstance(body, OperatorActed)]


def test_a_run_is_quarantined_after_its_third_worker_has_died(world: World, run_id: str) -> None:
    """I20: a run that crashes its workers is no longer given to them, and operators see why."""
    for crashes in (1, 2):
        assert crash_and_sweep(world, run_id) == 0
        world.claim(run_id, f"w{crashes + 1}")
        assert world.run(run_id).crashes == crashes
    epoch = world.run(run_id).epoch
    assert crash_and_sweep(world, run_id) == 1
    run = world.run(run_id)
    assert (run.state, run.crashes, run.claim_at, run.worker_id) == (RunState.NEEDS_ATTENTION, 3, None, None)
    assert run.attention is not None
    assert (run.attention.reason, run.attention.since_time) == (AttentionReason.QUARANTINED, world.now)
    assert (world.event_types(run_id)[-1], sweep(world, run_id)) == ("run.needs_attention", 0)
    with pytest.raises(LeaseLost):
        world.commit(run_id, epoch, state=RunState.COMPLETED)


@given(st.lists(st.booleans(), max_size=12))
def test_progress_resets_the_count_of_crashes_in_a_row(progresses: list[bool]) -> None:
    """Each worker dies, some after their job has progressed."""
    world = World()
    run_id = world.start_run()
    in_a_row = 0
    for has_progressed in progresses:
        world.commit(run_id, has_progressed=has_progressed)
        in_a_row = 1 if has_progressed else in_a_row + 1
        assert crash_and_sweep(world, run_id) == (in_a_row == CRASHES_MAX)
        if in_a_row == CRASHES_MAX:
            assert world.run(run_id).is_quarantined
            return
        world.claim(run_id, f"w{world.number()}")
        assert world.run(run_id).crashes == in_a_row


def test_a_redrive_by_an_operator_is_recorded_in_the_log(world: World, run_id: str) -> None:
    world.commit(run_id, calls=(change("call_1", CallState.RUNNING),))
    quarantine(world, run_id)
    assert world.steer(run_id).pending == (), "I5: the registry may know the outcome of the call"
    assert operate(world, run_id, Redrive(reason="the tool is mended"), "c1").outcome is CommandOutcome.ACCEPTED
    run = world.run(run_id)
    assert (run.state, run.crashes, run.attention) == (RunState.QUEUED, 0, None)
    assert world.event_types(run_id)[-2:] == ["operator.acted", "run.queued"]
    assert acts(world, run_id) == [(OPERATOR, OperatorAct.REDRIVEN, "the tool is mended", "")]
    assert operate(world, run_id, Redrive(reason="the tool is mended"), "c1").outcome is CommandOutcome.DUPLICATE
    world.claim(run_id)
    world.commit(run_id, state=RunState.WAITING, waits=(1,), lease=LeaseAction.PARK)


def test_a_stopping_run_cannot_move_to_needs_attention(world: World, run_id: str) -> None:
    """I12: from that state it could start anything."""
    world.commit(run_id, calls=(change("call_1", CallState.RUNNING),))
    world.cancel(run_id)
    for consumed, refusal in (((), InboxChanged), (world.unread(run_id), IllegalTransition)):
        with pytest.raises(refusal):
            world.commit(run_id, state=RunState.NEEDS_ATTENTION, consumed=consumed)


def test_a_worker_that_stops_its_run_must_give_the_cause(world: World, run_id: str) -> None:
    """Otherwise a redrive after a quarantine would ignore the stop."""
    with pytest.raises(InvalidField):
        world.commit(run_id, state=RunState.CANCELLING)
    world.commit(run_id, state=RunState.CANCELLING, stop_cause=StopCause.USER)
    quarantine(world, run_id)
    operate(world, run_id, Redrive())
    assert world.run(run_id).state is RunState.CANCELLING


def test_an_operator_may_end_a_healthy_run_and_the_log_records_it(world: World, run_id: str) -> None:
    receipt = operate(world, run_id, Cancel(cause=StopCause.OPERATOR, reason="too expensive"))
    assert receipt.outcome is CommandOutcome.ACCEPTED
    run = world.run(run_id)
    assert (run.state, run.stop_cause) == (RunState.CANCELLING, StopCause.OPERATOR)
    assert acts(world, run_id) == [(OPERATOR, OperatorAct.ENDED, "too expensive", "")]


def test_an_operator_may_resolve_a_call_of_another_user(world: World, run_id: str) -> None:
    """D9: the log records who resolved the call."""
    world.commit(run_id, calls=(change("call_1", CallState.RUNNING),))
    world.commit(run_id, state=RunState.NEEDS_ATTENTION, lease=LeaseAction.PARK)
    assert world.run(run_id).attention.reason is AttentionReason.UNKNOWN_OUTCOME  # type: ignore[union-attr]
    assert [call.call_id for call in world.steer(run_id).pending] == ["call_1"]
    assert world.send(run_id, Resolve(call_id=CallId("call_1")), user_id=OPERATOR).outcome is CommandOutcome.UNKNOWN
    assert operate(world, run_id, Resolve(call_id=CallId("call_1"))).outcome is CommandOutcome.ACCEPTED
    assert acts(world, run_id) == [(OPERATOR, OperatorAct.RESOLVED, "", "call_1")]
    assert world.run(run_id).claim_at == world.now


# Sweeps: jumps of the database clock, silent workers, and the erasure log, which is retried until applied (I22).


@dataclass
class JumpingDatabase:
    clock: VirtualClock = field(default_factory=VirtualClock)
    ahead_seconds: float = 0.0
    brought_forward: list[float] = field(default_factory=list)
    answer_takes_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.seen_time = self.time

    @property
    def time(self) -> datetime:
        return datetime.fromtimestamp(self.clock.now() + self.ahead_seconds, UTC)

    async def times(self) -> tuple[datetime, datetime]:
        answer = self.time, self.seen_time
        self.seen_time = max(answer)
        await asyncio.sleep(self.answer_takes_seconds)
        return answer

    async def bring_forward(self, seconds: float) -> int:
        self.brought_forward.append(round(seconds, 3))
        self.seen_time = self.time
        return 0


async def watched(*jumps: float, answer_takes_seconds: float = 0.0) -> JumpingDatabase:
    database = JumpingDatabase()
    sweeping = asyncio.create_task(watch_clock(database, database.clock))
    await asyncio.sleep(5.5)
    for jump in jumps:
        database.ahead_seconds += jump
        database.answer_takes_seconds = answer_takes_seconds
        await asyncio.sleep(5.5 + answer_takes_seconds)
    sweeping.cancel()
    return database


@pytest.mark.parametrize(
    ("jumps", "answer_takes_seconds", "brought_forward"),
    [
        ((-130.0,), 0, [130.0]),
        ((-130.0, 130.0, -60.0), 0, [130.0, 60.0]),
        ((130.0,), 0, []),
        ((-1.0,), 0, []),
        ((0.0, 0.0), 20, []),
    ],
)
def test_only_a_backward_clock_jump_moves_runs_to_an_earlier_time(
    jumps: tuple[float, ...], answer_takes_seconds: float, brought_forward: list[float]
) -> None:
    """A response that a frozen process reads late is no jump: leases that were just renewed must not end."""
    database = run_in_virtual_time(watched(*jumps, answer_takes_seconds=answer_takes_seconds))
    assert database.brought_forward == brought_forward


def test_a_gap_between_polls_restarts_the_silence_count() -> None:
    """While the database was unavailable, no worker could renew its lease."""
    key = RunKey(StoreId("store"), RunId("run"))
    silence = Silence()
    for now in (0.0, 1.0, 2.0, 3.0):
        silence = silence.after([key], now)
    assert silence.after([key], 20.0).confirmed == ()
    for now in (4.0, 5.0):
        silence = silence.after([key], now)
    assert silence.confirmed == (key,)


def test_a_renewed_lease_resets_the_silence() -> None:
    key, silence = RunKey(StoreId("store"), RunId("run")), Silence()
    for now in range(20):
        silence = silence.after([] if now % 4 == 0 else [key], float(now))
        assert silence.confirmed == ()


class Bus:
    connected = True
    connection_number = 1
    is_clustered = False

    def jetstream(self) -> Any:
        return self

    async def stream_info(self, _name: str) -> Any:
        return SimpleNamespace(config=SimpleNamespace(num_replicas=1))

    async def update_stream(self, _config: object) -> Any:
        return SimpleNamespace(state=SimpleNamespace(messages=0))


async def test_the_erasure_log_is_read_until_it_has_been_applied_on_the_same_connection() -> None:
    bus = Bus()
    log = JetStreamErasures(bus)  # type: ignore[arg-type]  # only these methods are used
    assert [await log.open(), await log.open()] == [True, True]
    bus.connection_number = 2
    log.applied()
    assert await log.open() is True
    log.applied()
    assert await log.open() is None
