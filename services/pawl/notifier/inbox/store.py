"""Stores inboxes in PostgreSQL, schema `notifier`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from operator import itemgetter
from typing import Final, NamedTuple

import asyncpg

from pawl.chassis.ids import ConversationId, StoreId, UserId
from pawl.errors import NotificationNotFound
from pawl.notifier.deliveries.rules import body_of, type_of
from pawl.notifier.inbox.rules import OF_OTHERS, Draft, Inbox, NotificationId, PoisonEvent, ResolvedNeed, shown
from pawl.notify.v1 import channel_pb2
from pawl.notify.v1.notify_pb2 import Notification
from pawl.server.db.database import Database, DatabaseAdapter, affected, read_each
from pawl.server.db.erasures import ErasurePart

SCHEMA: Final = "notifier"

_ADD_ATTEMPTS: Final = 3
_REFUSED_VALUES: Final = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
)

# The draft fields that are columns, in the order of the statement.
_DRAFT: Final = (
    "notification_id",
    "kind",
    "run_id",
    "conversation_id",
    "event_id",
    "title",
    "body",
    "create_time",
    "call_id",
    "channel_id",
)
_MESSAGE: Final = ("store_id", "user_id", "number", "read_time", *_DRAFT)

# Adds drafts to their inboxes, with a delivery for each channel that wants them. Known notifications do not use up a
# number. The counter rows are locked in a fixed order, so that replicas do not deadlock. If another replica adds the
# same draft concurrently, the statement violates the unique key and has no effect.
ADD: Final = """
WITH draft AS (
    SELECT DISTINCT ON (d.store_id, d.user_id, d.notification_id) d.*
    FROM unnest(
        $1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[],
        $7::text[], $8::text[], $9::text[], $10::timestamptz[], $11::text[], $12::text[], $13::text[],
        $14::text[]
    ) WITH ORDINALITY AS d (
        store_id, user_id, notification_id, kind, run_id, conversation_id,
        event_id, title, body, create_time, call_id, channel_id, message_type, message_body, position
    )
    WHERE NOT EXISTS (
        SELECT FROM notifier.notifications AS n
        WHERE n.notification_id = d.notification_id
        AND (n.store_id, n.user_id) IS NOT DISTINCT FROM (d.store_id, d.user_id)
    ) AND NOT EXISTS (
        SELECT FROM notifier.erased_conversations AS e
        WHERE (e.store_id, e.conversation_id) = (d.store_id, d.conversation_id)
    )
    ORDER BY d.store_id, d.user_id, d.notification_id, d.position
),
counter AS (
    INSERT INTO notifier.inboxes AS i (store_id, user_id, last_number)
    SELECT store_id, user_id, count(*) FROM draft GROUP BY store_id, user_id ORDER BY store_id, user_id
    ON CONFLICT (store_id, user_id) DO UPDATE SET last_number = i.last_number + excluded.last_number
    RETURNING store_id, user_id, last_number
),
added AS (
    INSERT INTO notifier.notifications (
        store_id, user_id, number, notification_id, kind, run_id, conversation_id, event_id, title, body, create_time,
        call_id, channel_id
    )
    SELECT
        draft.store_id,
        draft.user_id,
        counter.last_number + 1 - row_number() OVER (PARTITION BY draft.store_id, draft.user_id ORDER BY position DESC),
        notification_id, kind, run_id, conversation_id, event_id, title, body, create_time, call_id, channel_id
    FROM draft
    JOIN counter USING (store_id, user_id)
    RETURNING store_id, user_id, number, notification_id
),
deliveries AS (
    INSERT INTO notifier.webhook_deliveries (delivery_id, webhook_id, store_id, user_id, number, type, body)
    SELECT
        'dlv_' || left(encode(sha256(convert_to(notification_id || '/' || w.webhook_id, 'UTF8')), 'hex'), 40),
        w.webhook_id, w.store_id, w.user_id, added.number, draft.message_type, draft.message_body
    FROM added
    JOIN draft USING (store_id, user_id, notification_id)
    JOIN notifier.webhooks AS w USING (store_id, user_id)
    WHERE w.enabled AND (w.kinds = '{}' OR draft.kind = ANY (w.kinds))
    FOR KEY SHARE OF w
    RETURNING delivery_id
)
SELECT (SELECT count(*) FROM added) AS notifications, (SELECT count(*) FROM deliveries) AS deliveries
"""

_READ_AFTER: Final = """
SELECT * FROM notifier.notifications
WHERE store_id = $1 AND user_id = $2 AND number > $3 AND ($5 OR kind <> 'approval_needed')
ORDER BY number LIMIT $4
"""

_READ_BEFORE: Final = """
SELECT * FROM notifier.notifications
WHERE store_id = $1 AND user_id = $2 AND number < coalesce($3::bigint, 9223372036854775807)
AND ($5 OR kind <> 'approval_needed')
ORDER BY number DESC LIMIT $4
"""

_READ_UNREAD_BEFORE: Final = """
SELECT * FROM notifier.notifications
WHERE store_id = $1 AND user_id = $2 AND number < coalesce($3::bigint, 9223372036854775807) AND read_time IS NULL
AND ($5 OR kind <> 'approval_needed')
ORDER BY number DESC LIMIT $4
"""

_COUNT_UNREAD: Final = """
SELECT count(*) FROM notifier.notifications
WHERE store_id = $1 AND user_id = $2 AND read_time IS NULL AND ($3 OR kind <> 'approval_needed')
"""

_LAST_NUMBERS: Final = """
SELECT store_id, user_id, last_number
FROM notifier.inboxes
JOIN unnest($1::text[], $2::text[]) AS wanted (store_id, user_id) USING (store_id, user_id)
"""

# Sorted, so that concurrent acknowledgements do not deadlock. IS NOT DISTINCT FROM prevents the planner from using an
# index on the user, who may have many notifications.
_LOCK: Final = """
SELECT number FROM notifier.notifications
WHERE (store_id, user_id) IS NOT DISTINCT FROM ($1, $2) AND notification_id = ANY ($3::text[])
AND ($4 OR kind <> 'approval_needed')
ORDER BY number FOR UPDATE
"""

MARK_READ: Final = """
UPDATE notifier.notifications SET read_time = coalesce(read_time, now())
WHERE (store_id, user_id) IS NOT DISTINCT FROM ($1, $2) AND notification_id = ANY ($3::text[])
RETURNING *
"""

# An approval request is resolved with its call or its run; other needs are resolved with the next change of the run.
# The lateral join makes the planner look up by run instead of scanning all open needs.
MARK_RESOLVED: Final = """
WITH found AS MATERIALIZED (
    SELECT n.store_id, n.user_id, n.number
    FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[], $5::boolean[])
        AS o (store_id, run_id, call_id, time, run_ended)
    CROSS JOIN LATERAL (
        SELECT * FROM notifier.notifications AS each
        WHERE (each.store_id, each.run_id) = (o.store_id, o.run_id)
        AND each.kind IN ('input_needed', 'attention_needed', 'approval_needed', 'decision_needed')
        AND each.over_time IS NULL OFFSET 0
    ) AS n
    WHERE n.create_time < o.time
    AND CASE WHEN n.kind IN ('approval_needed', 'decision_needed') THEN o.run_ended OR n.call_id = o.call_id
        ELSE o.call_id = '' END
), held AS MATERIALIZED (
    SELECT store_id, user_id, number FROM notifier.notifications JOIN found USING (store_id, user_id, number)
    WHERE over_time IS NULL ORDER BY store_id, user_id, number FOR UPDATE OF notifications
)
UPDATE notifier.notifications SET over_time = now()
WHERE (store_id, user_id, number) IN (SELECT store_id, user_id, number FROM held)
"""

# Looked up by conversation. The expressions prevent the planner from using the indexes on open needs and on users.
WAITING: Final = """
SELECT DISTINCT store_id, user_id, conversation_id
FROM unnest($1::text[], $2::text[], $3::text[]) AS o (store_id, user_id, conversation_id)
WHERE EXISTS (
    SELECT FROM notifier.notifications AS n WHERE n.conversation_id = o.conversation_id
    AND (n.store_id, n.user_id) IS NOT DISTINCT FROM (o.store_id, o.user_id)
    AND n.kind || '' IN ('input_needed', 'attention_needed') AND n.over_time IS NULL OFFSET 0
)
"""

_HOLD_UNPUBLISHED: Final = """
SELECT * FROM notifier.notifications
WHERE publish_time IS NULL
ORDER BY insert_time, number LIMIT $1
FOR UPDATE SKIP LOCKED
"""

# A mark that is lost in a crash only means that its row is published again, so the commit does not wait for the disk.
_MARK_PUBLISHED: Final = """
UPDATE notifier.notifications AS n SET publish_time = now()
FROM unnest($1::text[], $2::text[], $3::bigint[]) AS held (store_id, user_id, number),
    set_config('synchronous_commit', 'off', true)
