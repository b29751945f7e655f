"""Outgoing requests of tools reach only allowed targets, and are sent only once (SEC, TOOL-7)."""

from __future__ import annotations

import gzip
import ssl
import tracemalloc
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trustme

from pawl.chassis.ids import StoreId
from pawl.chassis.process.start import StartError
from pawl.server.egress.addresses import Lookups
from pawl.server.egress.client import (
    GuardedEgress,
    OutboundRequest,
    OutboundResponse,
    RequestFailed,
    Unpacker,
    read_egress_file,
)
from pawl.server.egress.policy import EgressRefused, EgressRules, read_rules
from tests.rpc.refusals import raises
from tests.web_server import Names, Reply, WebServer, pages, web_server

ACME = StoreId("acme")

MIB = 1024 * 1024
TRUSTS_NOBODY = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
BOMB = gzip.compress(b"0" * 32 * MIB, 1)
ENDLESS_NAME = b"\x1f\x8b\x08\x08\0\0\0\0\0\x03a"


def opened(*servers: WebServer) -> dict[str, EgressRules]:
    return {"*": read_rules(None, [f"127.0.0.1:{server.port}" for server in servers])}


async def get(
    server: WebServer, path: str = "/", *, names: Names | None = None, host: str = "127.0.0.1", **more: Any
) -> OutboundResponse:
    lookups = Lookups(names or Names({host: ["127.0.0.1"]}))
    egress = GuardedEgress(opened(server), lookups=lookups, tls=TRUSTS_NOBODY)
    return await egress.send(ACME, OutboundRequest(url=f"http://{host}:{server.port}{path}", **more))


@pytest.fixture
async def site() -> AsyncIterator[WebServer]:
    replies = {
        "/": Reply(b"hello"),
        "/missing": Reply(b"not here", status=404),
        "/gzip": Reply(gzip.compress(b"hello") + gzip.compress(b" you"), headers={"Content-Encoding": "gzip"}),
        "/bomb": Reply(BOMB, headers={"Content-Encoding": "gzip"}),
        "/broken": Reply(gzip.compress(b"hello")[:-4], headers={"Content-Encoding": "gzip"}),
        "/brotli": Reply(b"hello", headers={"Content-Encoding": "br"}),
        "/never": Reply(headers={"Content-Length": "10"}),
        "/hints": Reply(b"hello", interim=b"HTTP/1.1 103 Early Hints\r\n\r\n" * 10),
        "/too-many-hints": Reply(b"hello", interim=b"HTTP/1.1 103 Early Hints\r\n\r\n" * 11),
        "/twice": Reply(b"hello", headers={"Content-Encoding": "gzip, gzip"}),
        "/endless": Reply(b"a", is_endless=True),
        "/packed-nothing": Reply(ENDLESS_NAME, headers={"Content-Encoding": "gzip"}, is_endless=True),
        "/waits": Reply(waits=True),
        "/breaks": Reply(breaks=True),
        "/cookie": Reply(b"hello", headers={"Set-Cookie": "a=b"}),
    }
    async with web_server(pages(replies)) as server:
        yield server


async def test_decompression_bomb_is_cut_off(site: WebServer) -> None:
    tracemalloc.start()
    try:
        found = await get(site, "/bomb", bytes_max=MIB)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (len(found.body), found.is_cut) == (MIB, True)
    assert peak < 8 * MIB

    unpacker = Unpacker("gzip", bytes_max=1000)
    unpacker.feed(BOMB)
    assert (len(unpacker.body), unpacker.is_full) == (1001, True)


async def test_silent_server_is_disconnected_at_the_deadline(site: WebServer) -> None:
    failed = await raises(
        RequestFailed, get(site, "/waits", timeout_seconds=0.2), match=r"no response from .* within 0.2 s"
    )
    assert failed.was_sent
    failed = await raises(RequestFailed, get(site, "/endless", timeout_seconds=0.2, bytes_max=2**40))
    assert failed.was_sent


async def test_error_states_whether_the_server_may_have_received_the_request(site: WebServer) -> None:
    failed = await raises(RequestFailed, get(site, "/breaks"))
    assert failed.was_sent
    failed = await raises(RequestFailed, get(WebServer(pages({}), port=9)), match="cannot connect to")
    assert not failed.was_sent
    failed = await raises(RequestFailed, get(site, headers={"X-One": "secret\r\nX-Two: b"}), match="is not valid HTTP")
    assert not failed.was_sent
    assert "secret" not in str(failed)


