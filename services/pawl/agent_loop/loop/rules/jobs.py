"""Handles background jobs, from the call that starts a job to the notices in its conversation."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.agents.rules import START_GOAL
from pawl.agent_loop.loop.rules import background, budget, delegation, file_front, settle, text
from pawl.agent_loop.loop.rules.background import RequestedTerms
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.message import Message, Role
from pawl.agent_loop.loop.rules.retry import BUDGET_EXHAUSTED
from pawl.agent_loop.loop.rules.run import (
    Delegation,
    Job,
    Notice,
    RoundLimitPolicy,
    Run,
    TokenBudgetPolicy,
    ToolChoice,
    UnknownOutcomePolicy,
)
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.loop.rules.tool import Tool, Verdict
from pawl.chassis import strict_json
from pawl.chassis.ids import CallId
from pawl.errors import InvalidArguments, PermissionDenied, ToolNotFound
from pawl.values import WITH_PEOPLE, CallState, Disposition, ExecutionContext, JobReports, RunState, WaitKind

# Maximum number of open jobs per conversation (ASYNC-7).
OPEN_MAX: Final = 10
# Timeout of an iteration if the tool sets none.
TIMEOUT_SECONDS: Final = 3600.0
# Maximum number of rounds in a turn started by job notices (ASYNC-5).
TURN_ROUNDS_MAX: Final = 3
# Fraction of the context that new notices may fill; a single notice may be larger.
ENTERED_FRACTION: Final = 0.25
# Larger results are truncated in notices.
OUTPUT_BYTES_MAX: Final = 16 * 1024
# A model's answer when it has nothing to say.
SILENT: Final = "[silent]"

# Contexts of tools that can run in the background.
IN_BACKGROUND: Final = frozenset({ExecutionContext.BACKEND, ExecutionContext.AGENT})
_NEEDS_USER: Final = "This tool needs the user or the user's program, so it cannot run in the background."
_REFUSALS: Final = {"TOOL_NOT_FOUND": ToolNotFound, "NOT_ALLOWED": PermissionDenied}
_MARKING: Final = re.compile(r"[<>]|[^\x20-\x7e]")
_NOT_SO: Final = "It ran immediately, not in the background: {}."


# Runs wait for tools with these contexts, except for turns started by job notices.
WAITED_FOR: Final = frozenset({ExecutionContext.HUMAN, ExecutionContext.FRONTEND, ExecutionContext.AGENT})


def background_denial(run: Run) -> str:
    """Return why the run may not start background calls, or an empty string if it may."""
    return "background calls are switched off" if run.options.without_background else ""


def extract_terms(
    calls: Iterable[Call], tools: Iterable[Tool], now: float, *, as_tool: bool = False
) -> tuple[tuple[Call, ...], dict[CallId, RequestedTerms]]:
    """Return the calls without background parameters, and the background requests made by those parameters.

    With `as_tool`, calls to `background.TOOL` become calls to the tools that they specify. Calls to `file_front.TOOL`
    become calls to the file tools.
    """
    tools = tuple(tools)
    schemas = {tool.name: tool.arguments_schema_json for tool in tools}
    registered = file_front.registered(tools)
    terms: dict[CallId, RequestedTerms] = {}
    found = []
    for call in calls:
        if as_tool and call.tool_name == background.TOOL not in schemas:
            named, reading = background.read_tool(call.proposed_arguments, schemas)
            if call.state is CallState.PROPOSED and not reading.fault:
                call = replace(call, tool_name=named, proposed_tool_name=background.TOOL)  # noqa: PLW2901
        else:
            reading = background.read(call.proposed_arguments, schemas.get(call.tool_name, b""))
        if not reading.fault and call.tool_name == file_front.TOOL in registered:
            front = file_front.resolve(reading.arguments, registered)
            reading = replace(reading, arguments=front.arguments, fault=front.fault)
            if call.state is CallState.PROPOSED and not front.fault:
                call = replace(call, tool_name=front.tool_name, proposed_tool_name=call.name_for_model)  # noqa: PLW2901
        if call.state is CallState.PROPOSED and reading.fault:
            call = _refused(call, "INVALID_ARGUMENTS", reading.fault, now)  # noqa: PLW2901
        elif call.state is CallState.PROPOSED and reading.arguments != call.proposed_arguments:
            call = replace(call, arguments_json=reading.arguments.encode())  # noqa: PLW2901
            if reading.terms is not None:
                terms[call.call_id] = reading.terms
        if call.state is CallState.PROPOSED and call.tool_name == START_GOAL:
            # A goal can take days, so no run waits for it.
            terms.setdefault(call.call_id, RequestedTerms())
        found.append(call)
    return tuple(found), terms


def detached(
    state: State,
    calls: Iterable[Call],
    terms_by_call: Mapping[CallId, RequestedTerms],
    verdicts: Mapping[CallId, Verdict],
    now: float,
) -> State:
    started: dict[str, CallId] = {}
    for call in calls:
        terms = terms_by_call.get(call.call_id)
        if terms is None or call.settled:
            continue
        verdict = verdicts[call.call_id]
        why_not = background_denial(state.run)
        if verdict.without_background and not why_not:
            why_not = f"{call.tool_name} cannot run in the background"
        if why_not:
            note = f"{state.loop.notes.get(call.call_id, '')} {_NOT_SO.format(why_not)}".strip()
            loop = replace(state.loop, notes={**state.loop.notes, call.call_id: note})
            state = replace(state, loop=loop)
            continue
        key = repr((call.tool_name, call.arguments_json, terms))
        if key in started:
            message = f"The background call {started[key]} in this answer is the same. It is not started twice."
            state = state.with_calls([_refused(call, "DUPLICATE_CALL", message, now)])
            continue
        started[key] = call.call_id
        state = _start_job(state, call, terms, verdict, now)
    if not state.run.is_turn:
        return state
    message = (
        "The user did not ask for this answer, so calls that need a user are not made. Say what you would do, and "
        "let the user decide."
    )
    return state.with_calls(
        _refused(call, "NOT_ALLOWED", message, now) for call in state.batch if call.state in WITH_PEOPLE
    )


def as_driven(run: Run) -> Run:
    """Return the run with adjusted options if it is a job, a workflow run or a turn started by job notices."""
    options, limits = run.options, run.options.limits
    if run.job is not None and run.is_job:
        seconds = run.job.timeout_seconds
        if run.job.delegates:
            limits = replace(limits, run_timeout_seconds=seconds)
        else:
            limits = replace(limits, tool_timeout_seconds=seconds, tool_timeout_seconds_max=seconds)
        names = options.tool_names if run.job.delegates else (run.job.tool_name,)
        options = replace(options, tool_names=names, without_tools=False, tool_choice=ToolChoice(), limits=limits)
        return replace(run, options=options)
    if not run.is_turn and run.workflow is not None:
        policy = UnknownOutcomePolicy.NEEDS_ATTENTION
        return replace(run, options=replace(options, unknown_outcome_policy=policy, response_format=None))
    if not run.is_turn:
        return run
    # No user requested it, so it does not wait for a user.
    options = replace(
        options,
        limits=replace(limits, rounds_max=min(TURN_ROUNDS_MAX, limits.rounds_max)),
        round_limit_policy=RoundLimitPolicy.FINAL_ANSWER,
        token_budget_policy=TokenBudgetPolicy.FAIL,
        unknown_outcome_policy=UnknownOutcomePolicy.TELL_MODEL,
        tool_choice=ToolChoice(),
        response_format=None,
    )
    return replace(run, options=options, job=None, workflow=None, waits_for_jobs=False)


def entered(state: State) -> State:
    """Add a message with the job notices for the model.

    If there is no room for all notices, the rest wait for the next model call or turn.
    """
    taken, rest = list[bytes](), ENTERED_FRACTION * state.run.options.limits.context_bytes_max
    for notice in state.notices:
        shown = _escaped(msgspec.json.encode(_notice_content(notice)))
        rest -= len(shown)
        if taken and rest < 0:
            break
        taken.append(shown)
    if not taken:
        return state
    notices = state.notices[: len(taken)]
    message = Message(
        role=Role.NOTICE,
        run_id=state.run.run_id,
        text="\n".join(map(_line, notices)),
        notices_json=b"[" + b",".join(taken) + b"]",
    )
    return replace(state.with_message(message), notices=state.notices[len(taken) :], entered=(*state.entered, *notices))


def alarms(state: State) -> str:
    """Return the alarms that a turn must report to the user, one per line.

    Return an empty string if there are none.
    """
    if not state.run.is_turn:
        return ""
    shown = (
        notice
        for message in state.messages
        if message.role is Role.NOTICE and message.run_id == state.run.run_id
        for notice in msgspec.json.decode(message.notices_json)
    )
    return "\n".join(f"{each['tool']}: {each['alarm']} ({each['job_id']})" for each in shown if "alarm" in each)


def is_silent(content: str) -> bool:
    return content.strip().lower() in {"", SILENT}


def may_become_silent(content: str) -> bool:
    """Return whether an answer that starts with `content` could still turn out to be silent."""
    return SILENT.startswith(content.strip().lower())


def new_job(terms: RequestedTerms, tool_name: str, arguments_json: bytes, now: float) -> Job:
    return Job(
        tool_name=tool_name,
        arguments_json=arguments_json,
        begin_time=now,
        interval_seconds=terms.interval_seconds,
        iterations_max=terms.iterations_max,
        end_time=now + terms.duration_seconds if terms.duration_seconds else None,
        delay_first=terms.delay_first,
        timeout_seconds=TIMEOUT_SECONDS,
        estimated_minutes=terms.estimated_minutes,
        reports=terms.reports,
        report_iterations=terms.report_iterations,
        report_seconds=terms.report_seconds,
        report_percents=terms.report_percents,
        until=terms.until,
        when=terms.when,
        failures_told=terms.failures_told,
    )


def admitted(job: Job, terms: RequestedTerms, verdict: Verdict) -> Job:
    """Return a user's job with the changes that its first call's verdict requires.

    Raises:
        ToolNotFound, PermissionDenied, InvalidArguments: The job is not allowed. The message contains the reason.
    """
    check_allowed(verdict)
    if verdict.context not in IN_BACKGROUND:
        raise InvalidArguments(_NEEDS_USER)
    if verdict.without_background:
        raise InvalidArguments(f"{job.tool_name} cannot run in the background.")
    return replace(
        _under_policy(job, terms, verdict),
        arguments_json=verdict.arguments_json,
        timeout_seconds=verdict.async_timeout_seconds or TIMEOUT_SECONDS,
        delegates=verdict.context is ExecutionContext.AGENT,
    )


def check_allowed(verdict: Verdict) -> None:
    """Check that the registry does not refuse a call.

    Raises:
        ToolNotFound, PermissionDenied, InvalidArguments: The call is refused. The message contains the reason.
    """
    if verdict.disposition is Disposition.REFUSE:
        raise _REFUSALS.get(verdict.error_reason, InvalidArguments)(verdict.error_message)


def _under_policy(job: Job, terms: RequestedTerms, verdict: Verdict) -> Job:
    """Apply the tool's report policy, unless the request has its own.

    A monitoring job ignores the policy. A job with a single call follows the policy only if the policy concerns
    progress or is to report nothing. In the latter case, the job does not report progress either, even if requested.
    """
    policy = verdict.reports
    if policy is None or terms.until is not None or terms.when is not None:
        return job
    is_none = policy.reports is JobReports.NONE
    if terms.sets_reports and not (is_none and job.reports is JobReports.PROGRESS):
        return job
    if not is_none and (policy.reports is JobReports.PROGRESS) is bool(job.interval_seconds):
        return job
    content = {name: getattr(policy, name) for name in policy.__struct_fields__}
    return replace(job, **content)


def title(job: Job) -> str:
    return f"{job.tool_name} (in the background)"


def draft(run: Run, job: Job, now: float) -> Call:
    number = run.round + 1
    digest = hashlib.sha256(f"{run.run_id}:{number}".encode()).hexdigest()[:32]
    return Call(
        store_id=run.store_id,
        conversation_id=run.conversation_id,
        run_id=run.run_id,
        call_id=CallId(f"call_{digest}"),
        round=number,
        index=0,
        tool_name=job.tool_name,
        state=CallState.PROPOSED,
        proposed_arguments=job.arguments_json.decode(errors="replace"),
        create_time=now,
        agent_name=run.agent.name if run.agent else "",
    )


def _start_job(state: State, call: Call, terms: RequestedTerms, verdict: Verdict, now: float) -> State:
    """Start a job. The call becomes DETACHED with a job, or FAILED if it cannot run in the background."""
    if call.context not in IN_BACKGROUND:
        return state.with_calls([_refused(call, "INVALID_ARGUMENTS", _NEEDS_USER, now)])
    if call.context is ExecutionContext.AGENT and not delegation.may_delegate(state.run):
        return state.with_calls([_refused(call, "NOT_ALLOWED", delegation.CANNOT_DELEGATE, now)])
    if state.open_jobs >= OPEN_MAX:
        message = f"This conversation has {OPEN_MAX} open jobs, which is the maximum. Stop one or wait until one ends."
        return state.with_calls([_refused(call, "TOO_MANY_JOBS", message, now)])
    run, run_id = state.run, delegation.child_run_id(call)
    job = replace(
        _under_policy(new_job(terms, call.tool_name, call.arguments_json, now), terms, verdict),
        timeout_seconds=verdict.async_timeout_seconds or TIMEOUT_SECONDS,
        delegates=call.context is ExecutionContext.AGENT,
    )
    options, tokens = run.options, budget.left(state)
    if job.delegates and tokens is not None:
        if not tokens:
            return state.with_calls([_refused(call, BUDGET_EXHAUSTED, "No tokens are left for an agent.", now)])
        limits = replace(options.limits, total_tokens_max=tokens, topped_up_tokens_max=tokens)
        options = replace(options, limits=limits)
    started = Delegation(
        call_id=call.call_id,
        run_id=run_id,
        text=title(job),
        options=options,
        above=run.chain,
        depth=run.depth,
        user_roles=run.user_roles,
        agent=run.agent,
        job=job,
    )
    handle: dict[str, Any] = {"job_id": run_id, "state": "RUNNING"}
    if call.state is CallState.AWAITING_APPROVAL:
        handle["state"] = "AWAITING_APPROVAL"
    if terms.estimated_minutes:
        handle["estimated_minutes"] = terms.estimated_minutes
    notified = "are not notified of" if job.reports is JobReports.NONE else "are notified of"
    shown = f"It continues in the background. You {notified} its results. Do not wait for it, and do not repeat it."
    if run.depth and not run.waits_for_jobs and job.reports is not JobReports.NONE:
        shown += " After your answer, the agent that you work for is notified instead."
    note = f"{state.loop.notes.get(call.call_id, '')} {shown}".strip()
    bare = replace(call, approval=None, offer=None, question=None, child_run_id=run_id, start_time=None)
    result = CallResult(content_json=strict_json.dumps_canonical(handle))
    state = state.with_calls([settle.settled(bare, CallState.DETACHED, result, now, note)])
    return replace(
        state,
        delegations=(*state.delegations, started),
        open_jobs=state.open_jobs + 1,
        jobs_below=state.jobs_below + 1,
    )


def _refused(call: Call, reason: str, message: str, now: float) -> Call:
    return settle.settled(
        replace(call, approval=None, offer=None), CallState.FAILED, settle.error(reason, message), now
    )


def result_text(call: Call) -> str:
    """Return an iteration's result as JSON, truncated if necessary. An error is an object with an `error` field."""
    content = call.result.content_json if call.result else b"null"
    if len(content) <= OUTPUT_BYTES_MAX:
        return content.decode(errors="replace")
    cut = text.cut_bytes(content, OUTPUT_BYTES_MAX)
    note = (
        f"This is the first {OUTPUT_BYTES_MAX} of {len(content)} bytes. To read the rest, call read_result with "
        f"call_id {call.call_id}."
    )
    return strict_json.dumps_canonical({"cut": cut, "note": note}).decode()


