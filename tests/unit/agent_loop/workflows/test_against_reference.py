"""Random workflows with random failures, orders and crashes, against the reference interpreter."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pawl.values import RunState
from tests.unit.agent_loop.workflows.graphs import GIVEN, Luck, documents, lucks
from tests.unit.agent_loop.workflows.player import Player, has_ended
from tests.unit.agent_loop.workflows.reference import Failed, Outcome, Reference, Succeeded, Work


@given(documents(), lucks(), st.integers(0, 2**32), st.sampled_from([0, 3, 20]))
@settings(max_examples=60, deadline=None, phases=[Phase.generate])
def test_engine_matches_the_reference(document: dict[str, Any], luck: Luck, seed: int, crashes: int) -> None:
    _name_events(document["nodes"], "")
    if any(node["kind"] == "parallel" for node in document["nodes"].values()):
        # The engine keeps the slot of a cancelled branch until its call stops. The reference frees it immediately.
        document["concurrency"] = 50
    reference = Reference(document, GIVEN)
    player = Player(document, GIVEN, random.Random(seed), crashes=crashes)
    step = 0
    _compare(player, reference)
    while reference.open:
        path = luck.path(sorted(reference.open), step)
        work = reference.open[path]
        outcome = _outcome(luck.outcome(path, work), work)
        player.end(path, outcome)
        player.settle()
        reference.end(path, outcome)
        _compare(player, reference)
        step += 1
    assert has_ended(player)
    assert all(count == 1 for count in player.succeeded.values() if count), "a call that succeeded ran again"


def _compare(player: Player, reference: Reference) -> None:
    run = player.state.run
    if reference.state == "FAILED":
        assert run.state is RunState.FAILED
        assert run.failure is not None
        assert run.failure.message.startswith(f"Node {reference.failed_node}: ")
        assert run.failure.reason == reference.nodes[reference.failed_node].reason
        return
    assert player.states == _states(reference)
    assert player.open == set(reference.open)
    if reference.state == "COMPLETED":
        assert run.state is RunState.COMPLETED
        assert json.loads(run.output_json or b"null") == reference.output


def _states(reference: Reference) -> dict[str, str]:
    """Return the states. The engine shows branches of a skipped node as skipped, too."""
    found: dict[str, str] = {}
    for path, state in reference.states.items():
        above = path.rpartition(".")[0]
        found[path] = "SKIPPED" if above and found[above] == "SKIPPED" else state
    return found


def _outcome(outcome: Outcome, work: Work) -> Outcome:
    """Return an outcome that this kind of work can have."""
    match work.kind, outcome:
        case "wait", Failed():
            return Succeeded(None)
        case "human", Failed():
            return Failed("REJECTED")
        case "agent", Failed():
            return Failed("AGENT_FAILED", retryable=True)
        case "human" | "agent", Succeeded():
            return Succeeded(f"text {json.dumps(outcome.output)}")
        case _:
            return outcome


def _name_events(nodes: dict[str, Any], above: str) -> None:
    """Give each wait an event of its own, because the first wait would take an event that another one needs."""
    for name, node in nodes.items():
        if node["kind"] == "wait":
            node["event"] = f"{above}{name}"
        _name_events(node.get("branches", {}), f"{above}{name}.")
