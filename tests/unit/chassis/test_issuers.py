"""Issuer keys: fetched from a real HTTP server, and kept through rotation and outages (OPS-1)."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import structlog

from pawl.chassis.identity.auth import UNKNOWN
from pawl.errors import DependencyUnavailable, Unauthenticated
from pawl.server.identity import issuers
from pawl.server.identity.credentials import KeyAuthenticator, parse_keys
from pawl.server.identity.discovery import FetchFailed
from pawl.server.identity.issuers import Issuers, KeyFetcher
from pawl.server.identity.tokens import Provider, PublicKey, TokenRefused
from tests.fakes.issuer import (
    DISCOVERY,
    ISSUER,
    NOW,
    OK,
    IssuerServer,
    issuer_server,
    key,
    key_set,
    keys,
    provider,
    published,
    token,
)
from tests.fakes.manual_clock import ManualClock

DAY = 24 * 3600
OLD, NEW = key(name="old"), key(name="new")


class World:
    """An issuer that serves `published` unless it is down, and a verifier of its tokens."""

    def __init__(self, *entries: Any) -> None:
        self.published: tuple[PublicKey, ...] | None = keys(*entries)
        self.clock = ManualClock(NOW)
        self.providers: tuple[Provider, ...] = (provider(),)
        self.fetches = 0
        self.answers = asyncio.Event()
        self.answers.set()
        self.issuers = Issuers(lambda: self.providers, clock=self.clock, fetch=self.fetch)

    async def fetch(self, issuer: str, jwks_url: str | None) -> tuple[PublicKey, ...]:
        assert (issuer, jwks_url) == (ISSUER, None)
        self.fetches += 1
        await self.answers.wait()
        if self.published is None:
            raise FetchFailed("it is down")
        return self.published

    async def user(self, private: Any, **more: Any) -> str:
        now = int(self.clock.now())
        return (await self.issuers.credential(token(private=private, iat=now, exp=now + 60, **more))).user_id

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.issuers.run())
        try:
            await self.clock.advance(0)
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})


async def test_keys_are_fetched_for_the_first_token_and_cached() -> None:
    world = World(OLD)
    assert ({await world.user(OLD) for _ in range(3)}, world.fetches) == ({"ann"}, 1)
    world.published = keys(OLD, NEW)
    assert ({await world.user(each) for each in (NEW, OLD)}, world.fetches) == ({"ann"}, 2)


async def test_concurrent_callers_share_one_fetch() -> None:
    world = World(OLD)
    world.answers.clear()
    waiting = [asyncio.create_task(world.user(OLD)) for _ in range(20)]
    await world.clock.advance(0)
    waiting[0].cancel()  # a cancelled caller does not cancel the fetch
    await world.clock.advance(0)
    world.answers.set()
    assert await asyncio.gather(*waiting[1:]) == ["ann"] * 19
    assert world.fetches == 1


async def test_unknown_keys_cause_at_most_three_fetches_in_thirty_seconds() -> None:
    world = World(OLD)
    for _ in range(60):
        for name in ("a", "b"):
            with pytest.raises(TokenRefused, match="no such key"):
                await world.user(key(name=name))
        assert await world.user(OLD) == "ann"
        await world.clock.advance(1)
    assert world.fetches == 6


async def test_a_key_without_an_id_is_found_by_its_algorithm() -> None:
    old, new = ({name: value for name, value in published(each).items() if name != "kid"} for each in (OLD, NEW))
    world = World(old)
    assert await world.user(OLD, header={"kid": None}) == "ann"
    world.published = keys(old, new)
    users = {await world.user(each, header={"kid": None}) for each in (NEW, OLD)}
    assert (users, world.fetches) == ({"ann"}, 2)


async def test_fetches_stop_at_shutdown() -> None:
    world = World(OLD)
    world.answers.clear()
    async with world.running():
        assert world.fetches == 1
    assert [task for task in asyncio.all_tasks() if task.get_name() == "issuers.fetch"] == []


async def test_a_failing_caller_does_not_block_others_at_its_address() -> None:
    world = World(OLD)
    async with world.running():
        world.published = keys(OLD, NEW)
        await world.clock.advance(30)
        now = int(world.clock.now())
        made = token(private=NEW, iat=now, exp=now + 600)
        for _ in range(100):
            with pytest.raises(TokenRefused):
                await world.issuers.credential(made, may_look_up=lambda: False)
        await world.clock.advance(10)
        assert ((await world.issuers.credential(made, may_look_up=lambda: False)).user_id, world.fetches) == ("ann", 2)
        await world.clock.advance(60)
        assert world.fetches == 2


async def test_invalid_tokens_do_not_cause_a_fetch() -> None:
    world = World(OLD)
    assert await world.user(OLD) == "ann"
    await world.clock.advance(60)
    for made in (
        world.user(OLD, header={"kid": "old"}, aud="other"),
        world.user(NEW, iss="https://other.example.com"),
        world.user(NEW, header={"kid": "old"}),
        world.user(NEW, nbf=NOW + 10_000),
    ):
        with pytest.raises(TokenRefused):
            await made
    assert world.fetches == 1


async def test_a_withdrawn_key_is_valid_until_the_next_fetch() -> None:
    world = World(OLD, NEW)
    async with world.running():
        for published_keys, withdrawn, valid in ((keys(NEW), OLD, NEW), ((), NEW, None)):
            assert await world.user(withdrawn) == "ann"
            world.published = published_keys
            await world.clock.advance(300)
            with pytest.raises(TokenRefused, match="no such key"):
                await world.user(withdrawn)
            assert valid is None or await world.user(valid) == "ann"


async def test_keys_are_fetched_every_five_minutes_and_sooner_after_a_failure() -> None:
    world = World(OLD)
    async with world.running():
        assert world.fetches == 1
        await world.clock.advance(3000)
        assert world.fetches == 11
        world.published = None
        await world.clock.advance(300)
        fetches = world.fetches
        await world.clock.advance(300)
        assert world.fetches == fetches + 10


async def test_known_keys_stay_valid_during_an_outage_of_up_to_a_day() -> None:
    world = World(OLD)
    async with world.running():
        world.published = None
        await world.clock.advance(DAY)
        assert await world.user(OLD) == "ann"
        for private in (NEW, OLD):
            with pytest.raises(DependencyUnavailable, match="try again"):
                await world.user(private)
            await world.clock.advance(1)
        world.published = keys(OLD, NEW)
        await world.clock.advance(30)
        assert await world.user(OLD) == await world.user(NEW) == "ann"


async def test_every_refused_token_gets_the_same_error() -> None:
    world = World(OLD)
    file_key = "key.with.dots-of-a-file"
    entry = f'[{{"key": "{file_key}", "store_id": "acme", "user_id": "bob"}}]'.encode()
    known = KeyAuthenticator(keys=lambda: parse_keys(entry), issuers=world.issuers)

    async def caller(credential: str) -> str:
        return (await known.authenticate({"authorization": f"Bearer {credential}"}, source="")).user_id

    assert [await caller(each) for each in (token(private=OLD), file_key)] == ["ann", "bob"]
    for text in (
        "a.b.c",
        "a.b.c.d.e",
        f"{file_key}x",
        token(private=NEW),
        token(private=NEW, header={"kid": "old"}),
        token(private=OLD, exp=NOW - 600),
        token(private=OLD, iss="https://other.example.com"),
        token(private=OLD, aud="other"),
        token(private=OLD, tenant=None),
    ):
        with pytest.raises(Unauthenticated) as refused:
            await caller(text)
        assert refused.value.message == UNKNOWN
    with pytest.raises(Unauthenticated, match=UNKNOWN):
        await KeyAuthenticator().authenticate({"authorization": f"Bearer {token(private=OLD)}"}, source="")


async def test_the_log_has_the_reason_for_a_refusal_but_never_the_token() -> None:
    made = token(private=OLD, aud="other")
    known = KeyAuthenticator(issuers=World(OLD).issuers)
    with structlog.testing.capture_logs() as logged, pytest.raises(Unauthenticated):
        await known.authenticate({"authorization": f"Bearer {made}"}, source="")
    with structlog.testing.capture_logs() as throttled, pytest.raises(Unauthenticated):
        await known.authenticate({"authorization": f"Bearer {made}"}, source="", may_look_up=lambda: False)
    assert throttled == [], "repeated failures do not flood the log"
    assert [(line["event"], "audience" in line["reason"]) for line in logged] == [("token.refused", True)]
    assert not any(part in str(logged) for part in made.split("."))


@pytest.fixture
async def server() -> AsyncIterator[IssuerServer]:
    async with issuer_server() as made:
        made.say("/keys", key_set(key()))
        yield made


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> KeyFetcher:
    monkeypatch.setattr(issuers, "_FETCH_SECONDS_MAX", 60.0)
    return KeyFetcher()


async def test_keys_are_found_by_discovery_or_at_a_given_url(server: IssuerServer, fetch: KeyFetcher) -> None:
    assert ([each.key_id for each in await fetch(server.issuer, None)], server.asked) == (["k1"], [DISCOVERY, "/keys"])
    assert len(await fetch("https://id.example.com", f"{server.url}/keys")) == 1
    assert server.asked == [DISCOVERY, "/keys", "/keys"]


async def test_discovery_of_another_issuer_or_foreign_keys_is_refused(server: IssuerServer, fetch: KeyFetcher) -> None:
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


async def test_unexpected_responses_count_as_an_outage(server: IssuerServer, fetch: KeyFetcher) -> None:
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


async def test_a_silent_issuer_times_out(
    server: IssuerServer, fetch: KeyFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.answers["/keys"] = None
    monkeypatch.setattr(issuers, "_FETCH_SECONDS_MAX", 0.3)
    for issuer, says in ((server.issuer, "in time"), ("http://127.0.0.1:1", ".")):
        with pytest.raises(FetchFailed, match=says):
            await fetch(issuer, None)
