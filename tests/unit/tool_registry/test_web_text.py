"""Web pages become text that a model can read. TOOL-7."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.tool_registry.builtin.web_text import ELEMENTS_MAX, LINKS_MAX, NotText, Page, read_page
from tests.tables import for_each

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
    assert "Home" not in found.text
    assert "alert" not in found.text
    assert found.links == (("Home", "https://a.example/home"), ("link", "https://a.example/dir/other?x=1"))


def test_a_page_without_a_main_text_becomes_all_of_its_text() -> None:
    assert "Sign in" in page("<html><body><a>Sign in</a></body></html>").text
    assert page("<b>a</b>").text
    assert page("").text == ""
    assert page("<html></html>").text == ""


def test_a_page_with_too_many_elements_becomes_all_of_its_text_but_code() -> None:
    items = "<div><p>One <i>word</i>.</p><script>no()</script><!-- no --></div>" * (ELEMENTS_MAX // 4 + 1)
    found = page(f"<html><head><title>Many</title></head><body>{items}</body></html>")
    assert found.title == "Many"
    assert found.text.startswith("One word.\nOne word.")
    assert "no" not in found.text


def test_links_are_limited_and_each_comes_once() -> None:
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


def test_a_page_may_say_its_character_set_itself() -> None:
    text = '<html><head><meta charset="windows-1251"><title>Привет</title></head><body>x</body></html>'
    assert page(text.encode("windows-1251"), "text/html").title == "Привет"


@for_each("kind", ["application/json", "application/ld+json", "text/csv", "application/rss+xml"])
def test_other_kinds_of_text_are_returned_as_they_are(kind: str) -> None:
    assert page('{"a": "<b>"}', kind) == Page(title="", text='{"a": "<b>"}', links=())


@for_each("kind", ["image/png", "application/pdf", "application/octet-stream", "video/mp4", "nonsense"])
def test_what_is_no_text_is_refused(kind: str) -> None:
    with pytest.raises(NotText, match="is not text"):
        page(b"\x89PNG", kind)


@given(st.binary(max_size=300), st.sampled_from(["text/html", "text/plain", "text/html; charset=utf-16", ""]))
def test_any_bytes_become_text_that_json_can_hold(body: bytes, content_type: str) -> None:
    for prefix in (b"", b"<html><body><p>&#xD800;&#0;"):
        found = page(prefix + body, content_type)
        found.text.encode()
        assert "\0" not in found.text
