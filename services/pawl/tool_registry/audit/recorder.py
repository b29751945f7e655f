"""Writes concurrent entries of the audit chain in one transaction, and verifies the chain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, replace
from typing import Final

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RunId, StoreId
from pawl.chassis.rpc.parts import in_parts
from pawl.errors import DependencyUnavailable
from pawl.tool.v1 import audit_pb2
from pawl.tool_registry.audit.rules import (
    UNKNOWN_TOOL,
    AuditDraft,
    AuditKind,
    Head,
    Problem,
    Verifier,
    clean_name,
    sha256_hex,
)
from pawl.tool_registry.audit.store.audit import PostgresAuditLog
from pawl.tool_registry.policy.call import Job
from pawl.tool_registry.policy.rules.rules import Rule, canonical_terms
from pawl.tool_registry.rules.execution import ExecutionResult
from pawl.tool_registry.rules.verdict import CallContext, Verdict
from pawl.values import EffectClass

# Identifies a grant by the call whose approval gave it, because the grant's digest would reveal the arguments.
GRANT: Final = "grant {}"
_ENTRIES_PER_COMMIT_MAX: Final = 2000

_Waiting = tuple[Sequence[AuditDraft], "asyncio.Future[None]"]


class AuditTrail:
    """Writes the entries of concurrent calls in batches, in the order of their arrival.

    `now` returns seconds since 1970. All methods that write entries raise the same errors as `write`.
    """

    def __init__(self, log: PostgresAuditLog, now: Callable[[], float]) -> None:
        self._log = log
        self._now = now
        self._waiting: list[_Waiting] = []
        self._writer: asyncio.Task[None] | None = None

    async def write(self, drafts: Sequence[AuditDraft]) -> None:
        """Write entries and return once they are durable. After a cancellation, the entries may still be written.

        Raises:
            DependencyUnavailable: The entries may or may not have been written. The actions that they describe must not
                be carried out.
        """
        if not drafts:
            return
        written = asyncio.get_running_loop().create_future()
        self._waiting.append((drafts, written))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all(), name="audit")
        await written

    def of_proposal(self, context: CallContext, tool_name: str, verdict: Verdict) -> AuditDraft:
        return replace(
            # The model made up this name, which may contain anything, so it is not stored in the chain.
            self.of_call(
                context, AuditKind.PROPOSED, tool_name if verdict.definition else UNKNOWN_TOOL, verdict.tool_version
            ),
            verdict=verdict.disposition.value,
            reason=_reason(verdict),
            arguments_sha256=sha256_hex(verdict.accepted.canonical) if verdict.accepted else "",
        )

    def of_call(self, context: CallContext, kind: AuditKind, tool_name: str, tool_version: int) -> AuditDraft:
        """Return an entry for a call, with the current time, but without a verdict or digests."""
        return AuditDraft(
            store_id=context.store_id,
            kind=kind,
            time_us=self.time_us(),
            user_id=context.user_id,
            run_id=context.run_id,
            call_id=context.call_id,
            tool_name=clean_name(tool_name),
            tool_version=tool_version,
            verdict="",
            credential_id=context.credential_id,
            delegate_user_id=context.delegate_user_id,
            key_id=context.conversation_id,
            agent_name=context.agent_name,
        )

    async def executed(self, job: Job) -> None:
        """Record that a call is about to start."""
        await self.write([self._executed(job)])

    async def ended(self, job: Job, result: ExecutionResult, *, has_begun: bool = False, reason: str = "") -> None:
        """Record the end of a call.

        The check and the start of a READ_ONLY call are recorded together with its end. `reason` replaces the reason in
        the result. Pass CACHED for a cached result, and LATE for a result that was dropped because the call had already
        ended.
        """
        draft = replace(
            self._of_job(job, AuditKind.RETURNED),
            verdict=result.outcome.value,
            reason=reason or result.error_reason,
            result_sha256=sha256_hex(result.content),
            result_bytes=len(result.content),
            duration_us=int(result.duration_seconds * 1_000_000),
        )
        started = [self._executed(job)] if has_begun and job.effect is EffectClass.READ_ONLY else []
        await self.write([*job.proposal.claim(with_end=True), *started, draft])

    def of_end(self, job: Job) -> AuditDraft:
        """Return an entry for the end of a call, without the result."""
        return self._of_job(job, AuditKind.RETURNED)

    async def ruled(self, rule: Rule, verdict: str, by: Principal) -> None:
        """Record that a user is about to create (verdict MADE) or revoke (REVOKED) a rule."""
        await self.write(
            [
                AuditDraft(
                    store_id=rule.store_id,
                    kind=AuditKind.RULE,
                    time_us=self.time_us(),
                    user_id=rule.user_id,
                    run_id=RunId(""),
                    call_id=rule.call_id,
                    tool_name=clean_name(rule.tool_name),
                    tool_version=rule.tool_version,
                    verdict=verdict,
                    reason=rule.rule_id,
                    by_user_id=by.user_id,
                    by_credential_id=by.credential_id,
                    by_delegate_user_id=by.delegate_user_id,
                    arguments_sha256=sha256_hex(canonical_terms(rule)),
                    key_id=rule.rule_id,
                )
            ]
        )

    def time_us(self) -> int:
        return int(self._now() * 1_000_000)

    def _executed(self, job: Job) -> AuditDraft:
        verdict = "APPROVED" if job.is_approved else "RULE" if job.allowing_rule_id else "GRANT" if job.grant else ""
        reason = GRANT.format(job.grant.grant_call_id) if job.grant else job.allowing_rule_id
        return replace(self._of_job(job, AuditKind.EXECUTED), verdict=verdict, reason=reason)

    def _of_job(self, job: Job, kind: AuditKind) -> AuditDraft:
        draft = self.of_call(job.context, kind, job.definition.name, job.version)
        return replace(draft, arguments_sha256=job.arguments_sha256)

    async def _write_all(self) -> None:
        try:
            while self._waiting:
                await self._write_some()
        finally:
            self._writer = None

    async def _write_some(self) -> None:
        taken = next(in_parts(self._waiting, lambda waiting: len(waiting[0]), size_max=_ENTRIES_PER_COMMIT_MAX))
        del self._waiting[: len(taken)]
        try:
            refused = await self._log.append([draft for drafts, _ in taken for draft in drafts])
        except Exception as error:  # noqa: BLE001  # every waiting caller gets it
            for _, written in taken:
                if not written.done():
                    written.set_exception(error)
        else:
            for drafts, written in taken:
                if written.done():
                    continue
                if any(draft.store_id in refused for draft in drafts):
                    written.set_exception(DependencyUnavailable("the audit chain was tampered with: verify it"))
                else:
                    written.set_result(None)


def _reason(verdict: Verdict) -> str:
    reason = verdict.approval_cause or verdict.error_reason
    if verdict.grant_call_id:
        reason = f"{reason}, {GRANT.format(verdict.grant_call_id)}"
    if not verdict.rule_id or verdict.rule_id in reason:
        return reason
    return f"{reason}, rule {verdict.rule_id}".lstrip(", ")


_PAGE: Final = 2000
_PAGES_PER_REPORT: Final = 5


async def verify(
    log: PostgresAuditLog, store_id: StoreId, known: Head | None
) -> AsyncIterator[audit_pb2.VerifyAuditResponse]:
    """Verify a store's chain. Yield the verified position every 10,000 entries and, at the end, the result (`done`).

    Entries written during verification are not checked. `known` is a chain head that was stored outside the database,
    or None.

    Raises:
        DependencyUnavailable: The chain cannot be read.
    """
    head = await log.head(store_id)
    verifier = Verifier(head, known)
    after: int | None = None
    pages = 0
    while entries := await log.page(store_id, after_seq=after, up_to_seq=head.seq, rows_max=_PAGE):
        for entry in entries:
            problem = verifier.take(entry)
            if problem is not None:
                yield _report(verifier.verified, problem, done=True)
                return
        after = entries[-1].seq
        pages += 1
        if pages % _PAGES_PER_REPORT == 0:
            yield _report(verifier.verified)
    problem = verifier.end(await log.beyond_head(store_id))
    yield _report(verifier.verified, problem, done=True)


def _report(verified: Head, problem: Problem | None = None, *, done: bool = False) -> audit_pb2.VerifyAuditResponse:
    found = None if problem is None else audit_pb2.AuditProblem(**asdict(problem))
    return audit_pb2.VerifyAuditResponse(
        verified_seq=verified.seq, verified_hash=verified.hash, done=done, problem=found
    )
