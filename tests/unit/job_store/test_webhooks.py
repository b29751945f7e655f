"""Incoming webhooks: a signature is valid only for the signed id, time and body."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from standardwebhooks.webhooks import Webhook

from pawl.errors import BadSignature
from pawl.job_store.triggers.rules import Authentication
from pawl.job_store.triggers.triggers import event_id_of, secret_text

SECRET = b"k" * 32
NOW = datetime(2026, 5, 1, tzinfo=UTC)
OLD = NOW - timedelta(days=30)
NOW_TEXT, OLD_TEXT = (str(int(time.timestamp())) for time in (NOW, OLD))


def checked(event_id: str, time: str, body: str, signature: str) -> str:
    headers = {"webhook-id": event_id, "webhook-timestamp": time, "webhook-signature": signature}
    return event_id_of(Authentication.SIGNATURE, headers, body.encode(), [SECRET], NOW)


def signed(event_id: str, time: datetime, body: str) -> str:
    return Webhook(secret_text(SECRET)).sign(event_id, time, body)


def test_an_old_signature_is_invalid_for_another_id_and_time() -> None:
    """The signed parts are joined by dots, so a dot in the id would shift the other parts."""
    assert checked("a", NOW_TEXT, "{}", signed("a", NOW, "{}")) == "a"
    with pytest.raises(BadSignature, match="dot"):
        checked(f"a.{OLD_TEXT}", NOW_TEXT, "{}", signed("a", OLD, f"{NOW_TEXT}.{{}}"))


def test_a_sender_with_the_secret_as_bearer_token_may_choose_any_event_id() -> None:
    headers = {"webhook-id": "a.1", "authorization": f"Bearer {secret_text(SECRET)}"}
    assert event_id_of(Authentication.BEARER, headers, b"", [SECRET], NOW) == "a.1"
    for wrong in (f"Basic {secret_text(SECRET)}", "Bearer whsec_", ""):
        with pytest.raises(BadSignature):
            event_id_of(Authentication.BEARER, headers | {"authorization": wrong}, b"", [SECRET], NOW)
