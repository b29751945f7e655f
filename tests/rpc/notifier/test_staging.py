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
from tests.rpc.notifier.desk import ANN_ELSEWHERE, BOB, DELIVERED, SKIPPED, WAITING, Desk
from tests.web_server import WebServer

if TYPE_CHECKING:
    pass

Drafts = Callable[..., Draft]


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
    waits = await desk.looked_at(channel_id)
    pause = waits.next_try_time.ToDatetime() - waits.create_time.ToDatetime()
    assert (waits.state, waits.tries, pause) == (WAITING, 0, timedelta(minutes=10))
    assert receiver.asked == []
    await after_ten_minutes(desk)
    assert (await desk.delivery(channel_id, tries=1)).state == DELIVERED


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
    ("told", "others", "end"),
    [
        (WAITS, [replace(RUNS, run_id=RunId("run_2")), replace(RUNS, time=TIME), SETTLED], RUNS),
        (ASKED, [replace(SETTLED, call_id=CallId("call_2")), RUNS], SETTLED),
    ],
    ids=["a run that waits", "an approval"],
)
async def test_a_need_is_told_no_more_once_it_is_over_and_not_before(
    desk: Desk, store: PostgresStore, told: RunChange | ApprovalAsked, others: list[Change], end: Change
) -> None:
    channel_id, _ = await desk.hook(after_seconds=600)
    draft = draft_notification(told) if isinstance(told, RunChange) else None
    await store.add([draft] if draft else draft_requests(told, [UserId("ann")]))  # type: ignore[arg-type]
    for change, state in (*((other, WAITING) for other in others), (end, SKIPPED)):
        await store.note_over([over for over in [over_by(change)] if over is not None] * 2)
        await after_no_time(desk)
        found = await desk.looked_at(channel_id)
        assert (found.state, found.last_error) == (state, "nobody is needed any more" if state == SKIPPED else "")


async def after_no_time(desk: Desk) -> None:
    """Have what waits looked at."""
    await desk.database.execute("UPDATE notifier.webhook_deliveries SET due_time = now() WHERE due_time IS NOT NULL")


async def test_what_its_user_watched_is_told_no_more_later_and_stays_in_the_inbox(
    desk: Desk, store: PostgresStore, draft: Drafts
) -> None:
    """NOTE-1, EVT-3: a viewer is one until 30 s after the last sign."""
    later, _ = await desk.hook(after_seconds=600)
    at_once, _ = await desk.hook()
    for metadata in (BOB, ANN_ELSEWHERE):
        hook = pb.Channel(url=f"http://127.0.0.1:{desk.receiver.port}/")
        await desk.stub.CreateChannel(pb.CreateChannelRequest(channel=hook), metadata=metadata)
    told = draft("a")
    await store.add([told])
    await desk.looked_at(later)
    for seconds, store_id, user_id, run_id, state in (
        (-31, "acme", "ann", "run_1", WAITING),
        (0, "acme", "bob", "run_1", WAITING),
        (0, "acme", "ann", "run_2", WAITING),
        (0, "other", "ann", "run_1", WAITING),
        (-29, "acme", "ann", "run_1", SKIPPED),
    ):
        await desk.database.execute("DELETE FROM notifier.viewers")
        seen = [(Inbox(store_id=StoreId(store_id), user_id=UserId(user_id)), RunId(run_id))]
        await asyncio.gather(*(PostgresDeliveries(desk.database).note_viewers(seen * 2) for _ in range(3)))
        seen_time = told.create_time + timedelta(seconds=seconds)
        await desk.database.execute("UPDATE notifier.viewers SET seen_time = $1", seen_time)
        await after_no_time(desk)
        found = await desk.looked_at(later)
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
