"""Channels: the webhooks and e-mail addresses that receive a user's notifications."""

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

# Maximum number of channels per user.
CHANNELS_MAX: Final = 10
NAME_CHARACTERS_MAX: Final = 200
URL_CHARACTERS_MAX: Final = 2048
AFTER_SECONDS_MAX: Final = 86400
# Default delay between a notification and its e-mail.
EMAIL_AFTER_SECONDS: Final = 600
FORMER_SECRETS_MAX: Final = 4
# How long a replaced secret is still used for signing.
FORMER_SECRET_SECONDS: Final = 86400.0

CODE_DIGITS: Final = 8
# Maximum number of attempts to confirm an address with one code.
CODE_TRIES_MAX: Final = 5
CODE_LASTS: Final = timedelta(hours=1)
# Maximum number of codes sent in 24 hours: to one address (for any user), for one user, and for one store.
CODES_MAX_A_DAY: Final = {"address": 3, "user": 10, "store": 100}
UNCONFIRMED: Final = "the address is not confirmed"
KEY_GONE: Final = "the API key that last saved it was deleted: enable it with another key"
UNSUBSCRIBED: Final = "someone used the unsubscribe link in one of its e-mails"

# No quotes, comments or routes, which mail servers may parse differently.
_EMAIL: Final = re.compile(
    r"mailto:(?P<local>[A-Za-z0-9_](?:[A-Za-z0-9_.+=~-]{0,62}[A-Za-z0-9_+=~-])?)"
    r"@(?P<domain>(?:[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z]{2,63})",
    re.ASCII,
)
_ADDRESS_CHARACTERS_MAX: Final = 254


class ChannelKind(StrEnum):
    WEBHOOK = "webhook"
    EMAIL = "email"


def kind_of(url: str) -> ChannelKind:
    return ChannelKind.EMAIL if url.lower().startswith("mailto:") else ChannelKind.WEBHOOK


def code_of(secret: bytes, url: str) -> str:
    """Return the code that confirms an address. It is valid while the channel has this secret."""
    digest = hmac.digest(secret, f"confirm {url}".encode(), hashlib.sha256)
    return f"{int.from_bytes(digest[:8]) % 10**CODE_DIGITS:0{CODE_DIGITS}}"


def unsubscribe_token(secret: bytes, store_id: StoreId, channel_id: ChannelId, url: str) -> str:
    """Return an e-mail channel's unsubscribe token. It cannot be forged without the channel's secret."""
    digest = hmac.digest(secret, f"unsubscribe {store_id} {channel_id} {url}".encode(), hashlib.sha256)
    return f"{channel_id}.{digest.hex()}"


def channel_of_token(token: str) -> ChannelId | None:
    """Return the channel id in a token, or None if it contains no valid id. The token is not verified."""
    channel_id = token.partition(".")[0]
    return ChannelId(channel_id) if is_id(channel_id) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Channel:
    """A destination for a user's notifications. If `kinds` is empty, it receives all kinds.

    If `after_seconds` is None, the default for the channel's kind applies. Stored channels always have a value.
    `credential_id` is the credential that last saved the channel. `delegate_user_id` is the delegate that acted for the
    user, if any.
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
        return kind_of(self.url)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChannelChange:
    """A requested change to a channel. None leaves a field unchanged."""

    channel_id: ChannelId
    name: str | None = None
    url: str | None = None
    kinds: NotificationKinds | None = None
    enabled: bool | None = None
    after_seconds: int | None = None

    def of(self, channel: Channel) -> Channel:
        return replace(
            channel,
            name=channel.name if self.name is None else self.name,
            url=channel.url if self.url is None else self.url,
            kinds=channel.kinds if self.kinds is None else self.kinds.kinds,
            enabled=channel.enabled if self.enabled is None else self.enabled,
            after_seconds=channel.after_seconds if self.after_seconds is None else self.after_seconds,
        )


def checked(channel: Channel) -> Channel:
    """Validate a channel, and return it with its defaults filled in. Of the URLs, only e-mail URLs are validated here.

    Raises:
        InvalidField: A field is invalid.
    """
    if len(channel.name) > NAME_CHARACTERS_MAX or not channel.name.isprintable():
        raise InvalidField(f"name must be at most {NAME_CHARACTERS_MAX} printable characters", field="channel.name")
    if not 0 < len(channel.url) <= URL_CHARACTERS_MAX:
        raise InvalidField(f"url must be 1 to {URL_CHARACTERS_MAX} characters", field="channel.url")
    if (channel.after_seconds or 0) > AFTER_SECONDS_MAX:
        raise InvalidField(f"after_seconds must be at most {AFTER_SECONDS_MAX}", field="channel.after_seconds")
    if len(set(channel.kinds)) != len(channel.kinds):
        raise InvalidField("kinds must not repeat", field="channel.kinds")
    if channel.kind is not ChannelKind.EMAIL:
        return replace(channel, after_seconds=channel.after_seconds or 0)
    after_seconds = EMAIL_AFTER_SECONDS if channel.after_seconds is None else channel.after_seconds
    return replace(channel, url=_checked_address(channel.url), after_seconds=after_seconds)


def _checked_address(url: str) -> str:
    scheme, _, address = url.partition(":")
    match = _EMAIL.fullmatch(f"{scheme.lower()}:{address}")
    if match is None or ".." in address or len(address) > _ADDRESS_CHARACTERS_MAX:
        raise InvalidField(
            "url must be mailto: followed by a plain address, such as mailto:ann@example.com", field="channel.url"
        )
    return f"mailto:{match['local']}@{match['domain'].lower()}"
