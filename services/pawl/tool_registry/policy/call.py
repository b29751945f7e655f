"""A call on its way to its tool: proposed by the model, asked to be run, found to fit, and the job to be done."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Final

from pawl.chassis.ids import CallKey
from pawl.chassis.strict_json import JsonValue
from pawl.tool_registry.audit.rules import AuditDraft, sha256_hex
from pawl.tool_registry.catalog.catalog import CatalogTool, LoadedTool
from pawl.tool_registry.policy.rules.gate import approval_cause, items_of
from pawl.tool_registry.policy.rules.patterns import argument_acts, argument_kinds
from pawl.tool_registry.policy.rules.rules import RuledCall, may_approve
from pawl.tool_registry.rules.check import Accepted
from pawl.tool_registry.rules.definition import ToolDefinition, definition_hash
from pawl.tool_registry.rules.journal import JournalCall
from pawl.tool_registry.rules.registering import own_label
from pawl.tool_registry.rules.resources import resource_keys
from pawl.tool_registry.rules.verdict import CallContext, call_digest, grant_digest
from pawl.tool_registry.sdk.tool import Tool
from pawl.values import CAUTION, SEVERITY, Answer, Category, EffectClass, Execution, Series

DEFAULT_TIMEOUT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedCall:
    """A call as the model wrote it, with the version that its run has pinned."""

    tool_name: str
    tool_version: int
    arguments: bytes
    is_edited: bool = False
    """True if a reviewer wrote the arguments: no rule allows the call in place of the reviewer."""
    own_tool: ToolDefinition | None = None
    """The tool, if it came with the run: then no other one of its name is meant."""
    series: Series | None = None
    """The series of which it is a call."""

    @property
    def label(self) -> str:
        """The name of its tool in the audit chain."""
        own = self.own_tool
        return self.tool_name if own is None else own_label(own.name, definition_hash(own))


class ExecuteRequest(Execution, frozen=True, kw_only=True):
    """A call to run, with its run."""

    context: CallContext


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingCall:
    """A call of a tool that is there for its user, with arguments that the tool takes.

    The run has pinned one definition of the tool, and another may be in force:
    the stricter one counts.
    """

    context: CallContext
    tool: CatalogTool
    accepted: Accepted
    own_count: int | None
    """The number of things that the call is about, as the tool itself counts; None if it does not."""

    @property
    def definition(self) -> ToolDefinition:
        """The definition that the run has pinned, with the time that it has where the run makes it."""
        pinned = self.tool.definition
        return replace(pinned, timeout_seconds=pinned.async_timeout_seconds) if self.context.in_background else pinned

    @property
    def digest(self) -> str:
        """The digest that an approval of the call must carry."""
        return call_digest(
            store_id=self.context.store_id,
            run_id=self.context.run_id,
            call_id=self.context.call_id,
            tool_name=self.definition.name,
            tool_version=self.tool.entry.version,
            arguments=self.accepted.canonical,
        )

    def grant_digest(self, series: Series | None) -> str:
        """Return the digest by which a series of the call can be granted; empty if each call of it must be decided."""
        is_once = any(each.category is Category.DESTRUCTIVE and not each.permits_grants for each in self._definitions)
        if series is None or is_once:
            return ""
        in_force = self.tool.in_force
        return grant_digest(
            series,
            store_id=self.context.store_id,
            run_id=self.context.run_id,
            tool_name=self.definition.name,
            tool_versions=(self.tool.entry.version, in_force.version if in_force else 0),
            arguments=self.accepted.canonical,
        )

    @property
    def approvals_required(self) -> int:
        """The number of people who must approve a gated call, by the run or its tool."""
        return max(1, self.context.approvals_required, *(each.approvals_required for each in self._definitions))

    def gate(self) -> str:
        """Return why the call needs an approval, or nothing."""
        items = self._items()
        return next(filter(None, (approval_cause(definition, items) for definition in self._definitions)), "")

    def ruled(self) -> RuledCall:
        """Return what rules look at in the call."""
        context, entry, in_force, definitions = self.context, self.tool.entry, self.tool.in_force, self._definitions
        return RuledCall(
            user_id=context.user_id,
            conversation_id=context.conversation_id,
            run_id=context.run_id,
            above_ids=context.above_ids,
            agent_name=context.agent_name,
            agents_above=context.agents_above,
            tool_name=self.definition.name,
            tool_versions=frozenset({entry.version, in_force.version if in_force else 0}),
            tool_create_time=max(entry.create_time, in_force.create_time if in_force else 0.0),
            category=definitions[0].category,
            items=self._items(),
            approvals_required=self.approvals_required,
            user_may_approve=may_approve(context.user_roles),
            arguments=self.accepted.arguments,
            kinds={
                name: kind
                for each in reversed(definitions)
                for name, kind in argument_kinds(each.arguments_schema).items()
            },
            acts=tuple(dict.fromkeys(act for each in definitions for act in argument_acts(each.arguments_schema))),
        )

    @property
    def _definitions(self) -> list[ToolDefinition]:
        """The pinned definition and the one in force, the more severe first."""
        return sorted(self.tool.definitions, key=lambda each: SEVERITY.index(each.category), reverse=True)

    def _items(self) -> int:
        """Return how many things the call is about, by the definitions, or by the tool's own count."""
        if self.own_count is not None:
            return self.own_count
        return max(items_of(definition, self.accepted.arguments) for definition in self._definitions)


