"""Saves and finds workflow versions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any, Final

import grpc
import msgspec

from pawl.agent_loop.agents.agents import Agents
from pawl.agent_loop.agents.rules import OfferedTool
from pawl.agent_loop.loop.registry import RegistryClient
from pawl.agent_loop.workflows import definition as definitions
from pawl.agent_loop.workflows import parsing, validation
from pawl.agent_loop.workflows.definition import AgentNode, AnyNode, ToolNode, WorkflowDefinition, WorkflowNode
from pawl.agent_loop.workflows.expressions import DefinitionFault
from pawl.agent_loop.workflows.parsing import DefinitionError
from pawl.chassis import strict_json
from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import StoreId
from pawl.chassis.process import logs
from pawl.chassis.rpc.client import translated
from pawl.errors import AgentNotFound, InvalidSchema, InvalidWorkflow, ToolExists, WorkflowNotFound
from pawl.event.v1.workflow_pb2 import WorkflowVersion
from pawl.job.v1 import workflows_pb2 as pb
from pawl.job.v1 import workflows_pb2_grpc
from pawl.tools.rules.schema import did_you_mean

# Maximum number of faults that an error lists. With `validate_only`, a response lists all of them.
FAULTS_SHOWN_MAX: Final = 20
# Maximum number of fixed versions that a workflow and the workflows below it start.
_FIXED_MAX: Final = 200
# Source of the tools that start workflows.
_AS_TOOL: Final = "workflow"

_log = logs.get_logger(__name__)


class WorkflowLedger:
    """A client for job-store's workflow API.

    It does not retry. Every method may raise DependencyUnavailable and can be retried.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = workflows_pb2_grpc.WorkflowLedgerServiceStub(channel)

    async def get(self, store_id: StoreId, name: str, version: int) -> WorkflowVersion:
        """Return one version of a workflow. Version 0 means the newest version.

        Raises:
            WorkflowNotFound: There is no such version. A deleted workflow has no newest version.
        """
        request = pb.GetWorkflowRequest(store_id=store_id, name=name, version=version)
        return (await translated(self._stub.GetWorkflow(request))).workflow

    async def put(
        self, caller: Principal, workflow: WorkflowVersion, uses: Sequence[str], *, validate_only: bool
    ) -> pb.PutWorkflowResponse:
        """Save a new version unless it is identical to the newest one.

        Raises:
            WorkflowNotFound: A workflow in `uses` does not exist.
            InvalidWorkflow: The workflow would start itself.
            TooLarge
        """
        request = pb.PutWorkflowRequest(
            **_user_fields(caller), workflow=workflow, uses=uses, validate_only=validate_only
        )
        return await translated(self._stub.PutWorkflow(request))

    async def delete(self, caller: Principal, name: str) -> None:
        """Delete a workflow.

        Raises:
            WorkflowNotFound
        """
        await translated(self._stub.DeleteWorkflow(pb.DeleteWorkflowRequest(**_user_fields(caller), name=name)))


