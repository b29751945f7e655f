"""Faults of jobs, of what they tell, and of the turns that tell of them."""

from __future__ import annotations

from tests.simulation.planted import Mutant

_LEDGER = "pawl.job_store.domain.jobs"
_LOOP = "pawl.agent_loop.domain.jobs"

OF_JOBS = (
    Mutant(
        name="agents_are_limited_by_nothing",
        module="pawl.agent_loop.domain.delegation",
        text="return run.depth < run.options.limits.agent_depth_max",
        instead="return True",
        checker="each_call_has_its_run",
    ),
    Mutant(
        name="series_go_on_beyond_their_grant",
        module="pawl.job_store.domain.grants",
        text="and grant.uses < grant.series.iterations_max",
        instead="",
        checker="grants_cover_what_was_shown",
        also=(
            ("pawl.agent_loop.domain.job_program", "run.round >= job.iterations_max", "run.round > job.iterations_max"),
            ("tests.simulation.registry", "if len(used | {call.call_id}) <= series.iterations_max:", "if True:"),
        ),
    ),
    Mutant(
        name="grants_outlive_a_higher_number_of_approvals",
        module="pawl.agent_loop.app.drive",
        text="as_deployed(loaded.run.options, self._dependencies.approvals_required)",
        instead="as_deployed(loaded.run.options, 1)",
        checker="grants_are_of_as_many_people_as_are_wanted",
    ),
    Mutant(
        name="grants_count_for_any_number_of_people",
        module="pawl.agent_loop.domain.run",
        text="not self.ended and len({each.user_id for each in self.approvals}) >= max(1, approvals_required)",
        instead="not self.ended",
        checker="grants_are_of_as_many_people_as_are_wanted",
        also=(("pawl.job_store.domain.grants", "(change.approvals_required <= 1 or", "(True or"),),
    ),
    Mutant(
        name="agents_end_twice",
        module="pawl.job_store.domain.stop",
        text="    turn.wake(unit, inbox.accept(unit, parent, incoming))",
        instead="    parent = inbox.accept(unit, parent, incoming)\n"
        "    again = inbox.arrived(unit, parent, name=inbox.AGENT_ENDED, payload=payload, call_id=call.call_id)\n"
        "    turn.wake(unit, inbox.accept(unit, parent, again))",
        checker="agents_end_once",
    ),
    Mutant(
        name="agents_of_agents_begin_jobs",
        module=_LOOP,
        text="if run.depth or run.job is not None:",
        instead="if run.job is not None:",
        checker="calls_in_the_background_have_their_job",
    ),
    Mutant(
        name="notices_enter_again",
        module=_LEDGER,
        text="replace(each, entered_by=run.run_id) if",
        instead="replace(each, tries=each.tries) if",
        checker="notices_are_new_once",
    ),
    Mutant(
        name="every_job_is_told_of_as_a_success",
        module=_LOOP,
        text='told["state"] = str(notice.state)',
        instead='told["state"] = "COMPLETED"',
        checker="notices_are_new_once",
    ),
    Mutant(
        name="what_comes_too_late_for_a_run_waits_for_the_user",
        module=_LEDGER,
        text="    if told:\n",
        instead="    if False:\n",
        checker="ends_are_told_or_dismissed",
    ),
    Mutant(
        name="jobs_that_end_stay_open",
        module=_LEDGER,
        text="background.open_jobs - is_end)",
        instead="background.open_jobs)",
        checker="jobs_are_counted",
    ),
    Mutant(
        name="turns_begin_beside_the_user",
        module=_LEDGER,
        text="    if conversation.active_run_id is None:\n        _begin_turn",
        instead="    if True:\n        _begin_turn",
        checker="one_run_at_a_time",
    ),
    Mutant(
        name="messages_wait_for_turns",
        module="pawl.job_store.domain.submit",
        text="(is_to_end or not jobs.has_begun(active))",
        instead="is_to_end",
        checker="messages_pass_turns",
    ),
    Mutant(
        name="turns_follow_at_once",
        module=_LEDGER,
        text="max(unit.now, recent[-1] + TURN_DISTANCE) if recent else unit.now",
        instead="unit.now",
        checker="turns_keep_their_distance",
    ),
    Mutant(
        name="turns_that_begin_late_count_from_when_they_might_have",
        module=_LEDGER,
        text="(*background.turn_times[:-1], *_begun_at(run)) if run.is_turn else background.turn_times",
        instead="background.turn_times",
        checker="turns_keep_their_distance",
    ),
    Mutant(
        name="turns_ask_people",
        module=_LOOP,
        text="    if not state.run.is_turn:\n        return state\n",
        instead="    if True:\n        return state\n",
        checker="turns_wait_for_nobody",
    ),
    Mutant(
        name="iterations_come_at_once",
        module="pawl.agent_loop.domain.job_program",
        text="math.floor(began + _TINY) + 1",
        instead="math.floor(began + _TINY)",
        checker="series_keep_their_beat",
        also=(("pawl.agent_loop.domain.job_program", "math.ceil(ended - _TINY)", "math.floor(ended)"),),
    ),
    Mutant(
        name="series_that_are_to_wait_begin_at_once",
        module="pawl.agent_loop.domain.job_program",
        text="first = job.delay_first if last is None",
        instead="first = 0 if last is None",
        checker="series_keep_their_beat",
    ),
    Mutant(
        name="series_go_on_after_their_end",
        module="pawl.agent_loop.domain.job_program",
        text="(due > job.end_time or (paused and now >= job.end_time))",
        instead="(paused and now >= job.end_time)",
        checker="series_keep_their_beat",
    ),
    Mutant(
        name="iterations_wait_beside_each_other",
        module=_LEDGER,
        text="if each.run_id != job.run_id or each.occasion == 0 or each.entered_by)",
        instead="if True)",
        checker="one_iteration_waits",
    ),
    Mutant(
        name="monitors_fire_while_it_stays_so",
        module="pawl.agent_loop.domain.monitor",
        text="fired_time=now, is_armed=False",
        instead="fired_time=now, is_armed=True",
        checker="monitors_fire_on_edges",
    ),
    Mutant(
        name="monitors_forget_their_pause",
        module="pawl.agent_loop.domain.monitor",
        text="has_passed(cursor.fired_time, now, monitor.pause_seconds)",
        instead="True",
        checker="monitors_fire_on_edges",
    ),
    Mutant(
        name="paused_jobs_go_on",
        module="pawl.agent_loop.domain.job_program",
        text="(WaitKind.PAUSED,) if isinstance(cursor, PausedJob) else ()",
        instead="()",
        checker="paused_jobs_begin_nothing",
    ),
    Mutant(
        name="what_is_planned_begins_after_the_pause",
        module="pawl.job_store.domain.commit",
        text="if any(command.name == inbox.PAUSE for command in unit.inbox(run)):",
        instead="if False:",
        checker="paused_jobs_begin_nothing",
    ),
    Mutant(
        name="silent_jobs_tell_of_their_end",
        module=_LEDGER,
        text="(is_known or job.silent)",
        instead="is_known",
        checker="ends_are_told_or_dismissed",
    ),
    Mutant(
        name="trimming_takes_the_last_iterations",
        module="pawl.job_store.domain.trimming",
        text="round=run.mark_round, seq=run.mark_seq",
        instead="round=before.round, seq=before.last_seq",
        checker="series_keep_their_last_iterations",
    ),
    Mutant(
        name="trimming_takes_events_of_calls_that_stay",
        module="pawl.job_store.domain.trimming",
        text="mark_seq=before.last_seq",
        instead="mark_seq=before.last_seq + 40",
        checker="series_keep_their_last_iterations",
    ),
    Mutant(
        name="series_end_while_they_wait",
        module="pawl.agent_loop.domain.planning",
        text="decision.state is RunState.COMPLETED and written not in IN_MOTION",
        instead="False",
        checker="no_crash",
        seeds=600,
    ),
)
