from __future__ import annotations

from typing import Any

from pawl.notify.v1 import channel_pb2 as pb
from pawl.notify.v1 import notify_pb2
from pawl.server.db.database import Database
from tests.poll import until
from tests.rpc.stubs import ChannelServiceAsyncStub, NotifyServiceAsyncStub
from tests.web_server import WebServer

DELIVERED, DEAD, WAITING, SKIPPED = (
    pb.CHANNEL_DELIVERY_STATE_DELIVERED,
    pb.CHANNEL_DELIVERY_STATE_DEAD,
    pb.CHANNEL_DELIVERY_STATE_WAITING,
    pb.CHANNEL_DELIVERY_STATE_SKIPPED,
)
ANN = (("pawl-store", "acme"), ("pawl-user", "ann"))
BOB = (("pawl-store", "acme"), ("pawl-user", "bob"))
ANN_ELSEWHERE = (("pawl-store", "other"), ("pawl-user", "ann"))
URL = "https://example.com/hook"
_AT_WORK = "SELECT count(*) FROM notifier.webhook_deliveries WHERE claimed OR due_time <= now()"


async def created(
    channels: ChannelServiceAsyncStub, url: str = URL, *, request_id: str = "", **fields: object
) -> pb.CreateChannelResponse:
    channel = pb.Channel(url=url, **fields)  # type: ignore[arg-type]
    return await channels.CreateChannel(pb.CreateChannelRequest(channel=channel, request_id=request_id), metadata=ANN)


class Desk:
    def __init__(
        self,
        stub: ChannelServiceAsyncStub,
        inboxes: NotifyServiceAsyncStub,
        receiver: WebServer,
        database: Database,
    ) -> None:
        self.stub = stub
        self.inboxes = inboxes
        self.receiver = receiver
        self.database = database

    async def hook(self, path: str = "/", host: str = "127.0.0.1", **fields: Any) -> tuple[str, str]:
        made = await created(self.stub, f"http://{host}:{self.receiver.port}{path}", **fields)
        return made.channel.channel_id, made.secret

    async def channel(self, channel_id: str) -> pb.Channel:
        return (await self.stub.GetChannel(pb.GetChannelRequest(channel_id=channel_id), metadata=ANN)).channel

    async def deliveries(self, channel_id: str) -> list[pb.ChannelDelivery]:
        request = pb.ListDeliveriesRequest(channel_id=channel_id)
        return list((await self.stub.ListDeliveries(request, metadata=ANN)).deliveries)

    async def delivery(self, channel_id: str, *, tries: int) -> pb.ChannelDelivery:
        async def has_ended() -> bool:
            (each,) = await self.deliveries(channel_id)
            return each.tries == tries and await self.is_idle()

        await until(has_ended)
        (found,) = await self.deliveries(channel_id)
        return found

    async def settled_delivery(self, channel_id: str) -> pb.ChannelDelivery:
        await until(self.is_idle)
        (found,) = await self.deliveries(channel_id)
        return found

    async def is_idle(self) -> bool:
        return bool(await self.database.fetchval(_AT_WORK) == 0)

    async def change(self, channel_id: str, **fields: Any) -> pb.Channel:
        request = pb.UpdateChannelRequest(channel_id=channel_id, **fields)
        return (await self.stub.UpdateChannel(request, metadata=ANN)).channel

    async def resend(self, delivery: pb.ChannelDelivery) -> pb.ChannelDelivery:
        request = pb.ResendDeliveryRequest(delivery_id=delivery.delivery_id)
        return (await self.stub.ResendDelivery(request, metadata=ANN)).delivery

    async def test(self, channel_id: str) -> pb.ChannelDelivery:
        return (await self.stub.TestChannel(pb.TestChannelRequest(channel_id=channel_id), metadata=ANN)).delivery

    async def inbox(self) -> list[notify_pb2.Notification]:
        request = notify_pb2.ListNotificationsRequest()
        return list((await self.inboxes.ListNotifications(request, metadata=ANN)).notifications)

    async def hurry(self) -> None:
        await self.database.execute("UPDATE notifier.webhook_deliveries SET due_time = now() WHERE due_time > now()")
