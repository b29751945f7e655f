"""Implements an agent's program: the model requests calls until it answers.

It has no cursor, because the messages are its state.
"""

from __future__ import annotations

from pawl.agent_loop.loop.rules import budget, history, output
from pawl.agent_loop.loop.rules.decision import CallModel, Decision, EnterSteers, Fail, Finish, PinTools, Wait
from pawl.agent_loop.loop.rules.message import Role
from pawl.agent_loop.loop.rules.program import Program
from pawl.agent_loop.loop.rules.run import FailureClass, RoundLimitPolicy, RunFailure
from pawl.agent_loop.loop.rules.state import State
from pawl.values import RunState, WaitKind


class AgentProgram(Program):
    def follows(self, state: State, now: float) -> Decision:
        run = state.run
        if run.is_turn and not run.round and not _has_unanswered_notices(state):
            return Finish(state=RunState.COMPLETED)
        if not (run.round or run.tools or state.tools_pinned):
            return PinTools()
        if state.loop.model_call is not None or state.open_calls:
            return Wait(until=None)
        if state.loop.steers:
            return EnterSteers()
        last = state.last_message
        limits = run.options.limits
        is_silent = state.loop.said_nothing and (last is None or last.role is not Role.USER)
        if is_silent and not _awaits_jobs(state):
            return Finish(state=RunState.COMPLETED)
        answered = last is not None and last.role is Role.ASSISTANT
        if answered and last is not None and last.misfit and not output.may_be_tried_again(state):
            return Fail(failure=output.failure(last))
        has_ended = is_silent or (answered and last is not None and not last.call_ids and not last.misfit)
        if has_ended and not _awaits_jobs(state):
            return Finish(state=RunState.COMPLETED)
        if has_ended and not state.notices:
            return Wait(until=None, waits=(WaitKind.JOB,))
        is_last = run.round >= limits.rounds_max
        if run.round > limits.rounds_max and answered:
            return Finish(state=RunState.COMPLETED) if run.output_text else _round_limit(limits.rounds_max)
        if is_last and run.options.round_limit_policy is RoundLimitPolicy.FAIL:
            return _round_limit(limits.rounds_max)
        if budget.is_used_up(state):
            return budget.exhausted(state, now)
        to_number = history.summarise_to(state) if state.loop.summarised_round <= run.round else 0
        return CallModel(round=run.round + 1, without_tools=is_last, is_last=is_last, summarise_to_number=to_number)


def _awaits_jobs(state: State) -> bool:
    return state.run.waits_for_jobs and bool(state.jobs_below or state.notices)


def _has_unanswered_notices(state: State) -> bool:
    if state.notices:
        return True
    # Ignore an answer that an earlier run started but did not finish.
    answers_and_notices = (
        message
        for message in filter(state.is_own, reversed(state.messages))
        if message.role is Role.NOTICE
        or (message.role is Role.ASSISTANT and not message.interrupted and not message.call_ids)
    )
    newest = next(answers_and_notices, None)
    return newest is not None and newest.role is Role.NOTICE


def _round_limit(rounds_max: int) -> Fail:
    message = f"The model still requested tools after {rounds_max} rounds."
    return Fail(failure=RunFailure(failure_class=FailureClass.LIMIT, reason="ROUND_LIMIT", message=message))
