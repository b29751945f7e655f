"""Random workflows for tests: definitions, the outcomes of their work, and the order in which it ends."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from hypothesis import assume
from hypothesis import strategies as st

from pawl.agent_loop.workflows import parsing
from pawl.agent_loop.workflows.expressions import DefinitionFault
from pawl.agent_loop.workflows.parsing import DefinitionError
from tests.unit.agent_loop.workflows.reference import Failed, Outcome, Succeeded, Work, edges_of

# The input of every random run.
GIVEN: Final = {"flag": True, "text": "hello", "items": [1, 2, 3]}
_CALLS: Final = ("tool", "tool", "tool", "agent", "human", "workflow")
_KINDS: Final = (*_CALLS, *_CALLS, "wait", "map", "map", "parallel", "parallel", "condition", "condition", "output")


@st.composite
def documents(draw: st.DrawFn, *, nodes_max: int = 10) -> dict[str, Any]:
    """Return a valid definition as a JSON document. Names are in no particular order."""
    names = draw(st.permutations([f"n{number}" for number in range(draw(st.integers(1, nodes_max)))]))
    nodes: dict[str, Any] = {}
    for position, name in enumerate(names):
        has_output = any(node["kind"] == "output" for node in nodes.values())
        kinds = [kind for kind in _KINDS if kind != "output" or not has_output]
        nodes[name] = _node(draw, draw(st.sampled_from(kinds)), names[:position], names[position + 1 :])
    _draw_joins(draw, nodes)
    document = {"name": "random", "concurrency": draw(st.integers(1, 4)), "nodes": nodes}
    # A node on one side of a condition must not read the other side. The rest is valid by construction.
    assume(not any("never runs" in fault.message for fault in _faults(document)))
    return document


class Luck(NamedTuple):
    """Decides the outcome of each attempt and the order of ends, depending only on the seed."""

    seed: int
    # Percentage of attempts that fail.
    failures: int

    def outcome(self, path: str, work: Work) -> Outcome:
        own = random.Random(f"{self.seed} {path} {work.iteration} {work.attempt}")
        if own.randrange(100) < self.failures:
            return own.choice([Failed("TOOL_ERROR", retryable=True), Failed("NOT_ALLOWED")])
        if work.kind == "map":
            return Succeeded([own.randrange(9) for _ in work.given])
        whole = {"flag": own.random() < 0.5, "text": own.choice("abc"), "items": [own.randrange(9)] * own.randrange(3)}
        return Succeeded(own.choice([whole, whole, whole, whole | {"flag": None}, {"flag": True}, "text", None]))

    def path(self, paths: list[str], step: int) -> str:
        """Return the piece of open work that ends next."""
        return random.Random(f"{self.seed} {step}").choice(paths)


def lucks() -> st.SearchStrategy[Luck]:
    return st.builds(Luck, st.integers(0, 2**32), st.sampled_from([0, 10, 40]))


def _faults(document: dict[str, Any]) -> Sequence[DefinitionFault]:
    try:
        parsing.read(document)
    except DefinitionError as error:
        return error.faults
    return ()


def _node(draw: st.DrawFn, kind: str, before: list[str], behind: list[str]) -> dict[str, Any]:
    node = _below(draw, kind, before, depth=1)
    if before:
        node["after"] = draw(st.lists(st.sampled_from(before), max_size=2, unique=True))
    on_error = draw(st.sampled_from(["fail", "undo", "continue", "continue", "go_to", "go_to"]))
    sides = draw(st.lists(st.sampled_from(behind), max_size=4, unique=True)) if behind else []
    if kind == "condition":
        middle = draw(st.integers(0, len(sides)))
        node |= {"then": sides[:middle], "else": sides[middle:]}
    if on_error != "go_to":
        node["on_error"] = on_error
    elif targets := [name for name in behind if kind != "condition" or name not in sides]:
        node["on_error"] = {"go_to": draw(st.sampled_from(targets))}
    return node


def _below(draw: st.DrawFn, kind: str, before: list[str], *, depth: int) -> dict[str, Any]:
    """Return a node without the fields that only nodes of the graph have."""
    path = draw(_paths(before))
    fields: dict[str, dict[str, Any]] = {
        "tool": {"tool": "look", "arguments": {"all": [path], "one": f"a {path}"}},
        "agent": {"task": f"Do {path}."},
        "human": {"question": f"Is {path} right?"},
        "workflow": {"workflow": "other", "input": {"text": path}},
        "wait": {"event": "paid"},
        "map": {"items": draw(_paths(before, ".items")), "do": {"kind": "tool", "tool": "look"}},
        "parallel": {},
        "condition": {"if": draw(_paths(before, ".flag"))},
        "output": {"value": path},
    }
    node = fields[kind]
    if kind in _CALLS and draw(st.booleans()):
        node["retry"] = {"attempts": draw(st.integers(1, 3)), "delay_seconds": 0}
    if kind in _CALLS and draw(st.integers(0, 3)) == 0:
        node["repeat"] = {"until": "${output.flag}", "max": draw(st.integers(1, 3))}
    if kind == "parallel":
        kinds = [each for each in _KINDS if each not in {"condition", "output"} and (each != "parallel" or depth < 3)]
        chosen = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=3))
        branches = {
            name: _below(draw, each, before, depth=depth + 1) for name, each in zip("abc", chosen, strict=False)
        }
        node |= {"branches": branches, "require": draw(st.sampled_from(["all", "any", *range(1, len(branches) + 1)]))}
    return {"kind": kind, **node}


@st.composite
def _paths(draw: st.DrawFn, before: list[str], field: str = "") -> str:
    fields = [field] * 4 if field else [".flag", ".text", ".items", ".missing"]
    own = draw(st.sampled_from([*fields, ".text"]))
    if not before or draw(st.booleans()):
        return f"${{input{own.replace('.missing', '.text')}}}"
    read = draw(st.sampled_from([".output" + own, ".output", ".state"]) if not field else st.just(".output" + own))
    return f"${{nodes.{draw(st.sampled_from(before))}{read}}}"


def _draw_joins(draw: st.DrawFn, nodes: dict[str, Any]) -> None:
    edges = edges_of(nodes)
    for name, node in nodes.items():
        kinds = [kind for (_, target), kind in edges.items() if target == name]
        count = sum(kind != "reference" for kind in kinds) or len(kinds)
        if count:
            node["join"] = draw(st.sampled_from(["all", "all", "all", "any", *range(1, count + 1)]))
