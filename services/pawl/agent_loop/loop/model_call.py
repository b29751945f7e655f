"""Makes one model call: builds its request, assembles its answer, and shows the output to watchers as it streams."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import lru_cache
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from pawl.agent_loop.agents.rules import ModelTerms, RateReached, TokenBudget, draft_name
from pawl.agent_loop.loop.ports import Meter, ModelTiming, Randomness
from pawl.agent_loop.loop.rules import background, budget, file_front, guidelines, history, jobs, output, retry
from pawl.agent_loop.loop.rules.answering import usage_of
from pawl.agent_loop.loop.rules.assembly import Assembly, ModelAnswer
from pawl.agent_loop.loop.rules.coalesce import Coalescer
from pawl.agent_loop.loop.rules.fact import ModelFailed, OutputDelta
from pawl.agent_loop.loop.rules.history import ReasoningEcho
from pawl.agent_loop.loop.rules.run import Run, ToolChoice, ToolChoiceMode
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.loop.rules.tool import Tool
from pawl.agent_loop.model.names import names_of, renamed
from pawl.agent_loop.model.request import (
    CallPiece,
    Finished,
    ModelError,
    ModelPort,
    ModelRequest,
    Piece,
    ReasoningPiece,
    RefusalPiece,
    Sent,
    TextPiece,
    UsageReport,
)
from pawl.chassis.ids import StoreId, UserId
from pawl.chassis.strict_json import storable

_SUMMARY_INSTRUCTIONS: Final = (
    "Summarise the conversation that follows, so that an assistant can continue it. Keep every fact, name, id, "
    "decision and open question, and the user's last request word for word. Write only the summary."
)

_NO_ARGUMENTS: Final = b'{"type":"object","properties":{}}'


class ModelCall:
    """Makes the open model call once. Its output can be read while it streams."""

    def __init__(
        self,
        state: State,
        *,
        model: ModelPort,
        monotonic: Callable[[], float],
        on_output: Callable[[], None],
        due_at: float,
    ) -> None:
        opened = state.loop.model_call
        if opened is None:
            raise RuntimeError("the state has no open model call")
        self._state = state
        self._opened = opened
        self._model = model
        self._monotonic = monotonic
        self._on_output = on_output
        self._assembly = Assembly()
        self._coalescer = Coalescer(OutputDelta(round=state.run.round, model_attempt=opened.attempt))
        self._prompt_bytes = 0
        # An estimate; 0 if the call has not been made.
        self.prompt_tokens = 0
        self._output_bytes = 0
        # Identifies the call once it counts against limits of its store or model server.
        self.model_call_id = ""
        self._due_at = due_at
        self._sent_at: float | None = None
        self._server = ""
        # A turn's output is hidden as long as the turn could still be silent.
        self._may_be_silent = state.run.is_turn
        self._opening = ""
        # The monotonic time of the first piece; None if there was none.
        self.first_output_at: float | None = None

    def refused(self, terms: ModelTerms, model: str) -> ModelFailed | None:
        """Return why the call must not be made now, or None if it may be made."""
        if exhausted := terms.exhausted:
            return ModelFailed(error=budget.used_up(exhausted), answer=self.answer(), jitter=0.0, used_up=exhausted)
        if terms.models and model not in terms.models:
            return ModelFailed(error=retry.model_not_allowed(model), answer=self.answer(), jitter=0.0)
        return None

    async def stream(
        self,
        request: ModelRequest,
        random: Randomness,
        take: Callable[[int, int | None], Awaitable[TokenBudget | RateReached | None]] | None,
    ) -> ModelAnswer | ModelFailed:
        """Make the call unless the token budget or a limit that `take` returns prevents it.

        `take` reserves tokens for the prompt and the answer, and returns a budget that has too few tokens left, if
        any.
        """
        prompt_bytes = history.size_bytes(request.messages)
        prompt_bytes += len(msgspec.json.encode((request.tools, request.response_format)))
        prompt_tokens = budget.prompt_tokens(self._state, prompt_bytes)
        if needed := budget.needed(self._state, prompt_tokens):
            return ModelFailed(error=budget.TOO_LITTLE, answer=self.answer(), jitter=random(), tokens_needed=needed)
        output_tokens_max = budget.output_tokens_max(self._state, prompt_tokens)
        if take is not None and (exhausted := await take(prompt_tokens, output_tokens_max)):
            return ModelFailed(error=budget.used_up(exhausted), answer=self.answer(), jitter=0.0, used_up=exhausted)
        self._prompt_bytes = prompt_bytes
        self.prompt_tokens = prompt_tokens
        names = names_of(request)
        self._assembly = Assembly(names.inward)
        request = replace(renamed(request, names), output_tokens_max=output_tokens_max)
        self._sent_at, self._server = self._monotonic(), request.server
        try:
            async with aclosing(self._model.stream(request)) as pieces:
                async for piece in pieces:
                    self._take(piece)
        except ModelError as error:
            if not self._output_bytes and error.problem.is_free:
                self._prompt_bytes = 0
            return ModelFailed(error=error.problem, answer=self.answer(), jitter=random())
        answer = self.answer()
        wrong = budget.cut_short(self._state, answer, request.output_tokens_max)
        if not self._state.run.is_turn:
            wrong = wrong or retry.empty_answer_problem(answer)
        return ModelFailed(error=wrong, answer=answer, jitter=random()) if wrong else answer

    def answer(self) -> ModelAnswer:
        return replace(self._assembly.answer(), usage=self.usage())

    def usage(self) -> UsageReport:
        """Return the usage so far, with estimates for anything that the server did not report."""
        return budget.counted(self._assembly.usage, prompt_bytes=self._prompt_bytes, output_bytes=self._output_bytes)

    def measure(self, outcome: str, meter: Meter) -> None:
        """Record the metrics of the call that has just ended, if it was made."""
        if self._sent_at is None:
            return
        timing = ModelTiming(
            server=self._server, due_at=self._due_at, sent_at=self._sent_at, first_output_at=self.first_output_at
        )
        meter.model_called(self._state.run.store_id, outcome, usage_of(self.usage()), timing)

    def output_due_at(self) -> float | None:
        """Return the monotonic time at which output must be shown, or None if there is none."""
        return None if self._may_be_silent else self._coalescer.due_at()

    def take_output(self) -> tuple[OutputDelta, ...]:
        return self._coalescer.take(self._monotonic())

    def output_shown(self, pause_seconds_min: float | None) -> None:
        """Record that the output collected so far is durable."""
        self._coalescer.shown(self._monotonic(), pause_seconds_min)

    def _take(self, piece: Piece) -> None:
        if isinstance(piece, Sent):
            self._assembly.add(piece)
            return
        now, before = self._monotonic(), self.output_due_at()
        self.first_output_at = now if self.first_output_at is None else self.first_output_at
        if isinstance(piece, Finished):
            self._coalescer.end(now)
        shown = self._assembly.add(piece)
        if self._may_be_silent:
            self._opening += piece.text if isinstance(piece, TextPiece) else ""
            self._may_be_silent = not isinstance(piece, CallPiece) and jobs.may_become_silent(self._opening)
        self._output_bytes += _size(piece)
        if self._opened.summary:
            return
        self._coalescer.add(shown, now)
        if before is None and self.output_due_at() is not None:
            self._on_output()


def request_of(
    state: State,
    tools: Sequence[Tool],
    *,
    default_model: str,
    echo: ReasoningEcho,
    takes_images: bool = False,
    background_as_tool: bool = False,
) -> ModelRequest:
    opened, options = state.loop.model_call, state.run.options
    limits = options.limits
    base = ModelRequest(
        model=state.model or default_model,
        messages=(),
        temperature=options.temperature,
        reasoning_effort=options.reasoning_effort,
        headers_timeout_seconds=limits.model_headers_timeout_seconds,
        idle_timeout_seconds=limits.model_idle_timeout_seconds,
        deadline_seconds=max(0.1, limits.round_timeout_seconds - state.round_active_seconds),
    )
    if opened is not None and opened.summary:
        old = history.to_summarise(state, opened.summarised_to_number)
        system = {"role": "system", "content": _SUMMARY_INSTRUCTIONS}
        return replace(base, messages=(system, {"role": "user", "content": old}))
    offered = [] if opened is None or opened.without_tools else _offered(state, tools)
    functions, more_instructions = tuple(map(_function, offered)), [guidelines.asking(options.instructions, offered)]
    if offered and not jobs.background_denial(state.run):
        as_tool = background_as_tool and all(tool.name != background.TOOL for tool in tools)
        functions = (*functions, dict(background.FUNCTION)) if as_tool else functions
        more_instructions.append(background.INSTRUCTIONS_OF_TOOL if as_tool else background.INSTRUCTIONS)
    if options.without_guidelines:
        more_instructions.clear()
    return replace(
        base,
        messages=history.of_run(state, echo, takes_images=takes_images, more_instructions=more_instructions),
        tools=functions,
        tool_choice=_tool_choice(options.tool_choice) if offered and state.run.round == 1 else None,
        response_format=output.asked(options.response_format) if options.response_format else None,
    )


def _offered(state: State, tools: Sequence[Tool]) -> list[Tool]:
    """Return the tools that are offered to the model. `tools` also contains fallback tools, which are not offered."""
    names = state.run.options.tool_names
    return file_front.offered([tool for tool in tools if not names or tool.name in names or tool.is_own])


@lru_cache(maxsize=1024)
def _function(tool: Tool) -> dict[str, Any]:
    """Return the tool in the form that the model server expects. The result is shared, so do not change it."""
    parameters = msgspec.json.decode(tool.arguments_schema_json or _NO_ARGUMENTS)
    return {
        "type": "function",
        "function": {"name": tool.name, "description": tool.description, "parameters": parameters},
    }


def _tool_choice(choice: ToolChoice) -> str | dict[str, Any] | None:
    match choice.mode:
        case ToolChoiceMode.AUTO:
            return None
        case ToolChoiceMode.NONE:
            return "none"
        case ToolChoiceMode.REQUIRED:
            return "required"
        case ToolChoiceMode.TOOL:
            return {"type": "function", "function": {"name": choice.tool_name}}


def _size(piece: Piece) -> int:
    match piece:
        case TextPiece() | ReasoningPiece() | RefusalPiece():
            return len(storable(piece.text).encode())
        case CallPiece():
            return len((piece.name + storable(piece.arguments)).encode())
        case _:
            return 0


# Maximum time until new terms are noticed.
_TERMS_SECONDS: Final = 5.0
_TERMS_KEPT_MAX: Final = 10_000


class TermsCache:
    """Caches the terms of runs whose budgets are not used up, so that most model calls do not need to read them."""

    def __init__(self) -> None:
        # By store, user and agent, with the time until which they are remembered.
        self._known: dict[tuple[StoreId, UserId, str], tuple[ModelTerms, float]] = {}

    async def of(
        self, run: Run, now: float, read: Callable[[StoreId, UserId, str], Awaitable[ModelTerms]]
    ) -> ModelTerms:
        """Return the terms of the run's next model call. `now` is a monotonic time."""
        key = run.store_id, run.user_id, agent_with_budget(run)
        terms, until = self._known.pop(key, (ModelTerms(), now))
        if until <= now:
            terms, until = await read(*key), now + _TERMS_SECONDS
            if terms.exhausted:
                return terms
        while len(self._known) >= _TERMS_KEPT_MAX:
            self._known.pop(next(iter(self._known)))
        self._known[key] = terms, until
        return terms


def agent_with_budget(run: Run) -> str:
    """Return the name of the run's agent.

    It is empty for drafts and the default agent, because neither has a budget.
    """
    return "" if run.agent is None or draft_name(run.agent.name) else run.agent.name
