"""Jobs that users start without a model (ASYNC-1), pauses of jobs (ASYNC-6), and delegated runs (TOOL-7)."""

from __future__ import annotations

from datetime import UTC, timedelta
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from pawl.chassis.ids import RunId, RunKey
from pawl.errors import (
    ConversationNotFound,
    IllegalTransition,
    InboxChanged,
    InvalidField,
    RequestIdReused,
    TooManyJobs,
)
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store.ledger.ports import Limits
from pawl.job_store.ledger.rpc import job_messages
from pawl.job_store.ledger.rules import inbox, stop
from pawl.job_store.ledger.rules.attention import ReportCrash
from pawl.job_store.ledger.rules.calls import CallChange
from pawl.job_store.ledger.rules.command import Pause, Redrive
from pawl.job_store.ledger.rules.jobs import OPEN_MAX
from pawl.job_store.ledger.rules.slots import QueueKey, SlotLimits
from pawl.job_store.ledger.rules.start_job import StartJob
from pawl.job_store.ledger.rules.states import Sharing
from pawl.job_store.ledger.rules.submit import Submitted
from pawl.values import CallState, CommandOutcome, LeaseAction, RunState, StopCause, WaitKind
from tests.unit.job_store.desk import Desk
from tests.unit.job_store.world import BOB, STORE, USER, World, change, delegation, submission


def start_job(desk: Desk, run_id: str = "job_s", **fields: Any) -> Submitted:
    started: Submitted = desk.apply(
        StartJob(**asdict(submission()) | {"run_id": RunId(run_id), "is_silent": False, "job": lambda _: b""} | fields)
    )
    return started


def test_starting_a_job_is_idempotent_by_request_id(desk: Desk) -> None:
    """A repeated request succeeds even at the limit of open jobs.

    Reusing the request id with other content is refused.
    """
    job = start_job(desk, request_id="r1").run
    for number in range(OPEN_MAX - 1):
        start_job(desk, f"job_{number}")
    for only_repeat in (False, True):
        assert start_job(desk, request_id="r1", only_repeat=only_repeat).run.run_id == job.run_id
    for other in ({"request_id": "r1", "fingerprint": b"other"}, {"request_id": "r2", "conversation_id": "another"}):
        with pytest.raises(RequestIdReused):
            start_job(desk, job.run_id, **other)
    assert desk.background.open_jobs_of(USER) == OPEN_MAX


def test_a_users_open_jobs_in_a_conversation_are_limited(desk: Desk, job: str) -> None:
    """ASYNC-7: jobs that the model started count too, but not jobs of other users."""
    for number in range(OPEN_MAX - 1):
        start_job(desk, f"job_{number}")
    with pytest.raises(TooManyJobs):
        start_job(desk)
    desk.unit.put_conversation(replace(desk.conversation, sharing=Sharing.WRITE))
    assert start_job(desk, "theirs", user_id=BOB).run.user_id == BOB
    desk.end_job("job_0")
    assert start_job(desk).run.state is RunState.QUEUED


def test_a_delayed_job_is_queued_only_once_it_is_due(desk: Desk) -> None:
    """ASYNC-7: a delayed job neither blocks other jobs nor counts towards the queue limit before it is due."""
    job = start_job(desk).run

    def queued() -> int:
        queue = desk.unit.queues.get(QueueKey(job.store_id, in_background=True))
        assert queue is not None
        return queue.queued

    assert queued() == 1
    desk.claim(job.run_id)
    due = desk.now + timedelta(seconds=60)
    parked: dict[str, Any] = {"state": RunState.WAITING, "waits": (WaitKind.TIME,), "lease": LeaseAction.PARK}
    desk.commit(job.run_id, **parked, wake_time=due)
    assert queued() == 0
    assert not desk.run(job.run_id).needs_slot(due - timedelta(seconds=1))
    assert desk.run(job.run_id).needs_slot(due)
    desk.now = due
    desk.claim(job.run_id)
    desk.commit(job.run_id, state=RunState.RUNNING, round=1)
    desk.commit(job.run_id, **parked, wake_time=due)
    assert not desk.run(job.run_id).needs_slot(due), "it has started"


def test_a_job_cannot_be_started_in_another_users_conversation(desk: Desk, job: str) -> None:
    with pytest.raises(ConversationNotFound):
        start_job(desk, user_id="you")


def test_a_job_starts_by_the_database_clock(desk: Desk) -> None:
    """The clock of the client or of agent-loop may be wrong; in this test it is wrong by days."""
    request = ledger_pb2.StartJobRequest(run_id="job_s")
    request.message.MergeFrom(
        ledger_pb2.SubmitMessageRequest(
            store_id=STORE, user_id=USER, conversation_id="conv", text="work", policy=ledger_pb2.MESSAGE_POLICY_QUEUE
        )
    )
    request.job.begin_time.FromDatetime(desk.now + timedelta(days=3))
    request.job.end_time.FromDatetime(desk.now + timedelta(days=3, seconds=600))
    desk.start_run()
    limits = Limits(crashes_max=3, queue_max=9, store_queue_max=9, slots=SlotLimits(per_store=9, per_user=9))
    job = run_pb2.Run.FromString(desk.apply(job_messages.start(request, lambda _: limits)).run.options).job
    times = [time.ToDatetime(tzinfo=UTC) for time in (job.begin_time, job.end_time)]
    assert times == [desk.now, desk.now + timedelta(seconds=600)]


