"""A call that passed all checks and may run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from pawl.chassis.strict_json import JsonValue
from pawl.errors import ApprovalRequired, InvalidArguments, ToolNotFound
from pawl.tool_registry.app.catalog.catalog import Catalog, CatalogTool
from pawl.tool_registry.app.policy.checking import digest_of, gate, ruled_call
from pawl.tool_registry.app.ports import CallKey, JournalCall
from pawl.tool_registry.domain.audit import sha256_hex
from pawl.tool_registry.domain.check import Refused
from pawl.tool_registry.domain.definition import EffectClass, ExecutionContext, ToolDefinition
from pawl.tool_registry.domain.question import Answer
from pawl.tool_registry.domain.resources import resource_keys
from pawl.tool_registry.domain.rules import RuledCall
from pawl.tool_registry.domain.verdict import CallContext
from pawl.tool_registry.sdk.tool import Tool

DEFAULT_TIMEOUT_SECONDS: Final = 10.0

_CAUTION: Final = (EffectClass.READ_ONLY, EffectClass.IDEMPOTENT, EffectClass.RECONCILABLE, EffectClass.AT_MOST_ONCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecuteRequest:
    """A call to run, as its run has it."""

    context: CallContext
    tool_name: str
    tool_version: int
    arguments: bytes
    earlier_attempts: int = 0
    timeout_seconds: float = 0.0
    approved_digest: str = ""
    unknowns_resolved: int = 0
    rule_id: str = ""
    """The rule that the verdict on the call named."""
    answers: tuple[Answer, ...] = ()
    """Answers to what the tool has asked so far."""


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

    @property
    def key(self) -> CallKey:
        """Store and call."""
        return (self.context.store_id, self.context.call_id)

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
        )


async def admit(catalog: Catalog, request: ExecuteRequest) -> Job:
    """Return the job of a request that may run; everything is checked again.

    Raises:
        ToolNotFound: there is no such backend tool, or the user may not call it.
        InvalidArguments: the arguments do not fit.
        ApprovalRequired: the call is gated, and neither an approval of exactly this
            call nor the name of a rule came.
    """
    context = request.context
    found = await catalog.find(context.store_id, request.tool_name, request.tool_version)
    if found is None or found.loaded is None or not found.may_be_called_by(context.caller):
        raise ToolNotFound(f"there is no tool {request.tool_name!r} to run", tool_name=request.tool_name)
    if found.definition.context is not ExecutionContext.BACKEND:
        raise ToolNotFound(f"{request.tool_name!r} does not run in the registry", tool_name=request.tool_name)
    checked = await catalog.check(context.store_id, found, request.arguments)
    if isinstance(checked, Refused):
        raise InvalidArguments(checked.message)
    digest = digest_of(context, found, checked)
    cause = gate(found, checked)
    # An approval that is not of this call is a sign that something was exchanged.
    is_approved = request.approved_digest == digest
    if not is_approved and (request.approved_digest or (cause and not request.rule_id)):
        raise ApprovalRequired(f"{request.tool_name} needs an approval of exactly this call ({cause or 'it had one'})")
    return Job(
        context=context,
        tool=found.loaded.tool,
        definition=found.definition,
        version=found.entry.version,
        effect=_more_cautious(found),
        arguments=checked.arguments,
        resource_keys=resource_keys(found.loaded.tool.definition.resource_keys, checked.arguments),
        timeout_seconds=_timeout(found.definition.timeout_seconds, request.timeout_seconds),
        attempt=request.earlier_attempts + 1,
        fingerprint=digest,
        unknowns_resolved=request.unknowns_resolved,
        ruled=ruled_call(context, found, checked),
        is_approved=is_approved,
        answers=request.answers,
        allowing_rule_id=request.rule_id if cause and not is_approved else "",
        source=found.entry.source,
        is_of_store=bool(found.loaded.entry.store_id),
        running_version=found.loaded.entry.version,
        arguments_sha256=sha256_hex(checked.canonical),
        rate_per_minute=found.loaded.tool.definition.rate_per_minute,
        cache_seconds=_cache_seconds(found),
    )


def _cache_seconds(found: CatalogTool) -> float:
    in_force = found.loaded.tool.definition.cache_seconds if found.loaded else 0.0
    is_read_only = _more_cautious(found) is EffectClass.READ_ONLY
    return min(found.definition.cache_seconds, in_force) if is_read_only else 0.0


def _more_cautious(found: CatalogTool) -> EffectClass:
    effects = [found.definition.effect]
    if found.loaded is not None:
        effects.append(found.loaded.tool.definition.effect)
    effect = max(effects, key=_CAUTION.index)
    if effect is EffectClass.RECONCILABLE and (found.loaded is None or found.loaded.tool.reconcile is None):
        return EffectClass.AT_MOST_ONCE
    return effect


def _timeout(own: float, asked: float) -> float:
    return min((seconds for seconds in (own, asked) if seconds > 0), default=DEFAULT_TIMEOUT_SECONDS)
