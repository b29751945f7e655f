"""Limits and outages of model servers, shared with all other agent-loop processes."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, NamedTuple

from pawl.chassis.ids import StoreId
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.client import translated
from pawl.errors import PawlError
from pawl.job.v1 import models_pb2 as pb
from pawl.job.v1 import models_pb2_grpc

# Tokens reserved in token budgets for an answer without a limit.
OUTPUT_TOKENS_RESERVED: Final = 4096
_REPORT_SECONDS: Final = 1.0
_ANNOUNCE_SECONDS: Final = 60.0
_COUNTED_AT_ONCE: Final = 100


class CountedCall(NamedTuple):
    """A model call. `tokens` are added to those counted so far, and may be negative."""

    store_id: StoreId
    server: str
    tokens: int


class PerMinute(NamedTuple):
    """A model server's limits per minute. 0 means no limit."""

    requests: int = 0
    tokens: int = 0


class SharedModels:
    """Shared state of model servers. `servers` maps names to limits. The default server's name is empty."""

    def __init__(self, stub: models_pb2_grpc.ModelServiceAsyncStub, servers: Mapping[str, PerMinute]) -> None:
        self._stub = stub
        self._servers = servers
        # Ended calls by the ids with which they were taken.
        self._uncounted: dict[str, CountedCall] = {}
        self._has_uncounted = asyncio.Event()

    def is_rated(self, server: str) -> bool:
        return any(self._servers.get(server, ()))

    async def take(
        self,
        model_call_id: str,
        call: CountedCall,
        *,
        user_id: str = "",
        agent_name: str = "",
        output_tokens: int = 0,
        seconds_max: float = 0.0,
        ended: bool = False,
    ) -> pb.TakeModelCallResponse:
        """Count a model call. Idempotent by `model_call_id`."""
        found = self._servers.get(call.server, PerMinute())
        request = pb.TakeModelCallRequest(
            model_call_id=model_call_id,
            store_id=call.store_id,
            model_server=call.server,
            requests_per_minute=found.requests,
            tokens_per_minute=found.tokens,
            tokens=call.tokens,
            ended=ended,
            user_id=user_id,
            agent_name=agent_name,
            output_tokens=output_tokens,
            seconds_max=seconds_max,
        )
        return await translated(self._stub.TakeModelCall(request))

    def used(self, model_call_id: str, call: CountedCall) -> None:
        """Record that a call has ended and that its tokens are in the ledger."""
        self._uncounted[model_call_id] = call
        self._has_uncounted.set()

    async def count_ended(self) -> None:
        """Count the tokens of completed calls. A restart loses the tokens of calls that ended just before it."""
        while await self._has_uncounted.wait():
            self._has_uncounted.clear()
            while batch := list(self._uncounted.items())[:_COUNTED_AT_ONCE]:
                await asyncio.gather(*(self.take(*each, ended=True) for each in batch))
                for model_call_id, _ in batch:
                    del self._uncounted[model_call_id]

    async def announce(self, clock: Clock) -> None:
        """Report the names of all model servers every minute. Settings can only refer to these names."""
        while True:
            names = sorted({"default", *filter(None, self._servers)})
            await translated(self._stub.ReportModelServer(pb.ReportModelServerRequest(known_servers=names)))
            await clock.sleep(_ANNOUNCE_SECONDS)

    async def report(
        self, server: str, *, outages: int = 0, answered: bool = False, attempts: bool = False
    ) -> pb.ReportModelServerResponse | None:
        """Report how a server responds.

        Return the reports of all processes, or None if job-store does not answer.
        """
        request = pb.ReportModelServerRequest(
            model_server=server, outages=outages, answered=answered, attempts=attempts
        )
        try:
            async with asyncio.timeout(_REPORT_SECONDS):
                return await translated(self._stub.ReportModelServer(request))
        except (PawlError, TimeoutError):
            return None
