"""Forks of conversations: finds the fork point, then creates the fork in one transaction."""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from pawl.chassis.ids import CallId, RunKey, UserId
from pawl.errors import ConversationNotFound, RunNotFound
from pawl.job_store.ledger.group_commit import GroupCommit, Lane
from pawl.job_store.ledger.reading import ConversationReads, Reads
from pawl.job_store.ledger.rpc.messages import head_of
from pawl.job_store.ledger.rules import forks
from pawl.job_store.ledger.rules.conversations import same
from pawl.job_store.ledger.rules.forks import ForkConversation, Head
from pawl.job_store.ledger.rules.rows import ConversationRow

_HEADS_AT_ONCE: Final = 32
# How many messages to search back for the last fork point.
_SEARCHED_MAX: Final = 4096


class Forks:
    def __init__(self, reads: Reads, conversations: ConversationReads, group_commit: GroupCommit) -> None:
        self._reads = reads
        self._conversations = conversations
        self._group_commit = group_commit

    async def fork(self, requested: ForkConversation, *, size_bytes: int) -> ConversationRow:
        """Fork a conversation.

        `requested` has no path yet. If its number is 0, fork the conversation at the last possible point.

        Idempotent by request id.

        Raises:
            ConversationNotFound: The user has no such conversation.
            ForkPointOpen: The conversation cannot be forked at that point. The error lists possible points.
            PastTooLong: The conversation is the result of too many forks in a row.
            RequestIdReused: The request id was used with a different payload.
        """
        for key in requested.request_keys:
            if earlier := same(await self._conversations.request(key), requested.fingerprint):
                return await self._conversations.by_id(requested.store_id, requested.user_id, earlier.conversation_id)
        source = await self._conversations.by_id(requested.store_id, requested.user_id, requested.conversation_id)
        if source.user_id != requested.user_id:
            raise ConversationNotFound  # The conversation is only shared for reading.
        number = await self._fork_point(source, requested.number)
        path = forks.path_to(source, await self._conversations.segments(source), number)
        operation = replace(requested, number=number, path=path)
        return await self._group_commit.run(
            operation, size_bytes=size_bytes, lane=Lane.PEOPLE, store_id=requested.store_id
        )

    async def _fork_point(self, source: ConversationRow, wanted: int) -> int:
        last = await self._last(source, await self._open_calls(source))
        if not last or wanted > last:
            raise forks.open_point(wanted, [last] if last else [])
        if wanted in {0, last}:
            return last
        start, end = max(0, wanted - _HEADS_AT_ONCE), min(last, wanted + _HEADS_AT_ONCE)
        # No call is open up to the last fork point.
        points = forks.fork_points(await self._heads(source, start, end), frozenset())
        if wanted not in points:
            raise forks.open_point(wanted, [*points, last])
        return wanted

    async def _last(self, source: ConversationRow, open_calls: frozenset[CallId]) -> int:
        heads: list[Head] = []
        unseen, start = set(open_calls), source.last_number
        while start > 0 and len(heads) < _SEARCHED_MAX:
            end, start = start, max(0, start - _HEADS_AT_ONCE)
            part = await self._heads(source, start, end)
            heads = [*part, *heads]
            unseen.difference_update(*(head.call_ids for head in part))
            points = forks.fork_points(heads, open_calls)
            if points and not unseen:
                return points[-1]
        return max(forks.fork_points(heads, open_calls), default=0)

    async def _open_calls(self, source: ConversationRow) -> frozenset[CallId]:
        """Return the calls that have no result. Only the active run can have such calls."""
        if source.active_run_id is None:
            return frozenset()
        key = RunKey(source.store_id, source.active_run_id)
        try:
            view = await self._reads.run(key, UserId(""))  # The run may belong to another user.
        except RunNotFound:
            return frozenset()
        return frozenset(call.call_id for call in (*view.pending, *view.active) if call.run_id == key.run_id)

    async def _heads(self, source: ConversationRow, after: int, end: int) -> list[Head]:
        """Return the `Head`s of the messages from `after` + 1 to `end`, in order."""
        heads: list[Head] = []
        while after < end:
            page = await self._reads.messages(
                source.store_id, source.user_id, source.conversation_id, after=after, rows_max=end - after
            )
            heads += [head_of(row) for row in page.rows if row.number <= end]
            if not page.has_more:
                break
            after = page.rows[-1].number
        return heads
