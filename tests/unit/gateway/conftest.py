"""Fixtures of the gateway's tests."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from pawl.chassis.rpc import tls
from pawl.server.process.http_server import HttpServer
from tests import certificates
from tests.fakes.manual_clock import ManualClock


@dataclass(frozen=True, kw_only=True)
class Listener:
    """Serves an application. `trusting` is the TLS context of its clients, or None without TLS."""

    tls: tls.Tls | None = None
    trusting: ssl.SSLContext | None = None

    def serve(self, app: Any) -> HttpServer:
        return HttpServer(
            app, "127.0.0.1:0", closing=asyncio.Event(), tls=self.tls, connections_max=10, drain_seconds=1.0
        )


@pytest.fixture(params=["http", "https"])
def listener(request: pytest.FixtureRequest, tmp_path: Path, clock: ManualClock) -> Listener:
    if request.param == "http":
        return Listener()
    files = certificates.write(tmp_path, "gateway", trustme.CA())
    return Listener(
        tls=tls.of_service(files.certificate, files.key, files.authority, clock=clock),
        trusting=ssl.create_default_context(cafile=files.authority),
    )
