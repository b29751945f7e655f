"""The inboxes in PostgreSQL, schema `notifier`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from operator import itemgetter
from typing import Final

import asyncpg

from pawl.chassis.db.database import Database, DatabaseAdapter, affected, read_each
from pawl.chassis.db.erasures import ErasurePart
from pawl.chassis.ids import ConversationId, StoreId, UserId
from pawl.errors import NotificationNotFound
from pawl.notifier.deliveries.rules import body_of, type_of
from pawl.notifier.inbox.rules import Draft, Inbox, NotificationId, NotificationKind, Over, PoisonEvent, shown
from pawl.notify.v1 import channel_pb2
from pawl.notify.v1.notify_pb2 import Notification

SCHEMA: Final = "notifier"

_ADD_ATTEMPTS: Final = 3
_REFUSED_VALUES: Final = (
    asyncpg.DataError,
    asyncpg.IntegrityConstraintViolationError,
    asyncpg.ProgramLimitExceededError,
)

# The fields of a draft that are columns, in the order of the statement.
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

ADD: Final = """
WITH draft AS (
    SELECT DISTINCT ON (d.store_id, d.user_id, d.notification_id) d.*
    FROM unnest(
        $1::text[], $2::text[], $3::text[], $4::text[], $5::text[], $6::text[],
        $7::text[], $8::text[], $9::text[], $10::timestamptz[], $11::text[], $12::text[], $13::text[],
        $14::text[]
    ) WITH ORDINALITY AS d (
        store_id, user_id, notification_id, kind, run_id, conversation_id,
        event_id, title, body, create_time, call_id, channel_id, told_type, told_body, position
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
told AS (
    INSERT INTO notifier.webhook_deliveries (delivery_id, webhook_id, store_id, user_id, number, type, body)
    SELECT
        'dlv_' || left(encode(sha256(convert_to(notification_id || '/' || w.webhook_id, 'UTF8')), 'hex'), 40),
        w.webhook_id, w.store_id, w.user_id, added.number, draft.told_type, draft.told_body
    FROM added
    JOIN draft USING (store_id, user_id, notification_id)
    JOIN notifier.webhooks AS w USING (store_id, user_id)
    WHERE w.enabled AND (w.kinds = '{}' OR draft.kind = ANY (w.kinds))
    FOR KEY SHARE OF w
)
SELECT count(*) FROM added
"""
"""Put drafts into their inboxes, each with a delivery to each channel that tells of it. What is there already takes no
number.

The counter rows are locked in one order, so that replicas do not deadlock. A draft that another replica adds at the
same moment violates the unique key here, and the whole statement has no effect.
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

# Locked in one order, so that two acknowledgements of the same ones do not deadlock. Compared like that, the user is no
# way to look them up: one may have been told of very much.
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

# What is for approvers is over with its call, or with the run; all else with the next change of the run. Looked up by
# the run, and not among all that is needed.
NOTE_OVER: Final = """
WITH found AS MATERIALIZED (
    SELECT n.store_id, n.user_id, n.number
    FROM unnest($1::text[], $2::text[], $3::text[], $4::timestamptz[], $5::boolean[])
        AS o (store_id, run_id, call_id, time, run_ended)
    CROSS JOIN LATERAL (
        SELECT * FROM notifier.notifications AS each
        WHERE (each.store_id, each.run_id) = (o.store_id, o.run_id)
        AND each.kind IN ('input_needed', 'attention_needed', 'approval_needed') AND each.over_time IS NULL OFFSET 0
    ) AS n
    WHERE n.create_time < o.time
    AND CASE WHEN n.kind = 'approval_needed' THEN o.run_ended OR n.call_id = o.call_id ELSE o.call_id = '' END
), held AS MATERIALIZED (
    SELECT store_id, user_id, number FROM notifier.notifications JOIN found USING (store_id, user_id, number)
    WHERE over_time IS NULL ORDER BY store_id, user_id, number FOR UPDATE OF notifications
)
UPDATE notifier.notifications SET over_time = now()
WHERE (store_id, user_id, number) IN (SELECT store_id, user_id, number FROM held)
"""

# By the conversation: the plan may use neither the index of all that is needed, nor one of all that the user was told.
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

_MARK_PUBLISHED: Final = """
UPDATE notifier.notifications AS n SET publish_time = now()
FROM unnest($1::text[], $2::text[], $3::bigint[]) AS held (store_id, user_id, number)
WHERE (n.store_id, n.user_id, n.number) = (held.store_id, held.user_id, held.number)
"""

_HOLD_UNTOLD: Final = "SELECT * FROM notifier.channel_events ORDER BY time LIMIT $1 FOR UPDATE SKIP LOCKED"
_FORGET_TOLD: Final = "DELETE FROM notifier.channel_events WHERE event_id = ANY ($1::text[])"
_FORGET_EVENTS: Final = "DELETE FROM notifier.channel_events WHERE time < now() - make_interval(secs => $1)"

# Deliveries go with their notifications. They are locked by their ids, as by who ends a channel, so that neither waits
# for the other.
_REMOVE: Final = """
WITH gone AS MATERIALIZED ({}),
told AS MATERIALIZED (
    SELECT delivery_id FROM notifier.webhook_deliveries AS d
    JOIN gone USING (store_id, user_id, number)
    ORDER BY delivery_id FOR UPDATE OF d
)
DELETE FROM notifier.notifications
WHERE (store_id, user_id, number) IN (SELECT store_id, user_id, number FROM gone) AND (SELECT count(*) FROM told) >= 0
"""
_FORGET: Final = _REMOVE.format("""
    SELECT store_id, user_id, number FROM notifier.notifications
    WHERE insert_time < now() - make_interval(secs => $1)
    ORDER BY insert_time LIMIT $2 FOR UPDATE SKIP LOCKED
""")
# Compared like that, the store is no way to look them up.
ERASE: Final = _REMOVE.format("""
    SELECT store_id, user_id, number FROM notifier.notifications
    WHERE store_id IS NOT DISTINCT FROM $1 AND conversation_id = $2
    ORDER BY store_id, user_id, number FOR UPDATE
""")

# Written once an hour of each user at most.
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

# Who adds a notification at this moment is waited for, and who does it later finds the mark.
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
# Longer than a delivery waits: a day, and the quiet hours of a week.
_FORGET_VIEWERS: Final = "DELETE FROM notifier.viewers WHERE seen_time < now() - interval '10 days'"
_ERASE_VIEWERS: Final = "DELETE FROM notifier.viewers WHERE store_id = $1 AND run_id = ANY ($2::text[])"
_FORGET_APPROVERS: Final = "DELETE FROM notifier.approvers WHERE seen_time < now() - make_interval(secs => $1)"


class PostgresStore(DatabaseAdapter):
    """The inboxes, and who approves. Every method raises DependencyUnavailable when the database is away.

    What is for approvers (APPROVAL_NEEDED) is there only for a reader who `approves`.

    What channels tell has links to `public_url`, if there is one.
    """

    def __init__(self, database: Database, public_url: str = "") -> None:
        super().__init__(database)
        self._public_url = public_url

    async def add(self, drafts: Sequence[Draft]) -> int:
        """Put drafts into their inboxes, in one transaction; returns how many were new.

        Durable on return. A draft whose notification is there already changes
        nothing and takes no number.

        Raises:
            PoisonEvent: the values of a draft cannot be stored, now or ever; nothing is.
        """
        for attempt in range(1, _ADD_ATTEMPTS + 1):
            try:
                added: int = await self._database.fetchval(ADD, *added_columns(drafts, self._public_url))
                return added
            except asyncpg.UniqueViolationError:
                # Another replica was given the same event. It has committed: the next attempt sees it.
                if attempt == _ADD_ATTEMPTS:
                    raise
            except _REFUSED_VALUES as error:
                raise PoisonEvent(f"the database refuses the values: {error}") from error
        raise AssertionError("unreachable")

    async def note_over(self, over: Sequence[Over]) -> None:
        """Note on what people were told that they are not needed for it any more. Noted again, nothing changes."""
        columns = ([getattr(each, name) for each in over] for name in ("store_id", "run_id", "call_id", "time"))
        await self._database.execute(NOTE_OVER, *columns, [each.run_ended for each in over])

    async def waiting(
        self, conversations: Collection[tuple[Inbox, ConversationId]]
    ) -> AbstractSet[tuple[Inbox, ConversationId]]:
        """Return those of some conversations of users in which a run needs somebody, as they were told."""
        columns = zip(*((inbox.store_id, inbox.user_id, each) for inbox, each in conversations), strict=True)
        rows = await self._database.fetch(WAITING, *map(list, columns))
        return {(inbox_of(row), ConversationId(row["conversation_id"])) for row in rows}

    async def read_after(self, inbox: Inbox, number: int, *, approves: bool, limit: int) -> Sequence[Notification]:
        """Return notifications with a greater number, oldest first."""
        rows = await self._database.fetch(_READ_AFTER, inbox.store_id, inbox.user_id, number, limit, approves)
        return [_notification(row) for row in rows]

    async def read_before(
        self, inbox: Inbox, number: int | None, *, only_unread: bool, approves: bool, limit: int
    ) -> Sequence[Notification]:
        """Return notifications with a smaller number (None: from the newest), newest first."""
        query = _READ_UNREAD_BEFORE if only_unread else _READ_BEFORE
        rows = await self._database.fetch(query, inbox.store_id, inbox.user_id, number, limit, approves)
        return [_notification(row) for row in rows]

    async def count_unread(self, inbox: Inbox, *, approves: bool) -> int:
        """Return how many notifications were not read."""
        count: int = await self._database.fetchval(_COUNT_UNREAD, inbox.store_id, inbox.user_id, approves)
        return count

    async def last_numbers(self, inboxes: Sequence[Inbox]) -> Mapping[Inbox, int]:
        """Return the newest number of each inbox that has one."""
        stores = [inbox.store_id for inbox in inboxes]
        users = [inbox.user_id for inbox in inboxes]
        rows = await self._database.fetch(_LAST_NUMBERS, stores, users)
        return {inbox_of(row): row["last_number"] for row in rows}

    async def acknowledge(
        self, inbox: Inbox, ids: Sequence[NotificationId], *, approves: bool
    ) -> Sequence[Notification]:
        """Mark notifications as read, once; returns them as they are now, in the order of `ids`.

        Raises:
            NotificationNotFound: one is not in the inbox; then nothing is marked.
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
        """Hold notifications that were not published yet, oldest first; other replicas get others.

        Leaving without an exception marks them as published; with one, they stay.
        """
        async with self._database.transaction() as connection:
            rows = await connection.fetch(_HOLD_UNPUBLISHED, limit)
            # One that cannot be read is never published, and marked like the others.
            yield read_each("notification", rows, _notification, itemgetter("notification_id"))
            if rows:
                await connection.execute(
                    _MARK_PUBLISHED,
                    [row["store_id"] for row in rows],
                    [row["user_id"] for row in rows],
                    [row["number"] for row in rows],
                )

    @asynccontextmanager
    async def untold(self, *, limit: int) -> AsyncIterator[Sequence[channel_pb2.ChannelEvent]]:
        """Hold events of channels that were not published yet, as `unpublished` does; told, they are forgotten."""
        async with self._database.transaction() as connection:
            rows = await connection.fetch(_HOLD_UNTOLD, limit)
            yield read_each(
                "channel event", rows, lambda row: channel_pb2.ChannelEvent(**dict(row)), itemgetter("event_id")
            )
            if rows:
                await connection.execute(_FORGET_TOLD, [row["event_id"] for row in rows])

    async def forget(self, *, older_than_seconds: float, limit: int) -> int:
        """Delete notifications that came longer ago; returns how many. Forget what else is old, such as approvers."""
        await self._database.execute(_FORGET_APPROVERS, older_than_seconds)
        await self._database.execute(_FORGET_TESTS, older_than_seconds)
        await self._database.execute(FORGET_CODES)
        await self._database.execute(_FORGET_VIEWERS)
        await self._database.execute(_FORGET_EVENTS, older_than_seconds)
        return affected(await self._database.execute(_FORGET, older_than_seconds, limit))

    async def erase(self, part: ErasurePart) -> None:
        """Remove what was told of a conversation, and have nothing more be told of it. May be done again."""
        async with self._database.transaction() as connection:
            await connection.execute(_NO_LONG_WAIT)
            await connection.execute(_WAIT_FOR_WRITERS)
            await connection.execute(_MARK_ERASED, part.store_id, part.conversation_id)
        await self._database.execute(ERASE, part.store_id, part.conversation_id)
        await self._database.execute(_ERASE_VIEWERS, part.store_id, list(part.run_ids))
        await self._database.execute(_ERASE_MUTES, part.store_id, part.conversation_id)
        await self._database.execute(_UNMARK_OLD)

    async def note_approver(self, inbox: Inbox) -> None:
        """Remember that the user of an inbox approves calls of the store, and was seen now."""
        await self._database.execute(_NOTE_APPROVER, inbox.store_id, inbox.user_id)

    async def approvers(self, store_ids: Collection[StoreId]) -> Mapping[StoreId, Sequence[UserId]]:
        """Return who approves in each of some stores: the 100 who were seen last."""
        found: dict[StoreId, list[UserId]] = {store_id: [] for store_id in store_ids}
        for record in await self._database.fetch(_APPROVERS, sorted(store_ids), _APPROVERS_MAX):
            found[record["store_id"]].append(UserId(record["user_id"]))
        return found


def added_columns(drafts: Sequence[Draft], public_url: str = "") -> list[Sequence[object]]:
    """Return the arguments of ADD; what channels tell has links to `public_url`."""
    columns: list[Sequence[object]] = [
        [draft.inbox.store_id for draft in drafts],
        [draft.inbox.user_id for draft in drafts],
    ]
    columns += ([getattr(draft, name) for draft in drafts] for name in _DRAFT)
    columns.append([type_of(draft.kind) for draft in drafts])
    columns.append([body_of(shown(draft), public_url) for draft in drafts])
    return columns


def inbox_of(row: asyncpg.Record) -> Inbox:
    """Return whose a row is."""
    return Inbox(store_id=StoreId(row["store_id"]), user_id=UserId(row["user_id"]))


def _notification(row: asyncpg.Record) -> Notification:
    fields = {name: row[name] for name in _MESSAGE} | {"kind": f"NOTIFICATION_KIND_{row['kind'].upper()}"}
    if row["kind"] == NotificationKind.APPROVAL_NEEDED:
        fields["conversation_id"] = ""  # It is that of another user.
    return Notification(**fields)
