"""The JSON Schema of workflow definitions, which editors use to complete and check them.

docs/reference/workflow.schema.json contains the same schema. It does not cover rules that involve several nodes.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from pawl.agent_loop.workflows.definition import WorkflowDefinition


def _schema() -> Any:
    _, parts = msgspec.json.schema_components([WorkflowDefinition], ref_template="#/$defs/{name}")
    whole = parts.pop(WorkflowDefinition.__name__)
    # Documents may refer to their schema, for editors.
    whole["properties"] = {"$schema": {"type": "string"}, **whole["properties"]}
    dialect = "https://json-schema.org/draft/2020-12/schema"
    return _plain({"$schema": dialect, **whole, "title": "Pawl workflow", "$defs": parts})


def _plain(value: Any) -> Any:
    """Return the schema without OpenAPI keywords, and without null for optional values."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    plain = {name: _plain(each) for name, each in value.items() if name != "discriminator"}
    if plain.get("default", "") is None:
        del plain["default"]
        plain["anyOf"] = [each for each in plain["anyOf"] if each != {"type": "null"}]
    return plain


SCHEMA_JSON: Final = msgspec.json.format(msgspec.json.encode(_schema()), indent=2) + b"\n"
