"""Sources: what a store has connected to get tools from, and what of their tools is believed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from pawl.chassis.ids import StoreId
from pawl.chassis.strict_json import dumps_canonical, loads
from pawl.errors import InvalidField, InvalidJson, TooLarge
from pawl.tool_registry.policy.rules.gate import may_be_count_path
from pawl.tool_registry.rules.definition import (
    CONTROL,
    DESCRIPTION_BYTES_MAX,
    ToolDefinition,
    ToolVersion,
    check_report_policy,
    encode_definition,
    require,
)
from pawl.values import Category, EffectClass, JobReports, ReportPolicy

SOURCES_MAX: Final = 50
TOOLS_MAX: Final = 200
POLICIES_MAX: Final = 500
CONFIG_BYTES_MAX: Final = 2 * 1024 * 1024
EVERY_TOOL: Final = "*"

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}", re.ASCII)
_NOT_IN_A_NAME: Final = re.compile(r"[^a-zA-Z0-9_-]+", re.ASCII)
_NAME_CHARACTERS_MAX: Final = 63
_DIGEST_DIGITS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An MCP server or an HTTP service of a store. Its tools are named `<name>.<tool>`.

    `kind` says who understands `config`, which is JSON and holds names of secrets,
    never their values.
    """

    store_id: StoreId
    name: str
    kind: str
    config: bytes

    @property
    def origin(self) -> str:
        """The `source` of its tools."""
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveredTool:
    """A tool as its source describes it now; `binding` is how the source runs it."""

    definition: ToolDefinition
    binding: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A tool of a source that cannot be registered; `name` is the source's own."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """The tools that a source has now, and those that cannot be registered."""

    tools: Sequence[DiscoveredTool]
    left_out: Sequence[LeftOut] = ()


class SourceState(StrEnum):
    """The states of a source, as of its last check."""

    READY = "READY"
    CHANGED = "CHANGED"
    UNREACHABLE = "UNREACHABLE"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """A source with what is known of it."""

    source: Source
    state: SourceState
    problem: str
    """For people; empty if nothing is wrong."""
    runs_program: bool
    """True if it is a program on the registry's machine."""
    create_time: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolPolicy:
    """The choices of a store's admin for a tool. None: the cautious value."""

    tool_name: str
    category: Category | None = None
    effect: EffectClass | None = None
    timeout_seconds: float = 0.0
    bulk_count: str = ""
    without_background: bool = False
    async_timeout_seconds: float = 0.0
    permits_grants: bool = False
    reports: ReportPolicy | None = None
    excluded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChange:
    """The difference of a tool from what was approved; None where it is not there."""

    tool_name: str
    approved: ToolDefinition | None
    found: ToolDefinition | None


def may_be_source(name: str) -> bool:
    """Return whether a source can have that name: what cannot is not worth asking a store for."""
    return _NAME.fullmatch(name) is not None


def check_source_name(name: str) -> None:
    """Return if a source may have that name.

    Raises:
        InvalidField: it may not.
    """
    if not may_be_source(name):
        raise InvalidField("name: must match ^[a-z0-9][a-z0-9_-]{0,31}$", field="name")


def read_policies(config: bytes) -> tuple[ToolPolicy, ...]:
    """Return the policies in a source's configuration.

    Raises:
        InvalidField: one of them cannot be kept, or a tool has two.
    """
    try:
        fields = loads(config, bytes_max=CONFIG_BYTES_MAX)
    except (InvalidJson, TooLarge) as error:
        raise InvalidField(f"config: {error.message}", field="config") from None
    items = fields.get("policies", []) if isinstance(fields, dict) else []
    policies = tuple(_policy(item) for item in items) if isinstance(items, list) else ()
    _check_policies(policies)
    return policies


def _policy(item: Any) -> ToolPolicy:
    """Return a policy from its JSON, which is that of the message SourceToolPolicy."""
    try:
        category = str(item.get("category", "")).removeprefix("TOOL_CATEGORY_")
        effect = str(item.get("effectClass", "")).removeprefix("EFFECT_CLASS_")
        return ToolPolicy(
            tool_name=item.get("toolName", ""),
            category=Category(category) if category else None,
            effect=EffectClass(effect) if effect else None,
            timeout_seconds=float(item.get("timeoutSeconds", 0.0)),
            bulk_count=str(item.get("bulkCount", "")),
            without_background=bool(item.get("withoutBackground", False)),
            async_timeout_seconds=float(item.get("asyncTimeoutSeconds", 0.0)),
            permits_grants=bool(item.get("permitsGrants", False)),
            reports=_report_policy(item["reports"]) if "reports" in item else None,
            excluded=bool(item.get("excluded", False)),
        )
    except ValueError as error:
        raise InvalidField(f"policies: {error}", field="policies") from None


def _report_policy(item: Any) -> ReportPolicy:
    return ReportPolicy(
        reports=JobReports(str(item.get("reports", JobReports.EVERY)).removeprefix("JOB_REPORTS_")),
        report_iterations=int(item.get("reportIterations", 0)),
        report_seconds=float(item.get("reportSeconds", 0.0)),
    )


