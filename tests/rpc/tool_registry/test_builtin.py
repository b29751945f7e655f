"""The built-in tools over gRPC: time, tasks, stored results, files and web pages (TOOL-7, LOOP-8, LOOP-9)."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.chassis.ids import IdSource
from pawl.chassis.process.clock import SystemClock
from pawl.chassis.rpc.client import open_channel
from pawl.errors import CallNotFound
from pawl.event.v1 import call_pb2, run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job.v1.ledger_pb2_grpc import LedgerServiceServicer, add_LedgerServiceServicer_to_server
from pawl.server.db.database import Database
from pawl.server.egress.client import GuardedEgress
from pawl.server.egress.policy import read_rules
from pawl.server.process.metrics import Metrics
from pawl.server.rpc.server import RpcServer
from pawl.tool.v1 import execution_pb2
from pawl.tool_registry.builtin.clock import clock_tools
from pawl.tool_registry.builtin.files.folders import FileFolders
from pawl.tool_registry.builtin.files.rules import FileLimits
from pawl.tool_registry.builtin.files.tools import file_tools
from pawl.tool_registry.builtin.planning.store import PostgresPlanRepository
from pawl.tool_registry.builtin.planning.tools import planning_tools
from pawl.tool_registry.builtin.stored_results import result_tools
from pawl.tool_registry.builtin.web.tools import PAGE_BYTES_MAX, web_tools
from pawl.tool_registry.ledger import LedgerReads
from pawl.tool_registry.sources.process.helpers import Helpers
from tests.fakes.manual_clock import ManualClock
from tests.fakes.session_agent import OpenAuthenticator
from tests.rpc.tool_registry.registry import (
    ANN,
    Registry,
    content,
    context,
    error_of,
    outcome,
    pieces,
    refusal,
    running,
)
from tests.web_server import Reply, WebServer, pages, web_server


@pytest.fixture
async def planning(database_url: str, tmp_path: Path, ids: IdSource) -> Any:
    async with Database(database_url, application_name="test") as database:
        tools = planning_tools(PostgresPlanRepository(database), ids)
        async with running(database_url, tmp_path, tools) as registry:
            yield registry


async def test_time_is_returned_in_the_requested_zone(database_url: str, tmp_path: Path, clock: ManualClock) -> None:
    async with running(database_url, tmp_path, clock_tools(clock)) as registry:
        utc = content(await registry.run("get_current_time", call="a"))
        oslo = content(await registry.run("get_current_time", {"timezone": "europe/oslo"}, call="b"))
        assert utc == {
            "time": "2027-01-15T08:00:00+00:00", "weekday": "Friday", "timezone": "UTC", "abbreviation": "UTC"
        }  # fmt: skip
        assert (oslo["time"], oslo["timezone"]) == ("2027-01-15T09:00:00+01:00", "Europe/Oslo")
        for text, hint in [("Oslo", "Europe/Oslo"), ("Europe/Olso", "Europe/Oslo"), ("../etc/passwd", "IANA")]:
            assert hint in error_of(await registry.run("get_current_time", {"timezone": text}, call="c"))


class Ledger(LedgerServiceServicer):
    """Has calls of ann's conversation in acme, and a call of a job that reports to it."""

    def __init__(self, content_json: bytes) -> None:
        self._content_json = content_json

    async def GetCall(
        self, request: ledger_pb2.GetCallRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ledger_pb2.GetCallResponse:
        if (request.store_id, request.user_id) != ("acme", "ann") or request.call_id not in {"big", "open", "job"}:
            raise CallNotFound
        result = call_pb2.CallResult(content_json=self._content_json) if request.call_id != "open" else None
        place = "own" if request.call_id == "job" else "conversation"
        call = call_pb2.Call(store_id="acme", run_id="run", conversation_id=place, result=result)
        return ledger_pb2.GetCallResponse(call=call)

    async def GetRun(
        self, request: ledger_pb2.GetRunRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ledger_pb2.GetRunResponse:
        return ledger_pb2.GetRunResponse(run=run_pb2.Run(reports_to_conversation_id="conversation"))


async def test_truncated_result_is_read_in_pieces(database_url: str, tmp_path: Path, ids: IdSource) -> None:
    """LOOP-8: no character is split."""
    whole = '"' + "abcdefghé" * 100 + '"'
    server = RpcServer(f"unix:{tmp_path}/ledger", authenticator=OpenAuthenticator(), ids=ids, metrics=Metrics("ledger"))
    server.add(add_LedgerServiceServicer_to_server, Ledger(whole.encode()))  # type: ignore[abstract]  # two methods are enough
    async with (
        server,
        open_channel(server.address) as channel,
        running(database_url, tmp_path, result_tools(LedgerReads(channel))) as registry,
    ):
        read = await pieces(
            lambda offset: registry.run(
                "read_result", {"call_id": "big", "offset": offset, "length": 97}, call=f"c{offset}"
            )
        )
        assert "".join(each["text"] for each in read) == whole
        of_job = content(await registry.run("read_result", {"call_id": "job"}, call="job"))
        assert of_job["text"], "the job reports to this conversation"
        torn = content(await registry.run("read_result", {"call_id": "big", "offset": 10}, call="torn"))
        assert torn["text"].startswith("é")
        beyond = content(await registry.run("read_result", {"call_id": "big", "offset": 10**6}, call="beyond"))
        assert (beyond["text"], beyond["next_offset"]) == ("", None)
        for number, (call_id, who) in enumerate(
            [
                ("open", context()),
                ("none", context()),
                ("big", context(user="bob")),
                ("big", context(store="other")),
            ]
        ):
            error_of(await registry.run("read_result", {"call_id": call_id}, call=f"f{number}", who=who))
        foreign = context(conversation_id="another")
        for call_id in ("big", "job"):
            error_of(await registry.run("read_result", {"call_id": call_id}, call=f"{call_id}_foreign", who=foreign))


async def test_projects_and_parents_are_found_by_id_or_title_with_suggestions(planning: Registry) -> None:
    """LOOP-9, I13: other users and stores never see the projects and tasks."""
    made = await asyncio.gather(
        *(planning.run("create_task", {"title": f"t{n}", "project": "New"}, call=f"c{n}") for n in range(6))
    )
    (project_id,) = {content(result)["project"]["project_id"] for result in made}
    for number, (name, created) in enumerate((("NEW", False), (project_id, False), ("Nw", True))):
        task = {"title": f"Party {number}", "project": name}
        again = content(await planning.run("create_task", task, call=f"p{number}"))
        assert (again["project"]["project_id"] != project_id, "project_created" in again) == (created, created), name
    assert again["similar_projects"] == ["New"]
    for call, parent in (("by_title", "party 0"), ("by_id", again["task_id"])):
        added = content(await planning.run("add_subtask", {"parent": parent, "title": "Cake"}, call=call))
        assert added["parent"]["title"] in {"Party 0", "Party 2"}
    for who, said in (
        (context(), "did you mean 'Party "),
        (context(user="bob"), "no task has the id or title"),
        (context(store="other"), "no task has the id or title"),
    ):
        arguments = {"parent": "Prty 0", "title": "x"}
        assert said in error_of(await planning.run("add_subtask", arguments, call="near", who=who))
    twice = {"title": "Party 0", "project": "Other"}
    await planning.run("create_task", twice, call="twice", who=context(run="earlier"))
    failed = await planning.run("add_subtask", {"parent": "Party 0", "title": "x"}, call="u", who=context(run="later"))
    assert "2 tasks have the title 'Party 0'" in content(failed)["error"], "no project is guessed"
    named = {"parent": "Party 0", "title": "x", "project": "other"}
    assert content(await planning.run("add_subtask", named, call="v"))["parent"]["title"] == "Party 0"


@pytest.fixture
async def files(database_url: str, tmp_path: Path) -> AsyncIterator[Registry]:
    limits = FileLimits(file_bytes_max=1 << 20, store_bytes_max=1 << 24)
    tools = file_tools(FileFolders(tmp_path / "files", limits, SystemClock().now))
    async with running(database_url, tmp_path, tools) as registry:
        yield registry


async def test_file_calls_are_serialized_by_path_and_moves_by_both_paths(files: Registry) -> None:
    for name, arguments, keys in [
        ("write_file", {"path": "a/b", "content": ""}, ["file:a/b"]),
        ("edit_file", {"path": "a/b", "old_text": "x", "new_text": "y"}, ["file:a/b"]),
        ("move_file", {"path": "a/b", "new_path": "c"}, ["file:a/b", "file:c"]),
        ("delete_file", {"path": "a/b"}, ["file:a/b"]),
        ("read_file", {"path": "a/b"}, []),
    ]:
        assert list((await files.check(name, arguments)).resource_keys) == keys


async def test_deleting_needs_approval_and_shows_its_targets(files: Registry) -> None:
    """HITL-2: writing a file needs no approval."""
    assert (await files.check("write_file", {"path": "a", "content": "x"})).approval_cause == ""
    verdict = await files.check("delete_file", {"path": "a"})
    assert (verdict.approval_cause, verdict.preview) == ("category DESTRUCTIVE", "Delete the file or empty folder 'a'")


PARAGRAPHS = [f"This is paragraph {number} of a page that has quite a few of them." for number in range(1, 40)]
ARTICLE = "<html><head><title>Page</title></head><body><article>{}</article></body></html>".format(
    "".join(f"<p>{text}</p>" for text in PARAGRAPHS)
)
PAGES = {
    "/": Reply(ARTICLE.encode()),
    "/moved": Reply(status=301, headers={"Location": "/"}),
    "/links": Reply(b'<html><body><p>See <a href="/">the page</a>.</p></body></html>'),
    "/image": Reply(b"\x89PNG", headers={"Content-Type": "image/png"}),
    "/large": Reply(b"a" * (PAGE_BYTES_MAX + 1), headers={"Content-Type": "text/plain"}),
    "/inside": Reply(status=302, headers={"Location": "http://169.254.169.254/latest/meta-data/"}),
}


@pytest.fixture
async def reader(database_url: str, tmp_path: Path) -> AsyncIterator[tuple[Registry, WebServer, str]]:
    async with web_server(pages(PAGES)) as server:
        rules = {"acme": read_rules(None, [f"127.0.0.1:{server.port}"])}
        egress = GuardedEgress(rules, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        async with Helpers() as helpers, running(database_url, tmp_path, web_tools(egress, helpers)) as registry:
            yield registry, server, f"http://127.0.0.1:{server.port}"


async def test_web_page_is_read_in_pieces(reader: tuple[Registry, WebServer, str]) -> None:
    registry, _, url = reader
    whole = "\n\n".join(PARAGRAPHS)
    read = await pieces(
        lambda offset: registry.run(
            "web_scrape", {"url": f"{url}/moved", "offset": offset, "max_characters": 1000}, call=f"c{offset}"
        )
    )
    shown = {(each["title"], each["url"], each["total_characters"], len(each["text"]) <= 1000) for each in read}
    assert ("".join(each["text"] for each in read), shown) == (whole, {("Page", f"{url}/", len(whole), True)})
    beyond = content(await registry.run("web_scrape", {"url": url, "offset": 10**6}, call="beyond"))
    assert (beyond["text"], beyond["next_offset"]) == ("", None)


async def test_links_are_returned_on_request(reader: tuple[Registry, WebServer, str]) -> None:
    registry, _, url = reader
    found = content(await registry.run("web_scrape", {"url": f"{url}/links", "links": True}))
    assert found["links"] == [{"text": "the page", "url": f"{url}/"}]
    assert "links" not in content(await registry.run("web_scrape", {"url": f"{url}/links"}, call="b"))


async def test_unreadable_or_forbidden_pages_are_explained(reader: tuple[Registry, WebServer, str]) -> None:
    registry, server, url = reader
    (entry,) = await registry.catalog.visible(ANN)
    assert (entry.definition.category, entry.definition.effect) == ("SAFE", "READ_ONLY")
    refused = ["http://127.0.0.1/", "http://localhost/", "file:///etc/passwd", "nonsense"]
    rows = [(target, context(), "") for target in refused]
    rows.append((url, context(store="other"), ""))
    rows += [
        (f"{url}/image", context(), "image/png is not text"),
        (f"{url}/none", context(), "status 404"),
        (f"{url}/inside", context(), "169.254.169.254 is not an allowed address"),
    ]
    for number, (target, who, says) in enumerate(rows):
        assert says or server.connections == 0
        assert says in error_of(await registry.run("web_scrape", {"url": target}, call=f"c{number}", who=who)), target
    found = content(await registry.run("web_scrape", {"url": f"{url}/large"}))
    assert found["total_characters"] == PAGE_BYTES_MAX
    assert found["note"] == f"only the first {PAGE_BYTES_MAX} bytes of the page were read"


@dataclass
class Planner:
    registry: Registry
    _calls: int = 0

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
    assert (changed, (await planner.projects())[0]["tasks"]) == (shown, [shown])
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
        assert (await planner("complete_tasks", tasks=["Party"], who=who))["completed"][0]["task_id"] != mine["task_id"]
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
