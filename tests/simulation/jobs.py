"""Checkers of jobs and their notices (ASYNC-1 to ASYNC-7)."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise, takewhile
from typing import Any

import msgspec

from pawl.chassis.ids import RunKey
from pawl.event.v1 import call_pb2, message_pb2, run_pb2
from pawl.job_store.ledger.rules.jobs import GENERATIONS_MAX, TURNS_MAX
from pawl.job_store.ledger.rules.rows import ConversationRow, RunRow
from pawl.job_store.ledger.rules.turn import budget_below
from tests.simulation.checkers import ENDED, SETTLED
from tests.simulation.model import WATCHED
from tests.simulation.record import Ledger, Record, broken, call_changes, call_state, run_state
from tests.simulation.store import ITERATIONS_KEPT as KEPT

_TURN_SECONDS = 2.0
_TINY_SECONDS = 1e-4
_WAITS_FOR_PEOPLE = {"AWAITING_APPROVAL", "OFFERED", "ASKED"}


def detached_calls_have_their_job(record: Ledger) -> Iterator[str]:
    """ASYNC-1: each DETACHED call has one job, which reports to the conversation of the root run above the call."""
    begun = {job.parent_call_id: job for job in _jobs(record)}
    for call_id, call in record.calls.items():
        job, is_detached = begun.get(call_id), call_state(call.state) == "DETACHED"
        if is_detached != (job is not None):
            yield f"call {call_id} is {call_state(call.state)}, but its job is {job and job.run_id}"
        elif job is not None and job.reports_to_conversation_id != root_conversation(record, record.runs[call.run_id]):
            yield f"job {job.run_id} does not report to the root conversation of its call"
    for job in begun.values():
        caller = record.runs[job.parent_run_id] if job.parent_run_id else None
        if caller is not None and caller.reports_to_conversation_id:
            yield f"job {job.run_id} was started by the job {caller.run_id}"


def notices_are_delivered_once(record: Ledger) -> Iterator[str]:
    """ASYNC-5: each notice enters its conversation once and in order, and the last notice reports the end correctly.

    It enters another conversation only after the delegated run that received it has ended without an answer.
    """
    last: dict[tuple[str, int], str] = {}
    for conversation_id in record.messages:
        said: dict[str, list[int]] = defaultdict(list)
        for message, notice in entered(record, conversation_id):
            job, receiver = record.runs[notice["job_id"]], record.runs[message.run_id]
            said[job.run_id].append(notice.get("iteration") or notice.get("report", 0))
            is_here = conversation_id == job.reports_to_conversation_id or receiver.run_id in _agents_above(record, job)
            is_final = not receiver.depth or run_state(receiver.state) == "COMPLETED"
            occasion, state = (job.run_id, said[job.run_id][-1]), run_state(job.state)
            first = last.setdefault(occasion, conversation_id) if is_final else conversation_id
            is_wrong = is_of_end(notice) and notice["state"] != state
            yield from broken(
                (not is_here, f"{receiver.run_id} has a notice of job {job.run_id}, which does not belong to it"),
                (first != conversation_id, f"{conversation_id} and {first} both have notice {occasion}"),
                (is_wrong, f"job {job.run_id} is {state}, but was reported as {notice.get('state')}"),
            )
        for job_id, occasions in said.items():
            order = [occasion or math.inf for occasion in occasions]
            if order != sorted(set(order)):
                yield f"{conversation_id} has notices of job {job_id} in this order: {occasions}"


def notices_enter_the_nearest_agent(record: Record) -> Iterator[str]:
    """ASYNC-5: a notice enters no run while a delegated run between it and the job is open."""
    for message, notice in (each for name in record.messages for each in entered(record, name)):
        job, receiver = record.runs[notice["job_id"]], record.runs[message.run_id]
        entered_at = _entered_at(record, receiver, message.message_id)
        nearer = takewhile(lambda run_id: run_id != receiver.run_id, _agents_above(record, job))  # noqa: B023
        for run in map(record.runs.__getitem__, nearer):
            if run_state(run.state) not in ENDED or record.written_at(run.run_id, run.last_seq) > entered_at:
                yield f"{receiver.run_id} has a notice of job {job.run_id}, but {run.run_id} was nearer"


def _entered_at(record: Record, run: run_pb2.Run, message_id: str) -> float:
    events = (each for each in record.logs[run.run_id] if each.message_added.message.message_id == message_id)
    return record.written_at(run.run_id, next(events).seq)


def _agents_above(record: Ledger, job: run_pb2.Run) -> list[str]:
    """Return the delegated runs above a job, nearest first."""
    found, run = [], job
    while run.parent_run_id:
        run = record.runs[run.parent_run_id]
        found += [run.run_id] if run.parent_run_id and not run.reports_to_conversation_id else []
    return found


def root_conversation(record: Ledger, run: run_pb2.Run) -> str:
    while run.parent_run_id:
        run = record.runs[run.parent_run_id]
    return run.reports_to_conversation_id or run.conversation_id


def notices_stay_with_their_user(record: Record) -> Iterator[str]:
    """ASYNC-5: notices appear only in runs and model requests of the user who started the job."""
    for message, notice in (each for name in record.messages for each in entered(record, name)):
        job, run = record.runs[notice["job_id"]], record.runs[message.run_id]
        if run.user_id != job.user_id:
            yield f"{run.run_id} of {run.user_id} has a notice of job {job.run_id} of {job.user_id}"
    users = {message.user_id for message in record.history.messages}
    for served in record.history.served:
        user_id = served.plan.partition("x")[0]
        yield from (
            f"the model answers {user_id} has a notice of job {job_id} of {record.runs[job_id].user_id}"
            for job_id, _ in served.told
            if user_id in users and record.runs[job_id].user_id != user_id
        )


def job_ends_are_reported_or_dismissed(record: Record) -> Iterator[str]:
    """ASYNC-5: each job end is pending, answered by the model, or dismissed.

    A job that was cancelled at its start, because a run above it was being stopped, reports nothing. An end is
    dismissed if the model stopped the job, or the user stopped the turn or lost write access. It is answered if a
    delegated run that received it has completed.
    """
    for job in _jobs(record):
        problem = _problem_of_end(record, job)
        if problem:
            yield f"the end of {job.run_id} {problem}"


def _problem_of_end(record: Record, job: run_pb2.Run) -> str:
    conversation_id = job.reports_to_conversation_id
    notices = _conversation(record, conversation_id).background.notices
    if _row(record, job).silent:
        reports = any(each.run_id == job.run_id for each in notices) or _reports(record, job)
        return "must not be reported, but is" if reports else ""
    waiting = next((each for each in notices if (each.run_id, each.occasion) == (job.run_id, 0)), None)
    told = _ends_in(record, conversation_id, job)
    receivers = [record.runs[run_id] for run_id in _agents_above(record, job)]
    informed = [run for run in receivers if _ends_in(record, run.conversation_id, job)]
    if any(run_state(run.state) == "COMPLETED" for run in informed):
        is_pending = waiting is not None or told
        return "was answered by a delegated run, but is still reported" if is_pending else ""
    if waiting is not None and waiting.receiver:
        has_ended = run_state(record.runs[waiting.receiver].state) in ENDED
        return f"waits for {waiting.receiver}, which has ended" if has_ended else ""
    if waiting is not None and bool(waiting.entered_by) != bool(told):
        return f"was entered by {waiting.entered_by!r}, but is in {told}"
    if waiting is not None:
        return "" if waiting.entered_by or _is_held_back(record, conversation_id, job) else "has no notice"
    if _was_dismissed(record, conversation_id, job) or (told and _is_answered(record, job, told[0])):
        return ""
    return "is in a notice without an answer" if told else "is lost"


def turns_keep_their_minimum_interval(record: Record) -> Iterator[str]:
    """ASYNC-5: turns of a conversation start at least two seconds apart, unless the database clock jumped."""
    begun: dict[str, list[float]] = defaultdict(list)
    for run in record.runs.values():
        if is_turn(run) and run.HasField("start_time"):
            begun[run.conversation_id].append(run.start_time.ToNanoseconds() / 1e9)
    return (
        f"{conversation_id}: a turn started {second - first:.3f} s after another"
        for conversation_id, times in begun.items()
        for first, second in pairwise(sorted(times))
        if second - first < _TURN_SECONDS - _TINY_SECONDS and not record.history.jumps
    )


def turns_never_wait_for_people(record: Ledger) -> Iterator[str]:
    """ASYNC-5: a turn never waits for people, because no user started it."""
    return (
        f"turn {run_id} has a call that is {call_state(call.state)}"
        for run_id, run in record.runs.items()
        if is_turn(run)
        for _, call in call_changes(record.logs[run_id])
        if call_state(call.state) in _WAITS_FOR_PEOPLE
    )


def series_keep_their_interval(record: Ledger) -> Iterator[str]:
    """ASYNC-3: iterations neither overlap nor start early, and their number does not exceed the request."""
    for run in _jobs(record):
        is_open = ""
        for _, call in call_changes(record.logs[run.run_id]):
            if is_open not in {"", call.call_id}:
                yield f"job {run.run_id} started call {call.call_id} while {is_open} was open"
            is_open = "" if call_state(call.state) in SETTLED else call.call_id
        own = (call for call in record.calls.values() if call.run_id == run.run_id)
        calls, most = sorted(own, key=lambda each: each.round), run.job.iterations_max
        rounds = [call.round for call in calls]
        is_wrong = rounds != list(range(1, len(calls) + 1)) or len(calls) > most
        yield from broken((is_wrong, f"job {run.run_id} made {rounds} of {most}"))
        yield from _off_beat(run, calls) if run.job.interval_seconds else ()


def paused_jobs_start_nothing(record: Record) -> Iterator[str]:
    """ASYNC-6: a paused job starts no iteration until it is resumed."""
    for run_id in (job.run_id for job in _jobs(record)):
        begun: dict[str, float] = {}
        for event, call in call_changes(record.logs[run_id]):
            begun.setdefault(call.call_id, record.written_at(run_id, event.seq))
        sent = [each for each in record.history.commands if each.run_id == run_id]
        for pause in (each for each in sent if each.kind == "PAUSE" and each.accepted_at is not None):
            paused_at = pause.accepted_at or 0.0
            resumed = (each.sent_at for each in sent if each.kind == "RESUME" and each.sent_at >= pause.sent_at)
            until = min(resumed, default=math.inf)
            yield from (
                f"job {run_id} started {call_id} at {time:.3f}, but was paused from {paused_at:.3f}"
                for call_id, time in begun.items()
                if paused_at < time < until
            )


def trimming_keeps_the_last_iterations(record: Record) -> Iterator[str]:
    """ASYNC-3: trimming removes only old settled iterations, and keeps the calls and events of the others."""
    for row in record.tables.runs.values():
        removed = [call for call in record.tables.gone.values() if call.run_id == row.run_id]
        gone, name = sorted(call.round for call in removed), row.run_id
        kept = [call.round for call in record.tables.calls_of(row.key)]
        first, failures = row.trimmed_rounds, sum(call.state.name != "SUCCEEDED" for call in removed)
        lacks = gone != list(range(1, first + 1)) or row.round - first < min(row.round, KEPT)
        is_wrong_job = gone + kept != list(range(1, row.round + 1)) or len(kept) > 2 * KEPT + 1
        yield from broken(
            (lacks, f"run {name} in round {row.round} lacks {gone} but records {first}"),
            (
                failures != row.trimmed_failures,
                f"{failures} removed calls of {name} failed, not {row.trimmed_failures}",
            ),
            (row.reports_to and is_wrong_job, f"job {name} has the calls {kept} of {row.round}"),
        )
        yield from (
            f"event {event.seq} of {name} is removed, but its call is not"
            for event in record.logs[name][: record.tables.trimmed.get(row.key, 0)]
            if event.call_changed.call.round > first
        )


def monitors_fire_on_edges(record: Ledger) -> Iterator[str]:
    """ASYNC-4: a monitor fires each time its condition becomes true after its pause, at most as often as allowed."""
    for run in (job for job in _jobs(record) if job.job.HasField("when") and job.output_text):
        expected, said = _firings(record, run), msgspec.json.decode(run.output_text)["fired"]
        is_wrong = run_state(run.state) == "COMPLETED" and said != len(expected)
        if said > run.job.when.firings_max or is_wrong:
            yield f"job {run.run_id} reports that it fired {said} times, but the condition was met in {expected}"
        may_report = {0, *expected, *_third_failures(record, run)}
        only_fired = run.job.reports == run_pb2.JOB_REPORTS_END
        yield from (
            f"job {run.run_id} reported iteration {notice['iteration']}, but the condition was met in {expected}"
            for _, notice in entered(record, run.reports_to_conversation_id if only_fired else "")
            if notice["job_id"] == run.run_id and notice.get("iteration", 0) not in may_report
        )


def _firings(record: Ledger, run: run_pb2.Run) -> list[int]:
    condition, pause = run.job.when.condition, run.job.when.pause_seconds
    firings: list[tuple[int, float]] = []
    seen, was_so = "", False
    for call in (each for each in _iterations(record, run) if _is_judged(run, each)):
        value = call.result.content_json.decode()
        is_so = value.endswith('again"') if condition.expression else bool(seen) and value != seen
        now = call.end_time.ToNanoseconds() / 1e9
        may = not firings or not 0 <= now - firings[-1][1] < pause
        fires = is_so and may and not (was_so and condition.expression) and len(firings) < run.job.when.firings_max
        firings += [(call.round, now)] if fires else []
        was_so = is_so and (was_so or fires)
        seen = seen if is_so and not fires else value
    return [number for number, _ in firings]


def _third_failures(record: Ledger, run: run_pb2.Run) -> list[int]:
    found, failures = [], 0
    for call in _iterations(record, run):
        failures = 0 if _is_judged(run, call) else failures + 1
        found += [call.round] * (failures == 3)
    return found


def _is_judged(run: run_pb2.Run, call: call_pb2.Call) -> bool:
    """Return whether the condition of a job can be evaluated on a result. An expression needs a text."""
    has_text = run.job.when.condition.expression == WATCHED and call.result.content_json.startswith(b'"')
    return call_state(call.state) == "SUCCEEDED" and (has_text or run.job.when.condition.changed)


def _iterations(record: Ledger, run: run_pb2.Run) -> list[call_pb2.Call]:
    calls = (call for call in record.calls.values() if call.run_id == run.run_id and call_state(call.state) in SETTLED)
    return sorted(calls, key=lambda each: each.round)


def _off_beat(run: run_pb2.Run, calls: list[call_pb2.Call]) -> Iterator[str]:
    job, begin = run.job, run.job.begin_time.ToNanoseconds() / 1e9
    granted = next((number for number, call in enumerate(calls) if call.call_id == run.grant.call_id), None)
    calls = calls[granted:]
    intervals = [
        math.floor((call.create_time.ToNanoseconds() / 1e9 - begin + _TINY_SECONDS) / job.interval_seconds)
        for call in calls
    ]
    # A call created before its job means that the database clock was set back.
    if intervals and granted is None and 0 <= intervals[0] < job.delay_first:
        yield f"job {run.run_id} started immediately instead of after one interval"
    # A late iteration may start after the end of its job, but none is due then.
    has_end = job.HasField("end_time")
    last = (job.end_time.ToNanoseconds() / 1e9 - begin) / job.interval_seconds if has_end else math.inf
    for (first, after), (earlier, later) in zip(pairwise(intervals), pairwise(calls), strict=True):
        ended = (earlier.end_time.ToNanoseconds() / 1e9 - begin) / job.interval_seconds
        if later.create_time.ToNanoseconds() < earlier.create_time.ToNanoseconds():
            continue  # The database clock was set back, so iterations follow immediately.
        if first + 1 > last + _TINY_SECONDS:
            yield f"job {run.run_id} continued with call {later.round} after its end"
        if after <= first or after < math.floor(ended):
            yield f"job {run.run_id} made call {earlier.round + 1} in interval {after}, the previous one in {first}"


def entered(record: Ledger, conversation_id: str) -> Iterator[tuple[message_pb2.Message, dict[str, Any]]]:
    return (
        (message, notice)
        for message in record.messages.get(conversation_id, ())
        if message.role == message_pb2.ROLE_NOTICE
        for notice in msgspec.json.decode(message.notices_json)
    )


def is_of_end(notice: dict[str, Any]) -> bool:
    return notice.keys().isdisjoint({"iteration", "report"})


def _jobs(record: Ledger) -> list[run_pb2.Run]:
    return [run for run in record.runs.values() if run.reports_to_conversation_id]


def is_turn(run: run_pb2.Run) -> bool:
    """Return whether job notices, instead of a message, started the run."""
    return run.generation > 0 and not run.reports_to_conversation_id


def is_silent_turn(run: run_pb2.Run) -> bool:
    return is_turn(run) and run.round > 0 and run_state(run.state) == "COMPLETED"


def _row(record: Record, job: run_pb2.Run) -> RunRow:
    return next(row for row in record.tables.runs.values() if row.run_id == job.run_id)


def _reports(record: Record, job: run_pb2.Run) -> bool:
    talks = (
        job.reports_to_conversation_id,
        *(record.runs[each].conversation_id for each in _agents_above(record, job)),
    )
    return any(notice["job_id"] == job.run_id for each in talks for _, notice in entered(record, each))


def _ends_in(record: Record, conversation_id: str, job: run_pb2.Run) -> list[int]:
    notices = entered(record, conversation_id)
    return [message.number for message, each in notices if each["job_id"] == job.run_id and is_of_end(each)]


def _is_held_back(record: Record, conversation_id: str, job: run_pb2.Run) -> bool:
    tables = record.tables
    turns = [run for run in record.runs.values() if is_turn(run) and run.conversation_id == conversation_id]
    row = _row(record, job)
    root = tables.runs[RunKey(row.store_id, row.agents_above[-1])] if len(row.agents_above) > 1 else row
    used_up = _conversation(record, conversation_id).background.used_up_budgets
    return budget_below(root) in used_up or job.generation >= GENERATIONS_MAX or len(turns) >= TURNS_MAX


def _is_answered(record: Record, job: run_pb2.Run, number: int) -> bool:
    """Return whether the user's model received the job's end and answered, or ended the turn silently."""
    answers = (
        message.number > number
        and message.role == message_pb2.ROLE_ASSISTANT
        and not message.interrupted
        and message.user_id == job.user_id
        for message in record.messages[job.reports_to_conversation_id]
    )
    ended = record.written_at(job.run_id, job.last_seq)
    silent = (
        is_silent_turn(run)
        and run.user_id == job.user_id
        and run.conversation_id == job.reports_to_conversation_id
        and record.written_at(run.run_id, run.last_seq) >= ended
        for run in record.runs.values()
    )
    was_reported = any(served.whole and (job.run_id, 0) in served.told for served in record.history.served)
    return was_reported and (any(answers) or any(silent))


def _was_dismissed(record: Record, conversation_id: str, job: run_pb2.Run) -> bool:
    """Return whether the model stopped the job, the user stopped the turn, or the user lost write access."""
    if job.stop_cause == run_pb2.STOP_CAUSE_MODEL and run_state(job.state) == "CANCELLED":
        return True
    is_private = conversation_id in record.history.made_private
    if is_private and job.user_id != _conversation(record, conversation_id).user_id:
        return True
    ended = record.written_at(job.run_id, job.last_seq)
    return any(
        is_turn(run)
        and run.conversation_id == conversation_id
        and (run.stop_cause, run.user_id) == (run_pb2.STOP_CAUSE_USER, job.user_id)
        and record.written_at(run.run_id, run.last_seq) >= ended
        for run in record.runs.values()
    )


def _conversation(record: Record, conversation_id: str) -> ConversationRow:
    (row,) = (each for each in record.tables.conversations.values() if each.conversation_id == conversation_id)
    return row


# Checkers that only need the ledger.
LEDGER_CHECKERS = (
    detached_calls_have_their_job,
    notices_are_delivered_once,
    turns_never_wait_for_people,
    series_keep_their_interval,
)

CHECKERS = (
    notices_enter_the_nearest_agent,
    notices_stay_with_their_user,
    job_ends_are_reported_or_dismissed,
    turns_keep_their_minimum_interval,
    paused_jobs_start_nothing,
    trimming_keeps_the_last_iterations,
    monitors_fire_on_edges,
    *LEDGER_CHECKERS,
)
