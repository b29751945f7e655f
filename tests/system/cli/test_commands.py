"""The command line against a real suite."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.system.cli.conftest import CommandLine

ROOT = Path(__file__).parents[3]


# The first test waits for the suite to start.
def pending_call(pawl: CommandLine, run_id: str) -> str:
    """The id of the call that a run waits for, as the inbox shows it."""
    output = pawl.succeed("inbox")
    found = re.search(rf"run {run_id}  call (call_\w+)", output)
    assert found is not None, output
    return found[1]


def started(pawl: CommandLine, text: str, *options: str) -> str:
    """A run that waits for somebody."""
    run_id = pawl.succeed("run", "--detach", *options, text).strip()
    pawl.until(lambda inbox: run_id in inbox, "inbox", "--list")
    return run_id


def test_a_run_is_shown_and_its_outcome_is_the_exit_code(pawl: CommandLine) -> None:
    output = pawl.succeed("run", "what is 17 * 23")
    assert "calculate" in output
    assert "391" in output
    assert "completed" in output.splitlines()[-1]


def test_the_first_program_of_the_readme_works(pawl: CommandLine, tmp_path: Path) -> None:
    """It finds the suite and the key where `pawl up` keeps them."""
    program = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / ".pawl").symlink_to(pawl.data)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert "391" in done.stdout
    assert done.stderr == ""


def test_without_the_key_a_command_says_where_it_is(pawl: CommandLine) -> None:
    """OPS-1."""
    endpoints = json.loads((pawl.data / "endpoints.json").read_text())
    address = endpoints["services"]["agent-loop"][0]["grpc"].replace("127.0.0.1", "localhost")
    code, _, errors = pawl.run("--address", address, "runs")
    assert code != 0
    assert "PAWL_API_KEY" in errors
    assert "--data FOLDER" in errors


def test_a_run_as_json_is_its_whole_log(pawl: CommandLine) -> None:
    """EVT-1."""
    lines = pawl.succeed("run", "--json", "what time is it in Oslo").splitlines()
    events = [json.loads(line) for line in lines]
    assert [int(event["seq"]) for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["type"] == "run.completed"
    again = pawl.succeed("watch", "--json", events[0]["run_id"])
    assert again.splitlines() == lines
    rest = pawl.succeed("watch", "--json", events[0]["run_id"], "--after", "3")
    assert rest.splitlines() == lines[3:]


def test_without_a_terminal_nothing_is_approved_or_undone_unless_one_says_so(pawl: CommandLine) -> None:
    """HITL-3: who is not asked has not agreed."""
    run_id = started(pawl, "e-mail ann@example.com about lunch: see you at noon")
    call_id = pending_call(pawl, run_id)
    for options in ((), ("--remember", "run")):
        code, _, errors = pawl.run("approve", run_id, call_id, *options, keyboard="y\n")
        assert (code, errors.strip()) == (2, "Nobody can be asked here whether you are sure. Add --yes if you are.")
    assert pending_call(pawl, run_id) == call_id
    pawl.succeed("approve", run_id, call_id, "--yes")
    done = pawl.succeed("run", "--detach", "add task Paint the fence").strip()
    pawl.succeed("watch", done)
    code, output, errors = pawl.run("undo", done, keyboard="y\n")
    assert "create_task" in output
    assert (code, errors.strip()) == (2, "Nobody can be asked here whether you are sure. Add --yes if you are.")
    assert "to undo" in pawl.succeed("undo", done, "--preview")


def test_the_steps_of_a_run_are_folded_and_open(pawl: CommandLine) -> None:
    """HITL-8"""
    run_id = pawl.succeed("run", "--detach", "what is 17 * 23").strip()
    pawl.succeed("watch", run_id)
    folded = pawl.succeed("steps", run_id).splitlines()
    kinds = [line.split(":")[0].split()[1] for line in folded]
    assert kinds == ["reasoning", "planning", "call", "result", "reasoning", "answer"]
    assert len(pawl.succeed("steps", run_id, "--full").splitlines()) > len(folded)


def test_a_run_is_undone_once_what_takes_it_back_is_approved(pawl: CommandLine) -> None:
    """HITL-7: shown before, approved in between, reported after."""
    run_id = pawl.succeed("run", "--detach", "add task Paint the fence").strip()
    pawl.succeed("watch", run_id)
    assert "create_task (Delete the task 'Paint the fence') to undo" in pawl.succeed("undo", run_id, "--preview")
    with ThreadPoolExecutor() as beside:
        undoing = beside.submit(pawl.succeed, "undo", run_id, "--yes")
        found = None
        while found is None and not undoing.done():
            found = re.search(r"run (run_\w+)  call (undo_\w+)", pawl.succeed("inbox", "--list"))
        assert found is not None
        pawl.succeed("approve", *found.groups(), "--yes")
        output = undoing.result()
    assert "create_task (Delete the task 'Paint the fence') undone" in output.splitlines()[-1]


def test_a_run_without_effects_has_nothing_to_undo(pawl: CommandLine) -> None:
    run_id = pawl.succeed("run", "--detach", "what is 17 * 23").strip()
    pawl.succeed("watch", run_id)
    output = pawl.succeed("undo", run_id, "--yes")
    assert "calculate nothing to undo: It only reads." in output
    assert output.splitlines()[-1] == "Nothing can be undone."
    assert pawl.run("undo", "run_that_is_not_there")[0] == 2


def test_a_detached_run_is_cancelled_and_ends_with_1(pawl: CommandLine) -> None:
    run_id = pawl.succeed("run", "--detach", "count very slowly to 500").strip()
    assert "cancel" in pawl.succeed("cancel", run_id, "--reason", "enough")
    code, output, _ = pawl.run("watch", run_id)
    assert code == 1
    assert "cancelled" in output.splitlines()[-1]
    assert run_id in pawl.succeed("runs")


def test_a_gated_call_is_shown_whole_and_runs_with_the_edited_arguments(pawl: CommandLine) -> None:
    """HITL-2, HITL-3."""
    run_id = started(pawl, "e-mail ann@example.com about lunch: see you at noon")
    call_id = pending_call(pawl, run_id)
    code, _, errors = pawl.run("approve", run_id, call_id, "--edit", '{"to": 5}')
    assert code == 2
    assert "body: is required" in errors
    edited = '{"to": ["bob@example.com"], "subject": "dinner", "body": "at eight", "cc": []}'
    assert "see you at noon" in pawl.succeed("approve", run_id, call_id, "--edit", edited)
    assert "bob@example.com" in pawl.succeed("watch", run_id)
    code, _, errors = pawl.run("approve", run_id, call_id)
    assert code == 2
    assert "does not wait" in errors


def test_a_rejected_call_does_not_run_and_the_reason_reaches_the_model(pawl: CommandLine) -> None:
    run_id = started(pawl, "e-mail ann@example.com about lunch: see you at noon")
    pawl.succeed("approve", run_id, pending_call(pawl, run_id), "--reject", "not before noon")
    assert "not before noon" in pawl.succeed("watch", run_id)


def test_a_question_is_answered_from_the_command_line(pawl: CommandLine) -> None:
    run_id = started(pawl, "book a table")
    call_id = pending_call(pawl, run_id)
    assert pawl.run("approve", run_id, call_id)[0] == 2
    pawl.succeed("approve", run_id, call_id, "--answer", "Next Friday")
    assert 'You answered "Next Friday"' in pawl.succeed("watch", run_id)


def test_a_chat_runs_the_front_end_tool_and_takes_answers_and_decisions(pawl: CommandLine) -> None:
    keyboard = (
        "show me the plan\n"
        "book a table\n2\n"
        "e-mail ann@example.com about lunch: hi\nperhaps\nr not today\n"
        "/runs\nwhat is 6 * 7\n"
    )
    output = pawl.succeed("chat", keyboard=keyboard)
    assert "[the plan]" in output
    assert 'You answered "Tomorrow at 19:00"' in output
    assert "Type one of" in output
    assert "send_email rejected" in output
    assert "6 * 7 = 42" in output
    assert output.count("completed (") == 4


def test_tools_and_notifications_are_listed(pawl: CommandLine) -> None:
    run_id = pawl.succeed("run", "--detach", "what is 1 + 1").strip()
    assert re.search(r"^send_email\t1\tbackend\tsensitive\tat most once\t", pawl.succeed("tools"), re.MULTILINE)
    notifications = pawl.until(lambda told: run_id in told, "notifications")
    assert "Run completed" in next(line for line in notifications.splitlines() if run_id in line)

    def all_are_read(told: str) -> bool:
        # Of a run before it one may be told only now.
        pawl.succeed("notifications", "--read", "--count", "200")
        return "no unread" in told

    pawl.until(all_are_read, "notifications", "--unread")


def test_another_user_sees_nothing_of_it(pawl: CommandLine) -> None:
    """I13."""
    run_id = pawl.succeed("run", "--detach", "what is 1 + 1").strip()
    assert "You have no runs" in pawl.succeed("--user", "bob", "runs")
    code, output, errors = pawl.run("--user", "bob", "watch", run_id)
    assert (code, output) == (2, "")
    assert errors == pawl.run("watch", "run_absent")[2]


def test_a_position_beyond_the_end_is_refused_in_a_sentence(pawl: CommandLine) -> None:
    run_id = pawl.succeed("run", "--detach", "what is 1 + 1").strip()
    code, _, errors = pawl.run("watch", run_id, "--after", "100000")
    assert code == 2
    assert errors.startswith("The log ends at seq")


def listed(pawl: CommandLine, run_id: str) -> str:
    """The line of a run in the list."""
    return line_of(run_id, pawl.succeed("runs"))


def line_of(run_id: str, runs: str) -> str:
    """Its line, empty if it has none."""
    return next((line for line in runs.splitlines() if line.startswith(run_id)), "")


def test_a_run_waits_for_tokens_and_goes_on_after_a_top_up(pawl: CommandLine) -> None:
    """LOOP-12."""
    run_id = pawl.succeed("run", "--detach", "--tokens-max", "5", "what is 17 * 23").strip()
    pawl.until(lambda runs: "waiting for more tokens" in line_of(run_id, runs), "runs")
    inbox = pawl.succeed("inbox")
    assert f"{run_id} waits for more tokens" in inbox
    needed = re.search(rf"add at least (\d+) with: pawl top-up {run_id} \1", inbox)
    assert needed
    assert f"at least {needed[1]} tokens" in pawl.succeed("status", run_id)
    assert f"{run_id} may use 50005 tokens" in pawl.succeed("top-up", run_id, "50000")
    output = pawl.succeed("watch", run_id)
    assert "‖ waits for more tokens" in output
    assert f"pawl top-up {run_id} {needed[1]}" in output
    assert "+ me added 50000 tokens: it may use 50005" in output
    assert "completed" in output.splitlines()[-1]
    code, _, errors = pawl.run("top-up", run_id, "1")
    assert code == 2
    assert "ended" in errors


def test_a_run_that_waits_for_its_turn_says_its_place(pawl: CommandLine) -> None:
    first = started(pawl, "book a table")
    conversation = listed(pawl, first).split("\t")[3]
    waiting = []
    for place in (1, 2):
        code, output, errors = pawl.run("run", "--detach", "--conversation", conversation, "and now?")
        assert (code, errors.strip()) == (0, f"queued, place {place}")
        waiting.append(output.strip())
    for run_id in (*reversed(waiting), first):
        pawl.succeed("cancel", run_id)


def test_what_no_operator_is_needed_for_is_refused_in_a_sentence(pawl: CommandLine) -> None:
    run_id = started(pawl, "book a table")
    assert "No run needs attention." in pawl.succeed("attention")
    assert f"{run_id} needs no attention." in pawl.succeed("attention", run_id)
    code, _, errors = pawl.run("redrive", run_id, "--reason", "to see")
    assert code == 2
    assert "`pawl attention` lists the runs that need an operator." in errors
    code, _, errors = pawl.run("resolve", run_id, pending_call(pawl, run_id), "--tell-model")
    assert code == 2
    assert "not in doubt" in errors
    code, _, errors = pawl.run("top-up", run_id, "1")
    assert code == 2
    assert "no token budget" in errors
    assert pawl.run("redrive", "run_absent")[2] == pawl.run("--store", "other", "redrive", run_id)[2]
    pawl.succeed("cancel", run_id)


@pytest.mark.parametrize(
    ("command", "following"),
    [
        (("attention", "nope"), "`pawl runs`"),
        (("tools", "stats", "nope"), "`pawl tools`"),
        (("tools", "stats", "--agent", "nope"), "`pawl agents list`"),
        (("memory", "list", "--agent", "nope"), "`pawl agents list`"),
        (("memory", "erase", "nope", "--yes"), "`pawl memory list`"),
        (("memory", "erase", "--agent", "nope", "--yes"), "`pawl agents list`"),
        (("notify", "mute", "nope"), "`pawl conversations list`"),
        (("notify", "unmute", "nope"), "`pawl conversations list`"),
        (("jobs", "list", "--conversation", "nope"), "`pawl conversations list`"),
        (("jobs", "show", "nope"), "`pawl jobs list --all`"),
        (("rules", "revoke", "nope"), "`pawl rules list`"),
    ],
    ids=" ".join,
)
def test_what_is_not_there_is_refused_with_what_lists_those_that_are(
    pawl: CommandLine, command: tuple[str, ...], following: str
) -> None:
    code, output, errors = pawl.run(*command)
    assert (code, output) == (2, "")
    assert re.match(r"(No|You have no) such ", errors)
    assert following in errors


def test_documents_are_added_listed_found_by_the_model_and_removed(pawl: CommandLine, tmp_path: Path) -> None:
    """TOOL-7."""
    file = tmp_path / "menu.txt"
    file.write_text("Grüße: marzipan at noon", encoding="utf-8")
    assert pawl.succeed("documents", "add", str(file)) == "Added menu.txt.\n"
    assert pawl.succeed("documents", "add", str(file), "--shared", "--name", "House menu") == "Added House menu.\n"
    file.write_text("marzipan at one", encoding="utf-8")
    assert pawl.succeed("documents", "add", str(file)) == "Replaced menu.txt.\n"
    rows = [line.split("\t") for line in pawl.succeed("documents", "list").splitlines()]
    assert [(row[0], row[1], row[-1]) for row in rows] == [("store", "25", "House menu"), ("you", "15", "menu.txt")]
    assert "marzipan" in pawl.succeed("run", 'call search_documents with {"query": "marzipan"}')
    pawl.succeed("documents", "remove", "menu.txt")
    code, _, errors = pawl.run("documents", "remove", "menu.txt")
    assert code == 2
    assert "`pawl documents list`" in errors
    file.write_bytes(b"\xff\xfe")
    for given, sentence in [(file, "is not a text in UTF-8"), (tmp_path / "none", "cannot be read")]:
        code, _, errors = pawl.run("documents", "add", str(given))
        assert code == 2
        assert sentence in errors


def test_what_the_model_writes_is_in_the_files_of_the_data_folder(pawl: CommandLine) -> None:
    """TOOL-7."""
    pawl.succeed("run", 'call write_file with {"path": "notes/plan.md", "content": "marzipan"}')
    (written,) = (pawl.data / "files").glob("*/notes/plan.md")
    assert written.read_text() == "marzipan"
    assert "marzipan" in pawl.succeed("run", 'call read_file with {"path": "notes/plan.md"}')


def test_what_an_agent_waits_for_is_shown_at_the_top_and_decided_in_the_chat(pawl: CommandLine) -> None:
    """TOOL-7."""
    task = "ask an agent to e-mail ann@example.com about lunch: at noon"
    output = pawl.succeed("chat", keyboard=f"{task}\ny\n")
    assert "⇉ run_agent" in output
    assert "✓ send_email" in output
    command = [sys.executable, "-m", "pawl.cli", "run", task]
    with subprocess.Popen(command, env=pawl.environment(), stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        shown = ""
        while "decide with: " not in shown:
            shown += running.stdout.readline() or pytest.fail(shown)
        run_id, call_id = shown.rpartition("pawl approve ")[2].split()[:2]
        pawl.succeed("approve", run_id, call_id, "--yes")
        rest = running.stdout.read()
    assert f"watch it with: pawl watch {run_id}" in shown
    assert "completed" in rest.splitlines()[-1]


def test_whoami_says_who_calls_and_what_there_is(pawl: CommandLine) -> None:
    output = pawl.succeed("whoami", "--limits")
    assert "me of the store local" in output
    assert "credential: local, without an end" in output
    assert "decides: gated calls of the whole store" in output
    assert re.search(r"^Pawl \S+: model \S+, \d+ tools$", output, re.MULTILINE)
    assert re.search(r"^agents: .*\bdefault\b", output, re.MULTILINE)
    assert "rounds_max\t10\t1000" in output
    told = json.loads(pawl.succeed("--user", "ann", "whoami", "--json"))
    assert (told["caller"]["user_id"], told["caller"]["store_id"]) == ("ann", "local")


def test_status_says_why_a_run_waits_and_what_lets_it_go_on(pawl: CommandLine) -> None:
    run_id = started(pawl, "send an e-mail to ann@example.com about lunch: at noon")
    output = pawl.succeed("status", run_id)
    assert f"{run_id} is waiting" in output
    assert "It waits for an approval of send_email." in output
    assert "what lets it go on: Approve, edit or reject it" in output
    assert "1 awaiting approval" in output
    assert f"decide with: pawl approve {run_id}" in output
    waiting = pawl.succeed(
        "run", "--detach", "--conversation", conversation_of(pawl, run_id), "what time is it in Oslo"
    )
    assert "It waits for its turn in the conversation" in pawl.succeed("status", waiting.strip())
    assert re.search(rf"^{waiting.strip()}\tqueued for its turn\t", pawl.succeed("runs"), re.MULTILINE)
    pawl.succeed("cancel", waiting.strip())
    pawl.succeed("approve", run_id, pending_call(pawl, run_id), "--yes")
    pawl.succeed("watch", run_id)
    assert f"{run_id} is completed" in (output := pawl.succeed("status", run_id))
    assert "1 succeeded" in output
    assert "waits" not in output


def conversation_of(pawl: CommandLine, run_id: str) -> str:
    """The conversation of a run."""
    found = re.search(rf"^{run_id}\t.*\t(conv_\w+)\t", pawl.succeed("runs", "-n", "200"), re.MULTILINE)
    assert found is not None
    return found[1]


def test_approvers_are_told_of_calls_of_others_and_decide_with_what_they_are_told(pawl: CommandLine) -> None:
    """HITL-4: who has read notifications as an approver is one."""
    pawl.succeed("--user", "bob", "notifications")
    run_id = pawl.succeed("--user", "ann", "run", "--detach", "e-mail eve@example.com about lunch: at noon").strip()
    told = pawl.until(lambda told: run_id in told, "--user", "bob", "notifications", "--unread")
    assert "send_email of ann awaits your approval" in told
    command = re.search(rf"decide with: pawl (approve {run_id} call_\w+)$", told, re.MULTILINE)
    assert command is not None, told
    assert "send_email of ann" not in pawl.succeed("--user", "ann", "notifications"), "it is told of its own run"
    pawl.succeed("--user", "bob", *command[1].split(), "--yes")
    assert "completed" in pawl.succeed("--user", "ann", "watch", run_id).splitlines()[-1]


def test_runs_are_listed_by_state_time_and_order(pawl: CommandLine) -> None:
    ids = [pawl.succeed("--user", "lea", "run", "--detach", f"what is {n} * 3").strip() for n in range(2)]
    for run_id in ids:
        pawl.succeed("--user", "lea", "watch", run_id)

    def listed(*options: str) -> list[str]:
        lines = pawl.succeed("--user", "lea", "runs", *options).splitlines()
        return [line.partition("\t")[0] for line in lines]

    assert listed("--state", "completed", "--since", "2h") == ids[::-1]
    assert listed("--oldest") == ids
    assert listed("--state", "waiting") == ["There are no such runs."]
    code, _, errors = pawl.run("--user", "lea", "runs", "--since", "soon")
    assert code == 2
    assert "no duration like 30m, 2h or 7d" in errors
