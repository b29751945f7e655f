"""Checking the calls of an answer, and running them at once where all of them only read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from pawl.chassis.ids import CallId
from pawl.errors import DependencyUnavailable, PawlError
from pawl.tool_registry.audit.recorder import AuditTrail
from pawl.tool_registry.audit.rules import AuditDraft
from pawl.tool_registry.execution.execution import Execution
from pawl.tool_registry.execution.executor import Executor
from pawl.tool_registry.policy.admission import Admission, Judged, Proposed
from pawl.tool_registry.policy.call import Job
from pawl.tool_registry.rules.execution import ENDS, ExecutionResult
from pawl.tool_registry.rules.verdict import Verdict
from pawl.values import ReadTimeouts

# A moment: those who wait for the answer, and see nothing of it before, do not notice.
_READ_SECONDS: Final = 0.05
# Results go into the message, and into the step, that bring the answer itself.
_READ_BYTES_MAX: Final = 256 * 1024
# So long an end that is being written down is waited for; the disk may be slow.
_WRITE_SECONDS: Final = 10.0

_NOT_WRITTEN: Final = "the end of a call cannot be written down"

Checked = tuple[Verdict, ExecutionResult | None]


@dataclass(frozen=True, slots=True)
class BatchCheck:
    """Gives verdicts on batches of calls. Before anybody sees them they are in the audit chain.

    What only reads needs no record of its intent: so it runs before its check is
    written down, and both are written with its end.
    """

    admission: Admission
    executor: Executor
    audit: AuditTrail

    async def check(
        self, proposed: Sequence[Proposed], known_names: Iterable[str], timeouts: ReadTimeouts | None
    ) -> list[Checked]:
        """Return the verdicts on the calls of one batch, in order; with `timeouts`, results of reads along with them.

        A result that is not there in a moment is for whoever executes the call.

        Raises:
            DependencyUnavailable: the audit chain cannot be written.
        """
        judged = await self.admission.judge_batch(proposed, known_names)
        jobs = {job.context.call_id: job for job in self.admission.reads_of(judged, timeouts)} if timeouts else {}
        begun = dict[CallId, Execution]()
        try:
            results = await self._read(jobs, begun)
            await self.audit.write([draft for each in judged for draft in _unwritten(each, jobs)])
        except BaseException:
            for execution in begun.values():
                execution.leave()
            raise
        for call_id in begun.keys() - results.keys():
            self.executor.keep(begun[call_id])
        return [(each.verdict, results.get(each.verdict.call_id)) for each in judged]

    async def _read(self, jobs: Mapping[CallId, Job], begun: dict[CallId, Execution]) -> dict[CallId, ExecutionResult]:
        """Run the jobs; return the results that are there in a moment, and are not too large together.

        Of the checks of those that are in `begun` and go on none is written down yet.

        Raises:
            DependencyUnavailable: an end cannot be written down.
        """
        found = dict[CallId, ExecutionResult]()
        for call_id, job in jobs.items():
            cached = self.admission.cache.find(job)
            if cached is None:
                with suppress(PawlError):  # There is no room now, or no time left: it is executed later.
                    begun[call_id] = await self.executor.begin(job)
            elif _fits(cached, found):
                found[call_id] = cached
        if found:
            # At once: they go into one transaction.
            cached_ends = (self.audit.ended(jobs[call_id], end, reason="CACHED") for call_id, end in found.items())
            await asyncio.gather(*cached_ends)
        if begun:
            await asyncio.wait([execution.ended for execution in begun.values()], timeout=_READ_SECONDS)
        pairs = [(jobs[call_id], execution) for call_id, execution in begun.items()]
        while writing := [execution.ended for job, execution in pairs if _is_being_written(job, execution)]:
            if not (await asyncio.wait(writing, timeout=_WRITE_SECONDS))[0]:
                raise DependencyUnavailable(_NOT_WRITTEN)
        for job, execution in pairs:
            result = _result(job, execution)
            if result is not None and _fits(result, found):
                found[job.context.call_id] = result
        return found


def _is_being_written(job: Job, execution: Execution) -> bool:
    """Return whether a call has ended, and that is just being written down together with its check."""
    return bool(job.proposal.goes_with_end) and not execution.ended.done()


def _result(job: Job, execution: Execution) -> ExecutionResult | None:
    """Return how a read ended that has ended; None for one that goes on, asks somebody, or came to nothing.

    Raises:
        DependencyUnavailable: it took its check along, and that is not written down.
    """
    if not execution.ended.done():
        return None
    if execution.ended.exception() is not None:
        if job.proposal.goes_with_end:
            raise DependencyUnavailable(_NOT_WRITTEN)
        return None
    result = execution.ended.result()
    return result if result.outcome in ENDS else None


def _fits(result: ExecutionResult, found: Mapping[CallId, ExecutionResult]) -> bool:
    return len(result.content) + sum(len(each.content) for each in found.values()) <= _READ_BYTES_MAX


def _unwritten(judged: Judged, jobs: Mapping[CallId, Job]) -> tuple[AuditDraft, ...]:
    """Return the entry about the check of a call, unless it goes with the end of the call."""
    job = jobs.get(judged.verdict.call_id)
    return (judged.draft,) if job is None else job.proposal.claim(with_end=False)
