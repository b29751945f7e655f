"""A store's source, and the policies for its tools. The configuration is the protobuf message itself."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import StoreId
from pawl.errors import InvalidField
from pawl.event.v1 import call_pb2
from pawl.tool.v1.source_pb2 import SourceConfig, SourceToolPolicy
from pawl.tool_registry.policy.rules.gate import may_be_count_path
from pawl.tool_registry.sources.rules import DiscoveredTool
from pawl.tools import wire
from pawl.tools.rules.definition import ToolDefinition, check_report_policy, require

POLICIES_MAX: Final = 500
EVERY_TOOL: Final = "*"

_KINDS: Final = {"mcp_stdio": "mcp", "mcp_http": "mcp", "open_api": "http", "http_endpoint": "http"}


class SourceState(StrEnum):
    READY = "READY"
    CHANGED = "CHANGED"
    UNREACHABLE = "UNREACHABLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A store's MCP server or HTTP service. Its tools are named `<name>.<tool>`."""

    store_id: StoreId
    # Contains names of secrets, never their values.
    config: SourceConfig
    create_time: float = 0.0
    state: SourceState = SourceState.READY
    # Human-readable message; empty if there is no problem.
    problem: str = ""

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def kind(self) -> str:
        """The kind of connector for the source, or an empty string if this version does not know it."""
        return _KINDS.get(self.config.WhichOneof("kind") or "", "")

    @property
    def origin(self) -> str:
        """The value of `source` with which the registry records the source's tools."""
        return f"{self.kind}:{self.name}"

    @property
    def runs_program(self) -> bool:
        """True if the source is a program on the registry's machine."""
        return self.config.HasField("mcp_stdio")

    @property
    def changer(self) -> Role:
        """The role required to change the source or to see its whole configuration."""
        return Role.OPERATOR if self.runs_program else Role.ADMIN


def check_policies(policies: Sequence[SourceToolPolicy]) -> None:
    """Validate a source's policies.

    Raises:
        InvalidField: A policy is invalid, a tool has two policies, or there are too many policies.
    """
    names = {policy.tool_name for policy in policies}
    if len(policies) > POLICIES_MAX:
        raise InvalidField(f"policies must have at most {POLICIES_MAX} entries, got {len(policies)}", field="policies")
    if len(names) != len(policies):
        raise InvalidField("policies must have at most one entry for each tool", field="policies")
    for policy in policies:
        if policy.effect_class == call_pb2.EFFECT_CLASS_RECONCILABLE:
            raise InvalidField("policies: effect_class RECONCILABLE is not supported for sources", field="policies")
        if policy.bulk_count and not may_be_count_path(policy.bulk_count):
            raise InvalidField("policies: bulk_count must be a path like $.body.items[*].lines", field="policies")
        try:
            wire.CATEGORIES.read(policy.category)
            wire.EFFECTS.read(policy.effect_class)
            if policy.HasField("reports"):
                require(
                    not policy.without_background, "reports", "is only allowed for tools that run in the background"
                )
                check_report_policy(wire.REPORTS.read(policy.reports))
        except InvalidField as error:
            raise InvalidField(f"policies: {error.message}", field="policies") from None


def under_policies(source: Source, found: Iterable[DiscoveredTool]) -> list[DiscoveredTool]:
    """Return the tools that are not excluded, sorted by name, with their policies applied."""
    by_name = {policy.tool_name: policy for policy in source.config.policies}
    default = by_name.get(EVERY_TOOL, SourceToolPolicy())
    remaining: list[DiscoveredTool] = []
    for tool in found:
        policy = by_name.get(tool.definition.name.removeprefix(f"{source.name}."), default)
        if not policy.excluded:
            remaining.append(replace(tool, definition=_under(tool.definition, policy)))
    return sorted(remaining, key=lambda tool: tool.definition.name)


def _under(definition: ToolDefinition, policy: SourceToolPolicy) -> ToolDefinition:
    return replace(
        definition,
        category=wire.CATEGORIES.read(policy.category) if policy.category else definition.category,
        effect=wire.EFFECTS.read(policy.effect_class) if policy.effect_class else definition.effect,
        timeout_seconds=policy.timeout_seconds or definition.timeout_seconds,
        bulk_count=policy.bulk_count,
        without_background=policy.without_background,
        async_timeout_seconds=policy.async_timeout_seconds,
        permits_grants=policy.permits_grants,
        reports=wire.REPORTS.read(policy.reports) if policy.HasField("reports") else None,
    )
