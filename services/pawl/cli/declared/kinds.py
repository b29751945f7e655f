"""The kinds of resources that files can declare, and how to read, validate, save and delete each of them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Protocol

from pawl.agent.v1 import agents_pb2, schedule_pb2, trigger_pb2, workflow_pb2
from pawl.cli import wording
from pawl.cli.contract import ask, items
from pawl.cli.declared import files
from pawl.cli.declared.rules import Key
from pawl.client import AsyncClient
from pawl.errors import InvalidField, PermissionDenied
from pawl.event.v1 import agent_pb2
from pawl.event.v1.schedule_pb2 import ScheduleDefinition
from pawl.event.v1.trigger_pb2 import TriggerDefinition
from pawl.event.v1.workflow_pb2 import WorkflowFault, WorkflowVersion
from pawl.notify.v1 import channel_pb2, notify_pb2
from pawl.settings.v1 import settings_pb2
from pawl.tool.v1 import rule_pb2, source_pb2

# A warning that disappears once a worker or source offers the tool.
NO_TOOL: Final = "matches no available tool"
_EMAIL_AFTER_SECONDS: Final = 600
_SCOPES: Final = (rule_pb2.RULE_SCOPE_USER, rule_pb2.RULE_SCOPE_STORE, rule_pb2.RULE_SCOPE_AGENT)
# Fields of a rule that its author does not set.
_RULE_OUTPUTS: Final = (
    *("rule_id", "uses", "tool_version", "suspended", "user_id", "create_time"),
    *("revoke_time", "revoke_user_id", "call_id"),
)


@dataclass(frozen=True, slots=True)
class State:
    """A resource as the servers have saved it or would save it.

    `comments` include an agent's selected tools.
    """

    definition: Any
    comments: tuple[str, ...] = ()
    is_partial: bool = False  # An earlier change stopped midway.


@dataclass(frozen=True, slots=True)
class Saved:
    state: State
    outcome: str = ""
    notes: tuple[str, ...] = ()
    secret: str = ""


class Kind(Protocol):
    """Operations on one kind of resource. `definition` is the type of its files."""

    definition: type[Any]

    async def current(self, target: AsyncClient) -> Mapping[str, State]: ...

    async def save(
        self, target: AsyncClient, asked: Any, *, exists: bool, validate_only: bool, new_before: int = 0
    ) -> Saved:
        """Save a resource. With `validate_only`, `new_before` others of this kind will be created before it."""
        ...

    async def delete(self, target: AsyncClient, name: str) -> None: ...


class _Agents:
    definition: type[Any] = agent_pb2.AgentDefinition

    def __init__(self, *, drafts: bool = False) -> None:
        self._drafts = drafts

    async def current(self, target: AsyncClient) -> Mapping[str, State]:
        found = await items(target, agents_pb2.ListAgentsRequest(drafts=self._drafts))
        return {agent.definition.name: _of_agent(agent) for agent in found if agent.version}

    async def save(
        self, target: AsyncClient, asked: Any, *, exists: bool, validate_only: bool, new_before: int = 0
    ) -> Saved:
        request = agents_pb2.UpdateDraftRequest if self._drafts else agents_pb2.UpdateAgentRequest
        saved = await ask(target, request(definition=asked, validate_only=validate_only))
        notes = tuple(f"{pattern} {NO_TOOL}" for pattern in saved.unmatched)
        return Saved(_of_agent(saved.agent), f"version {saved.agent.version}", notes)

    async def delete(self, target: AsyncClient, name: str) -> None:
        await ask(target, agents_pb2.DeleteAgentRequest(name=name))


class Faulty(Exception):  # The exception contains several faults, each of which is an error.
    def __init__(self, faults: Iterable[WorkflowFault]) -> None:
        self.faults = [(each.path, each.message + (f" ({each.hint})" if each.hint else "")) for each in faults]
        super().__init__("; ".join(f"{path}: {text}" for path, text in self.faults))

    def without(self, definition: Any, later: Collection[Key]) -> list[tuple[str, str]]:
        """Return the faults that remain once the resources in `later` exist."""
        return [fault for fault in self.faults if not {*_named_by_nodes(_at(definition, fault[0]))} & {*later}]


class Workflows:
    """Workflows, whose definitions are JSON documents."""

    definition: type[Any] = dict

    async def current(self, target: AsyncClient) -> Mapping[str, State]:
        names = [each.name for each in await items(target, workflow_pb2.ListWorkflowsRequest())]
        found = [await ask(target, workflow_pb2.GetWorkflowRequest(name=name)) for name in names]
        return {each.workflow.name: _of_workflow(each.workflow) for each in found}

    async def save(
        self, target: AsyncClient, asked: Any, *, exists: bool, validate_only: bool, new_before: int = 0
    ) -> Saved:
        """Save a workflow.

        Raises:
            Faulty: The definition has faults. Raised only with `validate_only`.
        """
        request = workflow_pb2.SaveWorkflowRequest(
            definition_json=json.dumps(asked).encode(), validate_only=validate_only
        )
        saved = await ask(target, request)
        if saved.faults:
            raise Faulty(saved.faults)
        return Saved(_of_workflow(saved.workflow), f"version {saved.workflow.version}")

    async def delete(self, target: AsyncClient, name: str) -> None:
        await ask(target, workflow_pb2.DeleteWorkflowRequest(name=name))


class _Starters:
    """Schedules or triggers."""

    def __init__(self, definition: type[Any], requests: Any, name: str) -> None:
        self.definition = definition
        self._requests = requests
        self._name = name

    def _request(self, verb: str, **fields: Any) -> Any:
        return getattr(self._requests, f"{verb}{self._name}Request")(**fields)

    async def current(self, target: AsyncClient) -> Mapping[str, State]:
        found = await items(target, getattr(self._requests, f"List{self._name}sRequest")())
        return {each.definition.name: State(each.definition) for each in found}

    async def save(
        self, target: AsyncClient, asked: Any, *, exists: bool, validate_only: bool, new_before: int = 0
    ) -> Saved:
        verb = "Update" if exists else "Create"
        saved = await ask(target, self._request(verb, definition=asked, validate_only=validate_only))
        resource = getattr(saved, self._name.lower())
        return Saved(State(resource.definition), secret=getattr(saved, "secret", ""))

    async def delete(self, target: AsyncClient, name: str) -> None:
        await ask(target, self._request("Delete", name=name))


class _Sources:
    definition: type[Any] = source_pb2.SourceConfig

    async def current(self, target: AsyncClient) -> Mapping[str, State]:
        found = await items(target, source_pb2.ListSourcesRequest())
        return {each.config.name: State(each.config) for each in found}

    async def save(
        self, target: AsyncClient, asked: Any, *, exists: bool, validate_only: bool, new_before: int = 0
    ) -> Saved:
        request = source_pb2.AddSourceRequest(config=asked, replace=exists, validate_only=validate_only)
        saved = await ask(target, request)
        notes = tuple(f"{tool.name} is left out: {tool.reason}" for tool in saved.left_out)
        return Saved(State(saved.source.config), notes=notes)

    async def delete(self, target: AsyncClient, name: str) -> None:
        await ask(target, source_pb2.RemoveSourceRequest(name=name))


class _Rules:
    """Rules are immutable, so a change creates a new rule and then revokes earlier rules of the same name."""

    definition: type[Any] = rule_pb2.Rule

    async def _named(self, target: AsyncClient) -> Mapping[str, list[rule_pb2.Rule]]:
        found: dict[str, list[rule_pb2.Rule]] = {}
        for rule in await items(target, rule_pb2.ListRulesRequest()):
            if rule.scope in _SCOPES:
                found.setdefault(rule.name or rule.rule_id, []).append(rule)
        return found

    async def current(self, target: AsyncClient) -> Mapping[str, State]:
        named = await self._named(target)
        return {name: State(_terms(rules[0]), is_partial=len(rules) > 1) for name, rules in named.items()}

    async def save(
        self, target: AsyncClient, asked: Any, *, exists: bool, validate_only: bool, new_before: int = 0
    ) -> Saved:
        if validate_only:
            request = rule_pb2.CreateRuleRequest(rule=asked, validate_only=True)
            return Saved(State(_terms((await ask(target, request)).rule)))
        earlier = (await self._named(target)).get(asked.name, [])
        matching = next((rule for rule in earlier if _terms(rule) == asked), None)
        if matching is None:
            matching = (await ask(target, rule_pb2.CreateRuleRequest(rule=asked))).rule
        await self._revoke(target, (rule for rule in earlier if rule.rule_id != matching.rule_id))
        return Saved(State(_terms(matching)))

    async def delete(self, target: AsyncClient, name: str) -> None:
        await self._revoke(target, (await self._named(target)).get(name, ()))

    async def _revoke(self, target: AsyncClient, rules: Any) -> None:
        for rule in rules:
            await ask(target, rule_pb2.RevokeRuleRequest(rule_id=rule.rule_id))


class _Channels:
    definition: type[Any] = channel_pb2.Channel

    async def _named(self, target: AsyncClient) -> Mapping[str, channel_pb2.Channel]:
        found = (await ask(target, channel_pb2.ListChannelsRequest())).channels
        # The oldest one, if several have the same name.
        return {each.name: each for each in reversed(found)}

    async def current(self, target: AsyncClient) -> Mapping[str, State]:
        return {name: State(_settings(each)) for name, each in (await self._named(target)).items() if name}

    async def save(
        self, target: AsyncClient, asked: Any, *, exists: bool, validate_only: bool, new_before: int = 0
    ) -> Saved:
        saved: Any
        if exists:
            is_email = asked.url.startswith("mailto:")
            after = asked.after_seconds if asked.HasField("after_seconds") else _EMAIL_AFTER_SECONDS * is_email
            request = channel_pb2.UpdateChannelRequest(
                channel_id=(await self._named(target))[asked.name].channel_id,
                url=asked.url,
                kinds=notify_pb2.NotificationKinds(kinds=asked.kinds),
                after_seconds=after,
                validate_only=validate_only,
            )
            saved = await ask(target, request)
        else:
            saved = await ask(
                target,
                channel_pb2.CreateChannelRequest(channel=asked, validate_only=validate_only, created_before=new_before),
            )
        is_new_address = asked.url.startswith("mailto:") and not saved.channel.HasField("confirm_time")
        notes = (f"{asked.url} must be confirmed with `pawl notify confirm`",) if is_new_address else ()
        return Saved(State(_settings(saved.channel)), notes=notes, secret=getattr(saved, "secret", ""))

    async def delete(self, target: AsyncClient, name: str) -> None:
        channel = (await self._named(target))[name]
        await ask(target, channel_pb2.DeleteChannelRequest(channel_id=channel.channel_id))


_TEXTS: Final = ("models", "model_server")


class _SettingsLayers:
    """Layers of settings that the caller may change. A file contains all values of its layer."""

    definition: type[Any] = settings_pb2.Settings

    async def _read(self, target: AsyncClient, layer: Any) -> settings_pb2.Settings:
        found: settings_pb2.Settings = (await ask(target, settings_pb2.GetSettingsRequest(layer=layer))).settings
        return found

    async def current(self, target: AsyncClient) -> Mapping[str, State]:
        found = dict[str, State]()
        for layer in settings_pb2.SettingsLayer.values()[1:]:
            with suppress(PermissionDenied, InvalidField):  # Another user's layer, or no store.
                settings = await self._read(target, layer)
                if _names(settings):
                    same = settings_pb2.Settings(layer=layer, version=settings.version)
                    await ask(target, settings_pb2.UpdateSettingsRequest(settings=same, validate_only=True))
                    found[wording.short_name(settings_pb2.SettingsLayer.DESCRIPTOR, layer)] = _values(settings)
        return found

    async def save(
        self, target: AsyncClient, asked: Any, *, exists: bool, validate_only: bool, new_before: int = 0
    ) -> Saved:
        if asked.store_id:
            raise InvalidField("leave store_id empty: a file has the settings of the caller's store", field="store_id")
        current = await self._read(target, asked.layer)
        request = settings_pb2.UpdateSettingsRequest(
            settings=asked,
            unset=_names(current) - _names(asked),
            validate_only=validate_only,
        )
        request.settings.version = current.version
        return Saved(_values((await ask(target, request)).settings))

    async def delete(self, target: AsyncClient, name: str) -> None:
        layer = settings_pb2.SettingsLayer.Value(f"SETTINGS_LAYER_{name.upper()}")
        await self.save(target, settings_pb2.Settings(layer=layer), exists=True, validate_only=False)


def _names(settings: settings_pb2.Settings) -> set[str]:
    return {*settings.switches, *settings.limits, *(name for name in _TEXTS if getattr(settings, name))}


def _values(settings: settings_pb2.Settings) -> State:
    shown = settings_pb2.Settings()
    shown.CopyFrom(settings)
    for name in ("store_id", "version", "update_time", "update_user_id"):
        shown.ClearField(name)
    for switch in shown.switches.values():
        switch.ClearField("set_time")
    return State(shown)


def _of_agent(agent: agent_pb2.AgentVersion) -> State:
    return State(agent.definition, tuple(f"tool: {name}" for name in agent.tool_names))


def _at(definition: Any, path: str) -> Any:
    """Return an object that contains only the field at a path such as `nodes.fetch.tool`."""
    names = files.PARTS.findall(path)
    found = definition
    for name in names[:-1]:
        found = found.get(name) if isinstance(found, dict) else None
    return {names[-1]: found.get(names[-1])} if names and isinstance(found, dict) else None


def _of_workflow(workflow: WorkflowVersion) -> State:
    return State(json.loads(workflow.definition_json))


def _terms(rule: rule_pb2.Rule) -> rule_pb2.Rule:
    shown = rule_pb2.Rule()
    shown.CopyFrom(rule)
    for name in _RULE_OUTPUTS:
        shown.ClearField(name)
    shown.name = rule.name or rule.rule_id
    return shown


def _settings(channel: channel_pb2.Channel) -> channel_pb2.Channel:
    after = channel.after_seconds if channel.HasField("after_seconds") else None
    return channel_pb2.Channel(name=channel.name, url=channel.url, kinds=channel.kinds, after_seconds=after)


KINDS: Final[Mapping[str, Kind]] = {
    "settings": _SettingsLayers(),
    "source": _Sources(),
    "agent": _Agents(),
    "workflow": Workflows(),
    "rule": _Rules(),
    "schedule": _Starters(ScheduleDefinition, schedule_pb2, "Schedule"),
    "trigger": _Starters(TriggerDefinition, trigger_pb2, "Trigger"),
    "channel": _Channels(),
}
DRAFTS: Final[Mapping[str, Kind]] = {"agent": _Agents(drafts=True)}


def references(key: Key, definition: Any) -> set[Key]:
    """Return the agents, sources and workflows that a definition refers to."""
    sources, agents, workflows = set[str](), set[str](), set[str]()
    match key.kind:
        case "agent":
            named = {name.partition(".")[0] for name in (*definition.tools.names, *definition.tools.patterns)}
            sources = named | {name.partition(":")[2] for name in definition.tools.sources}
            agents, workflows = set(definition.delegates_to), set(definition.tools.names)
        case "workflow":
            return set(_named_by_nodes(definition))
        case "rule":
            sources = {definition.tool_name.partition(".")[0]}
            agents = {definition.scope_id} if definition.scope == rule_pb2.RULE_SCOPE_AGENT else set()
        case "schedule" | "trigger":
            agents, workflows = {definition.agent}, {definition.workflow}
    named_by_kind = {"source": sources, "agent": agents, "workflow": workflows}
    return {Key(kind, name) for kind, names in named_by_kind.items() for name in names}


def _named_by_nodes(value: Any) -> Iterator[Key]:
    """Yield the resources that a workflow's nodes refer to. A tool name can also refer to a workflow."""
    if isinstance(value, dict):
        for field, each in value.items():
            if isinstance(each, str) and field in {"agent", "workflow"}:
                yield Key(field, each)
            elif isinstance(each, str) and field == "tool":
                yield Key("source", each.partition(".")[0])
                yield Key("workflow", each)
            else:
                yield from _named_by_nodes(each)
    elif isinstance(value, list):
        for each in value:
            yield from _named_by_nodes(each)


