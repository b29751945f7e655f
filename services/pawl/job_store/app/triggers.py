"""Triggers: kept, their webhooks checked, and fired."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Protocol, TypeAlias

from pawl.chassis.ids import IdSource, RunId, StoreId, UserId
from pawl.errors import PawlError, PermissionDenied, TriggerNotFound, TriggerPaused, Unavailable
from pawl.job_store.app.group_commit import GroupCommit
from pawl.job_store.app.lanes import Lane
from pawl.job_store.app.ports import Meter
from pawl.job_store.app.schedules import pause_seconds
from pawl.job_store.domain import triggers, webhooks
from pawl.job_store.domain.deliver import Deliver, Delivered
from pawl.job_store.domain.schedules import Owner
from pawl.job_store.domain.triggers import (
    REFUSALS_TIME,
    LaneRow,
    MailPlace,
    TriggerDefinition,
    TriggerKey,
    TriggerRow,
)
from pawl.values import RunState

SECRET_BYTES: Final = 32

TriggerChange: TypeAlias = Callable[[TriggerRow | None, int, datetime], TriggerRow]
"""A trigger as it becomes, from how it is, how many triggers its user has, and the time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedEvent:
    """An event that has waited, in its lane, and the trigger that it is to fire."""

    trigger: TriggerRow
    lane: LaneRow


class TriggerRepository(Protocol):
    """Keeps triggers."""

    async def change(self, store_id: StoreId, user_id: UserId, name: str, change: TriggerChange) -> TriggerRow:
        """Keep what `change` returns. Changes of the triggers of a user come one after the other.

        Raises:
            PawlError: what `change` raises.
        """

    async def get(
        self, store_id: StoreId, user_id: UserId, name: str
    ) -> tuple[TriggerRow, Mapping[RunId, RunState], datetime] | None:
        """Return a trigger, the states of the runs of its fires that are still there, and the time."""

    async def of_id(self, store_id: StoreId, trigger_id: str) -> tuple[TriggerRow, datetime] | None:
        """Return a trigger of any user, and the time."""

    async def list(self, store_id: StoreId, user_id: UserId) -> Sequence[TriggerRow]:
        """Return the triggers of a user, by name."""

    async def delete(self, store_id: StoreId, user_id: UserId, name: str) -> bool:
        """Remove a trigger with what waits; whether there was one."""

    async def claim(self, *, events_max: int) -> Sequence[ClaimedEvent]:
        """Claim events that need not wait any more, the longest due first."""

    async def wait_seconds(self) -> float | None:
        """Return after how many seconds the next event can be claimed; None if there is none."""

    async def add_refusals(self, key: TriggerKey, count: int, reason: str) -> None:
        """Count deliveries that were refused up to now, the last one for that reason."""

    async def claim_mailboxes(self, *, mailboxes_max: int, busy_stores: Sequence[StoreId]) -> Sequence[TriggerRow]:
        """Claim a trigger of each store whose mailbox is to be read, the longest due, and none of these stores."""

    async def mailbox_wait_seconds(self, busy_stores: Sequence[StoreId]) -> float | None:
        """Return after how many seconds the next mailbox of others can be claimed; None if there is none."""


