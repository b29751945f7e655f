"""One attempt to run a call. It takes the call's locks, writes the journal and runs the tool."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from pawl.chassis.ids import CallKey
from pawl.chassis.process import logs
from pawl.chassis.process.clock import Clock
from pawl.chassis.rpc.retry import Retry
from pawl.chassis.strict_json import JsonValue, loads
from pawl.tool_registry import outcome
from pawl.tool_registry.execution.completions import Completing
from pawl.tool_registry.execution.execution import CancelCause, Execution
from pawl.tool_registry.execution.rules import CompletionTerms, digest_of
from pawl.tool_registry.execution.store.checkpoints import PostgresCheckpoints
from pawl.tool_registry.execution.store.locks import PostgresResourceLocks
from pawl.tool_registry.policy.admission import Admission
from pawl.tool_registry.policy.call import Job
from pawl.tool_registry.rules.execution import ExecutionResult, awaiting_completion, progress
from pawl.tool_registry.rules.journal import Begun, HeldElsewhere, Writer
from pawl.tool_registry.secret_file import FileSecrets
from pawl.tool_registry.sources.process.runner import ProcessRunner
from pawl.tool_registry.sources.python.runner import PythonWork
from pawl.tools.rules.definition import CHECKPOINT_BYTES_MAX, RESULT_BYTES_MAX
from pawl.tools.sdk.completion import Awaited, CompletionToken
from pawl.tools.sdk.context import (
    SecretNotFound,
    Superseded,
    ToolCancelled,
    ToolContext,
    ToolError,
    checkpoint_content,
)
from pawl.tools.sdk.reconciling import ReconcileResult
from pawl.tools.sdk.tool import WholeArguments
from pawl.tools.sdk.values import hide, without
from pawl.values import EffectClass, Question

_SECRET_CHARACTERS_MIN: Final = 4
_TOKEN_BYTES: Final = 32
_POLLS_PER_HEARTBEAT: Final = 4

T = TypeVar("T")

_log = logs.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptParts:
    locks: PostgresResourceLocks
    runner: ProcessRunner
    secrets: FileSecrets
    checkpoints: PostgresCheckpoints
    # For checkpoints.
    retry: Retry
    admission: Admission
    clock: Clock
    completing: Completing
    # The gateway's address, which is used in the URLs of completion tokens; empty if it is not public.
    public_url: str = ""
    # Attempts that were stopped because of missing heartbeats but whose tool code is still running. The call's next
    # attempt waits for them.
    silent: dict[CallKey, asyncio.Task[None]] = field(default_factory=dict)

    def forget_silent(self, task: asyncio.Task[None]) -> None:
        """Allow the next attempt at a call to start, now that the stopped attempt in `task` has ended."""
        for key in [key for key, each in self.silent.items() if each is task]:
            del self.silent[key]


class Attempt:
    """Runs a job in its own task.

    Callers get the outcome as soon as it is known. The task ends, and the resource keys are unlocked, only when all of
    the tool's code has ended, including a thread that could not be stopped.
    """

    def __init__(self, execution: Execution, job: Job, parts: AttemptParts) -> None:
        self._execution = execution
        self._job = job
        self._parts = parts
        self._cancelled = threading.Event()
        self._secrets: set[str] = set()
        self._secret_names: frozenset[str] = frozenset()
        # The completion token. Empty until the tool takes it, after which the call can also be completed from outside.
        self.completion_token = ""
        self._token = secrets.token_hex(16)
        self._loop = asyncio.get_running_loop()
        self._writer = Writer(key=job.key, run_id=job.context.run_id, attempt=job.attempt, token=self._token)
        self._last_checkpoint: JsonValue = None
        self._has_saved = False
        self._work: PythonWork | None = None
        self._saving = asyncio.Lock()
        self._started = parts.clock.monotonic()
        self.outcome: asyncio.Future[ExecutionResult | HeldElsewhere] = asyncio.get_running_loop().create_future()
        self.is_reconciling = False
        self.has_asked_journal = False
        # True if the tool was started, so it may have taken effect.
        self.has_run = False
        # How the tool ended if its call already had another result.
        self.late_end: ExecutionResult | None = None
        # True if the outcome comes from the journal or another process.
        self.was_known = False
        self.task = asyncio.create_task(self._run(), name=f"attempt {job.definition.name}")

    @property
    def hindrance(self) -> str:
        """A sentence that names the tool that blocked this call, or an empty string if no tool did."""
        return self._work.hindrance if self._work else ""

    @property
    def never_started(self) -> bool:
        """True if no attempt at the call can have taken effect. AT_MOST_ONCE calls have only one attempt."""
        return not self.has_run and (self._job.effect is EffectClass.AT_MOST_ONCE or self._job.attempt == 1)

    async def stop(self, unwind_seconds: float) -> bool:
        """Cancel the tool and wait up to `unwind_seconds`. Return whether all of its code has stopped."""
        self._cancelled.set()
        self.task.cancel()
        await asyncio.wait({self.task}, timeout=unwind_seconds)
        return self.task.done() and self._earlier is None

    async def _run(self) -> None:
        try:
            await self._wait_for_earlier()
            async with AsyncExitStack() as stack:
                if self._job.resource_keys:
                    if await self._is_known():
                        return
                    holder = self._job.context.call_id
                    await stack.enter_async_context(
                        self._parts.locks.hold(self._job.context.store_id, self._job.resource_keys, holder)
                    )
                if self._job.effect.is_journaled:
                    await self._run_journaled()
                else:
                    await self._take_checkpoint()
                    await self._run_tool()
        except Exception as error:  # noqa: BLE001  # errors of the tool are in the outcome; this one is internal
            if not self.outcome.done():
                self.outcome.set_exception(error)
                self.outcome.exception()  # Mark the exception as retrieved, in case the supervisor has exited.

    @property
    def _earlier(self) -> asyncio.Task[None] | None:
        """Return the task of an earlier attempt that no longer sends heartbeats but is still running here, or None."""
        found = self._parts.silent.get(self._job.key)
        return None if found is self.task or found is None or found.done() else found

    async def _wait_for_earlier(self) -> None:
        """Wait until the code of an earlier attempt has ended.

        Otherwise, both attempts could take effect, and hung attempts could use up the thread pool.
        """
        earlier = self._earlier
        if earlier is None:
            return
        # Until the earlier attempt ends, it may still take effect, so the outcome is in doubt.
        self.is_reconciling = self.has_asked_journal = self._job.effect.is_journaled
        await asyncio.wait({earlier})
        self.is_reconciling = self.has_asked_journal = False

    async def _is_known(self) -> bool:
        """Return whether the journal already contains the call. If it does, set the outcome. Never waits for locks."""
        if not self._job.effect.is_journaled:
            return False
        known = await self._parts.admission.journal.known(self._job.journal_call(self._token))
        if known is not None:
            self._set_known(known)
        return known is not None

    async def _run_journaled(self) -> None:
        self.has_asked_journal = True
        begun = await self._parts.admission.begin(self._job, self._token)
        if not isinstance(begun, Begun):
            self._set_known(begun)
            return
        self._execution.has_started = True
        await self._take_checkpoint()
        if begun.must_reconcile and await self._reconcile():
            return
        if begun.is_cancelled:
            self._set(outcome.of_cancel(self._job.definition, self._seconds()))
            return
        await self._run_tool()

    async def _reconcile(self) -> bool:
        """Ask the tool whether an earlier execution took effect. Return whether its answer settled the outcome."""
        reconcile = self._job.tool.reconcile
        if reconcile is None:
            raise TypeError("only RECONCILABLE tools can be reconciled")

        async def asked(context: ToolContext, **_: object) -> ReconcileResult:
            return await reconcile(context)

        self.is_reconciling = True
        try:
            # `reconcile` may block, just like the tool.
            tool = replace(self._job.tool, function=asked, signature=WholeArguments(), marks_start=True, process=None)
            found: ReconcileResult = await self._parts.runner.start(tool, {}, self._context()).result()
        except Exception as error:  # noqa: BLE001  # the author's code: if it fails, the outcome is unknown
            _log.warning("tool.reconcile_failed", tool=self._job.tool.name, error=type(error).__name__)
            found = ReconcileResult(finding="CANNOT_SAY")
        self.is_reconciling = False
        _log.info("tool.reconciled", tool=self._job.tool.name, call=self._job.context.call_id, finding=found.finding)
        if found.finding == "HAPPENED" and isinstance(found.result, Awaited):
            self._set(awaiting_completion())
        elif found.finding == "HAPPENED":
            self._set(
                outcome.of_value(self._job.definition, found.result, secrets=self._secrets, seconds=self._seconds())
            )
        elif found.finding == "FAILED":
            self._set(self._to_result(error=found.result))
        elif found.finding == "CANNOT_SAY":
            self._set(outcome.of_doubt(self._job.definition.name, self._seconds()))
        return self.outcome.done()

    async def _run_tool(self) -> None:
        job = self._job
        refusal = await self._parts.admission.permit(job, self._token)
        if refusal is not None:
            self._set(refusal)
            return
        try:
            work = self._work = self._parts.runner.start(job.tool, job.arguments, self._context())
        except Exception as error:  # noqa: BLE001  # arguments that fit the schema but not the Python type
            self._set(outcome.of_error(job.definition, error, secrets=(), seconds=self._seconds()))
            return
        heartbeat = asyncio.create_task(self._watch_heartbeat()) if job.tool.heartbeat_seconds else None
        try:
            value = await work.result()
        except Exception as error:  # noqa: BLE001  # any error of the author's code is the call's result
            self._set(self._to_result(error=error))
        else:
            self._set(self._to_result(value))
        finally:
            if heartbeat is not None:
                heartbeat.cancel()
            await asyncio.wait({work.task})
            if not work.task.cancelled() and not self.outcome.done():
                late = work.task.exception()
                self.late_end = self._to_result(None if late else work.task.result(), late)

    async def _watch_heartbeat(self) -> None:
        """Cancel the execution if its tool misses a heartbeat. The time during which a question is open does not count.

        This counts polls instead of elapsed time, so that a pause of this process is not mistaken for a missed
        heartbeat.
        """
        execution, seconds = self._execution, self._job.tool.heartbeat_seconds
        silent, signs = 0, execution.heartbeats
        while silent < _POLLS_PER_HEARTBEAT:
            await self._parts.clock.sleep(seconds / _POLLS_PER_HEARTBEAT)
            runs = self.has_run and execution.dialogue.question is None
            silent = silent + 1 if runs and execution.heartbeats == signs else 0
            signs = execution.heartbeats
        _log.warning("execution.silent", tool=self._job.tool.name, call=self._job.context.call_id, seconds=seconds)
        self._parts.silent[self._job.key] = self.task
        self.task.add_done_callback(self._parts.forget_silent)
        execution.cancel(CancelCause.SILENT)

    def _to_result(self, value: Any = None, error: BaseException | None = None) -> ExecutionResult:
        definition, secrets, seconds = self._job.definition, self._secrets, self._seconds()
        if isinstance(value, Awaited):
            if self.completion_token:
                return awaiting_completion()
            error = ToolError(f"{definition.name} awaits a completion, but has not read context.completion_token")
        if error is not None:
            return outcome.of_error(definition, error, secrets=secrets, seconds=seconds)
        return outcome.of_value(definition, value, secrets=secrets, seconds=seconds)

    def _context(self) -> ToolContext:
        context = self._job.context
        report = self._execution.report
        left = self._job.timeout_seconds - self._seconds()
        return ToolContext(
            store_id=context.store_id,
            user_id=context.user_id,
            conversation_id=context.conversation_id,
            run_id=context.run_id,
            call_id=context.call_id,
            attempt=self._job.attempt,
            agent_name=context.agent_name,
            traceparent=context.traceparent,
            deadline=datetime.fromtimestamp(self._parts.clock.now() + left, UTC),
            last_checkpoint=self._last_checkpoint,
            _cancelled=self._cancelled,
            _report=lambda fraction, message: report(progress(fraction, hide(self._secrets, message))),
            _find_secret=self._find_secret,
            _begin=self._begin,
            _save=self._save,
            _token=self._open_completion,
            _will_restart=lambda: self._execution.will_restart,
            _note_checkpoint=self._execution.note_checkpoint,
            **({"_ask": self._ask} if self._job.tool.is_async else {}),
        )

    def _begin(self) -> None:
        self.has_run = True
        self._execution.has_started = True

    async def _take_checkpoint(self) -> None:
        if self._job.attempt == 1:
            return
        content = await self._with_retry(lambda: self._parts.checkpoints.take(self._writer))
        if content is not None:
            self._last_checkpoint = loads(content, bytes_max=CHECKPOINT_BYTES_MAX)

    async def _ask(self, question: Question) -> str:
        asking = asyncio.run_coroutine_threadsafe(self._execution.dialogue.ask(question), self._loop)
        return await asyncio.wrap_future(asking)

    def _save(self, content: bytes) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(self._keep(content), self._loop)

    async def _keep(self, content: bytes) -> None:
        async with self._saving:
            if self._cancelled.is_set():
                raise ToolCancelled
            await self._write_checkpoint(content)

    async def _write_checkpoint(self, content: bytes) -> None:
        if self._secrets:
            content = checkpoint_content(without(self._secrets, loads(content, bytes_max=CHECKPOINT_BYTES_MAX)))
        checkpoints, is_first = self._parts.checkpoints, not self._has_saved
        kept = await self._with_retry(lambda: checkpoints.keep(self._writer, content, is_first=is_first))
        if not kept:
            self._cancelled.set()
            raise Superseded(
                "another execution of this call has started, or its conversation was erased: this execution must stop"
            )
        self._has_saved = True
        self._execution.note_checkpoint()

    @property
    def completion_terms(self) -> CompletionTerms:
        job = self._job
        return CompletionTerms(
            draft=self._parts.admission.audit.of_end(job),
            result_bytes_max=job.definition.result_bytes_max or RESULT_BYTES_MAX,
            secret_names=tuple(sorted(self._secret_names)),
            is_of_store=job.is_of_store,
        )

    def _open_completion(self) -> CompletionToken:
        job = self._job
        if job.tool.is_remote or job.tool.process is not None or job.tool.is_external:
            raise ToolError(
                f"{job.definition.name} does not run in the registry process, so it cannot be completed from outside"
            )
        if not job.effect.is_journaled:
            raise ToolError(
                f"{job.definition.name} is {job.effect.value}; "
                "only AT_MOST_ONCE and RECONCILABLE calls can be completed from outside"
            )
        # The prefix ensures that a token never starts with a dash, which would look like a command-line option.
        token = self.completion_token = self.completion_token or f"cmp_{secrets.token_urlsafe(_TOKEN_BYTES)}"
        url = f"{self._parts.public_url}/completions/{job.key.store_id}/{token}" if self._parts.public_url else ""
        return CompletionToken(token, url, asyncio.run_coroutine_threadsafe(self._keep_token(token), self._loop))

    async def _keep_token(self, token: str) -> None:
        key, completions = self._job.key, self._parts.completing.store
        if not await self._with_retry(lambda: completions.open(key, digest_of(token), self.completion_terms)):
            raise Superseded("this call has ended, or another execution of it has started: this execution must stop")

    async def _with_retry(self, ask: Callable[[], Awaitable[T]]) -> T:
        return await self._parts.retry.until_answered(ask, call=self._job.context.call_id)

    def _find_secret(self, name: str) -> str:
        secrets = self._parts.secrets
        find = secrets.own if self._job.is_of_store else secrets.find
        value = find(self._job.context.store_id, name)
        if value is None:
            raise SecretNotFound(f"no secret named {name!r} is configured")
        if len(value) >= _SECRET_CHARACTERS_MIN:
            # Create a new set, because a progress report may be reading the old one in another thread.
            self._secrets = self._secrets | {value}
            is_new = name not in self._secret_names
            self._secret_names |= {name}
            if is_new and self.completion_token:
                # A completion that arrives before the tool ends may contain the secret.
                asyncio.run_coroutine_threadsafe(self._keep_token(self.completion_token), self._loop)
        return value

    def _seconds(self) -> float:
        return self._parts.clock.monotonic() - self._started

    def _set_known(self, known: ExecutionResult | HeldElsewhere) -> None:
        self.was_known = True
        self._set(known)

    def _set(self, result: ExecutionResult | HeldElsewhere) -> None:
        if not self.outcome.done():
            self.outcome.set_result(result)
