"""The container set-up says the same as the suite on one machine."""

from __future__ import annotations

import re

from services.launcher import nats
from services.launcher.services import DEFAULT_PORTS
from tests.tidy import tree

COMPOSE = (tree.ROOT / "docker-compose.yml").read_text()


def test_nats_users_have_the_rights_that_the_launcher_gives_them() -> None:
    blocks = re.split(r"\n {8}user: (\w+)\n", (tree.ROOT / "deploy/nats.conf").read_text())[1:]
    granted = {}
    for user, block in zip(blocks[::2], blocks[1::2], strict=True):
        publish, subscribe = block.split("subscribe:")
        granted[user] = nats.Rights(publish=subjects(publish), subscribe=subjects(subscribe))
    assert granted == nats.USERS


def subjects(text: str) -> tuple[str, ...]:
    found = tuple(re.findall(r'"([^"]+)"', text))
    return () if found == (">",) else found


def test_containers_listen_on_the_usual_ports() -> None:
    listening = {int(port) for port in re.findall(r"LISTEN: 0\.0\.0\.0:(\d+)", COMPOSE)}
    assert listening < set(DEFAULT_PORTS.values())


def test_prometheus_asks_every_service_where_it_answers() -> None:
    metrics = re.findall(
        r"^  ([a-z-]+):\n(?:    .*\n)*?      PAWL_METRICS_LISTEN: 0\.0\.0\.0:(\d+)", COMPOSE, re.MULTILINE
    )
    targets = re.findall(r'targets: \["([a-z-]+):(\d+)"\]', (tree.ROOT / "deploy/prometheus.yml").read_text())
    assert sorted(targets) == sorted(metrics)
    assert len(targets) == len({name for name, _ in targets}) == 4


def test_no_password_of_the_containers_has_a_default() -> None:
    secrets = re.findall(r"\$\{(\w+(?:PASSWORD|KEY))(:?[-?]?)", COMPOSE)
    assert {operator for _, operator in secrets} <= {":?", ""}
    checked = {name for name, operator in secrets if operator == ":?"}
    assert {name for name, _ in secrets} == checked
