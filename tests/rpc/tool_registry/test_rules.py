"""Rules: what people have decided for the next time (HITL-5)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.tool.v1 import audit_pb2, execution_pb2, rule_pb2, tool_pb2
from pawl.tool_registry.domain import rules
from pawl.tool_registry.domain.definition import Category, EffectClass
from pawl.tools import Tool, tool
from tests.rpc.tool_registry.registry import (
    FOR_ANN,
    Registry,
    as_json,
    context,
    front_end_tool,
    outcome,
    reason,
    running,
)

RUN, APPROVE, REFUSE = (
    execution_pb2.DISPOSITION_RUN,
    execution_pb2.DISPOSITION_APPROVE,
    execution_pb2.DISPOSITION_REFUSE,
)
ALLOW, ASK, DENY = rule_pb2.RULE_EFFECT_ALLOW, rule_pb2.RULE_EFFECT_ASK, rule_pb2.RULE_EFFECT_DENY
USER, STORE, AGENT = rule_pb2.RULE_SCOPE_USER, rule_pb2.RULE_SCOPE_STORE, rule_pb2.RULE_SCOPE_AGENT


def tools(*, changed: bool = False) -> list[Tool[..., Any]]:
    @tool(description="Pay a bill now." if changed else "Pay a bill.")
    async def pay(amount: int = 1, to: str = "ann", items: list[str] | None = None) -> str:
        return f"paid {amount}"

    @tool(category=Category.DESTRUCTIVE)
    async def erase() -> str:
        """Erase everything."""
        return "erased"

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    async def look() -> str:
        """Look."""
        return "seen"

    return [pay, erase, look]


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, tools()) as registry:
        yield registry


async def make(registry: Registry, effect: Any, who: str = "ann", *, store: str = "acme", **fields: Any) -> str:
    """Make a rule, by default for all runs of the user; returns its id."""
    expires_in = fields.pop("expires_in", None)
    said: dict[str, Any] = {"scope": USER, "tool_name": "pay"} | fields
    rule = rule_pb2.Rule(effect=effect, **said)
    if expires_in is not None:
        rule.expire_time.FromMicroseconds(int((time.time() + expires_in) * 1e6))
    answer = await registry.rules[store, who].CreateRule(rule_pb2.CreateRuleRequest(rule=rule))
    return answer.rule.rule_id


async def refused(registry: Registry, effect: Any, who: str = "ann", **fields: Any) -> tuple[Any, str]:
    """Code and reason with which a rule is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await make(registry, effect, who, **fields)
    code, why, _ = reason(caught.value)
    return code, why


async def test_an_allowed_call_runs_without_approval_and_names_its_rule(registry: Registry) -> None:
    assert (await registry.check("pay")).disposition == APPROVE
    rule_id = await make(registry, ALLOW)
    verdict = await registry.check("pay")
    assert (verdict.disposition, verdict.rule_id, verdict.digest) == (RUN, rule_id, "")
    assert outcome(await registry.run("pay", rule_id=rule_id)) == "SUCCEEDED"


async def test_the_audit_chain_names_the_rule_that_decided(registry: Registry) -> None:
    allowing = await make(registry, ALLOW)
    await registry.check("pay", call="one")
    denying = await make(registry, DENY, tool_name="look")
    await registry.check("look", call="two")
    asking = await make(registry, ASK)
    await registry.check("pay", call="three")
    listed = await registry.auditors["acme", "root"].ListAudit(audit_pb2.ListAuditRequest())
    why = [entry.reason for entry in reversed(listed.entries) if entry.kind == audit_pb2.AUDIT_KIND_PROPOSED]
    assert why == [f"rule {allowing}", f"NOT_ALLOWED, rule {denying}", f"category SENSITIVE, rule {asking}"]


async def test_a_gated_call_does_not_run_in_the_name_of_a_rule_that_did_not_allow_it(registry: Registry) -> None:
    rule_id = await make(registry, ALLOW)
    for claimed in (rule_id, "rule_x"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await registry.run("pay", call="another", rule_id=claimed)
        assert reason(caught.value)[1] == "APPROVAL_REQUIRED"


async def test_a_revoked_rule_allows_nothing_that_has_not_begun(registry: Registry) -> None:
    rule_id = await make(registry, ALLOW)
    assert (await registry.check("pay", call="one")).disposition == RUN
    assert (await registry.check("pay", call="two")).disposition == RUN
    assert outcome(await registry.run("pay", call="one", rule_id=rule_id)) == "SUCCEEDED"
    await registry.rules["acme", "ann"].RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=rule_id))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.run("pay", call="two", rule_id=rule_id)
    assert reason(caught.value)[1] == "APPROVAL_REQUIRED"
    # What has begun is told, not done again.
    assert outcome(await registry.run("pay", call="one", rule_id=rule_id)) == "SUCCEEDED"
    assert (await registry.check("pay", call="three")).disposition == APPROVE


