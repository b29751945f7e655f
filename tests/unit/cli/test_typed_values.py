"""Parsing of typed words, and errors for invalid words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pawl.agent_loop.loop.rules.limits import Limits
from pawl.cli import answers, decisions, wording
from pawl.cli.__main__ import app
from pawl.cli.command import time_of
from pawl.cli.failure import CommandError, explain
from pawl.cli.toolbox import policy_of
from pawl.errors import (
    AlreadyDecided,
    AttentionNotNeeded,
    ConversationExists,
    ConversationNotFound,
    Internal,
    InvalidArguments,
    InvalidField,
    InvalidId,
    InvalidJson,
    PawlError,
    RunNotFound,
    ToolNotFound,
    Unauthenticated,
)
from pawl.event.v1 import call_pb2, run_pb2
from pawl.tool.v1.source_pb2 import SourceToolPolicy
from tests.tables import for_each, not_explained, not_refused

UNREACHABLE = "127.0.0.1:1"

EVERY = {"cron": "--cron", "interval_seconds": "--every", "text": "--text", "name": "name"}
JOB = {"interval": "--interval", "stop_after": "--stop-after", "duration": "--duration", "tool": "tool"}


REFUSALS: list[tuple[Mapping[str, str], PawlError, str]] = [
    (
        JOB,
        InvalidField("interval_seconds needs an end: iterations_max (times)", field="interval_seconds"),
        "--interval needs an end: --stop-after (times).",
    ),
    (
        JOB,
        InvalidArguments(
            "the arguments of look do not fit:\n- interval_seconds: unknown property\nSet interval_seconds"
        ),
        "The arguments of look do not fit:\n- interval_seconds: unknown property\nSet --interval.",
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
        InvalidField("set either `cron` or `interval_seconds`", field="definition.cron"),
        "Set either --cron or --every.",
    ),
    (
        EVERY,
        InvalidField("cron 'text interval_seconds' is like text", field="definition.cron"),
        "--cron 'text interval_seconds' is like text.",
    ),
    (
        EVERY,
        InvalidId("definition.name must have 1 to 64 letters, got 'a b'", field="definition.name"),
        "Name must have 1 to 64 letters, got 'a b'.",
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
    (EVERY, ToolNotFound("the text of cron"), "The text of cron. `pawl tools` lists the available tools."),
]


@for_each(("typed", "error", "sentence"), REFUSALS)
def test_an_error_names_the_typed_option_and_keeps_other_words(typed: Any, error: Any, sentence: Any) -> None:
    assert explain(error, [UNREACHABLE], typed=typed) == sentence


def test_an_error_suggests_what_to_do_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for error, advice in (
        (RunNotFound("where is it?"), "Where is it? `pawl runs` shows your runs."),
        (ConversationNotFound(), "`pawl conversations list`"),
        (ConversationExists("there is one"), "`pawl conversations show --key`"),
        (Unauthenticated("the key is not known"), "PAWL_API_KEY"),
        (
            Unauthenticated("no key was sent: send it"),
            f"There is no .pawl in {tmp_path}, so no key was found. Set",
        ),
        (Internal("internal error err_1"), "The service log"),
        (AlreadyDecided("decided by bob"), "`pawl inbox`"),
        (AttentionNotNeeded("it is well"), "`pawl attention`"),
        (KeyError("x"), "KeyError: 'x'"),
    ):
        assert advice in explain(error, [UNREACHABLE])
    monkeypatch.setenv("PAWL_API_KEY", "k")
    assert "The key came from PAWL_API_KEY" in explain(Unauthenticated("the key is not known"), [UNREACHABLE])


@for_each(
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
)
def test_the_error_for_an_invalid_value_names_the_option(command: Any, option: str) -> None:
    refused = CliRunner().invoke(app, command, env={"PAWL_ADDRESS": UNREACHABLE})
    assert (refused.exit_code, refused.output.startswith(f"{option}: '5x' ")) == (2, True)


def test_a_time_without_a_zone_uses_the_local_zone() -> None:
    moments = {
        "2026-01-31": datetime(2026, 1, 31).astimezone(UTC).isoformat().replace("+00:00", "Z"),
        "2026-01-31 09:00:00+01:00": "2026-01-31T08:00:00Z",
        "2026-01-31T09:00Z": "2026-01-31T09:00:00Z",
    }
    assert {text: time_of(text, "since").ToJsonString() for text in moments} == moments
    none = ["", "soon", "0001-01-01T00:00+05:00", "9999-12-31T23:00-05:00", "2026-02-30"]
    assert not_refused(CommandError, lambda text: time_of(text, "since"), none) == []


@for_each(
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
)
def test_an_empty_filter_never_means_everything(command: Any) -> None:
    refused = CliRunner().invoke(app, command, env={"PAWL_ADDRESS": UNREACHABLE})
    assert (refused.exit_code, "must not be empty. Omit the option to include all." in refused.output) == (2, True)


@for_each(
    "command",
    [
        ("run", "look", "--image"),
        ("run", "look", "--schema"),
        ("documents", "add"),
        ("conversations", "import"),
        ("apply", "--file"),
    ],
)
def test_an_unreadable_file_gives_the_same_error_everywhere(tmp_path: Path, command: tuple[str, ...]) -> None:
    none = tmp_path / "none.yaml"
    refused = CliRunner().invoke(app, [*command, str(none)], env={"PAWL_ADDRESS": UNREACHABLE})
    assert (refused.exit_code, refused.output) == (2, f"{none} cannot be read: No such file or directory.\n")


POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("Safe, READ_ONLY", {"category": call_pb2.TOOL_CATEGORY_SAFE, "effect_class": call_pb2.EFFECT_CLASS_READ_ONLY}),
    ("excluded", {"excluded": True}),
    ("bulk=$.body.Orders[*].lines", {"bulk_count": "$.body.Orders[*].lines"}),
    ("without_background", {"without_background": True}),
    ("permits_grants", {"permits_grants": True}),
    ("timeout_seconds=0.5,async_timeout_seconds=7200", {"timeout_seconds": 0.5, "async_timeout_seconds": 7200}),
    ("reports=end", {"reports": run_pb2.ReportPolicy(reports=run_pb2.JOB_REPORTS_END)}),
    ("reports=None", {"reports": run_pb2.ReportPolicy(reports=run_pb2.JOB_REPORTS_NONE)}),
    (
        "reports=every=10",
        {"reports": run_pb2.ReportPolicy(reports=run_pb2.JOB_REPORTS_EVERY, report_iterations=10)},
    ),
    (
        "reports=digest=600",
        {"reports": run_pb2.ReportPolicy(reports=run_pb2.JOB_REPORTS_DIGEST, report_seconds=600)},
    ),
]


@for_each(("words", "fields"), POLICIES)
def test_each_word_sets_a_policy_field(words: Any, fields: Any) -> None:
    assert policy_of(f"look={words}") == SourceToolPolicy(tool_name="look", **fields)


def test_every_policy_field_has_a_word() -> None:
    words = "safe,idempotent,excluded,without_background,permits_grants,bulk=$.a,timeout_seconds=1"
    policy = policy_of(f"*={words},async_timeout_seconds=2,reports=change")
    assert {field.name for field, _ in policy.ListFields()} == set(SourceToolPolicy.DESCRIPTOR.fields_by_name)


def test_an_invalid_policy_is_reported_clearly() -> None:
    rows = [
        ("look", "of the form TOOL=WORD,WORD"),
        ("=safe", "of the form TOOL=WORD,WORD"),
        ("look=nice", "'nice' must be one of safe, sensitive, "),
        ("look=timeout_seconds", "'timeout_seconds' must be one of"),
        ("look=excluded=yes", "'excluded=yes' must be one of"),
        ("look=timeout_seconds=soon", "must be a number of seconds"),
        ("look=reports=now", "reports must be every, every=10"),
        ("look=reports=every=ten", "reports must be every, every=10"),
        ("look=reports=", "reports must be every, every=10"),
    ]
    assert not_explained(CommandError, policy_of, [(given, re.escape(expected)) for given, expected in rows]) == []


GATED = call_pb2.Call(
    run_id="run_1",
    call_id="call_1",
    state=call_pb2.CALL_STATE_AWAITING_APPROVAL,
    arguments_json=b'{"to":"ann@example.com"}',
    approval=call_pb2.ApprovalRequest(digest="d" * 64),
)
ASKED = call_pb2.Call(
    run_id="run_1",
    call_id="call_2",
    state=call_pb2.CALL_STATE_ASKED,
    question=call_pb2.Question(question="When?", options=["Today", "Tomorrow"]),
)


def test_a_typed_answer_decides_on_the_call_shown() -> None:
    """HITL-1, HITL-3: an approval contains the digest of the call that was shown."""
    for line in ("a", "A", " yes ", "approve"):
        decision = answers.decision_of(line, GATED)
        assert (decision.kind, decision.digest) == (call_pb2.DECISION_KIND_APPROVE, "d" * 64), line
        assert (decision.run_id, decision.call_id) == ("run_1", "call_1")
    edited = answers.decision_of('e {"to": "bob@example.com"}', GATED)
    assert (edited.kind, edited.arguments_json) == (call_pb2.DECISION_KIND_EDIT, b'{"to": "bob@example.com"}')
    rejected = answers.decision_of("r: not before noon", GATED)
    assert (rejected.kind, rejected.reason) == (call_pb2.DECISION_KIND_REJECT, "not before noon")
    expected = answers.decision_of("t: I wrote to her myself", GATED)
    assert (expected.kind, expected.answer) == (call_pb2.DECISION_KIND_ANSWER, "I wrote to her myself")
    for line, answer in {"2": "Tomorrow", "3": "3", "0": "0", "next week": "next week"}.items():
        decision = answers.decision_of(line, ASKED)
        assert (decision.kind, decision.answer) == (call_pb2.DECISION_KIND_ANSWER, answer)
        assert answers.chosen(line, ASKED) == answer


def test_the_error_for_an_unknown_answer_lists_the_possible_ones() -> None:
    lines = ("e {", 'e {"a": 1, "a": 2}', "e [1]", "e 1", "", "x", "t", "maybe")
    assert not_refused(CommandError, lambda line: answers.decision_of(line, GATED), lines) == []


def test_only_a_single_word_approves_or_rejects() -> None:
    """HITL-1: after any longer line, the command asks again and shows the possible answers."""
    call = call_pb2.Call()
    call.CopyFrom(GATED)
    call.approval.series.digest = "e" * 64
    for kind, lines in {
        call_pb2.DECISION_KIND_APPROVE: ("Y", "YES", "\ta ", "s", "Series"),
        call_pb2.DECISION_KIND_REJECT: ("n", " NO ", "R", "reject", "No: not before noon"),
    }.items():
        assert {answers.decision_of(line, call).kind for line in lines} == {kind}
    sentences = (
        *("a different account please", "A moment, I have to ask", "yes but to the other account", "y tho?", "y."),
        *("y: go", "Approve? Never", "s is for small", "series of what?", "no problem, do it", "n/a", "r u sure?"),
        *("reject the other one, not this one", "t shirts only", "edit the amount", "all of them", "always ask me"),
    )
    assert not_refused(CommandError, lambda line: answers.decision_of(line, call), sentences) == []
    with pytest.raises(CommandError, match=r"\[a\]pprove, \[e\]dit \[JSON\], \[r\]eject"):
        answers.decision_of("yes but to the other account", GATED)


def test_the_editor_edits_the_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    editor = tmp_path / "editor"
    editor.write_text("#!/bin/sh\nsed -i s/ann/bob/ $1\n")
    editor.chmod(0o700)
    monkeypatch.setenv("VISUAL", str(editor))
    assert b"bob@example.com" in answers.decision_of("e", GATED).arguments_json


def test_no_decision_is_made_if_the_editor_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VISUAL", "/no/such/editor")
    with pytest.raises(CommandError, match="Set EDITOR"):
        answers.decision_of("e", GATED)


def gated(**series: Any) -> call_pb2.Call:
    call = call_pb2.Call(
        run_id="run_1",
        call_id="call_1",
        state=call_pb2.CALL_STATE_AWAITING_APPROVAL,
        tool_name="pay",
        arguments_json=b'{"amount":1}',
        approval=call_pb2.ApprovalRequest(digest="of the call"),
    )
    if series:
        call.approval.series.CopyFrom(call_pb2.Series(digest="of the series", **series))
    return call


def test_a_call_shows_what_happens_if_nobody_decides() -> None:
    """HITL-4: by default, the call waits for a day."""
    call, now = gated(), datetime.now(UTC)
    call.deadline_time.FromDatetime(now + timedelta(seconds=Limits().approval_expiry_seconds))
    assert wording.call_lines(call, now)[-2:] == [
        "expires in 24 h",
        "If no one decides in time, the call does not run, or the deadline is extended once.",
    ]


def test_a_series_is_granted_only_explicitly() -> None:
    call = gated(interval_seconds=60, iterations_max=20)
    once, series = answers.decision_of("a", call), answers.decision_of("series", call)
    assert (once.for_series, once.digest) == (False, "of the call")
    assert (series.for_series, series.digest) == (True, "of the series")
    with pytest.raises(CommandError, match="Not a decision"):
        answers.decision_of("s", gated())
    with pytest.raises(InvalidField, match="the call has no series"):
        decisions.for_series(gated(), None, None, None, None)


def test_only_the_specified_terms_of_a_series_are_changed() -> None:
    call = gated(interval_seconds=60, iterations_max=20)
    edited = decisions.for_series(call, None, 5.0, None, 10.0)
    assert (edited.kind, edited.for_series, edited.digest) == (call_pb2.DECISION_KIND_EDIT, True, "of the series")
    assert edited.arguments_json == call.arguments_json
    assert (edited.edited_series.interval_seconds, edited.edited_series.iterations_max) == (5.0, 20)
    zero = decisions.for_series(call, None, 0.0, None, None)
    assert zero.edited_series.interval_seconds == 0.0, "the server refuses it"
    left = edited.edited_series.end_time.ToDatetime(tzinfo=UTC) - datetime.now(UTC)
    assert timedelta(minutes=9) < left <= timedelta(minutes=10)
    other = decisions.for_series(call, '{"amount": 2}', None, None, None)
    assert (other.arguments_json, other.HasField("edited_series")) == (b'{"amount": 2}', False)


def test_impossible_terms_of_a_series_are_refused() -> None:
    call = gated(interval_seconds=60, iterations_max=20)
    terms: list[tuple[int | None, float | None]] = [(2**32, None), *((None, float(n)) for n in ("1e12", "inf", "nan"))]
    assert not_refused(CommandError, lambda each: decisions.for_series(call, None, None, *each), terms) == []
    for options, expected in {
        ("--interval", "1"): "require --series",
        ("--series", "--reject", "no"): "cannot be combined with",
        ("--reject", "no", "--remember", "run"): "are mutually exclusive",
        ("--uses", "1"): "require --remember",
    }.items():
        refused = CliRunner().invoke(app, ("approve", "run_1", "call_1", *options), env={"PAWL_ADDRESS": UNREACHABLE})
        assert (refused.exit_code, expected in refused.output) == (2, True), options
