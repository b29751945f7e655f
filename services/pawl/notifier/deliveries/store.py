"""Stores the delivery queue in PostgreSQL, schema `notifier`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from operator import itemgetter
from typing import Final

import asyncpg

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CredentialId, RunId, UserId
from pawl.notifier.channels.rules import CODE_LASTS, ChannelId, ChannelKind
from pawl.notifier.channels.store import (
    CHANGED,
    LOCK,
    LOCK_INBOX,
    LOCK_WAITING,
    NOW,
    WITH_EVENTS,
    channel_of,
    end_disabled,
)
from pawl.notifier.deliveries.rules import (
    CODE,
    FAILING_TRIES_MAX,
    NOT_SENT,
    TEST,
    TRIES_MAX_AT_ONCE,
    Attempt,
    Candidate,
    DeliveryId,
    DeliveryState,
    Due,
    Outcome,
    Plan,
    Verdict,
    crowded,
    judge,
    plan,
)
from pawl.notifier.inbox.rules import Inbox
from pawl.notifier.inbox.store import inbox_of
from pawl.notifier.preferences.store import preferences_of
from pawl.server.db.database import Connection, DatabaseAdapter, read_each

# Jumps from one channel with waiting deliveries to the next and reads only its oldest ones, so the queue's length does
# not matter.
DUE: Final = """
WITH RECURSIVE waiting AS (
    SELECT min(webhook_id) AS webhook_id FROM notifier.webhook_deliveries WHERE due_time IS NOT NULL
    UNION ALL
    SELECT (
        SELECT min(webhook_id) FROM notifier.webhook_deliveries
        WHERE due_time IS NOT NULL AND webhook_id > waiting.webhook_id
    ) FROM waiting WHERE webhook_id IS NOT NULL
),
in_progress AS (
    SELECT store_id, user_id, count(*) AS tries FROM unnest($4::text[], $5::text[]) AS each (store_id, user_id)
    GROUP BY store_id, user_id
)
SELECT d.delivery_id, webhook_id, store_id, user_id, w.host, w.failing_since IS NOT NULL AS is_failing
FROM waiting
JOIN notifier.webhooks AS w USING (webhook_id)
LEFT JOIN in_progress USING (store_id, user_id)
CROSS JOIN LATERAL (
    SELECT delivery_id, due_time FROM notifier.webhook_deliveries AS each
    WHERE each.webhook_id = w.webhook_id AND each.due_time <= now()
    ORDER BY each.due_time LIMIT CASE WHEN w.failing_since IS NULL THEN $6::int ELSE $7::int END
) AS d
WHERE w.host <> ALL ($1::text[])
AND store_id <> ALL ($2::text[])
AND (w.failing_since IS NULL OR webhook_id <> ALL ($3::text[]))
AND coalesce(tries, 0) < $8
ORDER BY coalesce(tries, 0) + row_number() OVER (PARTITION BY store_id, user_id ORDER BY d.due_time), d.due_time
LIMIT $9
"""
HOLD_DUE: Final = """
SELECT
    d.delivery_id, d.type, d.body, d.tries, d.claimed, d.number IS NULL OR d.resent AS is_requested, now() AS now,
    d.insert_time, d.put_off,
    w.url NOT LIKE 'mailto:%' OR w.confirm_time IS NOT NULL AS is_confirmed,
    w.confirm_time IS NOT NULL OR w.code_time <= now() - $2::interval AS code_is_void,
    CASE WHEN w.url LIKE 'mailto:%' THEN (
        SELECT count(*) FROM notifier.webhook_deliveries AS sent
        JOIN notifier.webhooks AS by USING (webhook_id)
        WHERE (sent.store_id, sent.user_id) = (d.store_id, d.user_id) AND sent.try_time > now() - interval '1 hour'
        AND by.url LIKE 'mailto:%'
    ) ELSE 0 END AS emails,
    n.read_time IS NOT NULL AS is_read, n.over_time IS NOT NULL AS is_resolved, EXISTS (
        SELECT FROM notifier.viewers AS v
        WHERE (v.store_id, v.user_id, v.run_id) = (n.store_id, n.user_id, n.run_id)
        AND v.seen_time > n.create_time
    ) AS is_watched,
    w.url, w.after_seconds, w.enabled, w.credential_id, w.delegate_user_id, w.secret, ARRAY(
        SELECT former FROM unnest(w.former_secrets, w.former_times) AS each (former, until) WHERE until > now()
    ) AS former_secrets,
    p.kinds, p.quiet, EXISTS (
        SELECT FROM notifier.mutes AS m
        WHERE (m.store_id, m.user_id, m.conversation_id) = (d.store_id, d.user_id, n.conversation_id)
        AND coalesce(m.until_time > now(), true)
    ) AS is_muted
