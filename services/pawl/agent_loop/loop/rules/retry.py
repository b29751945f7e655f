"""Retries of failed model calls (LOOP-7). The only retry layer there is."""

from __future__ import annotations

from typing import Final

from pawl.agent_loop.loop.rules.assembly import ModelAnswer
from pawl.agent_loop.loop.rules.run import FailureClass, RunFailure
from pawl.agent_loop.model.request import CONTENT_FILTER, EMPTY_ANSWER, ROUND_TIMEOUT, Problem

_FIRST_DELAY_SECONDS: Final = 1.0
_DELAY_SECONDS_MAX: Final = 10.0
_FIRST_WAIT_SECONDS: Final = 10.0
_WAIT_SECONDS_MAX: Final = 60.0

BUDGET_EXHAUSTED: Final = "BUDGET_EXHAUSTED"
"""The token budget is used up, or cut an answer short."""

AGENT_QUOTA_EXHAUSTED: Final = "AGENT_QUOTA_EXHAUSTED"
"""The runs of the agent have used up what they may in a day."""

_REASONS: Final = {
    FailureClass.AUTH: "PROVIDER_AUTH",
    FailureClass.RATE: "PROVIDER_RATE_LIMIT",
    FailureClass.CONTENT_FILTER: "CONTENT_FILTER",
    FailureClass.LIMIT: "PROVIDER_LIMIT",
    FailureClass.INTERNAL: "INTERNAL",
}


def of_nothing(answer: ModelAnswer) -> Problem | None:
    """Return what is wrong with an answer that has neither text nor a call; None if it has."""
    if not answer.empty or answer.finish_reason.lower() == CONTENT_FILTER.lower():
        return None
    said = "The model's answer had neither text nor a call."
    if answer.cut_off:
        said = "The model reached its output limit before it gave any text or call."
    return Problem(reason=EMPTY_ANSWER, message=said)


def delay(problem: Problem, *, failures: int, attempts_max: int, left: float, jitter: float) -> float | None:
    """Return the seconds to wait before the next attempt, or None if there is none.

    `failures` are those of the model server in this call, this one included: a
    worker that died or handed over is none of them. 1 s doubling to 10 s, of which
    up to a half is left out by `jitter` (0 to 1); at least what the server asked
    for. `left` is what the round has: a wait beyond it makes no sense.
    """
    if not problem.retryable or failures >= attempts_max:
        return None
    backoff = min(_FIRST_DELAY_SECONDS * 2 ** max(0, failures - 1), _DELAY_SECONDS_MAX) * (1 - jitter / 2)
    wait = max(backoff, problem.retry_after_seconds or 0.0)
    return wait if wait < left else None


def next_try_time(
    problem: Problem, *, since: float, waits: int, wait_seconds: float, jitter: float, now: float
) -> float | None:
    """Return when a run that has waited for the model server since a time asks it again; None if it does not.

    After 10 s doubling to a minute, of which up to a half is left out by `jitter`, but no earlier than the server asked
    for; for the last time when `wait_seconds` are over.
    """
    end = since + wait_seconds
    asked = now + (problem.retry_after_seconds or 0.0)
    if not problem.is_outage or now >= end or asked > end:
        return None
    backoff = min(_FIRST_WAIT_SECONDS * 2.0 ** min(waits, 10), _WAIT_SECONDS_MAX) * (1 - jitter / 2)
    return min(max(now + backoff, asked), end)


def falls_back(problem: Problem, *, fallbacks_left: int, left: float) -> bool:
    """Return whether the next model is asked, after the last attempt with this one.

    It is where the model server failed, refused the request, or is at its rate limit: another model may be served
    elsewhere. A wrong credential, what a filter withheld and limits of the run are not mended by that. `left` as for
    `delay`.
    """
    is_of_server = problem.failure_class in {FailureClass.PROVIDER, FailureClass.RATE}
    return is_of_server and fallbacks_left > 0 and left > 0


def failure_of(problem: Problem) -> RunFailure:
    """Return why the run fails after its last attempt."""
    if problem.reason in {ROUND_TIMEOUT, BUDGET_EXHAUSTED}:
        return RunFailure(failure_class=FailureClass.LIMIT, reason=problem.reason, message=problem.message)
    reason = "PROVIDER_REFUSED" if problem.refuses_content else _REASONS.get(problem.failure_class, "PROVIDER_ERROR")
    return RunFailure(failure_class=problem.failure_class, reason=reason, message=problem.message)
