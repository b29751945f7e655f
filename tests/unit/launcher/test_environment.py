"""Options of a suite. Each process gets only the environment that it reads, and no secret of another process."""

from __future__ import annotations

import dataclasses
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pawl.chassis.process.start import StartError
from pawl.chassis.rpc.replicas import DEFAULT_PORTS
from pawl.launcher.folder import DataFolder, SecretFiles
from pawl.launcher.options import SuiteOptions, read_options, unknown_of
from pawl.launcher.plan import SuiteContext, model_process, service_process
from pawl.launcher.services import STAGES, ServiceSpec
from tests.tables import for_each

SECRETS: Mapping[str, frozenset[str]] = {
    "OPENAI_API_KEY": frozenset({"agent-loop"}),
    "OTEL_EXPORTER_OTLP_HEADERS": frozenset({"agent-loop"}),
    "HTTPS_PROXY": frozenset({"agent-loop"}),
    "PAWL_SMTP_URL": frozenset({"notifier", "tool-registry"}),
    "PAWL_TOOL_SECRETS_FILE": frozenset({"tool-registry"}),
    "PAWL_SERVICE_KEY_FILE": frozenset({"agent-loop", "tool-registry", "notifier", "gateway", "mailbox"}),
    "PAWL_MAILBOX_PASSWORDS_FILE": frozenset({"mailbox"}),
    "PAWL_DATABASE_URL_FILE": frozenset({"job-store", "tool-registry", "notifier"}),
    "PAWL_DATABASE_OWNER_URL_FILE": frozenset({"job-store", "tool-registry", "notifier"}),
    "PAWL_NATS_URL_FILE": frozenset({"job-store", "agent-loop", "notifier"}),
    "AWS_SECRET_ACCESS_KEY": frozenset(),
    "PAWL_API_KEY": frozenset(),
    "BILLING_URL": frozenset({"tool-registry"}),
}
PLAIN = {"PATH": "/bin", "LC_ALL": "C", "PAWL_LOG_LEVEL": "debug", "PAWL_TOOL_ENVIRONMENT": "BILLING_URL, ABSENT"}


SPECS = [spec for stage in STAGES for spec in stage]
# Files that the launcher writes.
_MADE = ("PAWL_DATABASE_URL_FILE", "PAWL_DATABASE_OWNER_URL_FILE", "PAWL_NATS_URL_FILE", "PAWL_SERVICE_KEY_FILE")


def options(data: Path) -> SuiteOptions:
    """Return the options of `pawl up` in an environment full of secrets."""
    return read_options({**PLAIN, **{name: "hush" for name in SECRETS if name not in _MADE}}, data=data)


def context(folder: Path, chosen: SuiteOptions) -> SuiteContext:
    secrets = SecretFiles(folder / "secrets")
    return SuiteContext(options=chosen, folder=DataFolder(folder), secrets=secrets, peers=lambda _: {}, model=dict)


def environment_of(spec: ServiceSpec, folder: Path, chosen: SuiteOptions) -> Mapping[str, str]:
    return service_process(spec, 0, context(folder, chosen)).command().environment


def test_a_secret_reaches_only_the_services_that_need_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I22: the scripted model gets no secret."""
    for name in SECRETS:
        monkeypatch.setenv(name, "hush")
    for spec in SPECS:
        found = environment_of(spec, tmp_path, options(tmp_path))
        needed = {name for name in SECRETS if spec.name in SECRETS[name]}
        assert {name for name in SECRETS if name in found} == needed, spec.name
        assert (found["PATH"], found["LC_ALL"], found["PAWL_LOG_LEVEL"]) == ("/bin", "C", "debug")
    found = model_process(context(tmp_path, options(tmp_path))).command().environment
    assert "hush" not in found.values()
    assert not [name for name in found if name.startswith(("PAWL_", "OPENAI_"))]


@for_each("spec", SPECS)
def test_only_services_that_use_the_data_folder_get_it(tmp_path: Path, spec: Any) -> None:
    """The registry keeps files there, and the gateway reads the problems that `pawl dev` reports."""
    found = environment_of(spec, tmp_path, SuiteOptions(data=tmp_path))
    assert ("PAWL_DATA" in found) is (spec.name in {"tool-registry", "gateway"})


def test_only_the_registry_gets_the_paths_of_secret_files(tmp_path: Path) -> None:
    files = {"PAWL_MAILBOX_PASSWORDS_FILE": "/etc/mail.json", "OPENAI_API_KEY_FILE": "/etc/model"}
    for spec in SPECS:
        found = environment_of(spec, tmp_path, SuiteOptions(data=tmp_path, environment=files))
        named = found.get("PAWL_PRIVATE_FILES", "").split(",")
        assert ({*named} >= {*files.values()}) is (spec.name == "tool-registry")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for socket names; paths of `tmp_path` are too long."""
    with tempfile.TemporaryDirectory(prefix="pawl-") as path:
        yield Path(path)


LISTENS_INTERNALLY = {"job-store", "tool-registry", "agent-loop"}


