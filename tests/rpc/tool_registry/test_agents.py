"""What the registry does by the agent of a run: rules (HITL-5), the audit chain, and the figures of tools (TOOL-6)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import grpc
import pytest

from pawl.tool.v1 import audit_pb2, rule_pb2
from tests.rpc.tool_registry.registry import Registry, context, outcome, reason, running
from tests.rpc.tool_registry.test_rules import (
    AGENT,
    ALLOW,
    APPROVE,
    ASK,
    DENY,
    REFUSE,
    RUN,
    STORE,
    make,
    refused,
    tools,
)


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, tools()) as registry:
        yield registry


async def test_a_rule_of_an_agent_counts_for_its_runs_whoever_starts_them(registry: Registry) -> None:
    rule_id = await make(registry, ALLOW, "root", scope=AGENT, scope_id="clerk")
    for user in ("ann", "bob"):
        verdict = await registry.check("pay", call=user, user=user, agent="clerk")
        assert (verdict.disposition, verdict.rule_id) == (RUN, rule_id)
    for other in ("counter", "default"):
        assert (await registry.check("pay", call=other, agent=other)).disposition == APPROVE
    assert (await registry.check("pay", store="other", agent="clerk")).disposition == APPROVE
    assert outcome(await registry.run("pay", call="ann", rule_id=rule_id, who=context(agent="clerk"))) == "SUCCEEDED"


async def test_deny_of_an_agent_wins_and_names_the_rule_and_the_agent(registry: Registry) -> None:
    await make(registry, ALLOW, "root", scope=STORE)
    rule_id = await make(registry, DENY, "root", scope=AGENT, scope_id="clerk")
    verdict = await registry.check("pay", agent="clerk")
    assert (verdict.disposition, verdict.rule_id) == (REFUSE, rule_id)
    assert verdict.error_message == f"a rule of the agent clerk denies this call ({rule_id})"
    assert (await registry.check("pay", call="another", agent="counter")).disposition == RUN


async def test_who_gives_a_task_to_another_agent_does_not_escape_its_rules(registry: Registry) -> None:
    await make(registry, ALLOW, "root", scope=AGENT, scope_id="clerk")
    assert (await registry.check("pay", call="one", agent="counter", above=["clerk"])).disposition == APPROVE
    await make(registry, DENY, "root", scope=AGENT, scope_id="clerk", tool_name="look")
    assert (await registry.check("look", call="two", agent="counter", above=["default", "clerk"])).disposition == REFUSE
    assert (await registry.check("look", call="three", agent="counter", above=["default"])).disposition == RUN


async def test_a_run_of_which_the_agent_is_not_known_is_restricted_and_never_freed(registry: Registry) -> None:
    """I10, I23: an agent-loop of the version before does not say it."""
    await make(registry, ALLOW, "root", scope=AGENT, scope_id="clerk")
    assert (await registry.check("pay", call="one", agent="")).disposition == APPROVE
    await make(registry, ASK, "root", scope=AGENT, scope_id="clerk", tool_name="look")
    assert (await registry.check("look", call="two", agent="")).disposition == APPROVE
    assert (await registry.check("look", call="three", agent="counter", above=[""])).disposition == APPROVE
    assert (await registry.check("look", call="four", agent="counter")).disposition == RUN


async def test_admins_make_list_and_revoke_rules_of_agents(registry: Registry) -> None:
    for who in ("ann", "apu", "vic"):
        assert (await refused(registry, DENY, who, scope=AGENT, scope_id="clerk"))[1] == "PERMISSION_DENIED"
    absent = (grpc.StatusCode.NOT_FOUND, "AGENT_NOT_FOUND")
    assert await refused(registry, DENY, "root", scope=AGENT, scope_id="nobody") == absent
    assert await refused(registry, DENY, "root", scope=AGENT, scope_id="clerk", store="other") == absent
    for scope_id in ("", "no name"):
        assert (await refused(registry, DENY, "root", scope=AGENT, scope_id=scope_id))[1] == "INVALID_FIELD"
    rule_id = await make(registry, DENY, "root", scope=AGENT, scope_id="clerk", tool_name="look")
    assert (await registry.check("look", agent="clerk")).disposition == REFUSE
    (listed,) = (await registry.rules["acme", "ann"].ListRules(rule_pb2.ListRulesRequest())).rules
    assert (listed.rule_id, listed.scope, listed.scope_id, listed.user_id) == (rule_id, AGENT, "clerk", "root")
    revoke = rule_pb2.RevokeRuleRequest(rule_id=rule_id)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.rules["acme", "ann"].RevokeRule(revoke)
    assert reason(caught.value)[1] == "PERMISSION_DENIED"
    await registry.rules["acme", "root"].RevokeRule(revoke)
    assert (await registry.check("look", call="after", agent="clerk")).disposition == RUN


async def test_a_registry_that_knows_no_rules_of_agents_lets_no_more_calls_run(
    registry: Registry, database_url: str
) -> None:
    """I23: it reads the columns of before only, and restricts the whole store where a rule restricts an agent."""
    for effect in (ALLOW, ASK, DENY):
        await make(registry, effect, "root", scope=AGENT, scope_id="clerk")
    connection = await asyncpg.connect(database_url)
    try:
        rows = await connection.fetch("SELECT effect, scope, scope_id FROM tool_registry.rules")
    finally:
        await connection.close()
    assert {tuple(row) for row in rows} == {("ALLOW", "RUN", ""), ("ASK", "STORE", ""), ("DENY", "STORE", "")}


async def figures(registry: Registry, **fields: Any) -> list[tuple[str, str, int]]:
    """Agent, tool and executions."""
    request = audit_pb2.GetToolAnalyticsRequest(**fields)
    tools = (await registry.auditors["acme", "olga"].GetToolAnalytics(request)).tools
    return [(found.agent_name, found.tool_name, found.execution_count) for found in tools]


async def test_analytics_tell_agents_apart_and_their_names_are_in_the_chain(registry: Registry) -> None:
    for number, agent in enumerate(("clerk", "clerk", "counter", "")):
        await registry.run("look", call=f"c{number}", who=context(agent=agent))
    assert await figures(registry) == [("", "look", 4)]
    assert await figures(registry, by_agent=True) == [("", "look", 1), ("clerk", "look", 2), ("counter", "look", 1)]
    assert await figures(registry, agent_name="clerk") == [("", "look", 2)]
    auditor = registry.auditors["acme", "olga"]
    entries = (await auditor.ListAudit(audit_pb2.ListAuditRequest(agent_name="counter"))).entries
    assert {(entry.call_id, entry.agent_name) for entry in entries} == {("c2", "counter")}
    answers = [answer async for answer in auditor.VerifyAudit(audit_pb2.VerifyAuditRequest())]
    assert not answers[-1].HasField("problem")
