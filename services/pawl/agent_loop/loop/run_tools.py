"""A run's tools, which are chosen and pinned when the run starts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Sequence

from msgspec.structs import replace

from pawl.agent_loop.goals import rules as goals
from pawl.agent_loop.loop.rules import delegation, jobs
from pawl.agent_loop.loop.rules.fact import Fact, RunRefused, ToolsPinned
from pawl.agent_loop.loop.rules.run import PinnedTool, Run, limit_failure
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.loop.rules.tool import TOOLS_MAX, Resolved, Tool
from pawl.agent_loop.loop.tool_calls import ToolCalls
from pawl.errors import ToolNotFound
from pawl.values import ExecutionContext


class RunTools:
    """The tools of one run. `own_tools` contains the tools that the run's client supplied."""

    def __init__(self, tool_calls: ToolCalls, own_tools: Sequence[Tool] = ()) -> None:
        self._tool_calls = tool_calls
        self._own_tools = tuple(own_tools)
        self._tools: tuple[Tool, ...] | None = None

    async def pin(self, state: State) -> Fact:
        options = state.run.options
        chosen = options.tool_choice.tool_name
        try:
            found = await self._resolved(state.run)
        except ToolNotFound as error:
            return _no_tool(error.metadata.get("tool_name", ""))
        # Runs at the depth limit do not get the tool that starts more runs.
        may_delegate = delegation.may_delegate(state.run)
        without = frozenset() if may_delegate else frozenset({ExecutionContext.AGENT})
        # A turn started by job notices must not wait for users.
        without = jobs.WAITED_FOR if state.run.is_turn else without
        self._tools = tuple(tool for tool in found.tools if tool.context not in without)
        if chosen and all(tool.name != chosen for tool in self._tools):
            return _no_tool(chosen)
        pinned = tuple(
            PinnedTool(name=tool.name, version=tool.version, definition_sha256=tool.definition_sha256)
            for tool in self._tools
        )
        return ToolsPinned(tools=pinned, left_out=found.left_out)

    async def _resolved(self, run: Run) -> Resolved:
        if run.goal is not None:
            needed = (await self._tool_calls.resolve(goals.tools_needed(run.goal))).tools
            found = Resolved(tools=()) if run.options.without_tools else await self._registered(run, ())
            others = tuple(tool for tool in found.tools if tool not in needed)[: TOOLS_MAX - len(needed)]
            return replace(found, tools=(*needed, *others))
        if run.options.without_tools:
            return Resolved(tools=())
        own = {tool.name: tool for tool in self._own_tools}
        found = await self._registered(run, own)
        # A tool supplied with the run takes precedence over a registered one of the same name.
        tools = [*own.values(), *(tool for tool in found.tools if tool.name not in own)]
        missing = {tool.fallback_tool_name for tool in tools} - {tool.name for tool in tools} - {""}
        if missing:
            # A missing fallback is reported when its call is checked.
            tools += (await self._tool_calls.resolve(sorted(missing), skip_missing=True)).tools
        kept = tuple(tools[:TOOLS_MAX])
        return Resolved(tools=kept, left_out=found.left_out + len(tools) - len(kept))

    async def _registered(self, run: Run, own: Collection[str]) -> Resolved:
        """Return the run's registered tools. They include the tool that the model must call, if it is registered."""
        options, gives_tools = run.options, run.agent is not None and run.agent.gives_tools
        names = tuple(name for name in options.tool_names if name not in own)
        if options.tool_names and not names:
            return Resolved(tools=())
        most = TOOLS_MAX - len(own)
        found = await self._tool_calls.resolve(names, most=most, skip_missing=gives_tools)
        chosen = options.tool_choice.tool_name
        if not chosen or chosen in own or not found.left_out or any(tool.name == chosen for tool in found.tools):
            return found
        wanted = await self._tool_calls.resolve([chosen])
        return replace(found, tools=(*wanted.tools, *found.tools)[:most])

    async def pinned(self, state: State) -> tuple[Tool, ...]:
        if self._tools is None:
            self._tools = await pinned_tools(state.run, self._own_tools, self._tool_calls.resolve)
        return self._tools


async def pinned_tools(
    run: Run, own_tools: Sequence[Tool], resolve: Callable[[Sequence[str], Sequence[PinnedTool]], Awaitable[Resolved]]
) -> tuple[Tool, ...]:
    """Return the tools that the run has pinned.

    Raises:
        ToolNotFound: A tool does not exist for this user.
    """
    pinned = [tool for tool in run.tools if not tool.definition_sha256]
    found = await resolve([tool.name for tool in pinned], pinned) if pinned else Resolved(tools=())
    return (*(tool for tool in own_tools if run.definition_sha256(tool.name)), *found.tools)


def _no_tool(name: str) -> RunRefused:
    return RunRefused(failure=limit_failure(ToolNotFound.reason, f"There is no tool {name} that you may use."))
