"""Access to the gateway: hosts, origins, keys, sessions, and public methods."""

from __future__ import annotations

import functools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.identity.roles import CALLERS
from pawl.errors import (
    ForeignHost,
    ForeignOrigin,
    InvalidField,
    Kind,
    MethodNotFound,
    RunNotFound,
    TooLarge,
    Unauthenticated,
)
from pawl.gateway.login import session
from pawl.gateway.login.session import Seal, Session
from pawl.gateway.services import PUBLIC, WATCH_RUN, find
from pawl.gateway.web import hosts
from tests.tables import for_each, not_refused, refusal

HOSTS = frozenset({"pawl.example.com", "other.example.com:8443"})
OWN = {"host": "pawl.example.com:7600", "origin": "https://pawl.example.com:7600"}


def test_the_gateway_serves_only_its_own_hosts() -> None:
    own = [
        "localhost",
        "LOCALHOST:7600",
        "127.0.0.1:7600",
        "127.8.0.1",
        "[::1]:7600",
        "pawl.example.com",
        "Pawl.Example.Com:443",
        "other.example.com:8443",
        "pawl.example.com.",
    ]
    assert [host for host in own if refusal(ForeignHost, lambda host=host: hosts.check_host(host, HOSTS))] == []  # type: ignore[misc]
    foreign = [
        "",
        "evil.com",
        "localhost.evil.com",
        "127.0.0.1.evil.com",
        "evil.com:7600",
        "pawl.example.com.evil.com",
        "evil.com#pawl.example.com",
        "[::1",
        "0.0.0.0:7600",
        "other.example.com:1",
        "user@evil.com",
        "user@localhost",
        "localhost/evil.com",
        "localhost#evil.com",
        "localhost:evil.com",
        "[::1].evil.com",
        "localhost, evil.com",
    ]
    assert not_refused(ForeignHost, lambda host: hosts.check_host(host, HOSTS), foreign) == []


@given(st.text(max_size=40))
def test_accepted_hosts_are_loopback_or_configured(host: str) -> None:
    try:
        hosts.check_host(host, HOSTS)
    except ForeignHost:
        return
    assert hosts.is_loopback(host) or hosts.host_name(host) in HOSTS or host.lower() in HOSTS


