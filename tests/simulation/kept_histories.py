"""Checks `kept_histories_match`: a history continued from a kept prefix equals the whole history at that time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pawl.agent_loop.loop.histories import LoadedHistory, history_of
from pawl.agent_loop.loop.ledger import WorkerLedgerClient
from pawl.agent_loop.loop.ports import Claim, Loaded
from pawl.job.v1 import ledger_pb2 as pb
from pawl.job_store.ledger import reading
from pawl.job_store.ledger.rpc import parts
from tests.simulation.history import History as Record


class CheckedLedger(WorkerLedgerClient):
    def __init__(self, channel: Any, monotonic: Callable[[], float], record: Record) -> None:
        super().__init__(channel, monotonic)
        self._record = record

    async def load(self, claim: Claim) -> Loaded:
        loaded = await super().load(claim)
        # The network may have duplicated the request.
        wholes = self._record.whole_loads.pop((claim.key.run_id, claim.epoch), [])
        found = LoadedHistory(messages=loaded.state.messages, calls=dict(loaded.state.calls))
        if found not in map(_history, wholes):
            self._record.violation("kept_histories_match", f"{claim.key.run_id} epoch {claim.epoch}")
        return loaded


def _history(loaded: reading.Loaded) -> LoadedHistory:
    whole = pb.LoadRunResponse()
    for part in parts.of_run(loaded):
        whole.MergeFrom(part)
    return history_of(whole)
