"""A model that answers by the seed, fails in every way a stream can, and refuses histories that a provider would."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from pawl.agent_loop.domain.model import (
    CallPiece,
    Finished,
    ModelError,
    ModelRequest,
    Piece,
    Problem,
    ReasoningPiece,
    TextPiece,
    UsageReport,
)
from tests.fakes.provider import check_history
from tests.simulation.chance import Chance
from tests.simulation.history import History, Served

MODELS = ("first", "second", "third")
"""Those of runs with fallbacks: each may be down for one round of a run."""
_PLAN = re.compile(r"plan-(\w+)")
_ROUNDS_MAX = 3
# Fewer tokens than a careful estimate takes them for, as with real models.
_BYTES_PER_TOKEN = 4
_REPORTS_USAGE = 0.7


class SimulatedModel:
    """A `ModelPort`: a server that all agent-loops share and that never dies."""

    def __init__(self, chance: Chance, history: History) -> None:
        self._chance = chance
        self._history = history
        self._asked: Counter[tuple[str, int]] = Counter()

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Piece, None]:
        try:
            check_history(request.messages, request.tools)
        except Exception as error:  # noqa: BLE001  # whatever it is, a provider would have refused
            self._history.violation("one_result_per_call", f"the provider refuses: {error}")
        plan, round_number = _place(request)
        self._asked[plan, round_number] += 1
        attempt = self._asked[plan, round_number]
        self._history.tell(f"model {plan} round {round_number} attempt {attempt}")
        draw = self._chance.stream("model", plan, round_number, attempt)
        served = Served(
            plan=plan,
            round=(plan, round_number),
            began_at=asyncio.get_running_loop().time(),
            input_tokens=_prompt_tokens(request),
        )
        reports = self._chance.stream("usage", plan, round_number, attempt).random() < _REPORTS_USAGE
        async for piece in self._answer(request, round_number, draw, served):
            if isinstance(piece, Finished):
                served.whole = True
                if reports:
                    yield UsageReport(input_tokens=served.input_tokens, output_tokens=served.output_tokens)
            yield piece
            if isinstance(piece, Finished):
                return

    async def _answer(
        self, request: ModelRequest, round_number: int, draw: random.Random, served: Served
    ) -> AsyncGenerator[Piece, None]:
        strikes = self._chance.strikes
        if strikes(draw, "model refused", 0.05):
            raise _error("HTTP_503", retryable=True)
        fate = self._chance.stream("down", served.plan, round_number, request.model)
        if request.model in MODELS and strikes(fate, "model down", 0.1):
            raise _error("HTTP_503", retryable=True)
        self._history.served.append(served)
        if strikes(draw, "model hung before headers", 0.02):
            await asyncio.sleep(min(request.headers_timeout_seconds, request.deadline_seconds))
            raise _error("HEADERS_TIMEOUT", retryable=True)
        if strikes(draw, "model failed for good", 0.01):
            raise _error("HTTP_400", retryable=False)
        pieces = _pieces(request, served.plan, round_number, draw)
        cut_after = draw.randrange(len(pieces)) if strikes(draw, "stream cut", 0.06) else None
        hang_after = draw.randrange(len(pieces)) if strikes(draw, "stream hung", 0.02) else None
        for number, piece in enumerate(pieces):
            if draw.random() < 0.4:
                await asyncio.sleep(draw.choice([0.01, 0.1, 0.5]) * draw.random())
            if number == cut_after:
                raise _error("STREAM_TRUNCATED", retryable=True)
            if number == hang_after:
                await asyncio.sleep(min(request.idle_timeout_seconds, request.deadline_seconds))
                raise _error("IDLE_TIMEOUT", retryable=True)
            served.output_tokens += _tokens(piece)
            if request.output_tokens_max is not None and served.output_tokens > request.output_tokens_max:
                yield Finished(reason="length")
                return
            yield piece


def _place(request: ModelRequest) -> tuple[str, int]:
    """Return which plan is played, and how many rounds of it are over."""
    plan, said = "none", 0
    for message in request.messages:
        found = _PLAN.findall(_text(message)) if message["role"] == "user" else []
        if found:
            plan, said = found[-1], 0
        elif message["role"] == "assistant":
            said += 1
    return plan, said


def _text(message: Any) -> str:
    content = message.get("content")
    return content if isinstance(content, str) else ""


def _pieces(request: ModelRequest, plan: str, round_number: int, draw: random.Random) -> list[Piece]:
    names = [tool["function"]["name"] for tool in request.tools]
    pieces: list[Piece] = []
    if draw.random() < 0.3:
        pieces.append(ReasoningPiece(text="Let me think. "))
    has_calls = bool(names) and round_number < _ROUNDS_MAX and draw.random() < 0.75
    if not has_calls or draw.random() < 0.4:
        pieces += [TextPiece(text=f"word {number} ") for number in range(draw.randrange(1, 6))]
    if has_calls:
        for index in range(draw.choice([1, 1, 2, 3, 4])):
            pieces += _call(index, names, f"{plan}r{round_number}i{index}", draw)
    pieces.append(Finished(reason="tool_calls" if has_calls else "stop"))
    return pieces


def _prompt_tokens(request: ModelRequest) -> int:
    return sum(len(_text(message)) for message in request.messages) // _BYTES_PER_TOKEN


def _tokens(piece: Piece) -> int:
    match piece:
        case TextPiece() | ReasoningPiece():
            return len(piece.text) // _BYTES_PER_TOKEN
        case CallPiece():
            return len(piece.arguments) // _BYTES_PER_TOKEN
        case _:
            return 0


def _call(index: int, names: list[str], plan: str, draw: random.Random) -> list[Piece]:
    name = draw.choice(names) if draw.random() < 0.97 else "absent"
    arguments = msgspec.json.encode({"n": draw.randrange(100)}).decode()
    if name == "hire":
        arguments = msgspec.json.encode({"task": f"plan-{plan} please"}).decode()
    if draw.random() < 0.04:
        arguments = draw.choice(["{", '{"n":"bad"}', "[]", ""])
    half = len(arguments) // 2
    provider_id = "" if draw.random() < 0.05 else f"provider_{index if draw.random() < 0.95 else 0}"
    return [
        CallPiece(index=index, call_id=provider_id, name=name, arguments=arguments[:half]),
        CallPiece(index=index, arguments=arguments[half:]),
    ]


def _error(reason: str, *, retryable: bool) -> ModelError:
    return ModelError(Problem(reason=reason, retryable=retryable, message="The model server failed."))
