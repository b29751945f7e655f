"""Documents: stored with DocumentService, and listed, read and searched with the model's tools (TOOL-7, I13)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.server.db.database import Database
from pawl.tool.v1 import document_pb2
from pawl.tool_registry.documents import store as postgres_documents
from pawl.tool_registry.documents import tools
from pawl.tool_registry.documents.rules import PART_CHARACTERS_MAX, TEXT_BYTES_MAX
from pawl.tool_registry.documents.store import PostgresDocumentRepository
from pawl.tool_registry.documents.tools import document_tools
from tests.rpc.tool_registry.registry import Registry, all_pages, content, context, reason, refusal, running

USER, STORE = document_pb2.DOCUMENT_OWNER_USER, document_pb2.DOCUMENT_OWNER_STORE


class Shelf:
    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.clients = registry.documents

    async def put(
        self, name: str, text: str, *, store: str = "acme", user: str = "ann", language: str = ""
    ) -> document_pb2.PutDocumentResponse:
        owner = STORE if user == "root" else USER
        request = document_pb2.PutDocumentRequest(name=name, text=text, owner=owner, language=language)
        return await self.clients[store, user].PutDocument(request)

    async def result(self, name: str, /, *, who: Any = None, **arguments: Any) -> Any:
        return await self.registry.run(name, arguments, who=who or context())

    async def __call__(self, name: str, /, **arguments: Any) -> Any:
        return content(await self.result(name, **arguments))

    async def found(self, query: str, **more: Any) -> list[str]:
        return [match["name"] for match in (await self("search_documents", query=query, **more))["matches"]]

    async def listed(self, store: str, user: str, page_size: int) -> list[tuple[str, int]]:
        request = document_pb2.ListDocumentsRequest(page_size=page_size)
        found = await all_pages(self.clients[store, user].ListDocuments, request, "documents")
        return [(document.name, document.owner) for document in found]


@pytest.fixture
async def shelf(database_url: str, tmp_path: Path) -> AsyncIterator[Shelf]:
    async with Database(database_url, application_name="test") as database:
        repository = PostgresDocumentRepository(database)
        async with running(database_url, tmp_path, document_tools(repository)) as registry:
            yield Shelf(registry)


async def test_document_is_stored_once_and_replaced_by_name(shelf: Shelf) -> None:
    first = await shelf.put("plan.md", "Grüße")
    assert (first.created, first.document.text_bytes, first.document.language) == (True, 7, "simple")
    again = await shelf.put("plan.md", "Grüße")
    assert (again.created, again.document) == (False, first.document)
    other = await shelf.put("plan.md", "other")
    assert (other.created, other.document.create_time) == (False, first.document.create_time)
    assert other.document.update_time.ToNanoseconds() > first.document.update_time.ToNanoseconds()
    got = await shelf.clients["acme", "ann"].GetDocument(document_pb2.GetDocumentRequest(name="plan.md"))
    assert (got.text, got.document) == ("other", other.document)
    assert await shelf.found("grüße") == []


async def test_same_name_is_a_different_document_for_each_user_and_store(shelf: Shelf) -> None:
    """I13: documents of another store or user are never listed, read, found or removed."""
    await shelf.put("plan", "apples of ann")
    await shelf.put("plan", "apples of bob", user="bob")
    await shelf.put("plan", "apples of all", user="root")
    await shelf.put("plan", "apples of others", store="other")
    assert await shelf.listed("acme", "ann", 10) == [("plan", STORE), ("plan", USER)]
    assert await shelf.listed("other", "ann", 10) == [("plan", USER)]
    for who, own in [
        (context(), "apples of ann"),
        (context(user="bob"), "apples of bob"),
        (context(store="other"), "apples of others"),
    ]:
        assert (await shelf("read_document", name="plan", shared=False, who=who))["text"] == own
        matches = (await shelf("search_documents", query="apples", who=who))["matches"]
        texts = {own.replace("apples", "**apples**")} | ({"**apples** of all"} if who.store_id == "acme" else set())
        assert {match["snippets"][0] for match in matches} == texts
    assert (await shelf("read_document", name="plan", shared=True))["text"] == "apples of all"
    deleted = document_pb2.DeleteDocumentRequest(name="plan")
    await shelf.clients["acme", "ann"].DeleteDocument(deleted)
    assert await refusal(shelf.clients["acme", "ann"].DeleteDocument(deleted)) == "DOCUMENT_NOT_FOUND"
    assert await shelf.listed("acme", "bob", 10) == [("plan", STORE), ("plan", USER)]
    assert await shelf.found("others") == []


async def test_store_has_document_limits(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_documents, "DOCUMENTS_MAX", 2)
    monkeypatch.setattr(postgres_documents, "STORE_BYTES_MAX", 10)
    await shelf.put("a", "12345")
    for number in range(3):
        assert await refusal(shelf.put("b", "123456", user="bob")) == "TOO_LARGE", number
    await shelf.put("a", "123456789")
    await shelf.put("b", "1", user="bob")
    with pytest.raises(grpc.aio.AioRpcError, match="at most 2 documents"):
        await shelf.put("c", "")
    assert (await shelf.put("a", "x")).created is False
    assert (await shelf.put("c", "12345", store="other")).created is True


async def test_search_finds_words_phrases_and_alternatives_best_first(shelf: Shelf) -> None:
    await shelf.put("cats", "Cats sleep. Cats eat. Cats purr.")
    await shelf.put("dogs", "Dogs eat what cats leave.")
    await shelf.put("fish", "Fish swim.")
    assert await shelf.found("cats") == ["cats", "dogs"]
    assert await shelf.found("cats", most=1) == ["cats"]
    assert await shelf.found('"dogs eat"') == ["dogs"]
    assert await shelf.found('"cats dogs"') == []
    assert await shelf.found("cats -dogs") == ["cats"]
    assert sorted(await shelf.found("fish or dogs")) == ["dogs", "fish"]
    for nothing in ("zebra", "...", "-", '""', "& | ! ( ) <-> :*", "' OR 1=1 --", "\\"):
        assert await shelf.found(nothing) == [], nothing
    some = await shelf("search_documents", query="swim purr")
    assert sorted(match["name"] for match in some["matches"]) == ["cats", "fish"]
    assert "some of them" in some["note"]


async def test_each_document_is_searched_by_the_rules_of_its_language(shelf: Shelf) -> None:
    await shelf.put("english", "She was running to the houses.", language="english")
    await shelf.put("german", "Die Häuser am See.", language="german")
    await shelf.put("plain", "running houses")
    assert sorted(await shelf.found("run")) == ["english"]
    assert sorted(await shelf.found("running")) == ["english", "plain"]
    assert await shelf.found("Haus") == ["german"]
    assert await shelf.found("the") == []
    await shelf.put("english", "She was running to the houses.", language="simple")
    assert await shelf.found("run") == []
    assert await shelf.found("the") == ["english"]


async def test_only_an_admin_changes_store_documents(shelf: Shelf) -> None:
    await shelf.put("rules", "be kind", user="root")
    bob = shelf.clients["acme", "bob"]
    get = document_pb2.GetDocumentRequest
    for call, why in (
        (bob.PutDocument(document_pb2.PutDocumentRequest(name="rules", text="x", owner=STORE)), "PERMISSION_DENIED"),
        (bob.DeleteDocument(document_pb2.DeleteDocumentRequest(name="rules", owner=STORE)), "PERMISSION_DENIED"),
        (bob.DeleteDocument(document_pb2.DeleteDocumentRequest(name="none", owner=STORE)), "PERMISSION_DENIED"),
        (bob.GetDocument(get(name="rules", owner=USER)), "DOCUMENT_NOT_FOUND"),
    ):
        assert await refusal(call) == why
    assert (await bob.GetDocument(get(name="rules", owner=STORE))).text == "be kind"


async def test_error_for_an_invalid_document_names_the_field(shelf: Shelf) -> None:
    rows: list[tuple[dict[str, Any], str, dict[str, str]]] = [
        ({"name": "a\nb"}, "INVALID_FIELD", {"field": "name"}),
        ({"name": ""}, "INVALID_FIELD", {"field": "name"}),
        ({"text": "a\0b"}, "INVALID_FIELD", {"field": "text"}),
        ({"language": "klingon"}, "INVALID_FIELD", {"field": "language"}),
        ({"owner": 7}, "INVALID_FIELD", {"field": "owner"}),
        ({"text": "x" * (TEXT_BYTES_MAX + 1)}, "TOO_LARGE", {}),
    ]
    for fields, why, metadata in rows:
        request = document_pb2.PutDocumentRequest(**{"name": "a", "text": "b"} | fields)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await shelf.clients["acme", "ann"].PutDocument(request)
        assert reason(error.value)[1:] == (why, metadata), fields.keys()


async def test_documents_are_listed_in_order_in_pages(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "LISTED_MAX", 3)
    names = ["Zoo", "a", "b c", "ä", "日本"]
    for name in names:
        await shelf.put(name, "x")
        await shelf.put(name, "y", user="root")
    expected = [(name, owner) for name in names for owner in (STORE, USER)]
    for size in (1, 3, 200):
        assert await shelf.listed("acme", "ann", size) == expected
    seen: list[tuple[str, int]] = []
    start: str | None = ""
    while start is not None:
        listed = await shelf("list_documents", start=start)
        assert len(listed["documents"]) <= 4, "documents with one name are listed together"
        seen += [(each["name"], STORE if each["shared"] else USER) for each in listed["documents"]]
        start = listed.get("next_start")
    assert seen == expected


async def test_document_is_read_in_pieces_and_a_match_has_its_position(shelf: Shelf) -> None:
    text = "naïve 日本語 text. " * 8000 + "the needle is here. " + "more filler " * 100
    await shelf.put("handbook", text)
    read = ""
    offset: int | None = 0
    while offset is not None:
        piece = await shelf("read_document", name="handbook", offset=offset, length=40_000)
        read, offset = read + piece["text"], piece["next_offset"]
    assert read == text
    assert "did you mean 'handbook'?" in (await shelf("read_document", name="handbok"))["error"]
    (match,) = (await shelf("search_documents", query="needle"))["matches"]
    assert "**needle**" in match["snippets"][0]
    assert match["offset"] > PART_CHARACTERS_MAX
    piece = await shelf("read_document", name="handbook", offset=match["offset"], length=2000)
    assert "needle is here" in piece["text"]
    assert (await shelf.put("empty", "")).document.text_bytes == 0
    assert (await shelf("read_document", name="empty"))["text"] == ""
