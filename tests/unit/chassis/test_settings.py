from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, SecretStr

from pawl.agent_loop.settings import AgentLoopSettings
from pawl.chassis.process.address import is_loopback
from pawl.job_store.settings import JobStoreSettings
from pawl.notifier.settings import NotifierSettings
from pawl.server.process.settings import PeerAddresses, ServiceSettings, SettingsError, load, read
from pawl.tool_registry.settings import ToolRegistrySettings
from tests.keys import LOCAL_KEY
from tests.tables import for_each, not_refused


class Settings(ServiceSettings):
    database_url: SecretStr
    peers: PeerAddresses = "127.0.0.1:7603"
    model_key: SecretStr | None = Field(default=None, validation_alias="MODEL_API_KEY")


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("PAWL_DATABASE_URL", "postgresql://db/pawl")
    monkeypatch.setenv("PAWL_LOCAL_KEY", LOCAL_KEY)
    return monkeypatch


def problems() -> list[str]:
    with pytest.raises(SettingsError) as caught:
        read(Settings)
    return caught.value.problems


def test_settings_come_from_variables_with_the_prefix(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("PAWL_LISTEN", "127.0.0.1:7603")
    environment.setenv("PAWL_LOG_LEVEL", "WARNING")
    environment.setenv("PAWL_NATS_URL", "")
    settings = read(Settings)
    assert settings.database_url.get_secret_value() == "postgresql://db/pawl"
    assert (settings.listen, settings.log_level, settings.nats_url) == ("127.0.0.1:7603", "warning", None)


def test_constants_cannot_be_set_by_a_variable(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("PAWL_STREAMS_MAX", "5")
    assert (read(Settings).streams_max, Settings(streams_max=5).streams_max) == (1000, 5)


def test_all_problems_are_reported_at_once(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environment.delenv("PAWL_DATABASE_URL")
    environment.setenv("PAWL_LISTEN", "7603")
    environment.setenv("PAWL_METRICS_LISTEN", "unix:/run/metrics")
    environment.setenv("PAWL_PEERS", "a:1,b")
    environment.setenv("PAWL_LOG_LEVEL", "loud")
    environment.setenv("PAWL_SERVICE_KEY_FILE", f"{tmp_path}/missing")
    found = "\n".join(sorted(problems()))
    assert [line.replace(":", " ").split()[0] for line in found.splitlines()] == [
        "PAWL_DATABASE_URL",
        "PAWL_LISTEN",
        "PAWL_LOG_LEVEL",
        "PAWL_METRICS_LISTEN",
        "PAWL_PEERS",
        "PAWL_SERVICE_KEY_FILE",
    ]


def test_a_secret_may_come_from_a_file_but_only_from_one_source(
    environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "url").write_text("postgresql://file/pawl\n")
    (tmp_path / "key").write_text("sk-1")
    (tmp_path / "empty").write_text("\n")
    environment.setenv("PAWL_DATABASE_URL_FILE", f"{tmp_path}/url")
    assert problems() == ["PAWL_DATABASE_URL: set either PAWL_DATABASE_URL or PAWL_DATABASE_URL_FILE, not both"]
    environment.delenv("PAWL_DATABASE_URL")
    environment.setenv("MODEL_API_KEY_FILE", f"{tmp_path}/key")
    settings = read(Settings)
    assert settings.database_url.get_secret_value() == "postgresql://file/pawl"
    assert settings.model_key is not None
    assert settings.model_key.get_secret_value() == "sk-1"
    environment.setenv("PAWL_SERVICE_KEY_FILE", f"{tmp_path}/empty")
    assert problems() == [f"PAWL_SERVICE_KEY_FILE: {tmp_path}/empty: it is empty"]


def test_the_local_key_is_for_loopback_only(environment: pytest.MonkeyPatch) -> None:
    """OPS-1: on other addresses, callers need keys from a file or the database, or tokens."""
    environment.setenv("PAWL_OIDC_FILE", "oidc.json")
    assert read(Settings).local_key is not None, "both may be set on one machine, to try tokens"
    for name in ("PAWL_LISTEN", "PAWL_INTERNAL_LISTEN"):
        with environment.context() as only_here:
            only_here.setenv(name, "0.0.0.0:7603")
            assert ["PAWL_LOCAL_KEY" in problem for problem in problems()] == [True], name
    environment.setenv("PAWL_LISTEN", "0.0.0.0:7603")
    environment.delenv("PAWL_LOCAL_KEY")
    assert read(Settings).listen == "0.0.0.0:7603"
    environment.delenv("PAWL_OIDC_FILE")
    assert read(Settings).listen == "0.0.0.0:7603", "all keys are in the database"


def test_the_local_key_is_long_and_excludes_a_key_file(environment: pytest.MonkeyPatch) -> None:
    """OPS-1: only one source of keys applies."""
    environment.setenv("PAWL_LOCAL_KEY", "short")
    assert "at least 16" in problems()[0]
    environment.setenv("PAWL_LOCAL_KEY", LOCAL_KEY)
    environment.setenv("PAWL_API_KEYS_FILE", "keys.json")
    assert problems() == ["PAWL_API_KEYS_FILE: set either this or PAWL_LOCAL_KEY (on a single machine only), not both"]


@for_each("cls", [AgentLoopSettings, JobStoreSettings, NotifierSettings, ToolRegistrySettings])
def test_services_require_a_key_and_listen_on_loopback_by_default(cls: Any) -> None:
    """OPS-1: /metrics and /healthz answer any caller that reaches them."""
    with pytest.raises(SettingsError) as caught:
        read(cls)
    assert {"PAWL_SERVICE_KEY is required", "PAWL_SERVICE_KEYS_FILE is required"} & set(caught.value.problems)
    listens = [cls.model_fields[f"{name}listen"].default for name in ("", "metrics_", "internal_")]
    assert all(map(is_loopback, filter(None, listens)))


def test_a_registry_is_private_only_if_it_uses_the_local_key(environment: pytest.MonkeyPatch) -> None:
    """Otherwise an operator of any store could start any program on the registry's machine."""
    environment.delenv("PAWL_LOCAL_KEY")
    environment.setenv("PAWL_SERVICE_KEY", "s" * 32)
    environment.setenv("PAWL_SERVICE_KEYS_FILE", "services.json")
    for given, expected in (
        ({"PAWL_LOCAL_KEY": LOCAL_KEY}, True),
        ({"PAWL_LOCAL_KEY": LOCAL_KEY, "PAWL_OIDC_FILE": "oidc.json"}, False),
        ({"PAWL_API_KEYS_FILE": "keys.json"}, False),
        ({}, False),  # All keys are in the database, for any store.
    ):
        with environment.context() as set_so:
            for name, value in given.items():
                set_so.setenv(name, value)
            assert read(ToolRegistrySettings).is_personal is expected, given


def test_loopback_addresses_are_recognised() -> None:
    here = ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:/run/x"]
    elsewhere = ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "localhost.example:1"]
    assert [address for address in (*here, *elsewhere) if is_loopback(address)] == here


def test_secrets_are_never_shown(environment: pytest.MonkeyPatch) -> None:
    """I22: neither errors nor reprs contain them."""
    environment.setenv("PAWL_DATABASE_URL", "postgresql://u:hunter2@db/pawl")
    environment.setenv("PAWL_DATABASE_CONNECTIONS_MAX", "hunter2")
    assert "hunter2" not in str(problems())
    environment.delenv("PAWL_DATABASE_CONNECTIONS_MAX")
    assert "hunter2" not in repr(read(Settings))


def test_a_process_with_invalid_settings_exits_with_code_2(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("PAWL_LISTEN", "nowhere")
    with pytest.raises(SystemExit) as caught:
        load(Settings)
    assert caught.value.code == 2
    assert capsys.readouterr().err == "PAWL_LISTEN must be host:port, for example 127.0.0.1:7601\n"


@for_each(
    ("name", "problem"),
    [
        ("PAWL_TLS_CERTIFICATE_FILE", "set both PAWL_TLS_CERTIFICATE_FILE and "),
        ("PAWL_TLS_KEY_FILE", "set both PAWL_TLS_CERTIFICATE_FILE and "),
        ("PAWL_TLS_CA_FILE", "PAWL_TLS_CA_FILE requires "),
    ],
)
def test_an_incomplete_tls_configuration_is_refused(environment: pytest.MonkeyPatch, name: str, problem: str) -> None:
    with environment.context() as half:
        half.setenv(name, "/file")
        assert [found.startswith(problem) for found in problems()] == [True]


def test_the_public_url_must_be_https_or_loopback(environment: pytest.MonkeyPatch) -> None:
    """Links in e-mails start with this URL."""
    environment.setenv("PAWL_SERVICE_KEY", "k" * 16)

    def shown(given: str) -> str:
        environment.setenv("PAWL_PUBLIC_URL", given)
        return read(NotifierSettings).public_url

    right = ["", "https://pawl.example.com", "https://pawl.example.com:8443"]
    right += ["http://127.0.0.1:7600", "http://[::1]:7600", "http://localhost"]
    assert [shown(given) for given in right] == right
    wrong = ["http://pawl.example.com", *(f"https://pawl.example.com{rest}" for rest in ("/", "/console", "?a=b"))]
    wrong += ["https://ann@pawl.example.com", "https://pawl.example.com\r\nBcc: eve@example.net", "https://"]
    wrong += ["pawl.example.com", "javascript://pawl.example.com"]
    assert not_refused(SettingsError, shown, wrong) == []
