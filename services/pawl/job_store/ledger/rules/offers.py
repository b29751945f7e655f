"""Leases of front-end calls, each to one client at a time. Calls whose lease ends are offered again (FE-2)."""

from __future__ import annotations

from datetime import datetime, timedelta

import msgspec
from msgspec.structs import replace

from pawl.chassis.ids import CallKey, ClientId, RunKey, SessionId, StoreId, UserId
from pawl.job_store.ledger.rules import call_table, log
from pawl.job_store.ledger.rules.events import CallChanged
from pawl.job_store.ledger.rules.rows import CallRow, Offer, RunRow
from pawl.job_store.ledger.rules.unit_of_work import RowKeys, UnitOfWork
from pawl.values import CallState, RunState


def is_pending(run: RunRow, call: CallRow) -> bool:
    if call.reserved_by or run.state.is_terminal or run.is_stopping:
        return False
    if call.state is CallState.RUNNING:
        # The outcome is in doubt. For a quarantined run this is not known yet: the registry may have the result.
        return run.state is RunState.NEEDS_ATTENTION and not run.is_quarantined
    return call.state in call_table.PENDING


def inboxes(unit: UnitOfWork) -> frozenset[tuple[StoreId, UserId]]:
    """Return the users whose inboxes the operations of `unit` may have changed. Some may not have changed."""
    calls = [*unit.calls.created(), *(call for change in unit.calls.changed() for call in change)]
    calls = [call for call in calls if call.state in call_table.PENDING]
    keys = {RunKey(call.store_id, call.run_id) for call in calls}
    runs = [run for key in keys if (run := unit.runs.get(key)) is not None]
    runs += [run for before, run in unit.runs.changed() if _waits(before) != _waits(run) or run.attention is not None]
    asked = {(call.store_id, call.asked_user_id) for call in calls if call.asked_user_id}
    return frozenset((run.store_id, run.user_id) for run in runs) | asked


def _waits(run: RunRow) -> tuple[bool, bool, int | None]:
    return run.state in {RunState.WAITING, RunState.NEEDS_ATTENTION}, run.is_stopping, run.token_budget


def renewed(call: CallRow, *, now: datetime, lease_seconds: float | None = None) -> CallRow:
    """Return `call` with its lease renewed. By default, the lease has the same duration as before."""
    offer = call.offer
    if offer is None:
        return call
    seconds = offer.lease_seconds if lease_seconds is None else lease_seconds
    return replace(call, offer=replace(offer, expire_time=now + timedelta(seconds=seconds), lease_seconds=seconds))


def may_take(run: RunRow, call: CallRow, client_id: ClientId) -> bool:
    """Return whether a client may lease `call`.

    Calls to tools that were supplied with a run can be reserved for one client.
    """
    own = run.own_tools
    return own is None or not own.client_id or call.tool_name not in own.names or own.client_id == client_id


class Leased(msgspec.Struct, frozen=True, kw_only=True):
    """The response to a client that requested a lease.

    `call` is None if the user has no such call.

    `replaced` means that a newer session of the same client holds the call.
    """

    granted: bool
    call: CallRow | None
    replaced: bool = False


