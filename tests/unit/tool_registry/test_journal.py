"""What the journal says of a call that is asked for again. I5, decision 14."""

from __future__ import annotations

import itertools

from pawl.tool_registry.domain.execution import ExecutionResult
from pawl.tool_registry.domain.journal import Entry, Step, next_step
from pawl.values import EffectClass, Outcome
from tests.tables import for_each

JOURNALED = (EffectClass.AT_MOST_ONCE, EffectClass.RECONCILABLE)
BOTH = (False, True)


def result(outcome: Outcome) -> ExecutionResult:
    return ExecutionResult(outcome=outcome, content=b"null")


def step(
    *,
    fingerprint: str = "f",
    effect: EffectClass = EffectClass.AT_MOST_ONCE,
    outcome: Outcome | None = None,
    unknowns: int = 0,
    is_own: bool = False,
    alive: bool = False,
    resolved: int = 0,
    unacted: bool = False,
) -> Step:
    entry = Entry(
        fingerprint=fingerprint,
        effect=effect,
        unknowns=unknowns,
        is_own=is_own,
        is_unacted=unacted,
        is_holder_alive=alive,
        result=None if outcome is None else result(outcome),
    )
    return next_step(entry, fingerprint="f", unknowns_resolved=resolved)


def test_an_ended_call_is_never_run_again() -> None:
    """Whoever asks, alive or dead, of whatever effect: the one result stands."""
    ended = (Outcome.SUCCEEDED, Outcome.FAILED, Outcome.CANCELLED)
    for effect, outcome, own, alive, never in itertools.product(JOURNALED, ended, BOTH, BOTH, BOTH):
        found = step(effect=effect, outcome=outcome, is_own=own, alive=alive, unacted=never, resolved=9)
        assert found is Step.STORED


def test_another_call_under_the_same_id_is_refused() -> None:
    for outcome, own, alive in itertools.product((None, *Outcome), (False, True), (False, True)):
        found = step(fingerprint="other", outcome=outcome, is_own=own, alive=alive, unacted=True, resolved=9)
        assert found is Step.MISMATCH


def test_a_call_of_a_living_process_is_waited_for() -> None:
    for effect in JOURNALED:
        assert step(effect=effect, alive=True) is Step.ELSEWHERE


@for_each("is_own", [False, True])
def test_a_call_that_was_interrupted_is_asked_about_or_said_to_be_unknown(is_own: bool) -> None:
    assert step(effect=EffectClass.RECONCILABLE, is_own=is_own, alive=is_own) is Step.RECONCILE
    assert step(effect=EffectClass.AT_MOST_ONCE, is_own=is_own, alive=is_own) is Step.CONCLUDE_UNKNOWN


def test_a_call_runs_if_the_process_knows_that_it_unacted_it() -> None:
    for effect in JOURNALED:
        assert step(effect=effect, is_own=True, alive=True, unacted=True) is Step.RUN


def test_an_unknown_outcome_runs_again_only_if_each_of_them_was_resolved() -> None:
    """D9: one finding of an operator does not excuse a second interruption."""
    assert step(outcome=Outcome.UNKNOWN, unknowns=1, resolved=0) is Step.STORED
    assert step(outcome=Outcome.UNKNOWN, unknowns=1, resolved=1) is Step.RUN
    assert step(outcome=Outcome.UNKNOWN, unknowns=2, resolved=1) is Step.STORED


def test_a_call_cancelled_before_it_began_does_not_begin() -> None:
    assert step(fingerprint="", outcome=Outcome.CANCELLED) is Step.STORED
