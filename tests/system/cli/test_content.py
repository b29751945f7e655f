"""Images and documents with a message, efforts and forms, from the command line and in files of agents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fakes.images import PNG
from tests.system.cli.conftest import CommandLine

SCHEMA = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
SUMS = """
name: sums
options:
  reasoning_effort: REASONING_EFFORT_HIGH
  response_format:
    name: sum
    schema: {type: object, properties: {answer: {type: string}}, required: [answer]}
tools: {names: [calculate]}
"""


def test_a_run_answers_in_the_form_of_a_file(pawl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "form.json").write_text(json.dumps(SCHEMA))
    shown = pawl.succeed("run", "what is 17 * 23", "--schema", str(tmp_path / "form.json"), "--effort", "low")
    assert '{"answer": "' in shown
    assert "391" in shown


@pytest.mark.parametrize(("schema", "told"), [("[]", "must be a JSON object"), ("{", "not strict JSON")])
def test_a_form_that_cannot_be_meant_is_said_in_a_sentence(
    pawl: CommandLine, tmp_path: Path, schema: str, told: str
) -> None:
    (tmp_path / "form.json").write_text(schema)
    code, _, errors = pawl.run("run", "hello", "--schema", str(tmp_path / "form.json"))
    assert (code, told in errors) == (2, True), errors
    code, _, errors = pawl.run("run", "hello", "--schema", str(tmp_path / "absent.json"))
    assert (code, "cannot be read" in errors) == (2, True), errors


def test_a_document_goes_with_a_message_and_an_image_only_where_models_take_it(
    pawl: CommandLine, tmp_path: Path
) -> None:
    (tmp_path / "plants.md").write_text("Water the plants on Mondays.")
    (tmp_path / "dot.png").write_bytes(PNG)
    pawl.succeed("documents", "add", str(tmp_path / "plants.md"))
    shown = pawl.succeed("run", "who are you?", "--file", "plants.md")
    assert "[plants.md, 28 bytes]" in shown
    assert "text, file" in pawl.succeed("whoami")
    code, _, errors = pawl.run("run", "look", "--image", str(tmp_path / "dot.png"))
    assert (code, "PAWL_MODEL_INPUT" in errors) == (2, True), errors
    code, _, errors = pawl.run("run", "look", "--shared-file", "plants.md")
    assert (code, "document" in errors) == (2, True), errors
    pawl.succeed("documents", "remove", "plants.md")


def test_an_agent_has_an_effort_and_a_form(pawl: CommandLine, tmp_path: Path) -> None:
    (tmp_path / "sums.yaml").write_text(SUMS)
    pawl.succeed("apply", "-f", str(tmp_path))
    shown = pawl.succeed("agents", "show", "sums")
    assert "schema:" in shown
    assert "REASONING_EFFORT_HIGH" in shown
    (tmp_path / "sums.yaml").write_text(shown)
    assert "sums: unchanged" in pawl.succeed("apply", "-f", str(tmp_path)), "what is shown can be applied"
    assert '{"answer": "' in pawl.succeed("run", "what is 2 + 2", "--agent", "sums")
    (tmp_path / "sums.yaml").write_text(SUMS.replace("type: object, prop", "type: array, prop"))
    code, _, errors = pawl.run("apply", "-f", str(tmp_path))
    assert (code, '"type": "object"' in errors) == (2, True), errors
    pawl.succeed("agents", "delete", "sums", "--yes")
