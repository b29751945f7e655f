"""Checkers of usage figures, judged by the runs and calls in the ledger."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from pawl.chassis.ids import RunKey
from pawl.job_store.ledger.rpc.messages import own_usage
from pawl.job_store.ledger.rules.usage import UNKNOWN_TOOL, Used
from tests.simulation.record import Record, call_state
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
    for group in sorted({*found, *expected}):
        if found[group] != expected[group]:
            yield f"{group} has {found[group]}, but the ledger says {expected[group]}"


def delegated_usage_is_that_of_child_runs(record: Record) -> Iterator[str]:
    """OPS-2: a child run's tokens do not count again for the run that delegated to it."""
    for run_id, run in record.runs.items():
        heard = [call for call in record.calls.values() if call.run_id == run_id and call.child_run_id]
        heard = [call for call in heard if call_state(call.state) in {"SUCCEEDED", "FAILED"}]
        below = sum(record.runs[call.child_run_id].usage.input_tokens for call in heard)
        if run.delegated_usage.input_tokens != below:
            yield f"run {run_id} delegated {run.delegated_usage.input_tokens} input tokens, its child runs used {below}"


CHECKERS = (usage_is_the_sum_of_runs_and_calls, delegated_usage_is_that_of_child_runs)
