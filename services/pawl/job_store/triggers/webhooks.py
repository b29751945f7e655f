"""The check of webhooks that come in: by the Standard Webhooks specification, or by a key."""

from __future__ import annotations

import base64
import hmac
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Final

from standardwebhooks.webhooks import Webhook as Signature

from pawl.errors import BadSignature, WebhookTooOld
from pawl.job_store.triggers.rules import Authentication

TOLERANCE_SECONDS: Final = 300.0
SIGNATURES_MAX: Final = 10

_EVENT_ID: Final = re.compile(r"[!-~]{1,200}")
_TIME: Final = re.compile(r"[0-9]{1,12}")


def event_id_of(
    authentication: Authentication, headers: Mapping[str, str], body: bytes, secrets: Sequence[bytes], now: datetime
) -> str:
    """Return the webhook-id of a webhook that somebody has sent who knows one of the secrets; empty if it has none.

    Nobody else is told anything but that. The names of `headers` are in lower case.

    Raises:
        BadSignature: there is no good signature, or key, or what it needs is missing.
        WebhookTooOld: the signature is good, and of another time.
    """
    event_id = headers.get("webhook-id", "")
    if event_id and not _EVENT_ID.fullmatch(event_id):
        raise BadSignature("webhook-id is not 1 to 200 visible characters of ASCII")
    if authentication is Authentication.BEARER:
        _check_key(headers.get("authorization", ""), secrets)
        return event_id
    if "." in event_id:
        # What is signed is id.time.body: with one more dot an old signature would fit another id, time and body.
        raise BadSignature("a webhook-id that is signed has no full stop")
    time = headers.get("webhook-timestamp", "")
    if not event_id or not _TIME.fullmatch(time):
        raise BadSignature("webhook-id or webhook-timestamp is missing, or wrong")
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
    """Return a secret as senders have it."""
    return f"whsec_{base64.b64encode(secret).decode()}"


def _check_key(authorization: str, secrets: Sequence[bytes]) -> None:
    scheme, _, key = authorization.partition(" ")
    shown = key.strip().encode()
    is_good = any(hmac.compare_digest(shown, secret_text(secret).encode()) for secret in secrets)
    if scheme.lower() != "bearer" or not is_good:
        raise BadSignature
