"""Faults planted in a record in which all was right, each of which exactly one checker must find: `make mutants`.

A checker that no mutant turns red proves nothing. The checkers judge records, so a mutant is a wrong record. Each is
named after the checker that must find it. A nemesis that does not do what a mend is for proves nothing either: so it
plays a failover to a suite without the mends of `unmended`.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import msgspec

from pawl.chassis import logs
from pawl.event.v1 import event_pb2, run_pb2, schedule_pb2
from tests.chaos import nemesis, unmended
from tests.chaos.checkers import judge
from tests.chaos.faults import DEMOTE
from tests.chaos.history import Kind, Operation, Outcome
from tests.chaos.play import Game, play
from tests.chaos.record import Record
from tests.chaos.story import BUTTON, EVENT, FIRST_DUE, FOREIGN, JOB, MAIN, OWNERS, PANEL_CALL, STOPPED, told, watch


def _operation(record: Record, kind: Kind) -> Operation:
    return next(operation for operation in record.history.operations if operation.kind is kind)


def _acknowledged(
    record: Record, kind: Kind, request_id: str, run_id: str, *, call_id: str = "", content: str = ""
) -> None:
    history = record.history
    store_id, user_id = OWNERS[FOREIGN]
    about = {"run_id": run_id, "call_id": call_id, "content": content}
    operation = history.invoke(kind, store_id=store_id, user_id=user_id, request_id=request_id, **about)
    history.answer(operation, Outcome.OK, run_id=run_id, run_state="RUNNING")


def _log(record: Record, run_id: str, kind: str) -> event_pb2.RunEvent:
    return next(event for event in record.logs[run_id] if event.HasField(kind))  # type: ignore[arg-type]


def accepted_messages_are_kept() -> Record:
    """A run that was acknowledged is gone."""
    record = told()
    _acknowledged(record, Kind.START, "lost", "run-lost", content="do what is lost")
    return record


def requests_have_their_effect_once() -> Record:
    """A request that was sent again made a second run."""
    record = told()
    record.history.answer(_operation(record, Kind.START), Outcome.OK, run_id=FOREIGN)
    return record


def accepted_commands_have_their_effect() -> Record:
    """Another result than the accepted one is in the ledger."""
    record = told()
    operations = record.history.operations
    operations[:] = [replace(o, content='"other"') if o.kind is Kind.RESULT else o for o in operations]
    return record


def one_decision_and_one_result_per_call() -> Record:
    """Two results for one call were accepted."""
    record = told()
    _acknowledged(record, Kind.RESULT, "again", MAIN, call_id=PANEL_CALL, content='"shown"')
    return record


def runs_end() -> Record:
    """A run was never finished."""
    return told(foreign_end="")


def runs_do_not_fail() -> Record:
    """A run failed."""
    return told(foreign_end="FAILED")


def model_refuses_nothing() -> Record:
    """The provider answered 400."""
    record = told()
    record.process_logs.refusals.append("model.log:1: chat.refused")
    return record


def cancelled_runs_stay_stopped() -> Record:
    """A stop was acknowledged, and the run was completed."""
    record = told()
    _acknowledged(record, Kind.CANCEL, "stop", FOREIGN)
    return record


def terminal_states_stay() -> Record:
    """A client was shown another end."""
    record = told()
    record.history.answer(_operation(record, Kind.START), Outcome.OK, run_id=MAIN, run_state="CANCELLED")
    return record


def logs_have_no_gaps() -> Record:
    """The last entry of a log is missing."""
    record = told()
    record.runs[FOREIGN].last_seq += 1
    return record


def watchers_saw_the_log() -> Record:
    """A watcher saw something that was never written."""
    record = told()
    seen = record.history.seen
    seen[3] = replace(seen[3], digest="other")
    return record


def owners_follow_one_another() -> Record:
    """A worker wrote after its successor had."""
    record = told()
    _log(record, FOREIGN, "round_started").attempt = 2
    watch(record)
    return record


def effects_happen_as_their_class_allows() -> Record:
    """The button was pressed twice."""
    record = told()
    record.effects.append(next(effect for effect in record.effects if effect.key == BUTTON))
    return record


def intent_before_effect() -> Record:
    """The button was pressed before the ledger said so."""
    record = told()
    record.effects[:] = [msgspec.structs.replace(e, time=1.0) if e.key == BUTTON else e for e in record.effects]
    return record


def gated_effects_were_approved() -> Record:
    """What was approved has other arguments."""
    record = told()
    record.history.operations.remove(_operation(record, Kind.APPROVE))
    return record


def nothing_crosses_stores_or_users() -> Record:
    """Somebody else's run could be stopped."""
    record = told()
    _acknowledged(record, Kind.TRESPASS, "trespass", MAIN)
    return record


