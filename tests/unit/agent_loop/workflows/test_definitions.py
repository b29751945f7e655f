"""Definitions: all faults at once, each with its path and a hint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import yaml

from pawl.agent_loop.workflows import definition, parsing, validation
from pawl.agent_loop.workflows.mermaid import flowchart
from pawl.agent_loop.workflows.parsing import DefinitionError
from pawl.agent_loop.workflows.schema import SCHEMA_JSON
from tests.tables import for_each

TOOL = {"kind": "tool", "tool": "look"}
# The example of the documentation.
TRIAGE = """
name: triage
description: Sort a ticket.
input: {type: object, properties: {ticket: {type: string}}, required: [ticket]}
concurrency: 10
timeout_seconds: 86400
nodes:
  fetch: {kind: tool, tool: get_ticket, arguments: {id: "${input.ticket}"}, retry: {attempts: 3, delay_seconds: 5}}
  big: {kind: condition, if: "${size(nodes.fetch.output.text) > 1000}", then: [shorten]}
  shorten: {kind: agent, agent: writer, task: "Shorten: ${nodes.fetch.output.text}", jobs: leave}
  check:
    kind: human
    question: Send ${nodes.shorten.output}?
    options: ["yes", "no"]
    deadline_seconds: 3600
    default: "no"
    on_error: {go_to: late}
  late: {kind: tool, tool: warn, arguments: {why: "${nodes.check.error.reason}"}}
  both: {kind: parallel, branches: {a: {kind: wait, seconds: 60}, b: {kind: wait, event: paid}}, require: any}
  each:
    kind: map
    items: "${nodes.fetch.output.lines}"
    as: line
    concurrency: 8
    tolerate: 10%
    do: {kind: tool, tool: look, arguments: {line: "${line}", number: "${index + 1}"}, repeat: {until: "${output.ok}"}}
  sub: {kind: workflow, workflow: other, input: "${nodes.fetch.output}", after: [both, each]}
  pause: {kind: wait, until: "${nodes.sub.output.time}", after: [check, late], join: any}
  answer: {kind: output, value: "${nodes.pause.state} ${run.id}"}
