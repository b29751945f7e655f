"""A thread's turns that were not started by AG-UI requests, and changes to its jobs."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from typing import Final

from pawl.errors import Unavailable
from pawl.event.v1 import run_pb2
from pawl.gateway.agui.events import Json
from pawl.gateway.services import PUBLIC, Metadata, Services, write

_WATCH: Final = "pawl.agent.v1.ConversationService/WatchConversation"
# Runs that ended between two watches and have nothing to show.
_EMPTY: Final = frozenset({run_pb2.RUN_STATE_CANCELLED, run_pb2.RUN_STATE_EXPIRED})


async def changes(
    services: Services, metadata: Metadata, conversation_id: str, shown: Mapping[str, int]
) -> AsyncGenerator[Json, None]:
    """Yield a conversation's runs that were not started by an AG-UI request, and its job changes.

    The watch closes while the caller streams a run, and then continues at the same position. In `shown`, the caller
    stores the last seq of each run that it has streamed. A waiting run is yielded again when it continues.

    Raises:
        PawlError: The watch failed, for example because the conversation was erased.
    """
    watch, cursor = PUBLIC[_WATCH], ""
    while True:
        fresh: list[run_pb2.Run] = []
        asked = watch.read({"conversationId": conversation_id, "after": cursor})
        async with contextlib.aclosing(services.watch(watch.name, asked, metadata)) as responses:
            async for response in responses:
                cursor = response.cursor or cursor
                for item in response.items:
                    if item.HasField("job"):
                        yield write(item.job)
                runs = (item.run for item in response.items if item.HasField("run"))
                fresh = [
                    run for run in runs if run.last_seq > shown.get(run.run_id, 0 if _is_turn(run) else run.last_seq)
                ]
                if fresh:
                    break
            else:
                raise Unavailable("The stream of events was interrupted. Try again.")
        for run in fresh:
            yield write(run)


def _is_turn(run: run_pb2.Run) -> bool:
    if run.parent_run_id or run.reports_to_conversation_id or "agui.run" in run.labels:
        return False
    is_silent = run.state == run_pb2.RUN_STATE_COMPLETED and not run.output_text
    return run.state != run_pb2.RUN_STATE_QUEUED and run.state not in _EMPTY and not is_silent
