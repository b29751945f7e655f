from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from pawl.chassis import logs
from pawl.chassis.rpc_server import RpcServer
from pawl.chassis.service import Service
from pawl.chassis.settings import ServiceSettings
from tests.keys import ENVIRONMENT


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the logs of the test process as they are, and give a service its keys."""
    monkeypatch.setattr(logs, "configure", lambda **_: None)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


class Part:
    """Something a service holds; notes when it is left."""

    def __init__(self, name: str, order: list[str]) -> None:
        self._name = name
        self._order = order

    async def __aenter__(self) -> None:
        return

    async def __aexit__(self, *_: object) -> None:
        self._order.append(self._name)


async def test_a_service_ends_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drain, then the loops, then what they use: a loop that calls wait for is there to the last."""
    order: list[str] = []

    async def loop() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            order.append("loop")

    async def drained(self: RpcServer, *_: object) -> None:
        await stop_serving(self)
        order.append("server")

    stop_serving = RpcServer.__aexit__
    monkeypatch.setattr(RpcServer, "__aexit__", drained)
    stop = asyncio.Event()
    stop.set()
    async with Service("test", ServiceSettings()) as service:
        await service.enter(Part("database", order))
        await service.enter(Part("bus", order))
        service.background.start("loop", loop)
        await service.serve(service.rpc_server(), stop)
    assert order == ["server", "loop", "bus", "database"]


def test_a_service_loads_no_libraries_that_only_others_need() -> None:
    """Each would cost every process megabytes: those for tokens of issuers, and for colours."""
    for service in ("agent_loop", "job_store", "notifier", "tool_registry"):
        program = (
            f"import sys, pawl.{service}.__main__; print(*{{'cryptography', 'joserfc', 'rich'}} & {{*sys.modules}})"
        )
        assert subprocess.check_output([sys.executable, "-c", program], text=True).split() == [], service
