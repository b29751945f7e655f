"""The Mutant type, and mutants of inboxes, approvers' credentials, schedules, jobs and notices."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """Replaces `text` in `module` by `instead`, a fault that `checker` must find.

    `seed` found it last time and is tried first, followed by `seeds` other seeds.
    """

    name: str
    module: str
    text: str
    instead: str
    checker: str
    seed: int = 0
    seeds: int = 200
    also: tuple[tuple[str, str, str], ...] = ()

    @property
    def edits(self) -> tuple[tuple[str, str, str], ...]:
        return ((self.module, self.text, self.instead), *self.also)


# Found by the model-based tests in tests/ledger, whose seeds `seeds` counts.
REFERENCE_MODEL = "the reference model"

_COMMIT = "pawl.job_store.ledger.rules.commit"

OF_THE_LEDGER = (
    Mutant(
        name="effects_precede_their_record",
        module="pawl.job_store.ledger.rules.calls",
        text="if not (change.only_reads and change.attempt > 0 and change.state.is_terminal):",
        instead="if not (change.attempt > 0 and change.state.is_terminal):",
        checker="only_reads_run_before_they_are_recorded",
        also=(
            (
                "tests.simulation.registry",
                "any(verdict.effect_class is not EffectClass.READ_ONLY for verdict in not_refused)",
                "any(verdict.effect_class not in REPEATABLE for verdict in not_refused)",
            ),
        ),
    ),
    Mutant(
        name="outdated_steps_are_written",
        module="tests.simulation.job_store",
        text="return tables.runs.get(step.cached.key) is step.cached.version",
        instead="return True",
        checker=REFERENCE_MODEL,
        seed=2,
    ),
    Mutant(
        name="outdated_steps_are_refused",
        module="tests.simulation.job_store",
        text="            if self._is_current(step):",
        instead="            outcomes[step.number] = LeaseLost()\n            if self._is_current(step):",
        checker=REFERENCE_MODEL,
        seed=2,
        also=(
            (
                "tests.simulation.job_store",
                "from pawl.job_store.ledger.cache import RunCache\n",
                "from pawl.errors import LeaseLost\nfrom pawl.job_store.ledger.cache import RunCache\n",
            ),
        ),
    ),
    Mutant(
        name="steps_that_need_other_runs_take_one_statement",
        module="pawl.job_store.ledger.rules.commit",
        text="step=self.run if is_alone else None,",
        instead="step=self.run,",
        checker=REFERENCE_MODEL,
        seed=42,
    ),
    Mutant(
        name="inboxes_accept_one_message_too_many",
        module="pawl.job_store.ledger.rules.inbox",
        text="if run.steers_waiting >= limits.commands_max or",
        instead="if run.steers_waiting > limits.commands_max or",
        checker=REFERENCE_MODEL,
        seed=144,
        seeds=800,
    ),
    Mutant(
        name="read_top_ups_free_message_slots",
        module=_COMMIT,
        text="steers_waiting=max(0, run.steers_waiting - len(steers) - self.events_taken),",
        instead="steers_waiting=max(0, run.steers_waiting - len(self.consumed)),",
        checker=REFERENCE_MODEL,
        seed=1,
    ),
    Mutant(
        name="inboxes_are_unbounded",
        module="pawl.job_store.ledger.rules.inbox",
        text="if run.steers_waiting >= limits.commands_max or size_bytes > limits.bytes_max:",
        instead="if False:",
        checker="no_crash",
    ),
    Mutant(
        name="refusals_are_unbounded",
        module="pawl.job_store.ledger.rules.inbox",
        text="    if run.idle_receipts >= limits.idle_receipts_max:",
        instead="    if False:",
        checker=REFERENCE_MODEL,
        seed=2,
    ),
    Mutant(
        name="inboxes_are_consumed_whole",
        module="pawl.agent_loop.loop.rules.planning",
        text="    if count == len(commands):",
        instead="    if True:",
        checker="no_crash",
        seeds=800,
        seed=2008,
    ),
    Mutant(
        name="credential_approves_twice",
        module="pawl.job_store.ledger.rules.decisions",
        text="if any(is_same_credential(self.credential_id, approval.credential_id) for approval in call.approvals):",
        instead="if False:",
        checker=REFERENCE_MODEL,
        seed=8,
    ),
    Mutant(
        name="creator_of_the_key_may_approve",
        module="pawl.job_store.ledger.rules.decisions",
        text="people = {self.user_id, self.delegate_user_id, *self.people} - ",
        instead="people = {self.user_id, self.delegate_user_id} - ",
        checker=REFERENCE_MODEL,
        seed=7,
    ),
    Mutant(
        name="user_who_steered_the_run_may_approve",
        module="pawl.job_store.ledger.rules.decisions",
        text="people_of(run).union(run.steered_by)",
        instead="people_of(run)",
        checker=REFERENCE_MODEL,
        seed=212,
    ),
    Mutant(
        name="steering_users_of_child_runs_are_forgotten",
        module="pawl.job_store.ledger.rules.stop",
        text="{*parent.steered_by, *run.steered_by}",
        instead="parent.steered_by",
        checker=REFERENCE_MODEL,
        seed=508,
    ),
    Mutant(
        name="starting_credential_may_approve",
        module="pawl.job_store.ledger.rules.decisions",
        text="if several > 1 and is_same_credential(self.credential_id, run.credential_id):",
        instead="if False:",
        checker=REFERENCE_MODEL,
        seed=8,
    ),
    Mutant(
        name="run_tools_are_looked_up_in_the_registry",
        module="pawl.agent_loop.loop.tool_calls",
        text="return call if own is None else replace(call, own_tool=own)",
        instead="return call",
        checker="own_tools_stay_with_their_run",
        seed=0,
    ),
    Mutant(
        name="run_tool_calls_are_offered_to_any_client",
        module="pawl.job_store.ledger.rules.offers",
        text="own.client_id == client_id",
        instead="True",
        checker="own_calls_stay_with_their_client",
        also=(("pawl.agent_loop.api.offers", "return own.client_id == self._client.client_id", "return True"),),
        seed=11,
    ),
    Mutant(
        name="fires_ignore_changed_schedules",
        module="pawl.job_store.ledger.rules.fire",
        text="if row.generation != self.generation or not is_due:",
        instead="if False:",
        checker="each_due_time_fires_once",
        seed=3,
    ),
    Mutant(
        name="triggers_are_forgotten",
        module="pawl.job_store.ledger.rules.fire",
        text="for fire in row.fires if self.request_id else ():",
        instead="for fire in ():",
        checker="each_due_time_fires_once",
        seed=72,
        also=(("pawl.job_store.ledger.rules.submit", "if earlier is not None:", "if False:"),),
    ),
    Mutant(
        name="fires_do_not_name_their_runs",
        module="pawl.job_store.ledger.rules.fire",
        text='    return Start(FireOutcome.STARTED, "", run.run_id, run.conversation_id)',
        instead="    return Start(FireOutcome.STARTED)",
        checker="each_fire_has_its_run",
        seed=2,
    ),
    Mutant(
        name="fires_do_not_wait_for_the_previous_run",
        module="pawl.job_store.schedules.rules",
        text="if not is_busy or overlap is Overlap.ALLOW:",
        instead="if True:",
        checker="fires_do_not_overlap",
        seed=3,
    ),
    Mutant(
        name="schedule_changes_lose_due_times",
        module="pawl.job_store.schedules.rules",
        text="    if timing.same_times(requested, row.definition):",
        instead="    if False:",
        checker="no_due_time_is_lost",
        seed=13,
    ),
    Mutant(
        name="missed_fires_are_not_caught_up",
        module="pawl.job_store.schedules.timing",
        text="    first = max(due, caught_up_from(timing, now))",
        instead="    first = max(due, now)",
        checker="no_due_time_is_lost",
        seed=17,
    ),
    Mutant(
        name="at_most_one_fire_per_second",
        module="pawl.agent_loop.schedules.rpc",
        text="            await self._fire_all(due, start)",
        instead="            await self._fire_all(due, start)\n"
        "            await self._clock.sleep(wait_seconds if due else 0)",
        checker="no_due_time_is_lost",
        seed=47,
        seeds=600,
    ),
)


_LEDGER = "pawl.job_store.ledger.rules.jobs"
_LOOP = "pawl.agent_loop.loop.rules.jobs"

OF_JOBS = (
    Mutant(
        name="jobs_drop_the_rules_of_their_run",
        module=_LOOP,
        text="above=run.chain,",
        instead="above=(),",
        checker="ancestor_rules_apply",
        seed=6,
    ),
    Mutant(
        name="delegation_exceeds_its_depth",
        module="pawl.agent_loop.loop.rules.delegation",
        text="return run.depth < run.options.limits.agent_depth_max",
        instead="return run.depth <= run.options.limits.agent_depth_max",
        checker="delegated_calls_match_their_child_runs",
        seed=25,
    ),
    Mutant(
        name="series_exceed_their_grant",
        module="pawl.job_store.ledger.rules.grants",
        text="and grant.uses < grant.series.iterations_max",
        instead="",
        checker="series_stay_within_their_grant",
        also=(
            (
                "pawl.agent_loop.loop.rules.job_program",
                "run.round >= job.iterations_max",
                "run.round > job.iterations_max",
            ),
            ("tests.simulation.registry", "if len(used | {call.call_id}) <= series.iterations_max:", "if True:"),
        ),
        seed=25,
    ),
    Mutant(
        name="grants_survive_a_raised_approval_count",
        module="pawl.agent_loop.loop.drive",
        text="as_deployed(run.options, self._dependencies.approvals_required)",
        instead="as_deployed(run.options, 1)",
        checker="grants_have_enough_approvers",
        seed=58,
    ),
    Mutant(
        name="grants_ignore_the_number_of_approvers",
        module="pawl.agent_loop.loop.rules.run",
        text="not self.ended and len({each.user_id for each in self.approvals}) >= max(1, approvals_required)",
        instead="not self.ended",
        checker="grants_have_enough_approvers",
        also=(("pawl.job_store.ledger.rules.grants", "(change.approvals_required <= 1 or", "(True or"),),
        seed=111,
    ),
    Mutant(
        name="child_ends_are_reported_twice",
        module="pawl.job_store.ledger.rules.stop",
        text="    turn.wake(unit, inbox.accept(unit, parent, incoming))",
        instead="    parent = inbox.accept(unit, parent, incoming)\n"
        "    again = inbox.arrived(unit, parent, name=inbox.AGENT_ENDED, payload=payload, call_id=call.call_id)\n"
        "    turn.wake(unit, inbox.accept(unit, parent, again))",
        checker="child_ends_are_reported_once",
        seed=10,
    ),
    Mutant(
        name="jobs_report_to_the_conversation_of_their_call",
        module="pawl.job_store.ledger.rules.rows",
        text="return self.root_conversation_id or self.reports_to or self.conversation_id",
        instead="return self.reports_to or self.conversation_id",
        checker="detached_calls_have_their_job",
        seed=25,
    ),
    Mutant(
        name="notices_pass_over_delegated_runs",
        module="pawl.job_store.ledger.rules.background",
        text='return self.above[0] if len(self.above) > 1 else RunId("")',
        instead='return RunId("")',
        checker="notices_enter_the_nearest_agent",
        seed=46,
    ),
    Mutant(
        name="ended_runs_keep_their_notices",
        module="pawl.job_store.ledger.rules.background",
        text="for run_id in each.above[:-1] if run_id not in ended)",
        instead="for run_id in each.above[:-1])",
        checker="job_ends_are_reported_or_dismissed",
        seed=25,
    ),
    Mutant(
        name="notices_die_with_their_delegated_run",
        module=_LEDGER,
        text='answered_by = run.run_id if run.state is RunState.COMPLETED else RunId("")',
        instead="answered_by = run.run_id",
        checker="job_ends_are_reported_or_dismissed",
        seed=91,
    ),
    Mutant(
        name="notices_enter_again",
        module=_LEDGER,
        text="replace(each, entered_by=run.run_id) if",
        instead="replace(each, tries=each.tries) if",
        checker="notices_are_delivered_once",
        seed=1,
    ),
    Mutant(
        name="notices_enter_runs_of_others",
        module="pawl.job_store.ledger.rules.background",
        text="for each in waiting if each.user_id == user_id and not each.entered_by",
        instead="for each in waiting if not each.entered_by",
        checker="notices_stay_with_their_user",
        seed=51,
    ),
    Mutant(
        name="every_job_is_reported_as_a_success",
        module=_LOOP,
        text='shown["state"] = run.state.name',
        instead='shown["state"] = "COMPLETED"',
        checker="notices_are_delivered_once",
        seed=1,
    ),
    Mutant(
        name="late_notices_wait_for_the_user",
        module=_LEDGER,
        text="    for is_iteration, _, job in candidates:\n",
        instead="    for is_iteration, _, job in candidates[:0]:\n",
        checker="job_ends_are_reported_or_dismissed",
        seed=12,
    ),
    Mutant(
        name="ended_jobs_stay_open",
        module=_LEDGER,
        text="if not is_end or each.run_id != job.run_id)",
        instead=")",
        checker="jobs_are_counted",
        seed=1,
    ),
    Mutant(
        name="turns_start_during_user_runs",
        module=_LEDGER,
        text="    if receiver is None:\n        _start_turn",
        instead="    if True:\n        _start_turn",
        checker="one_run_at_a_time",
        seed=1,
    ),
    Mutant(
        name="messages_wait_for_turns",
        module="pawl.job_store.ledger.rules.submit",
        text="(is_to_end or not jobs.has_started(active))",
        instead="is_to_end",
        checker="messages_pass_turns",
        seed=21,
    ),
    Mutant(
        name="turns_follow_immediately",
        module=_LEDGER,
        text="max(unit.now, recent[-1].time + TURN_DISTANCE) if recent else unit.now",
        instead="unit.now",
        checker="turns_keep_their_minimum_interval",
        seed=23,
    ),
    Mutant(
        name="late_turns_count_from_their_due_time",
        module=_LEDGER,
        text="(*background.turn_times[:-1], *_started_at(run)) if run.is_turn else background.turn_times",
        instead="background.turn_times",
        checker="turns_keep_their_minimum_interval",
        seed=23,
    ),
    Mutant(
        name="turns_wait_for_people",
        module=_LOOP,
        text="    if not state.run.is_turn:\n        return state\n",
        instead="    if True:\n        return state\n",
        checker="turns_never_wait_for_people",
        seed=23,
    ),
    Mutant(
        name="iterations_follow_immediately",
        module="pawl.agent_loop.loop.rules.job_program",
        text="math.floor(started + _TINY) + 1",
        instead="math.floor(started + _TINY)",
        checker="series_keep_their_interval",
        seed=6,
        also=(("pawl.agent_loop.loop.rules.job_program", "math.ceil(ended - _TINY)", "math.floor(ended)"),),
    ),
    Mutant(
        name="delayed_series_start_immediately",
        module="pawl.agent_loop.loop.rules.job_program",
        text="first = job.delay_first if last is None",
        instead="first = 0 if last is None",
        checker="series_keep_their_interval",
        seed=6,
    ),
    Mutant(
        name="series_continue_after_their_end",
        module="pawl.agent_loop.loop.rules.job_program",
        text="(due > job.end_time or (paused and now >= job.end_time))",
        instead="(paused and now >= job.end_time)",
        checker="series_keep_their_interval",
        seed=6,
    ),
    Mutant(
        name="iteration_notices_pile_up",
        module=_LEDGER,
        text="if each.run_id != job.run_id or each.occasion < first or each.entered_by)",
        instead="if True)",
        checker="one_iteration_waits",
        seed=6,
    ),
    Mutant(
        name="monitors_fire_without_an_edge",
        module="pawl.agent_loop.loop.rules.monitor",
        text="fired_time=now, is_armed=False",
        instead="fired_time=now, is_armed=True",
        checker="monitors_fire_on_edges",
        seed=25,
    ),
    Mutant(
        name="monitors_forget_their_pause",
        module="pawl.agent_loop.loop.rules.monitor",
        text="has_passed(cursor.fired_time, now, monitor.pause_seconds)",
        instead="True",
        checker="monitors_fire_on_edges",
        seed=25,
    ),
    Mutant(
        name="paused_jobs_continue",
        module="pawl.agent_loop.loop.rules.job_program",
        text="(WaitKind.PAUSED,) if cursor.is_paused else ()",
        instead="()",
        checker="paused_jobs_start_nothing",
        seed=11,
    ),
    Mutant(
        name="silent_jobs_report_their_end",
        module=_LEDGER,
        text="(is_known or job.silent)",
        instead="is_known",
        checker="job_ends_are_reported_or_dismissed",
        seed=15,
    ),
    Mutant(
        name="trimming_removes_the_last_iterations",
        module="pawl.job_store.ledger.rules.trimming",
        text="round=run.mark_round, seq=run.mark_seq",
        instead="round=before.round, seq=before.last_seq",
        checker="trimming_keeps_the_last_iterations",
        seed=17,
    ),
    Mutant(
        name="trimming_removes_events_of_kept_calls",
        module="pawl.job_store.ledger.rules.trimming",
        text="mark_seq=before.last_seq",
        instead="mark_seq=before.last_seq + 40",
        checker="trimming_keeps_the_last_iterations",
        seed=9,
    ),
)
