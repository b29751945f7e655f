"""Stores users' channels in PostgreSQL, schema `notifier`. The tables are named after the first kind, webhooks."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

import asyncpg

from pawl.chassis.ids import CredentialId, StoreId, UserId
from pawl.errors import ChannelNotFound, DeliveryNotFound, InvalidField, RequestIdReused
from pawl.notifier.channels.rules import (
    CHANNELS_MAX,
    CODE_LASTS,
    CODE_TRIES_MAX,
    CODES_MAX_A_DAY,
    FORMER_SECRET_SECONDS,
    FORMER_SECRETS_MAX,
    UNCONFIRMED,
    UNSUBSCRIBED,
    Channel,
    ChannelId,
    ChannelKind,
    channel_of_token,
    code_of,
    unsubscribe_token,
)
from pawl.notifier.deliveries.rules import (
    CODE,
    TEST,
    TESTS_KEPT,
    DeliveryId,
    DeliveryState,
    OwnDelivery,
    body_of_own,
    notice,
)
from pawl.notifier.inbox.rules import Inbox, NotificationKind
from pawl.notifier.inbox.store import ADD, added_columns, inbox_of
from pawl.notify.v1 import channel_pb2 as pb
from pawl.server.db.database import Connection, DatabaseAdapter

_LOCK_USER: Final = "SELECT pg_advisory_xact_lock(hashtextextended('notifier.webhooks ' || $1 || '/' || $2, 0))"
_LIST: Final = "SELECT * FROM notifier.webhooks WHERE store_id = $1 AND user_id = $2 ORDER BY webhook_id"
_FIND: Final = "SELECT * FROM notifier.webhooks WHERE store_id = $1 AND user_id = $2 AND webhook_id = $3"
_CREATE: Final = """
INSERT INTO notifier.webhooks (
    webhook_id, store_id, user_id, request_id, request_hash, name, url, host, kinds, secret, create_time, after_seconds,
    credential_id, delegate_user_id
) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14)
RETURNING *
"""
_UPDATE: Final = """
UPDATE notifier.webhooks SET
    name = $4, url = $5, host = $6, kinds = $7, enabled = $8, after_seconds = $9,
    credential_id = $10, delegate_user_id = $11,
    confirm_time = CASE WHEN $5 = url THEN confirm_time END,
    disable_reason = CASE WHEN $8 OR enabled THEN '' ELSE disable_reason END,
    failing_since = CASE WHEN $8 AND NOT enabled OR $5 <> url THEN NULL ELSE failing_since END
WHERE store_id = $1 AND user_id = $2 AND webhook_id = $3
RETURNING *
"""
_DELETE: Final = """
DELETE FROM notifier.webhooks WHERE store_id = $1 AND user_id = $2 AND webhook_id = $3 RETURNING webhook_id
"""
_DELETE_DELIVERIES: Final = """
DELETE FROM notifier.webhook_deliveries WHERE delivery_id IN (
    SELECT delivery_id FROM notifier.webhook_deliveries WHERE webhook_id = $1 ORDER BY delivery_id FOR UPDATE
)
"""
_ROTATE: Final = """
UPDATE notifier.webhooks SET
    secret = $4,
    former_secrets = (array_prepend(secret, former_secrets))[1:$5],
    former_times = (array_prepend(now() + make_interval(secs => $6), former_times))[1:$5]