async def test_cookies_and_environment_proxies_are_ignored(site: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    egress = GuardedEgress(opened(site), tls=TRUSTS_NOBODY)
    for _ in range(2):
        assert (await egress.send(ACME, OutboundRequest(url=f"http://127.0.0.1:{site.port}/cookie"))).status == 200
    assert all("cookie" not in asked.headers for asked in site.asked)


async def redirecting(replies: Mapping[str, Reply], path: str = "/", **more: Any) -> tuple[OutboundResponse, int]:
    async with web_server(pages(replies)) as server:
        return await get(server, path, **more), len(server.asked)


def to(location: str, status: int = 302) -> Reply:
    return Reply(b"elsewhere", status=status, headers={"Location": location})


async def test_headers_are_not_sent_to_another_origin_or_after_returning_from_one() -> None:
    async with web_server(pages({"/back": Reply(b"hello")})) as first, web_server(pages({})) as second:
        second.answer = pages({"/": to(f"http://127.0.0.1:{first.port}/back")})
        first.answer = pages({"/": to("/same"), "/same": to(f"http://127.0.0.1:{second.port}/"), "/back": Reply(b"x")})
        egress = GuardedEgress(opened(first, second), tls=TRUSTS_NOBODY)
        headers = {"Authorization": "Bearer secret", "X-Key": "secret", "Accept": "text/html"}
        request = OutboundRequest(url=f"http://127.0.0.1:{first.port}/", headers=headers)
        assert (await egress.send(ACME, request)).body == b"x"
    start, same, back = first.asked
    (elsewhere,) = second.asked
    assert (start.headers["authorization"], same.headers["x-key"]) == ("Bearer secret", "secret")
    for asked in (elsewhere, back):
        assert "secret" not in str(asked.headers)
        assert asked.headers["accept"] == "text/html"


async def test_unlisted_host_is_rejected_without_a_dns_lookup(site: WebServer) -> None:
    names = Names({"a.example": ["127.0.0.1"], "b.example": ["127.0.0.1"]})
    rules = {"*": read_rules([f"a.example:{site.port}"], [f"127.0.0.1:{site.port}"])}
    egress = GuardedEgress(rules, lookups=Lookups(names), tls=TRUSTS_NOBODY)
    assert (await egress.send(ACME, OutboundRequest(url=f"http://a.example:{site.port}/"))).body == b"hello"
    await raises(
        EgressRefused,
        egress.send(ACME, OutboundRequest(url=f"http://b.example:{site.port}/")),
        match="not among the allowed hosts",
    )
    assert (names.asked, site.connections) == (["a.example"], 1)


async def test_certificate_is_checked_against_the_name_of_the_host() -> None:
    authority = trustme.CA()
    serving, trusting = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH), ssl.create_default_context()
    authority.issue_cert("a.example").configure_cert(serving)
    authority.configure_trust(trusting)
    async with web_server(pages({"/": Reply(b"hello")}), tls=serving) as server:
        rules = {"*": read_rules(None, [f"{host}:{server.port}" for host in ("a.example", "b.example")])}
        names = Names({"a.example": ["127.0.0.1"], "b.example": ["127.0.0.1"]})
        egress = GuardedEgress(rules, lookups=Lookups(names), tls=trusting)
        assert (await egress.send(ACME, OutboundRequest(url=f"https://a.example:{server.port}/"))).body == b"hello"
        assert server.asked[0].headers["host"] == f"a.example:{server.port}"
        await raises(
            RequestFailed,
            egress.send(ACME, OutboundRequest(url=f"https://b.example:{server.port}/")),
            GuardedEgress(rules, lookups=Lookups(names)).send(
                ACME, OutboundRequest(url=f"https://a.example:{server.port}/")
            ),
        )
        assert len(server.asked) == 1


async def test_request_is_sent_unchanged_and_any_status_is_returned(
    site: WebServer,
) -> None:
    found = await get(site, "/?q=1%20%C3%BC", method="POST", headers={"X-One": "1"}, body=b"{}", host="a.example")
    (asked,) = site.asked
    assert (asked.method, asked.target, asked.body) == ("POST", "/?q=1%20%C3%BC", b"{}")
    assert asked.headers["host"] == f"a.example:{site.port}"
    assert (asked.headers["x-one"], asked.headers["content-length"]) == ("1", "2")
    assert (found.status, found.body, found.is_cut) == (200, b"hello", False)
    assert found.content_type == "text/html; charset=utf-8"
    missing = await get(site, "/missing")
    assert (missing.status, missing.body) == (404, b"not here")


async def test_body_is_decompressed_up_to_its_limit_and_invalid_encodings_fail(site: WebServer) -> None:
    for path, body in (("/gzip", b"hello you"), ("/hints", b"hello")):
        assert (await get(site, path)).body == body, path
    for path in ("/broken", "/brotli", "/twice", "/too-many-hints"):
        assert (await raises(RequestFailed, get(site, path), match="sent an invalid response")).was_sent
    for path, limit, size in (
        ("/broken", 0, 0),
        ("/brotli", 0, 0),
        ("/never", 0, 0),
        ("/endless", 1000, 1000),
        ("/packed-nothing", 1000, 0),
        ("/", 4, 4),
    ):
        found = await get(site, path, bytes_max=limit)
        assert (found.status, len(found.body), found.is_cut) == (200, size, limit > 0), path
    assert (await get(site, bytes_max=5)).is_cut is False


