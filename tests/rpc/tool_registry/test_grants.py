"""A grant: one approval for a series of calls, which the registry holds to exactly what was shown (I9, I10)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final

import asyncpg
import grpc
import pytest

from pawl.event.v1 import call_pb2
from pawl.tool.v1 import audit_pb2, execution_pb2, rule_pb2
from pawl.tool_registry.domain.definition import Category, EffectClass
from pawl.tool_registry.domain.source import read_policies
from pawl.tools import Tool, tool
from tests import databases
from tests.poll import until
from tests.rpc.tool_registry.registry import Registry, as_json, context, outcome, reason, running

RUN, APPROVE, REFUSE = (
    execution_pb2.DISPOSITION_RUN,
    execution_pb2.DISPOSITION_APPROVE,
    execution_pb2.DISPOSITION_REFUSE,
)


def tools(*, changed: bool = False) -> list[Tool[..., Any]]:
    @tool(description="Pay a bill now." if changed else "Pay a bill.")
    async def pay(amount: int = 1) -> str:
        return f"paid {amount}"

    @tool(category=Category.DESTRUCTIVE)
    async def erase() -> str:
        """Erase everything."""
        return "erased"

    @tool(category=Category.DESTRUCTIVE, effect=EffectClass.IDEMPOTENT, grants=True)
    async def rotate() -> str:
        """Delete the oldest log."""
        return "deleted"

    return [pay, erase, rotate]


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, tools()) as registry:
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
    proposed = execution_pb2.ProposedCall(
        call_id=call, tool_name=name, tool_version=1, arguments_json=as_json(arguments), series=of
    )
    request = execution_pb2.CheckCallsRequest(context=context(**who), calls=[proposed])
    (verdict,) = (await registry.execution.CheckCalls(request)).verdicts
    return verdict


async def refused(registry: Registry, call: str, of: call_pb2.Series, amount: int = 1) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await registry.run("pay", {"amount": amount}, call=call, series=of)
    return reason(caught.value)[1]


async def granted(registry: Registry, **terms: Any) -> call_pb2.Series:
    """The series of call_1, which a person has granted and which has begun."""
    verdict = await check(registry, "call_1", series(**terms))
    assert verdict.disposition == APPROVE
    of = series(verdict.series_digest, **terms)
    result = await registry.run("pay", {"amount": 1}, call="call_1", approved_digest=verdict.digest, series=of)
    assert outcome(result) == "SUCCEEDED"
    return of


async def test_calls_of_a_granted_series_run_without_another_approval_and_never_more(registry: Registry) -> None:
    of = await granted(registry)
    for number in (2, 3):
        verdict = await check(registry, f"call_{number}", of)
        assert (verdict.disposition, verdict.series_digest) == (RUN, of.digest)
        assert verdict.digest, "by which the ledger knows that it is gated"
        for _ in range(2):
            assert outcome(await registry.run("pay", {"amount": 1}, call=f"call_{number}", series=of)) == "SUCCEEDED"
    assert (await check(registry, "call_3", of)).disposition == RUN, "it is counted once"
    assert (await check(registry, "call_4", of)).disposition == APPROVE
    assert await refused(registry, "call_4", of) == "APPROVAL_REQUIRED"


async def test_of_calls_that_come_at_once_no_more_begin_than_were_granted(registry: Registry) -> None:
    of = await granted(registry, times=5)
    verdicts = await asyncio.gather(*(check(registry, f"at_once_{number}", of) for number in range(12)))
    assert sum(verdict.disposition == RUN for verdict in verdicts) == 4


async def test_a_grant_is_of_exactly_what_was_shown(registry: Registry) -> None:
    of = await granted(registry)
    others = [series(of.digest, times=4), series(of.digest, interval=1.0), series(of.digest, ends_in=3600)]
    for other in others:
        assert (await check(registry, "call_2", other)).disposition == APPROVE
        assert await refused(registry, "call_2", other) == "APPROVAL_REQUIRED"
    assert (await check(registry, "call_2", of, amount=2)).disposition == APPROVE
    assert await refused(registry, "call_2", of, amount=2) == "APPROVAL_REQUIRED"
    assert (await check(registry, "call_2", of, run="another")).disposition == APPROVE
    assert (await check(registry, "call_2", None)).series_digest == ""


async def test_it_holds_no_longer_than_it_was_given_for(registry: Registry) -> None:
    """But for a minute, for what was due before its end and is late."""
    for ends_in, disposition in ((-5.0, RUN), (-120.0, APPROVE)):
        shown = series(ends_in=ends_in)
        digest = (await check(registry, "call_1", shown)).series_digest
        shown.digest = digest
        assert (await check(registry, f"after_{ends_in:g}", shown)).disposition == disposition


async def test_a_destructive_tool_asks_each_time_unless_it_permits_grants(registry: Registry) -> None:
    assert (await check(registry, "one", series(), "erase")).series_digest == ""
    assert (await check(registry, "two", series(), "rotate")).series_digest != ""
    (found,) = read_policies(b'{"policies":[{"toolName":"*","permitsGrants":true}]}')
    assert found.permits_grants


async def test_deny_and_ask_reach_a_series_that_was_granted(registry: Registry) -> None:
    """A rule that asks asks for each call, and offers no grant."""
    of = await granted(registry, times=100)
    rules = registry.rules["acme", "ann"]
    for effect, disposition in ((rule_pb2.RULE_EFFECT_ASK, APPROVE), (rule_pb2.RULE_EFFECT_DENY, REFUSE)):
        assert (await check(registry, f"before_{effect}", of)).disposition == RUN
        rule = rule_pb2.Rule(effect=effect, scope=rule_pb2.RULE_SCOPE_USER, tool_name="pay")
        made = await rules.CreateRule(rule_pb2.CreateRuleRequest(rule=rule))
        verdict = await check(registry, f"after_{effect}", of)
        assert (verdict.disposition, verdict.series_digest) == (disposition, "")
        assert await refused(registry, f"before_{effect}", of) in {"APPROVAL_REQUIRED", "PERMISSION_DENIED"}
        await rules.RevokeRule(rule_pb2.RevokeRuleRequest(rule_id=made.rule.rule_id))


async def test_under_a_rule_that_allows_it_no_grant_is_used(registry: Registry) -> None:
    of = await granted(registry, times=2)
    rule = rule_pb2.Rule(effect=rule_pb2.RULE_EFFECT_ALLOW, scope=rule_pb2.RULE_SCOPE_USER, tool_name="pay")
    made = await registry.rules["acme", "ann"].CreateRule(rule_pb2.CreateRuleRequest(rule=rule))
    for number in range(5):
        verdict = await check(registry, f"allowed_{number}", of)
        assert (verdict.disposition, verdict.rule_id, verdict.series_digest) == (RUN, made.rule.rule_id, "")


async def test_a_new_version_of_the_tool_asks_again(database_url: str, tmp_path: Path) -> None:
    """Also of runs that go on with the older one; what is granted then is granted for both."""
    async with running(database_url, tmp_path, tools()) as registry:
        of = await granted(registry)
    async with running(database_url, tmp_path, tools(changed=True), name="b") as registry:
        verdict = await check(registry, "call_2", of)
        assert verdict.disposition == APPROVE
        assert verdict.series_digest not in {"", of.digest}
        assert await refused(registry, "call_2", of) == "APPROVAL_REQUIRED"
        anew = series(verdict.series_digest)
        assert (await check(registry, "call_3", anew)).disposition == RUN


# What stays of each iteration, with the column that counts them there.
_GROWING: Final = {"executions": "", "audit": "seq", "grant_uses": "number"}
_GROW: Final = """
INSERT INTO tool_registry.{table} SELECT (jsonb_populate_record(NULL::tool_registry.{table},
    to_jsonb(one) || jsonb_build_object('call_id', 'old_' || n, '{number}', 1000 + n))).*
