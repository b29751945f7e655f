"""The gRPC health service, and calls to it.

The library's servicer holds a lock while it writes to a watcher. A watcher that does not read would therefore block all
other watchers and the shutdown.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from pawl.chassis.rpc.client import translated
from pawl.chassis.rpc.kinds import Context
from pawl.errors import DependencyUnavailable

NAME: Final = health.SERVICE_NAME

_UNKNOWN: Final = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Reports the health of services by name. The empty name means the whole server."""

    def __init__(self) -> None:
        self._states: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._has_ended = False

    def set(self, serving: Mapping[str, bool]) -> None:
        """Set the health of services and notify watchers, without waiting for them."""
        if self._has_ended:
            return
        response = health_pb2.HealthCheckResponse
        for name, is_healthy in serving.items():
            self._states[name] = response.SERVING if is_healthy else response.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self) -> None:
        """Set all services to NOT_SERVING permanently. Later calls of `set` are ignored."""
        self.set(dict.fromkeys(self._states, False))
        self._has_ended = True

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._states:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=self._states[request.service])

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        while True:
            changed, state = self._changed, self._states.get(request.service, _UNKNOWN)
            if state != last:
                last = state
                yield health_pb2.HealthCheckResponse(status=state)
            await changed.wait()


async def ping(channel: grpc.aio.Channel) -> None:
    """Check that a replica behind the channel is reachable and healthy.

    Raises:
        DependencyUnavailable: No replica is reachable and healthy.
    """
    stub: Any = health_pb2_grpc.HealthStub(channel)
    reply = await translated(stub.Check(health_pb2.HealthCheckRequest()))
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        raise DependencyUnavailable("the service reports that it is not serving")
