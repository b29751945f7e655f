"""Decides which of a run's calls can be undone and in which order, and evaluates the results.

The ids of undo attempts are derived from the call's id. Earlier attempts are therefore visible from the calls alone,
and no attempt is made twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Final

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.loop.rules.call import Call, Inverse
from pawl.agent_loop.loop.rules.run import FailureClass, Run, RunFailure
from pawl.agent_loop.loop.rules.settle import NOT_STOPPED
from pawl.chassis import strict_json
from pawl.chassis.ids import CallId, RunId
from pawl.values import WITH_PEOPLE, CallState, DecisionKind, EffectClass, ExecutionContext

REASON_CHARACTERS_MAX: Final = 300
# The tool name of a workflow's call that undoes its effects.
UNDO_RUN: Final = "workflow.undo"
_REPORT_LINES_MAX: Final = 50

# Result reasons of calls that may have taken effect, or may still take effect.
_IN_DOUBT: Final = frozenset({NOT_STOPPED, "TOOL_TIMEOUT"})


class UndoState(StrEnum):
    TO_UNDO = "TO_UNDO"
    RUNNING = "RUNNING"
    NEEDS_APPROVAL = "NEEDS_APPROVAL"
    UNDONE = "UNDONE"
    ALREADY_UNDONE = "ALREADY_UNDONE"
    FAILED = "FAILED"
    CANNOT_BE_UNDONE = "CANNOT_BE_UNDONE"
    NOTHING_TO_UNDO = "NOTHING_TO_UNDO"


class CallUndo(msgspec.Struct, frozen=True, kw_only=True):
    """An undo's expected or actual effect on one call. `undo_call_id` is the last call that ran the inverse."""

    call_id: CallId
    tool_name: str
    state: UndoState
    summary: str = ""
    reason: str = ""
    undo_call_id: CallId = CallId("")
    undo_run_id: RunId = RunId("")


class UndoSource(msgspec.Struct, frozen=True, kw_only=True):
    """One of a run's calls, with the calls that tried to undo it, oldest first. Contents of results may be omitted."""

    call: Call
    attempts: tuple[Call, ...] = ()
    # If positive, the source represents the first rounds of a job, which are no longer stored. This is their
    # number, and `call` is a sample.
    trimmed_rounds: int = 0
    # If set, the source represents the effects of another run, whose nodes this run reuses; `call` is a sample.
    reused_run_id: RunId = RunId("")
    # The run's own call that `call` is part of, or `call` itself.
    top_call_id: CallId = CallId("")


class PlannedUndo(msgspec.Struct, frozen=True, kw_only=True):
    call_id: CallId
    undo_call_id: CallId
    tool_name: str
    summary: str


class UndoPlan(msgspec.Struct, frozen=True, kw_only=True, tag_field="program", tag="undo"):
    """The plan of an undo: its steps in order, and the calls that cannot be undone.

    `reported` is true once the report has been added to the conversation.
    """

    steps: tuple[PlannedUndo, ...] = ()
    others: tuple[CallUndo, ...] = ()
    reported: bool = False


def undo_call_id(call_id: CallId, attempt: int) -> CallId:
    """Return the id of the `attempt`th call that tries to undo a call, counted from 1."""
    return CallId(f"undo_{attempt}_{hashlib.sha256(call_id.encode()).hexdigest()[:32]}")


def inverse_of(call: Call) -> Inverse | None:
    """Return the call's inverse, or None if the call did not succeed or cannot be reversed."""
    return call.result.inverse if call.state is CallState.SUCCEEDED and call.result is not None else None


def is_carried_out_below(call: Call) -> bool:
    """Return whether a child run (but not an undo) carried out the call.

    In this case, the child's calls are undone instead.
    """
    return call.child_run_id != "" and call.state is not CallState.DETACHED and call.tool_name != UNDO_RUN


def in_order(sources: Iterable[UndoSource], call_id: CallId = CallId("")) -> tuple[UndoSource, ...]:
    """Return the sources in undo order: the call that ended last comes first.

    If `call_id` is set, return only its source.
    """
    chosen = (source for source in sources if call_id in {"", source.call.call_id})
    return tuple(sorted(chosen, key=_end, reverse=True))


