"""Documents and memories: stored by users or tools, and listed, read and searched (TOOL-7, I13)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pawl.errors import PawlError
from pawl.server.db.database import Database
from pawl.tool.v1 import document_pb2, execution_pb2, memory_pb2
from pawl.tool_registry.documents import store as postgres_documents
from pawl.tool_registry.documents import tools
from pawl.tool_registry.documents.rules import PART_CHARACTERS_MAX, TEXT_BYTES_MAX
from pawl.tool_registry.documents.store import PostgresDocumentRepository
from pawl.tool_registry.documents.tools import document_tools
from pawl.tool_registry.memory import store as postgres_memories
from pawl.tool_registry.memory.store import PostgresMemoryRepository
from pawl.tool_registry.memory.tools import memory_tools
from tests.rpc.refusals import raises
from tests.rpc.tool_registry.registry import Registry, all_pages, content, context, outcome, pieces, refusal, running

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
    assert (got.text, got.document, await shelf.found("grüße")) == ("other", other.document, [])


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
    await raises(PawlError, shelf.put("c", ""), match="at most 2 documents")
    assert (await shelf.put("a", "x")).created is False
    assert (await shelf.put("c", "12345", store="other")).created is True


async def test_search_finds_words_phrases_and_alternatives_best_first(shelf: Shelf) -> None:
    texts = {"cats": "Cats sleep. Cats eat. Cats purr.", "dogs": "Dogs eat what cats leave.", "fish": "Fish swim."}
    for name, text in texts.items():
        await shelf.put(name, text)
    assert (await shelf.found("cats"), await shelf.found("cats", most=1)) == (["cats", "dogs"], ["cats"])
    assert (await shelf.found('"dogs eat"'), await shelf.found('"cats dogs"')) == (["dogs"], [])
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
    assert (sorted(await shelf.found("running")), await shelf.found("Haus")) == (["english", "plain"], ["german"])
    assert await shelf.found("the") == []
    await shelf.put("english", "She was running to the houses.", language="simple")
    assert (await shelf.found("run"), await shelf.found("the")) == ([], ["english"])


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
        error = await raises(PawlError, shelf.clients["acme", "ann"].PutDocument(request))
        assert (error.reason, error.metadata) == (why, metadata), fields.keys()


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
    read = await pieces(lambda offset: shelf.result("read_document", name="handbook", offset=offset, length=40_000))
    assert "".join(each["text"] for each in read) == text
    assert "did you mean 'handbook'?" in (await shelf("read_document", name="handbok"))["error"]
    (match,) = (await shelf("search_documents", query="needle"))["matches"]
    assert "**needle**" in match["snippets"][0]
    assert match["offset"] > PART_CHARACTERS_MAX
    piece = await shelf("read_document", name="handbook", offset=match["offset"], length=2000)
    assert "needle is here" in piece["text"]
    assert (await shelf.put("empty", "")).document.text_bytes == 0
    assert (await shelf("read_document", name="empty"))["text"] == ""


class Host:
    """An agent with a memory."""

    def __init__(self, registry: Registry, database: Database) -> None:
        self.registry, self.database = registry, database
        self.calls = 0

    async def result(
        self, tool: str, /, *, agent: str = "host", store: str = "acme", user: str = "ann", call: str = "", **given: Any
    ) -> execution_pb2.ExecutionResult:
        self.calls += 1
        who = context(store=store, user=user, agent=agent)
        return await self.registry.run(tool, given, who=who, call=call or f"call_{self.calls}")

    async def __call__(self, tool: str, /, **given: Any) -> Any:
        return content(await self.result(tool, **given))

    async def recalled(self, query: str = "", **more: Any) -> list[str]:
        return [memory["text"] for memory in (await self("recall", query=query, **more))["memories"]]

    async def listed(
        self, agent: str = "", *, store: str = "acme", user: str = "ann", size: int = 0
    ) -> list[memory_pb2.Memory]:
        request = memory_pb2.ListMemoriesRequest(agent_name=agent, page_size=size)
        return await all_pages(self.registry.memories[store, user].ListMemories, request, "memories")

    async def erase(self, *, store: str = "acme", user: str = "ann", **what: str) -> int:
        return (
            await self.registry.memories[store, user].EraseMemories(memory_pb2.EraseMemoriesRequest(**what))
        ).erased_count


@pytest.fixture
async def host(database_url: str, tmp_path: Path) -> AsyncIterator[Host]:
    async with Database(database_url, application_name="test") as database:
        tools = memory_tools(PostgresMemoryRepository(database))
        async with running(database_url, tmp_path, tools) as registry:
            yield Host(registry, database)


async def test_memory_is_found_by_its_words(host: Host) -> None:
    for text in ("Ann wants a seat at the window.", "Ann eats no fish.", "The dog is called  Rex\n"):
        await host("remember", text=text)
    assert await host.recalled("seat window") == ["Ann wants a seat at the window."]
    assert await host.recalled("fish zebra") == ["Ann eats no fish."], "some of the words suffice if no memory has all"
    assert (await host.recalled("zebra"), await host.recalled('"!!!" -')) == ([], [])
    assert await host.recalled() == ["The dog is called Rex", "Ann eats no fish.", "Ann wants a seat at the window."]
    assert len(await host.recalled(most=2)) == 2


async def test_memory_belongs_to_one_agent_and_user_in_one_store(host: Host) -> None:
    """Arguments from the model cannot select another owner."""
    kept = await host("remember", text="Ann wants a seat at the window.")
    for other in ({"agent": "clerk"}, {"agent": "draft/host"}, {"user": "bob"}, {"store": "other"}):
        assert (await host.recalled(**other), await host.recalled("seat", **other)) == ([], [])
        assert outcome(await host.result("forget", **other, **kept)).startswith("FAILED")
    for store, user in (("acme", "bob"), ("other", "ann"), ("acme", "root")):
        assert (await host.listed(store=store, user=user), await host.erase(store=store, user=user)) == ([], 0)
    await raises(PawlError, host.result("remember", text="x", user_id="bob"), match="user_id: unknown property")
    assert await host.recalled() == ["Ann wants a seat at the window."]


async def test_repeated_call_does_not_store_a_second_memory(host: Host) -> None:
    first = await host("remember", text="Ann eats no fish.", call="the_call")
    assert await host("remember", text="Ann eats no fish.", call="the_call") == first
    assert await host("remember", text=" Ann eats  no fish.") == first, "nor does a duplicate text"
    assert len(await host.listed()) == 1


async def test_forgotten_memory_is_deleted(host: Host) -> None:
    kept = await host("remember", text="Ann eats no fish.")
    await host("forget", **kept)
    assert await host.recalled() == []
    assert outcome(await host.result("forget", **kept)).startswith("FAILED")
    who = context(agent="host")
    again = await host.registry.run("forget", kept, who=who, call="again", earlier_attempts=1)
    assert outcome(again) == "SUCCEEDED", "the previous attempt may have done it"


async def test_number_of_memories_is_limited(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres_memories, "MEMORIES_MAX", 2)
    monkeypatch.setattr(postgres_memories, "USER_MEMORIES_MAX", 3)
    for text in ("one", "two"):
        await host("remember", text=text)
    assert "forget one first" in content(await host.result("remember", text="three"))["error"]
    await host("remember", text="one")
    await host("remember", text="three", agent="clerk")
    assert "forget one first" in content(await host.result("remember", text="four", agent="clerk"))["error"]
    assert await host("remember", text="four", user="bob"), "memories of others do not count"
    both = await asyncio.gather(*(host.result("remember", text=f"{n}", user="bob", call=f"c{n}") for n in range(4)))
    assert sum(outcome(each) == "SUCCEEDED" for each in both) == 1, "also with many concurrent calls"


async def test_users_list_and_erase_memories_about_them(host: Host) -> None:
    for number in range(3):
        await host("remember", text=f"fact {number}")
        await host("remember", text=f"fact {number}", agent="clerk")
    await host("remember", text="of bob", user="bob")
    found = await host.listed(size=2)
    assert [(each.agent_name, each.text) for each in found] == [
        *(("clerk", f"fact {number}") for number in range(3)),
        *(("host", f"fact {number}") for number in range(3)),
    ]
    assert all(each.HasField("create_time") for each in found)
    assert [each.text for each in await host.listed("host", size=1)] == ["fact 0", "fact 1", "fact 2"]
    assert (await host.erase(memory_id=found[0].memory_id), await host.erase(agent_name="clerk")) == (1, 2)
    assert (await host.erase(agent_name="clerk"), await host.erase()) == (0, 3)
    left = await host.database.fetch("SELECT content FROM tool_registry.memories")
    assert [row["content"] for row in left] == ["of bob"], "nothing erased is left"


async def test_invalid_memory_requests_are_rejected(host: Host) -> None:
    clients = host.registry.memories
    for request, why in (
        (memory_pb2.ListMemoriesRequest(agent_name="a b"), "INVALID_ID"),
        (memory_pb2.ListMemoriesRequest(page_size=201), "INVALID_FIELD"),
        (memory_pb2.ListMemoriesRequest(page_token="x"), "INVALID_PAGE_TOKEN"),
        (memory_pb2.ListMemoriesRequest(page_token="bWVtb3JpZXM6bmFuIGEgYg=="), "INVALID_PAGE_TOKEN"),
    ):
        assert await refusal(clients["acme", "ann"].ListMemories(request)) == why
    for text in (" \n", "bell \a"):
        assert outcome(await host.result("remember", text=text)).startswith("FAILED"), "no searchable words"


async def test_only_runs_that_name_memory_tools_have_them(host: Host) -> None:
    async def names(**fields: Any) -> list[str]:
        request = execution_pb2.ResolveToolsRequest(context=context(), **fields)
        return [tool.definition.name for tool in (await host.registry.execution.ResolveTools(request)).tools]

    assert (await names(), await names(tool_names=["recall"])) == ([], ["recall"])
    assert await names(with_opt_in=True) == ["forget", "recall", "remember"]
