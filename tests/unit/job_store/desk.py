"""A conversation in which only jobs act, and the model that responds to them."""

from __future__ import annotations

from pawl.chassis.ids import ConversationId
from pawl.job_store.ledger.rules.background import Background
from pawl.job_store.ledger.rules.jobs import Entered
from pawl.job_store.ledger.rules.rows import ConversationKey, ConversationRow, RunRow
from pawl.job_store.ledger.rules.slots import QueueKey
from pawl.values import CallState, RunState
from tests.unit.job_store.world import STORE, World, change, delegation


class Desk(World):
    @property
    def conversation(self) -> ConversationRow:
        row = self.unit.conversations.get(ConversationKey(STORE, ConversationId("conv")))
        assert row is not None
        return row

    @property
    def background(self) -> Background:
        return self.conversation.background

    @property
    def queue(self) -> tuple[int, int]:
        queue = self.unit.queues.get(QueueKey(STORE, in_background=False))
        return (queue.queued, queue.active) if queue else (0, 0)

    @property
    def active(self) -> RunRow | None:
        return self.run(self.conversation.active_run_id) if self.conversation.active_run_id else None

    @property
    def runs(self) -> list[RunRow]:
        return [run for _, run in self.unit.runs.items() if run.conversation_id == "conv"]

    @property
    def turns(self) -> list[RunRow]:
        return [run for run in self.runs if run.is_turn]

    @property
    def jobs(self) -> list[RunRow]:
        return [run for _, run in self.unit.runs.items() if run.reports_to]

    def start_job(self, run_id: str) -> str:
        name = f"{run_id}_{self.number()}"
        detached = change(f"call_{name}", CallState.DETACHED, child_run_id=f"job_{name}")
        self.commit(run_id, calls=(detached,), delegations=(delegation(f"call_{name}", f"job_{name}", is_job=True),))
        return f"job_{name}"

    def job_of_ended(self, run_id: str) -> str:
        """Start a job of a run, and end the run."""
        job = self.start_job(run_id)
        self.end(run_id)
        return job

    def delegate(self, run_id: str) -> str:
        """Delegate a call of a run, and return the delegated run, which a worker has started."""
        name = f"{run_id}_{self.number()}"
        delegated = change(f"call_{name}", CallState.DELEGATED, child_run_id=f"agent_{name}")
        self.commit(run_id, calls=(delegated,), delegations=(delegation(f"call_{name}", f"agent_{name}"),))
        return self.take(f"agent_{name}")

    def answer(self, run_id: str, state: RunState = RunState.COMPLETED) -> None:
        """End a delegated run, and settle the call that it carried out."""
        self.end(run_id, state)
        child = self.run(run_id)
        if not self.run(child.parent_run_id).state.is_terminal:
            settled = CallState.SUCCEEDED if state is RunState.COMPLETED else CallState.FAILED
            call = change(child.parent_call_id, settled, child_run_id=run_id)
            self.commit(child.parent_run_id, calls=(call,), consumed=self.unread(child.parent_run_id))

    def cancel_calls(self, run_id: str) -> None:
        """Stop a run, and have its worker cancel its delegated calls."""
        if not self.run(run_id).is_stopping:
            self.cancel(run_id)
        calls = tuple(
            change(call.call_id, CallState.CANCELLED, child_run_id=call.child_run_id)
            for call in self.unit.open_calls(self.run(run_id))
        )
        self.commit(run_id, calls=calls, consumed=self.unread(run_id), child_cancel=b"cancel")

    def take(self, run_id: str) -> str:
        claim_at = self.run(run_id).claim_at
        assert claim_at is not None
        self.now = max(self.now, claim_at)
        assert self.claim(run_id) is not None
        self.commit(run_id, state=RunState.RUNNING)
        return run_id

    def end(self, run_id: str, state: RunState = RunState.COMPLETED) -> None:
        self.commit(run_id, state=state, failure=b"why" if state is RunState.FAILED else None)

    def end_job(self, run_id: str) -> None:
        if self.run(run_id).worker_id is None:
            self.take(run_id)
        self.end(run_id)

    def enter(self, run_id: str) -> tuple[Entered, ...]:
        run = self.run(run_id)
        waiting = self.background.pending_of(run.user_id, run.receives_as)
        entered = tuple(Entered(run_id=each.run_id, occasion=each.occasion) for each in waiting)
        self.commit(run_id, entered=entered)
        return entered


def desk_with_a_turn() -> tuple[Desk, str]:
    """Return the desk and a turn that a worker has started and that has received the notice of a job."""
    desk = Desk()
    desk.end_job(desk.job_of_ended(desk.start_run()))
    turn = desk.take(desk.turns[0].run_id)
    desk.enter(turn)
    return desk, turn
