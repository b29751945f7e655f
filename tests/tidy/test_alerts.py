"""The rules of Prometheus ask for metrics that there are."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.tidy import tree

RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((tree.ROOT / "deploy/alerts.yml").read_text())["groups"] for rule in group["rules"]
]
_METRIC = re.compile(r"metrics\.(counter|gauge|histogram)\(\s*\"(\w+)\"", re.DOTALL)
_LABELS = re.compile(r"(pawl_\w+)\{(\w+)=\"(\w+)\"\}")


def metrics_of(folder: str) -> set[str]:
    """The names under which a part of the suite shows its metrics."""
    found: set[str] = set()
    for path in (tree.ROOT / "services/pawl" / folder).rglob("*.py"):
        for kind, name in _METRIC.findall(path.read_text()):
            found |= {f"{name}_{each}" for each in ("count", "sum", "bucket")} if kind == "histogram" else {name}
    return found


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: str(rule["alert"]))
def test_each_metric_of_a_rule_is_there(rule: dict[str, Any]) -> None:
    """OPS-2."""
    match = re.search(r"pawl_\(([\w|]+)\)_(\w+)", rule["expr"])
    names = (
        [f"pawl_{each}_{match[2]}" for each in match[1].split("|")] if match else re.findall(r"pawl_\w+", rule["expr"])
    )
    for name in names:
        service = next(each for each in ("agent_loop", "job_store", "notifier") if name.startswith(f"pawl_{each}_"))
        assert name.removeprefix(f"pawl_{service}_") in metrics_of(service) | metrics_of("chassis")
    assert names or rule["expr"].startswith("up{")


def test_each_label_of_a_rule_is_one_that_is_set() -> None:
    labels = {found for rule in RULES for found in _LABELS.findall(rule["expr"])}
    assert labels == {
        ("pawl_job_store_jobs", "state", "late"),
        ("pawl_job_store_notices", "state", "pending"),
        ("pawl_notifier_delivery_try_seconds_count", "state", "dead"),
    }


def test_each_rule_says_how_bad_it_is_and_what_to_do() -> None:
    operations = (tree.ROOT / "docs/operations.md").read_text()
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in {"page", "warn"}
        assert rule["annotations"]["summary"]
        assert f"`{rule['alert']}`" in operations


def test_prometheus_reads_the_rules() -> None:
    assert yaml.safe_load((tree.ROOT / "deploy/prometheus.yml").read_text())["rule_files"] == ["alerts.yml"]
    assert "./deploy/alerts.yml:/etc/prometheus/alerts.yml:ro" in (tree.ROOT / "docker-compose.yml").read_text()