WHERE store_id = $1 AND user_id = $2 AND webhook_id = $3
RETURNING webhook_id
"""

LOCK_INBOX: Final = "SELECT FROM notifier.inboxes WHERE store_id = $1 AND user_id = $2 FOR UPDATE"
_FIND_OF_STORE: Final = "SELECT * FROM notifier.webhooks WHERE store_id = $1 AND webhook_id = $2"
_DISABLE: Final = "UPDATE notifier.webhooks SET enabled = false, disable_reason = $2 WHERE webhook_id = $1"
_ADD_DISABLED_EVENT: Final = """
INSERT INTO notifier.channel_events (type, store_id, user_id, channel_id, delivery_id, error)
VALUES ('channel.disabled', $1, $2, $3, $4, $5)
"""
# Prevents a channel from being disabled or deleted while deliveries are being added to it.
LOCK: Final = f"{_FIND} FOR UPDATE"
_WAITING_TEST: Final = """
SELECT * FROM notifier.webhook_deliveries
WHERE webhook_id = $1 AND number IS NULL AND type <> 'channel.code' AND due_time IS NOT NULL
"""
_FORGET_TESTS: Final = """
DELETE FROM notifier.webhook_deliveries WHERE delivery_id IN (
    SELECT delivery_id FROM notifier.webhook_deliveries
    WHERE webhook_id = $1 AND number IS NULL AND due_time IS NULL
    ORDER BY insert_time DESC OFFSET $2
)
"""
_ADD_OWN: Final = """
INSERT INTO notifier.webhook_deliveries (delivery_id, webhook_id, store_id, user_id, type, body)
VALUES ($1, $2, $3, $4, $5, $6)
RETURNING *
"""
# Reads only one page of each channel's newest deliveries, however many there are.
_DELIVERIES: Final = """
SELECT d.* FROM unnest($1::text[]) AS w (webhook_id)
CROSS JOIN LATERAL (
    SELECT * FROM notifier.webhook_deliveries AS each
    WHERE each.webhook_id = w.webhook_id
    AND (insert_time, delivery_id) < (coalesce($2, 'infinity'::timestamptz), $3)
    AND ($4::text[] = '{}' OR state = ANY ($4))
    ORDER BY insert_time DESC, delivery_id DESC LIMIT $5
) AS d
ORDER BY d.insert_time DESC, d.delivery_id DESC LIMIT $5
"""
_COUNT_DELIVERIES: Final = """
SELECT state, count(*) FROM notifier.webhook_deliveries WHERE webhook_id = ANY ($1::text[]) GROUP BY state
"""
# A delivery in progress keeps its claim. Codes cannot be resent this way, because their number is limited.
_RESEND: Final = """
UPDATE notifier.webhook_deliveries SET
    state = 'waiting',
    resent = true,
    tries = CASE WHEN claimed THEN tries ELSE 0 END,
    due_time = CASE WHEN claimed THEN due_time ELSE now() END
WHERE delivery_id IN (
    SELECT delivery_id FROM notifier.webhook_deliveries
    WHERE delivery_id = ANY ($3::text[]) AND (store_id, user_id) IS NOT DISTINCT FROM ($1, $2)
    AND type <> 'channel.code'
    ORDER BY delivery_id FOR UPDATE
)
RETURNING *
"""

NOW: Final = "SELECT now()"
LOCK_WAITING: Final = """
SELECT FROM notifier.webhook_deliveries WHERE webhook_id = $1 AND due_time IS NOT NULL ORDER BY delivery_id FOR UPDATE
"""
# A template for an UPDATE of deliveries and a SELECT from `changed`. Queues a NATS event for each delivery that ends.
WITH_EVENTS: Final = """
WITH changed AS ({} RETURNING d.*),
events AS (
    INSERT INTO notifier.channel_events (type, store_id, user_id, channel_id, delivery_id, tries, status, error)
    SELECT 'delivery.' || state, store_id, user_id, webhook_id, delivery_id, tries, status, last_error FROM changed
    WHERE number IS NOT NULL AND state IN ('delivered', 'dead')
)
{}
"""
CHANGED: Final = "SELECT FROM changed"
_END_WAITING: Final = WITH_EVENTS.format(
    """
