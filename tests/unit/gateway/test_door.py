"""Who is let in: hosts, pages, keys."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.errors import ForeignHost, ForeignOrigin, InvalidField, Kind, RunNotFound, TooLarge
from pawl.gateway.domain import door

HOSTS = frozenset({"pawl.example.com", "other.example.com:8443"})
OWN = {"host": "pawl.example.com:7600", "origin": "https://pawl.example.com:7600"}


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:7600",
        "127.0.0.1:7600",
        "127.8.0.1",
        "[::1]:7600",
        "pawl.example.com",
        "Pawl.Example.Com:443",
        "other.example.com:8443",
        "pawl.example.com.",
    ],
)
def test_it_answers_to_its_own_names(host: str) -> None:
    door.check_host(host, HOSTS)


@pytest.mark.parametrize(
    "host",
    [
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
    ],
)
def test_it_answers_to_no_other_name(host: str) -> None:
    with pytest.raises(ForeignHost, match="PAWL_GATEWAY_HOSTS"):
        door.check_host(host, HOSTS)


@given(st.text(max_size=40))
def test_any_text_is_a_host_or_none(host: str) -> None:
    try:
        door.check_host(host, HOSTS)
    except ForeignHost:
        return
    assert door.is_loopback(host) or door.host_name(host) in HOSTS or host.lower() in HOSTS


@pytest.mark.parametrize("site", [None, "same-origin", "none"])
def test_its_own_pages_use_its_sessions(site: str | None) -> None:
    door.check_page("POST", OWN | ({"sec-fetch-site": site} if site else {}))


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.com"},
        {"origin": "https://pawl.example.com"},
        {"origin": "https://pawl.example.com:7601"},
        {"origin": "https://pawl.example.com:7600.evil.com"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "ftp://pawl.example.com:7600"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_no_other_page_uses_its_sessions(headers: dict[str, str]) -> None:
    for method in ("GET", "POST"):
        with pytest.raises(ForeignOrigin):
            door.check_page(method, OWN | headers)


def test_a_post_without_an_origin_is_of_no_page() -> None:
    with pytest.raises(ForeignOrigin, match="Bearer"):
        door.check_page("POST", {"host": OWN["host"]})
    door.check_page("GET", {"host": OWN["host"]})
    door.check_page("POST", {"host": OWN["host"], "sec-fetch-site": "same-origin"})


@pytest.mark.parametrize("said", [None, "", "text/plain", "application/x-www-form-urlencoded", "application/jsonx"])
def test_a_body_that_a_form_could_send_is_refused(said: str | None) -> None:
    with pytest.raises(InvalidField, match="application/json"):
        door.check_json(said)


@pytest.mark.parametrize("said", ["application/json", "Application/JSON; charset=utf-8"])
def test_json_is_json(said: str) -> None:
    door.check_json(said)


def test_a_key_comes_as_a_bearer() -> None:
    assert door.bearer("Bearer abc") == "abc"
    assert door.bearer("bearer  abc ") == "abc"
    assert door.bearer(None) is None
    for wrong in ("", "Basic abc", "Bearer", "Bearer "):
        with pytest.raises(InvalidField):
            door.bearer(wrong)


def test_every_kind_of_error_has_a_status() -> None:
    assert set(door.HTTP_STATUS) == set(Kind)
    assert door.http_status(RunNotFound()) == 404
    assert door.http_status(TooLarge()) == 413
    assert door.http_status(ForeignHost()) == 421