FROM notifier.webhook_deliveries AS d
JOIN notifier.webhooks AS w USING (webhook_id)
LEFT JOIN notifier.notifications AS n ON (n.store_id, n.user_id, n.number) = (d.store_id, d.user_id, d.number)
LEFT JOIN notifier.preferences AS p ON (p.store_id, p.user_id) = (d.store_id, d.user_id)
WHERE d.delivery_id = ANY ($1::text[]) AND d.due_time <= now()
ORDER BY d.delivery_id
FOR UPDATE OF d SKIP LOCKED
"""
CLAIM: Final = WITH_EVENTS.format(
    """
UPDATE notifier.webhook_deliveries AS d SET
    claimed = each.claimed, due_time = each.due_time, last_error = coalesce(each.reason, last_error),
    state = each.state, put_off = put_off OR NOT each.claimed
FROM unnest($1::text[], $2::boolean[], $3::timestamptz[], $4::text[], $5::text[])
    AS each (delivery_id, claimed, due_time, reason, state)
WHERE d.delivery_id = each.delivery_id
""",
    CHANGED,
)
# IS NOT DISTINCT FROM prevents the planner from looking up deliveries by the time they are due, because many may be
# due.
RELEASE: Final = """
UPDATE notifier.webhook_deliveries SET claimed = false, due_time = now()
WHERE delivery_id IN (
    SELECT d.delivery_id FROM notifier.webhook_deliveries AS d
    JOIN unnest($1::text[], $2::timestamptz[]) AS own (delivery_id, until) USING (delivery_id)
    WHERE claimed AND due_time IS NOT DISTINCT FROM until
    FOR UPDATE OF d SKIP LOCKED
)
"""
_SETTLEMENT: Final = """
UPDATE notifier.webhook_deliveries AS d SET
    claimed = false, tries = tries + 1, state = $3, due_time = now() + make_interval(secs => $4), try_time = now(),
    status = $5, latency_ms = $6, last_error = $7
WHERE delivery_id = $1 AND claimed AND due_time IS NOT DISTINCT FROM $2
"""
SETTLE: Final = WITH_EVENTS.format(_SETTLEMENT, CHANGED)
_SETTLE_SUCCESS: Final = WITH_EVENTS.format(
    _SETTLEMENT,
    "SELECT failing_since IS NOT NULL AS is_failing FROM changed JOIN notifier.webhooks USING (webhook_id)",
)
# Sorted, so that replicas that receive the same message do not deadlock.
_NOTE_VIEWERS: Final = """
INSERT INTO notifier.viewers (store_id, user_id, run_id)
SELECT DISTINCT o.* FROM unnest($1::text[], $2::text[], $3::text[]) AS o (store_id, user_id, run_id)
WHERE EXISTS (
    SELECT FROM notifier.webhooks AS w WHERE (w.store_id, w.user_id) = (o.store_id, o.user_id) AND w.enabled
)
ORDER BY store_id, user_id, run_id
ON CONFLICT (store_id, user_id, run_id) DO UPDATE SET seen_time = now()
"""
_SUCCEEDED: Final = """
UPDATE notifier.webhooks SET failing_since = NULL WHERE webhook_id = $1 AND failing_since IS NOT NULL
"""
_FAILED: Final = """
UPDATE notifier.webhooks SET
    failing_since = CASE WHEN $3 THEN coalesce(failing_since, now()) ELSE failing_since END,
    enabled = enabled AND $2 = '',
    disable_reason = CASE WHEN $2 = '' THEN disable_reason ELSE $2 END
WHERE webhook_id = $1
"""
_UNREADABLE: Final = "the user's preferences cannot be read"
_UNREADABLE_PAUSE_MIN: Final = timedelta(minutes=1)
_UNREADABLE_PAUSE_MAX: Final = timedelta(hours=1)
_DUE_SECONDS: Final = """
SELECT extract(epoch FROM min(due_time) - clock_timestamp())::float8 FROM notifier.webhook_deliveries
"""
_COUNT_WAITING: Final = """
SELECT
    CASE WHEN w.url ILIKE 'mailto:%' THEN 'email' ELSE 'webhook' END AS kind,
    count(*), coalesce(extract(epoch FROM max(now() - d.due_time) FILTER (
        WHERE NOT d.claimed AND d.due_time <= now() AND w.failing_since IS NULL
    )), 0)::float8 AS delay_seconds
