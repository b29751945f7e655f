"""Implements pawl.tool.v1.MemoryService. The store and user come from the caller's credential."""

from __future__ import annotations

import math

from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import check_agent_name, check_id
from pawl.chassis.rpc.kinds import Context
from pawl.tool.v1 import memory_pb2 as pb
from pawl.tool.v1 import memory_pb2_grpc
from pawl.tool_registry.memory.rules import Memory, MemoryOwner
from pawl.tool_registry.memory.store import PostgresMemoryRepository
from pawl.tool_registry.pages import cut, page_size, page_token, position_of
from pawl.tools.wire import WIRE

_MEMORY = WIRE.struct(Memory, pb.Memory)
_FIRST = ("", -math.inf, "")


class MemoryServicer(memory_pb2_grpc.MemoryServiceServicer):
    def __init__(self, memories: PostgresMemoryRepository) -> None:
        self._memories = memories

    async def ListMemories(self, request: pb.ListMemoriesRequest, context: Context) -> pb.ListMemoriesResponse:
        owner, size = _owner(request.agent_name), page_size(request.page_size)
        place = position_of("memories", request.page_token, tuple[str, float, str]) or _FIRST
        found = await self._memories.after(owner, place, size + 1)
        page, token = cut(
            found, size, lambda last: page_token("memories", last.agent_name, last.create_time, last.memory_id)
        )
        return pb.ListMemoriesResponse(memories=map(_MEMORY.fields, page), next_page_token=token)

    async def EraseMemories(self, request: pb.EraseMemoriesRequest, context: Context) -> pb.EraseMemoriesResponse:
        owner, memory_id = _owner(request.agent_name), check_id(request.memory_id, "memory_id", optional=True)
        return pb.EraseMemoriesResponse(erased_count=await self._memories.delete(owner, memory_id))


def _owner(agent_name: str) -> MemoryOwner:
    caller = require_user()
    checked = check_agent_name(agent_name, "agent_name", optional=True)
    return MemoryOwner(store_id=caller.store_id, user_id=caller.user_id, agent_name=checked)
