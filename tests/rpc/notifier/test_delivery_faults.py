"""Deliveries that wait, fail, are claimed or resent, or end during an attempt (NOTE-1)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pawl.chassis.ids import ConversationId, RunId, StoreId, UserId
from pawl.chassis.process.tasks import end
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.notifier.channels.rules import FORMER_SECRETS_MAX, Channel, ChannelId, ChannelKind
from pawl.notifier.deliveries.rules import (
    LOST,
    TESTS_KEPT,
    TRIES_MAX_AT_ONCE,
    Attempt,
    Candidate,
    DeliveryId,
    Outcome,
    OwnDelivery,
    choose,
)
from pawl.notifier.deliveries.store import DUE, PostgresDeliveries
from pawl.notifier.inbox.announcement import drafts_of, need_resolved_by
from pawl.notifier.inbox.rules import Draft, Inbox
from pawl.notifier.inbox.store import ADD, PostgresStore, added_columns
from pawl.notifier.preferences.rules import Mute
from pawl.notifier.preferences.store import PostgresPreferences
from pawl.notify.v1 import channel_pb2 as pb
from pawl.server.db.database import Database
from pawl.server.egress.client import GuardedEgress
from tests.poll import until
from tests.rpc.notifier.conftest import ANN_ELSEWHERE, BOB, DELIVERED, SKIPPED, WAITING, Desk, Repository, wired
from tests.rpc.notifier.test_inbox import PART
from tests.web_server import Reply, WebServer

Drafts = Callable[..., Draft]
NOW = datetime(2026, 5, 1, tzinfo=UTC)
ANNS, BOBS = (Inbox(store_id=StoreId("acme"), user_id=UserId(user)) for user in ("ann", "bob"))
FAILED, GONE = Outcome(status=500), Outcome(status=410)
HOOK = ChannelId("hook_1")


@pytest.fixture
def repository(database: Database) -> Repository:
    return Repository(database)


async def hook(
    repository: Repository,
    channel_id: str = HOOK,
    *,
    inbox: Inbox = ANNS,
    host: str = "example.com",
    scheme: str = "https",
) -> Channel:
    channel = Channel(
        channel_id=ChannelId(channel_id), name="", url=f"{scheme}://{host}/", after_seconds=0, create_time=NOW
    )
    return await repository.create(
        inbox, channel, host=host, secret=b"s", request_id="", request_hash=b"", code=made_test()
    )


async def try_delivery(repository: Repository, outcome: Outcome) -> Candidate:
    (candidate,) = await repository.due([], limit=10)
    (attempt,) = await repository.claim([candidate], seconds=30)
    assert await repository.settle(attempt, outcome, chance=0.5)
    return candidate


def made_test(number: int = 0) -> OwnDelivery:
    return OwnDelivery(delivery_id=DeliveryId(f"dlv_test{number}"), channel_id=HOOK, create_time=NOW, secret=b"s")


async def test_failing_channels_get_one_attempt_at_a_time_while_users_take_turns(
    repository: Repository, store: PostgresStore, draft: Drafts, database: Database
) -> None:
    await hook(repository, "hook_dead", host="dead.test")
    await store.add([draft("first")])
    await try_delivery(repository, FAILED)
    await store.add([draft(f"dead{number}") for number in range(30)])
    (failing,) = choose(await repository.due([], limit=500), [])
    assert await repository.due([failing], limit=500) == [], "it has its one attempt"
    await hook(repository, "hook_ann", host="a.test")
    await hook(repository, "hook_bob", inbox=BOBS, host="b.test")
    await store.add([draft(f"ann{number}") for number in range(30)])
    await store.add([draft("bob", user="bob")])
    found = await repository.due([failing], limit=500)
    assert [each.channel_id for each in found[:2]] == ["hook_bob", "hook_ann"]
    assert len(found) == 17, "at most the limit of attempts per webhook"


async def test_failed_test_deliveries_are_limited_and_do_not_affect_the_channel(
    repository: Repository, database: Database
) -> None:
    await hook(repository)
    for number in range(TESTS_KEPT + 5):
        await repository.add_test(ANNS, made_test(number))
        await try_delivery(repository, FAILED)
    assert (await repository.channel(ANNS, HOOK)).failing_since_time is None
    assert len(await repository.deliveries(ANNS, HOOK, (), None, limit=100)) == TESTS_KEPT + 1
    await repository.add_test(ANNS, made_test(99))
    await try_delivery(repository, GONE)
    assert not (await repository.channel(ANNS, HOOK)).enabled
    assert await database.fetchval("SELECT count(*) FROM notifier.notifications") == 0


async def test_cost_of_polling_due_deliveries_is_independent_of_the_backlog(
    repository: Repository, database: Database
) -> None:
    await hook(repository)
    await database.execute(
        """
        INSERT INTO notifier.webhook_deliveries (delivery_id, webhook_id, store_id, user_id, type, body)
        SELECT 'dlv_' || n, 'hook_1', 'acme', 'ann', 'webhook.test', '{}' FROM generate_series(1, 20000) AS n
        """
    )
    await database.execute("ANALYZE notifier.webhook_deliveries")
    assert len(await repository.due([], limit=500)) == 16
    assert await pages(database, DUE, [], [], [], [], [], 16, 1, 32, 500) < 200, "it would read 20,000 rows"


async def pages(database: Database, statement: str, *arguments: object) -> int:
    """Return the number of pages that a statement reads."""
    ((told,),) = await database.fetch(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", *arguments)
    plan = json.loads(told)[0]["Plan"]
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


@pytest.mark.parametrize("ends", ["delete", "disable", "gone"])
async def test_channel_deleted_during_a_delivery_gets_no_more_deliveries(
    repository: Repository, store: PostgresStore, draft: Drafts, database: Database, ends: str
) -> None:
    await hook(repository)
    await store.add([draft("first")])
    (candidate,) = await repository.due([], limit=1)
    (attempt,) = await repository.claim([candidate], seconds=30)

    async def end_it() -> None:
        if ends == "delete":
            await repository.delete(ANNS, HOOK)
        elif ends == "disable":
            await changed(repository, enabled=False)
        else:
            await repository.settle(attempt, GONE, chance=0.5)

    async with database.transaction() as connection:
        await connection.fetchval(ADD, *added_columns([draft("second")]))
        ending = asyncio.create_task(end_it())
        await asyncio.sleep(0.2)
        assert not ending.done()
    await asyncio.wait_for(ending, 60)
    assert await repository.due([], limit=10) == []
    waiting = (await repository.count_waiting()).values()
    assert sum(count for count, _ in waiting) == (ends == "disable"), "one attempt is running"
    kept = await database.fetchval("SELECT count(*) FROM notifier.webhook_deliveries")
    assert kept == (0 if ends == "delete" else 2)


async def test_stopping_notifier_releases_its_deliveries(
    repository: Repository, draft: Drafts, database: Database, receiver: WebServer, egress: GuardedEgress
) -> None:
    """Another replica continues immediately, and the interrupted attempt does not count as failed."""
    receiver.answer = lambda _: Reply(waits=True)
    await hook(repository, host=f"127.0.0.1:{receiver.port}", scheme="http")
    await PostgresStore(database).add([draft("a")])
    running = asyncio.create_task(wired(database, egress).deliveries.run())
    await until(lambda: len(receiver.asked) == 1)
    assert await repository.due([], limit=1) == []
    await end([running])
    (again,) = await repository.claim(await repository.due([], limit=1), seconds=30)
    assert (again.is_lost, again.tries) == (False, 1)


async def test_unattempted_delivery_counts_as_late_unless_its_channel_is_failing(
    repository: Repository, store: PostgresStore, draft: Drafts, database: Database
) -> None:
    """OPS-2: on a failing channel, no waiting delivery counts as late."""
    await hook(repository)
    await store.add([draft("a"), draft("b")])
    await database.execute("UPDATE notifier.webhook_deliveries SET due_time = now() - interval '9 min'")
    count, delay_seconds = (await repository.count_waiting())[ChannelKind.WEBHOOK]
    assert (count, delay_seconds >= 540) == (2, True)
    await database.execute("UPDATE notifier.webhooks SET failing_since = now()")
    assert (await repository.count_waiting())[ChannelKind.WEBHOOK] == (2, 0.0)


TIME = datetime(2026, 5, 1, tzinfo=UTC)


def at(seconds: float, run_id: str = "run_1", **fields: Any) -> event_pb2.RunEvent:
    event = event_pb2.RunEvent(
        store_id="acme", conversation_id="conv_1", run_id=run_id, event_id="evt_1", **{"type": "run.running"} | fields
    )
    event.time.FromDatetime(TIME + timedelta(seconds=seconds))
    return event


def of_call(seconds: float, call_id: str = "call_1", **states: Any) -> event_pb2.RunEvent:
    event = at(seconds)
    event.call_changed.MergeFrom(event_pb2.CallChanged(**states))
    event.call_changed.call.MergeFrom(call_pb2.Call(user_id="bob", call_id=call_id, tool_name="pay"))
    return event


ANN_S_RUN = event_pb2.RunChanged(run=run_pb2.Run(user_id="ann"))
WAITS, RUNS = at(0, type="run.waiting", run_changed=ANN_S_RUN), at(5, run_changed=ANN_S_RUN)
ASKED = of_call(0, call=call_pb2.Call(state=call_pb2.CALL_STATE_AWAITING_APPROVAL))
SETTLED = of_call(5, from_state=call_pb2.CALL_STATE_AWAITING_APPROVAL)


@pytest.mark.parametrize(
    ("told", "others", "end"),
    [
        (WAITS, [at(5, "run_2", run_changed=ANN_S_RUN), at(0, run_changed=ANN_S_RUN), SETTLED], RUNS),
        (ASKED, [of_call(5, "call_2", from_state=call_pb2.CALL_STATE_AWAITING_APPROVAL), RUNS], SETTLED),
    ],
    ids=["a run that waits", "an approval"],
)
async def test_pending_request_is_not_delivered_once_it_is_settled(
    desk: Desk,
    store: PostgresStore,
    told: event_pb2.RunEvent,
    others: list[event_pb2.RunEvent],
    end: event_pb2.RunEvent,
) -> None:
    channel_id, _ = await desk.hook(after_seconds=600)
    await store.add(drafts_of(told, [UserId("ann")]))
    for change, state in (*((other, WAITING) for other in others), (end, SKIPPED)):
        await store.mark_resolved([over for over in [need_resolved_by(change)] if over is not None] * 2)
        await hurry(desk.database)
        found = await desk.settled_delivery(channel_id)
        assert (found.state, found.last_error) == (
            state,
            "the user's action is no longer needed" if state == SKIPPED else "",
        )


async def test_notification_seen_by_its_user_is_not_delivered_but_stays_in_the_inbox(
    desk: Desk, store: PostgresStore, draft: Drafts
) -> None:
    """NOTE-1: an open stream alone does not count; the user must have seen the notification."""
    later, _ = await desk.hook(after_seconds=600)
    at_once, _ = await desk.hook()
    for metadata in (BOB, ANN_ELSEWHERE):
        hook = pb.Channel(url=f"http://127.0.0.1:{desk.receiver.port}/")
        await desk.stub.CreateChannel(pb.CreateChannelRequest(channel=hook), metadata=metadata)
    told = draft("a")
    await store.add([told])
    await desk.settled_delivery(later)
    for seconds, store_id, user_id, run_id, state in (
        (-1, "acme", "ann", "run_1", WAITING),
        (1, "acme", "bob", "run_1", WAITING),
        (1, "acme", "ann", "run_2", WAITING),
        (1, "other", "ann", "run_1", WAITING),
        (1, "acme", "ann", "run_1", SKIPPED),
    ):
        await desk.database.execute("DELETE FROM notifier.viewers")
        seen = [(Inbox(store_id=StoreId(store_id), user_id=UserId(user_id)), RunId(run_id))]
        await asyncio.gather(*(PostgresDeliveries(desk.database).note_viewers(seen * 2) for _ in range(3)))
        seen_time = told.create_time + timedelta(seconds=seconds)
        await desk.database.execute("UPDATE notifier.viewers SET seen_time = $1", seen_time)
        await hurry(desk.database)
        found = await desk.settled_delivery(later)
        assert (found.state, found.last_error) == (state, "the run was watched" if state == SKIPPED else "")
    assert (await desk.delivery(at_once, tries=1)).state == DELIVERED, "immediate notifications are delivered"
    assert [each.HasField("read_time") for each in await desk.inbox()] == [False]


OK = Outcome(status=200)


@pytest.fixture
async def queue(database: Database, store: PostgresStore, draft: Drafts) -> Repository:
    queue = Repository(database)
    await hook(queue)
    await store.add([draft("a")])
    return queue


async def changed(queue: Repository, **fields: Any) -> Channel:
    return await queue.update(
        ANNS,
        HOOK,
        lambda channel: (replace(channel, **fields), "example.com"),
        code=made_test(),
    )


async def claimed(queue: Repository, *, seconds: float = 30) -> Attempt:
    (attempt,) = await queue.claim(await queue.due([], limit=10), seconds=seconds)
    return attempt


async def hurry(database: Database) -> None:
    await database.execute("UPDATE notifier.webhook_deliveries SET due_time = now() WHERE due_time IS NOT NULL")


async def test_channel_counts_as_failing_until_it_is_enabled_again_or_moved(
    queue: Repository, store: PostgresStore, draft: Drafts, database: Database
) -> None:
    await try_delivery(queue, FAILED)
    failing_since = (await queue.channel(ANNS, HOOK)).failing_since_time
    await hurry(database)
    await try_delivery(queue, FAILED)
    assert (await changed(queue, name="x")).failing_since_time == failing_since is not None
    assert (await changed(queue, url="https://example.com/new")).failing_since_time is None
    await hurry(database)
    await try_delivery(queue, FAILED)
    assert (await changed(queue, enabled=False)).failing_since_time is not None
    assert (await changed(queue, enabled=True)).failing_since_time is None
    await store.add([draft("b")])
    await try_delivery(queue, GONE)
    assert "410" in (await changed(queue, name="y")).disable_reason
    assert (await changed(queue, enabled=True)).disable_reason == ""


@pytest.mark.parametrize("how", ["lost", "moved", "the notifier's own"])
async def test_only_the_receivers_failures_count_against_its_channel(queue: Repository, how: str) -> None:
    outcome = FAILED
    if how == "lost":
        await claimed(queue, seconds=0)
        outcome = LOST
    if how == "the notifier's own":
        outcome = Outcome(error="closed", is_receivers=False)
    attempt = await claimed(queue)
    if how == "moved":
        outcome = GONE
        await changed(queue, url="https://example.com/new")
    assert attempt.is_lost is (how == "lost")
    assert await queue.settle(attempt, outcome, chance=0.5)
    channel = await queue.channel(ANNS, HOOK)
    assert (channel.enabled, channel.failing_since_time) == (True, None)


async def test_delivery_resent_during_an_attempt_stays_with_that_attempt(queue: Repository, database: Database) -> None:
    await try_delivery(queue, FAILED)
    await hurry(database)
    attempt = await claimed(queue)
    (again,) = await queue.resend(ANNS, [attempt.candidate.delivery_id])
    assert (again.tries, await queue.due([], limit=10)) == (1, [])
    late = replace(attempt, claim_until=attempt.claim_until - timedelta(seconds=1))
    await queue.release([late])
    assert await queue.settle(late, OK, chance=0.5) is None
    assert await queue.due([], limit=10) == [], "an expired claim changes nothing"
    assert await queue.settle(attempt, OK, chance=0.5)
    (again,) = await queue.resend(ANNS, [attempt.candidate.delivery_id])
    assert (again.tries, len(await queue.due([], limit=10))) == (0, 1)


async def test_ended_deliveries_are_published_to_nats_but_skipped_ones_are_not(
    queue: Repository, store: PostgresStore, draft: Drafts, database: Database
) -> None:
    await PostgresPreferences(database).mute(ANNS, Mute(conversation_id=ConversationId("conv_1")))
    assert await queue.claim(await queue.due([], limit=10), seconds=30) == []
    await PostgresPreferences(database).unmute(ANNS, ConversationId("conv_1"))
    await store.add([draft("b"), draft("c")])
    (delivered, dead) = await queue.claim(await queue.due([], limit=10), seconds=30)
    await queue.settle(delivered, OK, chance=0.5)
    await queue.settle(dead, GONE, chance=0.5)
    async with store.unpublished_channel_events(limit=10) as events:
        assert sorted(event.type for event in events) == ["channel.disabled", "delivery.dead", "delivery.delivered"]


@pytest.mark.parametrize("full", ["host", "user", "store"])
async def test_nothing_is_due_for_a_host_user_or_store_at_its_limit(queue: Repository, full: str) -> None:
    (due,) = await queue.due([], limit=10)
    inbox = {"host": Inbox(store_id=StoreId("other"), user_id=UserId("bob")), "user": ANNS, "store": BOBS}[full]
    in_progress = replace(
        due, channel_id=ChannelId("hook_2"), inbox=inbox, host=due.host if full == "host" else "other"
    )
    assert await queue.due([in_progress] * (TRIES_MAX_AT_ONCE[full] - 1), limit=10) == [due]
    assert await queue.due([in_progress] * TRIES_MAX_AT_ONCE[full], limit=10) == []


async def test_only_recent_secrets_sign_deliveries_in_addition_to_the_current_secret(queue: Repository) -> None:
    secrets = [bytes([number]) for number in range(FORMER_SECRETS_MAX + 3)]
    for secret in secrets:
        await queue.rotate(ANNS, HOOK, secret)
    assert list((await claimed(queue)).secrets) == secrets[: -FORMER_SECRETS_MAX - 2 : -1]


async def test_conversations_viewers_and_mutes_are_deleted_by_an_erasure(
    queue: Repository, store: PostgresStore, database: Database
) -> None:
    """I13: no row remains."""
    await PostgresPreferences(database).mute(ANNS, Mute(conversation_id=ConversationId("conv_1")))
    await queue.note_viewers({(ANNS, RunId("run_1"))})
    await store.erase(PART)
    rows = "SELECT (SELECT count(*) FROM notifier.mutes) + (SELECT count(*) FROM notifier.viewers)"
    assert await database.fetchval(rows) == 0
