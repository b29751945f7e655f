from __future__ import annotations

from collections.abc import Callable
from datetime import UTC
from typing import Any, Final

from pawl.agent.v1 import usage_pb2 as pb
from pawl.cli import wording
from pawl.cli.contract import Columns, Option, listing

_NAMES: Final = {
    pb.USAGE_DIMENSION_STORE: ("store", "store_id"),
    pb.USAGE_DIMENSION_USER: ("user", "user_id"),
    pb.USAGE_DIMENSION_AGENT: ("agent", "agent_name"),
    pb.USAGE_DIMENSION_TOOL: ("tool", "tool_name"),
    pb.USAGE_DIMENSION_MODEL: ("model", "model"),
}


def _mean(total: str, *counts: str) -> Callable[[Any], str]:
    def shown(row: Any) -> str:
        ended = sum(getattr(row.figures, name) for name in counts)
        return wording.seconds_text(getattr(row.figures, total) / ended) if ended else ""

    return shown


_CALLS_ENDED: Final = ("calls_succeeded", "calls_failed", "calls_refused")
_RUNS_ENDED: Final = ("runs_completed", "runs_failed", "runs_cancelled", "runs_expired")
_CALLS: Final[Columns] = {
    "calls": lambda row: str(sum(getattr(row.figures, name) for name in _CALLS_ENDED)),
    "failed": "figures.calls_failed",
    "refused": "figures.calls_refused",
    "mean": _mean("call_seconds", *_CALLS_ENDED),
}
_MODEL_CALLS: Final[Columns] = {
    "model calls": "figures.usage.model_calls",
    "input": "figures.usage.input_tokens",
    "cached": "figures.usage.cached_input_tokens",
    "output": "figures.usage.output_tokens",
    "reasoning": "figures.usage.reasoning_tokens",
}
_RUNS: Final[Columns] = {
    "users": "figures.users",
    "runs": "figures.runs",
    "completed": "figures.runs_completed",
    "failed": "figures.runs_failed",
    "mean": _mean("run_seconds", *_RUNS_ENDED),
    "calls": _CALLS["calls"],
    "input": "figures.usage.input_tokens",
    "output": "figures.usage.output_tokens",
}


def _columns(request: Any) -> Columns:
    shown: dict[str, Callable[[Any], str] | str] = {}
    if request.period:
        form = "%Y-%m-%d %H:00" if request.period == pb.USAGE_PERIOD_HOUR else "%Y-%m-%d"
        shown["time (UTC)"] = lambda row: row.time.ToDatetime(UTC).strftime(form)
    shown |= dict(_NAMES[each] for each in sorted(request.by))
    if request.tool_name or pb.USAGE_DIMENSION_TOOL in request.by:
        return {**shown, **_CALLS}
    return {**shown, **(_MODEL_CALLS if request.model or pb.USAGE_DIMENSION_MODEL in request.by else _RUNS)}


usage: Final = listing(
    pb.GetUsageRequest(page_size=200),
    {
        "--by": Option(path="by", help="Group by store, user, agent, tool or model. Repeatable."),
        "--per": Option(path="period", help="Show each hour or day (UTC), newest first."),
        "--from": Option(path="from_time", help="Start; by default 30 days ago, with --per hour 24 hours."),
        "--to": Option(path="to_time", help="End; by default now."),
        "--agent": "agent_name",
        "--tool": "tool_name",
        "--model": "model",
        "--of-user": "user_id",
        "--store": Option(path="store_id", help="Include only this store."),
    },
    "Show how many runs, calls and tokens were used. Covers your own usage, the whole store if you are an admin, or"
    " all stores with a deployment key.",
    _columns,
    none="There is no usage.",
)
