"""`file_operations` becomes a call of a file tool that the agent has, before the call is checked (TOOL-7)."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from pawl.agent_loop.loop.rules import file_front
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.file_front import ACTIONS, TOOL, resolve
from pawl.agent_loop.loop.rules.jobs import extract_terms
from pawl.agent_loop.loop.rules.tool import Tool
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId
from pawl.values import CallState
from tests.fakes.model import calls, says
from tests.fakes.registry import tool as verdict
from tests.unit.agent_loop.test_jobs import Story

_NAMES = st.sets(st.sampled_from([*ACTIONS.values(), "send_email"]))
_ARGUMENTS = st.dictionaries(
    st.sampled_from(["path", "file_path", "new_path", "output_path", "content", "_executeAsync", "x"]),
    st.one_of(st.none(), st.integers(0, 3), st.sampled_from(["", "/", "/a/b", "a/b", "//a", "../a", "/../a"])),
    max_size=4,
)


def schema(**properties: Any) -> bytes:
    return json.dumps({"type": "object", "properties": properties, "additionalProperties": False}).encode()


def tool(name: str, **fields: Any) -> Tool:
    return Tool(name=name, version=1, **fields)


def proposed(name: str, arguments: Any) -> Call:
    return Call(
        store_id=StoreId("s"),
        conversation_id=ConversationId("c"),
        run_id=RunId("r"),
        call_id=CallId("call"),
        round=1,
        index=0,
        tool_name=name,
        state=CallState.PROPOSED,
        proposed_arguments=arguments if isinstance(arguments, str) else json.dumps(arguments),
        create_time=0.0,
    )


@given(st.one_of(st.text(), st.text().map(lambda text: f'{{"action": {text}}}')), _NAMES)
@example("[" * 100_000, {"read_file"})
@example('{"action": "read", "action": "delete"}', {"read_file", "delete_file"})
@example('{"action": ["read"]}', {"read_file"})
@example('{"action": {}}', {"read_file"})
def test_any_arguments_are_either_resolved_or_refused(arguments: str, names: set[str]) -> None:
    found = resolve(arguments, names)
    if found.fault:
        assert (found.tool_name, found.arguments) == (TOOL, arguments)
    else:
        assert found.tool_name in names & set(ACTIONS.values())


@given(st.sampled_from([*ACTIONS, *ACTIONS.values()]), _ARGUMENTS, _NAMES)
def test_an_action_becomes_a_call_of_its_tool_with_the_same_arguments(
    action: str, arguments: dict[str, Any], names: set[str]
) -> None:
    """No action reaches a tool that the agent lacks, and no path changes except for one leading slash."""
    found = resolve(json.dumps({"action": action} | arguments), names)
    given = {key: value for key, value in arguments.items() if value is not None}
    wanted = ACTIONS.get(action, action)
    paths = [given.pop(key) for key in ("path", "file_path") if key in given]
    if wanted not in names:
        assert "`action` must be one of" in found.fault
        return
    if len(paths) == 2 and paths[0] != paths[1]:
        assert "differ" in found.fault
        return
    expected = given | ({"path": paths[0]} if paths else {})
    for key in {"path", "new_path", "output_path"} & expected.keys():
        value = expected[key]
        expected[key] = value[1:] if isinstance(value, str) and value.startswith("/") else value
    assert (found.fault, found.tool_name, json.loads(found.arguments)) == ("", wanted, expected)


@given(_NAMES)
def test_the_model_sees_exactly_the_actions_of_its_tools(names: set[str]) -> None:
    tools = [tool(name, arguments_schema_json=schema(path={"type": "string"}, own={})) for name in sorted(names)]
    shown = {each.name: each for each in file_front.offered([tool(TOOL), *tools])}
    had = [action for action, name in ACTIONS.items() if name in names]
    assert shown.keys() == names | ({TOOL} if had else set())
    if had:
        front = json.loads(shown[TOOL].arguments_schema_json)
        assert front["properties"]["action"]["enum"] == had
        assert front["properties"].keys() == {"action", "path", "file_path", "own"}


def test_client_supplied_tools_are_not_file_tools() -> None:
    own = tool("delete_file", definition_sha256="digest")
    (front,) = [each for each in file_front.offered([tool(TOOL), tool("read_file"), own]) if each.name == TOOL]
    assert json.loads(front.arguments_schema_json)["properties"]["action"]["enum"] == ["read"]
    (call,), _ = extract_terms([proposed(TOOL, {"action": "delete", "path": "a"})], [tool(TOOL), own], 0.0)
    assert (call.tool_name, call.state) == (TOOL, CallState.FAILED)
    own_front = tool(TOOL, definition_sha256="digest")
    (call,), _ = extract_terms([proposed(TOOL, {"action": "read"})], [own_front, tool("read_file")], 0.0)
    assert (call.tool_name, call.state) == (TOOL, CallState.PROPOSED)


def test_background_parameters_of_file_operations_apply_to_the_resolved_call() -> None:
    tools = [tool(TOOL), tool("process_file")]
    action = {"action": "process_large_file", "file_path": "/big.csv"}
    direct = proposed(TOOL, action | {"_executeAsync": True})
    nested = proposed("in_background", {"tool": TOOL, "arguments": action})
    for call, shown in ((direct, TOOL), (nested, "in_background")):
        (made,), terms = extract_terms([call], tools, 0.0, as_tool=True)
        assert (made.tool_name, made.name_for_model, made.state) == ("process_file", shown, CallState.PROPOSED)
        assert json.loads(made.arguments_json) == {"path": "big.csv"}
        assert terms.keys() == {made.call_id}


async def test_the_registry_only_sees_the_resolved_call() -> None:
    """The model reads its own call in the history, and the reason if the action is wrong."""
    asked = 'file_operations {"action":"read","file_path":"/notes/plan.md"}'
    story = Story(calls(asked, 'file_operations {"action":"shred"}'), says("Done."))
    registry = story.world.registry
    registry.verdicts = {TOOL: verdict(), "read_file": verdict()}
    key = await story.finish("read it")
    read, refused = story.calls(story.world.ledger.run(key))
    assert (read.tool_name, json.loads(read.arguments_json)) == ("read_file", {"path": "notes/plan.md"})
    assert (refused.tool_name, refused.state) == (TOOL, CallState.FAILED)
    assert [execution.tool_name for execution in registry.asked] == ["read_file"]
    first, second = story.world.model.requests
    (front,) = [each["function"] for each in first.tools if each["function"]["name"] == TOOL]
    assert front["parameters"]["properties"]["action"]["enum"] == ["read"]
    shown = second.messages[2]["tool_calls"][0]["function"]
    assert (shown["name"], json.loads(shown["arguments"])["file_path"]) == (TOOL, "/notes/plan.md")
    assert "must be one of read, got" in second.messages[4]["content"]
