"""Formats runs, calls and values as short, plain text."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent.v1 import jobs_pb2
from pawl.chassis.visible import HIDDEN, HOST, undecided, visible
from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2, waiting_pb2

PREVIEW_CHARACTERS_MAX: Final = 100
clean: Final = visible
_MINUTE: Final = 60
_HOUR: Final = 3600
_HOURS_FROM: Final = 2 * _HOUR

_WAITS: Final = {
    run_pb2.WAIT_KIND_APPROVAL: "an approval",
    run_pb2.WAIT_KIND_ANSWER: "an answer",
    run_pb2.WAIT_KIND_TOOL_RESULT: "a front end",
    run_pb2.WAIT_KIND_BUDGET: "more tokens",
    run_pb2.WAIT_KIND_AGENT: "another agent",
    run_pb2.WAIT_KIND_AGENT_QUOTA: "the next day, because its agent has no tokens left today",
    run_pb2.WAIT_KIND_STORE_DAILY_TOKENS: "the next day, because its store has no tokens left today",
    run_pb2.WAIT_KIND_STORE_MONTHLY_TOKENS: "the next month, because its store has no tokens left this month",
    run_pb2.WAIT_KIND_USER_DAILY_TOKENS: "the next day, because its user has no tokens left today",
    run_pb2.WAIT_KIND_USER_MONTHLY_TOKENS: "the next month, because its user has no tokens left this month",
    run_pb2.WAIT_KIND_RATE: "a model call, because its store or model server is at its limit per minute",
    run_pb2.WAIT_KIND_PROVIDER: "the model server, which does not respond",
    run_pb2.WAIT_KIND_TIME: "the time of its next step",
    run_pb2.WAIT_KIND_EVENT: "an event",
    run_pb2.WAIT_KIND_JOB: "its background jobs",
    run_pb2.WAIT_KIND_PERSON: "another person",
    run_pb2.WAIT_KIND_PAUSED: "its user to resume it",
    run_pb2.WAIT_KIND_COMPLETION: "an external result for a call",
}
# Reasons why queued runs are waiting.
QUEUED_FOR: Final = {
    waiting_pb2.WAIT_REASON_TURN: "its turn",
    waiting_pb2.WAIT_REASON_PLACE: "a free slot",
    waiting_pb2.WAIT_REASON_WORKER: "a worker",
}

_ACTS: Final = {
    event_pb2.OPERATOR_ACT_RESOLVED: "reported the outcome of a call",
    event_pb2.OPERATOR_ACT_REDRIVEN: "resumed the run",
    event_pb2.OPERATOR_ACT_ENDED: "ended the run",
}
# Who stopped a run, if not its user.
STOPPED_BY: Final = {
    run_pb2.STOP_CAUSE_SUPERSEDED: " by a newer message",
    run_pb2.STOP_CAUSE_OPERATOR: " by an operator",
    run_pb2.STOP_CAUSE_PARENT: " by its parent run",
    run_pb2.STOP_CAUSE_MODEL: " by the model",
    run_pb2.STOP_CAUSE_FEATURE_OFF: ", because runs were switched off for the store",
}


def quoted(label: str, text: str) -> list[str]:
    """Return untrusted text after a label. Additional lines are marked, so that they do not look like Pawl's output."""
    first, *rest = clean(text).splitlines() or [""]
    return [f"{label}{first}", *(f"  | {line}" for line in rest)]


def sentence(text: str) -> str:
    """Add a full stop to a string unless it ends with ? or !."""
    text = text.rstrip(". ")
    return text if text.endswith(("?", "!")) else f"{text}."


def one_line(text: str, characters_max: int = PREVIEW_CHARACTERS_MAX) -> str:
    line = " ".join(clean(text).split())
    return line if len(line) <= characters_max else f"{line[: characters_max - 1]}…"


def json_line(data: bytes, characters_max: int = PREVIEW_CHARACTERS_MAX) -> str:
    """Return JSON on one line, truncated. A string is returned without its quotes."""
    text = data.decode(errors="replace")
    try:
        value = json.loads(text)
    except ValueError:
        return one_line(text, characters_max)
    return one_line(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False), characters_max)


def json_block(data: bytes) -> str:
    """Return indented JSON.

    Hidden characters and misleading host names are escaped, which does not change the value.
    """
    text = data.decode(errors="replace")
    try:
        block = json.dumps(json.loads(text), indent=2, ensure_ascii=False)
    except ValueError:
        return clean(text)
    shown = HIDDEN.sub(lambda found: found[1] or _escaped(found[0]), block)
    return HOST.sub(lambda found: "".join(each if each.isascii() else _escaped(each) for each in found[0]), shown)


def _escaped(character: str) -> str:
    units = character.encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))


