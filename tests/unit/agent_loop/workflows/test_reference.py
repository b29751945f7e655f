"""The reference interpreter, against the examples of its meaning."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from pawl.agent_loop.workflows import definition, edges, parsing
from pawl.agent_loop.workflows.mermaid import flowchart
from pawl.values import RunState
from tests.unit.agent_loop.workflows.graphs import GIVEN, Luck, documents, lucks
from tests.unit.agent_loop.workflows.player import Player, has_ended
from tests.unit.agent_loop.workflows.reference import (
    Failed,
    Outcome,
    Reference,
    Succeeded,
    Work,
    edges_of,
    map_outcome,
    order_of,
)
from tests.unit.agent_loop.workflows.test_definitions import SCHEMA

TOOL = {"kind": "tool", "tool": "look"}


def reads(*names: str, **fields: Any) -> dict[str, Any]:
    return {**TOOL, "arguments": {name: f"${{nodes.{name}.state}}" for name in names}, **fields}


CHOICE: dict[str, Any] = {
    "fetch": TOOL,
    "big": {"kind": "condition", "if": "${nodes.fetch.output.flag}", "then": ["shorten"], "else": ["keep"]},
    "shorten": reads("fetch"),
    "keep": TOOL,
    "answer": {"kind": "output", "value": "${nodes.shorten.output}"},
    "merged": reads("shorten", "keep"),
}
FLAG, NO_FLAG = Succeeded({"flag": True}), Succeeded({"flag": False})
WRONG, BUSY = Failed("NOT_ALLOWED"), Failed("TOOL_ERROR", retryable=True)
# Each example: nodes, ends of work in order, and the states that follow.
EXAMPLES: dict[str, tuple[dict[str, Any], list[tuple[str, Any]], dict[str, str]]] = {
    "a condition starts one side, and a reference alone does not start the other": (
        CHOICE,
        [("fetch", NO_FLAG)],
        {"big": "SUCCEEDED", "shorten": "SKIPPED", "keep": "RUNNING", "answer": "SKIPPED", "merged": "PENDING"},
    ),
    "a node that reads both sides runs after either": (
        CHOICE,
        [("fetch", FLAG), ("shorten", FLAG)],
        {"keep": "SKIPPED", "answer": "SUCCEEDED", "merged": "RUNNING"},
    ),
    "a failure ends the run": (
        {"a": TOOL, "b": reads("a"), "c": TOOL},
        [("a", WRONG)],
        {"b": "PENDING", "c": "CANCELLED"},
    ),
    "a failure that continues counts as an active edge": (
        {"a": {**TOOL, "on_error": "continue"}, "b": reads("a")},
        [("a", WRONG)],
        {"a": "FAILED", "b": "RUNNING"},
    ),
    "a failure with go_to starts the handler only": (
        {"a": {**TOOL, "on_error": {"go_to": "c"}}, "b": reads("a"), "c": reads("a")},
        [("a", WRONG)],
        {"a": "FAILED", "b": "SKIPPED", "c": "RUNNING"},
    ),
    "a success does not start the handler": (
        {"a": {**TOOL, "on_error": {"go_to": "c"}}, "b": reads("a"), "c": reads("a")},
        [("a", FLAG)],
        {"b": "RUNNING", "c": "SKIPPED"},
    ),
    "join any starts at the first": (
        {"a": TOOL, "b": TOOL, "c": {**TOOL, "after": ["a", "b"], "join": "any"}},
        [("b", FLAG)],
        {"c": "RUNNING"},
    ),
    "join any still waits for what the node reads": (
        {"a": TOOL, "b": TOOL, "d": TOOL, "c": reads("d", after=["a", "b"], join="any")},
        [("b", FLAG)],
        {"c": "PENDING"},
    ),
    "join 2 is skipped when it can no longer be met": (
        {
            "a": {**TOOL, "on_error": {"go_to": "h"}},
            "b": TOOL,
            "h": TOOL,
            "c": {**TOOL, "after": ["a", "b"], "join": 2},
        },
        [("a", WRONG)],
        {"b": "RUNNING", "c": "SKIPPED"},
    ),
    "a retry is another attempt": ({"a": {**TOOL, "retry": {"attempts": 2}}}, [("a", BUSY)], {"a": "RUNNING"}),
    "attempts end": ({"a": {**TOOL, "retry": {"attempts": 2}}}, [("a", BUSY), ("a", BUSY)], {"a": "FAILED"}),
    "some failures are not retried": ({"a": {**TOOL, "retry": {"attempts": 2}}}, [("a", WRONG)], {"a": "FAILED"}),
    "a repeat ends when its expression is true": (
        {"a": {**TOOL, "repeat": {"until": "${output.flag}"}}},
        [("a", NO_FLAG), ("a", FLAG)],
        {"a": "SUCCEEDED"},
    ),
    "a repeat ends at its limit": (
        {"a": {**TOOL, "repeat": {"until": "${output.flag}", "max": 2}}},
        [("a", NO_FLAG), ("a", NO_FLAG)],
        {"a": "FAILED"},
    ),
    "enough branches cancel the others": (
        {"p": {"kind": "parallel", "branches": {"a": TOOL, "b": TOOL, "c": TOOL}, "require": 2}},
        [("p.c", FLAG), ("p.a", FLAG)],
        {"p": "SUCCEEDED", "p.b": "CANCELLED"},
    ),
    "too few branches fail the node": (
        {"p": {"kind": "parallel", "branches": {"a": TOOL, "b": TOOL, "c": TOOL}, "require": 2}},
        [("p.c", WRONG), ("p.a", WRONG)],
        {"p": "FAILED", "p.b": "CANCELLED"},
    ),
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_reaches_its_expected_states(example: str) -> None:
    nodes, ends, states = EXAMPLES[example]
    parsing.read({"name": "example", "nodes": nodes})
    reference = Reference({"nodes": nodes}, {})
    for path, outcome in ends:
        reference.end(path, outcome)
    assert {path: reference.states[path] for path in states} == states


def test_slots_are_assigned_in_topological_order() -> None:
    parallel = {"kind": "parallel", "branches": {"a": TOOL, "b": TOOL}}
    reference = Reference(
        {"concurrency": 2, "nodes": {"z": TOOL, "b": reads("z"), "p": parallel, "w": {"kind": "wait", "event": "x"}}}
    )
    assert set(reference.open) == {"p.a", "p.b", "w"}
    reference.end("p.b", FLAG)
    assert set(reference.open) == {"p.a", "z", "w"}


def test_a_map_tolerates_failures_up_to_its_limit() -> None:
    outcomes: list[Outcome] = [FLAG, WRONG, FLAG, WRONG]
    limits: list[tuple[int | str, bool]] = [(1, True), (2, False), ("49%", True), ("50%", False)]
    for tolerate, is_failed in limits:
        assert (map_outcome(outcomes, tolerate) == WRONG) is is_failed
    assert map_outcome([FLAG, WRONG], 1) == Succeeded([{"flag": True}, None])


@given(documents())
@settings(max_examples=60)
def test_random_definitions_are_valid_and_consistent_with_their_edges(document: dict[str, Any]) -> None:
    """They fit the schema, too, and their flowcharts show each edge."""
    assert SCHEMA.is_valid(document)
    parsed = parsing.read(document)
    incoming = edges.incoming(parsed)
    found = edges.edges(incoming)
    assert {(edge.source, edge.target): edge.kind for edge in found} == edges_of(document["nodes"])
    assert list(edges.order(incoming)) == order_of(document["nodes"])
    assert definition.decode(definition.encode(parsed)) == parsed
    chart = flowchart(parsed)
    assert chart.count(" -->") + chart.count(" -.->") == len(found)


# Random workflows with random failures, orders and crashes, against the reference interpreter.


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
    assert (player.states, player.open) == (_states(reference), set(reference.open))
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
