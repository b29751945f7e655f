"""The file tools, through the wire: checked, gated, one at a time for each path. TOOL-7, LOOP-9, HITL-7, C4."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from pawl.chassis.clock import SystemClock
from pawl.tool_registry.adapters.files.folders import FileFolders
from pawl.tool_registry.builtin.files import file_tools
from pawl.tool_registry.domain.files import FileLimits
from tests.rpc.tool_registry.registry import Registry, content, context, outcome, running


@pytest.fixture
async def replicas(database_url: str, tmp_path: Path) -> AsyncIterator[list[Registry]]:
    limits = FileLimits(file_bytes_max=1 << 20, store_bytes_max=1 << 24)
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                running(
                    database_url,
                    tmp_path,
                    file_tools(FileFolders(tmp_path / "files", limits, SystemClock().now)),
                    name=name,
                )
            )
            for name in "ab"
        ]


async def test_of_edits_of_one_file_in_one_batch_none_is_lost(replicas: list[Registry]) -> None:
    """C4, also where the calls reach different replicas."""
    words = [f"word{number}" for number in range(10)]
    await replicas[0].run("write_file", {"path": "plan", "content": " ".join(words)}, call="w")
    results = await asyncio.gather(
        *(
            replicas[number % 2].run(
                "edit_file",
                {"path": "plan", "old_text": word, "new_text": f"<{number}>"},
                call=f"e{number}",
                timeout_seconds=120,
            )
            for number, word in enumerate(words)
        )
    )
    assert {outcome(result) for result in results} == {"SUCCEEDED"}
    read = content(await replicas[0].run("read_file", {"path": "plan"}, call="r"))
    assert read["text"] == " ".join(f"<{number}>" for number in range(10))


async def test_calls_are_serialised_by_path_and_both_paths_of_a_move(replicas: list[Registry]) -> None:
    registry = replicas[0]
    for name, arguments, keys in [
        ("write_file", {"path": "a/b", "content": ""}, ["file:a/b"]),
        ("edit_file", {"path": "a/b", "old_text": "x", "new_text": "y"}, ["file:a/b"]),
        ("move_file", {"path": "a/b", "new_path": "c"}, ["file:a/b", "file:c"]),
        ("delete_file", {"path": "a/b"}, ["file:a/b"]),
        ("read_file", {"path": "a/b"}, []),
    ]:
        assert list((await registry.check(name, arguments)).resource_keys) == keys


async def test_deleting_is_gated_and_shows_what_it_deletes(replicas: list[Registry]) -> None:
    """HITL-2."""
    registry = replicas[0]
    assert (await registry.check("write_file", {"path": "a", "content": "x"})).approval_cause == ""
    verdict = await registry.check("delete_file", {"path": "a"})
    assert (verdict.approval_cause, verdict.preview) == ("category DESTRUCTIVE", "Delete the file or empty folder 'a'")


async def test_a_new_file_is_taken_back_by_the_call_that_its_result_names(replicas: list[Registry]) -> None:
    """HITL-7."""
    registry = replicas[0]
    made = await registry.run("write_file", {"path": "a", "content": "x"}, call="w")
    inverse = made.result.inverse
    assert (inverse.tool_name, inverse.summary) == ("delete_file", "Delete the file 'a'")
    undone = await registry.run_approved(inverse.tool_name, json.loads(inverse.arguments_json), call="u")
    assert content(undone) == {"path": "a", "deleted": "file"}
    assert content(await registry.run("list_files", call="l"))["entries"] == []


async def test_the_same_call_run_again_has_its_effect_once(replicas: list[Registry]) -> None:
    """IDEMPOTENT, in whichever replica."""
    line = {"path": "log", "content": "line\n"}
    first = await replicas[0].run("append_file", line, call="once")
    again = await replicas[1].run("append_file", line, call="once", earlier_attempts=1)
    assert (content(again), again.result.inverse) == (content(first), first.result.inverse)
    assert content(await replicas[0].run("read_file", {"path": "log"}, call="r"))["text"] == "line\n"


async def test_nothing_crosses_stores(replicas: list[Registry], tmp_path: Path) -> None:
    """I13: one name in two stores is two files, and no path leads from one to the other."""
    registry = replicas[0]
    for store in ("acme", "other"):
        written = {"path": "plan", "content": f"of {store}"}
        await registry.run("write_file", written, call=f"w-{store}", who=context(store=store))
    for store in ("acme", "other"):
        for user in ("ann", "bob"):
            who = context(store=store, user=user)
            read = content(await registry.run("read_file", {"path": "plan"}, call=f"r-{store}-{user}", who=who))
            assert read["text"] == f"of {store}"
    calls: list[tuple[str, dict[str, Any]]] = [
        ("read_file", {"path": "../acme/plan"}),
        ("read_file", {"path": str(tmp_path / "files/acme/plan")}),
        ("list_files", {"path": "../acme"}),
        ("write_file", {"path": "../acme/plan", "content": "x", "overwrite": True}),
        ("move_file", {"path": "plan", "new_path": "../acme/stolen"}),
        ("move_file", {"path": "../acme/plan", "new_path": "stolen"}),
    ]
    for number, (name, arguments) in enumerate(calls):
        failed = await registry.run(name, arguments, call=f"x{number}", who=context(store="other"))
        assert outcome(failed) == "FAILED TOOL_ERROR"
        assert str(tmp_path) not in content(failed)["error"] or str(tmp_path) in str(arguments)
    assert (tmp_path / "files/acme/plan").read_text() == "of acme"
    assert sorted(path.name for path in (tmp_path / "files").iterdir()) == [
        "acme", "acme.state", "other", "other.state"
    ]  # fmt: skip
