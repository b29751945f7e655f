"""Validates the semantics of definitions, and reports all faults together."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from graphlib import CycleError
from typing import Any, Final

from msgspec import UNSET

from pawl.agent_loop.loop.rules.expression import ExpressionError
from pawl.agent_loop.workflows import expressions, values
from pawl.agent_loop.workflows.definition import (
    DEPTH_MAX,
    NODES_MAX,
    AnyNode,
    ConditionNode,
    GoTo,
    HumanNode,
    MapNode,
    Node,
    OutputNode,
    ParallelNode,
    WaitNode,
    WorkflowDefinition,
    WorkflowNode,
    below,
    templates,
    walk,
)
from pawl.agent_loop.workflows.edges import Incoming, incoming, order
from pawl.agent_loop.workflows.expressions import DefinitionFault, Names, near
from pawl.tools.rules.schema import near_matches

EXPRESSIONS_MAX: Final = 1000

_RUN: Final = frozenset({"id", "user"})
_NO_FIELDS: Final = frozenset[str]()
# Values that must be exactly one expression, with the CEL types that it may have.
_CONDITIONS: Final = frozenset({"BOOL", "DYN"})
_WHOLE: Final[Mapping[str, frozenset[str]]] = {
    "if": _CONDITIONS,
    "repeat.until": _CONDITIONS,
    "items": frozenset({"LIST", "DYN"}),
    "arguments": frozenset({"MAP", "DYN"}),
    "input": frozenset({"MAP", "DYN"}),
}
_TYPES: Final[Mapping[str, str]] = {
    "BOOL": "true or false",
    "LIST": "a list",
    "MAP": "an object",
    "STRING": "text",
    **dict.fromkeys(("INT", "UINT", "DOUBLE"), "a number"),
}
# Names with a meaning in expressions.
_RESERVED: Final = frozenset({"input", "nodes", "run", "output", "iteration", "index", "tokens"})


def faults(definition: WorkflowDefinition, *, names: frozenset[str]) -> list[DefinitionFault]:
    """Return all faults. `names` contains all nodes, including those that could not be parsed."""
    nodes = tuple(walk(definition))
    count = sum(expressions.count(templates(node)) for _, node in nodes)
    if len(nodes) > NODES_MAX:
        return [DefinitionFault("nodes", f"{len(nodes)} nodes, over the limit of {NODES_MAX}", _SPLIT)]
    if count > EXPRESSIONS_MAX:
        return [DefinitionFault("nodes", f"{count} expressions, over the limit of {EXPRESSIONS_MAX}", _SPLIT)]
    edges = incoming(definition)
    found = [*_of_whole(definition, names), *_cycles(edges), *_joins(edges, definition), *_sides(edges)]
    scope: dict[str, frozenset[str] | None] = {"input": _inputs(definition), "nodes": names, "run": _RUN}
    if definition.waits:
        scope["tokens"] = definition.waits
    for name, node in definition.nodes.items():
        found += [*_targets(node, names, f"nodes.{name}"), *_of_expressions(node, scope, f"nodes.{name}")]
        found += _inside(node, f"nodes.{name}", depth=1)
    for path, node in nodes:
        found += _of_node(node, definition, path)
    return found


_SPLIT: Final = "move a part to another workflow"


def arguments_faults(arguments: Mapping[str, Any] | str, schema: Mapping[str, Any], path: str) -> list[DefinitionFault]:
    """Return the missing and unknown arguments of a tool, or the missing and unknown input fields of a workflow."""
    properties = schema.get("properties")
    if isinstance(arguments, str) or not isinstance(properties, Mapping):
        return []
    # The registry fills in defaults.
    filled = {name for name, each in properties.items() if isinstance(each, Mapping) and "default" in each}
    missing = [name for name in schema.get("required", ()) if name not in arguments and name not in filled]
    unknown = [name for name in arguments if name not in properties]
    found = []
    for name in missing:
        similar = near_matches(name, unknown, most=1)
        found.append(DefinitionFault(f"{path}.{name}", "is required", f"rename {similar[0]!r}" if similar else ""))
    if schema.get("additionalProperties") is False:
        found += [DefinitionFault(f"{path}.{name}", "unknown argument", near(name, properties)) for name in unknown]
    return found


def _of_whole(definition: WorkflowDefinition, names: frozenset[str]) -> Iterator[DefinitionFault]:
    if definition.as_tool and not definition.description.strip():
        yield DefinitionFault("description", "is required for a tool", "models read it")
    outputs = sorted(name for name, node in definition.nodes.items() if isinstance(node, OutputNode))
    if len(outputs) > 1:
        yield DefinitionFault(f"nodes.{outputs[1]}", "is a second output", f"the output is {outputs[0]}")
    yield from (
        DefinitionFault(f"nodes.{name}", f"the name {name} is reserved")
        for name in sorted(names)
        # Names of any other form are already reported as malformed.
        if name.isidentifier() and not expressions.is_name(name)
    )


def _targets(node: Node, names: frozenset[str], path: str) -> Iterator[DefinitionFault]:
    """Yield the faults of a node's references outside expressions, such as missing or repeated targets."""
    lists: dict[str, tuple[str, ...]] = {"after": node.after}
    if isinstance(node, ConditionNode):
        lists |= {"then": node.then, "else": node.else_}
    if isinstance(node.on_error, GoTo):
        lists["on_error.go_to"] = (node.on_error.go_to,)
    for field, targets in lists.items():
        seen = set[str]()
        for index, name in enumerate(targets):
            where = f"{path}.{field}" if field == "on_error.go_to" else f"{path}.{field}[{index}]"
            if name not in names:
                yield DefinitionFault(where, f"there is no node {name!r}", near(name, names - {path.partition(".")[2]}))
            if name in seen:
                yield DefinitionFault(where, f"{name!r} is listed twice")
            seen.add(name)
    if isinstance(node, ConditionNode):
        yield from _of_condition(node, path)


