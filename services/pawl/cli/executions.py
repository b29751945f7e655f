"""Shows workflow runs as trees of nodes. On a terminal, the trees are updated live."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Final

from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console
from rich.live import Live
from rich.text import Text

from pawl.agent.v1 import workflow_pb2
from pawl.cli import wording
from pawl.cli.command import EXIT_UNSUCCESSFUL, follows, say
from pawl.cli.transcript import ENDED, decides, hint
from pawl.client import AsyncClient
from pawl.event.v1 import call_pb2, run_pb2
from pawl.event.v1.workflow_pb2 import (
    NODE_STATE_CANCELLED,
    NODE_STATE_FAILED,
    NODE_STATE_PENDING,
    NODE_STATE_RUNNING,
    NODE_STATE_SKIPPED,
    NODE_STATE_SUCCEEDED,
    NODE_STATE_WAITING,
    MapExecution,
    NodeError,
    NodeExecution,
    NodeState,
)

_SYMBOLS: Final = {
    NODE_STATE_PENDING: "·",
    NODE_STATE_RUNNING: "●",
    NODE_STATE_WAITING: "◔",
    NODE_STATE_SUCCEEDED: "✓",
    NODE_STATE_FAILED: "✗",
    NODE_STATE_SKIPPED: "-",
    NODE_STATE_CANCELLED: "✗",
}
_BAR_CELLS: Final = 20


def execution_lines(execution: workflow_pb2.GetExecutionResponse, now: datetime | None = None) -> list[str]:
    """Return the tree of a run's nodes, with a heading, and with the output or failure at the end."""
    run = execution.run
    state = "paused" if execution.paused and run.state not in ENDED else wording.state_name(run.state)
    lines = [wording.clean(f"{run.workflow.name} version {run.workflow.version}: {state}  {run.run_id}")]
    lines += _tree(execution.nodes, "", now or datetime.now(UTC))
    if run.HasField("failure"):
        reason = "" if run.failure.reason in run.failure.message else f"{run.failure.reason}: "
        lines += wording.quoted(reason, run.failure.message)
    return lines + (wording.quoted("", run.output_text) if run.output_text else [])


def node_lines(node: NodeExecution, now: datetime | None = None) -> list[str]:
    """Return a node with its input, output and attempts."""
    others = {"attempts", "nodes", "map"}
    lines = wording.described(node, only=[field.name for field in node.DESCRIPTOR.fields if field.name not in others])
    lines += _tree(node.nodes, "  ", now or datetime.now(UTC))
    if node.HasField("map"):
        lines.append(f"items: {_bar(node.map)}")
        lines += [f"  from {chunk.first_index}: run {chunk.run_id}, {_state(chunk.state)}" for chunk in node.map.chunks]
    for attempt in node.attempts:
        run = f", run {attempt.child_run_id}" if attempt.child_run_id else ""
        error = f", {_error_text(attempt.error)}" if attempt.HasField("error") else ""
        times = f"{wording.time_text(attempt.start_time)} to {wording.time_text(attempt.end_time)}"
        lines.append(f"attempt {attempt.attempt}: {_state(attempt.state)}, call {attempt.call_id}{run}, {times}{error}")
    return lines


def _tree(nodes: Sequence[NodeExecution], indent: str, now: datetime) -> list[str]:
    names = [_name(node, indent) for node in nodes]
    width = max(map(len, names), default=0)
    lines = []
    for node, name in zip(nodes, names, strict=True):
        is_last = node is nodes[-1]
        branch = ("└ " if is_last else "├ ") if indent else ""
        facts = ", ".join(filter(None, _facts(node, now)))
        lines.append(f"{indent}{branch}{_SYMBOLS.get(node.state, '?')} {name:{width}}  {node.kind:9}  {facts}".rstrip())
        lines += _tree(node.nodes, f"{indent}{'  ' if is_last or not indent else '│ '}", now)
    return lines


def _name(node: NodeExecution, indent: str) -> str:
    if node.HasField("item_index"):
        return f"[{node.item_index}]"
    return wording.clean(node.path.rpartition(".")[2] if indent else node.path)


def _facts(node: NodeExecution, now: datetime) -> list[str]:
    attempt = f"attempt {node.attempt}" if node.attempt > 1 else ""
    iteration = f"iteration {node.iteration}" if node.iteration > 1 else ""
    error = _error_text(node.error)
    bar = _bar(node.map) if node.HasField("map") else ""
    reused = "reused" if node.reused else ""
    by = f"by {wording.clean(node.decided_by)}" if node.decided_by else ""
    child = node.child_run_id if node.state in {NODE_STATE_RUNNING, NODE_STATE_FAILED} else ""
    return [_state(node.state), by, bar, _duration(node, now), iteration, attempt, reused, error, child]


def _state(state: NodeState.ValueType) -> str:
    return wording.short_name(NodeState.DESCRIPTOR, state)


def _error_text(error: NodeError) -> str:
    return ": ".join(filter(None, (error.reason, wording.one_line(error.message))))


def _bar(items: MapExecution) -> str:
    done = items.succeeded + items.failed
    cells = _BAR_CELLS * done // items.items if items.items else _BAR_CELLS
    failed = f" ({items.failed} failed)" if items.failed else ""
    return f"{'━' * cells}{'─' * (_BAR_CELLS - cells)} {done} of {items.items}{failed}"


def _duration(node: NodeExecution, now: datetime) -> str:
    if not node.HasField("start_time") or node.state == NODE_STATE_SKIPPED:
        return ""
    end = _time(node.end_time) if node.HasField("end_time") else now
    return wording.seconds_text(max(0.0, (end - _time(node.start_time)).total_seconds()))


def _time(time: Timestamp) -> datetime:
    return time.ToDatetime(tzinfo=UTC)


async def follow_execution(target: AsyncClient, console: Console, run_id: str) -> int:
    """Show a run's nodes until the run ends. Return the exit code.

    On a terminal, the tree is updated live. Elsewhere, print each call that is waiting for a person and, at the
    end, the tree.
    """
    follows(target)
    shown = set[tuple[str, int]]()
    lines: list[str] = []
    live = Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext()
    with live as screen:
        async for execution in target.workflow_run(run_id).follow():
            lines, run = execution_lines(execution), execution.run
            waiting = hints(await target.get(run_id)) if run.state == run_pb2.RUN_STATE_WAITING else {}
            if screen:
                text = "\n".join([*lines, *waiting.values()])
                screen.update(Text(text, overflow="ellipsis", no_wrap=True), refresh=True)
            else:
                say(console, [line for key, line in waiting.items() if key not in shown])
                shown |= waiting.keys()
    if not console.is_terminal:
        say(console, lines)
    return 0 if run.state == run_pb2.RUN_STATE_COMPLETED else EXIT_UNSUCCESSFUL


def hints(run: run_pb2.Run) -> dict[tuple[str, int], str]:
    """Return what to do about each call that is waiting for a person, in the run and in the runs below it."""
    return {
        (call.call_id, call.state): f"{_question(call)}\n  {hint(call, decides=decides(run))}"
        for call in run.pending_calls
    }


def _question(call: call_pb2.Call) -> str:
    text = call.question.question if call.HasField("question") else call.approval.preview
    return wording.one_line(f"{wording.call_title(call)}: {text}" if text else wording.call_title(call), 300)
