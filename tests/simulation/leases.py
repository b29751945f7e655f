"""The slots of the simulated store, and checks of the leases that messages get."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import Any

from pawl.chassis.ids import StoreId, UserId, WorkerId
from pawl.job_store.ledger.rules.rows import RunRow
from pawl.job_store.ledger.rules.slots import Slots
from pawl.job_store.ledger.rules.submit import Submit, Submitted

_IN_MOTION = frozenset({"RUNNING", "CANCELLING"})


def uses_slot(run: RunRow, like: RunRow) -> bool:
    """LOOP-14: whether a run uses a slot of the same kind as another run."""
    is_active = run.worker_id is not None or run.state.name in _IN_MOTION
    return is_active and run.in_background == like.in_background


def slots_of(runs: Iterable[RunRow], store_id: StoreId, users: Iterable[UserId], now: datetime) -> Slots:
    mine = [run for run in runs if run.store_id == store_id]
    active = [run.user_id for run in mine if run.is_active and not run.in_background]
    return Slots(
        used=len(active),
        used_by_user={user: active.count(user) for user in users},
        has_due=any(run.claim_at is not None and run.claim_at <= now for run in mine),
    )


def broken(
    operation: Submit, outcome: Any, runs: Iterable[RunRow], owners: dict[tuple[str, int], str]
) -> Iterator[tuple[str, str]]:
    """Add the owner of a message's lease; yield the broken promises: it is given once (I4), with a slot (LOOP-14)."""
    if not isinstance(outcome, Submitted) or not outcome.is_claimed:
        return
    run, limits = outcome.run, operation.slots
    if (run.run_id, run.epoch) in owners or run.worker_id is None:
        yield "leases_are_given_once", f"{run.run_id} at epoch {run.epoch}"
    owners[run.run_id, run.epoch] = run.worker_id or WorkerId("")
    active = [each.user_id for each in runs if each.store_id == run.store_id and uses_slot(each, run)]
    if len(active) > limits.per_store or active.count(run.user_id) > limits.per_user:
        yield "limits_hold", f"{run.run_id} was accepted alongside {len(active) - 1} other runs"
