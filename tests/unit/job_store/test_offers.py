"""One client at a time runs a front-end call (FE-2)."""

from __future__ import annotations

from datetime import timedelta

from pawl.chassis.ids import CallId, CallKey, ClientId, RunId, RunKey
from pawl.job_store.ledger.rules.offers import ReleaseOffers, RenewOffers
from pawl.values import CallState, DecisionKind
from tests.unit.job_store.world import DIGEST, STORE, World, change


def offered(world: World, **fields: object) -> str:
    run_id = world.start_run()
    world.commit(run_id, calls=(change("call", CallState.OFFERED, **fields),))
    return run_id


def key(run_id: str) -> tuple[tuple[RunKey, CallKey], ...]:
    return ((RunKey(STORE, RunId(run_id)), CallKey(STORE, CallId("call"))),)


def test_a_lease_is_renewed_only_for_its_holder(world: World) -> None:
    run_id = offered(world)
    world.lease(run_id, "call", "tab_1")
    world.advance(20)
    assert world.apply(RenewOffers(client_id=ClientId("tab_2"), lease_seconds=30, calls=key(run_id))) == ()
    held = world.apply(RenewOffers(client_id=ClientId("tab_1"), lease_seconds=30, calls=key(run_id)))
    assert [call.offer.expire_time for call in held] == [world.now + timedelta(seconds=30)]


def test_only_an_offered_call_can_be_leased(world: World) -> None:
    run_id = offered(world, deadline_time=world.now + timedelta(seconds=10))
    assert world.lease(run_id, "none", "tab").call is None
    assert world.lease("none", "call", "tab").call is None
    world.advance(10)
    assert not world.lease(run_id, "call", "tab").granted
    for settle in (lambda world, run_id: world.result(run_id, "call"), World.cancel):
        world = World()
        run_id = offered(world)
        settle(world, run_id)
        assert not world.lease(run_id, "call", "tab").granted


def test_a_call_offered_again_gets_a_higher_epoch(world: World) -> None:
    """A result under a lease of the first offer must be refused."""
    run_id = offered(world)
    world.lease(run_id, "call", "tab")
    world.commit(run_id, calls=(change("call", CallState.AWAITING_APPROVAL, digest=DIGEST),))
    world.decide(run_id, "call", DecisionKind.APPROVE, "yes")
    world.commit(run_id, calls=(change("call", CallState.OFFERED, digest=DIGEST),), consumed=("yes",))
    assert world.call("call").offer.client_id == ""  # type: ignore[union-attr]
    world.lease(run_id, "call", "tab")
    assert world.call("call").offer.epoch == 2  # type: ignore[union-attr]


def test_a_call_released_by_its_holder_is_offered_again(world: World) -> None:
    run_id = offered(world)
    world.lease(run_id, "call", "tab_1")
    released = [world.apply(ReleaseOffers(client_id=ClientId(f"tab_{tab}"), calls=key(run_id))) for tab in (2, 1, 1)]
    assert released == [0, 1, 0]
    assert world.lease(run_id, "call", "tab_2").granted
