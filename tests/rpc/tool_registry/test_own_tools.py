"""Front-end tools that come with a run: checked as those of the register, and known by what they bring along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.event.v1 import call_pb2
from pawl.tool.v1 import audit_pb2, execution_pb2, rule_pb2, tool_pb2
from pawl.tools import Category, EffectClass, Tool, tool
from tests.rpc.tool_registry.registry import Registry, context, front_end_tool, reason, running

OFFER, APPROVE, REFUSE = (
    execution_pb2.DISPOSITION_OFFER,
    execution_pb2.DISPOSITION_APPROVE,
    execution_pb2.DISPOSITION_REFUSE,
)
ALLOW, DENY = rule_pb2.RULE_EFFECT_ALLOW, rule_pb2.RULE_EFFECT_DENY


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
def look(n: int = 0) -> int:
    """Look."""
    return n


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, allowed_users=["bob"])
def private() -> str:
    """Only for bob."""
    return ""


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> Any:
    tools: list[Tool[..., Any]] = [look, private]
    async with running(database_url, tmp_path, tools) as registry:
        yield registry


async def checked(registry: Registry, *definitions: tool_pb2.ToolDefinition) -> list[tool_pb2.OwnTool]:
    request = execution_pb2.CheckOwnToolsRequest(context=context(), definitions=definitions)
    return list((await registry.execution.CheckOwnTools(request)).tools)


async def refusal(registry: Registry, *definitions: tool_pb2.ToolDefinition) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await checked(registry, *definitions)
    _, why, _ = reason(error.value)
    return why, error.value.details() or ""


async def judge(
    registry: Registry, own: tool_pb2.OwnTool, arguments: bytes = b"{}", *, call: str = "call"
) -> execution_pb2.Verdict:
    proposed = execution_pb2.ProposedCall(
        call_id=call, tool_name=own.definition.name, tool_version=1, arguments_json=arguments, own_tool=own
    )
    request = execution_pb2.CheckCallsRequest(context=context(), calls=[proposed])
    (verdict,) = (await registry.execution.CheckCalls(request)).verdicts
    return verdict


async def make_rule(registry: Registry, effect: Any, tool_name: str) -> None:
    rule = rule_pb2.Rule(effect=effect, scope=rule_pb2.RULE_SCOPE_USER, tool_name=tool_name)
    if effect == ALLOW and tool_name == "*":
        rule.expire_time.GetCurrentTime()
        rule.expire_time.seconds += 60
    await registry.rules["acme", "ann"].CreateRule(rule_pb2.CreateRuleRequest(rule=rule))


def gated(**changes: Any) -> tool_pb2.ToolDefinition:
    return front_end_tool("show_chart", category=2, effect_class=4, **changes)


async def test_nothing_is_kept_of_them_and_the_same_definition_has_the_same_digest(registry: Registry) -> None:
    first, second = await checked(registry, front_end_tool("a"), front_end_tool("b", context=0))
    assert first.definition.context == second.definition.context == call_pb2.EXECUTION_CONTEXT_FRONTEND
    assert len({first.definition_sha256, second.definition_sha256}) == 2
    assert (await checked(registry, first.definition))[0].definition_sha256 == first.definition_sha256
    listed = (await registry.ann.ListTools(tool_pb2.ListToolsRequest())).tools
    assert {entry.definition.name for entry in listed} == {"look"}


@pytest.mark.parametrize(
    ("changes", "why", "said"),
    [
        ({"name": "look"}, "TOOL_EXISTS", "cannot be replaced"),
        ({"name": "private"}, "TOOL_EXISTS", "cannot be replaced"),
        ({"name": "a.b"}, "INVALID_FIELD", "a dot"),
        ({"name": ""}, "INVALID_FIELD", "must match"),
        ({"context": 1}, "INVALID_FIELD", "FRONTEND"),
        ({"arguments_schema_json": b"{"}, "INVALID_SCHEMA", "strict JSON"),
        ({"arguments_schema_json": b'{"type":"object","properties":3}'}, "INVALID_SCHEMA", ""),
        ({"timeout_seconds": -1}, "INVALID_FIELD", "timeout_seconds"),
        ({"offer_fallback": 2, "fallback_tool_name": "absent"}, "INVALID_FIELD", "backend tool"),
        ({"allowed_roles": ["admin"]}, "INVALID_FIELD", "who may call it"),
    ],
)
async def test_they_are_checked_as_those_of_the_register(
    registry: Registry, changes: dict[str, Any], why: str, said: str
) -> None:
    refused, sentence = await refusal(registry, front_end_tool("fine"), front_end_tool(**({"name": "x"} | changes)))
    assert refused == why
    assert said in sentence


async def test_a_registered_tool_keeps_its_name_unless_it_is_the_same_tool(registry: Registry) -> None:
    root = registry.users["acme", "root"]
    await root.RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end_tool()))
    why, said = await refusal(registry, front_end_tool(description="Another."))
    assert (why, "give the one of this run another name" in said) == ("TOOL_EXISTS", True)
    await checked(registry, front_end_tool())
    for_bob = front_end_tool("chart_of_bob", allowed_user_ids=["bob"])
    await root.RegisterTool(tool_pb2.RegisterToolRequest(definition=for_bob))
    await checked(registry, front_end_tool("chart_of_bob"))


async def test_a_call_is_judged_by_the_definition_that_came_along(registry: Registry) -> None:
    closed = b'{"type":"object","properties":{"points":{"type":"array"}},"additionalProperties":false}'
    (own,) = await checked(registry, front_end_tool("show_map", timeout_seconds=5, arguments_schema_json=closed))
    verdict = await judge(registry, own, b'{"points":"1"}')
    assert (verdict.disposition, verdict.context) == (OFFER, call_pb2.EXECUTION_CONTEXT_FRONTEND)
    assert (verdict.arguments_json, verdict.tool_version, verdict.timeout_seconds) == (b'{"points":["1"]}', 1, 5.0)
    refused = await judge(registry, own, b'{"pionts":[1]}')
    assert (refused.disposition, refused.error_reason) == (REFUSE, "INVALID_ARGUMENTS")
    assert "points" in refused.error_message
    (other,) = await checked(registry, front_end_tool("show_list", category=3, effect_class=4))
    asked = await judge(registry, other)
    assert (asked.disposition, asked.approval_cause, len(asked.digest)) == (APPROVE, "category DESTRUCTIVE", 64)


async def test_what_a_person_denies_holds_for_them_and_what_one_allows_does_not(registry: Registry) -> None:
    root = registry.users["acme", "root"]
    await root.RegisterTool(tool_pb2.RegisterToolRequest(definition=gated()))
    own = tool_pb2.OwnTool(definition=gated())
    await make_rule(registry, ALLOW, "show_chart")
    await make_rule(registry, ALLOW, "*")
    assert (await registry.check("show_chart", call="registered")).disposition == OFFER
    assert (await judge(registry, own, call="own")).disposition == APPROVE
    await make_rule(registry, DENY, "show_chart")
    assert (await judge(registry, own, call="denied")).error_reason == "NOT_ALLOWED"


async def test_two_tools_of_one_name_are_two_in_the_audit_chain_and_the_analytics(registry: Registry) -> None:
    (first,) = await checked(registry, front_end_tool("panel"))
    (second,) = await checked(registry, front_end_tool("panel", description="Another one."))
    for number, own in enumerate((first, second, second)):
        call = f"call_{number}"
        await judge(registry, own, call=call)
        result = execution_pb2.RecordedResult(
            call_id=call,
            tool_name="panel",
            tool_version=1,
            user_id="ann",
            arguments_sha256="0" * 64,
            result_sha256="0" * 64,
            state=call_pb2.CALL_STATE_SUCCEEDED,
            duration_seconds=number + 1,
            definition_sha256=own.definition_sha256,
        )
        await registry.execution.RecordResults(execution_pb2.RecordResultsRequest(context=context(), results=[result]))
    decision = execution_pb2.RecordedDecision(
        call_id="call_0",
        tool_name="panel",
        kind=call_pb2.DECISION_KIND_APPROVE,
        user_id="ann",
        definition_sha256=first.definition_sha256,
    )
    await registry.execution.RecordDecisions(
        execution_pb2.RecordDecisionsRequest(context=context(), decisions=[decision])
    )
    labels = [f"panel@{own.definition_sha256[:12]}" for own in (first, second)]
    auditor = registry.auditors["acme", "olga"]
    entries = (await auditor.ListAudit(audit_pb2.ListAuditRequest())).entries
    assert [entry.tool_name for entry in entries][::-1] == [
        *(labels[0], labels[0], labels[1], labels[1], labels[1], labels[1], labels[0])
    ]
    figures = (await auditor.GetToolAnalytics(audit_pb2.GetToolAnalyticsRequest())).tools
    assert {each.tool_name: (each.execution_count, each.p50_seconds) for each in figures} == {
        labels[0]: (1, 1.0),
        labels[1]: (2, 2.0),
    }


async def test_a_call_of_another_tool_than_the_one_that_came_along_is_refused(registry: Registry) -> None:
    (own,) = await checked(registry, front_end_tool("panel"))
    proposed = execution_pb2.ProposedCall(call_id="c", tool_name="look", tool_version=1, own_tool=own)
    with pytest.raises(grpc.aio.AioRpcError, match="is not the tool of the call"):
        await registry.execution.CheckCalls(execution_pb2.CheckCallsRequest(context=context(), calls=[proposed]))
