"""Every expression of every dashboard returns data from a real Prometheus that watches a live suite."""

from __future__ import annotations

import asyncio
import json
import math
import time
from pathlib import Path
from typing import Any

import httpx2
import pytest

from pawl.chassis.process.tasks import end
from pawl.client import AsyncClient
from tests import packages
from tests.poll import until
from tests.system.deploy.conftest import KEY
from tests.system.deploy.containers import ROOT, Containers

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
# Series that exist only after something has gone wrong, or after a feature was used that this test does not use.
_WITHOUT_DATA = {
    'sum by (cause) (rate(pawl_job_store_runs_ended_total{outcome=~"failed|expired"}[1m]))': "no run fails",
    'sum by (service) (rate({__name__=~"pawl_.+_bus_dropped_total"}[1m]))': "NATS never fails",
    "sum by (kind, state) (rate(pawl_notifier_delivery_try_seconds_count[1m]))": "no channel exists",
    "sum by (outcome) (rate(pawl_job_store_schedule_fires_total[1m]))": "no schedule exists",
    "sum by (outcome) (rate(pawl_job_store_trigger_events_total[1m]))": "no trigger exists",
    'sum by (service, code) (rate({__name__=~"pawl_.+_rpc_requests_total",code!="OK"}[1m]))': "every call succeeds",
    'sum by (service, kind) (rate({__name__=~"pawl_.+_login_failures_total"}[1m]))': "every login succeeds",
}
_PATIENCE_SECONDS = 240.0


async def test_every_expression_returns_data(containers: Containers, tmp_path: Path) -> None:
    prometheus = packages.debian(tmp_path / "prometheus", "prometheus") / "usr/bin/prometheus"
    exporter = packages.debian(tmp_path / "node", "prometheus-node-exporter") / "usr/bin/prometheus-node-exporter"
    for service in ("job-store", "tool-registry", "notifier", "agent-loop", "gateway", "mailbox"):
        await containers.start(service)
    containers.write("deploy/prometheus.yml", (ROOT / "deploy/prometheus.yml").read_text().replace("15s", "1s"))
    command = containers.parts["node-exporter"]["command"]
    command[command.index("--path.rootfs=/host")] = "--path.rootfs=/"
    await containers.start("node-exporter", exporter)
    await containers.start("prometheus", prometheus)
    queries = {query for path in (ROOT / "deploy/grafana/dashboards").iterdir() for query in _queries(path)}
    assert set(_WITHOUT_DATA) <= queries
    empty = set(queries)
    async with httpx2.AsyncClient(trust_env=False) as http:
        load = asyncio.create_task(_work(containers, http))

        async def all_have_data() -> bool:
            for query in sorted(empty):
                if await _has_data(http, f"http://127.0.0.1:{containers.port(9090)}", query):
                    empty.discard(query)
            assert not load.done(), load.result()
            return empty <= set(_WITHOUT_DATA)

        try:
            await until(all_have_data, patience_seconds=_PATIENCE_SECONDS)
        except TimeoutError:
            pytest.fail("no data: " + "\n".join(sorted(empty - set(_WITHOUT_DATA))))
        finally:
            await end([load])


def _queries(dashboard: Path) -> set[str]:
    panels = json.loads(dashboard.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    return {each.replace("$__rate_interval", "1m").replace("$store", ".*") for each in expressions}


async def _work(containers: Containers, http: httpx2.AsyncClient) -> None:
    """Repeatedly run a tool, reject an approval and request a page from the gateway."""
    async with AsyncClient([f"127.0.0.1:{containers.port(7601)}"], api_key=KEY) as pawl:
        while True:
            run = await pawl.start("what is 17 * 23?")
            assert [piece async for piece in pawl.text(run.run_id)]
            await pawl.start("send an email to bob@example.com saying hello")
            await http.get(f"http://127.0.0.1:{containers.port(7600)}/healthz")


async def _has_data(http: httpx2.AsyncClient, url: str, query: str) -> bool:
    now = time.time()
    window: dict[str, Any] = {"query": query, "start": now - 60, "end": now, "step": 1}
    answer = (await http.get(f"{url}/api/v1/query_range", params=window)).json()
    assert answer["status"] == "success", (query, answer)
    return any(math.isfinite(float(value)) for series in answer["data"]["result"] for _, value in series["values"])
