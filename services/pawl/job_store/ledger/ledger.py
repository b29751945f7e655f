"""The ledger's use cases. Changes go through group commit, but leases and reads go directly to the store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from pawl.chassis.ids import CallKey, ClientId, CommandId, RunId, RunKey, SessionId, StoreId, UserId, WorkerId
from pawl.chassis.process import logs
from pawl.chassis.rpc.parts import in_parts
from pawl.errors import PawlError
from pawl.event.v1 import run_pb2
from pawl.job.v1 import ledger_pb2
from pawl.job_store.ledger.forks import Forks
from pawl.job_store.ledger.group_commit import GroupCommit, Lane
from pawl.job_store.ledger.ports import LimitsOf, Ports
from pawl.job_store.ledger.reading import Claimed, Loaded
from pawl.job_store.ledger.rpc.messages import LOST
from pawl.job_store.ledger.rules.attention import Quarantine, ReportCrash
from pawl.job_store.ledger.rules.command import Cancel, Send
from pawl.job_store.ledger.rules.conversations import UpdateConversation
from pawl.job_store.ledger.rules.jobs import StartTurns
from pawl.job_store.ledger.rules.offers import ReleaseOffers, RenewOffers
from pawl.job_store.ledger.rules.rows import CallRow, ConversationKey, ConversationRow
from pawl.job_store.ledger.rules.unit_of_work import Operation
from pawl.values import StopCause

# Maximum number of calls that one operation renews or releases.
_CALLS_PER_OPERATION: Final = 200
_RUNS_PER_OPERATION: Final = 50
_DOOMED_MAX: Final = 1000
# Size of an operation on many rows within its group.
_SWEEP_BYTES: Final = 64 * 1024

# Runs of larger claims are not loaded one by one, because loading one run would delay the others.
RUNS_LOADED_MAX: Final = 4
# A longer conversation is not loaded with a claim. Its worker may have cached most of it, and a very long conversation
# would not fit into one part.
MESSAGES_LOADED_MAX: Final = 64

T = TypeVar("T")

_log = logs.get_logger(__name__)


class Ledger:
    def __init__(self, ports: Ports, group_commit: GroupCommit, limits_of: LimitsOf, *, crashes_max: int) -> None:
        self.group_commit = group_commit
        self.limits_of = limits_of
        self._crashes_max = crashes_max
        self.leases = ports.leases
        self.meter = ports.meter
        self.reads = ports.reads
        self.conversations = ports.conversations
        self.forks = Forks(ports.reads, ports.conversations, group_commit)
        self.attention_repository = ports.attention_repository
        self._offer_repository = ports.offer_repository
        self._announcer = ports.announcer

    async def release_worker(self, worker_id: WorkerId) -> int:
        released = await self.leases.release(worker_id)
        # Do this even if nothing was released, because only that worker may have known when a parked run is due.
        await self._announcer.work_ready()
        return released

    async def load_claimed(self, claimed: Sequence[Claimed]) -> dict[RunKey, Loaded]:
        """Load a claim's new runs together. If the claim is small, also load other runs with few messages, one by one.

        No client holds any of these runs' calls, so they do not change before they are loaded. A run that cannot be
        loaded is left out: LoadRun will report why.
        """
        quiet = {RunKey(claim.store_id, claim.run_id): claim for claim in claimed if claim.is_quiet}
        new = {key: claim.epoch for key, claim in quiet.items() if claim.last_number == 1}
        loaded = await _or_nothing(self.reads.load_first(new)) if new else {}
        for key, claim in quiet.items() if len(claimed) <= RUNS_LOADED_MAX else ():
            if key not in loaded and claim.last_number <= MESSAGES_LOADED_MAX:
                loaded |= await _or_nothing(self._load(key, claim.epoch))
        return loaded

    async def _load(self, key: RunKey, epoch: int) -> dict[RunKey, Loaded]:
        return {key: await self.reads.load(key, epoch)}

    async def update_conversation(self, update: UpdateConversation, *, size_bytes: int) -> ConversationRow:
        """Change a conversation and return it. Stop the jobs of users who may no longer write to it.

        If the service crashes before it stops the jobs, repeat the request. Any other request that ends other users'
        right to write also stops these jobs.
        """
        changed: ConversationRow = await self.group_commit.run(
            update, size_bytes=size_bytes, lane=Lane.PEOPLE, store_id=update.store_id
        )
        for job in changed.background.open_jobs if update.ends_writing else ():
            if job.user_id == changed.user_id:
                continue
            command_id = CommandId(f"unshare_{job.run_id}")
            await self.cancel(RunKey(update.store_id, job.run_id), job.user_id, StopCause.USER, command_id)
        return changed

    async def cancel(self, run: RunKey, user_id: UserId, cause: StopCause, command_id: CommandId) -> None:
        """Cancel one of the user's runs. Idempotent by command id."""
        payload = ledger_pb2.Command(
            cancel=ledger_pb2.CancelCommand(cause=run_pb2.StopCause.Value(f"STOP_CAUSE_{cause.name}"))
        ).SerializeToString()
        send = Send(
            run=run,
            user_id=user_id,
            command_id=command_id,
            fingerprint=b"",
            command=Cancel(cause=cause),
            payload=payload,
        )
        await self.group_commit.run(send, size_bytes=len(payload), store_id=run.store_id)

    async def report_crash(self, run: RunKey, epoch: int) -> bool:
        """Release a run that its worker can neither run nor end. Return whether the run is now quarantined.

        See `attention.ReportCrash`.
        """
        report = ReportCrash(run=run, epoch=epoch, crashes_max=self._crashes_max, lost=LOST)
        return await self.group_commit.run(report, size_bytes=0, store_id=run.store_id)

    async def doomed(self) -> Sequence[RunKey]:
        """Return the runs whose lease has expired and whose next crash would quarantine them."""
        return await self.attention_repository.doomed(crashes_max=self._crashes_max, runs_max=_DOOMED_MAX)

    async def quarantine(self, runs: Sequence[RunKey]) -> int:
        count = 0
        for part in in_parts(runs, lambda _: 1, size_max=_RUNS_PER_OPERATION):
            count += await self._sweep(
                part, _store_of_run, lambda keys: Quarantine(runs=keys, crashes_max=self._crashes_max, lost=LOST)
            )
        return count

    async def start_turns(self, conversations: Sequence[ConversationKey]) -> int:
        """Start a turn in each idle conversation that has notices. Return the number of idle conversations."""
        count = 0
        for part in in_parts(conversations, lambda _: 1, size_max=_RUNS_PER_OPERATION):
            count += await self._sweep(part, lambda key: key.store_id, lambda keys: StartTurns(conversations=keys))
        return count

    async def renew_offers(
        self, store_id: StoreId, user_id: UserId, client_id: ClientId, session_id: SessionId, *, lease_seconds: float
    ) -> Sequence[CallRow]:
        calls = await self._offer_repository.held_by(store_id, user_id, client_id, RunId(""))
        held: list[CallRow] = []
        for part in in_parts(calls, lambda _: 1, size_max=_CALLS_PER_OPERATION):
            operation = RenewOffers(
                client_id=client_id, session_id=session_id, lease_seconds=lease_seconds, calls=tuple(part)
            )
            held += await self.group_commit.run(operation, size_bytes=_SWEEP_BYTES, lane=Lane.PEOPLE, store_id=store_id)
        return held

    async def release_offers(
        self, store_id: StoreId, user_id: UserId, client_id: ClientId, session_id: SessionId, run_id: RunId
    ) -> int:
        calls = await self._offer_repository.held_by(store_id, user_id, client_id, run_id)
        released = 0
        for part in in_parts(calls, lambda _: 1, size_max=_CALLS_PER_OPERATION):
            operation = ReleaseOffers(client_id=client_id, session_id=session_id, calls=tuple(part))
            released += await self.group_commit.run(
                operation, size_bytes=_SWEEP_BYTES, lane=Lane.PEOPLE, store_id=store_id
            )
        return released

    async def offer_again(self) -> int:
        calls = await self._offer_repository.run_out(calls_max=_CALLS_PER_OPERATION)
        if not calls:
            return 0
        return await self._sweep(calls, _store_of_call, lambda calls: ReleaseOffers(client_id=None, calls=calls))

    async def _sweep(
        self, keys: Sequence[T], store_of: Callable[[T], StoreId], operation: Callable[[tuple[T, ...]], Operation[int]]
    ) -> int:
        """Run the operation for all keys of a store. If that fails, run it for each key.

        The next sweep retries failures.
        """
        by_store: defaultdict[StoreId, list[T]] = defaultdict(list)
        for key in keys:
            by_store[store_of(key)].append(key)
        return sum([await self._sweep_store(store_id, own, operation) for store_id, own in by_store.items()])

    async def _sweep_store(
        self, store_id: StoreId, keys: Sequence[T], operation: Callable[[tuple[T, ...]], Operation[int]]
    ) -> int:
        try:
            return await self.group_commit.run(operation(tuple(keys)), size_bytes=_SWEEP_BYTES, store_id=store_id)
        except PawlError:
            raise
        except Exception as error:  # noqa: BLE001  # one unreadable row must not block the others
            if len(keys) == 1:
                _log.error("ledger.sweep_failed", key=keys[0], error=type(error).__name__)
                return 0
            return sum([await self._sweep_store(store_id, [key], operation) for key in keys])


async def _or_nothing(loading: Awaitable[dict[RunKey, Loaded]]) -> dict[RunKey, Loaded]:
    try:
        return await loading
    except Exception as error:  # noqa: BLE001  # the runs are claimed already
        _log.info("runs.not_loaded", error=type(error).__name__)
        return {}


def _store_of_run(run: RunKey) -> StoreId:
    return run.store_id


def _store_of_call(call: tuple[RunKey, CallKey]) -> StoreId:
    return call[0].store_id
