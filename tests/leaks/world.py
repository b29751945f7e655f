"""The five services in this process, on the embedded PostgreSQL and NATS as `pawl up` runs them."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from pawl.agent_loop.__main__ import main as agent_loop
from pawl.event.v1 import call_pb2
from pawl.gateway.__main__ import main as gateway
from pawl.job_store.__main__ import main as job_store
from pawl.launcher.suite import Suite
from pawl.notifier.__main__ import main as notifier
from pawl.tool.v1 import tool_pb2, tool_pb2_grpc
from pawl.tool_registry.__main__ import main as tool_registry
from tests.keys import ENVIRONMENT, keyed_channel

_START_SECONDS_MAX: Final = 90.0
_SERVICES: Final[Mapping[str, Callable[[asyncio.Event], Awaitable[None]]]] = {
    "job_store": job_store,
    "tool_registry": tool_registry,
    "notifier": notifier,
    "agent_loop": agent_loop,
    "gateway": gateway,
}


@contextlib.asynccontextmanager
async def running(suite: Suite, folder: Path) -> AsyncIterator[Mapping[str, str]]:
    addresses: dict[str, str] = {}
    async with contextlib.AsyncExitStack() as stack:
        for name, main in _SERVICES.items():
            addresses[name] = await stack.enter_async_context(
                _one(name, main, _environment(suite, name, addresses), folder)
            )
        await _register_panel(addresses["tool_registry"])
        yield addresses


@contextlib.asynccontextmanager
async def _one(
    name: str, main: Callable[[asyncio.Event], Awaitable[None]], environment: Mapping[str, str], folder: Path
) -> AsyncIterator[str]:
    address_file = folder / f"{name}.addresses"
    address_file.unlink(missing_ok=True)
    for variable in [variable for variable in os.environ if variable.startswith(("PAWL_", "OPENAI_"))]:
        del os.environ[variable]
    os.environ.update(environment, PAWL_ADDRESS_FILE=str(address_file))
    stop = asyncio.Event()
    task = asyncio.ensure_future(main(stop))
    try:
        async with asyncio.timeout(_START_SECONDS_MAX):
            while not address_file.exists():
                if task.done():
                    await task
                await asyncio.sleep(0.01)
        listens = msgspec.json.decode(address_file.read_bytes(), type=dict[str, str])
        yield listens.get("grpc") or listens["http"]
    finally:
        stop.set()
        await task


def _environment(suite: Suite, name: str, addresses: Mapping[str, str]) -> dict[str, str]:
    return {
        **ENVIRONMENT,
        "PAWL_LISTEN": "127.0.0.1:0",
        "PAWL_METRICS_LISTEN": "127.0.0.1:0",
        "PAWL_LOG_LEVEL": "warning",
        "PAWL_DATABASE_URL": suite.database_url,
        "PAWL_NATS_URL": suite.nats_url(name),
        "PAWL_JOB_STORE_ADDRESS": addresses.get("job_store", ""),
        "PAWL_TOOL_REGISTRY_ADDRESS": addresses.get("tool_registry", ""),
        "PAWL_NOTIFIER_ADDRESS": addresses.get("notifier", ""),
        "PAWL_AGENT_LOOP_ADDRESS": addresses.get("agent_loop", ""),
        "PAWL_GATEWAY_SEAL_KEY": "seal-key-of-the-leak-tests-0123456789",
        "PAWL_ACTIVE_RUNS_PER_USER": "1000",
        "PAWL_ACTIVE_RUNS_PER_STORE": "1000",
        "OPENAI_BASE_URL": suite.endpoints.model_base_url or "",
        "OPENAI_API_KEY": "none",
        "PAWL_MODEL": "pawl-scripted",
    }


async def _register_panel(address: str) -> None:
    definition = tool_pb2.ToolDefinition(
        name="show_panel",
        description="Shows something to the user.",
        arguments_schema_json=b'{"type":"object","properties":{"title":{"type":"string"}}}',
        context=call_pb2.EXECUTION_CONTEXT_FRONTEND,
        category=call_pb2.TOOL_CATEGORY_SAFE,
        effect_class=call_pb2.EFFECT_CLASS_IDEMPOTENT,
    )
    async with keyed_channel(address) as channel:
        stub = tool_pb2_grpc.ToolServiceStub(channel)
        await stub.RegisterTool(tool_pb2.RegisterToolRequest(definition=definition, replace=True))
