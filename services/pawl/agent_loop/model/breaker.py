from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

from pawl.agent_loop.model.request import UNAVAILABLE, ModelError, ModelPort, ModelRequest, Piece, Problem
from pawl.chassis.ids import StoreId
from pawl.job.v1.models_pb2 import ReportModelServerResponse

_FAILURES_MAX: Final = 10
_STORE_FAILURES_MAX: Final = 3
_PAUSE_SECONDS: Final = 10.0


Report = Callable[..., Awaitable[ReportModelServerResponse | None]]


class Breaker:
    """A circuit breaker for a model server.

    After 10 outages in a row, calls fail immediately with PROVIDER_UNAVAILABLE, except for one every 10 s. Any answer
    closes the circuit. An open circuit only refuses stores that have had three outages in a row themselves. No store
    can therefore make a healthy server unavailable to others. `report` shares the circuit with other processes. While
    it returns None, the process has its own circuit.
    """

    def __init__(self, model: ModelPort, monotonic: Callable[[], float], report: Report | None = None) -> None:
        self._model = model
        self._monotonic = monotonic
        self._report = report
        self._failures = 0
        self._store_failures: Counter[StoreId] = Counter()
        self._closed_until = 0.0

    async def stream(self, request: ModelRequest) -> AsyncGenerator[Piece, None]:
        await self._enter(request.store_id)
        try:
            async with aclosing(self._model.stream(request)) as pieces:
                async for piece in pieces:
                    if self._failures:
                        await self._answered()
                    yield piece
        except ModelError as error:
            is_outage = request.shows_outage(error.problem)
            if is_outage:
                self._failures += 1
                self._store_failures[request.store_id] += 1
                self._closed_until = self._monotonic() + _PAUSE_SECONDS
                if self._report and (found := await self._report(outages=1)):
                    self._failures = max(self._failures, found.outages)
            elif is_outage is False and self._failures:
                await self._answered()
            raise

    async def _answered(self) -> None:
        self._failures = 0
        self._store_failures.clear()
        if self._report:
            await self._report(answered=True)

    async def _enter(self, store_id: StoreId) -> None:
        now = self._monotonic()
        if self._failures < _FAILURES_MAX or self._store_failures[store_id] < _STORE_FAILURES_MAX:
            return
        if now >= self._closed_until:
            # The next attempt does not wait for the end of this one, which may be slow or cancelled.
            self._closed_until = now + _PAUSE_SECONDS
            found = await self._report(attempts=True) if self._report else None
            if found is None or found.may_attempt:
                return
            self._failures, self._closed_until = found.outages, now + found.closed_seconds
            if self._failures < _FAILURES_MAX:
                self._store_failures.clear()
                return
        message = f"The model server has not answered {self._failures} calls in a row. It will be tried again later."
        left = max(0.0, self._closed_until - now)
        raise ModelError(Problem(reason=UNAVAILABLE, message=message, retry_after_seconds=left))
