"""One client at a time runs a front-end call (FE-2)."""

from __future__ import annotations

from datetime import timedelta

from pawl.chassis.ids import CallId, CallKey, ClientId, RunId, RunKey
from pawl.job_store.domain.offers import ReleaseOffers, RenewOffers
from pawl.job_store.domain.states import CallState, DecisionKind
from tests.unit.job_store.world import DIGEST, STORE, World, change


def offered(world: World, **fields: object) -> str:
    run_id = world.begin()
    world.commit(run_id, calls=(change("call", CallState.OFFERED, **fields),))
    return run_id


def key(run_id: str) -> tuple[tuple[RunKey, CallKey], ...]:
    return ((RunKey(STORE, RunId(run_id)), CallKey(STORE, CallId("call"))),)


def test_a_lease_goes_to_one_client_and_is_told() -> None:
    world = World()
    run_id = offered(world)
    assert world.lease(run_id, "call", "tab_1").granted
    assert not world.lease(run_id, "call", "tab_2").granted
    again = world.lease(run_id, "call", "tab_1")
    assert again.granted
    assert again.call is not None
    assert again.call.offer is not None
    assert again.call.offer.epoch == 1
    assert world.event_types(run_id)[-2:] == ["tool.offered", "tool.executing"]


def test_a_lease_that_ended_goes_to_the_next_client_with_a_new_epoch() -> None:
    world = World()
    run_id = offered(world)
    world.lease(run_id, "call", "tab_1")
    world.advance(31)
    leased = world.lease(run_id, "call", "tab_2")
    assert leased.granted
    assert world.call("call").offer.epoch == 2  # type: ignore[union-attr]


def test_leases_are_renewed_only_for_their_holder() -> None:
    world = World()
    run_id = offered(world)
    world.lease(run_id, "call", "tab_1")
    world.advance(20)
    assert world.apply(RenewOffers(client_id=ClientId("tab_2"), lease_seconds=30, calls=key(run_id))) == ()
    held = world.apply(RenewOffers(client_id=ClientId("tab_1"), lease_seconds=30, calls=key(run_id)))
    assert [call.offer.expire_time for call in held] == [world.now + timedelta(seconds=30)]


def test_the_newest_session_of_a_client_takes_its_calls_over_and_an_older_one_takes_none() -> None:
    world = World()
    run_id = offered(world)
    assert world.lease(run_id, "call", "tab", "ses_1").granted
    taken = world.lease(run_id, "call", "tab", "ses_2")
    assert (taken.granted, taken.replaced, taken.call.offer.epoch) == (True, False, 1)  # type: ignore[union-attr]
    refused = world.lease(run_id, "call", "tab", "ses_1")
    assert (refused.granted, refused.replaced) == (False, True)
    stranger = world.lease(run_id, "call", "other", "ses_0")
    assert (stranger.granted, stranger.replaced) == (False, False)
    world.advance(31)
    assert world.lease(run_id, "call", "tab", "ses_1").granted, "the newer one has let its lease run out"


def test_a_call_that_is_given_back_is_offered_again() -> None:
    world = World()
    run_id = offered(world)
    world.lease(run_id, "call", "tab_1")
    assert world.apply(ReleaseOffers(client_id=ClientId("tab_2"), calls=key(run_id))) == 0
    assert world.apply(ReleaseOffers(client_id=ClientId("tab_1"), calls=key(run_id))) == 1
    assert world.apply(ReleaseOffers(client_id=ClientId("tab_1"), calls=key(run_id))) == 0
    assert world.lease(run_id, "call", "tab_2").granted


def test_only_leases_that_ended_are_swept() -> None:
    world = World()
    run_id = offered(world)
    world.lease(run_id, "call", "tab_1")
    sweep = ReleaseOffers(client_id=None, calls=key(run_id))
    assert world.apply(sweep) == 0
    world.advance(30)
    events = len(world.event_types(run_id))
    assert world.apply(sweep) == 1
    assert world.event_types(run_id)[events:] == ["tool.offered"]
    assert world.call("call").offer.client_id == ""  # type: ignore[union-attr]


def test_nothing_is_leased_that_does_not_wait_for_a_client() -> None:
    world = World()
    run_id = offered(world, deadline_time=world.now + timedelta(seconds=10))
    assert world.lease(run_id, "none", "tab").call is None
    assert world.lease("none", "call", "tab").call is None
    world.advance(10)
    assert not world.lease(run_id, "call", "tab").granted

    world = World()
    run_id = offered(world)
    world.result(run_id, "call")
    assert not world.lease(run_id, "call", "tab").granted

    world = World()
    run_id = offered(world)
    world.cancel(run_id)
    assert not world.lease(run_id, "call", "tab").granted


def test_a_call_that_is_offered_a_second_time_gets_higher_epochs() -> None:
    """A result under a lease of the first time must not be taken."""
    world = World()
    run_id = offered(world)
    world.lease(run_id, "call", "tab")
    world.commit(run_id, calls=(change("call", CallState.AWAITING_APPROVAL, digest=DIGEST),))
    world.decide(run_id, "call", DecisionKind.APPROVE, "yes")
    world.commit(run_id, calls=(change("call", CallState.OFFERED, digest=DIGEST),), consumed=("yes",))
    assert world.call("call").offer.client_id == ""  # type: ignore[union-attr]
    world.lease(run_id, "call", "tab")
    assert world.call("call").offer.epoch == 2  # type: ignore[union-attr]
