"""Saves triggers, verifies webhooks, and fires triggers."""

from __future__ import annotations

import base64
import hmac
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Final

from standardwebhooks.webhooks import Webhook as Signature

from pawl.chassis.ids import IdSource, StoreId, UserId
from pawl.errors import (
    BadSignature,
    PawlError,
    PermissionDenied,
    TriggerNotFound,
    TriggerPaused,
    Unavailable,
    WebhookTooOld,
)
from pawl.job_store.ledger.group_commit import GroupCommit, Lane
from pawl.job_store.ledger.metrics import PrometheusMeter
from pawl.job_store.ledger.rules.deliver import Deliver, Delivered
from pawl.job_store.schedules.rules import Owner
from pawl.job_store.schedules.schedules import Starters, pause_seconds
from pawl.job_store.triggers import rules as triggers
from pawl.job_store.triggers.rules import (
    REFUSALS_TIME,
    Authentication,
    LaneRow,
    MailPosition,
    TriggerDefinition,
    TriggerKey,
    TriggerRow,
)
from pawl.job_store.triggers.store import PostgresTriggers

TOLERANCE_SECONDS: Final = 300.0
SIGNATURES_MAX: Final = 10

_EVENT_ID: Final = re.compile(r"[!-~]{1,200}")
_TIME: Final = re.compile(r"[0-9]{1,12}")


def event_id_of(
    authentication: Authentication, headers: Mapping[str, str], body: bytes, secrets: Sequence[bytes], now: datetime
) -> str:
    """Check that the sender of a webhook knows one of the secrets. Return its webhook-id, or "" if it has none.

    Header names must be in lower case.

    Raises:
        BadSignature: There is no valid signature or key, or a required header is missing.
        WebhookTooOld: The signature is valid, but its timestamp is too far from the current time.
    """
    event_id = headers.get("webhook-id", "")
    if event_id and not _EVENT_ID.fullmatch(event_id):
        raise BadSignature("webhook-id must be 1 to 200 visible ASCII characters")
    if authentication is Authentication.BEARER:
        _check_key(headers.get("authorization", ""), secrets)
        return event_id
    if "." in event_id:
        # The signature covers id.time.body. If ids could contain a dot, an old signature would match a different id,
        # time and body.
        raise BadSignature("the webhook-id of a signed webhook must not contain a dot ('.')")
    time = headers.get("webhook-timestamp", "")
    if not event_id:
        raise BadSignature("the header webhook-id is missing")
    if not _TIME.fullmatch(time):
        raise BadSignature("the header webhook-timestamp is missing or malformed")
    try:
        # The specification signs the body as UTF-8.
        text, seconds = body.decode(), int(time)
        sent = datetime.fromtimestamp(seconds, UTC)
    except (ValueError, OverflowError):
        raise BadSignature from None
    good = [Signature(secret).sign(event_id, sent, text).encode() for secret in secrets]
    shown = headers.get("webhook-signature", "").encode().split(b" ")[:SIGNATURES_MAX]
    if not any(hmac.compare_digest(one, other) for one in shown for other in good):
        raise BadSignature
    if abs(now.timestamp() - seconds) > TOLERANCE_SECONDS:
        raise WebhookTooOld
    return event_id


def secret_text(secret: bytes) -> str:
    return f"whsec_{base64.b64encode(secret).decode()}"


def _check_key(authorization: str, secrets: Sequence[bytes]) -> None:
    scheme, _, key = authorization.partition(" ")
    shown = key.strip().encode()
    is_good = any(hmac.compare_digest(shown, secret_text(secret).encode()) for secret in secrets)
    if scheme.lower() != "bearer" or not is_good:
        raise BadSignature


SECRET_BYTES: Final = 32


