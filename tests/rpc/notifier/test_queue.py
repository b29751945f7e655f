"""Failing channels, claims that are lost, and deliveries that are sent again, as the tables keep them (NOTE-1)."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from pawl.chassis.database import Database
from pawl.chassis.ids import ConversationId, RunId, StoreId, UserId
from pawl.notifier.adapters.postgres import PostgresStore
from pawl.notifier.adapters.preferences import PostgresPreferences
from pawl.notifier.domain.channel import FORMER_SECRETS_MAX, Channel, ChannelId
from pawl.notifier.domain.delivery import LOST, TRIES_MAX_AT_ONCE, Attempt, Outcome
from pawl.notifier.domain.notification import Inbox
from pawl.notifier.domain.preferences import Mute
from tests.rpc.notifier.conftest import Repository
from tests.rpc.notifier.test_delivery_faults import (
    ANNS,
    BOBS,
    FAILED,
    GONE,
    HOOK,
    Drafts,
    hook,
    made_code,
    tried,
)
from tests.rpc.notifier.test_inbox import PART

OK = Outcome(status=200)


@pytest.fixture
async def repository(database: Database, store: PostgresStore, draft: Drafts) -> Repository:
    """A channel of ann, with one delivery that is due."""
    repository = Repository(database)
    await hook(repository)
    await store.add([draft("a")])
    return repository


async def changed(repository: Repository, **fields: Any) -> Channel:
    return await repository.update(
        ANNS,
        HOOK,
        lambda channel: (replace(channel, **fields), "example.com"),
        code=made_code(),
    )


async def claimed(repository: Repository, *, seconds: float = 30) -> Attempt:
    (attempt,) = await repository.claim(await repository.due([], limit=10), seconds=seconds)
    return attempt


async def hurry(database: Database) -> None:
    await database.execute("UPDATE notifier.webhook_deliveries SET due_time = now() WHERE due_time IS NOT NULL")


async def test_a_channel_fails_since_its_first_failure_until_it_is_enabled_or_moved(
    repository: Repository, store: PostgresStore, draft: Drafts, database: Database
) -> None:
    await tried(repository, FAILED)
    failing_since = (await repository.channel(ANNS, HOOK)).failing_since_time
    await hurry(database)
    await tried(repository, FAILED)
    assert (await changed(repository, name="x")).failing_since_time == failing_since is not None
    assert (await changed(repository, url="https://example.com/new")).failing_since_time is None
    await hurry(database)
    await tried(repository, FAILED)
    assert (await changed(repository, enabled=False)).failing_since_time is not None
    assert (await changed(repository, enabled=True)).failing_since_time is None
    await store.add([draft("b")])
    await tried(repository, GONE)
    assert "410" in (await changed(repository, name="y")).disable_reason
    assert (await changed(repository, enabled=True)).disable_reason == ""


@pytest.mark.parametrize("how", ["lost", "moved", "the notifier's own"])
async def test_what_is_no_failure_of_the_receiver_does_not_count_against_its_channel(
    repository: Repository, how: str
) -> None:
    outcome = FAILED
    if how == "lost":
        await claimed(repository, seconds=0)
        outcome = LOST
    if how == "the notifier's own":
        outcome = Outcome(error="closed", is_receivers=False)
    attempt = await claimed(repository)
    if how == "moved":
        outcome = GONE
        await changed(repository, url="https://example.com/new")
    assert attempt.is_lost is (how == "lost")
    assert await repository.settle(attempt, outcome, chance=0.5)
    channel = await repository.channel(ANNS, HOOK)
    assert (channel.enabled, channel.failing_since_time) == (True, None)


async def test_a_delivery_that_is_sent_again_while_it_is_tried_stays_with_its_try(
    repository: Repository, database: Database
) -> None:
    await tried(repository, FAILED)
    await hurry(database)
    attempt = await claimed(repository)
    (again,) = await repository.resend(ANNS, [attempt.candidate.delivery_id])
    assert again.tries == 1
    assert await repository.due([], limit=10) == []
    late = replace(attempt, claim_until=attempt.claim_until - timedelta(seconds=1))
    await repository.give_back([late])
    assert await repository.settle(late, OK, chance=0.5) is None
    assert await repository.due([], limit=10) == [], "a claim that is over changes nothing"
    assert await repository.settle(attempt, OK, chance=0.5)
    (again,) = await repository.resend(ANNS, [attempt.candidate.delivery_id])
    assert (again.tries, len(await repository.due([], limit=10))) == (0, 1)


async def test_nats_is_told_of_deliveries_that_end_and_not_of_those_that_are_skipped(
    repository: Repository, store: PostgresStore, draft: Drafts, database: Database
) -> None:
    await PostgresPreferences(database).mute(ANNS, Mute(conversation_id=ConversationId("conv_1")))
    assert await repository.claim(await repository.due([], limit=10), seconds=30) == []
    await PostgresPreferences(database).unmute(ANNS, ConversationId("conv_1"))
    await store.add([draft("b"), draft("c")])
    (delivered, dead) = await repository.claim(await repository.due([], limit=10), seconds=30)
    await repository.settle(delivered, OK, chance=0.5)
    await repository.settle(dead, GONE, chance=0.5)
    async with store.untold(limit=10) as events:
        assert sorted(event.type for event in events) == ["channel.disabled", "delivery.dead", "delivery.delivered"]


@pytest.mark.parametrize("full", ["host", "user", "store"])
async def test_nothing_is_due_for_a_host_a_user_or_a_store_with_as_many_tries_as_it_may_have(
    repository: Repository, full: str
) -> None:
    (due,) = await repository.due([], limit=10)
    stranger = Inbox(store_id=StoreId("other"), user_id=UserId("bob"))
    inbox = {"host": stranger, "user": ANNS, "store": BOBS}[full]
    at_work = replace(due, channel_id=ChannelId("hook_2"), inbox=inbox, host=due.host if full == "host" else "other")
    assert await repository.due([at_work] * (TRIES_MAX_AT_ONCE[full] - 1), limit=10) == [due]
    assert await repository.due([at_work] * TRIES_MAX_AT_ONCE[full], limit=10) == []


async def test_only_the_last_secrets_sign_beside_the_present_one(repository: Repository) -> None:
    secrets = [bytes([number]) for number in range(FORMER_SECRETS_MAX + 3)]
    for secret in secrets:
        await repository.rotate(ANNS, HOOK, secret)
    assert list((await claimed(repository)).secrets) == secrets[: -FORMER_SECRETS_MAX - 2 : -1]


async def test_viewers_and_mutes_of_an_erased_conversation_go(
    repository: Repository, store: PostgresStore, database: Database
) -> None:
    """I13."""
    await PostgresPreferences(database).mute(ANNS, Mute(conversation_id=ConversationId("conv_1")))
    await repository.note_viewers({(ANNS, RunId("run_1"))})
    await store.erase(PART)
    rows = "SELECT (SELECT count(*) FROM notifier.mutes) + (SELECT count(*) FROM notifier.viewers)"
    assert await database.fetchval(rows) == 0
