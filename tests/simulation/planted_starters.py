"""Mutants of schedules and triggers."""

from __future__ import annotations

from dataclasses import replace

from tests.simulation.planted import Mutant

_TIMING = "pawl.job_store.schedules.timing"
_DELIVER = "pawl.job_store.ledger.rules.deliver"
# Every seed has schedules.
_SCHEDULES = (
    ("tests.simulation.schedules", "_PLAYED = 0.4", "_PLAYED = 1.0"),
    ("tests.simulation.timers", "        if draw.random() < 0.5:\n            return times\n", ""),
)
_TRIGGERS = (("tests.simulation.triggers", "_PLAYED = 0.3", "_PLAYED = 1.0"),)

_OF_SCHEDULES = (
    Mutant(
        name="schedules_go_on_after_their_end",
        module=_TIMING,
        text="min(timing.end_time or _TIME_MAX, until or begin + HORIZON)",
        instead="until or begin + HORIZON",
        checker="no_due_time_is_lost",
        seed=1,
    ),
    Mutant(
        name="schedules_begin_before_their_start",
        module=_TIMING,
        text="if timing.start_time is not None and timing.start_time > begin:",
        instead="if False:",
        checker="no_due_time_is_lost",
    ),
    Mutant(
        name="each_change_of_a_schedule_draws_another_jitter",
        module=_TIMING,
        text="hashlib.sha256(schedule_id.encode())",
        instead='hashlib.sha256(f"{schedule_id}{timing}".encode())',
        checker="jitter_is_bounded_and_stays",
    ),
)

_OF_TRIGGERS = (
    Mutant(
        name="each_copy_of_an_event_fires",
        module=_DELIVER,
        text="        if earlier is not None and earlier.outcome is not",
        instead="        if waits and earlier is not None and earlier.outcome is not",
        checker="each_event_starts_one_run",
        also=(("pawl.job_store.ledger.rules.submit", "if earlier is not None:", "if False:"),),
    ),
    Mutant(
        name="what_waits_is_forgotten",
        module=_DELIVER,
        text="            claim_at=claim_at,\n        )\n",
        instead="            claim_at=None,\n        )\n",
        checker="no_event_waits_for_ever",
    ),
    Mutant(
        name="events_that_another_one_replaced_wait_on",
        module=_DELIVER,
        text="        unit.trigger_events.put(replaced.key, replaced)\n",
        instead="",
        checker="no_event_waits_for_ever",
    ),
    Mutant(
        name="events_overtake_the_run_before",
        module=_DELIVER,
        text="        is_busy = is_open or (has_waiting and overlap is Overlap.QUEUE)\n",
        instead="        is_busy = False\n",
        checker="events_keep_apart",
    ),
)

OF_STARTERS = (
    *(replace(mutant, also=(*mutant.also, *_SCHEDULES)) for mutant in _OF_SCHEDULES),
    *(replace(mutant, also=(*mutant.also, *_TRIGGERS)) for mutant in _OF_TRIGGERS),
)
