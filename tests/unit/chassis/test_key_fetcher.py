"""The fetch of an issuer's keys from a real HTTP server on this machine. OPS-1."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pawl.chassis import issuers
from pawl.chassis.issuers import FetchFailed, KeyFetcher
from tests.fakes.issuer import DISCOVERY, OK, IssuerServer, issuer_server, key, key_set


@pytest.fixture
async def server() -> AsyncIterator[IssuerServer]:
    async with issuer_server() as made:
        made.say("/keys", key_set(key()))
        yield made


@pytest.fixture(scope="module")
def fetch() -> KeyFetcher:
    return KeyFetcher()


async def test_keys_are_found_by_discovery_or_at_a_given_url(server: IssuerServer, fetch: KeyFetcher) -> None:
    assert [each.key_id for each in await fetch(server.issuer, None)] == ["k1"]
    assert server.asked == [DISCOVERY, "/keys"]
    assert len(await fetch("https://id.example.com", f"{server.url}/keys")) == 1
    assert server.asked == [DISCOVERY, "/keys", "/keys"]


async def test_no_proxy_answers_for_an_issuer_on_this_machine(
    server: IssuerServer, fetch: KeyFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert [each.key_id for each in await fetch(server.issuer, None)] == ["k1"]


async def test_a_description_of_another_issuer_or_of_keys_elsewhere_does_not_count(
    server: IssuerServer, fetch: KeyFetcher
) -> None:
    issuer, there = server.issuer, f"{server.url}/keys"
    rows: list[tuple[dict[str, str], str]] = [
        ({"issuer": f"{issuer}/", "jwks_uri": there}, "another issuer"),
        ({"issuer": "https://id.example.com", "jwks_uri": there}, "another issuer"),
        ({"jwks_uri": there}, "issuer"),
        ({"issuer": issuer}, "jwks_uri"),
        *(
            ({"issuer": issuer, "jwks_uri": url}, "not at an https")
            for url in ("http://192.0.2.1/keys", "file:///etc/passwd", "")
        ),
    ]
    for description, says in rows:
        server.say(DISCOVERY, dict(description))
        with pytest.raises(FetchFailed, match=says):
            await fetch(issuer, None)
    assert set(server.asked) == {DISCOVERY}


async def test_an_issuer_over_https_cannot_point_to_plain_http_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody but the operator says what is asked for inside."""
    asked = []

    async def get(_: Any, url: str) -> bytes:
        asked.append(url)
        return b'{"issuer": "https://id.example.com", "jwks_uri": "http://127.0.0.1:1/keys"}'

    monkeypatch.setattr(issuers, "_get", get)
    with pytest.raises(FetchFailed, match="https"):
        await KeyFetcher()("https://id.example.com", None)
    assert len(asked) == 1


async def test_odd_answers_are_an_outage(server: IssuerServer, fetch: KeyFetcher) -> None:
    server.say("/other", key_set(key()))
    for head, body, says in (
        (b"HTTP/1.1 302 Found\r\nlocation: /other\r\nconnection: close\r\n", b"", "status 302"),
        (b"HTTP/1.1 500 Oops\r\nconnection: close\r\n", key_set(key()), "status 500"),
        (b"HTTP/1.1 204 No Content\r\nconnection: close\r\n", b"", "status 204"),
        (OK, b"", "truncated"),
        (OK, b"<html>", "invalid"),
        (OK, b'{"keys": [' + b" " * 600_000 + b"]}", "more than"),
        (OK + b"content-encoding: gzip\r\n", gzip.compress(key_set(key())), "invalid"),
        (b"nonsense\r\n", b"", "Protocol"),
    ):
        server.say("/keys", body, head)
        with pytest.raises(FetchFailed, match=says):
            await fetch(server.issuer, None)
    assert "/other" not in server.asked


async def test_a_silent_issuer_is_given_up(
    server: IssuerServer, fetch: KeyFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["/keys"] = None
    monkeypatch.setattr(issuers, "_FETCH_SECONDS_MAX", 0.3)
    with pytest.raises(FetchFailed, match="in time"):
        await fetch(server.issuer, None)
    with pytest.raises(FetchFailed):
        await fetch("http://127.0.0.1:1", None)
