"""Changes of projects and tasks over gRPC (TOOL-7, HITL-2, HITL-7, I13)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from pawl.chassis.ids import IdSource
from pawl.server.db.database import Database
from pawl.tool.v1 import execution_pb2
from pawl.tool_registry.builtin.planning.store import PostgresPlanRepository
from pawl.tool_registry.builtin.planning.tools import planning_tools
from tests.rpc.tool_registry.registry import Registry, content, context, outcome, refusal, running


class Planner:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self._calls = 0

    async def result(self, name: str, /, *, call: str = "", who: Any = None, **arguments: Any) -> Any:
        self._calls += 1
        call = call or f"p{self._calls}"
        who = who or context()
        verdict = await self.registry.check(name, arguments, call=call, store=who.store_id, user=who.user_id)
        return await self.registry.run(name, arguments, call=call, who=who, approved_digest=verdict.digest)

    async def __call__(self, name: str, /, **arguments: Any) -> Any:
        return content(await self.result(name, **arguments))

    async def undo(self, result: execution_pb2.ExecutionResult) -> Any:
        inverse = result.result.inverse
        return await self(inverse.tool_name, **json.loads(inverse.arguments_json))

    async def projects(self) -> Any:
        return (await self("list_projects"))["projects"]


@pytest.fixture
async def planner(database_url: str, tmp_path: Path, ids: IdSource) -> AsyncIterator[Planner]:
    async with (
        Database(database_url, application_name="test") as database,
        running(database_url, tmp_path, planning_tools(PostgresPlanRepository(database), ids)) as registry,
    ):
        yield Planner(registry)


async def test_project_is_changed_by_id_or_title_and_keeps_other_fields(planner: Planner) -> None:
    project = (await planner("create_task", title="t", project="API"))["project"]
    changed = await planner("update_project", project="api", status="on_hold", notes="wait for Bo")
    assert changed == project | {"status": "on_hold", "notes": "wait for Bo"}
    renamed = await planner("update_project", project=project["project_id"], title="API 2")
    assert renamed == changed | {"title": "API 2"}
    assert await planner("update_project", project="API 2", notes="", status="active") == project | {"title": "API 2"}
    await planner("create_task", title="t", project="Two")
    failed = await planner("update_project", project="Two", title="api 2", status="archived")
    assert failed == {"error": "the project 'api 2' already exists; nothing was changed"}


async def test_ambiguous_project_name_makes_the_model_ask(planner: Planner) -> None:
    """ "Update the API project" is ambiguous for a user who has two such projects."""
    made = [(await planner("create_task", title="t", project=name))["project"] for name in ("API docs", "Old API")]
    failed = await planner("update_project", project="API", status="archived")
    assert all(f"{project['title']!r} ({project['project_id']})" in failed["error"] for project in made)
    tasks = [(await planner("create_task", title=t, project=p))["task_id"] for t, p in (("Bo", "Home"), ("bo", "Work"))]
    for name, arguments in (("update_task", {"notes": "x"}), ("delete_task", {})):
        failed = await planner(name, task="Bo", **arguments)
        assert all(f"{task} (in" in failed["error"] for task in tasks)
    assert all("status" not in project for project in await planner.projects())


async def test_task_update_keeps_unspecified_fields(planner: Planner) -> None:
    task = await planner("create_task", title="Cake", notes="big", due="2026-12-24")
    changed = await planner("update_task", task="cake", done=True, due="2026-12-25")
    shown = {"task_id": task["task_id"], "title": "Cake", "notes": "big", "due": "2026-12-25", "done": True}
    assert changed == shown
    assert (await planner.projects())[0]["tasks"] == [shown]
    cleared = await planner("update_task", task=task["task_id"], due="none", notes="", done=False, title="Pie")
    assert cleared == {"task_id": task["task_id"], "title": "Pie"}
    assert "'2026-02-30' is not a date" in (await planner("update_task", task="Pie", due="2026-02-30"))["error"]


async def test_bulk_completion_is_one_gated_atomic_call(planner: Planner) -> None:
    """HITL-2: a call for 12 tasks is bulk."""
    titles = [f"task number {number}" for number in range(12)]
    for title in titles:
        await planner("create_task", title=title)
    assert (await planner.registry.check("complete_tasks", {"tasks": titles[:2]})).approval_cause == ""
    assert (await planner.registry.check("complete_tasks", {"tasks": titles})).approval_cause == "bulk of 12"
    assert (
        await refusal(planner.registry.run("complete_tasks", {"tasks": titles}, call="ungated")) == "APPROVAL_REQUIRED"
    )
    failed = await planner("complete_tasks", tasks=[*titles, "zebra", "giraffe"])
    assert "'zebra'" in failed["error"]
    assert "'giraffe'" in failed["error"]
    assert not any("done" in task for task in (await planner.projects())[0]["tasks"])
    done = await planner("complete_tasks", tasks=[*titles, titles[0]])
    assert [task["title"] for task in done["completed"]] == titles
    assert all(task["done"] for task in (await planner.projects())[0]["tasks"])


async def test_deleting_a_task_needs_approval_and_an_option_for_its_subtasks(planner: Planner) -> None:
    await planner("create_task", title="Party")
    await planner("add_subtask", parent="Party", title="Cake")
    await planner("add_subtask", parent="Cake", title="Flour")
    await planner("create_task", title="Other")
    verdict = await planner.registry.check("delete_task", {"task": "Party", "with_subtasks": True})
    assert verdict.approval_cause == "category DESTRUCTIVE"
    assert verdict.preview == "Delete the task 'Party' with all its subtasks"
    deleted = await planner("delete_task", task="Party", with_subtasks=True)
    assert [task["title"] for task in deleted["deleted"]] == ["Party", "Cake", "Flour"]
    assert [task["title"] for task in (await planner.projects())[0]["tasks"]] == ["Other"]


async def test_other_users_tasks_are_hidden(planner: Planner) -> None:
    """I13: neither an id nor an equal title gives access."""
    mine = await planner("create_task", title="Party", project="Home")
    for who in (context(user="bob"), context(store="other")):
        await planner("create_task", title="Party", project="Home", who=who)
        done = await planner("complete_tasks", tasks=["Party"], who=who)
        assert done["completed"][0]["task_id"] != mine["task_id"]
        for name, arguments in [
            ("update_task", {"task": mine["task_id"], "title": "x"}),
            ("complete_tasks", {"tasks": [mine["task_id"]]}),
            ("delete_task", {"task": mine["task_id"]}),
            ("update_project", {"project": mine["project"]["project_id"], "title": "x"}),
        ]:
            assert outcome(await planner.result(name, who=who, **arguments)) == "FAILED TOOL_ERROR"
    assert (await planner.projects())[0]["tasks"] == [{"task_id": mine["task_id"], "title": "Party"}]


CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("create_task", {"title": "New", "project": "Home"}),
    ("add_subtask", {"parent": "Party", "title": "Cake"}),
    ("update_project", {"project": "Home", "title": "House", "status": "archived", "notes": ""}),
    ("update_task", {"task": "Party", "title": "Feast", "due": "none", "notes": "x", "done": True}),
    ("complete_tasks", {"tasks": ["Party"]}),
    ("add_comment", {"text": "Bring forks.", "task": "Party"}),
]


async def test_comments_are_shown_with_their_task_or_project(planner: Planner) -> None:
    task = await planner("create_task", title="Party", project="Home")
    await planner("add_subtask", parent="Party", title="Cake")
    made = [
        await planner("add_comment", text=text, **on)
        for text, on in [
            ("Ask Bo.", {"task": "party", "project": "HOME"}),
            ("No nuts!", {"task": "Cake"}),
            ("On\nhold.", {"project": task["project"]["project_id"]}),
            ("Bo agrees.", {"task": task["task_id"]}),
        ]
    ]
    assert [comment["title"] for comment in made] == ["Party", "Cake", "Home", "Party"]
    (project,) = await planner.projects()
    (party,) = project["tasks"]
    shown = [[each["text"] for each in item["comments"]] for item in (project, party, party["subtasks"][0])]
    assert shown == [["On\nhold."], ["Ask Bo.", "Bo agrees."], ["No nuts!"]]
    assert party["comments"][0]["comment_id"] == made[0]["comment_id"]
    assert datetime.fromisoformat(party["comments"][0]["time"]).tzinfo is not None
    assert (await planner.registry.check("add_comment", {"text": "x", "task": "Party"})).approval_cause == ""
    await planner("delete_task", task="Party", with_subtasks=True)
    assert [each["text"] for each in (await planner.projects())[0]["comments"]] == ["On\nhold."]


async def test_comment_is_deleted_once_after_approval(planner: Planner) -> None:
    await planner("create_task", title="Party")
    comment = (await planner("add_comment", text="Ask Bo.", task="Party"))["comment_id"]
    arguments = {"comment_id": comment, "text": "Ask Bo."}
    verdict = await planner.registry.check("delete_comment", arguments)
    assert (verdict.approval_cause, verdict.preview) == ("category DESTRUCTIVE", "Delete the comment:\nAsk Bo.")
    for who in (context(user="bob"), context(store="other")):
        assert outcome(await planner.result("delete_comment", who=who, **arguments)) == "FAILED TOOL_ERROR"
    other_text = await planner("delete_comment", **arguments | {"text": "Ask Ann."})
    assert f"there is no comment {comment!r} with this text" in other_text["error"]
    for _ in range(2):
        assert await planner("delete_comment", call="once", **arguments) == {"deleted": comment, "text": "Ask Bo."}
    assert "there is no comment" in (await planner("delete_comment", **arguments))["error"]
    assert "comments" not in (await planner.projects())[0]["tasks"][0]


async def test_comment_without_a_known_subject_is_refused(planner: Planner) -> None:
    await planner("create_task", title="Party", project="Home")
    for arguments, error in [
        ({"text": "x"}, "name the task or the project to comment on"),
        ({"text": " ", "task": "Party"}, "the comment is empty"),
        ({"text": "x", "task": "Prty"}, "no task has the id or title 'Prty'; did you mean 'Party'?"),
        ({"text": "x", "project": "Hme"}, "similar titles: 'Home'"),
        ({"text": "x", "task": "Party", "project": "Work"}, "no project has the id or title 'Work'"),
    ]:
        assert error in (await planner("add_comment", **arguments))["error"]
    assert (await planner.registry.check("add_comment", {"text": "x" * 2001, "task": "Party"})).error_reason
    assert "comments" not in (await planner.projects())[0]


async def test_change_is_applied_once_and_undone_by_its_inverse(planner: Planner) -> None:
    """HITL-7, IDEMPOTENT: undoing a change keeps later changes by the user."""
    await planner("create_task", title="Party", project="Home", due="2026-12-24")
    await planner("update_project", project="Home", notes="mine")
    before = await planner.projects()
    for name, arguments in CHANGES:
        first = await planner.result(name, call=f"once_{name}", **arguments)
        assert await planner.projects() != before, name
        for undone in (False, True):
            if undone:
                await planner.undo(first)
                assert await planner.projects() == before, name
            if not undone or name.startswith(("update", "complete")):
                again = await planner.result(name, call=f"once_{name}", **arguments)
                assert (content(again), again.result.inverse) == (content(first), first.result.inverse), name
    assert await planner.projects() == before
    await planner("add_subtask", parent="Party", title="Done already")
    await planner("complete_tasks", tasks=["Done already"])
    result = await planner.result("complete_tasks", tasks=["Party", "Done already"])
    assert [task["title"] for task in content(result)["were_done_already"]] == ["Done already"]
    assert result.result.inverse.summary == "Reopen 'Party'"
    await planner.undo(result)
    unchanged: list[tuple[str, dict[str, Any]]] = [
        ("update_task", {"task": "Party", "title": "Party"}),
        ("update_project", {"project": "Home"}),
        ("reopen_tasks", {"tasks": ["Party"]}),
    ]
    for name, arguments in unchanged:
        result = await planner.result(name, **arguments)
        assert (outcome(result), result.result.HasField("inverse")) == ("SUCCEEDED", False), name
