"""One attempt at an MCP tool call: its progress, its questions, and the result for the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any, Final

import mcp.types

from pawl.chassis.process.tasks import hold
from pawl.chassis.strict_json import storable
from pawl.errors import DependencyUnavailable, Overloaded
from pawl.tool_registry.sources.mcp.elicitation import Reader, UnanswerableQuestion, ask_person
from pawl.tool_registry.sources.mcp.results import error_text, result_json
from pawl.tools.rules.definition import ToolVersion
from pawl.tools.sdk.context import ToolContext, ToolError
from pawl.tools.sdk.values import hide

_QUESTIONS_MAX: Final = 20
_DECLINED_MAX: Final = 5
_TEXT_CHARACTERS_MAX: Final = 2000


class Call:
    def __init__(self, entry: ToolVersion, context: ToolContext, secrets: Collection[str], reader: Reader) -> None:
        self.entry = entry
        self.context = context
        self._reader = reader
        self._secrets = secrets
        self._declined: list[str] = []
        self._questions: set[asyncio.Future[mcp.types.ElicitResult]] = set()

    async def on_progress(self, progress: float, total: float | None, message: str | None) -> None:
        fraction = min(max(progress / total, 0.0), 1.0) if total else None
        self.context.progress(fraction, message or "")

    async def ask(self, question: mcp.types.ElicitRequestParams) -> mcp.types.ElicitResult:
        """Ask the user a question. Return `cancel` if the call ends first, or `decline` if too many questions are open.

        The question stays open until the call ends, even if the server withdraws it.
        """
        if len(self._questions) >= _QUESTIONS_MAX:
            return mcp.types.ElicitResult(action="decline")
        asking = hold(self._questions, asyncio.ensure_future(self._answer(question)))
        await asyncio.wait({asking})
        return mcp.types.ElicitResult(action="cancel") if asking.cancelled() else asking.result()

    def stop_asking(self) -> None:
        for asking in list(self._questions):
            asking.cancel()

    async def _answer(self, question: mcp.types.ElicitRequestParams) -> mcp.types.ElicitResult:
        source = self.entry.source.partition(":")[2]
        try:
            return await ask_person(question, self.context.ask, source=source, clean=self.clean, reader=self._reader)
        except (UnanswerableQuestion, ToolError, Overloaded, DependencyUnavailable) as error:
            # A server can ask any number of questions, of any length.
            if len(self._declined) < _DECLINED_MAX:
                self._declined.append(_declined_text(question, str(error)))
        return mcp.types.ElicitResult(action="decline")

    def outcome(self, result: mcp.types.CallToolResult) -> Any:
        """Return the result for the model.

        Raises:
            ToolError: The tool failed, or asked a question that no user can answer.
        """
        if self._declined:
            answer = error_text(result) if result.is_error else json.dumps(result_json(result), ensure_ascii=False)
            lines = [
                f"{self.entry.definition.name} asked the user a question during the call, which was declined.",
                *self._declined,
                "Ask the user with ask_user, then call the tool again with arguments that include the answer.",
                f"After the decline the tool returned: {answer}",
            ]
            raise ToolError("\n".join(lines))
        if result.is_error:
            raise ToolError(error_text(result))
        return result_json(result)

    def clean(self, text: str) -> str:
        """Return the server's text with secrets removed."""
        return storable(hide(self._secrets, text))


def _declined_text(question: mcp.types.ElicitRequestParams, problem: str) -> str:
    asked = question.model_dump(by_alias=True, mode="json", exclude_none=True)
    about = [f"Question: {asked['message']}"]
    if "requestedSchema" in asked:
        about.append(f"Schema of the answer: {json.dumps(asked['requestedSchema'], ensure_ascii=False)}")
    if "url" in asked:
        about.append(f"It wants the user to open: {asked['url']}")
    about.append(f"It was declined because {problem}.")
    return "\n".join(line[:_TEXT_CHARACTERS_MAX] for line in about)
