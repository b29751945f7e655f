"""Lets external systems complete waiting calls. Each completion is reported to the audit chain, then to the run."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final, Self

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallKey, RunKey
from pawl.chassis.process import logs, tasks
from pawl.chassis.strict_json import dumps_canonical, loads
from pawl.errors import CallNotPending, CompletionNotFound, InvalidField, Unavailable
from pawl.tool_registry import outcome
from pawl.tool_registry.audit.recorder import AuditTrail
from pawl.tool_registry.audit.rules import AuditDraft
from pawl.tool_registry.execution.rules import ERROR_CHARACTERS_MAX, CallEnd, CompletionTerms, digest_of
from pawl.tool_registry.execution.store.completions import GONE, PostgresCompletions
from pawl.tool_registry.ledger import LedgerReads
from pawl.tool_registry.policy.call import Job
from pawl.tool_registry.rules.execution import ExecutionResult, ended_badly, succeeded
from pawl.tool_registry.rules.journal import HeldElsewhere
from pawl.tool_registry.secret_file import FileSecrets
from pawl.tools.sdk.values import hide, without
from pawl.values import Outcome

_TOKEN_CHARACTERS_MAX: Final = 200
# The interval at which a replica polls for ended calls that another replica could not report.
_POLL_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 1.0
_BATCH_MAX: Final = 100

_log = logs.get_logger(__name__)


class Completing:
    """Lets external systems complete waiting calls. An async context manager that reports completions until it exits.

    Waiting calls are rows in the database. This process holds no state for them.
    """

    def __init__(
        self, *, completions: PostgresCompletions, runs: LedgerReads, secrets: FileSecrets, audit: AuditTrail
    ) -> None:
        self.store = completions
        self._runs = runs
        self._secrets = secrets
        self._audit = audit
        self._wake = asyncio.Event()
        self._reporter: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._reporter = asyncio.create_task(self._report_all(), name="completions")
        return self

    async def __aexit__(self, *_: object) -> None:
        await tasks.end([self._reporter] if self._reporter else [])

    def wake(self) -> None:
        """Report recorded completions immediately, without waiting for the next poll."""
        self._wake.set()

    async def complete(self, by: Principal, token: str, end: CallEnd) -> bool:
        """Complete a call. Return whether it had already ended in exactly this way.

        Raises:
            CompletionNotFound: No call in the store has this token.
            CallNotPending: The call has already ended differently, or its run is being stopped.
            DeadlinePassed: The call's deadline has passed.
            InvalidJson, InvalidField, TooLarge: `end` is neither a result nor an error that the tool could have
                returned.
        """
        digest = digest_of(token)
        found = None if len(token) > _TOKEN_CHARACTERS_MAX else await self.store.find(by.store_id, digest)
        if found is None:
            raise CompletionNotFound
        terms, is_open = found
        end, result = self._result_of(terms, end)
        if is_open and not await self._runs.takes_results(RunKey(by.store_id, terms.draft.run_id)):
            raise CallNotPending(GONE)
        is_duplicate = await self.store.complete(by.store_id, digest, end, result, by)
        if not is_duplicate:
            self.wake()
            _log.info("call.completed", run=terms.draft.run_id, call=terms.draft.call_id, outcome=result.outcome)
        return is_duplicate

    async def hold(self, job: Job, terms: CompletionTerms, seconds: float) -> ExecutionResult | None:
        """Let a call wait up to `seconds` for its completion. Return its state, or None if it cannot wait.

        Durable on return.
        """
        held = await self.store.hold(job.key, terms, seconds)
        if held is not None and held.outcome is not Outcome.AWAITING_COMPLETION:
            self.wake()
        return held

    async def ended_if_lapsed(
        self, job: Job, known: ExecutionResult | HeldElsewhere
    ) -> ExecutionResult | HeldElsewhere:
        """Return a call's state. If the deadline for its completion has passed, end the call first."""
        if not isinstance(known, ExecutionResult) or known.outcome is not Outcome.AWAITING_COMPLETION:
            return known
        if not known.completion_seconds_left:
            known = await self.store.lapse(job.key, outcome.of_uncompleted(job.definition))
            self.wake()
        return known

    async def withdraw(self, key: CallKey) -> ExecutionResult | None:
        ended = await self.store.withdraw(key)
        self.wake()
        return ended

    def _result_of(self, terms: CompletionTerms, end: CallEnd) -> tuple[CallEnd, ExecutionResult]:
        secrets = self._secrets_of(terms)
        if end.error:
            if len(end.error) > ERROR_CHARACTERS_MAX:
                raise InvalidField(f"error must be at most {ERROR_CHARACTERS_MAX} characters", field="error")
            return end, ended_badly(Outcome.FAILED, "TOOL_ERROR", hide(secrets, end.error))
        value = loads(end.content, bytes_max=terms.result_bytes_max)
        return CallEnd(content=dumps_canonical(value)), succeeded(dumps_canonical(without(secrets, value)), 0.0)

    def _secrets_of(self, terms: CompletionTerms) -> Collection[str]:
        find = self._secrets.own if terms.is_of_store else self._secrets.find
        found = (find(terms.draft.store_id, name) for name in terms.secret_names)
        return {value for value in found if value}

    async def _report_all(self) -> None:
        while True:
            self._wake.clear()
            seconds = _POLL_SECONDS if await self._report_some() else _RETRY_SECONDS
            await tasks.within(seconds, self._wake.wait())

    async def _report_some(self) -> bool:
        """Report a batch of ended calls. Return whether all ended calls have been reported."""
        try:
            found = await self.store.claim_unreported(_BATCH_MAX)
            reported = [await self._report(*each) for each in found]
        except Exception as error:  # noqa: BLE001  # the next poll may succeed
            # The database pool already logs that the database is unreachable.
            log = _log.debug if isinstance(error, Unavailable) else _log.warning
            log("completions.poll_failed", error=type(error).__name__)
            return False
        return all(reported) and len(found) < _BATCH_MAX

    async def _report(self, draft: AuditDraft, is_completed: bool) -> bool:  # noqa: FBT001  # unpacked from a claimed row
        key = CallKey(draft.store_id, draft.call_id)
        is_reported = False
        try:
            await self._audit.write([draft])
            if is_completed:
                await self._runs.note_completion(RunKey(draft.store_id, draft.run_id), key)
            is_reported = True
        except Exception as error:  # noqa: BLE001  # it is reported later
            _log.warning("completions.report_failed", call=key.call_id, error=type(error).__name__)
        await self.store.mark_reported(key, is_reported=is_reported)
        return is_reported
