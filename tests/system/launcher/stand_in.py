"""A service with nothing in it, for tests of the launcher: settings from the environment, addresses, gRPC health.

What it was given it shows as a metric page would: it writes its environment next to its address file. Faults are asked
for by STAND_IN: `usage` ends with exit code 2, `mute` never becomes ready, `stubborn` ignores SIGTERM, `broken`
logs a module of tools that cannot be loaded.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc


async def main(address_file: Path) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if os.environ.get("STAND_IN") == "stubborn":
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
    port = server.add_insecure_port(os.environ["PAWL_LISTEN"])
    await server.start()
    address_file.with_suffix(".environment").write_text(json.dumps(dict(os.environ)))
    if os.environ.get("STAND_IN") != "mute":
        draft = address_file.with_suffix(".draft")
        draft.write_text(json.dumps({"grpc": f"127.0.0.1:{port}", "metrics": "127.0.0.1:9"}))
        draft.replace(address_file)
    await stop.wait()
    with address_file.with_name("stopped").open("a") as order:
        order.write(f"{address_file.stem}\n")
    await server.stop(0)


if __name__ == "__main__":
    if os.environ.get("STAND_IN") == "usage":
        sys.stderr.write("PAWL_NONSENSE: is required\n")
        sys.exit(2)
    if os.environ.get("STAND_IN") == "broken":
        line = {"event": "tool.module_broken", "tool_module": "shop", "error": "shop.py:1: SyntaxError"}
        sys.stderr.write(json.dumps(line) + "\n")
    asyncio.run(main(Path(os.environ["PAWL_ADDRESS_FILE"])))
