"""Checkers of usage figures and token budgets, judged by runs, calls, model usage and top-ups (I18)."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pawl.chassis.ids import RunKey
from pawl.job_store.ledger.rpc.messages import own_usage
from pawl.job_store.ledger.rules.usage import UNKNOWN_TOOL, Used
from tests.simulation.history import Served
from tests.simulation.record import Record, broken, call_state
from tests.simulation.store import Tables


class _Group(NamedTuple):
    store_id: str
    user_id: str
    agent_name: str
    tool_name: str


def _expected(tables: Tables) -> Mapping[_Group, Used]:
    found: defaultdict[_Group, Used] = defaultdict(Used)
    for run in tables.runs.values():
        if run.imported:
            continue
        group = _Group(run.store_id, run.user_id, run.agent_name, "")
        ended = Used.by_run_end(run) if run.state.is_terminal else Used()
        found[group] = found[group].plus(Used(runs=1)).plus(ended).plus(Used.by_model(own_usage(run.usage)))
    for call in (*tables.gone.values(), *tables.calls.values()):
        run = tables.runs[RunKey(call.store_id, call.run_id)]
        if call.state.is_terminal:
            tool_name = call.tool_name if call.tool_version else UNKNOWN_TOOL
            group = _Group(run.store_id, run.user_id, run.agent_name, tool_name)
            found[group] = found[group].plus(Used.by_call_end(call))
    return found


def usage_is_the_sum_of_runs_and_calls(record: Record) -> Iterator[str]:
    """OPS-2: each start, end and token counts once, whatever was repeated, refused or lost."""
    found: defaultdict[_Group, Used] = defaultdict(Used)
    for key, used in record.tables.usage.items():
        group = _Group(key.store_id, key.user_id, key.agent_name, key.tool_name)
        found[group] = found[group].plus(used)
    expected = _expected(record.tables)
    return (
        f"{group} has {found[group]}, but the ledger says {expected[group]}"
        for group in sorted({*found, *expected})
        if found[group] != expected[group]
    )


def delegated_usage_is_that_of_child_runs(record: Record) -> Iterator[str]:
    """OPS-2: a child run's tokens do not count again for the run that delegated to it."""
    below: Counter[str] = Counter()
    for call in record.calls.values():
        if call.child_run_id and call_state(call.state) in {"SUCCEEDED", "FAILED"}:
            below[call.run_id] += record.runs[call.child_run_id].usage.input_tokens
    return (
        f"run {run_id} delegated {run.delegated_usage.input_tokens} input tokens, its child runs used {below[run_id]}"
        for run_id, run in record.runs.items()
        if run.delegated_usage.input_tokens != below[run_id]
    )


def budgets_are_exceeded_by_at_most_one_call(record: Record) -> Iterator[str]:
    """I18: no model call starts once earlier calls have used up the budget.

    Output tokens count once the next request shows that the answer arrived. If a crash loses an answer, only its prompt
    counts.
    """
    top_ups = record.taken("TOP_UP")
    for run_id, calls in _by_run(record).items():
        tokens_max = record.runs[run_id].options.limits.total_tokens_max
        for position, call in enumerate(calls if tokens_max else ()):
            earlier = (sent for sent in top_ups if sent.run_id == run_id and sent.sent_at <= call.started_at)
            added, spent = sum(sent.tokens for sent in earlier), _spent(calls[:position], call)
            if spent >= tokens_max + added:
                yield f"run {run_id} called the model with {spent} of {tokens_max} + {added} tokens used"


def top_ups_count_once(record: Record) -> Iterator[str]:
    """I1, I2: the budget is the initial limit plus all accepted top-ups."""
    for run_id, run in record.runs.items():
        taken = [sent.tokens for sent in record.taken("TOP_UP") if sent.run_id == run_id]
        budget, ceiling = run.token_budget, run.options.limits.topped_up_tokens_max
        expected = run.options.limits.total_tokens_max + sum(taken)
        # A turn inherits the budget of its job.
        is_own = not run.generation or run.reports_to_conversation_id
        is_over = taken and ceiling and budget > ceiling
        yield from broken(
            (is_own and budget != expected, f"run {run_id} has a budget of {budget} tokens, expected {expected}"),
            (is_own and is_over, f"run {run_id} has a budget of {budget} tokens, over its ceiling of {ceiling}"),
        )


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


CHECKERS = (
    usage_is_the_sum_of_runs_and_calls,
    delegated_usage_is_that_of_child_runs,
    budgets_are_exceeded_by_at_most_one_call,
    top_ups_count_once,
)
