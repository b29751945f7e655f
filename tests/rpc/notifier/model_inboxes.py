"""The notifier's database in memory, behind its ports: inboxes and preferences.

What it takes for granted of PostgreSQL is checked against it in tests/rpc/notifier/test_contract.py. Each transaction
is one instant of virtual time, and all or nothing; what a process that died had locked is free.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta

from pawl.chassis.erasures import ErasurePart
from pawl.chassis.ids import ConversationId, StoreId, UserId
from pawl.errors import InvalidField, NotificationNotFound
from pawl.notifier.domain.announcement import Over
from pawl.notifier.domain.delivery import ChannelEvent
from pawl.notifier.domain.notification import Draft, Inbox, Notification, NotificationId, NotificationKind
from pawl.notifier.domain.preferences import MUTES_MAX, Mute, Preferences, PreferencesChange
from tests.rpc.notifier.model_rows import NoteRow, NotifierRows

_APPROVERS_MAX = 100
_NEEDS = (NotificationKind.INPUT_NEEDED, NotificationKind.ATTENTION_NEEDED, NotificationKind.APPROVAL_NEEDED)
_OF_APPROVERS = NotificationKind.APPROVAL_NEEDED


class MemoryInboxes:
    """See the notifier's `ports.Store`. `lives` says whether the process is there whose it is."""

    def __init__(self, rows: NotifierRows, lives: Callable[[], bool] = lambda: True) -> None:
        self._rows = rows
        self._lives = lives

    async def add(self, drafts: Sequence[Draft]) -> int:
        return self._rows.add(drafts, self._rows.now())

    async def note_over(self, over: Sequence[Over]) -> None:
        for each in over:
            for row in self._rows.notes.values():
                draft, is_call = row.draft, row.draft.call_id == each.call_id
                is_it = (draft.inbox.store_id, draft.run_id) == (each.store_id, each.run_id)
                if is_it and draft.kind in _NEEDS and draft.create_time < each.time:
                    of_all = draft.kind is _OF_APPROVERS
                    row.is_over = row.is_over or ((each.run_ended or is_call) if of_all else each.call_id == "")

    async def waiting(
        self, conversations: Collection[tuple[Inbox, ConversationId]]
    ) -> AbstractSet[tuple[Inbox, ConversationId]]:
        needs = [r.draft for r in self._rows.notes.values() if not r.is_over and r.draft.kind in _NEEDS]
        return {(d.inbox, d.conversation_id) for d in needs if d.kind is not _OF_APPROVERS} & set(conversations)

    def _of(self, inbox: Inbox, *, approves: bool) -> list[NoteRow]:
        rows = [row for row in self._rows.notes.values() if row.draft.inbox == inbox]
        return sorted((row for row in rows if approves or row.draft.kind is not _OF_APPROVERS), key=lambda r: r.number)

    async def read_after(self, inbox: Inbox, number: int, *, approves: bool, limit: int) -> Sequence[Notification]:
        return [row.notification for row in self._of(inbox, approves=approves) if row.number > number][:limit]

    async def read_before(
        self, inbox: Inbox, number: int | None, *, only_unread: bool, approves: bool, limit: int
    ) -> Sequence[Notification]:
        rows = [row for row in self._of(inbox, approves=approves) if number is None or row.number < number]
        return [row.notification for row in reversed(rows) if not (only_unread and row.read_time)][:limit]

    async def count_unread(self, inbox: Inbox, *, approves: bool) -> int:
        return sum(row.read_time is None for row in self._of(inbox, approves=approves))

    async def last_numbers(self, inboxes: Sequence[Inbox]) -> Mapping[Inbox, int]:
        return {inbox: self._rows.numbers[inbox] for inbox in inboxes if inbox in self._rows.numbers}

    async def acknowledge(
        self, inbox: Inbox, ids: Sequence[NotificationId], *, approves: bool
    ) -> Sequence[Notification]:
        by_id = {row.draft.notification_id: row for row in self._of(inbox, approves=approves)}
        if not set(ids) <= set(by_id):
            raise NotificationNotFound
        for each in ids:
            by_id[each].read_time = by_id[each].read_time or self._rows.now()
        return [by_id[each].notification for each in ids]

    @asynccontextmanager
    async def _hold(self, keys: Sequence[Hashable]) -> AsyncIterator[None]:
        self._rows.held.update(dict.fromkeys(keys, self._lives))
        try:
            yield
        finally:
            for key in keys:
                self._rows.held.pop(key, None)

    @asynccontextmanager
    async def unpublished(self, *, limit: int) -> AsyncIterator[Sequence[Notification]]:
        waiting = [key for key, row in self._rows.notes.items() if not row.is_published]
        keys = self._rows.free(waiting)[:limit]
        async with self._hold(keys):
            yield [self._rows.notes[key].notification for key in keys]
            for key in keys:
                if key in self._rows.notes:
                    self._rows.notes[key].is_published = True

    @asynccontextmanager
    async def untold(self, *, limit: int) -> AsyncIterator[Sequence[ChannelEvent]]:
        keys = self._rows.free(self._rows.events)[:limit]
        async with self._hold(keys):
            yield [self._rows.events[key] for key in keys]
            for key in keys:
                self._rows.told.append(self._rows.events.pop(key))

    async def forget(self, *, older_than_seconds: float, limit: int) -> int:
        begin = self._rows.now() - timedelta(seconds=older_than_seconds)
        old = [key for key, row in self._rows.notes.items() if row.insert_time < begin][:limit]
        self._rows.remove(old)
        return len(old)

    async def erase(self, part: ErasurePart) -> None:
        """Remove what was told of a conversation, and have nothing more be told of it."""
        self._rows.erased.add((part.store_id, part.conversation_id))
        erased = (part.store_id, part.conversation_id)
        of_it = [k for k, r in self._rows.notes.items() if (k[0].store_id, r.draft.conversation_id) == erased]
        self._rows.remove(of_it)
        for viewer in [
            key for key in self._rows.viewers if key[0].store_id == part.store_id and key[1] in part.run_ids
        ]:
            del self._rows.viewers[viewer]
        for key in [key for key in self._rows.mutes if (key[0].store_id, key[1]) == erased]:
            del self._rows.mutes[key]

    async def note_approver(self, inbox: Inbox) -> None:
        self._rows.approvers[inbox] = self._rows.now()

    async def approvers(self, store_ids: Collection[StoreId]) -> Mapping[StoreId, Sequence[UserId]]:
        seen = sorted(self._rows.approvers, key=lambda inbox: (self._rows.approvers[inbox], inbox.user_id))
        return {
            store_id: [inbox.user_id for inbox in reversed(seen) if inbox.store_id == store_id][:_APPROVERS_MAX]
            for store_id in store_ids
        }


