"""Webhooks and their deliveries in PostgreSQL, schema `notifier`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

import asyncpg

from pawl.chassis.database import Connection, DatabaseAdapter
from pawl.errors import DeliveryNotFound, InvalidField, RequestIdReused, WebhookNotFound
from pawl.notifier.adapters.postgres import ADD, added_columns, inbox_of
from pawl.notifier.app.ports import NewWebhook
from pawl.notifier.domain.notification import Inbox, NotificationKind
from pawl.notifier.domain.webhook import (
    FAILING_TRIES_MAX,
    FORMER_SECRET_SECONDS,
    FORMER_SECRETS_MAX,
    TEST,
    TESTS_KEPT,
    TRIES_MAX_AT_ONCE,
    WEBHOOKS_MAX,
    Attempt,
    Candidate,
    DeliveryId,
    DeliveryState,
    Outcome,
    Verdict,
    Webhook,
    WebhookDelivery,
    WebhookId,
    crowded,
    judge,
    notice,
)

_LOCK_USER: Final = "SELECT pg_advisory_xact_lock(hashtextextended('notifier.webhooks ' || $1 || '/' || $2, 0))"
_LIST: Final = "SELECT * FROM notifier.webhooks WHERE store_id = $1 AND user_id = $2 ORDER BY webhook_id"
_FIND: Final = "SELECT * FROM notifier.webhooks WHERE store_id = $1 AND user_id = $2 AND webhook_id = $3"
_CREATE: Final = """
INSERT INTO notifier.webhooks (
    webhook_id, store_id, user_id, request_id, request_hash, name, url, host, kinds, secret, create_time
) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)
RETURNING *
"""
_UPDATE: Final = """
UPDATE notifier.webhooks SET
    name = $4, url = $5, host = $6, kinds = $7, enabled = $8,
    disable_reason = CASE WHEN $8 OR enabled THEN '' ELSE disable_reason END,
    failing_since = CASE WHEN $8 AND NOT enabled OR $5 <> url THEN NULL ELSE failing_since END
WHERE store_id = $1 AND user_id = $2 AND webhook_id = $3
RETURNING *
"""
_DELETE: Final = """
DELETE FROM notifier.webhooks WHERE store_id = $1 AND user_id = $2 AND webhook_id = $3 RETURNING webhook_id
"""
_DELETE_DELIVERIES: Final = "DELETE FROM notifier.webhook_deliveries WHERE webhook_id = $1"
_ROTATE: Final = """
UPDATE notifier.webhooks SET
    secret = $4,
    former_secrets = (array_prepend(secret, former_secrets))[1:$5],
    former_times = (array_prepend(now() + make_interval(secs => $6), former_times))[1:$5]
WHERE store_id = $1 AND user_id = $2 AND webhook_id = $3
RETURNING webhook_id
"""

# Who disables or deletes a webhook waits for who writes deliveries to it, and the other way round.
_LOCK: Final = f"{_FIND} FOR UPDATE"
_LOCK_INBOX: Final = "SELECT FROM notifier.inboxes WHERE store_id = $1 AND user_id = $2 FOR UPDATE"
_WAITING_TEST: Final = """
SELECT * FROM notifier.webhook_deliveries WHERE webhook_id = $1 AND number IS NULL AND due_time IS NOT NULL
"""
_FORGET_TESTS: Final = """
DELETE FROM notifier.webhook_deliveries WHERE delivery_id IN (
    SELECT delivery_id FROM notifier.webhook_deliveries
    WHERE webhook_id = $1 AND number IS NULL AND due_time IS NULL
    ORDER BY insert_time DESC OFFSET $2
)
"""
_ADD_TEST: Final = """
INSERT INTO notifier.webhook_deliveries (delivery_id, webhook_id, store_id, user_id, type, body)
VALUES ($1, $2, $3, $4, $5, $6)
RETURNING *
"""
_DELIVERIES: Final = """
SELECT * FROM notifier.webhook_deliveries
WHERE webhook_id = $1 AND (insert_time, delivery_id) < (coalesce($2, 'infinity'::timestamptz), $3)
ORDER BY insert_time DESC, delivery_id DESC LIMIT $4
"""
# One at work stays with who is at it.
_RESEND: Final = """
UPDATE notifier.webhook_deliveries SET
    state = 'waiting',
    tries = CASE WHEN claimed THEN tries ELSE 0 END,
    due_time = CASE WHEN claimed THEN due_time ELSE now() END
