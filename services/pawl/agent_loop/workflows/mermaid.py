"""Draws a workflow as a Mermaid flowchart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from pawl.agent_loop.workflows.definition import (
    AgentNode,
    AnyNode,
    MapNode,
    ParallelNode,
    ToolNode,
    WorkflowDefinition,
    WorkflowNode,
)
from pawl.agent_loop.workflows.edges import EdgeKind, edges, incoming, order

_SHAPES: Final = {
    "condition": ("{", "}"),
    "human": ("[/", "/]"),
    "map": ("[[", "]]"),
    "output": ("([", "])"),
    "wait": ("(", ")"),
}
_ARROWS: Final[Mapping[EdgeKind, str]] = {
    "after": "-->",
    "reference": "-->",
    "then": "-->|then|",
    "else": "-->|else|",
    "go_to": "-.->|on error|",
}
_COLOURS: Final = {
    "RUNNING": "fill:#dbeafe,stroke:#2563eb,color:#1e3a8a",
    "WAITING": "fill:#fef3c7,stroke:#d97706,color:#78350f",
    "SUCCEEDED": "fill:#dcfce7,stroke:#16a34a,color:#14532d",
    "FAILED": "fill:#fee2e2,stroke:#dc2626,color:#7f1d1d",
    "SKIPPED": "fill:#f3f4f6,stroke:#9ca3af,color:#6b7280,stroke-dasharray:4",
    "CANCELLED": "fill:#f3f4f6,stroke:#6b7280,color:#374151",
}


def flowchart(definition: WorkflowDefinition, states: Mapping[str, str] = {}) -> str:
    """Return the flowchart. `states` are the states of nodes and branches by path, such as `both.a`.

    Names of nodes, tools and so on contain no character that Mermaid would interpret.
    """
    lines = ["flowchart TD"]
    found = incoming(definition)
    # Names such as `end` are keywords of Mermaid.
    ids = {name: f"n{number}" for number, name in enumerate(order(found))}
    for name, node_id in ids.items():
        lines += _node(definition.nodes[name], name, node_id, states, "  ")
    lines += [f"  {ids[edge.source]} {_ARROWS[edge.kind]} {ids[edge.target]}" for edge in edges(found)]
    used = sorted(_COLOURS.keys() & states.values())
    return "\n".join([*lines, *(f"  classDef {state} {_COLOURS[state]}" for state in used)]) + "\n"


def _node(node: AnyNode, path: str, node_id: str, states: Mapping[str, str], indent: str) -> Iterator[str]:
    state = states.get(path, "")
    label = "<br/>".join(filter(None, (path.rpartition(".")[2], _detail(node), state.lower())))
    if isinstance(node, ParallelNode):
        yield f'{indent}subgraph {node_id} ["{label}"]'
        for number, (name, branch) in enumerate(sorted(node.branches.items())):
            yield from _node(branch, f"{path}.{name}", f"{node_id}_{number}", states, f"{indent}  ")
        yield f"{indent}end"
    else:
        before, after = _SHAPES.get(_kind(node), ("[", "]"))
        yield f'{indent}{node_id}{before}"{label}"{after}'
    if state in _COLOURS:
        yield f"{indent}class {node_id} {state}"


def _detail(node: AnyNode) -> str:
    match node:
        case ToolNode():
            return f"tool {node.tool}"
        case AgentNode():
            return f"agent {node.agent}"
        case WorkflowNode():
            return f"workflow {node.workflow}"
        case MapNode():
            return f"map: {_detail(node.do)}"
        case ParallelNode():
            return f"parallel: {node.require}"
        case _:
            return _kind(node)


def _kind(node: AnyNode) -> str:
    return str(node.__struct_config__.tag)