async def test_deny_wins_over_everything_and_reaches_calls_that_were_approved(registry: Registry) -> None:
    digest = (await registry.check("pay")).digest
    await make(registry, ALLOW)
    rule_id = await make(registry, DENY, "root", scope=STORE)
    verdict = await registry.check("pay", call="new")
    assert (verdict.disposition, verdict.error_reason, verdict.rule_id) == (REFUSE, "NOT_ALLOWED", rule_id)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.run("pay", approved_digest=digest)
    assert reason(caught.value)[1] == "PERMISSION_DENIED"
    assert (await registry.check("pay", store="other")).disposition == APPROVE


async def test_ask_gates_a_safe_tool_and_wins_over_allow(registry: Registry) -> None:
    rule_id = await make(registry, ASK, tool_name="look")
    await make(registry, ALLOW, tool_name="look")
    verdict = await registry.check("look")
    assert (verdict.disposition, verdict.approval_cause) == (APPROVE, f"rule {rule_id}")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.run("look")
    assert reason(caught.value)[1] == "APPROVAL_REQUIRED"
    assert outcome(await registry.run("look", approved_digest=verdict.digest)) == "SUCCEEDED"


async def test_uses_are_counted_once_a_call_and_then_people_are_asked_again(registry: Registry) -> None:
    await make(registry, ALLOW, uses_max=2)
    for call in ("one", "one", "two", "one"):
        assert (await registry.check("pay", call=call)).disposition == RUN
    assert (await registry.check("pay", call="three")).disposition == APPROVE
    (rule,) = (await registry.rules["acme", "ann"].ListRules(rule_pb2.ListRulesRequest(include_ended=True))).rules
    assert rule.uses == 2


async def test_patterns_say_which_arguments_are_meant(registry: Registry) -> None:
    await make(
        registry,
        ALLOW,
        arguments=[
            rule_pb2.ArgumentPattern(argument="to", glob="*@example.com"),
            rule_pb2.ArgumentPattern(argument="amount", equals_json=b"5.0"),
        ],
    )
    assert (await registry.check("pay", {"to": "a@example.com", "amount": 5})).disposition == RUN
    assert (await registry.check("pay", {"to": "a@example.com", "amount": 6})).disposition == APPROVE
    assert (await registry.check("pay", {"to": "a@example.com.evil.org", "amount": 5})).disposition == APPROVE


async def test_bulk_is_asked_about_unless_the_rule_says_how_many(registry: Registry) -> None:
    await make(registry, ALLOW)
    bulk = {"items": ["a", "b", "c"]}
    assert (await registry.check("pay", bulk)).disposition == APPROVE
    await make(registry, ALLOW, items_max=3)
    assert (await registry.check("pay", bulk)).disposition == RUN
    assert (await registry.check("pay", {"items": ["a", "b", "c", "d"]})).disposition == APPROVE


async def test_trust_mode_leaves_out_destruction_unless_it_is_meant(registry: Registry) -> None:
    rule_id = await make(registry, ALLOW, tool_name="*", expires_in=60)
    assert (await registry.check("pay")).rule_id == rule_id
    assert (await registry.check("erase")).disposition == APPROVE
    await make(registry, ALLOW, tool_name="*", expires_in=60, includes_destructive=True)
    assert (await registry.check("erase")).disposition == RUN


async def test_a_new_version_of_the_tool_suspends_the_rule(
    registry: Registry, database_url: str, tmp_path: Path
) -> None:
    await make(registry, ALLOW)
    await make(registry, ALLOW, tool_name="*", expires_in=60)
    async with running(database_url, tmp_path, tools(changed=True), name="b") as newer:
        for version in (1, 2):
            assert (await newer.check("pay", version=version)).disposition == APPROVE
        assert (await newer.check("erase")).disposition == APPROVE
        listed = (await newer.rules["acme", "ann"].ListRules(rule_pb2.ListRulesRequest())).rules
        assert [rule.suspended for rule in listed] == [False, True]


