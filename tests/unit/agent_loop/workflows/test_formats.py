"""The JSON Schema of definitions, and their flowcharts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import yaml
from hypothesis import given

from pawl.agent_loop.workflows import parsing
from pawl.agent_loop.workflows.edges import edges
from pawl.agent_loop.workflows.mermaid import flowchart
from pawl.agent_loop.workflows.schema import SCHEMA_JSON
from tests.unit.agent_loop.workflows.graphs import documents
from tests.unit.agent_loop.workflows.test_definitions import FAULTS, TRIAGE

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


def test_the_schema_accepts_the_example_and_refuses_faults_of_form() -> None:
    assert SCHEMA.is_valid(yaml.safe_load(TRIAGE))
    first_of_graph = next(row for row, (_, message) in enumerate(FAULTS) if "there is no node" in message)
    assert [message for found, message in FAULTS[:first_of_graph] if SCHEMA.is_valid(found)] == []


@given(documents())
def test_every_definition_fits_the_schema_and_has_a_flowchart(document: dict[str, Any]) -> None:
    assert SCHEMA.is_valid(document)
    definition = parsing.read(document)
    chart = flowchart(definition)
    assert chart.count(" -->") + chart.count(" -.->") == len(edges(definition))


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
    definition = parsing.read({"name": "example", "nodes": nodes})
    assert flowchart(definition) == CHART
