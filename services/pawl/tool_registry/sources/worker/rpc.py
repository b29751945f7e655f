"""Implements pawl.tool.v1.WorkerService: attaches programs that run a store's tools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Final

from pawl.chassis.identity.auth import require_user
from pawl.chassis.rpc.kinds import Context
from pawl.errors import DeadlineExceeded, HelloRequired
from pawl.tool.v1 import worker_pb2, worker_pb2_grpc
from pawl.tool_registry.sources.worker.answers import check_hello
from pawl.tool_registry.sources.worker.tools import WorkerTools
from pawl.tool_registry.sources.worker.workers import WorkerHub

_HELLO_SECONDS_MAX: Final = 15.0


class WorkerServicer(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, hub: WorkerHub, tools: WorkerTools) -> None:
        self._hub = hub
        self._tools = tools

    async def AttachWorker(  # type: ignore[override]  # gRPC also allows a coroutine that writes to the context
        self, requests: AsyncIterator[worker_pb2.AttachWorkerRequest], context: Context
    ) -> None:
        caller = require_user()
        try:
            async with asyncio.timeout(_HELLO_SECONDS_MAX):
                first = await anext(aiter(requests), None)
        except TimeoutError:
            raise DeadlineExceeded(f"the worker sent no hello within {_HELLO_SECONDS_MAX:g} s") from None
        if first is None or not first.HasField("hello"):
            raise HelloRequired
        check_hello(first.hello)
        await self._hub.serve(caller, first.hello, self._tools, requests, context.write)