def outcome_of(source: UndoSource, undo_run_id: RunId = RunId("")) -> CallUndo:
    """Return the outcome of a call in the undo run `undo_run_id` or, without that id, the outcome to expect now."""
    call, inverse = source.call, inverse_of(source.call)
    if source.reused_run_id:
        reason = f"It reuses results of run {source.reused_run_id}: undo that run to undo their effects."
        return CallUndo(call_id=CallId(""), tool_name=call.tool_name, state=UndoState.NOTHING_TO_UNDO, reason=reason)
    if source.trimmed_rounds:
        reason = f"The first {source.trimmed_rounds} iterations are no longer stored."
        state = UndoState.CANNOT_BE_UNDONE
        if call.effect_class is EffectClass.READ_ONLY:
            state, reason = UndoState.NOTHING_TO_UNDO, "They were read-only."
        return CallUndo(call_id=CallId(""), tool_name=call.tool_name, state=state, reason=reason)
    if inverse is None:
        state, reason = _without_inverse(call)
        return CallUndo(call_id=call.call_id, tool_name=call.tool_name, state=state, reason=reason)
    own = [each for each in source.attempts if each.run_id == undo_run_id]
    last = next(reversed(own or source.attempts), None)
    state, reason = _tried(last, undo_run_id)
    return CallUndo(
        call_id=call.call_id,
        tool_name=call.tool_name,
        state=state,
        summary=_line(inverse.summary),
        reason=reason,
        undo_call_id=last.call_id if last else CallId(""),
        undo_run_id=last.run_id if last else RunId(""),
    )


def plan(sources: Iterable[UndoSource], run: Run) -> UndoPlan:
    """Return the plan for the undo `run`. It contains each call at most once."""
    steps, others = [], []
    for source in in_order(sources, run.undo.call_id if run.undo else CallId("")):
        found = outcome_of(source, run.run_id)
        if found.state is UndoState.TO_UNDO:
            step = PlannedUndo(
                call_id=found.call_id,
                undo_call_id=undo_call_id(found.call_id, len(source.attempts) + 1),
                tool_name=found.tool_name,
                summary=found.summary,
            )
            steps.append(step)
        elif found.state is not UndoState.NOTHING_TO_UNDO:
            others.append(found)
    return UndoPlan(steps=tuple(steps), others=tuple(others))


def following(planned: UndoPlan, calls: Mapping[CallId, Call]) -> PlannedUndo | None:
    return next((step for step in planned.steps if step.undo_call_id not in calls), None)


def draft(run: Run, step: PlannedUndo, inverse: Inverse, now: float) -> Call:
    return Call(
        store_id=run.store_id,
        conversation_id=run.conversation_id,
        run_id=run.run_id,
        call_id=step.undo_call_id,
        undoes_call_id=step.call_id,
        round=run.round + 1,
        index=0,
        tool_name=inverse.tool_name,
        state=CallState.PROPOSED,
        proposed_arguments=inverse.arguments_json.decode(errors="replace"),
        create_time=now,
    )


def report(planned: UndoPlan | None, run: Run, calls: Mapping[CallId, Call]) -> str:
    head = f"Undo of run {run.undo.run_id}" if run.undo else "Undo"
    if planned is None:
        return f"{head}: nothing was undone."
    found = [*(_outcome(step, run, calls) for step in planned.steps), *planned.others]
    if not found:
        return f"{head}: there was nothing to undo."
    undone = sum(each.state is UndoState.UNDONE for each in found)
    lines = [f"{head}: undid {undone} of {len(found)} calls with effects."]
    lines += map(_report_line, found[:_REPORT_LINES_MAX])
    if len(found) > _REPORT_LINES_MAX:
        lines.append(f"- and {len(found) - _REPORT_LINES_MAX} more")
    return "\n".join(lines)


def failure(planned: UndoPlan, run: Run, calls: Mapping[CallId, Call]) -> RunFailure | None:
    """Return the failure of an undo that has run all its steps, or None if all steps succeeded."""
    found = [_outcome(step, run, calls) for step in planned.steps]
    failed = [each for each in found if each.state is not UndoState.UNDONE]
    if not failed:
        return None
    message = f"{len(failed)} of {len(found)} calls could not be undone: {failed[0].tool_name}: {failed[0].reason}"
    return RunFailure(failure_class=FailureClass.TOOL, reason="UNDO_INCOMPLETE", message=message)


def request_text(run_id: RunId, call_id: CallId = CallId("")) -> str:
    return f"[Undo of call {call_id} of run {run_id}]" if call_id else f"[Undo of run {run_id}]"


