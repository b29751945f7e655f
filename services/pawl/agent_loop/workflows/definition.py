"""Workflow definitions: their nodes, and the edges between them.

A definition is a JSON document. Its strings are templates; see `expressions`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from pawl.agent_loop.workflows import expressions
from pawl.chassis.ids import DEFAULT_AGENT

BYTES_MAX: Final = 256 * 1024
NODES_MAX: Final = 200
DEPTH_MAX: Final = 8
ITEMS_MAX: Final = 100_000
YEAR_SECONDS: Final = 365 * 86_400

Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$")]
ToolName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
NodeName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
EventName: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
Text: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64_000)]
Seconds: TypeAlias = Annotated[int, Meta(ge=1, le=YEAR_SECONDS)] | Annotated[float, Meta(ge=0.1, le=YEAR_SECONDS)]
Concurrency: TypeAlias = Annotated[int, Meta(ge=1, le=50)]
Quorum: TypeAlias = Literal["all", "any"] | Annotated[int, Meta(ge=1, le=NODES_MAX)]
EdgeKind: TypeAlias = Literal["after", "then", "else", "go_to", "reference"]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class NodeRetry(_Part, frozen=True, kw_only=True):
    """Attempts in all, and the delay before the second one, which grows by `factor` up to an hour."""

    attempts: Annotated[int, Meta(ge=1, le=20)]
    delay_seconds: Annotated[int, Meta(ge=0, le=86_400)] | Annotated[float, Meta(ge=0, le=86_400)] = 1
    factor: Annotated[int, Meta(ge=1, le=10)] | Annotated[float, Meta(ge=1, le=10)] = 2


class Repeat(_Part, frozen=True, kw_only=True):
    """Runs the node again until the expression is true, at most `max` times in all."""

    until: Text
    max: Annotated[int, Meta(ge=1, le=1000)] = 20


class GoTo(_Part, frozen=True, kw_only=True):
    """Continue with this node, which otherwise does not run."""

    go_to: NodeName


class Respondent(_Part, frozen=True, kw_only=True):
    """One user who answers. The id is a template."""

    user: Text


class Node(_Part, frozen=True, kw_only=True, tag_field="kind"):
    """Fields of every node. A node in a branch or a map has none of them set."""

    after: tuple[NodeName, ...] = ()
    join: Quorum = "all"
    on_error: Literal["fail", "continue", "undo"] | GoTo = "fail"


class TimedNode(Node, frozen=True, kw_only=True):
    # Limit for one attempt.
    timeout_seconds: Seconds | None = None


class CallNode(TimedNode, frozen=True, kw_only=True):
    retry: NodeRetry | None = None
    repeat: Repeat | None = None


class ToolNode(CallNode, frozen=True, kw_only=True, tag="tool"):
    """Calls a tool as the run's user. Its output is the result."""

    tool: ToolName
    # A string must be one expression, whose value is an object.
    arguments: dict[str, Any] | str = {}


class AgentNode(CallNode, frozen=True, kw_only=True, tag="agent"):
    """Runs an agent. Its output is the answer's text, or with `output_schema` the answer's JSON."""

    agent: Name = DEFAULT_AGENT
    task: Text
    instructions: str = ""
    # Fewer tools than the agent has; None for all of them.
    tools: tuple[ToolName, ...] | None = None
    output_schema: dict[str, Any] | None = None
    # Whether to wait for the background jobs that the agent started.
    jobs: Literal["wait", "leave"] = "wait"


class HumanNode(CallNode, frozen=True, kw_only=True, tag="human"):
    """Asks a person. Its output is the answer; for an approval true, and a rejection fails the node."""

    question: Text
    options: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=400)], ...], Meta(max_length=20)] = ()
    form: Literal["question", "approval"] = "question"
    who: Literal["user", "approvers"] | Respondent = "user"
    deadline_seconds: Seconds | None = None
    # The output if nobody answers by the deadline; without it, the node fails with EXPIRED.
    default: Any | UnsetType = UNSET