class Triggers(Starters[TriggerRow]):
    def __init__(
        self,
        repository: PostgresTriggers,
        group_commit: GroupCommit,
        meter: PrometheusMeter,
        ids: IdSource,
        *,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        super().__init__(repository, TriggerNotFound)
        self._repository = repository
        self._group_commit = group_commit
        self._meter = meter
        self._ids = ids
        self._random_bytes = random_bytes
        self._refusals: dict[TriggerKey, tuple[int, str]] = {}
        self.lease_mailboxes = repository.lease_mailboxes

    async def put(
        self, owner: Owner, requested: TriggerDefinition, *, must_exist: bool, validate_only: bool = False
    ) -> tuple[TriggerRow, str]:
        """Create or change a trigger and return it. For a new webhook trigger, also return the secret.

        With `validate_only`, nothing is stored.

        Idempotent.

        Raises:
            InvalidField: The definition is invalid.
            TriggerExists, TriggerNotFound, TooLarge: See `triggers.put`.
        """
        triggers.check(requested)
        requested = triggers.filled_in(requested)
        new_id, secret = self._ids.new("trg"), self._random_bytes(SECRET_BYTES)
        row = await self._repository.change(
            owner.store_id,
            owner.user_id,
            requested.name,
            lambda row, count, now: triggers.put(
                row,
                requested,
                owner,
                now,
                new_id=new_id,
                secret=secret if requested.webhook is not None else b"",
                count=count,
                must_exist=must_exist,
            ),
            validate_only=validate_only,
        )
        is_told = not validate_only and row.trigger_id == new_id and row.definition.webhook is not None
        return row, secret_text(secret) if is_told else ""

    async def pause(self, owner: Owner, name: str, note: str, *, paused: bool) -> TriggerRow:
        """Pause a trigger, or resume it with the credential in `owner`.

        Idempotent.

        Raises:
            TriggerNotFound: The trigger does not exist.
            PermissionDenied: See `triggers.resumed`.
        """
        return await self._change(
            owner.store_id,
            owner.user_id,
            name,
            lambda row, now: triggers.paused(row, note, now) if paused else triggers.resumed(row, owner, now),
        )

    async def rotate(self, store_id: StoreId, user_id: UserId, name: str) -> str:
        """Replace the secret of a trigger and return the new secret.

        Raises:
            TriggerNotFound: The trigger does not exist.
            InvalidField: The trigger has no secret.
        """
        secret = self._random_bytes(SECRET_BYTES)
        await self._change(store_id, user_id, name, lambda row, now: triggers.rotated(row, secret, now))
        return secret_text(secret)

    async def check(
        self, store_id: StoreId, trigger_id: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[TriggerRow, str]:
        """Verify a webhook. Return its trigger, and the id of its event ("" if it has none).

        Raises:
            TriggerNotFound, BadSignature, WebhookTooOld, TriggerPaused: The webhook may not fire the trigger.
        """
        try:
            found = await self._repository.of_id(store_id, trigger_id)
            if found is None or found[0].definition.webhook is None:
                raise TriggerNotFound
            row, now = found
            authentication = found[0].definition.webhook.authentication
            try:
                event_id = event_id_of(authentication, headers, body, row.secrets(now), now)
            except PermissionDenied as refused:
                await self._count_refusal(row, f"{refused.reason}: {refused.message}", now)
                raise
            if row.pause_time is not None:
                raise TriggerPaused
        except PawlError as refused:
            self._meter.webhooks_refused.labels(refused.reason).inc()
            raise
        return row, event_id

    async def _count_refusal(self, row: TriggerRow, reason: str, now: datetime) -> None:
        """Count a refusal in memory, and store the count in the row at most once a minute."""
        count, _ = self._refusals.get(row.key, (0, ""))
        self._refusals[row.key] = (count + 1, reason)
        if row.refused_time is None or now - row.refused_time >= REFUSALS_TIME:
            with suppress(Unavailable):
                await self._add_refusals(row.key)

    async def add_refusals(self) -> None:
        for key in list(self._refusals):
            await self._add_refusals(key)

    async def _add_refusals(self, key: TriggerKey) -> None:
        count, reason = self._refusals.pop(key, (0, ""))
        if not count:
            return
        try:
            await self._repository.add_refusals(key, count, reason)
        except BaseException:
            since, newer = self._refusals.get(key, (0, ""))
            self._refusals[key] = (count + since, newer or reason)
            raise

    async def claim(self, events_max: int) -> tuple[Sequence[tuple[TriggerRow, LaneRow]], float]:
        """Claim waiting events that may fire. Return them, and the number of seconds to wait before the next claim."""
        claimed = await self._repository.claim(events_max=events_max)
        if len(claimed) == events_max:
            return claimed, 0.0
        return claimed, pause_seconds(await self._repository.wait_seconds(), len(claimed))

    async def leased(self, key: TriggerKey, generation: int) -> TriggerRow | None:
        """Return the trigger of a leased mailbox, or None if the trigger has changed or was paused.

        Raises:
            TriggerNotFound: The trigger does not exist.
        """
        found = await self._repository.of_id(key.store_id, key.trigger_id)
        if found is None:
            raise TriggerNotFound
        row = found[0]
        has_mailbox = row.definition.mailbox is not None and row.pause_time is None
        return row if has_mailbox and row.generation == generation else None

    async def report_mailbox(
        self, key: TriggerKey, generation: int, position: MailPosition | None, reason: str
    ) -> None:
        """Store the result of polling a mailbox, unless its trigger has changed.

        Raises:
            TriggerNotFound: The trigger does not exist.
        """
        leased = await self.leased(key, generation)
        if leased is None:
            return

        def change(row: TriggerRow, now: datetime) -> TriggerRow:
            if row.key != key:
                raise TriggerNotFound
            return triggers.reported(row, position, reason, now) if row.generation == generation else row

        await self._change(key.store_id, leased.user_id, leased.name, change)

    async def fire(self, deliver: Deliver, size_bytes: int) -> Delivered:
        """Fire a trigger with an event, at most once.

        Raises:
            TriggerNotFound: The trigger does not exist.
        """
        lane = Lane.WORK if deliver.claimed else Lane.PEOPLE
        delivered = await self._group_commit.run(
            deliver, size_bytes=size_bytes, lane=lane, store_id=deliver.trigger.store_id
        )
        if delivered.fire is not None:
            outcome = "duplicate" if delivered.duplicate else delivered.fire.outcome.name.lower()
            self._meter.events.labels(outcome).inc()
        return delivered
