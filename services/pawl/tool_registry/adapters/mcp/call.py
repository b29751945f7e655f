"""One call of a tool of an MCP server: what the server says and asks meanwhile, and what came of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Annotated, Any, Final, TypeAlias

import mcp
import mcp.types
import pydantic

from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.strict_json import storable
from pawl.errors import DependencyUnavailable, Overloaded
from pawl.tool_registry.adapters.mcp.elicitation import Asked, Reader, Unaskable, put
from pawl.tool_registry.adapters.mcp.results import error_text, result_json
from pawl.tool_registry.app.catalog.ports import Helper
from pawl.tool_registry.domain.definition import ToolVersion
from pawl.tool_registry.sdk.context import ToolContext, ToolError
from pawl.tool_registry.sdk.values import hide

_ASKING_MAX: Final = 20
_DECLINED_MAX: Final = 5
_SCHEMA_CHARACTERS_MAX: Final = 2000

OnQuestion: TypeAlias = Callable[[Asked], Awaitable[mcp.types.ElicitResult]]
"""Returns the answer to a question of the server."""


class Called(mcp.types.CallToolResult):
    """The result of a call, or the task that it has begun; `task` is anything else where nobody has asked for one."""

    task: Annotated[mcp.types.Task | Any, pydantic.Field(union_mode="left_to_right")] = None


class Call:
    """The part of a call that a session needs, and the result for the model."""

    def __init__(self, entry: ToolVersion, context: ToolContext, secrets: Collection[str], helper: Helper) -> None:
        self.entry = entry
        self.context = context
        self._reader = Reader(helper, StoreId(context.store_id))
        self._secrets = secrets
        self._declined: list[str] = []
        self.is_in_doubt = False
        """True if a question was declined that may have been this call's, or another's."""

    def mark_begun(self) -> None:
        """Say that the server can hear of the call from now on."""
        self.context.mark_begun()

    async def on_progress(self, progress: float, total: float | None, message: str | None) -> None:
        """Pass progress on."""
        fraction = min(max(progress / total, 0.0), 1.0) if total else None
        self.context.progress(fraction, message or "")

    async def on_question(self, question: Asked) -> mcp.types.ElicitResult:
        """Ask the user. What cannot be put to a person is declined; the model is told of it, and can ask."""
        try:
            return await put(
                question,
                self.context.ask,
                tool=self.entry.definition.name,
                clean=self.clean,
                reader=self._reader,
            )
        except (Unaskable, ToolError, Overloaded, DependencyUnavailable) as error:
            # A server may ask on and on, and at any length.
            if len(self._declined) < _DECLINED_MAX:
                self._declined.append(_declined_text(question, str(error)))
        return mcp.types.ElicitResult(action="decline")

    def outcome(self, result: mcp.types.CallToolResult) -> Any:
        """Return the result for the model.

        Raises:
            ToolError: the tool failed, or asked the user what could not be put to them.
        """
        if self._declined:
            asked = _question_text(self.entry.definition.name, self._declined)
            answer = error_text(result) if result.is_error else json.dumps(result_json(result), ensure_ascii=False)
            raise ToolError(f"{asked}\nAfter the decline the tool returned: {answer}")
        if self.is_in_doubt:
            return self._doubtful(result)
        if result.is_error:
            raise ToolError(error_text(result))
        return result_json(result)

    def _doubtful(self, result: mcp.types.CallToolResult) -> Any:
        """Return the result of a call whose server asked something that may have been for somebody else."""
        note = (
            f"The server of {self.entry.definition.name} asked something while several calls were under way, and did"
            " not say in which one, so nobody was asked and it was declined. If this result lacks an answer, call the"
            " tool again: it will be alone on its connection, and what it asks reaches the user."
        )
        if result.is_error:
            raise ToolError(f"{error_text(result)}\n{note}")
        return {"result": result_json(result), "note": note}

    def clean(self, text: str) -> str:
        """Return words of the server without secrets."""
        return storable(hide(self._secrets, text))


class Flight:
    """A call's place on a connection, and what its server asks meanwhile."""

    def __init__(self, user_id: UserId, call_id: str) -> None:
        self.user_id = user_id
        self.call_id = call_id
        self.is_in_doubt = False
        """True if a question was declined that may have been this call's, or another's."""
        self._on_question: OnQuestion | None = None
        self._asking: set[asyncio.Task[mcp.types.ElicitResult]] = set()

    @property
    def is_sent(self) -> bool:
        """True if the server may have heard of the call."""
        return self._on_question is not None

    def send(self, on_question: OnQuestion) -> None:
        """Say that the server hears of the call now."""
        self._on_question = on_question

    async def ask(self, question: Asked) -> mcp.types.ElicitResult:
        """Return the answer, a cancel if the call ends before it comes, a decline if too many questions are open.

        A person who was asked stays asked, also when the server takes its question
        back, until the call ends.
        """
        if self._on_question is None or len(self._asking) >= _ASKING_MAX:
            return mcp.types.ElicitResult(action="decline")
        asking = asyncio.ensure_future(self._on_question(question))
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        await asyncio.wait({asking})
        return mcp.types.ElicitResult(action="cancel") if asking.cancelled() else asking.result()

    def end(self) -> None:
        """Stop asking."""
        for asking in list(self._asking):
            asking.cancel()


async def open_pages(error: mcp.MCPError, ask: OnQuestion) -> None:
    """Return if an error asks for pages to be opened, and the user has done that; else raise it again."""
    if error.code != mcp.types.URL_ELICITATION_REQUIRED:
        raise error
    try:
        pages = mcp.UrlElicitationRequiredError.from_error(error.error).elicitations
    except (ValueError, TypeError, AttributeError):
        raise error from None
    for page in pages:
        if (await ask(page)).action != "accept":
            raise error
    if not pages:
        raise error


def _question_text(name: str, declined: Sequence[str]) -> str:
    """Return what the model is told of questions that nobody could answer."""
    first = f"{name} asked the user something in the middle of the call, which was declined."
    last = "Ask the user with ask_user, then call the tool again with what the answer changes."
    return "\n".join([first, *declined, last])


def _declined_text(question: Asked, problem: str) -> str:
    asked = question.model_dump(by_alias=True, mode="json", exclude_none=True)
    schema = asked.get("requestedSchema")
    lines = [f"Question: {str(asked.get('message', ''))[:_SCHEMA_CHARACTERS_MAX]}"]
    if schema is not None:
        lines.append(f"Schema of the answer: {json.dumps(schema, ensure_ascii=False)[:_SCHEMA_CHARACTERS_MAX]}")
    if asked.get("url"):
        lines.append(f"It wants the user to open: {str(asked['url'])[:_SCHEMA_CHARACTERS_MAX]}")
    lines.append(f"It was declined because {problem[:_SCHEMA_CHARACTERS_MAX]}.")
    return "\n".join(lines)
