"""Giving a task to another agent."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from pawl.tool_registry.sdk.context import ToolError
from pawl.tool_registry.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass, ExecutionContext

Task = Annotated[
    str,
    msgspec.Meta(min_length=1, max_length=100_000),
    "what to do and what to answer with; it sees nothing of this conversation, so say all that it needs to know",
]
Instructions = Annotated[
    str, msgspec.Meta(max_length=16_000), "how to go about it; it is told this after what every agent here is told"
]
ToolNames = Annotated[
    list[str], msgspec.Meta(max_length=1000), "those of your tools that it may use; empty for all of them"
]
Rounds = Annotated[int, msgspec.Meta(ge=0, le=1000), "how many times it may call tools; 0 for as often as you may"]
Agent = Annotated[
    str,
    msgspec.Meta(max_length=64),
    "name of the agent that does it, one of those that you were told of; empty for one like you",
]


def agent_tools() -> list[Tool[..., Any]]:
    """Return run_agent."""

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, context=ExecutionContext.AGENT)
    def run_agent(
        task: Task,  # noqa: ARG001
        instructions: Instructions = "",  # noqa: ARG001
        tool_names: ToolNames = [],  # noqa: ARG001, B006
        rounds_max: Rounds = 0,  # noqa: ARG001
        agent: Agent = "",  # noqa: ARG001
    ) -> str:
        """Give a task to another agent, which begins afresh, and wait for its answer.

        Use it for a part of the work that is whole in itself and takes many calls,
        so that only its answer stays in this conversation.
        """
        raise ToolError("a run of its own does this")

    return [run_agent]
