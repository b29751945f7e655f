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


def flowchart(definition: WorkflowDefinition) -> str:
    """Return the workflow as a Mermaid flowchart.

    The names of nodes, tools and so on do not contain characters that Mermaid would interpret.
    """
    lines = ["flowchart TD"]
    found = incoming(definition)
    # Names such as `end` are keywords of Mermaid.
    ids = {name: f"n{number}" for number, name in enumerate(order(found))}
    for name, node_id in ids.items():
        lines += _node(definition.nodes[name], name, node_id, "  ")
    lines += [f"  {ids[edge.source]} {_ARROWS[edge.kind]} {ids[edge.target]}" for edge in edges(found)]
    return "\n".join(lines) + "\n"


def _node(node: AnyNode, path: str, node_id: str, indent: str) -> Iterator[str]:
    label = "<br/>".join((path.rpartition(".")[2], _detail(node)))
    if isinstance(node, ParallelNode):
        yield f'{indent}subgraph {node_id} ["{label}"]'
        for number, (name, branch) in enumerate(sorted(node.branches.items())):
            yield from _node(branch, f"{path}.{name}", f"{node_id}_{number}", f"{indent}  ")
        yield f"{indent}end"
    else:
        before, after = _SHAPES.get(_kind(node), ("[", "]"))
        yield f'{indent}{node_id}{before}"{label}"{after}'


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
