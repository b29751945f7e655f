"""Memories: an agent's tools store, find and delete them, and users list and erase them with MemoryService."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from pawl.server.db.database import Database
from pawl.tool.v1 import execution_pb2
from pawl.tool.v1 import memory_pb2 as pb
from pawl.tool_registry.memory import store as postgres_memories
from pawl.tool_registry.memory.store import PostgresMemoryRepository
from pawl.tool_registry.memory.tools import memory_tools
from tests.rpc.tool_registry.registry import Registry, all_pages, content, context, outcome, refusal, running


class Host:
    """An agent with a memory."""

    def __init__(self, registry: Registry, database: Database) -> None:
        self.registry, self.database = registry, database
        self.calls = 0

    async def result(
        self, tool: str, /, *, agent: str = "host", store: str = "acme", user: str = "ann", call: str = "", **given: Any
    ) -> execution_pb2.ExecutionResult:
        self.calls += 1
        who = context(store=store, user=user)
        who.agent_name = agent
        return await self.registry.run(tool, given, who=who, call=call or f"call_{self.calls}")

    async def __call__(self, tool: str, /, **given: Any) -> Any:
        return content(await self.result(tool, **given))

    async def recalled(self, query: str = "", **more: Any) -> list[str]:
        return [memory["text"] for memory in (await self("recall", query=query, **more))["memories"]]

    async def listed(
        self, agent: str = "", *, store: str = "acme", user: str = "ann", size: int = 0
    ) -> list[pb.Memory]:
        request = pb.ListMemoriesRequest(agent_name=agent, page_size=size)
        return await all_pages(self.registry.memories[store, user].ListMemories, request, "memories")

    async def erase(self, *, store: str = "acme", user: str = "ann", **what: str) -> int:
        request = pb.EraseMemoriesRequest(**what)
        return (await self.registry.memories[store, user].EraseMemories(request)).erased_count


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
    assert await host.recalled("zebra") == []
    assert await host.recalled('"!!!" -') == []
    assert await host.recalled() == ["The dog is called Rex", "Ann eats no fish.", "Ann wants a seat at the window."]
    assert len(await host.recalled(most=2)) == 2


async def test_memory_belongs_to_one_agent_and_user_in_one_store(host: Host) -> None:
    """Arguments from the model cannot select another owner."""
    kept = await host("remember", text="Ann wants a seat at the window.")
    for other in ({"agent": "clerk"}, {"agent": "draft/host"}, {"user": "bob"}, {"store": "other"}):
        assert await host.recalled(**other) == []
        assert await host.recalled("seat", **other) == []
        assert outcome(await host.result("forget", **other, **kept)).startswith("FAILED")
    for store, user in (("acme", "bob"), ("other", "ann"), ("acme", "root")):
        assert await host.listed(store=store, user=user) == []
        assert await host.erase(store=store, user=user) == 0
    with pytest.raises(grpc.aio.AioRpcError, match="user_id: unknown property"):
        await host.result("remember", text="x", user_id="bob")
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
    who = context()
    who.agent_name = "host"
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
    assert await host.erase(memory_id=found[0].memory_id) == 1
    assert await host.erase(agent_name="clerk") == 2
    assert await host.erase(agent_name="clerk") == 0
    assert await host.erase() == 3
    left = await host.database.fetch("SELECT content FROM tool_registry.memories")
    assert [row["content"] for row in left] == ["of bob"], "nothing erased is left"


async def test_invalid_memory_requests_are_rejected(host: Host) -> None:
    clients = host.registry.memories
    for request, why in (
        (pb.ListMemoriesRequest(agent_name="a b"), "INVALID_ID"),
        (pb.ListMemoriesRequest(page_size=201), "INVALID_FIELD"),
        (pb.ListMemoriesRequest(page_token="x"), "INVALID_PAGE_TOKEN"),
        (pb.ListMemoriesRequest(page_token="bWVtb3JpZXM6bmFuIGEgYg=="), "INVALID_PAGE_TOKEN"),
    ):
        assert await refusal(clients["acme", "ann"].ListMemories(request)) == why
    for text in (" \n", "bell \a"):
        assert outcome(await host.result("remember", text=text)).startswith("FAILED"), "no searchable words"


async def test_only_runs_that_name_memory_tools_have_them(host: Host) -> None:
    async def names(**fields: Any) -> list[str]:
        request = execution_pb2.ResolveToolsRequest(context=context(), **fields)
        return [tool.definition.name for tool in (await host.registry.execution.ResolveTools(request)).tools]

    assert await names() == []
    assert await names(tool_names=["recall"]) == ["recall"]
    assert await names(with_opt_in=True) == ["forget", "recall", "remember"]
