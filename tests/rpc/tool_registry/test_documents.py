"""Documents: put over DocumentService, listed, read and found by the model's tools. TOOL-7, I13."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.chassis.database import Database
from pawl.chassis.rpc_client import open_channel
from pawl.tool.v1 import document_pb2
from pawl.tool_registry.adapters.postgres import documents as postgres_documents
from pawl.tool_registry.adapters.postgres.documents import PostgresDocumentRepository
from pawl.tool_registry.builtin import documents as tools
from pawl.tool_registry.builtin.documents import document_tools
from pawl.tool_registry.domain.document import PART_CHARACTERS_MAX, TEXT_BYTES_MAX
from tests.rpc.tool_registry.registry import Registry, content, context, outcome, reason, running

USER, STORE = document_pb2.DOCUMENT_OWNER_USER, document_pb2.DOCUMENT_OWNER_STORE


class Shelf:
    """Documents as users put them there, and as the model sees them."""

    def __init__(self, registry: Registry) -> None:
        self.registry = registry
        self.clients = registry.documents

    async def put(
        self, name: str, text: str, *, store: str = "acme", user: str = "ann", language: str = ""
    ) -> document_pb2.PutDocumentResponse:
        """Put a document of a user's own; the user root puts the store's."""
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
        found: list[tuple[str, int]] = []
        token = ""
        while True:
            request = document_pb2.ListDocumentsRequest(page_size=page_size, page_token=token)
            page = await self.clients[store, user].ListDocuments(request)
            assert len(page.documents) <= page_size
            found += [(document.name, document.owner) for document in page.documents]
            token = page.next_page_token
            if not token:
                return found


@pytest.fixture
async def shelf(database_url: str, tmp_path: Path) -> AsyncIterator[Shelf]:
    async with Database(database_url, application_name="test") as database:
        repository = PostgresDocumentRepository(database)
        async with running(database_url, tmp_path, document_tools(repository)) as registry:
            yield Shelf(registry)


async def test_a_document_is_put_once_and_replaced_by_name(shelf: Shelf) -> None:
    first = await shelf.put("plan.md", "Grüße")
    assert (first.created, first.document.text_bytes, first.document.language) == (True, 7, "simple")
    again = await shelf.put("plan.md", "Grüße")
    assert (again.created, again.document) == (False, first.document)
    other = await shelf.put("plan.md", "other")
    assert (other.created, other.document.create_time) == (False, first.document.create_time)
    assert other.document.update_time.ToNanoseconds() > first.document.update_time.ToNanoseconds()
    request = document_pb2.GetDocumentRequest(name="plan.md")
    got = await shelf.clients["acme", "ann"].GetDocument(request)
    assert (got.text, got.document) == ("other", other.document)
    assert await shelf.found("grüße") == []


async def test_puts_of_one_name_at_once_leave_one_whole_document(shelf: Shelf) -> None:
    texts = [f"{number} " * 60_000 for number in range(4)]
    await asyncio.gather(*(shelf.put("plan", text) for text in texts))
    got = await shelf.clients["acme", "ann"].GetDocument(document_pb2.GetDocumentRequest(name="plan"))
    assert got.text in texts


async def test_the_same_name_is_another_document_for_each_user_and_store(shelf: Shelf) -> None:
    """I13: nothing of another store or user is listed, read, found or removed."""
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
    assert "set shared" in (await shelf("read_document", name="plan"))["error"]
    deleted = document_pb2.DeleteDocumentRequest(name="plan")
    await shelf.clients["acme", "ann"].DeleteDocument(deleted)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await shelf.clients["acme", "ann"].DeleteDocument(deleted)
    assert reason(error.value)[:2] == (grpc.StatusCode.NOT_FOUND, "DOCUMENT_NOT_FOUND")
    assert await shelf.listed("acme", "bob", 10) == [("plan", STORE), ("plan", USER)]
    assert await shelf.found("others") == []


async def test_only_an_admin_changes_documents_of_the_store(shelf: Shelf) -> None:
    await shelf.put("rules", "be kind", user="root")
    bob = shelf.clients["acme", "bob"]
    for call in (
        bob.PutDocument(document_pb2.PutDocumentRequest(name="rules", text="x", owner=STORE)),
        bob.DeleteDocument(document_pb2.DeleteDocumentRequest(name="rules", owner=STORE)),
        bob.DeleteDocument(document_pb2.DeleteDocumentRequest(name="none", owner=STORE)),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        assert reason(error.value)[1] == "PERMISSION_DENIED"
    got = await bob.GetDocument(document_pb2.GetDocumentRequest(name="rules", owner=STORE))
    assert got.text == "be kind"
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await bob.GetDocument(document_pb2.GetDocumentRequest(name="rules", owner=USER))
    assert reason(error.value)[1] == "DOCUMENT_NOT_FOUND"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"name": "a\nb"}, ("INVALID_FIELD", {"field": "name"})),
        ({"name": ""}, ("INVALID_FIELD", {"field": "name"})),
        ({"text": "a\0b"}, ("INVALID_FIELD", {"field": "text"})),
        ({"language": "klingon"}, ("INVALID_FIELD", {"field": "language"})),
        ({"owner": 7}, ("INVALID_FIELD", {"field": "owner"})),
        ({"text": "x" * (TEXT_BYTES_MAX + 1)}, ("TOO_LARGE", {})),
    ],
)
async def test_what_cannot_be_kept_is_refused(shelf: Shelf, fields: dict[str, Any], expected: Any) -> None:
    request = document_pb2.PutDocumentRequest(**{"name": "a", "text": "b"} | fields)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await shelf.clients["acme", "ann"].PutDocument(request)
    assert reason(error.value)[1:] == expected


async def test_a_text_that_is_not_utf_8_is_refused(shelf: Shelf) -> None:
    raw = document_pb2.PutDocumentRequest(name="a", text="bcd").SerializeToString().replace(b"bcd", b"\xff\xfe\xfd")
    async with open_channel(shelf.registry.address, service_key="key-of-ann-of-acme") as channel:
        put: Any = channel.unary_unary("/pawl.tool.v1.DocumentService/PutDocument")
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await put(raw)
    assert reason(error.value)[1] == "MALFORMED_REQUEST"


async def test_a_store_has_limits(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_documents, "DOCUMENTS_MAX", 2)
    monkeypatch.setattr(postgres_documents, "STORE_BYTES_MAX", 10)
    await shelf.put("a", "12345")
    for number in range(3):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await shelf.put("b", "123456", user="bob")
        assert reason(error.value)[1] == "TOO_LARGE", number
    await shelf.put("a", "123456789")
    await shelf.put("b", "1", user="bob")
    with pytest.raises(grpc.aio.AioRpcError, match="at most 2 documents"):
        await shelf.put("c", "")
    assert (await shelf.put("a", "x")).created is False
    assert (await shelf.put("c", "12345", store="other")).created is True


@pytest.mark.parametrize("size", [1, 2, 3, 200])
async def test_pages_have_each_document_once_and_in_order(shelf: Shelf, size: int) -> None:
    names = ["Zoo", "a", "b c", "ä", "日本"]
    for name in names:
        await shelf.put(name, "x")
        await shelf.put(name, "y", user="root")
    expected = [(name, owner) for name in names for owner in (STORE, USER)]
    assert await shelf.listed("acme", "ann", size) == expected
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await shelf.clients["acme", "ann"].ListDocuments(document_pb2.ListDocumentsRequest(page_token="x"))
    assert reason(error.value)[1] == "INVALID_PAGE_TOKEN"


async def test_the_model_lists_documents_in_pieces(shelf: Shelf, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "LISTED_MAX", 3)
    for name in "abcdef":
        await shelf.put(name, "x")
    for name in "ce":
        await shelf.put(name, "xy", user="root")
    pieces: list[Sequence[tuple[str, bool]]] = []
    start: str | None = ""
    while start is not None:
        listed = await shelf("list_documents", start=start)
        pieces.append([(document["name"], document["shared"]) for document in listed["documents"]])
        start = listed.get("next_start")
    assert pieces == [
        [("a", False), ("b", False), ("c", True), ("c", False)],
        [("d", False), ("e", True), ("e", False)],
        [("f", False)],
    ]


async def test_a_document_is_read_in_pieces_and_a_near_name_is_told(shelf: Shelf) -> None:
    text = "naïve 日本語 text. " * 8000
    await shelf.put("handbook", text)
    read = ""
    offset: int | None = 0
    while offset is not None:
        piece = await shelf("read_document", name="handbook", offset=offset, length=40_000)
        read, offset = read + piece["text"], piece["next_offset"]
    assert read == text
    assert "did you mean 'handbook'?" in (await shelf("read_document", name="handbok"))["error"]
    empty = await shelf.put("empty", "")
    assert empty.document.text_bytes == 0
    assert (await shelf("read_document", name="empty"))["text"] == ""


async def test_words_phrases_and_alternatives_are_found_the_best_first(shelf: Shelf) -> None:
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


async def test_a_match_says_where_to_read_on(shelf: Shelf) -> None:
    text = "ø filler word " * (PART_CHARACTERS_MAX // 8) + "the needle is here. " + "more filler " * 100
    await shelf.put("long", text)
    (match,) = (await shelf("search_documents", query="needle"))["matches"]
    assert "**needle**" in match["snippets"][0]
    piece = await shelf("read_document", name="long", offset=match["offset"], length=1000)
    assert "needle is here" in piece["text"]
    assert match["offset"] > PART_CHARACTERS_MAX


async def test_every_text_of_the_largest_size_can_be_kept_and_searched(shelf: Shelf) -> None:
    """One search vector has at most 1 MiB; a text can make more of it than its own size."""
    chance = random.Random(7)
    letters = "abcdefghijklmnopqrstuvwxyz"

    def word(length: int) -> str:
        return "".join(chance.choice(letters) for _ in range(length))

    makes: list[Callable[[], str]] = [
        lambda: word(3) + " ",
        lambda: word(2) + "-" + word(2) + "-" + word(2) + " ",
        lambda: f"{word(2)}.{word(2)}/{word(2)} ",
    ]
    for number, make in enumerate(makes):
        text = ""
        piece = "".join(make() for _ in range(60_000))
        while len((text + piece).encode()) < TEXT_BYTES_MAX:
            text += piece
        room = TEXT_BYTES_MAX - len(text.encode())
        text += piece.encode()[:room].decode(errors="ignore")
        await shelf.put(f"text {number}", text)
        wanted = text.split()[-2]
        assert outcome(await shelf.result("search_documents", query=f'"{wanted}"')) == "SUCCEEDED"
    assert len(await shelf.listed("acme", "ann", 50)) == 3
