"""The tree of a workflow run's nodes."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from pawl.agent.v1.workflow_pb2 import GetExecutionResponse
from pawl.cli import wording
from pawl.cli.executions import execution_lines, node_lines
from pawl.event.v1 import call_pb2, run_pb2
from pawl.event.v1.workflow_pb2 import (
    NODE_STATE_FAILED,
    NODE_STATE_PENDING,
    NODE_STATE_RUNNING,
    NODE_STATE_SKIPPED,
    NODE_STATE_SUCCEEDED,
    MapChunkExecution,
    MapExecution,
    NodeAttempt,
    NodeError,
    NodeExecution,
    PinnedWorkflow,
)

NOW = datetime(2026, 1, 1, 0, 1, tzinfo=UTC)


def node(path: str, kind: str, state: Any, **fields: Any) -> NodeExecution:
    made = NodeExecution(path=path, kind=kind, state=state, **fields)
    if state not in {NODE_STATE_PENDING, NODE_STATE_SKIPPED}:
        made.start_time.FromJsonString("2026-01-01T00:00:00Z")
    if state in {NODE_STATE_SUCCEEDED, NODE_STATE_FAILED}:
        made.end_time.FromJsonString("2026-01-01T00:00:02.500Z")
    return made


def execution(*nodes: NodeExecution, state: Any = run_pb2.RUN_STATE_RUNNING, **fields: Any) -> GetExecutionResponse:
    run = run_pb2.Run(run_id="run_1", state=state, workflow=PinnedWorkflow(name="triage", version=3), **fields)
    return GetExecutionResponse(run=run, nodes=nodes)


def test_nodes_have_states_times_progress_and_branches() -> None:
    branches = [node("both.a", "agent", NODE_STATE_SUCCEEDED), node("both.long_b", "tool", NODE_STATE_RUNNING)]
    items = MapExecution(items=200, succeeded=95, failed=5)
    lines = execution_lines(
        execution(
            node("fetch", "tool", NODE_STATE_SUCCEEDED, attempt=2),
            node("both", "parallel", NODE_STATE_RUNNING, nodes=branches),
            node("each", "map", NODE_STATE_RUNNING, map=items, iteration=3),
            node("other", "agent", NODE_STATE_SKIPPED),
            node("answer", "output", NODE_STATE_PENDING),
        ),
        NOW,
    )
    assert lines == [
        "triage version 3: running  run_1",
        "✓ fetch   tool       succeeded, 2.5 s, attempt 2",
        "● both    parallel   running, 1 min",
        "  ├ ✓ a       agent      succeeded, 2.5 s",
        "  └ ● long_b  tool       running, 1 min",
        "● each    map        running, ━━━━━━━━━━────────── 100 of 200 (5 failed), 1 min, iteration 3",
        "- other   agent      skipped",
        "· answer  output     pending",
    ]


def test_the_failed_node_and_the_outcome_are_shown_as_plain_text() -> None:
    error = NodeError(reason="TOOL_ERROR", message="no \x1b[31m disk")
    failed = node("fetch", "tool", NODE_STATE_FAILED, error=error, child_run_id="run_2")
    failure = run_pb2.RunFailure(reason="NODE_FAILED", message="fetch failed:\n✓ all is well")
    heading, line, *rest = execution_lines(execution(failed, state=run_pb2.RUN_STATE_FAILED, failure=failure), NOW)
    assert heading == "triage version 3: failed  run_1"
    assert line.startswith("✗ fetch  tool       failed, 2.5 s, TOOL_ERROR: no ")
    assert "\x1b" not in line
    assert rest == ["NODE_FAILED: fetch failed:", "  | ✓ all is well"]


def test_a_reason_that_the_message_contains_is_not_repeated() -> None:
    failure = run_pb2.RunFailure(reason="EXPIRED", message="Node check: EXPIRED")
    assert execution_lines(execution(failure=failure), NOW)[1:] == ["Node check: EXPIRED"]


def test_a_node_is_shown_with_labels_and_the_names_of_states() -> None:
    attempt = NodeAttempt(attempt=2, call_id="node_1", state=NODE_STATE_FAILED, error=NodeError(reason="TOOL_ERROR"))
    attempt.start_time.FromJsonString("2026-01-01T00:00:00Z")
    attempt.end_time.FromJsonString("2026-01-01T00:00:02Z")
    chunk = MapChunkExecution(run_id="run_9", first_index=50, state=NODE_STATE_SUCCEEDED)
    shown = node("each", "map", NODE_STATE_RUNNING, attempts=[attempt], output_json=b"[1]")
    shown.map.MergeFrom(MapExecution(items=60, succeeded=60, chunks=[chunk]))
    shown.nodes.append(node("each.a", "tool", NODE_STATE_PENDING))
    lines = node_lines(shown, NOW)
    assert lines[:3] == ["path: each", "kind: map", "state: running"]
    assert lines[-4:] == [
        "  └ · a  tool       pending",
        "items: ━━━━━━━━━━━━━━━━━━━━ 60 of 60",
        "  from 50: run run_9, succeeded",
        "attempt 2: failed, call node_1, 2026-01-01 00:00:00Z to 2026-01-01 00:00:02Z, TOOL_ERROR",
    ]


def test_what_a_workflow_asks_is_shown_without_json() -> None:
    asked = call_pb2.Call(context=call_pb2.EXECUTION_CONTEXT_HUMAN, arguments_json=b'{"question":"Pay?"}')
    asked.approval.preview = "Pay?"
    shown = "\n".join(wording.call_lines(asked, NOW))
    assert ("Pay?" in shown, "{" in shown) == (True, False)
