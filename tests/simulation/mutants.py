"""Faults planted in the product, each of which a named checker must find: `make mutants`.

A checker that no mutant turns red proves nothing. A mutant replaces pieces of text of modules while they are imported:
of the product; where one line of defence stands before another, or the promise is a stand-in's, of the stand-in.
"""

from __future__ import annotations

import importlib
import multiprocessing
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.simulation.chance import fix_hashes
from tests.simulation.planted import OF_THE_LEDGER, REFERENCE_MODEL, Mutant
from tests.simulation.planted_jobs import OF_JOBS
from tests.simulation.planted_outages import OF_OUTAGES
from tests.simulation.planted_starters import OF_STARTERS
from tests.simulation.planting import Finder

# Far beyond what one takes, also on a machine that is busy with other things.
_SECONDS_MAX = 900

_COMMIT = "pawl.job_store.domain.commit"
_COMMAND = "pawl.job_store.domain.command"

MUTANTS = (
    Mutant(
        name="steers_are_dropped",
        module="pawl.agent_loop.domain.planning",
        text="messages = [Message(role=Role.USER, run_id=state.run.run_id, text=text) for text in state.loop.steers]",
        instead="messages = []",
        checker="accepted_messages_are_kept",
    ),
    Mutant(
        name="messages_withdraw_what_was_taken",
        module="pawl.agent_loop.domain.planning",
        text="else 2 if isinstance(command.kind, Steer) else 1",
        instead="else 1",
        checker="accepted_commands_have_their_effect",
    ),
    Mutant(
        name="requests_are_forgotten",
        module="pawl.job_store.domain.submit",
        text="if earlier is not None:",
        instead="if earlier is not None and False:",
        checker="accepted_messages_are_kept",
    ),
    Mutant(
        name="callers_sleep_on",
        module="pawl.job_store.domain.stop",
        text="    turn.wake(unit, inbox.accept(unit, parent, incoming))",
        instead="    inbox.accept(unit, parent, incoming)",
        checker="runs_end",
    ),
    Mutant(
        name="agents_outlive_their_callers",
        module="pawl.job_store.domain.delegation",
        text="        stop.command(unit, run, StopCause.PARENT, cancel)",
        instead="        pass",
        checker="callers_wait_for_their_agents",
    ),
    Mutant(
        name="agents_are_free",
        module="pawl.agent_loop.domain.delegation",
        text="usage=state.run.usage + command.usage",
        instead="usage=state.run.usage",
        checker="callers_pay_for_their_agents",
    ),
    Mutant(
        name="approvals_among_several_are_not_audited",
        module="pawl.agent_loop.domain.command_rules",
        text="for given in (*call.approval.earlier_approvals, *call.approval.approvals)",
        instead="for given in ()",
        checker="decisions_are_audited",
        seed=1,
    ),
    Mutant(
        name="held_calls_are_not_audited",
        module="pawl.agent_loop.domain.command_rules",
        text="and call.state in {CallState.EXPIRED, CallState.CANCELLED}",
        instead="and call.state is CallState.EXPIRED",
        checker="held_calls_are_audited",
    ),
    Mutant(
        name="commands_come_again",
        module=_COMMAND,
        text="outcome = CommandOutcome.DUPLICATE if is_taken else earlier.outcome",
        instead="outcome = earlier.outcome",
        checker="commands_are_accepted_once",
        seed=1,
    ),
    Mutant(
        name="anybody_may_decide",
        module=_COMMAND,
        text="if run is None or not (self.as_operator or run.user_id == self.user_id or self._approves(unit, run)):",
        instead="if run is None:",
        checker="strangers_are_refused",
        seed=1,
    ),
    Mutant(
        name="leases_are_not_fenced",
        module=_COMMIT,
        text="if run.epoch != self.epoch or run.worker_id is None:",
        instead="if False:",
        checker="stale_epochs_change_nothing",
    ),
    Mutant(
        name="parked_runs_sleep_on",
        module=_COMMIT,
        text="claim_at = unit.now if unread else self.wake_time",
        instead="claim_at = None",
        checker="runs_end",
    ),
    Mutant(
        name="the_next_run_gets_no_turn",
        module="pawl.job_store.domain.turn",
        text="run = replace(run, queued_message=None, claim_at=claim_at or unit.now)\n    return",
        instead="run = replace(run, queued_message=None, claim_at=None if before == () else unit.now)\n    return",
        checker="runs_end",
        seed=6,
    ),
    Mutant(
        name="the_journal_runs_the_unknown_again",
        module="pawl.tool_registry.domain.journal",
        text="Step.RECONCILE if entry.effect is EffectClass.RECONCILABLE else Step.CONCLUDE_UNKNOWN",
        instead="Step.RUN",
        checker="effects_happen_once",
        seeds=600,
    ),
    Mutant(
        name="calls_run_before_the_commit",
        module="pawl.agent_loop.app.drive",
        text="        planned = self._step(plan)\n",
        instead="        planned = self._step(plan)\n"
        "        for work in plan.work:\n"
        "            if type(work).__name__ == 'Execute':\n"
        "                self._tasks.begin(work, plan.state)\n"
        "                await asyncio.sleep(1.0)\n",
        checker="intent_before_effect",
    ),
    Mutant(
        name="rounds_do_not_wait_for_calls",
        module="pawl.agent_loop.domain.agent_program",
        text="if state.loop.model_call is not None or state.open_calls:",
        instead="if state.loop.model_call is not None or len(state.open_calls) > 1:",
        checker="one_result_per_call",
    ),
    Mutant(
        name="feeds_give_what_they_did_not_see_in_order",
        module="pawl.agent_loop.adapters.views",
        text="seq=event.seq,",
        instead="seq=event.seq - event.seq // 7,",
        checker="seqs_without_gaps",
    ),
    Mutant(
        name="events_are_shown_before_they_are_written",
        module="tests.simulation.store",
        text="        store(tables, unit, events)\n",
        instead="        store(tables, unit, [])\n"
        "        asyncio.get_running_loop().call_later(0.5, store, tables, UnitOfWork(self._ids), events)\n",
        checker="durable_before_visible",
    ),
    Mutant(
        name="edited_calls_run_unedited",
        module="pawl.agent_loop.app.tool_calls",
        text="arguments_json=call.arguments_json,",
        instead="arguments_json=call.proposed_arguments.encode(),",
        checker="gated_calls_run_as_approved",
        also=(("tests.simulation.registry", "if verdict.disposition is Disposition.APPROVE and", "if False and"),),
    ),
    Mutant(
        name="results_come_twice",
        module="pawl.job_store.domain.refusals",
        text="if call.state.is_terminal or call.reserved_by:",
        instead="if call.state.is_terminal:",
        checker="one_front_end_result",
    ),
    Mutant(
        name="stopped_runs_go_on",
        module=_COMMIT,
        text="        if run.state is not RunState.CANCELLING:\n            return\n",
        instead="        return\n",
        checker="nothing_starts_after_a_cancel",
    ),
    Mutant(
        name="stops_are_taken_and_forgotten",
        module=_COMMAND,
        text="return stop.request(unit, run, command.cause)",
        instead="return inbox.accept(unit, run, incoming, consumed=True)",
        checker="accepted_cancels_stop",
    ),
    Mutant(
        name="runs_that_are_stopped_come_from_nowhere",
        module="pawl.job_store.domain.stop",
        text="RunChanged(from_state=run.state, run=stopping)",
        instead="RunChanged(from_state=None, run=stopping)",
        checker="states_move_along_the_tables",
    ),
    Mutant(
        name="events_say_another_attempt",
        module=_COMMIT,
        text="bodies.append(calls.changed(before, call))",
        instead="bodies.append(calls.changed(before, replace(call, attempt=call.attempt + 1)))",
        checker="state_is_the_fold_of_the_log",
    ),
    Mutant(
        name="messages_guess_their_seqs",
        module="pawl.agent_loop.domain.step",
        text="after_seq=old.last_seq if names_own_seqs else None",
        instead="after_seq=None",
        checker="what_was_shown_was_said",
        seeds=800,
    ),
    Mutant(
        name="late_copies_are_written",
        module=_COMMIT,
        text="if last is not None and last.epoch == self.epoch and self.commit_id < last.commit_id:",
        instead="if False:",
        checker=REFERENCE_MODEL,
    ),
    Mutant(
        name="rounds_are_left_out",
        module="pawl.agent_loop.domain.planning",
        text="run = replace(run, round=decision.round)",
        instead="run = replace(run, round=decision.round + (decision.round > 1))",
        checker="rounds_begin_in_order",
    ),
    Mutant(
        name="one_run_more_is_begun_than_there_are_places",
        module="pawl.job_store.domain.places",
        text="if taken >= limits.per_store or",
        instead="if taken > limits.per_store or",
        checker="limits_hold",
        seed=2,
    ),
    Mutant(
        name="budgets_are_not_looked_at",
        module="pawl.agent_loop.domain.budget",
        text="return rest is not None and rest < max(1, _needed_by_open_call(state))",
        instead="return False",
        checker="budgets_are_passed_by_one_call_at_most",
        also=(
            (
                "pawl.agent_loop.domain.budget",
                "return prompt_tokens + 1 if rest is not None and rest <= prompt_tokens else 0",
                "return 0",
            ),
        ),
    ),
    Mutant(
        name="top_ups_count_half",
        module=_COMMAND,
        text="budget, ceiling = run.token_budget + command.tokens,",
        instead="budget, ceiling = run.token_budget + command.tokens // 2,",
        checker="top_ups_count_once",
    ),
    Mutant(
        name="steps_of_old_epochs_are_taken",
        module=_COMMIT,
        text="if run.epoch != self.epoch or run.worker_id is None:",
        instead="if run.worker_id is None:",
        checker=REFERENCE_MODEL,
        seed=4,
    ),
    Mutant(
        name="steps_begin_at_another_seq",
        module=_COMMIT,
        text="first_seq=before.last_seq + 1 if",
        instead="first_seq=before.last_seq + 2 if",
        checker=REFERENCE_MODEL,
    ),
    Mutant(
        name="steps_end_runs_with_unread_top_ups",
        module=_COMMIT,
        text="{inbox.STEER, inbox.TOP_UP}",
        instead="{inbox.STEER}",
        checker=REFERENCE_MODEL,
        seeds=600,
    ),
    Mutant(
        name="calls_are_decided_twice",
        module="pawl.job_store.domain.refusals",
        text="if call.state.is_terminal or call.reserved_by:",
        instead="if call.state.is_terminal:",
        checker=REFERENCE_MODEL,
        seed=5,
    ),
    Mutant(
        name="refusals_are_not_kept",
        module=_COMMAND,
        text="run = inbox.keep_receipt(unit, run, incoming, self.inbox_limits)",
        instead="pass",
        checker=REFERENCE_MODEL,
        seed=1,
    ),
    Mutant(
        name="clients_need_no_lease",
        module=_COMMAND,
        text="if offer is None or (offer.client_id, offer.epoch) != (command.client_id, command.offer_epoch):",
        instead="if offer is None:",
        checker=REFERENCE_MODEL,
    ),
    Mutant(
        name="replaced_streams_bring_results",
        module=_COMMAND,
        text="if session_id and session_id != offer.session_id:",
        instead="if False:",
        checker=REFERENCE_MODEL,
    ),
    Mutant(
        name="older_streams_take_calls_back",
        module="pawl.job_store.domain.offers",
        text="if offer.is_held(unit.now) and self.session_id < offer.session_id:",
        instead="if False:",
        checker=REFERENCE_MODEL,
    ),
    Mutant(
        name="one_approves_for_two",
        module="pawl.job_store.domain.calls",
        text="return approvers(run, of_it) >= call.approvals_required",
        instead="return True",
        checker=REFERENCE_MODEL,
        also=(("pawl.job_store.domain.decisions", "len(approvals) >= call.approvals_required", "True"),),
    ),
    Mutant(
        name="a_person_approves_twice",
        module="pawl.job_store.domain.decisions",
        text="if any(approval.user_id == self.user_id for approval in call.approvals):",
        instead="if False:",
        checker=REFERENCE_MODEL,
    ),
    Mutant(
        name="who_started_it_approves_it",
        module="pawl.job_store.domain.decisions",
        text="if several > 1 and not people.isdisjoint(people_of(run).union(run.steered_by)):",
        instead="if False:",
        checker=REFERENCE_MODEL,
        seed=7,
    ),
    Mutant(
        name="edits_keep_the_approvals",
        module="pawl.job_store.domain.decisions",
        text="call = replace(call, approvals=(), earlier_approvals=",
        instead="call = replace(call, earlier_approvals=",
        checker=REFERENCE_MODEL,
        seeds=600,
    ),
    Mutant(
        name="requests_escalate_for_ever",
        module="pawl.job_store.domain.calls",
        text="elif call.reserved_by or call.escalated or not change.escalated:",
        instead="elif call.reserved_by or not change.escalated:",
        checker=REFERENCE_MODEL,
        seed=7,
    ),
    Mutant(
        name="approvers_see_questions",
        module=_COMMAND,
        text='call.digest != "" and call.state is not CallState.ASKED',
        instead="True",
        checker=REFERENCE_MODEL,
    ),
    Mutant(
        name="top_ups_pass_the_ceiling",
        module=_COMMAND,
        text="if budget > ceiling:",
        instead="if run.token_budget > ceiling:",
        checker=REFERENCE_MODEL,
        seeds=600,
    ),
    Mutant(
        name="queues_are_one_too_long",
        module="pawl.job_store.domain.submit",
        text="of_store.waiting < self.store_queue_max:",
        instead="of_store.waiting <= self.store_queue_max:",
        checker=REFERENCE_MODEL,
    ),
    Mutant(
        name="users_have_one_run_too_many",
        module="pawl.job_store.domain.places",
        text="taken_by_user[run.user_id] >= limits.per_user:",
        instead="taken_by_user[run.user_id] > limits.per_user:",
        checker=REFERENCE_MODEL,
    ),
    Mutant(
        name="workers_have_two_last_chances",
        module="pawl.job_store.domain.places",
        text="if last_chances == last_chances_max:",
        instead="if last_chances > last_chances_max:",
        checker=REFERENCE_MODEL,
    ),
    Mutant(
        name="stopped_runs_are_let_go_on",
        module="pawl.job_store.domain.attention",
        text="RunState.QUEUED if run.stop_cause is None else RunState.CANCELLING",
        instead="RunState.QUEUED",
        checker=REFERENCE_MODEL,
        seed=6,
    ),
    Mutant(
        name="quarantined_runs_keep_their_epoch",
        module="pawl.job_store.domain.attention",
        text="epoch=run.epoch + 1, claim_at=None",
        instead="epoch=run.epoch, claim_at=None",
        checker=REFERENCE_MODEL,
        seed=1,
    ),
    *OF_THE_LEDGER,
    *OF_OUTAGES,
    *OF_JOBS,
    *OF_STARTERS,
)