def short_name(kind: EnumDescriptor, value: int) -> str:
    """Return an enum value's short name: `at_most_once` for EFFECT_CLASS_AT_MOST_ONCE."""
    names = kind.values_by_number
    return names[value].name.removeprefix(names[0].name.removesuffix("UNSPECIFIED")).lower()


def job_name(job: jobs_pb2.BackgroundJob) -> str:
    return f"{job.job_id} ({clean(job.definition.tool_name)})"


def state_name(state: run_pb2.RunState.ValueType) -> str:
    """Return a state in words: `needs attention` for RUN_STATE_NEEDS_ATTENTION."""
    return short_name(run_pb2.RunState.DESCRIPTOR, state).replace("_", " ")


def stopped_text(job: jobs_pb2.BackgroundJob) -> str:
    """Return the outcome of a stop so far: being stopped, stopped, or not stopped and why."""
    if job.not_stopped:
        return f"{job_name(job)} could not be stopped: {one_line(job.not_stopped, 300)}"
    if job.state == run_pb2.RUN_STATE_CANCELLING:
        return f"{job_name(job)} is being stopped."
    if job.state == run_pb2.RUN_STATE_CANCELLED:
        return f"{job_name(job)} is stopped."
    return f"{job_name(job)} had already ended ({state_name(job.state)})."


def wait_names(waits: Sequence[run_pb2.WaitKind.ValueType]) -> str:
    """Return the reasons for waiting as text, such as `an approval and an answer`."""
    return " and ".join(_WAITS[wait] for wait in waits) or "input"


def attention_text(attention: run_pb2.Attention, crash_count: int) -> str:
    if attention.reason == run_pb2.ATTENTION_REASON_UNKNOWN_OUTCOME:
        return "it is unknown whether a call took effect"
    died = "1 worker died" if crash_count == 1 else f"{crash_count} workers died"
    return f"quarantined: {died} while running it, without making any progress"


def act_text(acted: event_pb2.OperatorActed) -> str:
    """Describe an operator's action, as in `operator bob resumed the run: tool fixed`."""
    call = f" ({acted.call_id})" if acted.call_id else ""
    reason = f": {one_line(acted.reason, 300)}" if acted.reason else ""
    return f"operator {clean(acted.user_id)} {_ACTS[acted.act]}{call}{reason}"


def seconds_text(seconds: float) -> str:
    """Return a duration as text, such as `12 ms`, `3.4 s`, `2 min` or `24 h`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    return f"{seconds / _MINUTE:.0f} min" if seconds < _HOURS_FROM else f"{seconds / _HOUR:.0f} h"


def count_text(count: int, noun: str) -> str:
    """Return a count and its noun, such as `1 round` or `2 rounds`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def budget_text(run: run_pb2.Run) -> str:
    used = run.usage.input_tokens + run.usage.output_tokens
    return f"has used {used} of {run.token_budget} tokens"


def time_text(time: Timestamp) -> str:
    """Return a time in the local time zone, such as `2026-11-24 14:00:00+01:00`. Options accept this format."""
    return time.ToDatetime(tzinfo=UTC).astimezone().isoformat(" ", "seconds").replace("+00:00", "Z")


