"""Retries of failed model calls (LOOP-7). There is no other retry layer."""

from __future__ import annotations

from typing import Final

from pawl.agent_loop.loop.rules.assembly import ModelAnswer
from pawl.agent_loop.loop.rules.run import FailureClass, RunFailure
from pawl.agent_loop.model.request import CONTENT_FILTER, EMPTY_ANSWER, ROUND_TIMEOUT, Problem

_FIRST_DELAY_SECONDS: Final = 1.0
_DELAY_SECONDS_MAX: Final = 10.0
_FIRST_WAIT_SECONDS: Final = 10.0
_WAIT_SECONDS_MAX: Final = 60.0

# The token budget is used up, or was too small for an answer.
BUDGET_EXHAUSTED: Final = "BUDGET_EXHAUSTED"

MODEL_NOT_ALLOWED: Final = "MODEL_NOT_ALLOWED"
# The key that started a background or child run is no longer valid.
KEY_GONE: Final = Problem(
    reason="PERMISSION_DENIED",
    message="The API key that started the run was revoked or has lost a role. Start a new run with another key.",
    failure_class=FailureClass.LIMIT,
    retryable=False,
)

_REASONS: Final = {
    FailureClass.AUTH: "PROVIDER_AUTH",
    FailureClass.RATE: "PROVIDER_RATE_LIMIT",
    FailureClass.CONTENT_FILTER: "CONTENT_FILTER",
    FailureClass.LIMIT: "PROVIDER_LIMIT",
    FailureClass.INTERNAL: "INTERNAL",
}


def empty_answer_problem(answer: ModelAnswer) -> Problem | None:
    """Return the problem with an empty answer, or None if the answer is not empty.

    An answer is not empty if it has text, a refusal or a call, or if it was filtered.
    """
    if not answer.empty or answer.finish_reason.lower() == CONTENT_FILTER.lower():
        return None
    message = "The model's answer had neither text nor a call."
    if answer.cut_off:
        message = "The model reached its output limit before it produced any text or call."
    return Problem(reason=EMPTY_ANSWER, message=message)


def delay(problem: Problem, *, failures: int, attempts_max: int, left: float, jitter: float) -> float | None:
    """Return the number of seconds before the next attempt, or None if there are no more attempts.

    `failures` counts the model server's failures in this call, including the latest, but not workers that died or
    handed over. The delay doubles from 1 s to 10 s, and `jitter` (0 to 1) reduces it by up to half. It is never shorter
    than the server requested. The next attempt must start within `left`, the time left in the round.
    """
    if not problem.retryable or failures >= attempts_max:
        return None
    backoff = min(_FIRST_DELAY_SECONDS * 2 ** max(0, failures - 1), _DELAY_SECONDS_MAX) * (1 - jitter / 2)
    wait = max(backoff, problem.retry_after_seconds or 0.0)
    return wait if wait < left else None


def next_try_time(
    problem: Problem, *, since: float, waits: int, wait_seconds: float, jitter: float, now: float
) -> float | None:
    """Return when a run that is waiting for the model server tries again, or None if it fails.

    `since` is when the run started to wait. The wait doubles from 10 s to one minute, and `jitter` reduces it by up to
    half. It is never shorter than the server requested. The last wait ends at the end of `wait_seconds`.
    """
    end = since + wait_seconds
    asked = now + (problem.retry_after_seconds or 0.0)
    if not problem.is_outage or now >= end or asked > end:
        return None
    backoff = min(_FIRST_WAIT_SECONDS * 2.0 ** min(waits, 10), _WAIT_SECONDS_MAX) * (1 - jitter / 2)
    return min(max(now + backoff, asked), end)


def falls_back(problem: Problem, *, fallbacks_left: int, left: float) -> bool:
    """Return whether to switch to the next fallback model after the last attempt with the current model.

    This is true after server errors, refusals and rate limits, because another server may serve the next model. It is
    false after wrong credentials, content filters or the run's own limits. `left` has the same meaning as in `delay`.
    """
    is_server_fault = problem.failure_class in {FailureClass.PROVIDER, FailureClass.RATE}
    return is_server_fault and fallbacks_left > 0 and left > 0


def model_not_allowed(model: str) -> Problem:
    return Problem(
        reason=MODEL_NOT_ALLOWED, retryable=False, message=f"The store may no longer use the model {model!r}."
    )


def failure_of(problem: Problem) -> RunFailure:
    if problem.reason in {ROUND_TIMEOUT, BUDGET_EXHAUSTED, MODEL_NOT_ALLOWED, KEY_GONE.reason}:
        return RunFailure(failure_class=FailureClass.LIMIT, reason=problem.reason, message=problem.message)
    reason = "PROVIDER_REFUSED" if problem.refuses_content else _REASONS.get(problem.failure_class, "PROVIDER_ERROR")
    return RunFailure(failure_class=problem.failure_class, reason=reason, message=problem.message)
