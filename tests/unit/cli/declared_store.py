"""A store in memory for `pawl apply`."""

from __future__ import annotations

import json
from typing import Any

from pawl.agent.v1 import agents_pb2, declaration_pb2, schedule_pb2, workflow_pb2
from pawl.cli.declared.rules import Key
from pawl.errors import AgentNotFound, Conflict, DependencyUnavailable, InvalidField, PermissionDenied
from pawl.event.v1.agent_pb2 import AgentDefinition, AgentVersion
from pawl.event.v1.schedule_pb2 import Schedule, ScheduleDefinition
from pawl.event.v1.workflow_pb2 import WorkflowFault, WorkflowVersion
from pawl.notify.v1 import channel_pb2
from pawl.settings.v1 import settings_pb2


class Store:
    """Agents, schedules and declarations. Each write counts down `writes_left`, and fails at 0."""

    retry_seconds = 0.0

    def __init__(self) -> None:
        self.agents: dict[str, AgentDefinition] = {}
        self.schedules: dict[str, ScheduleDefinition] = {}
        self.flows: dict[str, bytes] = {}
        self.channels: list[channel_pb2.Channel] = []
        self.owners: dict[Key, declaration_pb2.Declaration] = {}
        self.writes_left = 10**6
        self.writes: list[str] = []
        self.limits: dict[str, int] = {}
        self.ceiling: dict[str, int] = {}

    def __getattr__(self, _service: str) -> Store:
        return self

    async def again(self, method: Any, request: Any) -> Any:
        return await method(request)

    once = again

    async def pages(self, method: Any, request: Any) -> Any:
        yield await method(request)

    async def ListWorkflows(self, request: Any) -> Any:
        return workflow_pb2.ListWorkflowsResponse(workflows=[WorkflowVersion(name=name) for name in self.flows])

    async def GetWorkflow(self, request: Any) -> Any:
        return workflow_pb2.GetWorkflowResponse(workflow=self._workflow(self.flows[request.name]))

    def _workflow(self, definition: bytes) -> WorkflowVersion:
        return WorkflowVersion(name=json.loads(definition)["name"], version=1, definition_json=definition)

    async def SaveWorkflow(self, request: Any) -> Any:
        asked = json.loads(request.definition_json)
        faults = [
            WorkflowFault(path=f"nodes.{name}.{kind}", message=f"there is no {kind} {node[kind]!r}", hint="make it")
            for name, node in asked["nodes"].items()
            for kind, known in (("agent", self.agents), ("workflow", self.flows))
            if kind in node and node[kind] not in known
        ]
        if faults:
            return workflow_pb2.SaveWorkflowResponse(faults=faults)
        if not request.validate_only:
            self._write(f"workflow {asked['name']}")
            self.flows[asked["name"]] = request.definition_json
        return workflow_pb2.SaveWorkflowResponse(workflow=self._workflow(request.definition_json))

    def _write(self, what: str) -> None:
        if not self.writes_left:
            raise DependencyUnavailable("the store is gone")
        self.writes_left -= 1
        self.writes.append(what)

    async def ListAgents(self, request: Any) -> Any:
        agents = [AgentVersion(definition=each, version=1, tool_names=["add"]) for each in self.agents.values()]
        return agents_pb2.ListAgentsResponse(agents=agents)

    async def UpdateAgent(self, request: Any) -> Any:
        for name in request.definition.delegates_to:
            if name not in self.agents:
                raise AgentNotFound(f"delegates_to: there is no agent {name!r}")
        if not request.validate_only:
            self._write(f"agent {request.definition.name}")
            self.agents[request.definition.name] = request.definition
        saved = AgentVersion(definition=request.definition, version=1, tool_names=["add"])
        return agents_pb2.UpdateAgentResponse(agent=saved)

    async def DeleteAgent(self, request: Any) -> Any:
        self._write(f"-agent {request.name}")
        del self.agents[request.name]

    async def ListSchedules(self, request: Any) -> Any:
        return schedule_pb2.ListSchedulesResponse(
            schedules=[Schedule(definition=each) for each in self.schedules.values()]
        )

    async def CreateSchedule(self, request: Any) -> Any:
        if request.definition.agent and request.definition.agent not in self.agents:
            raise AgentNotFound(f"agent: there is no agent {request.definition.agent!r}")
        if not request.validate_only:
            self._write(f"schedule {request.definition.name}")
            self.schedules[request.definition.name] = request.definition
        return schedule_pb2.CreateScheduleResponse(schedule=Schedule(definition=request.definition))

    UpdateSchedule = CreateSchedule

    async def DeleteSchedule(self, request: Any) -> Any:
        self._write(f"-schedule {request.name}")
        del self.schedules[request.name]

    async def ListChannels(self, request: Any) -> Any:
        return channel_pb2.ListChannelsResponse(channels=self.channels)

    async def CreateChannel(self, request: Any) -> Any:
        if len(self.channels) + request.created_before >= 2:
            raise InvalidField("a user can have at most 2 channels: delete one", field="channel")
        if not request.validate_only:
            self._write(f"channel {request.channel.name}")
            self.channels.append(request.channel)
        return channel_pb2.CreateChannelResponse(channel=request.channel)

    async def GetSettings(self, request: Any) -> Any:
        if request.layer == settings_pb2.SETTINGS_LAYER_DEPLOYMENT:
            raise PermissionDenied("reading the layer DEPLOYMENT requires a deployment key")
        return settings_pb2.GetSettingsResponse(
            settings=settings_pb2.Settings(
                layer=request.layer,
                limits=self.limits if request.layer == settings_pb2.SETTINGS_LAYER_STORE else self.ceiling,
            )
        )

    async def UpdateSettings(self, request: Any) -> Any:
        asked = request.settings
        if asked.layer != settings_pb2.SETTINGS_LAYER_STORE:
            raise PermissionDenied("changing the layer requires a deployment key")
        if asked.switches:
            raise InvalidField(
                "switches can be set only for all stores, by a deployment key", field="settings.switches"
            )
        limits = {name: value for name, value in self.limits.items() if name not in request.unset} | dict(asked.limits)
        if not request.validate_only:
            self._write("settings")
            self.limits = limits
        return settings_pb2.UpdateSettingsResponse(settings=settings_pb2.Settings(layer=asked.layer, limits=limits))

    async def ListDeclarations(self, request: Any) -> Any:
        return declaration_pb2.ListDeclarationsResponse(declarations=self.owners.values())

    async def PutDeclaration(self, request: Any) -> Any:
        asked = request.declaration
        key = Key(asked.kind, asked.name)
        self._check(key, asked)
        self._write(f"owner {key}")
        kept = declaration_pb2.Declaration(kind=asked.kind, name=asked.name, set=asked.set, version=asked.version + 1)
        self.owners[key] = kept
        return declaration_pb2.PutDeclarationResponse(declaration=kept)

    async def DeleteDeclaration(self, request: Any) -> Any:
        key = Key(request.declaration.kind, request.declaration.name)
        self._check(key, request.declaration)
        self._write(f"-owner {key}")
        del self.owners[key]

    def _check(self, key: Key, asked: Any) -> None:
        if asked.version != (self.owners[key].version if key in self.owners else 0):
            raise Conflict(f"the {key.kind} {key.name!r} was changed by bob")
