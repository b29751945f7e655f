"""Erasures that job-store requests from other services."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from pawl.chassis.process.clock import SystemClock
from pawl.job.v1 import erasure_pb2 as pb
from pawl.server.db.erasures import ErasurePart, ErasureWork


class Stub:
    def __init__(self) -> None:
        self.confirmed: list[str] = []

    async def ListErasures(self, _: object, *, timeout: float) -> AsyncIterator[pb.ListErasuresResponse]:
        for conversation_id, last in (("broken", False), ("broken", True), ("good", True)):
            yield pb.ListErasuresResponse(store_id="acme", conversation_id=conversation_id, last=last)

    async def ConfirmErasure(self, request: pb.ConfirmErasureRequest) -> pb.ConfirmErasureResponse:
        self.confirmed.append(request.conversation_id)
        return pb.ConfirmErasureResponse()


async def test_a_failed_erasure_does_not_block_others(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def erase(part: ErasurePart) -> None:
        asked.append(part.conversation_id)
        if part.conversation_id == "broken":
            raise ValueError

    stub: Any = Stub()
    async with grpc.aio.insecure_channel("unix:unused") as channel:
        work = ErasureWork(channel, erase, SystemClock())
        monkeypatch.setattr(work, "_stub", stub)
        await work.sweep()
    assert (asked, stub.confirmed) == (["broken", "good"], ["good"])
