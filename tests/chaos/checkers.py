"""Checkers of a record. Each is named after a promise, and yields a description of each violation."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from pawl.event.v1 import call_pb2, event_pb2, message_pb2, run_pb2
from pawl.job_store.ledger.rules.jobs import GENERATIONS_MAX, PROGRESS_TURNS_MAX
from tests.chaos.faults import WIPE
from tests.chaos.front_ends import digest
from tests.chaos.history import MESSAGES, STARTS, Kind, Operation, Outcome
from tests.chaos.prompts import GATED, READS
from tests.chaos.world import Record
from tests.simulation import flows, goals, jobs
from tests.simulation.checkers import ENDED, LEDGER_CHECKERS
from tests.simulation.record import broken, call_changes, call_state, run_state, seconds

Checker = Callable[[Record], Iterator[str]]

_DECISIONS = frozenset({Kind.APPROVE, Kind.EDIT, Kind.REJECT, Kind.ANSWER})
_ONCE = (call_pb2.EFFECT_CLASS_AT_MOST_ONCE, call_pb2.EFFECT_CLASS_RECONCILABLE)
_WIPED_SECONDS = 15.0


def accepted_messages_are_kept(record: Record) -> Iterator[str]:
    """I1: an acknowledged run exists. Its message exists too, unless the run was cancelled before its first round."""
    texts = _user_texts(record)
    for operation in (each for each in record.history.operations if each.kind in STARTS):
        for answer in record.history.taken(operation):
            run = record.runs.get(answer.run_id)
            is_void = run is not None and (run_state(run.state), run.round) == ("CANCELLED", 0)
            is_missing = operation.kind in MESSAGES and not texts[operation.content] and not is_void
            what = f"{operation.request_id} was acknowledged, but its"
            yield from broken(
                (run is None, f"{what} run {answer.run_id} is not there"),
                (run is not None and is_missing, f"{what} message is missing"),
            )


def requests_take_effect_once(record: Record) -> Iterator[str]:
    """I2: a repeated request creates one run and one message, and a refused request creates none."""
    texts = _user_texts(record)
    owner_of: dict[str, str] = {}
    for operation in (each for each in record.history.operations if each.kind in STARTS):
        run_ids, name = {answer.run_id for answer in record.history.taken(operation)}, operation.request_id
        count = texts[operation.content]
        refused = any(answer.outcome is Outcome.REFUSED for answer in record.history.answers[operation.number])
        yield from broken(
            (len(run_ids) > 1, f"{name} got several runs: {sorted(run_ids)}"),
            (count > 1, f"the message of {name} stands {count} times"),
            (refused and (run_ids or count), f"{name} was refused, but had an effect"),
        )
        yield from (
            f"{name} and {owner_of[run_id]} got the same run"
            for run_id in run_ids
            if operation.kind is not Kind.STEER and owner_of.setdefault(run_id, name) != name
        )


def accepted_commands_take_effect(record: Record) -> Iterator[str]:
    """I1: each acknowledged command decides its call, unless the run was stopped or an approved call was withdrawn."""
    for operation in (each for each in record.history.operations if each.call_id and record.history.taken(each)):
        call = record.calls.get(operation.call_id)
        if call is None:
            yield f"{operation.request_id} is about call {operation.call_id}, which does not exist"
            continue
        run, state = run_state(record.runs[operation.run_id].state), call_state(call.state)
        withdrawn = operation.kind in {Kind.APPROVE, Kind.EDIT} or run in {"CANCELLED", "FAILED"}
        if not (state == "CANCELLED" and withdrawn) and not _took_effect(operation, call, state):
            yield f"{operation.request_id} was acknowledged, but call {call.call_id} is {state}: {call.result}"


def _took_effect(operation: Operation, call: call_pb2.Call, state: str) -> bool:
    content = call.result.content_json.decode()
    match operation.kind:
        case Kind.RESULT:
            return state == "SUCCEEDED" and content == operation.content
        case Kind.ANSWER:
            return state == "SUCCEEDED" and operation.content in content
        case Kind.REJECT:
            return state == "REJECTED"
        case Kind.RESOLVE:
            return (state == "SUCCEEDED" and content == operation.content) if operation.content else state == "FAILED"
        case _:
            same = json.loads(call.arguments_json) == json.loads(operation.content)
            return state not in {"REJECTED", "EXPIRED"} and same


def one_decision_and_one_result_per_call(record: Record) -> Iterator[str]:
    """I9, I11: at most one decision or result, and at most one resolution, is accepted for each call."""
    taken: dict[tuple[str, bool], set[str]] = defaultdict(set)
    for operation in record.history.operations:
        if operation.kind in {*_DECISIONS, Kind.RESULT, Kind.RESOLVE} and record.history.taken(operation):
            taken[operation.call_id, operation.kind is Kind.RESOLVE].add(operation.request_id)
    return (f"call {call_id} took {sorted(names)}" for (call_id, _), names in taken.items() if len(names) > 1)


def runs_end(record: Record) -> Iterator[str]:
    """I3: every run has ended, and every failed run has a reason."""
    for run in record.runs.values():
        state = run_state(run.state)
        has_no_reason = state == "FAILED" and not run.failure.reason
        yield from broken(
            (state not in ENDED, f"run {run.run_id} is {state}"),
            (has_no_reason, f"run {run.run_id} failed without a reason"),
        )


def runs_do_not_fail(record: Record) -> Iterator[str]:
    """OPS-3, I6: no run fails, except goals, and jobs and workflows whose own call did not succeed."""
    failures = {(call.run_id, call.result.error_reason) for call in record.calls.values()}
    for run in (run for run in record.runs.values() if run_state(run.state) == "FAILED"):
        belongs_to_call = run.HasField("job") and run.failure.failure_class == run_pb2.FAILURE_CLASS_TOOL
        belongs_to_node = run.HasField("workflow") and (run.run_id, run.failure.reason) in failures
        if not (belongs_to_call or belongs_to_node or run.HasField("goal")):
            yield f"run {run.run_id} failed: {run.failure.reason}: {run.failure.message}"


def model_refuses_nothing(record: Record) -> Iterator[str]:
    """I6: a strict provider accepts every conversation sent to the model."""
    yield from record.process_logs.refusals


def cancelled_runs_stay_cancelled(record: Record) -> Iterator[str]:
    """I1, I12: after an acknowledged cancel, no further call has an effect, except read-only calls."""
    began = {call_id: event.seq for call_id, event in _starts(record).items()}
    stopped: dict[str, int] = {}
    for event in (event for log in record.logs.values() for event in log):
        if run_state(event.run_changed.run.state) in {"CANCELLING", "CANCELLED"}:
            stopped.setdefault(event.run_id, event.seq)
    yield from (
        f"{effect.tool_name} {effect.key} had an effect, but started after its run was stopped"
        for effect in record.effects
        if effect.tool_name != READS and began.get(effect.key, 1 << 62) > stopped.get(effect.run_id, 1 << 62)
    )
    for operation in (each for each in record.history.operations if each.kind is Kind.CANCEL):
        state = run_state(record.runs[operation.run_id].state) if record.history.taken(operation) else ""
        yield from (
            f"{operation.request_id} was acknowledged as {answer.run_state}, but the run is {state}"
            for answer in record.history.taken(operation)
            if state not in {"CANCELLED", answer.run_state}
        )


def terminal_states_are_final(record: Record) -> Iterator[str]:
    """EVT-4: a terminal state shown to a client never changes, and only the last entry of a log is terminal."""
    for answer in (each for answers in record.history.answers.values() for each in answers):
        run = record.runs.get(answer.run_id)
        if answer.run_state in ENDED and run is not None and run_state(run.state) != answer.run_state:
            yield f"run {answer.run_id} was {answer.run_state} and is {run_state(run.state)}"
    for run_id, log in record.logs.items():
        ends = [event.seq for event in log if _is_end(event)]
        if run_state(record.runs[run_id].state) in ENDED and ends != [len(log)]:
            yield f"the log of {run_id} has {len(log)} entries and ends at {ends}"


def logs_have_no_gaps(record: Record) -> Iterator[str]:
    """I7: events are numbered from 1 without gaps or repeats."""
    for run_id, log in record.logs.items():
        last, seqs = record.runs[run_id].last_seq, [event.seq for event in log]
        yield from broken(
            (seqs != list(range(1, len(log) + 1)), f"the log of {run_id} is not numbered from 1 to {len(log)}"),
            (len({event.event_id for event in log}) != len(log), f"the log of {run_id} has an event twice"),
            (last != len(log), f"run {run_id} has a log that ends at {last}, not {len(log)}"),
        )


def watchers_saw_the_log(record: Record) -> Iterator[str]:
    """I7, I8: every event shown to a watcher is in the log, byte for byte."""
    logged = {(run_id, event.seq): digest(event) for run_id, log in record.logs.items() for event in log}
    return (
        f"{seen.watcher} saw another seq {seen.seq} of {seen.run_id} than the log has"
        for seen in record.history.seen
        if logged.get((seen.run_id, seen.seq)) != seen.digest
    )


def earlier_owners_stop_writing(record: Record) -> Iterator[str]:
    """I4: once a worker has written, earlier workers no longer write."""
    epochs = {run_id: [event.attempt for event in log if event.attempt] for run_id, log in record.logs.items()}
    return (f"run {run_id} was written by owners {each}" for run_id, each in epochs.items() if each != sorted(each))


def effects_match_their_class(record: Record) -> Iterator[str]:
    """I5: effects happen at most once where promised, with the recorded arguments.

    Each successful call has had its effect.
    """
    count = Counter(effect.key for effect in record.effects)
    found_out = {o.call_id for o in record.history.operations if o.kind is Kind.RESOLVE and record.history.taken(o)}
    for effect in record.effects:
        call = record.calls.get(effect.key)
        # Read-only calls run with their check, and leave no trace if the worker dies before its step.
        is_unknown = call is None and effect.tool_name != READS
        is_other = call is not None and json.loads(call.arguments_json) != effect.arguments
        what = f"{effect.tool_name} {effect.key}"
        yield from broken(
            (is_unknown, f"{what} had an effect, but is in no ledger"),
            (is_other, f"{what} happened with {effect.arguments}, not {call and call.arguments_json!r}"),
        )
    for call in record.calls.values():
        state, happened = call_state(call.state), count[call.call_id]
        what, is_free = f"{call.tool_name} {call.call_id}", not happened and call.call_id not in found_out
        if call.context == call_pb2.EXECUTION_CONTEXT_BACKEND and call.tool_version:
            yield from broken(
                (call.effect_class in _ONCE and happened > 1, f"{what} happened {happened} times"),
                (state == "SUCCEEDED" and is_free, f"{what} succeeded without an effect"),
                (state in {"REJECTED", "EXPIRED"} and happened, f"{what} is {state}, and has happened"),
            )


def intent_before_effect(record: Record) -> Iterator[str]:
    """I5: the ledger records each call before its effect, except read-only calls, which run with their check."""
    began = {call_id: seconds(event) for call_id, event in _starts(record).items()}
    return (
        f"{effect.tool_name} {effect.key} had its effect before the ledger recorded it"
        for effect in record.effects
        if effect.tool_name != READS and began.get(effect.key, float("inf")) > effect.time
    )


def gated_effects_were_approved(record: Record) -> Iterator[str]:
    """I9, I10: the owner approved each gated effect with exactly these arguments, or granted its series."""
    approved: dict[str, list[Operation]] = defaultdict(list)
    for operation in record.history.operations:
        if operation.kind in {Kind.APPROVE, Kind.EDIT}:
            approved[operation.run_id if operation.series else operation.call_id].append(operation)
    return (
        f"{effect.tool_name} {effect.key} had an effect that was not approved: {effect.arguments}"
        for effect in record.effects
        if effect.tool_name == GATED
        and not any(
            json.loads(operation.content) == effect.arguments
            and (operation.store_id, operation.user_id) == (effect.store_id, effect.user_id)
            and any(answer.outcome is not Outcome.REFUSED for answer in record.history.answers[operation.number])
            for operation in (*approved[effect.key], *approved[effect.run_id])
        )
    )


def grants_are_not_overused(record: Record) -> Iterator[str]:
    """I9, I10: no series has more effects than were granted."""
    granted: Counter[tuple[str, str]] = Counter()
    for operation in (each for each in record.history.operations if each.series):
        answers, key = record.history.answers[operation.number], (operation.run_id, operation.content)
        if any(answer.outcome is not Outcome.REFUSED for answer in answers):
            granted[key] = max(granted[key], int(operation.series))
    used: dict[tuple[str, str], set[str]] = defaultdict(set)
    for effect in record.effects:
        used[effect.run_id, json.dumps(effect.arguments, sort_keys=True)].add(effect.key)
    return (
        f"run {key[0]} was granted {most} calls with {key[1]}, and {len(used[key])} happened"
        for key, most in granted.items()
        if len(used[key]) > most
    )


def nothing_crosses_stores_or_users(record: Record) -> Iterator[str]:
    """I13: users see only their own runs and notifications."""
    for run_id, owners in record.owners.items():
        run, log = record.runs[run_id], record.logs.get(run_id, [])
        others = [event for event in log if (event.store_id, event.run_id) != (run.store_id, run_id)]
        owner = (run.store_id, run.user_id)
        yield from broken(
            (owners != [owner], f"run {run_id} of {owner} was shown to {owners}"),
            (others, f"the log of {run_id} has events of another run or store"),
        )
    yield from (
        f"call {call.call_id} is in another store than its run"
        for call in record.calls.values()
        if call.store_id != record.runs[call.run_id].store_id
    )
    yield from (
        f"{owner} was notified of another user's run"
        for owner, notifications in record.notifications.items()
        if any((told.store_id, told.user_id) != owner for told in notifications)
    )
    yield from (
        f"{operation.request_id} reached another user's run"
        for operation in record.history.operations
        if operation.kind is Kind.TRESPASS
        and any(answer.outcome is Outcome.OK for answer in record.history.answers[operation.number])
    )


def every_run_end_is_notified(record: Record) -> Iterator[str]:
    """I15: every end of a run is notified once, unless a newer message superseded the run.

    A job, a run below another, and a turn without text that a job started, end without a notification. A wipe of NATS
    loses notifications in transit by design.
    """
    wipes = [fault for fault in record.history.faults if fault.name == WIPE and not fault.skipped]
    told = {told.event_id for notifications in record.notifications.values() for told in notifications}
    for event in (event for log in record.logs.values() for event in log if _is_end(event)):
        run, is_told = event.run_changed.run, event.event_id in told
        is_lost = any(w.begin_time - _WIPED_SECONDS < seconds(event) < w.end_time + _WIPED_SECONDS for w in wipes)
        superseded = run.stop_cause == run_pb2.STOP_CAUSE_SUPERSEDED
        is_silent = run.HasField("job") or run.parent_run_id or (jobs.is_turn(run) and not run.output_text)
        if not (is_told or is_lost or superseded or is_silent):
            yield f"there is no notification that {event.run_id} ended with {event.type}"
    yield from (
        f"{owner} has {count} notifications with the {name} {value}"
        for owner, notifications in record.notifications.items()
        for name in ("notification_id", "event_id", "number")
        for value, count in Counter(getattr(told, name) for told in notifications).items()
        if count > 1
    )


def job_ends_are_reported(record: Record) -> Iterator[str]:
    """ASYNC-5: the model answers each notice of a job's end or stays silent, unless the user stopped a turn.

    A notice is missing only if no turn was left to report it.
    """
    for job in record.runs.values():
        conversation_id, end = job.reports_to_conversation_id, job.end_time.ToNanoseconds()
        beside = [run for run in record.runs.values() if run.conversation_id == conversation_id]
        turns = [run for run in beside if jobs.is_turn(run)]
        later = [run for run in turns if run.end_time.ToNanoseconds() >= end]
        is_stopped = any(run.stop_cause == run_pb2.STOP_CAUSE_USER for run in later)
        if not conversation_id or job.stop_cause == run_pb2.STOP_CAUSE_MODEL or is_stopped:
            continue
        notices = jobs.entered(record, conversation_id)
        numbers = [message.number for message, told in notices if told["job_id"] == job.run_id and jobs.is_of_end(told)]
        has_answer = any(
            message.number > min(numbers, default=0)
            for message in record.messages[conversation_id]
            if message.role == message_pb2.ROLE_ASSISTANT and not message.interrupted
        )
        is_answered = has_answer or any(map(jobs.is_silent_turn, later))
        may_report = job.generation < GENERATIONS_MAX and len(turns) < PROGRESS_TURNS_MAX
        has_time = all(run_state(run.state) == "COMPLETED" for run in beside)
        yield from broken(
            (not numbers and may_report, f"there is no notice of the end of {job.run_id}"),
            (numbers and not is_answered and has_time, f"the end of {job.run_id} is in a notice without an answer"),
        )


def no_internal_error_is_visible(record: Record) -> Iterator[str]:
    """No client received UNKNOWN, INTERNAL or a gap in a stream, and no log has a traceback or a forgotten task."""
    yield from record.history.complaints
    yield from record.process_logs.complaints


def _user_texts(record: Record) -> Counter[str]:
    return Counter(
        message.text
        for conversation in record.messages.values()
        for message in conversation
        if message.role == message_pb2.ROLE_USER
    )


def _starts(record: Record) -> dict[str, event_pb2.RunEvent]:
    """Return the event of each call's first start."""
    changes = (change for log in record.logs.values() for change in reversed([*call_changes(log)]))
    return {call.call_id: event for event, call in changes if call_state(call.state) == "RUNNING"}


def _is_end(event: event_pb2.RunEvent) -> bool:
    return event.HasField("run_changed") and run_state(event.run_changed.run.state) in ENDED


CHECKERS: tuple[Checker, ...] = (
    accepted_messages_are_kept,
    requests_take_effect_once,
    accepted_commands_take_effect,
    one_decision_and_one_result_per_call,
    runs_end,
    runs_do_not_fail,
    model_refuses_nothing,
    cancelled_runs_stay_cancelled,
    terminal_states_are_final,
    logs_have_no_gaps,
    watchers_saw_the_log,
    earlier_owners_stop_writing,
    effects_match_their_class,
    intent_before_effect,
    gated_effects_were_approved,
    grants_are_not_overused,
    nothing_crosses_stores_or_users,
    every_run_end_is_notified,
    no_internal_error_is_visible,
    job_ends_are_reported,
    *LEDGER_CHECKERS,
    *jobs.LEDGER_CHECKERS,
    *flows.LEDGER_CHECKERS,
    *goals.LEDGER_CHECKERS,
)


def judge(record: Record) -> list[str]:
    return [f"{checker.__name__}: {violation}" for checker in CHECKERS for violation in checker(record)]
