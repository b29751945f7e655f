"""Flags and variables of `pawl up`, and errors for invalid ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pawl.chassis.process.start import StartError
from pawl.chassis.rpc.replicas import DEFAULT_PORTS
from pawl.launcher.options import SuiteOptions, read_options, unknown_of


def test_the_documented_ports_are_the_default() -> None:
    options = read_options({})
    assert options.ports == DEFAULT_PORTS
    assert options.data == Path(".pawl").resolve()
    assert options.scripted_model


def test_a_flag_overrides_its_variable() -> None:
    environment = {"PAWL_DATA": "elsewhere"}
    options = read_options(environment, data=Path("here"), ports=["nats=3"], replicas=["agent-loop=4"])
    assert (options.port("nats"), options.port("agent-loop")) == (3, 7601)
    assert options.replicas == {"agent-loop": 4}
    assert options.data == Path("here").resolve()
    assert read_options(environment).data == Path("elsewhere").resolve()


def test_all_sets_every_port_that_is_not_set_individually() -> None:
    options = read_options({}, ports=["all=0", "nats=5"])
    assert set(options.ports) == set(DEFAULT_PORTS)
    assert {name: port for name, port in options.ports.items() if port} == {"nats": 5}


def test_only_the_first_replica_gets_the_chosen_port() -> None:
    assert read_options({}).port("agent-loop", 1) == 0
    assert SuiteOptions(data=Path("x")).port("agent-loop") == 0


def test_a_real_model_replaces_the_scripted_one() -> None:
    assert not any(read_options({name: "x"}).scripted_model for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL"))


def test_servers_can_be_replaced_by_variable_or_file(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("nats://n\n")
    options = read_options({"PAWL_DATABASE_URL": "postgresql://p", "PAWL_NATS_URL_FILE": str(tmp_path / "url")})
    assert (options.database_url, options.nats_url) == ("postgresql://p", "nats://n")


MISTAKES: list[tuple[dict[str, str], list[str], list[str], str]] = [
    ({"PAWL_DATABASE_OWNER_URL": "x"}, [], [], "PAWL_DATABASE_OWNER_URL requires PAWL_DATABASE_URL"),
    ({"PAWL_TLS_CERTIFICATE_FILE": "x"}, [], [], "PAWL_TLS_CERTIFICATE_FILE requires PAWL_TLS_CA_FILE"),
    ({}, ["agentloop=1"], [], "--port: unknown name 'agentloop'; choose from gateway, agent-loop,"),
    ({}, ["nats=70000"], [], "--port: nats must be a number between 0 and 65535, got '70000'"),
    ({}, ["nats"], [], "--port: nats must be a number"),
    ({}, [], ["agent-loop=0"], "--replicas: agent-loop must be a number between 1 and 16, got '0'"),
    ({"PAWL_NATS_URL": "a", "PAWL_NATS_URL_FILE": "b"}, [], [], "PAWL_NATS_URL: set either"),
    ({"PAWL_EGRES_FILE": "x"}, [], [], "unknown setting: PAWL_EGRES_FILE (did you mean PAWL_EGRESS_FILE?)"),
    (
        {"PAWL_OF_NOBODY": "x", "PAWL_ALSO": "y"},
        [],
        [],
        "unknown setting: PAWL_ALSO, PAWL_OF_NOBODY",
    ),
    ({"PAWL_ROUNDS_MAX": "9"}, [], [], "unknown setting: PAWL_ROUNDS_MAX (did you mean PAWL_LIMITS_FILE?)"),
    ({"PAWL_PORT": "7600"}, [], [], "unknown setting: PAWL_PORT"),
    ({"PAWL_NATS_URL_FILE": "/absent"}, [], [], "PAWL_NATS_URL_FILE: cannot read /absent: No such file"),
]


KUBERNETES = {
    f"PAWL_{name}": value
    for service in ("", "AGENT_LOOP_")
    for name, value in {
        f"{service}SERVICE_HOST": "10.0.0.1",
        f"{service}SERVICE_PORT": "7600",
        f"{service}SERVICE_PORT_GRPC": "7600",
        f"{service}PORT": "tcp://10.0.0.1:7600",
        f"{service}PORT_7600_TCP": "tcp://10.0.0.1:7600",
        f"{service}PORT_7600_TCP_ADDR": "10.0.0.1",
    }.items()
}


def test_settings_tool_and_kubernetes_variables_are_accepted() -> None:
    names = re.findall(r"^#(PAWL_\w+)=", (Path(__file__).parents[3] / ".env.example").read_text(), re.MULTILINE)
    assert names
    of_tools = {"PAWL_TOOL_ENVIRONMENT": "PAWL_OF_A_TOOL", "PAWL_OF_A_TOOL": "x"}
    assert unknown_of(dict.fromkeys([*names, "HOME"], "") | KUBERNETES | of_tools) == {}


def test_a_mistake_gives_one_clear_error() -> None:
    for environment, ports, replicas, sentence in MISTAKES:
        with pytest.raises(StartError) as caught:
            read_options(environment, ports=ports, replicas=replicas)
        assert str(caught.value).startswith(sentence)
