"""The folder of a mailbox that a trigger reads, and who may have it read: the same for all services."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Final, Protocol, Self

from pawl.chassis.roles import Role
from pawl.errors import PermissionDenied

_INBOX: Final = "INBOX"
_PORT: Final = 993
_PORT_IN_CLEAR: Final = 143


class Written(Protocol):
    """A folder as somebody wrote it: `pawl.event.v1.MailboxSource`, or its row."""

    @property
    def host(self) -> str:
        """The host."""

    @property
    def port(self) -> int:
        """The port; 0 for the usual one."""

    @property
    def plaintext(self) -> bool:
        """True to read it without TLS."""

    @property
    def username(self) -> str:
        """The name of the user."""

    @property
    def folder(self) -> str:
        """The folder; empty for INBOX."""


def check_may_read(roles: Container[str]) -> None:
    """Return if somebody with these roles may have a mailbox read.

    Raises:
        PermissionDenied: it is read with a secret of the store, and these are an admin's.
    """
    if Role.ADMIN not in roles:
        raise PermissionDenied(f"a mailbox is read with a secret of the store: that needs the role {Role.ADMIN}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MailboxPlace:
    """A folder of a mailbox, and how to get in. Without `plaintext` it speaks TLS."""

    host: str
    port: int
    plaintext: bool
    username: str
    folder: str

    @classmethod
    def of(cls, written: Written) -> Self:
        """Return what is meant: ports and INBOX may go without saying, and INBOX has no case (RFC 9051, 5.1)."""
        folder = written.folder or _INBOX
        return cls(
            host=written.host.lower(),
            port=written.port or (_PORT_IN_CLEAR if written.plaintext else _PORT),
            plaintext=written.plaintext,
            username=written.username,
            folder=_INBOX if folder.upper() == _INBOX else folder,
        )
