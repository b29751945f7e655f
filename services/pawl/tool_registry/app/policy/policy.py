"""The policy for every execution: how often calls may begin, what is written of them, what is given again."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pawl.tool_registry.app.policy.admission import Job
from pawl.tool_registry.app.policy.audit import AuditTrail
from pawl.tool_registry.app.policy.ports import RateLimits
from pawl.tool_registry.app.policy.result_cache import ResultCache
from pawl.tool_registry.domain.audit import AuditDraft, AuditKind, sha256_hex
from pawl.tool_registry.domain.definition import EffectClass
from pawl.tool_registry.domain.execution import ExecutionResult
from pawl.tool_registry.domain.rate import STORE_RATE_NAME, Rate, rate_limited, tool_rate

_FIRST_ATTEMPT: Final = 1


class CallPolicy:
    """Rate limits, audit and result cache of executions. `store_calls_per_minute` 0 means any number."""

    def __init__(
        self, *, limits: RateLimits, audit: AuditTrail, cache: ResultCache, store_calls_per_minute: int = 0
    ) -> None:
        self._limits = limits
        self._cache = cache
        self._store_calls_per_minute = store_calls_per_minute
        self._audit = audit

    async def cached(self, job: Job) -> ExecutionResult | None:
        """Return an earlier result of the same READ_ONLY call, written down as given again.

        Raises:
            DependencyUnavailable: it could not be written down.
        """
        found = self._cache.find(job)
        if found is not None:
            await self._audit.write([replace(self._returned(job, found, "CACHED"), duration_us=0)])
        return found

    async def permit(self, job: Job) -> ExecutionResult | None:
        """Count a call that is about to begin and write it down; the result in its place if it may not.

        The attempts of one call count once. What a READ_ONLY tool does is written
        down together with its end.

        Raises:
            DependencyUnavailable: the call must not begin.
        """
        rates = self._rates(job) if job.attempt == _FIRST_ATTEMPT else []
        exceeded = await self._limits.take(job.context.store_id, rates) if rates else None
        if exceeded is not None:
            return rate_limited(job.definition.name, exceeded)
        if job.effect is not EffectClass.READ_ONLY:
            await self._audit.write([self._executed(job)])
        return None

    async def ended(self, job: Job, result: ExecutionResult, *, has_begun: bool) -> None:
        """Write the end of an execution down, and keep its result if the tool wants that.

        Raises:
            DependencyUnavailable: it is not known whether it was written.
        """
        drafts = [self._returned(job, result)]
        if has_begun and job.effect is EffectClass.READ_ONLY:
            drafts.insert(0, self._executed(job))
        await self._audit.write(drafts)
        self._cache.put(job, result)

    async def ended_late(self, job: Job, result: ExecutionResult) -> None:
        """Write down what a tool came to whose call had ended before; its result is dropped.

        Raises:
            DependencyUnavailable: as `ended`.
        """
        await self._audit.write([self._returned(job, result, "LATE")])

    async def sweep(self) -> None:
        """Drop results that are too old, and rates that nobody uses."""
        self._cache.sweep()
        await self._limits.forget()

    def _rates(self, job: Job) -> list[Rate]:
        rates = []
        if self._store_calls_per_minute:
            rates.append(Rate(name=STORE_RATE_NAME, per_minute=self._store_calls_per_minute))
        if job.rate_per_minute:
            rates.append(tool_rate(job.definition.name, job.rate_per_minute))
        return rates

    def _executed(self, job: Job) -> AuditDraft:
        rule_id = job.allowing_rule_id
        verdict = "APPROVED" if job.is_approved else "RULE" if rule_id else ""
        return replace(self._of_job(job), kind=AuditKind.EXECUTED, verdict=verdict, reason=rule_id)

    def _returned(self, job: Job, result: ExecutionResult, reason: str = "") -> AuditDraft:
        return replace(
            self._of_job(job),
            kind=AuditKind.RETURNED,
            verdict=result.outcome.value,
            reason=reason or result.error_reason,
            result_sha256=sha256_hex(result.content),
            result_bytes=len(result.content),
            duration_us=int(result.duration_seconds * 1_000_000),
        )

    def _of_job(self, job: Job) -> AuditDraft:
        context = job.context
        return AuditDraft(
            store_id=context.store_id,
            kind="",
            time_us=self._audit.time_us(),
            user_id=context.user_id,
            run_id=context.run_id,
            call_id=context.call_id,
            tool_name=job.definition.name,
            tool_version=job.version,
            verdict="",
            arguments_sha256=job.arguments_sha256,
        )
