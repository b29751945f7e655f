"""Receivers that fail, webhooks that end, and processes that die while something is delivered (NOTE-1)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from pawl.chassis.database import Database
from pawl.chassis.ids import StoreId, UserId
from pawl.notifier.adapters.postgres import ADD, PostgresStore, added_columns
from pawl.notifier.adapters.webhooks import PostgresWebhooks
from pawl.notifier.app.ports import NewWebhook
from pawl.notifier.domain.notification import Draft, Inbox
from pawl.notifier.domain.webhook import (
    TEST,
    TESTS_KEPT,
    Candidate,
    DeliveryId,
    DeliveryState,
    Outcome,
    Webhook,
    WebhookDelivery,
    WebhookId,
    choose,
)

Drafts = Callable[..., Draft]
NOW = datetime(2026, 5, 1, tzinfo=UTC)
ANN, BOB = (Inbox(store_id=StoreId("acme"), user_id=UserId(user)) for user in ("ann", "bob"))
FAILED, GONE = Outcome(status=500), Outcome(status=410)
HOOK = WebhookId("hook_1")


@pytest.fixture
def repository(database: Database) -> PostgresWebhooks:
    return PostgresWebhooks(database)


async def hook(
    repository: PostgresWebhooks, webhook_id: str = HOOK, *, inbox: Inbox = ANN, host: str = "example.com"
) -> Webhook:
    webhook = Webhook(webhook_id=WebhookId(webhook_id), name="", url=f"https://{host}/", create_time=NOW)
    new = NewWebhook(inbox=inbox, webhook=webhook, host=host, secret=b"s", request_id="", request_hash=b"")
    return await repository.create(new)


async def tried(repository: PostgresWebhooks, outcome: Outcome) -> Candidate:
    """Try the one that is due."""
    (candidate,) = await repository.due([], limit=10)
    (attempt,) = await repository.claim([candidate], seconds=30)
    assert await repository.settle(attempt, outcome, chance=0.5)
    return candidate


def made_test(number: int = 0) -> WebhookDelivery:
    return WebhookDelivery(
        delivery_id=DeliveryId(f"dlv_test{number}"),
        webhook_id=HOOK,
        type=TEST,
        number=0,
        state=DeliveryState.WAITING,
        tries=0,
        create_time=NOW,
    )


async def test_a_webhook_that_fails_has_one_try_at_once_and_users_with_few_are_first(
    repository: PostgresWebhooks, store: PostgresStore, draft: Drafts, database: Database
) -> None:
    await hook(repository, "hook_dead", host="dead.test")
    await store.add([draft("first")])
    await tried(repository, FAILED)
    await store.add([draft(f"dead{number}") for number in range(30)])
    (failing,) = choose(await repository.due([], limit=500), [])
    assert await repository.due([failing], limit=500) == [], "it has its one"
    await hook(repository, "hook_ann", host="a.test")
    await hook(repository, "hook_bob", inbox=BOB, host="b.test")
    await store.add([draft(f"ann{number}") for number in range(30)])
    await store.add([draft("bob", user="bob")])
    found = await repository.due([failing], limit=500)
    assert [each.webhook_id for each in found[:2]] == ["hook_bob", "hook_ann"]
    assert len(found) == 17, "of each webhook no more than may be tried"


async def test_a_look_at_what_is_due_costs_the_same_however_much_waits(
    repository: PostgresWebhooks, database: Database
) -> None:
    await hook(repository)
    await database.execute(
        """
        INSERT INTO notifier.webhook_deliveries (delivery_id, webhook_id, store_id, user_id, type, body)
        SELECT 'dlv_' || n, 'hook_1', 'acme', 'ann', 'webhook.test', '{}' FROM generate_series(1, 20000) AS n
        """
    )
    await database.execute("ANALYZE notifier.webhook_deliveries")
    await repository.due([], limit=500)
    started = time.monotonic()
    for _ in range(10):
        assert len(await repository.due([], limit=500)) == 16
    assert time.monotonic() - started < 0.2, "each would read 20,000 rows"


@pytest.mark.parametrize("ends", ["delete", "disable", "gone"])
async def test_a_webhook_that_ends_while_it_is_told_is_told_nothing(
    repository: PostgresWebhooks, store: PostgresStore, draft: Drafts, database: Database, ends: str
) -> None:
    webhook = await hook(repository)
    await store.add([draft("first")])
    (candidate,) = await repository.due([], limit=1)
    (attempt,) = await repository.claim([candidate], seconds=30)

    async def end_it() -> None:
        if ends == "delete":
            await repository.delete(ANN, HOOK)
        elif ends == "disable":
            await disabled(repository, webhook)
        else:
            await repository.settle(attempt, GONE, chance=0.5)

    async with database.transaction() as connection:
        await connection.fetchval(ADD, *added_columns([draft("second")]))
        ending = asyncio.create_task(end_it())
        await asyncio.sleep(0.2)
        assert not ending.done()
    await asyncio.wait_for(ending, 5)
    assert await repository.due([], limit=10) == []
    assert await repository.count_waiting() == (ends == "disable"), "one is at work"
    kept = await database.fetchval("SELECT count(*) FROM notifier.webhook_deliveries")
    assert kept == (0 if ends == "delete" else 2)


async def disabled(repository: PostgresWebhooks, webhook: Webhook) -> Webhook:
    asked = Webhook(webhook_id=webhook.webhook_id, name="", url=webhook.url, enabled=False)
    return await repository.update(ANN, asked, host="example.com")


async def test_what_a_process_that_died_had_claimed_is_not_sent_once_its_webhook_is_disabled(
    repository: PostgresWebhooks, store: PostgresStore, draft: Drafts
) -> None:
    webhook = await hook(repository)
    await store.add([draft("a")])
    found = await repository.due([], limit=1)
    await repository.claim(found, seconds=0)
    await disabled(repository, webhook)
    assert await repository.claim(await repository.due([], limit=1), seconds=30) == []
    (dead,) = await repository.deliveries(ANN, HOOK, None, limit=10)
    assert (dead.state, dead.last_error, dead.next_try_time) == ("dead", "the webhook was disabled", None)
    await repository.resend(ANN, dead.delivery_id)
    await repository.add_test(ANN, made_test(), "{}")
    assert len(await repository.claim(await repository.due([], limit=10), seconds=30)) == 2, "these were asked for"


async def test_only_what_was_sent_counts_as_a_try(
    repository: PostgresWebhooks, store: PostgresStore, draft: Drafts
) -> None:
    await hook(repository)
    await store.add([draft("a")])
    for _ in range(12):
        await repository.claim(await repository.due([], limit=1), seconds=0)
    await tried(repository, FAILED)
    (delivery,) = await repository.deliveries(ANN, HOOK, None, limit=10)
    assert (delivery.state, delivery.tries) == ("waiting", 1)


async def test_tests_neither_fail_a_webhook_nor_tell_nor_pile_up(
    repository: PostgresWebhooks, store: PostgresStore, database: Database
) -> None:
    await hook(repository)
    for number in range(TESTS_KEPT + 5):
        await repository.add_test(ANN, made_test(number), "{}")
        await tried(repository, FAILED)
    assert (await repository.webhook(ANN, HOOK)).failing_since_time is None
    assert len(await repository.deliveries(ANN, HOOK, None, limit=100)) == TESTS_KEPT + 1
    await repository.add_test(ANN, made_test(99), "{}")
    await tried(repository, GONE)
    assert not (await repository.webhook(ANN, HOOK)).enabled
    assert await database.fetchval("SELECT count(*) FROM notifier.notifications") == 0


async def test_a_new_url_begins_anew(repository: PostgresWebhooks, store: PostgresStore, draft: Drafts) -> None:
    webhook = await hook(repository)
    await store.add([draft("a")])
    await tried(repository, FAILED)
    assert (await repository.webhook(ANN, HOOK)).failing_since_time
    await store.add([draft("b")])
    (attempt,) = await repository.claim(await repository.due([], limit=1), seconds=30)
    asked = Webhook(webhook_id=webhook.webhook_id, name="", url="https://example.com/new")
    assert (await repository.update(ANN, asked, host="example.com")).failing_since_time is None
    assert await repository.settle(attempt, GONE, chance=0.5)
    after = await repository.webhook(ANN, HOOK)
    assert (after.enabled, after.failing_since_time) == (True, None), "what the former one says does not count"
