"""Verdicts: what may be done with each call of a batch. TOOL-5, HITL-1, HITL-2, HITL-3, D8."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.event.v1 import call_pb2
from pawl.tool.v1 import execution_pb2, tool_pb2
from pawl.tool_registry.builtin.agents import agent_tools
from pawl.tool_registry.builtin.question import question_tools
from pawl.tools import Category, EffectClass, Tool, tool
from tests.rpc.tool_registry.registry import Registry, context, front_end_tool, reason, running

RUN, APPROVE, OFFER, ASK, REFUSE = (
    execution_pb2.DISPOSITION_RUN,
    execution_pb2.DISPOSITION_APPROVE,
    execution_pb2.DISPOSITION_OFFER,
    execution_pb2.DISPOSITION_ASK,
    execution_pb2.DISPOSITION_REFUSE,
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


def count(names: str) -> int:
    return names.count(",") + 1


@tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, bulk_count=count)
def invite(names: str) -> str:
    """Invite people, with commas between."""
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


async def test_a_call_that_fits_may_run_with_all_that_its_run_needs_to_know(registry: Registry) -> None:
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


async def test_read_only_calls_may_run_side_by_side_and_are_never_bulk(registry: Registry) -> None:
    """LOOP-9, D8."""
    verdict = await registry.check("read", {"paths": ["a", "b", "c", "d"]})
    assert (verdict.disposition, verdict.parallel) == (RUN, True)


async def test_a_gated_call_says_why_and_what_it_would_do(registry: Registry) -> None:
    """HITL-2."""
    verdict = await registry.check("delete", {"path": "a"})
    assert (verdict.disposition, verdict.approval_cause) == (APPROVE, "category DESTRUCTIVE")
    assert verdict.preview == "would delete a"
    assert len(verdict.digest) == 64


async def test_a_preview_that_fails_leaves_the_call_to_its_arguments(registry: Registry) -> None:
    verdict = await registry.check("delete", {"path": "break"})
    assert (verdict.disposition, verdict.preview) == (APPROVE, "")


async def test_a_bulk_call_is_gated(registry: Registry) -> None:
    """HITL-2, D8."""
    assert (await registry.check("write", {"path": "a", "lines": ["1", "2"]})).disposition == RUN
    bulk = await registry.check("write", {"path": "a", "lines": ["1", "2", "3"]})
    assert (bulk.disposition, bulk.approval_cause) == (APPROVE, "bulk of 3")


async def test_a_tool_may_count_by_itself(registry: Registry) -> None:
    """D8."""
    assert (await registry.check("invite", {"names": "a,b"})).disposition == RUN
    assert (await registry.check("invite", {"names": "a,b,c"})).approval_cause == "bulk of 3"


async def test_the_digest_is_that_of_this_call_only(registry: Registry) -> None:
    """HITL-3."""
    first = await registry.check("delete", {"path": "a"})
    again = await registry.check("delete", b' { "path" : "a" } ')
    assert again.digest == first.digest
    others = [
        await registry.check("delete", {"path": "b"}),
        await registry.check("delete", {"path": "a"}, call="other"),
        await registry.check("delete", {"path": "a"}, run="other"),
        await registry.check("delete", {"path": "a"}, store="other"),
    ]
    assert len({first.digest, *(other.digest for other in others)}) == 5


async def test_a_question_is_asked(registry: Registry) -> None:
    """HITL-1."""
    verdict = await registry.check(
        "ask_user", {"question": "Which?", "why": "two fit", "kind": "permission", "options": ["a", "b", "c"]}
    )
    assert verdict.disposition == ASK
    assert verdict.question == call_pb2.Question(
        question="Which?", why="two fit", kind=call_pb2.QUESTION_KIND_PERMISSION, options=["a", "b", "c"]
    )


async def test_a_front_end_call_is_offered_or_approved_first(registry: Registry) -> None:
    definition = front_end_tool(offer_fallback=call_pb2.OFFER_FALLBACK_BACKEND_TOOL, fallback_tool_name="write")
    await registry.ann.RegisterTool(tool_pb2.RegisterToolRequest(definition=definition))
    offered = await registry.check("show_chart", {"points": [1, 2, 3]})
    assert offered.disposition == OFFER
    assert offered.context == call_pb2.EXECUTION_CONTEXT_FRONTEND
    assert (offered.offer_fallback, offered.fallback_tool_name) == (2, "write")
    definition.category = call_pb2.TOOL_CATEGORY_SENSITIVE
    await registry.ann.RegisterTool(tool_pb2.RegisterToolRequest(definition=definition, replace=True))
    gated = await registry.check("show_chart", {"points": []}, version=2)
    assert (gated.disposition, gated.context) == (APPROVE, call_pb2.EXECUTION_CONTEXT_FRONTEND)
    assert gated.digest


@pytest.mark.parametrize(
    ("name", "arguments", "version", "why", "said"),
    [
        ("wriet", {}, 0, "TOOL_NOT_FOUND", "did you mean 'write'?"),
        ("write", {"path": "a"}, 0, "TOOL_NOT_FOUND", "no tool"),
        ("write", {"path": "a"}, 9, "TOOL_NOT_FOUND", "no tool"),
        ("private", {}, 1, "TOOL_NOT_FOUND", "private"),
        ("write", b"{", 1, "INVALID_JSON", "strict JSON"),
        ("write", {"pth": "a"}, 1, "INVALID_ARGUMENTS", "did you mean 'path'?"),
        ("write", b'{"path":"' + b"x" * 300_000 + b'"}', 1, "INVALID_ARGUMENTS", "limit"),
    ],
)
async def test_a_call_that_may_not_run_says_why_to_program_and_model(  # noqa: PLR0917
    registry: Registry, name: str, arguments: Any, version: int, why: str, said: str
) -> None:
    """LOOP-7: these are error results for the model, never errors of the request."""
    verdict = await registry.check(name, arguments, version=version)
    assert (verdict.disposition, verdict.error_reason) == (REFUSE, why)
    assert said in verdict.error_message
    assert verdict.arguments_json == b""


async def test_one_bad_call_does_not_stop_the_others_and_the_order_is_kept(registry: Registry) -> None:
    calls = [
        execution_pb2.ProposedCall(call_id=f"c{number}", tool_name="write", tool_version=1, arguments_json=raw)
        for number, raw in enumerate([b'{"path":"a"}', b"{", b"", b'{"path":"b"}'])
    ]
    request = execution_pb2.CheckCallsRequest(context=context(), calls=calls)
    verdicts = (await registry.execution.CheckCalls(request)).verdicts
    assert [verdict.call_id for verdict in verdicts] == ["c0", "c1", "c2", "c3"]
    assert [verdict.disposition for verdict in verdicts] == [RUN, REFUSE, REFUSE, RUN]


async def test_a_tool_of_another_store_does_not_exist(registry: Registry) -> None:
    """I13."""
    await registry.ann.RegisterTool(tool_pb2.RegisterToolRequest(definition=front_end_tool()))
    verdict = await registry.check("show_chart", {}, store="other")
    assert (verdict.disposition, verdict.error_reason) == (REFUSE, "TOOL_NOT_FOUND")


async def test_checks_are_counted_by_disposition(registry: Registry) -> None:
    await registry.check("delete", {"path": "a"})
    assert b'checks_total{disposition="APPROVE"} 1.0' in registry.metrics.text()


@pytest.mark.parametrize("field", ["store_id", "user_id", "conversation_id", "run_id"])
async def test_a_missing_id_is_refused_by_name(registry: Registry, field: str) -> None:
    who = context()
    who.ClearField(field)  # type: ignore[arg-type]
    request = execution_pb2.CheckCallsRequest(context=who, calls=[execution_pb2.ProposedCall(call_id="c")])
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await registry.execution.CheckCalls(request)
    assert reason(error.value) == (grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ID", {"field": field})


async def test_arguments_of_an_older_version_must_fit_the_function_that_is_there(
    database_url: str, tmp_path: Path
) -> None:
    """TOOL-1: a run keeps its version, but only the newest function can run."""

    @tool(name="write", category=Category.SENSITIVE, effect=EffectClass.IDEMPOTENT)
    def write_again(path: str, size: int) -> str:
        """Write a file, of a size."""
        return f"{path}{size}"

    async with running(database_url, tmp_path, [write]):
        pass
    async with running(database_url, tmp_path, [write_again]) as registry:
        changed = await registry.check("write", {"path": "a", "lines": ["x"]})
        assert (changed.disposition, changed.error_reason) == (REFUSE, "INVALID_ARGUMENTS")
        assert "has changed" in changed.error_message
        current = await registry.check("write", {"path": "a", "size": 1}, version=2)
        assert (current.disposition, current.tool_version) == (APPROVE, 2)


async def test_what_the_newest_version_gates_is_gated_in_every_version(database_url: str, tmp_path: Path) -> None:
    """I10: when in doubt, no."""

    @tool(name="invite", category=Category.SENSITIVE, effect=EffectClass.IDEMPOTENT)
    def invite_carefully(names: str) -> str:
        """Invite people, with commas between."""
        return names

    async with running(database_url, tmp_path, [invite]) as registry:
        assert (await registry.check("invite", {"names": "a"})).disposition == RUN
    async with running(database_url, tmp_path, [invite_carefully]) as registry:
        verdict = await registry.check("invite", {"names": "a"})
        assert (verdict.disposition, verdict.approval_cause) == (APPROVE, "category SENSITIVE")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await registry.run("invite", {"names": "a"})
        assert reason(error.value)[1] == "APPROVAL_REQUIRED"
        assert (await registry.run("invite", {"names": "a"}, approved_digest=verdict.digest)).outcome == 1
    async with running(database_url, tmp_path, [invite]) as registry:
        # The other way round as well: a run that pinned the careful version keeps it.
        assert (await registry.check("invite", {"names": "a"}, version=2)).disposition == APPROVE


async def test_a_task_for_an_agent_is_delegated_and_never_run_here(registry: Registry) -> None:
    """TOOL-7."""
    verdict = await registry.check("run_agent", {"task": "look", "tool_names": ["a", "b", "c", "d"]})
    assert verdict.disposition == execution_pb2.DISPOSITION_DELEGATE
    assert verdict.context == call_pb2.EXECUTION_CONTEXT_AGENT
    assert (
        verdict.arguments_json
        == b'{"agent":"","instructions":"","rounds_max":0,"task":"look","tool_names":["a","b","c","d"]}'
    )
    refused = await registry.check("run_agent", {"task": ""})
    assert refused.error_reason == "INVALID_ARGUMENTS"