WHERE store_id = $1 AND user_id = $2 AND delivery_id = $3
RETURNING *
"""

# From one webhook for which something waits to the next, and of each the oldest: what a long row holds costs nothing.
_DUE: Final = """
WITH RECURSIVE waiting AS (
    SELECT min(webhook_id) AS webhook_id FROM notifier.webhook_deliveries WHERE due_time IS NOT NULL
    UNION ALL
    SELECT (
        SELECT min(webhook_id) FROM notifier.webhook_deliveries
        WHERE due_time IS NOT NULL AND webhook_id > waiting.webhook_id
    ) FROM waiting WHERE webhook_id IS NOT NULL
),
at_work AS (
    SELECT store_id, user_id, count(*) AS tries FROM unnest($4::text[], $5::text[]) AS each (store_id, user_id)
    GROUP BY store_id, user_id
)
SELECT d.delivery_id, webhook_id, store_id, user_id, w.host, w.failing_since IS NOT NULL AS is_failing
FROM waiting
JOIN notifier.webhooks AS w USING (webhook_id)
LEFT JOIN at_work USING (store_id, user_id)
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
# Of a disabled webhook, what a process that died had claimed is over; what waits unclaimed was sent again.
_CLAIM: Final = """
WITH held AS (
    SELECT delivery_id, each.claimed AND number IS NOT NULL AND NOT w.enabled AS is_over
    FROM notifier.webhook_deliveries AS each
    JOIN notifier.webhooks AS w USING (webhook_id)
    WHERE delivery_id = ANY ($1::text[]) AND due_time <= now()
    ORDER BY delivery_id
    FOR UPDATE OF each SKIP LOCKED
)
UPDATE notifier.webhook_deliveries AS d SET
    claimed = NOT is_over,
    due_time = CASE WHEN is_over THEN NULL ELSE now() + make_interval(secs => $2) END,
    state = CASE WHEN is_over THEN 'dead' ELSE state END,
    last_error = CASE WHEN is_over THEN 'the webhook was disabled' ELSE last_error END
FROM held, notifier.webhooks AS w
WHERE d.delivery_id = held.delivery_id AND w.webhook_id = d.webhook_id
RETURNING d.delivery_id, d.claimed, d.type, d.body, d.tries + 1 AS tries, d.due_time, w.url, w.secret, ARRAY(
    SELECT former FROM unnest(w.former_secrets, w.former_times) AS each (former, until) WHERE until > now()
) AS former_secrets
"""
_SETTLE: Final = """
UPDATE notifier.webhook_deliveries SET
    claimed = false, tries = tries + 1, state = $3, due_time = now() + make_interval(secs => $4), try_time = now(),
    status = $5, latency_ms = $6, last_error = $7
WHERE delivery_id = $1 AND claimed AND due_time = $2
RETURNING delivery_id
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
_NOW: Final = "SELECT now()"
_END_WAITING: Final = """
UPDATE notifier.webhook_deliveries SET state = 'dead', due_time = NULL, last_error = 'the webhook was disabled'
WHERE webhook_id = $1 AND due_time IS NOT NULL AND NOT claimed AND number IS NOT NULL
"""
_COUNT_WAITING: Final = "SELECT count(*) FROM notifier.webhook_deliveries WHERE due_time IS NOT NULL"


class PostgresWebhooks(DatabaseAdapter):
    """See `ports.WebhookRepository`. Locked in this order: an inbox, a webhook, its deliveries."""

    async def create(self, new: NewWebhook) -> Webhook:
        inbox, webhook = new.inbox, new.webhook
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK_USER, inbox.store_id, inbox.user_id)
            rows = await connection.fetch(_LIST, inbox.store_id, inbox.user_id)
            for row in rows:
                if new.request_id and row["request_id"] == new.request_id:
                    if row["request_hash"] != new.request_hash:
                        raise RequestIdReused
                    return _webhook(row)
            if len(rows) >= WEBHOOKS_MAX:
                raise InvalidField(f"a user has at most {WEBHOOKS_MAX} webhooks: delete one", field="webhook")
            made = await connection.fetchrow(
                _CREATE,
                webhook.webhook_id,
                inbox.store_id,
                inbox.user_id,
                new.request_id,
                new.request_hash,
                webhook.name,
                webhook.url,
                new.host,
                list(webhook.kinds),
                new.secret,
                webhook.create_time,
            )
        return _webhook(_there(made))

    async def webhooks(self, inbox: Inbox) -> Sequence[Webhook]:
        return list(map(_webhook, await self._database.fetch(_LIST, inbox.store_id, inbox.user_id)))

    async def webhook(self, inbox: Inbox, webhook_id: WebhookId) -> Webhook:
        return _webhook(_there(await self._database.fetchrow(_FIND, inbox.store_id, inbox.user_id, webhook_id)))

    async def update(self, inbox: Inbox, webhook: Webhook, *, host: str) -> Webhook:
        said = (webhook.name, webhook.url, host, list(webhook.kinds), webhook.enabled)
        async with self._database.transaction() as connection:
            await connection.execute(_LOCK, inbox.store_id, inbox.user_id, webhook.webhook_id)
            row = await connection.fetchrow(_UPDATE, inbox.store_id, inbox.user_id, webhook.webhook_id, *said)
            if not webhook.enabled:
                await connection.execute(_END_WAITING, _there(row)["webhook_id"])
        return _webhook(_there(row))

    async def delete(self, inbox: Inbox, webhook_id: WebhookId) -> None:
        async with self._database.transaction() as connection:
            _there(await connection.fetchrow(_DELETE, inbox.store_id, inbox.user_id, webhook_id))
            await connection.execute(_DELETE_DELIVERIES, webhook_id)

    async def rotate(self, inbox: Inbox, webhook_id: WebhookId, secret: bytes) -> None:
        limits = (FORMER_SECRETS_MAX, FORMER_SECRET_SECONDS)
        _there(await self._database.fetchrow(_ROTATE, inbox.store_id, inbox.user_id, webhook_id, secret, *limits))

    async def add_test(self, inbox: Inbox, test: WebhookDelivery, body: str) -> WebhookDelivery:
        async with self._database.transaction() as connection:
            _there(await connection.fetchrow(_LOCK, inbox.store_id, inbox.user_id, test.webhook_id))
            await connection.execute(_FORGET_TESTS, test.webhook_id, TESTS_KEPT)
            row = await connection.fetchrow(_WAITING_TEST, test.webhook_id) or await connection.fetchrow(
                _ADD_TEST,
                test.delivery_id,
                test.webhook_id,
                inbox.store_id,
                inbox.user_id,
                test.type,
                body,
            )
        return _delivery(_there(row))

    async def deliveries(
        self, inbox: Inbox, webhook_id: WebhookId, before: tuple[datetime, str] | None, *, limit: int
    ) -> Sequence[WebhookDelivery]:
        await self.webhook(inbox, webhook_id)
        return list(map(_delivery, await self._database.fetch(_DELIVERIES, webhook_id, *(before or (None, "")), limit)))

    async def resend(self, inbox: Inbox, delivery_id: DeliveryId) -> WebhookDelivery:
        row = await self._database.fetchrow(_RESEND, inbox.store_id, inbox.user_id, delivery_id)
        if row is None:
            raise DeliveryNotFound
        return _delivery(row)

    async def due(self, at_work: Sequence[Candidate], *, limit: int) -> Sequence[Candidate]:
        rows = await self._database.fetch(
            _DUE,
            crowded((each.host for each in at_work), "host"),
            crowded((each.inbox.store_id for each in at_work), "store"),
            [each.webhook_id for each in at_work],
            [each.inbox.store_id for each in at_work],
            [each.inbox.user_id for each in at_work],
            TRIES_MAX_AT_ONCE["host"],
            FAILING_TRIES_MAX,
            TRIES_MAX_AT_ONCE["user"],
            limit,
        )
        return [
            Candidate(
                delivery_id=DeliveryId(row["delivery_id"]),
                webhook_id=WebhookId(row["webhook_id"]),
                inbox=inbox_of(row),
                host=row["host"],
                is_failing=row["is_failing"],
            )
            for row in rows
        ]

    async def claim(self, candidates: Sequence[Candidate], *, seconds: float) -> Sequence[Attempt]:
        by_id = {candidate.delivery_id: candidate for candidate in candidates}
        return [
            Attempt(
                candidate=by_id[row["delivery_id"]],
                url=row["url"],
                secrets=(row["secret"], *row["former_secrets"]),
                type=row["type"],
                body=row["body"],
                tries=row["tries"],
                claim_until=row["due_time"],
            )
            for row in await self._database.fetch(_CLAIM, list(by_id), seconds)
            if row["claimed"]
        ]

    async def settle(self, attempt: Attempt, outcome: Outcome, *, chance: float) -> Verdict | None:
        if outcome.is_success:
            # No lock on the webhook, which has many at once.
            verdict = Verdict(state=DeliveryState.DELIVERED)
            if await self._database.fetchrow(_SETTLE, *_settlement(attempt, outcome, verdict)) is None:
                return None
            await self._database.execute(_SUCCEEDED, attempt.candidate.webhook_id)
            return verdict
        async with self._database.transaction() as connection:
            return await _settle_failure(connection, attempt, outcome, chance)

    async def count_waiting(self) -> int:
        count: int = await self._database.fetchval(_COUNT_WAITING)
        return count


async def _settle_failure(connection: Connection, attempt: Attempt, outcome: Outcome, chance: float) -> Verdict | None:
    inbox, webhook_id = attempt.candidate.inbox, attempt.candidate.webhook_id
    await connection.execute(_LOCK_INBOX, inbox.store_id, inbox.user_id)
    row = await connection.fetchrow(_LOCK, inbox.store_id, inbox.user_id, webhook_id)
    if row is None:
        return None
    is_test, is_former = attempt.type == TEST, attempt.url != row["url"]
    now: datetime = await connection.fetchval(_NOW)
    verdict = judge(
        outcome,
        tries=attempt.tries,
        is_test=is_test,
        enabled=row["enabled"],
        failing_since=row["failing_since"] or now,
        now=now,
        chance=chance,
    )
    if not row["enabled"] or is_former:
        verdict = replace(verdict, disable_reason="")
    if await connection.fetchrow(_SETTLE, *_settlement(attempt, outcome, verdict)) is None:
        return None
    await connection.execute(_FAILED, webhook_id, verdict.disable_reason, not (is_test or is_former))
    if verdict.disable_reason:
        await connection.execute(_END_WAITING, webhook_id)
    if verdict.disable_reason and not is_test:
        disabled = replace(_webhook(row), disable_reason=verdict.disable_reason)
        told = notice(inbox, disabled, attempt.candidate.delivery_id, now)
        await connection.fetchval(ADD, *added_columns([told]))
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


def _there(row: asyncpg.Record | None) -> asyncpg.Record:
    if row is None:
        raise WebhookNotFound
    return row


def _webhook(row: asyncpg.Record) -> Webhook:
    return Webhook(
        webhook_id=WebhookId(row["webhook_id"]),
        name=row["name"],
        url=row["url"],
        kinds=tuple(map(NotificationKind, row["kinds"])),
        enabled=row["enabled"],
        disable_reason=row["disable_reason"],
        create_time=row["create_time"],
        failing_since_time=row["failing_since"],
    )


def _delivery(row: asyncpg.Record) -> WebhookDelivery:
    return WebhookDelivery(
        delivery_id=DeliveryId(row["delivery_id"]),
        webhook_id=WebhookId(row["webhook_id"]),
        type=row["type"],
        number=row["number"] or 0,
        state=DeliveryState(row["state"]),
        tries=row["tries"],
        create_time=row["insert_time"],
        try_time=row["try_time"],
        next_try_time=row["due_time"],
        status=row["status"],
        latency_milliseconds=row["latency_ms"],
        last_error=row["last_error"],
    )
