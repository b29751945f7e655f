"""Creates, lists and revokes a store's rules. Finds the rule that decides on a call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pawl.chassis.identity.auth import Principal, check_decides
from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import CallKey, ConversationId, IdSource, RequestId, RunId, RunKey, StoreId, UserId
from pawl.chassis.process.clock import Clock
from pawl.errors import (
    AgentNotFound,
    CallNotFound,
    ConversationErased,
    ConversationNotFound,
    InvalidField,
    PermissionDenied,
    RuleNotFound,
    RunNotFound,
    ToolNotFound,
)
from pawl.tool_registry.audit.recorder import AuditTrail
from pawl.tool_registry.catalog.catalog import Catalog
from pawl.tool_registry.ledger import LedgerReads
from pawl.tool_registry.policy.rules.patterns import takes_argument
from pawl.tool_registry.policy.rules.rules import (
    Rule,
    RuledCall,
    RuleEffect,
    RuleScope,
    check_rule,
    may_approve,
    ruling,
)
from pawl.tool_registry.policy.store.rule_rows import PostgresRuleRepository
from pawl.tools.rules.definition import ToolVersion

_FRESH_SECONDS: Final = 1.0
_STORES_MAX: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The rules of all stores. Changes are recorded in the audit chain before they take effect.

    A store's rules are cached for a second, so that checking a batch usually requires no query. If a rule allows a
    call, it is verified again in the database, and its use is counted, right before the call runs.
    """

    repository: PostgresRuleRepository
    catalog: Catalog
    runs: LedgerReads
    audit: AuditTrail
    ids: IdSource
    clock: Clock
    _kept: dict[StoreId, tuple[float, Sequence[Rule]]] = field(default_factory=dict, init=False)

    async def create(
        self, person: Principal, rule: Rule, request_id: RequestId, *, validate_only: bool = False
    ) -> Rule:
        """Create a rule from the values that the user set. With `validate_only`, nothing is stored.

        Raises:
            InvalidField: The rule is invalid, its tool has no such argument, or the limit on rules is reached.
            PermissionDenied: The user may not create this rule, or a delegate without decision rights tried to create
                an ALLOW.
            ToolNotFound: An ALLOW names a tool that the user may not call.
            RunNotFound, CallNotFound: The user has no such run, or no such call that needed approval.
            ConversationNotFound: The user has no such conversation.
            AgentNotFound: The store has no such agent.
            ConversationErased: The conversation was erased, so no rule may be created for it.
            RequestIdReused: The request id was already used for another rule.
        """
        if rule.is_of_store and Role.ADMIN not in person.roles:
            raise PermissionDenied("a rule for all users' runs requires the admin role")
        if not may_approve(person.roles):
            raise PermissionDenied("creating a rule requires the approver or admin role")
        if rule.effect is RuleEffect.ALLOW:
            check_decides(person)
        now = self.clock.now()
        check_rule(rule, now)
        tool = await self._tool_of(person, rule)
        schema = tool.definition.arguments_schema if tool else {}
        for name in (pattern.argument for pattern in rule.arguments):
            if not takes_argument(schema, name):
                raise InvalidField(f"arguments: {rule.tool_name} has no argument {name!r}", field="rule.arguments")
        await self._check_origin(person, rule)
        rule = replace(
            rule,
            store_id=person.store_id,
            rule_id=self.ids.new("rule"),
            user_id=person.user_id,
            tool_version=tool.version if tool and rule.effect is RuleEffect.ALLOW else 0,
        )
        if not (request_id and await self.repository.is_made(person.store_id, person.user_id, request_id)):
            await self.repository.check_room(rule)
            if validate_only:
                return rule
            await self.audit.ruled(rule, "MADE", person)
        made = await self.repository.add(rule, request_id)
        self._kept.pop(person.store_id, None)
        return made

    async def _tool_of(self, person: Principal, rule: Rule) -> ToolVersion | None:
        name = rule.tool_name
        try:
            return await self.catalog.get(person, name, 0) if rule.is_for_one_tool else None
        except ToolNotFound:
            if rule.effect is not RuleEffect.ALLOW:
                return None
            problem = f"there is no registered tool {name!r} that you may call"
            raise ToolNotFound(
                f"{problem}; tools sent with a run cannot be allowed in advance", tool_name=name
            ) from None

    async def _check_origin(self, person: Principal, rule: Rule) -> None:
        run = RunKey(person.store_id, RunId(rule.scope_id))
        if rule.scope is RuleScope.RUN and not await self.runs.has_run(run, person.user_id):
            raise RunNotFound
        if rule.is_of_conversation and await self.repository.is_erased(replace(rule, store_id=person.store_id)):
            raise ConversationErased
        conversation = (person.store_id, person.user_id, ConversationId(rule.scope_id))
        if rule.scope is RuleScope.CONVERSATION and not await self.runs.has_conversation(*conversation):
            raise ConversationNotFound
        if rule.scope is RuleScope.AGENT and not await self.runs.has_agent(person.store_id, rule.scope_id):
            raise AgentNotFound(f"the store has no agent {rule.scope_id!r}: `pawl agents list` shows its agents")
        if not rule.call_id:
            return
        tool_name = await self.runs.gated_tool(CallKey(person.store_id, rule.call_id), person.user_id)
        if tool_name is None:
            raise CallNotFound
        if rule.is_for_one_tool and rule.tool_name != tool_name:
            raise InvalidField(f"call_id is a call to {tool_name}, not to {rule.tool_name}", field="rule.call_id")

    async def revoke(self, person: Principal, rule_id: str) -> Rule:
        """Revoke a rule permanently. Idempotent.

        Raises:
            RuleNotFound: The rule does not exist, or the user cannot see it.
            PermissionDenied: The rule belongs to the store or to an agent and the user is not an admin, or the rule is
                not an ALLOW and the user is a delegate without decision rights.
        """
        rule = await self.repository.get(person.store_id, rule_id)
        is_admin = Role.ADMIN in person.roles
        if rule is None or not (is_admin or rule.is_of_store or rule.user_id == person.user_id):
            raise RuleNotFound
        if rule.is_of_store and not is_admin:
            raise PermissionDenied("revoking a rule for all users' runs requires the admin role")
        if rule.effect is not RuleEffect.ALLOW:
            check_decides(person)
        if rule.revoke_time:
            return await self._listed(rule)
        await self.audit.ruled(rule, "REVOKED", person)
        revoked = await self.repository.revoke(person.store_id, rule_id, person.user_id)
        self._kept.pop(person.store_id, None)
        return await self._listed(revoked)

    async def list(
        self, person: Principal, *, include_ended: bool, all_users: bool, before: str, most: int
    ) -> Sequence[Rule]:
        """Return rules in descending order of id. If `before` is set, return only rules with lower ids.

        Raises:
            PermissionDenied: `all_users` is set and the user is not an admin.
        """
        if all_users and Role.ADMIN not in person.roles:
            raise PermissionDenied("listing all users' rules requires the admin role")
        user_id = UserId("") if all_users else person.user_id
        rules = await self.repository.list(
            person.store_id, user_id, include_ended=include_ended, before=before, most=most
        )
        return [await self._listed(rule) for rule in rules]

    async def deciding(self, store_id: StoreId, call: RuledCall) -> Rule | None:
        """Return the rule that decides on a call, or None if no rule applies. This does not count as a use.

        Raises:
            TooMuchToMatch: Matching the rules and arguments would take too many steps.
        """
        rules = await self._in_force(store_id)
        await asyncio.sleep(0)  # Matching can take tens of milliseconds; let other tasks run between calls.
        return ruling(rules, call, self.clock.now()) if rules else None

    async def _in_force(self, store_id: StoreId) -> Sequence[Rule]:
        now = self.clock.monotonic()
        read_at, rules = self._kept.get(store_id, (-_FRESH_SECONDS, ()))
        if now - read_at < _FRESH_SECONDS:
            return rules
        rules = await self.repository.in_force(store_id)
        if len(self._kept) >= _STORES_MAX:
            self._kept.clear()
        self._kept[store_id] = (now, rules)
        return rules

    async def _listed(self, rule: Rule) -> Rule:
        if rule.effect is not RuleEffect.ALLOW or not rule.is_for_one_tool:
            return rule
        version = await self.catalog.current_version(rule.store_id, rule.tool_name)
        return replace(rule, suspended=rule.tool_version != version)