async def test_a_front_end_tool_that_was_replaced_suspends_its_rule_for_older_runs_too(registry: Registry) -> None:
    """A run goes on with the version that it began with; what is said of that version does not go on."""
    root = registry.users["acme", "root"]

    async def disposition(call: str) -> Any:
        return (await registry.check("show_chart", version=1, call=call)).disposition

    gated = front_end_tool(category=2, effect_class=4)
    await root.RegisterTool(tool_pb2.RegisterToolRequest(definition=gated))
    await make(registry, ALLOW, tool_name="show_chart")
    assert await disposition("one") == execution_pb2.DISPOSITION_OFFER
    changed = front_end_tool(category=2, effect_class=4, description="Show it to everybody.")
    await root.RegisterTool(tool_pb2.RegisterToolRequest(definition=changed, replace=True))
    assert await disposition("two") == APPROVE
    (rule,) = (await registry.rules["acme", "ann"].ListRules(rule_pb2.ListRulesRequest())).rules
    assert rule.suspended
    await make(registry, ALLOW, tool_name="show_chart")
    await root.UnregisterTool(tool_pb2.UnregisterToolRequest(name="show_chart"))
    assert await disposition("three") == APPROVE


async def test_a_front_end_tool_that_was_replaced_by_a_stricter_one_is_gated_for_older_runs_too(
    registry: Registry,
) -> None:
    root = registry.users["acme", "root"]
    await root.RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end_tool()))
    assert (await registry.check("show_chart")).disposition == execution_pb2.DISPOSITION_OFFER
    stricter = front_end_tool(category=3, effect_class=4)
    await root.RegisterTool(tool_pb2.RegisterToolRequest(definition=stricter, replace=True))
    assert (await registry.check("show_chart")).disposition == APPROVE


async def test_a_rule_names_the_approval_that_made_it(registry: Registry) -> None:
    await make(registry, ALLOW, call_id="approved")
    (rule,) = (await registry.rules["acme", "ann"].ListRules(rule_pb2.ListRulesRequest())).rules
    assert rule.call_id == "approved"
    request = audit_pb2.ListAuditRequest(call_id="approved", kind=audit_pb2.AUDIT_KIND_RULE)
    (entry,) = (await registry.auditors["acme", "root"].ListAudit(request)).entries
    assert (entry.verdict, entry.reason) == ("MADE", rule.rule_id)
    absent = (grpc.StatusCode.NOT_FOUND, "CALL_NOT_FOUND")
    assert await refused(registry, ALLOW, call_id="another") == absent
    assert await refused(registry, ALLOW, "bob", call_id="approved") == absent
    unfit = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    assert await refused(registry, ALLOW, tool_name="erase", call_id="approved") == unfit
    assert await refused(registry, ALLOW, call_id="a/b") == unfit


async def test_the_rules_of_users_leave_room_for_each_other_and_for_those_of_the_store(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "RULES_MAX", 3)
    monkeypatch.setattr(rules, "RULES_OF_USER_MAX", 2)
    full = (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")
    request = rule_pb2.CreateRuleRequest(request_id="r1", rule=rule_pb2.Rule(effect=ALLOW, scope=USER, tool_name="pay"))
    first = (await registry.rules["acme", "ann"].CreateRule(request)).rule.rule_id
    await make(registry, ALLOW)
    assert await refused(registry, ALLOW) == full
    assert (await registry.rules["acme", "ann"].CreateRule(request)).rule.rule_id == first
    await make(registry, ALLOW, "bob")
    assert await refused(registry, ALLOW, "bob") == full
    for _ in range(3):
        await make(registry, DENY, "root", scope=STORE)
    assert await refused(registry, DENY, "root", scope=STORE) == full
    await registry.rules["acme", "ann"].RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=first))
    await make(registry, ALLOW, "bob")


async def test_rules_that_are_made_at_once_do_not_pass_the_bound(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "RULES_OF_USER_MAX", 2)
    made = await asyncio.gather(*(make(registry, ALLOW) for _ in range(6)), return_exceptions=True)
    assert sum(isinstance(each, str) for each in made) == 2


async def test_a_rule_counts_only_in_its_scope(registry: Registry) -> None:
    await make(registry, ALLOW, scope=rule_pb2.RULE_SCOPE_RUN, scope_id="run")
    assert (await registry.check("pay", run="run")).disposition == RUN
    assert (await registry.check("pay", run="other")).disposition == APPROVE
    absent = (grpc.StatusCode.NOT_FOUND, "RUN_NOT_FOUND")
    for who, run in (("ann", "absent"), ("bob", "run")):
        assert await refused(registry, DENY, who, scope=rule_pb2.RULE_SCOPE_RUN, scope_id=run) == absent
    assert (await registry.check("pay", run="run", user="bob")).disposition == APPROVE
    assert (await registry.check("pay", run="run", store="other")).disposition == APPROVE


