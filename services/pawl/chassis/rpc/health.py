"""Health as gRPC has it, for whoever asks.

The library's own servicer holds a lock while it writes to a watcher: one that does not read
would keep the news from all others, and the server from its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pawl.chassis.rpc.kinds import Context

NAME: Final = health.SERVICE_NAME

_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):
    """The health of a server's services by name; that of the server itself has the empty one."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}
        self._news = asyncio.Event()
        self._has_ended = False

    def set(self, serving: Mapping[str, bool]) -> None:
        """Say of each of these services whether it is well, to those who watch too; waits for none of them."""
        if self._has_ended:
            return
        response = health_pb2.HealthCheckResponse
        for name, is_well in serving.items():
            self._states[name] = response.SERVING if is_well else response.NOT_SERVING
        self._news.set()
        self._news = asyncio.Event()

    def end(self) -> None:
        """Say that no service is well, whatever is said later."""
        self.set(dict.fromkeys(self._states, False))
        self._has_ended = True

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._states:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=self._states[request.service])

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        told = None
        while True:
            news, state = self._news, self._states.get(request.service, _UNKNOWN)
            if state != told:
                told = state
                yield health_pb2.HealthCheckResponse(status=state)
            await news.wait()
