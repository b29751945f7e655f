"""Tools that come with sessions and runs, through the whole suite, while replicas of agent-loop die (FE-2, I23)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pawl.agent.v1 import agent_pb2
from pawl.client import AsyncClient, result
from pawl.errors import InvalidSchema, ToolExists
from pawl.event.v1 import call_pb2, event_pb2, run_pb2
from pawl.launcher.suite import Suite
from pawl.tool.v1 import audit_pb2, tool_pb2
from pawl.tool.v1.audit_pb2_grpc import AuditServiceStub
from pawl.tools import Category, EffectClass, Tool, tool
from tests.keys import keyed_channel
from tests.system.suite.client import Agent
from tests.system.suite.test_python_client import arguments

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASKED = 'call draw with {"title": "Plan"}'


class Panel:
    """A front end with a tool `draw`, which no other one has: it says what it was asked to draw, and where."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.drawn: list[str] = []
        self.begun = asyncio.Event()
        self.goes_on = asyncio.Event()
        self.goes_on.set()

    def tool(self) -> Tool[..., Any]:
        @tool(description=f"Draws on {self.place}.", category=Category.SAFE, effect=EffectClass.IDEMPOTENT)
        async def draw(title: str) -> dict[str, str]:
            self.begun.set()
            await self.goes_on.wait()
            self.drawn.append(title)
            return {"drawn_on": self.place}

        return draw


async def drawn_on(pawl: AsyncClient, run_id: str) -> str:
    done = await pawl.result(run_id)
    assert done.state == run_pb2.RUN_STATE_COMPLETED
    (call,) = [call async for call in pawl.calls(run_id)]
    assert call.state == call_pb2.CALL_STATE_SUCCEEDED
    return call.result.content_json.decode()


async def test_front_ends_with_the_same_name_of_a_tool_do_not_meet(suite: Suite) -> None:
    """Of two users, and of one: each run has the tool of the front end that started it, and calls it there."""
    panels = [Panel("the wall"), Panel("the desk"), Panel("the door")]
    users = ["me", "me", "kim"]
    async with AsyncClient(**arguments(suite)) as mine, AsyncClient(**arguments(suite), user="kim") as other:
        clients = [{"me": mine, "kim": other}[user] for user in users]
        sessions = [pawl.session(tools=[panel.tool()]) for pawl, panel in zip(clients, panels, strict=True)]
        async with sessions[0], sessions[1], sessions[2]:
            runs = [await session.start(ASKED) for session in sessions]
            await sessions[0].attach(runs[1])
            await sessions[1].attach(runs[0])
            found = [await drawn_on(pawl, run) for pawl, run in zip(clients, runs, strict=True)]
        assert found == [f'{{"drawn_on":"{panel.place}"}}' for panel in panels]
        assert [panel.drawn for panel in panels] == [["Plan"]] * 3
        pages = mine.pages(mine.tool_register.ListTools, tool_pb2.ListToolsRequest())
        assert "draw" not in {tool.definition.name async for page in pages for tool in page.tools}
    async with keyed_channel(suite.endpoints.services["tool-registry"][0].grpc) as channel:
        figures = (await AuditServiceStub(channel).GetToolAnalytics(audit_pb2.GetToolAnalyticsRequest())).tools
    counted = {each.tool_name: each.execution_count for each in figures if each.tool_name.startswith("draw@")}
    assert list(counted.values()) == [1, 1, 1]
    assert all(each.p50_seconds > 0 for each in figures if each.tool_name in counted)


async def test_a_call_ends_once_though_the_replicas_are_killed_while_it_is_drawn(suite: Suite) -> None:
    """The replica that its client is connected to, and the one that drives its run; another client gets nothing."""
    panel, other = Panel("the wall"), Panel("the desk")
    panel.goes_on.clear()
    async with AsyncClient(**arguments(suite)) as pawl:
        async with pawl.session(tools=[panel.tool()]) as session, pawl.session(tools=[other.tool()]) as idle:
            run_id = await session.start(ASKED)
            await idle.attach(run_id)
            await asyncio.wait_for(panel.begun.wait(), 90)
            for number in (0, 1):
                suite.kill("agent-loop", number)
                await suite.wait_ready("agent-loop", number)
            panel.goes_on.set()
            assert await drawn_on(pawl, run_id) == '{"drawn_on":"the wall"}'
        events = [event async for event in pawl.watch(run_id) if isinstance(event, event_pb2.RunEvent)]
    assert (panel.drawn, other.drawn) == (["Plan"], [])
    types = [event.type for event in events if event.type.startswith("tool.")]
    assert types.count("tool.completed") == 1
    assert "tool.executing" in types
    ended = next(event.call_changed for event in events if event.type == "tool.completed")
    assert ended.duration_seconds > 0


async def test_a_run_with_tools_of_its_own_is_served_by_a_front_end_that_attaches_or_by_hand(
    suite: Suite, agent: Agent
) -> None:
    panel = Panel("the wall")
    async with AsyncClient(**arguments(suite)) as pawl:
        run = await pawl.start(ASKED, tools=[panel.tool()])
        assert list(run.own_tools.names) == ["draw"]
        async with pawl.session(tools=[panel.tool()]) as session:
            await session.attach(run.run_id)
            assert await drawn_on(pawl, run.run_id) == '{"drawn_on":"the wall"}'
        bare = await pawl.start(ASKED, tools=[panel.tool()])
        call = await agent.until_pending(bare.run_id, call_pb2.CALL_STATE_OFFERED)
        await pawl.submit(result(call, "by hand"))
        assert await drawn_on(pawl, bare.run_id) == '"by hand"'


async def test_a_name_that_there_is_and_a_schema_that_is_none_are_refused_before_anything_is_started(
    suite: Suite,
) -> None:
    @tool
    def calculate(expression: str) -> str:
        """Something else than the tool of that name."""
        return expression

    async with AsyncClient(**arguments(suite)) as pawl, pawl.session(tools=[calculate]) as session:
        with pytest.raises(ToolExists, match="calculate"):
            await session.start("go")
        with pytest.raises(ToolExists):
            await pawl.start("go", tools=[calculate])
        bad = tool_pb2.ToolDefinition(name="draw", description="Draw.", arguments_schema_json=b"[]")
        with pytest.raises(InvalidSchema):
            await pawl.once(pawl.agents.StartRun, agent_pb2.StartRunRequest(text="go", front_end_tools=[bad]))
