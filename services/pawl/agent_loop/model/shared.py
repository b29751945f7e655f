"""Limits and outages of model servers, shared with all other agent-loop processes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

from pawl.chassis.ids import StoreId
from pawl.chassis.rpc.client import translated
from pawl.errors import PawlError
from pawl.job.v1 import models_pb2 as pb
from pawl.job.v1 import models_pb2_grpc

_REPORT_SECONDS: Final = 1.0


class PerMinute(NamedTuple):
    """A model server's limits per minute. 0 means no limit."""

    requests: int = 0
    tokens: int = 0


class SharedModels:
    """Shared state of model servers. `servers` maps names to limits. The default server's name is empty."""

    def __init__(self, stub: models_pb2_grpc.ModelServiceAsyncStub, servers: Mapping[str, PerMinute]) -> None:
        self._stub = stub
        self._servers = servers
        # Tokens that ended calls have used beyond those counted before the calls.
        self._uncounted: Counter[tuple[StoreId, str]] = Counter()
        self._has_uncounted = asyncio.Event()

    def is_rated(self, server: str) -> bool:
        return any(self._servers.get(server, ()))

    async def take(self, store_id: StoreId, server: str, tokens: int, *, ended: bool = False) -> float:
        """Count a model call. Return the seconds until the next attempt, or 0 if the call may be made."""
        found = self._servers.get(server, PerMinute())
        request = pb.TakeModelCallRequest(
            store_id=store_id,
            model_server=server,
            requests_per_minute=found.requests,
            tokens_per_minute=found.tokens,
            tokens=tokens,
            ended=ended,
        )
        wait_seconds: float = (await translated(self._stub.TakeModelCall(request))).wait_seconds
        return wait_seconds

    def used(self, store_id: StoreId, server: str, tokens: int) -> None:
        """Record that a call used `tokens` more than were counted. A negative number means fewer."""
        self._uncounted[store_id, server] += tokens
        self._has_uncounted.set()

    async def count_ended(self) -> None:
        """Count the tokens of ended calls.

        A restart loses the tokens of open calls and of calls that ended just before.
        """
        while await self._has_uncounted.wait():
            self._has_uncounted.clear()
            while self._uncounted:
                # The key is removed first, so that calls that end during the request add to a new number.
                key, tokens = self._uncounted.popitem()
                try:
                    await self.take(*key, tokens, ended=True)
                except BaseException:
                    self.used(*key, tokens)
                    raise

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