WHERE (n.store_id, n.user_id, n.number) = (held.store_id, held.user_id, held.number)
"""

_HOLD_CHANNEL_EVENTS: Final = "SELECT * FROM notifier.channel_events ORDER BY time LIMIT $1 FOR UPDATE SKIP LOCKED"
_DELETE_CHANNEL_EVENTS: Final = "DELETE FROM notifier.channel_events WHERE event_id = ANY ($1::text[])"
_FORGET_EVENTS: Final = "DELETE FROM notifier.channel_events WHERE time < now() - make_interval(secs => $1)"

# Deleting a notification cascades to its deliveries. They are locked by id first, in the same order as when a channel
# is disabled, so that the two do not deadlock.
_REMOVE: Final = """
WITH gone AS MATERIALIZED ({}),
held AS MATERIALIZED (
    SELECT delivery_id FROM notifier.webhook_deliveries AS d
    JOIN gone USING (store_id, user_id, number)
    ORDER BY delivery_id FOR UPDATE OF d
)
DELETE FROM notifier.notifications
WHERE (store_id, user_id, number) IN (SELECT store_id, user_id, number FROM gone) AND (SELECT count(*) FROM held) >= 0
"""
_FORGET: Final = _REMOVE.format("""
    SELECT store_id, user_id, number FROM notifier.notifications
    WHERE insert_time < now() - make_interval(secs => $1)
    ORDER BY insert_time LIMIT $2 FOR UPDATE SKIP LOCKED
