"""Channels and their deliveries in memory, behind the ports of the notifier. There is no mail server here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from pawl.chassis.ids import ConversationId, RunId, StoreId
from pawl.errors import ChannelNotFound, DeliveryNotFound, InvalidField, RequestIdReused
from pawl.notifier.app.ports import NewChannel, NewCode
from pawl.notifier.domain.channel import (
    CHANNELS_MAX,
    FORMER_SECRET_SECONDS,
    FORMER_SECRETS_MAX,
    Channel,
    ChannelId,
    ChannelKind,
)
from pawl.notifier.domain.delivery import (
    FAILING_TRIES_MAX,
    TEST,
    TESTS_KEPT,
    TRIES_MAX_AT_ONCE,
    Attempt,
    Candidate,
    ChannelDelivery,
    DeliveryCount,
    DeliveryFilter,
    DeliveryId,
    DeliveryState,
    Due,
    Outcome,
    Verdict,
    crowded,
    judge,
    notice,
    plan,
)
from pawl.notifier.domain.notification import Draft, Inbox
from pawl.notifier.domain.preferences import Preferences
from tests.rpc.notifier.model_rows import ChannelRow, DeliveryRow, NotifierRows


class MemoryChannels:
    """See the notifier's `ports.ChannelRepository`."""

    def __init__(self, rows: NotifierRows) -> None:
        self._rows = rows

    def _find(self, inbox: Inbox, channel_id: ChannelId) -> ChannelRow:
        row = self._rows.channels.get(channel_id)
        if row is None or row.inbox != inbox:
            raise ChannelNotFound
        return row

    async def create(self, new: NewChannel) -> Channel:
        rows = [row for row in self._rows.channels.values() if row.inbox == new.inbox]
        for row in rows:
            if new.request_id and row.request_id == new.request_id:
                if row.request_hash != new.request_hash:
                    raise RequestIdReused
                return row.channel
        if len(rows) >= CHANNELS_MAX:
            raise InvalidField(f"a user has at most {CHANNELS_MAX} channels: delete one", field="channel")
        self._rows.channels[new.channel.channel_id] = ChannelRow(
            inbox=new.inbox,
            channel=new.channel,
            host=new.host,
            secret=new.secret,
            request_id=new.request_id,
            request_hash=new.request_hash,
        )
        return new.channel

    async def channels(self, inbox: Inbox) -> Sequence[Channel]:
        found = [row.channel for row in self._rows.channels.values() if row.inbox == inbox]
        return sorted(found, key=lambda channel: channel.channel_id)

    async def channel(self, inbox: Inbox, channel_id: ChannelId) -> Channel:
        return self._find(inbox, channel_id).channel

    async def update(
        self, inbox: Inbox, channel_id: ChannelId, change: Callable[[Channel], tuple[Channel, str]], *, code: NewCode
    ) -> Channel:
        row = self._find(inbox, channel_id)
        before = row.channel
        channel, row.host = change(before)
        is_anew = (channel.enabled and not before.enabled) or channel.url != before.url
        row.channel = replace(
            channel,
            disable_reason="" if channel.enabled or before.enabled else before.disable_reason,
            failing_since_time=None if is_anew else before.failing_since_time,
        )
        if not channel.enabled:
            end_waiting(self._rows, channel_id)
        return row.channel

    async def delete(self, inbox: Inbox, channel_id: ChannelId) -> None:
        self._find(inbox, channel_id)
        del self._rows.channels[channel_id]
        for row in [row for row in self._rows.deliveries.values() if row.channel_id == channel_id]:
            del self._rows.deliveries[row.delivery_id]

    async def send_code(self, inbox: Inbox, channel_id: ChannelId, code: NewCode) -> None:
        self._find(inbox, channel_id)
        raise InvalidField("it is no e-mail whose address is to be confirmed", field="channel_id")

    async def confirm(self, inbox: Inbox, channel_id: ChannelId, code: str) -> Channel:
        self._find(inbox, channel_id)
        raise InvalidField("it is no e-mail", field="channel_id")

    async def rotate(self, inbox: Inbox, channel_id: ChannelId, secret: bytes) -> None:
        row = self._find(inbox, channel_id)
        until = self._rows.now() + timedelta(seconds=FORMER_SECRET_SECONDS)
        row.former = ((row.secret, until), *row.former)[:FORMER_SECRETS_MAX]
        row.secret = secret

    async def add_test(self, inbox: Inbox, test: ChannelDelivery, body: str) -> ChannelDelivery:
        self._find(inbox, test.channel_id)
        deliveries, now = self._rows.deliveries, self._rows.now()
        tests = [row for row in deliveries.values() if row.channel_id == test.channel_id and row.number is None]
        ended = sorted((row for row in tests if row.due_time is None), key=lambda row: row.insert_time)
        for row in ended[: max(0, len(ended) - TESTS_KEPT)]:
            del deliveries[row.delivery_id]
        found = next((row for row in tests if row.due_time is not None), None)
        if found is None:
            found = deliveries[test.delivery_id] = DeliveryRow(
                delivery_id=test.delivery_id,
                channel_id=test.channel_id,
                inbox=inbox,
                type=test.type,
                body=body,
                number=None,
                insert_time=now,
                due_time=now,
            )
        return _seen(found)

    async def deliveries(
        self, inbox: Inbox, wanted: DeliveryFilter, before: tuple[datetime, str] | None, *, limit: int
    ) -> Sequence[ChannelDelivery]:
        found = [
            each for each in self._seen_of(inbox, wanted.channel_id) if each.state in (wanted.states or (each.state,))
        ]
        found.sort(key=lambda each: (each.create_time, each.delivery_id), reverse=True)
        return [each for each in found if before is None or (each.create_time, each.delivery_id) < before][:limit]

    async def count_deliveries(self, inbox: Inbox, channel_id: ChannelId) -> Sequence[DeliveryCount]:
        counts = Counter(each.state for each in self._seen_of(inbox, channel_id))
        return [DeliveryCount(state=state, count=counts[state]) for state in DeliveryState if counts[state]]

    def _seen_of(self, inbox: Inbox, channel_id: ChannelId) -> list[ChannelDelivery]:
        if channel_id:
            self._find(inbox, channel_id)
        rows = [row for row in self._rows.deliveries.values() if row.inbox == inbox]
        return [_seen(row) for row in rows if row.channel_id == (channel_id or row.channel_id)]

    async def unsubscribe(self, store_id: StoreId, token: str) -> None:
        raise ChannelNotFound

    async def resend(self, inbox: Inbox, delivery_ids: Sequence[DeliveryId]) -> Sequence[ChannelDelivery]:
        rows = [self._rows.deliveries.get(delivery_id) for delivery_id in delivery_ids]
        found = [row for row in rows if row is not None and row.inbox == inbox]
        if len(found) != len(rows):
            raise DeliveryNotFound
        for row in found:
            row.state, row.is_skipped, row.is_resent = DeliveryState.WAITING, False, True
            if not row.is_claimed:
                row.tries, row.due_time = 0, self._rows.now()
        return list(map(_seen, found))


