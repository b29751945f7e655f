"""Approvers: who is one, and who is shown what is for them (HITL-4)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from pawl.chassis.database import Database
from pawl.chassis.ids import CallId, StoreId
from pawl.notifier.adapters.postgres import PostgresStore
from pawl.notifier.domain.notification import Draft, NotificationKind
from pawl.notify.v1 import notify_pb2
from tests.rpc.notifier.test_inbox import reason_of

if TYPE_CHECKING:
    from pawl.notify.v1.notify_pb2_grpc import NotifyServiceAsyncStub

ACME = StoreId("acme")
STORE = (("pawl-store", "acme"), ("pawl-user", "ann"))
APPROVER = (*STORE, ("pawl-roles", "approver"))
MEMBER = (*STORE, ("pawl-roles", "member,operator"))


async def listed(stub: NotifyServiceAsyncStub, metadata: Any) -> notify_pb2.ListNotificationsResponse:
    return await stub.ListNotifications(notify_pb2.ListNotificationsRequest(), metadata=metadata)


@pytest.fixture
def request_of(draft: Callable[..., Draft]) -> Callable[[str], Draft]:
    """Makes notifications for approvers."""

    def make(event: str) -> Draft:
        return replace(draft(event), kind=NotificationKind.APPROVAL_NEEDED, call_id=CallId("call_1"))

    return make


async def test_who_reads_with_a_role_that_approves_is_an_approver(
    store: PostgresStore, stub: NotifyServiceAsyncStub
) -> None:
    await listed(stub, MEMBER)
    assert await store.approvers([ACME]) == {ACME: []}
    for metadata in (APPROVER, APPROVER, (("pawl-store", "acme"), ("pawl-user", "bob"), ("pawl-roles", "admin"))):
        await listed(stub, metadata)
    found = await store.approvers([ACME, StoreId("other")])
    assert {store_id: set(users) for store_id, users in found.items()} == {ACME: {"ann", "bob"}, "other": set()}


async def test_without_the_role_what_is_for_approvers_is_not_there(
    store: PostgresStore,
    stub: NotifyServiceAsyncStub,
    draft: Callable[..., Draft],
    request_of: Callable[[str], Draft],
) -> None:
    """Who has lost the role learns nothing more of calls of others."""
    await store.add([draft("a"), request_of("b")])
    shown = await listed(stub, APPROVER)
    assert [(one.event_id, one.call_id) for one in shown.notifications] == [("b", "call_1"), ("a", "")]
    assert shown.notifications[0].kind == notify_pb2.NOTIFICATION_KIND_APPROVAL_NEEDED
    assert shown.unread_count == 2
    shown = await listed(stub, MEMBER)
    assert [one.event_id for one in shown.notifications] == ["a"]
    assert shown.unread_count == 1
    unread = notify_pb2.ListNotificationsRequest(only_unread=True)
    assert len((await stub.ListNotifications(unread, metadata=MEMBER)).notifications) == 1
    request = notify_pb2.AcknowledgeNotificationsRequest(notification_ids=[request_of("b").notification_id])
    assert await reason_of(stub.AcknowledgeNotifications(request, metadata=MEMBER)) == "NOTIFICATION_NOT_FOUND"
    assert (await stub.AcknowledgeNotifications(request, metadata=APPROVER)).notifications[0].HasField("read_time")


async def test_a_subscriber_without_the_role_is_sent_the_others_only(
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
                break  # Nothing comes after them. A heartbeat may also come before, while they are looked up.
        assert found == events


async def test_the_version_before_reads_the_rows_too(
    store: PostgresStore, request_of: Callable[[str], Draft], database_url: str
) -> None:
    """I23: it knows no kind for approvers, and would fail at it."""
    await store.add([request_of("a")])
    async with Database(database_url, application_name="test") as database:
        assert await database.fetchval("SELECT kind FROM notifier.notifications") == "input_needed"