def labels_text(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{key}={clean(value)}" for key, value in sorted(labels.items()))


def text_at(message: Any, path: str) -> str:
    """Return a field of a message as one line of text, or an empty string if it is absent.

    `path` leads to the field.
    """
    *parents, name = path.split(".")
    inside = functools.reduce(getattr, parents, message)
    field = inside.DESCRIPTOR.fields_by_name[name]
    return "" if field.has_presence and not inside.HasField(name) else _text(field, getattr(inside, name))


def described(message: Any, indent: str = "", *, only: Collection[str] = ()) -> list[str]:
    """Return a line for each field that is set. `only` restricts the fields.

    The fields of a definition are not indented further.
    """
    lines: list[str] = []
    for field, value in message.ListFields():
        if only and field.name not in only:
            continue
        label = f"{indent}{field.name.replace('_', ' ')}:"
        is_message = field.message_type is not None and not field.message_type.GetOptions().map_entry
        if field.name == "definition":
            lines += described(value, indent)
        elif is_message and field.is_repeated:
            lines += [label, *(f"{indent}  {summary(each)}" for each in value)]
        elif is_message and not isinstance(value, Timestamp):
            lines += [label, *described(value, f"{indent}  ")]
        elif field.type == field.TYPE_BYTES:
            lines += [label, *json_block(value).splitlines()]
        else:
            text = value if isinstance(value, str) else "yes" if value is True else _text(field, value)
            lines += quoted(f"{label} ", text)
    return lines


def summary(message: Any) -> str:
    if isinstance(message, Timestamp):
        return time_text(message)
    return "  ".join(filter(None, (_text(field, value) for field, value in message.ListFields())))


def _text(field: FieldDescriptor, value: Any) -> str:
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return labels_text(value)
    if field.is_repeated:
        return ", ".join(_one(field, each) for each in value)
    return _one(field, value)


def _one(field: FieldDescriptor, value: Any) -> str:
    if isinstance(value, Timestamp):
        return time_text(value)
    if isinstance(value, Message):
        return summary(value)
    if field.enum_type is not None:
        return short_name(field.enum_type, value).replace("_", " ") if value else ""
    if isinstance(value, bool):
        return field.name.replace("_", " ") if value else ""
    if isinstance(value, float):
        return f"{value:g}"
    return json_line(value) if isinstance(value, bytes) else one_line(str(value), 200)


def progress_text(progress: event_pb2.ToolProgress | run_pb2.JobProgress) -> str:
    """Return a tool's progress, as in `40% two of five pages`."""
    percent = f"{math.floor(progress.fraction * 100)}% " if progress.HasField("fraction") else ""
    return f"{percent}{one_line(progress.message)}".rstrip()


def remaining_text(deadline: Timestamp, now: datetime) -> str:
    seconds = (deadline.ToDatetime(tzinfo=UTC) - now).total_seconds()
    return f"expires in {seconds_text(seconds)}" if seconds > 0 else "expired"


def call_lines(call: call_pb2.Call, now: datetime) -> list[str]:
    lines = []
    if call.HasField("question"):
        lines += quoted("", call.question.question)
        if call.question.why:
            lines += quoted("why: ", call.question.why)
        for number, option in enumerate(call.question.options, 1):
            lines += quoted(f"  {number}. ", option)
        if call.question.default_answer:
            lines += quoted("default answer: ", call.question.default_answer)
    else:
        if call.approval.preview:
            lines += [*quoted("", call.approval.preview), ""]
        # The preview of a workflow's question contains the whole question.
        if call.context != call_pb2.EXECUTION_CONTEXT_HUMAN:
            lines += json_block(call.arguments_json).splitlines()
        if call.approval.cause:
            lines += quoted("needs approval: ", call.approval.cause)
        lines += _approval_lines(call.approval)
    if call.undoes_call_id:
        lines.append(f"undoes: call {call.undoes_call_id}")
    agent = f"  agent {clean(call.agent_name)}" if call.agent_name else ""
    user = f"  user {clean(call.user_id)}" if call.user_id else ""
    lines.append(f"run {call.run_id}  call {call.call_id}{user}{agent}")
    if call.HasField("deadline_time"):
        lines.append(remaining_text(call.deadline_time, now))
    if call.state == call_pb2.CALL_STATE_AWAITING_APPROVAL:
        lines.append(undecided(is_extended=call.approval.escalated))
    return lines


def _approval_lines(approval: call_pb2.ApprovalRequest) -> list[str]:
    lines = []
    if approval.approvals_required > 1:
        people = ", ".join(clean(decision.user_id) for decision in approval.approvals) or "no one yet"
        edited = any(decision.kind == call_pb2.DECISION_KIND_EDIT for decision in approval.approvals)
        note = ", with edited arguments" if edited else ""
        lines.append(f"approved by {len(approval.approvals)} of {approval.approvals_required}: {people}{note}")
    if approval.HasField("series"):
        lines.append(f"one of a series: {series_text(approval.series)} (to approve all of it: series)")
    if approval.escalated:
        lines.append("no decision in time: the deadline was extended")
    return lines


def series_text(series: call_pb2.Series) -> str:
    """Describe a series, as in `every 60 s, at most 20 times, until 2026-11-24 14:00:00Z`."""
    until = f", until {time_text(series.end_time)}" if series.HasField("end_time") else ""
    return f"every {series.interval_seconds:g} s, at most {count_text(series.iterations_max, 'time')}{until}"


def call_title(call: call_pb2.Call) -> str:
    if call.HasField("question"):
        return "Question"
    danger = " (destructive)" if call.category == call_pb2.TOOL_CATEGORY_DESTRUCTIVE else ""
    doubt = ": did it happen?" if call.state == call_pb2.CALL_STATE_RUNNING else ""
    return f"{clean(call.tool_name)}{danger}{doubt}"


def parts_of(message: message_pb2.Message) -> list[str]:
    lines = []
    for part in message.parts:
        if part.HasField("image"):
            lines.append(f"[{clean(part.image.media_type)}, {part.image.size_bytes} bytes]")
        elif part.HasField("file"):
            lines.append(f"[{one_line(part.file.document_name, 200)}, {part.file.size_bytes} bytes]")
    return lines
