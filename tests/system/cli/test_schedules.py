"""A schedule in the zone of its user, while the clocks there change."""

from __future__ import annotations

import re

import pytest

from tests.system.cli.conftest import CommandLine


def test_every_weekday_at_seven_in_oslo_stays_at_seven(pawl: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """ASYNC-8: times to come over the beginning of summer time, and due times of the past over its end."""
    monkeypatch.setenv("TZ", "UTC")
    when = ("--cron", "0 7 * * 1-5", "--zone", "Europe/Oslo")
    pawl.succeed("schedules", "create", "news", *when, "--start", "2027-03-25T00:00", "--text", "what is 6 * 7?")
    shown = pawl.succeed("schedules", "show", "news").partition("next:")[2]
    times = [line.strip() for line in shown.splitlines() if line.strip().startswith("2027-")]
    assert times[:4] == [
        "2027-03-25 06:00:00Z",  # Thursday, winter time
        "2027-03-26 06:00:00Z",
        "2027-03-29 05:00:00Z",  # Monday, summer time
        "2027-03-30 05:00:00Z",
    ]
    pawl.succeed("schedules", "update", "news", "--start", "", "--overlap", "allow")
    fired = pawl.succeed("schedules", "backfill", "news", "--from", "2026-10-22T12:00", "--to", "2026-10-27T12:00")
    lines = [line for line in fired.splitlines() if "started" in line]
    due = [re.search(r"2026-10-\d\d \d\d:\d\d:\d\d", line) for line in lines]
    assert [found and found[0] for found in due] == [
        "2026-10-23 05:00:00",  # Friday, summer time
        "2026-10-26 06:00:00",  # Monday, winter time
        "2026-10-27 06:00:00",
    ]
    runs = [word for line in lines for word in line.split() if word.startswith("run_")]
    assert len(set(runs)) == 3
    for run_id in runs:
        assert "42" in pawl.succeed("watch", run_id)
    pawl.succeed("schedules", "delete", "news", "--yes")
