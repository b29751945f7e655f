"""Changes the state at the end of a model call. Detects a model that repeats itself (LOOP-5).

Calls are identical if they have the same name and canonical arguments. With a limit of 4, the run is stuck when the
model makes the same call for the fourth time, or when the calls of its last six rounds were A B A B A B. The calls of
that last round are not executed. If a round could leave the run stuck, the registry does not run read-only calls while
it checks that round's calls.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from msgspec.structs import replace

from pawl.agent_loop.agents.rules import RateReached, TokenBudget
from pawl.agent_loop.loop.rules import budget, jobs, proposals, retry
from pawl.agent_loop.loop.rules.assembly import ModelAnswer
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.fact import (
    ModelAnswered,
    ModelCut,
    ModelFailed,
    OutputChecked,
    OwnerEvent,
    RoundEnded,
    RoundRetrying,
    Shown,
    Warned,
)
from pawl.agent_loop.loop.rules.loop_state import CountedPrompt, LoopState, OpenModelCall
from pawl.agent_loop.loop.rules.message import Message, Role
from pawl.agent_loop.loop.rules.run import FailureClass, RunFailure
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.model.request import CONTENT_FILTER, EMPTY_ANSWER, UNAVAILABLE, Problem, UsageReport
from pawl.values import CallState, Usage

_FINGERPRINTS_KEPT: Final = 1000
_DIGITS: Final = 16


def fingerprint(call: Call) -> str:
    """Return a key that identical calls share.

    Without canonical arguments, the key is based on the model's own text.
    """
    arguments = call.arguments_json or call.proposed_arguments.encode()
    return _digest(call.tool_name.encode() + b"\0" + arguments)


def count(loop: LoopState, calls: Sequence[Call], identical_max: int) -> LoopState:
    counts = dict(loop.call_counts)
    for key in map(fingerprint, calls):
        # Reinsert the key, so that recent calls are last.
        counts[key] = counts.pop(key, 0) + 1
    remaining = dict(list(counts.items())[-_FINGERPRINTS_KEPT:])
    rounds = (*loop.round_fingerprints, _digest("".join(map(fingerprint, calls)).encode()))
    return replace(loop, call_counts=remaining, round_fingerprints=rounds[-_alternation_length(identical_max) :])


def stuck_call(loop: LoopState, calls: Iterable[Call], identical_max: int) -> Call | None:
    """Return the call that a stuck run repeats, or None if the run is not stuck.

    `loop` already counts the new `calls`.
    """
    calls = list(calls)
    repeated = next((call for call in calls if loop.call_counts.get(fingerprint(call), 0) >= identical_max), None)
    if repeated is not None or not calls:
        return repeated
    length = _alternation_length(identical_max)
    return calls[0] if _takes_turns(loop.round_fingerprints[-length:], length) else None


def may_be_stuck(loop: LoopState, calls: Sequence[Call], identical_max: int) -> bool:
    """Return whether the run could be stuck once these calls are counted.

    The calls have not been checked yet, so their canonical arguments are unknown.
    """
    of_one_tool = max(Counter(call.tool_name for call in calls).values(), default=0)
    if max(loop.call_counts.values(), default=0) + of_one_tool >= identical_max:
        return True
    before = _alternation_length(identical_max) - 1
    return _takes_turns(loop.round_fingerprints[-before:], before)


def _takes_turns(last: Sequence[str], length: int) -> bool:
    return len(last) == length and len(set(last[::2])) == len(set(last[1::2])) == 1 and last[0] != last[1]


def _alternation_length(identical_max: int) -> int:
    # At least A B A B, even if the limit is low.
    return 2 * max(2, identical_max - 1)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:_DIGITS]


def answered(state: State, fact: ModelAnswered, now: float) -> tuple[State, tuple[OwnerEvent, ...]]:
    """Add the model's answer: a message and its calls, or a summary."""
    answer, opened = fact.answer, state.loop.model_call
    if opened is None:
        return state, ()
    usage = usage_of(answer.usage)
    ended = RoundEnded(
        round=state.run.round + opened.summary,
        model_attempt=opened.attempt,
        finish_reason=answer.finish_reason,
        usage=usage,
        request_sha256=answer.sent.request_sha256,
        output_tokens_max=answer.sent.output_tokens_max or 0,
    )
    state = replace(
        state,
        run=replace(state.run, usage=opened.usage_before + usage),
        loop=replace(state.loop, model_call=None, partial_text=""),
    )
    state = _with_counted_prompt(state, answer.usage, is_summary=opened.summary)
    if opened.summary:
        return _summarised(state, answer, opened.summarised_to_number), (ended,)
    limits = state.run.options.limits
    calls = tuple(
        proposals.apply_verdict(call, fact.verdicts[call.call_id], state.run.options, now)
        if call.state is CallState.PROPOSED
        else call
        for call in fact.calls
    )
    notes = {key: verdict.note for key, verdict in fact.verdicts.items() if verdict.note}
    within = calls[: limits.calls_per_round_max]
    loop = replace(state.loop, notes=notes)
    if within and not opened.without_tools:
        loop = _counted(loop, within, limits.identical_calls_max)
    state = jobs.detached(replace(state, loop=loop).with_calls(calls), calls, fact.terms, fact.verdicts, now)
    state = _with_message(state, fact, calls)
    events: list[OwnerEvent] = [ended]
    if answer.cut_off:
        events.append(Warned(reason="ANSWER_CUT_OFF", message="The model's answer was cut off at the output limit."))
    if answer.fields_left_out:
        message = (
            "The model server returned extra fields that are too large to store. It may need them in the next request."
        )
        events.append(Warned(reason="FIELDS_LEFT_OUT", message=message))
    if len(calls) > limits.calls_per_round_max:
        message = (
            f"The model requested {len(calls)} calls in one round; only the first {limits.calls_per_round_max} are run."
        )
        events.append(Warned(reason="TOO_MANY_CALLS", message=message))
    return _filtered(state, answer) if not calls else state, tuple(events)


