"""Counts one run's model calls against limits per minute, and reserves their tokens in token budgets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeAlias

from msgspec.structs import replace

from pawl.agent_loop.agents.rules import ModelTerms, RateReached, TokenBudget
from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.model_call import ModelCall, agent_with_budget
from pawl.agent_loop.loop.ports import Randomness
from pawl.agent_loop.loop.rules.answering import usage_of
from pawl.agent_loop.loop.rules.state import State
from pawl.agent_loop.model.request import ModelRequest
from pawl.agent_loop.model.shared import OUTPUT_TOKENS_RESERVED, CountedCall, SharedModels
from pawl.chassis.ids import IdSource, StoreId
from pawl.chassis.rpc.retry import Retry
from pawl.job.v1 import agents_pb2
from pawl.job.v1.models_pb2 import TakeModelCallResponse

# Takes the tokens of a prompt and the limit of its answer. Returns the limit that the call must wait for, if any.
Take: TypeAlias = Callable[[int, int | None], Awaitable[TokenBudget | RateReached | None]]

# Longest wait for a limit per minute, after which a run tries again.
_RATE_SECONDS_MAX: Final = 60.0
# How long to wait if model calls in progress have reserved the rest of a budget.
_RESERVED_WAIT_SECONDS: Final = 2.0
# Time after a model call's deadline until its reservation expires.
_RESERVED_SECONDS: Final = 30.0
_BUDGET: Final = wire.WIRE.struct(TokenBudget, agents_pb2.TokenBudget)


class ModelLimits:
    """The limits of a run's model calls. `shared` is None if the deployment has no shared limits."""

    def __init__(
        self,
        shared: SharedModels | None,
        retry: Retry,
        ids: IdSource,
        random: Randomness,
        now: Callable[[], float],
    ) -> None:
        self._shared = shared
        self._retry = retry
        self._ids = ids
        self._random = random
        self._now = now
        # Ended calls by id, until their tokens are durable.
        self._ended: dict[str, CountedCall] = {}

    def taking(self, call: ModelCall, request: ModelRequest, state: State, terms: ModelTerms) -> Take | None:
        """Return a function that counts the call before it is made. Return None if no limit applies."""
        shared, run = self._shared, state.run
        if shared is None or not (terms.is_rated or terms.budgets or shared.is_rated(request.server)):
            return None

        async def take(prompt_tokens: int, output_tokens_max: int | None) -> TokenBudget | RateReached | None:
            model_call_id = self._ids.new("mcl")
            ask = partial(
                shared.take,
                model_call_id,
                CountedCall(run.store_id, request.server, prompt_tokens),
                user_id=run.user_id if terms.budgets else "",
                agent_name=agent_with_budget(run),
                output_tokens=OUTPUT_TOKENS_RESERVED if output_tokens_max is None else output_tokens_max,
                seconds_max=request.deadline_seconds + _RESERVED_SECONDS,
            )
            limit = self._limit(await self._retry.until_answered(ask), state)
            call.model_call_id = "" if limit else model_call_id
            return limit

        return take

    def _limit(self, answer: TakeModelCallResponse, state: State) -> TokenBudget | RateReached | None:
        used_up = _BUDGET.read(answer.budget) if answer.HasField("budget") else None
        if used_up is None and not answer.wait_seconds:
            return None
        if used_up is not None and used_up.is_used_up:
            return used_up
        # Spread the attempts, so that waiting runs do not all try again at the same time.
        waits = state.loop.model_call.quota_waits if state.loop.model_call else 0
        spread = (1 + waits) * (0.5 + self._random())
        end_time = self._now() + min((answer.wait_seconds or _RESERVED_WAIT_SECONDS) * spread, _RATE_SECONDS_MAX)
        return replace(used_up, end_time=end_time) if used_up else RateReached(end_time=end_time)

    def ended(self, call: ModelCall, store_id: StoreId, server: str) -> None:
        """Record that a call has ended. Once its tokens are durable, `count` counts them."""
        if call.model_call_id:
            more = usage_of(call.usage()).total_tokens - call.prompt_tokens
            self._ended[call.model_call_id] = CountedCall(store_id, server, more)

    def count(self, model_call_id: str) -> None:
        """Count the tokens of a completed call, and release its reservation."""
        if (call := self._ended.pop(model_call_id, None)) is not None and self._shared is not None:
            self._shared.used(model_call_id, call)

    def count_all(self) -> None:
        for model_call_id in list(self._ended):
            self.count(model_call_id)
