"""Drafts a goal's calls and records their results.

Each attempt is a round. The calls of a round are the attempt and its judgement. If a judge's answer cannot be used, the
judgement is repeated once. A criterion's tool is also called before the first attempt and after each wait. The ids of
the calls are derived from the run, the round and the step.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.agents.rules import RUN_AGENT
from pawl.agent_loop.goals import judging, texts
from pawl.agent_loop.goals.cursor import Attempt, GoalCursor, Tried
from pawl.agent_loop.goals.judging import Evidence, Judgement
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.fact import RaiseGoal
from pawl.agent_loop.loop.rules.retry import BUDGET_EXHAUSTED
from pawl.agent_loop.loop.rules.run import (
    FailureClass,
    Goal,
    JobProgress,
    RunFailure,
)
from pawl.agent_loop.loop.rules.state import State
from pawl.chassis.ids import CallId, RunId
from pawl.values import CallState

# The goal fails after this many attempts in a row without progress.
STALLED_MAX: Final = 3
# Number of recent attempts that the next attempt's task describes in detail.
_TRIED_MAX: Final = 3
_REASON_BYTES_MAX: Final = 72
# After these errors, the same call would fail again.
_HOPELESS: Final = frozenset({"NOT_ALLOWED", "PERMISSION_DENIED", "TOOL_NOT_FOUND", "INVALID_ARGUMENTS"})
# A user was asked and did not approve.
_NOT_WANTED: Final = frozenset({CallState.REJECTED, CallState.EXPIRED})


class Step(IntEnum):
    """The index of a call in its round."""

    CHECK_BEFORE = 0
    ATTEMPT = 1
    JUDGEMENT = 2
    JUDGED_AGAIN = 3
    CHECK_LATER = 4


def cursor_of(state: State) -> GoalCursor:
    cursor = state.loop.cursor
    return cursor if isinstance(cursor, GoalCursor) else GoalCursor()


def call_id(run_id: RunId, number: int, step: Step) -> CallId:
    return CallId(f"call_{hashlib.sha256(f'{run_id}:goal:{number}:{step}'.encode()).hexdigest()[:32]}")


def step_of(state: State, number: int, step: Step) -> Call | None:
    return state.calls.get(call_id(state.run.run_id, number, step))


def check_before(number: int) -> tuple[int, Step]:
    """Return the round and step of the check before an attempt."""
    return (1, Step.CHECK_BEFORE) if number == 1 else (number - 1, Step.CHECK_LATER)


def checks_before(goal: Goal, number: int) -> bool:
    """Return whether to check the criterion before attempt `number`.

    The criterion's tool is called before the first attempt and, if the goal waits between attempts, before each later
    one.
    """
    return bool(goal.criterion.tool_name) and (number == 1 or goal.wait_seconds > 0)


def tools_needed(goal: Goal) -> tuple[str, ...]:
    """Return the tools that the goal run itself calls."""
    return tuple(filter(None, (RUN_AGENT, goal.criterion.tool_name)))


def evidence(state: State, attempt: Call) -> Evidence | None:
    """Return the calls that a judgement may cite, or None if the attempt's calls have not been read."""
    if attempt.child_run_id not in state.named_runs:
        return None
    return judging.evidence_of(attempt, state.named.values())


def attempt(state: State, goal: Goal, number: int, now: float) -> Call:
    arguments = {
        "task": texts.task(state, goal, cursor_of(state), number),
        "instructions": goal.attempts_by.instructions,
    }
    return _draft(state, RUN_AGENT, msgspec.json.encode(arguments), now, at=(number, Step.ATTEMPT))


def check(state: State, goal: Goal, now: float, *, at: tuple[int, Step]) -> Call:
    criterion = goal.criterion
    return _draft(state, criterion.tool_name, criterion.arguments_json or b"{}", now, at=at)


def judgement(state: State, goal: Goal, attempted: Call, shown: Evidence, now: float) -> Call:
    """Return the call to the judge. If the judge's first answer could not be used, return the second call."""
    if goal.criterion.judge is None:
        raise RuntimeError("the goal has no judge")
    judge, first = goal.criterion.judge, step_of(state, attempted.round, Step.JUDGEMENT)
    problem = judging.by_judge(first, shown) if first is not None else ""
    task = judging.question(goal, judge, attempted, shown, problem if isinstance(problem, str) else "")
    arguments = msgspec.json.encode({"task": task, "agent": judge.agent})
    step = Step.JUDGEMENT if first is None else Step.JUDGED_AGAIN
    return _draft(state, RUN_AGENT, arguments, now, at=(attempted.round, step))


def recorded(state: State, goal: Goal) -> State:
    """Return the state after recording the settled calls in the cursor. Idempotent."""
    cursor = cursor_of(state)
    if cursor.met or cursor.failure is not None:
        return state
    number = len(cursor.attempts) + 1
    before, attempted = step_of(state, *check_before(number)), step_of(state, number, Step.ATTEMPT)
    if before is not None and before.settled and cursor.checked < number:
        found = judging.by_tool(goal.criterion, before)
        return _with(state, _checked(replace(cursor, checked=number), found, before), found, before)
    if attempted is None or not attempted.settled:
        return state
    if failure := _hopeless(attempted):
        return _with(state, replace(cursor, failure=failure))
    settled = _judged(state, goal, attempted)
    if settled is None:
        return state
    found, last = settled
    after = _after_attempt(_checked(cursor, found, last), cursor, found, attempted)
    after = replace(after, not_before=(last.end_time or 0.0) + goal.wait_seconds)
    # Tokens added during the attempt may suffice for the next.
    lacks = cursor.topped_up < number and any(BUDGET_EXHAUSTED in _reason(call) for call in (attempted, last))
    # The evidence is no longer needed.
    state = replace(state, named={}, named_runs=frozenset())
    return _with(state, replace(after, lacks_tokens=lacks), found, last)


