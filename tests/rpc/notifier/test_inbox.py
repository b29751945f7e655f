"""The inbox: sequence numbers, pages, subscribers, approvers, read state and erasure."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import grpc
import pytest

from pawl.chassis.identity import auth
from pawl.chassis.ids import CallId, ConversationId, StoreId, UserId
from pawl.errors import SlowConsumer
from pawl.notifier.inbox.rpc import Notify
from pawl.notifier.inbox.rules import Draft, Inbox, NotificationKind, PoisonEvent, ResolvedNeed
from pawl.notifier.inbox.store import PostgresStore
from pawl.notifier.inbox.subscription import PAGE, Subscriptions
from pawl.notify.v1 import notify_pb2
from pawl.server.db.database import Database
from pawl.server.db.erasures import ErasurePart
from tests.rpc.notifier.conftest import ANN, ANN_ELSEWHERE, BOB
from tests.rpc.refusals import raises, reason_of
from tests.rpc.stubs import NotifyServiceAsyncStub


async def listed(
    stub: NotifyServiceAsyncStub, metadata: tuple[tuple[str, str], ...] = ANN, **request: object
) -> list[int]:
    response = await stub.ListNotifications(notify_pb2.ListNotificationsRequest(**request), metadata=metadata)  # type: ignore[arg-type]
    return [notification.number for notification in response.notifications]


async def test_sequence_numbers_have_no_gaps_and_are_not_used_up_by_duplicates(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    """NOTE-1, I15: a redelivered event creates no second notification."""
    assert await store.add([draft("a"), draft("b"), draft("a")]) == (2, 0)
    assert await store.add([draft("b"), draft("c"), draft("x", user="bob")]) == (2, 0)
    response = await stub.ListNotifications(notify_pb2.ListNotificationsRequest(), metadata=ANN)
    assert [(n.number, n.event_id) for n in response.notifications] == [(3, "c"), (2, "b"), (1, "a")]


async def test_replicas_with_the_same_events_create_only_one_notification_for_each(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    events = [f"e{number}" for number in range(20)]
    rounds = [[draft(event) for event in events], [draft(event) for event in reversed(events)]] * 2
    added = await asyncio.gather(*(store.add(drafts) for drafts in rounds))
    assert (sum(one.notifications for one in added), await listed(stub)) == (len(events), list(range(20, 0, -1)))


async def test_unstorable_values_are_distinguished_from_a_failing_store(
    store: PostgresStore, draft: Callable[..., Draft]
) -> None:
    await raises(PoisonEvent, store.add([replace(draft("a"), title="no\x00text")]))


async def test_inboxes_of_other_users_and_stores_are_invisible(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    """I13: a foreign notification is not found, exactly like an absent one."""
    await store.add([draft("a")])
    assert (await listed(stub, BOB), await listed(stub, ANN_ELSEWHERE)) == ([], [])
    request = notify_pb2.AcknowledgeNotificationsRequest(notification_ids=[draft("a").notification_id])
    for metadata in (BOB, ANN_ELSEWHERE):
        assert await reason_of(stub.AcknowledgeNotifications(request, metadata=metadata)) == "NOTIFICATION_NOT_FOUND"


async def test_pages_are_newest_first_and_complete(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    await store.add([draft(f"e{number}") for number in range(5)])
    request, pages = notify_pb2.ListNotificationsRequest(page_size=2), list[list[int]]()
    while not pages or request.page_token:
        response = await stub.ListNotifications(request, metadata=ANN)
        pages.append([notification.number for notification in response.notifications])
        request.page_token = response.next_page_token
    assert pages == [[5, 4], [3, 2], [1]]


async def test_read_notification_keeps_its_first_read_time(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    await store.add([draft("a"), draft("b")])
    request = notify_pb2.AcknowledgeNotificationsRequest(notification_ids=[draft("a").notification_id])
    first = await stub.AcknowledgeNotifications(request, metadata=ANN)
    again = await stub.AcknowledgeNotifications(request, metadata=ANN)
    assert (first.notifications[0].HasField("read_time"), first) == (True, again)
    unread = await stub.ListNotifications(notify_pb2.ListNotificationsRequest(only_unread=True), metadata=ANN)
    assert ([n.event_id for n in unread.notifications], unread.unread_count) == (["b"], 1)


async def test_invalid_request_is_explained_and_has_no_effect(
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


async def test_old_notifications_are_deleted_but_their_numbers_are_not_reused(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    await store.add([draft("a"), draft("b")])
    assert await store.forget(older_than_seconds=3600, limit=10) == 0
    assert await store.forget(older_than_seconds=-1, limit=10) == 2
    await store.add([draft("c")])
    assert await listed(stub) == [3]


async def test_conversation_is_waiting_while_one_of_its_runs_waits_for_a_user(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    """ASYNC-5: its user is then notified when its jobs end."""
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
    resolved = ResolvedNeed(
        store_id=StoreId("acme"), run_id=parked.run_id, time=parked.create_time + timedelta(seconds=1)
    )
    await store.mark_resolved([resolved])
    assert await store.waiting(asked) == set()


ACME = StoreId("acme")
STORE = (("pawl-store", "acme"), ("pawl-user", "ann"))
APPROVER = (*STORE, ("pawl-roles", "approver"))
MEMBER = (*STORE, ("pawl-roles", "member,operator"))


async def listed_of_approvers(stub: NotifyServiceAsyncStub, metadata: Any) -> notify_pb2.ListNotificationsResponse:
    return await stub.ListNotifications(notify_pb2.ListNotificationsRequest(), metadata=metadata)


@pytest.fixture
def request_of(draft: Callable[..., Draft]) -> Callable[[str], Draft]:
    def make(event: str) -> Draft:
        return replace(draft(event), kind=NotificationKind.APPROVAL_NEEDED, call_id=CallId("call_1"))

    return make


async def test_reader_with_an_approving_role_is_an_approver(store: PostgresStore, stub: NotifyServiceAsyncStub) -> None:
    await listed_of_approvers(stub, MEMBER)
    assert await store.approvers([ACME]) == {ACME: []}
    for metadata in (APPROVER, APPROVER, (("pawl-store", "acme"), ("pawl-user", "bob"), ("pawl-roles", "admin"))):
        await listed_of_approvers(stub, metadata)
    found = await store.approvers([ACME, StoreId("other")])
    assert {store_id: set(users) for store_id, users in found.items()} == {ACME: {"ann", "bob"}, "other": set()}


async def test_notifications_for_approvers_are_hidden_without_the_role(
    store: PostgresStore,
    stub: NotifyServiceAsyncStub,
    draft: Callable[..., Draft],
    request_of: Callable[[str], Draft],
) -> None:
    """A user who has lost the role sees no more calls of others."""
    await store.add([draft("a"), request_of("b")])
    shown = await listed_of_approvers(stub, APPROVER)
    assert [(one.event_id, one.call_id) for one in shown.notifications] == [("b", "call_1"), ("a", "")]
    assert (shown.notifications[0].kind, shown.unread_count) == (notify_pb2.NOTIFICATION_KIND_APPROVAL_NEEDED, 2)
    shown = await listed_of_approvers(stub, MEMBER)
    assert ([one.event_id for one in shown.notifications], shown.unread_count) == (["a"], 1)
    unread = notify_pb2.ListNotificationsRequest(only_unread=True)
    assert len((await stub.ListNotifications(unread, metadata=MEMBER)).notifications) == 1
    request = notify_pb2.AcknowledgeNotificationsRequest(notification_ids=[request_of("b").notification_id])
    assert await reason_of(stub.AcknowledgeNotifications(request, metadata=MEMBER)) == "NOTIFICATION_NOT_FOUND"
    assert (await stub.AcknowledgeNotifications(request, metadata=APPROVER)).notifications[0].HasField("read_time")


async def test_subscriber_without_the_role_gets_only_other_notifications(
    store: PostgresStore,
    stub: NotifyServiceAsyncStub,
    draft: Callable[..., Draft],
    request_of: Callable[[str], Draft],
) -> None:
    await store.add([request_of("a"), draft("b")])
    for metadata, events in ((APPROVER, ["a", "b"]), (MEMBER, ["b"])):
        stream = stub.Subscribe(notify_pb2.SubscribeRequest(), metadata=metadata)
        found: list[str] = []
        async for response in stream:
            if response.HasField("notification"):
                found.append(response.notification.event_id)
            elif len(found) >= len(events):
                break  # Nothing follows them. A heartbeat may come earlier, during the lookup.
        assert found == events


Stream = grpc.aio.UnaryStreamCall[notify_pb2.SubscribeRequest, notify_pb2.SubscribeResponse]


def subscribe(stub: NotifyServiceAsyncStub, **request: object) -> Stream:
    return stub.Subscribe(notify_pb2.SubscribeRequest(**request), metadata=ANN)  # type: ignore[arg-type]


async def read(stream: Stream, count: int) -> list[int]:
    """Return the numbers of the next `count` notifications, skipping heartbeats."""
    numbers: list[int] = []
    async with asyncio.timeout(60):
        while len(numbers) < count:
            response = await stream.read()
            assert isinstance(response, notify_pb2.SubscribeResponse)
            if response.HasField("notification"):
                numbers.append(response.notification.number)
    return numbers


async def test_subscription_sends_past_notifications_first(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    """Only the poll finds the second notification, because there is no bus."""
    await store.add([draft("a"), draft("b")])
    stream = subscribe(stub, after_number=1)
    assert await read(stream, 1) == [2]
    await store.add([draft("c"), draft("x", user="bob")])
    assert await read(stream, 1) == [3]


async def test_long_history_is_sent_completely_and_in_order(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    count = 2 * PAGE + 1
    await store.add([draft(f"e{number}") for number in range(count)])
    assert await read(subscribe(stub), count) == list(range(1, count + 1))


async def test_a_subscription_for_new_notifications_omits_past_notifications(
    store: PostgresStore, stub: NotifyServiceAsyncStub, subscriptions: Subscriptions, draft: Callable[..., Draft]
) -> None:
    await store.add([draft("a")])
    stream = subscribe(stub, only_new=True)
    assert await stream.read() == notify_pb2.SubscribeResponse()  # The heartbeat confirms that the subscription is open
    await store.add([draft("b")])
    subscriptions.wake(draft("b").inbox)
    assert await read(stream, 1) == [2]


async def test_idle_subscription_sends_heartbeats(stub: NotifyServiceAsyncStub) -> None:
    stream = subscribe(stub)
    assert [await stream.read(), await stream.read()] == [notify_pb2.SubscribeResponse()] * 2


@dataclass
class DeafContext:
    """A client that reads two messages and then stops."""

    taken: int = 0

    async def write(self, message: notify_pb2.SubscribeResponse) -> None:
        if self.taken == 2:
            await asyncio.Event().wait()
        self.taken += 1


async def test_slow_subscriber_is_disconnected_with_the_position_to_resume(
    store: PostgresStore, subscriptions: Subscriptions, draft: Callable[..., Draft]
) -> None:
    await store.add([draft("a"), draft("b"), draft("c")])
    auth.set_principal(auth.Principal(store_id=StoreId("acme"), user_id=UserId("ann")))
    notify = Notify(store, subscriptions, write_seconds_max=0.05)
    error = await raises(SlowConsumer, notify.Subscribe(notify_pb2.SubscribeRequest(), DeafContext()))  # type: ignore[arg-type]
    assert error.metadata == {"resume_after_seq": "2"}


ANNS = Inbox(store_id=StoreId("acme"), user_id=UserId("ann"))
OTHER = Inbox(store_id=StoreId("other"), user_id=UserId("ann"))
PART = ErasurePart(
    store_id=StoreId("acme"), conversation_id=ConversationId("conv_1"), run_ids=["run_1"], call_ids=["call_1"]
)


async def titles(store: PostgresStore, inbox: Inbox) -> list[str]:
    return [each.title for each in await store.read_after(inbox, 0, approves=True, limit=10)]


async def test_erased_conversation_has_no_notifications_and_gets_no_new_ones(
    store: PostgresStore, draft: Callable[..., Draft]
) -> None:
    """I13: this includes approval notifications, whose previews have arguments."""
    request = replace(draft("request"), kind=NotificationKind.APPROVAL_NEEDED)
    await store.add([draft("a"), draft("b", store="other"), request])
    for _ in range(2):
        await store.erase(PART)
    assert (await store.add([draft("c"), draft("d", store="other")]), await titles(store, ANNS)) == ((1, 0), [])
    assert await titles(store, OTHER) == ["About b", "About d"]


async def test_unreadable_notification_does_not_delay_others(
    store: PostgresStore, database: Database, draft: Callable[..., Draft]
) -> None:
    await store.add([draft("a"), draft("b", store="other")])
    await database.execute("UPDATE notifier.notifications SET kind = 'future' WHERE store_id = 'acme'")
    for expected in (["other"], []):
        async with store.unpublished(limit=10) as found:
            assert [each.store_id for each in found] == expected
