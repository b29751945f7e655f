"""An in-memory ledger for tests of its operations, with a manual clock and counting ids."""

from __future__ import annotations

import itertools
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

from msgspec.structs import replace

from pawl.chassis.ids import CallId, CallKey, ClientId, CommandId, RunId, RunKey, SessionId, StoreId, UserId
from pawl.job_store.ledger.rules.calls import CallChange
from pawl.job_store.ledger.rules.command import Cancel, Command, Receipt, Send, Steer, ToolResult
from pawl.job_store.ledger.rules.commit import Commit
from pawl.job_store.ledger.rules.decisions import Decide
from pawl.job_store.ledger.rules.delegation import Delegation
from pawl.job_store.ledger.rules.offers import Leased, LeaseOffer
from pawl.job_store.ledger.rules.rows import CallRow, LastCommit, RunRow
from pawl.job_store.ledger.rules.slots import Queue, QueueKey
from pawl.job_store.ledger.rules.submit import Submit, Submitted
from pawl.job_store.ledger.rules.unit_of_work import UnitOfWork
from pawl.values import CallState, DecisionKind, MessagePolicy, RunState, StopCause

DIGEST = "ab" * 32
EDITED_DIGEST = "cd" * 32
STORE = StoreId("acme")
USER = UserId("ann")
BOB = UserId("bob")


class CountingIds:
    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()

    def new(self, prefix: str) -> str:
        self._counts[prefix] += 1
        return f"{prefix}_{self._counts[prefix]:04}"


class World:
    """Applies operations to one unit of work, as if each were stored immediately."""

    def __init__(self) -> None:
        self.unit = UnitOfWork(CountingIds())
        self.now = datetime(2026, 5, 1, tzinfo=UTC)
        self._numbers = itertools.count(1)
        for in_background in (False, True):
            self.unit.queues.load(QueueKey(STORE, in_background=in_background), Queue(queued=0, active=0, slots=0))

    def apply(self, operation: Any) -> Any:
        self.unit.now = self.now
        with self.unit.attempt():
            return operation.apply(self.unit)

    def advance(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def number(self) -> int:
        return next(self._numbers)

    def submit(self, policy: MessagePolicy = MessagePolicy.QUEUE, **fields: Any) -> Submitted:
        submitted: Submitted = self.apply(submission(policy, **fields))
        return submitted

    def claim(self, run_id: str, worker_id: str = "w1") -> int | None:
        run = self.run(run_id)
        if run.claim_at is None or run.claim_at > self.now:
            return None
        run = replace(
            run,
            epoch=run.epoch + 1,
            worker_id=worker_id,
            claim_at=self.now + timedelta(seconds=30),
            start_time=self.now,
            crashes=run.crashes + (run.worker_id is not None),
        )
        self.unit.put_run(run)
        return run.epoch

    def release(self, run_id: str) -> None:
        self.unit.put_run(replace(self.run(run_id), worker_id=None, claim_at=self.now))

    def run(self, run_id: str) -> RunRow:
        run = self.unit.runs.get(RunKey(STORE, RunId(run_id)))
        assert run is not None
        return run

    def call(self, call_id: str) -> CallRow:
        call = self.unit.calls.get(CallKey(STORE, CallId(call_id)))
        assert call is not None
        return call

    def commit(self, run_id: str, epoch: int | None = None, **fields: Any) -> LastCommit:
        values: dict[str, Any] = {
            "run": RunKey(STORE, RunId(run_id)),
            "epoch": self.run(run_id).epoch if epoch is None else epoch,
            "commit_id": f"c{self.number():06}",
        }
        committed: LastCommit = self.apply(Commit(**(values | fields)))
        return committed

    def start_run(self, **fields: Any) -> str:
        run_id = self.submit(**fields).run.run_id
        self.claim(run_id)
        self.commit(run_id, state=RunState.RUNNING)
        return run_id

    def send(self, run_id: str, command: Command, command_id: str = "", **fields: Any) -> Receipt:
        values: dict[str, Any] = {
            "run": RunKey(STORE, RunId(run_id)),
            "user_id": USER,
            "command_id": command_id or f"cmd{self.number()}",
            "fingerprint": repr(command).encode(),
            "command": command,
            "payload": b"payload",
        }
        receipt: Receipt = self.apply(Send(**(values | fields)))
        return receipt

    def cancel(self, run_id: str) -> Receipt:
        return self.send(run_id, Cancel(cause=StopCause.USER), user_id=self.run(run_id).user_id)

    def steer(self, run_id: str) -> Receipt:
        return self.send(run_id, Steer())

    def decide(self, run_id: str, call_id: str, kind: DecisionKind, command_id: str = "", **fields: Any) -> Receipt:
        values = {"digest": DIGEST, "arguments": b"", "edited_digest": "", "reason": ""}
        return self.send(run_id, Decide(call_id=CallId(call_id), kind=kind, **(values | fields)), command_id)

    def result(
        self, run_id: str, call_id: str, client_id: str = "", epoch: int = 0, command_id: str = "", **fields: Any
    ) -> Receipt:
        brought = ToolResult(call_id=CallId(call_id), client_id=ClientId(client_id), offer_epoch=epoch)
        return self.send(run_id, brought, command_id, **fields)

    def lease(self, run_id: str, call_id: str, client_id: str, session_id: str = "") -> Leased:
        leased: Leased = self.apply(
            LeaseOffer(
                run=RunKey(STORE, RunId(run_id)),
                call=CallKey(STORE, CallId(call_id)),
                user_id=USER,
                client_id=ClientId(client_id),
                session_id=SessionId(session_id),
                lease_seconds=30.0,
            )
        )
        return leased

    def unread(self, run_id: str) -> tuple[CommandId, ...]:
        return tuple(command.command_id for command in self.unit.inbox(self.run(run_id)))

    def event_types(self, run_id: str) -> list[str]:
        return [event.type for event in self.unit.events.rows if event.run_id == run_id]


def submission(policy: MessagePolicy = MessagePolicy.QUEUE, **fields: Any) -> Submit:
    values: dict[str, Any] = {
        "store_id": STORE,
        "user_id": USER,
        "request_id": "",
        "fingerprint": b"f",
        "conversation_id": "conv",
        "conversation_must_exist": False,
        "policy": policy,
        "message": b"message",
        "steer": b"steer",
        "interrupt": b"interrupt",
        "options": b"",
        "queue_max": 100,
        "store_queue_max": 10_000,
    }
    return Submit(**(values | fields))


def change(call_id: str, state: CallState, **fields: Any) -> CallChange:
    """Return a change of an ungated call of `tool`, with a result if the state is terminal."""
    values: dict[str, Any] = {
        "round": 1,
        "index": 0,
        "tool_name": "tool",
        "tool_version": 1,
        "fallback_tool_name": "",
        "arguments": b"{}",
        "attempt": 1,
        "digest": "",
        "deadline_time": None,
        "result": b"result" if state.is_terminal else None,
        "spec": b"",
    }
    return CallChange(call_id=CallId(call_id), state=state, **(values | fields))


def delegation(call_id: str, run_id: str, **fields: Any) -> Delegation:
    values: dict[str, Any] = {"message": b"task", "options": b""}
    return Delegation(call_id=CallId(call_id), run_id=RunId(run_id), **(values | fields))
