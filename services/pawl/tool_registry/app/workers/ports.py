"""The ports of remote workers: the record of who is attached and of their calls, shared by all replicas."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from pawl.chassis.ids import CallId, CallKey, StoreId, UserId
from pawl.tool.v1 import worker_pb2 as pb
from pawl.tool_registry.domain.workers import (
    Answer,
    CallState,
    Origin,
    Purpose,
    WorkerCall,
    WorkerKey,
)
from pawl.values import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached:
    """A worker's stream in this process; `tools` are its definitions' hashes by name."""

    key: WorkerKey
    attachment: str
    tools: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class CallView:
    """A call as the execution that asked sees it."""

    state: CallState
    purpose: Purpose
    is_lost: bool
    """Its worker's lease is over, by the clock of the record, or it came back without the call."""
    is_given_up: bool
    """It came back without the call."""
    progress: Progress | None
    answer: Answer | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LateCall:
    """A call that has ended without the result that a worker brought, as the audit names it."""

    tool_name: str
    origin: Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The fate of a result; `late` if it is one that the audit does not have yet."""

    status: pb.ResultStatus.ValueType
    late: LateCall | None = None


class NewsKind(StrEnum):
    """The kinds of news from another process."""

    WAITING = "WAITING"
    """A call waits; the name is that of its group."""
    CALL = "CALL"
    """Something came for the execution of a call."""
    CANCEL = "CANCEL"
    """The result of a call is not wanted any more."""


Listener = Callable[[NewsKind, StoreId, str], None]
"""Gets the kind, the store, and the name of a group or the id of a call."""


class WorkerRepository(Protocol):
    """Workers and their calls, durable, in database time. All methods raise DependencyUnavailable.

    Where a call's `token` is an argument, nothing happens to a call that another
    execution has taken over.
    """

    async def owner(self, store_id: StoreId, group_name: str, user_id: UserId) -> UserId:
        """Return the owner of a group: `user_id` if the group is new or has no tools. Atomic."""

    async def unserved(self, attachments: Collection[str]) -> Collection[str]:
        """Return which of these workers have another definition of a tool that no live worker of its group has."""

    async def has_successor(self, worker: WorkerKey, tool_name: str, definition_hash: str, current_hash: str) -> bool:
        """Return whether this group registered a definition before, and a live worker has the current one."""

    async def attach(self, worker: Attached, *, held: Mapping[CallId, int], lease_seconds: float) -> Mapping[str, int]:
        """Note a worker's stream, in place of an earlier one; returns the calls that it holds, with their epochs.

        Calls that it should hold and that are not in `held` are lost. Atomic.
        """

    async def renew(self, seconds: Mapping[str, float]) -> Collection[str]:
        """Renew leases for so many seconds, by attachment; returns the attachments that are still there."""

    async def detach(self, worker: Attached) -> None:
        """End a worker's lease now. Idempotent."""

    async def is_attached(self, store_id: StoreId, group_name: str, tool_name: str, definition_hash: str) -> bool:
        """Return whether a live worker of the group has this definition, in whatever process."""

    async def add(self, call: WorkerCall, worker: Attached | None) -> int | None:
        """Write a call down, held by `worker` if one is given and still attached; returns its epoch then.

        Otherwise the call waits, and there is none. Takes the call over from an
        earlier execution. The same token again changes nothing. Of a run that was
        erased nothing is written.
        """

    async def adopt(self, call: WorkerCall) -> bool:
        """Take over a call that an execution of a dead process asked for, as it stands; False if there is none."""

    async def claim(self, worker: Attached, *, most: int) -> Sequence[pb.Invocation]:
        """Take waiting calls for a worker, those with the earliest deadlines; of several processes one gets each."""

    async def held(self, attachments: Collection[str]) -> Collection[tuple[str, CallKey, int]]:
        """Return the calls that attached workers hold, each behind the attachment and before its lease epoch."""

    async def put_back(self, call: CallKey, lease_epoch: int) -> None:
        """Have a call wait again that was claimed and not sent to its worker."""

    async def report(self, worker: WorkerKey, call_id: CallId, lease_epoch: int, progress: Progress) -> None:
        """Note progress of a call that the worker holds."""

    async def keep_checkpoint(self, worker: WorkerKey, call_id: CallId, lease_epoch: int, content: bytes) -> bool:
        """Keep how far a call is; False if the worker does not hold it, or it is cancelled. Atomic."""

    async def finish(self, worker: WorkerKey, call_id: CallId, lease_epoch: int, answer: Answer) -> Finished:
        """Note a worker's answer, and return what becomes of it. The same answer again gets the same status."""

    async def mark_told(self, call: CallKey, lease_epoch: int) -> None:
        """Note that the audit has the late result of this hand-out. Idempotent."""

    async def look(self, call: CallKey, token: str) -> CallView | None:
        """Return how a call stands; None if another execution has taken it over, or it is gone."""

    async def hand_out_again(self, call: CallKey, token: str, purpose: Purpose) -> bool:
        """Have a call wait again that is lost or answered; False if it is neither."""

    async def conclude_lost(self, call: CallKey, token: str) -> bool:
        """Settle a lost call: what its worker says later is late. False if it is not lost."""

    async def withdraw(self, call: CallKey, token: str) -> bool:
        """Settle a call that still waits, so that nobody gets it; False if somebody has it."""

    async def abandon(self, call: CallKey, token: str, worker: WorkerKey) -> None:
        """Settle a call that was perhaps written down as held by a worker, and was not sent to it."""

    async def cancel(self, call: CallKey, token: str) -> bool:
        """Ask for the end of a call; returns whether a worker has it, whose answer is then to be waited for."""

    async def settle(self, call: CallKey, token: str) -> None:
        """Drop arguments and answer of a call that is over. Idempotent."""

    async def news(self) -> Collection[CallKey]:
        """Return the calls of this process's executions that are answered or lost."""

    async def waiting_groups(self) -> Collection[tuple[StoreId, str]]:
        """Return store and name of the groups that calls wait for."""

    async def unwanted(self, calls: Collection[tuple[WorkerKey, CallId, int]]) -> Collection[tuple[WorkerKey, CallId]]:
        """Return which of these calls, of workers with their epochs, are cancelled or not theirs any more."""

    async def forget(self) -> None:
        """Delete workers and calls that were over ten minutes ago."""

    async def listen(self, listener: Listener) -> None:
        """Tell the listener what other processes say, until the connection breaks or this is cancelled."""
