"""Shares the limits and outages of model servers with all other agent-loop processes."""

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
    """The limits per minute of a model server. 0 means no limit."""

    requests: int = 0
    tokens: int = 0


class SharedModels:
    """`servers` contains the limits of each model server by its name. The default server's name is empty."""

    def __init__(self, stub: models_pb2_grpc.ModelServiceAsyncStub, servers: Mapping[str, PerMinute]) -> None:
        self._stub = stub
        self._servers = servers
        # Tokens that calls have used beyond the tokens counted before the calls.
        self._uncounted: Counter[tuple[StoreId, str]] = Counter()

    def is_rated(self, server: str) -> bool:
        return any(self._servers.get(server, ()))

    async def take(self, store_id: StoreId, server: str, tokens: int) -> float:
        """Count a model call. Return the seconds until the next attempt, or 0 if the call may be made."""
        found, key = self._servers.get(server, PerMinute()), (store_id, server)
        # Concurrent calls must not count the same tokens.
        uncounted = self._uncounted.pop(key, 0)
        request = pb.TakeModelCallRequest(
            store_id=store_id,
            model_server=server,
            requests_per_minute=found.requests,
            tokens_per_minute=found.tokens,
            tokens=max(0, tokens + uncounted),
        )
        left = uncounted
        try:
            wait_seconds: float = (await translated(self._stub.TakeModelCall(request))).wait_seconds
            if not wait_seconds:
                left = tokens + uncounted - request.tokens
        finally:
            if left:
                self._uncounted[key] += left
        return wait_seconds

    def used(self, store_id: StoreId, server: str, tokens: int) -> None:
        """Note that a call used `tokens` more than were counted. A negative number means that it used fewer."""
        self._uncounted[store_id, server] += tokens

    async def report(
        self, server: str, *, outages: int = 0, answered: bool = False, attempt_seconds: float = 0.0
    ) -> pb.ReportModelServerResponse | None:
        """Report how a server answers.

        Return what all processes have reported, or None if job-store does not answer.
        """
        request = pb.ReportModelServerRequest(
            model_server=server, outages=outages, answered=answered, attempt_seconds=attempt_seconds
        )
        try:
            async with asyncio.timeout(_REPORT_SECONDS):
                return await translated(self._stub.ReportModelServer(request))
        except (PawlError, TimeoutError):
            return None
