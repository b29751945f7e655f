"""A worker that a test controls frame by frame."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from pawl.chassis.rpc.client import open_channel
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import tool_pb2, worker_pb2
from pawl.tool.v1.worker_pb2_grpc import WorkerServiceStub
from pawl.tool_registry.sources.worker.workers import WorkerOptions
from tests.poll import PATIENCE_SECONDS
from tests.rpc.tool_registry.registry import Registry
from tests.rpc.tool_registry.world import execute


class LastingOptions(WorkerOptions):
    """Leases that outlast every test unless it ends one. The loss is then confirmed soon."""

    silence_seconds = 0.5


OPTIONS = LastingOptions(lease_seconds=60.0, poll_seconds=0.1)
Request, Status, Purpose = worker_pb2.AttachWorkerRequest, worker_pb2.ResultStatus, worker_pb2.InvocationPurpose
EffectClass = call_pb2.EffectClass


def definition(
    name: str = "charge", *, effect: int = EffectClass.EFFECT_CLASS_AT_MOST_ONCE, **changes: Any
) -> tool_pb2.ToolDefinition:
    """Return a worker tool that needs no approval."""
    fields: dict[str, Any] = {
        "name": name,
        "description": "Charge an amount.",
        "arguments_schema_json": b'{"type": "object", "properties": {"amount": {"type": "integer"}}}',
        "context": call_pb2.EXECUTION_CONTEXT_BACKEND,
        "category": call_pb2.TOOL_CATEGORY_SAFE,
        "effect_class": effect,
        "timeout_seconds": 60,
    }
    return tool_pb2.ToolDefinition(**fields | changes)


@dataclass
class AttachedWorker:
    call: Any

    async def send(self, **frame: Any) -> None:
        await self.call.write(Request(**frame))

    async def next(self) -> Any:
        async with asyncio.timeout(PATIENCE_SECONDS):
            response = await self.call.read()
        assert response is not grpc.aio.EOF
        return getattr(response, response.WhichOneof("frame"))

    async def invocation(self) -> worker_pb2.Invocation:
        frame = await self.next()
        assert isinstance(frame, worker_pb2.Invocation), frame
        return frame

    async def beat(self) -> None:
        await self.send(heartbeat=worker_pb2.WorkerHeartbeat())
        assert isinstance(await self.next(), worker_pb2.WorkerHeartbeatAnswer)

    async def answer(self, invocation: worker_pb2.Invocation, value: Any = "done", **outcome: Any) -> int:
        """Send a result. Return the status of its receipt, skipping cancels."""
        outcome = outcome or {"content_json": json.dumps(value).encode()}
        await self.send(
            result=worker_pb2.WorkerResult(call_id=invocation.call_id, lease_epoch=invocation.lease_epoch, **outcome)
        )
        while isinstance(receipt := await self.next(), worker_pb2.InvocationCancel):
            pass
        assert isinstance(receipt, worker_pb2.ResultReceipt), receipt
        assert (receipt.call_id, receipt.lease_epoch) == (invocation.call_id, invocation.lease_epoch)
        return receipt.status

    def vanish(self) -> None:
        self.call.cancel()

    async def lose(self, database_url: str) -> None:
        """Cut the connection of the worker w1 and end its lease."""
        self.vanish()
        await execute(database_url, "DELETE FROM tool_registry.workers WHERE worker_id = 'w1'")

    async def ended(self) -> grpc.StatusCode:
        async with asyncio.timeout(PATIENCE_SECONDS):
            code: grpc.StatusCode = await self.call.code()
        return code


@asynccontextmanager
async def attached(
    registry: Registry,
    *tools: tool_pb2.ToolDefinition,
    worker: str = "w1",
    group: str = "billing",
    key: str = "key-of-machine-of-acme",
    calls_max: int = 1,
    held: Mapping[str, int] | None = None,
) -> AsyncIterator[AttachedWorker]:
    async with stream(registry, key) as opened:
        await opened.send(hello=hello(tools or (definition(),), worker, group, calls_max, held or {}))
        assert isinstance(await opened.next(), worker_pb2.WorkerWelcome)
        yield opened


@asynccontextmanager
async def stream(registry: Registry, key: str) -> AsyncIterator[AttachedWorker]:
    channel = open_channel(registry.address, service_key=key)
    try:
        yield AttachedWorker(WorkerServiceStub(channel).AttachWorker())
    finally:
        await channel.close()


def hello(
    tools: Sequence[tool_pb2.ToolDefinition],
    worker: str = "w1",
    group: str = "billing",
    calls_max: int = 1,
    held: Mapping[str, int] | None = None,
) -> worker_pb2.WorkerHello:
    return worker_pb2.WorkerHello(
        group_name=group,
        worker_id=worker,
        tools=tools,
        calls_max=calls_max,
        held_calls=[worker_pb2.HeldCall(call_id=call, lease_epoch=epoch) for call, epoch in (held or {}).items()],
    )


async def start_call(
    registry: Registry, worker: AttachedWorker, call: str = "call", **more: Any
) -> tuple[asyncio.Future[Any], worker_pb2.Invocation]:
    return asyncio.ensure_future(registry.run("charge", call=call, **more)), await worker.invocation()
