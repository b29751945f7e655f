"""Writes the Grafana dashboards: `python deploy/grafana/build.py`.

A panel has a title, a unit and queries by legend. Gauges of job-store and notifier count the whole deployment, so the
replicas agree and `max` picks one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

FOLDER: Final = Path(__file__).parent / "dashboards"
Panel: TypeAlias = tuple[str, str, Mapping[str, str]]


def rate(metric: str, *labels: str, where: str = "") -> str:
    """Return the increase per second of a counter, by labels."""
    return f"{_sum(labels)} (rate({_series(metric, where)}[$__rate_interval]))"


def quantile(part: float, metric: str, *labels: str, where: str = "") -> str:
    """Return a quantile of a histogram, by labels."""
    return f"histogram_quantile({part}, {rate(f'{metric}_bucket', *labels, 'le', where=where)})"


def ratio(metric: str, where: str, of: str = "", *labels: str) -> str:
    """Return the fraction of a counter's increase that meets a condition."""
    return f"{rate(metric, *labels, where=where)} / {rate(metric, *labels, where=of)}"


def mean(metric: str) -> str:
    return f"{rate(f'{metric}_sum')} / {rate(f'{metric}_count')}"


def every(metric: str) -> str:
    """Return the name of a metric that several services have."""
    return f"pawl_.+_{metric}"


def _series(metric: str, where: str) -> str:
    conditions = [f'__name__=~"{metric}"', where] if "+" in metric else [where]
    selector = ",".join(filter(None, conditions))
    return f"{'' if '+' in metric else metric}{{{selector}}}" if selector else metric


def _sum(labels: tuple[str, ...]) -> str:
    return f"sum by ({', '.join(labels)})" if labels else "sum"


STARTED: Final = "pawl_job_store_runs_started_total"
ENDED: Final = "pawl_job_store_runs_ended_total"
DURATION: Final = "pawl_job_store_run_duration_seconds"
WAIT: Final = "pawl_job_store_queue_wait_seconds"
CALLS: Final = "pawl_job_store_calls_ended_total"
MODEL_CALLS: Final = "pawl_agent_loop_model_calls_total"
MODEL_SECONDS: Final = "pawl_agent_loop_model_duration_seconds"
FIRST_OUTPUT: Final = "pawl_agent_loop_model_first_token_seconds"
ADDED: Final = "pawl_agent_loop_model_added_latency_seconds"
TOKENS: Final = "pawl_agent_loop_model_tokens_total"
EXECUTIONS: Final = "pawl_tool_registry_executions_total"
TOOL_SECONDS: Final = "pawl_tool_registry_execution_duration_seconds"
CHOSEN: Final = 'store=~"$store"'

