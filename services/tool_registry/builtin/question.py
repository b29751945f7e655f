"""Asking the user."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from services.tool_registry.sdk import Category, Effect, ExecutionContext, Tool, ToolError, tool

Text = Annotated[str, msgspec.Meta(min_length=1, max_length=4000)]


def question_tools() -> list[Tool[..., Any]]:
    """Return ask_user."""

    @tool(category=Category.SAFE, effect=Effect.READ_ONLY, context=ExecutionContext.HUMAN)
    def ask_user(  # the arguments are what the user is shown
        question: Annotated[Text, "what to ask, in the user's language"],  # noqa: ARG001
        why: Annotated[str, "why the answer is needed"] = "",  # noqa: ARG001
        kind: Annotated[  # noqa: ARG001
            Literal["clarification", "permission", "confirmation"],
            "a missing detail, leave to do something, or that something is so",
        ] = "clarification",
        options: Annotated[list[str], "answers to choose from; the user may always answer freely"] = [],  # noqa: ARG001, B006
    ) -> str:
        """Ask the user a question and wait for the answer.

        Use it when something needed is missing or ambiguous, not for what another
        tool can find out.
        """
        raise ToolError("a question is answered by a person")

    return [ask_user]
