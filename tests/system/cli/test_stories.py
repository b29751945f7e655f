"""The six stories that the tools, the people and the command line have to tell together."""

from __future__ import annotations

import base64
import json
import re

from tests.system.cli.conftest import CommandLine
from tests.system.cli.test_commands import pending_call, started


def project(pawl: CommandLine, title: str) -> str:
    """What list_projects says of one project, as text."""
    output = pawl.succeed("run", "--json", "list projects")
    results = [json.loads(line) for line in output.splitlines()]
    listed = next(
        event["call_changed"]["call"]["result"]
        for event in results
        if event.get("call_changed", {}).get("call", {}).get("result")
    )
    content = json.loads(base64.b64decode(listed["content_json"]))
    found: list[str] = [json.dumps(each) for each in content["projects"] if each["title"] == title]
    return found[0] if found else ""


def run_of(output: str) -> str:
    """The id of the run that an output ends with."""
    found = re.findall(r"run_\w+", output)
    return str(found[-1])


def test_a_task_with_two_subtasks_is_one_batch(pawl: CommandLine) -> None:
    """LOOP-9: the subtasks name their parent by its title, in the same batch."""
    output = pawl.succeed("run", "add task Launch day with subtasks Book a room and Invite people")
    assert output.count("✓ create_task") == 1
    assert output.count("✓ add_subtask") == 2
    steps = pawl.succeed("steps", run_of(output))
    assert "Book a room" in steps
    (task,) = [task for task in json.loads(project(pawl, "Inbox"))["tasks"] if task["title"] == "Launch day"]
    assert [subtask["title"] for subtask in task["subtasks"]] == ["Book a room", "Invite people"]


def test_the_reasoning_of_any_request_can_be_seen(pawl: CommandLine) -> None:
    """HITL-8: real reasoning, also of a request without tools."""
    for prompt in ("hello", "what is 6 * 7"):
        run_id = run_of(pawl.succeed("run", prompt))
        folded = pawl.succeed("steps", run_id)
        assert "reasoning" in folded.lower()
        assert "The prompt" in pawl.succeed("steps", run_id, "--full")


def test_an_ambiguous_project_is_asked_about_then_updated_then_undone(pawl: CommandLine) -> None:
    """HITL-1 and HITL-7: the original intent goes on with the answer, and undo reaches across the question."""
    pawl.succeed("run", "add task Write it in project API docs and add task Build it in project API server")
    run_id = started(pawl, "update the API project: moved to May")
    call_id = pending_call(pawl, run_id)
    listed = pawl.succeed("inbox", "--list")
    assert "API docs" in listed
    assert "API server" in listed
    pawl.succeed("approve", run_id, call_id, "--answer", "API server")
    assert "completed" in pawl.succeed("watch", run_id)
    assert "moved to May" in project(pawl, "API server")
    assert "moved to May" not in project(pawl, "API docs")
    output = pawl.succeed("undo", run_id, "--yes")
    assert "update_project" in output
    assert "moved to May" not in project(pawl, "API server")
    again = pawl.run("undo", run_id, "--yes")[1]
    assert "already" in again.lower() or "nothing" in again.lower()


def test_a_letter_to_five_is_previewed_edited_and_sent(pawl: CommandLine) -> None:
    """HITL-2, HITL-3: shown whole, changed by the reviewer, sent as changed, and the model knows."""
    people = [f"{name}@example.com" for name in ("ann", "bob", "cyd", "dan", "eve")]
    before = set((pawl.data / "outbox").glob("**/*.eml"))
    run_id = started(pawl, f"e-mail {', '.join(people)} about lunch: see you at noon")
    call_id = pending_call(pawl, run_id)
    listed = pawl.succeed("inbox", "--list")
    assert all(address in listed for address in people)
    assert "bulk of 5" in listed
    assert "Subject: lunch" in listed
    edited = json.dumps({"to": people[:4], "subject": "lunch", "body": "see you at one", "cc": []})
    pawl.succeed("approve", run_id, call_id, "--edit", edited)
    watched = pawl.succeed("watch", run_id)
    assert "reviewer edited" in watched
    (letter,) = set((pawl.data / "outbox").glob("**/*.eml")) - before
    text = letter.read_text()
    assert "see you at one" in text
    assert people[4] not in text


def test_completing_twelve_tasks_asks_first(pawl: CommandLine) -> None:
    """HITL-2, D8: bulk is asked about although the tool is SAFE; siblings and the rest are one undo."""
    for numbers in (range(6), range(6, 12)):
        wishes = " and ".join(f"add task T{number} in project Move" for number in numbers)
        pawl.succeed("run", wishes)
    run_id = started(pawl, "complete all tasks in Move")
    call_id = pending_call(pawl, run_id)
    assert "bulk of 12" in pawl.succeed("inbox", "--list")
    assert '"done"' not in project(pawl, "Move")
    pawl.succeed("approve", run_id, call_id, "--yes")
    assert "completed" in pawl.succeed("watch", run_id)
    assert project(pawl, "Move").count('"done"') == 12