async def test_a_rule_for_a_conversation_is_for_one_that_is_there(registry: Registry) -> None:
    scope = rule_pb2.RULE_SCOPE_CONVERSATION
    await make(registry, ALLOW, scope=scope, scope_id="conversation")
    absent = (grpc.StatusCode.NOT_FOUND, "CONVERSATION_NOT_FOUND")
    assert await refused(registry, ALLOW, scope=scope, scope_id="absent") == absent


@pytest.mark.parametrize("token", ["x", "rule_1", "cnVsZXM6YSBi", "dG9vbHM6cnVsZV8x"])
async def test_rules_are_listed_on_by_tokens_that_were_given_only(registry: Registry, token: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.rules["acme", "ann"].ListRules(rule_pb2.ListRulesRequest(page_token=token))
    assert reason(caught.value)[1] == "INVALID_PAGE_TOKEN"


async def test_no_rule_allows_what_a_reviewer_edited(registry: Registry) -> None:
    await make(registry, ALLOW)
    call = execution_pb2.ProposedCall(
        call_id="call", tool_name="pay", tool_version=1, arguments_json=as_json({}), edited=True
    )
    request = execution_pb2.CheckCallsRequest(context=context(), calls=[call])
    (verdict,) = (await registry.execution.CheckCalls(request)).verdicts
    assert verdict.disposition == APPROVE
    assert verdict.digest


async def test_only_those_who_may_decide_make_rules(registry: Registry) -> None:
    denied = (grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED")
    assert await refused(registry, ALLOW, "vic") == denied
    assert await refused(registry, ALLOW, "ann", scope=STORE) == denied
    rule_id = await make(registry, DENY, "root", scope=STORE)
    for user in ("bob", "vic"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await registry.rules["acme", user].RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=rule_id))
        assert reason(caught.value)[1] == "PERMISSION_DENIED"
    for who, rule in ((("other", "ann"), rule_id), (("acme", "bob"), await make(registry, ALLOW))):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await registry.rules[who].RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=rule))
        assert reason(caught.value)[1] == "RULE_NOT_FOUND"


async def test_a_delegate_that_decides_nothing_makes_no_call_freer(registry: Registry) -> None:
    """An ALLOW says yes beforehand, and without an ASK or a DENY nobody is asked any more."""
    shop = registry.rules["acme", "shop"]
    asks, allows = await make(registry, ASK), await make(registry, ALLOW)
    allow = rule_pb2.CreateRuleRequest(rule=rule_pb2.Rule(effect=ALLOW, scope=USER, tool_name="pay"))
    own = await make(registry, DENY, "shop")
    for metadata in (FOR_ANN, ()):
        refusals: list[Any] = [shop.CreateRule(allow, metadata=metadata)]
        refusals.append(
            shop.RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=asks if metadata else own), metadata=metadata)
        )
        for refusal in refusals:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await refusal
            assert reason(caught.value)[1] == "PERMISSION_DENIED"
            assert "key or token of their own" in (caught.value.details() or "")
    await shop.RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=allows), metadata=FOR_ANN)
    ask = rule_pb2.CreateRuleRequest(rule=rule_pb2.Rule(effect=ASK, scope=USER, tool_name="look"))
    assert (await shop.CreateRule(ask, metadata=FOR_ANN)).rule.user_id == "ann"
    entries = (await registry.auditors["acme", "olga"].ListAudit(audit_pb2.ListAuditRequest())).entries
    named = [(entry.verdict, entry.by_user_id, entry.by_delegate_user_id) for entry in entries]
    assert named[:2] == [("MADE", "ann", "shop"), ("REVOKED", "ann", "shop")]
    assert len({entry.by_credential_id for entry in entries}) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"effect": 0},
        {"scope": 0},
        {"tool_name": "no such name!"},
        {"tool_name": "*"},
        {"tool_name": "*", "expires_in": 31 * 86400},
        {"expires_in": -1},
        {"scope_id": "x"},
        {"scope": rule_pb2.RULE_SCOPE_RUN},
        {"effect": DENY, "uses_max": 1},
        {"effect": ASK, "items_max": 9},
        {"includes_destructive": True},
        {"arguments": [rule_pb2.ArgumentPattern(argument="to")]},
        {"arguments": [rule_pb2.ArgumentPattern(glob="*")]},
        {"arguments": [rule_pb2.ArgumentPattern(argument="to", glob="[ab]")]},
        {"arguments": [rule_pb2.ArgumentPattern(argument="to", equals_json=b"{")]},
        {"reason": "\0"},
    ],
)
async def test_a_rule_that_cannot_be_used_is_refused(registry: Registry, fields: dict[str, Any]) -> None:
    effect = fields.pop("effect", ALLOW)
    assert await refused(registry, effect, **fields) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_FIELD")


