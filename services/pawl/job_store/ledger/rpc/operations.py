"""Converts requests to ledger operations, and refuses requests that violate the contract."""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping
from typing import Any, Final

from google.protobuf.message import Message as ProtoMessage

from pawl.chassis.ids import (
    DEFAULT_AGENT,
    CallId,
    CallKey,
    ClientId,
    CommandId,
    RunId,
    RunKey,
    check_id,
)
from pawl.chassis.labels import OF_MAIL, check_labels
from pawl.errors import InvalidField
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2, workflow_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store.ledger.ports import LimitsOf
from pawl.job_store.ledger.rpc import goal_limits, messages, own_tools, run_limits, user_messages
from pawl.job_store.ledger.rpc.approvals import check_digest, decide, people_needed, series_from
from pawl.job_store.ledger.rpc.fields import enum_member, fingerprint, int32, tokens, user_ids, wait_kinds
from pawl.job_store.ledger.rules import labels
from pawl.job_store.ledger.rules.calls import CallChange
from pawl.job_store.ledger.rules.command import (
    Cancel,
    Command,
    Event,
    Pause,
    Progress,
    Redrive,
    Resolve,
    Send,
    Steer,
    ToolResult,
    TopUp,
)
from pawl.job_store.ledger.rules.commit import BUDGET_EXHAUSTED, Commit, NewMessage
from pawl.job_store.ledger.rules.conversations import key_hash, made_title
from pawl.job_store.ledger.rules.delegation import Delegation
from pawl.job_store.ledger.rules.events import OwnerEvent
from pawl.job_store.ledger.rules.inbox import EVENT, NoteCompletion
from pawl.job_store.ledger.rules.jobs import Entered
from pawl.job_store.ledger.rules.offers import LeaseOffer
from pawl.job_store.ledger.rules.states import RunProgram
from pawl.job_store.ledger.rules.submit import Submit
from pawl.values import (
    CallState,
    DecisionRight,
    Feature,
    LeaseAction,
    MessagePolicy,
    RunState,
    StopCause,
)

LEASE_SECONDS_MIN: Final = 1.0
LEASE_SECONDS_MAX: Final = 300.0
EVENTS_PER_COMMIT_MAX: Final = 1000

_OWNER_EVENTS: Final = {
    "round_started": "round.started",
    "round_retrying": "round.retrying",
    "round_ended": "round.ended",
    "output_delta": "output.delta",
    "tool_progress": "tool.progress",
    "warning": "warning",
}
_EVENT_HEADER: Final = ("store_id", "conversation_id", "run_id", "seq", "time", "attempt", "event_id", "type")
_MESSAGE_HEADER: Final = (
    *("message_id", "conversation_id", "run_id", "number", "summarised_to_number", "create_time"),
    "user_id",
)
_APPROVAL_HEADER: Final = ("digest", "decision", "approvals_required", "approvals", "escalated", "series")
# The command sent to the owners of runs whose conversation was erased, or is no longer shared for writing.
CANCEL: Final = ledger_pb2.Command(cancel=ledger_pb2.CancelCommand(cause=run_pb2.STOP_CAUSE_USER)).SerializeToString()
_TOKEN_KEY_BYTES: Final = 16
_CHILD_CANCEL: Final = ledger_pb2.Command(
    cancel=ledger_pb2.CancelCommand(cause=run_pb2.STOP_CAUSE_PARENT)
).SerializeToString()


def run_key(request: Any) -> RunKey:
    return RunKey(check_id(request.store_id, "store_id"), check_id(request.run_id, "run_id"))


def call_key(request: Any) -> CallKey:
    return CallKey(check_id(request.store_id, "store_id"), check_id(request.call_id, "call_id"))


