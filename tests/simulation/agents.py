"""Checkers of delegated calls and child runs (TOOL-7), judged by the ledger."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pawl.event.v1 import call_pb2, run_pb2
from tests.simulation.checkers import ENDED
from tests.simulation.record import Record, call_state, run_state

_DEPTH_MAX = 2


def delegated_calls_match_their_child_runs(record: Record) -> Iterator[str]:
    """Each delegated call names its child run, and the child run names the call."""
    for call_id, call in record.calls.items():
        run = record.runs.get(call.child_run_id)
        if call.child_run_id and (run is None or run.parent_call_id != call_id or run.parent_run_id != call.run_id):
            yield f"call {call_id} names child run {call.child_run_id}, which does not name it"
    for run_id, run in record.runs.items():
        if run.parent_call_id and record.calls[run.parent_call_id].child_run_id != run_id:
            yield f"run {run_id} names parent call {run.parent_call_id}, which does not name it"
        if run.depth > _DEPTH_MAX or run.depth != _depth(record, run):
            yield f"run {run_id} has depth {run.depth}"


def _depth(record: Record, run: run_pb2.Run) -> int:
    """Return the number of delegations above a run. Jobs do not count."""
    above = record.runs[run.parent_run_id].depth if run.parent_run_id else 0
    is_counted = not (run.reports_to_conversation_id or run.workflow.HasField("chunk") or run.HasField("undo"))
    return above + (bool(run.parent_run_id) and is_counted)


def calls_settle_after_their_child_run(record: Record) -> Iterator[str]:
    """A delegated call settles after its child run, with the same result, unless the call was cancelled."""
    for call_id, call in record.calls.items():
        if not call.child_run_id:
            continue
        state, child = call_state(call.state), record.runs[call.child_run_id]
        how = run_state(child.state)
        if state in {"SUCCEEDED", "FAILED"}:
            end, settled = record.written_at(child.run_id, child.last_seq), _settled_at(record, call)
            if how not in ENDED or end > settled:
                yield f"call {call_id} settled before run {child.run_id} ended"
            if (state == "SUCCEEDED") != (how == "COMPLETED"):
                yield f"call {call_id} is {state}, and run {child.run_id} {how}"
            if state == "SUCCEEDED" and not (child.HasField("workflow") or child.HasField("undo")):
                answer = msgspec.json.decode(call.result.content_json)["answer"]
                if answer != child.output_text:
                    yield f"call {call_id} has answer {answer!r}, run {child.run_id} {child.output_text!r}"
        elif state == "DETACHED":
            continue
        elif how not in {"CANCELLED", "FAILED"} and record.written_at(child.run_id, child.last_seq) > _settled_at(
            record, call
        ):
            yield f"call {call_id} was cancelled, but run {child.run_id} became {how}"


def _settled_at(record: Record, call: call_pb2.Call) -> float:
    seqs = [event.seq for event in record.logs[call.run_id] if event.call_changed.call.call_id == call.call_id]
    return record.written_at(call.run_id, seqs[-1])


def child_ends_are_reported_once(record: Record) -> Iterator[str]:
    """A run receives the end of each child run at most once."""
    told = [(row.run_id, row.call_id) for row in record.tables.commands.values() if row.name == "agent_ended"]
    for key in set(told):
        if told.count(key) > 1:
            yield f"run {key[0]} received the end of call {key[1]} {told.count(key)} times"


def ancestor_rules_apply(record: Record) -> Iterator[str]:
    """Each call is judged by the rules of all runs and conversations above it."""
    for effect in record.history.effects:
        missing = set(_led_to(record, effect.run_id)) - effect.ruled_by
        if missing:
            yield f"call {effect.call_id} ran without the rules of {sorted(missing)}"


def _led_to(record: Record, run_id: str) -> Iterator[str]:
    while run_id:
        run = record.runs[run_id]
        yield from (run_id, run.reports_to_conversation_id or run.conversation_id)
        run_id = run.parent_run_id


CHECKERS = (
    delegated_calls_match_their_child_runs,
    calls_settle_after_their_child_run,
    child_ends_are_reported_once,
    ancestor_rules_apply,
)
