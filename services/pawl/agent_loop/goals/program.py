"""Implements goals. Child runs make attempts, which are judged until the goal is met or a limit is reached.

A judge runs as another child run. A tool that checks the criterion is called like any other tool. The goal run itself
calls no model. Messages from its user are passed to the next attempt.
"""

from __future__ import annotations

from msgspec.structs import replace

from pawl.agent_loop.goals import judging, rules, texts
from pawl.agent_loop.goals.cursor import GoalCursor
from pawl.agent_loop.goals.rules import Step
from pawl.agent_loop.loop.rules import budget
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.decision import Decision, EnterSteers, Fail, Finish, PinTools, Propose, ReadCalls, Wait
from pawl.agent_loop.loop.rules.fact import Command, OwnerEvent, RaiseGoal, ToolProgress
from pawl.agent_loop.loop.rules.message import Message, Role
from pawl.agent_loop.loop.rules.program import Program
from pawl.agent_loop.loop.rules.run import Delegation, Goal, ResponseFormat, RunOptions, ToolChoice
from pawl.agent_loop.loop.rules.state import State
from pawl.values import RunState


class GoalProgram(Program):
    def follows(self, state: State, now: float) -> Decision:
        run, goal, cursor = state.run, _goal(state), rules.cursor_of(state)
        if not (run.round or run.tools or state.tools_pinned):
            return PinTools()
        if cursor.met:
            return Finish(state=RunState.COMPLETED)
        if failure := rules.limit_reached(goal, cursor, now):
            return Fail(failure=failure)
        if state.open_calls:
            return Wait(until=goal.deadline_time)
        if state.loop.steers:
            return EnterSteers()
        number = len(cursor.attempts) + 1
        attempt = rules.step_of(state, number, Step.ATTEMPT)
        return _next_attempt(state, goal, cursor, now) if attempt is None else _judgement(state, goal, attempt, now)

    def commanded(self, state: State, command: Command, now: float) -> State:  # the ledger has checked the command
        return rules.raised(state, _goal(state), command.kind) if isinstance(command.kind, RaiseGoal) else state

    def reported(self, base: State, after: State) -> tuple[State, tuple[OwnerEvent, ...]]:
        """Record judgements, and report the progress that they found as progress of the judging calls."""
        after = rules.recorded(after, _goal(after))
        progress = after.run.job_progress
        if progress is None or progress == base.run.job_progress:
            return after, ()
        judged = (call for call in after.calls.values() if call.end_time == progress.time)
        events = (
            ToolProgress(
                call_id=call.call_id, tool_name=call.tool_name, fraction=progress.fraction, message=progress.message
            )
            for call in sorted(judged, key=lambda call: (call.round, call.index))[-1:]
        )
        return after, tuple(events)

    def child(self, state: State, call: Call, delegation: Delegation) -> Delegation:
        """Give an attempt the agent's tools. Give a judge a response format, but no tools."""
        goal, options = _goal(state), delegation.options
        if call.index != Step.ATTEMPT and goal.criterion.judge is None:
            # The criterion's tool is a workflow.
            return delegation
        if call.index != Step.ATTEMPT:
            options = replace(
                options,
                instructions="\n\n".join(filter(None, (options.instructions, judging.INSTRUCTIONS))),
                tool_names=(),
                without_tools=True,
                tool_choice=ToolChoice(),
                response_format=ResponseFormat(name="judgement", schema_json=judging.SCHEMA_JSON),
            )
            return replace(delegation, options=options)
        return replace(delegation, options=_of_attempt(state.run.options, goal, options), waits_for_jobs=True)

    def concluded(self, state: State, *, continues: bool) -> State:
        """Add the report to the conversation, unless the run continues."""
        cursor = rules.cursor_of(state)
        if continues or cursor.reported:
            return state
        report = texts.report(state, _goal(state), cursor)
        run, loop = replace(state.run, output_text=report), replace(state.loop, cursor=replace(cursor, reported=True))
        message = Message(role=Role.ASSISTANT, run_id=run.run_id, text=report)
        return replace(state, run=run, loop=loop).with_message(message)


def _next_attempt(state: State, goal: Goal, cursor: GoalCursor, now: float) -> Decision:
    number = len(cursor.attempts) + 1
    if cursor.not_before and now < cursor.not_before:
        return Wait(until=min(filter(None, (cursor.not_before, goal.deadline_time))))
    if rules.checks_before(goal, number) and cursor.checked < number:
        return Propose(calls=(rules.check(state, goal, now, at=rules.check_before(number)),))
    if _lacks_tokens(state):
        return Fail(failure=rules.out_of_tokens(cursor))
    return Propose(calls=(rules.attempt(state, goal, number, now),))


def _judgement(state: State, goal: Goal, attempt: Call, now: float) -> Decision:
    if goal.criterion.judge is None:
        return Propose(calls=(rules.check(state, goal, now, at=(attempt.round, Step.JUDGEMENT)),))
    shown = rules.evidence(state, attempt)
    if shown is None:
        return ReadCalls(run_id=attempt.child_run_id)
    if _lacks_tokens(state):
        return Fail(failure=rules.out_of_tokens(rules.cursor_of(state)))
    return Propose(calls=(rules.judgement(state, goal, attempt, shown, now),))


def _of_attempt(own: RunOptions, goal: Goal, options: RunOptions) -> RunOptions:
    """Return an attempt's options, with only the tools that the goal allows."""
    wanted = goal.attempts_by.tool_names or own.tool_names
    names = tuple(name for name in options.tool_names if not wanted or name in wanted)
    without = own.without_tools or not names
    return replace(options, tool_names=() if without else names, without_tools=without)


def _lacks_tokens(state: State) -> bool:
    return budget.left(state) == 0


def _goal(state: State) -> Goal:
    if state.run.goal is None:
        raise RuntimeError("the run is not a goal run")
    return state.run.goal
