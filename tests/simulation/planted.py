"""The Mutant type, and mutants of inboxes, approvers' credentials and schedules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """Replaces `text` with `instead` in `module`, which `checker` must find.

    `seed` found it last time and is tried first, then `seeds` others.
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


# Found by the model-based tests in tests/ledger; `seeds` are theirs.
REFERENCE_MODEL = "the reference model"

_COMMIT = "pawl.job_store.ledger.rules.commit"

OF_THE_LEDGER = (
    Mutant(
        name="effects_precede_their_record",
        module="pawl.job_store.ledger.rules.calls",
        text="if not (change.only_reads and change.attempt > 0 and change.state.is_terminal):",
        instead="if not (change.attempt > 0 and change.state.is_terminal):",
        checker="only_reads_run_before_they_are_recorded",
        seed=6,
        also=(
            (
                "tests.simulation.registry",
                "any(verdict.effect_class is not EffectClass.READ_ONLY for verdict in not_refused)",
                "any(verdict.effect_class not in REPEATABLE for verdict in not_refused)",
            ),
        ),
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
        text="steers_waiting=max(0, run.steers_waiting - len(steers)),",
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
        seed=286,
        seeds=800,
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
        seed=7,
    ),
    Mutant(
        name="steering_users_of_child_runs_are_forgotten",
        module="pawl.job_store.ledger.rules.stop",
        text="{*parent.steered_by, *run.steered_by}",
        instead="parent.steered_by",
        checker=REFERENCE_MODEL,
        seed=119,
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
        seed=37,
        also=(("pawl.agent_loop.api.offers", "return own.client_id == self._client.client_id", "return True"),),
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
        seed=35,
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
        text="    if timing.same_times(asked, row.definition):",
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
