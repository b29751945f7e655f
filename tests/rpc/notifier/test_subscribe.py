"""Following an inbox: the past, then what comes, each once, from any replica."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
import pytest

from pawl.chassis import auth
from pawl.chassis.ids import StoreId, UserId
from pawl.errors import SlowConsumer
from pawl.notifier.adapters.postgres import PostgresStore
from pawl.notifier.app.subscription import PAGE, Subscriptions
from pawl.notifier.domain.notification import Draft
from pawl.notifier.rpc.servicer import Notify
from pawl.notify.v1 import notify_pb2

if TYPE_CHECKING:
    from pawl.notify.v1.notify_pb2_grpc import NotifyServiceAsyncStub

ANN = (("pawl-store", "acme"), ("pawl-user", "ann"))

Stream = grpc.aio.UnaryStreamCall[notify_pb2.SubscribeRequest, notify_pb2.SubscribeResponse]


def subscribe(stub: NotifyServiceAsyncStub, **request: object) -> Stream:
    return stub.Subscribe(notify_pb2.SubscribeRequest(**request), metadata=ANN)  # type: ignore[arg-type]


async def read(stream: Stream, count: int) -> list[int]:
    """The numbers of the next `count` notifications; heartbeats are passed over."""
    numbers: list[int] = []
    async with asyncio.timeout(60):
        while len(numbers) < count:
            response = await stream.read()
            assert isinstance(response, notify_pb2.SubscribeResponse)
            if response.HasField("notification"):
                numbers.append(response.notification.number)
    return numbers


async def test_the_past_comes_first_then_what_is_new(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    """The second notification is found by the poll alone: no bus is there to wake anybody."""
    await store.add([draft("a"), draft("b")])
    stream = subscribe(stub, after_number=1)
    assert await read(stream, 1) == [2]
    await store.add([draft("c"), draft("x", user="bob")])
    assert await read(stream, 1) == [3]


async def test_a_long_past_comes_whole_and_in_order(
    store: PostgresStore, stub: NotifyServiceAsyncStub, draft: Callable[..., Draft]
) -> None:
    count = 2 * PAGE + 1
    await store.add([draft(f"e{number}") for number in range(count)])
    assert await read(subscribe(stub), count) == list(range(1, count + 1))


async def test_with_only_new_the_past_is_left_out(
    store: PostgresStore, stub: NotifyServiceAsyncStub, subscriptions: Subscriptions, draft: Callable[..., Draft]
) -> None:
    await store.add([draft("a")])
    stream = subscribe(stub, only_new=True)
    assert await stream.read() == notify_pb2.SubscribeResponse()  # The heartbeat says that it stands.
    await store.add([draft("b")])
    subscriptions.wake(draft("b").inbox)
    assert await read(stream, 1) == [2]


async def test_silence_is_filled_with_heartbeats(stub: NotifyServiceAsyncStub) -> None:
    stream = subscribe(stub)
    assert [await stream.read(), await stream.read()] == [notify_pb2.SubscribeResponse()] * 2


class DeafContext:
    """A client that takes two messages and then reads no more."""

    def __init__(self) -> None:
        self.taken = 0

    async def write(self, message: notify_pb2.SubscribeResponse) -> None:
        if self.taken == 2:
            await asyncio.Event().wait()
        self.taken += 1


async def test_a_follower_that_does_not_read_is_cut_off_and_told_where_to_go_on(
    store: PostgresStore, subscriptions: Subscriptions, draft: Callable[..., Draft]
) -> None:
    await store.add([draft("a"), draft("b"), draft("c")])
    auth.set_principal(auth.Principal(store_id=StoreId("acme"), user_id=UserId("ann")))
    notify = Notify(store, subscriptions, write_seconds_max=0.05)
    with pytest.raises(SlowConsumer) as caught:
        await notify.Subscribe(notify_pb2.SubscribeRequest(), DeafContext())  # type: ignore[arg-type]
    assert caught.value.metadata == {"resume_after_seq": "2"}


async def test_a_follower_that_leaves_is_forgotten(stub: NotifyServiceAsyncStub, subscriptions: Subscriptions) -> None:
    """I19."""
    stream = subscribe(stub)
    await stream.read()
    assert subscriptions._count == 1
    stream.cancel()
    async with asyncio.timeout(60):
        while subscriptions._count or subscriptions._followers:
            await asyncio.sleep(0.01)
