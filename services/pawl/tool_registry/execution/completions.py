"""Completing calls from outside, and telling of it: the audit chain first, then the run that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final, Self

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import CallKey, RunKey
from pawl.chassis.process import logs, tasks
from pawl.chassis.strict_json import dumps_canonical, loads
from pawl.errors import CallNotPending, CompletionNotFound, InvalidField, Unavailable
from pawl.tool_registry.audit.recorder import AuditTrail
from pawl.tool_registry.audit.rules import AuditDraft
from pawl.tool_registry.execution.rules import ERROR_CHARACTERS_MAX, CompletionTerms, Said, digest_of
from pawl.tool_registry.execution.store.completions import GONE, PostgresCompletions
from pawl.tool_registry.ledger import LedgerReads
from pawl.tool_registry.policy.call import Job
from pawl.tool_registry.rules.execution import ExecutionResult, ended_badly, succeeded
from pawl.tool_registry.rules.journal import HeldElsewhere
from pawl.tool_registry.sdk import outcome
from pawl.tool_registry.sdk.values import hide, without
from pawl.tool_registry.secret_file import FileSecrets
from pawl.values import Outcome

_TOKEN_CHARACTERS_MAX: Final = 200
_POLL_SECONDS: Final = 10.0
"""So often a replica looks for what another one could not tell."""
_AGAIN_SECONDS: Final = 1.0
_BATCH_MAX: Final = 100

_log = logs.get_logger(__name__)


class Completing:
    """Takes ends of calls from outside; an async context manager that reports them.

    Waiting calls are rows: nothing is held of them here.
    """

    def __init__(
        self, *, completions: PostgresCompletions, runs: LedgerReads, secrets: FileSecrets, audit: AuditTrail
    ) -> None:
        self.store = completions
        self._runs = runs
        self._secrets = secrets
        self._audit = audit
        self._news = asyncio.Event()
        self._teller: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._teller = asyncio.create_task(self._tell_all(), name="completions")
        return self

    async def __aexit__(self, *_: object) -> None:
        await tasks.end([self._teller] if self._teller else [])

    def look(self) -> None:
        """Tell soon of ends that were written here."""
        self._news.set()

    async def complete(self, by: Principal, token: str, said: Said) -> bool:
        """Give a call its end; returns whether it had exactly this one before.

        Raises:
            CompletionNotFound: the token is none of the store.
            CallNotPending: the call has ended otherwise, or its run is being stopped.
            DeadlinePassed: its time is over.
            InvalidJson, InvalidField, TooLarge: the tool could not return that.
        """
        digest = digest_of(token)
        found = None if len(token) > _TOKEN_CHARACTERS_MAX else await self.store.find(by.store_id, digest)
        if found is None:
            raise CompletionNotFound
        terms, is_open = found
        said, result = self._judged(terms, said)
        if is_open and not await self._runs.takes_results(RunKey(by.store_id, terms.draft.run_id)):
            raise CallNotPending(GONE)
        is_duplicate = await self.store.complete(by.store_id, digest, said, result, by)
        if not is_duplicate:
            self.look()
            _log.info("call.completed", run=terms.draft.run_id, call=terms.draft.call_id, outcome=result.outcome)
        return is_duplicate

    async def hold(self, job: Job, terms: CompletionTerms, seconds: float) -> ExecutionResult | None:
        """Let a call wait without its tool for so long; return what it has then. Durable. None if it cannot wait."""
        held = await self.store.hold(job.key, terms, seconds)
        if held is not None and held.outcome is not Outcome.AWAITING_COMPLETION:
            self.look()
        return held

    async def checked(self, job: Job, known: ExecutionResult | HeldElsewhere) -> ExecutionResult | HeldElsewhere:
        """Return what is known of a call; one that waits, and whose time is over, ends by that."""
        if not isinstance(known, ExecutionResult) or known.outcome is not Outcome.AWAITING_COMPLETION:
            return known
        if not known.completion_seconds_left:
            known = await self.store.lapse(job.key, outcome.of_uncompleted(job.definition))
            self.look()
        return known

    async def withdraw(self, key: CallKey) -> ExecutionResult | None:
        """Cancel a call that waits; return what it has then."""
        ended = await self.store.withdraw(key)
        self.look()
        return ended

    def _judged(self, terms: CompletionTerms, said: Said) -> tuple[Said, ExecutionResult]:
        """Return what was said, in the one form that it has, and as a tool would have returned it."""
        secrets = self._secrets_of(terms)
        if said.error:
            if len(said.error) > ERROR_CHARACTERS_MAX:
                raise InvalidField(f"error: at most {ERROR_CHARACTERS_MAX} characters", field="error")
            return said, ended_badly(Outcome.FAILED, "TOOL_ERROR", hide(secrets, said.error))
        value = loads(said.content, bytes_max=terms.result_bytes_max)
        return Said(content=dumps_canonical(value)), succeeded(dumps_canonical(without(secrets, value)), 0.0)

    def _secrets_of(self, terms: CompletionTerms) -> Collection[str]:
        find = self._secrets.own if terms.is_of_store else self._secrets.find
        found = (find(terms.draft.store_id, name) for name in terms.secret_names)
        return {value for value in found if value}

    async def _tell_all(self) -> None:
        while True:
            self._news.clear()
            seconds = _POLL_SECONDS if await self._tell_some() else _AGAIN_SECONDS
            await tasks.within(seconds, self._news.wait())

    async def _tell_some(self) -> bool:
        """Tell what there is to tell; returns whether all was told."""
        try:
            found = await self.store.claim_untold(_BATCH_MAX)
            told = [await self._tell(*each) for each in found]
        except Exception as error:  # noqa: BLE001  # the next look may succeed
            # The database itself is in the log when it cannot be reached.
            log = _log.debug if isinstance(error, Unavailable) else _log.warning
            log("completions.not_looked", error=type(error).__name__)
            return False
        return all(told) and len(found) < _BATCH_MAX

    async def _tell(self, draft: AuditDraft, is_completed: bool) -> bool:  # noqa: FBT001  # as it is claimed
        key = CallKey(draft.store_id, draft.call_id)
        is_told = False
        try:
            await self._audit.write([draft])
            if is_completed:
                await self._runs.note_completion(RunKey(draft.store_id, draft.run_id), key)
            is_told = True
        except Exception as error:  # noqa: BLE001  # it is told later
            _log.warning("completions.not_told", call=key.call_id, error=type(error).__name__)
        await self.store.mark_told(key, is_told=is_told)
        return is_told