class ConditionNode(Node, frozen=True, kw_only=True, tag="condition"):
    """Continues with the nodes of one side. Its output is whether the expression is true."""

    if_: Text = field(name="if")
    then: tuple[NodeName, ...] = ()
    else_: tuple[NodeName, ...] = field(name="else", default=())


class ParallelNode(TimedNode, frozen=True, kw_only=True, tag="parallel"):
    """Runs its branches at the same time. Its output is an object with the output of each branch that succeeded."""

    branches: Annotated[dict[NodeName, AnyNode], Meta(min_length=1)]
    # How many branches must succeed. The others are then cancelled.
    require: Quorum = "all"


class MapNode(TimedNode, frozen=True, kw_only=True, tag="map"):
    """Runs a node for each item of a list. Its output is the list of outputs, null for a tolerated failure."""

    # A string must be one expression, whose value is a list.
    items: str | list[Any]
    as_: NodeName = field(name="as", default="item")
    concurrency: Concurrency = 8
    # Failures that do not fail the map: a number, or a percentage of the items.
    tolerate: Annotated[int, Meta(ge=0, le=ITEMS_MAX)] | Annotated[str, Meta(pattern=r"^(100|[0-9]{1,2})%$")] = 0
    do: ToolNode | AgentNode | HumanNode | WorkflowNode


class WorkflowNode(CallNode, frozen=True, kw_only=True, tag="workflow"):
    """Runs another workflow. Its output is that workflow's output."""

    workflow: Name
    # 0 for the newest version when the node starts.
    version: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    # A string must be one expression, whose value is an object.
    input: dict[str, Any] | str = {}


class WaitNode(TimedNode, frozen=True, kw_only=True, tag="wait"):
    """Waits for some time, until a time, or for an event, whose payload is the output. Exactly one of these is set."""

    seconds: Seconds | None = None
    # A time in RFC 3339, or in seconds since 1970.
    until: str = ""
    event: EventName | None = None


class OutputNode(Node, frozen=True, kw_only=True, tag="output"):
    """Sets the output of the run."""

    value: Any


AnyNode: TypeAlias = (
    ToolNode | AgentNode | HumanNode | ConditionNode | ParallelNode | MapNode | WorkflowNode | WaitNode | OutputNode
)


class WorkflowDefinition(_Part, frozen=True, kw_only=True):
    name: Name
    description: Annotated[str, Meta(max_length=2000)] = ""
    # A JSON Schema of an object; use `input_schema`.
    input: dict[str, Any] = {}
    # Calls that are open at the same time. A map counts as one call, and a parallel node as its branches.
    concurrency: Concurrency = 10
    # Limit for the whole run.
    timeout_seconds: Seconds | None = None
    as_tool: bool = False
    nodes: Annotated[dict[NodeName, AnyNode], Meta(min_length=1)]

    @property
    def input_schema(self) -> dict[str, Any]:
        return {"type": "object", **self.input}


class Edge(NamedTuple):
    source: str
    target: str
    kind: EdgeKind


class Incoming(NamedTuple):
    """How a node starts: when its join over `control` allows it, and all sources in `others` have ended.

    `others` are references, unless the node has only references: then these are its control edges.
    """

    control: tuple[Edge, ...]
    others: tuple[Edge, ...]


# Fields whose strings are templates.
_TEMPLATES: Final[dict[type[Node], tuple[str, ...]]] = {
    ToolNode: ("arguments",),
    AgentNode: ("task", "instructions"),
    HumanNode: ("question", "default"),
    ConditionNode: ("if_",),
    ParallelNode: (),
    MapNode: ("items",),
    WorkflowNode: ("input",),
    WaitNode: ("until",),
    OutputNode: ("value",),
}
# The kind that remains if two nodes have several edges.
_PRECEDENCE: Final[dict[EdgeKind, int]] = {"go_to": 0, "then": 1, "else": 2, "after": 3, "reference": 4}
_decode: Final = msgspec.json.Decoder(WorkflowDefinition).decode
_encode: Final = msgspec.json.Encoder(order="sorted").encode


