"""Checking the calls of a batch: what may be done with each."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pawl.chassis import logs
from pawl.tool_registry.app.catalog.catalog import Catalog, CatalogTool
from pawl.tool_registry.app.policy.audit import AuditTrail
from pawl.tool_registry.app.policy.rules import Rules
from pawl.tool_registry.app.ports import Observer
from pawl.tool_registry.domain.check import Accepted, Refused
from pawl.tool_registry.domain.definition import Category, EffectClass, ExecutionContext, ToolDefinition
from pawl.tool_registry.domain.digest import call_digest
from pawl.tool_registry.domain.gate import approval_cause, items_of
from pawl.tool_registry.domain.names import did_you_mean
from pawl.tool_registry.domain.patterns import TooMuchToMatch, argument_acts, argument_kinds
from pawl.tool_registry.domain.resources import resource_keys
from pawl.tool_registry.domain.rules import Rule, RuledCall, RuleEffect, RuleScope, may_approve
from pawl.tool_registry.domain.verdict import CallContext, Disposition, Verdict, question_of

PREVIEW_CHARACTERS_MAX: Final = 4096
TOO_MUCH_TO_MATCH: Final = (
    "these arguments are too much to be held against the rules of the store: use fewer or shorter ones in a call"
)

_log = logs.get_logger(__name__)
_LOADED: Final = frozenset({ExecutionContext.BACKEND, ExecutionContext.AGENT})
_SEVERITY: Final = (Category.SAFE, Category.SENSITIVE, Category.DESTRUCTIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposedCall:
    """A call as the model wrote it, with the version that its run has pinned."""

    tool_name: str
    tool_version: int
    arguments: bytes
    is_edited: bool = False
    """True if a reviewer wrote the arguments: no rule allows the call in place of the reviewer."""


class Checker:
    """Says what may be done with calls; never runs any."""

    def __init__(self, catalog: Catalog, rules: Rules, observer: Observer, audit: AuditTrail) -> None:
        self._catalog = catalog
        self._rules = rules
        self._observer = observer
        self._audit = audit

    async def check_batch(
        self, proposed: Sequence[tuple[CallContext, ProposedCall]], known_names: Iterable[str]
    ) -> list[Verdict]:
        """Return the verdicts on the calls of one batch, in order; they are in the audit chain by then.

        A call that could have the effect of an earlier one of the batch once more
        is refused: it is nearly always a slip of the model.

        Raises:
            DependencyUnavailable: the audit chain cannot be written.
        """
        first: dict[tuple[str, bytes], int] = {}
        verdicts = []
        for number, (context, call) in enumerate(proposed, 1):
            fitting = await self._fitting(context, call, known_names)
            if isinstance(fitting, Verdict):
                verdict = fitting
            else:
                tool, accepted = fitting
                key = (tool.definition.name, accepted.canonical)
                if key in first:
                    # Before any rule, which would count it.
                    verdict = _duplicate(context, tool, first[key], proposed[first[key] - 1][0].call_id)
                else:
                    verdict = await self._judged(context, call, tool, accepted)
                    if verdict.accepted is not None and tool.definition.effect is not EffectClass.READ_ONLY:
                        first[key] = number
            self._observer.checked(verdict.disposition)
            verdicts.append(verdict)
        await self._audit.proposed(
            [context for context, _ in proposed], [call.tool_name for _, call in proposed], verdicts
        )
        return verdicts

    async def _fitting(
        self, context: CallContext, call: ProposedCall, known_names: Iterable[str]
    ) -> tuple[CatalogTool, Accepted] | Verdict:
        """Return the tool that the user may call, and arguments that fit it, or the refusal."""
        tool = None
        if call.tool_version:
            tool = await self._catalog.find(context.store_id, call.tool_name, call.tool_version)
        if tool is None or not tool.may_be_called_by(context.caller):
            near = did_you_mean(call.tool_name, known_names)
            return _refused(context, "TOOL_NOT_FOUND", f"there is no tool {call.tool_name[:80]!r}{near}")
        definition = tool.definition
        checked = await self._catalog.check(context.store_id, tool, call.arguments)
        if isinstance(checked, Refused):
            return _refused(context, checked.reason, checked.message, tool)
        if definition.context in _LOADED and tool.loaded is None:
            return _refused(context, "TOOL_NOT_FOUND", f"the tool {definition.name} is not available any more", tool)
        return tool, checked

    async def _judged(self, context: CallContext, call: ProposedCall, tool: CatalogTool, checked: Accepted) -> Verdict:
        """Return the verdict on a call that fits, by the gate and by people's rules."""
        definition = tool.definition
        cause = gate(tool, checked)
        try:
            rule = await self._rules.deciding(context.store_id, ruled_call(context, tool, checked))
        except TooMuchToMatch:
            return _refused(context, "INVALID_ARGUMENTS", TOO_MUCH_TO_MATCH, tool)
        if rule is not None:
            match rule.effect:
                case RuleEffect.DENY:
                    return replace(_refused(context, "NOT_ALLOWED", denial(rule), tool), rule_id=rule.rule_id)
                case RuleEffect.ASK if definition.context is not ExecutionContext.HUMAN:
                    cause = ", ".join(filter(None, (cause, f"rule {rule.rule_id}")))
                case RuleEffect.ALLOW if (
                    cause and not call.is_edited and await self._rules.allow(rule, context.call_id)
                ):
                    cause = ""
                case _:
                    rule = None
        return Verdict(
            call_id=context.call_id,
            disposition=Disposition.APPROVE if cause else _ungated(definition),
            definition=definition,
            tool_version=tool.entry.version,
            accepted=checked,
            resource_keys=resource_keys(definition.resource_keys, checked.arguments),
            # By its digest the ledger knows what was approved: so an edit has one though it needs no approval any more.
            digest=digest_of(context, tool, checked) if cause or call.is_edited else "",
            preview=_preview(tool, checked) if cause else "",
            approval_cause=cause,
            approvals_required=_approvals_required(context, tool) if cause else 0,
            question=(
                question_of(definition, checked.arguments) if definition.context is ExecutionContext.HUMAN else None
            ),
            rule_id=rule.rule_id if rule else "",
        )