def slim(call: Call) -> Call:
    result = call.result
    if result is not None and not result.is_error:
        result = replace(result, content_json=b"null")
    return replace(call, arguments_json=b"", proposed_arguments="", result=result)


_STATE_TEXTS: Final = {
    UndoState.UNDONE: "undone",
    UndoState.ALREADY_UNDONE: "was already undone",
    UndoState.FAILED: "could not be undone",
    UndoState.CANNOT_BE_UNDONE: "cannot be undone",
}


def _report_line(found: CallUndo) -> str:
    what = f"{found.tool_name} ({found.summary})" if found.summary else found.tool_name
    reason = f": {found.reason}" if found.reason else ""
    return f"- {what} {_STATE_TEXTS.get(found.state, 'not undone')}{reason}"


def _outcome(step: PlannedUndo, run: Run, calls: Mapping[CallId, Call]) -> CallUndo:
    state, reason = _tried(calls.get(step.undo_call_id), run.run_id)
    return CallUndo(call_id=step.call_id, tool_name=step.tool_name, state=state, summary=step.summary, reason=reason)


def _end(source: UndoSource) -> tuple[float, int, int]:
    call = source.call
    return call.end_time or 0.0, call.round, call.index


def _without_inverse(call: Call) -> tuple[UndoState, str]:
    if call.imported:
        return UndoState.CANNOT_BE_UNDONE, "It was made in another system, before the conversation was imported."
    if call.effect_class is EffectClass.READ_ONLY:
        return UndoState.NOTHING_TO_UNDO, "It was read-only."
    if call.context is ExecutionContext.HUMAN or (call.question is not None and not call.attempt):
        return UndoState.NOTHING_TO_UNDO, "It was a question."
    if _is_in_doubt(call):
        return UndoState.CANNOT_BE_UNDONE, "It is unknown whether it took effect."
    if call.state is CallState.DETACHED:
        return UndoState.CANNOT_BE_UNDONE, f"Job {call.child_run_id} ran it: undo that run."
    if call.state is not CallState.SUCCEEDED:
        return UndoState.NOTHING_TO_UNDO, "It did not succeed."
    if _was_answered(call):
        return UndoState.NOTHING_TO_UNDO, "A user answered instead; it was not run."
    if call.child_run_id:
        return UndoState.CANNOT_BE_UNDONE, f"Run {call.child_run_id} ran it: undo that run."
    return UndoState.CANNOT_BE_UNDONE, "Its tool does not support undo."


def _tried(last: Call | None, undo_run_id: RunId) -> tuple[UndoState, str]:
    if last is None:
        return UndoState.TO_UNDO, ""
    own = last.run_id == undo_run_id
    if not last.settled:
        return UndoState.NEEDS_APPROVAL if last.state in WITH_PEOPLE else UndoState.RUNNING, ""
    if _is_in_doubt(last):
        return (
            UndoState.CANNOT_BE_UNDONE,
            "It is unknown whether its inverse took effect, so the inverse is not run again.",
        )
    if last.state is CallState.SUCCEEDED and not _was_answered(last):
        return UndoState.UNDONE if own else UndoState.ALREADY_UNDONE, ""
    if not own:
        return UndoState.TO_UNDO, _why(last)
    missing = last.result is not None and last.result.error_reason == "TOOL_NOT_FOUND"
    return UndoState.CANNOT_BE_UNDONE if missing else UndoState.FAILED, _why(last)


def _is_in_doubt(call: Call) -> bool:
    if call.effect_class is EffectClass.READ_ONLY:
        return False
    if call.state is CallState.OUTCOME_UNKNOWN or (call.state is CallState.CANCELLED and call.attempt):
        return True
    return call.result is not None and call.result.is_error and call.result.error_reason in _IN_DOUBT


def _was_answered(call: Call) -> bool:
    decision = call.approval.decision if call.approval else None
    return decision is not None and decision.kind is DecisionKind.ANSWER


def _why(call: Call) -> str:
    if _was_answered(call):
        return "A user answered instead; the inverse was not run."
    content: object = None
    if call.result is not None:
        try:
            content = msgspec.json.decode(call.result.content_json)
        except msgspec.DecodeError:
            content = None
    text = content.get("error") if isinstance(content, dict) else content
    return _line(text) if isinstance(text, str) and text else f"The inverse ended in the state {call.state.name}."


def _line(text: str) -> str:
    return " ".join(strict_json.storable(text).split())[:REASON_CHARACTERS_MAX]
