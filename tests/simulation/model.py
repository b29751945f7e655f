"""A model whose answers depend on the seed. It fails in every way that a stream can, and rejects invalid histories."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from pawl.agent_loop.model.request import (
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
from tests.fakes.model import check_history
from tests.simulation.chance import Chance
from tests.simulation.history import History, Served

_NOTICES = re.compile(r"^\[\{\"job_id\".*$", re.MULTILINE)

# Models of runs with fallbacks; each may fail permanently for one round of a run.
MODELS = ("first", "second", "third")
# A job condition that about half of the results meet.
WATCHED = "value.endsWith('again')"
# Does not match text that is quoted from other users.
_PLAN = re.compile(r"(?<!> )plan-(\w+)")
_ROUNDS_MAX = 3
_SILENCE = 0.15
# Fewer tokens than a careful estimate, as with real models.
_BYTES_PER_TOKEN = 4
_REPORTS_USAGE = 0.7


class SimulatedModel:
    """A `ModelPort` for one server that all agent-loops share and that never crashes."""

    def __init__(self, chance: Chance, history: History) -> None:
        self._chance = chance
        self._history = history
        self._asked: Counter[tuple[str, int]] = Counter()
        self._background = chance.stream("background").choice([0.0, 0.0, 0.2, 0.5, 0.9])

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Piece, None]:
        try:
            check_history(request.messages, request.tools)
        except Exception as error:  # noqa: BLE001  # whatever it is, a provider would have refused
            self._history.violation("one_result_per_call", f"the provider refuses: {error}")
        plan, round_number = _position(request)
        self._asked[plan, round_number] += 1
        attempt = self._asked[plan, round_number]
        self._history.tell(f"model {plan} round {round_number} attempt {attempt}")
        draw = self._chance.stream("model", plan, round_number, attempt)
        served = Served(
            plan=plan,
            round=(plan, round_number),
            started_at=asyncio.get_running_loop().time(),
            input_tokens=_prompt_tokens(request),
            told=notices_in(map(_text, request.messages)),
        )
        reports = self._chance.stream("usage", plan, round_number, attempt).random() < _REPORTS_USAGE
        async for piece in self._answer(request, (round_number, attempt), draw, served):
            if isinstance(piece, Finished):
                served.whole = True
                if reports:
                    yield UsageReport(input_tokens=served.input_tokens, output_tokens=served.output_tokens)
            yield piece
            if isinstance(piece, Finished):
                return

    async def _answer(
        self, request: ModelRequest, position: tuple[int, int], draw: random.Random, served: Served
    ) -> AsyncGenerator[Piece, None]:
        strikes, (round_number, attempt) = self._chance.strikes, position
        if strikes(draw, "model refused", 0.05):
            raise _error("HTTP_503", retryable=True)
        fate = self._chance.stream("down", served.plan, round_number, request.model)
        if request.model in MODELS and strikes(fate, "model down", 0.1):
            raise _error("HTTP_503", retryable=True)
        self._history.served.append(served)
        if strikes(draw, "model hung before headers", 0.02):
            await asyncio.sleep(min(request.headers_timeout_seconds, request.deadline_seconds))
            raise _error("HEADERS_TIMEOUT", retryable=True)
        if strikes(draw, "model failed permanently", 0.01):
            raise _error("HTTP_400", retryable=False)
        later = self._chance.stream("background", served.plan, round_number, attempt)
        pieces = _pieces(request, served.plan, round_number, draw, BackgroundRequests(later, self._background))
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


def _position(request: ModelRequest) -> tuple[str, int]:
    """Return the plan and the number of finished rounds. A job notice starts a new plan."""
    plan, said, told = "none", 0, 0
    for message in request.messages:
        text = _text(message)
        found = _PLAN.findall(text) if message["role"] == "user" else []
        notice = _NOTICES.search(text) if message["role"] == "user" else None
        told = (0 if found else told) + (notice is not None)
        plan = found[-1] if found else plan
        said = 0 if found or notice else said + (message["role"] == "assistant")
    return (f"{plan}t{told}" if told else plan), said


def notices_in(texts: Iterable[str]) -> tuple[tuple[str, int], ...]:
    """Return the job notices in the texts as pairs of run and iteration or progress report; 0 is the job's end."""
    lines = (line for text in texts for line in _NOTICES.findall(text))
    notices = (notice for line in lines for notice in msgspec.json.decode(line))
    return tuple((notice["job_id"], notice.get("iteration") or notice.get("report", 0)) for notice in notices)