def test_iterations_do_not_start_after_an_accepted_pause(desk: Desk, job: str) -> None:
    """The result of a read-only call that has already run is refused too, but running calls may still end."""
    desk.take(job)
    desk.commit(job, calls=(change("first", CallState.RUNNING),))
    assert desk.send(job, Pause(), "one").outcome is CommandOutcome.ACCEPTED
    desk.commit(job, calls=(change("first", CallState.SUCCEEDED),))
    for second in (
        change("second", CallState.RUNNING),
        change("second", CallState.SUCCEEDED, only_reads=True, attempt=1),
    ):
        with pytest.raises(InboxChanged):
            desk.commit(job, calls=(second,))
    desk.commit(job, consumed=("one",))
    assert desk.send(job, Pause()).outcome is CommandOutcome.ACCEPTED, "pausing again is allowed"


def test_only_a_running_job_can_be_paused(desk: Desk, job: str) -> None:
    assert desk.send(desk.runs[0].run_id, Pause()).reason == "RUN_ENDED"
    assert desk.send(desk.submit().run.run_id, Pause()).reason == "RUN_NOT_FOUND"
    desk.cancel(desk.take(job))
    assert desk.send(job, Pause()).reason == "RUN_ENDED", "it is being cancelled"
    desk.end(job, RunState.CANCELLED)
    assert desk.send(job, Pause()).reason == "RUN_ENDED"


CHILD = "run_child"


def delegated(state: CallState = CallState.DELEGATED, **fields: Any) -> CallChange:
    return change("call", state, child_run_id=CHILD, **fields)


@pytest.fixture
def parent(world: World, run_id: str) -> str:
    """Return a run that waits for a child run, which a worker has claimed."""
    parked: dict[str, Any] = {"state": RunState.WAITING, "waits": (60,), "lease": LeaseAction.PARK}
    world.commit(run_id, calls=(delegated(),), delegations=(delegation("call", CHILD),), **parked)
    world.claim(CHILD)
    return run_id


def test_the_budget_of_a_removed_run_is_empty(world: World, run_id: str) -> None:
    """LOOP-12: retention may remove an ended run while its jobs are open."""
    world.unit.put_run(replace(world.run(run_id), budget_run_id=RunId("run_removed")))
    assert world.commit(run_id, tokens_used=5).shared_tokens_left == 0


def test_a_child_runs_end_enters_the_parents_inbox_once(world: World, parent: str) -> None:
    end: dict[str, Any] = {"state": RunState.COMPLETED, "output": b"out", "usage": b"used", "commit_id": "end"}
    for _ in range(2):
        world.commit(CHILD, **end)

    (command,) = world.unit.inbox(world.run(parent))
    ending = stop.read_ending(command.payload)
    assert (command.name, command.call_id) == (inbox.AGENT_ENDED, "call")
    assert (ending.run_id, ending.state, ending.output, ending.usage) == (CHILD, RunState.COMPLETED, b"out", b"used")
    assert world.call("call").reserved_by == command.command_id
    assert world.run(parent).claim_at == world.now, "it may still resume"
    world.claim(parent)
    with pytest.raises(InboxChanged):
        world.commit(parent, calls=(delegated(CallState.CANCELLED),))
    world.commit(parent, calls=(delegated(CallState.SUCCEEDED),), consumed=(command.command_id,))
    assert world.call("call").state is CallState.SUCCEEDED


def test_the_worker_of_a_child_run_is_notified_of_its_cancellation(world: World, parent: str) -> None:
    """Otherwise the worker would finish its current work first."""
    world.commit(CHILD, state=RunState.RUNNING)
    world.cancel(parent)
    world.claim(parent)
    world.commit(
        parent, calls=(delegated(CallState.CANCELLED),), consumed=world.unread(parent), child_cancel=b"give up"
    )
    child = world.run(CHILD)
    assert (child.state, child.stop_cause) == (RunState.CANCELLING, StopCause.PARENT)
    assert [(command.name, command.payload) for command in world.unit.inbox(child)] == [("cancel", b"give up")]
    assert world.unit.wakeups.rows[-1].run.run_id == CHILD


def test_a_quarantined_run_is_notified_of_its_childs_end_when_it_is_redriven(world: World, parent: str) -> None:
    """Otherwise the run could wait forever for a child that has ended."""
    world.release(parent)
    epoch = world.claim(parent)
    world.apply(ReportCrash(run=RunKey(STORE, RunId(parent)), epoch=epoch or 0, crashes_max=1))
    world.commit(CHILD, state=RunState.COMPLETED)
    assert world.run(parent).claim_at is None
    world.send(parent, Redrive(), as_operator=True)
    assert world.run(parent).claim_at == world.now
    assert [command.name for command in world.unit.inbox(world.run(parent))] == [inbox.AGENT_ENDED]


def test_a_call_is_delegated_only_to_a_run_created_in_the_same_step(world: World, run_id: str) -> None:
    bare, itself = change("call", CallState.DELEGATED), change("call", CallState.DELEGATED, child_run_id=run_id)
    for calls, delegations, error in (
        ((delegated(),), (), InvalidField),
        ((bare,), (delegation("call", CHILD),), InvalidField),
        ((delegated(),), (delegation("call", "run_other"),), InvalidField),
        ((), (delegation("call", CHILD),), InvalidField),
        ((delegated(),), (delegation("call", run_id),), InvalidField),
        ((delegated(CallState.RUNNABLE),), (), IllegalTransition),
        ((itself,), (delegation("call", run_id),), IllegalTransition),
    ):
        with pytest.raises(error):
            world.commit(run_id, calls=calls, delegations=delegations)
    assert world.unit.runs.get(RunKey(STORE, RunId(CHILD))) is None