def failed(state: State, fact: ModelFailed, now: float) -> tuple[State, tuple[OwnerEvent, ...]]:
    """Retry a failed model call, hold it (for tokens, a budget or the model server), or fail the run.

    A turn started by job notices does not wait for the server, because no user is waiting for it.
    """
    opened = state.loop.model_call
    if opened is None:
        return state, ()
    if fact.used_up is not None:
        return _waits(state, opened, fact.used_up, fact.error)
    if fact.tokens_needed:
        return _not_made(state, opened, fact.tokens_needed)
    limits, written, usage = state.run.options.limits, fact.answer.text, usage_of(fact.answer.usage)
    loop = replace(state.loop, partial_text=written or state.loop.partial_text)
    state = replace(state, run=replace(state.run, usage=opened.usage_before + usage))
    left = limits.round_timeout_seconds - state.round_active_seconds
    # If the budget cut the output short, the model server did not fail. Top-ups limit how often this happens.
    failures = opened.failures + (fact.error.reason != retry.BUDGET_EXHAUSTED)
    is_empty = fact.error.reason == EMPTY_ANSWER
    # A model that gave no answer twice will not answer the third time.
    error = replace(fact.error, retryable=False) if is_empty and opened.empty_answers else fact.error
    may_wait = error.is_outage and limits.provider_wait_seconds > 0 and not state.run.is_turn
    # Stop making attempts early enough that the run can still wait for the server within its round timeout.
    left_here = left - limits.model_headers_timeout_seconds if may_wait else left
    # Until the wait ends, each failure after the first wait leads to another one.
    keeps_waiting = opened.outage_since is not None and now < opened.outage_since + limits.provider_wait_seconds
    attempts_max = 0 if may_wait and (keeps_waiting or error.reason == UNAVAILABLE) else limits.model_attempts_max
    delay = retry.delay(error, failures=failures, attempts_max=attempts_max, left=left_here, jitter=fact.jitter)
    falls_back = delay is None and retry.falls_back(fact.error, fallbacks_left=state.fallbacks_left, left=left)
    waits = may_wait and delay is None and not falls_back
    if waits:
        opened = _held_back(opened, error, limits.provider_wait_seconds, fact.jitter, now)
    if budget.ends_run(state) or (delay is None and not falls_back and not opened.held):
        failure = budget.failure(state) if delay is not None or falls_back else retry.failure_of(fact.error)
        loop = replace(loop, failure=failure)
        return with_partial(replace(state, loop=loop), fact.shown if written else Shown()), ()
    again = replace(
        opened,
        attempt=opened.attempt + 1,
        # Other failures after a wait get the full number of attempts.
        failures=0 if waits else failures,
        empty_answers=opened.empty_answers + is_empty,
        output_from_seq=state.run.last_seq + 1,
        usage_before=state.run.usage,
    )
    warned: tuple[Warned, ...] = ()
    if waits:
        delay = (opened.next_try_time or now) - now
        loop = replace(loop, round_began_active_seconds=state.active_seconds)
    loop = replace(loop, model_call=again)
    before, state = state.model, replace(state, loop=loop, model_starts_in=None if waits else delay or 0.0)
    if falls_back:
        state = _with_next_model(state, again)
        message = f"The model {before} failed. The run continues with {state.model}."
        warned = (Warned(reason="MODEL_FALLBACK", message=message),)
    event = RoundRetrying(
        round=state.run.round + opened.summary,
        model_attempt=opened.attempt,
        reason=fact.error.reason,
        message=fact.error.message,
        delay_seconds=delay or 0.0,
        void_from_seq=fact.shown.first_seq,
        usage=usage,
        model=state.model,
    )
    return state, (event, *warned)


