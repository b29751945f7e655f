"""Checkers of token budgets, judged by model usage and top-ups (I18)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from tests.simulation.history import Served
from tests.simulation.record import Record


def budgets_are_exceeded_by_at_most_one_call(record: Record) -> Iterator[str]:
    """I18: no model call starts once earlier calls have used up the budget.

    Output tokens count once the next request shows that the answer arrived. If a crash loses an answer, only its prompt
    counts.
    """
    for run_id, calls in _by_run(record).items():
        tokens_max = record.runs[run_id].options.limits.total_tokens_max
        if not tokens_max:
            continue
        for position, call in enumerate(calls):
            added = sum(
                sent.tokens
                for sent in record.history.commands
                if sent.run_id == run_id and sent.kind == "TOP_UP" and sent.taken and sent.sent_at <= call.started_at
            )
            spent = _spent(calls[:position], call)
            if spent >= tokens_max + added:
                yield f"run {run_id} called the model with {spent} of {tokens_max} + {added} tokens used"


def top_ups_count_once(record: Record) -> Iterator[str]:
    """I1, I2: the budget is the initial limit plus all accepted top-ups."""
    for run_id, run in record.runs.items():
        taken = [
            sent.tokens
            for sent in record.history.commands
            if sent.run_id == run_id and sent.kind == "TOP_UP" and sent.taken
        ]
        if run.generation and not run.reports_to_conversation_id:
            continue  # A turn inherits the budget of its job.
        expected = run.options.limits.total_tokens_max + sum(taken)
        if run.token_budget != expected:
            yield f"run {run_id} has a budget of {run.token_budget} tokens, expected {expected}"
        ceiling = run.options.limits.topped_up_tokens_max
        if taken and ceiling and run.token_budget > ceiling:
            yield f"run {run_id} has a budget of {run.token_budget} tokens, over its ceiling of {ceiling}"


def _by_run(record: Record) -> dict[str, list[Served]]:
    run_of_plan = {message.plan: message.run_ids[0] for message in record.history.messages if message.run_ids}
    calls: dict[str, list[Served]] = defaultdict(list)
    for served in record.history.served:
        if served.plan in run_of_plan:
            calls[run_of_plan[served.plan]].append(served)
    return calls


def _spent(earlier: list[Served], now: Served) -> int:
    spent = sum(call.input_tokens for call in earlier)
    whole: dict[tuple[str, int], int] = {}
    for call in earlier:
        if call.whole and call.round != now.round:
            whole[call.round] = min(call.output_tokens, whole.get(call.round, call.output_tokens))
    return spent + sum(whole.values())


CHECKERS = (budgets_are_exceeded_by_at_most_one_call, top_ups_count_once)
