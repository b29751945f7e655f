"""Decides which steps can be written with one statement, and prepares them from cached rows.

Most of a run's rows are written by its owner, so job-store usually has them in its cache. A step that needs only the
rows of its run, the run's calls and its conversation can be prepared from the cache. The statement writes the step only
if none of these rows has changed. It can check this, because every write to a run, its calls or its commands changes
the version of the run's row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import RunKey
from pawl.errors import PawlError
from pawl.job_store.ledger.rules.background import NO_BACKGROUND
from pawl.job_store.ledger.rules.rows import CallRow, ConversationKey, ConversationRow, RunRow
from pawl.job_store.ledger.rules.unit_of_work import Ids, Operation, RowKeys, UnitOfWork

# The approximate size of the other fields of a row.
_ROWS_BYTES: Final = 2048
# How long after the database's last response the time is estimated. The estimate may be late by as much.
ESTIMATE_SECONDS_MAX: Final = 1.0


class CachedRun(msgspec.Struct, frozen=True, kw_only=True):
    """An open run whose inbox is empty, with its open calls, at some version of its row.

    The version is opaque and comes from the store. The conversation may be older than the run, or None if unknown.
    """

    run: RunRow
    version: Any
    calls: tuple[CallRow, ...]
    conversation: ConversationRow | None = None

    @property
    def key(self) -> RunKey:
        return self.run.key

    @property
    def size_bytes(self) -> int:
        """The approximate size of the cached rows."""
        run, tools = self.run, self.run.own_tools
        size = _ROWS_BYTES + len(run.options) + len(run.tools) + len(run.output) + len(run.usage)
        size += len(tools.definitions) if tools is not None else 0
        return size + sum(_ROWS_BYTES + len(call.arguments) + len(call.spec) for call in self.calls)


@dataclass(frozen=True, slots=True)
class Step:
    """A step that is ready to be written. `number` is its position among the operations."""

    number: int
    cached: CachedRun
    unit: UnitOfWork
    outcome: Any

    @property
    def frees_slot(self) -> bool:
        return any(not run.is_active for _, run in self.unit.runs.changed())

    @property
    def conversations(self) -> list[tuple[ConversationRow, ConversationRow]]:
        """The conversation before and after the step. Empty if the step neither appends messages nor ends the run."""
        return self.unit.conversations.changed()

    def written(self, version: Any) -> CachedRun | None:
        """Return the part of the run that may be cached once the step is written, or None if the run has ended."""
        return after(self.unit, self.cached.key, version, self.cached)


def prepare(
    operations: Sequence[Operation[Any]], cached: Callable[[RunKey], CachedRun | None], now: datetime, ids: Ids
) -> list[Step]:
    """Apply steps of different runs to their cached rows. If any operation is not such a step, return an empty list.

    A group that needs a transaction anyway would only cost more with a separate statement for some of its steps.
    """
    known: dict[RunKey, CachedRun] = {}
    for operation in operations:
        key = operation.row_keys.step
        run = cached(key) if key is not None and key not in known else None
        if run is None:
            return []
        known[run.key] = run
    steps: list[Step] = []
    for number, (operation, run) in enumerate(zip(operations, known.values(), strict=True)):
        step = _prepared(number, operation, run, now, ids)
        if step is None:
            return []
        steps.append(step)
    return steps


def _prepared(number: int, operation: Operation[Any], cached: CachedRun, now: datetime, ids: Ids) -> Step | None:
    keys, run, conversation = operation.row_keys, cached.run, cached.conversation
    if (keys.conversations_of or keys.ends) and not _is_simple(run, conversation):
        return None
    unit = UnitOfWork(ids)
    last = run.last_commit
    latest = max(run.update_time, run.update_time if last is None else last.time)
    if now < latest - timedelta(seconds=ESTIMATE_SECONDS_MAX):
        # The clock was set back.
        return None
    unit.now = max(now, latest)
    unit.runs.load(run.key, run)
    for call in cached.calls:
        unit.load_call(call)
    if conversation is not None:
        unit.conversations.load(conversation.key, conversation)
    try:
        with unit.attempt():
            outcome = operation.apply(unit)
    except PawlError:
        # Only the stored rows can justify a refusal.
        return None
    return Step(number, cached, unit, outcome) if _is_alone(unit, run) else None


def _is_simple(run: RunRow, conversation: ConversationRow | None) -> bool:
    """Return whether a step can append messages or end the run without changing other runs."""
    return (
        conversation is not None
        and conversation.active_run_id == run.run_id
        and not conversation.queue
        and conversation.background == NO_BACKGROUND
        and not (run.parent_run_id or run.is_turn)
    )


def _is_alone(unit: UnitOfWork, before: RunRow) -> bool:
    """Return whether an operation changed only a run, its conversation and its calls, and did not release the run."""
    run = unit.runs.get(before.key)
    if run is None or run is before:
        return False
    keeps = run.state.is_terminal or (run.worker_id, run.claim_at) == (before.worker_id, before.claim_at)
    others = (
        unit.work_ready,
        unit.trims.rows,
        unit.off_log.rows,
        unit.wakeups.rows,
        unit.segments.rows,
        unit.commands.created(),
        unit.runs.created(),
        unit.conversations.created(),
    )
    return keeps and len(unit.runs.changed()) == 1 and not any(others)


def is_cacheable(run: RunRow) -> bool:
    """Return whether a run can be cached, which requires that its steps never need other runs.

    Jobs cannot be cached, because they are trimmed, and neither can runs that share a budget.
    """
    return not (run.reports_to or run.budget_run_id)


def after(unit: UnitOfWork, key: RunKey, version: Any, before: CachedRun | None) -> CachedRun | None:
    """Return the part of a run to cache once the changes of `unit` are stored, or None if the run must be reloaded.

    All open calls and unread commands of the run must be in the unit. `before` is the current content of the cache.
    """
    run = unit.runs.get(key)
    if run is None or run.worker_id is None or unit.inbox(run) or not is_cacheable(run):
        return None
    conversation = unit.conversations.get(ConversationKey(run.store_id, run.conversation_id))
    if conversation is None and before is not None:
        conversation = before.conversation
    return CachedRun(
        run=run,
        version=version,
        calls=tuple(unit.open_calls(run)),
        conversation=conversation,
    )


def loaded_with(keys: RowKeys) -> RowKeys:
    """Return the keys of the rows that an operation needs.

    If the operation is a step, the keys include all calls of its run, so that the run can be cached.
    """
    return keys if keys.step is None else replace(keys, calls_of=(keys.step,))
