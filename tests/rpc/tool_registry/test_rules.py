"""Rules of users (HITL-5), stores and agents (TOOL-6) that decide future calls, and grants of series."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pawl.event.v1 import call_pb2
from pawl.tool.v1 import audit_pb2, execution_pb2, rule_pb2
from pawl.tool_registry.policy.rules import rules
from tests.rpc.tool_registry.registry import (
    APPROVE,
    FOR_ANN,
    REFUSE,
    RUN,
    Registry,
    all_pages,
    context,
    outcome,
    proposed,
    refusal,
    running,
)
from tests.rpc.tool_registry.world import bills

ALLOW, ASK, DENY = rule_pb2.RULE_EFFECT_ALLOW, rule_pb2.RULE_EFFECT_ASK, rule_pb2.RULE_EFFECT_DENY
USER, STORE, AGENT = rule_pb2.RULE_SCOPE_USER, rule_pb2.RULE_SCOPE_STORE, rule_pb2.RULE_SCOPE_AGENT


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, bills()) as registry:
        yield registry


async def make(registry: Registry, effect: Any, who: str = "ann", *, store: str = "acme", **fields: Any) -> str:
    expires_in = fields.pop("expires_in", None)
    said: dict[str, Any] = {"scope": USER, "tool_name": "pay"} | fields
    rule = rule_pb2.Rule(effect=effect, **said)
    if expires_in is not None:
        rule.expire_time.FromMicroseconds(int((time.time() + expires_in) * 1e6))
    return (await registry.rules[store, who].CreateRule(rule_pb2.CreateRuleRequest(rule=rule))).rule.rule_id


async def test_allowed_call_runs_without_approval_until_its_rule_is_revoked(registry: Registry) -> None:
    assert (await registry.check("pay")).disposition == APPROVE
    rule_id = await make(registry, ALLOW)
    for claimed in (rule_id, "rule_x"):
        unchecked = registry.run("pay", call="unchecked", rule_id=claimed)
        assert await refusal(unchecked) == "APPROVAL_REQUIRED", "no rule has allowed this call"
    verdict = await registry.check("pay")
    assert (verdict.disposition, verdict.rule_id, verdict.digest) == (RUN, rule_id, "")
    await registry.check("pay", call="two")
    (edit,) = await registry.verdicts(proposed("edited", "pay", edited=True))
    assert (edit.disposition, bool(edit.digest)) == (APPROVE, True), "no rule allows an edited call"
    assert outcome(await registry.run("pay", rule_id=rule_id)) == "SUCCEEDED"
    await registry.rules["acme", "ann"].RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=rule_id))
    assert await refusal(registry.run("pay", call="two", rule_id=rule_id)) == "APPROVAL_REQUIRED"
    # A call that has started returns its result and does not run again.
    assert outcome(await registry.run("pay", rule_id=rule_id)) == "SUCCEEDED"
    assert (await registry.check("pay", call="three")).disposition == APPROVE


async def test_deny_overrides_everything_including_approved_calls(registry: Registry) -> None:
    digest = (await registry.check("pay")).digest
    await make(registry, ALLOW)
    rule_id = await make(registry, DENY, "root", scope=STORE)
    verdict = await registry.check("pay", call="new")
    assert (verdict.disposition, verdict.error_reason, verdict.rule_id) == (REFUSE, "NOT_ALLOWED", rule_id)
    assert await refusal(registry.run("pay", approved_digest=digest)) == "PERMISSION_DENIED"
    assert (await registry.check("pay", store="other")).disposition == APPROVE


async def test_each_call_counts_as_one_use_and_a_used_up_rule_requires_approval(registry: Registry) -> None:
    await make(registry, ALLOW, uses_max=2)
    for call in ("one", "one", "two", "one"):
        assert (await registry.check("pay", call=call)).disposition == RUN
    await registry.forget_rule_uses(0)
    assert (await registry.check("pay", call="three")).disposition == APPROVE, "also after the calls are deleted"
    (rule,) = (await registry.rules["acme", "ann"].ListRules(rule_pb2.ListRulesRequest(include_ended=True))).rules
    assert rule.uses == 2


async def test_new_version_of_the_tool_suspends_the_rule(registry: Registry, database_url: str, tmp_path: Path) -> None:
    await make(registry, ALLOW)
    await make(registry, ALLOW, tool_name="*", expires_in=60)
    async with running(database_url, tmp_path, bills(changed=True), name="b") as newer:
        for version in (1, 2):
            assert (await newer.check("pay", version=version)).disposition == APPROVE
        listed = (await newer.rules["acme", "ann"].ListRules(rule_pb2.ListRulesRequest())).rules
        assert [rule.suspended for rule in listed] == [False, True]


async def test_rule_names_the_approval_that_created_it(registry: Registry) -> None:
    await make(registry, ALLOW, call_id="approved")
    (rule,) = (await registry.rules["acme", "ann"].ListRules(rule_pb2.ListRulesRequest())).rules
    assert rule.call_id == "approved"
    request = audit_pb2.ListAuditRequest(call_id="approved", kind=audit_pb2.AUDIT_KIND_RULE)
    (entry,) = (await registry.auditors["acme", "root"].ListAudit(request)).entries
    assert (entry.verdict, entry.reason) == ("MADE", rule.rule_id)
    rows: list[tuple[str, dict[str, Any], str]] = [
        ("ann", {"call_id": "another"}, "CALL_NOT_FOUND"),
        ("bob", {"call_id": "approved"}, "CALL_NOT_FOUND"),
        ("ann", {"tool_name": "erase", "call_id": "approved"}, "INVALID_FIELD"),
        ("ann", {"call_id": "a/b"}, "INVALID_FIELD"),
    ]
    for who, fields, why in rows:
        assert await refusal(make(registry, ALLOW, who, **fields)) == why, fields


async def test_rule_quotas_of_users_and_the_store_are_separate(
    registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "RULES_MAX", 3)
    monkeypatch.setattr(rules, "RULES_OF_USER_MAX", 2)
    request = rule_pb2.CreateRuleRequest(request_id="r1", rule=rule_pb2.Rule(effect=ALLOW, scope=USER, tool_name="pay"))
    first = (await registry.rules["acme", "ann"].CreateRule(request)).rule.rule_id
    made = await asyncio.gather(*(make(registry, ALLOW) for _ in range(6)), return_exceptions=True)
    assert sum(isinstance(each, str) for each in made) == 1, "also for rules created concurrently"
    assert (await registry.rules["acme", "ann"].CreateRule(request)).rule.rule_id == first
    await make(registry, ALLOW, "bob")
    assert await refusal(make(registry, ALLOW, "bob")) == "INVALID_FIELD"
    for _ in range(3):
        await make(registry, DENY, "root", scope=STORE)
    assert await refusal(make(registry, DENY, "root", scope=STORE)) == "INVALID_FIELD"
    await registry.rules["acme", "ann"].RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=first))
    await make(registry, ALLOW, "bob")


async def test_rule_applies_only_in_its_scope(registry: Registry) -> None:
    run, conversation = rule_pb2.RULE_SCOPE_RUN, rule_pb2.RULE_SCOPE_CONVERSATION
    await make(registry, ALLOW, scope=run, scope_id="run")
    assert (await registry.check("pay", run="run")).disposition == RUN
    elsewhere: tuple[dict[str, Any], ...] = (
        {"run": "other"},
        {"run": "run", "user": "bob"},
        {"run": "run", "store": "other"},
    )
    for who in elsewhere:
        assert (await registry.check("pay", **who)).disposition == APPROVE, who
    await make(registry, ALLOW, scope=conversation, scope_id="conversation")
    for user, scope, scope_id, why in (
        ("ann", run, "absent", "RUN_NOT_FOUND"),
        ("bob", run, "run", "RUN_NOT_FOUND"),
        ("ann", conversation, "absent", "CONVERSATION_NOT_FOUND"),
    ):
        assert await refusal(make(registry, DENY, user, scope=scope, scope_id=scope_id)) == why


async def test_only_deciders_create_and_revoke_rules(registry: Registry) -> None:
    assert await refusal(make(registry, ALLOW, "vic")) == "PERMISSION_DENIED"
    assert await refusal(make(registry, ALLOW, "ann", scope=STORE)) == "PERMISSION_DENIED"
    rule_id = await make(registry, DENY, "root", scope=STORE)
    for store, user, revoked, why in (
        ("acme", "bob", rule_id, "PERMISSION_DENIED"),
        ("acme", "vic", rule_id, "PERMISSION_DENIED"),
        ("other", "ann", rule_id, "RULE_NOT_FOUND"),
        ("acme", "bob", await make(registry, ALLOW), "RULE_NOT_FOUND"),
    ):
        assert await refusal(registry.rules[store, user].RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=revoked))) == why


async def test_delegate_without_decisions_cannot_relax_rules(registry: Registry) -> None:
    """ALLOW rules approve calls in advance, and ASK and DENY rules can be relaxed by revoking them."""
    shop = registry.rules["acme", "shop"]
    asks, allows = await make(registry, ASK), await make(registry, ALLOW)
    allow = rule_pb2.CreateRuleRequest(rule=rule_pb2.Rule(effect=ALLOW, scope=USER, tool_name="pay"))
    own = await make(registry, DENY, "shop")
    for metadata in (FOR_ANN, ()):
        revoke = rule_pb2.RevokeRuleRequest(rule_id=asks if metadata else own)
        for call in (shop.CreateRule(allow, metadata=metadata), shop.RevokeRule(revoke, metadata=metadata)):
            assert await refusal(call) == "PERMISSION_DENIED"
    await shop.RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=allows), metadata=FOR_ANN)
    ask = rule_pb2.CreateRuleRequest(rule=rule_pb2.Rule(effect=ASK, scope=USER, tool_name="look"))
    assert (await shop.CreateRule(ask, metadata=FOR_ANN)).rule.user_id == "ann"
    entries = (await registry.auditors["acme", "olga"].ListAudit(audit_pb2.ListAuditRequest())).entries
    named = [(entry.verdict, entry.by_user_id, entry.by_delegate_user_id) for entry in entries]
    assert named[:2] == [("MADE", "ann", "shop"), ("REVOKED", "ann", "shop")]
    assert len({entry.by_credential_id for entry in entries}) == 2


async def test_invalid_rule_is_rejected(registry: Registry) -> None:
    rows: list[dict[str, Any]] = [
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
        {"arguments": [rule_pb2.ArgumentPattern(argument="absent", glob="*")]},
        {"effect": DENY, "arguments": [rule_pb2.ArgumentPattern(argument="absent", glob="*")]},
        {"arguments": [rule_pb2.ArgumentPattern(argument="to", glob="[ab]")]},
        {"arguments": [rule_pb2.ArgumentPattern(argument="to", equals_json=b"{")]},
        {"reason": "\0"},
        {"expires_in": -2e9},
    ]
    for fields in rows:
        assert await refusal(make(registry, fields.pop("effect", ALLOW), **fields)) == "INVALID_FIELD", fields
    assert await refusal(make(registry, ALLOW, tool_name="nothing")) == "TOOL_NOT_FOUND"


async def test_rules_are_listed_in_pages_to_affected_users(registry: Registry) -> None:
    made = [await make(registry, ALLOW) for _ in range(3)] + [await make(registry, DENY, "root", scope=STORE)]
    await make(registry, ALLOW, "bob")
    ann = registry.rules["acme", "ann"]
    seen = await all_pages(ann.ListRules, rule_pb2.ListRulesRequest(page_size=2), "rules")
    assert [rule.rule_id for rule in seen] == made[::-1]
    assert await refusal(ann.ListRules(rule_pb2.ListRulesRequest(all_users=True))) == "PERMISSION_DENIED"
    assert len((await registry.rules["acme", "root"].ListRules(rule_pb2.ListRulesRequest(all_users=True))).rules) == 5
    assert not (await registry.rules["other", "ann"].ListRules(rule_pb2.ListRulesRequest())).rules


async def test_rules_and_their_decisions_are_recorded_once_in_the_audit_chain(registry: Registry) -> None:
    request = rule_pb2.CreateRuleRequest(request_id="r1", rule=rule_pb2.Rule(effect=ALLOW, scope=USER, tool_name="pay"))
    ann = registry.rules["acme", "ann"]
    (rule_id,) = {(await ann.CreateRule(request)).rule.rule_id for _ in range(3)}
    request.rule.tool_name = "erase"
    assert await refusal(ann.CreateRule(request)) == "REQUEST_ID_REUSED"
    await registry.check("pay")
    await registry.run("pay", rule_id=rule_id)
    denying = await make(registry, DENY, tool_name="look")
    await registry.check("look", call="two")
    asking = await make(registry, ASK)
    await registry.check("pay", call="three")
    for _ in range(3):
        assert (await ann.RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=rule_id))).rule.HasField("revoke_time")
    listed = (await registry.auditors["acme", "olga"].ListAudit(audit_pb2.ListAuditRequest())).entries
    assert [(entry.verdict, entry.reason) for entry in reversed(listed)] == [
        ("MADE", rule_id),
        ("RUN", f"rule {rule_id}"),
        ("RULE", rule_id),
        ("SUCCEEDED", ""),
        ("MADE", denying),
        ("REFUSE", f"NOT_ALLOWED, rule {denying}"),
        ("MADE", asking),
        ("APPROVE", f"category SENSITIVE, rule {asking}"),
        ("REVOKED", rule_id),
    ]


async def test_agent_rule_applies_to_all_users_runs(registry: Registry) -> None:
    rule_id = await make(registry, ALLOW, "root", scope=AGENT, scope_id="clerk")
    for user in ("ann", "bob"):
        verdict = await registry.check("pay", call=user, user=user, agent="clerk")
        assert (verdict.disposition, verdict.rule_id) == (RUN, rule_id)
    rows: list[dict[str, Any]] = [
        {"agent": "counter"},
        {"agent": "default"},
        {"agent": "clerk", "store": "other"},
        {"agent": "counter", "above": ["clerk"]},  # A delegating agent does not pass on its permissions
    ]
    for number, who in enumerate(rows):
        assert (await registry.check("pay", call=f"c{number}", **who)).disposition == APPROVE, who
    assert outcome(await registry.run("pay", call="ann", rule_id=rule_id, who=context(agent="clerk"))) == "SUCCEEDED"


async def test_admins_create_list_and_revoke_agent_rules(registry: Registry) -> None:
    rows: list[tuple[str, dict[str, str], str]] = [
        *((who, {}, "PERMISSION_DENIED") for who in ("ann", "apu", "vic")),
        ("root", {"scope_id": "nobody"}, "AGENT_NOT_FOUND"),
        ("root", {"store": "other"}, "AGENT_NOT_FOUND"),
        ("root", {"scope_id": ""}, "INVALID_FIELD"),
        ("root", {"scope_id": "no name"}, "INVALID_FIELD"),
    ]
    for who, fields, why in rows:
        assert await refusal(make(registry, DENY, who, scope=AGENT, **({"scope_id": "clerk"} | fields))) == why, fields
    rule_id = await make(registry, DENY, "root", scope=AGENT, scope_id="clerk", tool_name="look")
    (listed,) = (await registry.rules["acme", "ann"].ListRules(rule_pb2.ListRulesRequest())).rules
    assert (listed.rule_id, listed.scope, listed.scope_id, listed.user_id) == (rule_id, AGENT, "clerk", "root")
    revoke = rule_pb2.RevokeRuleRequest(rule_id=rule_id)
    assert await refusal(registry.rules["acme", "ann"].RevokeRule(revoke)) == "PERMISSION_DENIED"
    await registry.rules["acme", "root"].RevokeRule(revoke)
    assert (await registry.check("look", call="after", agent="clerk")).disposition == RUN


async def figures(registry: Registry, **fields: Any) -> list[tuple[str, str, int]]:
    request = audit_pb2.GetToolAnalyticsRequest(**fields)
    found = (await registry.auditors["acme", "olga"].GetToolAnalytics(request)).tools
    return [(each.agent_name, each.tool_name, each.execution_count) for each in found]


async def test_analytics_separate_agents_and_the_audit_chain_names_them(registry: Registry) -> None:
    for number, agent in enumerate(("clerk", "clerk", "counter", "default")):
        await registry.run("look", call=f"c{number}", who=context(agent=agent))
    assert await figures(registry) == [("", "look", 4)]
    assert await figures(registry, by_agent=True) == [
        ("clerk", "look", 2),
        ("counter", "look", 1),
        ("default", "look", 1),
    ]
    assert await figures(registry, agent_name="clerk") == [("", "look", 2)]
    auditor = registry.auditors["acme", "olga"]
    entries = (await auditor.ListAudit(audit_pb2.ListAuditRequest(agent_name="counter"))).entries
    assert {(entry.call_id, entry.agent_name) for entry in entries} == {("c2", "counter")}
    assert not [answer async for answer in auditor.VerifyAudit(audit_pb2.VerifyAuditRequest())][-1].HasField("problem")


def series(
    digest: str = "", *, times: int = 3, interval: float = 60.0, ends_in: float | None = None
) -> call_pb2.Series:
    made = call_pb2.Series(digest=digest, interval_seconds=interval, iterations_max=times)
    if digest:
        made.grant_call_id = "call_1"
    if ends_in is not None:
        made.end_time.FromSeconds(int(time.time() + ends_in))
    return made


async def check(
    registry: Registry, call: str, of: call_pb2.Series | None, name: str = "pay", amount: int = 1, **who: Any
) -> execution_pb2.Verdict:
    arguments = {"amount": amount} if name == "pay" else {}
    (verdict,) = await registry.verdicts(proposed(call, name, arguments, series=of), who=context(**who))
    return verdict


async def granted(registry: Registry, **terms: Any) -> call_pb2.Series:
    """Return the series of call_1, which a person has granted and which has started."""
    verdict = await check(registry, "call_1", series(**terms))
    assert verdict.disposition == APPROVE
    of = series(verdict.series_digest, **terms)
    result = await registry.run("pay", {"amount": 1}, call="call_1", approved_digest=verdict.digest, series=of)
    assert outcome(result) == "SUCCEEDED"
    return of


async def refused(registry: Registry, call: str, of: call_pb2.Series, amount: int = 1) -> str:
    return await refusal(registry.run("pay", {"amount": amount}, call=call, series=of))


async def test_granted_series_runs_without_further_approvals_up_to_its_limit(database_url: str, tmp_path: Path) -> None:
    async with running(database_url, tmp_path, bills()) as registry:
        of = await granted(registry)
        for number in (2, 3):
            verdict = await check(registry, f"call_{number}", of)
            assert (verdict.disposition, verdict.series_digest) == (RUN, of.digest)
            assert verdict.digest, "so that the ledger knows that it is gated"
            for _ in range(2):
                done = await registry.run("pay", {"amount": 1}, call=f"call_{number}", series=of)
                assert outcome(done) == "SUCCEEDED"
        assert (await check(registry, "call_3", of)).disposition == RUN, "it is counted once"
        assert (await check(registry, "call_4", of)).disposition == APPROVE
        assert await refused(registry, "call_4", of) == "APPROVAL_REQUIRED"
    async with running(database_url, tmp_path, bills(changed=True), name="b") as registry:
        # A new version needs a new approval, even in runs with the older version. That grant covers both versions.
        verdict = await check(registry, "call_5", of)
        assert verdict.disposition == APPROVE
        assert verdict.series_digest not in {"", of.digest}
        assert await refused(registry, "call_5", of) == "APPROVAL_REQUIRED"
        assert (await check(registry, "call_6", series(verdict.series_digest))).disposition == RUN


async def test_concurrent_calls_never_exceed_the_grant(registry: Registry) -> None:
    of = await granted(registry, times=5)
    verdicts = await asyncio.gather(*(check(registry, f"at_once_{number}", of) for number in range(12)))
    assert sum(verdict.disposition == RUN for verdict in verdicts) == 4


async def test_grant_expires_and_covers_exactly_what_was_shown(registry: Registry) -> None:
    of = await granted(registry)
    for other in (series(of.digest, times=4), series(of.digest, interval=1.0), series(of.digest, ends_in=3600)):
        assert (await check(registry, "call_2", other)).disposition == APPROVE
        assert await refused(registry, "call_2", other) == "APPROVAL_REQUIRED"
    assert (await check(registry, "call_2", of, amount=2)).disposition == APPROVE
    assert await refused(registry, "call_2", of, amount=2) == "APPROVAL_REQUIRED"
    assert (await check(registry, "call_2", of, run="another")).disposition == APPROVE
    assert (await check(registry, "call_2", None)).series_digest == ""
    # Calls that were due before the end may start up to a minute late.
    for ends_in, disposition in ((-5.0, RUN), (-120.0, APPROVE)):
        shown = series(ends_in=ends_in)
        shown.digest = (await check(registry, "call_1", shown)).series_digest
        assert (await check(registry, f"after_{ends_in:g}", shown)).disposition == disposition
    assert (await check(registry, "one", series(), "erase")).series_digest == "", (
        "destructive calls need approval each time"
    )
    assert (await check(registry, "two", series(), "rotate")).series_digest != "", "unless it permits grants"


async def test_rules_take_precedence_over_a_grant(registry: Registry) -> None:
    """If a rule has the effect ASK, each call needs its own approval and no grant is offered."""
    of = await granted(registry, times=2)
    rules = registry.rules["acme", "ann"]
    for name, disposition in (("ALLOW", RUN), ("ASK", APPROVE), ("DENY", REFUSE)):
        effect = rule_pb2.RuleEffect.Value(f"RULE_EFFECT_{name}")
        rule = rule_pb2.Rule(effect=effect, scope=rule_pb2.RULE_SCOPE_USER, tool_name="pay")
        made = await rules.CreateRule(rule_pb2.CreateRuleRequest(rule=rule))
        for number in range(3):
            verdict = await check(registry, f"{name}_{number}", of)
            assert (verdict.disposition, verdict.series_digest) == (disposition, "")
        if name != "ALLOW":
            assert await refused(registry, "unchecked", of) in {"APPROVAL_REQUIRED", "PERMISSION_DENIED"}
        await rules.RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=made.rule.rule_id))


async def test_audit_chain_names_the_author_and_grant_for_each_use(registry: Registry) -> None:
    of = await granted(registry)
    decision = execution_pb2.RecordedDecision(
        call_id="call_1",
        tool_name="pay",
        tool_version=1,
        kind=call_pb2.DECISION_KIND_APPROVE,
        user_id="apu",
        arguments_json=b'{"amount":1}',
        for_series=True,
    )
    await registry.execution.RecordDecisions(
        execution_pb2.RecordDecisionsRequest(context=context(), decisions=[decision])
    )
    await check(registry, "call_2", of)
    await registry.run("pay", {"amount": 1}, call="call_2", series=of)
    listed = await registry.auditors["acme", "root"].ListAudit(audit_pb2.ListAuditRequest())
    assert {
        ("call_1", "APPROVE", "grant call_1", "apu"),
        ("call_2", "RUN", "category SENSITIVE, grant call_1", ""),
        ("call_2", "GRANT", "grant call_1", ""),
    } <= {(entry.call_id, entry.verdict, entry.reason, entry.by_user_id) for entry in reversed(listed.entries)}
