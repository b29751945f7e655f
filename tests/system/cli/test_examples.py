"""The workflows and the goal of docs/examples, as users run them."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.system.cli.conftest import CommandLine, find
from tests.tidy.tree import ROOT

WORKFLOWS = ROOT / "docs/examples/workflows"
# More than a chunk of a map
FILES = 60


@pytest.fixture(scope="module")
def examples(pawl: CommandLine) -> CommandLine:
    pawl.succeed("apply", "-f", str(WORKFLOWS))
    return pawl


def folder(pawl: CommandLine) -> Path:
    return pawl.data / "files/local"


def started(pawl: CommandLine, name: str, **given: str) -> str:
    return pawl.succeed("workflows", "run", name, "--input", json.dumps(given), "--detach").strip()


def names(path: Path) -> set[str]:
    return {each.name for each in path.iterdir()} if path.exists() else set()


def test_research_by_parallel_agents_is_checked_by_a_person_and_becomes_a_report(
    examples: CommandLine, tmp_path: Path
) -> None:
    notes = tmp_path / "mills.md"
    notes.write_text("Tide mills: their history began in Ireland, their costs were low, their risks were storms.")
    examples.succeed("documents", "add", str(notes), "--shared")
    run_id = started(examples, "research", topic="tide mills")
    shown = examples.until(lambda shown: "pawl approve" in shown, "workflows", "show", run_id)
    assert len(re.findall(r"[├└] ✓ (?:history|costs|risks) +agent +succeeded", shown)) == 3, shown
    node_id = find(rf"pawl approve {run_id} (node_\w+)", shown)
    examples.succeed("approve", run_id, node_id, "--answer", "write it")
    examples.succeed("watch", run_id)
    shown = examples.succeed("workflows", "show", run_id)
    assert shown.rstrip().endswith("reports/tide mills.md"), shown
    report = (folder(examples) / "reports/tide mills.md").read_text()
    assert report.count("mills.md") == 3, report


def test_an_agent_calls_a_workflow_as_a_tool(examples: CommandLine) -> None:
    run_id = examples.succeed("run", "--detach", 'call research with {"topic": "water wheels"}').strip()
    shown = examples.until(lambda inbox: "Write the report on water wheels" in inbox, "inbox", "--list")
    found = re.search(r"run (run_\w+)  call (node_\w+)", shown[shown.index("water wheels") :])
    assert found is not None, shown
    examples.succeed("approve", found[1], found[2], "--answer", "write it")
    examples.succeed("watch", run_id)
    assert "reports/water wheels.md" in examples.succeed("status", run_id) + examples.succeed("steps", run_id, "--full")


def test_an_agent_calls_a_workflow_in_the_background_and_a_token_ends_its_wait(
    examples: CommandLine, tmp_path: Path
) -> None:
    nodes = {
        "link": {"kind": "tool", "tool": "write_file", "arguments": {"path": "link.txt", "content": "${tokens.paid}"}},
        "paid": {"kind": "wait", "event": "paid", "after": ["link"]},
        "total": {"kind": "tool", "tool": "calculate", "arguments": {"expression": "${nodes.paid.output.euros} * 2"}},
        "answer": {"kind": "output", "value": "${nodes.total.output.result} euros"},
    }
    file = tmp_path / "order.json"
    file.write_text(json.dumps({"name": "order", "description": "Order.", "as_tool": True, "nodes": nodes}))
    examples.succeed("workflows", "save", str(file))
    run_id = examples.succeed("run", "--detach", 'call order with {"_executeAsync": true}').strip()
    assert "started a background job to" in examples.succeed("watch", run_id)
    waits = examples.until(lambda jobs: "waiting\torder" in jobs, "jobs", "list")
    link = folder(examples) / "link.txt"
    examples.until(lambda _: link.exists(), "jobs", "list")
    token, job_id = link.read_text(), waits.split()[0]
    examples.succeed("workflows", "complete", token, "--payload", '{"euros": 21}')
    examples.succeed("watch", job_id)
    assert "42 euros" in examples.succeed("workflows", "show", token.partition(".")[0])
    examples.succeed("workflows", "complete", token, "--payload", '{"euros": 21}')
    code, _, error = examples.run("workflows", "complete", token, "--payload", "1")
    assert (code != 0, "used" in error) == (True, True), error


def test_a_nightly_digest_is_mailed_by_a_schedule(examples: CommandLine) -> None:
    examples.succeed("run", "add task Write the workflow page")
    fired = examples.succeed("schedules", "trigger", "nightly")
    examples.succeed("watch", find(r"(run_\w+)", fired))
    mails = [each.read_text() for each in (examples.data / "outbox").rglob("*") if each.is_file()]
    digests = [mail for mail in mails if "team@example.com" in mail and "Subject: Open tasks on 20" in mail]
    assert len(digests) == 1, mails
    assert "Write the workflow page" in digests[0]


def test_a_batch_moves_either_all_files_or_none(examples: CommandLine) -> None:
    inbox = folder(examples) / "inbox"
    inbox.mkdir(parents=True, exist_ok=True)
    wanted = {f"{number}.txt" for number in range(FILES)}
    for name in wanted:
        (inbox / name).write_text(name)
    kept = folder(examples) / "archive/50.txt"
    kept.parent.mkdir()
    kept.write_text("an older file with this name")
    run_id = started(examples, "batch", source="inbox", target="archive")
    code, _, _ = examples.run("watch", run_id)
    assert code == 1
    assert names(inbox) == wanted
    assert names(kept.parent) == {"50.txt"}
    kept.unlink()
    run_id = started(examples, "batch", source="inbox", target="archive")
    examples.succeed("watch", run_id)
    shown = examples.succeed("workflows", "show", run_id)
    assert f"━ {FILES} of {FILES}" in shown, shown
    assert f"{FILES} files moved" in shown, shown
    assert names(kept.parent) == wanted
    assert names(inbox) == set()


class Site(BaseHTTPRequestHandler):
    """A web site whose page `new.html` does not exist when it is first requested."""

    exists = False

    def do_GET(self) -> None:  # the name that the base class calls
        is_new = self.path == "/new.html"
        self.send_response(
            HTTPStatus.OK if self.path == "/page.html" or (is_new and Site.exists) else HTTPStatus.NOT_FOUND
        )
        self.end_headers()
        Site.exists |= is_new

    def log_message(self, *_: object) -> None:
        """Print nothing."""


@pytest.fixture
def site() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_goal_waits_between_attempts_until_all_links_answer(pawl: CommandLine, site: str) -> None:
    goal = (
        *("goal", "start", 'All links answer; call replace_link with {"old": "old.html", "new": "new.html"};'),
        *("--tool", "check_links", "--arguments", json.dumps({"url": f"{site}/page.html"})),
        *("--expression", "1.0 - double(size(value.broken)) / double(size(value.links))"),
        *("--tools", "replace_link", "--wait", "1", "--attempts", "5"),
    )
    run_id = find(r"(run_\w+)", pawl.succeed(*goal))
    pawl.succeed("goal", "watch", run_id)
    shown = pawl.succeed("goal", "show", run_id)
    assert re.search(r"1\. .* 50% The check returned", shown), shown
    assert "The goal was met after 1 attempt: The check passed." in shown, shown
