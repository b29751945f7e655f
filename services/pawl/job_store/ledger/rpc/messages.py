"""Converts ledger rows to API messages."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypeVar

from google.protobuf.message import Message as ProtoMessage
from google.protobuf.timestamp_pb2 import Timestamp
from msgspec.structs import astuple

from pawl.chassis.ids import CallId
from pawl.chassis.rpc.translate import Exceptions, Translator
from pawl.errors import InvalidField
from pawl.event.v1 import call_pb2, conversation_pb2, gap_pb2, goal_pb2, message_pb2, run_pb2, waiting_pb2, workflow_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store.ledger.reading import Claimed, LogGap
from pawl.job_store.ledger.rpc.approvals import put_approval, put_grant
from pawl.job_store.ledger.rules import inbox, stop
from pawl.job_store.ledger.rules.forks import Head
from pawl.job_store.ledger.rules.prefix import HistoryPrefix
from pawl.job_store.ledger.rules.rows import CallRow, CommandRow, ConversationRow, LastCommit, MessageRow, Offer, RunRow
from pawl.job_store.ledger.rules.waiting import Situation, Waiting
from pawl.values import TOKENS_MAX, Usage

M = TypeVar("M", bound=ProtoMessage)

# Larger results are left out of events.
EVENT_RESULT_BYTES_MAX: Final = 16 * 1024
_LOST: Final = (
    b'{"error":"The workers of this run died, and the run ended. Check what this call did before you repeat it."}'
)
# The result of a call that was open when its run ended without a worker.
LOST: Final = call_pb2.CallResult(content_json=_LOST, is_error=True, error_reason="WORKERS_DIED").SerializeToString()

_FOR_APPROVERS: Final = frozenset(
    {
        *("store_id", "user_id", "run_id", "call_id", "round", "index", "state", "create_time", "deadline_time"),
        *("tool_name", "tool_version", "context", "category", "effect_class", "arguments_json", "timeout_seconds"),
        *("approval", "asked_user_id"),
    }
)
_CALL_FOR_READERS: Final = frozenset(
    {
        *("store_id", "user_id", "conversation_id", "run_id", "call_id", "round", "index", "state", "tool_name"),
        *("tool_version", "context", "category", "effect_class", "arguments_json", "result", "result_omitted_bytes"),
        *("create_time", "start_time", "end_time", "imported"),
    }
)
_MESSAGE_FOR_READERS: Final = frozenset(
    {
        *("message_id", "conversation_id", "run_id", "number", "role", "text", "refusal", "interrupted", "call_ids"),
        *("summarised_to_number", "create_time", "imported", "user_id"),
    }
)
# A summary can reveal calls and documents, and a notice is for the user who started the job. Other users see only that
# they exist.
_HIDDEN_FROM_READERS: Final = frozenset({message_pb2.ROLE_SUMMARY, message_pb2.ROLE_NOTICE})
_CONVERSATION_FOR_READERS: Final = frozenset(
    {
        *("store_id", "user_id", "conversation_id", "title", "has_own_title", "archived", "create_time", "update_time"),
        *("last_message_number", "sharing", "shows_arguments"),
    }
)
_NOTICE_FIELDS: Final = frozenset(
    {
        *("run_id", "job", "state", "waits", "stop_cause", "output_text", "failure", "round", "end_time"),
        *("missed_iterations", "job_progress", "traceparent", "trace_link"),
    }
)
# Longer workflow inputs are left out of events and lists.
_LISTED_INPUT_BYTES_MAX: Final = 1024
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND: Final = timedelta(microseconds=1)
_WIRE: Final = Translator(lambda unknown: ValueError(f"unknown value {unknown.value}"))
_RUN: Final = _WIRE.struct(
    RunRow,
    run_pb2.Run,
    Exceptions(
        write={
            "waits": lambda row: row.waits,
            "crash_count": lambda row: row.crashes,
            "update_time": lambda row: timestamp(row.update_time),
            "reports_to_conversation_id": lambda row: row.reports_to,
        },
        # Opaque, or internal to the ledger.
        of_struct=(
            *(
                "waits",
                "crashes",
                "options",
                "tools",
                "usage",
                "failure",
                "unstopped",
                "output",
                "worker_id",
                "claim_at",
            ),
            *(
                "command_count",
                "token_ceiling",
                "topped_up_tokens",
                "shared_tokens_used",
                "last_commit",
                "queued_message",
                "steers_waiting",
            ),
            *("steer_bytes_waiting", "idle_receipts", "people", "steered_by", "update_time", "state_time"),
            *("imported", "own_tools", "agent_name", "reports_to", "in_background", "silent"),
            *("trimmed_log_seq", "mark_round", "mark_seq", "grant", "program", "root_conversation_id", "agents_above"),
        ),
        of_message=(
            *("options", "tools", "usage", "failure", "output_text", "unstopped_call_ids", "user_roles", "undo"),
            *("tokens_needed", "delegated_usage"),
            *("output_json", "agent", "depth", "above", "pending_calls", "active_calls", "queue_position", "waiting"),
            *("update_time", "call_counts", "child_run_ids", "own_tools", "job", "grant"),
            *("missed_iterations", "job_progress", "workflow", "goal", "waits_for_jobs"),
            *("traceparent", "trace_link", "lowered_limits"),
        ),
    ),
)
_USAGE: Final = _WIRE.struct(Usage, run_pb2.Usage)
# Used as part of a call.
_WIRE.struct(
    Offer,
    call_pb2.OfferLease,
    Exceptions(write={"offer_epoch": lambda offer: offer.epoch}, of_struct=("session_id", "epoch", "lease_seconds")),
)
# The opaque fields of a call.
_CALL_SPEC: Final = (
    *("provider_call_id", "undoes_call_id", "proposed_tool_name", "proposed_arguments", "context", "category"),
    *("effect_class", "parallel", "resource_keys", "timeout_seconds", "question", "offer_fallback", "rule_id"),
    *("imported", "agent_name"),
)
_CALL: Final = _WIRE.struct(
    CallRow,
    call_pb2.Call,
    Exceptions(
        of_struct=(
            *("digest", "decision", "reserved_by", "result", "spec", "approvals_required", "approvals"),
            *("escalated", "has_default", "progress_time", "earlier_approvals", "state_time", "series"),
        ),
        of_message=(*_CALL_SPEC, "approval", "result", "result_omitted_bytes"),
    ),
)
# The fields of a call that the ledger checks or sets, and therefore does not store in the opaque `spec`.
CALL_HEADER: Final = frozenset(call_pb2.Call.DESCRIPTOR.fields_by_name) - {*_CALL_SPEC, "approval"}
CONVERSATION: Final = _WIRE.struct(
    ConversationRow,
    conversation_pb2.Conversation,
    Exceptions(
        write={
            "title": lambda row: row.shown_title,
            "has_own_title": lambda row: bool(row.title),
            "queued_run_count": lambda row: len(row.queue),
            "last_message_number": lambda row: row.last_number,
            "active_run_id": lambda row: row.active_run_id or "",
            "sharing": lambda row: row.sharing.value,
            "forked_conversation_id": lambda row: row.fork_of,
            "forked_number": lambda row: row.past_number,
        },
        of_struct=(
            "title",
            "made_title",
            "model_title",
            "title_at",
            "title_run_id",
            "queue",
            "interrupting",
            "last_number",
            "key_hash",
            "active_run_id",
            "fork_of",
            "past_number",
            "erase_user_id",
            "parent_conversation_id",
            "background",
        ),
    ),
)
_WAITING: Final = _WIRE.struct(Waiting, waiting_pb2.Waiting)
CLAIMED: Final = _WIRE.struct(
    Claimed,
    ledger_pb2.ClaimedRun,
    Exceptions(of_struct=("is_quiet", "last_number", "waited_seconds"), of_message=("loaded",)),
)
PREFIX: Final = _WIRE.struct(HistoryPrefix, ledger_pb2.HistoryPrefix)
_COMMIT: Final = Exceptions(of_struct=("commit_id", "epoch"), of_message=("output_pause_seconds",))
COMMITTED: Final = _WIRE.struct(LastCommit, ledger_pb2.CommitRunResponse, _COMMIT)


def timestamp(time: datetime) -> Timestamp:
    seconds, microseconds = divmod((time - _EPOCH) // _MICROSECOND, 1_000_000)
    return Timestamp(seconds=seconds, nanos=microseconds * 1000)


def moment(value: Timestamp, field: str) -> datetime:
    """Return the time in a field. Raise InvalidField if it is not in the years 1 to 9999."""
    try:
        return value.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise InvalidField(f"{field} must be in the years 1 to 9999", field=field) from None


def optional_moment(message: Any, name: str, above: str = "") -> datetime | None:
    """Return the time in a field, or None if it is absent. `above` is the message's path, for error messages."""
    return moment(getattr(message, name), above + name) if message.HasField(name) else None


