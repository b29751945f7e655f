"""Faults planted in a good record: `make mutants`.

A checker that no fault triggers proves nothing, so each fault is named after the only checker that may find it. The
faults of the services must be strong enough too: `unfixed` plays a failover against services without its fix.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from pawl.agent_loop.goals.rules import Step
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.server.process import log_setup
from tests.chaos import faults, unfixed
from tests.chaos.checkers import judge
from tests.chaos.history import Kind, Operation, Outcome
from tests.chaos.play import Game, play
from tests.chaos.story import (
    BUTTON,
    CHECK,
    FLOW,
    FOREIGN,
    GOAL,
    JOB,
    JUDGEMENT,
    MAIN,
    NODE_AGAIN,
    NODE_RETRIED,
    OWNERS,
    PANEL_CALL,
    STOPPED,
    good_record,
    watch,
)
from tests.chaos.world import Record

Mutant = Callable[[Record], object]


def _operation(record: Record, kind: Kind) -> Operation:
    return next(operation for operation in record.history.operations if operation.kind is kind)


def _acknowledged(kind: Kind, run_id: str, *, call_id: str = "", content: str = "") -> Mutant:
    def plant(record: Record) -> None:
        store_id, user_id = OWNERS[FOREIGN]
        about = {"run_id": run_id, "call_id": call_id, "content": content}
        operation = record.history.invoke(kind, store_id=store_id, user_id=user_id, request_id="another", **about)
        record.history.answer(operation, Outcome.OK, run_id=run_id, run_state="RUNNING")

    return plant


def _started(run_id: str, run_state: str = "") -> Mutant:
    ok = Outcome.OK
    return lambda record: record.history.answer(_operation(record, Kind.START), ok, run_id=run_id, run_state=run_state)


def _operations(kind: Kind, **fields: Any) -> Mutant:
    def plant(record: Record) -> None:
        operations = record.history.operations
        operations[:] = [replace(o, **fields) if o.kind is kind else o for o in operations]

    return plant


def _logged(run_id: str, kind: str, change: Callable[[Any], object], place: int = 0) -> Mutant:
    def plant(record: Record) -> None:
        change([event for event in record.logs[run_id] if event.HasField(kind)][place])  # type: ignore[arg-type]
        watch(record)

    return plant


def _set(path: str, value: object) -> Callable[[Any], object]:
    *parents, name = path.split(".")

    def change(thing: Any) -> None:
        for parent in parents:
            thing = getattr(thing, parent)
        setattr(thing, name, value)

    return change


def _run(run_id: str, path: str, value: object) -> Mutant:
    return lambda record: _set(path, value)(record.runs[run_id])


def _notices(*told_of: Mapping[str, str]) -> Mutant:
    def plant(record: Record) -> None:
        logged = [event.message_added.message for event in record.logs[MAIN] if event.HasField("message_added")]
        for message in (*record.messages[f"conversation-{MAIN}"], *logged):
            if message.notices_json:
                message.notices_json = msgspec.json.encode(told_of)
        watch(record)

    return plant


def _call(call_id: str, change: Callable[[call_pb2.Call], object]) -> Mutant:
    def plant(record: Record) -> None:
        logged = [event.call_changed.call for event in record.logs[record.calls[call_id].run_id]]
        for call in (record.calls[call_id], *(each for each in logged if each.call_id == call_id)):
            change(call)
        watch(record)

    return plant


def _node_again(record: Record) -> None:
    _call(NODE_AGAIN, _set("call_id", NODE_RETRIED))(record)
    record.calls[NODE_RETRIED] = record.calls.pop(NODE_AGAIN)
    renamed = {NODE_AGAIN: NODE_RETRIED}
    record.effects[:] = [msgspec.structs.replace(each, key=renamed.get(each.key, each.key)) for each in record.effects]


def _reported_otherwise(record: Record) -> None:
    logged = [event.message_added.message for event in record.logs[GOAL] if event.HasField("message_added")]
    for message in (record.messages[f"conversation-{GOAL}"][-1], logged[-1]):
        message.text = "other"
    watch(record)


def _late_round(record: Record) -> None:
    log, run = record.logs[STOPPED], record.runs[STOPPED]
    late = event_pb2.RunEvent(store_id=run.store_id, run_id=STOPPED, event_id="late", attempt=1)
    late.round_started.round, late.round_started.model_attempt = 2, 1
    log.insert(len(log) - 1, late)
    for seq, event in enumerate(log, 1):
        event.seq = seq
    run.last_seq = len(log)
    watch(record)


def _first_model_again(record: Record) -> None:
    log = record.logs[MAIN]
    runs = [event.run_changed.run for event in log if event.HasField("run_changed")]
    for run in (record.runs[MAIN], *runs):
        run.options.model, run.options.model_fallbacks[:] = "one", ["two"]
    first, second = (event.round_started for event in log if event.HasField("round_started"))
    first.model, second.model = "two", "one"
    watch(record)


def _seen_otherwise(record: Record) -> None:
    seen = record.history.seen
    seen[3] = replace(seen[3], digest="other")


def _pressed_early(record: Record) -> None:
    record.effects[:] = [msgspec.structs.replace(e, time=1.0) if e.key == BUTTON else e for e in record.effects]


_NOTICE = {"job_id": JOB, "state": "COMPLETED"}

# Each mutant under the name of the checker that must find it.
MUTANTS: Mapping[str, Mutant] = {
    # An acknowledged run is missing.
    "accepted_messages_are_kept": _acknowledged(Kind.START, "run-lost", content="do what is lost"),
    # A repeated request made a second run.
    "requests_take_effect_once": _started(FOREIGN),
    # The ledger has another result than the accepted one.
    "accepted_commands_take_effect": _operations(Kind.RESULT, content='"other"'),
    # Two results for one call were accepted.
    "one_decision_and_one_result_per_call": _acknowledged(Kind.RESULT, MAIN, call_id=PANEL_CALL, content='"shown"'),
    # See _FOREIGN_ENDS.
    "runs_end": lambda _: None,
    "runs_do_not_fail": lambda _: None,
    # The provider answered 400.
    "model_refuses_nothing": lambda record: record.process_logs.refusals.append("model.log:1: chat.refused"),
    # A stop was acknowledged, but the run completed.
    "cancelled_runs_stay_cancelled": _acknowledged(Kind.CANCEL, FOREIGN),
    # A client saw another final state.
    "terminal_states_are_final": _started(MAIN, "CANCELLED"),
    # The last entry of a log is missing.
    "logs_have_no_gaps": _run(FOREIGN, "last_seq", 99),
    # A watcher saw an event that was never written.
    "watchers_saw_the_log": _seen_otherwise,
    # A worker wrote after its successor.
    "earlier_owners_stop_writing": _logged(FOREIGN, "round_started", _set("attempt", 2)),
    # The button was pressed twice.
    "effects_match_their_class": lambda record: record.effects.append(
        next(effect for effect in record.effects if effect.key == BUTTON)
    ),
    # The button was pressed before the ledger recorded the call.
    "intent_before_effect": _pressed_early,
    # The approved arguments differ.
    "gated_effects_were_approved": lambda record: record.history.operations.remove(_operation(record, Kind.APPROVE)),
    # More calls were made than granted.
    "grants_are_not_overused": _operations(Kind.APPROVE, series="0"),
    # The run of another user could be stopped.
    "nothing_crosses_stores_or_users": _acknowledged(Kind.TRESPASS, MAIN),
    # The user was not notified.
    "every_run_end_is_notified": lambda record: record.notifications[OWNERS[FOREIGN]].clear(),
    # A client got UNKNOWN.
    "no_internal_error_is_visible": lambda record: record.history.complain("UNKNOWN: unexpected"),
    # A call ended without a result.
    "one_result_per_call": _call(BUTTON, lambda call: call.ClearField("result")),
    # The model was called for a stopping run.
    "nothing_starts_after_a_cancel": _late_round,
    # A transition starts from a state that the run was not in.
    "state_changes_are_allowed": _logged(
        FOREIGN, "run_changed", _set("run_changed.from_state", run_pb2.RUN_STATE_WAITING), place=1
    ),
    # The row differs from the log.
    "state_is_the_fold_of_the_log": _run(FOREIGN, "output_text", "other"),
    # Watchers saw another text than the conversation has.
    "streamed_output_matches_the_message": _logged(MAIN, "output_delta", _set("output_delta.text", "other")),
    # The first round is missing.
    "rounds_start_in_order": _logged(FOREIGN, "round_started", _set("round_started.round", 2)),
    # The second round returned to the model that failed in the first.
    "failed_models_are_not_used_again": _first_model_again,
    # The end of the job is in no notice.
    "job_ends_are_reported": _notices(),
    # The end of the job is in two notices.
    "notices_are_delivered_once": _notices(_NOTICE, _NOTICE),
    # The job was started by another call.
    "detached_calls_have_their_job": _run(JOB, "parent_call_id", "call-other"),
    # A notice started the main run, which waited for people.
    "turns_never_wait_for_people": _run(MAIN, "generation", 1),
    # A node that had succeeded made another attempt.
    "nodes_that_succeeded_never_run_again": _node_again,
    # A map has the outputs of two items, but only one item.
    "batches_process_each_item_once": _run(FLOW, "output_json", b"2"),
    # The goal was checked twice after its attempt.
    "each_step_of_a_goal_is_made_once": lambda record: record.calls[CHECK].MergeFrom(
        call_pb2.Call(round=1, index=Step.JUDGEMENT)
    ),
    # The goal completed, but no check met it.
    "goals_end_for_their_reason": _call(JUDGEMENT, _set("result.content_json", b'"read_meter"')),
    # The report is not in the conversation.
    "goals_report_once": _reported_otherwise,
    # The job made its call once, although it must not make it.
    "series_keep_their_interval": _run(JOB, "job.iterations_max", 0),
}

# Final state of the other user's run for each mutant; empty if the run does not end.
_FOREIGN_ENDS = {"runs_end": "", "runs_do_not_fail": "FAILED"}

UNFIXED = "no_internal_error_is_visible"
UNFIXED_SEEDS = (3, 4, 5, 6)


def hunt(name: str) -> str:
    """Return what the checker of a mutant reports, or an empty string unless only this checker reports anything."""
    record = good_record(foreign_end=_FOREIGN_ENDS.get(name, "COMPLETED"))
    MUTANTS[name](record)
    violations = judge(record)
    return violations[0] if {violation.split(":")[0] for violation in violations} == {name} else ""


def hunt_unfixed() -> str:
    """Return a report of a failover against services without the fix, or an empty string if no checker finds the fault.

    Several seeds are tried, because the point at which the failover hits depends on the speed of the machine.
    """
    return next(filter(None, map(_play_unfixed, UNFIXED_SEEDS)), "")


def _play_unfixed(seed: int) -> str:
    game = Game(
        seed=seed, phases=faults.named([faults.DEMOTE]), quiet_seconds=1.0, pace_seconds=0.5, settle_seconds=120.0
    )
    with tempfile.TemporaryDirectory(prefix="pawl-chaos-") as folder:
        try:
            found = asyncio.run(play(game, Path(folder), extra=unfixed.prepare(Path(folder))))
        except TimeoutError:
            return ""
    return next((violation for violation in found.violations if violation.startswith(f"{UNFIXED}:")), "")


def main() -> int:
    log_setup.configure(service="chaos", instance_id="", level="critical", log_format="console")
    found = {name: hunt(name) for name in MUTANTS} | {"a failover to a suite without its fix": hunt_unfixed()}
    for name, violation in found.items():
        print(f"chaos: {violation or f'{name}: MISSED'}")  # noqa: T201
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
