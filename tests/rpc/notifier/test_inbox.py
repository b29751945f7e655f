"""The inbox: numbers without gaps, pages, and what was read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from pawl.chassis.ids import ConversationId, StoreId, UserId
from pawl.chassis.status import from_rpc_error
from pawl.errors import PawlError
from pawl.notifier.adapters.postgres import PostgresStore
from pawl.notifier.app.ports import PoisonEvent
from pawl.notifier.domain.announcement import Over
from pawl.notifier.domain.notification import Draft, Inbox, NotificationKind
from pawl.notify.v1 import notify_pb2
from tests.rpc.notifier.desk import ANN, ANN_ELSEWHERE, BOB

if TYPE_CHECKING:
    from pawl.notify.v1.notify_pb2_grpc import NotifyServiceAsyncStub


async def listed(
    stub: NotifyServiceAsyncStub, metadata: tuple[tuple[str, str], ...] = ANN, **request: object
) -> list[int]:
    response = await stub.ListNotifications(notify_pb2.ListNotificationsRequest(**request), metadata=metadata)  # type: ignore[arg-type]
    return [notification.number for notification in response.notifications]


async def reason_of(call: Awaitable[object]) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    error: PawlError = from_rpc_error(caught.value)
    return error.reason


async def test_numbers_count_from_one_without_gaps_and_the_same_event_takes_none(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    """NOTE-1, I15: redelivery gives one notification."""
    assert await store.add([draft("a"), draft("b"), draft("a")]) == 2
    assert await store.add([draft("b"), draft("c"), draft("x", user="bob")]) == 2
    response = await stub.ListNotifications(notify_pb2.ListNotificationsRequest(), metadata=ANN)
    assert [(n.number, n.event_id) for n in response.notifications] == [(3, "c"), (2, "b"), (1, "a")]


async def test_replicas_given_the_same_events_at_once_make_one_notification_of_each(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    events = [f"e{number}" for number in range(20)]
    rounds = [[draft(event) for event in events], [draft(event) for event in reversed(events)]] * 2
    added = await asyncio.gather(*(store.add(drafts) for drafts in rounds))
    assert sum(added) == len(events)
    assert await listed(stub) == list(range(20, 0, -1))


async def test_values_that_can_never_be_stored_are_told_from_a_store_that_fails(
    store: PostgresStore, draft: Callable[..., Draft]
) -> None:
    with pytest.raises(PoisonEvent):
        await store.add([replace(draft("a"), title="no\x00text")])


async def test_nobody_sees_the_inbox_of_another_user_or_store(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    """I13: a foreign notification is not found, exactly as an absent one."""
    await store.add([draft("a")])
    assert await listed(stub, BOB) == []
    assert await listed(stub, ANN_ELSEWHERE) == []
    request = notify_pb2.AcknowledgeNotificationsRequest(notification_ids=[draft("a").notification_id])
    for metadata in (BOB, ANN_ELSEWHERE):
        assert await reason_of(stub.AcknowledgeNotifications(request, metadata=metadata)) == "NOTIFICATION_NOT_FOUND"


async def test_pages_go_from_new_to_old_and_lose_nothing(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    await store.add([draft(f"e{number}") for number in range(5)])
    request, pages = notify_pb2.ListNotificationsRequest(page_size=2), []
    while not pages or request.page_token:
        response = await stub.ListNotifications(request, metadata=ANN)
        pages.append([notification.number for notification in response.notifications])
        request.page_token = response.next_page_token
    assert pages == [[5, 4], [3, 2], [1]]


async def test_what_was_read_stays_read_with_its_first_time(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    await store.add([draft("a"), draft("b")])
    request = notify_pb2.AcknowledgeNotificationsRequest(notification_ids=[draft("a").notification_id])
    first = await stub.AcknowledgeNotifications(request, metadata=ANN)
    again = await stub.AcknowledgeNotifications(request, metadata=ANN)
    assert first.notifications[0].HasField("read_time")
    assert first == again
    unread = await stub.ListNotifications(notify_pb2.ListNotificationsRequest(only_unread=True), metadata=ANN)
    assert [n.event_id for n in unread.notifications] == ["b"]
    assert unread.unread_count == 1


async def test_a_request_that_is_wrong_says_why_and_changes_nothing(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    await store.add([draft("a")])
    lists: list[tuple[dict[str, Any], str]] = [
        ({"page_size": 201}, "INVALID_FIELD"),
        ({"page_token": "garbage"}, "INVALID_PAGE_TOKEN"),
        ({"page_token": "unread-3"}, "INVALID_PAGE_TOKEN"),
        ({"page_token": "all-3", "only_unread": True}, "INVALID_PAGE_TOKEN"),
    ]
    for fields, reason in lists:
        asked = stub.ListNotifications(notify_pb2.ListNotificationsRequest(**fields), metadata=ANN)
        assert await reason_of(asked) == reason, fields
    absent = [draft("a").notification_id, "ntf_absent"]
    for ids, reason in (
        ([], "INVALID_FIELD"),
        (["a"] * 201, "INVALID_FIELD"),
        (["a.b"], "INVALID_ID"),
        (absent, "NOTIFICATION_NOT_FOUND"),
    ):
        request = notify_pb2.AcknowledgeNotificationsRequest(notification_ids=ids)
        assert await reason_of(stub.AcknowledgeNotifications(request, metadata=ANN)) == reason, ids
    assert await listed(stub, only_unread=True) == [1]


async def test_old_notifications_are_forgotten_and_numbers_go_on(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    await store.add([draft("a"), draft("b")])
    assert await store.forget(older_than_seconds=3600, limit=10) == 0
    assert await store.forget(older_than_seconds=-1, limit=10) == 2
    await store.add([draft("c")])
    assert await listed(stub) == [3]


async def test_a_conversation_waits_as_long_as_somebody_is_needed_for_a_run_of_it(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    """ASYNC-5: then people are told of the ends of its jobs."""
    ann = Inbox(store_id=StoreId("acme"), user_id=UserId("ann"))
    parked = replace(draft("parked"), kind=NotificationKind.INPUT_NEEDED)
    other = replace(draft("other"), conversation_id=ConversationId("conv_2"))
    of_approver = replace(
        draft("asked"), kind=NotificationKind.APPROVAL_NEEDED, conversation_id=ConversationId("conv_3")
    )
    await store.add([parked, other, of_approver])
    asked = {(ann, ConversationId(f"conv_{number}")) for number in range(1, 5)}
    asked |= {
        (Inbox(store_id=StoreId("acme"), user_id=UserId("bob")), ConversationId("conv_1")),
        (Inbox(store_id=StoreId("other"), user_id=UserId("ann")), ConversationId("conv_1")),
    }
    assert await store.waiting(asked) == {(ann, "conv_1")}
    await store.add([replace(draft("job"), kind=NotificationKind.JOB_ENDED)])
    newest = (await stub.ListNotifications(notify_pb2.ListNotificationsRequest(), metadata=ANN)).notifications[0]
    assert (newest.kind, newest.conversation_id) == (notify_pb2.NOTIFICATION_KIND_JOB_ENDED, "conv_1")
    goes_on = Over(store_id=StoreId("acme"), run_id=parked.run_id, time=parked.create_time + timedelta(seconds=1))
    await store.note_over([goes_on])
    assert await store.waiting(asked) == set()