@dataclass(slots=True, kw_only=True)
class Proposal:
    """The entry about the check of a call that runs already: written together with its end, or before."""

    drafts: tuple[AuditDraft, ...] = ()
    goes_with_end: bool | None = None
    """None until one of the two writes it."""

    def claim(self, *, with_end: bool) -> tuple[AuditDraft, ...]:
        """Return the entries for that one of the two which asks first, always again; none for the other."""
        if self.goes_with_end is None:
            self.goes_with_end = with_end
        return self.drafts if self.goes_with_end is with_end else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A call to run, how, and for how long."""

    context: CallContext
    tool: Tool[..., Any]
    definition: ToolDefinition
    """The version that the run has pinned."""
    version: int
    effect: EffectClass
    arguments: dict[str, JsonValue]
    resource_keys: tuple[str, ...]
    timeout_seconds: float
    attempt: int
    fingerprint: str
    unknowns_resolved: int
    ruled: RuledCall
    is_approved: bool
    """True if a person approved exactly this call."""
    grant: Series | None = None
    """The series whose grant covers the call, where there is one."""
    answers: tuple[Answer, ...]
    allowing_rule_id: str
    """The rule in whose name a gated call runs; empty if it needs none."""
    source: str
    is_of_store: bool
    """True if what runs it was connected by the store, and is no code of the deployment."""
    running_version: int
    """The version of the function that runs: the newest one."""
    arguments_sha256: str
    rate_per_minute: int
    """0 means any number."""
    cache_seconds: float
    """0 means that its result is not kept."""
    proposal: Proposal = field(default_factory=Proposal)
    """Nothing, unless the call runs before its check is written down."""

    @classmethod
    def of(cls, call: FittingCall, loaded: LoadedTool, request: ExecuteRequest, *, digest: str, is_gated: bool) -> Job:
        """Return what is to be done for a call that fits: of its two definitions the more cautious one counts."""
        definition, running = call.definition, loaded.tool.definition
        effect = max(definition.effect, running.effect, key=CAUTION.index)
        if effect is EffectClass.RECONCILABLE and loaded.tool.reconcile is None:
            effect = EffectClass.AT_MOST_ONCE
        timeouts = [seconds for seconds in (definition.timeout_seconds, request.timeout_seconds) if seconds > 0]
        is_approved = request.approved_digest == digest
        grant = request.series
        if grant is not None and call.grant_digest(grant) != grant.digest:
            grant = None
        return cls(
            context=call.context,
            tool=loaded.tool,
            definition=definition,
            version=call.tool.entry.version,
            effect=effect,
            arguments=call.accepted.arguments,
            resource_keys=resource_keys(running.resource_keys, call.accepted.arguments),
            timeout_seconds=min(timeouts, default=DEFAULT_TIMEOUT_SECONDS),
            attempt=request.earlier_attempts + 1,
            fingerprint=digest,
            unknowns_resolved=request.unknowns_resolved,
            ruled=call.ruled(),
            is_approved=is_approved,
            grant=grant,
            answers=request.answers,
            allowing_rule_id=request.rule_id if is_gated and not (is_approved or grant) else "",
            source=call.tool.entry.source,
            is_of_store=bool(loaded.entry.store_id),
            running_version=loaded.entry.version,
            arguments_sha256=sha256_hex(call.accepted.canonical),
            rate_per_minute=running.rate_per_minute,
            cache_seconds=min(definition.cache_seconds, running.cache_seconds) * (effect is EffectClass.READ_ONLY),
        )

    @property
    def is_askable(self) -> bool:
        """True if the tool can be asked what became of an earlier execution."""
        return self.effect.is_journaled and self.tool.reconcile is not None

    @property
    def only_reads(self) -> bool:
        """True if it makes no difference that the call runs though nobody may ever hear of it.

        It has no effect, nobody beyond the registry sees it, nothing counts it, and it waits for nobody. That it
        needs no approval is for the verdict to say.
        """
        is_own_code = not (self.is_of_store or self.tool.goes_out or self.tool.is_remote)
        is_counted = bool(self.rate_per_minute or self.allowing_rule_id)
        return self.effect is EffectClass.READ_ONLY and is_own_code and not is_counted and not self.resource_keys

    @property
    def key(self) -> CallKey:
        """The call of its store."""
        return CallKey(self.context.store_id, self.context.call_id)

    def journal_call(self, token: str) -> JournalCall:
        """Return what the journal writes of it."""
        return JournalCall(
            key=self.key,
            run_id=self.context.run_id,
            tool_name=self.definition.name,
            tool_version=self.version,
            effect=self.effect,
            fingerprint=self.fingerprint,
            unknowns_resolved=self.unknowns_resolved,
            token=token,
            is_askable=self.is_askable,
        )
