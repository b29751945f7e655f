"""The ports of what starts runs by itself: schedules, and triggers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pawl.agent_loop.app.public_values import (
    Delivery,
    DueMailbox,
    DueTrigger,
    MailboxView,
    MailPlace,
    NewMessage,
    TriggerEvent,
)
from pawl.chassis.auth import Principal
from pawl.chassis.ids import StoreId


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
        message: NewMessage | None,
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