"""


def document(**nodes: Any) -> dict[str, Any]:
    return {"name": "example", "nodes": nodes or {"a": TOOL}}


def faults_of(found: Any) -> list[str]:
    try:
        parsing.read(found)
    except DefinitionError as error:
        return [str(fault) for fault in error.faults]
    return []


def condition(**fields: Any) -> dict[str, Any]:
    return {"kind": "condition", "if": "${input.flag}", **fields}


def parallel(*branches: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"kind": "parallel", "branches": dict(zip("abcdefghij", branches, strict=False)), **fields}


def mapped(do: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"kind": "map", "items": "${input.items}", "do": do, **fields}


def human(**fields: Any) -> dict[str, Any]:
    return {"kind": "human", "question": "Is it right?", **fields}


def nested(levels: int) -> dict[str, Any]:
    return parallel(nested(levels - 1)) if levels else {**TOOL}


# Each row: a document, and its only fault.
FAULTS: list[tuple[Any, str]] = [
    # The form.
    ([], "must be an object with name and nodes, got []"),
    ({"nodes": {"a": TOOL}}, "name: is required"),
    ({"name": "example", "nodes": {}}, "nodes: must be an object with at least one entry, got {}"),
    ({**document(), "timout_seconds": 3}, "timout_seconds: unknown field (did you mean 'timeout_seconds'?)"),
    ({**document(), "name": "9"}, "name: must be a letter followed by up to 63 letters, digits, _ and -, got '9'"),
    ({**document(), "concurrency": 51}, "concurrency: must be a whole number from 1 to 50, got 51"),
    (document(Fetch=TOOL), "nodes.Fetch: must be a lower-case letter followed by up to 39"),
    (document(a=3), "nodes.a: must be a node, got 3"),
    (document(a={"tool": "look"}), "nodes.a.kind: is required (known: agent, condition, human"),
    (document(a={"kind": "tol"}), "nodes.a.kind: unknown kind 'tol' (did you mean 'tool'?)"),
    (document(a={"kind": ["tool"]}), "nodes.a.kind: unknown kind ['tool']"),
    (document(a={"kind": "tool"}), "nodes.a.tool: is required"),
    (document(a={**TOOL, "argument": {}}), "nodes.a.argument: unknown field (did you mean 'arguments'?)"),
    (
        document(a={**TOOL, "retry": {"attempts": 0}}),
        "nodes.a.retry.attempts: must be a whole number from 1 to 20",
    ),
    (
        document(a={**TOOL, "retry": {"attempts": 2, "factor": 0.5}}),
        "nodes.a.retry.factor: must be a number from 1 to 10, got 0.5",
    ),
    (document(a={**TOOL, "repeat": {"max": 3}}), "nodes.a.repeat.until: is required"),
    (
        document(a={**TOOL, "timeout_seconds": 0}),
        "nodes.a.timeout_seconds: must be a number from 0.1 to 31536000",
    ),
    (document(a={**TOOL, "timeout_seconds": "5 s"}), "nodes.a.timeout_seconds: must be a number from 0.1 to"),
    (document(a={**TOOL, "after": ["B"]}), "nodes.a.after[0]: must be a lower-case letter followed by"),
    (
        document(a={**TOOL, "on_error": "explode"}),
        "nodes.a.on_error: must be fail, continue, undo or an object with go_to, got 'explode'",
    ),
    (
        document(a=human(form="aproval")),
        "nodes.a.form: must be question or approval, got 'aproval' (did you mean 'approval'?)",
    ),
    (document(a={**TOOL, "join": "al"}, b=TOOL), "nodes.a.join: must be all, any or a whole number from 1 to 200"),
    (document(a={"kind": "agent", "task": "x", "tools": [3]}), "nodes.a.tools[0]: must be 1 to 64 letters, digits"),
    (document(**{"bad name": TOOL}), "nodes.bad name: must be a lower-case letter"),
    (document(a={**TOOL, "on_error": {}}), "nodes.a.on_error.go_to: is required"),
    (
        document(a=human(options=[True])),
        "nodes.a.options[0]: must be text of 1 to 400 characters, got true (quote",
    ),
    (document(a=human(options=["a"] * 21)), "nodes.a.options: must be a list of at most 20 entries"),
    (document(a=mapped({"kind": "output", "value": 1})), "nodes.a.do.kind: unknown kind 'output' (known: agent, human"),
    (
        document(a=mapped(TOOL, tolerate="101%")),
        "nodes.a.tolerate: must be a whole number from 0 to 100000 or a",
    ),
    (document(a=parallel()), "nodes.a.branches: must be an object with at least one entry, got {}"),
    # The graph.
    (
        document(a={**TOOL, "after": ["fetsch"]}, fetch=TOOL),
        "nodes.a.after[0]: there is no node 'fetsch' (did you mean 'fetch'?)",
    ),
    (document(a={**TOOL, "after": ["b", "b"]}, b=TOOL), "nodes.a.after[1]: 'b' is listed twice"),
    (document(a={**TOOL, "after": ["a"]}), "nodes.a: needs itself: a -> a (use repeat for a loop)"),
    (
        document(a={**TOOL, "after": ["b"]}, b={**TOOL, "on_error": {"go_to": "c"}}, c=condition(then=["a", "b"])),
        "nodes.b: needs itself: b -> c -> b",
    ),
    (document(a={**TOOL, "on_error": {"go_to": "b"}}), "nodes.a.on_error.go_to: there is no node 'b'"),
    (document(a=condition(then=["b"], **{"else": ["b"]}), b=TOOL), "nodes.a.else: 'b' is in both then and else"),
    (
        document(a=condition(then=["b"], on_error={"go_to": "b"}), b=TOOL),
        "nodes.a.on_error.go_to: 'b' is also in then or else",
    ),
    (
        document(
            a=condition(then=["b"], **{"else": ["c"]}), b=TOOL, c={**TOOL, "arguments": {"x": "${nodes.b.output}"}}
        ),
        "nodes.c: reads nodes.b, which never runs when this node does (remove c from else of a, or add after: [b])",
    ),
    (
        document(a={**TOOL, "join": 2, "after": ["b"]}, b=TOOL),
        "nodes.a.join: must be at most 1, the number of control edges",
    ),
    (document(a=parallel(TOOL, require=2)), "nodes.a.require: must be at most 1, got 2"),
    (document(a=parallel({**TOOL, "join": 2})), "nodes.a.branches.a.join: is not allowed here (set it for nodes.a)"),
    (document(a=mapped({**TOOL, "after": ["b"]}), b=TOOL), "nodes.a.do.after: is not allowed here"),
    (document(a=mapped({**TOOL, "on_error": "undo"})), "nodes.a.do.on_error: is not allowed here"),
    (
        document(a=parallel(condition(then=["b"])), b=TOOL),
        "nodes.a.branches.a.kind: a branch must not be of kind condition",
    ),
    (document(a={"kind": "output", "value": 1}, b={"kind": "output", "value": 1}), "nodes.b: is a second output"),
    (document(a=nested(8)), f"nodes.a{'.branches.a' * 8}: is nested deeper than 8 levels"),
    (document(**{f"n{number}": TOOL for number in range(201)}), "nodes: 201 nodes, over the limit of 200"),
    (document(a=parallel(TOOL, TOOL), **{f"n{number}": TOOL for number in range(198)}), "nodes: 201 nodes, over"),
    (document(true=TOOL), "nodes.true: the name true is reserved"),
    # The kinds.
    (document(a={"kind": "wait"}), "nodes.a: a wait must have one of seconds, until and event (got none of them)"),
    (
        document(a={"kind": "wait", "seconds": 1, "event": "x"}),
        "nodes.a: a wait must have one of seconds, until and event",
    ),
    (
        document(a={"kind": "wait", "seconds": 1, "timeout_seconds": 1}),
        "nodes.a.timeout_seconds: is not allowed without",
    ),
    (
        document(a={"kind": "wait", "until": "yesterday"}),
        "nodes.a.until: must be a time with a zone, got 'yesterday' (write a time such as",
    ),
    (document(a={"kind": "wait", "until": "2030-01-31T09:00:00"}), "nodes.a.until: must be a time with a zone"),
    (document(a={**TOOL, "join": "any"}), "nodes.a.join: has no effect: no node comes before this one (set after)"),
    (document(a={**TOOL, "join": 2}), "nodes.a.join: has no effect: no node comes before this one (set after)"),
    (document(a=human(who="approvers")), "nodes.a.who: only approvals can be sent to approvers (set form: approval)"),
    (document(a=human(form="approval", options=["a"])), "nodes.a.options: an approval has no options"),
    (document(a=human(options=["a", "a"])), "nodes.a.options: an option is listed twice"),
    (document(a=human(default="a")), "nodes.a.default: requires a deadline (set deadline_seconds)"),
    (document(a=mapped(TOOL, **{"as": "input"})), "nodes.a.as: the name 'input' is reserved"),
    (document(a=mapped(TOOL, **{"as": "for"})), "nodes.a.as: the name 'for' is reserved"),
    (document(a={"kind": "workflow", "workflow": "example"}), "nodes.a.workflow: a workflow must not start itself"),
    ({**document(), "as_tool": True}, "description: is required for a tool"),
    # Expressions.
    (
        document(a={**TOOL, "arguments": {"x": ["${inptu.y}"]}}),
        "nodes.a.arguments.x[0]: there is no 'inptu' here (did you mean 'input'?)",
    ),
    (
        {**document(a={**TOOL, "arguments": {"x": "${input.tikcet}"}}), "input": {"properties": {"ticket": {}}}},
        "nodes.a.arguments.x: input.tikcet does not exist (did you mean 'ticket'?)",
    ),
    (document(a={**TOOL, "arguments": {"x": "${nodes.b.output}"}}), "nodes.a.arguments.x: nodes.b does not exist"),
    (
        document(a={"kind": "agent", "task": "${nodes.b.result}"}, b=TOOL),
        "nodes.a.task: nodes.b.result does not exist (write nodes.b.output)",
    ),
    (
        document(a={"kind": "agent", "task": "${nodes['b']}"}, b=TOOL),
        "nodes.a.task: nodes cannot be used as a value (write nodes.",
    ),
    (document(a={"kind": "agent", "task": "${run.time}"}), "nodes.a.task: run.time does not exist (known: id, user)"),
    (
        document(a={"kind": "agent", "task": "${item}"}),
        "nodes.a.task: there is no 'item' here (known: input",
    ),
    (document(a={"kind": "agent", "task": "${output}"}), "nodes.a.task: there is no 'output' here"),
    (document(a={"kind": "agent", "task": "${"}), "nodes.a.task: the expression '${' has no closing brace"),
    (
        document(a={"kind": "agent", "task": "${ }"}),
        "nodes.a.task: an expression is empty (write $${ for a literal ${)",
    ),
    (
        document(a={"kind": "agent", "task": "${input.x +}"}),
        "nodes.a.task: 'input.x +': column 10: the expression ends too early",
    ),
    (document(a={"kind": "agent", "task": "${input.x ) 1}"}), "nodes.a.task: 'input.x ) 1': column 9: unexpected"),
    (document(a={"kind": "agent", "task": "${(input.x}"}), "nodes.a.task: '(input.x': column 9: ')' is missing"),
    (document(a={"kind": "agent", "task": f"${{{'1+' * 600}1}}"}), "nodes.a.task: '1+1+1+1+"),
    (
        document(a=condition(**{"if": "input.flag", "then": ["b"]}), b=TOOL),
        "nodes.a.if: must be exactly one expression",
    ),
    (
        document(a=condition(**{"if": "${size(input.flag)}", "then": ["b"]}), b=TOOL),
        "nodes.a.if: the expression must return true or false, but returns a number",
    ),
    (document(a=mapped(TOOL, items="${'x'}")), "nodes.a.items: the expression must return a list, but returns text"),
    (document(a={**TOOL, "arguments": "x ${input.y}"}), "nodes.a.arguments: must be exactly one expression"),
    (
        document(a={**TOOL, "repeat": {"until": "${nodes.a.output.ok}"}}),
        "nodes.a: needs itself: a -> a (use repeat for a loop)",
    ),
    (
        document(a={**TOOL, "arguments": {"x": ["${input}"] * 1001}}),
        "nodes: 1001 expressions, over the limit of 1000",
    ),
]


def test_the_example_is_valid_and_has_one_canonical_form() -> None:
    found = parsing.read(yaml.safe_load(TRIAGE))
    assert found.nodes["sub"] == definition.WorkflowNode(
        workflow="other", input="${nodes.fetch.output}", after=("both", "each")
    )
    written = definition.encode(found)
    assert definition.decode(written) == found == parsing.parse(written)
    assert [*msgspec.json.decode(written)["nodes"]] == [*yaml.safe_load(TRIAGE)["nodes"]], "nodes keep their order"
    reordered = dict(reversed(msgspec.json.decode(written).items()))
    assert definition.encode(parsing.read({**reordered, "$schema": "x", "as_tool": False})) == written


@pytest.mark.parametrize("row", range(len(FAULTS)), ids=[message for _, message in FAULTS])
def test_a_fault_has_its_path_and_a_hint(row: int) -> None:
    found, message = FAULTS[row]
    (fault,) = faults_of(found)
    assert fault.startswith(message), fault


def test_all_faults_are_reported_at_once() -> None:
    rows = [found for found, message in FAULTS if message.startswith("nodes.a") and list(found["nodes"]) == ["a"]]
    nodes = {f"n{number}": found["nodes"]["a"] for number, found in enumerate(rows)}
    assert len(nodes) > 40
    named = {fault.partition(":")[0].split(".")[1] for fault in faults_of({"name": "all", "nodes": nodes})}
    # These have a fault only in their own document.
    texts = ("'workflow': 'example'", "'after': ['a']", "${input.tikcet}", "${nodes.a.output.ok}")
    assert all(any(text in str(nodes[name]) for text in texts) for name in nodes.keys() - named)


def test_faults_are_sorted_by_path() -> None:
    found = faults_of({"name": "9", "nodes": {"b": {}, "a": {"kind": "tol"}}, "concurency": 1})
    assert (found, len(found)) == (sorted(found), 4)


@for_each(
    ("data", "message"), [(b"{", "truncated"), (b'{"a": 1, "a": 1}', "twice"), (b" " * 300_000, "limit of 262144")]
)
def test_a_definition_that_is_not_json_or_too_large_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        parsing.parse(data)


def test_arguments_are_checked_against_the_schema() -> None:
    schema = {
        "properties": {"ticket": {}, "limit": {"default": 3}},
        "required": ["ticket", "limit"],
        "additionalProperties": False,
    }
    found = validation.arguments_faults({"tiket": 1}, schema, "nodes.a.arguments")
    assert list(map(str, found)) == [
        "nodes.a.arguments.ticket: is required (rename 'tiket')",
        "nodes.a.arguments.tiket: unknown argument (did you mean 'ticket'?)",
    ]
    assert not validation.arguments_faults("${input}", schema, "nodes.a.arguments")
    open_schema = {"properties": {"pieces": {}}, "required": ["pieces"]}
    (fault,) = validation.arguments_faults({"pices": 1}, open_schema, "nodes.a.input")
    assert str(fault) == "nodes.a.input.pieces: is required (rename 'pices')"
    assert not validation.arguments_faults({"other": 1}, {"type": "object"}, "nodes.a.arguments")


# The JSON Schema of definitions, and their flowcharts.


ROOT = Path(__file__).parents[4]
SCHEMA = jsonschema_rs.Draft202012Validator(msgspec.json.decode(SCHEMA_JSON))
CHART = """\
flowchart TD
  n0{"big<br/>condition"}
  subgraph n1 ["both<br/>parallel: any"]
    n1_0("a<br/>wait")
    n1_1[["b<br/>map: agent writer"]]
  end
  n2["end<br/>tool look"]
  n0 -->|then| n1
  n0 -.->|on error| n2
  n1 --> n2
"""


def test_the_published_schema_is_current() -> None:
    """If it is not, write schema.SCHEMA_JSON to the file."""
    assert (ROOT / "docs/reference/workflow.schema.json").read_bytes() == SCHEMA_JSON


def test_the_schema_accepts_the_example_and_refuses_structural_faults() -> None:
    assert SCHEMA.is_valid(yaml.safe_load(TRIAGE))
    first_of_graph = next(row for row, (_, message) in enumerate(FAULTS) if "there is no node" in message)
    assert [message for found, message in FAULTS[:first_of_graph] if SCHEMA.is_valid(found)] == []


def test_a_flowchart_shows_kinds_and_edges() -> None:
    nodes = {
        "big": {
            "kind": "condition",
            "if": "${input.flag}",
            "then": ["both"],
            "on_error": {"go_to": "end"},
        },
        "both": {
            "kind": "parallel",
            "require": "any",
            "branches": {
                "a": {"kind": "wait", "seconds": 1},
                "b": {"kind": "map", "items": [1], "do": {"kind": "agent", "agent": "writer", "task": "x"}},
            },
        },
        "end": {"kind": "tool", "tool": "look", "after": ["both"]},
    }
    assert flowchart(parsing.read({"name": "example", "nodes": nodes})) == CHART
