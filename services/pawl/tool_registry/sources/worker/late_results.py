"""The record of results that workers bring for calls that have ended without them: each had its effect all the same."""

from __future__ import annotations

import asyncio

from pawl.chassis.ids import CallKey
from pawl.chassis.process import tasks
from pawl.chassis.rpc.retry import Retry
from pawl.tool_registry.audit.recorder import AuditTrail
from pawl.tool_registry.audit.rules import AuditDraft, AuditKind, sha256_hex
from pawl.tool_registry.sources.worker.answers import late_end
from pawl.tool_registry.sources.worker.rules import Answer, LateCall
from pawl.tool_registry.sources.worker.store.workers import PostgresWorkerRepository


class LateResults:
    """Writes each late result to the audit chain, once; nobody waits for it."""

    def __init__(self, repository: PostgresWorkerRepository, audit: AuditTrail, retry: Retry) -> None:
        self._repository = repository
        self._audit = audit
        self._retry = retry
        self._telling: dict[tuple[CallKey, int], asyncio.Task[None]] = {}

    def tell(self, key: CallKey, lease_epoch: int, call: LateCall, answer: Answer) -> None:
        """Begin to write down what a worker answered under that epoch."""
        which = (key, lease_epoch)
        if which not in self._telling:
            task = asyncio.create_task(self._tell(key, lease_epoch, call, answer))
            self._telling[which] = task
            task.add_done_callback(lambda _: self._telling.pop(which))

    async def end(self) -> None:
        """Stop writing."""
        await tasks.end(list(self._telling.values()))

    async def _tell(self, key: CallKey, lease_epoch: int, call: LateCall, answer: Answer) -> None:
        outcome, content = late_end(answer)
        draft = AuditDraft(
            store_id=key.store_id,
            kind=AuditKind.RETURNED,
            time_us=self._audit.time_us(),
            user_id=call.origin.user_id,
            run_id=call.origin.run_id,
            call_id=key.call_id,
            tool_name=call.tool_name,
            tool_version=call.origin.tool_version,
            verdict=outcome.value,
            reason="LATE",
            arguments_sha256=call.origin.arguments_sha256,
            result_sha256=sha256_hex(content),
            result_bytes=len(content),
            key_id=call.origin.conversation_id,
        )
        await self._retry.until_answered(lambda: self._audit.write([draft]), call=key.call_id)
        await self._retry.until_answered(lambda: self._repository.mark_told(key, lease_epoch), call=key.call_id)
