"""A grant is one approval for a series of calls, limited to exactly what was shown (I9, I10)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pawl.event.v1 import call_pb2
from pawl.tool.v1 import audit_pb2, execution_pb2, rule_pb2
from tests.rpc.tool_registry.registry import (
    APPROVE,
    REFUSE,
    RUN,
    Registry,
    context,
    outcome,
    proposed,
    refusal,
    running,
)
from tests.rpc.tool_registry.world import bills


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, bills()) as registry:
        yield registry


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
    said = [(entry.call_id, entry.verdict, entry.reason, entry.by_user_id) for entry in reversed(listed.entries)]
    assert ("call_1", "APPROVE", "grant call_1", "apu") in said
    assert ("call_2", "RUN", "category SENSITIVE, grant call_1", "") in said
    assert ("call_2", "GRANT", "grant call_1", "") in said