class Triggers:
    """The use cases of triggers in the ledger."""

    def __init__(
        self,
        repository: TriggerRepository,
        group_commit: GroupCommit,
        meter: Meter,
        ids: IdSource,
        *,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        self._repository = repository
        self._group_commit = group_commit
        self._meter = meter
        self._ids = ids
        self._random_bytes = random_bytes
        self._refusals: dict[TriggerKey, tuple[int, str]] = {}
        self._adding: set[TriggerKey] = set()
        self.list = repository.list

    async def put(
        self, owner: Owner, asked: TriggerDefinition, place: MailPlace | None = None, *, must_exist: bool
    ) -> tuple[TriggerRow, str]:
        """Make a trigger, or change one; return the secret of a new one with a webhook, too. Idempotent.

        A mailbox that it has not read yet is read from `place` on.

        Raises:
            InvalidField: it cannot be like that.
            TriggerExists, TriggerNotFound, TooLarge: see `triggers.put`.
        """
        triggers.check(asked)
        new_id, secret = self._ids.new("trg"), self._random_bytes(SECRET_BYTES)
        row = await self._repository.change(
            owner.store_id,
            owner.user_id,
            asked.name,
            lambda row, count, now: triggers.put(
                row,
                asked,
                owner,
                now,
                new_id=new_id,
                secret=secret if asked.webhook is not None else b"",
                place=place,
                count=count,
                must_exist=must_exist,
            ),
        )
        is_told = row.trigger_id == new_id and row.definition.webhook is not None
        return row, webhooks.secret_text(secret) if is_told else ""

    async def pause(self, owner: Owner, name: str, note: str, *, paused: bool) -> TriggerRow:
        """Pause a trigger, or resume it with the credential of its owner. Idempotent.

        Raises:
            TriggerNotFound
            PermissionDenied: see `triggers.resumed`.
        """

        def change(row: TriggerRow | None, _: int, now: datetime) -> TriggerRow:
            if row is None:
                raise TriggerNotFound
            if paused:
                return triggers.paused(row, note, now)
            return triggers.resumed(row, owner, now)

        return await self._repository.change(owner.store_id, owner.user_id, name, change)

    async def rotate(self, store_id: StoreId, user_id: UserId, name: str) -> str:
        """Give a trigger another secret, and return it.

        Raises:
            TriggerNotFound
            InvalidField: it has none.
        """
        secret = self._random_bytes(SECRET_BYTES)

        def change(row: TriggerRow | None, _: int, now: datetime) -> TriggerRow:
            if row is None:
                raise TriggerNotFound
            return triggers.rotated(row, secret, now)

        await self._repository.change(store_id, user_id, name, change)
        return webhooks.secret_text(secret)

    async def get(self, store_id: StoreId, user_id: UserId, name: str) -> tuple[TriggerRow, Mapping[RunId, RunState]]:
        """Return a trigger, and the states of the runs of its fires.

        Raises:
            TriggerNotFound
        """
        found = await self._repository.get(store_id, user_id, name)
        if found is None:
            raise TriggerNotFound
        return found[:2]

    async def delete(self, store_id: StoreId, user_id: UserId, name: str) -> None:
        """Remove a trigger with its fires and what waits.

        Raises:
            TriggerNotFound
        """
        if not await self._repository.delete(store_id, user_id, name):
            raise TriggerNotFound

    async def check(
        self, store_id: StoreId, trigger_id: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[TriggerRow, str]:
        """Return the trigger of a webhook whose sender may fire it, and the id of the event; empty for none.

        Raises:
            TriggerNotFound, BadSignature, WebhookTooOld, TriggerPaused
        """
        try:
            found = await self._repository.of_id(store_id, trigger_id)
            if found is None or found[0].definition.webhook is None:
                raise TriggerNotFound
            row, now = found
            authentication = found[0].definition.webhook.authentication
            try:
                event_id = webhooks.event_id_of(authentication, headers, body, row.secrets(now), now)
            except PermissionDenied as refused:
                await self._count_refusal(row, f"{refused.reason}: {refused.message}", now)
                raise
            if row.pause_time is not None:
                raise TriggerPaused
        except PawlError as refused:
            self._meter.webhook_refused(refused)
            raise
        return row, event_id

    async def _count_refusal(self, row: TriggerRow, reason: str, now: datetime) -> None:
        """Count a refusal: in the row if that has none of the last minute, else here."""
        count, _ = self._refusals.get(row.key, (0, ""))
        self._refusals[row.key] = (count + 1, reason)
        if row.refused_time is None or now - row.refused_time >= REFUSALS_TIME:
            with suppress(Unavailable):
                await self._add_refusals(row.key)

    async def add_refusals(self) -> None:
        """Add to the rows what was counted here."""
        for key in list(self._refusals):
            await self._add_refusals(key)

    async def _add_refusals(self, key: TriggerKey) -> None:
        if key in self._adding or key not in self._refusals:
            return
        self._adding.add(key)
        count, reason = self._refusals[key]
        try:
            await self._repository.add_refusals(key, count, reason)
            left, reason = self._refusals.pop(key)
            if left > count:
                self._refusals[key] = (left - count, reason)
        finally:
            self._adding.discard(key)

    async def claim(self, events_max: int) -> tuple[Sequence[ClaimedEvent], float]:
        """Claim events that have waited; return them, and after how many seconds there may be more."""
        claimed = await self._repository.claim(events_max=events_max)
        if len(claimed) == events_max:
            return claimed, 0.0
        return claimed, pause_seconds(await self._repository.wait_seconds(), len(claimed))

    async def claim_mailboxes(
        self, mailboxes_max: int, busy_stores: Sequence[StoreId]
    ) -> tuple[Sequence[TriggerRow], float]:
        """Claim a trigger of each store whose mailbox is to be read, of none of the busy ones.

        Return them, and after how many seconds there may be more.
        """
        claimed = await self._repository.claim_mailboxes(mailboxes_max=mailboxes_max, busy_stores=busy_stores)
        if len(claimed) == mailboxes_max:
            return claimed, 0.0
        return claimed, pause_seconds(await self._repository.mailbox_wait_seconds(busy_stores), len(claimed))

    async def note_mailbox(
        self, trigger: TriggerKey, generation: int, place: MailPlace | None, reason: str, *, has_more: bool
    ) -> None:
        """Set when a mailbox is read next that was read, or could not be for a reason, if the trigger is as it was."""
        found = await self._repository.of_id(trigger.store_id, trigger.trigger_id)
        if found is None:
            return

        def change(row: TriggerRow | None, _: int, now: datetime) -> TriggerRow:
            if row is None or (row.key, row.generation) != (trigger, generation):
                raise TriggerNotFound
            return triggers.noted(row, place, reason, now, has_more=has_more)

        with suppress(TriggerNotFound):
            await self._repository.change(trigger.store_id, found[0].user_id, found[0].name, change)
        if reason:
            self._meter.mailbox_unreachable()

    async def fire(self, deliver: Deliver, size_bytes: int) -> Delivered:
        """Fire a trigger with an event, once.

        Raises:
            TriggerNotFound
        """
        lane = Lane.WORK if deliver.claimed else Lane.PEOPLE
        delivered = await self._group_commit.run(
            deliver, size_bytes=size_bytes, lane=lane, store_id=deliver.trigger.store_id
        )
        if delivered.fire is not None:
            outcome = "duplicate" if delivered.duplicate else delivered.fire.outcome.name.lower()
            self._meter.trigger_fired(outcome)
        return delivered
