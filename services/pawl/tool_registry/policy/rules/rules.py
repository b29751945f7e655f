"""Selects the rule that applies to a call. Rules are decisions that users have made in advance.

DENY takes precedence over ASK, and ASK over ALLOW. An ALLOW applies only to the tool version that existed when it was
created, and covers bulk calls only if it explicitly includes them. An ALLOW that names several tools covers destructive
calls only if it explicitly includes them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

from pawl.chassis.identity.roles import Role
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId, UserId, is_id
from pawl.chassis.strict_json import JsonValue, dumps_canonical
from pawl.errors import InvalidField
from pawl.tool_registry.policy.rules.gate import BULK_ITEMS_MIN
from pawl.tool_registry.policy.rules.patterns import Act, ArgumentKind, ArgumentPattern, Matching, piles_marks
from pawl.tools.rules.definition import CONTROL, can_exist, sentence
from pawl.values import Category

ANY_TOOL: Final = "*"
PATTERNS_MAX: Final = 20
GLOB_CHARACTERS_MAX: Final = 1000
# Limit on the total size of a rule's patterns.
PATTERN_BYTES_MAX: Final = 4096
REASON_BYTES_MAX: Final = 1024
# Maximum lifetime of an ALLOW whose tool name is a pattern.
TRUST_SECONDS_MAX: Final = 30 * 86400.0
# Maximum number of store-wide rules in force. The same limit applies to all users' rules in total.
RULES_MAX: Final = 1000
# Maximum number of one user's rules in force, excluding store-wide rules.
RULES_OF_USER_MAX: Final = 100


class RuleEffect(StrEnum):
    ALLOW = "ALLOW"
    ASK = "ASK"
    DENY = "DENY"


class RuleScope(StrEnum):
    RUN = "RUN"
    CONVERSATION = "CONVERSATION"
    USER = "USER"
    STORE = "STORE"
    AGENT = "AGENT"


def may_approve(roles: Collection[str]) -> bool:
    """Return whether users with these roles may approve calls in their own runs. Users without roles may."""
    return not roles or not {Role.ADMIN, Role.APPROVER}.isdisjoint(roles)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A decision that a user made in advance. Times are seconds since 1970, and 0 means never."""

    store_id: StoreId
    rule_id: str
    effect: RuleEffect
    scope: RuleScope
    # Run id, conversation id or agent name. Empty for USER and STORE.
    scope_id: str
    # The author. Unless its scope is STORE or AGENT, the rule applies only to this user's runs.
    user_id: UserId
    # A tool name, `*`, or `<source>.*`.
    tool_name: str
    arguments: tuple[ArgumentPattern, ...] = ()
    items_max: int = 0
    includes_destructive: bool = False
    uses_max: int = 0
    uses: int = 0
    tool_version: int = 0
    reason: str = ""
    create_time: float = 0.0
    expire_time: float = 0.0
    revoke_time: float = 0.0
    revoke_user_id: UserId = UserId("")
    # The call whose approval created the rule. Empty if there is none.
    call_id: CallId = CallId("")
    # True if the tool has changed, so that an ALLOW no longer applies. Set only on rules returned to clients.
    suspended: bool = False
    # The name by which `pawl apply` identifies the rule; may be empty.
    name: str = ""

    @property
    def is_for_one_tool(self) -> bool:
        return not self.tool_name.endswith(ANY_TOOL)

    @property
    def is_of_store(self) -> bool:
        """True if the rule applies to all users' runs. Only admins may create and revoke such rules."""
        return self.scope in (RuleScope.STORE, RuleScope.AGENT)

    @property
    def is_of_conversation(self) -> bool:
        """True if the rule belongs to one conversation or run. The rule is then erased with it."""
        return self.scope in (RuleScope.RUN, RuleScope.CONVERSATION)

    def is_in_force(self, now: float) -> bool:
        """Return whether the rule is in force: not revoked, expired or used up."""
        is_used_up = bool(self.uses_max) and self.uses >= self.uses_max
        return not self.revoke_time and not (self.expire_time and self.expire_time <= now) and not is_used_up


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledCall:
    """The attributes of a call that rules can match."""

    user_id: UserId
    conversation_id: ConversationId
    run_id: RunId
    tool_name: str
    # The pinned version and the current version, which is 0 if the tool was unregistered.
    tool_versions: frozenset[int]
    # Time at which the newer of these versions was registered.
    tool_create_time: float
    category: Category
    # Number of affected items.
    items: int
    # Required by the definitions or by the run.
    approvals_required: int
    # True if the run's user may approve the call without a rule.
    user_may_approve: bool
    arguments: Mapping[str, JsonValue]
    # The kinds of the arguments for which the tool declares one.
    kinds: Mapping[str, ArgumentKind] = field(default_factory=dict)
    # Arguments that act as other tools' arguments. DENY and ASK rules for those tools also apply to this call.
    acts: tuple[Act, ...] = ()
    # Parent runs and their conversations. DENY and ASK rules for them also apply to this call.
    above_ids: frozenset[str] = frozenset()
    # The run's agent.
    agent_name: str
    # The parent runs' agents.
    agents_above: frozenset[str] = frozenset()


