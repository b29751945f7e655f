"""Verdicts on the calls of a batch, and combinations of features (TOOL-5, HITL-1, HITL-2, HITL-3, D8)."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pawl.event.v1 import call_pb2
from pawl.tool.v1 import audit_pb2, execution_pb2, rule_pb2, tool_pb2
from pawl.tool_registry.builtin.agents import agent_tools
from pawl.tool_registry.builtin.question import question_tools
from pawl.tool_registry.execution.executor import ExecutorOptions
from pawl.tools import Category, EffectClass, Tool, ToolContext, tool
from tests.rpc.tool_registry.registry import (
    APPROVE,
    ASK,
    OFFER,
    REFUSE,
    RUN,
    Registry,
    content,
    context,
    front_end_tool,
    outcome,
    proposed,
    refusal,
    running,
)


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, timeout_seconds=3, resource_keys=["path:{path}"])
def write(path: str, size: int = 0, lines: list[str] = []) -> str:  # noqa: B006
    """Write a file."""
    return f"{path}{size}{lines}"


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
def read(paths: list[str]) -> str:
    """Read files."""
    return " ".join(paths)


def preview(path: str) -> str:
    if path == "break":
        raise RuntimeError("secret")
    return f"would delete {path}"


@tool(category=Category.DESTRUCTIVE, preview=preview)
def delete(path: str) -> str:
    """Delete a file."""
    return path


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, bulk_count=lambda names: names.count(",") + 1)
def invite(names: str) -> str:
    """Invite people, separated by commas."""
    return names


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, allowed_users=["bob"])
def private() -> str:
    """Only for bob."""
    return ""


@pytest.fixture
async def registry(database_url: str, tmp_path: Path) -> Any:
    tools: list[Tool[..., Any]] = [write, read, delete, invite, private, *question_tools(), *agent_tools()]
    async with running(database_url, tmp_path, tools) as registry:
        yield registry


async def test_verdict_on_a_valid_call_has_everything_its_run_needs(registry: Registry) -> None:
    verdict = await registry.check("write", {"path": "a", "size": "440"})
    assert (verdict.disposition, verdict.arguments_json) == (RUN, b'{"lines":[],"path":"a","size":440}')
    assert verdict.note == 'Arguments were adjusted: size: "440" was read as 440'
    assert (verdict.context, verdict.category) == (call_pb2.EXECUTION_CONTEXT_BACKEND, call_pb2.TOOL_CATEGORY_SAFE)
    assert verdict.effect_class == call_pb2.EFFECT_CLASS_IDEMPOTENT
    assert (verdict.tool_version, verdict.timeout_seconds, verdict.parallel) == (1, 3.0, False)
    assert verdict.resource_keys == ["path:a"]
    assert (verdict.digest, verdict.preview, verdict.approval_cause) == ("", "", "")


async def test_gated_and_bulk_calls_show_their_reason_and_preview(registry: Registry) -> None:
    """HITL-2, D8, LOOP-9: read-only calls may run in parallel and are never bulk."""
    for name, arguments, disposition, cause in (
        ("read", {"paths": ["a", "b", "c", "d"]}, RUN, ""),
        ("delete", {"path": "a"}, APPROVE, "category DESTRUCTIVE"),
        ("delete", {"path": "a\u202e"}, APPROVE, "category DESTRUCTIVE"),
        ("delete", {"path": "break"}, APPROVE, "category DESTRUCTIVE"),
        ("write", {"path": "a", "lines": ["1", "2"]}, RUN, ""),
        ("write", {"path": "a", "lines": ["1", "2", "3"]}, APPROVE, "bulk of 3"),
        ("invite", {"names": "a,b"}, RUN, ""),
        ("invite", {"names": "a,b,c"}, APPROVE, "bulk of 3"),
    ):
        verdict = await registry.check(name, arguments)
        assert (verdict.disposition, verdict.approval_cause) == (disposition, cause), (name, arguments)
        assert verdict.parallel is (name == "read")
        previews = {"a": "would delete a", "a\u202e": "would delete a<U+202E>"}
        assert verdict.preview == (previews.get(str(arguments.get("path")), "") if name == "delete" else "")
        assert len(verdict.digest) == (64 if disposition == APPROVE else 0)
    assert b'checks_total{disposition="APPROVE"} 5.0' in registry.metrics.text()


async def test_the_verdict_says_that_a_question_is_asked_or_that_a_task_is_delegated(registry: Registry) -> None:
    """HITL-1, TOOL-7: the verdict includes the question or the task."""
    asked: dict[str, Any] = {"question": "Which?", "why": "two fit", "options": ["a", "b", "c"]}
    verdict = await registry.check("ask_user", asked | {"kind": "permission"})
    assert verdict.disposition == ASK
    assert verdict.question == call_pb2.Question(kind=call_pb2.QUESTION_KIND_PERMISSION, **asked)
    verdict = await registry.check("run_agent", {"task": "look", "tool_names": ["a", "b", "c", "d"]})
    assert verdict.disposition == execution_pb2.DISPOSITION_DELEGATE
    assert verdict.context == call_pb2.EXECUTION_CONTEXT_AGENT
    task = b'{"agent":"","instructions":"","rounds_max":0,"task":"look","tool_names":["a","b","c","d"]}'
    assert verdict.arguments_json == task
    assert (await registry.check("run_agent", {"task": ""})).error_reason == "INVALID_ARGUMENTS"


async def test_a_front_end_call_is_offered_immediately_or_after_an_approval(registry: Registry) -> None:
    """I13: a tool of another store is not found."""
    definition = front_end_tool(offer_fallback=call_pb2.OFFER_FALLBACK_BACKEND_TOOL, fallback_tool_name="write")
    await registry.ann.RegisterTool(tool_pb2.RegisterToolRequest(definition=definition))
    offered = await registry.check("show_chart", {"points": [1, 2, 3]})
    assert (offered.disposition, offered.context) == (OFFER, call_pb2.EXECUTION_CONTEXT_FRONTEND)
    assert (offered.offer_fallback, offered.fallback_tool_name) == (2, "write")
    foreign = await registry.check("show_chart", {}, store="other")
    assert (foreign.disposition, foreign.error_reason) == (REFUSE, "TOOL_NOT_FOUND")
    definition.category = call_pb2.TOOL_CATEGORY_SENSITIVE
    await registry.ann.RegisterTool(tool_pb2.RegisterToolRequest(definition=definition, replace=True))
    gated = await registry.check("show_chart", {"points": []}, version=2)
    assert (gated.disposition, gated.context) == (APPROVE, call_pb2.EXECUTION_CONTEXT_FRONTEND)


async def test_refused_call_has_reasons_for_both_program_and_model(registry: Registry) -> None:
    """LOOP-7: a refusal is an error result for the model, and does not fail the request or its other calls."""
    for name, arguments, version, why, said in [
        ("wriet", {}, 0, "TOOL_NOT_FOUND", "did you mean 'write'?"),
        ("write", {"path": "a"}, 0, "TOOL_NOT_FOUND", "no tool"),
        ("write", {"path": "a"}, 9, "TOOL_NOT_FOUND", "no tool"),
        ("private", {}, 1, "TOOL_NOT_FOUND", "private"),
        ("write", b"{", 1, "INVALID_JSON", "strict JSON"),
        ("write", {"pth": "a"}, 1, "INVALID_ARGUMENTS", "did you mean 'path'?"),
        ("write", b'{"path":"' + b"x" * 300_000 + b'"}', 1, "INVALID_ARGUMENTS", "limit"),
    ]:
        verdict = await registry.check(name, arguments, version=version)
        assert (verdict.disposition, verdict.error_reason, verdict.arguments_json) == (REFUSE, why, b""), name
        assert said in verdict.error_message
    written = enumerate([b'{"path":"a"}', b"{", b"", b'{"path":"b"}'])
    verdicts = await registry.verdicts(*(proposed(f"c{number}", "write", raw) for number, raw in written))
    found = [(verdict.call_id, verdict.disposition) for verdict in verdicts]
    assert found == [("c0", RUN), ("c1", REFUSE), ("c2", REFUSE), ("c3", RUN)]


async def test_arguments_of_an_older_version_must_fit_the_newest_function(database_url: str, tmp_path: Path) -> None:
    """TOOL-1: a run keeps its version of the definition, but only the newest function can run."""

    @tool(name="write", category=Category.SENSITIVE, effect=EffectClass.IDEMPOTENT)
    def write_again(path: str, size: int) -> str:
        """Write a file, of a size."""
        return f"{path}{size}"

    async with running(database_url, tmp_path, [write]):
        pass
    async with running(database_url, tmp_path, [write_again]) as registry:
        changed = await registry.check("write", {"path": "a", "lines": ["x"]})
        assert (changed.disposition, changed.error_reason) == (REFUSE, "INVALID_ARGUMENTS")
        current = await registry.check("write", {"path": "a", "size": 1}, version=2)
        assert (current.disposition, current.tool_version) == (APPROVE, 2)


async def test_gate_of_the_newest_version_applies_to_every_version(database_url: str, tmp_path: Path) -> None:
    """I10: a call needs approval if the newest version of its tool does."""

    @tool(name="invite", category=Category.SENSITIVE, effect=EffectClass.IDEMPOTENT)
    def invite_carefully(names: str) -> str:
        """Invite people, separated by commas."""
        return names

    async with running(database_url, tmp_path, [invite]) as registry:
        assert (await registry.check("invite", {"names": "a"})).disposition == RUN
    async with running(database_url, tmp_path, [invite_carefully]) as registry:
        verdict = await registry.check("invite", {"names": "a"})
        assert (verdict.disposition, verdict.approval_cause) == (APPROVE, "category SENSITIVE")
        assert await refusal(registry.run("invite", {"names": "a"})) == "APPROVAL_REQUIRED"
        assert (await registry.run("invite", {"names": "a"}, approved_digest=verdict.digest)).outcome == 1
    async with running(database_url, tmp_path, [invite]) as registry:
        # The reverse also holds: a run pinned to the gated version keeps the gate.
        assert (await registry.check("invite", {"names": "a"}, version=2)).disposition == APPROVE


SCHEMA = {"type": "object", "properties": {"count": {"type": "integer", "maximum": 5}}, "required": ["count"]}
NUMBERS = {"oneOf": [{"not": {"minimum": least}} for least in range(50)]}
COSTLY = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"oneOf": [{"$ref": "#/$defs/numbers"}] * 20}}},
    "$defs": {"numbers": NUMBERS},
}


async def checked(registry: Registry, output: str | None, schema: object = SCHEMA) -> Any:
    asked = None if output is None else output.encode()
    request = execution_pb2.CheckOutputRequest(store_id="acme", schema_json=json.dumps(schema).encode(), output=asked)
    return await registry.execution.CheckOutput(request, timeout=60)


async def test_all_problems_in_an_invalid_answer_are_reported(registry: Registry) -> None:
    assert (await checked(registry, '{"count": 3}')).output_json == b'{"count":3}'
    wrong = await checked(registry, '{"count": 6}')
    assert wrong.output_json == b""
    assert wrong.faults[0].startswith("count: ")
    assert await checked(registry, None) == execution_pb2.CheckOutputResponse()


async def test_slow_schema_check_fails_without_blocking_others(registry: Registry) -> None:
    checking = asyncio.ensure_future(checked(registry, json.dumps({"a": [-1] * 20_000}), COSTLY))
    listed = 0
    while not (await asyncio.wait({checking}, timeout=0.1))[0]:
        await registry.execution.ResolveTools(execution_pb2.ResolveToolsRequest(context=context()))
        listed += 1
    assert "takes too long" in (await checking).faults[0]
    assert listed


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
async def combined(database_url: str, tmp_path: Path) -> AsyncIterator[Registry]:
    async with running(database_url, tmp_path, _tools(), options=ExecutorOptions(executions_max=2)) as combined:
        yield combined


async def allow(combined: Registry, **fields: Any) -> None:
    """Create a rule of ann that allows `pay`. A rule for any tool expires after a minute."""
    rule = rule_pb2.Rule(effect=rule_pb2.RULE_EFFECT_ALLOW, scope=rule_pb2.RULE_SCOPE_USER)
    rule.MergeFrom(rule_pb2.Rule(**{"tool_name": "pay"} | fields))
    if rule.tool_name == "*":
        rule.expire_time.FromSeconds(int(time.time()) + 60)
    await combined.rules["acme", "ann"].CreateRule(rule_pb2.CreateRuleRequest(rule=rule))


async def check_all(
    combined: Registry,
    *calls: str,
    tool: str = "pay",
    arguments: Any = None,
    who: execution_pb2.CallContext | None = None,
    **fields: Any,
) -> list[execution_pb2.Verdict]:
    return await combined.verdicts(*(proposed(call, tool, arguments, **fields) for call in calls), who=who)


async def test_questions_and_answers_are_never_reused_for_another_call(combined: Registry) -> None:
    """RETURNED entries and the analytics do not count executions that end with a question."""
    auditor = combined.auditors["acme", "olga"]
    request = audit_pb2.ListAuditRequest(kind=audit_pb2.AUDIT_KIND_RETURNED)
    assert outcome(await combined.run("weather")) == "INPUT_REQUIRED"
    assert list((await auditor.ListAudit(request)).entries) == []
    answered = await combined.run("weather", answers=TOWN, earlier_attempts=1)
    assert (outcome(answered), content(answered)) == ("SUCCEEDED", "rain in Delft")
    assert [entry.verdict for entry in (await auditor.ListAudit(request)).entries] == ["SUCCEEDED"]
    (figures,) = (await auditor.GetToolAnalytics(audit_pb2.GetToolAnalyticsRequest())).tools
    assert (figures.execution_count, figures.error_count) == (1, 0)
    assert outcome(await combined.run("weather", call="other")) == "INPUT_REQUIRED", "another call has not asked"


async def test_duplicate_call_does_not_count_as_a_rule_use(combined: Registry) -> None:
    """A duplicate is rejected, so the rule did not allow it."""
    await allow(combined, uses_max=2)
    first, again = await check_all(combined, "one", "two")
    assert (first.disposition, again.error_reason) == (RUN, "DUPLICATE_CALL")
    (later,) = await check_all(combined, "three")
    assert later.disposition == RUN


async def test_a_rule_does_not_replace_a_second_approver_or_an_unauthorized_author(combined: Registry) -> None:
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
    two_people = context(approvals_required=2)
    for name in ("pay", "*"):
        await allow(combined, tool_name=name)
        for number, (who, disposition) in enumerate([*rows, (two_people, APPROVE)]):
            (verdict,) = await check_all(combined, f"c{number}", who=who)
            assert verdict.disposition == disposition, who
        assert verdict.approvals_required == 2


async def test_edited_call_has_its_own_digest_even_without_approval(combined: Registry) -> None:
    """The ledger identifies an approved call by its digest, so without one it could not be shown or started."""
    few = {"to": ["a"]}
    (bulk,) = await check_all(combined, "one", tool="send", arguments={"to": ["a", "b", "c", "d"]})
    assert bulk.disposition == APPROVE
    (edited,) = await check_all(combined, "one", tool="send", arguments=few, edited=True)
    assert (edited.disposition, len(edited.digest)) == (RUN, 64)
    assert outcome(await combined.run("send", few, call="one", approved_digest=edited.digest)) == "SUCCEEDED"


@pytest.mark.parametrize(("settles", "expected", "count"), [(False, "FAILED TOOL_ERROR", 20), (True, "SUCCEEDED", 2)])
async def test_tool_that_keeps_asking_new_questions_is_stopped(
    combined: Registry, settles: bool, expected: str, count: int
) -> None:
    """Earlier answers are skipped to find the answer to the current question."""
    given: list[execution_pb2.Answer] = []
    result = await combined.run("fickle", {"settles": settles})
    while outcome(result) == "INPUT_REQUIRED" and len(given) < 100:
        given.append(execution_pb2.Answer(question=result.question.question, answer="yes"))
        result = await combined.run("fickle", {"settles": settles}, answers=given, earlier_attempts=len(given))
    assert (outcome(result), len(given)) == (expected, count)


async def test_calls_waiting_for_answers_do_not_use_slots(combined: Registry) -> None:
    """Otherwise unanswered questions, which may stay open for days, would block the tools of all stores."""
    for number in range(5):
        assert outcome(await combined.run("order", call=f"order-{number}")) == "INPUT_REQUIRED"
    assert outcome(await combined.run_approved("pay", call="pay")) == "SUCCEEDED"
    answer = execution_pb2.Answer(question="What shall it be?", answer="tea")
    for number in range(5):
        assert content(await combined.run("order", call=f"order-{number}", answers=[answer])) == "tea"
