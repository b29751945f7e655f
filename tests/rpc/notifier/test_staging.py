"""What is told later, and no more once it was read or is over (NOTE-1)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

import pytest

from pawl.chassis.database import Database
from pawl.chassis.erasures import ErasurePart
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId
from pawl.notifier.adapters.deliveries import PostgresDeliveries
from pawl.notifier.adapters.postgres import PostgresStore
from pawl.notifier.domain.announcement import (
    ApprovalAsked,
    ApprovalSettled,
    Change,
    RunChange,
    draft_notification,
    draft_requests,
    over_by,
)
from pawl.notifier.domain.notification import Draft, EventId, Inbox
from pawl.notify.v1 import channel_pb2 as pb
from pawl.notify.v1 import notify_pb2
from tests.rpc.notifier.test_channels import created
from tests.rpc.notifier.test_deliveries import DELIVERED, WAITING, Desk
from tests.rpc.notifier.test_inbox import ANN, ANN_ELSEWHERE, BOB, reason_of
from tests.rpc.notifier.test_preferences import SKIPPED, looked_at
from tests.web_server import WebServer

if TYPE_CHECKING:
    from pawl.notify.v1.channel_pb2_grpc import ChannelServiceAsyncStub
    from pawl.notify.v1.notify_pb2_grpc import NotifyServiceAsyncStub

Drafts = Callable[..., Draft]


@pytest.fixture
def desk(
    channels: ChannelServiceAsyncStub, stub: NotifyServiceAsyncStub, receiver: WebServer, database: Database
) -> Desk:
    return Desk(channels, stub, receiver, database)


async def after_ten_minutes(desk: Desk) -> None:
    """Let ten minutes pass for what waits."""
    await desk.database.execute(
        "UPDATE notifier.webhook_deliveries"
        " SET insert_time = insert_time - interval '10 minutes', due_time = now() WHERE due_time IS NOT NULL"
    )


async def test_a_channel_tells_later_what_was_not_read_by_then(
    desk: Desk, store: PostgresStore, draft: Drafts, receiver: WebServer
) -> None:
    channel_id, _ = await desk.hook(after_seconds=600)
    await store.add([draft("a")])
    waits = await looked_at(desk, channel_id)
    pause = waits.next_try_time.ToDatetime() - waits.create_time.ToDatetime()
    assert (waits.state, waits.tries, pause) == (WAITING, 0, timedelta(minutes=10))
    assert receiver.asked == []
    await after_ten_minutes(desk)
    assert (await desk.delivery(channel_id, tries=1)).state == DELIVERED


async def test_what_was_read_meanwhile_is_skipped_and_what_is_told_at_once_is_told(
    desk: Desk, store: PostgresStore, draft: Drafts
) -> None:
    later, _ = await desk.hook(after_seconds=600)
    at_once, _ = await desk.hook()
    await store.add([draft("a")])
    await looked_at(desk, later)
    read = notify_pb2.AcknowledgeNotificationsRequest(
        notification_ids=[each.notification_id for each in await desk.inbox()]
    )
    await desk.inboxes.AcknowledgeNotifications(read, metadata=ANN)
    await after_ten_minutes(desk)
    skipped = await looked_at(desk, later)
    assert (skipped.state, skipped.last_error) == (SKIPPED, "it was read")
    assert (await desk.delivery(at_once, tries=1)).state == DELIVERED


TIME = datetime(2026, 5, 1, tzinfo=UTC)
WAITS = RunChange(
    event_id=EventId("evt_waits"),
    type="run.waiting",
    time=TIME,
    inbox=Inbox(store_id=StoreId("acme"), user_id=UserId("ann")),
    run_id=RunId("run_1"),
    conversation_id=ConversationId("conv_1"),
)
ASKED = ApprovalAsked(
    event_id=EventId("evt_asked"),
    time=TIME,
    store_id=StoreId("acme"),
    user_id=UserId("bob"),
    run_id=RunId("run_1"),
    call_id=CallId("call_1"),
    conversation_id=ConversationId("conv_1"),
    tool_name="pay",
)
SETTLED = ApprovalSettled(
    time=TIME + timedelta(seconds=5), store_id=StoreId("acme"), run_id=RunId("run_1"), call_id=CallId("call_1")
)
RUNS = replace(WAITS, type="run.running", time=SETTLED.time)


@pytest.mark.parametrize(
    ("told", "then", "state"),
    [
        (WAITS, [RUNS], SKIPPED),
        (WAITS, [replace(RUNS, run_id=RunId("run_2"))], WAITING),
        (WAITS, [replace(RUNS, time=TIME)], WAITING),
        (WAITS, [SETTLED], WAITING),
        (replace(WAITS, type="run.completed"), [replace(RUNS, type="run.completed")], WAITING),
        (ASKED, [SETTLED], SKIPPED),
        (ASKED, [replace(SETTLED, call_id=CallId("call_2")), RUNS], WAITING),
        (ASKED, [replace(RUNS, type="run.cancelled")], SKIPPED),
        (ASKED, [replace(ASKED, time=SETTLED.time)], SKIPPED),
    ],
)
async def test_a_need_that_is_over_is_told_no_more(
    desk: Desk, store: PostgresStore, told: Change, then: list[Change], state: pb.ChannelDeliveryState.ValueType
) -> None:
    channel_id, _ = await desk.hook(after_seconds=600)
    draft = draft_notification(told) if isinstance(told, RunChange) else None
    drafts = draft_requests(told, [UserId("ann")]) if isinstance(told, ApprovalAsked) else []
    await store.add([*drafts, *([draft] if draft else [])])
    await store.note_over([over for over in map(over_by, then) if over is not None] * 2)
    await looked_at(desk, channel_id)
    found = (await desk.deliveries(channel_id))[0]
    assert (found.state, found.last_error) == (state, "nobody is needed any more" if state == SKIPPED else "")


@pytest.mark.parametrize(
    ("sign", "state"),
    [
        ((0, "acme", "ann", "run_1"), SKIPPED),
        ((-29, "acme", "ann", "run_1"), SKIPPED),
        ((300, "acme", "ann", "run_1"), SKIPPED),
        ((-31, "acme", "ann", "run_1"), WAITING),
        ((0, "acme", "bob", "run_1"), WAITING),
        ((0, "acme", "ann", "run_2"), WAITING),
        ((0, "other", "ann", "run_1"), WAITING),
    ],
    ids=["then", "just before", "since", "long before", "somebody else", "another run", "elsewhere"],
)
async def test_what_its_user_watched_is_told_no_more_later_and_stays_in_the_inbox(
    desk: Desk,
    store: PostgresStore,
    draft: Drafts,
    sign: tuple[float, str, str, str],
    state: pb.ChannelDeliveryState.ValueType,
) -> None:
    """NOTE-1, EVT-3: a viewer is one until 30 s after the last sign."""
    later, _ = await desk.hook(after_seconds=600)
    at_once, _ = await desk.hook()
    for metadata in (BOB, ANN_ELSEWHERE):
        hook = pb.Channel(url=f"http://127.0.0.1:{desk.receiver.port}/")
        await desk.stub.CreateChannel(pb.CreateChannelRequest(channel=hook), metadata=metadata)
    told = draft("a")
    await store.add([told])
    await looked_at(desk, later)
    seconds, store_id, user_id, run_id = sign
    seen = [(Inbox(store_id=StoreId(store_id), user_id=UserId(user_id)), RunId(run_id))]
    await asyncio.gather(*(PostgresDeliveries(desk.database).note_viewers(seen * 2) for _ in range(3)))
    seen_time = told.create_time + timedelta(seconds=seconds)
    await desk.database.execute("UPDATE notifier.viewers SET seen_time = $1", seen_time)
    await desk.database.execute("UPDATE notifier.webhook_deliveries SET due_time = now() WHERE due_time IS NOT NULL")
    found = await looked_at(desk, later)
    assert (found.state, found.last_error) == (state, "the run was watched" if state == SKIPPED else "")
    assert (await desk.delivery(at_once, tries=1)).state == DELIVERED, "what is told at once is told"
    assert [each.HasField("read_time") for each in await desk.inbox()] == [False]


async def test_of_who_has_no_channel_nobody_notes_what_they_watch_and_what_is_old_or_erased_is_forgotten(
    desk: Desk, store: PostgresStore, database: Database
) -> None:
    viewers, count = PostgresDeliveries(database), "SELECT count(*) FROM notifier.viewers"
    seen = [(Inbox(store_id=StoreId("acme"), user_id=UserId("ann")), RunId(f"run_{number}")) for number in range(3)]
    await viewers.note_viewers(seen)
    assert await database.fetchval(count) == 0
    await desk.hook()
    await viewers.note_viewers(seen)
    assert await database.fetchval(count) == 3
    await store.erase(
        ErasurePart(store_id=StoreId("acme"), conversation_id=ConversationId("conv_1"), run_ids=["run_0"], call_ids=[])
    )
    assert await database.fetchval(count) == 2
    await database.execute("UPDATE notifier.viewers SET seen_time = now() - interval '11 days' WHERE run_id = 'run_1'")
    await store.forget(older_than_seconds=86400, limit=10)
    assert await database.fetchval("SELECT run_id FROM notifier.viewers") == "run_2"


async def test_the_pause_of_a_channel_has_a_limit_and_can_be_changed(desk: Desk) -> None:
    assert await reason_of(created(desk.stub, after_seconds=86401)) == "INVALID_FIELD"
    channel_id, _ = await desk.hook(after_seconds=86400)
    change = pb.UpdateChannelRequest(channel_id=channel_id, after_seconds=0)
    assert (await desk.stub.UpdateChannel(change, metadata=ANN)).channel.after_seconds == 0
