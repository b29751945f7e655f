"""Refusals in the words of who typed the command."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pawl.cli.__main__ import app
from pawl.cli.failure import explain
from pawl.errors import InvalidField, InvalidId, InvalidJson, PawlError, ToolNotFound

NOBODY = "127.0.0.1:1"

EVERY = {"cron": "--cron", "interval_seconds": "--every", "text": "--text", "name": "name"}
JOB = {"interval": "--interval", "stop_after": "--stop-after", "duration": "--duration", "tool": "tool"}


@pytest.mark.parametrize(
    ("typed", "error", "sentence"),
    [
        (
            JOB,
            InvalidField("interval_seconds needs an end: iterations_max (times)", field="interval_seconds"),
            "--interval needs an end: --stop-after (times).",
        ),
        (JOB, InvalidField("a tool's name is printable", field="tool_name"), "A tool's name is printable."),
        (
            EVERY,
            InvalidField("intervals have none", field="definition.cron"),
            "--cron: intervals have none.",
        ),
        (EVERY, InvalidField("definition.text is empty", field="definition.text"), "--text is empty."),
        (
            EVERY,
            InvalidField("give either `cron` or `interval_seconds`", field="definition.cron"),
            "Give either --cron or --every.",
        ),
        (
            EVERY,
            InvalidField("cron 'text interval_seconds' is like text", field="definition.cron"),
            "--cron 'text interval_seconds' is like text.",
        ),
        (
            EVERY,
            InvalidId("definition.name must match ^[A-Za-z0-9_-]{1,64}$", field="definition.name"),
            "Name must have 1 to 64 letters, digits, _ and -, and nothing else.",
        ),
        (
            {"quiet": "--quiet", "zone": "--zone"},
            InvalidField("time_zone 'Mars' is none", field="quiet_hours.time_zone"),
            "--zone 'Mars' is none.",
        ),
        (
            {"schema": "--schema"},
            InvalidJson("response_format.schema_json is not strict JSON"),
            "--schema is not strict JSON.",
        ),
        ({}, InvalidField("interval_seconds is wrong", field="interval_seconds"), "interval_seconds is wrong."),
        (EVERY, ToolNotFound("the text of cron"), "The text of cron. `pawl tools` lists those that there are."),
    ],
)
def test_a_refusal_names_the_option_that_was_typed_and_leaves_other_words_alone(
    typed: Mapping[str, str], error: PawlError, sentence: str
) -> None:
    assert explain(error, [NOBODY], typed=typed) == sentence


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("runs", "--since", "5x"), "--since"),
        (("rules", "allow", "*", "--for", "5x"), "--for"),
        (("rules", "allow", "*", "--like", "5x"), "--like"),
        (("keys", "create", "ann", "--for", "5x"), "--for"),
        (("notify", "create", "https://example.com", "--after", "5x"), "--after"),
        (("notify", "preferences", "--quiet", "5x"), "--quiet"),
        (("schedules", "create", "tea", "--every", "5x"), "--every"),
        (("schedules", "create", "tea", "--catch-up", "5x"), "--catch-up"),
        (("schedules", "create", "tea", "--start", "5x"), "--start"),
        (("schedules", "create", "tea", "--label", "5x"), "--label"),
        (("schedules", "backfill", "tea", "--from", "2026-01-31", "--to", "5x"), "--to"),
        (("triggers", "create", "tea", "--webhook", "bearer", "--debounce", "5x"), "--debounce"),
        (("triggers", "create", "tea", "--mailbox", "a@b", "--poll", "5x"), "--poll"),
        (("triggers", "create", "tea", "--mailbox", "5x"), "--mailbox"),
        (("audit", "list", "--before", "5x"), "--before"),
        (("audit", "verify", "--known-head", "5x"), "--known-head"),
    ],
    ids=" ".join,
)
def test_a_value_that_is_none_is_refused_with_the_option_that_was_typed(command: tuple[str, ...], option: str) -> None:
    refused = CliRunner().invoke(app, command, env={"PAWL_ADDRESS": NOBODY})
    assert refused.exit_code == 2
    assert refused.output.startswith(f"{option}: '5x' ")


@pytest.mark.parametrize(
    "command",
    [
        ("memory", "erase", "--yes", ""),
        ("memory", "erase", "--yes", "--agent", ""),
        ("memory", "list", "--agent", ""),
        ("notify", "resend", "--dead", "--channel", ""),
        ("notify", "deliveries", ""),
        ("attention", ""),
        ("tools", "stats", ""),
        ("tools", "stats", "--agent", ""),
        ("runs", "--conversation", ""),
        ("runs", "--parent", ""),
        ("jobs", "list", "--conversation", ""),
        ("audit", "list", "--run", ""),
        ("keys", "events", "--key", ""),
        ("rules", "allow", "*", "--run", ""),
    ],
    ids=" ".join,
)
def test_what_narrows_a_command_down_never_means_everything_when_it_is_empty(command: tuple[str, ...]) -> None:
    refused = CliRunner().invoke(app, command, env={"PAWL_ADDRESS": NOBODY})
    assert refused.exit_code == 2
    assert "it is empty. Leave it out for all." in refused.output


@pytest.mark.parametrize(
    "command",
    [
        ("run", "look", "--image"),
        ("run", "look", "--schema"),
        ("documents", "add"),
        ("conversations", "import"),
        ("apply", "--file"),
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_read_is_refused_in_the_same_words_everywhere(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    none = tmp_path / "none.yaml"
    refused = CliRunner().invoke(app, [*command, str(none)], env={"PAWL_ADDRESS": NOBODY})
    assert (refused.exit_code, refused.output) == (2, f"{none} cannot be read: No such file or directory.\n")