def play(mutant: Mutant) -> str:
    """Plant a mutant in this process and play seeds; return what its checker reports, empty if nothing."""
    for name in [name for name in sys.modules if name.startswith(("pawl.", "tests.")) and "_pb2" not in name]:
        del sys.modules[name]
    sys.meta_path.insert(0, Finder(mutant))
    seeds = dict.fromkeys((mutant.seed, *range(mutant.seeds)))
    if mutant.checker == REFERENCE_MODEL:
        return str(importlib.import_module("tests.ledger.game").first_difference(seeds))
    simulate = importlib.import_module("tests.simulation.simulate").simulate
    # Triggers cost time, and most mutants do not need them.
    has_triggers = mutant in OF_STARTERS
    for seed in seeds:
        for violation in simulate(seed, has_triggers=has_triggers).violations:
            if violation.startswith(f"{mutant.checker}:"):
                return f"seed {seed}: {violation}"
    return ""


def hunt(mutants: Sequence[Mutant], processes: int = 1) -> Iterator[tuple[Mutant, str]]:
    """Play each mutant in a process of its own; yield it with what was found, empty if nothing.

    The processes are forks of this one, which has imported everything, so that only what may be mutated is imported
    again.
    """
    for module in ("tests.ledger.game", "tests.simulation.simulate"):
        importlib.import_module(module)
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=1) as pool:
        hunts = [(mutant, pool.apply_async(_attempt, (mutant,))) for mutant in mutants]
        yield from ((mutant, hunted.get()) for mutant, hunted in hunts)


