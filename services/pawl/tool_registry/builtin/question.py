"""The tool that asks the user a question."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from pawl.tools.sdk.context import ToolError
from pawl.tools.sdk.tool import Tool, tool
from pawl.values import Category, EffectClass, ExecutionContext

Question = Annotated[str, msgspec.Meta(min_length=1, max_length=4000), "what to ask, in the user's language"]
Why = Annotated[str, "why the answer is needed"]
Kind = Annotated[
    Literal["clarification", "permission", "confirmation"],
    "a missing detail, permission to do something, or confirmation that something is true",
]
Options = Annotated[
    list[str], msgspec.Meta(max_length=20), "answers to choose from; the user may also give another answer"
]

Default = Annotated[
    str,
    msgspec.Meta(max_length=4000),
    "the answer to use if the user does not answer in time; empty for none",
]
Minutes = Annotated[float, msgspec.Meta(ge=0, le=525_600), "how long to wait for the answer; 0 for the run's limit"]


def question_tools() -> list[Tool[..., Any]]:
    @tool(category=Category.SAFE, effect=EffectClass.READ_ONLY, context=ExecutionContext.HUMAN)
    def ask_user(  # noqa: PLR0917  # the arguments are shown to the user
        question: Question,  # noqa: ARG001
        why: Why = "",  # noqa: ARG001
        kind: Kind = "clarification",  # noqa: ARG001
        options: Options = [],  # noqa: ARG001, B006
        default: Default = "",  # noqa: ARG001
        timeout_minutes: Minutes = 0,  # noqa: ARG001
    ) -> str:
        """Ask the user a question and wait for the answer.

        Use it when required information is missing or ambiguous, and no other tool can find it out.
        """
        raise ToolError("ask_user is answered by a user, not executed by the registry")

    return [ask_user]