UPDATE notifier.webhook_deliveries AS d
SET state = 'dead', due_time = NULL, last_error = 'the channel was disabled'
WHERE webhook_id = $1 AND due_time IS NOT NULL AND NOT claimed AND number IS NOT NULL
""",
    CHANGED,
)
_LOCK_CODES: Final = "SELECT pg_advisory_xact_lock(hashtextextended('notifier.codes_sent', 0))"
COUNT_CODES: Final = """
WITH of_store AS MATERIALIZED (
    SELECT user_id FROM notifier.codes_sent WHERE store_id = $2 AND sent_time > now() - interval '1 day'
)
SELECT (
    SELECT count(*) FROM notifier.codes_sent
    WHERE lower(address) = lower($1) AND sent_time > now() - interval '1 day'
) AS address, count(*) FILTER (WHERE user_id = $3) AS user, count(*) AS store FROM of_store
"""
_NOTE_CODE: Final = "INSERT INTO notifier.codes_sent (address, store_id, user_id) VALUES ($1, $2, $3)"
_RENEW_CODE: Final = """
UPDATE notifier.webhooks SET secret = $2, code_time = now(), code_tries = 0, enabled = false, disable_reason = $3
WHERE webhook_id = $1
RETURNING *
"""
_FORGET_CODE: Final = """
DELETE FROM notifier.webhook_deliveries WHERE delivery_id IN (
    SELECT delivery_id FROM notifier.webhook_deliveries
    WHERE webhook_id = $1 AND number IS NULL AND type = 'channel.code' AND due_time IS NOT NULL AND NOT claimed
    FOR UPDATE SKIP LOCKED
)
"""
_CONFIRM: Final = """
UPDATE notifier.webhooks SET enabled = true, disable_reason = '', confirm_time = now(), failing_since = NULL
WHERE webhook_id = $1
RETURNING *
"""
_MISSED: Final = "UPDATE notifier.webhooks SET code_tries = code_tries + 1 WHERE webhook_id = $1"


class PostgresChannels(DatabaseAdapter):
    """Channels and their delivery logs. Every method raises DependencyUnavailable if the database is unavailable.

    Methods that take an inbox raise ChannelNotFound for other users' channels.

    Locks are taken in this order: an inbox, a channel, its deliveries by id.
    """

    async def create(
        self,
        inbox: Inbox,
        channel: Channel,
        *,
        host: str,
        secret: bytes,
        request_id: str,
        request_hash: bytes,
        code: OwnDelivery,
        validate_only: bool = False,
        created_before: int = 0,
    ) -> Channel:
        """Create a channel. If the same request has already created a channel, return that one.

        A code is sent to a new e-mail address. With `validate_only`, nothing is created or sent, and the limit is
        checked as if the user had `created_before` more channels.

        Raises:
            RequestIdReused: The request id was already used for another channel.
            InvalidField: The user already has the maximum number of channels, or too many codes were sent.
        """
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK_USER, inbox.store_id, inbox.user_id)
            rows = await connection.fetch(_LIST, inbox.store_id, inbox.user_id)
            for row in rows:
                if request_id and row["request_id"] == request_id:
                    if row["request_hash"] != request_hash:
                        raise RequestIdReused
                    return channel_of(row)
            if len(rows) + created_before >= CHANNELS_MAX:
                raise InvalidField(f"a user can have at most {CHANNELS_MAX} channels: delete one", field="channel")
            if validate_only:
                return channel
            made = await connection.fetchrow(
                _CREATE,
                channel.channel_id,
                inbox.store_id,
                inbox.user_id,
                request_id,
                request_hash,
                channel.name,
                channel.url,
                host,
                list(channel.kinds),
                secret,
                channel.create_time,
                channel.after_seconds,
                channel.credential_id,
                channel.delegate_user_id,
            )
            if channel.kind is ChannelKind.EMAIL:
                made = await _send_code(connection, inbox, channel.url, code)
        return channel_of(_existing(made))

    async def channels(self, inbox: Inbox) -> Sequence[Channel]:
        """Return a user's channels, oldest first."""
        return list(map(channel_of, await self._database.fetch(_LIST, inbox.store_id, inbox.user_id)))

    async def channel(self, inbox: Inbox, channel_id: ChannelId) -> Channel:
        return channel_of(_existing(await self._database.fetchrow(_FIND, inbox.store_id, inbox.user_id, channel_id)))

    async def update(
        self,
        inbox: Inbox,
        channel_id: ChannelId,
        change: Callable[[Channel], tuple[Channel, str]],
        *,
        code: OwnDelivery,
        validate_only: bool = False,
    ) -> Channel:
        """Atomically replace a channel with the channel and host that `change` returns.

        With `validate_only`, only validate the change. Disabling the channel ends its waiting deliveries. A code is
        sent to a new e-mail address.

        Raises:
            PawlError: Any error that `change` raises.
            InvalidField: Too many codes were sent.
        """
        key = (inbox.store_id, inbox.user_id, channel_id)
        async with self._database.transaction() as connection:
            before = channel_of(_existing(await connection.fetchrow(LOCK, *key)))
            channel, host = change(before)
            if validate_only:
                return channel
            values = (channel.name, channel.url, host, list(channel.kinds), channel.enabled, channel.after_seconds)
            by = (channel.credential_id, channel.delegate_user_id)
            row = _existing(await connection.fetchrow(_UPDATE, *key, *values, *by))
            if channel.kind is ChannelKind.EMAIL and channel.url != before.url:
                row = await _send_code(connection, inbox, channel.url, code)
            if not channel.enabled:
                await connection.execute(LOCK_WAITING, channel_id)
                await connection.execute(_END_WAITING, channel_id)
        return channel_of(row)

    async def delete(self, inbox: Inbox, channel_id: ChannelId) -> None:
        """Delete a channel and its deliveries."""
        async with self._database.transaction() as connection:
            _existing(await connection.fetchrow(_DELETE, inbox.store_id, inbox.user_id, channel_id))
            await connection.execute(_DELETE_DELIVERIES, channel_id)

    async def send_code(self, inbox: Inbox, code: OwnDelivery) -> None:
        """Send a new code, which replaces the previous code.

        Raises:
            InvalidField: The channel has no address to confirm, or too many codes were sent.
        """
        async with self._database.transaction() as connection:
            row = _existing(await connection.fetchrow(LOCK, inbox.store_id, inbox.user_id, code.channel_id))
            if channel_of(row).kind is not ChannelKind.EMAIL or row["confirm_time"] is not None:
                raise InvalidField("the channel has no unconfirmed e-mail address", field="channel_id")
            await _send_code(connection, inbox, row["url"], code)

    async def confirm(self, inbox: Inbox, channel_id: ChannelId, code: str) -> Channel:
        """Confirm a channel's address and enable the channel. Has no effect if the address is already confirmed.

        Raises:
            InvalidField: The channel is not an e-mail channel, or the code is wrong or no longer valid.
        """
        async with self._database.transaction() as connection:
            row = _existing(await connection.fetchrow(LOCK, inbox.store_id, inbox.user_id, channel_id))
            channel = channel_of(row)
            if channel.kind is not ChannelKind.EMAIL:
                raise InvalidField("the channel is not an e-mail channel", field="channel_id")
            if channel.confirm_time is not None:
                return channel
            now: datetime = await connection.fetchval(NOW)
            is_good = row["code_tries"] < CODE_TRIES_MAX and now < row["code_time"] + CODE_LASTS
            if is_good and hmac.compare_digest(code_of(row["secret"], channel.url).encode(), code.encode()):
                return channel_of(_existing(await connection.fetchrow(_CONFIRM, channel_id)))
            await connection.execute(_MISSED, channel_id)
        # Raised here instead of above, so that the failed attempt is committed.
        problem = "is wrong" if is_good else "is no longer valid: request a new one"
        raise InvalidField(f"code: {problem}", field="code")

    async def unsubscribe(self, store_id: StoreId, token: str) -> None:
        """Disable the e-mail channel for which a token was issued, and notify the channel's user. Idempotent.

        Raises:
            ChannelNotFound: The store has no such channel, or the token is invalid.
        """
        channel_id = channel_of_token(token)
        row = await self._database.fetchrow(_FIND_OF_STORE, store_id, channel_id) if channel_id else None
        inbox = inbox_of(_existing(row))
        async with self._database.transaction() as connection:
            await connection.execute(LOCK_INBOX, inbox.store_id, inbox.user_id)
            row = _existing(await connection.fetchrow(LOCK, inbox.store_id, inbox.user_id, channel_id))
            channel = channel_of(row)
            made = unsubscribe_token(row["secret"], store_id, channel.channel_id, channel.url)
            if channel.kind is not ChannelKind.EMAIL or not hmac.compare_digest(made.encode(), token.encode()):
                raise ChannelNotFound
            if not channel.enabled:
                return
            await connection.execute(LOCK_WAITING, channel_id)
            await connection.execute(_DISABLE, channel_id, UNSUBSCRIBED)
            disabled = replace(channel, enabled=False, disable_reason=UNSUBSCRIBED)
            now: datetime = await connection.fetchval(NOW)
            await end_disabled(connection, inbox, disabled, DeliveryId(""), notice_time=now)

    async def rotate(self, inbox: Inbox, channel_id: ChannelId, secret: bytes) -> None:
        """Replace a channel's secret. For a day, deliveries are also signed with its former secrets."""
        limits = (FORMER_SECRETS_MAX, FORMER_SECRET_SECONDS)
        _existing(await self._database.fetchrow(_ROTATE, inbox.store_id, inbox.user_id, channel_id, secret, *limits))

    async def add_test(self, inbox: Inbox, test: OwnDelivery) -> pb.ChannelDelivery:
        """Create a test delivery, or return the one that is waiting. Only the newest 20 ended tests are stored."""
        async with self._database.transaction() as connection:
            _existing(await connection.fetchrow(LOCK, inbox.store_id, inbox.user_id, test.channel_id))
            await connection.execute(_FORGET_TESTS, test.channel_id, TESTS_KEPT)
            row = await connection.fetchrow(_WAITING_TEST, test.channel_id) or await connection.fetchrow(
                _ADD_OWN,
                test.delivery_id,
                test.channel_id,
                inbox.store_id,
                inbox.user_id,
                TEST,
                body_of_own(TEST, inbox, test.channel_id, test.create_time),
            )
        return _delivery(_existing(row))

    async def deliveries(
        self,
        inbox: Inbox,
        channel_id: ChannelId,
        states: Sequence[DeliveryState],
        before: tuple[datetime, str] | None,
        *,
        limit: int,
    ) -> Sequence[pb.ChannelDelivery]:
        """Return a channel's deliveries, newest first. If `channel_id` is empty, return all channels' deliveries.

        `before` is the time and id of the last delivery on the previous page.
        """
        channel_ids = await self._ids(inbox, channel_id)
        rows = await self._database.fetch(_DELIVERIES, channel_ids, *(before or (None, "")), list(states), limit)
        return list(map(_delivery, rows))

    async def count_deliveries(self, inbox: Inbox, channel_id: ChannelId) -> Sequence[pb.ChannelDeliveryCount]:
        """Return the number of deliveries in each state for one channel.

        If `channel_id` is empty, count all channels.
        """
        rows = await self._database.fetch(_COUNT_DELIVERIES, await self._ids(inbox, channel_id))
        counts = (pb.ChannelDeliveryCount(state=_state(row), count=row["count"]) for row in rows)
        return sorted(counts, key=lambda each: each.state)

    async def resend(self, inbox: Inbox, delivery_ids: Sequence[DeliveryId]) -> Sequence[pb.ChannelDelivery]:
        """Reset the attempts of deliveries and send them now. Return them in the same order as the ids.

        A delivery that is in progress continues.

        Raises:
            DeliveryNotFound: One of the deliveries belongs to another user, or is a code. Nothing is sent.
        """
        async with self._database.transaction() as connection:
            rows = await connection.fetch(_RESEND, inbox.store_id, inbox.user_id, delivery_ids)
            found = {row["delivery_id"]: _delivery(row) for row in rows}
            if not found.keys() >= set(delivery_ids):
                raise DeliveryNotFound
        return [found[delivery_id] for delivery_id in delivery_ids]

    async def _ids(self, inbox: Inbox, channel_id: ChannelId) -> Sequence[ChannelId]:
        if channel_id:
            return [(await self.channel(inbox, channel_id)).channel_id]
        return [channel.channel_id for channel in await self.channels(inbox)]


