"""Built-in tools: arithmetic, documents, web pages and jobs (TOOL-7, ASYNC-6)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any
from unittest.mock import ANY

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.chassis.ids import CommandId, ConversationId, RunId, RunKey, StoreId, UserId
from pawl.errors import InvalidField, TooLarge
from pawl.event.v1 import run_pb2
from pawl.tool_registry.builtin.calculator import EXPRESSION_CHARACTERS_MAX, evaluate
from pawl.tool_registry.builtin.jobs import job_tools
from pawl.tool_registry.builtin.web.text import ELEMENTS_MAX, LINKS_MAX, NotText, Page, read_page
from pawl.tool_registry.documents.rules import PART_CHARACTERS_MAX, TEXT_BYTES_MAX, check_document, parts_of
from pawl.tool_registry.ledger import LedgerReads
from pawl.tools import ToolContext, ToolError
from tests.fakes.manual_clock import ManualClock
from tests.tables import for_each


@for_each(
    ("expression", "value"),
    [
        ("17 * 23", 391),
        ("(1 + 2) * 3 - -4", 13),
        ("7 / 2", 3.5),
        ("7 // 2 + 7 % 4", 6),
        ("2 ** 10", 1024),
        ("2^10", 1024),
        ("2 ** -1", 0.5),
        ("sqrt(2) ** 2", 2.0000000000000004),
        ("round(7 / 3, 2)", 2.33),
        ("round(1234, -2)", 1200),
        ("1 ** 10 ** 9", 1),
        ("max(1, 5, 3) + min(4, 2)", 7),
        ("sum(1, 2, 3)", 6),
        ("factorial(5)", 120),
        ("sin(pi / 2)", 1.0),
        ("3 > 2", True),
        ("2 ** 64", "18446744073709551616"),
        ("1e3 + 1", 1001.0),
    ],
)
def test_arithmetic_is_evaluated(expression: str, value: Any) -> None:
    found = evaluate(expression)
    assert (found, type(found)) == (value, type(value))


@for_each(
    "expression",
    [
        "__import__('os').system('true')",
        "(1).__class__",
        "().__class__.__bases__",
        "open('x')",
        "eval('1')",
        "'a' * 10",
        "[1] * 10",
        "lambda: 1",
        "[x for x in (1, 2)]",
        "f'{1}'",
        "x := 3",
        "x = 3",
        "import os",
        "1 if unknown else 2",
        "abs(*[1])",
        "round(number=1)",
        "None",
        "1j",
        "...",
        "",
        "1 +",
        "pi(3)",
        "max",
        "1; 2",
        # Huge or undefined results.
        "9 ** 9 ** 9",
        "(-9) ** 99999",
        "factorial(99999)",
        "2 ** 4000 * 2 ** 4000",
        "(2 ** 4000) ** 2",
        "10 ** 10 ** 10 % 7",
        "1" * (EXPRESSION_CHARACTERS_MAX + 1),
        "(" * 200 + ")" * 200,
        "+".join("1" * 300),
        "exp(10000)",
        "1e308 * 10",
        "lcm(2**4000, 3**2500)",
        "round(5, -1000000000)",
        "round(1.5, 10 ** 9)",
        "1 / 0",
        "0 ** -1",
        "log(0)",
        "(-8) ** 0.5",
    ],
)
def test_anything_but_arithmetic_with_a_small_result_is_refused_quickly(expression: str) -> None:
    with pytest.raises(ToolError):
        evaluate(expression)


@given(st.text(max_size=60))
def test_any_text_gives_a_value_or_a_tool_error(text: str) -> None:
    try:
        value = evaluate(text)
    except ToolError:
        return
    assert isinstance(value, str) or math.isfinite(value)


@given(st.lists(st.text("aø\n 語", max_size=50), max_size=8), st.integers(1, 5000))
def test_the_parts_of_a_text_cover_all_of_it_and_have_offsets(pieces: list[str], times: int) -> None:
    text = "".join(piece * times for piece in pieces)
    parts = parts_of(text)
    assert "".join(content for _, content in parts) == text
    whole = text.encode()
    for byte_offset, content in parts:
        assert 1 <= len(content) <= PART_CHARACTERS_MAX
        assert whole[byte_offset:].startswith(content.encode())


@for_each("separator", ["\n\n", "\n", " "])
def test_text_is_split_between_paragraphs_lines_or_words(separator: str) -> None:
    (_, first), *_ = parts_of((("x" * 99) + separator) * 2000)
    assert first.endswith("x" + separator)


def test_invalid_documents_are_refused() -> None:
    check_document("Notes on 日本.md", "x" * TEXT_BYTES_MAX, "english")
    with pytest.raises(TooLarge):
        check_document("a", "ø" * (TEXT_BYTES_MAX // 2 + 1), "simple")
    for name, text, language, field in [
        *(("", "", "simple", "name"), ("a" * 201, "", "simple", "name"), ("a\nb", "", "simple", "name")),
        *((" a", "", "simple", "name"), ("a\0", "", "simple", "name"), ("a\u2028b", "", "simple", "name")),
        *(("a", "x\0y", "simple", "text"), ("a", "", "klingon", "language"), ("a", "", "pg_temp.x", "language")),
    ]:
        with pytest.raises(InvalidField) as error:
            check_document(name, text, language)
        assert error.value.metadata["field"] == field


URL = "https://a.example/dir/page"
ARTICLE = """<!DOCTYPE html><html><head><title>The  &amp;
 title</title><style>p { color: red }</style></head><body>
