"""Each alert fires when it should and is silent otherwise, in promtool's unit tests of rules."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import packages
from tests.system.deploy.containers import ROOT

pytestmark = pytest.mark.long
_RULES = ROOT / "deploy/alerts.yml"
_UP = 'up{job="pawl",service="gateway",instance="%s"}'
_ENDED = 'pawl_job_store_runs_ended_total{outcome="%s"}'
_MODEL = 'pawl_agent_loop_model_calls_total{provider="p",outcome="%s"}'
_WAIT = 'pawl_job_store_queue_wait_seconds_bucket{le="%s"}'
_QUARANTINED = "pawl_job_store_quarantined_runs_total"
_DISK = 'node_filesystem_%s_bytes{mountpoint="/",fstype="ext4"}'
Series = dict[str, str]


def gauge(metric: str, fires: int, silent: int = 0) -> tuple[Series, Series]:
    return {metric: f"{fires}x90"}, {metric: f"{silent}x90"}


def calls(outcome: str, percent: int, silent: int) -> tuple[Series, Series]:
    """Return calls with this outcome as a percentage of all calls."""
    return tuple(  # type: ignore[return-value]  # two
        {_MODEL % outcome: f"0+{each}x90", _MODEL % "answered": f"0+{100 - each}x90"} for each in (percent, silent)
    )


def used(limit: str, near: str) -> tuple[Series, Series]:
    """Return calls of which 20 % or none were made when more than `near` of a limit was used."""
    name = f'pawl_job_store_model_limit_used_ratio_%s{{store="acme",limit="{limit}"%s}}'
    below, count = name % ("bucket", f',le="{near}"'), name % ("count", "")
    return {below: "0+8x90", count: "0+10x90"}, {below: "0+10x90", count: "0+10x90"}


# For each alert, series that make it fire after an hour, and series that do not. A series has a value for each minute.
CASES: dict[str, tuple[Series, Series]] = {
    "PawlServiceDown": gauge(_UP % "a", 0, 1),
    "PawlReplicaLost": (
        {_UP % "a": "1x90", _UP % "b": "1x45 _x45"},
        {_UP % "a": "1x90", _UP % "b": "1x90"},
    ),
    "PawlSuccessRateLow": (
        {_ENDED % "completed": "0+9x90", _ENDED % "failed": "0+1x90", _ENDED % "cancelled": "0+5x90"},
        {_ENDED % "completed": "0+99x90", _ENDED % "failed": "0+1x90", _ENDED % "cancelled": "0+50x90"},
    ),
    "PawlModelTimeouts": calls("timeout", 11, 9),
    "PawlModelErrors": calls("provider", 11, 9),
    "PawlModelRateLimited": calls("rate", 6, 4),
    "PawlTokensUsedUp": gauge('pawl_job_store_waiting_runs{reason="store_daily_tokens"}', 1),
    "PawlTokensNear": used("user_daily_tokens", "0.8"),
    "PawlRateNear": used("model_tokens_per_minute", "0.9"),
    "PawlStoreLimitReached": gauge('pawl_job_store_over_limit_runs{limit="store"}', 101, 100),
    "PawlQueueWaitLong": (
        {_WAIT % "10": "0+90x90", _WAIT % "60": "0+100x90", _WAIT % "+Inf": "0+100x90"},
        {_WAIT % "10": "0+100x90", _WAIT % "60": "0+100x90", _WAIT % "+Inf": "0+100x90"},
    ),
    "PawlNatsAway": gauge('pawl_notifier_bus_connected{service="notifier"}', 0, 1),
    "PawlRunsQuarantined": ({_QUARANTINED: "0x30 1x60"}, {_QUARANTINED: "1x90"}),
    "PawlRunsNeedAttention": gauge('pawl_job_store_runs{state="NEEDS_ATTENTION"}', 1),
    "PawlSchedulesLate": gauge("pawl_job_store_due_schedules", 1),
    "PawlTriggerEventsLate": gauge("pawl_job_store_due_events", 1),
    "PawlJobsLate": gauge('pawl_job_store_jobs{state="late"}', 1),
    "PawlNoticesWait": gauge('pawl_job_store_notices{state="pending"}', 1001, 1000),
    "PawlLifecycleWaits": gauge("pawl_job_store_outbox_events", 1001, 1000),
    "PawlDeliveriesLate": gauge('pawl_notifier_delivery_delay_seconds{kind="email"}', 301, 300),
    "PawlDeliveryBacklog": gauge('pawl_notifier_deliveries_waiting{kind="email"}', 1001, 1000),
    "PawlDeliveriesDead": (
        {'pawl_notifier_delivery_try_seconds_count{kind="email",state="dead"}': "0+1x90"},
        {'pawl_notifier_delivery_try_seconds_count{kind="email",state="delivered"}': "0+1x90"},
    ),
    "PawlDiskLow": (
        {_DISK % "avail": "9x90", _DISK % "size": "100x90"},
        {_DISK % "avail": "11x90", _DISK % "size": "100x90"},
    ),
}  # fmt: skip


def test_each_alert_fires_when_it_should(tmp_path: Path) -> None:
    promtool = packages.debian(tmp_path / "prometheus", "prometheus") / "usr/bin/promtool"
    alerts = [rule["alert"] for group in yaml.safe_load(_RULES.read_text())["groups"] for rule in group["rules"]]
    assert sorted(alerts) == sorted(CASES)
    tests = [
        _test(alert, series, fires=fires)
        for alert, both in CASES.items()
        for series, fires in zip(both, (True, False), strict=True)
    ]
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(_RULES)], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _test(alert: str, series: Series, *, fires: bool) -> dict[str, Any]:
    return {
        "name": f"{alert} {'fires' if fires else 'is silent'}",
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'count(ALERTS{{alertname="{alert}",alertstate="firing"}})',
                "eval_time": "61m",
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
        ],
    }