async def test_an_allow_names_a_tool_that_its_author_may_call(registry: Registry) -> None:
    assert await refused(registry, ALLOW, tool_name="nothing") == (grpc.StatusCode.NOT_FOUND, "TOOL_NOT_FOUND")


async def test_the_same_request_makes_one_rule(registry: Registry) -> None:
    ann = registry.rules["acme", "ann"]
    rule = rule_pb2.Rule(effect=ALLOW, scope=USER, tool_name="pay")
    request = rule_pb2.CreateRuleRequest(request_id="r1", rule=rule)
    first, second = await ann.CreateRule(request), await ann.CreateRule(request)
    assert first.rule.rule_id == second.rule.rule_id
    request.rule.tool_name = "erase"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ann.CreateRule(request)
    assert reason(caught.value)[1] == "REQUEST_ID_REUSED"


async def test_rules_are_listed_in_pages_to_those_whom_they_concern(registry: Registry) -> None:
    made = [await make(registry, ALLOW) for _ in range(3)] + [await make(registry, DENY, "root", scope=STORE)]
    await make(registry, ALLOW, "bob")
    ann, seen, token = registry.rules["acme", "ann"], list[str](), ""
    while True:
        page = await ann.ListRules(rule_pb2.ListRulesRequest(page_size=2, page_token=token))
        seen += [rule.rule_id for rule in page.rules]
        token = page.next_page_token
        if not token:
            break
    assert seen == made[::-1]
    with pytest.raises(grpc.aio.AioRpcError):
        await ann.ListRules(rule_pb2.ListRulesRequest(all_users=True))
    everything = await registry.rules["acme", "root"].ListRules(rule_pb2.ListRulesRequest(all_users=True))
    assert len(everything.rules) == 5
    assert not (await registry.rules["other", "ann"].ListRules(rule_pb2.ListRulesRequest())).rules


async def test_calls_that_were_allowed_long_ago_are_forgotten_and_still_counted(registry: Registry) -> None:
    await make(registry, ALLOW, uses_max=2)
    await registry.check("pay", call="one")
    await registry.forget_rule_uses(0)
    (rule,) = (await registry.rules["acme", "ann"].ListRules(rule_pb2.ListRulesRequest())).rules
    assert rule.uses == 1
    assert (await registry.check("pay", call="two")).disposition == RUN
    assert (await registry.check("pay", call="three")).disposition == APPROVE


async def test_a_rule_is_made_and_revoked_once_in_the_audit_chain_however_often_it_is_asked_for(
    registry: Registry,
) -> None:
    rule = rule_pb2.Rule(effect=DENY, scope=USER, tool_name="pay")
    request = rule_pb2.CreateRuleRequest(request_id="r1", rule=rule)
    rules = registry.rules["acme", "ann"]
    (rule_id,) = {(await rules.CreateRule(request)).rule.rule_id for _ in range(3)}
    other = rule_pb2.CreateRuleRequest(request_id="r1", rule=rule_pb2.Rule(effect=ASK, scope=USER, tool_name="pay"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rules.CreateRule(other)
    assert reason(caught.value)[1] == "REQUEST_ID_REUSED"
    for _ in range(3):
        assert (await rules.RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=rule_id))).rule.HasField("revoke_time")
    listed = await registry.auditors["acme", "root"].ListAudit(audit_pb2.ListAuditRequest())
    assert [(entry.verdict, entry.reason) for entry in reversed(listed.entries)] == [
        ("MADE", rule_id),
        ("REVOKED", rule_id),
    ]


async def test_rules_and_what_they_decide_are_in_the_audit_chain(registry: Registry) -> None:
    rule_id = await make(registry, ALLOW)
    await registry.check("pay")
    await registry.run("pay", rule_id=rule_id)
    await registry.rules["acme", "ann"].RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=rule_id))
    listed = (await registry.auditors["acme", "olga"].ListAudit(audit_pb2.ListAuditRequest())).entries
    told = sorted((entry.seq, entry.verdict, entry.reason) for entry in listed)
    assert [entry[1:] for entry in told] == [
        ("MADE", rule_id),
        ("RUN", f"rule {rule_id}"),
        ("RULE", rule_id),
        ("SUCCEEDED", ""),
        ("REVOKED", rule_id),
    ]