def submit(request: ledger_pb2.SubmitMessageRequest, limits_of: LimitsOf) -> Submit:
    if not request.text and not request.parts:
        raise InvalidField("text must not be empty", field="text")
    if request.parts and (request.text or request.policy == ledger_pb2.MESSAGE_POLICY_STEER):
        raise InvalidField("parts cannot be combined with text or with the policy STEER", field="parts")
    steer = ledger_pb2.Command(steer=ledger_pb2.SteerCommand(text=request.text))
    interrupt = ledger_pb2.Command(cancel=ledger_pb2.CancelCommand(cause=run_pb2.STOP_CAUSE_SUPERSEDED))
    reports_to = check_id(request.workflow.reports_to_conversation_id, "conversation_id", optional=True)
    program = _program(request)
    own = own_tools.of_request(request)
    store_id = check_id(request.store_id, "store_id")
    limits = limits_of(store_id)
    run = run_pb2.Run(
        user_roles=request.user_roles,
        traceparent=request.traceparent,
        trace_link=request.trace_link,
        **_present(request, "options", "undo", "agent", "workflow", "goal"),
    )
    if request.HasField("options"):
        run_limits.lower(run, limits.of_runs)
    return Submit(
        store_id=store_id,
        user_id=check_id(request.user_id, "user_id"),
        request_id=check_id(request.request_id, "request_id", optional=True),
        # Defaults, roles and credentials are not part of the payload: they may differ when the request is repeated.
        fingerprint=fingerprint(
            user_messages.without_documents(request),
            without=(
                *("request_id", "options", "user_roles", "credential_id", "delegate_user_id", "people", "agent"),
                *("tools", "client_id", "only_repeat", "workflow", "goal", "traceparent", "trace_link"),
            ),
        ),
        conversation_id=reports_to or check_id(request.conversation_id, "conversation_id", optional=True),
        conversation_must_exist=request.conversation_must_exist or bool(reports_to),
        policy=enum_member(MessagePolicy, request.policy, "policy"),
        message=user_messages.body(request),
        steer=steer.SerializeToString(),
        interrupt=interrupt.SerializeToString(),
        options=run.SerializeToString() + _without(limits.off) + _token_key(request),
        off=limits.off,
        refused_model=limits.refused_model((request.options.model, *request.options.model_fallbacks)),
        is_full=limits.is_full,
        queue_max=limits.queue_max,
        store_queue_max=limits.store_queue_max,
        program=program,
        is_reported=bool(reports_to),
        traceparent=request.traceparent,
        store_slots=limits.slots.background_per_store if program else limits.slots.per_store,
        token_budget=tokens(run.options.limits.total_tokens_max, "options.limits.total_tokens_max"),
        token_ceiling=tokens(run.options.limits.topped_up_tokens_max, "options.limits.topped_up_tokens_max"),
        text_bytes=len(request.text.encode()),
        inbox_limits=limits.inbox,
        credential_id=check_id(request.credential_id, "credential_id", optional=True),
        delegate_user_id=check_id(request.delegate_user_id, "delegate_user_id", optional=True),
        people=user_ids(request.people),
        key_hash=key_hash_of(request),
        made_title=made_title(user_messages.text_of(request)),
        undoes=RunId(check_id(request.undo.run_id, "undo.run_id", optional=True)),
        agent_name=request.agent.name or DEFAULT_AGENT,
        labels=check_labels(request.labels, reserved=OF_MAIL)
        | labels.of_workflow(request.workflow.name)
        | labels.of_goal(is_goal=request.HasField("goal")),
        own_tools=own,
        only_repeat=request.only_repeat or (bool(request.asked_agent) and not request.HasField("agent")),
    )


def _without(off: Collection[Feature]) -> bytes:
    """Return an encoded Run that, appended to another, disables the features in `off`."""
    options = run_pb2.RunOptions(without_background=Feature.BACKGROUND in off)
    if Feature.DELEGATION in off:
        options.limits.agent_depth_max = 0
    return run_pb2.Run(options=options).SerializeToString() if options.ByteSize() else b""


