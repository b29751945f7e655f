"""Stages of a call: proposed by the model, checked, requested, and turned into a job."""

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
from pawl.tool_registry.rules.journal import JournalCall
from pawl.tool_registry.rules.registering import own_label
from pawl.tool_registry.rules.verdict import CallContext, call_digest, grant_digest
from pawl.tools.rules.definition import ToolDefinition, definition_hash
from pawl.tools.rules.resources import resource_keys
from pawl.tools.sdk.tool import Tool
from pawl.values import CAUTION, SEVERITY, Answer, Category, EffectClass, Execution, Series

DEFAULT_TIMEOUT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedCall:
    """A call as the model wrote it, with the tool version that the run has pinned."""

    tool_name: str
    tool_version: int
    arguments: bytes
    # A reviewer wrote the arguments. No rule may replace the reviewer's approval.
    is_edited: bool = False
    # The tool, if it was sent with the run. It takes precedence over registered tools of the same name.
    own_tool: ToolDefinition | None = None
    # The series that this call belongs to; None if it belongs to none.
    series: Series | None = None

    @property
    def label(self) -> str:
        """The name of the tool in the audit chain."""
        own = self.own_tool
        return self.tool_name if own is None else own_label(own.name, definition_hash(own))


class ExecuteRequest(Execution, frozen=True, kw_only=True):
    context: CallContext


@dataclass(frozen=True, slots=True, kw_only=True)
class FittingCall:
    """A call whose tool is available to the user and accepts the arguments.

    The run has pinned a definition, and the current definition may differ. The stricter of the two applies.
    """

    context: CallContext
    tool: CatalogTool
    accepted: Accepted
    # Number of affected items reported by the tool's own `bulk_count`, if it has one.
    own_count: int | None

    @property
    def definition(self) -> ToolDefinition:
        """The pinned definition. For a background call, its timeout is the one for background calls."""
        pinned = self.tool.definition
        return replace(pinned, timeout_seconds=pinned.async_timeout_seconds) if self.context.in_background else pinned

    @property
    def digest(self) -> str:
        """The digest that an approval of this call must have."""
        return call_digest(
            store_id=self.context.store_id,
            run_id=self.context.run_id,
            call_id=self.context.call_id,
            tool_name=self.definition.name,
            tool_version=self.tool.entry.version,
            arguments=self.accepted.canonical,
        )

    def grant_digest(self, series: Series | None) -> str:
        """Return the digest that a grant for the series must have, or "" if every call needs its own approval."""
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
        """The number of users who must approve the call if it is gated."""
        return max(1, self.context.approvals_required, *(each.approvals_required for each in self._definitions))

    def gate(self) -> str:
        """Return why the call needs approval, or an empty string if it needs none."""
        items = self._items()
        return next(filter(None, (approval_cause(definition, items) for definition in self._definitions)), "")

    def ruled(self) -> RuledCall:
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
        return sorted(self.tool.definitions, key=lambda each: SEVERITY.index(each.category), reverse=True)

    def _items(self) -> int:
        if self.own_count is not None:
            return self.own_count
        return max(items_of(definition, self.accepted.arguments) for definition in self._definitions)


@dataclass(slots=True, kw_only=True)
class Proposal:
    """Audit entries for the check of a call that is already running.

    The entries are written only once, either together with the call's end or separately before it.
    """

    drafts: tuple[AuditDraft, ...] = ()
    # None until one of the two writers claims the entries.
    goes_with_end: bool | None = None

    def claim(self, *, with_end: bool) -> tuple[AuditDraft, ...]:
        """Claim and return the entries for one of the two writers.

        If the other writer has claimed them, return an empty tuple. The writer that holds the claim may claim them
        again.
        """
        if self.goes_with_end is None:
            self.goes_with_end = with_end
        return self.drafts if self.goes_with_end is with_end else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    context: CallContext
    tool: Tool[..., Any]
    # The pinned version.
    definition: ToolDefinition
    version: int
    effect: EffectClass
    arguments: dict[str, JsonValue]
    resource_keys: tuple[str, ...]
    timeout_seconds: float
    attempt: int
    fingerprint: str
    unknowns_resolved: int
    ruled: RuledCall
    # A user approved this exact call.
    is_approved: bool
    # The series whose grant covers the call; None if no grant does.
    grant: Series | None = None
    answers: tuple[Answer, ...]
    # The rule that allows a gated call. Empty if no rule is needed.
    allowing_rule_id: str
    source: str
    # True if the store connected the runner, which is therefore not part of the deployment's code.
    is_of_store: bool
    # The newest version, whose function runs.
    running_version: int
    arguments_sha256: str
    # 0 means unlimited.
    rate_per_minute: int
    # 0 means the result is not cached.
    cache_seconds: float
    # Has entries only if the call runs before its check has been recorded.
    proposal: Proposal = field(default_factory=Proposal)

    @classmethod
    def of(cls, call: FittingCall, loaded: LoadedTool, request: ExecuteRequest, *, digest: str, is_gated: bool) -> Job:
        """Build the job for a checked call.

        If the current version differs from the pinned one, the more cautious effect applies.
        """
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
        """True if the tool can report whether an earlier execution took effect."""
        return self.effect.is_journaled and self.tool.reconcile is not None

    @property
    def only_reads(self) -> bool:
        """True if running the call is harmless even if its result is never read.

        Such a call has no effect, cannot be noticed outside the registry, does not count towards any limit, and does
        not need a lock. It may still need an approval, which the verdict states.
        """
        is_own_code = not (self.is_of_store or self.tool.is_external or self.tool.is_remote)
        is_counted = bool(self.rate_per_minute or self.allowing_rule_id)
        return self.effect is EffectClass.READ_ONLY and is_own_code and not is_counted and not self.resource_keys

    @property
    def key(self) -> CallKey:
        return CallKey(self.context.store_id, self.context.call_id)

    def journal_call(self, token: str) -> JournalCall:
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
