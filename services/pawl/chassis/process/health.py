"""Health that follows what the process really depends on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, Self

import msgspec

from pawl.chassis.process import logs, tasks
from pawl.chassis.process.http_server import Response
from pawl.chassis.rpc.server import RpcServer

Probe = Callable[[], Awaitable[object]]
"""Returns if the dependency answers, raises if not."""

_INTERVAL_SECONDS: Final = 2.0
_TIMEOUT_SECONDS: Final = 2.0

_log = logs.get_logger(__name__)


class HealthMonitor:
    """Probes the dependencies every 2 s and sets the health of all services of an RPC server.

    NOT_SERVING while a required one does not answer; optional ones are only
    reported. An async context manager, to be entered inside the server's.
    """

    def __init__(self) -> None:
        self._probes: dict[str, tuple[Probe, bool]] = {}
        self._failures: dict[str, str] = {}
        self._serving = False
        self._server: RpcServer | None = None
        self._task: asyncio.Task[None] | None = None

    def add(self, name: str, probe: Probe, *, optional: bool = False) -> None:
        """Watch a dependency, from the next round on."""
        self._probes[name] = (probe, optional)

    def follow(self, server: RpcServer) -> None:
        """Set the health of the services of `server` from now on."""
        self._server = server

    async def __aenter__(self) -> Self:
        await self.check()
        self._task = asyncio.get_running_loop().create_task(self._repeat(), name="health.monitor")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            await tasks.end([self._task])
        self._serving = False

    async def check(self) -> None:
        """Probe everything once and publish the outcome."""
        names = list(self._probes)
        outcomes = await asyncio.gather(*(self._probe(name) for name in names))
        for name, (failure, detail) in zip(names, outcomes, strict=True):
            if failure is None and self._failures.pop(name, None) is not None:
                _log.info("health.recovered", dependency=name)
            elif failure is not None and self._failures.get(name) != failure:
                self._failures[name] = failure
                _log.warning("health.lost", dependency=name, error=failure, detail=detail)
        self._serving = all(self._probes[name][1] for name in self._failures)
        if self._server is not None:
            self._server.set_health(serving=self._serving)

    def page(self) -> Response:
        """Return the state for /healthz: 200 while serving, else 503."""
        checks = {name: self._failures.get(name, "ok") for name in self._probes}
        return Response(
            body=msgspec.json.encode({"serving": self._serving, "checks": checks}) + b"\n",
            content_type="application/json",
            status=200 if self._serving else 503,
        )

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_SECONDS)
            await self.check()

    async def _probe(self, name: str) -> tuple[str | None, str]:
        """Return what failed, None if nothing, and the details that are for logs only."""
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                await self._probes[name][0]()
        except TimeoutError:
            return f"no answer in {_TIMEOUT_SECONDS:g} s", ""
        except Exception as error:  # noqa: BLE001  # a probe fails in whatever way its driver does
            return type(error).__name__, "; ".join(getattr(error, "__notes__", ()))
        return None, ""