def _notice_content(notice: Notice) -> dict[str, Any]:
    run, job = notice.run, _job(notice)
    shown: dict[str, Any] = {"job_id": run.run_id, "tool": job.tool_name}
    if _is_of_progress(notice):
        return shown | {"state": run.state.name} | _progress_content(notice)
    if notice.occasion:
        shown |= {"state": "PAUSED" if _is_paused(notice) else "RUNNING", "iteration": notice.occasion}
        if run.round > notice.occasion:
            # The notice was delayed; its result is from the latest iteration.
            shown["iterations"] = run.round
    else:
        shown["state"] = run.state.name
        if job.interval_seconds:
            shown["iterations"] = run.round
        if run.failure is not None:
            shown["error"] = run.failure.message
    if alarm := _alarm(notice):
        shown["alarm"] = alarm
    if run.missed_iterations:
        shown["missed"] = run.missed_iterations
    if run.workflow is not None and len(run.output_text) > OUTPUT_BYTES_MAX:
        shown["result"] = f"The output is too large to show: {len(run.output_text)} characters."
    elif run.output_text:
        shown["result"] = _json(run.output_text)
    return shown


def _is_of_progress(notice: Notice) -> bool:
    return notice.occasion > 0 and not _job(notice).interval_seconds


def _progress_content(notice: Notice) -> dict[str, Any]:
    """Return the content of a progress notice, as of the job's latest report."""
    run, job, progress = notice.run, _job(notice), notice.run.job_progress
    shown: dict[str, Any] = {"report": notice.occasion - run.round}
    if progress is not None and progress.fraction is not None:
        shown["percent"] = math.floor(progress.fraction * 100)
    if progress is not None and progress.message:
        shown["progress"] = progress.message
    if job.report_seconds:
        shown["minutes"] = round(shown["report"] * job.report_seconds / 60, 1)
    return shown


