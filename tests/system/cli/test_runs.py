"""Runs, agents, conversations and content on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.system.cli.conftest import CommandLine, find

ROOT = Path(__file__).parents[3]


def line_of(run_id: str, runs: str) -> str:
    return next((line for line in runs.splitlines() if line.startswith(run_id)), "")


def test_first_program_of_the_readme_works(pawl: CommandLine, tmp_path: Path) -> None:
    """The program finds the suite and the key where `pawl up` keeps them."""
    program = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    (tmp_path / ".pawl").symlink_to(pawl.data)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=True)
    assert "391" in done.stdout
    assert done.stderr == ""


def test_watching_a_run_again_prints_the_same_events_from_any_seq(pawl: CommandLine) -> None:
    """EVT-1: watching the run again prints the same lines."""
    output = pawl.succeed("run", "what is 17 * 23")
    assert "calculate" in output
    assert "391" in output
    assert "completed" in output.splitlines()[-1]
    lines = pawl.succeed("run", "--json", "what time is it in Oslo").splitlines()
    events = [json.loads(line) for line in lines]
    assert [int(event["seq"]) for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["type"] == "run.completed"
    assert pawl.succeed("watch", "--json", events[0]["run_id"]).splitlines() == lines
    assert pawl.succeed("watch", "--json", events[0]["run_id"], "--after", "3").splitlines() == lines[3:]


def test_cancelled_detached_run_exits_with_1(pawl: CommandLine) -> None:
    run_id = pawl.succeed("run", "--detach", "count very slowly to 500").strip()
    assert "cancel" in pawl.succeed("cancel", run_id, "--reason", "enough")
    code, output, _ = pawl.run("watch", run_id)
    assert (code, "cancelled" in output.splitlines()[-1]) == (1, True)


def test_run_waits_for_tokens_and_continues_after_top_up(pawl: CommandLine) -> None:
    """LOOP-12: the inbox shows the minimum number of tokens that the run needs."""
    run_id = pawl.succeed("run", "--detach", "--tokens-max", "5", "what is 17 * 23").strip()
    pawl.until(lambda runs: "waiting for more tokens" in line_of(run_id, runs), "runs")
    needed = find(rf"add at least (\d+) tokens with: pawl top-up {run_id} \1", pawl.succeed("inbox"))
    assert f"at least {needed} tokens" in pawl.succeed("status", run_id)
    assert "of 50005 tokens" in pawl.succeed("top-up", run_id, "50000")
    output = pawl.succeed("watch", run_id)
    for line in ("‖ waiting for more tokens", f"pawl top-up {run_id} {needed}", "+ me added 50000 tokens"):
        assert line in output
    assert "completed" in output.splitlines()[-1]
    assert "ended" in pawl.refuse("top-up", run_id, "1")
