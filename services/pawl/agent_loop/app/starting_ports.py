"""The ports of what starts runs by itself: schedules, and triggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Protocol

from pawl.agent_loop.app.public_values import (
    Delivery,
    DueMailbox,
    DueSchedule,
    DueTrigger,
    MailboxView,
    MailPlace,
    TriggerEvent,
)
from pawl.chassis.auth import Principal
from pawl.chassis.ids import RequestId, StoreId
from pawl.job.v1.ledger_pb2 import SubmitMessageRequest


class ScheduleLedger(Protocol):
    """The ledger's schedules, as documents of the contract. Every method may raise DependencyUnavailable."""

    async def put_schedule(self, caller: Principal, definition: object, *, must_exist: bool) -> object:
        """Make a schedule of the caller, or change one; idempotent.

        Raises:
            ScheduleExists, ScheduleNotFound, InvalidField, InvalidId, TooLarge
        """
        ...

    async def get_schedule(self, caller: Principal, name: str) -> tuple[object, DueSchedule]:
        """Read a schedule of the caller, and what is needed to fire it now.

        Raises:
            ScheduleNotFound
        """
        ...

    async def past_times(self, caller: Principal, name: str, begin: datetime, end: datetime) -> Sequence[datetime]:
        """Read the due times of a schedule from `begin` on and before `end` and now.

        Raises:
            ScheduleNotFound, InvalidField, TooLarge
        """
        ...

    async def list_schedules(self, caller: Principal) -> Sequence[object]:
        """Read the schedules of the caller, by name."""
        ...

    async def pause_schedule(self, caller: Principal, name: str, note: str, *, paused: bool) -> object:
        """Pause a schedule of the caller, or have it go on; idempotent.

        Raises:
            ScheduleNotFound
        """
        ...

    async def delete_schedule(self, caller: Principal, name: str) -> None:
        """Remove a schedule of the caller.

        Raises:
            ScheduleNotFound
        """
        ...

    async def claim_schedules(self, schedules_max: int) -> tuple[Sequence[DueSchedule], float]:
        """Claim schedules that are due; return them, and the seconds after which to ask again."""
        ...

    async def fire_schedule(
        self,
        due: DueSchedule,
        message: SubmitMessageRequest | None,
        *,
        refusal: str = "",
        request_id: RequestId,
        backfill_time: datetime | None = None,
    ) -> object | None:
        """Fire a schedule, with the message of its run or why there is none; None if it has changed since.

        A fire with a `backfill_time` stands for that due time of the past.

        Raises:
            ScheduleNotFound, RequestIdReused
        """
        ...


class TriggerLedger(Protocol):
    """The ledger's triggers, as documents of the contract. Every method may raise DependencyUnavailable."""

    async def put_trigger(
        self, caller: Principal, definition: object, place: MailPlace | None = None, *, must_exist: bool
    ) -> tuple[object, str]:
        """Make a trigger of the caller, or change one, idempotent; return the secret of a new one, too.

        A mailbox that it has not read yet is read from `place` on.

        Raises:
            TriggerExists, TriggerNotFound, InvalidField, InvalidId, TooLarge
        """
        ...

    async def get_trigger(self, caller: Principal, name: str) -> object:
        """Read a trigger of the caller.

        Raises:
            TriggerNotFound
        """
        ...

    async def list_triggers(self, caller: Principal) -> Sequence[object]:
        """Read the triggers of the caller, by name."""
        ...

    async def pause_trigger(self, caller: Principal, name: str, note: str, *, paused: bool) -> object:
        """Pause a trigger of the caller, or have it go on; idempotent.

        Raises:
            TriggerNotFound
        """
        ...

    async def delete_trigger(self, caller: Principal, name: str) -> None:
        """Remove a trigger of the caller.

        Raises:
            TriggerNotFound
        """
        ...

    async def rotate_trigger_secret(self, caller: Principal, name: str) -> str:
        """Give a trigger of the caller another secret, and return it.

        Raises:
            TriggerNotFound, InvalidField
        """
        ...

    async def check_webhook(
        self, caller: Principal, trigger_id: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[DueTrigger, str]:
        """Return the trigger of the caller's store that the sender of a webhook may fire, and its id; empty for none.

        Raises:
            TriggerNotFound, BadSignature, WebhookTooOld, TriggerPaused
        """
        ...

    async def claim_events(self, events_max: int) -> tuple[Sequence[tuple[DueTrigger, TriggerEvent]], float]:
        """Claim events that have waited; return them, and the seconds after which to ask again."""
        ...

    async def claim_mailboxes(
        self, mailboxes_max: int, *, busy_stores: Sequence[StoreId] = ()
    ) -> tuple[Sequence[DueMailbox], float]:
        """Claim a mailbox of each store that is to be read; return them, and the seconds after which to ask again.

        Of `busy_stores` none is claimed.
        """
        ...

    async def note_mailbox(self, due: DueTrigger, place: MailPlace | None, *, reason: str, has_more: bool) -> None:
        """Set when a mailbox is read again, and from where on if that is another place; a reason if it failed."""
        ...

    async def fire_trigger(
        self,
        due: DueTrigger,
        event: TriggerEvent,
        message: SubmitMessageRequest | None,
        *,
        refusal: str = "",
        claimed: bool = False,
        mail: MailPlace | None = None,
        skipped: str = "",
    ) -> Delivery:
        """Fire a trigger, with the message of its run or why there is none; a mail only if it was not read before.

        Raises:
            TriggerNotFound
        """
        ...


class MailboxReader(Protocol):
    """Reads mailboxes."""

    async def read_mailbox(
        self, caller: Principal, mailbox: object, place: MailPlace, *, mails_max: int, documents_prefix: str = ""
    ) -> MailboxView:
        """Return mails of a mailbox after a place, none if mails are numbered otherwise now.

        Raises:
            MailboxUnreachable: it does not answer as it should.
            InvalidField: the deployment does not allow it, or there is no such secret.
        """
        ...