def run(row: RunRow, *, whole: bool = False) -> run_pb2.Run:
    """Return a run as users see it, without its pending calls.

    A workflow run that reports to a conversation also looks like a job with a single call. Unless `whole` is set, large
    workflow inputs are omitted.
    """
    message = run_for_service(row)
    if not whole and message.HasField("goal"):
        _leave_out_texts(message.goal)
    if message.HasField("workflow"):
        workflow = message.workflow
        workflow.ClearField("token_key")
        if not whole:
            _leave_out_inputs(workflow)
        if row.reports_to:
            message.job.tool_name, message.job.arguments_json = workflow.name, workflow.input_json
            message.job.iterations_max = 1
            message.job.begin_time.CopyFrom(message.create_time)
    return message


def _leave_out_texts(goal: goal_pb2.Goal) -> None:
    """Remove texts that only the worker and GetRun need. They are too long to be in every event about the run."""
    goal.aim = goal.aim[:_LISTED_INPUT_BYTES_MAX]
    goal.attempts_by.ClearField("instructions")
    if len(goal.criterion.arguments_json) > _LISTED_INPUT_BYTES_MAX:
        goal.criterion.ClearField("arguments_json")
    if goal.criterion.HasField("judge"):
        goal.criterion.judge.rubric = goal.criterion.judge.rubric[:_LISTED_INPUT_BYTES_MAX]


