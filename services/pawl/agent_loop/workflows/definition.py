"""The parts of a workflow definition.

A definition is a JSON document. Its strings are templates (see `expressions`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Final, Literal, TypeAlias

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from pawl.chassis.ids import DEFAULT_AGENT

BYTES_MAX: Final = 256 * 1024
# Limit for the input of a run.
INPUT_BYTES_MAX: Final = 256 * 1024
NODES_MAX: Final = 200
DEPTH_MAX: Final = 8
ITEMS_MAX: Final = 100_000
YEAR_SECONDS: Final = 365 * 86_400

_NAME: Final = "a letter followed by up to 63 letters, digits, _ and -"
_NODE_NAME: Final = "a lower-case letter followed by up to 39 lower-case letters, digits and _"

Name: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z][A-Za-z0-9_-]{0,63}$", description=_NAME)]
ToolName: TypeAlias = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,64}$", description="1 to 64 letters, digits, _, - and .")
]
NodeName: TypeAlias = Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,39}$", description=_NODE_NAME)]
EventName: TypeAlias = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_.:-]{1,128}$", description="1 to 128 letters, digits, _, -, . and :")
]
Text: TypeAlias = Annotated[str, Meta(min_length=1, max_length=64_000)]
Seconds: TypeAlias = Annotated[int, Meta(ge=1, le=YEAR_SECONDS)] | Annotated[float, Meta(ge=0.1, le=YEAR_SECONDS)]
Concurrency: TypeAlias = Annotated[int, Meta(ge=1, le=50)]
Percentage: TypeAlias = Annotated[str, Meta(pattern=r"^(100|[0-9]{1,2})%$", description="a percentage such as 10%")]
Quorum: TypeAlias = Literal["all", "any"] | Annotated[int, Meta(ge=1, le=NODES_MAX)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class NodeRetry(_Part, frozen=True, kw_only=True):
    """The retry policy of a node: the total number of attempts, and the delay before the second one.

    Each later delay is `factor` times longer, up to an hour.
    """

    attempts: Annotated[int, Meta(ge=1, le=20)]
    delay_seconds: Annotated[int, Meta(ge=0, le=86_400)] | Annotated[float, Meta(ge=0, le=86_400)] = 1
    factor: Annotated[int, Meta(ge=1, le=10)] | Annotated[float, Meta(ge=1, le=10)] = 2


class Repeat(_Part, frozen=True, kw_only=True):
    """Runs the node until the expression is true, but at most `max` times in total."""

    until: Text
    max: Annotated[int, Meta(ge=1, le=1000)] = 20


class GoTo(_Part, frozen=True, kw_only=True):
    """On failure, the run continues with this node, which otherwise does not run."""

    go_to: NodeName


class Node(_Part, frozen=True, kw_only=True, tag_field="kind"):
    """Fields that every node has. Nodes in a branch or a map set none of them."""

    after: tuple[NodeName, ...] = ()
    join: Quorum = "all"
    on_error: Literal["fail", "continue", "undo"] | GoTo = "fail"


class TimedNode(Node, frozen=True, kw_only=True):
    # Limit per attempt.
    timeout_seconds: Seconds | None = None


class CallNode(TimedNode, frozen=True, kw_only=True):
    retry: NodeRetry | None = None
    repeat: Repeat | None = None


class ToolNode(CallNode, frozen=True, kw_only=True, tag="tool"):
    """Calls a tool as the run's user. Its output is the result."""

    tool: ToolName
    # A string must be one expression that returns an object.
    arguments: dict[str, Any] | str = {}


class AgentNode(CallNode, frozen=True, kw_only=True, tag="agent"):
    """Runs an agent. Its output is the answer: text, or JSON if `output_schema` is set."""

    agent: Name = DEFAULT_AGENT
    task: Text
    instructions: str = ""
    # The agent's tools that the node may use; None for all of them.
    tools: tuple[ToolName, ...] | None = None
    output_schema: dict[str, Any] | None = None
    # Whether to wait for the background jobs that the agent started.
    jobs: Literal["wait", "leave"] = "wait"


