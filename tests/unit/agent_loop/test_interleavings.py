"""Any order of events gives one model call per closed batch and one result per call (I5, I6, I12)."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pawl.agent_loop.loop.rules.fact import RoundStarted
from pawl.agent_loop.loop.rules.limits import Limits
from pawl.agent_loop.loop.rules.run import BatchOrder, RunOptions, TokenBudgetPolicy, UnknownOutcomePolicy
from pawl.agent_loop.loop.rules.state import MODEL
from pawl.chassis.ids import CallId
from pawl.values import ENDED, CallResolution, CallState, DecisionKind, RunState
from tests.unit.agent_loop.simulation import ASKS, BROKEN, OK, PENDING, UNKNOWN, VERDICTS, Simulation, started

BATCHES = st.lists(st.lists(st.sampled_from(sorted(VERDICTS)), min_size=1, max_size=4), min_size=1, max_size=2)
OPTIONS = st.builds(
    RunOptions,
    batch_order=st.sampled_from(BatchOrder),
    unknown_outcome_policy=st.sampled_from(UnknownOutcomePolicy),
    limits=st.builds(Limits, total_tokens_max=st.sampled_from([0, 0, 1, 15, 16, 40])),
    token_budget_policy=st.sampled_from(TokenBudgetPolicy),
)
KINDS = (
    *("model", "model_breaks", "top_up", "end", "break", "doubt", "asks", "resolve"),
    *("approve", "edit", "reject", "answer", "return", "return_error", "expire"),
    *("cancel", "steer", "take_over"),
)
EVENTS = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 3)), max_size=25)
# The fourth failed attempt is final; takeovers count as attempts.
BREAKS_MAX = 1
DECISIONS = {
    "approve": DecisionKind.APPROVE,
    "edit": DecisionKind.EDIT,
    "reject": DecisionKind.REJECT,
    "answer": DecisionKind.ANSWER,
}


def happen(run: Simulation, what: str, which: int) -> None:
    calls = run.base.open_calls
    running = [name for name in run.under_way if name in run.base.calls]
    asked = [call for call in calls if call.state in {CallState.AWAITING_APPROVAL, CallState.ASKED}]
    offered = [call for call in calls if call.state is CallState.OFFERED]
    if run.run.state in ENDED:
        return
    match what:
        case "model" if MODEL in run.under_way:
            run.model_answers()
        case "model_breaks" if MODEL in run.under_way and run.breaks < BREAKS_MAX:
            run.model_fails()
        case "top_up" if run.tokens_granted and not run.cancelled:
            run.tops_up(10 * which + 1)
        case "end" | "break" | "doubt" | "asks" if running:
            ended = {"end": OK, "break": BROKEN, "doubt": UNKNOWN, "asks": ASKS}[what]
            run.ends(sorted(running)[which % len(running)], ended)
        case "approve" | "edit" | "reject" | "answer" if asked and not run.cancelled:
            call, kind = asked[which % len(asked)], DECISIONS[what]
            if call.state is CallState.AWAITING_APPROVAL or kind in {DecisionKind.REJECT, DecisionKind.ANSWER}:
                run.decides(call, kind)
        case "return" | "return_error" if offered and not run.cancelled:
            run.returns(offered[which % len(offered)], is_error=what == "return_error")
        case "expire":
            run.passes(1000)
        case "cancel" if not run.cancelled:
            run.cancels()
        case "steer" if not run.cancelled:
            run.steers()
        case "take_over" if run.takeovers < 2:
            run.is_taken_over()
        case "resolve" if run.base.loop.in_doubt and run.run.state is RunState.NEEDS_ATTENTION:
            call = run.base.calls[CallId(run.base.loop.in_doubt[0])]
            run.resolves(call, list(CallResolution)[which % 3])


@settings(max_examples=300)
@given(batches=BATCHES, options=OPTIONS, happenings=EVENTS)
def test_each_call_gets_one_result_in_any_order_of_events(
    batches: list[list[str]], options: RunOptions, happenings: list[tuple[str, int]]
) -> None:
    run = started(*batches, options=options)

    for what, which in happenings:
        happen(run, what, which)
    run.finishes()

    assert all(call.settled and call.result is not None for call in run.calls)
    assert run.under_way == set()
    rounds = [event.round for event in run.events if isinstance(event, RoundStarted)]
    assert rounds == list(range(1, len(rounds) + 1)), "each round starts once, in order"
    assert len(rounds) <= run.model_calls <= len(rounds) + run.takeovers + run.breaks
    if run.cancelled:
        assert run.run.state is RunState.CANCELLED
    elif run.tokens_granted and (run.tokens_served >= run.tokens_granted or run.run.usage.estimated_tokens):
        # Unreported usage is estimated, and never below the real value.
        waits = options.token_budget_policy is TokenBudgetPolicy.WAIT
        assert run.run.state in {RunState.COMPLETED, RunState.EXPIRED if waits else RunState.FAILED}
    else:
        assert run.run.state is RunState.COMPLETED


@settings(max_examples=100)
@given(names=st.lists(st.sampled_from(sorted(VERDICTS)), min_size=1, max_size=4), happenings=EVENTS)
def test_nothing_starts_after_a_cancel(names: list[str], happenings: list[tuple[str, int]]) -> None:
    """I12, C5: pending calls are cancelled, and no call or round starts."""
    run = started(names)
    half = len(happenings) // 2
    for what, which in happenings[:half]:
        happen(run, what, which)
    if run.run.state in ENDED:
        return
    pending = [call.call_id for call in run.calls if call.state in PENDING]
    started_before, rounds = list(run.started), run.model_calls

    run.cancels()
    for what, which in happenings[half:]:
        happen(run, what, which)
    run.finishes()

    assert (run.started, run.model_calls) == (started_before, rounds)
    assert run.run.state is RunState.CANCELLED
    assert all(run.base.calls[call_id].state is CallState.CANCELLED for call_id in pending)
