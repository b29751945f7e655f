"""Channels: the webhooks, e-mail addresses and services by which users are told."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Final, NewType

from pawl.chassis.ids import CredentialId, StoreId, UserId, is_id
from pawl.errors import InvalidField
from pawl.notifier.inbox.rules import NotificationKind, NotificationKinds

ChannelId = NewType("ChannelId", str)

CHANNELS_MAX: Final = 10
"""Channels of one user."""
NAME_CHARACTERS_MAX: Final = 200
URL_CHARACTERS_MAX: Final = 2048
AFTER_SECONDS_MAX: Final = 86400
EMAIL_AFTER_SECONDS: Final = 600
"""The time after which an e-mail tells, if its user has not said another."""
FORMER_SECRETS_MAX: Final = 4
FORMER_SECRET_SECONDS: Final = 86400.0
"""The time for which a secret that was replaced still signs."""

CODE_DIGITS: Final = 8
CODE_TRIES_MAX: Final = 5
"""Tries to confirm an address with one code."""
CODE_LASTS: Final = timedelta(hours=1)
CODES_MAX_A_DAY: Final = {"address": 3, "user": 10, "store": 100}
"""Codes that are sent in 24 hours to one address, whoever asks, for one user, and for one store."""
UNCONFIRMED: Final = "its address is not confirmed"
KEY_GONE: Final = "the API key that saved it last is gone: enable it with another one"
UNSUBSCRIBED: Final = "somebody unsubscribed by the link in one of its e-mails"

# No quotes, no comments, no routes: whatever could be read in two ways.
_EMAIL: Final = re.compile(
    r"mailto:(?P<local>[A-Za-z0-9_](?:[A-Za-z0-9_.+=~-]{0,62}[A-Za-z0-9_+=~-])?)"
    r"@(?P<domain>(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]{2,63})",
    re.ASCII,
)
_ADDRESS_CHARACTERS_MAX: Final = 254


class ChannelKind(StrEnum):
    """The kinds of channels."""

    WEBHOOK = "webhook"
    EMAIL = "email"


def kind_of(url: str) -> ChannelKind:
    """Return the kind of a channel with this URL."""
    return ChannelKind.EMAIL if url.lower().startswith("mailto:") else ChannelKind.WEBHOOK


def code_of(secret: bytes, url: str) -> str:
    """Return the code that confirms an address, for as long as its channel has this secret."""
    digest = hmac.digest(secret, f"confirm {url}".encode(), hashlib.sha256)
    return f"{int.from_bytes(digest[:8]) % 10**CODE_DIGITS:0{CODE_DIGITS}}"


def unsubscribe_token(secret: bytes, store_id: StoreId, channel_id: ChannelId, url: str) -> str:
    """Return the token that ends e-mails to an address: nobody makes one without the secret of their channel."""
    digest = hmac.digest(secret, f"unsubscribe {store_id} {channel_id} {url}".encode(), hashlib.sha256)
    return f"{channel_id}.{digest.hex()}"


def channel_of_token(token: str) -> ChannelId | None:
    """Return the channel that a token names, if it names one; whether it is of that channel is another question."""
    channel_id = token.partition(".")[0]
    return ChannelId(channel_id) if is_id(channel_id) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """A place where a user is told, so long after the inbox. Without `kinds` it is told everything.

    Without `after_seconds` they are those of its kind; one that is kept has them. `credential_id` is the credential
    that saved it last, `delegate_user_id` the user of the delegate that did so for its user.
    """

    channel_id: ChannelId
    name: str
    url: str
    kinds: tuple[NotificationKind, ...] = ()
    after_seconds: int | None = None
    enabled: bool = True
    disable_reason: str = ""
    create_time: datetime | None = None
    failing_since_time: datetime | None = None
    confirm_time: datetime | None = None
    credential_id: CredentialId = CredentialId("")
    delegate_user_id: UserId = UserId("")

    @property
    def kind(self) -> ChannelKind:
        """Its kind."""
        return kind_of(self.url)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelChange:
    """A change that a user asks for; what is None stays."""

    channel_id: ChannelId
    name: str | None = None
    url: str | None = None
    kinds: NotificationKinds | None = None
    enabled: bool | None = None
    after_seconds: int | None = None

    def of(self, channel: Channel) -> Channel:
        """Return the channel after the change."""
        return replace(
            channel,
            name=channel.name if self.name is None else self.name,
            url=channel.url if self.url is None else self.url,
            kinds=channel.kinds if self.kinds is None else self.kinds.kinds,
            enabled=channel.enabled if self.enabled is None else self.enabled,
            after_seconds=channel.after_seconds if self.after_seconds is None else self.after_seconds,
        )


def checked(channel: Channel) -> Channel:
    """Return a channel that a user asked for, whole, if it has a meaning; of URLs only addresses are judged.

    Raises:
        InvalidField: it has none.
    """
    if len(channel.name) > NAME_CHARACTERS_MAX or not channel.name.isprintable():
        raise InvalidField(f"name must be at most {NAME_CHARACTERS_MAX} printable characters", field="channel.name")
    if not 0 < len(channel.url) <= URL_CHARACTERS_MAX:
        raise InvalidField(f"url must have 1 to {URL_CHARACTERS_MAX} characters", field="channel.url")
    if (channel.after_seconds or 0) > AFTER_SECONDS_MAX:
        raise InvalidField(f"after_seconds may be at most {AFTER_SECONDS_MAX}", field="channel.after_seconds")
    if len(set(channel.kinds)) != len(channel.kinds):
        raise InvalidField("kinds must differ from each other", field="channel.kinds")
    if channel.kind is not ChannelKind.EMAIL:
        return replace(channel, after_seconds=channel.after_seconds or 0)
    after_seconds = EMAIL_AFTER_SECONDS if channel.after_seconds is None else channel.after_seconds
    return replace(channel, url=_checked_address(channel.url), after_seconds=after_seconds)


def _checked_address(url: str) -> str:
    scheme, _, address = url.partition(":")
    match = _EMAIL.fullmatch(f"{scheme.lower()}:{address}")
    if match is None or ".." in address or len(address) > _ADDRESS_CHARACTERS_MAX:
        raise InvalidField("url must be mailto: and a plain address, like mailto:ann@example.com", field="channel.url")
    return f"mailto:{match['local']}@{match['domain'].lower()}"
