"""The product behind the model's interface: the same asks, answers and view."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Generic, TypeVar

from msgspec.structs import astuple

from pawl.chassis.ids import RunId, RunKey, StoreId
from pawl.errors import PawlError
from pawl.event.v1 import event_pb2, run_pb2
from pawl.job_store.ledger.group_commit import GroupCommit
from pawl.job_store.ledger.reading import Claimed
from pawl.job_store.ledger.rules.approval import Decision
from pawl.job_store.ledger.rules.attention import Quarantine
from pawl.job_store.ledger.rules.command import Receipt
from pawl.job_store.ledger.rules.offers import Leased, ReleaseOffers, RenewOffers
from pawl.job_store.ledger.rules.rows import CallRow, ConversationRow, LastCommit, RunRow
from pawl.job_store.ledger.rules.submit import Submitted
from pawl.job_store.ledger.rules.unit_of_work import Operation, RowKeys, UnitOfWork
from tests.ledger.model import Model, Row
from tests.ledger.operations import operation
from tests.ledger.stores import Store
from tests.simulation.store import Tables

T = TypeVar("T")

_MANY = 100


class _Ids:
    """Ids derived from the tag of an ask. They are the same for every repetition and every order."""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._counts: Counter[str] = Counter()

    def new(self, prefix: str) -> str:
        self._counts[prefix] += 1
        count = self._counts[prefix]
        return f"{prefix}_{self._tag}" + (f"_{count}" if count > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tagged(Generic[T]):
    tag: str
    operation: Operation[T]

    @property
    def row_keys(self) -> RowKeys:
        return self.operation.row_keys

    def apply(self, unit: UnitOfWork) -> T:
        unit.ids = _Ids(self.tag)
        return self.operation.apply(unit)


class Product:
    def __init__(self, store: Store, group_commit: GroupCommit) -> None:
        self.store = store
        self._group_commit = group_commit
        self._crashes_max = store.limits["crashes"]

    async def do(self, ask: Row) -> tuple[Any, ...]:
        store, tag = self.store, ask["tag"]
        match ask["do"]:
            case "wait":
                await store.pass_time(ask["seconds"])
                return ("ok",)
            case "claim":
                claimed = await store.leases.claim(
                    ask["worker"], runs_max=ask["runs_max"], lease_seconds=ask["seconds"], background_runs_max=64
                )
                for run in claimed:
                    with suppress(PawlError):
                        await store.reads.load(RunKey(run.store_id, run.run_id), run.epoch)
                return ("ok", _epochs(claimed))
            case "renew":
                renewed = await store.leases.renew(ask["worker"], lease_seconds=ask["seconds"])
                return ("ok", _epochs(renewed.runs), set(_epochs(renewed.with_commands)))
            case "release":
                return ("ok", await store.leases.release(ask["worker"]))
            case "sweep_crashed":
                runs = await store.attention_repository.doomed(crashes_max=self._crashes_max, runs_max=_MANY)
                ended = 0
                for store_id, own in by_store(runs, lambda run: run.store_id).items():
                    quarantine = Quarantine(runs=own, crashes_max=self._crashes_max)
                    ended += await self._change(f"{tag}_{store_id}", quarantine, store_id)
                return ("ok", ended)
            case "renew_offers":
                calls = await store.offer_repository.held_by(ask["store"], ask["user"], ask["client"], RunId(""))
                session = {"client_id": ask["client"], "session_id": ask["session"]}
                renewal = RenewOffers(**session, lease_seconds=ask["seconds"], calls=_sorted(calls))
                return ("ok", {call.call_id for call in await self._change(tag, renewal, ask["store"])})
            case "release_offers":
                calls = await store.offer_repository.held_by(ask["store"], ask["user"], ask["client"], ask["run"])
                session = {"client_id": ask["client"], "session_id": ask["session"]}
                release = ReleaseOffers(**session, calls=_sorted(calls))
                return ("ok", await self._change(tag, release, ask["store"]))
            case "sweep_offers":
                calls, released = await store.offer_repository.run_out(calls_max=_MANY), 0
                for store_id, lost in by_store(calls, lambda call: call[0].store_id).items():
                    release = ReleaseOffers(client_id=None, calls=_sorted(lost))
                    released += await self._change(f"{tag}_{store_id}", release, store_id)
                return ("ok", released)
            case _:
                (answer,) = await self.group([ask])
                return answer

    async def group(self, asks: Sequence[Row]) -> list[tuple[Any, ...]]:
        """Answer asks that arrive together and share a transaction."""
        now = await self.store.now()
        changes = [self._change(ask["tag"], operation(ask, now), ask["store"]) for ask in asks]
        answers = await asyncio.gather(*changes, return_exceptions=True)
        return [_answer(answer) for answer in answers]

    async def _change(self, tag: str, operation: Operation[T], store_id: StoreId) -> T:
        tagged = Tagged(tag=tag, operation=operation)
        return await self._group_commit.run(tagged, size_bytes=1, store_id=store_id)


def by_store(items: Iterable[T], store_of: Callable[[T], StoreId]) -> Mapping[StoreId, tuple[T, ...]]:
    found: defaultdict[StoreId, list[T]] = defaultdict(list)
    for item in items:
        found[store_of(item)].append(item)
    return {store_id: tuple(own) for store_id, own in found.items()}


def _sorted(keys: tuple[T, ...]) -> tuple[T, ...]:
    """Sort keys, because their order determines the order of event ids and is otherwise unspecified."""
    return tuple(sorted(keys))  # type: ignore[type-var]  # keys of rows


def _epochs(claimed: Sequence[Claimed]) -> dict[tuple[str, str], int]:
    return {(run.store_id, run.run_id): run.epoch for run in claimed}


def _answer(answer: object) -> tuple[Any, ...]:
    match answer:
        case ConversationRow():
            return ("ok", answer.sharing.name)
        case Submitted():
            return ("ok", answer.run.run_id, answer.steered)
        case LastCommit():
            return ("ok", answer.first_seq, answer.last_seq, answer.commands_pending)
        case Receipt():
            return ("receipt", answer.outcome.name, answer.reason)
        case Leased(granted=granted, call=call):
            return ("ok", granted, call.offer.epoch if call is not None and call.offer is not None else 0)
        case PawlError():
            return ("refused", answer.reason)
        case bool():
            return ("ok", answer)
        case Exception():
            raise answer
        case _:
            raise AssertionError(f"no answer: {answer!r}")


def view_of_model(model: Model) -> Row:
    """Return the rows of the model that the product also shows, with times in seconds from now."""

    def left(time: int | None) -> float | None:
        return None if time is None else (time - model.now) / 1000

    return {
        "conversations": {
            key: (row["user"], row["active"], tuple(row["queue"]), row["messages"], row["sharing"])
            for key, row in model.conversations.items()
        },
        "runs": {
            key: {
                "user": row["user"],
                "state": row["state"],
                "waits": row["waits"],
                "cause": row["cause"],
                "attention": row["attention"],
                "crashes": row["crashes"],
                "budget": row["budget"],
                "parent": row["parent"],
                "credential": row["credential"],
                "people": (row["people"], sorted(row["steered_by"])),
                "unstopped": row["unstopped"],
                "waiting": (row["waiting"], row["waiting_bytes"]),
                "epoch": row["epoch"],
                "worker": row["worker"],
                "claim": left(row["claim_at"]),
                "log": row["log"],
                "unread": list(model.unread(row)),
                "receipts": sorted(row["commands"]),
            }
            for key, row in model.runs.items()
        },
        "calls": {
            key: {
                "state": row["state"],
                "what": (row["tool"], row["arguments"], row["digest"], row["attempt"]),
                "decision": row["decision"],
                "approvals": (
                    row["required"],
                    tuple(row["approvers"]),
                    tuple(row["approved_before"]),
                    row["escalated"],
                ),
                "reserved": row["reserved"],
                "child": row["child"],
                "deadline": left(row["deadline"]),
                "offer": (row["client"], row["session"], row["offer_epoch"], left(row["held_until"])),
            }
            for key, row in model.calls.items()
        },
    }


def _approver(approval: Decision) -> tuple[str, str, tuple[str, ...]]:
    return approval.user_id, approval.credential_id, approval.people


def view_of_tables(tables: Tables, now: datetime) -> Row:
    def left(time: datetime | None) -> float | None:
        return None if time is None else round((time - now).total_seconds(), 3)

    def run(row: RunRow) -> Row:
        log = [event_pb2.RunEvent.FromString(payload) for payload in tables.events.get(row.key, [])]
        assert [event.seq for event in log] == list(range(1, row.last_seq + 1)), "seqs have gaps"
        return {
            "user": row.user_id,
            "state": row.state.name,
            "waits": list(row.waits),
            "cause": "" if row.stop_cause is None else row.stop_cause.name,
            "attention": "" if row.attention is None else row.attention.reason.name,
            "crashes": row.crashes,
            "budget": row.token_budget,
            "parent": (row.parent_run_id, row.parent_call_id),
            "credential": row.credential_id,
            "people": (row.people, list(row.steered_by)),
            "waiting": (row.steers_waiting, row.steer_bytes_waiting),
            "unstopped": list(run_pb2.Run.FromString(row.unstopped).unstopped_call_ids),
            "epoch": row.epoch,
            "worker": row.worker_id or "",
            "claim": left(row.claim_at),
            "log": [event.type for event in log],
            "unread": [command.command_id for command in tables.unread(row.key)],
            "receipts": sorted(
                key.command_id for key in tables.commands if RunKey(key.store_id, key.run_id) == row.key
            ),
        }

    def call(row: CallRow) -> Row:
        offer = row.offer
        return {
            "state": row.state.name,
            "what": (row.tool_name, row.arguments.decode(), row.digest, row.attempt),
            "decision": "" if row.decision is None else row.decision.kind.name,
            "approvals": (
                row.approvals_required,
                tuple(map(_approver, row.approvals)),
                tuple(map(_approver, row.earlier_approvals)),
                row.escalated,
            ),
            "reserved": row.reserved_by,
            "child": row.child_run_id,
            "deadline": left(row.deadline_time),
            "offer": ("", "", 0, None)
            if offer is None
            else (offer.client_id, offer.session_id, offer.epoch, left(offer.expire_time)),
        }

    return {
        "conversations": {
            astuple(key): (row.user_id, row.active_run_id or "", row.queue, row.last_number, row.sharing.name)
            for key, row in tables.conversations.items()
        },
        "runs": {astuple(key): run(row) for key, row in tables.runs.items()},
        "calls": {astuple(key): call(row) for key, row in tables.calls.items()},
    }
