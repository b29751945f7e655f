"""Mutants of goals."""

from __future__ import annotations

from tests.simulation.planted import Mutant

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