""")
# IS NOT DISTINCT FROM prevents the planner from using an index on the store.
ERASE: Final = _REMOVE.format("""
    SELECT store_id, user_id, number FROM notifier.notifications
    WHERE store_id IS NOT DISTINCT FROM $1 AND conversation_id = $2
    ORDER BY store_id, user_id, number FOR UPDATE
""")

# Written at most once an hour per user.
_NOTE_APPROVER: Final = """
INSERT INTO notifier.approvers AS a (store_id, user_id, seen_time) VALUES ($1, $2, now())
ON CONFLICT (store_id, user_id) DO UPDATE SET seen_time = now() WHERE a.seen_time < now() - interval '1 hour'
"""

_APPROVERS: Final = """
SELECT s.store_id, a.user_id FROM unnest($1::text[]) AS s (store_id)
CROSS JOIN LATERAL (
    SELECT user_id FROM notifier.approvers AS each WHERE each.store_id = s.store_id
    ORDER BY seen_time DESC, user_id LIMIT $2
) AS a
"""
_APPROVERS_MAX: Final = 100

# Waits for transactions that are adding notifications; later ones see the mark.
_NO_LONG_WAIT: Final = "SET LOCAL lock_timeout = '1s'"
_WAIT_FOR_WRITERS: Final = "LOCK TABLE notifier.notifications IN SHARE ROW EXCLUSIVE MODE"
_MARK_ERASED: Final = """
INSERT INTO notifier.erased_conversations (store_id, conversation_id) VALUES ($1, $2) ON CONFLICT DO NOTHING
"""
_ERASE_MUTES: Final = "DELETE FROM notifier.mutes WHERE store_id = $1 AND conversation_id = $2"
_UNMARK_OLD: Final = "DELETE FROM notifier.erased_conversations WHERE erase_time < now() - interval '30 days'"

_FORGET_TESTS: Final = """
DELETE FROM notifier.webhook_deliveries WHERE delivery_id IN (
    SELECT delivery_id FROM notifier.webhook_deliveries
    WHERE number IS NULL AND insert_time < now() - make_interval(secs => $1)
    FOR UPDATE SKIP LOCKED
)
"""
FORGET_CODES: Final = "DELETE FROM notifier.codes_sent WHERE sent_time <= now() - interval '1 day'"
# Longer than the longest wait for a delivery: a day of attempts plus a week of quiet hours.
_FORGET_VIEWERS: Final = "DELETE FROM notifier.viewers WHERE seen_time < now() - interval '10 days'"
_ERASE_VIEWERS: Final = "DELETE FROM notifier.viewers WHERE store_id = $1 AND run_id = ANY ($2::text[])"
_FORGET_APPROVERS: Final = "DELETE FROM notifier.approvers WHERE seen_time < now() - make_interval(secs => $1)"


class Added(NamedTuple):
    notifications: int
    deliveries: int


class PostgresStore(DatabaseAdapter):
    """Inboxes and approvers. Every method raises DependencyUnavailable if the database is unavailable.

    APPROVAL_NEEDED notifications are visible only to readers with `approves` set. Bodies sent to channels contain links
    if there is a `public_url`.
    """

    def __init__(self, database: Database, public_url: str = "") -> None:
        super().__init__(database)
        self._public_url = public_url

    async def add(self, drafts: Sequence[Draft]) -> Added:
        """Add drafts to their inboxes in one transaction. Return how many were new, and how many deliveries were added.

        The drafts are durable on return. Idempotent: adding an existing notification has no effect and uses up no
        number.

        Raises:
            PoisonEvent: A draft's values can never be stored. None of the drafts were stored.
        """
        for attempt in range(1, _ADD_ATTEMPTS + 1):
            try:
                row = await self._database.fetchrow(ADD, *added_columns(drafts, self._public_url))
            except asyncpg.UniqueViolationError:
                # Another replica received the same event and has committed, so the next attempt sees its row.
                if attempt == _ADD_ATTEMPTS:
                    raise
            except _REFUSED_VALUES as error:
                raise PoisonEvent(f"the database refuses the values: {error}") from error
            else:
                return Added(*row) if row else Added(0, 0)
        raise AssertionError("unreachable")

    async def mark_resolved(self, over: Sequence[ResolvedNeed]) -> None:
        """Mark notifications whose need has been resolved. Idempotent."""
        columns = ([getattr(each, name) for each in over] for name in ("store_id", "run_id", "call_id", "time"))
        await self._database.execute(MARK_RESOLVED, *columns, [each.run_ended for each in over])

    async def waiting(
        self, conversations: Collection[tuple[Inbox, ConversationId]]
    ) -> AbstractSet[tuple[Inbox, ConversationId]]:
        """Return the conversations in which a run currently needs its user."""
        columns = zip(*((inbox.store_id, inbox.user_id, each) for inbox, each in conversations), strict=True)
        rows = await self._database.fetch(WAITING, *map(list, columns))
        return {(inbox_of(row), ConversationId(row["conversation_id"])) for row in rows}

    async def read_after(self, inbox: Inbox, number: int, *, approves: bool, limit: int) -> Sequence[Notification]:
        """Return notifications numbered above `number`, oldest first."""
        rows = await self._database.fetch(_READ_AFTER, inbox.store_id, inbox.user_id, number, limit, approves)
        return [_notification(row) for row in rows]

    async def read_before(
        self, inbox: Inbox, number: int | None, *, only_unread: bool, approves: bool, limit: int
    ) -> Sequence[Notification]:
        """Return notifications numbered below `number`, newest first. If `number` is None, start with the newest."""
        query = _READ_UNREAD_BEFORE if only_unread else _READ_BEFORE
        rows = await self._database.fetch(query, inbox.store_id, inbox.user_id, number, limit, approves)
        return [_notification(row) for row in rows]

    async def count_unread(self, inbox: Inbox, *, approves: bool) -> int:
        count: int = await self._database.fetchval(_COUNT_UNREAD, inbox.store_id, inbox.user_id, approves)
        return count

    async def last_numbers(self, inboxes: Sequence[Inbox]) -> Mapping[Inbox, int]:
        """Return the last number used in each inbox. Inboxes without a number are omitted."""
        stores = [inbox.store_id for inbox in inboxes]
        users = [inbox.user_id for inbox in inboxes]
        rows = await self._database.fetch(_LAST_NUMBERS, stores, users)
        return {inbox_of(row): row["last_number"] for row in rows}

    async def acknowledge(
        self, inbox: Inbox, ids: Sequence[NotificationId], *, approves: bool
    ) -> Sequence[Notification]:
        """Mark notifications as read. Return them in the order of `ids`. Idempotent.

        Raises:
            NotificationNotFound: One of them is not in the inbox. Nothing is marked.
        """
        wanted = list(dict.fromkeys(ids))
        async with self._database.transaction() as connection:
            held = await connection.fetch(_LOCK, inbox.store_id, inbox.user_id, wanted, approves)
            if len(held) != len(wanted):
                raise NotificationNotFound
            rows = await connection.fetch(MARK_READ, inbox.store_id, inbox.user_id, wanted)
        by_id = {row["notification_id"]: _notification(row) for row in rows}
        return [by_id[notification_id] for notification_id in ids]

    @asynccontextmanager
    async def unpublished(self, *, limit: int) -> AsyncIterator[Sequence[Notification]]:
        """Lock unpublished notifications, oldest first. Other replicas get different notifications.

        On a normal exit, the notifications are marked as published. After an exception, they remain unpublished.
        """
        async with self._database.transaction() as connection:
            rows = await connection.fetch(_HOLD_UNPUBLISHED, limit)
            # An unreadable notification is never published, but is marked like the others.
            yield read_each("notification", rows, _notification, itemgetter("notification_id"))
            if rows:
                await connection.execute(
                    _MARK_PUBLISHED,
                    [row["store_id"] for row in rows],
                    [row["user_id"] for row in rows],
                    [row["number"] for row in rows],
                )

    @asynccontextmanager
    async def unpublished_channel_events(self, *, limit: int) -> AsyncIterator[Sequence[channel_pb2.ChannelEvent]]:
        """Lock unpublished channel events, as `unpublished` does. On a normal exit, they are deleted."""
        async with self._database.transaction() as connection:
            rows = await connection.fetch(_HOLD_CHANNEL_EVENTS, limit)
            yield read_each(
                "channel event", rows, lambda row: channel_pb2.ChannelEvent(**dict(row)), itemgetter("event_id")
            )
            if rows:
                await connection.execute(_DELETE_CHANNEL_EVENTS, [row["event_id"] for row in rows])

    async def forget(self, *, older_than_seconds: float, limit: int) -> int:
        """Delete at most `limit` old notifications and return their number. Also delete old rows of other kinds."""
        await self._database.execute(_FORGET_APPROVERS, older_than_seconds)
        await self._database.execute(_FORGET_TESTS, older_than_seconds)
        await self._database.execute(FORGET_CODES)
        await self._database.execute(_FORGET_VIEWERS)
        await self._database.execute(_FORGET_EVENTS, older_than_seconds)
        return affected(await self._database.execute(_FORGET, older_than_seconds, limit))

    async def erase(self, part: ErasurePart) -> None:
        """Delete the notifications about a conversation and prevent new ones. Idempotent."""
        async with self._database.transaction() as connection:
            await connection.execute(_NO_LONG_WAIT)
            await connection.execute(_WAIT_FOR_WRITERS)
            await connection.execute(_MARK_ERASED, part.store_id, part.conversation_id)
        await self._database.execute(ERASE, part.store_id, part.conversation_id)
        await self._database.execute(_ERASE_VIEWERS, part.store_id, list(part.run_ids))
        await self._database.execute(_ERASE_MUTES, part.store_id, part.conversation_id)
        await self._database.execute(_UNMARK_OLD)

    async def note_approver(self, inbox: Inbox) -> None:
        """Record that an inbox's user is an approver for the store, and has just been active."""
        await self._database.execute(_NOTE_APPROVER, inbox.store_id, inbox.user_id)

    async def approvers(self, store_ids: Collection[StoreId]) -> Mapping[StoreId, Sequence[UserId]]:
        """Return the approvers of each store: the 100 who were active most recently."""
        found: dict[StoreId, list[UserId]] = {store_id: [] for store_id in store_ids}
        for record in await self._database.fetch(_APPROVERS, sorted(store_ids), _APPROVERS_MAX):
            found[record["store_id"]].append(UserId(record["user_id"]))
        return found


def added_columns(drafts: Sequence[Draft], public_url: str = "") -> list[Sequence[object]]:
    """Return the arguments for ADD. Bodies sent to channels contain links if there is a `public_url`."""
    columns: list[Sequence[object]] = [
        [draft.inbox.store_id for draft in drafts],
        [draft.inbox.user_id for draft in drafts],
    ]
    columns += ([getattr(draft, name) for draft in drafts] for name in _DRAFT)
    columns.append([type_of(draft.kind) for draft in drafts])
    columns.append([body_of(shown(draft), public_url) for draft in drafts])
    return columns


def inbox_of(row: asyncpg.Record) -> Inbox:
    return Inbox(store_id=StoreId(row["store_id"]), user_id=UserId(row["user_id"]))


def _notification(row: asyncpg.Record) -> Notification:
    fields = {name: row[name] for name in _MESSAGE} | {"kind": f"NOTIFICATION_KIND_{row['kind'].upper()}"}
    if row["kind"] in OF_OTHERS:
        fields["conversation_id"] = ""  # The conversation belongs to another user.
    return Notification(**fields)
