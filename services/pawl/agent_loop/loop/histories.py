"""Caches conversation histories, so that job-store sends only the new part when a worker loads a run.

job-store decides which prefix of a history may be cached and, at the next load, whether the prefix is still valid (see
its `ledger/rules/prefix.py`). Small histories are sent with the claim and are not cached.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.message import Message
from pawl.chassis.ids import CallId, RunId, RunKey, StoreId
from pawl.job.v1 import ledger_pb2 as pb

# Limit for the estimated size of all cached histories.
BYTES_MAX: Final = 64 * 1024 * 1024
# Estimated memory that a message or call takes in addition to its encoded size.
_ENTRY_BYTES: Final = 1024
# Erased messages may stay in memory this long.
IDLE_SECONDS_MAX: Final = 600.0
_CLAIMS_MAX: Final = 4096

_Key = tuple[str, str]


class KeptHistory(NamedTuple):
    prefix: pb.HistoryPrefix
    messages: tuple[Message, ...]
    calls: Mapping[CallId, Call]
    size_bytes: int
    used_at: float


class LoadedHistory(NamedTuple):
    messages: tuple[Message, ...]
    calls: dict[CallId, Call]


def history_of(response: pb.LoadRunResponse) -> LoadedHistory:
    """Return the history in the response. It is complete unless the response continues a cached history."""
    return LoadedHistory(
        messages=tuple(map(wire.MESSAGE.read, response.messages)),
        calls={call.call_id: call for call in map(wire.CALL.read, response.calls)},
    )


class Histories:
    """Cached histories by conversation, least recently used first. Bounded in size and idle time."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._kept: dict[_Key, KeptHistory] = {}
        self._size_bytes = 0
        # Conversations of recently claimed runs.
        self._conversations: dict[RunKey, _Key] = {}

    def claimed(self, run: pb.ClaimedRun) -> None:
        """Remember the conversation of a claimed run."""
        run_key = RunKey(StoreId(run.store_id), RunId(run.run_id))
        self._conversations.pop(run_key, None)
        self._conversations[run_key] = (run.store_id, run.conversation_id)
        if len(self._conversations) > _CLAIMS_MAX:
            del self._conversations[next(iter(self._conversations))]

    def of(self, run: RunKey) -> KeptHistory | None:
        return self._kept.get(self._conversations.get(run, ("", "")))

    def taken(self, response: pb.LoadRunResponse, known: KeptHistory | None) -> LoadedHistory:
        """Return the complete history from the response to a request that sent `known`.

        Cache the part that may be cached.
        """
        before = known if response.continues_known else None
        history = history_of(response)
        if before:
            history = LoadedHistory((*before.messages, *history.messages), {**before.calls, **history.calls})
        key = (response.run.store_id, response.run.conversation_id)
        if response.HasField("prefix"):
            self._put(key, self._with(response, before, history))
        else:
            self._drop(key)
        return history

    def forget_idle(self) -> None:
        """Drop histories that have not been used for 10 minutes. Call this regularly."""
        used_after = self._monotonic() - IDLE_SECONDS_MAX
        while self._kept and (first := next(iter(self._kept.items())))[1].used_at <= used_after:
            self._drop(first[0])

    def _with(self, response: pb.LoadRunResponse, before: KeptHistory | None, history: LoadedHistory) -> KeptHistory:
        known = len(before.messages) if before else 0
        messages = history.messages[: response.prefix.message_count]
        added = [call_id for message in messages[known:] for call_id in message.call_ids]
        more = {call_id: history.calls[call_id] for call_id in added}
        size_bytes = sum(message.ByteSize() for message in response.messages[: len(messages) - known])
        size_bytes += sum(call.ByteSize() for call in response.calls if call.call_id in more)
        return KeptHistory(
            # Copy the prefix, because a submessage keeps the whole response in memory.
            prefix=pb.HistoryPrefix.FromString(response.prefix.SerializeToString()),
            messages=messages,
            calls={**before.calls, **more} if before else more,
            size_bytes=(before.size_bytes if before else 0)
            + size_bytes
            + _ENTRY_BYTES * (len(messages) - known + len(more)),
            used_at=self._monotonic(),
        )

    def _put(self, key: _Key, cached: KeptHistory) -> None:
        self._drop(key)
        self._kept[key] = cached
        self._size_bytes += cached.size_bytes
        while self._size_bytes > BYTES_MAX:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: _Key) -> None:
        if (cached := self._kept.pop(key, None)) is not None:
            self._size_bytes -= cached.size_bytes
