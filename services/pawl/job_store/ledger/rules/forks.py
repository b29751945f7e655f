"""Forks. The past of a fork belongs to another conversation, up to a point at which no calls are open.

Nothing is copied.

Past runs and calls, and the runs that undo them, stay in the source conversation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from typing import Final

import msgspec
from msgspec.structs import asdict, replace

from pawl.chassis.ids import CallId, ConversationId
from pawl.errors import ConversationErased, ConversationNotFound, ForkPointOpen, PastTooLong
from pawl.job_store.ledger.rules.conversations import ConversationRequest
from pawl.job_store.ledger.rules.rows import ConversationKey, ConversationRow, Segment, SegmentRow
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork

# Maximum number of segments in a fork. Each fork of a fork that has messages of its own adds one.
SEGMENTS_MAX: Final = 64


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a message that determines where a conversation can be forked."""

    number: int
    is_answer: bool
    is_summary: bool = False
    call_ids: tuple[CallId, ...] = ()


def fork_points(heads: Sequence[Head], open_calls: AbstractSet[CallId]) -> tuple[int, ...]:
    """Return the numbers of the messages at which the conversation can be forked.

    They are the answers with no open call in or before them. `heads` are in order. Summaries are ignored, because they
    replace earlier messages.
    """
    points: list[int] = []
    is_answered = False
    for head in heads:
        if not open_calls.isdisjoint(head.call_ids):
            break
        is_answered = is_answered if head.is_summary else head.is_answer
        if is_answered:
            points.append(head.number)
    return tuple(points)


def open_point(number: int, points: Collection[int]) -> ForkPointOpen:
    before = max((point for point in points if point < number), default=0)
    after = min((point for point in points if point > number), default=0)
    nearest = {name: point for name, point in (("before", before), ("after", after)) if point}
    if not nearest:
        return ForkPointOpen("the conversation has no answer yet: send a message, then fork after its answer")
    where = " or ".join(map(str, nearest.values()))
    return ForkPointOpen(
        f"number must refer to an answer whose calls all have results: {where}, not {number}",
        **nearest,
    )


def path_to(conversation: ConversationRow, segments: Sequence[Segment], number: int) -> tuple[Segment, ...]:
    """Return the segments that hold the conversation's messages up to `number`.

    Raises:
        PastTooLong: There are too many segments.
    """
    path: list[Segment] = []
    own = Segment(
        first_number=conversation.past_number + 1,
        last_number=number,
        source_conversation_id=conversation.conversation_id,
    )
    for each in (*segments, own):
        last_number = min(each.last_number, number)
        if each.first_number > last_number:
            continue
        first_number = each.first_number
        if path and path[-1].source_conversation_id == each.source_conversation_id:
            first_number = path.pop().first_number
        source = each.source_conversation_id
        path.append(Segment(first_number=first_number, last_number=last_number, source_conversation_id=source))
    if len(path) > SEGMENTS_MAX:
        raise PastTooLong
    return tuple(path)


def is_whole(path: Sequence[Segment], *, end_number: int, kept: int) -> bool:
    """Return whether all messages after the newest summary exist. Erased messages do not count as missing.

    `end_number` is the number of the last message that the summary covers. `kept` is the number of messages after it.
    """
    first = end_number + 1
    erased = sum(
        max(0, each.last_number - max(each.first_number, first) + 1) for each in path if not each.source_conversation_id
    )
    return kept + erased >= path[-1].last_number - end_number


class ForkConversation(ConversationRequest, frozen=True, kw_only=True):
    """Create a conversation that shares another conversation's past up to the fork point `number`. See `path_to`."""

    conversation_id: ConversationId
    number: int
    path: tuple[Segment, ...] = ()

    @property
    def row_keys(self) -> RowKeys:
        """Rows to lock. They include all sources, so that no source is erased concurrently."""
        sources = (self.conversation_id, *(each.source_conversation_id for each in self.path))
        return RowKeys(
            requests=self.request_keys,
            conversations=tuple(ConversationKey(self.store_id, source) for source in dict.fromkeys(sources) if source),
            paths=((self.store_id, self.path),),
        )

    def apply(self, unit: UnitOfWork) -> ConversationRow:
        """Create the fork and return it.

        A repeated request returns the same fork.

        Raises:
            RequestIdReused: The request id was used with a different payload.
            ConversationNotFound: The user has no such conversation.
            ConversationErased: The user has erased the conversation.
            ForkPointOpen: Some of the messages were removed.
        """
        earlier = self.earlier(unit)
        if earlier is not None:
            return self.found(unit, earlier.conversation_id)
        source = self.found(unit, self.conversation_id)
        path = tuple(replace(each, source_conversation_id=self._source(unit, each)) for each in self.path)
        end_number, kept = unit.kept[self.store_id, self.path]
        if not is_whole(path, end_number=end_number, kept=kept):
            number = self.number
            raise ForkPointOpen(
                f"messages before {number} were removed because a summary covers them: fork after the summary"
            )
        fork = unit.put_conversation(
            ConversationRow(
                store_id=self.store_id,
                conversation_id=ConversationId(unit.ids.new("conv")),
                user_id=self.user_id,
                last_number=self.number,
                create_time=unit.now,
                update_time=unit.now,
                made_title=source.shown_title,
                fork_of=source.conversation_id,
                past_number=self.number,
            )
        )
        unit.segments.add(
            SegmentRow(store_id=self.store_id, conversation_id=fork.conversation_id, **asdict(each)) for each in path
        )
        self.remember(unit, fork.conversation_id)
        return fork

    def _source(self, unit: UnitOfWork, segment: Segment) -> ConversationId:
        """Return the source of the segment, or an empty id if the source was erased after the path was read."""
        if not segment.source_conversation_id:
            return segment.source_conversation_id
        try:
            return self.found(unit, segment.source_conversation_id).conversation_id
        except (ConversationErased, ConversationNotFound):
            return ConversationId("")
