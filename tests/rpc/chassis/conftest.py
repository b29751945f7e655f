"""Servers with a small service of all four RPC kinds on a Unix socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pawl.chassis.identity.auth import Authenticator
from pawl.chassis.identity.roles import AGENT_LOOP, ANYBODY
from pawl.chassis.ids import IdSource
from pawl.chassis.rpc.limits import Limits
from pawl.chassis.rpc.tls import Tls
from pawl.server.process.metrics import Metrics
from pawl.server.rpc.server import RpcServer
from tests.fakes.session_agent import OpenAuthenticator
from tests.rpc.chassis.echo import ECHO_METHODS, EchoServicer, Serve, add_echo_to_server


@pytest.fixture
def servicer() -> EchoServicer:
    return EchoServicer()


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("test")


@pytest.fixture
def serve(servicer: EchoServicer, ids: IdSource, metrics: Metrics, tmp_path: Path) -> Serve:
    @asynccontextmanager
    async def start(
        *,
        authenticator: Authenticator | None = None,
        service_only: bool = False,
        drain_streams: bool = False,
        listen: str = f"unix:{tmp_path}/echo",
        drain_seconds: float = 0.2,
        tls: Tls | None = None,
        callers_seconds: float = 2.0,
        **limits: Any,
    ) -> AsyncIterator[RpcServer]:
        anybody = frozenset({AGENT_LOOP}) if service_only else ANYBODY
        server = RpcServer(
            listen,
            authenticator=authenticator or OpenAuthenticator(),
            ids=ids,
            metrics=metrics,
            limits=Limits(**limits),
            drain_seconds=drain_seconds,
            tls=tls,
            internal_listen="127.0.0.1:0",
            callers_seconds=callers_seconds,
        )
        server.add(
            add_echo_to_server,
            servicer,
            service_only=service_only,
            drain_streams=drain_streams,
            callers=dict.fromkeys(ECHO_METHODS, anybody),
        )
        async with server:
            yield server

    return start
