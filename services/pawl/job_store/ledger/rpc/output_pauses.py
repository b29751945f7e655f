"""Pauses in the model output of stores that exceed their limit of events per second."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from pawl.chassis.ids import StoreId
from pawl.chassis.process import logs
from pawl.job.v1 import ledger_pb2 as pb

# Called with a store, its limit of events per second, and the number of new events. Returns a pause in seconds.
CountEvents = Callable[[StoreId, int, int], Awaitable[float]]

# A worker waits for the count before it continues with the run.
_COUNT_SECONDS_MAX: Final = 1.0

_log = logs.get_logger(__name__)


def events_with_output(request: pb.CommitRunRequest) -> int:
    """Return the number of events of a step that contains model output, or 0 for other steps."""
    has_output = any(event.HasField("output_delta") for event in request.events)
    return len(request.events) if has_output else 0


async def pause_seconds(count: CountEvents, store_id: StoreId, per_second: int, events: int) -> float:
    """Count the events of a durable step. If they cannot be counted now, the step has succeeded all the same."""
    try:
        async with asyncio.timeout(_COUNT_SECONDS_MAX):
            return await count(store_id, per_second, events)
    except Exception as error:  # noqa: BLE001  # the step is durable
        _log.warning("events.not_counted", store=store_id, error=repr(error))
        return 0.0
