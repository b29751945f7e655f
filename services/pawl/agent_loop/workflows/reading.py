"""Reads pinned workflow versions, which never change."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, Protocol

import msgspec

from pawl.agent_loop.loop.rules.fact import Fact, ProgramRead, RunRefused
from pawl.agent_loop.loop.rules.run import FailureClass, PinnedTool, PinnedWorkflow, Run, RunFailure
from pawl.agent_loop.loop.tool_calls import ToolCalls
from pawl.agent_loop.workflows import definition as definitions
from pawl.agent_loop.workflows import graph
from pawl.agent_loop.workflows.definition import ToolNode
from pawl.agent_loop.workflows.graph import Graph
from pawl.chassis.ids import StoreId
from pawl.chassis.rpc.retry import Retry
from pawl.errors import WorkflowNotFound
from pawl.event.v1 import workflow_pb2

_GRAPHS_KEPT_MAX: Final = 256


class WorkflowReader(Protocol):
    """Reads workflow versions. May raise DependencyUnavailable and can be retried."""

    async def get(self, store_id: StoreId, name: str, version: int) -> workflow_pb2.WorkflowVersion:
        """Return a version. Version 0 means the newest version of a workflow that is not deleted.

        Raises:
            WorkflowNotFound
        """
        ...


class Graphs:
    """The graphs of workflow versions. Recently used ones are cached."""

    def __init__(self, reader: WorkflowReader) -> None:
        self._reader = reader
        self._kept: OrderedDict[tuple[StoreId, str, int], Graph] = OrderedDict()

    async def of(self, store_id: StoreId, pinned: PinnedWorkflow) -> Graph:
        """Return a run's graph: the whole workflow, or only some items of a map.

        Raises:
            WorkflowNotFound
        """
        key = (store_id, pinned.name, pinned.version)
        found = self._kept.get(key)
        if found is None:
            read = await self._reader.get(*key)
            found = self._kept[key] = graph.of_definition(definitions.decode(read.definition_json))
            if len(self._kept) > _GRAPHS_KEPT_MAX:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        chunk = pinned.chunk
        if chunk is None:
            return found
        count = len(msgspec.json.decode(chunk.items_json))
        indexes = range(chunk.first_index, chunk.first_index + count)
        return graph.of_items(found, chunk.node, indexes, chunk.concurrency)

    async def version(self, store_id: StoreId, name: str, version: int) -> int:
        """Return `version` if it exists. For version 0, return the newest version, or 0 if there is none."""
        try:
            return (await self._reader.get(store_id, name, version)).version
        except WorkflowNotFound:
            return 0


async def read(run: Run, graphs: Graphs, *, tool_calls: ToolCalls, retry: Retry, pins_tools: bool) -> Fact:
    """Read the definition that a run executes. With `pins_tools`, also read the tools that its nodes call."""
    pinned = run.workflow
    if pinned is None:
        raise RuntimeError("the run is not a workflow run")
    try:
        found = await retry.until_answered(lambda: graphs.of(run.store_id, pinned))
    except WorkflowNotFound as error:
        failure = RunFailure(failure_class=FailureClass.LIMIT, reason=error.reason, message=error.message)
        return RunRefused(failure=failure)
    if not pins_tools:
        return ProgramRead(graph=found)
    names = sorted({step.node.tool for step in found.steps if isinstance(step.node, ToolNode)})
    # If a tool does not exist, its node fails when it starts.
    tools = (await tool_calls.resolve(names, skip_missing=True)).tools if names else ()
    return ProgramRead(graph=found, tools=tuple(PinnedTool(name=tool.name, version=tool.version) for tool in tools))