OVERVIEW: Final[tuple[Panel, ...]] = (
    ("Runs started and ended", "ops", {"started": rate(STARTED), "{{outcome}}": rate(ENDED, "outcome")}),
    (
        "Success rate, without cancelled runs",
        "percentunit",
        {"success": ratio(ENDED, 'outcome="completed"', 'outcome!="cancelled"')},
    ),
    ("Failures by cause", "ops", {"{{cause}}": rate(ENDED, "cause", where='outcome=~"failed|expired"')}),
    (
        "Added latency beside model time",
        "s",
        {
            "added by Pawl p50": quantile(0.5, ADDED),
            "added by Pawl p99": quantile(0.99, ADDED),
            "first token p50": quantile(0.5, FIRST_OUTPUT),
            "model call p50": quantile(0.5, MODEL_SECONDS),
        },
    ),
    ("Duration of runs", "s", {"p50": quantile(0.5, DURATION), "p95": quantile(0.95, DURATION)}),
    (
        "Rounds of a run",
        "short",
        {"mean": mean("pawl_job_store_run_rounds"), "p95": quantile(0.95, "pawl_job_store_run_rounds")},
    ),
    ("Open runs by state", "short", {"{{state}}": "max by (state) (pawl_job_store_runs)"}),
    ("Waiting runs by reason", "short", {"{{reason}}": "max by (reason) (pawl_job_store_waiting_runs)"}),
    ("Queue wait", "s", {"p50": quantile(0.5, WAIT), "p99": quantile(0.99, WAIT)}),
    (
        "Queue",
        "short",
        {
            "claimable": "max(pawl_job_store_claimable_runs)",
            "over the {{limit}} limit": "max by (limit) (pawl_job_store_over_limit_runs)",
        },
    ),
    ("Background jobs", "short", {"{{state}}": "max by (state) (pawl_job_store_jobs)"}),
    ("Tokens per second", "short", {"{{kind}}": rate(TOKENS, "kind")}),
)
STORES: Final[tuple[Panel, ...]] = (
    ("Runs started", "ops", {"{{store}}": rate(STARTED, "store", where=CHOSEN)}),
    ("Runs ended", "ops", {"{{store}} {{outcome}}": rate(ENDED, "store", "outcome", where=CHOSEN)}),
    ("Duration of runs p95", "s", {"{{store}}": quantile(0.95, DURATION, "store", where=CHOSEN)}),
    ("Queue wait p95", "s", {"{{store}}": quantile(0.95, WAIT, "store", where=CHOSEN)}),
    ("Model calls", "ops", {"{{store}} {{outcome}}": rate(MODEL_CALLS, "store", "outcome", where=CHOSEN)}),
    ("Tokens per second", "short", {"{{store}} {{kind}}": rate(TOKENS, "store", "kind", where=CHOSEN)}),
    ("Tool calls ended", "ops", {"{{store}} {{outcome}}": rate(CALLS, "store", "outcome", where=CHOSEN)}),
    ("Tool executions", "ops", {"{{store}} {{tool}}": rate(EXECUTIONS, "store", "tool", where=CHOSEN)}),
)
TOOLS: Final[tuple[Panel, ...]] = (
    ("Executions", "ops", {"{{tool}}": rate(EXECUTIONS, "tool")}),
    ("Executions by outcome", "ops", {"{{tool}} {{outcome}}": rate(EXECUTIONS, "tool", "outcome")}),
    ("Duration p50", "s", {"{{tool}}": quantile(0.5, TOOL_SECONDS, "tool")}),
    ("Duration p95", "s", {"{{tool}}": quantile(0.95, TOOL_SECONDS, "tool")}),
    ("Checks", "ops", {"{{disposition}}": rate("pawl_tool_registry_checks_total", "disposition")}),
    ("Calls ended by state", "ops", {"{{outcome}}": rate(CALLS, "outcome")}),
    (
        "In progress",
        "short",
        {
            "executions": "sum(pawl_tool_registry_executions_in_flight)",
            "threads": "sum(pawl_tool_registry_tool_threads_busy)",
            "processes": "sum(pawl_tool_registry_tool_processes_busy)",
        },
    ),
)
MODELS: Final[tuple[Panel, ...]] = (
    ("Calls", "ops", {"{{provider}} {{outcome}}": rate(MODEL_CALLS, "provider", "outcome")}),
    (
        "Share of answered calls",
        "percentunit",
        {"{{provider}}": ratio(MODEL_CALLS, 'outcome="answered"', "", "provider")},
    ),
    (
        "Time to the first token",
        "s",
        {f"{{{{provider}}}} p{part}": quantile(part / 100, FIRST_OUTPUT, "provider") for part in (50, 95)},
    ),
    (
        "Duration of calls",
        "s",
        {f"{{{{provider}}}} p{part}": quantile(part / 100, MODEL_SECONDS, "provider") for part in (50, 95)},
    ),
    ("Added by Pawl", "s", {"p50": quantile(0.5, ADDED), "p99": quantile(0.99, ADDED)}),
    ("Tokens per second", "short", {"{{provider}} {{kind}}": rate(TOKENS, "provider", "kind")}),
)
SERVICES: Final[tuple[Panel, ...]] = (
    ("Replicas that answer", "short", {"{{service}}": 'sum by (service) (up{job="pawl"})'}),
    ("Calls", "ops", {"{{service}}": rate(every("rpc_requests_total"), "service")}),
    (
        "Calls that failed",
        "ops",
        {"{{service}} {{code}}": rate(every("rpc_requests_total"), "service", "code", where='code!="OK"')},
    ),
    ("Duration of calls p99", "s", {"{{service}}": quantile(0.99, every("rpc_duration_seconds"), "service")}),
    ("Requests to the gateway", "ops", {"{{status}}": rate("pawl_gateway_http_requests_total", "status")}),
    (
        "Streams and watchers",
        "short",
        {
            "streams": "sum(pawl_gateway_streams)",
            "watchers": "sum(pawl_agent_loop_watchers)",
            "events behind": "max(pawl_agent_loop_watch_lag_events)",
        },
    ),
    ("Runs held by workers", "short", {"{{instance}}": "pawl_agent_loop_runs_held"}),
    (
        "Wait for a database connection p99",
        "s",
        {"{{service}}": quantile(0.99, every("database_wait_seconds"), "service")},
    ),
    (
        "Group commit",
        "short",
        {
            "operations per group": mean("pawl_job_store_group_operations"),
            "events per row": mean("pawl_job_store_batch_events"),
        },
    ),
    (
        "Time to write a group, and to claim, p99",
        "s",
        {
            "group": quantile(0.99, "pawl_job_store_group_duration_seconds"),
            "claim": quantile(0.99, "pawl_job_store_claim_duration_seconds"),
        },
    ),
    (
        "Lost leases and quarantined runs",
        "ops",
        {
            "lost leases": rate("pawl_job_store_lease_losses_total"),
            "quarantined": rate("pawl_job_store_quarantined_runs_total"),
        },
    ),
    ("Connected to NATS", "short", {"{{service}}": 'min by (service) ({__name__=~"pawl_.+_bus_connected"})'}),
    (
        "Messages to NATS",
        "ops",
        {
            "{{service}} published": rate(every("bus_published_total"), "service"),
            "{{service}} dropped": rate(every("bus_dropped_total"), "service"),
        },
    ),
    (
        "Backlogs",
        "short",
        {
            "life-cycle events": "max(pawl_job_store_outbox_events)",
            "due schedules": "max(pawl_job_store_due_schedules)",
            "due trigger events": "max(pawl_job_store_due_events)",
            "notices {{state}}": "max by (state) (pawl_job_store_notices)",
            "deliveries by {{kind}}": "max by (kind) (pawl_notifier_deliveries_waiting)",
        },
    ),
    ("Delay of deliveries", "s", {"{{kind}}": "max by (kind) (pawl_notifier_delivery_delay_seconds)"}),
    (
        "Delivery attempts",
        "ops",
        {"{{kind}} {{state}}": rate("pawl_notifier_delivery_try_seconds_count", "kind", "state")},
    ),
    (
        "Notifications",
        "ops",
        {
            "published": rate("pawl_notifier_published_total"),
            "events {{outcome}}": rate("pawl_notifier_events_total", "outcome"),
        },
    ),
    (
        "Schedules and triggers",
        "ops",
        {
            "schedule {{outcome}}": rate("pawl_job_store_schedule_fires_total", "outcome"),
            "trigger {{outcome}}": rate("pawl_job_store_trigger_events_total", "outcome"),
        },
    ),
    ("Failed logins", "ops", {"{{service}} {{kind}}": rate(every("login_failures_total"), "service", "kind")}),
    ("CPU seconds per second", "short", {"{{service}}": rate(every("process_cpu_seconds_total"), "service")}),
    ("Memory", "bytes", {"{{service}}": 'sum by (service) ({__name__=~"pawl_.+_process_resident_memory_bytes"})'}),
    ("Free disk", "percentunit", {"{{mountpoint}}": "node_filesystem_avail_bytes / node_filesystem_size_bytes"}),
)
DASHBOARDS: Final = {
    "overview": OVERVIEW,
    "stores": STORES,
    "tools": TOOLS,
    "models": MODELS,
    "services": SERVICES,
}

