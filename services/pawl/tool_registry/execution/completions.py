"""Completing calls from outside, and telling of it: the audit chain first, then the run that waits."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final, Self

from pawl.chassis.identity.auth import Principal
from pawl.chassis.ids import RunKey
from pawl.chassis.process import logs, tasks
from pawl.chassis.strict_json import dumps_canonical, loads
from pawl.errors import CallNotPending, CompletionNotFound, DeadlinePassed, InvalidField, Unavailable
from pawl.tool_registry.audit.recorder import AuditTrail
from pawl.tool_registry.execution.rules import (
    ERROR_CHARACTERS_MAX,
    AwaitedCall,
    CompletionTerms,
    Receipt,
    Said,
    UntoldEnd,
    digest_of,
)
from pawl.tool_registry.execution.store.completions import PostgresCompletions
from pawl.tool_registry.ledger import LedgerReads
from pawl.tool_registry.rules.execution import ExecutionResult, ended_badly, succeeded
from pawl.tool_registry.sdk.values import hide, without
from pawl.tool_registry.secret_file import FileSecrets
from pawl.values import Outcome

_TOKEN_CHARACTERS_MAX: Final = 200
_POLL_SECONDS: Final = 10.0
"""So often a replica looks for what another one could not tell."""
_AGAIN_SECONDS: Final = 1.0
_BATCH_MAX: Final = 100
_GONE: Final = "the call has ended otherwise, or was cancelled: this changes nothing"

_log = logs.get_logger(__name__)


class Completing:
    """Takes ends of calls from outside; an async context manager, in which what is taken is told."""

    def __init__(
        self, *, completions: PostgresCompletions, runs: LedgerReads, secrets: FileSecrets, audit: AuditTrail
    ) -> None:
        self._completions = completions
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
        call = None if len(token) > _TOKEN_CHARACTERS_MAX else await self._completions.find(by.store_id, digest)
        if call is None:
            raise CompletionNotFound
        said, result = self._judged(call, said)
        if call.is_open and not await self._runs.takes_results(RunKey(call.key.store_id, call.run_id)):
            raise CallNotPending(_GONE)
        receipt = await self._completions.complete(by.store_id, digest, said, result, by)
        match receipt:
            case Receipt.TAKEN:
                self.look()
                _log.info("call.completed", run=call.run_id, call=call.key.call_id, outcome=result.outcome)
            case Receipt.ENDED:
                raise CallNotPending(_GONE)
            case Receipt.LAPSED:
                raise DeadlinePassed("the time in which the call could be completed is over")
            case Receipt.UNKNOWN:
                raise CompletionNotFound
            case Receipt.DUPLICATE:
                pass
        return receipt is Receipt.DUPLICATE

    def _judged(self, call: AwaitedCall, said: Said) -> tuple[Said, ExecutionResult]:
        """Return what was said, in the one form that it has, and as a tool would have returned it."""
        secrets = self._secrets_of(call.terms)
        if said.error:
            if len(said.error) > ERROR_CHARACTERS_MAX:
                raise InvalidField(f"error: at most {ERROR_CHARACTERS_MAX} characters", field="error")
            return said, ended_badly(Outcome.FAILED, "TOOL_ERROR", hide(secrets, said.error))
        value = loads(said.content, bytes_max=call.terms.result_bytes_max)
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
            found = await self._completions.claim_untold(_BATCH_MAX)
            told = [await self._tell(each) for each in found]
        except Exception as error:  # noqa: BLE001  # the next look may succeed
            # The database itself is in the log when it cannot be reached.
            log = _log.debug if isinstance(error, Unavailable) else _log.warning
            log("completions.not_looked", error=type(error).__name__)
            return False
        return all(told) and len(found) < _BATCH_MAX

    async def _tell(self, end: UntoldEnd) -> bool:
        call = end.call
        is_told = False
        try:
            await self._audit.write([end.draft])
            if end.is_completed:
                await self._runs.note_completion(RunKey(call.key.store_id, call.run_id), call.key)
            is_told = True
        except Exception as error:  # noqa: BLE001  # it is told later
            _log.warning("completions.not_told", call=call.key.call_id, error=type(error).__name__)
        await self._completions.mark_told(call.key, is_told=is_told)
        return is_told
