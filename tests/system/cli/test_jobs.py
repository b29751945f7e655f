"""What goes on in the background, as the command line shows and stops it (ASYNC-5, ASYNC-7)."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from tests.system.cli.conftest import CommandLine


class Talk:
    """A chat whose keyboard stays there."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        self._keyboard = process.stdin
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.said = ""
        threading.Thread(target=self._read, args=(process.stdout,), daemon=True).start()

    def _read(self, output: Iterator[str]) -> None:
        for line in output:
            self._lines.put(line)

    def type(self, line: str) -> None:
        self._keyboard.write(f"{line}\n")
        self._keyboard.flush()

    def until(self, pattern: str) -> re.Match[str]:
        """Return what it says, once it has said so; what came before does not count any more."""
        deadline = time.monotonic() + 240
        while (found := re.search(pattern, self.said)) is None:
            try:
                self.said += self._lines.get(timeout=deadline - time.monotonic())
            except queue.Empty:
                raise AssertionError(f"{pattern!r} is not in {self.said!r}") from None
        self.said = self.said[found.end() :]
        return found


@contextmanager
def chat(pawl: CommandLine) -> Iterator[Talk]:
    with subprocess.Popen(
        [sys.executable, "-m", "pawl.cli", "chat"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=pawl.environment() | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        try:
            talk = Talk(process)
            yield talk
            talk.type("/quit")
            assert process.wait(120) == 0
        finally:
            process.kill()


def test_a_chat_is_told_what_a_job_came_to_while_nobody_says_anything(pawl: CommandLine) -> None:
    with chat(pawl) as talk:
        talk.type("in the background: what is 6 * 7")
        job_id = talk.until(r"with the job (run_\w+)")[1]
        talk.until(rf"The job {job_id} \(calculate\) has ended, completed: 42")
    assert "No job is open." in pawl.succeed("jobs", "list")
    listed = pawl.succeed("jobs", "list", "--all")
    assert re.search(rf'{job_id}\tcompleted\tcalculate\t1 of 1\t\t.*"result":42', listed), listed
    assert '"result":42' in pawl.succeed("jobs", "show", job_id)


def test_a_series_is_seen_and_stopped_in_the_chat_and_outside(pawl: CommandLine) -> None:
    with chat(pawl) as talk:
        jobs = []
        for number in range(2):
            talk.type(f"in the background, every 3600 s 5 times: what is {number} + 1")
            jobs.append(talk.until(r"with the job (run_\w+)")[1])
        pawl.until(partial(re.search, rf"{jobs[0]}\t.*\t1 of 5"), "jobs", "list")
        talk.type("/jobs")
        talk.until(rf"{jobs[1]}[^\n]*\n{jobs[0]}[^\n]*1 of 5")
        talk.type(f"/stop {jobs[0]}")
        talk.until(rf"{jobs[0]} \(calculate\) is (being )?cancel")
        talk.type("/stop nothing")
        talk.until("(?i)no .*run|not found|no such")
    open_one = pawl.succeed("jobs", "show", jobs[1])
    conversation = re.search(r"tells: conversation (\S+)", open_one)
    assert conversation is not None
    assert "next: " in open_one
    assert jobs[1] in pawl.succeed("jobs", "stop", "--conversation", conversation[1])
    assert pawl.run("jobs", "watch", jobs[1])[0] == 1
    for job_id in jobs:
        assert f"{job_id}: cancelled by its user" in pawl.succeed("jobs", "show", job_id)
    assert "No job of the conversation is open" in pawl.succeed("jobs", "stop", "--conversation", conversation[1])
    assert pawl.run("jobs", "stop")[0] == 2


def test_a_run_that_is_cancelled_names_the_jobs_that_go_on_or_stops_them_with_it(pawl: CommandLine) -> None:
    run_id = pawl.succeed("run", "--detach", "in the background, every 3600 s 5 times: what is 1 + 1").strip()
    pawl.succeed("watch", run_id)
    goes_on = re.search(r"(run_\w+) \(calculate\) goes on; to end it: pawl jobs stop", pawl.succeed("cancel", run_id))
    assert goes_on is not None
    assert re.search(rf"{goes_on[1]} \(calculate\) is cancel", pawl.succeed("cancel", run_id, "--jobs"))
    assert pawl.run("jobs", "watch", goes_on[1])[0] == 1
    assert "goes on" not in pawl.succeed("cancel", run_id)


def test_every_weekday_at_seven_in_oslo_stays_at_seven(pawl: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """ASYNC-8: times to come over the start of summer time, and due times of the past over its end."""
    monkeypatch.setenv("TZ", "UTC")
    when = ("--cron", "0 7 * * 1-5", "--zone", "Europe/Oslo")
    pawl.succeed("schedules", "create", "news", *when, "--start", "2027-03-25T00:00", "--text", "what is 6 * 7?")
    shown = pawl.succeed("schedules", "show", "news").partition("next:")[2]
    times = [line.strip() for line in shown.splitlines() if line.strip().startswith("2027-")]
    # From Thursday in winter time to Tuesday in summer time.
    assert [time[5:13] for time in times[:4]] == ["03-25 06", "03-26 06", "03-29 05", "03-30 05"]
    pawl.succeed("schedules", "update", "news", "--start", "", "--overlap", "allow")
    fired = pawl.succeed("schedules", "backfill", "news", "--from", "2026-10-22T12:00", "--to", "2026-10-27T12:00")
    lines = [line for line in fired.splitlines() if "started" in line]
    # From Friday in summer time to Tuesday in winter time.
    due = [time for line in lines for time in re.findall(r"2026-(10-\d\d \d\d):00:00", line)]
    assert due == ["10-23 05", "10-26 06", "10-27 06"]
    runs = {word for line in lines for word in line.split() if word.startswith("run_")}
    assert len(runs) == 3
    assert all("42" in pawl.succeed("watch", run_id) for run_id in runs)
    pawl.succeed("schedules", "delete", "news", "--yes")