async def test_redirects_are_followed_up_to_a_limit_and_only_for_safe_methods() -> None:
    for status in (301, 302, 303, 307, 308):
        found, _ = await redirecting({"/": to("a/../b?c#d", status), "/b": Reply(b"hello")})
        assert (found.body, found.url.endswith("/b?c")) == (b"hello", True)
    replies = {f"/{number}": to(f"/{number + 1}") for number in range(1, 7)} | {"/7": Reply(b"hello")}
    assert (await redirecting(replies, "/2"))[0].body == b"hello"
    await raises(RequestFailed, redirecting(replies, "/1"), match="more than 5 redirects")
    found, times = await redirecting({"/": to("/b", 307), "/b": Reply(b"hello")}, method="POST", body=b"{}")
    assert (found.status, times) == (307, 1)


async def test_redirect_to_a_forbidden_address_does_not_open_a_connection() -> None:
    async with web_server(pages({})) as other, web_server(pages({})) as server:
        for location in (
            "http://127.0.0.1:{other}/",
            "http://localhost:{other}/",
            "//127.0.0.1:{other}/",
            "http://user@127.0.0.1:{other}/",
            "http://trap.example:{other}/",
            "http://2130706433:{other}/",
            "http://[::ffff:127.0.0.1]:{other}/",
            "file:///etc/passwd",
            "http://169.254.169.254/latest/meta-data/",
            "http://[",
        ):
            server.answer = pages({"/": to(location.format(other=other.port))})
            await raises(
                EgressRefused, get(server, names=Names({"trap.example": ["127.0.0.1"], "localhost": ["127.0.0.1"]}))
            )
        assert other.connections == 0
        server.answer = pages({"/": to("/b"), "/b": Reply(b"hello")})
        server.asked.clear()
        await raises(
            EgressRefused, get(server, names=Names({"a.example": [["127.0.0.1"], ["10.0.0.1"]]}), host="a.example")
        )
        assert len(server.asked) == 1, "the same name is checked again"


async def test_connection_uses_the_checked_address_or_the_next_one(site: WebServer) -> None:
    names = Names({"a.example": [["127.0.0.1"], ["127.0.0.2"]]})
    assert (await get(site, names=names, host="a.example")).body == b"hello"
    assert names.asked == ["a.example"], "a name is looked up once"
    rules = {"acme": read_rules(None, [f"a.example:{site.port}"])}
    egress = GuardedEgress(rules, lookups=Lookups(Names({"a.example": ["127.0.0.3", "127.0.0.1"]})), tls=TRUSTS_NOBODY)
    request = OutboundRequest(url=f"http://a.example:{site.port}/")
    assert (await egress.send(ACME, request)).body == b"hello"
    await raises(EgressRefused, egress.send(StoreId("other"), request))


async def test_custom_client_is_checked_and_sends_secrets_only_to_safe_targets(
    site: WebServer,
) -> None:
    """A machine between the registry and an MCP server could read secret headers; see McpHttpConfig.url."""
    listed = [f"a.example:{site.port}"]
    for opened in (False, True):
        rules = {"*": read_rules(listed, [*(listed if opened else []), f"127.0.0.1:{site.port}"])}
        egress = GuardedEgress(rules, lookups=Lookups(Names({"a.example": ["127.0.0.1"]})), tls=TRUSTS_NOBODY)
        async with httpx2.AsyncClient(transport=egress.transport(ACME, with_secrets=True), trust_env=False) as client:
            if not opened:
                await raises(EgressRefused, client.get(f"http://a.example:{site.port}/"), match="secrets are not sent")
                assert site.connections == 0
                continue
            found = await client.get(f"http://a.example:{site.port}/", headers={"Host": "other.example"})
            assert (found.text, site.asked[0].headers["host"]) == ("hello", f"a.example:{site.port}")
            await raises(EgressRefused, client.get("http://169.254.169.254/"))


def test_invalid_egress_file_prevents_startup(tmp_path: Path) -> None:
    path = tmp_path / "egress.json"
    path.write_text('{"*": {"hosts": ["*.example.com"], "private": ["10.1.2.3:8080"]}, "acme": {}}')
    assert read_egress_file(path) == {"*": read_rules(["*.example.com"], ["10.1.2.3:8080"]), "acme": EgressRules()}
    assert read_egress_file(None) == {}
    bad = ["", "[]", '{"*": {"host": []}}', '{"*": {"hosts": "a"}}', '{"*": {"private": ["169.254.169.254:80"]}}']
    for text in bad:
        path.write_text(text)
        with pytest.raises(StartError, match="PAWL_EGRESS_FILE"):
            read_egress_file(path)
    with pytest.raises(StartError, match="cannot read"):
        read_egress_file(tmp_path / "none.json")
