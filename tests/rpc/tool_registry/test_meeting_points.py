"""Combinations of the registry's features: questions and the cache, rules and duplicates, edits and gates."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pawl.tool.v1 import audit_pb2, execution_pb2, rule_pb2
from pawl.tool_registry.execution.executor import ExecutorOptions
from pawl.tools import Tool, ToolContext, tool
from pawl.values import Category, EffectClass
from tests.rpc.tool_registry.registry import APPROVE, RUN, Registry, content, context, outcome, proposed, running

TOWN = [execution_pb2.Answer(question="In which town?", answer="Delft")]


def _tools() -> list[Tool[..., Any]]:
    @tool
    async def pay(amount: int = 1) -> str:
        """Pay a bill."""
        return f"paid {amount}"

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
    async def send(to: list[str]) -> int:
        """Send a letter to each."""
        return len(to)

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, cache_seconds=60.0)
    async def weather(context: ToolContext) -> str:
        """Return the weather."""
        return "rain in " + await context.ask("In which town?")

    runs = itertools.count(1)

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    async def fickle(context: ToolContext, settles: bool) -> str:
        """Ask a new question each time, or only the first time."""
        number = next(runs)
        return await context.ask("In which town?" if settles and number > 1 else f"Is it {number} o'clock?")

    @tool(category=Category.SAFE)
    async def order(context: ToolContext) -> str:
        """Order after a question, however long the answer takes."""
        return await context.ask("What shall it be?")

    return [pay, send, weather, fickle, order]


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, _tools(), options=ExecutorOptions(executions_max=2)) as registry:
        yield registry


async def allow(registry: Registry, **fields: Any) -> None:
    """Create a rule of ann that allows `pay`. A rule for any tool expires after a minute."""
    rule = rule_pb2.Rule(effect=rule_pb2.RULE_EFFECT_ALLOW, scope=rule_pb2.RULE_SCOPE_USER)
    rule.MergeFrom(rule_pb2.Rule(**{"tool_name": "pay"} | fields))
    if rule.tool_name == "*":
        rule.expire_time.FromSeconds(int(time.time()) + 60)
    await registry.rules["acme", "ann"].CreateRule(rule_pb2.CreateRuleRequest(rule=rule))


async def check(
    registry: Registry,
    *calls: str,
    tool: str = "pay",
    arguments: Any = None,
    who: execution_pb2.CallContext | None = None,
    **fields: Any,
) -> list[execution_pb2.Verdict]:
    return await registry.verdicts(*(proposed(call, tool, arguments, **fields) for call in calls), who=who)


async def test_questions_and_answers_are_never_reused_for_another_call(registry: Registry) -> None:
    """RETURNED entries and the analytics do not count executions that end with a question."""
    auditor = registry.auditors["acme", "olga"]
    request = audit_pb2.ListAuditRequest(kind=audit_pb2.AUDIT_KIND_RETURNED)
    assert outcome(await registry.run("weather")) == "INPUT_REQUIRED"
    assert list((await auditor.ListAudit(request)).entries) == []
    answered = await registry.run("weather", answers=TOWN, earlier_attempts=1)
    assert (outcome(answered), content(answered)) == ("SUCCEEDED", "rain in Delft")
    assert [entry.verdict for entry in (await auditor.ListAudit(request)).entries] == ["SUCCEEDED"]
    (figures,) = (await auditor.GetToolAnalytics(audit_pb2.GetToolAnalyticsRequest())).tools
    assert (figures.execution_count, figures.error_count) == (1, 0)
    assert outcome(await registry.run("weather", call="other")) == "INPUT_REQUIRED", "another call has not asked"


async def test_duplicate_call_does_not_count_as_a_rule_use(registry: Registry) -> None:
    """A duplicate is rejected, so the rule did not allow it."""
    await allow(registry, uses_max=2)
    first, again = await check(registry, "one", "two")
    assert (first.disposition, again.error_reason) == (RUN, "DUPLICATE_CALL")
    (later,) = await check(registry, "three")
    assert later.disposition == RUN


async def test_a_rule_does_not_replace_a_second_approver_or_an_unauthorized_author(registry: Registry) -> None:
    """A rule decides with the permissions of its author, who can never bypass approvals_required in their own runs."""
    rows: list[tuple[execution_pb2.CallContext, Any]] = [
        (context(roles=roles), disposition)
        for roles, disposition in (
            ((), RUN),
            (("approver",), RUN),
            (("member", "admin"), RUN),
            (("member",), APPROVE),
            (("viewer",), APPROVE),
        )
    ]
    two_people = context()
    two_people.approvals_required = 2
    for name in ("pay", "*"):
        await allow(registry, tool_name=name)
        for number, (who, disposition) in enumerate([*rows, (two_people, APPROVE)]):
            (verdict,) = await check(registry, f"c{number}", who=who)
            assert verdict.disposition == disposition, who
        assert verdict.approvals_required == 2


async def test_edited_call_has_its_own_digest_even_without_approval(registry: Registry) -> None:
    """The ledger identifies an approved call by its digest, so without one it could not be shown or started."""
    few = {"to": ["a"]}
    (bulk,) = await check(registry, "one", tool="send", arguments={"to": ["a", "b", "c", "d"]})
    assert bulk.disposition == APPROVE
    (edited,) = await check(registry, "one", tool="send", arguments=few, edited=True)
    assert (edited.disposition, len(edited.digest)) == (RUN, 64)
    assert outcome(await registry.run("send", few, call="one", approved_digest=edited.digest)) == "SUCCEEDED"


@pytest.mark.parametrize(("settles", "expected", "count"), [(False, "FAILED TOOL_ERROR", 20), (True, "SUCCEEDED", 2)])
async def test_tool_that_keeps_asking_new_questions_is_stopped(
    registry: Registry, settles: bool, expected: str, count: int
) -> None:
    """Earlier answers are skipped to find the answer to the current question."""
    given: list[execution_pb2.Answer] = []
    result = await registry.run("fickle", {"settles": settles})
    while outcome(result) == "INPUT_REQUIRED" and len(given) < 100:
        given.append(execution_pb2.Answer(question=result.question.question, answer="yes"))
        result = await registry.run("fickle", {"settles": settles}, answers=given, earlier_attempts=len(given))
    assert (outcome(result), len(given)) == (expected, count)


async def test_calls_waiting_for_answers_do_not_use_slots(registry: Registry) -> None:
    """Otherwise unanswered questions, which may stay open for days, would block the tools of all stores."""
    for number in range(5):
        assert outcome(await registry.run("order", call=f"order-{number}")) == "INPUT_REQUIRED"
    assert outcome(await registry.run_approved("pay", call="pay")) == "SUCCEEDED"
    answer = execution_pb2.Answer(question="What shall it be?", answer="tea")
    for number in range(5):
        assert content(await registry.run("order", call=f"order-{number}", answers=[answer])) == "tea"
