"""A scripted model that rejects histories that a strict provider would reject, and the same check without HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec

from pawl.agent_loop.model.request import (
    CallPiece,
    Finished,
    ModelError,
    ModelRequest,
    Piece,
    Problem,
    TextPiece,
    UsageReport,
)
from pawl.model_server.request import read_request
from pawl.model_server.strict import check_request


def check_history(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> None:
    """Raise if a provider would reject these messages.

    Stricter than OpenAI: adjacent messages of one role, and a history that ends with the model's message, are rejected
    too, as some providers do.
    """
    body: dict[str, Any] = {"model": "m", "messages": messages, "stream": True}
    if tools:
        body["tools"] = tools
    check_request(read_request(msgspec.json.encode(body)), reasoning_echo=False)
    roles = [message["role"] for message in messages]
    twice = [(first, second) for first, second in pairwise(roles) if first == second and first in {"user", "assistant"}]
    assert twice == [], roles
    assert roles[-1] in {"user", "tool"}, roles
    for message in messages:
        for call in message.get("tool_calls", ()):
            assert isinstance(msgspec.json.decode(call["function"]["arguments"]), dict)


# Pieces to send, seconds of silence, or a final error
Script = Sequence[Piece | float | ModelError]


def says(text: str, chunks: int = 1) -> Script:
    size = max(1, -(-len(text) // chunks))
    parts = [text[start : start + size] for start in range(0, len(text), size)]
    return [*(TextPiece(text=part) for part in parts), _USAGE, Finished(reason="stop")]


def calls(*asked: str, text: str = "") -> Script:
    """Return an answer that calls tools. Each is given as `name` or `name arguments`."""
    pieces: list[Piece] = [TextPiece(text=text)] if text else []
    for index, call in enumerate(asked):
        name, _, arguments = call.partition(" ")
        pieces.append(CallPiece(index=index, call_id=f"provider_{index}", name=name))
        pieces.append(CallPiece(index=index, arguments=arguments or "{}"))
    return [*pieces, _USAGE, Finished(reason="tool_calls")]


def fails(
    reason: str = "HTTP_503", *, retryable: bool = True, after: Script = (), retry_after: float | None = None
) -> Script:
    problem = Problem(
        reason=reason, retryable=retryable, message="The model server failed.", retry_after_seconds=retry_after
    )
    return [*after, ModelError(problem)]


_USAGE = UsageReport(input_tokens=10, output_tokens=5)


@dataclass
class FakeModel:
    """Answers with `reply` if given, otherwise with `scripts` in order.

    If `by_round` is set, the number of previous answers selects the script. Without a script, the answer is plain text.
    """

    scripts: list[Script]
    by_round: bool = False
    # Returns the script for a request, if it depends on the request
    reply: Callable[[ModelRequest], Script] | None = None
    requests: list[ModelRequest] = field(default_factory=list)
    streaming: int = 0

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Piece, None]:
        check_history(request.messages, request.tools)
        self.requests.append(request)
        script = self._script(request)
        self.streaming += 1
        try:
            for part in script:
                if isinstance(part, float):
                    await asyncio.sleep(part)
                elif isinstance(part, ModelError):
                    raise part
                else:
                    yield part
        finally:
            self.streaming -= 1

    def _script(self, request: ModelRequest) -> Script:
        if self.reply is not None:
            return self.reply(request)
        if self.by_round:
            said = sum(message["role"] == "assistant" for message in request.messages)
            return self.scripts[said] if said < len(self.scripts) else says("That is all.")
        return self.scripts.pop(0) if self.scripts else says("That is all.")