class MemoryPreferences:
    """See the notifier's `ports.PreferenceRepository`."""

    def __init__(self, rows: NotifierRows) -> None:
        self._rows = rows

    async def preferences(self, inbox: Inbox) -> Preferences:
        mutes = sorted(self._rows.mutes_of(inbox, self._rows.now()).items())
        found = tuple(Mute(conversation_id=conversation, until_time=until) for conversation, until in mutes)
        return replace(self._rows.preferences.get(inbox, Preferences()), mutes=found)

    async def change(self, inbox: Inbox, change: PreferencesChange) -> None:
        before, now = self._rows.preferences.get(inbox, Preferences()), self._rows.now()
        kinds = before.kinds if change.kinds is None else change.kinds.kinds
        quiet = before.quiet if change.quiet is None else change.quiet
        self._rows.preferences[inbox] = Preferences(kinds=kinds, quiet=quiet)
        for row in self._rows.deliveries.values():
            waits = row.due_time is not None and row.due_time > now and not row.is_claimed
            if row.inbox == inbox and waits and row.tries == 0:
                row.due_time = now

    async def mute(self, inbox: Inbox, mute: Mute) -> None:
        held = self._rows.mutes_of(inbox, self._rows.now())
        if len(held.keys() - {mute.conversation_id}) >= MUTES_MAX:
            raise InvalidField(f"a user mutes at most {MUTES_MAX} conversations: unmute one", field="mute")
        self._rows.mutes[inbox, mute.conversation_id] = mute.until_time

    async def unmute(self, inbox: Inbox, conversation_id: ConversationId) -> None:
        self._rows.mutes.pop((inbox, conversation_id), None)