def run_for_service(row: RunRow) -> run_pb2.Run:
    """Return a run, without its pending calls."""
    message = _RUN.write(row)
    # In protobuf, concatenated encodings merge into one message.
    message.MergeFromString(row.options + row.tools + row.usage + row.failure + row.unstopped + row.output)
    if (own := row.own_tools) is not None:
        message.own_tools.CopyFrom(run_pb2.OwnTools(names=own.names, client_id=own.client_id))
    put_grant(message, row)
    if row.is_turn:
        # A turn inherits the options of the run whose notices started it.
        for field in ("job", "workflow", "goal"):
            message.ClearField(field)
        message.trace_link = message.traceparent or message.trace_link
        message.ClearField("traceparent")
    return message


def _leave_out_inputs(workflow: workflow_pb2.PinnedWorkflow) -> None:
    workflow.ClearField("start_state")
    if len(workflow.input_json) > _LISTED_INPUT_BYTES_MAX:
        workflow.ClearField("input_json")
    if workflow.HasField("chunk"):
        workflow.chunk.ClearField("items_json")
        workflow.chunk.ClearField("scope_state")


def run_in(situation: Situation, waiting: Waiting | None, write: Callable[[RunRow], run_pb2.Run] = run) -> run_pb2.Run:
    message = write(situation.run)
    message.queue_position = situation.queue_position
    message.child_run_ids.extend(situation.child_run_ids)
    for state, count in situation.call_counts:
        message.call_counts.add(state=state.value, count=count)
    if waiting is not None:
        message.waiting.CopyFrom(_WAITING.write(waiting))
        if message.tokens_needed and message.waiting.reason == waiting_pb2.WAIT_REASON_TOKENS:
            message.waiting.remedy = f"Its user must add at least {message.tokens_needed} tokens with a top-up."
        # A user whose roles do not allow the decision cannot unblock the run.
        if message.waiting.roles and message.user_roles and not set(message.waiting.roles) & set(message.user_roles):
            message.waiting.ClearField("user_ids")
    return message