class Workflows:
    def __init__(self, *, ledger: WorkflowLedger, agents: Agents, registry: RegistryClient) -> None:
        self._ledger = ledger
        self._agents = agents
        self._registry = registry

    async def save(self, caller: Principal, definition_json: bytes, *, validate_only: bool) -> dict[str, Any]:
        """Save a workflow unless it is unchanged. Return the fields of the response.

        Raises:
            InvalidWorkflow: The definition has faults, and `validate_only` is false.
            TooLarge: The store has too many workflows or versions.
        """
        try:
            tools = {tool.name: tool for tool in await self._registry.offered(caller)}
            definition = await self._checked(caller, definition_json, tools)
            version = _version(definition)
            if version.as_tool:
                await self._registry.put_workflow_tool(caller.store_id, version, validate_only=True)
            uses = await self._uses(caller, definition, tools)
            saved = await self._ledger.put(caller, version, uses, validate_only=validate_only)
            if not validate_only:
                await self._registry.put_workflow_tool(caller.store_id, version, validate_only=False)
        except DefinitionError as error:
            found = error.faults
        except (InvalidWorkflow, WorkflowNotFound) as error:
            found = (DefinitionFault("nodes", error.message),)
        except ToolExists as error:
            found = (DefinitionFault("name", error.message, "rename the workflow, or set as_tool to false"),)
        else:
            if saved.created and not validate_only:
                _log.info("workflow.saved", store=caller.store_id, user=caller.user_id, workflow=definition.name)
            return {"workflow": saved.workflow, "created": saved.created}
        if validate_only:
            return {"faults": [{"path": fault.path, "message": fault.message, "hint": fault.hint} for fault in found]}
        raise _invalid(found)

    async def delete(self, caller: Principal, name: str) -> None:
        """Delete a workflow.

        Raises:
            WorkflowNotFound
        """
        await self._registry.put_workflow_tool(caller.store_id, WorkflowVersion(name=name), validate_only=False)
        await self._ledger.delete(caller, name)
        _log.info("workflow.deleted", store=caller.store_id, user=caller.user_id, workflow=name)

    async def get(self, caller: Principal, name: str, version: int) -> WorkflowVersion:
        """Return a version. Version 0 means the newest version, which a deleted workflow no longer has.

        Raises:
            WorkflowNotFound
        """
        return await self._ledger.get(caller.store_id, name, version)

    async def of_run(self, caller: Principal, name: str, version: int) -> WorkflowVersion:
        """Return the version for a new run. Version 0 means the newest version.

        Raises:
            WorkflowNotFound: The workflow does not exist or was deleted.
        """
        newest = await self._ledger.get(caller.store_id, name, 0)
        return newest if version in {0, newest.version} else await self.get(caller, name, version)

    async def _checked(
        self, caller: Principal, definition_json: bytes, tools: Mapping[str, OfferedTool]
    ) -> WorkflowDefinition:
        """Parse a definition, and check that everything to which it refers exists, even if it has other faults.

        Raises:
            DefinitionError: The definition has faults. The error lists all of them.
        """
        known: tuple[DefinitionFault, ...] = ()
        try:
            definition = parsing.parse(definition_json)
        except DefinitionError as error:
            if error.rest is None:
                raise
            definition, known = error.rest, error.faults
        paths = tuple(fault.path for fault in known)
        found = [fault async for fault in self._faults(caller, definition, tools)]
        # Values at and below a faulty path may be placeholders.
        faults = [*known, *(fault for fault in found if not any(_is_below(fault.path, path) for path in paths))]
        if faults:
            raise DefinitionError(faults)
        return definition

    async def _faults(
        self, caller: Principal, definition: WorkflowDefinition, tools: Mapping[str, OfferedTool]
    ) -> AsyncIterator[DefinitionFault]:
        """Yield a fault for each tool, agent or workflow that does not exist or that the caller may not use."""
        schemas = {"input": definition.input_schema}
        for path, node in definitions.walk(definition):
            for field, tool in _tools(node):
                if tool not in tools:
                    hint = did_you_mean(tool, tools).removeprefix("; ")
                    yield DefinitionFault(f"{path}.{field}", f"there is no tool {tool!r} that you may call", hint)
            if isinstance(node, ToolNode) and node.tool in tools:
                arguments_schema = msgspec.json.decode(tools[node.tool].arguments_schema_json or b"{}")
                for fault in validation.arguments_faults(node.arguments, arguments_schema, f"{path}.arguments"):
                    yield fault
            if isinstance(node, AgentNode):
                if node.output_schema is not None:
                    schemas[f"{path}.output_schema"] = node.output_schema
                try:
                    await self._agents.of_run(caller, node.agent)
                except AgentNotFound:
                    yield DefinitionFault(f"{path}.agent", f"there is no agent {node.agent!r} that you may use")
            if isinstance(node, WorkflowNode) and node.workflow != definition.name:
                async for fault in self._workflow_faults(caller, node, path):
                    yield fault
        for path, schema in schemas.items():
            try:
                await self._registry.check_output(caller.store_id, strict_json.dumps_canonical(schema), None)
            except InvalidSchema as error:
                yield DefinitionFault(path, error.message)

    async def _uses(
        self, caller: Principal, definition: WorkflowDefinition, tools: Mapping[str, OfferedTool]
    ) -> list[str]:
        """Return the workflows that a run starts in their newest versions, directly or through fixed versions.

        Raises:
            WorkflowNotFound
            InvalidWorkflow: The definition starts too many fixed versions.
        """
        found, fixed, waiting = set[str](), set[tuple[str, int]](), [definition]
        while waiting:
            for _, node in definitions.walk(waiting.pop()):
                if isinstance(node, ToolNode) and node.tool in tools and tools[node.tool].source == _AS_TOOL:
                    found.add(node.tool)
                elif isinstance(node, WorkflowNode) and not node.version:
                    found.add(node.workflow)
                elif isinstance(node, WorkflowNode) and (node.workflow, node.version) not in fixed:
                    fixed.add((node.workflow, node.version))
                    read = await self.get(caller, node.workflow, node.version)
                    waiting.append(definitions.decode(read.definition_json))
            if len(fixed) > _FIXED_MAX:
                raise InvalidWorkflow(f"nodes: the workflow starts more than {_FIXED_MAX} fixed versions of workflows")
        return sorted(found)

    async def _workflow_faults(
        self, caller: Principal, node: WorkflowNode, path: str
    ) -> AsyncIterator[DefinitionFault]:
        try:
            found = await self.of_run(caller, node.workflow, node.version)
        except WorkflowNotFound:
            named = f"{node.workflow!r}" + (f", version {node.version}" if node.version else "")
            yield DefinitionFault(f"{path}.workflow", f"there is no workflow {named}")
            return
        schema = msgspec.json.decode(found.input_schema_json)
        for fault in validation.arguments_faults(node.input, schema, f"{path}.input"):
            yield fault


def _is_below(path: str, other: str) -> bool:
    return path == other or path.startswith((f"{other}.", f"{other}["))


def _user_fields(caller: Principal) -> dict[str, Any]:
    return {"store_id": caller.store_id, "user_id": caller.user_id, "credential_id": caller.credential_id}


def _version(definition: WorkflowDefinition) -> WorkflowVersion:
    return WorkflowVersion(
        name=definition.name,
        definition_json=definitions.encode(definition),
        description=definition.description,
        input_schema_json=strict_json.dumps_canonical(definition.input_schema),
        as_tool=definition.as_tool,
        node_count=sum(1 for _ in definitions.walk(definition)),
    )


def _tools(node: AnyNode) -> Iterator[tuple[str, str]]:
    match node:
        case ToolNode():
            yield "tool", node.tool
        case AgentNode():
            yield from ((f"tools[{index}]", name) for index, name in enumerate(node.tools or ()))
        case _:
            return


def _invalid(found: Sequence[DefinitionFault]) -> InvalidWorkflow:
    shown = found[:FAULTS_SHOWN_MAX]
    more = f"; and {len(found) - len(shown)} more" if len(found) > len(shown) else ""
    paths = ",".join(dict.fromkeys(fault.path for fault in shown))
    return InvalidWorkflow("; ".join(map(str, shown)) + more, fault_count=len(found), paths=paths)
