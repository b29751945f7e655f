"""The containers, alerts and Makefile agree with the suite on one machine."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import tomllib
from typing import Any

import jsonschema_rs
import yaml

from pawl.launcher import nats
from pawl.launcher.postgres import ROLES
from pawl.launcher.services import STAGES
from tests.tidy import tree

COMPOSE = (tree.ROOT / "docker-compose.yml").read_text()
PARTS: dict[str, Any] = yaml.safe_load(COMPOSE)["services"]
NETWORKS: dict[str, Any] = yaml.safe_load(COMPOSE)["networks"]
PROMETHEUS: dict[str, Any] = yaml.safe_load((tree.ROOT / "deploy/prometheus.yml").read_text())
SERVICES = frozenset({"agent-loop", "job-store", "tool-registry", "notifier"})
CALLERS_ONLY = frozenset({"gateway", "mailbox"})
OPEN_PORTS = frozenset({"gateway", "agent-loop", "tool-registry", "job-store", "notifier", "prometheus", "grafana"})


def test_compose_file_matches_the_compose_specification() -> None:
    """The schema is that of github.com/compose-spec/compose-spec (Apache-2.0), unchanged."""
    schema = json.loads((tree.ROOT / "tests/tidy/compose-spec.json").read_text())
    problems = jsonschema_rs.validator_for(schema).iter_errors(yaml.safe_load(COMPOSE))
    assert [f"{'/'.join(map(str, each.instance_path))}: {each.message}" for each in problems] == []


def test_nats_users_have_the_same_permissions_as_in_the_launcher() -> None:
    blocks = re.split(r"\n {8}user: (\w+)\n", (tree.ROOT / "deploy/nats.conf").read_text())[1:]
    granted = {}
    for user, block in zip(blocks[::2], blocks[1::2], strict=True):
        publish, subscribe = block.split("subscribe:")
        granted[user] = nats.Rights(publish=subjects(publish), subscribe=subjects(subscribe))
    assert granted == nats.USERS


def subjects(text: str) -> tuple[str, ...]:
    found = tuple(re.findall(r'"([^"]+)"', text))
    return () if found == (">",) else found


def test_prometheus_scrapes_every_service_at_its_address() -> None:
    metrics = re.findall(
        r"^  ([a-z-]+):\n(?:    .*\n)*?      PAWL_METRICS_LISTEN: 0\.0\.0\.0:(\d+)", COMPOSE, re.MULTILINE
    )
    jobs = {job["job_name"]: job["static_configs"] for job in PROMETHEUS["scrape_configs"]}
    targets = [tuple(target.split(":")) for config in jobs["pawl"] for target in config["targets"]]
    assert sorted(targets) == sorted(metrics)
    assert len(targets) == len({name for name, _ in targets}) == 6


def test_container_passwords_have_no_defaults() -> None:
    secrets = re.findall(r"\$\{(\w+(?:PASSWORD|KEY))(:?[-?]?)", COMPOSE)
    assert {operator for _, operator in secrets} <= {":?", ""}
    assert {name for name, _ in secrets} == {name for name, operator in secrets if operator == ":?"}


def members(network: str) -> set[str]:
    return {name for name, part in PARTS.items() if network in part["networks"]}


def test_containers_share_networks_only_as_needed() -> None:
    for name, part in PARTS.items():
        assert part.get("networks"), f"{name} would be on the network of every container"
    inner = {network for network, options in NETWORKS.items() if options and options.get("internal")}
    assert {network: members(network) for network in inner} == {
        "database": {"postgres", "job-store", "tool-registry", "notifier"},
        "bus": {"nats", "job-store", "agent-loop", "notifier"},
        "services": CALLERS_ONLY | SERVICES,
        "metrics": {"prometheus", "node-exporter"} | CALLERS_ONLY | SERVICES,
        "queries": {"prometheus", "grafana"},
    }
    outer = [members(network) for network in NETWORKS if network not in inner]
    assert sorted(map(sorted, outer)) == sorted([name] for name in OPEN_PORTS | CALLERS_ONLY)
    assert {name for name, part in PARTS.items() if part.get("ports")} == OPEN_PORTS


def test_each_container_has_limits_and_cannot_gain_privileges() -> None:
    for name, part in PARTS.items():
        assert {"cpus", "memory", "pids"} <= set(part["deploy"]["resources"]["limits"]), name
        assert "no-new-privileges:true" in part["security_opt"], name


def test_each_service_has_its_own_database_role_without_superuser() -> None:
    """OPS-1: each role has its own password, and no role can create roles or bypass row security."""
    roles = dict(re.findall(r"PAWL_DATABASE_URL: postgresql://(\w+):\$\{(\w+)\}@", COMPOSE))
    owners = dict(re.findall(r"PAWL_DATABASE_OWNER_URL: postgresql://(\w+):\$\{(\w+)\}@", COMPOSE))
    assert roles == {name: f"POSTGRES_{name.upper()}_PASSWORD" for name in ROLES}
    assert owners == {f"{name}_owner": f"POSTGRES_{name.upper()}_OWNER_PASSWORD" for name in ROLES}
    assert PARTS["postgres"]["environment"]["POSTGRES_USER"] not in roles | owners
    script = (tree.ROOT / "deploy/postgres-roles.sh").read_text()
    assert f"for service in {' '.join(ROLES)}; do" in script
    assert not re.search(r"SUPERUSER|CREATEDB|CREATEROLE|BYPASSRLS", script)


def test_each_container_gets_its_services_variables() -> None:
    specs = {spec.name: spec for stage in STAGES for spec in stage}
    for name in CALLERS_ONLY | SERVICES:
        assert set(PARTS[name]["environment"]) <= (specs[name].reads or set()), name


RULES: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((tree.ROOT / "deploy/alerts.yml").read_text())["groups"] for rule in group["rules"]
]
_METRIC = re.compile(r"metrics\.(counter|gauge|histogram)\(\s*\"(\w+)\"", re.DOTALL)


def metrics_of(folder: str) -> set[str]:
    found: set[str] = set()
    for path in (tree.ROOT / "services/pawl" / folder).rglob("*.py"):
        for kind, name in _METRIC.findall(path.read_text()):
            found |= {f"{name}_{each}" for each in ("count", "sum", "bucket")} if kind == "histogram" else {name}
    return found


def test_metrics_in_alert_rules_exist() -> None:
    """OPS-2: an alert on a missing metric would never fire."""
    for rule in RULES:
        match = re.search(r"pawl_\(([\w|]+)\)_(\w+)", rule["expr"])
        names = [f"pawl_{each}_{match[2]}" for each in match[1].split("|")] if match else []
        names = names or re.findall(r"pawl_\w+", rule["expr"])
        for name in names:
            service = next(each for each in ("agent_loop", "job_store", "notifier") if name.startswith(f"pawl_{each}_"))
            assert name.removeprefix(f"pawl_{service}_") in metrics_of(service) | metrics_of("server"), rule["alert"]
        assert names or "up{" in rule["expr"] or rule["expr"].startswith("node_")


def test_each_alert_has_severity_and_runbook() -> None:
    assert len({rule["alert"] for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule["labels"]["severity"] in {"page", "warn"}
        assert set(rule["annotations"]) == {"summary", "runbook"}


def test_prometheus_reads_the_rules() -> None:
    assert PROMETHEUS["rule_files"] == ["alerts.yml"]
    assert "./deploy/alerts.yml:/etc/prometheus/alerts.yml:ro" in (tree.ROOT / "docker-compose.yml").read_text()


def test_dashboards_match_their_description_and_grafana_reads_them() -> None:
    folder = tree.ROOT / "deploy/grafana/dashboards"
    assert {path.name: path.read_text() for path in folder.iterdir()} == runpy.run_path(
        str(tree.ROOT / "deploy/grafana/build.py")
    )["files"](), "run `python deploy/grafana/build.py`"
    source = yaml.safe_load((tree.ROOT / "deploy/grafana/datasource.yml").read_text())["datasources"][0]
    assert {
        panel["datasource"]["uid"] for path in folder.iterdir() for panel in json.loads(path.read_text())["panels"]
    } == {source["uid"]}
    mounts = dict(volume.split(":")[:2] for volume in PARTS["grafana"]["volumes"])
    provider = yaml.safe_load((tree.ROOT / "deploy/grafana/provider.yml").read_text())["providers"][0]
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]


MAKEFILE = (tree.ROOT / "Makefile").read_text()
(PHONY,) = re.findall(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)


def test_help_is_the_default_and_names_every_target() -> None:
    shown = subprocess.run(["make", "-C", tree.ROOT], capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  make (\S+) +\S", shown, re.MULTILINE) == PHONY.split()


def test_every_target_that_is_not_a_file_is_phony() -> None:
    assert re.findall(r"^([a-z-]+):", MAKEFILE, re.MULTILINE) == PHONY.split()


def test_each_test_is_run_by_exactly_one_of_two_targets() -> None:
    """The mark `long` selects the target. CI runs `make test` and the long tests with the mark `ci`."""
    recipes = dict(re.findall(r"^(test[a-z-]*):.*\n\t@(.*)$", MAKEFILE, re.MULTILINE))
    marks = {"test": "not long", "test-long": "long", "test-ci": "ci"}
    assert {target: recipes[target] for target in marks} == {
        target: f'$(TESTS) -m "{mark}" $(ARGS)' for target, mark in marks.items()
    }
    (command,) = re.findall(r"^TESTS := (.*)$", MAKEFILE, re.MULTILINE)
    options = tomllib.loads((tree.ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    leave_out = {"-m", "-k", "--ignore", "--ignore-glob", "--deselect"}
    assert not leave_out & {*command.removeprefix("$(BIN)/python -m $(PYTEST) ").split(), *options["addopts"]}
    assert options["testpaths"] == ["tests"]
    ran = (tree.ROOT / ".ci/run").read_text().splitlines()
    assert {"make test PYTEST=tests.twice", "make test-ci PYTEST=tests.twice"} <= set(ran)