def test_only_the_gateways_own_pages_may_use_sessions() -> None:
    no_origin = {"host": OWN["host"]}
    for own in (OWN, OWN | {"sec-fetch-site": "none"}, no_origin | {"sec-fetch-site": "same-origin"}):
        hosts.check_page("POST", own)
    hosts.check_page("GET", no_origin)
    others = [
        {"origin": "https://evil.com"},
        {"origin": "https://pawl.example.com"},
        {"origin": "https://pawl.example.com:7601"},
        {"origin": "https://pawl.example.com:7600.evil.com"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "ftp://pawl.example.com:7600"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ]
    for method in ("GET", "POST"):
        check = functools.partial(hosts.check_page, method)
        assert not_refused(ForeignOrigin, check, [OWN | headers for headers in others]) == []
    with pytest.raises(ForeignOrigin, match="Bearer"):
        hosts.check_page("POST", no_origin)


def test_only_json_content_types_are_accepted() -> None:
    forms = [None, "", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"]
    assert not_refused(InvalidField, hosts.check_json, forms) == []
    for header in ("application/json", "Application/JSON; charset=utf-8"):
        hosts.check_json(header)


def test_a_key_is_sent_as_a_bearer_token() -> None:
    assert [hosts.bearer(header) for header in ("Bearer abc", "bearer  abc ", None)] == ["abc", "abc", None]
    assert not_refused(InvalidField, hosts.bearer, ["", "Basic abc", "Bearer", "Bearer "]) == []


def test_every_kind_of_error_has_a_status() -> None:
    assert (set(hosts.HTTP_STATUS), hosts.http_status(RunNotFound())) == (set(Kind), 404)
    assert (hosts.http_status(TooLarge()), hosts.http_status(ForeignHost())) == (413, 421)


KEY = "k" * 32


def test_a_sealed_session_opens_unchanged() -> None:
    found = Session(key="secret", end_time=100.0, store="acme", user="ann")
    sealed = Seal(KEY).close(found)
    assert "secret" not in sealed
    assert Seal(KEY).open(sealed, Session) == found
    assert found.metadata == (("authorization", "Bearer secret"), ("pawl-store", "acme"), ("pawl-user", "ann"))
    assert Session(key="secret", end_time=1.0).metadata == (("authorization", "Bearer secret"),)


def test_seal_keys_can_be_rotated_without_ending_sessions() -> None:
    sealed = Seal(KEY).close(Session(key="a", end_time=1.0))
    assert Seal(f"new{KEY}, {KEY}").open(sealed, Session).key == "a"
    with pytest.raises(Unauthenticated):
        Seal(f"new{KEY}").open(sealed, Session)


@given(st.text(max_size=200))
def test_a_forged_session_is_refused(sealed: str) -> None:
    with pytest.raises(Unauthenticated):
        Seal(KEY).open(sealed, Session)


def test_a_key_too_long_for_a_cookie_is_refused() -> None:
    sealed = Seal(KEY).close(Session(key="k" * 3000, end_time=1.0))
    with pytest.raises(InvalidField, match="too long"):
        session.check_sealed(sealed)
    session.check_sealed(Seal(KEY).close(Session(key="k" * 2500, end_time=1.0)))


@for_each("field", ["key", "pawl-store", "pawl-user"])
def test_values_not_allowed_in_metadata_are_refused(field: str) -> None:
    for value in ("\u00e9", "a\nb", "a\tb", "a\x7f", "a\0"):
        given_ = {"key": "k", "pawl-store": "", "pawl-user": ""} | {field: value}
        with pytest.raises(InvalidField) as raised:
            session.metadata(given_["key"], store=given_["pawl-store"], user=given_["pawl-user"])
        assert raised.value.metadata["field"] == field


GIVES_RUN = "pawl.agent.v1.AgentService/GetRun"
NOT_FOR_PEOPLE = {"ExecutionService", "WorkerService", "LedgerService", "BatchService", "KeyService"}


def test_exactly_the_user_facing_methods_are_public() -> None:
    people = {"viewer", "member", "approver", "admin", "operator"}
    streams_in = {"pawl.agent.v1.AgentService/Session", "pawl.tool.v1.DocumentService/PutDocument"}
    # Files do not pass through JSON.
    streams_in |= {f"pawl.tool.v1.FileService/{method}" for method in ("PutFile", "GetFile", "ListFiles")}
    packages = ("/pawl.agent.v1.", "/pawl.tool.v1.", "/pawl.notify.v1.", "/pawl.settings.v1.")
    meant = {
        name[1:]
        for name, callers in CALLERS.items()
        if name.startswith(packages) and people & set(callers) and "/AttachWorker" not in name
    }
    assert set(PUBLIC) == {name for name in meant if name in PUBLIC or name not in streams_in}
    assert not any(service in name for name in PUBLIC for service in NOT_FOR_PEOPLE)
    assert "pawl.agent.v1.TriggerService/DeliverWebhook" not in PUBLIC


def test_an_unknown_method_is_reported() -> None:
    for name in ("", "a/b", "pawl.tool.v1.ExecutionService/CheckCalls", "pawl.job.v1.LedgerService/GetRun"):
        with pytest.raises(MethodNotFound, match="no such method"):
            find(name, streams=False)
    with pytest.raises(MethodNotFound, match="POST /stream"):
        find(WATCH_RUN, streams=False)
    with pytest.raises(MethodNotFound, match="POST /rpc/"):
        find(GIVES_RUN, streams=True)


def test_an_invalid_request_message_is_refused() -> None:
    deep: object = {}
    for _ in range(5000):
        deep = {"run": deep}
    rows: list[object] = [[], "x", None, {"runIdd": "x"}, {"runId": 3}, {"waitSeconds": "soon"}, deep]
    assert not_refused(InvalidField, find(GIVES_RUN, streams=False).read, rows) == []
