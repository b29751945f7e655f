"""Creates call rows for the calls that a model requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from msgspec.structs import replace

from pawl.agent_loop.loop.rules import settle, text
from pawl.agent_loop.loop.rules.assembly import ARGUMENTS_BYTES_MAX, ModelAnswer, is_json
from pawl.agent_loop.loop.rules.call import ApprovalRequest, Call, OfferLease
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.run import Run, RunOptions
from pawl.agent_loop.loop.rules.tool import ProposedCall, Verdict
from pawl.agent_loop.model.request import CallPiece
from pawl.chassis.ids import CallId
from pawl.values import CallState, Disposition, EffectClass, ExecutionContext, Outcome, Series

# Number of characters kept from arguments that are too large.
_KEPT_CHARACTERS: Final = 4096
_ENDS: Final = frozenset({Outcome.SUCCEEDED, Outcome.FAILED})


def draft(
    run: Run, answer: ModelAnswer, *, without_tools: bool, now: float, new_call_id: Callable[[], CallId]
) -> tuple[Call, ...]:
    """Return a call for each of the model's requests in round `run.round`, in the model's order.

    Calls that may run are PROPOSED and must be checked. The others are FAILED, with the reason as their result.
    """
    calls = [
        _draft(run, raw, index, without_tools=without_tools, now=now, call_id=new_call_id())
        for index, raw in enumerate(answer.calls)
    ]
    if calls and answer.cut_off and calls[-1].state is CallState.PROPOSED and not is_json(calls[-1].proposed_arguments):
        message = "The arguments were truncated by the output limit. Write less in one answer."
        calls[-1] = _refused(calls[-1], "INVALID_ARGUMENTS", message, now)
    return tuple(calls)


def _draft(run: Run, raw: CallPiece, index: int, *, without_tools: bool, now: float, call_id: CallId) -> Call:
    size = len(raw.arguments.encode())
    call = Call(
        store_id=run.store_id,
        conversation_id=run.conversation_id,
        run_id=run.run_id,
        call_id=call_id,
        round=run.round,
        index=index,
        provider_call_id=raw.call_id[:256],
        tool_name=text.tool_name(raw.name),
        state=CallState.PROPOSED,
        proposed_arguments=raw.arguments if size <= ARGUMENTS_BYTES_MAX else raw.arguments[:_KEPT_CHARACTERS],
        create_time=now,
        agent_name=run.agent.name if run.agent else "",
    )
    if without_tools:
        return _refused(call, "NOT_ALLOWED", "This run cannot call more tools.", now)
    calls_max = run.options.limits.calls_per_round_max
    if index >= calls_max:
        message = f"An answer may have at most {calls_max} calls. This one was over the limit and was not run."
        return _refused(call, "TOO_MANY_CALLS", message, now)
    near = _near_match(raw.name, run)
    if near or call.tool_name != raw.name.strip():
        # Keep the name in a form that model servers accept and that is not another tool's name.
        if near:
            call = replace(call, tool_name=text.tool_name(raw.name.replace(".", "_")))
        hint = f"; did you mean '{near}'?" if near else "."
        return _refused(call, "TOOL_NOT_FOUND", f"There is no tool with that name{hint}", now)
    if size > ARGUMENTS_BYTES_MAX:
        message = f"The arguments are {size} bytes; at most {ARGUMENTS_BYTES_MAX} are allowed."
        return _refused(call, "INVALID_ARGUMENTS", message, now)
    return call


def _near_match(name: str, run: Run) -> str:
    """Return the tool that `name` refers to without decorations (see `bare_name`), or an empty string."""
    known = {tool.name.replace(".", "__"): tool.name for tool in run.tools}
    if name.strip() in known.values():
        return ""
    bare = text.bare_name(name)
    return bare if bare in known else ""


def to_check(run: Run, calls: Sequence[Call]) -> tuple[ProposedCall, ...]:
    return tuple(
        ProposedCall(
            call_id=call.call_id,
            tool_name=call.tool_name,
            tool_version=run.tool_version(call.tool_name),
            arguments_json=call.arguments_json or call.proposed_arguments.encode(),
            series=run.series,
        )
        for call in calls
        if call.state is CallState.PROPOSED
    )


def apply_verdict(call: Call, verdict: Verdict, options: RunOptions, now: float, series: Series | None = None) -> Call:
    """Apply the registry's verdict to a PROPOSED call, or to a call that falls back to a backend tool.

    A call in a `series` either starts under the series' grant or requests a grant. A backend or delegated call that may
    run becomes RUNNABLE, and its batch determines when it starts. A read-only call that has already run is settled.
    """
    limits, people = options.limits, max(1, verdict.approvals_required, options.approvals_required)
    call = replace(
        call,
        tool_version=verdict.tool_version,
        context=verdict.context,
        category=verdict.category,
        effect_class=verdict.effect_class,
        arguments_json=verdict.arguments_json,
        # Delegated calls are not parallel, because each gets the budget that the earlier ones left.
        parallel=verdict.context is not ExecutionContext.AGENT
        and (verdict.parallel or verdict.effect_class is EffectClass.READ_ONLY),
        resource_keys=verdict.resource_keys,
        timeout_seconds=limits.seconds_of_tool(verdict.timeout_seconds),
        question=verdict.question,
        rule_id=verdict.rule_id,
    )
    if series is not None:
        series = replace(series, digest=verdict.series_digest, grant_call_id=CallId(""))
    if series is not None and verdict.series_digest and verdict.disposition is not Disposition.APPROVE:
        granted = ApprovalRequest(
            digest=verdict.digest, cause=verdict.approval_cause, approvals_required=people, series=series
        )
        call = replace(call, approval=granted)
    match verdict.disposition:
        case Disposition.REFUSE:
            return _refused(call, verdict.error_reason or "NOT_ALLOWED", verdict.error_message, now)
        case Disposition.APPROVE:
            return replace(
                with_offer(call, verdict),
                state=CallState.AWAITING_APPROVAL,
                approval=ApprovalRequest(
                    digest=verdict.digest,
                    preview=verdict.preview,
                    cause=verdict.approval_cause,
                    approvals_required=people,
                    series=series if verdict.series_digest else None,
                ),
                deadline_time=now + limits.approval_expiry_seconds,
            )
        case Disposition.RUN if verdict.result is not None and verdict.result.outcome in _ENDS:
            started = replace(call, state=CallState.RUNNING, attempt=1, start_time=now)
            return settle.executed(started, verdict.result, now, verdict.note)
        case Disposition.OFFER | Disposition.ASK | Disposition.RUN | Disposition.DELEGATE:
            return released(with_offer(call, verdict), limits, now)


def with_offer(call: Call, verdict: Verdict) -> Call:
    if verdict.context is not ExecutionContext.FRONTEND:
        return call
    return replace(call, offer_fallback=verdict.offer_fallback, fallback_tool_name=verdict.fallback_tool_name)


def released(call: Call, limits: Limits, now: float) -> Call:
    """Make a call that needs no further approval OFFERED, ASKED or RUNNABLE, depending on where it runs."""
    match call.context:
        case ExecutionContext.FRONTEND:
            deadline = now + limits.offer_deadline_seconds
            return replace(call, state=CallState.OFFERED, offer=OfferLease(), deadline_time=deadline)
        case ExecutionContext.HUMAN:
            seconds = limits.seconds_of_question(call.question.timeout_seconds if call.question else 0.0)
            return replace(call, state=CallState.ASKED, deadline_time=now + seconds)
        case ExecutionContext.BACKEND | ExecutionContext.AGENT | None:
            return replace(call, state=CallState.RUNNABLE, deadline_time=None)


def _refused(call: Call, reason: str, message: str, now: float) -> Call:
    return settle.settled(call, CallState.FAILED, settle.error(reason, message), now)