def people_are_told_of_every_end() -> Record:
    """Nobody was told."""
    record = told()
    record.notifications[OWNERS[FOREIGN]].clear()
    return record


def nobody_saw_what_never_should_be_seen() -> Record:
    """A client got UNKNOWN."""
    record = told()
    record.history.complain("UNKNOWN: unexpected")
    return record


def one_result_per_call() -> Record:
    """A call ended without a result."""
    record = told()
    record.calls[BUTTON].ClearField("result")
    for event in record.logs[MAIN]:
        if event.call_changed.call.call_id == BUTTON:
            event.call_changed.call.ClearField("result")
    watch(record)
    return record


def nothing_starts_after_a_cancel() -> Record:
    """The model was called for a run that was being stopped."""
    record = told()
    log, run = record.logs[STOPPED], record.runs[STOPPED]
    late = event_pb2.RunEvent(store_id=run.store_id, run_id=STOPPED, event_id="late", attempt=1)
    late.round_started.round, late.round_started.model_attempt = 2, 1
    log.insert(len(log) - 1, late)
    for seq, event in enumerate(log, 1):
        event.seq = seq
    run.last_seq = len(log)
    watch(record)
    return record


def states_move_along_the_tables() -> Record:
    """A run began to run from a state that it was not in."""
    record = told()
    changed = [event.run_changed for event in record.logs[FOREIGN] if event.HasField("run_changed")]
    changed[1].from_state = run_pb2.RUN_STATE_WAITING
    watch(record)
    return record


def state_is_the_fold_of_the_log() -> Record:
    """The row says what the log does not."""
    record = told()
    record.runs[FOREIGN].output_text = "other"
    return record


def what_was_shown_was_said() -> Record:
    """Watchers saw another text than the conversation has."""
    record = told()
    _log(record, MAIN, "output_delta").output_delta.text = "other"
    watch(record)
    return record


def rounds_begin_in_order() -> Record:
    """The first round was left out."""
    record = told()
    _log(record, FOREIGN, "round_started").round_started.round = 2
    watch(record)
    return record


def failed_models_are_left() -> Record:
    """The second round went back to the model that had failed in the first."""
    record = told()
    log = record.logs[MAIN]
    runs = [event.run_changed.run for event in log if event.HasField("run_changed")]
    for run in (record.runs[MAIN], *runs):
        run.options.model, run.options.model_fallbacks[:] = "one", ["two"]
    first, second = (event.round_started for event in log if event.HasField("round_started"))
    first.model, second.model = "two", "one"
    watch(record)
    return record


def _with_notices(record: Record, notices_json: bytes) -> Record:
    """Return the record with other notices in the conversation of the main run."""
    kept = record.messages[f"conversation-{MAIN}"]
    logged = [event.message_added.message for event in record.logs[MAIN] if event.HasField("message_added")]
    for message in (*kept, *logged):
        if message.notices_json:
            message.notices_json = notices_json
    watch(record)
    return record


def ends_of_jobs_are_told() -> Record:
    """The end of the job is in no notice."""
    return _with_notices(told(), b"[]")


def notices_are_new_once() -> Record:
    """The end of the job is told twice."""
    notice = {"job_id": JOB, "state": "COMPLETED"}
    return _with_notices(told(), msgspec.json.encode([notice, notice]))


def calls_in_the_background_have_their_job() -> Record:
    """The run that began the job does a call of another one."""
    record = told()
    record.runs[MAIN].depth = 1
    return record


def turns_wait_for_nobody() -> Record:
    """The main run, which waited for people, was begun by a notice."""
    record = told()
    record.runs[MAIN].generation = 1
    return record


