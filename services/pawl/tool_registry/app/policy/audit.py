"""Writing the audit chain: what happens at the same time goes into one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from pawl.errors import DependencyUnavailable
from pawl.tool_registry.app.policy.ports import AuditLog
from pawl.tool_registry.domain.audit import (
    ENDS,
    AuditDraft,
    AuditKind,
    RecordedDecision,
    RecordedResult,
    clean_name,
    sha256_hex,
)
from pawl.tool_registry.domain.rules import Rule, said_by
from pawl.tool_registry.domain.verdict import CallContext, Verdict

_ENTRIES_PER_COMMIT_MAX: Final = 2000

_Waiting = tuple[Sequence[AuditDraft], "asyncio.Future[None]"]


class AuditTrail:
    """Writes entries of concurrent calls together, in the order in which they came.

    `now` gives seconds since 1970.
    """

    def __init__(self, log: AuditLog, now: Callable[[], float]) -> None:
        self._log = log
        self._now = now
        self._waiting: list[_Waiting] = []
        self._writer: asyncio.Task[None] | None = None

    async def write(self, drafts: Sequence[AuditDraft]) -> None:
        """Return when the entries are durable. Safe to cancel: they may be written all the same.

        Raises:
            DependencyUnavailable: it is not known whether they were written; what
                they are about must not happen.
        """
        if not drafts:
            return
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((drafts, written))
        if self._writer is None:
            self._writer = asyncio.get_running_loop().create_task(self._write_all(), name="audit")
        await written

    async def proposed(
        self, contexts: Sequence[CallContext], tool_names: Sequence[str], verdicts: Sequence[Verdict]
    ) -> None:
        """Write what the check of a batch said."""
        time_us = self.time_us()
        await self.write(
            [
                AuditDraft(
                    store_id=context.store_id,
                    kind=AuditKind.PROPOSED,
                    time_us=time_us,
                    user_id=context.user_id,
                    run_id=context.run_id,
                    call_id=context.call_id,
                    tool_name=clean_name(tool_name),
                    tool_version=verdict.tool_version,
                    verdict=verdict.disposition.value,
                    reason=_reason(verdict),
                    arguments_sha256=sha256_hex(verdict.accepted.canonical) if verdict.accepted else "",
                )
                for context, tool_name, verdict in zip(contexts, tool_names, verdicts, strict=True)
            ]
        )

    async def decided(self, decisions: Sequence[tuple[CallContext, RecordedDecision]]) -> None:
        """Write what people decided; what is there already is not written again.

        Raises:
            DependencyUnavailable: as `write`.
        """
        time_us = self.time_us()
        await self.write(
            [
                AuditDraft(
                    store_id=context.store_id,
                    kind=AuditKind.DECIDED,
                    time_us=time_us,
                    user_id=context.user_id,
                    run_id=context.run_id,
                    call_id=context.call_id,
                    tool_name=clean_name(decision.tool_name),
                    tool_version=decision.tool_version,
                    verdict=decision.kind,
                    by_user_id=decision.by_user_id,
                    arguments_sha256=decision.arguments_sha256,
                )
                for context, decision in decisions
            ]
        )

    async def returned(self, results: Sequence[tuple[CallContext, RecordedResult]]) -> None:
        """Write how front-end calls ended; what is there already is not written again.

        Raises:
            DependencyUnavailable: as `write`.
        """
        time_us = self.time_us()
        await self.write(
            [
                AuditDraft(
                    store_id=context.store_id,
                    kind=AuditKind.RETURNED,
                    time_us=time_us,
                    user_id=context.user_id,
                    run_id=context.run_id,
                    call_id=context.call_id,
                    tool_name=clean_name(result.tool_name),
                    tool_version=result.tool_version,
                    verdict=ENDS[result.state][0].value,
                    reason=ENDS[result.state][1],
                    by_user_id=result.by_user_id,
                    arguments_sha256=result.arguments_sha256,
                    result_sha256=result.result_sha256,
                    result_bytes=result.result_bytes,
                    duration_us=int(result.duration_seconds * 1_000_000),
                )
                for context, result in results
            ]
        )

    async def ruled(self, rule: Rule, verdict: str, by_user_id: str) -> None:
        """Write that somebody makes (MADE) or revokes (REVOKED) a rule.

        Raises:
            DependencyUnavailable: as `write`.
        """
        await self.write(
            [
                AuditDraft(
                    store_id=rule.store_id,
                    kind=AuditKind.RULE,
                    time_us=self.time_us(),
                    user_id=rule.user_id,
                    run_id="",
                    call_id=rule.call_id,
                    tool_name=clean_name(rule.tool_name),
                    tool_version=rule.tool_version,
                    verdict=verdict,
                    reason=rule.rule_id,
                    by_user_id=by_user_id,
                    arguments_sha256=sha256_hex(said_by(rule)),
                )
            ]
        )

    def time_us(self) -> int:
        """Return the time of an entry that is made now."""
        return int(self._now() * 1_000_000)

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                await self._write_some()
        finally:
            self._writer = None

    async def _write_some(self) -> None:
        taken, entries = list[_Waiting](), list[AuditDraft]()
        while self._waiting and (not taken or len(entries) + len(self._waiting[0][0]) <= _ENTRIES_PER_COMMIT_MAX):
            taken.append(self._waiting.pop(0))
            entries += taken[-1][0]
        try:
            refused = await self._log.append(entries)
        except Exception as error:  # noqa: BLE001  # it is for those who wait
            for _, written in taken:
                if not written.done():
                    written.set_exception(error)
        else:
            for drafts, written in taken:
                if written.done():
                    continue
                if any(draft.store_id in refused for draft in drafts):
                    written.set_exception(DependencyUnavailable("the audit chain takes no entries: verify it"))
                else:
                    written.set_result(None)


def _reason(verdict: Verdict) -> str:
    """Return why a call is gated or refused; the rule that decided goes along where it is not in there."""
    reason = verdict.approval_cause or verdict.error_reason
    if not verdict.rule_id or verdict.rule_id in reason:
        return reason
    return f"{reason}, rule {verdict.rule_id}".lstrip(", ")
