"""Who may decide on a call that names whom it asks."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from pawl.chassis.ids import UserId
from pawl.values import CallState, DecisionKind, DecisionRight
from tests.unit.job_store.test_gate import ACCEPTED, REFUSED, decided
from tests.unit.job_store.world import DIGEST, World, change

NONE, OWN, STORE = DecisionRight.QUESTIONS, DecisionRight.OWN_RUNS, DecisionRight.STORE
HIDDEN = ("UNKNOWN", "RUN_NOT_FOUND")
# Users with their rights. The run belongs to ann.
PEOPLE = [("ann", NONE), ("ann", OWN), ("ann", STORE), ("kim", NONE), ("kim", STORE), ("bob", STORE), ("eve", OWN)]
# Whom a call asks, and the outcome of a decision by each of PEOPLE.
ASKED_FOR_APPROVAL: dict[str | None, list[tuple[str, str]]] = {
    None: [REFUSED, ACCEPTED, ACCEPTED, HIDDEN, ACCEPTED, ACCEPTED, HIDDEN],
    "": [REFUSED, REFUSED, ACCEPTED, HIDDEN, ACCEPTED, ACCEPTED, HIDDEN],
    "ann": [ACCEPTED, ACCEPTED, ACCEPTED, HIDDEN, HIDDEN, HIDDEN, HIDDEN],
    "kim": [REFUSED, REFUSED, REFUSED, ACCEPTED, ACCEPTED, HIDDEN, HIDDEN],
}
ASKED_A_QUESTION: dict[str | None, list[tuple[str, str]]] = {
    None: [ACCEPTED, ACCEPTED, ACCEPTED, HIDDEN, HIDDEN, HIDDEN, HIDDEN],
    "ann": [ACCEPTED, ACCEPTED, ACCEPTED, HIDDEN, HIDDEN, HIDDEN, HIDDEN],
    "kim": [REFUSED, REFUSED, REFUSED, ACCEPTED, ACCEPTED, HIDDEN, HIDDEN],
}


@pytest.mark.parametrize(
    ("state", "kind", "digest", "rows"),
    [
        (CallState.AWAITING_APPROVAL, DecisionKind.APPROVE, DIGEST, ASKED_FOR_APPROVAL),
        (CallState.ASKED, DecisionKind.ANSWER, "", ASKED_A_QUESTION),
    ],
)
def test_only_the_users_whom_a_call_asks_can_decide_on_it(
    state: CallState, kind: DecisionKind, digest: str, rows: dict[str | None, list[tuple[str, str]]]
) -> None:
    for asked, outcomes in rows.items():
        found = []
        for user_id, right in PEOPLE:
            world = World()
            run_id = world.start_run()
            world.commit(run_id, calls=(change("call", state, digest=digest, asked_user_id=asked),))
            found.append(decided(world, run_id, user_id, kind, digest, right=right))
        assert found == outcomes, asked


def test_the_users_whom_a_call_asks_do_not_change(world: World) -> None:
    run_id = world.start_run()
    asks = change("call", CallState.AWAITING_APPROVAL, digest=DIGEST, asked_user_id="kim")
    world.commit(run_id, calls=(asks,))
    world.commit(run_id, calls=(replace(asks, escalated=True, asked_user_id=UserId("ann")),))
    assert world.call("call").asked_user_id == "kim"