def series_keep_their_beat() -> Record:
    """The job did its call once, and was not to do it."""
    record = told()
    record.runs[JOB].job.iterations_max = 0
    return record


def grants_are_used_as_often_as_given() -> Record:
    """More calls were made than granted."""
    record = told()
    operations = record.history.operations
    operations[:] = [replace(o, series="0") if o.kind is Kind.APPROVE else o for o in operations]
    return record


def no_fire_is_lost_or_doubled() -> Record:
    """A due time has not fired."""
    record = told()
    del record.started[OWNERS[MAIN]].fires[FIRST_DUE]
    return record


def each_event_starts_one_run() -> Record:
    """An event that was sent again has started another run."""
    record = told()
    record.started[OWNERS[MAIN]].events[EVENT][1] = schedule_pb2.ScheduleFire(run_id=MAIN)
    return record


def deliveries_arrive_and_stay_the_same() -> Record:
    """A delivery that was tried again had other bytes."""
    record = told()
    received = record.started[OWNERS[MAIN]].received
    received[1] = replace(received[1], body=received[1].body + b" ")
    return record


MUTANTS: Mapping[str, Callable[[], Record]] = {
    mutant.__name__: mutant
    for mutant in (
        accepted_messages_are_kept,
        requests_have_their_effect_once,
        accepted_commands_have_their_effect,
        one_decision_and_one_result_per_call,
        runs_end,
        runs_do_not_fail,
        model_refuses_nothing,
        cancelled_runs_stay_stopped,
        terminal_states_stay,
        logs_have_no_gaps,
        watchers_saw_the_log,
        owners_follow_one_another,
        effects_happen_as_their_class_allows,
        intent_before_effect,
        gated_effects_were_approved,
        grants_are_used_as_often_as_given,
        nothing_crosses_stores_or_users,
        people_are_told_of_every_end,
        nobody_saw_what_never_should_be_seen,
        one_result_per_call,
        nothing_starts_after_a_cancel,
        states_move_along_the_tables,
        state_is_the_fold_of_the_log,
        what_was_shown_was_said,
        rounds_begin_in_order,
        failed_models_are_left,
        ends_of_jobs_are_told,
        notices_are_new_once,
        calls_in_the_background_have_their_job,
        turns_wait_for_nobody,
        series_keep_their_beat,
        no_fire_is_lost_or_doubled,
        each_event_starts_one_run,
        deliveries_arrive_and_stay_the_same,
    )
}

UNMENDED_SEEDS = (3, 4, 5, 6)


def hunt(name: str) -> str:
    """Return what the checker of a mutant says; empty if nothing, or if another checker says something too."""
    violations = judge(MUTANTS[name]())
    return violations[0] if {violation.split(":")[0] for violation in violations} == {name} else ""


def hunt_unmended(name: str) -> str:
    """Return what a checker says of a game against a suite without the mends that it is to miss; empty if nothing.

    Where the failover meets the runs depends on how fast the machine is, so that there are several games.
    """
    return next(filter(None, (_play_unmended(name, seed) for seed in UNMENDED_SEEDS)), "")


def _play_unmended(name: str, seed: int) -> str:
    # Where runs are not to end nobody waits for them as long.
    settle_seconds = 40.0 if name == "runs_end" else 120.0
    phases = nemesis.named([DEMOTE])
    game = Game(seed=seed, phases=phases, quiet_seconds=1.0, pace_seconds=0.5, settle_seconds=settle_seconds)
    with tempfile.TemporaryDirectory(prefix="pawl-chaos-") as folder:
        try:
            found = asyncio.run(play(game, Path(folder), extra=unmended.prepare(name, Path(folder))))
        except TimeoutError:
            return "runs_end: some did not" if name == "runs_end" else ""
    return next((violation for violation in found.violations if violation.split(":")[0] == name), "")


def main() -> int:
    """Hunt all mutants; 1 if a checker missed one."""
    logs.configure(service="chaos", instance_id="", level="critical", log_format="console")
    missed = 0
    hunts = [(name, hunt) for name in MUTANTS] + [(name, hunt_unmended) for name in unmended.UNMENDED]
    for name, look in hunts:
        found = look(name)
        missed += not found
        print(f"chaos: {found or f'{name}: MISSED'}")  # noqa: T201
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
