"""Verdicts on the calls of a batch (TOOL-5, HITL-1, HITL-2, HITL-3, D8)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from pawl.event.v1 import call_pb2
from pawl.tool.v1 import execution_pb2, tool_pb2
from pawl.tool_registry.builtin.agents import agent_tools
from pawl.tool_registry.builtin.question import question_tools
from pawl.tools import Category, EffectClass, Tool, tool
from tests.rpc.tool_registry.registry import (
    APPROVE,
    ASK,
    OFFER,
    REFUSE,
    RUN,
    Registry,
    context,
    front_end_tool,
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
    assert verdict.disposition == RUN
    assert verdict.arguments_json == b'{"lines":[],"path":"a","size":440}'
    assert verdict.note == 'Arguments were adjusted: size: "440" was read as 440'
    assert verdict.context == call_pb2.EXECUTION_CONTEXT_BACKEND
    assert verdict.category == call_pb2.TOOL_CATEGORY_SAFE
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
    rows: list[tuple[str, Any, int, str, str]] = [
        ("wriet", {}, 0, "TOOL_NOT_FOUND", "did you mean 'write'?"),
        ("write", {"path": "a"}, 0, "TOOL_NOT_FOUND", "no tool"),
        ("write", {"path": "a"}, 9, "TOOL_NOT_FOUND", "no tool"),
        ("private", {}, 1, "TOOL_NOT_FOUND", "private"),
        ("write", b"{", 1, "INVALID_JSON", "strict JSON"),
        ("write", {"pth": "a"}, 1, "INVALID_ARGUMENTS", "did you mean 'path'?"),
        ("write", b'{"path":"' + b"x" * 300_000 + b'"}', 1, "INVALID_ARGUMENTS", "limit"),
    ]
    for name, arguments, version, why, said in rows:
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
