"""Implements pawl.tool.v1.RuleService. The store and user come from the caller's credential."""

from __future__ import annotations

from typing import Final

from pawl.chassis.identity.auth import require_user
from pawl.chassis.ids import CallId, StoreId, UserId, check_id, is_id
from pawl.chassis.rpc.kinds import Context
from pawl.chassis.rpc.translate import Exceptions, seconds, timestamp
from pawl.chassis.strict_json import loads
from pawl.errors import InvalidField, InvalidJson, InvalidPageToken, RuleNotFound, TooLarge
from pawl.tool.v1 import rule_pb2 as pb
from pawl.tool.v1 import rule_pb2_grpc
from pawl.tool_registry.pages import cut, page_size, page_token, position_of
from pawl.tool_registry.policy.rules.patterns import ArgumentPattern, canonical_value
from pawl.tool_registry.policy.rules.rules import PATTERN_BYTES_MAX, Rule, RuleEffect, RuleScope
from pawl.tool_registry.policy.ruleset import Rules
from pawl.tools.wire import WIRE

_EFFECTS: Final = WIRE.enum(RuleEffect, pb.RuleEffect, field="rule.effect")
_SCOPES: Final = WIRE.enum(RuleScope, pb.RuleScope, field="rule.scope")
_RULE: Final = WIRE.struct(
    Rule,
    pb.Rule,
    Exceptions(
        write={
            "expire_time": lambda rule: timestamp(rule.expire_time) if rule.expire_time else None,
            "revoke_time": lambda rule: timestamp(rule.revoke_time) if rule.revoke_time else None,
        },
        of_struct=("store_id",),
    ),
)


class RuleServicer(rule_pb2_grpc.RuleServiceServicer):
    def __init__(self, rules: Rules) -> None:
        self._rules = rules

    async def CreateRule(self, request: pb.CreateRuleRequest, context: Context) -> pb.CreateRuleResponse:
        request_id = check_id(request.request_id, "request_id", optional=True)
        made = await self._rules.create(
            require_user(), _rule_from(request.rule), request_id, validate_only=request.validate_only
        )
        return pb.CreateRuleResponse(rule=_RULE.fields(made))

    async def RevokeRule(self, request: pb.RevokeRuleRequest, context: Context) -> pb.RevokeRuleResponse:
        person = require_user()
        if not is_id(request.rule_id):
            raise RuleNotFound
        return pb.RevokeRuleResponse(rule=_RULE.fields(await self._rules.revoke(person, request.rule_id)))

    async def ListRules(self, request: pb.ListRulesRequest, context: Context) -> pb.ListRulesResponse:
        size = page_size(request.page_size)
        (before,) = position_of("rules", request.page_token, tuple[str]) or ("",)
        if before and not is_id(before):
            raise InvalidPageToken
        found = await self._rules.list(
            require_user(),
            include_ended=request.include_ended,
            all_users=request.all_users,
            before=before,
            most=size + 1,
        )
        page, token = cut(found, size, lambda rule: page_token("rules", rule.rule_id))
        return pb.ListRulesResponse(rules=map(_RULE.fields, page), next_page_token=token)


def _rule_from(message: pb.Rule) -> Rule:
    """Parse a rule. `check_rule` validates it as a whole.

    Raises:
        InvalidField: A value cannot be read.
    """
    expire_time = 0.0
    if message.HasField("expire_time"):
        expire_time = seconds(message.expire_time)
        if not 0 < expire_time < _TIME_MAX:
            raise InvalidField("expire_time must be between the years 1970 and 9999", field="rule.expire_time")
    return Rule(
        store_id=StoreId(""),
        rule_id="",
        effect=_EFFECTS.read(message.effect),
        scope=_SCOPES.read(message.scope),
        scope_id=message.scope_id,
        user_id=UserId(""),
        tool_name=message.tool_name,
        arguments=tuple(map(_pattern_from, message.arguments)),
        items_max=message.items_max,
        includes_destructive=message.includes_destructive,
        uses_max=message.uses_max,
        reason=message.reason,
        name=message.name,
        expire_time=expire_time,
        call_id=CallId(message.call_id),
    )


# Start of the year 10000.
_TIME_MAX: Final = 253402300800.0


def _pattern_from(message: pb.ArgumentPattern) -> ArgumentPattern:
    if not message.HasField("equals_json"):
        return ArgumentPattern(argument=message.argument, glob=message.glob if message.HasField("glob") else None)
    try:
        value = loads(message.equals_json, bytes_max=PATTERN_BYTES_MAX)
    except (InvalidJson, TooLarge) as error:
        raise InvalidField(f"arguments: equals_json: {error.message}", field="rule.arguments") from None
    return ArgumentPattern(argument=message.argument, equals=canonical_value(value))