async def end_disabled(
    connection: Connection, inbox: Inbox, channel: Channel, ended_by: DeliveryId, *, notice_time: datetime | None
) -> None:
    """End a disabled channel's waiting deliveries and queue a NATS event. If `notice_time` is set, notify the user.

    The caller must hold the locks on the inbox, the channel and its waiting deliveries.
    """
    await connection.execute(_END_WAITING, channel.channel_id)
    event = (inbox.store_id, inbox.user_id, channel.channel_id, ended_by, channel.disable_reason)
    await connection.execute(_ADD_DISABLED_EVENT, *event)
    if notice_time is not None:
        await connection.fetchval(ADD, *added_columns([notice(inbox, channel, ended_by, notice_time)]))


async def _send_code(connection: Connection, inbox: Inbox, url: str, code: OwnDelivery) -> asyncpg.Record:
    """Queue a message with a new code, unless the daily limit is reached. Return the channel's row."""
    address, channel_id = url.partition(":")[2], code.channel_id
    await connection.execute(_LOCK_CODES)
    sent = _existing(await connection.fetchrow(COUNT_CODES, address, inbox.store_id, inbox.user_id))
    if any(sent[name] >= most for name, most in CODES_MAX_A_DAY.items()):
        raise InvalidField("too many codes were sent within 24 hours: use the last one, or wait", field="channel")
    await connection.execute(_NOTE_CODE, address, inbox.store_id, inbox.user_id)
    row = await connection.fetchrow(_RENEW_CODE, channel_id, code.secret, UNCONFIRMED)
    await connection.execute(_FORGET_CODE, channel_id)
    body = body_of_own(CODE, inbox, channel_id, code.create_time)
    await connection.execute(_ADD_OWN, code.delivery_id, channel_id, inbox.store_id, inbox.user_id, CODE, body)
    return _existing(row)