_SOURCE: Final = {"type": "prometheus", "uid": "prometheus"}
_STORE: Final = {
    "name": "store",
    "label": "Store",
    "type": "query",
    "datasource": _SOURCE,
    "query": {"query": f"label_values({STARTED}, store)", "refId": "store"},
    "includeAll": True,
    "multi": True,
    "refresh": 2,
    "allValue": ".*",
    "current": {"text": "All", "value": "$__all"},
}


def files() -> dict[str, str]:
    """Return the dashboards as JSON, by file name."""
    return {f"{name}.json": json.dumps(_dashboard(name, panels)) + "\n" for name, panels in DASHBOARDS.items()}


def _dashboard(name: str, panels: tuple[Panel, ...]) -> dict[str, Any]:
    return {
        "uid": f"pawl-{name}",
        "title": f"Pawl {name}",
        "tags": ["pawl"],
        "schemaVersion": 39,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [_STORE] if panels is STORES else []},
        "links": [{"type": "dashboards", "tags": ["pawl"], "title": "Pawl", "asDropdown": False}],
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    title, unit, queries = panel
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": _SOURCE,
        "gridPos": {"h": 8, "w": 12, "x": number % 2 * 12, "y": number // 2 * 8},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend}
            for index, (legend, expression) in enumerate(queries.items())
        ],
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