<nav><a href="/home">Home</a><a href="#top">Top</a></nav>
<article><h1>Heading</h1>
<p>A sentence that is <b>long</b> enough to be kept, with a <a href="other?x=1#part">link</a> to another page.</p>
<p>A second one, because a single one is hardly a text.</p><ul><li>first</li><li>second</li></ul></article>
<a href="mailto:a@example.com">Mail</a><a href="javascript:x()">X</a><a href="http://[">Broken</a>
<script>alert(1)</script></body></html>"""


def page(text: str | bytes, content_type: str = "text/html; charset=utf-8") -> Page:
    return read_page(text.encode() if isinstance(text, str) else text, content_type, URL)


def test_a_page_becomes_its_main_text_with_title_and_links() -> None:
    found = page(ARTICLE)
    assert found.title == "The & title"
    assert found.text.startswith("# Heading\n\nA sentence that is **long** enough")
    assert "- first\n- second" in found.text
    assert [part for part in ("Home", "alert") if part in found.text] == []
    assert found.links == (("Home", "https://a.example/home"), ("link", "https://a.example/dir/other?x=1"))


@for_each(
    ("html", "part"),
    [("<html><body><a>Sign in</a></body></html>", "Sign in"), ("<b>a</b>", "a"), ("", ""), ("<html></html>", "")],
)
def test_a_page_without_a_main_section_returns_all_its_text(html: str, part: str) -> None:
    text = page(html).text
    assert (part in text, bool(text)) == (True, bool(part))


def test_a_page_with_too_many_elements_becomes_plain_text() -> None:
    items = "<div><p>One <i>word</i>.</p><script>no()</script><!-- no --></div>" * (ELEMENTS_MAX // 4 + 1)
    found = page(f"<html><head><title>Many</title></head><body>{items}</body></html>")
    assert (found.title, found.text[:18], "no" in found.text) == ("Many", "One word.\nOne word", False)


def test_links_are_limited_and_unique() -> None:
    anchors = "".join(f'<a href="/{number // 2}">{number}</a>' for number in range(LINKS_MAX * 4))
    links = page(f"<html><body>{anchors}</body></html>").links
    assert len(links) == LINKS_MAX
    assert links[1] == ("2", "https://a.example/1")


@for_each(
    ("body", "content_type"),
    [
        ("naïve".encode(), "text/plain; charset=UTF-8"),
        ("naïve".encode("latin-1"), 'text/plain; charset="iso-8859-1"'),
        ("naïve".encode("latin-1"), "text/plain"),
        ("naïve".encode(), "text/plain; charset=punycode"),
        ("naïve".encode(), "text/plain; charset=cp99999"),
        ("naïve".encode("utf-16"), "text/plain"),
        ("naïve".encode("utf-8-sig"), "text/plain; charset=latin-1"),
        ("naïve".encode(), ""),
    ],
)
def test_text_is_decoded(body: bytes, content_type: str) -> None:
    assert page(body, content_type).text == "naïve"


def test_a_page_may_declare_its_character_set() -> None:
    text = '<html><head><meta charset="windows-1251"><title>Привет</title></head><body>x</body></html>'
    assert page(text.encode("windows-1251"), "text/html").title == "Привет"


@for_each("kind", ["application/json", "application/ld+json", "text/csv", "application/rss+xml"])
def test_other_kinds_of_text_are_returned_unchanged(kind: str) -> None:
    assert page('{"a": "<b>"}', kind) == Page(title="", text='{"a": "<b>"}', links=())


@for_each("kind", ["image/png", "application/pdf", "application/octet-stream", "video/mp4", "nonsense"])
def test_binary_content_is_refused(kind: str) -> None:
    with pytest.raises(NotText, match="is not text"):
        page(b"\x89PNG", kind)


@given(st.binary(max_size=300), st.sampled_from(["text/html", "text/plain", "text/html; charset=utf-16", ""]))
def test_any_bytes_become_text_that_json_can_hold(body: bytes, content_type: str) -> None:
    for prefix in (b"", b"<html><body><p>&#xD800;&#0;"):
        found = page(prefix + body, content_type)
        found.text.encode()
        assert "\0" not in found.text


MINUTE = 60.0


def job_run(run_id: str = "run_1", **changes: Any) -> run_pb2.Run:
    job: Any = {"tool_name": "look", "begin_time": {"seconds": 1000 * 60}, "interval_seconds": MINUTE}
    job |= changes.pop("job", {})
    fields: dict[str, Any] = {"state": run_pb2.RUN_STATE_WAITING, "waits": [run_pb2.WAIT_KIND_TIME]} | changes
    return run_pb2.Run(run_id=run_id, job=job, round=3, output_text="{}", **fields)


class SomeJobs(LedgerReads):
    def __init__(self, *jobs: run_pb2.Run) -> None:
        self.jobs_by_id = {job.run_id: job for job in jobs}
        self.commands: list[CommandId] = []

    async def jobs(
        self,
        store_id: StoreId,
        user_id: UserId,
        conversation_id: ConversationId,
        caller_run_id: RunId,
        *,
        ended_max: int,
    ) -> Sequence[run_pb2.Run]:
        assert (store_id, user_id, conversation_id, caller_run_id) == ("local", "me", "conversation", "run")
        assert ended_max == 10
        return list(self.jobs_by_id.values())

    async def stop_job(
        self,
        key: RunKey,
        user_id: UserId,
        conversation_id: ConversationId,
        caller_run_id: RunId,
        command_id: CommandId,
    ) -> tuple[run_pb2.Run, bool] | None:
        assert (key.store_id, user_id, conversation_id, caller_run_id) == ("local", "me", "conversation", "run")
        self.commands.append(command_id)
        job = self.jobs_by_id.get(key.run_id)
        return None if job is None else (job, job.state != run_pb2.RUN_STATE_COMPLETED)


def call(jobs: SomeJobs, name: str, now: float = 1000 * MINUTE, **arguments: object) -> Any:
    tools = {tool.name: tool for tool in job_tools(jobs, ManualClock(now))}
    return asyncio.run(tools[name](ToolContext(), **arguments))


def test_a_series_is_shown_with_its_iterations_and_the_next_time() -> None:
    (shown,) = call(SomeJobs(job_run()), "list_jobs", now=1002.5 * MINUTE)
    assert shown == {
        "job_id": "run_1",
        "tool": "look",
        "state": "WAITING",
        "started": "1970-01-01T16:40:00+00:00",
        "iterations": 3,
        "interval_seconds": 60.0,
        "next": "1970-01-01T16:43:00+00:00",
        "result": "{}",
    }


@for_each(
    "job",
    [
        job_run(waits=[]),
        job_run(job={"interval_seconds": 0.0}),
        job_run(job={"end_time": {"seconds": 60174}}),
    ],
)
def test_no_next_time_is_shown_if_unknown(job: run_pb2.Run) -> None:
    (shown,) = call(SomeJobs(job), "list_jobs", now=1002.5 * MINUTE)
    assert "next" not in shown


def test_stopping_a_job_reports_its_actual_state() -> None:
    """The tool never claims to have stopped a job that had already ended, or a job of another user."""
    over = job_run("run_2", state=run_pb2.RUN_STATE_COMPLETED, waits=[])
    ended = job_run("run_3", state=run_pb2.RUN_STATE_CANCELLED, waits=[])
    jobs = SomeJobs(job_run(state=run_pb2.RUN_STATE_CANCELLING, waits=[]), over, ended)
    stopping, late, stopped = (call(jobs, "stop_job", job_id=job_id) for job_id in ("run_1", "run_2", "run_3"))
    assert [(each["state"], each.get("note")) for each in (stopping, late, stopped)] == [
        ("CANCELLING", ANY),
        ("COMPLETED", "It had already ended; nothing was stopped."),
        ("CANCELLED", "It has ended, and none of it still runs."),
    ]
    with pytest.raises(ToolError, match="no job 'run_4'"):
        call(jobs, "stop_job", job_id="run_4")
    assert jobs.commands == ["call"] * 4, "the same call stops once, however often it runs"
