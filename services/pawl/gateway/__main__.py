"""Runs the gateway: `python -m pawl.gateway`."""

from __future__ import annotations

import asyncio
from typing import Final

from pawl.gateway.services import PEERS
from pawl.gateway.settings import GatewaySettings
from pawl.gateway.wiring import wire
from pawl.server.process.http_server import HttpServer
from pawl.server.process.service import Service, run_service
from pawl.server.process.settings import load

_CALLS_MAX: Final = 1000


async def main(stop: asyncio.Event) -> None:
    settings = load(GatewaySettings)
    async with Service("gateway", settings) as service:
        channels = {
            peer: await service.open_channel(
                peer, getattr(settings, f"{peer}_address"), public=True, optional=peer != "agent_loop"
            )
            for peer in PEERS
        }
        closing = asyncio.Event()
        app = wire(
            settings,
            channels,
            closing=closing,
            health=service.health.page,
            metrics=service.metrics,
            clock=service.clock,
            ids=service.ids,
        )
        server = HttpServer(
            app,
            settings.listen,
            closing=closing,
            tls=service.tls,
            connections_max=_CALLS_MAX + settings.streams_max,
            drain_seconds=settings.drain_seconds,
        )
        await service.serve(server, stop)


if __name__ == "__main__":
    run_service(main)
