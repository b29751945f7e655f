"""The tool that delegates a task to another agent."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from pawl.tools.sdk.context import ToolError
from pawl.tools.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass, ExecutionContext

Task = Annotated[
    str,
    msgspec.Meta(min_length=1, max_length=100_000),
    "what to do and what to answer; it does not see this conversation, so include everything it needs to know",
]
Instructions = Annotated[
    str, msgspec.Meta(max_length=16_000), "how to do it; added to the instructions that every agent gets"
]
ToolNames = Annotated[list[str], msgspec.Meta(max_length=1000), "which of your tools it may use; empty for all"]
Rounds = Annotated[int, msgspec.Meta(ge=0, le=1000), "how many rounds of tool calls it may make; 0 for your own limit"]
Agent = Annotated[
    str,
    msgspec.Meta(max_length=64),
    "name of the agent to use, from your instructions; empty for one like you",
]


def agent_tools() -> list[Tool[..., Any]]:
    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, context=ExecutionContext.AGENT)
    def run_agent(
        task: Task,  # noqa: ARG001
        instructions: Instructions = "",  # noqa: ARG001
        tool_names: ToolNames = [],  # noqa: ARG001, B006
        rounds_max: Rounds = 0,  # noqa: ARG001
        agent: Agent = "",  # noqa: ARG001
    ) -> str:
        """Give a task to another agent, which starts without this conversation, and wait for its answer.

        Use it for a self-contained part of the work that takes many calls, so that only its answer stays in this
        conversation.
        """
        raise ToolError("run_agent is executed by agent-loop, not by the registry")

    return [run_agent]
