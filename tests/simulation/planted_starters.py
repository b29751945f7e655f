"""Mutants of schedules, triggers, outages, workflow runs and goals."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.planted import REFERENCE_MODEL, Mutant

_TIMING = "pawl.job_store.schedules.timing"
_DELIVER = "pawl.job_store.ledger.rules.deliver"
# Every seed has schedules.
_SCHEDULES = (
    ("tests.simulation.schedules", "_PLAYED = 0.4", "_PLAYED = 1.0"),
    ("tests.simulation.timers", "        if draw.random() < 0.5:\n            return times\n", ""),
)
_TRIGGERS = (("tests.simulation.schedules", "_PLAYED = 0.3", "_PLAYED = 1.0"),)

_OF_SCHEDULES = (
    Mutant(
        name="schedules_fire_after_their_end",
        module=_TIMING,
        text="min(timing.end_time or _TIME_MAX, until or begin + HORIZON)",
        instead="until or begin + HORIZON",
        checker="no_due_time_is_lost",
        seed=1,
    ),
    Mutant(
        name="schedules_fire_before_their_start",
        module=_TIMING,
        text="if timing.start_time is not None and timing.start_time > begin:",
        instead="if False:",
        checker="no_due_time_is_lost",
    ),
    Mutant(
        name="each_schedule_change_draws_new_jitter",
        module=_TIMING,
        text="hashlib.sha256(schedule_id.encode())",
        instead='hashlib.sha256(f"{schedule_id}{timing}".encode())',
        checker="jitter_is_bounded_and_constant",
    ),
)

_OF_TRIGGERS = (
    Mutant(
        name="repeated_events_fire_again",
        module=_DELIVER,
        text="        if earlier is not None and earlier.outcome is not",
        instead="        if waits and earlier is not None and earlier.outcome is not",
        checker="each_event_starts_one_run",
        also=(("pawl.job_store.ledger.rules.submit", "if earlier is not None:", "if False:"),),
    ),
    Mutant(
        name="pending_events_are_forgotten",
        module=_DELIVER,
        text="            claim_at=claim_at,\n        )\n",
        instead="            claim_at=None,\n        )\n",
        checker="no_event_waits_forever",
    ),
    Mutant(
        name="replaced_events_stay_pending",
        module=_DELIVER,
        text="        unit.trigger_events.put(replaced.key, replaced)\n",
        instead="",
        checker="no_event_waits_forever",
    ),
    Mutant(
        name="events_do_not_wait_for_the_previous_run",
        module=_DELIVER,
        text="        is_busy = is_open or (has_waiting and overlap is Overlap.QUEUE)\n",
        instead="        is_busy = False\n",
        checker="events_do_not_overlap",
    ),
)

OF_STARTERS = (
    *(replace(mutant, also=(*mutant.also, *_SCHEDULES)) for mutant in _OF_SCHEDULES),
    *(replace(mutant, also=(*mutant.also, *_TRIGGERS)) for mutant in _OF_TRIGGERS),
)


_WORKER = "pawl.agent_loop.loop.worker"
_DRIVE = "pawl.agent_loop.loop.drive"
_RETRY = "pawl.chassis.rpc.retry"

_TRANSIENT = (
    _RETRY,
    "TRANSIENT: Final = (*UNAVAILABLE, Internal)",
    "TRANSIENT: Final = UNAVAILABLE",
)

_FORGETS = """\
        if claim in self._held and self._held[claim].task is ended:
            del self._held[claim]
        how = "lost" if ended.cancelled() else "crashed"
"""
_FORGETS_WHAT_ENDED_WELL = """\
        how = "lost" if ended.cancelled() else ended.result()
        del self._held[claim]