def _token_key(request: ledger_pb2.SubmitMessageRequest | ledger_pb2.Delegation) -> bytes:
    """Return an encoded Run that, appended to another, sets a random key for a workflow's tokens."""
    if not request.HasField("workflow"):
        return b""
    pinned = workflow_pb2.PinnedWorkflow(token_key=secrets.token_bytes(_TOKEN_KEY_BYTES))
    return run_pb2.Run(workflow=pinned).SerializeToString()


def _present(request: ProtoMessage, *names: str) -> dict[str, Any]:
    return {name: getattr(request, name) for name in names if request.HasField(name)}


def key_hash_of(
    request: ledger_pb2.SubmitMessageRequest | ledger_pb2.ImportConversationRequest,
) -> bytes:
    """Return the hash of the conversation key in the request, or empty bytes if there is no key."""
    if not request.conversation_key:
        return b""
    if not isinstance(request, ledger_pb2.ImportConversationRequest) and request.conversation_id:
        raise InvalidField("set either conversation_id or conversation_key, not both", field="conversation_key")
    return key_hash(
        check_id(request.store_id, "store_id"), check_id(request.user_id, "user_id"), request.conversation_key
    )


def _program(request: ledger_pb2.SubmitMessageRequest | ledger_pb2.Delegation) -> RunProgram:
    if request.HasField("workflow"):
        return RunProgram.WORKFLOW
    return RunProgram.GOAL if request.HasField("goal") else RunProgram.DEFAULT


def commit(request: ledger_pb2.CommitRunRequest, limits_of: LimitsOf) -> Commit:
    """Return the operation for a CommitRun request. Modifies the request, which must not be used again."""
    if len(request.events) > EVENTS_PER_COMMIT_MAX:
        raise InvalidField(
            f"a step may have at most {EVENTS_PER_COMMIT_MAX} events, got {len(request.events)}", field="events"
        )
    if len({call.call_id for call in request.calls}) != len(request.calls):
        raise InvalidField("a step may contain each call only once", field="calls")
    for usage in (request.usage, request.delegated_usage):
        messages.checked_usage(usage)
    for call_id in request.unstopped_call_ids:
        check_id(call_id, "unstopped_call_ids")
    has, of_runs = request.HasField, limits_of(check_id(request.store_id, "store_id")).of_runs
    return Commit(
        run=run_key(request),
        epoch=request.epoch,
        commit_id=check_id(request.commit_id, "commit_id"),
        events=tuple(_owner_event(event) for event in request.events),
        messages=tuple(new_message(message) for message in request.messages),
        calls=tuple(call_change(call) for call in request.calls),
        state=enum_member(RunState, request.state, "state") if request.state else None,
        waits=wait_kinds(request.waits),
        failure=_run_part(request, "failure") if has("failure") else None,
        exhausts_budget=request.failure.reason == BUDGET_EXHAUSTED,
        stop_cause=enum_member(StopCause, request.stop_cause, "stop_cause") if request.stop_cause else None,
        round=int32(request.round, "round") if has("round") else None,
        usage=_usage(request) if has("usage") else None,
        model=request.model,
        tokens_used=request.tokens_used,
        budget_run_id=RunId(check_id(request.budget_run_id, "budget_run_id", optional=True)),
        output=_output(request) if has("output_text") else None,
        active_seconds=request.active_seconds if has("active_seconds") else None,
        tools=_run_part(request, "tools") if request.tools else None,
        loop_state=request.loop_state if has("loop_state") else None,
        consumed=tuple(CommandId(check_id(each, "consumed_command_ids")) for each in request.consumed_command_ids),
        lease=enum_member(LeaseAction, request.lease_action or LeaseAction.KEEP, "lease_action"),
        wake_time=messages.optional_moment(request, "wake_time"),
        after_seq=request.after_seq if has("after_seq") else None,
        unstopped=_run_part(request, "unstopped_call_ids") if request.unstopped_call_ids else None,
        trace=request.trace or None,
        delegations=tuple(_delegation(entry, of_runs) for entry in request.delegations),
        asks_title=request.asks_title,
        entered=tuple(
            Entered(run_id=RunId(check_id(each.run_id, "entered_notices.run_id")), occasion=each.occasion)
            for each in request.entered_notices
        ),
        tells_iteration=int32(request.tells_iteration, "tells_iteration"),
        events_taken=int32(request.events_taken, "events_taken"),
        has_progressed=request.has_progressed,
        child_cancel=_CHILD_CANCEL,
    )


