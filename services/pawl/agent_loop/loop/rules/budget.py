"""A run's token budget: its size and use (LOOP-12), and estimates of unreported usage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.agents.rules import RateReached, TokenBudget
from pawl.agent_loop.loop.rules import history
from pawl.agent_loop.loop.rules.assembly import ModelAnswer
from pawl.agent_loop.loop.rules.decision import Decision, Fail, Finish, Park
from pawl.agent_loop.loop.rules.retry import BUDGET_EXHAUSTED
from pawl.agent_loop.loop.rules.run import FailureClass, RunFailure, TokenBudgetPolicy
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.model.request import Problem, UsageReport
from pawl.values import RunState, Usage, WaitKind

# Prose has four or more bytes per token, code and most other scripts about three. Overestimating is safer: unreported
# usage must not bypass a budget.
_BYTES_PER_TOKEN: Final = 3
# No text has more bytes per token on average. A server that counts fewer tokens omits some, such as cached ones.
_BYTES_PER_TOKEN_MAX: Final = 8
_QUOTA_WAIT_SECONDS: Final = 300.0
_QUOTA_WAITS_COUNTED_MAX: Final = 8
# For each budget of tokens: the reason of a failure, whose it is, and its period.
_BUDGETS: Final[Mapping[WaitKind, tuple[str, str, str]]] = {
    WaitKind.AGENT_QUOTA: ("AGENT_QUOTA_EXHAUSTED", "This agent's runs have", "daily"),
    WaitKind.STORE_DAILY_TOKENS: ("STORE_TOKENS_EXHAUSTED", "The store's runs have", "daily"),
    WaitKind.STORE_MONTHLY_TOKENS: ("STORE_TOKENS_EXHAUSTED", "The store's runs have", "monthly"),
    WaitKind.USER_DAILY_TOKENS: ("USER_TOKENS_EXHAUSTED", "This user's runs have", "daily"),
    WaitKind.USER_MONTHLY_TOKENS: ("USER_TOKENS_EXHAUSTED", "This user's runs have", "monthly"),
}


TOO_LITTLE: Final = Problem(
    reason=BUDGET_EXHAUSTED,
    failure_class=FailureClass.LIMIT,
    message="The request costs more tokens than are left in the budget.",
)


def tokens(state: State) -> int:
    """Return the run's token budget including top-ups. 0 means no budget."""
    tokens_max = state.run.options.limits.total_tokens_max
    return tokens_max + state.loop.tokens_added if tokens_max else 0


def left(state: State) -> int | None:
    """Return how many tokens are left, or None if there is no budget."""
    budget = tokens(state)
    return max(0, budget - used(state)) if budget else None


def used(state: State) -> int:
    """Return how many tokens of the run's budget have been used, including by runs that share the budget."""
    own, shared_max = state.run.usage.total_tokens, state.shared_tokens_max
    return own if shared_max is None else max(own, tokens(state) - (shared_max - state.run.own_tokens))


def is_used_up(state: State) -> bool:
    """Return whether the budget has no tokens left, or too few for the open call."""
    rest = left(state)
    return rest is not None and rest < max(1, _needed_by_open_call(state))


def ends_run(state: State) -> bool:
    """Return whether the run is out of tokens and must fail.

    A run fails if it may not wait for a top-up, or if a top-up would not help.
    """
    does_not_wait = state.run.options.token_budget_policy is TokenBudgetPolicy.FAIL
    return is_used_up(state) and (does_not_wait or _is_beyond_top_ups(state))


def _is_beyond_top_ups(state: State) -> bool:
    ceiling = state.run.options.limits.topped_up_tokens_max
    needed_tokens = max(1, _needed_by_open_call(state))
    return bool(ceiling) and used(state) + needed_tokens > max(ceiling, tokens(state))


def _needed_by_open_call(state: State) -> int:
    return state.loop.model_call.tokens_needed if state.loop.model_call else 0


def missing(state: State) -> int:
    """Return the smallest top-up that would allow the next model call, based on what is known so far."""
    last = state.loop.counted_prompt
    # Each prompt starts with the previous one.
    needed_tokens = _needed_by_open_call(state) or (last.tokens + 1 if last else 1)
    return max(1, needed_tokens - (left(state) or 0))


def failure(state: State) -> RunFailure:
    message = f"The run has used up its budget of {tokens(state)} tokens."
    if left(state):
        message = need_message(state)
    if _is_beyond_top_ups(state):
        message += f" Top-ups can raise it to at most {state.run.options.limits.topped_up_tokens_max}."
    return RunFailure(failure_class=FailureClass.LIMIT, reason=BUDGET_EXHAUSTED, message=message)


def exhausted(state: State, now: float) -> Decision:
    if ends_run(state):
        return Fail(failure=failure(state))
    deadline = state.loop.top_up_deadline_time
    if deadline is None:
        deadline = now + state.run.options.limits.top_up_timeout_seconds
    if deadline <= now:
        return Finish(state=RunState.EXPIRED)
    return Park(state=RunState.WAITING, waits=(WaitKind.BUDGET,), wake_time=deadline)


