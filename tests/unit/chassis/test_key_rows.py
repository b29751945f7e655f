"""The snapshot of API keys that each process keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.chassis.identity.auth import UNKNOWN, LoginRefused, principal_of, user_principal
from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.errors import DependencyUnavailable, Unauthenticated
from pawl.server.identity.credentials import KeyAuthenticator, gone
from pawl.server.identity.key_rows import KeyChanges, KeyGrant, KeyRows, digest_of, is_secret, secret_of
from pawl.server.process.settings import ServiceSettings
from tests.fakes.manual_clock import ManualClock

SECRETS = [secret_of(bytes([number]) * 32) for number in range(8)]
UNKNOWN_SECRET = SECRETS[7]


def grant(number: int, *, expire_time: float | None = None, is_revoked: bool = False) -> KeyGrant:
    return KeyGrant(
        credential_id=CredentialId(f"key_{number}"),
        digest=digest_of(SECRETS[number]),
        store_id=StoreId("acme"),
        user_id=UserId("ann"),
        roles=frozenset({"member"}),
        decides_for_users=False,
        expire_time=expire_time,
        is_revoked=is_revoked,
    )


class Source:
    """Keys in memory, in pages of two. The source can be down or slow."""

    def __init__(self) -> None:
        self.changes: list[KeyGrant] = []
        self.syncs: list[int] = []
        self.used: list[Sequence[str]] = []
        self.is_down = False

    async def sync_keys(self, after_change: int, used_key_ids: Sequence[str]) -> KeyChanges:
        self.syncs.append(after_change)
        if self.is_down:
            raise DependencyUnavailable
        if used_key_ids:
            self.used.append(sorted(used_key_ids))
        page = self.changes[after_change : after_change + 2]
        count = len(self.changes)
        last = after_change + len(page) if after_change <= count else count
        return KeyChanges(keys=page, last_change=last, has_more=last < count)


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
async def rows(source: Source, clock: ManualClock) -> AsyncIterator[KeyRows]:
    rows = KeyRows(source, clock)
    task = asyncio.ensure_future(rows.run())
    await clock.advance(0)
    yield rows
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def found(rows: KeyRows, secret: str, clock: ManualClock) -> KeyGrant | None:
    """Return the key with this secret, or None. Advances the clock until the lookup must have ended."""
    task = asyncio.ensure_future(rows.find(secret))
    await clock.advance(0.5)
    return await task


async def is_live(rows: KeyRows, number: int) -> bool:
    return await rows.find(SECRETS[number], may_look_up=lambda: False) is not None


async def live(rows: KeyRows, count: int) -> list[int]:
    return [number for number in range(count) if await is_live(rows, number)]


@given(st.binary(min_size=32, max_size=32), st.integers(min_value=0, max_value=53), st.characters(codec="ascii"))
def test_a_mistyped_secret_is_detected(random: bytes, position: int, other: str) -> None:
    secret = secret_of(random)
    assert (len(secret), is_secret(secret)) == (5 + 43 + 6, True)
    mistyped = secret[:position] + other + secret[position + 1 :]
    assert is_secret(mistyped) == (mistyped == secret)


async def test_key_changes_take_effect_within_two_seconds(rows: KeyRows, source: Source, clock: ManualClock) -> None:
    """OPS-1: revoked keys stop working within this time too."""
    source.changes = [grant(0), grant(1)]
    is_gone = gone(ServiceSettings.model_construct(api_keys_file=None), clock, lambda: rows)
    await clock.advance(2)
    assert await is_live(rows, 0)
    holders = [principal_of(grant(number), {}) for number in range(2)]
    assert [is_gone(holder) for holder in holders] == [False, False]
    source.changes.append(grant(0, is_revoked=True))
    await clock.advance(1.9)
    assert await is_live(rows, 0)
    await clock.advance(0.1)
    assert not await is_live(rows, 0)
    assert [is_gone(holder) for holder in holders] == [True, False]
    assert [await found(rows, secret, clock) for secret in SECRETS[:2]] == [None, grant(1)]
    assert await found(KeyRows(source, clock), SECRETS[1], clock) == grant(1), "a first call waits for the first poll"


async def test_ended_keys_are_remembered_up_to_a_limit(
    rows: KeyRows, source: Source, clock: ManualClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pawl.server.identity.key_rows.ENDED_MAX", 3)
    source.changes = [grant(number, is_revoked=True) for number in range(5)]
    await clock.advance(2)
    remembered = [rows.ended(digest_of(SECRETS[number])) is not None for number in range(5)]
    assert remembered == [False, False, True, True, True]


async def test_changes_are_read_in_pages_and_from_the_start_on_an_older_database(
    rows: KeyRows, source: Source, clock: ManualClock
) -> None:
    source.changes = [grant(number) for number in range(5)]
    await clock.advance(2)
    assert (await live(rows, 5), source.syncs) == ([0, 1, 2, 3, 4], [0, 0, 2, 4])
    source.changes = [grant(0)]
    await clock.advance(2)
    assert await live(rows, 5) == [0]


async def test_a_stampede_of_unknown_keys_causes_one_poll(rows: KeyRows, source: Source, clock: ManualClock) -> None:
    before = len(source.syncs)
    for garbage in ("pawl_" + "x" * 49, "header.payload.signature"):
        assert await rows.find(garbage) is None
    assert len(source.syncs) == before, "malformed keys are not looked up"
    asked = [asyncio.ensure_future(rows.find(UNKNOWN_SECRET)) for _ in range(1000)]
    await clock.advance(0.5)
    assert await asyncio.gather(*asked) == [None] * 1000
    assert len(source.syncs) == before + 1
    for _ in range(4):
        await found(rows, UNKNOWN_SECRET, clock)
    # One every half second, plus the regular one every two seconds.
    assert len(source.syncs) <= before + 1 + 4 + 1


async def test_a_caller_that_fails_too_often_does_not_cause_a_poll(
    rows: KeyRows, source: Source, clock: ManualClock
) -> None:
    source.changes = [grant(0)]
    await clock.advance(2)
    before = len(source.syncs)
    assert [await rows.find(secret, may_look_up=lambda: False) for secret in (UNKNOWN_SECRET, SECRETS[0])] == [
        None,
        grant(0),
    ]
    assert len(source.syncs) == before
    source.is_down = True
    await clock.advance(60)
    before = len(source.syncs)
    for secret in (SECRETS[0], UNKNOWN_SECRET):
        with pytest.raises(DependencyUnavailable):
            await rows.find(secret, may_look_up=lambda: False)
    assert len(source.syncs) == before


async def test_keys_are_not_accepted_if_polls_have_failed_for_a_minute(
    rows: KeyRows, source: Source, clock: ManualClock
) -> None:
    """Any key may have been revoked in the meantime."""
    source.changes = [grant(0)]
    await clock.advance(2)
    source.is_down = True
    await clock.advance(59)
    assert await rows.find(SECRETS[0]) == grant(0)
    await clock.advance(1)
    for secret in (SECRETS[0], UNKNOWN_SECRET):
        with pytest.raises(DependencyUnavailable):
            await found(rows, secret, clock)
    source.is_down = False
    assert await found(rows, SECRETS[0], clock) == grant(0)


async def test_after_a_long_outage_all_keys_are_read_again(rows: KeyRows, source: Source, clock: ManualClock) -> None:
    """The database may be an older copy by then, and a revoked key may have been deleted."""
    source.changes = [grant(0), grant(1)]
    await clock.advance(2)
    source.is_down = True
    await clock.advance(60)
    source.changes = [grant(2), grant(3)]
    source.is_down = False
    await clock.advance(2)
    assert await live(rows, 4) == [2, 3]


async def test_key_uses_are_reported_once_a_minute_even_after_an_outage(
    rows: KeyRows, source: Source, clock: ManualClock
) -> None:
    source.changes = [grant(0), grant(1)]
    await clock.advance(2)
    for _ in range(30):
        await rows.find(SECRETS[0])
        await clock.advance(1)
    assert source.used == [["key_0"]]
    source.is_down = True
    await clock.advance(40)
    source.is_down = False
    for seconds in (2, 600):
        await clock.advance(seconds)
        assert source.used == [["key_0"], ["key_0"]]


async def test_revoked_expired_and_unknown_keys_get_the_same_error(
    rows: KeyRows, source: Source, clock: ManualClock
) -> None:
    """OPS-1: the error does not reveal which keys exist."""
    source.changes = [
        grant(0),
        grant(1, is_revoked=True),
        grant(2, expire_time=clock.now() + 1),
        replace(grant(3), roles=frozenset()),
    ]
    await clock.advance(2)
    keys = KeyAuthenticator(rows=rows)
    causes = []
    for secret in (SECRETS[1], SECRETS[2], UNKNOWN_SECRET):
        asked = asyncio.ensure_future(keys.authenticate({"authorization": f"Bearer {secret}"}, source="ipv4:"))
        await clock.advance(0.5)
        with pytest.raises(Unauthenticated) as caught:
            await asked
        cause: Any = caught.value.__cause__
        assert (caught.value.message, type(cause)) == (UNKNOWN, LoginRefused)
        causes.append((cause.kind, cause.key_id))
    assert causes == [("revoked", "key_1"), ("expired", "key_2"), ("unknown", "")]
    found = await keys.authenticate({"authorization": f"Bearer {SECRETS[0]}"}, source="ipv4:")
    assert found == user_principal(
        StoreId("acme"), UserId("ann"), frozenset({"member"}), credential_id=CredentialId("key_0")
    )
