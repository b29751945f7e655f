"""Which finished nodes a new run of a workflow reuses."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import loop_state
from pawl.agent_loop.loop.rules.loop_state import LoopState
from pawl.agent_loop.workflows import graph as graphs
from pawl.agent_loop.workflows import parsing
from pawl.agent_loop.workflows.cursor import NodeRecord, NodeState, WorkflowCursor
from pawl.agent_loop.workflows.definition import NODES_MAX, YEAR_SECONDS
from pawl.agent_loop.workflows.graph import Graph, failed
from pawl.agent_loop.workflows.rerun import rerun
from pawl.chassis.ids import RunId

OLD = RunId("run_old")
GRAPH_NODES: dict[str, Any] = {
    "first": {"kind": "tool", "tool": "look"},
    "big": {"kind": "condition", "if": "${nodes.first.output.n > 1}", "then": ["short"], "else": ["long"]},
    "short": {"kind": "tool", "tool": "look"},
    "long": {"kind": "tool", "tool": "look"},
    "both": {
        "kind": "parallel",
        "branches": {"a": {"kind": "tool", "tool": "look"}, "b": {"kind": "tool", "tool": "look"}},
        "after": ["first"],
    },
    "other": {"kind": "tool", "tool": "look"},
    "last": {"kind": "output", "value": ["${nodes.both.output}", "${nodes.other.output}"]},
}
GRAPH = graphs.of_definition(parsing.read({"name": "w", "nodes": GRAPH_NODES}))
DONE = dict.fromkeys(("first", "big", "short", "both", "both.a", "both.b", "other", "last"), NodeState.SUCCEEDED)
DONE["long"] = NodeState.SKIPPED


def cursor(states: dict[str, NodeState], graph: Graph = GRAPH) -> WorkflowCursor:
    numbers = {step.path: step.number for step in graph.steps}
    return WorkflowCursor(
        start_time=5.0,
        nodes={numbers[path]: NodeRecord(state=state, start_ms=7, end_ms=9) for path, state in states.items()},
    )


def again(path: str, states: dict[str, NodeState]) -> set[str]:
    """Return the nodes that run again after a rerun from `path`."""
    step = GRAPH.step(path)
    assert step is not None
    found = rerun(GRAPH, cursor(states), OLD, step.number)
    kept, run_again = ({GRAPH.steps[number].path for number in each} for each in (found.start.nodes, found.again))
    # The output is set again in any case.
    assert kept == {step.path for step in GRAPH.steps} - run_again - {"last"}
    return run_again


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("first", {"first", "big", "short", "long", "both", "both.a", "both.b", "last"}),
        ("big", {"big", "short", "long"}),
        ("both.a", {"both", "both.a", "last"}),
        ("both", {"both", "both.a", "both.b", "last"}),
        ("last", {"last"}),
    ],
)
def test_dependents_of_a_node_run_again_with_it(path: str, expected: set[str]) -> None:
    assert again(path, DONE) == expected


def test_nodes_that_did_not_succeed_run_again_with_their_dependents() -> None:
    failed = {path: state for path, state in DONE.items() if path != "last"}
    failed |= {"other": NodeState.FAILED, "both.b": NodeState.CANCELLED, "both": NodeState.FAILED}
    assert again("short", failed) == {"short", "other", "both", "both.b", "last"}


def test_cancelled_branch_of_a_reused_parallel_node_stays_cancelled() -> None:
    assert again("other", DONE | {"both.b": NodeState.CANCELLED}) == {"other", "last"}


def test_nodes_whose_effects_were_undone_run_again_with_their_dependents() -> None:
    numbers = {step.path: step.number for step in GRAPH.steps}
    found = rerun(GRAPH, cursor(DONE), OLD, numbers["other"], {numbers["both.a"], numbers["big"]})
    assert {GRAPH.steps[number].path for number in found.again} == {
        *("other", "both", "both.a", "big", "short", "long", "last")
    }


WITH_TOKEN = {"all", "all.mail", "first", "early"}


@pytest.mark.parametrize(
    ("link", "path", "expected"),
    [
        ("${tokens.paid}", "paid", {*WITH_TOKEN, "paid", "sent"}),
        ("Pay at ${'x/' + tokens.paid}", "paid", {*WITH_TOKEN, "paid", "sent"}),
        ("${tokens.paid}", "sent", {"sent"}),
        ("${tokens.paid}", "other", {"other"}),
        # It may be the token of any wait.
        ("${tokens[input.name]}", "other", {*WITH_TOKEN, "other"}),
    ],
)
def test_nodes_that_use_a_waits_token_run_again_when_the_wait_does(link: str, path: str, expected: set[str]) -> None:
    mail = {"kind": "tool", "tool": "work", "arguments": {"link": link}}
    nodes = {
        "first": {"kind": "wait", "event": "first", "after": ["all"]},
        "all": {"kind": "parallel", "branches": {"mail": mail, "look": {"kind": "tool", "tool": "look"}}},
        "early": {"kind": "tool", "tool": "work", "arguments": {"link": "${tokens.first}"}},
        "skipped": mail,
        "paid": {"kind": "wait", "event": "paid"},
        "other": {"kind": "wait", "event": "other"},
        "sent": {"kind": "wait", "event": "sent", "after": ["paid"]},
    }
    graph = graphs.of_definition(parsing.read({"name": "w", "nodes": nodes}))
    states = {step.path: NodeState.SUCCEEDED for step in graph.steps} | {"skipped": NodeState.SKIPPED}
    found = rerun(graph, cursor(states, graph), OLD, {step.path: step.number for step in graph.steps}[path])
    assert {graph.steps[number].path for number in found.again} == expected


def test_reused_nodes_name_the_run_that_made_their_calls() -> None:
    number = next(step.number for step in GRAPH.steps if step.path == "last")
    second = rerun(GRAPH, cursor(DONE), OLD, number).start
    third = rerun(GRAPH, second, RunId("run_second"), number).start
    first = GRAPH.step("first")
    assert first is not None
    for found, expected in ((second, OLD), (third, OLD)):
        record = found.nodes[first.number]
        assert found.run_id(record, RunId("run_new")) == expected
        assert (record.start_ms, record.end_ms, found.start_time) == (0, 0, 0.0)


@given(st.dictionaries(st.sampled_from([step.path for step in GRAPH.steps]), st.sampled_from(NodeState)), st.data())
def test_reused_nodes_depend_only_on_reused_nodes(states: dict[str, NodeState], data: st.DataObject) -> None:
    number = data.draw(st.integers(0, len(GRAPH.steps) - 1))
    found = rerun(GRAPH, cursor(states), OLD, number)
    assert number in found.again
    for kept, record in found.start.nodes.items():
        step = GRAPH.steps[kept]
        sources = {source for source, _ in step.control} | set(step.others)
        assert not sources & found.again
        assert step.parent is None or not (step.parent in found.again and record.state not in _REUSABLE)


_REUSABLE = {NodeState.SUCCEEDED, NodeState.SKIPPED}


def test_stored_cursor_is_bounded() -> None:
    """200 nodes take less than 16 KiB, and 100 waiting events less than 8 KiB, with values of any size."""
    chance = random.Random(1)

    def word(length: int) -> str:
        return "".join(chance.choices("abcdefghijklmnopqrstuvwxyz_", k=length))

    cursor = WorkflowCursor(start_time=1_700_000_000.5)
    for number in range(NODES_MAX):
        record = NodeRecord(
            state=NodeState.RUNNING,
            iteration=chance.randrange(1, 1000),
            attempt=chance.randrange(1, 20),
            start_ms=chance.randrange(YEAR_SECONDS * 1000),
            event=chance.randrange(100),
        )
        cursor = cursor.with_nodes({number: failed(record, chance.randrange(YEAR_SECONDS * 1000), word(24), word(500))})
    sizes = []
    for events in ((), tuple((word(128), number) for number in range(100))):
        state = LoopState(cursor=replace(cursor, events=events))
        assert loop_state.read(loop_state.write(state)) == state
        sizes.append(len(loop_state.write(state)))
    assert sizes[0] < 16 * 1024
    assert sizes[1] < 24 * 1024
    assert cursor.nodes[0].message
    assert cursor.nodes[NODES_MAX - 1].message == "..."


def test_reruns_of_reruns_keep_only_the_runs_that_they_reuse() -> None:
    cursor = WorkflowCursor(nodes={0: NodeRecord(state=NodeState.SUCCEEDED), 1: NodeRecord(state=NodeState.SUCCEEDED)})
    first = cursor.reused({0}, RunId("run_1"))
    for number in range(2, 50):
        first = first.with_nodes({1: NodeRecord(state=NodeState.SUCCEEDED)}).reused({0, 1}, RunId(f"run_{number}"))
    assert first.origins == ("run_49", "run_1")
    assert [first.run_id(first.nodes[number], RunId("own")) for number in (0, 1)] == ["run_1", "run_49"]
