"""What holds whatever several workers, clients and users do to one conversation, in any order."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pawl.chassis.ids import CallId, CallKey, ClientId, ConversationId, RunId, RunKey
from pawl.errors import LeaseLost, PawlError, RunEnded
from pawl.job_store.domain import call_table
from pawl.job_store.domain.commit import Commit, NewMessage
from pawl.job_store.domain.events import CallChanged, MessageAdded, OwnerEvent, RunChanged
from pawl.job_store.domain.offers import ReleaseOffers
from pawl.job_store.domain.places import PlaceLimits
from pawl.job_store.domain.rows import CallRow, ConversationKey, RunRow
from pawl.job_store.domain.states import (
    CallState,
    CommandOutcome,
    DecisionKind,
    LeaseAction,
    MessagePolicy,
    RunState,
    StopCause,
    WaitReason,
)
from pawl.job_store.domain.waiting import Situation, explain
from tests.unit.job_store.test_waiting import check
from tests.unit.job_store.world import DIGEST, STORE, World, change

WORKERS = ("w1", "w2")
CLIENTS = ("tab_1", "tab_2", "")
CALLS = ("a", "b", "c", "d")
KINDS = st.sampled_from(DecisionKind)


class Conversation(RuleBasedStateMachine):
    """Workers keep the epochs they were given, and go on using them when they are stale."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.runs: list[str] = []
        self.epochs: dict[tuple[str, str], int] = {}
        self.leases: dict[tuple[str, str], int] = {}
        self.steps: list[tuple[Commit, object]] = []

    def try_apply(self, operation: Any) -> Any:
        """Apply; a refused operation must leave no trace."""
        before = self.snapshot()
        try:
            return self.world.apply(operation)
        except PawlError as error:
            assert self.snapshot() == before
            return error

    def snapshot(self) -> tuple[object, ...]:
        unit = self.world.unit
        tables = (unit.requests, unit.conversations, unit.runs, unit.calls, unit.commands, unit.loop_states)
        return (
            *(dict(table.items()) for table in tables),
            list(unit.events.rows),
            list(unit.messages.rows),
            list(unit.wakeups.rows),
            unit.work_ready,
        )

    def calls(self) -> list[CallRow]:
        return list(dict(self.world.unit.calls.items()).values())

    def pick(self, data: st.DataObject) -> str:
        return data.draw(st.sampled_from(self.runs), label="run")

    @initialize()
    def first_message(self) -> None:
        self.submit(MessagePolicy.QUEUE)

    @rule(policy=st.sampled_from(MessagePolicy))
    def submit(self, policy: MessagePolicy) -> None:
        try:
            submitted = self.world.submit(policy, queue_max=3)
        except PawlError:
            return
        if submitted.run.run_id not in self.runs:
            self.runs.append(submitted.run.run_id)

    @rule(data=st.data(), worker=st.sampled_from(WORKERS))
    def claim(self, data: st.DataObject, worker: str) -> None:
        run_id = self.pick(data)
        epoch = self.world.claim(run_id, worker)
        if epoch is not None:
            self.epochs[run_id, worker] = epoch

    @rule(seconds=st.sampled_from([1, 31]))
    def time_passes(self, seconds: int) -> None:
        self.world.advance(seconds)

    @rule(data=st.data(), worker=st.sampled_from(WORKERS))
    def step(self, data: st.DataObject, worker: str) -> None:
        run_id = self.pick(data)
        run = self.world.run(run_id)
        state = data.draw(st.none() | st.sampled_from(RunState), label="state")
        inbox = [command.command_id for command in self.world.unit.inbox(run)]
        operation = Commit(
            run=RunKey(STORE, RunId(run_id)),
            epoch=self.epochs.get((run_id, worker), 0),
            commit_id=f"c{self.world.number():06}",
            events=tuple([OwnerEvent(type="output.delta", body=b"x")] * data.draw(st.integers(0, 2))),
            messages=tuple([NewMessage(message_id="", summarised_to=0, body=b"m")] * data.draw(st.integers(0, 1))),
            calls=self.draw_calls(data, run_id),
            state=state,
            waits=(1,) if state is RunState.WAITING else (),
            failure=b"why" if state is RunState.FAILED else None,
            stop_cause=StopCause.USER if state is RunState.CANCELLED else None,
            consumed=tuple(inbox) if data.draw(st.booleans(), label="consume") else (),
            lease=data.draw(st.sampled_from(LeaseAction), label="lease"),
        )
        self.run_step(operation, run)

    def run_step(self, operation: Commit, run: RunRow) -> None:
        outcome = self.try_apply(operation)
        if not isinstance(outcome, PawlError):
            assert run.worker_id is not None
            assert (run.epoch, run.state.is_terminal) == (operation.epoch, False)
            self.steps.append((operation, outcome))
        elif run.epoch != operation.epoch:
            assert isinstance(outcome, LeaseLost | RunEnded)

    def draw_calls(self, data: st.DataObject, run_id: str) -> tuple[Any, ...]:
        changes = []
        for name in data.draw(st.lists(st.sampled_from(CALLS), unique=True, max_size=2), label="calls"):
            call = self.world.unit.calls.get(CallKey(STORE, CallId(f"{run_id}_{name}")))
            possible = call_table.INITIAL if call is None else call_table.TRANSITIONS[call.state]
            state = data.draw(st.sampled_from(sorted(possible or CallState)), label="call state")
            digest = call.digest if call is not None else ""
            if state is CallState.AWAITING_APPROVAL:
                digest = DIGEST
            attempt = 1 if call is None else call.attempt + 1
            changes.append(change(f"{run_id}_{name}", state, digest=digest, attempt=attempt))
        return tuple(changes)

    @rule(data=st.data())
    def settle_all(self, data: st.DataObject) -> None:
        """An owner that does everything right can always bring its run to an end."""
        run_id = self.pick(data)
        run = self.world.run(run_id)
        if run.worker_id is None or run.state.is_terminal:
            return
        unit = self.world.unit
        calls = tuple(
            change(call.call_id, CallState.FAILED, digest=call.digest, arguments=call.arguments, attempt=call.attempt)
            for call in unit.open_calls(run)
        )
        ends_from = {RunState.NEEDS_ATTENTION: RunState.RUNNING}
        if run.state in ends_from:
            self.world.commit(run_id, state=ends_from[run.state])
        self.world.commit(
            run_id,
            calls=calls,
            consumed=tuple(command.command_id for command in unit.inbox(run)),
            state=RunState.FAILED,
            failure=b"why",
        )

    @rule(data=st.data())
    def repeat_the_last_step(self, data: st.DataObject) -> None:
        """I2: the last step of each run can be sent again."""
        run_id = self.pick(data)
        steps = [step for step in self.steps if step[0].run.run_id == run_id]
        last = self.world.run(run_id).last_commit
        if not steps or last is None or last.commit_id != steps[-1][0].commit_id:
            return
        before = self.snapshot()
        assert self.world.apply(steps[-1][0]) == steps[-1][1]
        assert self.snapshot() == before

    @rule(data=st.data(), kind=KINDS, name=st.sampled_from(CALLS))
    def decide(self, data: st.DataObject, kind: DecisionKind, name: str) -> None:
        run_id = self.pick(data)
        edit: dict[str, Any] = {"arguments": b"{}", "edited_digest": DIGEST} if kind is DecisionKind.EDIT else {}
        self.world.decide(run_id, f"{run_id}_{name}", kind, **edit)

    @rule(data=st.data(), client=st.sampled_from(CLIENTS), name=st.sampled_from(CALLS))
    def bring_a_result(self, data: st.DataObject, client: str, name: str) -> None:
        run_id = self.pick(data)
        call_id = f"{run_id}_{name}"
        before = self.world.unit.calls.get(CallKey(STORE, CallId(call_id)))
        receipt = self.world.result(run_id, call_id, client, self.leases.get((call_id, client), 0))
        if receipt.outcome is CommandOutcome.ACCEPTED:
            assert before is not None
            assert (before.state, before.reserved_by) == (CallState.OFFERED, "")

    @rule(data=st.data(), client=st.sampled_from(CLIENTS[:2]), name=st.sampled_from(CALLS))
    def lease(self, data: st.DataObject, client: str, name: str) -> None:
        run_id = self.pick(data)
        leased = self.world.lease(run_id, f"{run_id}_{name}", client)
        if leased.granted:
            assert leased.call is not None
            assert leased.call.offer is not None
            self.leases[leased.call.call_id, client] = leased.call.offer.epoch

    @rule(data=st.data(), client=st.sampled_from([ClientId("tab_1"), ClientId("tab_2"), None]))
    def give_back(self, data: st.DataObject, client: ClientId | None) -> None:
        run_id = self.pick(data)
        calls = tuple((RunKey(STORE, RunId(run_id)), CallKey(STORE, CallId(f"{run_id}_{name}"))) for name in CALLS)
        self.world.apply(ReleaseOffers(client_id=client, calls=calls))

    @rule(data=st.data())
    def steer(self, data: st.DataObject) -> None:
        self.world.steer(self.pick(data))

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        run_id = self.pick(data)
        self.world.cancel(run_id)
        run = self.world.run(run_id)
        assert run.state is RunState.CANCELLING or run.state.is_terminal

    @invariant()
    def the_log_has_no_gaps_and_one_end(self) -> None:
        """EVT-1, EVT-4."""
        events = self.world.unit.events.rows
        assert len({event.event_id for event in events}) == len(events)
        for run_id in self.runs:
            log = [event for event in events if event.run_id == run_id]
            assert [event.seq for event in log] == list(range(1, len(log) + 1))
            assert self.world.run(run_id).last_seq == len(log)
            ends = [event for event in log if isinstance(event.body, RunChanged) and event.body.run.state.is_terminal]
            assert len(ends) == self.world.run(run_id).state.is_terminal
            assert ends in ([], log[-1:])

    @invariant()
    def the_state_is_the_fold_of_the_log(self) -> None:
        """I17."""
        states: dict[str, RunState] = {}
        calls: dict[str, CallRow] = {}
        numbers: list[int] = []
        for event in self.world.unit.events.rows:
            match event.body:
                case RunChanged(from_state=before, run=run):
                    assert states.get(run.run_id) is before
                    states[run.run_id] = run.state
                case CallChanged(from_state=before, call=call):
                    assert (calls[call.call_id].state if call.call_id in calls else None) is before
                    calls[call.call_id] = call
                case MessageAdded(message=message):
                    numbers.append(message.number)
                case _:
                    pass
        assert states == {run_id: self.world.run(run_id).state for run_id in self.runs}
        stored = {call.call_id: call.state for call in self.calls()}
        assert {name: call.state for name, call in calls.items()} == stored
        assert numbers == list(range(1, len(numbers) + 1))

    @invariant()
    def every_run_goes_on_or_waits_visibly(self) -> None:
        """I3, LOOP-13: the runs of a conversation that are open are the one with the turn and those that wait."""
        conversation = self.world.unit.conversations.get(ConversationKey(STORE, ConversationId("conv")))
        assert conversation is not None
        open_runs = [run_id for run_id in self.runs if not self.world.run(run_id).state.is_terminal]
        active = [conversation.active_run_id] if conversation.active_run_id else []
        assert sorted([*active, *conversation.queue]) == sorted(open_runs)
        for run_id in open_runs:
            run = self.world.run(run_id)
            if run_id in active:
                asleep = run.state in {RunState.WAITING, RunState.NEEDS_ATTENTION} and not self.world.unit.inbox(run)
                assert run.claim_at is not None or asleep
            else:
                assert (run.state, run.claim_at, run.worker_id) == (RunState.QUEUED, None, None)

    @invariant()
    def every_run_that_does_not_go_on_says_why(self) -> None:
        conversation = self.world.unit.conversations.get(ConversationKey(STORE, ConversationId("conv")))
        assert conversation is not None
        for run_id in self.runs:
            run, queue = self.world.run(run_id), conversation.queue
            before = [conversation.active_run_id, *queue[: queue.index(run.run_id)]] if run.run_id in queue else []
            situation = Situation(
                run=run,
                time=self.world.now,
                calls=self.world.unit.open_calls(run),
                before=tuple(each for each in before if each is not None),
            )
            waiting = explain(situation, PlaceLimits(per_store=9, per_user=9))
            check(situation, waiting)
            assert waiting is None or (waiting.reason is WaitReason.TURN) == (run.run_id in queue)
            assert waiting is None or waiting.reason is not WaitReason.TURN or waiting.run_ids

    @invariant()
    def a_call_is_settled_and_decided_once(self) -> None:
        """I6, I9, I11."""
        for call in self.calls():
            assert (call.result is not None) == call.state.is_terminal
            taken = [
                command
                for command in dict(self.world.unit.commands.items()).values()
                if command.call_id == call.call_id and not command.consumed
            ]
            assert [command.command_id for command in taken] == ([call.reserved_by] if call.reserved_by else [])

    @invariant()
    def no_gated_call_ran_without_an_approval(self) -> None:
        """I10."""
        for event in self.world.unit.events.rows:
            if isinstance(event.body, CallChanged) and event.body.call.digest:
                call = event.body.call
                approved = call.decision is not None and call.decision.kind in {DecisionKind.APPROVE, DecisionKind.EDIT}
                assert approved or call.state not in call_table.STARTED


Conversation.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestConversation = Conversation.TestCase