def _job(notice: Notice) -> Job:
    run = notice.run
    if run.workflow is not None:
        # A workflow run reports like a job with a single call.
        return Job(tool_name=run.workflow.name, arguments_json=run.workflow.input_json, begin_time=0.0)
    if run.job is None:
        raise RuntimeError("a notice's run is neither a job nor a workflow run")
    return run.job


def _is_paused(notice: Notice) -> bool:
    return WaitKind.PAUSED in notice.run.waits


def _json(content: str) -> Any:
    try:
        return msgspec.json.decode(content)
    except msgspec.DecodeError:
        return content


def _alarm(notice: Notice) -> str:
    """Return the alarm that the user must see, or an empty string if the model decides what to report."""
    run, job = notice.run, _job(notice)
    if not notice.occasion and run.state in {RunState.FAILED, RunState.EXPIRED}:
        return run.state.name.lower()
    if _is_paused(notice):
        return "paused"
    if job.until is None and job.when is None:
        return ""
    outcome = _json(run.output_text)
    if isinstance(outcome, dict) and (outcome.get("met") or outcome.get("fired")):
        return "condition met"
    return "failing" if notice.occasion and job.reports is JobReports.END else ""


def _escaped(encoded: bytes) -> bytes:
    """Escape characters in JSON that are invisible, change the text direction, or look like markup to a model."""
    return _MARKING.sub(_escape, encoded.decode()).encode()


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    if character in "<>":
        return f"\\u{ord(character):04x}"
    return character if character.isprintable() else json.dumps(character)[1:-1]


def _outcome(state: RunState) -> str:
    return "stopped" if state is RunState.CANCELLED else state.name.lower()


def _line(notice: Notice) -> str:
    what = f"iteration {notice.occasion}" if notice.occasion else _outcome(notice.run.state)
    if _is_of_progress(notice):
        found = _progress_content(notice)
        what = f"{found['percent']}% done" if "percent" in found else f"running for {found.get('minutes', 0):g} minutes"
    if (alarm := _alarm(notice)) not in {"", what}:
        what = f"{what}, {alarm}"
    return f"{_job(notice).tool_name}: {what} ({notice.run.run_id})"