def used_up(exhausted: TokenBudget | RateReached) -> Problem:
    if isinstance(exhausted, RateReached):
        message = "The store or its model server has reached its limit of model calls or tokens per minute."
        return Problem(reason="RATE_LIMITED", failure_class=FailureClass.RATE, message=message)
    reason, whose, period = _BUDGETS[exhausted.kind]
    how = "used up" if exhausted.is_used_up else "used up or reserved"
    message = f"{whose} {how} the {period} budget of {exhausted.tokens_max} tokens (UTC)."
    return Problem(reason=reason, failure_class=FailureClass.LIMIT, message=message)


def waits_for_period(state: State, exhausted: TokenBudget | RateReached, now: float) -> Decision:
    """Decide whether a run that has used up a token budget fails, or waits for the next day or month.

    A waiting run checks again after 5 minutes, then after 20, and so on, but no later than the end of the period. If
    calls in progress have reserved the rest of the budget, the run always waits. The ledger wakes waiting runs when the
    budget is raised, but it may do so just before this run parks. A minimum pause guards against a local clock that is
    ahead of the ledger's.
    """
    fails = state.run.options.token_budget_policy is TokenBudgetPolicy.FAIL
    if fails and isinstance(exhausted, TokenBudget) and exhausted.is_used_up:
        problem = used_up(exhausted)
        failure = RunFailure(failure_class=FailureClass.LIMIT, reason=problem.reason, message=problem.message)
        return Fail(failure=failure)
    waits = min(state.loop.model_call.quota_waits, _QUOTA_WAITS_COUNTED_MAX) if state.loop.model_call else 1
    wake_time = min(max(exhausted.end_time, now + 1), now + _QUOTA_WAIT_SECONDS * 4 ** (waits - 1))
    return Park(state=RunState.WAITING, waits=(exhausted.kind,), wake_time=wake_time)


def needed(state: State, prompt_tokens: int) -> int:
    """Return how many tokens a call needs (its prompt plus one), or 0 if enough are left."""
    rest = left(state)
    return prompt_tokens + 1 if rest is not None and rest <= prompt_tokens else 0


def need_message(state: State) -> str:
    return (
        f"The next model call needs about {_needed_by_open_call(state)} tokens, including tool descriptions; "
        f"{left(state)} of the budget's {tokens(state)} are left."
    )


def output_tokens_max(state: State, prompt_tokens: int) -> int | None:
    """Return the token limit for the next answer.

    This is the smaller of the requested limit and what the budget leaves after the prompt. None means no limit.
    """
    asked, rest = state.run.options.output_tokens_max, left(state)
    if rest is None:
        return asked
    rest = max(1, rest - prompt_tokens)
    return rest if asked is None else min(asked, rest)


def cut_short(state: State, answer: ModelAnswer, output_tokens_max: int | None) -> Problem | None:
    """Return the problem if the budget cut the answer short, or None. A partial answer is not used."""
    is_budget = output_tokens_max is not None and output_tokens_max != state.run.options.output_tokens_max
    if not is_budget or not answer.cut_off:
        return None
    return Problem(
        reason=BUDGET_EXHAUSTED,
        failure_class=FailureClass.LIMIT,
        message=f"The answer did not fit into the remaining budget: the run may use {tokens(state)} tokens.",
    )


def estimate(size_bytes: int) -> int:
    return -(-size_bytes // _BYTES_PER_TOKEN)


def prompt_tokens(state: State, prompt_bytes: int) -> int:
    """Estimate the next prompt's tokens.

    The next prompt starts with the previous one. The result is therefore the server's count for the previous prompt
    plus an estimate for the new part.
    """
    last = state.loop.counted_prompt
    if last is None:
        return estimate(prompt_bytes)
    tokens_min = -(-prompt_bytes // _BYTES_PER_TOKEN_MAX)
    return max(tokens_min, last.tokens + estimate(max(0, prompt_bytes - last.size_bytes)))


def counted(report: UsageReport, *, prompt_bytes: int, output_bytes: int) -> UsageReport:
    """Return a call's usage, with estimates for parts that the server did not report."""
    missing_input = 0 if report.input_tokens else estimate(prompt_bytes)
    missing_output = 0 if report.output_tokens else estimate(output_bytes)
    return replace(
        report,
        input_tokens=report.input_tokens + missing_input,
        output_tokens=report.output_tokens + missing_output,
        estimated_tokens=missing_input + missing_output,
        prompt_bytes=prompt_bytes if report.input_tokens else 0,
    )


def with_discarded(state: State, usage: Usage) -> State:
    if usage == Usage():
        return state
    opened = state.loop.model_call
    if opened is not None:
        opened = replace(opened, usage_before=opened.usage_before + usage)
    run, loop = replace(state.run, usage=state.run.usage + usage), replace(state.loop, model_call=opened)
    return replace(state, run=run, loop=loop)


def with_lost_call(state: State, usage_before: Usage) -> Usage:
    """Return the run's usage after the worker that made the open call has died.

    If output was shown, the usage already includes the call. Otherwise, an estimate for its prompt is added.
    """
    if state.run.usage != usage_before:
        return state.run.usage
    prompt = estimate(len(msgspec.json.encode(history.of_run(state))))
    return usage_before + Usage(input_tokens=prompt, estimated_tokens=prompt, model_calls=1)
