"""Checkers of delegated calls, child runs and stopped jobs (TOOL-7, ASYNC-5, ASYNC-6), judged by the ledger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import msgspec

from pawl.event.v1 import call_pb2, run_pb2
from tests.simulation.checkers import ENDED
from tests.simulation.record import Record, broken, call_changes, call_state, run_state

_DEPTH_MAX = 2


def delegated_calls_match_their_child_runs(record: Record) -> Iterator[str]:
    """Each delegated call names its child run, and the child run names the call."""
    for call_id, call in record.calls.items():
        run = record.runs.get(call.child_run_id)
        if call.child_run_id and (run is None or run.parent_call_id != call_id or run.parent_run_id != call.run_id):
            yield f"call {call_id} names child run {call.child_run_id}, which does not name it"
    for run_id, run in record.runs.items():
        names = run.parent_call_id
        yield from broken(
            (names and record.calls[names].child_run_id != run_id, f"run {run_id} names {names}, which names another"),
            (run.depth > _DEPTH_MAX or run.depth != _depth(record, run), f"run {run_id} has depth {run.depth}"),
        )


def _depth(record: Record, run: run_pb2.Run) -> int:
    """Return the number of delegations above a run. Jobs do not count."""
    above = record.runs[run.parent_run_id].depth if run.parent_run_id else 0
    is_counted = not (run.reports_to_conversation_id or run.workflow.HasField("chunk") or run.HasField("undo"))
    return above + (bool(run.parent_run_id) and is_counted)


def calls_settle_after_their_child_run(record: Record) -> Iterator[str]:
    """A delegated call settles after its child run, with the same result, unless the call was cancelled."""
    for call_id, call in record.calls.items():
        state, child = call_state(call.state), record.runs.get(call.child_run_id)
        if child is None or state == "DETACHED":
            continue
        how, by_model = run_state(child.state), not (child.HasField("workflow") or child.HasField("undo"))
        ended_later = record.written_at(child.run_id, child.last_seq) > _settled_at(record, call)
        if state not in {"SUCCEEDED", "FAILED"}:
            ran_on = how not in {"CANCELLED", "FAILED"} and ended_later
            yield from broken((ran_on, f"call {call_id} was cancelled, but run {child.run_id} became {how}"))
            continue
        yield from broken(
            (how not in ENDED or ended_later, f"call {call_id} settled before run {child.run_id} ended"),
            (
                (state == "SUCCEEDED") != (how == "COMPLETED"),
                f"call {call_id} is {state}, and run {child.run_id} {how}",
            ),
        )
        if state == "SUCCEEDED" and by_model:
            answer = msgspec.json.decode(call.result.content_json)["answer"]
            if answer != child.output_text:
                yield f"call {call_id} has answer {answer!r}, run {child.run_id} {child.output_text!r}"


def _settled_at(record: Record, call: call_pb2.Call) -> float:
    seqs = [event.seq for event, changed in call_changes(record.logs[call.run_id]) if changed.call_id == call.call_id]
    return record.written_at(call.run_id, seqs[-1])


def child_ends_are_reported_once(record: Record) -> Iterator[str]:
    """A run receives the end of each child run at most once."""
    rows = (row for row in record.tables.commands.values() if row.name == "agent_ended")
    return (
        f"run {run_id} received the end of call {call_id} {count} times"
        for (run_id, call_id), count in Counter((row.run_id, row.call_id) for row in rows).items()
        if count > 1
    )


def ancestor_rules_apply(record: Record) -> Iterator[str]:
    """Each call is judged by the rules of all runs and conversations above it."""
    missing = ((effect, set(_led_to(record, effect.run_id)) - effect.ruled_by) for effect in record.history.effects)
    return (f"call {effect.call_id} ran without the rules of {sorted(above)}" for effect, above in missing if above)


def _led_to(record: Record, run_id: str) -> Iterator[str]:
    while run_id:
        run = record.runs[run_id]
        yield from (run_id, run.reports_to_conversation_id or run.conversation_id)
        run_id = run.parent_run_id


def stops_reach_the_jobs_below(record: Record) -> Iterator[str]:
    """ASYNC-6: if a job is stopped, the jobs that its delegated runs started are stopped too."""
    for job in record.runs.values():
        starter = record.runs.get(job.parent_run_id) if job.reports_to_conversation_id else None
        if starter is None or starter.stop_cause != run_pb2.STOP_CAUSE_PARENT or not _is_below_job(record, starter):
            continue
        ended_at = record.written_at(job.run_id, job.last_seq)
        ran_on = run_state(job.state) not in ENDED or ended_at > _stopped_at(record, starter)
        if ran_on and not job.stop_cause:
            yield f"job {job.run_id} continued after {starter.run_id}, which had started it, was stopped"


def stops_are_reported_to_others(record: Record) -> Iterator[str]:
    """ASYNC-5: the end of a job is not reported to the model that stopped it, but to any other receiver."""
    for sent in (each for each in record.taken("CANCEL") if each.command_id.startswith("stop_")):
        job = record.runs.get(sent.run_id)
        if job is None or job.stop_cause != run_pb2.STOP_CAUSE_MODEL:
            continue
        stopped_at, stopper = _stopped_at(record, job), sent.content.decode()
        open_agents = (
            run.run_id
            for run in _above(record, job)
            if run.parent_run_id and not run.reports_to_conversation_id
            if record.written_at(run.run_id, run.last_seq) > stopped_at
        )
        receiver = next(open_agents, stopper)
        if receiver != stopper:
            yield f"{stopper} stopped {job.run_id}, which is not reported to {receiver}"


def _above(record: Record, run: run_pb2.Run) -> Iterator[run_pb2.Run]:
    while run.parent_run_id:
        run = record.runs[run.parent_run_id]
        yield run


def _is_below_job(record: Record, run: run_pb2.Run) -> bool:
    return any(above.reports_to_conversation_id for above in _above(record, run))


def _stopped_at(record: Record, run: run_pb2.Run) -> float:
    stops = (
        event.seq
        for event in record.logs[run.run_id]
        if run_state(event.run_changed.run.state) in {"CANCELLING", "CANCELLED"}
    )
    return record.written_at(run.run_id, next(stops))


CHECKERS = (
    delegated_calls_match_their_child_runs,
    calls_settle_after_their_child_run,
    child_ends_are_reported_once,
    ancestor_rules_apply,
    stops_reach_the_jobs_below,
    stops_are_reported_to_others,
)