def call(row: CallRow, *, result_bytes_max: int | None = None, omitted_bytes: int = 0) -> call_pb2.Call:
    """Return a call.

    A result larger than `result_bytes_max` is replaced by its size.

    If the result was not read with the row, `omitted_bytes` is its size.
    """
    message = _CALL.write(row)
    # In protobuf, concatenated encodings merge into one message.
    message.MergeFromString(row.spec)
    message.result_omitted_bytes = omitted_bytes
    put_approval(message, row)
    _put_result(message, row.result, result_bytes_max)
    return message


def run_for_approver(row: RunRow) -> run_pb2.Run:
    """Return the fields of another user's run that an approver may see. All other fields are private."""
    return run_pb2.Run(
        store_id=row.store_id,
        user_id=row.user_id,
        run_id=row.run_id,
        state=row.state.value,  # type: ignore[arg-type]  # the same numbers
    )


def run_short_of_tokens(row: RunRow, user_id: str) -> run_pb2.Run:
    """Return a run that is waiting for tokens. Other users see only its ids, state, waits, usage and budget."""
    whole = run(row)
    if row.user_id == user_id:
        return whole
    shown = run_for_approver(row)
    shown.waits.extend(whole.waits)
    shown.usage.CopyFrom(whole.usage)
    shown.token_budget = whole.token_budget
    return shown


def call_for(row: CallRow, user_id: str) -> call_pb2.Call:
    """Return a pending call, or only the public fields of another user's call."""
    if row.user_id == user_id:
        return call(row)
    return _only(call(row), _FOR_APPROVERS | {"question"} if row.asked_user_id == user_id else _FOR_APPROVERS)


def call_shown_to(row: CallRow, user_id: str) -> call_pb2.Call:
    """Return a call. For another user's call, return only fields that readers of a shared conversation may see.

    Texts that users wrote are omitted: answers to questions, results given for a call, and reasons for rejections.
    """
    whole = call(row)
    if row.user_id == user_id:
        return whole
    is_answer = whole.approval.decision.kind == call_pb2.DECISION_KIND_ANSWER
    is_of_people = is_answer or whole.context == call_pb2.EXECUTION_CONTEXT_HUMAN
    shown = _only(whole, _CALL_FOR_READERS)
    if is_of_people or whole.state == call_pb2.CALL_STATE_REJECTED:
        shown.ClearField("result")
    return shown


def message_for(row: MessageRow, user_id: str, reader_id: str) -> message_pb2.Message:
    """Return a message of `user_id`'s conversation.

    Readers other than the author see only its public fields. They do not see the text of summaries and notices.
    """
    whole = message(row, user_id)
    return whole if reader_id == whole.user_id else _for_others(whole)


def conversation_for(row: ConversationRow, user_id: str) -> conversation_pb2.Conversation:
    """Return a conversation as a user sees it. Readers of a shared conversation get no information about its runs."""
    whole = CONVERSATION.write(row)
    return whole if row.user_id == user_id else _only(whole, _CONVERSATION_FOR_READERS)


def _only(shown: M, names: frozenset[str]) -> M:
    for name in shown.DESCRIPTOR.fields_by_name:
        if name not in names:
            shown.ClearField(name)
    return shown


def _put_result(message: call_pb2.Call, result: bytes | None, result_bytes_max: int | None) -> None:
    if result is None:
        return
    message.result.MergeFromString(result)
    message.result.SetInParent()
    size_bytes = len(message.result.content_json) + len(message.result.inverse.arguments_json)
    if result_bytes_max is not None and size_bytes > result_bytes_max:
        message.ClearField("result")
        message.result_omitted_bytes = size_bytes


def message(row: MessageRow, user_id: str) -> message_pb2.Message:
    entry = _message(row, user_id)
    for part in entry.parts:
        leave_out(part)
    return entry


def leave_out(part: message_pb2.Part) -> None:
    """Remove the content of a message part. Its hash still identifies it."""
    if part.HasField("image"):
        part.image.ClearField("data")
    if part.HasField("file"):
        part.file.ClearField("text")


def message_for_worker(row: MessageRow, user_id: str, run_user_id: str) -> message_pb2.Message:
    """Return a message of `user_id`'s conversation. For runs of other users, return only its public fields."""
    entry = _message(row, user_id)
    if entry.user_id != run_user_id:
        _for_others(entry).ClearField("call_ids")
    return entry