@for_each("certificate", ["", "/certificate"])
def test_a_ca_for_commands_does_not_enable_tls_between_services(folder: Path, certificate: str) -> None:
    """A user of another suite with TLS can start one here without TLS."""
    given = {"PAWL_TLS_CA_FILE": "/authority", "PAWL_TLS_CERTIFICATE_FILE": certificate}
    for spec in SPECS:
        found = environment_of(spec, folder, read_options(given | {"PAWL_INTERNAL_LISTEN": "x:1"}, data=folder))
        assert ("PAWL_TLS_CA_FILE" in found) is bool(certificate)
        expected = r"127\.0\.0\.1:[1-9][0-9]+" if certificate else re.escape(f"unix:{folder}/run/{spec.name}.sock")
        expected = expected if spec.name in LISTENS_INTERNALLY else ""
        assert re.fullmatch(expected, found.get("PAWL_INTERNAL_LISTEN", ""))


@for_each("name", ["a" * 100, "a,b", "a#b", "a?b", "a%20b"])
def test_services_share_the_public_port_if_the_folder_cannot_hold_sockets(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    assert not environment_of(STAGES[0][0], folder, SuiteOptions(data=folder))["PAWL_INTERNAL_LISTEN"]


def test_replicas_share_public_ports_if_any_socket_path_is_too_long(folder: Path) -> None:
    """The first socket path would just fit into the limit, and the second would not."""
    room = 100 - len(f"{folder}//run/job-store.sock")
    folder = folder / ("a" * room)
    folder.mkdir()
    chosen = context(folder, SuiteOptions(data=folder, replicas={"job-store": 2}))
    found = [service_process(STAGES[0][0], number, chosen).command().environment for number in range(2)]
    assert [environment["PAWL_INTERNAL_LISTEN"] for environment in found] == ["", ""]


def test_each_service_has_its_own_database_url(tmp_path: Path) -> None:
    """OPS-1: no URL is that of the database's owner."""
    found = [environment_of(spec, tmp_path, SuiteOptions(data=tmp_path)) for spec in SPECS]
    urls = [environment["PAWL_DATABASE_URL_FILE"] for environment in found if "PAWL_DATABASE_URL_FILE" in environment]
    owners = {environment.get("PAWL_DATABASE_OWNER_URL_FILE") for environment in found}
    assert len(urls) == len(set(urls)) == 3
    assert not owners & set(urls)


def test_an_external_databases_owner_is_passed_to_the_services(tmp_path: Path) -> None:
    one = SuiteOptions(data=tmp_path, database_url="postgresql://us")
    two = dataclasses.replace(one, database_owner_url="postgresql://owner")
    (store,) = STAGES[0]
    found = ["PAWL_DATABASE_OWNER_URL_FILE" in environment_of(store, tmp_path, chosen) for chosen in (one, two)]
    assert found == [False, True]


def test_notifications_link_to_the_suites_gateway_by_default(tmp_path: Path) -> None:
    tls = {"PAWL_TLS_CERTIFICATE_FILE": "/certificate", "PAWL_TLS_CA_FILE": "/authority"}
    own = {"PAWL_PUBLIC_URL": "https://pawl.example.com"}
    for given, url in (({}, "http://127.0.0.1:7777"), (tls, "https://127.0.0.1:7777"), (own, own["PAWL_PUBLIC_URL"])):
        chosen = read_options(given, data=tmp_path, ports=["gateway=7777"])
        found = {spec.name: environment_of(spec, tmp_path, chosen) for spec in SPECS}
        links = {name: each["PAWL_PUBLIC_URL"] for name, each in found.items() if "PAWL_PUBLIC_URL" in each}
        assert links == dict.fromkeys(("notifier", "gateway", "tool-registry"), url)


def test_the_documented_ports_are_the_default() -> None:
    options = read_options({})
    assert (options.ports, options.data, options.scripted_model) == (DEFAULT_PORTS, Path(".pawl").resolve(), True)


def test_a_flag_overrides_its_variable() -> None:
    environment = {"PAWL_DATA": "elsewhere"}
    options = read_options(environment, data=Path("here"), ports=["nats=3"], replicas=["agent-loop=4"])
    assert (options.port("nats"), options.port("agent-loop")) == (3, 7601)
    assert (options.replicas, options.data) == ({"agent-loop": 4}, Path("here").resolve())
    assert read_options(environment).data == Path("elsewhere").resolve()


def test_the_port_option_all_sets_every_port_that_is_not_set_individually() -> None:
    options = read_options({}, ports=["all=0", "nats=5"])
    assert options.ports == dict.fromkeys(DEFAULT_PORTS, 0) | {"nats": 5}


def test_only_the_first_replica_gets_the_chosen_port() -> None:
    assert (read_options({}).port("agent-loop", 1), SuiteOptions(data=Path("x")).port("agent-loop")) == (0, 0)


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


@for_each(("environment", "ports", "replicas", "sentence"), MISTAKES)
def test_a_mistake_gives_one_clear_error(environment: Any, ports: Any, replicas: Any, sentence: Any) -> None:
    with pytest.raises(StartError) as caught:
        read_options(environment, ports=ports, replicas=replicas)
    assert str(caught.value).startswith(sentence)