def ruling(rules: Iterable[Rule], call: RuledCall, now: float) -> Rule | None:
    """Return the rule that decides on a call, or None if no rule applies.

    Among rules with the same effect, the one with the narrowest scope applies. If several have that scope, the newest
    of them applies. A broad rule's uses are therefore not spent on calls to which a narrow rule applies.

    Raises:
        TooMuchToMatch: Matching the rules and arguments would take too many steps.
    """
    matching = Matching(arguments=call.arguments, kinds=call.kinds)
    views = [(call, matching), *_acted(call, matching)]
    counting = [
        rule
        for rule in rules
        if any(_counts(rule, *view, now) for view in (views[:1] if rule.effect in _OWN_ONLY else views))
    ]
    return min(
        counting, key=lambda rule: (_PRECEDENCE[rule.effect], _BREADTH[rule.scope], -rule.create_time), default=None
    )


def _acted(call: RuledCall, matching: Matching) -> Iterator[tuple[RuledCall, Matching]]:
    """Yield the call once for each tool that it acts as, in the form that rules for that tool expect."""
    for act in call.acts:
        if act.argument in call.arguments:
            matching.work.spend(_ACT_STEPS)
            kinds = {act.tool_argument: call.kinds.get(act.argument, ArgumentKind.TEXT)}
            yield (
                replace(call, tool_name=act.tool_name),
                Matching(
                    arguments={act.tool_argument: call.arguments[act.argument]},
                    kinds=kinds,
                    is_below=frozenset({act.tool_argument} if act.is_below else ()),
                    work=matching.work,
                ),
            )


def canonical_terms(rule: Rule) -> bytes:
    """Return the canonical JSON of the values that the rule's author set.

    The id, tool version and uses are omitted.
    """
    patterns: list[JsonValue] = [
        {
            "argument": each.argument,
            "equals": each.equals.decode() if each.equals is not None else None,
            "glob": each.glob,
        }
        for each in rule.arguments
    ]
    return dumps_canonical(
        {
            "effect": rule.effect.value,
            "scope": rule.scope.value,
            "scope_id": rule.scope_id,
            "tool_name": rule.tool_name,
            "arguments": patterns,
            "items_max": rule.items_max,
            "includes_destructive": rule.includes_destructive,
            "uses_max": rule.uses_max,
            "reason": rule.reason,
            "name": rule.name,
            "expire_time": rule.expire_time,
            "call_id": rule.call_id,
        }
    )


_ACT_STEPS: Final = 20
_OWN_ONLY: Final = frozenset({RuleEffect.ALLOW})
_PRECEDENCE: Final = {RuleEffect.DENY: 0, RuleEffect.ASK: 1, RuleEffect.ALLOW: 2}
_BREADTH: Final = {
    scope: place
    for place, scope in enumerate(
        (RuleScope.RUN, RuleScope.CONVERSATION, RuleScope.AGENT, RuleScope.USER, RuleScope.STORE)
    )
}


def _counts(rule: Rule, call: RuledCall, matching: Matching, now: float) -> bool:
    matching.work.spend(1)
    return (
        rule.is_in_force(now)
        and _is_in_scope(rule, call)
        and _names(rule.tool_name, call.tool_name)
        and all(matching.meets(pattern, strictly=rule.effect is RuleEffect.ALLOW) for pattern in rule.arguments)
        and (rule.effect is not RuleEffect.ALLOW or _allows(rule, call))
    )


def _is_in_scope(rule: Rule, call: RuledCall) -> bool:
    if rule.scope is RuleScope.STORE:
        return True
    if rule.scope is RuleScope.AGENT:
        return _is_of_agent(rule, call)
    if rule.user_id != call.user_id:
        return False
    if rule.effect is not RuleEffect.ALLOW and rule.scope_id in call.above_ids:
        return True
    match rule.scope:
        case RuleScope.RUN:
            return rule.scope_id == call.run_id
        case RuleScope.CONVERSATION:
            return rule.scope_id == call.conversation_id
        case RuleScope.USER:
            return True


def _is_of_agent(rule: Rule, call: RuledCall) -> bool:
    is_own = rule.scope_id == call.agent_name
    return is_own or (rule.effect is not RuleEffect.ALLOW and rule.scope_id in call.agents_above)


def _names(pattern: str, tool_name: str) -> bool:
    if pattern == ANY_TOOL:
        return True
    if pattern.endswith(f".{ANY_TOOL}"):
        return tool_name.startswith(pattern.removesuffix(ANY_TOOL))
    return pattern == tool_name