class LeaseOffer(msgspec.Struct, frozen=True, kw_only=True):
    run: RunKey
    call: CallKey
    user_id: UserId
    client_id: ClientId
    session_id: SessionId = SessionId("")
    lease_seconds: float

    @property
    def row_keys(self) -> RowKeys:
        return RowKeys(runs=(self.run,), calls=(self.call,))

    def apply(self, unit: UnitOfWork) -> Leased:
        """Grant the lease if the call is waiting and no other client holds it.

        Log that the client is executing the call. A client that already holds the call keeps its epoch. The call moves
        to this session unless a newer session holds it. Session ids are ordered by the time at which the sessions were
        opened.
        """
        run, call = unit.runs.get(self.run), unit.calls.get(self.call)
        if run is None or call is None or call.run_id != run.run_id or run.user_id != self.user_id:
            return Leased(granted=False, call=None)
        is_over = call.deadline_time is not None and call.deadline_time <= unit.now
        if call.state is not CallState.OFFERED or is_over or not is_pending(run, call):
            return Leased(granted=False, call=call)
        if not may_take(run, call, self.client_id):
            return Leased(granted=False, call=call)
        offer = call.offer or Offer(client_id=ClientId(""), epoch=0, expire_time=None, lease_seconds=0.0)
        if offer.client_id == self.client_id:
            if offer.is_held(unit.now) and self.session_id < offer.session_id:
                return Leased(granted=False, call=call, replaced=True)
            call = replace(call, offer=replace(offer, session_id=self.session_id))
            call = renewed(call, now=unit.now, lease_seconds=self.lease_seconds)
            unit.put_call(call)
            return Leased(granted=True, call=call)
        if offer.is_held(unit.now):
            return Leased(granted=False, call=call)
        offer = replace(offer, client_id=self.client_id, session_id=self.session_id, epoch=offer.epoch + 1)
        call = renewed(replace(call, offer=offer, start_time=unit.now), now=unit.now, lease_seconds=self.lease_seconds)
        _change(unit, run, call)
        return Leased(granted=True, call=call)


class RenewOffers(msgspec.Struct, frozen=True, kw_only=True):
    client_id: ClientId
    session_id: SessionId = SessionId("")
    lease_seconds: float
    calls: tuple[tuple[RunKey, CallKey], ...]

    @property
    def row_keys(self) -> RowKeys:
        return _row_keys(self.calls)

    def apply(self, unit: UnitOfWork) -> tuple[CallRow, ...]:
        held = []
        for _, call in _held(unit, self.calls):
            if call.offer is not None and _holder(call.offer) == (self.client_id, self.session_id):
                held.append(renewed(call, now=unit.now, lease_seconds=self.lease_seconds))
                unit.put_call(held[-1])
        return tuple(held)


class ReleaseOffers(msgspec.Struct, frozen=True, kw_only=True):
    """Release the leases that a session of `client_id` holds on `calls`.

    If `client_id` is None, release the expired leases on these calls. Calls that another session of the same client has
    since leased stay leased, even if this session releases them late.
    """

    client_id: ClientId | None
    session_id: SessionId = SessionId("")
    calls: tuple[tuple[RunKey, CallKey], ...]

    @property
    def row_keys(self) -> RowKeys:
        return _row_keys(self.calls)

    def apply(self, unit: UnitOfWork) -> int:
        released = 0
        for run, call in _held(unit, self.calls):
            offer = call.offer
            if offer is None or not self._gives_back(offer, unit.now):
                continue
            offer = replace(offer, client_id=ClientId(""), session_id=SessionId(""), expire_time=None)
            call = replace(call, offer=offer, start_time=None)  # noqa: PLW2901  # same call
            _change(unit, unit.runs.get(run.key) or run, call)
            released += 1
        return released

    def _gives_back(self, offer: Offer, now: datetime) -> bool:
        if self.client_id is None:
            return not offer.is_held(now)
        return _holder(offer) == (self.client_id, self.session_id)


def _holder(offer: Offer) -> tuple[ClientId, SessionId]:
    return offer.client_id, offer.session_id


def _row_keys(calls: tuple[tuple[RunKey, CallKey], ...]) -> RowKeys:
    return RowKeys(runs=tuple(dict.fromkeys(run for run, _ in calls)), calls=tuple(call for _, call in calls))


def _held(unit: UnitOfWork, keys: tuple[tuple[RunKey, CallKey], ...]) -> list[tuple[RunRow, CallRow]]:
    held = []
    for run_key, call_key in keys:
        run, call = unit.runs.get(run_key), unit.calls.get(call_key)
        if run is None or call is None or call.state is not CallState.OFFERED or call.reserved_by:
            continue
        if call.offer is not None and call.offer.client_id:
            held.append((run, call))
    return held


def _change(unit: UnitOfWork, run: RunRow, call: CallRow) -> None:
    unit.put_call(call)
    log.write(unit, run, [CallChanged(from_state=CallState.OFFERED, call=call)])