def raised(state: State, goal: Goal, by: RaiseGoal) -> State:
    """Return the state with the goal's raised limits, which the ledger has validated."""
    deadline_time = by.deadline_time if by.deadline_time is not None else goal.deadline_time
    goal = replace(goal, attempts_max=goal.attempts_max + by.attempts, deadline_time=deadline_time)
    if by.tokens:
        cursor = cursor_of(state)
        state = _with(state, replace(cursor, lacks_tokens=False, topped_up=len(cursor.attempts) + 1))
    return replace(state, run=replace(state.run, goal=goal))


def limit_reached(goal: Goal, cursor: GoalCursor, now: float) -> RunFailure | None:
    """Return the failure that ends the goal now, or None if no limit has been reached."""
    if cursor.failure is not None:
        return cursor.failure
    count = texts.count(cursor)
    if cursor.lacks_tokens:
        return out_of_tokens(cursor)
    if goal.deadline_time is not None and goal.deadline_time <= now:
        return _failure("GOAL_DEADLINE", f"The deadline passed after {count}.")
    if len(cursor.attempts) >= goal.attempts_max:
        return _failure("GOAL_ATTEMPTS", f"The aim was not met in {count}.")
    if cursor.stalled >= STALLED_MAX:
        return _failure("GOAL_NO_PROGRESS", f"The last {STALLED_MAX} attempts made no progress.")
    return None


def out_of_tokens(cursor: GoalCursor) -> RunFailure:
    return _failure("GOAL_BUDGET", f"The token budget was used up after {texts.count(cursor)}.")


def _draft(state: State, tool_name: str, arguments_json: bytes, now: float, *, at: tuple[int, Step]) -> Call:
    run, (number, step) = state.run, at
    return Call(
        store_id=run.store_id,
        conversation_id=run.conversation_id,
        run_id=run.run_id,
        call_id=call_id(run.run_id, number, step),
        round=number,
        index=step,
        tool_name=tool_name,
        state=CallState.PROPOSED,
        proposed_arguments=arguments_json.decode(errors="replace"),
        create_time=now,
        agent_name=run.agent.name if run.agent else "",
    )


def _judged(state: State, goal: Goal, attempted: Call) -> tuple[Judgement, Call] | None:
    """Return the judgement of an attempt and the call that made it, or None if there is no judgement yet."""
    first, again = (step_of(state, attempted.round, step) for step in (Step.JUDGEMENT, Step.JUDGED_AGAIN))
    if goal.criterion.judge is None:
        return (judging.by_tool(goal.criterion, first), first) if first is not None and first.settled else None
    if attempted.state is not CallState.SUCCEEDED:
        reason = judging.line(f"The attempt failed: {judging.error_of(attempted)}", judging.REASON_BYTES_MAX)
        return Judgement(met=False, progress=None, reason=reason), attempted
    last = again or first
    shown = evidence(state, attempted)
    if last is None or not last.settled or shown is None:
        return None
    found = judging.by_judge(last, shown)
    if not isinstance(found, str):
        return found, last
    if again is None and not _hopeless(last):
        return None
    return Judgement(met=False, reason=judging.line(f"The judgement failed: {found}", judging.REASON_BYTES_MAX)), last


def _checked(cursor: GoalCursor, found: Judgement, call: Call) -> GoalCursor:
    return replace(
        cursor,
        met=found.met,
        reason=found.reason,
        best=max(cursor.best, found.progress or 0.0),
        value_sha256=found.value_sha256 or cursor.value_sha256,
        evidence=found.cited or (f"{call.call_id} {call.tool_name}: {judging.line(found.reason, 200)}",),
        failure=_hopeless(call),
    )


def _after_attempt(after: GoalCursor, before: GoalCursor, found: Judgement, attempted: Call) -> GoalCursor:
    if found.progress is None:
        # Without a number, a changed result counts as progress.
        progressed = bool(found.value_sha256) and found.value_sha256 != before.value_sha256
    else:
        progressed = found.progress > before.best
    answer = judging.line(judging.answer_of(attempted), judging.SHORT_ANSWER_BYTES_MAX)
    tried = Tried(len(before.attempts) + 1, answer, found.reason)
    progress = None if found.progress is None else round(found.progress, 3)
    return replace(
        after,
        attempts=(*before.attempts, Attempt(progress, judging.line(found.reason, _REASON_BYTES_MAX))),
        tried=(*before.tried, tried)[-_TRIED_MAX:],
        stalled=0 if progressed else before.stalled + 1,
    )


def _with(state: State, cursor: GoalCursor, found: Judgement | None = None, call: Call | None = None) -> State:
    run = state.run
    if found is not None and call is not None:
        time = call.end_time or 0.0
        start = run.job_progress.start_time if run.job_progress else call.create_time or time
        shown = JobProgress(fraction=found.progress, message=found.reason, time=time, start_time=start)
        run = replace(run, job_progress=shown)
    return replace(state, run=run, loop=replace(state.loop, cursor=cursor))


def _hopeless(call: Call) -> RunFailure | None:
    """Return the failure of a goal whose call was refused, or None if another attempt can succeed."""
    if call.state in _NOT_WANTED or _reason(call) in _HOPELESS:
        reason = _reason(call) or call.state.name
        message = f"{call.tool_name}: {judging.error_of(call)}"
        return RunFailure(failure_class=FailureClass.TOOL, reason=reason, message=message)
    return None


def _reason(call: Call) -> str:
    return call.result.error_reason if call.result else ""


def _failure(reason: str, message: str) -> RunFailure:
    return RunFailure(failure_class=FailureClass.LIMIT, reason=reason, message=message)