FROM notifier.webhook_deliveries AS d
JOIN notifier.webhooks AS w USING (webhook_id)
WHERE d.due_time IS NOT NULL GROUP BY kind
"""


class PostgresDeliveries(DatabaseAdapter):
    """The queue of waiting deliveries. Every method raises DependencyUnavailable if the database is unavailable.

    Locks are taken in this order: an inbox, a channel, its deliveries by id.
    """

    async def due(self, in_progress: Sequence[Candidate], *, limit: int) -> Sequence[Candidate]:
        """Return due deliveries, except those whose host, user, store or failing channel has no free slot.

        Users with the fewest deliveries in progress come first. For each user, the deliveries that have been due
        longest come first.
        """
        rows = await self._database.fetch(
            DUE,
            crowded((each.host for each in in_progress), "host"),
            crowded((each.inbox.store_id for each in in_progress), "store"),
            [each.channel_id for each in in_progress],
            [each.inbox.store_id for each in in_progress],
            [each.inbox.user_id for each in in_progress],
            TRIES_MAX_AT_ONCE["host"],
            FAILING_TRIES_MAX,
            TRIES_MAX_AT_ONCE["user"],
            limit,
        )
        return [
            Candidate(
                delivery_id=DeliveryId(row["delivery_id"]),
                channel_id=ChannelId(row["webhook_id"]),
                inbox=inbox_of(row),
                host=row["host"],
                is_failing=row["is_failing"],
            )
            for row in rows
        ]

    async def due_seconds(self) -> float | None:
        """Return the seconds until the next delivery is due, or None if no delivery is waiting.

        The number is negative if a delivery is overdue.
        """
        seconds: float | None = await self._database.fetchval(_DUE_SECONDS)
        return seconds

    async def claim(self, candidates: Sequence[Candidate], *, seconds: float) -> Sequence[Attempt]:
        """Claim deliveries that are still due and should be sent now. No other process attempts a claimed delivery.

        Other deliveries are postponed or ended, as `plan` decides.
        """
        by_id = {candidate.delivery_id: candidate for candidate in candidates}
        async with self._database.transaction() as connection:
            rows = await connection.fetch(HOLD_DUE, list(by_id), CODE_LASTS)
            if not rows:
                return []
            plans = [(row, _plan(row)) for row in rows]
            until = rows[0]["now"] + timedelta(seconds=seconds)
            changes = [
                (
                    row["delivery_id"],
                    each.sends,
                    until if each.sends else each.until_time,
                    each.reason or None,
                    each.state,
                )
                for row, each in plans
            ]
            await connection.execute(CLAIM, *map(list, zip(*changes, strict=True)))
        return [_attempt(by_id[row["delivery_id"]], row, until) for row, each in plans if each.sends]

    async def release(self, attempts: Sequence[Attempt]) -> None:
        """Release claims as if they had never been made. This does not affect attempts that are already settled."""
        ids = [attempt.candidate.delivery_id for attempt in attempts]
        await self._database.execute(RELEASE, ids, [attempt.claim_until for attempt in attempts])

    async def settle(self, attempt: Attempt, outcome: Outcome, *, chance: float) -> Verdict | None:
        """Record the outcome of an attempt. Return None if the claim has expired or the delivery was deleted.

        If the outcome disables the channel, the user is notified in the same transaction, except after a test.
        """
        if outcome.is_success:
            # Does not lock the channel, which may have many concurrent deliveries.
            verdict = Verdict(state=DeliveryState.DELIVERED)
            settled = await self._database.fetchrow(_SETTLE_SUCCESS, *_settlement(attempt, outcome, verdict))
            if settled is None:
                return None
            if settled["is_failing"]:
                await self._database.execute(_SUCCEEDED, attempt.candidate.channel_id)
            return verdict
        async with self._database.transaction() as connection:
            return await _settle_failure(connection, attempt, outcome, chance)

    async def note_viewers(self, viewers: Collection[tuple[Inbox, RunId]]) -> None:
        """Record that users have just seen these runs. Users without channels are ignored."""
        columns = zip(*((inbox.store_id, inbox.user_id, run_id) for inbox, run_id in viewers), strict=True)
        await self._database.execute(_NOTE_VIEWERS, *map(list, columns))

    async def count_waiting(self) -> Mapping[ChannelKind, tuple[int, float]]:
        """Return, for each kind of channel, the number of waiting deliveries and the longest delay in seconds.

        The delay is the time since a delivery became due. It ignores deliveries in progress and failing channels.
        """
        rows = await self._database.fetch(_COUNT_WAITING)
        found = {ChannelKind(row["kind"]): (row["count"], row["delay_seconds"]) for row in rows}
        return dict.fromkeys(ChannelKind, (0, 0.0)) | found


async def _settle_failure(connection: Connection, attempt: Attempt, outcome: Outcome, chance: float) -> Verdict | None:
    inbox, channel_id = attempt.candidate.inbox, attempt.candidate.channel_id
    await connection.execute(LOCK_INBOX, inbox.store_id, inbox.user_id)
    row = await connection.fetchrow(LOCK, inbox.store_id, inbox.user_id, channel_id)
    if row is None:
        return None
    is_test = attempt.type in {TEST, CODE}
    is_former = (attempt.url, attempt.saved_by.credential_id) != (row["url"], row["credential_id"])
    now: datetime = await connection.fetchval(NOW)
    verdict = judge(
        outcome,
        tries=attempt.tries,
        is_test=attempt.type == TEST,
        enabled=row["enabled"] or attempt.type == CODE,
        failing_since=row["failing_since"] or now,
        now=now,
        chance=chance,
    )
    if is_former and outcome == NOT_SENT:
        # The channel was saved with another key during this attempt.
        verdict = Verdict(state=DeliveryState.WAITING, retry_seconds=0.0)
    if not row["enabled"] or is_former:
        verdict = replace(verdict, disable_reason="")
    if verdict.disable_reason:
        await connection.execute(LOCK_WAITING, channel_id)
    if await connection.fetchrow(SETTLE, *_settlement(attempt, outcome, verdict)) is None:
        return None
    is_its_failure = outcome.is_receivers and not (is_test or is_former or attempt.is_lost)
    await connection.execute(_FAILED, channel_id, verdict.disable_reason, is_its_failure)
    if verdict.disable_reason:
        disabled = replace(channel_of(row), disable_reason=verdict.disable_reason)
        ended_by = attempt.candidate.delivery_id
        await end_disabled(connection, inbox, disabled, ended_by, notice_time=None if is_test else now)
    return verdict


def _settlement(attempt: Attempt, outcome: Outcome, verdict: Verdict) -> tuple[object, ...]:
    return (
        attempt.candidate.delivery_id,
        attempt.claim_until,
        verdict.state,
        verdict.retry_seconds,
        outcome.status,
        round(outcome.latency_seconds * 1000),
        outcome.message,
    )


def _plan(row: asyncpg.Record) -> Plan:
    """Return the plan for a delivery. If planning fails, the delivery is planned again after increasing pauses."""
    now: datetime = row["now"]
    pause = min(max(now - row["insert_time"], _UNREADABLE_PAUSE_MIN), _UNREADABLE_PAUSE_MAX)
    judged = read_each("delivery", [row], lambda each: plan(_due(each), now), itemgetter("delivery_id"))
    return judged[0] if judged else Plan(reason=_UNREADABLE, until_time=now + pause)


def _due(row: asyncpg.Record) -> Due:
    return Due(
        type=row["type"],
        is_confirmed=row["is_confirmed"],
        code_is_void=bool(row["code_is_void"]),
        emails=row["emails"],
        is_requested=row["is_requested"],
        was_claimed=row["claimed"],
        enabled=row["enabled"],
        is_muted=row["is_muted"],
        is_read=row["is_read"],
        is_resolved=row["is_resolved"],
        is_watched=row["is_watched"],
        after_seconds=row["after_seconds"],
        tries=row["tries"],
        create_time=row["insert_time"],
        was_delayed=row["put_off"],
        preferences=preferences_of(row),
    )


def _attempt(candidate: Candidate, row: asyncpg.Record, claim_until: datetime) -> Attempt:
    return Attempt(
        candidate=candidate,
        url=row["url"],
        secrets=(row["secret"], *row["former_secrets"]),
        type=row["type"],
        body=row["body"],
        tries=row["tries"] + 1,
        claim_until=claim_until,
        saved_by=Principal(
            store_id=candidate.inbox.store_id,
            user_id=candidate.inbox.user_id,
            credential_id=CredentialId(row["credential_id"]),
            delegate_user_id=UserId(row["delegate_user_id"]),
        ),
        is_lost=row["claimed"],
    )
