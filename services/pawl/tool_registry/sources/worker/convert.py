"""The first frame of a worker."""

from __future__ import annotations

from collections.abc import AsyncIterator

from pawl.chassis.ids import CallId, WorkerId, check_id
from pawl.errors import HelloRequired, InvalidField
from pawl.tool.v1 import worker_pb2
from pawl.tool_registry import convert
from pawl.tool_registry.sources.worker.answers import check_epoch
from pawl.tool_registry.sources.worker.rules import CALLS_MAX, TOOLS_MAX, Hello


async def hello_of(requests: AsyncIterator[worker_pb2.AttachWorkerRequest]) -> Hello:
    """Return the first frame.

    Raises:
        HelloRequired: it is none, or another one.
        InvalidField, InvalidId, InvalidSchema: something in it has no meaning.
    """
    request = await anext(requests, None)
    if request is None or request.WhichOneof("frame") != "hello":
        raise HelloRequired
    hello = request.hello
    if len(hello.tools) > TOOLS_MAX:
        raise InvalidField(f"hello.tools: at most {TOOLS_MAX}", field="hello.tools")
    if hello.calls_max > CALLS_MAX:
        raise InvalidField(f"hello.calls_max: at most {CALLS_MAX}", field="hello.calls_max")
    if len(hello.held_calls) > CALLS_MAX:
        raise InvalidField(f"hello.held_calls: at most {CALLS_MAX}", field="hello.held_calls")
    return Hello(
        group_name=check_id(hello.group_name, "hello.group_name"),
        worker_id=WorkerId(check_id(hello.worker_id, "hello.worker_id")),
        definitions=tuple(map(convert.DEFINITION.read, hello.tools)),
        calls_max=hello.calls_max or 1,
        held={
            CallId(check_id(call.call_id, "hello.held_calls.call_id")): check_epoch(call.lease_epoch)
            for call in hello.held_calls
        },
    )