def _existing(row: asyncpg.Record | None) -> asyncpg.Record:
    if row is None:
        raise ChannelNotFound
    return row


def channel_of(row: asyncpg.Record) -> Channel:
    return Channel(
        channel_id=ChannelId(row["webhook_id"]),
        name=row["name"],
        url=row["url"],
        kinds=tuple(map(NotificationKind, row["kinds"])),
        after_seconds=row["after_seconds"],
        enabled=row["enabled"],
        disable_reason=row["disable_reason"],
        create_time=row["create_time"],
        failing_since_time=row["failing_since"],
        confirm_time=row["confirm_time"],
        credential_id=CredentialId(row["credential_id"]),
        delegate_user_id=UserId(row["delegate_user_id"]),
    )


def _delivery(row: asyncpg.Record) -> pb.ChannelDelivery:
    times = {"create_time": "insert_time", "try_time": "try_time", "next_try_time": "due_time"}
    return pb.ChannelDelivery(
        delivery_id=row["delivery_id"],
        channel_id=row["webhook_id"],
        type=row["type"],
        number=row["number"] or 0,
        state=_state(row),
        tries=row["tries"],
        status=row["status"],
        latency_milliseconds=row["latency_ms"],
        last_error=row["last_error"],
        **{field: row[column] for field, column in times.items()},
    )


def _state(row: asyncpg.Record) -> pb.ChannelDeliveryState.ValueType:
    return pb.ChannelDeliveryState.Value(f"CHANNEL_DELIVERY_STATE_{row['state'].upper()}")