def _output(request: ledger_pb2.CommitRunRequest) -> bytes:
    progress = ("job_progress",) if request.HasField("job_progress") else ()
    output = _run_part(request, "output_text", "output_json", "missed_iterations", *progress)
    return output + goal_limits.encoded(request)


def _usage(request: ledger_pb2.CommitRunRequest) -> bytes:
    delegated = ("delegated_usage",) if request.HasField("delegated_usage") else ()
    return _run_part(request, "usage", "tokens_needed", *delegated)


def _run_part(request: ledger_pb2.CommitRunRequest, *fields: str) -> bytes:
    """Return the fields that CommitRunRequest and Run have in common, as an encoded Run."""
    return run_pb2.Run(**{name: getattr(request, name) for name in fields}).SerializeToString()


def send(request: ledger_pb2.SendCommandRequest, limits_of: LimitsOf) -> Send:
    """Return the operation for a SendCommand request. Modifies the request, which must not be used again."""
    entry = request.command
    command_id = CommandId(check_id(entry.command_id, "command.command_id"))
    for field in ("command_id", "user_id", "time", "credential_id", "delegate_user_id"):
        entry.ClearField(field)
    if request.decision_right and not entry.HasField("decision"):
        raise InvalidField("decision_right requires a decision", field="decision_right")
    right = enum_member(DecisionRight, request.decision_right or DecisionRight.OWN_RUNS, "decision_right")
    if request.event_is_awaited and not entry.HasField("event"):
        raise InvalidField("event_is_awaited requires an event", field="event_is_awaited")
    command = _command(entry, right, event_is_awaited=request.event_is_awaited)
    if request.as_operator and not isinstance(command, Resolve | Redrive | Cancel):
        raise InvalidField("as_operator applies only to resolve, redrive and cancel", field="as_operator")
    if isinstance(command, Redrive) and not request.as_operator:
        raise InvalidField("redrive requires as_operator", field="as_operator")
    run = run_key(request)
    return Send(
        run=run,
        user_id=check_id(request.user_id, "user_id"),
        command_id=command_id,
        # A tool may return different previews for the same arguments.
        fingerprint=fingerprint(_without_preview(entry)),
        command=command,
        payload=entry.SerializeToString(),
        as_operator=request.as_operator,
        session_id=check_id(request.session_id, "session_id", optional=True),
        inbox_limits=limits_of(run.store_id).inbox,
        credential_id=check_id(request.credential_id, "credential_id", optional=True),
        delegate_user_id=check_id(request.delegate_user_id, "delegate_user_id", optional=True),
        people=user_ids(request.people),
    )


def note_completion(request: ledger_pb2.NoteCompletionRequest) -> NoteCompletion:
    completed = ledger_pb2.CompletedCommand(call_id=call_key(request).call_id)
    return NoteCompletion(
        run=run_key(request), payload=ledger_pb2.Command(completed=completed).SerializeToString(deterministic=True)
    )


def lease_offer(request: ledger_pb2.LeaseOfferRequest) -> LeaseOffer:
    return LeaseOffer(
        run=run_key(request),
        call=call_key(request),
        user_id=check_id(request.user_id, "user_id"),
        client_id=check_id(request.client_id, "client_id"),
        session_id=check_id(request.session_id, "session_id", optional=True),
        lease_seconds=lease_seconds(request.lease_seconds),
    )


def lease_seconds(requested: float) -> float:
    """Return a lease duration. Raise InvalidField if it is invalid."""
    if not LEASE_SECONDS_MIN <= requested <= LEASE_SECONDS_MAX:
        raise InvalidField(f"lease_seconds must be between 1 and 300, got {requested:g}", field="lease_seconds")
    return requested


