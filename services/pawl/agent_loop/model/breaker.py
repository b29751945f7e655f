"""Implements a circuit breaker for the model server."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Final

from pawl.agent_loop.loop.rules.run import FailureClass
from pawl.agent_loop.model.request import UNAVAILABLE, ModelError, ModelPort, ModelRequest, Piece, Problem

_FAILURES_MAX: Final = 10
_PAUSE_SECONDS: Final = 10.0


class Breaker:
    """A circuit breaker for a model server.

    After 10 outages in a row, calls fail immediately with PROVIDER_UNAVAILABLE, except for one every 10 s. Any other
    outcome closes the circuit. A rate limit does not count as an outage (see `Problem.is_outage`).
    """

    def __init__(self, model: ModelPort, monotonic: Callable[[], float]) -> None:
        self._model = model
        self._monotonic = monotonic
        self._failures = 0
        self._closed_until = 0.0

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Piece, None]:
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
            message = (
                f"The model server has not answered {self._failures} calls in a row. It will be tried again later."
            )
            left = self._closed_until - now
            raise ModelError(Problem(reason=UNAVAILABLE, message=message, retry_after_seconds=left))
        # Other calls wait for this one to end.
        self._closed_until = now + request.headers_timeout_seconds