"""

OF_OUTAGES = (
    Mutant(
        name="unreleasable_runs_are_held_forever",
        module=_WORKER,
        text="        except Exception as error:  # noqa: BLE001  # the next renewal tries the run again\n",
        instead="        except RunNotFound as error:\n",
        checker="runs_end",
        seed=112,
        also=(
            (_WORKER, _FORGETS, _FORGETS_WHAT_ENDED_WELL),
            (_WORKER, "held is not None and not held.task.done()", "held is not None"),
            _TRANSIENT,
        ),
    ),
    Mutant(
        name="internal_errors_are_final_immediately",
        module=_TRANSIENT[0],
        text=_TRANSIENT[1],
        instead=_TRANSIENT[2],
        checker="no_crash",
        seed=2,
    ),
    Mutant(
        name="active_time_uses_the_database_clock",
        module=_DRIVE,
        text="        return self._dependencies.clock.monotonic() - self._active_from\n",
        instead="        return self._now() - self._active_from\n",
        checker="time_limits_use_real_time",
        seed=140,
        also=(
            (
                _DRIVE,
                "self._active_from = self._dependencies.clock.monotonic() - self._base.run.active_seconds",
                "self._active_from = self._now() - self._base.run.active_seconds",
            ),
        ),
    ),
    Mutant(
        name="interrupts_run_in_reverse_order",
        module="pawl.job_store.ledger.rules.submit",
        text="index = sum(waiting in interrupting for waiting in queue) if first else len(queue)",
        instead="index = 0 if first else len(queue)",
        checker=REFERENCE_MODEL,
        seed=96,
    ),
    Mutant(
        name="failed_models_are_used_again",
        module="pawl.agent_loop.loop.rules.state",
        text="self.loop.fallbacks_used, len(models) - 1",
        instead="self.loop.fallbacks_used * (self.loop.model_call is not None), len(models) - 1",
        checker="failed_models_are_not_used_again",
        seed=33,
    ),
)


_PROGRAM = "pawl.agent_loop.workflows.program"

OF_FLOWS = (
    Mutant(
        name="nodes_that_succeeded_run_again",
        module="pawl.agent_loop.workflows.graph",
        text="        if until is None or until or record.stop or repeat is None:",
        instead="        if record.attempt < 2 and repeat is None:\n"
        "            return replace(record, state=NodeState.RETRYING, attempt=2, due_ms=end_ms, end_ms=None)\n"
        "        if until is None or until or record.stop or repeat is None:",
        checker="nodes_that_succeeded_never_run_again",
        seed=1,
    ),
    Mutant(
        name="workflows_end_before_their_nodes",
        module=_PROGRAM,
        text="has_ended = graph.has_ended(self._graph, self._cursor) and self._cursor.failure is None",
        instead="has_ended = bool(self._cursor.nodes) and self._cursor.failure is None",
        checker="workflow_runs_end_as_their_nodes",
        seed=1,
    ),
    Mutant(
        name="maps_leave_items_out",
        module="pawl.agent_loop.workflows.drafting",
        text="items[indexes.start : indexes.stop]",
        instead="items[indexes.start + 1 : indexes.stop]",
        checker="batches_process_each_item_once",
        seed=4,
    ),
)


_RULES = "pawl.agent_loop.goals.rules"
# Every seed has goals.
_GOALS = (("tests.simulation.goals", "_PLAYED = 0.3", "_PLAYED = 1.0"),)

OF_GOALS = (
    Mutant(
        name="goals_ignore_the_check_before_their_first_attempt",
        module=_RULES,
        text="        met=found.met,\n",
        instead="        met=found.met and cursor.checked != 1,\n",
        checker="each_step_of_a_goal_is_made_once",
        also=_GOALS,
    ),
    Mutant(
        name="goals_make_one_attempt_too_many",
        module=_RULES,
        text="if len(cursor.attempts) >= goal.attempts_max:",
        instead="if len(cursor.attempts) > goal.attempts_max:",
        checker="goals_end_for_their_reason",
        also=_GOALS,
        seed=28,
    ),
    Mutant(
        name="goals_report_progress_in_each_step",
        module="pawl.agent_loop.goals.program",
        text="if progress is None or progress == base.run.job_progress:",
        instead="if progress is None:",
        checker="goals_report_once",
        also=_GOALS,
    ),
    Mutant(
        name="raised_limits_are_forgotten",
        module="pawl.agent_loop.loop.rules.step",
        text="goal_limits=_raised_limits(new) if changes_output else None,",
        instead="",
        checker="raised_limits_count_once",
        also=_GOALS,
    ),
)
