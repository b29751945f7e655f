"""The tools that delegate a task to another agent, or pursue a goal in several attempts."""

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


Aim = Annotated[
    str,
    msgspec.Meta(min_length=1, max_length=16_000),
    "what to achieve; attempts do not see this conversation, so include everything they need to know",
]
CheckTool = Annotated[
    str,
    msgspec.Meta(max_length=64),
    'one of your tools; the aim is met if its result is true or {"met": true}, or if `check_expression` holds for it',
]
CheckArguments = Annotated[dict[str, Any], "arguments of check_tool"]
CheckExpression = Annotated[
    str,
    msgspec.Meta(max_length=1000),
    "CEL over the result of check_tool, such as size(value.broken) == 0; a number from 0 to 1 is progress",
]
Rubric = Annotated[
    str,
    msgspec.Meta(max_length=16_000),
    "what counts as met, for a judge that sees each attempt; instead of check_tool",
]
AttemptTools = Annotated[
    list[str], msgspec.Meta(max_length=1000), "which of your tools attempts may use; empty for all"
]
Attempts = Annotated[int, msgspec.Meta(ge=1, le=100), "maximum number of attempts"]
WaitMinutes = Annotated[float, msgspec.Meta(ge=0, le=43_200), "how long to wait before each further attempt"]
DeadlineMinutes = Annotated[float, msgspec.Meta(ge=0, le=525_600), "when to stop, from now; 0 for no deadline"]


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

    @tool(category=Category.SAFE, effect=EffectClass.IDEMPOTENT, context=ExecutionContext.AGENT)
    def start_goal(  # noqa: PLR0917
        aim: Aim,  # noqa: ARG001
        check_tool: CheckTool = "",  # noqa: ARG001
        check_arguments: CheckArguments = {},  # noqa: ARG001, B006
        check_expression: CheckExpression = "",  # noqa: ARG001
        rubric: Rubric = "",  # noqa: ARG001
        tool_names: AttemptTools = [],  # noqa: ARG001, B006
        attempts_max: Attempts = 10,  # noqa: ARG001
        wait_minutes: WaitMinutes = 0.0,  # noqa: ARG001
        deadline_minutes: DeadlineMinutes = 0.0,  # noqa: ARG001
    ) -> str:
        """Pursue an aim in the background, in several attempts by agents like you, until it is met.

        Use it only if one attempt may not be enough and a tool or a rubric can tell whether the aim is met. You are
        notified when it ends.
        """
        raise ToolError("start_goal is executed by agent-loop, not by the registry")

    return [run_agent, start_goal]
