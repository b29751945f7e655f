"""ChannelService."""

from __future__ import annotations

import base64
import re
from datetime import UTC, datetime, timedelta
from typing import Final

from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import check_id
from pawl.chassis.rpc.kinds import Context
from pawl.errors import InvalidPageToken
from pawl.notifier.channels.channels import Channels
from pawl.notifier.channels.rules import Channel, ChannelChange, ChannelId
from pawl.notifier.channels.store import PostgresChannels
from pawl.notifier.deliveries.rules import DeliveryId, DeliveryState
from pawl.notifier.inbox.convert import WIRE, caller_inbox, page_size, several_ids
from pawl.notify.v1 import channel_pb2 as pb
from pawl.notify.v1 import channel_pb2_grpc

_CHANNEL: Final = WIRE.struct(Channel, pb.Channel, field="channel")
_CHANGE: Final = WIRE.struct(ChannelChange, pb.UpdateChannelRequest)
_STATES: Final = WIRE.enum(DeliveryState, pb.ChannelDeliveryState, field="states")
_TOKEN: Final = re.compile(r"deliveries-([0-9]{1,16})-([A-Za-z0-9_-]{1,64})")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class ChannelServicer(channel_pb2_grpc.ChannelServiceServicer):
    """Serves a user's own channels, and the links that end them; the credential says whose."""

    def __init__(self, channels: Channels, repository: PostgresChannels) -> None:
        self._channels = channels
        self._repository = repository

    async def CreateChannel(self, request: pb.CreateChannelRequest, context: Context) -> pb.CreateChannelResponse:
        request_id = check_id(request.request_id, "request_id", optional=True)
        channel, secret = await self._channels.create(require_user(), _CHANNEL.read(request.channel), request_id)
        return pb.CreateChannelResponse(channel=_CHANNEL.fields(channel), secret=_text(secret))

    async def GetChannel(self, request: pb.GetChannelRequest, context: Context) -> pb.GetChannelResponse:
        channel = await self._repository.channel(caller_inbox(), _id(request.channel_id))
        return pb.GetChannelResponse(channel=_CHANNEL.fields(channel))

    async def ListChannels(self, request: pb.ListChannelsRequest, context: Context) -> pb.ListChannelsResponse:
        return pb.ListChannelsResponse(channels=map(_CHANNEL.fields, await self._repository.channels(caller_inbox())))

    async def UpdateChannel(self, request: pb.UpdateChannelRequest, context: Context) -> pb.UpdateChannelResponse:
        _id(request.channel_id)
        channel = await self._channels.update(require_user(), _CHANGE.read(request))
        return pb.UpdateChannelResponse(channel=_CHANNEL.fields(channel))

    async def DeleteChannel(self, request: pb.DeleteChannelRequest, context: Context) -> pb.DeleteChannelResponse:
        await self._repository.delete(caller_inbox(), _id(request.channel_id))
        return pb.DeleteChannelResponse()

    async def SendChannelCode(self, request: pb.SendChannelCodeRequest, context: Context) -> pb.SendChannelCodeResponse:
        await self._channels.send_code(caller_inbox(), _id(request.channel_id))
        return pb.SendChannelCodeResponse()

    async def ConfirmChannel(self, request: pb.ConfirmChannelRequest, context: Context) -> pb.ConfirmChannelResponse:
        channel = await self._repository.confirm(caller_inbox(), _id(request.channel_id), request.code)
        return pb.ConfirmChannelResponse(channel=_CHANNEL.fields(channel))

    async def UnsubscribeChannel(
        self, request: pb.UnsubscribeChannelRequest, context: Context
    ) -> pb.UnsubscribeChannelResponse:
        await self._channels.unsubscribe(require_user().store_id, request.token)
        return pb.UnsubscribeChannelResponse()

    async def RotateChannelSecret(
        self, request: pb.RotateChannelSecretRequest, context: Context
    ) -> pb.RotateChannelSecretResponse:
        secret = await self._channels.rotate(caller_inbox(), _id(request.channel_id))
        return pb.RotateChannelSecretResponse(secret=_text(secret))

    async def TestChannel(self, request: pb.TestChannelRequest, context: Context) -> pb.TestChannelResponse:
        test = await self._channels.test(caller_inbox(), _id(request.channel_id))
        return pb.TestChannelResponse(delivery=test)

    async def ListDeliveries(self, request: pb.ListDeliveriesRequest, context: Context) -> pb.ListDeliveriesResponse:
        size, before, inbox = page_size(request.page_size), _place(request.page_token), caller_inbox()
        channel_id = ChannelId(check_id(request.channel_id, "channel_id", optional=True))
        states = [_STATES.read(state) for state in request.states]
        found = await self._repository.deliveries(inbox, channel_id, states, before, limit=size + 1)
        page = found[:size]
        token = _token(page[-1]) if len(found) > size else ""
        counts = () if request.page_token else await self._repository.count_deliveries(inbox, channel_id)
        return pb.ListDeliveriesResponse(deliveries=page, next_page_token=token, counts=counts)

    async def ResendDelivery(self, request: pb.ResendDeliveryRequest, context: Context) -> pb.ResendDeliveryResponse:
        delivery_id = DeliveryId(check_id(request.delivery_id, "delivery_id"))
        (delivery,) = await self._channels.resend(caller_inbox(), [delivery_id])
        return pb.ResendDeliveryResponse(delivery=delivery)

    async def ResendDeliveries(
        self, request: pb.ResendDeliveriesRequest, context: Context
    ) -> pb.ResendDeliveriesResponse:
        ids = [DeliveryId(each) for each in several_ids(request.delivery_ids, "delivery_ids")]
        deliveries = await self._channels.resend(caller_inbox(), ids)
        return pb.ResendDeliveriesResponse(deliveries=deliveries)


def _id(channel_id: str) -> ChannelId:
    return ChannelId(check_id(channel_id, "channel_id"))


def _text(secret: bytes) -> str:
    return f"whsec_{base64.b64encode(secret).decode()}" if secret else ""


def _token(last: pb.ChannelDelivery) -> str:
    return f"deliveries-{last.create_time.ToMicroseconds()}-{last.delivery_id}"


def _place(token: str) -> tuple[datetime, str] | None:
    """Return the time and id of the last delivery of the page before; None for the first page."""
    if not token:
        return None
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise InvalidPageToken
    return _EPOCH + timedelta(microseconds=int(match[1])), match[2]