def _for_others(entry: message_pb2.Message) -> message_pb2.Message:
    shown = _only(entry, _MESSAGE_FOR_READERS)
    if shown.role in _HIDDEN_FROM_READERS:
        shown.ClearField("text")
    return shown


def _message(row: MessageRow, user_id: str) -> message_pb2.Message:
    entry = message_pb2.Message.FromString(row.body)
    entry.message_id = row.message_id
    entry.conversation_id = row.conversation_id
    entry.run_id = row.run_id
    entry.number = row.number
    entry.summarised_to_number = row.summarised_to
    entry.create_time.CopyFrom(timestamp(row.create_time))
    entry.user_id = row.user_id or user_id
    return entry


def text_of(body: bytes) -> str:
    """Return the text that searches match. It is empty for summaries and notices."""
    entry = message_pb2.Message.FromString(body)
    return "" if entry.role in _HIDDEN_FROM_READERS else entry.text


def head_of(row: MessageRow) -> Head:
    """Return the part of a message that determines where its conversation can be forked."""
    entry = message_pb2.Message.FromString(row.body)
    return Head(
        number=row.number,
        is_answer=entry.role == message_pb2.ROLE_ASSISTANT,
        is_summary=entry.role == message_pb2.ROLE_SUMMARY,
        call_ids=tuple(map(CallId, entry.call_ids)),
    )


def gap(gap: LogGap) -> gap_pb2.Gap:
    return gap_pb2.Gap(
        run_id=gap.run.run_id,
        from_seq=gap.from_seq,
        to_seq=gap.to_seq,
        snapshot=gap_pb2.RunSnapshot(
            run=run(gap.run),
            messages=[message(row, gap.run.user_id) for row in gap.messages],
            calls=[
                call(row, result_bytes_max=EVENT_RESULT_BYTES_MAX, omitted_bytes=gap.omitted_bytes[row.call_id])
                for row in gap.calls
            ],
            omitted_message_count=gap.omitted_messages,
            omitted_call_count=gap.omitted_calls,
        ),
    )


def command(row: CommandRow) -> ledger_pb2.Command:
    is_ending = row.name == inbox.AGENT_ENDED
    entry = _agent_ended(row) if is_ending else ledger_pb2.Command.FromString(row.payload)
    entry.command_id = row.command_id
    entry.user_id = row.user_id
    entry.credential_id = row.credential_id
    entry.delegate_user_id = row.delegate_user_id
    entry.time.CopyFrom(timestamp(row.time))
    return entry


def _agent_ended(row: CommandRow) -> ledger_pb2.Command:
    ending = stop.read_ending(row.payload)
    entry = ledger_pb2.Command()
    entry.agent_ended.call_id = row.call_id
    entry.agent_ended.job_ids.extend(ending.job_ids)
    # In protobuf, concatenated encodings merge into one message.
    entry.agent_ended.run.MergeFromString(ending.usage + ending.failure + ending.output)
    entry.agent_ended.run.run_id = ending.run_id
    entry.agent_ended.run.state = ending.state.value  # type: ignore[assignment]  # the same numbers
    return entry


def notice(reported: tuple[RunRow, int]) -> ledger_pb2.Notice:
    row, occasion = reported
    whole = run(row)
    workflow = whole.workflow.name
    shown = _only(whole, _NOTICE_FIELDS)
    if workflow:
        shown.workflow.name = workflow
    return ledger_pb2.Notice(run=shown, occasion=occasion)


def checked_usage(message: run_pb2.Usage) -> Usage:
    """Return token usage. Raise InvalidField if it is too large to count."""
    usage = _USAGE.read(message)
    if max(astuple(usage)) > TOKENS_MAX:
        raise InvalidField(f"counts in usage must be at most {TOKENS_MAX}", field="usage")
    return usage


def own_usage(data: bytes) -> Usage:
    """Return the usage of a run's own model calls."""
    run = run_pb2.Run.FromString(data)
    return _USAGE.read(run.usage) - _USAGE.read(run.delegated_usage)