def _of_condition(node: ConditionNode, path: str) -> Iterator[DefinitionFault]:
    for name in sorted({*node.then} & {*node.else_}):
        yield DefinitionFault(f"{path}.else", f"{name!r} is in both then and else", f"set after of {name} instead")
    if isinstance(node.on_error, GoTo) and node.on_error.go_to in {*node.then, *node.else_}:
        yield DefinitionFault(f"{path}.on_error.go_to", f"{node.on_error.go_to!r} is also in then or else")


def _inside(node: AnyNode, path: str, *, depth: int) -> Iterator[DefinitionFault]:
    """Check the nodes inside a node."""
    for name, each in below(node).items():
        where = f"{path}.{name}"
        if depth >= DEPTH_MAX:
            yield DefinitionFault(where, f"is nested deeper than {DEPTH_MAX} levels", _SPLIT)
            return
        if isinstance(each, ConditionNode | OutputNode):
            yield DefinitionFault(f"{where}.kind", f"a branch must not be of kind {each.__struct_config__.tag}")
        for field, default in (("after", ()), ("join", "all"), ("on_error", "fail")):
            if getattr(each, field) != default:
                yield DefinitionFault(f"{where}.{field}", "is not allowed here", f"set it for {path}")
        yield from _inside(each, where, depth=depth + 1)


def _of_node(node: AnyNode, definition: WorkflowDefinition, path: str) -> Iterator[DefinitionFault]:
    match node:
        case HumanNode():
            yield from _of_human(node, path)
        case ParallelNode(require=int(needed)) if needed > len(node.branches):
            yield DefinitionFault(f"{path}.require", f"must be at most {len(node.branches)}, got {needed}")
        case MapNode() if node.as_ in _RESERVED or not expressions.is_name(node.as_):
            yield DefinitionFault(f"{path}.as", f"the name {node.as_!r} is reserved")
        case WorkflowNode() if node.workflow == definition.name:
            yield DefinitionFault(f"{path}.workflow", "a workflow must not start itself")
        case WaitNode():
            given = [name for name in ("seconds", "until", "event") if getattr(node, name)]
            if len(given) != 1:
                hint = f"got {' and '.join(given) or 'none of them'}"
                yield DefinitionFault(path, "a wait must have one of seconds, until and event", hint)
            elif node.timeout_seconds is not None and not node.event:
                yield DefinitionFault(f"{path}.timeout_seconds", "is not allowed without event")
            elif node.until and "${" not in node.until:
                yield from _of_time(node.until, f"{path}.until")
        case _:
            pass


def _of_time(text: str, path: str) -> Iterator[DefinitionFault]:
    try:
        values.time_of(text)
    except ExpressionError:
        hint = "write a time such as 2030-01-31T09:00:00Z, or an expression"
        yield DefinitionFault(path, f"must be a time with a zone, got {text!r:.60}", hint)