def _held_back(opened: OpenModelCall, error: Problem, wait_seconds: float, jitter: float, now: float) -> OpenModelCall:
    """Hold the call until its next attempt, or end the hold if the call has waited long enough."""
    since, waits = now if opened.outage_since is None else opened.outage_since, opened.outage_waits
    next_try = retry.next_try_time(error, since=since, waits=waits, wait_seconds=wait_seconds, jitter=jitter, now=now)
    held = next_try is not None
    return replace(opened, outage_since=since, outage_waits=waits + 1, next_try_time=next_try, held=held)


def _with_next_model(state: State, opened: OpenModelCall) -> State:
    """Switch to the next model, which gets the full number of attempts."""
    opened = replace(opened, failures=0, empty_answers=0)
    # Another model may count tokens differently.
    loop = replace(state.loop, model_call=opened, fallbacks_used=state.loop.fallbacks_used + 1, counted_prompt=None)
    return replace(state, loop=loop)


def _waits(
    state: State, opened: OpenModelCall, limit: TokenBudget | RateReached, error: Problem
) -> tuple[State, tuple[OwnerEvent, ...]]:
    waits = opened.quota_waits + 1 if opened.quota_kind is limit.kind else 1
    held = replace(opened, held=True, quota_waits=waits, quota_kind=limit.kind)
    state = replace(state, loop=replace(state.loop, model_call=held), model_starts_in=None, used_up=limit)
    return state, (Warned(reason=error.reason, message=error.message),) if waits == 1 else ()


def _not_made(state: State, opened: OpenModelCall, tokens_needed: int) -> tuple[State, tuple[OwnerEvent, ...]]:
    """Hold the call because it needs more tokens than are left."""
    held = replace(opened, held=True, tokens_needed=tokens_needed)
    state = replace(state, loop=replace(state.loop, model_call=held), model_starts_in=None)
    return state, (Warned(reason=retry.BUDGET_EXHAUSTED, message=budget.need_message(state)),)


