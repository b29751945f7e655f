"""What an undo is about, from calls in memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from pawl.agent_loop.adapters import wire
from pawl.agent_loop.domain.undo import UndoSource, undo_call_id
from pawl.event.v1 import call_pb2


def sources(calls: Iterable[call_pb2.Call], everything: Iterable[call_pb2.Call]) -> tuple[UndoSource, ...]:
    """Return the calls of a run with those of `everything` that have tried to undo them."""
    by_id = {call.call_id: wire.CALL.read(call) for call in everything}
    found = []
    for call in calls:
        ids = (undo_call_id(call.call_id, attempt) for attempt in itertools.count(1))
        tries = itertools.takewhile(bool, map(by_id.get, ids))
        found.append(UndoSource(call=by_id[call.call_id], tries=tuple(each for each in tries if each)))
    return tuple(found)
