"""Adds results that arrive after their call has ended to the audit chain, because the tool may have taken effect."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from pawl.chassis.ids import CallKey
from pawl.chassis.process import tasks
from pawl.chassis.rpc.retry import Retry
from pawl.tool.v1 import worker_pb2 as pb
from pawl.tool_registry.audit.recorder import AuditTrail
from pawl.tool_registry.audit.rules import AuditDraft, sha256_hex
from pawl.tool_registry.sources.worker.answers import late_end
from pawl.tool_registry.sources.worker.store.workers import PostgresWorkerRepository


class LateResults:
    """Writes late results to the audit chain in the background, once each."""

    def __init__(self, repository: PostgresWorkerRepository, audit: AuditTrail, retry: Retry) -> None:
        self._repository = repository
        self._audit = audit
        self._retry = retry
        self._writing: dict[tuple[CallKey, int], asyncio.Task[None]] = {}

    def record(self, key: CallKey, draft: AuditDraft, result: pb.WorkerResult) -> None:
        """Start writing a late result. `draft` is its audit entry, still without the outcome."""
        which = (key, result.lease_epoch)
        if which not in self._writing:
            task = asyncio.create_task(self._write(key, draft, result))
            self._writing[which] = task
            task.add_done_callback(lambda _: self._writing.pop(which))

    async def end(self) -> None:
        await tasks.end(list(self._writing.values()))

    async def _write(self, key: CallKey, draft: AuditDraft, result: pb.WorkerResult) -> None:
        outcome, content = late_end(result)
        entry = replace(
            draft,
            time_us=self._audit.time_us(),
            verdict=outcome.value,
            result_sha256=sha256_hex(content),
            result_bytes=len(content),
        )
        await self._retry.until_answered(lambda: self._audit.write([entry]), call=key.call_id)
        await self._retry.until_answered(
            lambda: self._repository.mark_reported(key, result.lease_epoch), call=key.call_id
        )
