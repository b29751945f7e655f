"""The pure rules of goals: judgements of any result, and size limits."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.agent_loop.goals import judging, rules
from pawl.agent_loop.goals.cursor import GoalCursor
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.expression import ExpressionError
from pawl.agent_loop.loop.rules.fact import RaiseGoal
from pawl.agent_loop.loop.rules.run import FailureClass, Goal, GoalCriterion, GoalJudge, Run, RunFailure
from pawl.agent_loop.loop.rules.state import State
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.values import CallState

VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["met", "progress", "reason", "x"]), inner)
    ),
    max_leaves=6,
)


def settled(content: Any, state: CallState = CallState.SUCCEEDED) -> Call:
    return Call(
        store_id=StoreId("s"),
        conversation_id=ConversationId("c"),
        run_id=RunId("r"),
        call_id=CallId("call"),
        round=1,
        index=0,
        tool_name="check",
        state=state,
        result=CallResult(content_json=msgspec.json.encode(content)),
    )


@settings(max_examples=60)
@given(
    content=VALUES, source=st.sampled_from(["", "value", "value.x", "value.met", "value == true", "size(value) > 1"])
)
def test_any_result_of_a_check_gives_a_bounded_judgement(content: Any, source: str) -> None:
    found = judging.by_tool(GoalCriterion(tool_name="check", expression=source), settled(content))

    assert found.progress is None or 0 <= found.progress <= 1
    assert len(found.reason.encode()) <= judging.REASON_BYTES_MAX + 100
    assert not found.met or found.progress == 1
    if not source:
        assert found.met is (content is True or (isinstance(content, dict) and content.get("met") is True))


@pytest.mark.parametrize(
    ("source", "value", "met", "progress"),
    [
        ("value.broken == 0", {"broken": 0}, True, 1.0),
        ("value.broken == 0", {"broken": 3}, False, None),
        ("1.0 - value.broken / value.total", {"broken": 1, "total": 4}, False, 0.75),
        ("1.0 - value.broken / value.total", {"broken": 0, "total": 4}, True, 1.0),
        ("size(value.broken) == 0", {"broken": ["a"], "progress": 0.9}, False, 0.9),
    ],
)
def test_expressions_give_a_truth_value_or_progress(source: str, value: Any, met: bool, progress: float | None) -> None:
    judging.check_expression(source)
    found = judging.by_tool(GoalCriterion(tool_name="check", expression=source), settled(value))
    assert (found.met, found.progress) == (met, progress)


@pytest.mark.parametrize(("source", "why"), [("value.", "column"), ("nothing", "undeclared"), ("'a'", "type string")])
def test_expressions_that_cannot_judge_are_refused(source: str, why: str) -> None:
    with pytest.raises(ExpressionError, match=why):
        judging.check_expression(source)


@settings(max_examples=60)
@given(
    answer=st.text(max_size=400)
    | st.builds(
        lambda *parts: json.dumps(dict(zip(("met", "progress", "reason", "citations"), parts, strict=True))),
        st.booleans(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=30),
        st.lists(st.sampled_from(["call", "other", "call_invented"]), max_size=3),
    )
)
def test_a_judgement_cites_only_existing_calls(answer: str) -> None:
    known = {CallId("call"): settled("a"), CallId("other"): settled("b")}
    found = judging.by_judge(settled({"answer": answer}), known)
    if isinstance(found, str):
        assert found
        return
    parsed = json.loads(answer)
    assert set(parsed["citations"]) <= set(known)
    assert parsed["citations"] or not found.met
    assert len(found.cited) == len(set(parsed["citations"]))


def test_a_judges_task_fits_into_the_arguments_of_an_agent_call() -> None:
    judge = GoalJudge(rubric="r" * 16_384)
    wanted = Goal(aim="a" * 16_384, criterion=GoalCriterion(judge=judge))
    attempt = replace(settled({"answer": '"' * 50_000}), call_id=CallId("attempt"), child_run_id=RunId("r"))
    made = [
        replace(settled('"' * 5000), call_id=CallId(f"call_{n}"), arguments_json=b'"' * 5000, round=n)
        for n in range(100)
    ]
    evidence = judging.evidence_of(attempt, made)

    asked = judging.question(wanted, judge, attempt, evidence, "")

    assert len(asked) <= 100_000
    assert '"call_id":"call_99"' in asked
    assert len(evidence) == judging.EVIDENCE_CALLS_MAX + 1


@settings(max_examples=30)
@given(reasons=st.lists(st.text(min_size=300, max_size=600), min_size=1, max_size=3), count=st.integers(1, 100))
def test_the_cursor_stays_under_16_kib(reasons: list[str], count: int) -> None:
    cursor = GoalCursor()
    for number in range(1, count + 1):
        reason = reasons[number % len(reasons)]
        found = judging.Judgement(
            met=False,
            progress=number / 101,
            reason=judging.line(reason, judging.REASON_BYTES_MAX),
            cited=tuple(judging.line(f"call {reason}", 200) for _ in range(8)),
        )
        call = settled({"answer": reason * 4})
        cursor = rules._after_attempt(rules._checked(cursor, found, call), cursor, found, call)
    failure = RunFailure(failure_class=FailureClass.TOOL, reason="NOT_ALLOWED", message=judging.line(reasons[0], 600))
    cursor = replace(cursor, failure=failure)
    assert len(cursor.attempts) == count
    assert len(msgspec.json.encode(cursor)) < 16 * 1024


@pytest.mark.parametrize("recorded_first", [False, True])
def test_tokens_added_before_the_end_is_committed_let_the_goal_continue(recorded_first: bool) -> None:
    goal = Goal(aim="Paint it.", criterion=GoalCriterion(tool_name="check"), attempts_max=9)
    run = Run(
        store_id=StoreId("s"), user_id=UserId("u"), conversation_id=ConversationId("c"), run_id=RunId("r"), goal=goal
    )
    lacking = CallResult(content_json=b"{}", is_error=True, error_reason="BUDGET_EXHAUSTED")
    steps = {rules.Step.ATTEMPT: settled("", CallState.FAILED), rules.Step.JUDGEMENT: settled({"met": False})}
    calls = {
        call_id: replace(call, call_id=call_id, index=step, result=lacking if step == 1 else call.result)
        for step, call in steps.items()
        for call_id in [rules.call_id(run.run_id, 1, step)]
    }
    state = State(run=run, calls=calls)
    ended = rules.recorded(state, goal)
    failure = rules.limit_reached(goal, rules.cursor_of(ended), 0.0)
    assert failure is not None
    assert failure.reason == "GOAL_BUDGET"

    state = rules.raised(ended if recorded_first else state, goal, RaiseGoal(tokens=5))
    cursor = rules.cursor_of(rules.recorded(state, goal))

    assert len(cursor.attempts) == 1
    assert rules.limit_reached(goal, cursor, 0.0) is None