def _attempt(mutant: Mutant) -> str:
    """Play a mutant; an error is no miss of the checker: it could not be planted, or the game broke."""
    # One that never ends is ended.
    signal.alarm(_SECONDS_MAX)
    try:
        return play(mutant)
    except BaseException as error:  # noqa: BLE001  # reported as a miss
        print(f"{mutant.name}: {error!r}", file=sys.stderr)  # noqa: T201
        return ""


def misplaced() -> list[str]:
    """Return the mutants whose text does not stand in its module any more, with what is missing."""
    sources = {module: _source(module) for mutant in MUTANTS for module, _, _ in mutant.edits}
    return [
        f"{mutant.name}: {module} has no {text!r}"
        for mutant in MUTANTS
        for module, text, _ in mutant.edits
        if text not in sources[module]
    ]


def _source(module: str) -> str:
    root = "services" if module.startswith("pawl.") else "."
    return Path(root, *module.split(".")).with_suffix(".py").read_text(encoding="utf-8")


def main() -> int:
    """Hunt all mutants, two at a time, or those that are named; 1 if a checker missed one."""
    chosen = [mutant for mutant in MUTANTS if mutant.name in sys.argv[1:]] or MUTANTS
    missed = 0
    for mutant, found in hunt(chosen, processes=2):
        missed += not found
        print(f"{mutant.name}: {found or 'MISSED'}", flush=True)  # noqa: T201
        if found and not found.startswith(f"seed {mutant.seed}:"):
            print(f"{mutant.name}: write down this seed, to find it at once", file=sys.stderr)  # noqa: T201
    return 1 if missed else 0


if __name__ == "__main__":
    fix_hashes("tests.simulation.mutants")
    sys.exit(main())