def end_waiting(rows: NotifierRows, channel_id: ChannelId) -> None:
    """End what waits for a channel that is disabled, but for what is tried at this moment."""
    for row in rows.deliveries.values():
        waits = row.due_time is not None and not row.is_claimed and row.number is not None
        if row.channel_id == channel_id and waits:
            row.state, row.due_time, row.is_skipped = DeliveryState.DEAD, None, False
            row.last_error = "the channel was disabled"
            rows.tell_end(row, rows.now())


def _seen(row: DeliveryRow) -> ChannelDelivery:
    is_skipped = row.is_skipped and row.due_time is None
    return ChannelDelivery(
        delivery_id=row.delivery_id,
        channel_id=row.channel_id,
        type=row.type,
        number=row.number or 0,
        state=DeliveryState.SKIPPED if is_skipped else row.state,
        tries=row.tries,
        create_time=row.insert_time,
        try_time=row.try_time,
        next_try_time=row.due_time,
        status=row.status,
        latency_milliseconds=row.latency_ms,
        last_error=row.last_error,
    )


class MemoryDeliveries:
    """See the notifier's `ports.DeliveryQueue`."""

    def __init__(self, rows: NotifierRows) -> None:
        self._rows = rows

    async def due(self, at_work: Sequence[Candidate], *, limit: int) -> Sequence[Candidate]:
        hosts = crowded((each.host for each in at_work), "host")
        stores = crowded((each.inbox.store_id for each in at_work), "store")
        tries = Counter(each.inbox for each in at_work)
        tried = {each.channel_id for each in at_work}
        found: list[tuple[Candidate, datetime]] = []
        for row in self._rows.channels.values():
            is_failing, inbox = row.channel.failing_since_time is not None, row.inbox
            is_full = row.host in hosts or inbox.store_id in stores or tries[inbox] >= TRIES_MAX_AT_ONCE["user"]
            if is_full or (is_failing and row.channel.channel_id in tried):
                continue
            for time, delivery_id in self._due_of(row)[
                : FAILING_TRIES_MAX if is_failing else TRIES_MAX_AT_ONCE["host"]
            ]:
                candidate = Candidate(
                    delivery_id=delivery_id,
                    channel_id=row.channel.channel_id,
                    inbox=inbox,
                    host=row.host,
                    is_failing=is_failing,
                )
                found.append((candidate, time))
        found.sort(key=lambda each: (each[1], each[0].delivery_id))
        places: list[tuple[int, int]] = []
        seen = Counter(tries)
        for number, (candidate, _) in enumerate(found):
            seen[candidate.inbox] += 1
            places.append((seen[candidate.inbox], number))
        return [found[number][0] for _, number in sorted(places)][:limit]

    def _due_of(self, channel: ChannelRow) -> list[tuple[datetime, DeliveryId]]:
        now, channel_id = self._rows.now(), channel.channel.channel_id
        rows = [row for row in self._rows.deliveries.values() if row.channel_id == channel_id]
        return sorted((row.due_time, row.delivery_id) for row in rows if row.due_time and row.due_time <= now)

    async def claim(self, candidates: Sequence[Candidate], *, seconds: float) -> Sequence[Attempt]:
        now, attempts = self._rows.now(), []
        until = now + timedelta(seconds=seconds)
        for candidate in sorted(candidates, key=lambda each: each.delivery_id):
            row = self._rows.deliveries.get(candidate.delivery_id)
            if row is None or row.due_time is None or row.due_time > now:
                continue
            channel = self._rows.channels[row.channel_id]
            planned = plan(self._due(row, channel, now), now)
            if planned.sends:
                attempts.append(_attempt(candidate, row, channel, now, until))
            is_skipped = planned.state is DeliveryState.SKIPPED
            row.is_claimed, row.due_time = planned.sends, until if planned.sends else planned.until_time
            row.state, row.is_skipped = DeliveryState.DEAD if is_skipped else planned.state, is_skipped
            row.last_error = planned.reason or row.last_error
            row.was_put_off = row.was_put_off or not planned.sends
            self._rows.tell_end(row, now)
        return attempts

    def _due(self, row: DeliveryRow, channel: ChannelRow, now: datetime) -> Due:
        note = self._rows.note_of(row)
        conversation_id = note.draft.conversation_id if note else ConversationId("")
        return Due(
            type=row.type,
            is_confirmed=True,
            code_is_over=False,
            emails=0,
            is_asked=row.is_asked,
            was_claimed=row.is_claimed,
            enabled=channel.channel.enabled,
            is_muted=note is not None and conversation_id in self._rows.mutes_of(row.inbox, now),
            is_read=note is not None and note.read_time is not None,
            is_over=note is not None and note.is_over,
            is_watched=note is not None and self._is_watched(note.draft),
            after_seconds=channel.channel.after_seconds or 0,
            tries=row.tries,
            create_time=row.insert_time,
            was_put_off=row.was_put_off,
            preferences=self._rows.preferences.get(row.inbox, Preferences()),
        )

    def _is_watched(self, draft: Draft) -> bool:
        seen = self._rows.viewers.get((draft.inbox, draft.run_id))
        return seen is not None and seen > draft.create_time

    async def give_back(self, attempts: Sequence[Attempt]) -> None:
        for attempt in attempts:
            row = self._claimed(attempt)
            if row is not None:
                row.is_claimed, row.due_time = False, self._rows.now()

    def _claimed(self, attempt: Attempt) -> DeliveryRow | None:
        row = self._rows.deliveries.get(attempt.candidate.delivery_id)
        return row if row is not None and row.is_claimed and row.due_time == attempt.claim_until else None

    async def settle(self, attempt: Attempt, outcome: Outcome, *, chance: float) -> Verdict | None:
        row = self._claimed(attempt)
        if not outcome.is_success:
            return None if row is None else self._fail(row, attempt, outcome, chance)
        if row is None:
            return None
        verdict = Verdict(state=DeliveryState.DELIVERED)
        self._settle(row, outcome, verdict)
        channel = self._rows.channels.get(attempt.candidate.channel_id)
        if channel is not None:
            channel.channel = replace(channel.channel, failing_since_time=None)
        return verdict

    def _settle(self, row: DeliveryRow, outcome: Outcome, verdict: Verdict) -> None:
        now, wait = self._rows.now(), verdict.retry_seconds
        row.is_claimed, row.tries, row.state, row.try_time = False, row.tries + 1, verdict.state, now
        row.due_time = None if wait is None else now + timedelta(seconds=wait)
        row.status, row.latency_ms, row.last_error = (
            outcome.status,
            round(outcome.latency_seconds * 1000),
            outcome.message,
        )
        self._rows.tell_end(row, now)

    def _fail(self, row: DeliveryRow, attempt: Attempt, outcome: Outcome, chance: float) -> Verdict:
        channel, now = self._rows.channels[row.channel_id], self._rows.now()
        before = channel.channel
        is_test, is_former = attempt.type == TEST, attempt.url != before.url
        verdict = judge(
            outcome,
            tries=attempt.tries,
            is_test=is_test,
            enabled=before.enabled,
            failing_since=before.failing_since_time or now,
            now=now,
            chance=chance,
        )
        if not before.enabled or is_former:
            verdict = replace(verdict, disable_reason="")
        self._settle(row, outcome, verdict)
        after = before
        if outcome.is_receivers and not (is_test or is_former or attempt.is_lost):
            after = replace(after, failing_since_time=before.failing_since_time or now)
        if verdict.disable_reason:
            after = replace(after, enabled=False, disable_reason=verdict.disable_reason)
        channel.channel = after
        if verdict.disable_reason:
            end_waiting(self._rows, row.channel_id)
            self._rows.note_event("channel.disabled", row, verdict.disable_reason, now)
            if not is_test:
                disabled = replace(before, disable_reason=verdict.disable_reason)
                self._rows.add([notice(row.inbox, disabled, row.delivery_id, now)], now)
        return verdict

    async def note_viewers(self, viewers: Collection[tuple[Inbox, RunId]]) -> None:
        now, told = self._rows.now(), {row.inbox for row in self._rows.channels.values() if row.channel.enabled}
        for viewer in viewers:
            if viewer[0] in told:
                self._rows.viewers[viewer] = now

    async def count_waiting(self) -> Mapping[ChannelKind, tuple[int, float]]:
        count, delay, now = 0, 0.0, self._rows.now()
        for row in self._rows.deliveries.values():
            if row.due_time is not None:
                count += 1
                is_failing = self._rows.channels[row.channel_id].channel.failing_since_time is not None
                if not row.is_claimed and not is_failing:
                    delay = max(delay, (now - row.due_time).total_seconds())
        return dict.fromkeys(ChannelKind, (0, 0.0)) | {ChannelKind.WEBHOOK: (count, delay)}


def _attempt(candidate: Candidate, row: DeliveryRow, channel: ChannelRow, now: datetime, until: datetime) -> Attempt:
    return Attempt(
        candidate=candidate,
        url=channel.channel.url,
        secrets=(channel.secret, *(secret for secret, end in channel.former if end > now)),
        type=row.type,
        body=row.body,
        tries=row.tries + 1,
        claim_until=until,
        is_lost=row.is_claimed,
    )