class NamedUser(_Part, frozen=True, kw_only=True):
    user: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class HumanNode(CallNode, frozen=True, kw_only=True, tag="human"):
    """Asks a person. Its output is the answer, or true for an approval. A rejection fails the node.

    Only the people in `who` can answer: the run's user, a named user of the store, or its approvers.
    """

    question: Text
    options: Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=400)], ...], Meta(max_length=20)] = ()
    form: Literal["question", "approval"] = "question"
    who: Literal["user", "approvers"] | NamedUser = "user"
    deadline_seconds: Seconds | None = None
    # The output if there is no answer by the deadline; if not set, the node fails with EXPIRED.
    default: Any | UnsetType = UNSET


class ConditionNode(Node, frozen=True, kw_only=True, tag="condition"):
    """Continues with the nodes in `then` or `else`. Its output is the value of the expression."""

    if_: Text = field(name="if")
    then: tuple[NodeName, ...] = ()
    else_: tuple[NodeName, ...] = field(name="else", default=())


class ParallelNode(TimedNode, frozen=True, kw_only=True, tag="parallel"):
    """Runs its branches at the same time. Its output is an object with the output of each branch that succeeded."""

    branches: Annotated[dict[NodeName, AnyNode], Meta(min_length=1)]
    # Number of branches that must succeed. The others are then cancelled.
    require: Quorum = "all"


class MapNode(TimedNode, frozen=True, kw_only=True, tag="map"):
    """Runs a node for each item of a list. Its output is the list of outputs, with null for a tolerated failure."""

    # A string must be one expression that returns a list.
    items: str | list[Any]
    as_: NodeName = field(name="as", default="item")
    concurrency: Concurrency = 8
    # Failures that do not fail the map: a number, or a percentage of the items.
    tolerate: Annotated[int, Meta(ge=0, le=ITEMS_MAX)] | Percentage = 0
    do: ToolNode | AgentNode | HumanNode | WorkflowNode


class WorkflowNode(CallNode, frozen=True, kw_only=True, tag="workflow"):
    """Runs another workflow. Its output is that workflow's output."""

    workflow: Name
    # 0 means the newest version when the node starts.
    version: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    # A string must be one expression that returns an object.
    input: dict[str, Any] | str = {}


class WaitNode(TimedNode, frozen=True, kw_only=True, tag="wait"):
    """Waits for a duration, until a time, or for an event. Exactly one of these is set.

    The output is the event's payload.
    """

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
    # Maximum number of calls that are open at the same time. A map counts as one call, and each branch as its own.
    concurrency: Concurrency = 10
    # Limit for the run.
    timeout_seconds: Seconds | None = None
    as_tool: bool = False
    nodes: Annotated[dict[NodeName, AnyNode], Meta(min_length=1)]

    @property
    def waits(self) -> frozenset[str]:
        """Nodes that wait for an event and are not inside a branch. Each has a token."""
        return frozenset(name for name, node in self.nodes.items() if isinstance(node, WaitNode) and node.event)

    @property
    def input_schema(self) -> dict[str, Any]:
        return {"type": "object", **self.input}


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
_decode: Final = msgspec.json.Decoder(WorkflowDefinition).decode
_encode: Final = msgspec.json.Encoder().encode


def decode(data: bytes) -> WorkflowDefinition:
    """Decode a saved definition. For all other definitions, use `parsing.parse`."""
    return _decode(data)


def encode(definition: WorkflowDefinition) -> bytes:
    """Return the JSON of a definition, without defaults. Nodes and arguments keep their order."""
    return _encode(definition)


def below(node: AnyNode) -> dict[str, AnyNode]:
    """Return the nodes inside a node, by their path in the document."""
    match node:
        case ParallelNode():
            return {f"branches.{name}": branch for name, branch in node.branches.items()}
        case MapNode():
            return {"do": node.do}
        case _:
            return {}


def walk(definition: WorkflowDefinition) -> Iterator[tuple[str, AnyNode]]:
    """Yield all nodes with their paths in the document. A node comes before the nodes inside it."""
    waiting = [(f"nodes.{name}", node) for name, node in reversed(definition.nodes.items())]
    while waiting:
        path, node = waiting.pop()
        yield path, node
        waiting += [(f"{path}.{name}", each) for name, each in reversed(below(node).items())]


def templates(node: AnyNode) -> dict[str, Any]:
    """Return a node's values that may contain expressions, by path. Exclude the nodes inside it."""
    found = {name.rstrip("_"): getattr(node, name) for name in _TEMPLATES[type(node)]}
    if isinstance(node, CallNode) and node.repeat is not None:
        found["repeat.until"] = node.repeat.until
    return {path: value for path, value in found.items() if value is not UNSET}
