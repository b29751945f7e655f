"""A circuit breaker in front of a model server: one that does not answer is asked by one call at a time."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from pawl.agent_loop.loop.rules.run import FailureClass
from pawl.agent_loop.model.request import UNAVAILABLE, ModelError, ModelPort, ModelRequest, Piece, Problem

_FAILURES_MAX: Final = 10
_PAUSE_SECONDS: Final = 10.0


class Breaker:
    """A model server that is spared while it does not answer.

    After 10 calls in a row without an answer, calls fail at once with PROVIDER_UNAVAILABLE, except for one every 10 s.
    The first answer ends that. A rate limit is an answer. `monotonic` is a clock.
    """

    def __init__(self, model: ModelPort, monotonic: Callable[[], float]) -> None:
        self._model = model
        self._monotonic = monotonic
        self._failures = 0
        self._closed_until = 0.0

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of an answer; raises ModelError."""
        self._enter(request)
        try:
            async with aclosing(self._model.stream(request)) as pieces:
                async for piece in pieces:
                    self._failures = 0
                    yield piece
        except ModelError as error:
            if error.problem.is_outage and error.problem.failure_class is not FailureClass.RATE:
                self._failures += 1
                self._closed_until = self._monotonic() + _PAUSE_SECONDS
            else:
                self._failures = 0
            raise

    def _enter(self, request: ModelRequest) -> None:
        now = self._monotonic()
        if self._failures < _FAILURES_MAX:
            return
        if now < self._closed_until:
            message = f"The model server has not answered {self._failures} calls in a row, and is asked again later."
            left = self._closed_until - now
            raise ModelError(Problem(reason=UNAVAILABLE, message=message, retry_after_seconds=left))
        # Others wait for the end of this one.
        self._closed_until = now + request.headers_timeout_seconds
