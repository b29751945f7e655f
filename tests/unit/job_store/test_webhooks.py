"""Webhooks that come in: a signature is good for the id, the time and the body that were signed, and for no others."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from standardwebhooks.webhooks import Webhook

from pawl.chassis.ids import StoreId
from pawl.errors import BadSignature, DependencyUnavailable
from pawl.job_store.app.triggers import Triggers
from pawl.job_store.domain.triggers import Authentication, TriggerKey
from pawl.job_store.domain.webhooks import event_id_of, secret_text

SECRET = b"k" * 32
NOW = datetime(2026, 5, 1, tzinfo=UTC)
OLD = NOW - timedelta(days=30)
NOW_TEXT, OLD_TEXT = (str(int(time.timestamp())) for time in (NOW, OLD))


def checked(event_id: str, time: str, body: str, signature: str) -> str:
    headers = {"webhook-id": event_id, "webhook-timestamp": time, "webhook-signature": signature}
    return event_id_of(Authentication.SIGNATURE, headers, body.encode(), [SECRET], NOW)


def signed(event_id: str, time: datetime, body: str) -> str:
    return Webhook(secret_text(SECRET)).sign(event_id, time, body)


def test_an_old_signature_is_not_good_for_another_id_and_time() -> None:
    """The three parts are signed with dots between them, so a dot inside the first would move the others."""
    assert checked("a", NOW_TEXT, "{}", signed("a", NOW, "{}")) == "a"
    with pytest.raises(BadSignature, match="full stop"):
        checked(f"a.{OLD_TEXT}", NOW_TEXT, "{}", signed("a", OLD, f"{NOW_TEXT}.{{}}"))


def test_who_shows_the_secret_itself_may_call_an_event_anything() -> None:
    headers = {"webhook-id": "a.1", "authorization": f"Bearer {secret_text(SECRET)}"}
    assert event_id_of(Authentication.BEARER, headers, b"", [SECRET], NOW) == "a.1"
    for wrong in (f"Basic {secret_text(SECRET)}", "Bearer whsec_", ""):
        with pytest.raises(BadSignature):
            event_id_of(Authentication.BEARER, headers | {"authorization": wrong}, b"", [SECRET], NOW)


class Refusals:
    """Rows that count refusals, the first one slowly; the database can be unavailable."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {"slow": 0, "quick": 0}
        self.may_add = asyncio.Event()
        self.is_away = False
        self.list = self.lease_mailboxes = None

    async def add_refusals(self, key: TriggerKey, count: int, reason: str) -> None:
        if self.is_away:
            raise DependencyUnavailable
        if key.trigger_id == "slow":
            await self.may_add.wait()
        self.counts[key.trigger_id] += count


async def test_no_refusal_is_lost_or_counted_twice() -> None:
    repository: Any = Refusals()
    unused: Any = None
    triggers = Triggers(repository, unused, unused, unused)
    rows: dict[str, Any] = {
        name: SimpleNamespace(key=TriggerKey(StoreId("acme"), name), refused_time=NOW) for name in repository.counts
    }

    async def refuse(name: str, at: datetime) -> None:
        await triggers._count_refusal(rows[name], "BAD_SIGNATURE: no", at)

    for name in rows:
        await refuse(name, NOW)
    sweep = asyncio.ensure_future(triggers.add_refusals())
    await asyncio.sleep(0)
    await refuse("slow", NOW)
    await refuse("quick", NOW + timedelta(hours=1))
    repository.may_add.set()
    await sweep
    repository.is_away = True
    await refuse("quick", NOW + timedelta(hours=1))
    repository.is_away = False
    await triggers.add_refusals()
    assert repository.counts == {"slow": 2, "quick": 3}
