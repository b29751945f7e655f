"""Implements ChannelService: creates, changes, confirms and tests a user's channels."""

from __future__ import annotations

import base64
import hashlib
import re
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Final

from pawl.chassis.identity.auth import Principal, require_user
from pawl.chassis.ids import IdSource, check_id
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.kinds import Context
from pawl.chassis.rpc.translate import Exceptions
from pawl.errors import InvalidField, InvalidPageToken
from pawl.notifier.channels.rules import UNCONFIRMED, Channel, ChannelChange, ChannelId, ChannelKind, checked
from pawl.notifier.channels.store import PostgresChannels
from pawl.notifier.deliveries.rules import EMAIL_HOST, DeliveryId, DeliveryState, OwnDelivery
from pawl.notifier.inbox.rpc import WIRE, caller_inbox, page_size, several_ids
from pawl.notifier.inbox.rules import Inbox
from pawl.notify.v1 import channel_pb2 as pb
from pawl.notify.v1 import channel_pb2_grpc
from pawl.server.egress.client import Egress
from pawl.server.egress.policy import EgressRefused, read_target

SECRET_BYTES: Final = 32
_PREFIXES: Final = {ChannelKind.WEBHOOK: "hook", ChannelKind.EMAIL: "mail"}
_CHANNEL: Final = WIRE.struct(Channel, pb.Channel, field="channel")
_CHANGE: Final = WIRE.struct(ChannelChange, pb.UpdateChannelRequest, Exceptions(of_message=("validate_only",)))
_STATES: Final = WIRE.enum(DeliveryState, pb.ChannelDeliveryState, field="states")
_TOKEN: Final = re.compile(r"deliveries-([0-9]{1,16})-([A-Za-z0-9_-]{1,64})")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