def without(key: Key, definition: Any, later: Collection[Key]) -> Any:
    """Return a definition that servers can validate before the resources in `later` exist.

    The returned definition does not refer to them. A workflow is returned unchanged, because `Faulty.without`
    drops the faults that are about these resources.
    """
    if not later or key.kind == "workflow":
        return definition
    made = type(definition)()
    made.CopyFrom(definition)

    def is_later(kind: str, name: str) -> bool:
        return Key(kind, name) in later

    match key.kind:
        case "agent":
            made.delegates_to[:] = [name for name in made.delegates_to if not is_later("agent", name)]
            for field in ("names", "patterns"):
                remaining = [
                    name for name in getattr(made.tools, field) if not is_later("source", name.partition(".")[0])
                ]
                getattr(made.tools, field)[:] = [name for name in remaining if not is_later("workflow", name)]
        case "rule":
            if made.scope == rule_pb2.RULE_SCOPE_AGENT and is_later("agent", made.scope_id):
                made.scope, made.scope_id = rule_pb2.RULE_SCOPE_STORE, ""
            if is_later("source", made.tool_name.partition(".")[0]):
                # Only an ALLOW needs the tool.
                made.effect = rule_pb2.RULE_EFFECT_DENY
                for field in ("items_max", "uses_max", "includes_destructive"):
                    made.ClearField(field)
        case "schedule" | "trigger":
            if is_later("agent", made.agent):
                made.agent = ""
            if is_later("workflow", made.workflow):
                made.workflow, made.input_json, made.text = "", b"", "-"
        case _:
            pass
    return made