@dataclass(frozen=True, slots=True)
class BackgroundRequests:
    draw: random.Random
    rate: float

    def add_to(self, arguments: str) -> str:
        draw = self.draw
        if draw.random() >= self.rate or not arguments.startswith('{"'):
            return arguments
        parameters: dict[str, object] = {"_executeAsync": draw.random() < 0.97 or "yes"}
        if draw.random() < 0.5:
            parameters["_interval"] = draw.choice([0.5, 1, 3, 12])
            parameters[draw.choice(["_stopAfter", "_stopAfter", "_duration"])] = draw.choice([1, 2, 3, 5, 8])
            parameters["_delayFirst"] = draw.random() < 0.3
            parameters["_reports"] = draw.choice(["every", "change", "end"])
        if parameters.get("_duration"):
            parameters["_duration"] = draw.choice([0.05, 0.2, 0.5])
        if "_interval" in parameters:
            parameters |= _watch(
                random.Random(arguments)
            )  # a stream of its own, so that the other streams do not change
        return msgspec.json.encode(msgspec.json.decode(arguments) | parameters).decode()

    def is_silent(self) -> bool:
        return self.draw.random() < _SILENCE


def _watch(draw: random.Random) -> dict[str, object]:
    """Return the arguments that start a monitor, which may be empty. See `jobs.monitors_fire_on_edges`."""
    if draw.random() < 0.5:
        return {"_reports": "none"} if draw.random() < 0.3 else {}
    limits: dict[str, object] = {"pause": draw.choice([0, 0, 1.7, 4.3]), "times": draw.choice([1, 2, 3, 1000])}
    condition: dict[str, object] = draw.choice(
        [{"cel": WATCHED}, {"cel": WATCHED}, {"changed": True}, {"cel": "value.price < 20"}]
    )
    return {
        "_when": condition | limits,
        "_stopAfter": draw.choice([5, 12, 20]),
        "_duration": 600,
        "_reports": draw.choice(["every", "end"]),
    }


def _text(message: Any) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _pieces(
    request: ModelRequest, plan: str, round_number: int, draw: random.Random, background: BackgroundRequests
) -> list[Piece]:
    if _NOTICES.search(_text(request.messages[-1])) and background.is_silent():
        return [TextPiece(text="[sil"), TextPiece(text="ent]"), Finished(reason="stop")]
    names = [tool["function"]["name"] for tool in request.tools]
    pieces: list[Piece] = []
    if draw.random() < 0.3:
        pieces.append(ReasoningPiece(text="Let me think. "))
    # Runs of schedules only answer.
    has_calls = bool(names) and not plan.startswith("tick") and round_number < _ROUNDS_MAX and draw.random() < 0.75
    if not has_calls or draw.random() < 0.4:
        pieces += [TextPiece(text=f"word {number} ") for number in range(draw.randrange(1, 6))]
    if has_calls:
        for index in range(draw.choice([1, 1, 2, 3, 4])):
            pieces += _call(index, names, f"{plan}r{round_number}i{index}", draw, background)
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


def _call(index: int, names: list[str], plan: str, draw: random.Random, background: BackgroundRequests) -> list[Piece]:
    name = draw.choice(names) if draw.random() < 0.97 else "absent"
    arguments = msgspec.json.encode({"n": draw.randrange(100)}).decode()
    if name == "run_agent":
        arguments = msgspec.json.encode({"task": f"plan-{plan} please"}).decode()
    if draw.random() < 0.04:
        arguments = draw.choice(["{", '{"n":"bad"}', "[]", ""])
    arguments = background.add_to(arguments)
    half = len(arguments) // 2
    provider_id = "" if draw.random() < 0.05 else f"provider_{index if draw.random() < 0.95 else 0}"
    return [
        CallPiece(index=index, call_id=provider_id, name=name, arguments=arguments[:half]),
        CallPiece(index=index, arguments=arguments[half:]),
    ]


def _error(reason: str, *, retryable: bool) -> ModelError:
    return ModelError(Problem(reason=reason, retryable=retryable, message="The model server failed."))