def _allows(rule: Rule, call: RuledCall) -> bool:
    """Return whether a matching ALLOW covers this kind of call."""
    if call.approvals_required > 1 or call.items > (rule.items_max or BULK_ITEMS_MIN - 1):
        return False
    if not rule.is_of_store and not call.user_may_approve:
        return False  # The author can no longer approve calls, so the rule cannot either.
    if call.tool_create_time > rule.create_time:
        return False  # Its author did not know this tool. A later tool with the same name can have the same version.
    if rule.is_for_one_tool:
        return call.tool_versions == {rule.tool_version}
    return call.category is not Category.DESTRUCTIVE or rule.includes_destructive


def check_room(rule: Rule, *, of_store: int, of_users: int, of_user: int) -> None:
    """Check the limits on rules in force. Users' rules do not count towards the limit on store-wide rules.

    The arguments count the rules in force: store-wide rules, all users' rules, and the author's own rules.

    Raises:
        InvalidField: A limit is reached.
    """
    is_for_store = rule.is_of_store
    if (of_store if is_for_store else of_users) >= RULES_MAX:
        whose, most = "the store has" if is_for_store else "the store's users have", RULES_MAX
    elif not is_for_store and of_user >= RULES_OF_USER_MAX:
        whose, most = "you have", RULES_OF_USER_MAX
    else:
        return
    raise InvalidField(f"{whose} {most} rules in force: revoke some first", field="rule")


def check_rule(rule: Rule, now: float) -> None:
    """Validate a new rule.

    Raises:
        InvalidField: A field is invalid. The `field` metadata names the first one.
    """
    _require(_is_tool_pattern(rule.tool_name), "tool_name", "must be the name of a tool, `*` or `<source>.*`")
    needs_id = rule.scope not in (RuleScope.USER, RuleScope.STORE)
    _require(
        is_id(rule.scope_id) if needs_id else not rule.scope_id,
        "scope_id",
        "must be a run, conversation or agent for the scopes RUN, CONVERSATION and AGENT, and empty otherwise",
    )
    _require(not rule.call_id or is_id(rule.call_id), "call_id", "must be the id of a call")
    _require(len(rule.arguments) <= PATTERNS_MAX, "arguments", f"must have at most {PATTERNS_MAX} patterns")
    for pattern in rule.arguments:
        _require(bool(pattern.argument), "arguments", "each pattern must name an argument")
        _require(
            (pattern.equals is None) != (pattern.glob is None),
            "arguments",
            "each pattern must have equals_json or glob",
        )
        _require(
            1 <= len(pattern.glob or "*") <= GLOB_CHARACTERS_MAX and not set(pattern.glob or "") & set("[]"),
            "arguments",
            f"a glob must be 1 to {GLOB_CHARACTERS_MAX} characters without brackets",
        )
    size = sum(
        len(dumps_canonical([each.argument, each.glob or ""])) + len(each.equals or b"") for each in rule.arguments
    )
    _require(size <= PATTERN_BYTES_MAX, "arguments", f"the patterns must be at most {PATTERN_BYTES_MAX} bytes in total")
    for pattern in rule.arguments:
        text = pattern.glob or (pattern.equals or b"").decode()
        _require(not piles_marks(text), "arguments", "a pattern has too many combining marks in a row")
    _require(len(rule.reason.encode()) <= REASON_BYTES_MAX, "reason", f"must be at most {REASON_BYTES_MAX} bytes")
    _require(CONTROL.search(rule.reason) is None, "reason", "must not have control characters")
    _require(not rule.name or is_id(rule.name), "name", "must have at most 64 letters, digits, _ and -")
    _require(not rule.expire_time or rule.expire_time > now, "expire_time", "must be in the future")
    allows = rule.effect is RuleEffect.ALLOW
    _require(allows or not rule.uses_max, "uses_max", "is only for ALLOW")
    _require(allows or not rule.items_max, "items_max", "is only for ALLOW")
    _require(
        not rule.includes_destructive or (allows and not rule.is_for_one_tool),
        "includes_destructive",
        "is only for ALLOW with a tool pattern",
    )
    if allows and not rule.is_for_one_tool:
        _require(
            bool(rule.expire_time) and rule.expire_time <= now + TRUST_SECONDS_MAX,
            "expire_time",
            f"ALLOW for a tool pattern must expire within {TRUST_SECONDS_MAX / 86400:g} days",
        )


def _is_tool_pattern(name: str) -> bool:
    if name == ANY_TOOL:
        return True
    if name.endswith(f".{ANY_TOOL}"):
        return can_exist(name.removesuffix(f".{ANY_TOOL}"))
    return can_exist(name)


def _require(holds: bool, field: str, rule: str) -> None:  # noqa: FBT001  # reads as the rule it states
    if not holds:
        raise InvalidField(sentence(field, rule), field=f"rule.{field}")
