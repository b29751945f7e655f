"""The rules of undo alone: what is chosen, in which order, and what is said of the rest."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.agent_loop.domain import undo
from pawl.agent_loop.domain.call import (
    ApprovalRequest,
    Call,
    CallResult,
    CallState,
    Decided,
    DecisionKind,
    EffectClass,
    ExecutionContext,
    Inverse,
    Question,
)
from pawl.agent_loop.domain.fact import CallChecked
from pawl.agent_loop.domain.fact_rules import apply_fact
from pawl.agent_loop.domain.loop_state import LoopState
from pawl.agent_loop.domain.run import Run, Undo
from pawl.agent_loop.domain.state import State
from pawl.agent_loop.domain.undo import CallUndo, PlannedUndo, UndoPlan, UndoSource, UndoState
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from tests.fakes.registry import tool

DIGEST = "d" * 64
INVERSE = Inverse(tool_name="back", arguments_json=b"{}", summary="back")


@st.composite
def any_call(draw: st.DrawFn, call_id: str = "", run_id: str = "run_1") -> Call:
    state = draw(st.sampled_from([state for state in CallState if state is not CallState.PROPOSED]))
    reason = draw(st.sampled_from(["TOOL_ERROR", "NOT_STOPPED", "TOOL_TIMEOUT", "TOOL_NOT_FOUND", "CANCELLED"]))
    inverse = INVERSE if draw(st.booleans()) and state is CallState.SUCCEEDED else None
    is_error = state is not CallState.SUCCEEDED
    result = CallResult(content_json=b"{}", is_error=is_error, error_reason=reason * is_error, inverse=inverse)
    kind = draw(st.sampled_from([None, *DecisionKind]))
    return Call(
        store_id=StoreId("store"),
        conversation_id=ConversationId("conv"),
        run_id=RunId(run_id),
        call_id=CallId(call_id or f"call_{draw(st.integers(1, 10**9))}"),
        round=draw(st.integers(1, 5)),
        index=draw(st.integers(0, 5)),
        tool_name="do",
        state=state,
        effect_class=draw(st.sampled_from(list(EffectClass))),
        context=draw(st.sampled_from([ExecutionContext.BACKEND, ExecutionContext.FRONTEND])),
        attempt=draw(st.integers(0, 2)),
        approval=ApprovalRequest(digest=DIGEST, decision=Decided(kind=kind, user_id=UserId("me"))) if kind else None,
        result=result,
        end_time=draw(st.sampled_from([1.0, 2.0, 3.0, 4.0])),
    )


@st.composite
def any_source(draw: st.DrawFn) -> UndoSource:
    call = draw(any_call())
    count = draw(st.integers(0, 3))
    tries = [
        draw(any_call(call_id=undo.undo_call_id(call.call_id, attempt), run_id=f"run_{attempt + 1}"))
        for attempt in range(1, count + 1)
    ]
    return UndoSource(call=call, tries=tuple(tries))


@given(any_call(call_id="last"), st.sampled_from(list(EffectClass)))
def test_what_is_not_kept_of_a_job_is_said_to_stay(call: Call, effect: EffectClass) -> None:
    """In previews, plans and reports; it is no call that could be named."""
    call = replace(call, effect_class=effect)
    gone = UndoSource(call=replace(call, call_id=CallId(""), round=0, end_time=None), trimmed_rounds=4900)
    sources = undo.in_order([gone, UndoSource(call=call)])
    assert [source.call.call_id for source in sources] == ["last", ""]
    found = undo.judged(sources[-1])
    if effect is EffectClass.READ_ONLY:
        assert found.state is UndoState.NOTHING_TO_UNDO
    else:
        assert (found.state, "4900" in found.reason) == (UndoState.CANNOT_BE_UNDONE, True)
    assert gone not in undo.in_order([gone], CallId("last"))


@given(st.lists(any_source(), unique_by=lambda source: source.call.call_id, max_size=12))
def test_a_plan_is_the_reverse_of_the_ends_with_each_call_at_most_once(sources: list[UndoSource]) -> None:
    run = Run(
        store_id=StoreId("s"),
        user_id=UserId("u"),
        conversation_id=ConversationId("c"),
        run_id=RunId("run_9"),
        undo=Undo(run_id=RunId("run_1")),
    )

    planned = undo.plan(sources, run)

    of = {source.call.call_id: source for source in sources}
    chosen = [of[step.call_id] for step in planned.steps]
    assert len(set(map(id, chosen))) == len(chosen)
    ends = [(each.call.end_time or 0.0, each.call.round, each.call.index) for each in chosen]
    assert ends == sorted(ends, reverse=True)
    for step, source in zip(planned.steps, chosen, strict=True):
        assert undo.inverse_of(source.call) is not None
        assert step.undo_call_id not in {each.call_id for each in source.tries}
        assert not any(_may_have_had_its_effect(each) for each in source.tries[-1:])
    skipped = [source for source in sources if source not in chosen and undo.inverse_of(source.call) is not None]
    assert all(source.tries for source in skipped)


def test_a_verdict_that_comes_again_does_not_begin_an_inverse_again() -> None:
    """A step of an earlier drive may have been written after all: its call is there when the fact is taken in."""
    run = Run(
        store_id=StoreId("s"),
        user_id=UserId("u"),
        conversation_id=ConversationId("c"),
        run_id=RunId("run_9"),
        undo=Undo(run_id=RunId("run_1")),
    )
    step = PlannedUndo(call_id=CallId("call_1"), undo_call_id=CallId("undo_1"), tool_name="do", summary="")
    undone = Call(
        store_id=StoreId("s"),
        conversation_id=ConversationId("c"),
        run_id=RunId("run_1"),
        call_id=CallId("call_1"),
        round=1,
        index=0,
        tool_name="do",
        state=CallState.SUCCEEDED,
        result=CallResult(content_json=b"{}", inverse=INVERSE),
    )
    state = State(run=run, loop=LoopState(cursor=UndoPlan(steps=(step,))), named={CallId("call_1"): undone})
    fact = CallChecked(call=undo.draft(run, step, INVERSE, 1.0), verdict=tool())
    begun, _ = apply_fact(state, fact, 1.0)
    ended = begun.with_calls([replace(begun.calls[CallId("undo_1")], state=CallState.SUCCEEDED)])

    again, _ = apply_fact(ended, fact, 2.0)

    assert begun.calls[CallId("undo_1")].state is CallState.RUNNABLE
    assert again == ended


@given(any_source())
def test_every_call_is_said_to_be_one_thing_and_why(source: UndoSource) -> None:
    for run_id in ("", "run_2", "run_9"):
        found: CallUndo = undo.judged(source, RunId(run_id))
        clear = {UndoState.UNDONE, UndoState.ALREADY_UNDONE, UndoState.RUNNING, UndoState.NEEDS_APPROVAL}
        if found.state not in {*clear, UndoState.TO_UNDO}:
            assert found.reason
        if found.state in clear:
            assert found.undo_call_id


def _may_have_had_its_effect(call: Call) -> bool:
    decision = call.approval.decision if call.approval else None
    answered = decision is not None and decision.kind is DecisionKind.ANSWER
    return (call.state is CallState.SUCCEEDED and not answered) or (
        call.state is CallState.OUTCOME_UNKNOWN and call.effect_class is not EffectClass.READ_ONLY
    )


def test_a_call_that_was_stopped_while_it_asked_is_no_question() -> None:
    """Its tool had begun: nobody knows what it did before it asked."""
    call = Call(
        store_id=StoreId("store"),
        conversation_id=ConversationId("conv"),
        run_id=RunId("run_1"),
        call_id=CallId("call_1"),
        round=1,
        index=0,
        tool_name="order",
        state=CallState.CANCELLED,
        effect_class=EffectClass.AT_MOST_ONCE,
        context=ExecutionContext.BACKEND,
        attempt=1,
        question=Question(question="Which colour?"),
        result=CallResult(content_json=b"{}", is_error=True, error_reason="CANCELLED"),
    )
    assert undo.judged(UndoSource(call=call)).state is UndoState.CANNOT_BE_UNDONE
