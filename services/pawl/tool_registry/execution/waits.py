"""Calls whose tool has ended and that wait for somebody outside: their begin, and the ends that nobody brings."""

from __future__ import annotations

from collections.abc import Callable

from pawl.chassis.ids import CallKey
from pawl.tool_registry.execution.rules import CompletionTerms
from pawl.tool_registry.execution.store.completions import PostgresCompletions
from pawl.tool_registry.policy.call import Job
from pawl.tool_registry.rules.execution import ExecutionResult
from pawl.tool_registry.rules.journal import HeldElsewhere
from pawl.tool_registry.sdk import outcome
from pawl.values import Outcome


class Waits:
    """The waits of an executor, which are rows: it holds nothing of them. `on_end` is called when one has ended."""

    def __init__(self, completions: PostgresCompletions, on_end: Callable[[], None]) -> None:
        self._completions = completions
        self._on_end = on_end

    async def begin(self, job: Job, terms: CompletionTerms, seconds: float) -> ExecutionResult | None:
        """Let a call go on without its tool for so long; return what it has then. Durable. None if it cannot wait."""
        held = await self._completions.hold(job.key, terms, seconds)
        if held is not None and held.outcome is not Outcome.AWAITING_COMPLETION:
            self._on_end()
        return held

    async def checked(self, job: Job, known: ExecutionResult | HeldElsewhere) -> ExecutionResult | HeldElsewhere:
        """Return what is known of a call; one that nobody completed in time ends by that."""
        if not isinstance(known, ExecutionResult) or known.outcome is not Outcome.AWAITING_COMPLETION:
            return known
        if not known.completion_seconds_left:
            known = await self._completions.lapse(job.key, outcome.of_uncompleted(job.definition))
            self._on_end()
        return known

    async def withdraw(self, key: CallKey) -> ExecutionResult | None:
        """Cancel a call that waits; return what it has then."""
        ended = await self._completions.withdraw(key)
        self._on_end()
        return ended