def _owner_event(event: event_pb2.RunEvent) -> OwnerEvent:
    kind = event.WhichOneof("kind")
    if kind not in _OWNER_EVENTS:
        raise InvalidField(f"only the ledger writes events of kind {kind}", field="events")
    for field in _EVENT_HEADER:
        event.ClearField(field)
    return OwnerEvent(type=_OWNER_EVENTS[kind], body=event.SerializeToString())


def new_message(message: message_pb2.Message) -> NewMessage:
    """Return the message to append. Modifies `message`, which must not be used again."""
    if message.role == message_pb2.ROLE_UNSPECIFIED:
        raise InvalidField("a message must have a role", field="messages.role")
    if (message.role == message_pb2.ROLE_SUMMARY) != (message.summarised_to_number > 0):
        raise InvalidField(
            "summarised_to_number must be set in summaries, and in no other messages",
            field="messages.summarised_to_number",
        )
    summarised_to = int32(message.summarised_to_number, "messages.summarised_to_number")
    message_id = check_id(message.message_id, "messages.message_id", optional=True)
    for field in _MESSAGE_HEADER:
        message.ClearField(field)
    return NewMessage(
        message_id=message_id,
        summarised_to=summarised_to,
        body=message.SerializeToString(),
        steer_bytes=len(message.text.encode()) if message.role == message_pb2.ROLE_USER else None,
    )


def _delegation(entry: ledger_pb2.Delegation, most: Mapping[str, int]) -> Delegation:
    if not entry.text:
        raise InvalidField("text must not be empty", field="delegations.text")
    run = run_pb2.Run(
        options=entry.options,
        user_roles=entry.user_roles,
        depth=int32(entry.depth, "delegations.depth"),
        above=entry.above,
        waits_for_jobs=entry.waits_for_jobs,
        traceparent=entry.traceparent,
        trace_link=entry.trace_link,
        **_present(entry, "agent", "job", "workflow", "goal", "undo"),
    )
    run_limits.lower(run, most)
    limits = run.options.limits
    return Delegation(
        call_id=CallId(check_id(entry.call_id, "delegations.call_id")),
        run_id=RunId(check_id(entry.run_id, "delegations.run_id")),
        message=user_messages.body(entry),
        made_title=made_title(entry.text),
        options=run.SerializeToString() + _token_key(entry),
        agent_name=entry.agent.name or DEFAULT_AGENT,
        token_budget=tokens(limits.total_tokens_max, "delegations.options.limits.total_tokens_max"),
        token_ceiling=tokens(limits.topped_up_tokens_max, "delegations.options.limits.topped_up_tokens_max"),
        is_job=entry.HasField("job"),
        program=_program(entry),
        traceparent=entry.traceparent,
        labels=labels.of_goal(is_goal=entry.HasField("goal")),
        is_silent=entry.job.reports == run_pb2.JOB_REPORTS_NONE,
    )


def call_change(call: call_pb2.Call) -> CallChange:
    """Return the requested change to a call. Modifies `call`, which must not be used again."""
    digest = call.approval.digest
    values = {
        "call_id": check_id(call.call_id, "calls.call_id"),
        "round": int32(call.round, "calls.round"),
        "index": int32(call.index, "calls.index"),
        "state": enum_member(CallState, call.state, "calls.state"),
        "tool_name": call.tool_name,
        "tool_version": int32(call.tool_version, "calls.tool_version"),
        "fallback_tool_name": call.fallback_tool_name,
        "arguments": call.arguments_json,
        "attempt": int32(call.attempt, "calls.attempt"),
        "digest": check_digest(digest, "calls.approval.digest") if digest else "",
        "deadline_time": messages.optional_moment(call, "deadline_time", "calls."),
        "result": call.result.SerializeToString() if call.HasField("result") else None,
        "approvals_required": people_needed(call.approval.approvals_required),
        "escalated": call.approval.escalated,
        "has_default": bool(call.question.default_answer),
        "asked_user_id": (
            check_id(call.asked_user_id, "calls.asked_user_id", optional=True)
            if call.HasField("asked_user_id")
            else None
        ),
        "child_run_id": check_id(call.child_run_id, "calls.child_run_id", optional=True),
        "series": series_from(call.approval.series) if call.approval.HasField("series") else None,
        "only_reads": call.effect_class == call_pb2.EFFECT_CLASS_READ_ONLY,
    }
    if call.HasField("approval"):
        for part in _APPROVAL_HEADER:
            call.approval.ClearField(part)
    for field in messages.CALL_HEADER:
        call.ClearField(field)  # type: ignore[arg-type]  # a field of the message
    return CallChange(**values, spec=call.SerializeToString())  # type: ignore[arg-type]  # checked by name