def gate(tool: CatalogTool, accepted: Accepted) -> str:
    """Return why the call needs an approval, by the pinned definition or by the one in force, or nothing."""
    items = _items(tool, accepted)
    return next(filter(None, (approval_cause(definition, items) for definition in _definitions(tool))), "")


def ruled_call(context: CallContext, tool: CatalogTool, accepted: Accepted) -> RuledCall:
    """Return what rules look at in a call."""
    definitions = _definitions(tool)
    return RuledCall(
        user_id=context.user_id,
        conversation_id=context.conversation_id,
        run_id=context.run_id,
        above_ids=context.above_ids,
        tool_name=tool.definition.name,
        tool_versions=frozenset({tool.entry.version, tool.in_force.version if tool.in_force else 0}),
        tool_create_time=max(tool.entry.create_time, tool.in_force.create_time if tool.in_force else 0.0),
        category=definitions[0].category,
        items=_items(tool, accepted),
        approvals_required=_approvals_required(context, tool),
        user_may_approve=may_approve(context.user_roles),
        arguments=accepted.arguments,
        kinds={
            name: kind for each in reversed(definitions) for name, kind in argument_kinds(each.arguments_schema).items()
        },
        acts=tuple(dict.fromkeys(act for each in definitions for act in argument_acts(each.arguments_schema))),
    )


def denial(rule: Rule) -> str:
    """Return what the model is told of a call that a rule denies."""
    return f"a rule of {'the store' if rule.scope is RuleScope.STORE else 'the user'} denies this call ({rule.rule_id})"


def _definitions(tool: CatalogTool) -> list[ToolDefinition]:
    """Return the pinned definition and the one in force, the more severe first."""
    return sorted(tool.definitions, key=lambda definition: _SEVERITY.index(definition.category), reverse=True)


def _items(tool: CatalogTool, accepted: Accepted) -> int:
    """Return how many things a call is about, by the definitions, or by the tool's own count."""
    items = max(items_of(definition, accepted.arguments) for definition in _definitions(tool))
    if tool.loaded is None:
        return items
    try:
        count = tool.loaded.tool.bulk_count(accepted.arguments)
    except Exception as error:  # noqa: BLE001  # the author's code: what it counts stays with the definition
        _log.warning("tool.bulk_count_failed", tool=tool.definition.name, error=type(error).__name__)
        return items
    return items if count is None else count


def _approvals_required(context: CallContext, tool: CatalogTool) -> int:
    """Return how many people must approve, by the run, the pinned definition or the one in force: the most."""
    return max(1, context.approvals_required, *(each.approvals_required for each in _definitions(tool)))


def digest_of(context: CallContext, tool: CatalogTool, accepted: Accepted) -> str:
    """Return the digest that an approval of the call must carry."""
    return call_digest(
        store_id=context.store_id,
        run_id=context.run_id,
        call_id=context.call_id,
        tool_name=tool.definition.name,
        tool_version=tool.entry.version,
        arguments=accepted.canonical,
    )


def _duplicate(context: CallContext, tool: CatalogTool, earlier: int, call_id: str) -> Verdict:
    message = (
        f"this is call {earlier} of the batch ({call_id}) once more: {tool.definition.name} with the same arguments. "
        "It is done once. If it is meant twice, call it again after its result"
    )
    return _refused(context, "DUPLICATE_CALL", message, tool)


def _ungated(definition: ToolDefinition) -> Disposition:
    match definition.context:
        case ExecutionContext.BACKEND:
            return Disposition.RUN
        case ExecutionContext.FRONTEND:
            return Disposition.OFFER
        case ExecutionContext.HUMAN:
            return Disposition.ASK
        case ExecutionContext.AGENT:
            return Disposition.DELEGATE


def _refused(context: CallContext, reason: str, message: str, tool: CatalogTool | None = None) -> Verdict:
    return Verdict(
        call_id=context.call_id,
        disposition=Disposition.REFUSE,
        definition=tool.definition if tool else None,
        tool_version=tool.entry.version if tool else 0,
        error_reason=reason,
        error_message=message,
    )


def _preview(tool: CatalogTool, accepted: Accepted) -> str:
    if tool.loaded is None:
        return ""
    try:
        return tool.loaded.tool.preview(accepted.arguments)[:PREVIEW_CHARACTERS_MAX]
    except Exception as error:  # noqa: BLE001  # the author's code: a call is approved by its arguments then
        _log.warning("tool.preview_failed", tool=tool.definition.name, error=type(error).__name__)
        return ""