class ChannelServicer(channel_pb2_grpc.ChannelServiceServicer):
    """Implements ChannelService. `on_due` is called when a delivery is due immediately."""

    def __init__(
        self,
        repository: PostgresChannels,
        egress: Egress,
        clock: Clock,
        ids: IdSource,
        *,
        sends_email: bool,
        on_due: Callable[[], None],
    ) -> None:
        self._repository = repository
        self._egress = egress
        self._clock = clock
        self._ids = ids
        self._sends_email = sends_email
        self._on_due = on_due

    async def CreateChannel(self, request: pb.CreateChannelRequest, context: Context) -> pb.CreateChannelResponse:
        request_id = check_id(request.request_id, "request_id", optional=True)
        requested = _saved_by(require_user(), checked(_CHANNEL.read(request.channel)))
        inbox = caller_inbox()
        host = self._host(inbox, requested)
        channel_id = ChannelId(self._ids.new(_PREFIXES[requested.kind]))
        channel = replace(requested, channel_id=channel_id, enabled=True, disable_reason="", create_time=self._now())
        secret = secrets.token_bytes(SECRET_BYTES)
        terms = repr((requested.name, requested.url, [kind.value for kind in requested.kinds], requested.after_seconds))
        stored = await self._repository.create(
            inbox,
            channel,
            host=host,
            secret=secret,
            request_id=request_id,
            request_hash=hashlib.sha256(terms.encode()).digest(),
            code=self._own(channel_id),
            validate_only=request.validate_only,
            created_before=request.created_before if request.validate_only else 0,
        )
        self._on_due()
        is_new = stored.channel_id == channel_id and not request.validate_only
        has_secret = is_new and requested.kind is ChannelKind.WEBHOOK
        return pb.CreateChannelResponse(channel=_CHANNEL.fields(stored), secret=_text(secret) if has_secret else "")

    async def GetChannel(self, request: pb.GetChannelRequest, context: Context) -> pb.GetChannelResponse:
        channel = await self._repository.channel(caller_inbox(), _id(request.channel_id))
        return pb.GetChannelResponse(channel=_CHANNEL.fields(channel))

    async def ListChannels(self, request: pb.ListChannelsRequest, context: Context) -> pb.ListChannelsResponse:
        return pb.ListChannelsResponse(channels=map(_CHANNEL.fields, await self._repository.channels(caller_inbox())))

    async def UpdateChannel(self, request: pb.UpdateChannelRequest, context: Context) -> pb.UpdateChannelResponse:
        channel_id, caller, inbox = _id(request.channel_id), require_user(), caller_inbox()
        change = _CHANGE.read(request)

        def changed(before: Channel) -> tuple[Channel, str]:
            requested = _saved_by(caller, checked(change.of(before)))
            if requested.kind is not before.kind:
                raise InvalidField(
                    f"url: a channel's kind ({before.kind}) cannot be changed: create another channel", field="url"
                )
            if requested.kind is ChannelKind.EMAIL:
                return self._changed_email(before, requested), EMAIL_HOST
            stays = requested.url == before.url and not requested.enabled
            return requested, read_target(requested.url).host if stays else self._host(inbox, requested)

        stored = await self._repository.update(
            inbox, channel_id, changed, code=self._own(channel_id), validate_only=request.validate_only
        )
        self._on_due()
        return pb.UpdateChannelResponse(channel=_CHANNEL.fields(stored))

    async def DeleteChannel(self, request: pb.DeleteChannelRequest, context: Context) -> pb.DeleteChannelResponse:
        await self._repository.delete(caller_inbox(), _id(request.channel_id))
        return pb.DeleteChannelResponse()

    async def SendChannelCode(self, request: pb.SendChannelCodeRequest, context: Context) -> pb.SendChannelCodeResponse:
        channel_id, inbox = _id(request.channel_id), caller_inbox()
        self._check_email()
        await self._repository.send_code(inbox, self._own(channel_id))
        self._on_due()
        return pb.SendChannelCodeResponse()

    async def ConfirmChannel(self, request: pb.ConfirmChannelRequest, context: Context) -> pb.ConfirmChannelResponse:
        channel = await self._repository.confirm(caller_inbox(), _id(request.channel_id), request.code)
        return pb.ConfirmChannelResponse(channel=_CHANNEL.fields(channel))

    async def UnsubscribeChannel(
        self, request: pb.UnsubscribeChannelRequest, context: Context
    ) -> pb.UnsubscribeChannelResponse:
        await self._repository.unsubscribe(require_user().store_id, request.token)
        self._on_due()
        return pb.UnsubscribeChannelResponse()

    async def RotateChannelSecret(
        self, request: pb.RotateChannelSecretRequest, context: Context
    ) -> pb.RotateChannelSecretResponse:
        inbox, channel_id = caller_inbox(), _id(request.channel_id)
        if (await self._repository.channel(inbox, channel_id)).kind is not ChannelKind.WEBHOOK:
            raise InvalidField("only webhook channels have a secret", field="channel_id")
        secret = secrets.token_bytes(SECRET_BYTES)
        await self._repository.rotate(inbox, channel_id, secret)
        return pb.RotateChannelSecretResponse(secret=_text(secret))

    async def TestChannel(self, request: pb.TestChannelRequest, context: Context) -> pb.TestChannelResponse:
        inbox, channel_id = caller_inbox(), _id(request.channel_id)
        channel = await self._repository.channel(inbox, channel_id)
        if channel.kind is ChannelKind.EMAIL and channel.confirm_time is None:
            raise InvalidField(UNCONFIRMED, field="channel_id")
        test = await self._repository.add_test(inbox, self._own(channel_id))
        self._on_due()
        return pb.TestChannelResponse(delivery=test)

    async def ListDeliveries(self, request: pb.ListDeliveriesRequest, context: Context) -> pb.ListDeliveriesResponse:
        size, before, inbox = page_size(request.page_size), _position(request.page_token), caller_inbox()
        channel_id = ChannelId(check_id(request.channel_id, "channel_id", optional=True))
        states = [_STATES.read(state) for state in request.states]
        found = await self._repository.deliveries(inbox, channel_id, states, before, limit=size + 1)
        page, token = found[:size], ""
        if len(found) > size:
            token = f"deliveries-{page[-1].create_time.ToMicroseconds()}-{page[-1].delivery_id}"
        counts = () if request.page_token else await self._repository.count_deliveries(inbox, channel_id)
        return pb.ListDeliveriesResponse(deliveries=page, next_page_token=token, counts=counts)

    async def ResendDelivery(self, request: pb.ResendDeliveryRequest, context: Context) -> pb.ResendDeliveryResponse:
        (delivery,) = await self._resend([check_id(request.delivery_id, "delivery_id")])
        return pb.ResendDeliveryResponse(delivery=delivery)

    async def ResendDeliveries(
        self, request: pb.ResendDeliveriesRequest, context: Context
    ) -> pb.ResendDeliveriesResponse:
        deliveries = await self._resend(several_ids(request.delivery_ids, "delivery_ids"))
        return pb.ResendDeliveriesResponse(deliveries=deliveries)

    async def _resend(self, delivery_ids: Sequence[str]) -> Sequence[pb.ChannelDelivery]:
        stored = await self._repository.resend(caller_inbox(), list(map(DeliveryId, delivery_ids)))
        self._on_due()
        return stored

    def _changed_email(self, before: Channel, requested: Channel) -> Channel:
        """Return a changed e-mail channel.

        If the address is new, the channel is disabled until the address is confirmed.
        """
        if requested.url != before.url:
            self._check_email()
            return replace(requested, enabled=False)
        if requested.enabled and before.confirm_time is None:
            raise InvalidField(f"{UNCONFIRMED}: confirm it to enable the channel", field="enabled")
        return requested

    def _host(self, inbox: Inbox, channel: Channel) -> str:
        if channel.kind is ChannelKind.EMAIL:
            self._check_email()
            return EMAIL_HOST
        try:
            self._egress.check(inbox.store_id, channel.url, with_secrets=True)
            return read_target(channel.url).host
        except EgressRefused as refused:
            advice = "; use https" if channel.url.lower().startswith("http:") else ""
            raise InvalidField(f"url: {refused}{advice}", field="channel.url") from None

    def _check_email(self) -> None:
        if not self._sends_email:
            raise InvalidField("the deployment cannot send e-mail: no mail server is configured", field="channel.url")

    def _own(self, channel_id: ChannelId) -> OwnDelivery:
        return OwnDelivery(
            delivery_id=DeliveryId(self._ids.new("dlv")),
            channel_id=channel_id,
            create_time=self._now(),
            secret=secrets.token_bytes(SECRET_BYTES),
        )

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.now(), UTC)


def _saved_by(caller: Principal, channel: Channel) -> Channel:
    return replace(channel, credential_id=caller.credential_id, delegate_user_id=caller.delegate_user_id)


def _id(channel_id: str) -> ChannelId:
    return ChannelId(check_id(channel_id, "channel_id"))


def _text(secret: bytes) -> str:
    return f"whsec_{base64.b64encode(secret).decode()}"


def _position(token: str) -> tuple[datetime, str] | None:
    if not token:
        return None
    match = _TOKEN.fullmatch(token)
    if match is None:
        raise InvalidPageToken
    return _EPOCH + timedelta(microseconds=int(match[1])), match[2]