def _without_preview(entry: ledger_pb2.Command) -> ledger_pb2.Command:
    if not entry.decision.edited_preview:
        return entry
    copy = ledger_pb2.Command()
    copy.CopyFrom(entry)
    copy.decision.ClearField("edited_preview")
    return copy


def _command(entry: ledger_pb2.Command, right: DecisionRight, *, event_is_awaited: bool) -> Command:
    match entry.WhichOneof("kind"):
        case "tool_result":
            result = entry.tool_result
            if not result.HasField("result"):
                raise InvalidField("a tool result requires a result", field="command.tool_result.result")
            return ToolResult(
                call_id=CallId(check_id(result.call_id, "command.tool_result.call_id")),
                client_id=ClientId(check_id(result.client_id, "command.tool_result.client_id", optional=True)),
                offer_epoch=result.offer_epoch,
            )
        case "decision":
            return decide(entry.decision, right)
        case "steer":
            if not entry.steer.text:
                raise InvalidField("text must not be empty", field="command.steer.text")
            return Steer(text_bytes=len(entry.steer.text.encode()))
        case "cancel":
            cause = enum_member(StopCause, entry.cancel.cause, "command.cancel.cause")
            return Cancel(cause=cause, reason=entry.cancel.reason)
        case "redrive":
            return Redrive(reason=entry.redrive.reason)
        case "resolve":
            return _resolve(entry.resolve)
        case "progress":
            return _progress(entry.progress)
        case "top_up":
            if not entry.top_up.tokens:
                raise InvalidField("a top-up requires tokens", field="command.top_up.tokens")
            return TopUp(tokens=tokens(entry.top_up.tokens, "command.top_up.tokens"))
        case "pause":
            return Pause()
        case "event":
            return Event(name=f"{EVENT}:{entry.event.name}", is_awaited=event_is_awaited)
        case "raise_goal":
            return goal_limits.raised(entry.raise_goal)
        case _:
            raise InvalidField("a command must have a kind", field="command.kind")


def _resolve(resolve: ledger_pb2.ResolveCommand) -> Resolve:
    if resolve.resolution not in {1, 2, 3}:
        raise InvalidField("resolution has an unknown value", field="command.resolve.resolution")
    happened = resolve.resolution == ledger_pb2.CALL_RESOLUTION_HAPPENED
    if happened != bool(resolve.content_json):
        raise InvalidField(
            "content_json must be set if the call happened, and empty otherwise", field="command.resolve.content_json"
        )
    return Resolve(call_id=CallId(check_id(resolve.call_id, "command.resolve.call_id")))


def _progress(progress: ledger_pb2.ProgressCommand) -> Progress:
    fraction = progress.fraction if progress.HasField("fraction") else None
    if fraction is not None and not 0 <= fraction <= 1:
        raise InvalidField(f"fraction must be between 0 and 1, got {fraction:g}", field="command.progress.fraction")
    return Progress(
        call_id=CallId(check_id(progress.call_id, "command.progress.call_id")),
        client_id=ClientId(check_id(progress.client_id, "command.progress.client_id")),
        offer_epoch=progress.offer_epoch,
        fraction=fraction,
        message=progress.message,
    )
