"""The built-in tools over gRPC: time, tasks, stored results (TOOL-7, LOOP-8, LOOP-9)."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
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
from tests.rpc.tool_registry.registry import ANN, Registry, content, context, outcome, running
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
            failed = await registry.run("get_current_time", {"timezone": text}, call="c")
            assert outcome(failed) == "FAILED TOOL_ERROR"
            assert hint in content(failed)["error"]


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
        text, number = "", 0
        offset: int | None = 0
        while offset is not None:
            arguments = {"call_id": "big", "offset": offset, "length": 97}
            piece = content(await registry.run("read_result", arguments, call=f"c{number}"))
            text, offset, number = text + piece["text"], piece["next_offset"], number + 1
        assert text == whole
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
            failed = await registry.run("read_result", {"call_id": call_id}, call=f"f{number}", who=who)
            assert outcome(failed) == "FAILED TOOL_ERROR"
        foreign = context()
        foreign.conversation_id = "another"
        for call_id in ("big", "job"):
            failed = await registry.run("read_result", {"call_id": call_id}, call=f"{call_id}_foreign", who=foreign)
            assert outcome(failed) == "FAILED TOOL_ERROR"


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
        failed = await planning.run("add_subtask", {"parent": "Prty 0", "title": "x"}, call="near", who=who)
        assert (outcome(failed), said in content(failed)["error"]) == ("FAILED TOOL_ERROR", True)
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
    whole, number = "", 0
    offset: int | None = 0
    while offset is not None:
        arguments = {"url": f"{url}/moved", "offset": offset, "max_characters": 1000}
        found = content(await registry.run("web_scrape", arguments, call=f"c{number}"))
        assert (found["title"], found["url"]) == ("Page", f"{url}/")
        assert len(found["text"]) <= 1000
        whole, offset, number = whole + found["text"], found["next_offset"], number + 1
    assert whole == "\n\n".join(PARAGRAPHS)
    assert found["total_characters"] == len(whole)
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
        failed = await registry.run("web_scrape", {"url": target}, call=f"c{number}", who=who)
        assert (outcome(failed), says in content(failed)["error"]) == ("FAILED TOOL_ERROR", True), target
    found = content(await registry.run("web_scrape", {"url": f"{url}/large"}))
    assert found["total_characters"] == PAGE_BYTES_MAX
    assert found["note"] == f"only the first {PAGE_BYTES_MAX} bytes of the page were read"
