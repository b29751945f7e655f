"""Checks a batch of calls. If all of them are read-only, runs them immediately."""

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

# Short enough that a caller waiting for the whole answer does not notice it.
_READ_SECONDS: Final = 0.05
# The results must fit in both the message and the step that contain the answer.
_READ_BYTES_MAX: Final = 256 * 1024
# Maximum time to wait for a call's end to be written. The disk may be slow.
_WRITE_SECONDS: Final = 10.0

_NOT_WRITTEN: Final = "the end of a call cannot be recorded"

Checked = tuple[Verdict, ExecutionResult | None]


@dataclass(frozen=True, slots=True)
class BatchCheck:
    """Returns verdicts on batches of calls after writing them to the audit chain.

    A read-only call need not be recorded before it runs. It may run before its check is written, and a single write
    then records both its check and its end.
    """

    admission: Admission
    executor: Executor
    audit: AuditTrail

    async def check(
        self, proposed: Sequence[Proposed], known_names: Iterable[str], timeouts: ReadTimeouts | None
    ) -> list[Checked]:
        """Return the verdicts on a batch of calls, in order.

        With `timeouts`, also run read-only calls, and return the results of the fast ones. A slow call continues to
        run, and a later request to execute it fetches the result.

        Raises:
            DependencyUnavailable: The audit chain cannot be written.
        """
        judged = await self.admission.judge_batch(proposed, known_names)
        jobs = {job.context.call_id: job for job in self.admission.reads_of(judged, timeouts)} if timeouts else {}
        started = dict[CallId, Execution]()
        try:
            results = await self._read(jobs, started)
            await self.audit.write([draft for each in judged for draft in _unwritten(each, jobs)])
        except BaseException:
            for execution in started.values():
                execution.leave()
            raise
        for call_id in started.keys() - results.keys():
            self.executor.keep(started[call_id])
        return [(each.verdict, results.get(each.verdict.call_id)) for each in judged]

    async def _read(
        self, jobs: Mapping[CallId, Job], started: dict[CallId, Execution]
    ) -> dict[CallId, ExecutionResult]:
        """Start the jobs. Return the results that arrive within `_READ_SECONDS` and are small enough in total.

        Add the started jobs to `started`. The checks of those that are still running have not been written yet.

        Raises:
            DependencyUnavailable: A call's end cannot be written.
        """
        found = dict[CallId, ExecutionResult]()
        for call_id, job in jobs.items():
            cached = self.admission.cache.find(job)
            if cached is None:
                with suppress(PawlError):  # No capacity or time left: the job is executed later.
                    started[call_id] = await self.executor.start(job)
            elif _fits(cached, found):
                found[call_id] = cached
        if found:
            # Concurrently, so that they share one transaction.
            cached_ends = (self.audit.ended(jobs[call_id], end, reason="CACHED") for call_id, end in found.items())
            await asyncio.gather(*cached_ends)
        if started:
            await asyncio.wait([execution.ended for execution in started.values()], timeout=_READ_SECONDS)
        pairs = [(jobs[call_id], execution) for call_id, execution in started.items()]
        while writing := [execution.ended for job, execution in pairs if _is_being_written(job, execution)]:
            if not (await asyncio.wait(writing, timeout=_WRITE_SECONDS))[0]:
                raise DependencyUnavailable(_NOT_WRITTEN)
        for job, execution in pairs:
            result = _result(job, execution)
            if result is not None and _fits(result, found):
                found[job.context.call_id] = result
        return found


def _is_being_written(job: Job, execution: Execution) -> bool:
    """Return whether a call has ended but its check and its end are still being written to the audit chain."""
    return bool(job.proposal.goes_with_end) and not execution.ended.done()


def _result(job: Job, execution: Execution) -> ExecutionResult | None:
    """Return a read's result, or None if the read is still running, is asking a question, or could not be run.

    Raises:
        DependencyUnavailable: The read's check and end could not be written.
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
    """Return the audit entry for a call's check, or nothing if it is written together with the call's end."""
    job = jobs.get(judged.verdict.call_id)
    return (judged.draft,) if job is None else job.proposal.claim(with_end=False)
