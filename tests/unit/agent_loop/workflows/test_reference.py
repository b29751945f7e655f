"""The reference interpreter, against the examples of its meaning."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import event, given

from pawl.agent_loop.workflows import definition, edges, parsing
from tests.unit.agent_loop.workflows.graphs import GIVEN, Luck, documents, lucks, played
from tests.unit.agent_loop.workflows.reference import (
    Failed,
    Outcome,
    Reference,
    Succeeded,
    edges_of,
    map_outcome,
    order_of,
)

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


def test_slots_are_given_in_topological_order() -> None:
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


@given(documents(), lucks())
def test_random_runs_end_and_every_state_has_a_reason(document: dict[str, Any], luck: Luck) -> None:
    reference, _ = played(document, luck)
    event(reference.state)
    states = {name: work.state for name, work in reference.nodes.items()}
    if reference.state == "FAILED":
        assert states[reference.failed_node] == "FAILED"
        assert "RUNNING" not in reference.states.values()
        return
    assert reference.state == "COMPLETED"
    for work in reference.nodes.values():
        on_error = work.document.get("on_error", "fail")
        is_caught = isinstance(on_error, dict) or on_error == "continue"
        assert work.state in {"SUCCEEDED", "SKIPPED"} or (work.state == "FAILED" and is_caught)
        if isinstance(on_error, dict) and work.state == "SUCCEEDED":
            others = [source for source, target in reference.edges if target == on_error["go_to"]]
            assert len(others) > 1 or states[on_error["go_to"]] == "SKIPPED"
        event(f"{work.kind} {work.state}")


@given(documents())
def test_random_definitions_are_valid_and_their_edges_agree(document: dict[str, Any]) -> None:
    parsed = parsing.read(document)
    assert {(edge.source, edge.target): edge.kind for edge in edges.edges(edges.incoming(parsed))} == edges_of(
        document["nodes"]
    )
    assert list(edges.order(edges.incoming(parsed))) == order_of(document["nodes"])
    assert definition.decode(definition.encode(parsed)) == parsed
    assert Reference(document, GIVEN).state in {"RUNNING", "COMPLETED", "FAILED"}