def _of_human(node: HumanNode, path: str) -> Iterator[DefinitionFault]:
    is_approval = node.form == "approval"
    if node.who == "approvers" and not is_approval:
        yield DefinitionFault(f"{path}.who", "only approvals can be sent to approvers", "set form: approval")
    if node.options and is_approval:
        yield DefinitionFault(f"{path}.options", "an approval has no options", "set form: question")
    if len(set(node.options)) < len(node.options):
        yield DefinitionFault(f"{path}.options", "an option is listed twice")
    if node.default is not UNSET and node.deadline_seconds is None:
        yield DefinitionFault(f"{path}.default", "requires a deadline", "set deadline_seconds")


def _of_expressions(node: AnyNode, scope: dict[str, frozenset[str] | None], path: str) -> Iterator[DefinitionFault]:
    for field, value in templates(node).items():
        where = f"{path}.{field}"
        names: Names = {**scope, "output": None, "iteration": _NO_FIELDS} if field == "repeat.until" else scope
        if field in _WHOLE and isinstance(value, str) and not expressions.is_expression(value):
            yield DefinitionFault(where, f"must be exactly one expression, got {value!r:.60}", "write ${...}")
            continue
        found = expressions.check(value, names, where)
        yield from found
        if field in _WHOLE and isinstance(value, str) and not found:
            kind = expressions.result_type(value, names)
            if kind not in _WHOLE[field]:
                wanted = _TYPES[min(_WHOLE[field] - {"DYN"})]
                given = _TYPES.get(kind, kind.lower())
                yield DefinitionFault(where, f"the expression must return {wanted}, but returns {given}")
    inner = scope
    if isinstance(node, MapNode):
        # Its items run in other runs, without the tokens of this one.
        inner = {**scope, node.as_: None, "index": _NO_FIELDS}
        inner.pop("tokens", None)
    for name, each in below(node).items():
        yield from _of_expressions(each, inner, f"{path}.{name}")


def _inputs(definition: WorkflowDefinition) -> frozenset[str] | None:
    """Return the fields of `input`, or None if its schema does not list all of them."""
    properties: Any = definition.input.get("properties")
    is_open = definition.input.get("additionalProperties", False)
    is_open = is_open or not {"patternProperties", "allOf", "anyOf", "oneOf", "$ref"}.isdisjoint(definition.input)
    return None if is_open or not isinstance(properties, dict) else frozenset(properties)


def _joins(found: Mapping[str, Incoming], definition: WorkflowDefinition) -> Iterator[DefinitionFault]:
    for name, edges in found.items():
        join = definition.nodes[name].join
        if join != "all" and not edges.control:
            yield DefinitionFault(f"nodes.{name}.join", "has no effect: no node comes before this one", "set after")
        elif isinstance(join, int) and join > len(edges.control):
            message = f"must be at most {len(edges.control)}, the number of control edges, got {join}"
            yield DefinitionFault(f"nodes.{name}.join", message, "those are the edges of after, then, else and go_to")


def _sides(found: Mapping[str, Incoming]) -> Iterator[DefinitionFault]:
    """Yield a fault for each node on one side of a condition that uses a node on the other. Only one side ever runs."""
    # The condition and side of each node with no other control edge.
    sides = {
        name: edge
        for name, edges in found.items()
        if len(edges.control) == 1 and (edge := next(iter(edges.control.items())))[1] in {"then", "else"}
    }
    for name, (condition, side) in sides.items():
        for source in found[name].others:
            if source in sides and sides[source] == (condition, "else" if side == "then" else "then"):
                yield DefinitionFault(
                    f"nodes.{name}",
                    f"reads nodes.{source}, which never runs when this node does",
                    f"remove {name} from {side} of {condition}, or add after: [{source}]",
                )


def _cycles(found: Mapping[str, Incoming]) -> Iterator[DefinitionFault]:
    """Report cycles of nodes. No node appears in two reported cycles."""
    while True:
        try:
            order(found)
        except CycleError as error:
            cycle = error.args[1][:-1]
            first = cycle.index(min(cycle))
            shown = [*cycle[first:], *cycle[: first + 1]]
            yield DefinitionFault(f"nodes.{shown[0]}", f"needs itself: {' -> '.join(shown)}", "use repeat for a loop")
            found = {name: _without(edges, cycle) for name, edges in found.items() if name not in cycle}
        else:
            return


def _without(edges: Incoming, names: Collection[str]) -> Incoming:
    control = {source: kind for source, kind in edges.control.items() if source not in names}
    return Incoming(control, tuple(source for source in edges.others if source not in names))
