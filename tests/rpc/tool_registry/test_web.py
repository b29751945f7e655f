"""web_scrape, through the wire: pages of a real server, and none that it may not read. TOOL-7."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pawl.chassis.egress import GuardedEgress
from pawl.chassis.egress_rules import read_rules
from pawl.tool_registry.adapters.process.helpers import Helpers
from pawl.tool_registry.builtin.web import PAGE_BYTES_MAX, web_tools
from tests.rpc.tool_registry.registry import ANN, Registry, content, context, outcome, running
from tests.web_server import Reply, WebServer, pages, web_server

PARAGRAPHS = [f"This is paragraph {number} of a page that has quite a few of them." for number in range(1, 40)]
ARTICLE = "<html><head><title>Page</title></head><body><article>{}</article></body></html>".format(
    "".join(f"<p>{text}</p>" for text in PARAGRAPHS)
)
PAGES = {
    "/": Reply(ARTICLE.encode()),
    "/moved": Reply(status=301, headers={"Location": "/"}),
    "/links": Reply(b'<html><body><p>See <a href="/">the page</a>.</p></body></html>'),
    "/image": Reply(b"\x89PNG", headers={"Content-Type": "image/png"}),
    "/large": Reply(b"a" * (PAGE_BYTES_MAX + 1), headers={"Content-Type": "text/plain"}),
    "/inside": Reply(status=302, headers={"Location": "http://169.254.169.254/latest/meta-data/"}),
}


@asynccontextmanager
async def reading(database_url: str, folder: Path) -> AsyncIterator[tuple[Registry, WebServer, str]]:
    async with web_server(pages(PAGES)) as server:
        rules = {"acme": read_rules(None, [f"127.0.0.1:{server.port}"])}
        egress = GuardedEgress(rules, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        async with Helpers() as helpers, running(database_url, folder, web_tools(egress, helpers)) as registry:
            yield registry, server, f"http://127.0.0.1:{server.port}"


@pytest.fixture
async def reader(database_url: str, tmp_path: Path) -> AsyncIterator[tuple[Registry, WebServer, str]]:
    """A registry whose web_scrape reads one server."""
    async with reading(database_url, tmp_path) as parts:
        yield parts


async def test_a_page_is_read_piece_by_piece(reader: tuple[Registry, WebServer, str]) -> None:
    registry, _, url = reader
    whole, number = "", 0
    offset: int | None = 0
    while offset is not None:
        arguments = {"url": f"{url}/moved", "offset": offset, "max_characters": 1000}
        found = content(await registry.run("web_scrape", arguments, call=f"c{number}"))
        assert (found["title"], found["url"]) == ("Page", f"{url}/")
        assert len(found["text"]) <= 1000
        whole, offset, number = whole + found["text"], found["next_offset"], number + 1
    assert whole == "\n\n".join(PARAGRAPHS)
    assert found["total_characters"] == len(whole)
    beyond = content(await registry.run("web_scrape", {"url": url, "offset": 10**6}, call="beyond"))
    assert (beyond["text"], beyond["next_offset"]) == ("", None)


async def test_links_come_when_asked_for(reader: tuple[Registry, WebServer, str]) -> None:
    registry, _, url = reader
    found = content(await registry.run("web_scrape", {"url": f"{url}/links", "links": True}))
    assert found["links"] == [{"text": "the page", "url": f"{url}/"}]
    assert "links" not in content(await registry.run("web_scrape", {"url": f"{url}/links"}, call="b"))


async def test_a_page_that_is_too_large_is_read_in_part_and_that_is_said(
    reader: tuple[Registry, WebServer, str],
) -> None:
    registry, _, url = reader
    found = content(await registry.run("web_scrape", {"url": f"{url}/large"}))
    assert found["total_characters"] == PAGE_BYTES_MAX
    assert found["note"] == f"only the first {PAGE_BYTES_MAX} bytes of the page were read"


@pytest.mark.parametrize(
    ("path", "says"),
    [("/image", "image/png is not text"), ("/none", "status 404"), ("/inside", "169.254.169.254 is not an address")],
)
async def test_what_cannot_be_read_is_said(reader: tuple[Registry, WebServer, str], path: str, says: str) -> None:
    registry, _, url = reader
    failed = await registry.run("web_scrape", {"url": url + path})
    assert outcome(failed) == "FAILED TOOL_ERROR"
    assert says in content(failed)["error"]


async def test_what_may_not_be_reached_is_refused_by_the_rules_of_the_calls_store(
    reader: tuple[Registry, WebServer, str],
) -> None:
    registry, server, url = reader
    for number, target in enumerate(["http://127.0.0.1/", "http://localhost/", "file:///etc/passwd", "nonsense"]):
        failed = await registry.run("web_scrape", {"url": target}, call=f"c{number}")
        assert outcome(failed) == "FAILED TOOL_ERROR"
    failed = await registry.run("web_scrape", {"url": url}, call="other", who=context(store="other"))
    assert outcome(failed) == "FAILED TOOL_ERROR"
    assert server.connections == 0


async def test_it_runs_without_an_approval_and_changes_nothing(reader: tuple[Registry, WebServer, str]) -> None:
    registry, _, _ = reader
    (entry,) = await registry.catalog.visible(ANN)
    assert (entry.definition.category, entry.definition.effect) == ("SAFE", "READ_ONLY")
