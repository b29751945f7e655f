"""Where parts of the registry meet: questions and the cache, rules and duplicates, edits and gates."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pawl.tool.v1 import audit_pb2, execution_pb2, rule_pb2
from pawl.tool_registry.app.execution.executor import ExecutorOptions
from pawl.tool_registry.domain.definition import Category, EffectClass
from pawl.tools import Tool, ToolContext, tool
from tests.rpc.tool_registry.registry import Registry, as_json, content, context, outcome, running

RUN, APPROVE, REFUSE = (
    execution_pb2.DISPOSITION_RUN,
    execution_pb2.DISPOSITION_APPROVE,
    execution_pb2.DISPOSITION_REFUSE,
)


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
        """Say what the weather is."""
        return "rain in " + await context.ask("In which town?")

    runs = itertools.count(1)

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    async def fickle(context: ToolContext) -> str:
        """Ask something else each time it runs."""
        return await context.ask(f"Is it {next(runs)} o'clock?")

    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
    async def settling(context: ToolContext) -> str:
        """Ask something else only the first time it runs."""
        return await context.ask("In which street?" if next(runs) == 1 else "In which town?")

    @tool(category=Category.SAFE)
    async def order(context: ToolContext) -> str:
        """Order once it is known what, however long that takes."""
        return await context.ask("What shall it be?")

    return [pay, send, weather, fickle, settling, order]


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, _tools()) as registry:
        yield registry


def town(answer: str) -> list[execution_pb2.Answer]:
    """An answer to the question of `weather`."""
    return [execution_pb2.Answer(question="In which town?", answer=answer)]


async def allow(registry: Registry, user: str = "ann", **fields: Any) -> str:
    """Make a rule that allows `pay`; returns its id."""
    rule = rule_pb2.Rule(effect=rule_pb2.RULE_EFFECT_ALLOW, scope=rule_pb2.RULE_SCOPE_USER, tool_name="pay", **fields)
    answer = await registry.rules["acme", user].CreateRule(rule_pb2.CreateRuleRequest(rule=rule))
    return answer.rule.rule_id


async def check(
    registry: Registry, *calls: execution_pb2.ProposedCall, who: execution_pb2.CallContext | None = None
) -> list[execution_pb2.Verdict]:
    """Check a batch."""
    request = execution_pb2.CheckCallsRequest(context=who or context(), calls=calls)
    return list((await registry.execution.CheckCalls(request)).verdicts)


def two_people() -> execution_pb2.CallContext:
    """A run each of whose gated calls needs two people."""
    asked = context()
    asked.approvals_required = 2
    return asked


def proposed(call: str, name: str, arguments: Any = None, **fields: Any) -> execution_pb2.ProposedCall:
    """A call of version 1 of a tool."""
    return execution_pb2.ProposedCall(
        call_id=call, tool_name=name, tool_version=1, arguments_json=as_json(arguments), **fields
    )


async def test_a_question_is_no_result_that_is_given_again(registry: Registry) -> None:
    """Else the answer is never heard: the same question comes again until the cache forgets it."""
    assert outcome(await registry.run("weather")) == "INPUT_REQUIRED"
    answered = await registry.run("weather", answers=town("Delft"), earlier_attempts=1)
    assert (outcome(answered), content(answered)) == ("SUCCEEDED", "rain in Delft")


async def test_a_result_that_hangs_on_an_answer_is_not_given_to_a_call_that_has_not_asked(registry: Registry) -> None:
    await registry.run("weather", answers=town("Delft"), earlier_attempts=1)
    assert outcome(await registry.run("weather", call="other")) == "INPUT_REQUIRED"
    other = await registry.run("weather", call="other", answers=town("Bath"), earlier_attempts=1)
    assert content(other) == "rain in Bath"


async def test_a_call_that_asks_has_not_returned(registry: Registry) -> None:
    """ListAudit: RETURNED is the end of an execution, and the figures count ends."""
    await registry.run("weather")
    auditor = registry.auditors["acme", "olga"]
    request = audit_pb2.ListAuditRequest(kind=audit_pb2.AUDIT_KIND_RETURNED)
    assert list((await auditor.ListAudit(request)).entries) == []
    await registry.run("weather", answers=town("Delft"), earlier_attempts=1)
    assert [entry.verdict for entry in (await auditor.ListAudit(request)).entries] == ["SUCCEEDED"]
    (figures,) = (await auditor.GetToolAnalytics(audit_pb2.GetToolAnalyticsRequest())).tools
    assert (figures.execution_count, figures.error_count) == (1, 0)


async def test_a_duplicate_uses_no_rule(registry: Registry) -> None:
    """It is refused, so it is no call that the rule has allowed."""
    await allow(registry, uses_max=2)
    first, again = await check(registry, proposed("one", "pay"), proposed("two", "pay"))
    assert (first.disposition, again.disposition, again.error_reason) == (RUN, REFUSE, "DUPLICATE_CALL")
    (later,) = await check(registry, proposed("three", "pay"))
    assert later.disposition == RUN


async def test_a_rule_does_not_stand_for_the_two_people_that_a_run_needs(registry: Registry) -> None:
    """RunOptions.approvals_required, which a deployment can set: nobody lifts it for his own runs."""
    await allow(registry)
    (alone,) = await check(registry, proposed("one", "pay"))
    (both,) = await check(registry, proposed("two", "pay"), who=two_people())
    assert (alone.disposition, both.disposition, both.approvals_required) == (RUN, APPROVE, 2)


async def test_trust_mode_does_not_stand_for_them_either(registry: Registry) -> None:
    rule = rule_pb2.Rule(effect=rule_pb2.RULE_EFFECT_ALLOW, scope=rule_pb2.RULE_SCOPE_USER, tool_name="*")
    rule.expire_time.FromSeconds(int(time.time()) + 60)
    await registry.rules["acme", "ann"].CreateRule(rule_pb2.CreateRuleRequest(rule=rule))
    (both,) = await check(registry, proposed("two", "pay"), who=two_people())
    assert both.disposition == APPROVE


@pytest.mark.parametrize(
    ("roles", "disposition"),
    [((), RUN), (("approver",), RUN), (("member", "admin"), RUN), (("member",), APPROVE), (("viewer",), APPROVE)],
)
async def test_a_rule_of_somebody_who_may_not_approve_any_more_allows_nothing(
    registry: Registry, roles: tuple[str, ...], disposition: Any
) -> None:
    """A rule decides in place of its author, who could not decide this call himself."""
    await allow(registry)
    (verdict,) = await check(registry, proposed("one", "pay"), who=context(roles=roles))
    assert verdict.disposition == disposition


async def test_an_edited_call_has_its_digest_also_where_it_needs_no_approval_any_more(registry: Registry) -> None:
    """The ledger knows an approved call by its digest: an edit without one can be neither shown again nor begun."""
    many, few = {"to": ["a", "b", "c", "d"]}, {"to": ["a"]}
    (bulk,) = await check(registry, proposed("one", "send", many))
    assert bulk.disposition == APPROVE
    (edited,) = await check(registry, proposed("one", "send", few, edited=True))
    assert (edited.disposition, len(edited.digest)) == (RUN, 64)
    assert outcome(await registry.run("send", few, call="one", approved_digest=edited.digest)) == "SUCCEEDED"


async def until_it_ends(registry: Registry, name: str) -> tuple[execution_pb2.ExecutionResult, int]:
    """Answer whatever a tool asks, as a run does; returns how it ended, and after how many answers."""
    given: list[execution_pb2.Answer] = []
    while True:
        result = await registry.run(name, answers=given, earlier_attempts=len(given))
        if outcome(result) != "INPUT_REQUIRED" or len(given) == 100:
            return result, len(given)
        given.append(execution_pb2.Answer(question=result.question.question, answer="yes"))


async def test_a_tool_that_asks_something_else_each_time_comes_to_an_end(registry: Registry) -> None:
    """It is told that it must not; its user must not be asked for ever."""
    result, count = await until_it_ends(registry, "fickle")
    assert (outcome(result), count) == ("FAILED TOOL_ERROR", 20)


async def test_an_answer_is_found_behind_those_to_what_is_asked_no_more(registry: Registry) -> None:
    result, count = await until_it_ends(registry, "settling")
    assert (outcome(result), content(result), count) == ("SUCCEEDED", "yes", 2)


async def test_calls_that_wait_for_people_take_no_place_from_calls_that_run(database_url: str, tmp_path: Path) -> None:
    """An answer may take days: a user who gives none would else keep the tools of all stores from running."""
    options = ExecutorOptions(executions_max=2)
    async with running(database_url, tmp_path, _tools(), options=options) as registry:
        for number in range(5):
            assert outcome(await registry.run("order", call=f"order-{number}")) == "INPUT_REQUIRED"
        assert outcome(await registry.run_approved("pay", call="pay")) == "SUCCEEDED"
        answer = execution_pb2.Answer(question="What shall it be?", answer="tea")
        for number in range(5):
            assert content(await registry.run("order", call=f"order-{number}", answers=[answer])) == "tea"
