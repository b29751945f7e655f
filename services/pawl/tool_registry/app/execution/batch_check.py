"""Checking the calls of an answer, and running them at once where all of them only read."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from pawl.chassis.ids import CallId
from pawl.errors import DependencyUnavailable, PawlError
from pawl.tool_registry.app.execution.execution import Execution
from pawl.tool_registry.app.execution.executor import Executor
from pawl.tool_registry.app.policy.admission import Admission, Judged, Proposed, ReadTimeouts
from pawl.tool_registry.app.policy.audit import AuditTrail
from pawl.tool_registry.app.policy.call import Job
from pawl.tool_registry.domain.audit import AuditDraft
from pawl.tool_registry.domain.execution import ExecutionResult, Outcome
from pawl.tool_registry.domain.verdict import Verdict

# A moment: those who wait for the answer, and see nothing of it before, do not notice.
_READ_SECONDS: Final = 0.05
# Results go into the message, and into the step, that bring the answer itself.
_READ_BYTES_MAX: Final = 256 * 1024
# So long an end that is being written down is waited for; the disk may be slow.
_WRITE_SECONDS: Final = 10.0

_ENDS: Final = frozenset({Outcome.SUCCEEDED, Outcome.FAILED})

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
        results = await self._read(jobs.values())
        await self.audit.write([draft for each in judged for draft in _unwritten(each, jobs)])
        return [(each.verdict, results.get(each.verdict.call_id)) for each in judged]

    async def _read(self, jobs: Iterable[Job]) -> dict[CallId, ExecutionResult]:
        """Run the jobs; return the results that are there in a moment, and are not too large together.

        Raises:
            DependencyUnavailable: an end cannot be written down.
        """
        found = dict[CallId, ExecutionResult]()
        begun = list[tuple[Job, Execution]]()
        try:
            for job in jobs:
                cached = await self.admission.cached(job)
                if cached is not None:
                    found[job.context.call_id] = cached
                    continue
                with suppress(PawlError):  # There is no room now, or no time left: it is executed later.
                    begun.append((job, await self.executor.begin(job)))
            if begun:
                await asyncio.wait([execution.ended for _, execution in begun], timeout=_READ_SECONDS)
            for job, execution in begun:
                result = await _result(job, execution)
                if result is not None and len(result.content) <= _READ_BYTES_MAX - sum(map(_size, found.values())):
                    found[job.context.call_id] = result
                else:
                    self.executor.keep(execution)
        except BaseException:
            for _, execution in begun:
                execution.leave()
            raise
        return found


async def _result(job: Job, execution: Execution) -> ExecutionResult | None:
    """Return how a read ended that has ended; None for one that goes on, asks somebody, or came to nothing."""
    if not execution.ended.done() and not job.proposal.claim(with_end=False):
        # It has ended, and that is just being written down together with its check.
        await asyncio.wait({execution.ended}, timeout=_WRITE_SECONDS)
        if not execution.ended.done():
            raise DependencyUnavailable("the end of a call cannot be written down")
    if not execution.ended.done() or execution.ended.exception() is not None:
        return None
    result = execution.ended.result()
    return result if result.outcome in _ENDS else None


def _unwritten(judged: Judged, jobs: Mapping[CallId, Job]) -> tuple[AuditDraft, ...]:
    """Return the entry about the check of a call, unless it goes with the end of the call."""
    job = jobs.get(judged.verdict.call_id)
    return (judged.draft,) if job is None else job.proposal.claim(with_end=False)


def _size(result: ExecutionResult) -> int:
    return len(result.content)