def _check_policies(policies: Sequence[ToolPolicy]) -> None:
    names = [policy.tool_name for policy in policies]
    if len(names) > POLICIES_MAX or len(set(names)) != len(names):
        raise InvalidField(f"policies: at most {POLICIES_MAX}, one for each tool", field="policies")
    if any(policy.effect is EffectClass.RECONCILABLE for policy in policies):
        raise InvalidField("policies: no source can be asked what became of a call", field="policies")
    for policy in policies:
        if policy.reports is not None:
            _check_reports(policy, policy.reports)
    if any(policy.bulk_count and not may_be_count_path(policy.bulk_count) for policy in policies):
        raise InvalidField("policies: bulk_count: must be a path like $.body.items[*].lines", field="policies")


def _check_reports(policy: ToolPolicy, reports: ReportPolicy) -> None:
    try:
        require(not policy.without_background, "reports", "goes with tools that run in the background")
        check_report_policy(reports)
    except InvalidField as error:
        raise InvalidField(f"policies: {error.message}", field="policies") from None


def under_policies(
    source_name: str, found: Iterable[DiscoveredTool], policies: Sequence[ToolPolicy]
) -> list[DiscoveredTool]:
    """Return the tools that are not excluded, by name, each with what its policy says of it."""
    by_name = {policy.tool_name: policy for policy in policies}
    default = by_name.get(EVERY_TOOL, ToolPolicy(tool_name=EVERY_TOOL))
    kept: list[DiscoveredTool] = []
    for tool in found:
        own_name = tool.definition.name.removeprefix(f"{source_name}.")
        policy = by_name.get(own_name, default)
        if not policy.excluded:
            kept.append(replace(tool, definition=_under(tool.definition, policy)))
    return sorted(kept, key=lambda tool: tool.definition.name)


def _under(definition: ToolDefinition, policy: ToolPolicy) -> ToolDefinition:
    return replace(
        definition,
        category=policy.category or definition.category,
        effect=policy.effect or definition.effect,
        timeout_seconds=policy.timeout_seconds or definition.timeout_seconds,
        bulk_count=policy.bulk_count,
        without_background=policy.without_background,
        async_timeout_seconds=policy.async_timeout_seconds,
        permits_grants=policy.permits_grants,
        reports=policy.reports,
    )


def definitions_hash(tools: Iterable[DiscoveredTool]) -> str:
    """Return the SHA-256, in hex, of definitions and bindings, whatever their order."""
    items = sorted((tool.definition.name, *_digests(tool)) for tool in tools)
    return hashlib.sha256(dumps_canonical([list(item) for item in items])).hexdigest()


def _digests(tool: DiscoveredTool) -> tuple[str, str]:
    definition = hashlib.sha256(encode_definition(tool.definition)).hexdigest()
    return definition, hashlib.sha256(tool.binding).hexdigest()


def as_approved(versions: Iterable[ToolVersion]) -> list[DiscoveredTool]:
    """Return registered versions as the tools that were discovered then."""
    return [DiscoveredTool(definition=version.definition, binding=version.binding) for version in versions]


def changes(approved: Iterable[DiscoveredTool], found: Iterable[DiscoveredTool]) -> list[ToolChange]:
    """Return what differs, by name."""
    before = {tool.definition.name: tool for tool in approved}
    now = {tool.definition.name: tool for tool in found}
    return [
        ToolChange(
            tool_name=name,
            approved=before[name].definition if name in before else None,
            found=now[name].definition if name in now else None,
        )
        for name in sorted(before.keys() | now.keys())
        if name not in before or name not in now or _digests(before[name]) != _digests(now[name])
    ]


def registered_names(source_name: str, names: Collection[str]) -> Mapping[str, str]:
    """Return the name in the register, `<source>.<tool>`, of each tool of a source, all different.

    A name that fits stays unchanged. Others get `_` for what a name cannot have, are cut, and end with a digest if the
    result is the name of another tool. The same names give the same result, in any order.
    """
    room = _NAME_CHARACTERS_MAX - len(source_name) - 1
    fitting = {name for name in names if 1 <= len(name) <= room and not _NOT_IN_A_NAME.search(name)}
    made = {name: name for name in fitting}
    taken = set(fitting)
    for name in sorted(set(names) - fitting):
        plain = _NOT_IN_A_NAME.sub("_", name).strip("_") or "tool"
        own_name, salt = plain[:room], 0
        while own_name in taken:
            digest = hashlib.sha256(f"{salt}:{name}".encode(errors="surrogatepass")).hexdigest()[:_DIGEST_DIGITS]
            own_name, salt = f"{plain[: room - _DIGEST_DIGITS - 1]}_{digest}", salt + 1
        taken.add(own_name)
        made[name] = own_name
    return {name: f"{source_name}.{own_name}" for name, own_name in made.items()}


def short_description(text: str) -> str:
    """Return the description of a source without control characters, cut where it is too long."""
    clean = CONTROL.sub("", text).encode(errors="replace")
    if len(clean) > DESCRIPTION_BYTES_MAX:
        clean = clean[: DESCRIPTION_BYTES_MAX - 3] + b"..."
    return clean.decode(errors="ignore").strip() or "It has no description."


def plain_schema(schema: Any) -> dict[str, Any]:
    """Return the arguments schema of a source as Pawl takes it: an object, in the one dialect.

    Sources name older dialects of JSON Schema out of habit, and mean what all of
    them have in common. A schema that does use an older one fails to compile.
    """
    given = dict(schema) if isinstance(schema, Mapping) else {}
    given.pop("$schema", None)
    return {"type": "object"} | given