def cut(state: State, fact: ModelCut) -> State:
    opened = state.loop.model_call
    if opened is None:
        return state
    run = replace(state.run, usage=opened.usage_before + usage_of(fact.answer.usage))
    written = fact.answer.text
    loop = replace(
        state.loop,
        partial_text=written or state.loop.partial_text,
        failure=state.loop.failure or fact.failure,
    )
    return with_partial(replace(state, run=run, loop=loop), fact.shown if written else Shown())


def with_partial(state: State, shown: Shown) -> State:
    """Add the last attempt's output as an interrupted message.

    `shown` is the position of this output in the log, or empty if the output is discarded.
    """
    partial = state.loop.partial_text
    opened = state.loop.model_call
    state = replace(state, loop=replace(state.loop, model_call=None, partial_text=""))
    if not partial.strip() or (opened and opened.summary):
        return state
    message = Message(
        role=Role.ASSISTANT,
        run_id=state.run.run_id,
        text=partial,
        interrupted=True,
        first_output_seq=shown.first_seq,
        last_output_seq=shown.last_seq,
    )
    return replace(state, run=replace(state.run, output_text=partial, output_json=b"")).with_message(message)


def _counted(loop: LoopState, calls: Sequence[Call], identical_max: int) -> LoopState:
    loop = count(loop, calls, identical_max)
    stuck = stuck_call(loop, calls, identical_max)
    if stuck is None:
        return loop
    message = f"The model repeated the same call to {stuck.tool_name} too often."
    failure = RunFailure(failure_class=FailureClass.STUCK, reason="STUCK_LOOP", message=message)
    return replace(loop, failure=failure)


def _filtered(state: State, answer: ModelAnswer) -> State:
    if answer.finish_reason.lower() != CONTENT_FILTER.lower():
        return state
    failure = RunFailure(
        failure_class=FailureClass.CONTENT_FILTER,
        reason="CONTENT_FILTER",
        message="The model server withheld the rest of the answer.",
    )
    return replace(state, loop=replace(state.loop, failure=failure))


def _summarised(state: State, answer: ModelAnswer, to_number: int) -> State:
    summary = Message(role=Role.SUMMARY, run_id=state.run.run_id, text=answer.text, summarised_to_number=to_number)
    remaining = tuple(message for message in state.messages if message.number > to_number or not message.number)
    return replace(state, messages=(*remaining, summary))


def _with_counted_prompt(state: State, usage: UsageReport, *, is_summary: bool) -> State:
    size_bytes, last = usage.prompt_bytes, state.loop.counted_prompt
    if size_bytes:
        last = CountedPrompt(size_bytes=size_bytes, tokens=usage.input_tokens)
    return replace(state, loop=replace(state.loop, counted_prompt=None if is_summary else last))


def _with_message(state: State, fact: ModelAnswered, calls: tuple[Call, ...]) -> State:
    answer, shown, output = fact.answer, fact.shown, fact.output or OutputChecked()
    is_silent = state.run.is_turn and not calls and jobs.is_silent(answer.text)
    message = Message(
        role=Role.ASSISTANT,
        run_id=state.run.run_id,
        text="" if is_silent else answer.text,
        reasoning=answer.reasoning,
        provider_state_json=answer.provider_state_json,
        model=state.model,
        call_ids=tuple(call.call_id for call in calls),
        refusal=answer.refusal,
        interrupted=answer.cut_off,
        first_output_seq=shown.first_seq,
        last_output_seq=shown.last_seq,
        misfit="\n".join(output.faults),
    )
    texts = [jobs.alarms(state) if not calls else "", message.text or message.refusal]
    run = replace(state.run, output_text="\n\n".join(filter(None, texts)), output_json=output.output_json)
    said_nothing = is_silent and not message.refusal.strip()
    loop = replace(state.loop, misfits=state.loop.misfits + bool(output.faults), said_nothing=said_nothing)
    state = replace(state, run=run, loop=loop)
    return state if said_nothing else state.with_message(message)


def usage_of(report: UsageReport) -> Usage:
    return Usage() + report