FROM generate_series(1, 4000) AS n, (SELECT * FROM tool_registry.{table} LIMIT 1) AS one
"""
_TUPLES_READ: Final = """
SELECT (SELECT sum(seq_tup_read) FROM pg_stat_user_tables WHERE schemaname = 'tool_registry')
    + (SELECT sum(idx_tup_read) FROM pg_stat_user_indexes WHERE schemaname = 'tool_registry')
"""
_OTHERS: Final = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


@pytest.fixture
def new_url(postgres_url: str) -> Iterator[str]:
    """The URL of a database in which there never was a row."""
    with databases.ServiceDatabase(postgres_url, "tool_registry") as new:
        yield new.url


async def test_an_iteration_reads_nothing_of_those_before_it(new_url: str, tmp_path: Path) -> None:
    """The registry keeps 30 days of them. Before there are statistics, and by plans that were made for empty tables."""
    connection = await asyncpg.connect(new_url)
    for table in _GROWING:
        await connection.execute(f"ALTER TABLE tool_registry.{table} SET (autovacuum_enabled = false)")
    async with running(new_url, tmp_path, tools()) as registry:
        of = await granted(registry, times=100_000)
        for _ in range(2):
            await check(registry, "call_2", of)
            await registry.run("pay", {"amount": 1}, call="call_2", series=of)
        for table, column in _GROWING.items():
            await connection.execute(_GROW.format(table=table, number=column))
        before = await connection.fetchval(_TUPLES_READ)
        for number in range(10):
            await check(registry, f"new_{number}", of)
            for _ in range(2):
                result = await registry.run("pay", {"amount": 1}, call=f"new_{number}", series=of)
                assert outcome(result) == "SUCCEEDED"

    async def are_gone() -> bool:
        return not await connection.fetchval(_OTHERS)

    # Sessions tell what they have read when they end.
    await until(are_gone)
    read = await connection.fetchval(_TUPLES_READ) - before
    await connection.close()
    assert read < 2_000, "it would be 4,000 for each of several statements"


async def test_the_audit_chain_says_who_granted_and_names_the_grant_for_each_use(registry: Registry) -> None:
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
