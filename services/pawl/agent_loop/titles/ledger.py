"""The ledger's titles."""

from __future__ import annotations

from typing import Final

import grpc

from pawl.agent_loop.loop import wire
from pawl.chassis.db.rows import read_each
from pawl.chassis.rpc.client import translated
from pawl.event.v1 import run_pb2
from pawl.job.v1 import titles_pb2 as pb
from pawl.job.v1 import titles_pb2_grpc
from pawl.values import TitleTask, Usage

_TASK: Final = wire.WIRE.struct(TitleTask, pb.TitleTask)
_USAGE: Final = wire.WIRE.struct(Usage, run_pb2.Usage)
_TEXT_CHARACTERS_MAX: Final = 4096


class TitleLedgerClient:
    """A `TitleLedger` over a channel to job-store. It makes no retries."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = titles_pb2_grpc.TitleServiceStub(channel)

    async def claim_titles(self, *, titles_max: int) -> list[TitleTask]:
        response = await translated(self._stub.ClaimTitles(pb.ClaimTitlesRequest(titles_max=titles_max)))
        return read_each("title", response.tasks, _TASK.read, lambda each: each.conversation_id)

    async def set_title(self, task: TitleTask, text: str, usage: Usage) -> None:
        request = pb.SetTitleRequest(
            store_id=task.store_id,
            conversation_id=task.conversation_id,
            attempt=task.attempt,
            text=text[:_TEXT_CHARACTERS_MAX],
            usage=_USAGE.write(usage),
        )
        await translated(self._stub.SetTitle(request))
