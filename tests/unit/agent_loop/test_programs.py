"""The programs of runs, rule by rule; and what the loop does for any program, whichever it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from msgspec.structs import replace

from pawl.agent_loop.domain import planning, program, undo_program
from pawl.agent_loop.domain.call import Call, CallResult, Inverse
from pawl.agent_loop.domain.condition import Condition
from pawl.agent_loop.domain.decide import decide
from pawl.agent_loop.domain.decision import (
    CallModel,
    Decision,
    Execute,
    Finish,
    Park,
    Propose,
    ReadCalls,
    Resume,
    Wait,
)
from pawl.agent_loop.domain.event import Warned
from pawl.agent_loop.domain.fact import CallChecked, CallExecuted, CallsRead
from pawl.agent_loop.domain.loop_state import JobCursor, LoopState
from pawl.agent_loop.domain.message import Message, Role
from pawl.agent_loop.domain.run import Job, PinnedTool, Run, RunOptions, Undo
from pawl.agent_loop.domain.state import State, check_of
from pawl.agent_loop.domain.tool import ExecutionResult
from pawl.agent_loop.domain.undo import CallUndo, PlannedUndo, UndoPlan, UndoState
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.values import CallState, EffectClass, Outcome, RunState, WaitKind
from tests.fakes.registry import tool
from tests.unit.agent_loop.simulation import OK

NOW = 1000.0
PLAN = UndoPlan(
    steps=(
        PlannedUndo(call_id=CallId("call_2"), undo_call_id=CallId("undo_2"), tool_name="do", summary="two"),
        PlannedUndo(call_id=CallId("call_1"), undo_call_id=CallId("undo_1"), tool_name="do", summary="one"),
    ),
    others=(
        CallUndo(call_id=CallId("call_3"), tool_name="mail", state=UndoState.CANNOT_BE_UNDONE, reason="No way back."),
    ),
)


def call(call_id: str, state: CallState = CallState.RUNNABLE, *, index: int = 0, number: int = 1) -> Call:
    return Call(
        store_id=StoreId("s"),
        conversation_id=ConversationId("c"),
        run_id=RunId("r"),
        call_id=CallId(call_id),
        round=number,
        index=index,
        tool_name="do",
        state=state,
        effect_class=EffectClass.IDEMPOTENT,
    )


def state_of(
    *calls: Call, run: Run | None = None, loop: LoopState | None = None, messages: Sequence[Message] = ()
) -> State:
    known = {each.call_id: each for each in calls}
    return State(run=run or agent_run(), calls=known, loop=loop or LoopState(), messages=tuple(messages))


def agent_run(*, number: int = 1, options: RunOptions | None = None) -> Run:
    return Run(
        store_id=StoreId("s"),
        user_id=UserId("u"),
        conversation_id=ConversationId("c"),
        run_id=RunId("r"),
        state=RunState.RUNNING,
        round=number,
        options=options or RunOptions(),
    )


def said(text: str = "", *call_ids: str, role: Role = Role.ASSISTANT) -> Message:
    return Message(role=role, run_id=RunId("r"), text=text, call_ids=tuple(map(CallId, call_ids)), number=1)


def undo_run(**values: object) -> Run:
    tools = (PinnedTool(name="back", version=1),)
    return replace(agent_run(number=0), undo=Undo(run_id=RunId("r_0")), tools=tools, **values)


def undone(call_id: str) -> Call:
    """A call of the run that is undone."""
    inverse = Inverse(tool_name="back", arguments_json=b'{"n":1}', summary=call_id)
    return replace(
        call(call_id, CallState.SUCCEEDED), run_id="r_0", result=CallResult(content_json=b"1", inverse=inverse)
    )


def inverse(undo_call_id: str, state: CallState, number: int = 1) -> Call:
    """A call of the undo itself."""
    return call(undo_call_id, state, number=number)


class TestUndo:
    """What follows in a run that takes another one back."""

    loop = LoopState(cursor=PLAN)

    def follows(self, *calls: Call, loop: LoopState | None = None, named: Sequence[Call] = ()) -> Decision:
        state = state_of(*calls, run=undo_run(), loop=loop or self.loop)
        return undo_program.follows(replace(state, named={each.call_id: each for each in named}), NOW)

    def test_what_the_claim_did_not_load_is_read(self) -> None:
        assert self.follows() == ReadCalls(call_ids=(CallId("call_2"),))
        assert isinstance(self.follows(named=[undone("call_2")]), Propose)

    def test_after_its_report_the_model_answers_the_message_without_tools_and_is_not_warned(self) -> None:
        run = undo_run(round=8)
        told = [said("the report"), said("wait", role=Role.USER)]
        loop = LoopState(cursor=replace(PLAN, reported=True))
        state = state_of(run=run, loop=loop, messages=told)
        follows = undo_program.follows(state, NOW)
        assert follows == CallModel(round=9, without_tools=True)
        _, events = planning.enact(state, follows, NOW)
        assert not any(isinstance(event, Warned) for event in events)
        answered = replace(state, messages=(*told, said("I stopped.")))
        assert undo_program.follows(answered, NOW) == Finish(state=RunState.COMPLETED)

    def test_a_plan_without_its_calls_is_a_fault(self) -> None:
        with pytest.raises(RuntimeError, match="no inverse"):
            self.follows(named=[call("call_2", CallState.SUCCEEDED)])


class TestJob:
    """What follows in a run that repeats a call."""

    @pytest.mark.parametrize(("price", "is_met"), [(b'{"price": 19}', True), (b'{"price": 21}', False)])
    def test_an_iteration_is_judged_once_as_it_ends_whether_it_is_written_or_handed_over(
        self, price: bytes, is_met: bool
    ) -> None:
        """What follows is asked of the cursor: the results of calls need not be there."""
        job = Job(
            tool_name="do",
            arguments_json=b"{}",
            begin_time=NOW,
            interval_seconds=60,
            iterations_max=9,
            until=Condition(pointer="/price", below=20),
        )
        run = replace(agent_run(), job=job)
        base = state_of(call("look", CallState.RUNNING), run=run, loop=LoopState(cursor=JobCursor()))
        result = CallResult(content_json=price)
        ended = CallExecuted(call_id=CallId("look"), ended=ExecutionResult(outcome=Outcome.SUCCEEDED, result=result))
        handed_over, _ = planning.take_all(base, [ended], NOW)
        cursor = handed_over.loop.cursor
        assert isinstance(cursor, JobCursor)
        assert cursor.met is is_met
        assert handed_over.tells_iteration == base.run.round
        plan = planning.plan(base, [ended], NOW)
        assert isinstance(plan.rest, Finish if is_met else Park)
        assert plan.state.loop.cursor == cursor
        forgotten = replace(handed_over.calls[CallId("look")], result=None)
        follows = program.of(run).follows(handed_over.with_calls([forgotten]), NOW)
        assert isinstance(follows, Finish if is_met else Wait)


class FakeProgram:
    """A program that answers as a function says; its calls start at once."""

    def __init__(self, answer: Callable[[State, float], Decision]) -> None:
        self.follows = answer

    def may_start(self, call: Call, state: State) -> bool:
        return True

    def gives_up(self, call: Call, state: State) -> bool:
        return False

    def concluded(self, state: State, *, goes_on: bool) -> State:
        return state

    def reported(self, base: State, after: State) -> State:
        return after


@pytest.fixture
def drives(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[State, float], Decision]], None]:
    """Let every run have a program that answers like this."""
    return lambda answer: monkeypatch.setattr(program, "of", lambda _: FakeProgram(answer))


Drives = Callable[[Callable[[State, float], Decision]], None]


class TestAnyProgram:
    """What the loop does for a program of which it knows nothing."""

    def test_it_is_asked_after_each_settlement_though_other_calls_wait_for_a_person(self, drives: Drives) -> None:
        """Two branches: the second call of one follows while the other one waits."""

        def follows(state: State, now: float) -> Decision:
            ended = state.calls[CallId("first")].settled
            return Propose(calls=(call("second"),)) if ended and "second" not in state.calls else Wait(until=None)

        drives(follows)
        state = state_of(call("first"), call("asks", CallState.ASKED, index=1))
        begun = planning.plan(state, (), NOW)
        assert begun.work == (Execute(call_ids=(CallId("first"),)),)
        later = planning.plan(
            replace(begun.state, under_way=frozenset()), [CallExecuted(call_id=CallId("first"), ended=OK)], NOW
        )
        assert later.work == (Propose(calls=(call("second"),)),)
        assert isinstance(later.rest, Wait)

        checked = CallChecked(call=call("second", CallState.PROPOSED), verdict=tool())
        last = planning.plan(replace(later.state, under_way=frozenset()), [checked], NOW)

        assert last.work == (Execute(call_ids=(CallId("second"),)),)
        assert last.state.calls[CallId("asks")].state is CallState.ASKED

    def test_a_round_that_begins_keeps_what_belongs_to_calls_that_are_open(self, drives: Drives) -> None:
        proposed = call("second", CallState.PROPOSED, number=2)
        drives(lambda state, _: Wait(until=None) if "second" in state.calls else Propose(calls=(proposed,)))
        loop = LoopState(
            notes={CallId("asks"): "kept", CallId("ended"): "gone"}, unknowns_resolved={CallId("ended"): 1}
        )
        state = state_of(call("asks", CallState.ASKED), call("ended", CallState.SUCCEEDED, index=1), loop=loop)
        plan = planning.plan(state, [CallChecked(call=proposed, verdict=tool())], NOW)
        assert (plan.state.run.round, plan.state.loop.notes) == (2, {"asks": "kept"})
        assert plan.state.loop.unknowns_resolved == {}
        assert {each.call_id for each in plan.state.open_calls} == {"asks", "second"}

    def test_its_time_wakes_a_run_that_waits_for_a_person_longer(self, drives: Drives) -> None:
        drives(lambda _, __: Wait(until=NOW + 5))
        asks = replace(call("asks", CallState.ASKED), deadline_time=NOW + 60)
        rest = planning.plan(state_of(asks), (), NOW).rest
        assert rest == Park(state=RunState.WAITING, waits=(WaitKind.ANSWER,), wake_time=NOW + 5)

    def test_a_proposal_that_is_being_checked_is_not_made_again_and_another_one_is(self, drives: Drives) -> None:
        first, second = call("first", CallState.PROPOSED), call("second", CallState.PROPOSED, index=1)
        drives(lambda _, __: Propose(calls=(first, second)))
        state = replace(state_of(), under_way=frozenset({check_of(CallId("first"))}))
        assert planning.plan(state, (), NOW).work == (Propose(calls=(second,)),)

    def test_a_verdict_after_a_cancel_begins_nothing(self, drives: Drives) -> None:
        proposed = call("late", CallState.PROPOSED)
        drives(lambda _, __: Propose(calls=(proposed,)))
        state = state_of(run=replace(agent_run(), state=RunState.CANCELLING))
        plan = planning.plan(state, [CallChecked(call=proposed, verdict=tool())], NOW)
        assert (plan.state.calls, plan.work) == ({}, ())
        assert plan.rest == Finish(state=RunState.CANCELLED)

    def test_what_it_names_is_read_and_is_never_written_as_its_own(self, drives: Drives) -> None:
        drives(lambda state, _: Wait(until=None) if state.named else ReadCalls(call_ids=(CallId("other"),)))
        asked = planning.plan(state_of(), (), NOW)
        assert asked.work == (ReadCalls(call_ids=(CallId("other"),)),)
        read = CallsRead(calls=(replace(call("other", CallState.RUNNABLE), run_id="r_0"),))
        plan = planning.plan(replace(asked.state, under_way=frozenset()), [read], NOW)
        assert (plan.work, plan.state.calls, plan.state.open_calls) == ((), {}, ())

    def test_a_run_that_is_parked_goes_on_before_it_completes(self, drives: Drives) -> None:
        """The ledger takes no step from WAITING to COMPLETED."""
        drives(lambda _, __: Finish(state=RunState.COMPLETED))
        state = state_of(run=replace(agent_run(), state=RunState.WAITING))
        assert decide(state, NOW) == Resume()
        assert decide(state_of(), NOW) == Finish(state=RunState.COMPLETED)

    def test_no_limit_of_a_round_holds_between_rounds(self, drives: Drives) -> None:
        """A check that is under way in a round that took long is waited for, not looked at again and again."""
        drives(lambda _, __: Propose(calls=(call("next", CallState.PROPOSED),)))
        state = replace(state_of(), active_seconds=200.0, under_way=frozenset({check_of(CallId("next"))}))
        assert decide(state, NOW) == Wait(until=NOW + 100)
