"""A user's channels: made, changed, confirmed and tested."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from pawl.chassis.egress.policy import EgressRefused, read_target
from pawl.chassis.egress.request import Egress
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import IdSource, StoreId
from pawl.chassis.process.clock import Clock
from pawl.errors import InvalidField
from pawl.notifier.channels.rules import UNCONFIRMED, Channel, ChannelChange, ChannelId, ChannelKind, checked
from pawl.notifier.channels.store import PostgresChannels
from pawl.notifier.deliveries.rules import (
    CODE,
    EMAIL_PLACE,
    TEST,
    DeliveryId,
    NewChannel,
    NewCode,
    OwnDelivery,
    body_of_own,
)
from pawl.notifier.inbox.rules import Inbox
from pawl.notify.v1 import channel_pb2

SECRET_BYTES: Final = 32
_PREFIXES: Final = {ChannelKind.WEBHOOK: "hook", ChannelKind.EMAIL: "mail"}


class Channels:
    """The use cases of channels; `on_due` is called where a delivery is to be sent now."""

    def __init__(
        self,
        repository: PostgresChannels,
        egress: Egress,
        clock: Clock,
        ids: IdSource,
        *,
        sends_email: bool,
        on_due: Callable[[], None],
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._repository = repository
        self._egress = egress
        self._clock = clock
        self._ids = ids
        self._sends_email = sends_email
        self._on_due = on_due
        self._random_bytes = random_bytes

    async def create(self, caller: Principal, asked: Channel, request_id: str) -> tuple[Channel, bytes]:
        """Make a channel, once for a request id; returns the secret of a webhook too, which is empty if it was there.

        Raises:
            InvalidField: it has no meaning, its URL is not allowed, or there are too many channels, or codes.
            RequestIdReused: the request made another channel.
        """
        inbox, asked = Inbox.of(caller), _saved_by(caller, checked(asked))
        host = self._host(inbox, asked)
        is_webhook = asked.kind is ChannelKind.WEBHOOK
        channel = replace(
            asked,
            channel_id=ChannelId(self._ids.new(_PREFIXES[asked.kind])),
            enabled=True,
            disable_reason="",
            create_time=self._now(),
        )
        secret = self._random_bytes(SECRET_BYTES)
        said = repr((asked.name, asked.url, [kind.value for kind in asked.kinds], asked.after_seconds))
        new = NewChannel(
            inbox=inbox,
            channel=channel,
            host=host,
            secret=secret,
            request_id=request_id,
            request_hash=hashlib.sha256(said.encode()).digest(),
            code=self._code(channel.channel_id) if asked.kind is ChannelKind.EMAIL else None,
        )
        kept = await self._repository.create(new)
        self._on_due()
        return kept, secret if is_webhook and kept.channel_id == channel.channel_id else b""

    async def update(self, caller: Principal, change: ChannelChange) -> Channel:
        """Change what a user says of a channel.

        Raises:
            ChannelNotFound: the user has none of that id.
            InvalidField: it has no meaning, or its URL is not allowed; that of one that is not enabled may stay.
        """
        inbox = Inbox.of(caller)

        def changed(before: Channel) -> tuple[Channel, str]:
            asked = _saved_by(caller, checked(change.of(before)))
            if asked.kind is not before.kind:
                raise InvalidField(f"a channel stays of its kind ({before.kind}): make another one", field="url")
            if asked.kind is ChannelKind.EMAIL:
                return self._changed_email(before, asked), EMAIL_PLACE
            stays = asked.url == before.url and not asked.enabled
            return asked, read_target(asked.url).host if stays else self._host(inbox, asked)

        code = self._code(change.channel_id)
        kept = await self._repository.update(inbox, change.channel_id, changed, code=code)
        self._on_due()
        return kept

    async def send_code(self, inbox: Inbox, channel_id: ChannelId) -> None:
        """Send another code to the address of a channel.

        Raises:
            ChannelNotFound: the user has none of that id.
            InvalidField: it has no address to be confirmed, or too many codes were sent.
        """
        self._check_email()
        await self._repository.send_code(inbox, channel_id, self._code(channel_id))
        self._on_due()

    async def unsubscribe(self, store_id: StoreId, token: str) -> None:
        """End an e-mail, as its reader asks by a link.

        Raises:
            ChannelNotFound: the token is of none of the store.
        """
        await self._repository.unsubscribe(store_id, token)
        self._on_due()

    async def rotate(self, inbox: Inbox, channel_id: ChannelId) -> bytes:
        """Give a webhook another secret, and return it.

        Raises:
            ChannelNotFound: the user has none of that id.
            InvalidField: it is no webhook.
        """
        if (await self._repository.channel(inbox, channel_id)).kind is not ChannelKind.WEBHOOK:
            raise InvalidField("only a webhook has a secret", field="channel_id")
        secret = self._random_bytes(SECRET_BYTES)
        await self._repository.rotate(inbox, channel_id, secret)
        return secret

    async def test(self, inbox: Inbox, channel_id: ChannelId) -> channel_pb2.ChannelDelivery:
        """Have a test sent; returns it, or the one that waits.

        Raises:
            ChannelNotFound: the user has none of that id.
            InvalidField: its address is not confirmed.
        """
        channel = await self._repository.channel(inbox, channel_id)
        if channel.kind is ChannelKind.EMAIL and channel.confirm_time is None:
            raise InvalidField(UNCONFIRMED, field="channel_id")
        test = self._own(TEST, channel_id)
        kept = await self._repository.add_test(inbox, test, body_of_own(TEST, inbox, channel_id, test.create_time))
        self._on_due()
        return kept

    async def resend(self, inbox: Inbox, delivery_ids: Sequence[DeliveryId]) -> Sequence[channel_pb2.ChannelDelivery]:
        """Send deliveries once more, all of them or none.

        Raises:
            DeliveryNotFound: the user has none of one of the ids.
        """
        kept = await self._repository.resend(inbox, delivery_ids)
        self._on_due()
        return kept

    def _changed_email(self, before: Channel, asked: Channel) -> Channel:
        """Return an e-mail as it is to be: to another address it says nothing before that is confirmed."""
        if asked.url != before.url:
            self._check_email()
            return replace(asked, enabled=False)
        if asked.enabled and before.confirm_time is None:
            raise InvalidField(f"{UNCONFIRMED}: that enables it", field="enabled")
        return asked

    def _host(self, inbox: Inbox, channel: Channel) -> str:
        if channel.kind is ChannelKind.EMAIL:
            self._check_email()
            return EMAIL_PLACE
        try:
            self._egress.check(inbox.store_id, channel.url, with_secrets=True)
            return read_target(channel.url).host
        except EgressRefused as refused:
            advice = "; use https" if channel.url.lower().startswith("http:") else ""
            raise InvalidField(f"url: {refused}{advice}", field="channel.url") from None

    def _check_email(self) -> None:
        if not self._sends_email:
            raise InvalidField("the deployment sends no e-mail: it has no mail server", field="channel.url")

    def _code(self, channel_id: ChannelId) -> NewCode:
        return NewCode(delivery=self._own(CODE, channel_id), secret=self._random_bytes(SECRET_BYTES))

    def _own(self, kind: str, channel_id: ChannelId) -> OwnDelivery:
        delivery_id = DeliveryId(self._ids.new("dlv"))
        return OwnDelivery(delivery_id=delivery_id, channel_id=channel_id, type=kind, create_time=self._now())

    def _now(self) -> datetime:
        return datetime.fromtimestamp(self._clock.now(), UTC)


def _saved_by(caller: Principal, channel: Channel) -> Channel:
    return replace(channel, credential_id=caller.credential_id, delegate_user_id=caller.delegate_user_id)