def decode(data: bytes) -> WorkflowDefinition:
    """Read a definition that was saved. Use `parsing.parse` for one that was not."""
    return _decode(data)


def encode(definition: WorkflowDefinition) -> bytes:
    """Return the canonical JSON of a definition: keys are sorted, and defaults are left out."""
    return _encode(definition)


def below(node: AnyNode) -> Mapping[str, AnyNode]:
    """Return the nodes inside a node, by their path in the document."""
    match node:
        case ParallelNode():
            return {f"branches.{name}": branch for name, branch in node.branches.items()}
        case MapNode():
            return {"do": node.do}
        case _:
            return {}


def templates(node: AnyNode) -> dict[str, Any]:
    """Return the values of a node that may contain expressions, by their path, without the nodes inside it."""
    found = {name.rstrip("_"): getattr(node, name) for name in _TEMPLATES[type(node)]}
    if isinstance(node, HumanNode) and isinstance(node.who, Respondent):
        found["who.user"] = node.who.user
    if isinstance(node, CallNode) and node.repeat is not None:
        found["repeat.until"] = node.repeat.until
    return {path: value for path, value in found.items() if value is not UNSET}


def references(node: AnyNode) -> frozenset[str]:
    """Return the names of all nodes that a node and the nodes inside it read."""
    found = expressions.references(templates(node))
    return found.union(*(references(each) for each in below(node).values()))


def edges(definition: WorkflowDefinition) -> tuple[Edge, ...]:
    """Return the edges, at most one from one node to another. Names that do not exist have no edges.

    The edges of `then`, `else` and `go_to` come before `after` and references, because they may be inactive when the
    others are active.
    """
    found: dict[tuple[str, str], EdgeKind] = {}
    for source, target, kind in sorted(_all_edges(definition), key=lambda edge: _PRECEDENCE[edge.kind]):
        if source in definition.nodes and target in definition.nodes:
            found.setdefault((source, target), kind)
    return tuple(Edge(source, target, kind) for (source, target), kind in sorted(found.items()))


def incoming(definition: WorkflowDefinition) -> dict[str, Incoming]:
    """Return how each node starts. A node without edges starts immediately."""
    found: dict[str, list[Edge]] = {name: [] for name in definition.nodes}
    for edge in edges(definition):
        found[edge.target].append(edge)
    return {name: _incoming(tuple(each)) for name, each in found.items()}


def order(definition: WorkflowDefinition) -> tuple[str, ...]:
    """Return the nodes in topological order, then by name. Nodes on a cycle and behind it are left out."""
    found = edges(definition)
    open_count = dict.fromkeys(definition.nodes, 0)
    after: dict[str, list[str]] = {name: [] for name in definition.nodes}
    for edge in found:
        open_count[edge.target] += 1
        after[edge.source].append(edge.target)
    ready = sorted(name for name, count in open_count.items() if not count)
    ordered = []
    while ready:
        name = heapq.heappop(ready)
        ordered.append(name)
        for target in after[name]:
            open_count[target] -= 1
            if not open_count[target]:
                heapq.heappush(ready, target)
    return tuple(ordered)


def _all_edges(definition: WorkflowDefinition) -> Iterator[Edge]:
    for name, node in definition.nodes.items():
        yield from (Edge(source, name, "after") for source in node.after)
        yield from (Edge(source, name, "reference") for source in references(node))
        if isinstance(node.on_error, GoTo):
            yield Edge(name, node.on_error.go_to, "go_to")
        if isinstance(node, ConditionNode):
            yield from (Edge(name, target, "then") for target in node.then)
            yield from (Edge(name, target, "else") for target in node.else_)


def _incoming(found: tuple[Edge, ...]) -> Incoming:
    control = tuple(edge for edge in found if edge.kind != "reference")
    if not control:
        return Incoming(found, ())
    return Incoming(control, tuple(edge for edge in found if edge.kind == "reference"))
