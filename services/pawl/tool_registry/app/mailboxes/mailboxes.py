"""Reading mailboxes for triggers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

import msgspec

from pawl.chassis.auth import Principal
from pawl.chassis.egress_rules import EgressRefused
from pawl.chassis.ids import StoreId
from pawl.chassis.mailbox_place import MailboxPlace
from pawl.errors import InvalidField, TooLarge
from pawl.tool_registry.adapters.postgres.documents import PostgresDocumentRepository
from pawl.tool_registry.app.catalog.ports import Helper, TooCostly
from pawl.tool_registry.domain.document import PLAIN_LANGUAGE
from pawl.tool_registry.domain.mail import CPU_SECONDS, Mail, Senders, read_mail

MAILS_MAX: Final = 10
READING_SECONDS: Final = 10.0
"""After so long no other mail is begun."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Mails that are asked for: so many after one of a UIDVALIDITY; 0 only looks at the folder."""

    uid_validity: int
    after_uid: int
    mails_max: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RawMail:
    """A mail as it came, or its beginning."""

    uid: int
    content: bytes
    is_cut: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RawMails:
    """Mails of a mailbox. `last_uid` is that of the last mail that is there, or was."""

    uid_validity: int
    last_uid: int
    mails: Sequence[RawMail] = ()
    has_more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadMail:
    """A mail as JSON, and why it fires nothing, if so."""

    uid: int
    refusal: str
    data_json: bytes


class MailboxReader(Protocol):
    """Speaks to servers."""

    async def read(self, store_id: StoreId, place: MailboxPlace, password: str, wanted: Wanted) -> RawMails:
        """Return mails after one, none if it is of another UIDVALIDITY. Nothing is changed there.

        Raises:
            MailboxUnreachable: it does not answer as it should, or refuses the password.
            EgressRefused: the deployment does not allow the host.
        """
        ...


class OwnSecrets(Protocol):
    """Secrets of stores."""

    def own(self, store_id: StoreId, name: str) -> str | None:
        """Return a secret that is the store's own."""


class Mailboxes:
    """The use case of reading a mailbox."""

    def __init__(
        self,
        reader: MailboxReader,
        secrets: OwnSecrets,
        helper: Helper,
        documents: PostgresDocumentRepository,
        *,
        monotonic: Callable[[], float],
    ) -> None:
        self._monotonic = monotonic
        self._reader = reader
        self._secrets = secrets
        self._helper = helper
        self._documents = documents

    async def read(
        self,
        caller: Principal,
        place: MailboxPlace,
        password_secret: str,
        senders: Senders,
        wanted: Wanted,
        *,
        documents_prefix: str,
    ) -> tuple[RawMails, Sequence[ReadMail]]:
        """Return mails after one, with attachments that are text among the documents of the user.

        Raises:
            InvalidField: there is no such secret, or the deployment does not allow the host.
            MailboxUnreachable: it does not answer as it should, or refuses the password.
            Unavailable, Overloaded: a mail cannot be taken apart now, or a document not kept.
        """
        store_id = caller.store_id
        password = self._secrets.own(store_id, password_secret)
        if password is None:
            message = f"the store has no secret {password_secret[:64]!r} of its own (PAWL_TOOL_SECRETS_FILE)"
            raise InvalidField(message, field="definition.mailbox.password_secret")
        if not password.isprintable():
            message = f"the secret {password_secret!r} has line ends or control characters"
            raise InvalidField(message, field="definition.mailbox.password_secret")
        try:
            found = await self._reader.read(store_id, place, password, wanted)
        except EgressRefused as refused:
            message = f"the deployment does not allow it (PAWL_EGRESS_FILE): {refused}"
            raise InvalidField(message, field="definition.mailbox.host") from None
        mails: list[ReadMail] = []
        began = self._monotonic()
        for raw in found.mails:
            if self._monotonic() - began > READING_SECONDS:
                # Whoever asks waits no longer than that for mails that are hard to read.
                return replace(found, has_more=True), mails
            mails.append(await self._mail(caller, raw, senders, f"{documents_prefix}{found.uid_validity}.{raw.uid}"))
        return found, mails

    async def _mail(self, caller: Principal, raw: RawMail, senders: Senders, prefix: str) -> ReadMail:
        try:
            mail = await self._helper.run(
                caller.store_id, _read, raw.content, senders, raw.is_cut, cpu_seconds=CPU_SECONDS
            )
        except TooCostly:
            return ReadMail(uid=raw.uid, refusal="it is written so that reading it takes too long", data_json=b"{}")
        if mail.refusal:
            return ReadMail(uid=raw.uid, refusal=mail.refusal, data_json=b"{}")
        data: dict[str, Any] = {"from": mail.sender, **mail.headers, "text": mail.text}
        data["attachments"] = [
            await self._attached(caller, mail, number, f"{prefix}/{number}") for number in range(len(mail.attachments))
        ]
        if mail.is_cut:
            data["cut"] = True
        return ReadMail(uid=raw.uid, refusal="", data_json=msgspec.json.encode(data))

    async def _attached(self, caller: Principal, mail: Mail, number: int, prefix: str) -> dict[str, Any]:
        """Return what is said of an attachment; one that is text is a document then."""
        file = mail.attachments[number]
        said: dict[str, Any] = {"name": file.name, "type": file.type, "size_bytes": file.size_bytes}
        if file.text is None:
            return said | ({"left_out": file.left_out} if file.left_out else {})
        name = f"{prefix}-{file.name}"
        try:
            await self._documents.put(caller.store_id, caller.user_id, name, file.text, PLAIN_LANGUAGE)
        except (InvalidField, TooLarge) as refused:
            return said | {"left_out": refused.message}
        return said | {"document": name}


def _read(content: bytes, senders: Senders, is_cut: bool) -> Mail:  # noqa: FBT001  # helpers take no keywords
    try:
        return read_mail(content, senders, is_cut=is_cut)
    except Exception:  # noqa: BLE001  # whatever one mail does, those after it are read
        return Mail(refusal="it is written so that it cannot be read")
