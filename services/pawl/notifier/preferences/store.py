"""Stores users' preferences in PostgreSQL, schema `notifier`."""

from __future__ import annotations

from typing import Final

import asyncpg
import msgspec

from pawl.chassis.ids import ConversationId
from pawl.errors import InvalidField
from pawl.notifier.inbox.rules import Inbox, NotificationKind
from pawl.notifier.preferences.rules import MUTES_MAX, Mute, Preferences, PreferencesChange, QuietTimes
from pawl.server.db.database import DatabaseAdapter

_FIND: Final = "SELECT kinds, quiet FROM notifier.preferences WHERE store_id = $1 AND user_id = $2"
_MUTES: Final = """
SELECT conversation_id, until_time FROM notifier.mutes
WHERE store_id = $1 AND user_id = $2 AND coalesce(until_time > now(), true)
ORDER BY conversation_id
"""
_CHANGE: Final = """
INSERT INTO notifier.preferences AS p (store_id, user_id, kinds, quiet)
VALUES ($1, $2, coalesce($3::text[], '{}'), coalesce($4::text, '{}'))
ON CONFLICT (store_id, user_id) DO UPDATE SET kinds = coalesce($3, p.kinds), quiet = coalesce($4, p.quiet)
"""
# Makes deliveries that are waiting for their first attempt due, so that they are planned again. Retries keep their
# pause. Looked up by channel, because the index on due deliveries starts with the channel.
_REPLAN: Final = """
UPDATE notifier.webhook_deliveries SET due_time = now() WHERE delivery_id IN (
    SELECT delivery_id FROM notifier.webhook_deliveries
    WHERE webhook_id = ANY (ARRAY(SELECT webhook_id FROM notifier.webhooks WHERE store_id = $1 AND user_id = $2))
    AND due_time > now() AND NOT claimed AND tries = 0
    FOR UPDATE SKIP LOCKED
)
"""
_FORGET_MUTES: Final = "DELETE FROM notifier.mutes WHERE store_id = $1 AND user_id = $2 AND until_time <= now()"
_MUTE: Final = """
INSERT INTO notifier.mutes (store_id, user_id, conversation_id, until_time)
SELECT $1, $2, $3, $4
WHERE (SELECT count(*) FROM notifier.mutes WHERE store_id = $1 AND user_id = $2 AND conversation_id <> $3) < $5
ON CONFLICT (store_id, user_id, conversation_id) DO UPDATE SET until_time = excluded.until_time
RETURNING conversation_id
"""
_UNMUTE: Final = "DELETE FROM notifier.mutes WHERE store_id = $1 AND user_id = $2 AND conversation_id = $3"


class PostgresPreferences(DatabaseAdapter):
    """Users' preferences. Every method raises DependencyUnavailable if the database is unavailable."""

    async def preferences(self, inbox: Inbox) -> Preferences:
        row = await self._database.fetchrow(_FIND, inbox.store_id, inbox.user_id)
        mutes = await self._database.fetch(_MUTES, inbox.store_id, inbox.user_id)
        found = (Mute(conversation_id=ConversationId(each[0]), until_time=each[1]) for each in mutes)
        return preferences_of(row, tuple(found)) if row is not None else Preferences(mutes=tuple(found))

    async def change(self, inbox: Inbox, change: PreferencesChange) -> None:
        """Change preferences, and update the plans of waiting deliveries."""
        kinds = list(change.kinds.kinds) if change.kinds is not None else None
        quiet = msgspec.json.encode(change.quiet).decode() if change.quiet is not None else None
        await self._database.execute(_CHANGE, inbox.store_id, inbox.user_id, kinds, quiet)
        await self._database.execute(_REPLAN, inbox.store_id, inbox.user_id)

    async def mute(self, inbox: Inbox, mute: Mute) -> None:
        """Stop deliveries about a conversation.

        Raises:
            InvalidField: The user already has the maximum number of mutes.
        """
        of = (inbox.store_id, inbox.user_id)
        await self._database.execute(_FORGET_MUTES, *of)
        if await self._database.fetchrow(_MUTE, *of, mute.conversation_id, mute.until_time, MUTES_MAX) is None:
            raise InvalidField(f"a user can mute at most {MUTES_MAX} conversations: unmute one", field="mute")

    async def unmute(self, inbox: Inbox, conversation_id: ConversationId) -> None:
        await self._database.execute(_UNMUTE, inbox.store_id, inbox.user_id, conversation_id)


def preferences_of(row: asyncpg.Record, mutes: tuple[Mute, ...] = ()) -> Preferences:
    """Return the preferences in a row. The row's columns are null if the user has never set any."""
    if row["quiet"] is None:
        return Preferences(mutes=mutes)
    return Preferences(
        kinds=tuple(map(NotificationKind, row["kinds"])),
        quiet=msgspec.json.decode(row["quiet"], type=QuietTimes),
        mutes=mutes,
    )
