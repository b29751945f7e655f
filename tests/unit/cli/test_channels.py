"""`pawl notify`: channels and their deliveries."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any
from unittest.mock import MagicMock

import pytest

from pawl.client import AsyncClient
from pawl.notify.v1 import channel_pb2 as pb
from tests.unit.cli.test_arguments import invoke


def test_of_all_that_is_dead_a_code_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that it is asked for the service sends all or nothing: a mistyped address would leave the rest dead."""
    sent: list[str] = []

    async def pages(_client: AsyncClient, _call: object, _request: object) -> AsyncIterator[Any]:
        types = ("run.completed", "channel.code", "channel.test")
        yield pb.ListDeliveriesResponse(deliveries=[pb.ChannelDelivery(delivery_id=f"dlv_{n}", type=n) for n in types])

    async def resend(request: pb.ResendDeliveriesRequest) -> None:
        sent.extend(request.delivery_ids)

    monkeypatch.setattr(AsyncClient, "pages", pages)
    monkeypatch.setattr(AsyncClient, "notify_channels", MagicMock(ResendDeliveries=resend))
    assert invoke("notify", "resend", "--dead") == (0, "Sending 2 deliveries again.\n")
    assert sent == ["dlv_run.completed", "dlv_channel.test"]
