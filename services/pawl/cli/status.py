"""`pawl status`: where a run stands, why it waits, and what would let it go on."""

from __future__ import annotations

from datetime import UTC, datetime

from rich.console import Console

from pawl.cli import wording
from pawl.cli.command import command
from pawl.cli.runs import RunId, labels_text
from pawl.cli.transcript import Transcript, decides, hint, top_up_hint
from pawl.client import AsyncClient
from pawl.event.v1 import call_pb2, run_pb2, waiting_pb2


@command()
async def status(target: AsyncClient, console: Console, run_id: RunId) -> None:
    """Show where a run stands.

    Why it waits, since when and for whom, what would let it go on, and its open calls.
    """
    run = await target.get(run_id)
    now = datetime.now(UTC)
    for line in (*standing(run), *because(run.waiting, now)):
        console.print(line, markup=False, soft_wrap=True)
    transcript = Transcript(console)
    for call in run.pending_calls:
        transcript.pending(call)
        transcript.command(hint(call, decides=decides(run)))
    if run.waiting.reason == waiting_pb2.WAIT_REASON_TOKENS:
        transcript.command(top_up_hint(run))
    for call in run.active_calls:
        console.print(_active(call), markup=False, soft_wrap=True)


def standing(run: run_pb2.Run) -> list[str]:
    """Return the state of a run, what it did so far, and its relatives."""
    calls = ", ".join(
        f"{count.count} {wording.value_name(call_pb2.CallState, count.state).replace('_', ' ')}"
        for count in run.call_counts
    )
    lines = [
        f"{run.run_id} is {wording.state_name(run.state)}, in conversation {run.conversation_id}",
        f"created {wording.time_text(run.create_time)}, changed {wording.time_text(run.update_time)}",
        f"{wording.count_text(run.round, 'round')}; calls: {calls or 'none'}",
    ]
    if run.token_budget:
        lines.append(wording.budget_text(run))
    if run.agent.name:
        version = f", version {run.agent.version}" if run.agent.version else ""
        lines.append(f"driven by the agent {wording.clean(run.agent.name)}{version}")
    if run.HasField("grant") and not run.grant.ended:
        people = ", ".join(wording.clean(decision.user_id) for decision in run.grant.approvals)
        series = run.grant.series
        used = f"{run.grant.uses} of {series.iterations_max} begun"
        lines.append(f"granted by {people}: {wording.series_text(series)}; {used}")
    if run.labels:
        lines.append(f"labels: {labels_text(run.labels)}")
    if run.HasField("progress_time"):
        lines.append(f"last got somewhere {wording.time_text(run.progress_time)}")
    if run.parent_run_id:
        lines.append(f"does call {run.parent_call_id} of {run.parent_run_id}")
    if run.child_run_ids:
        lines.append(f"runs that do its calls: {', '.join(run.child_run_ids)}")
    return lines


def because(waiting: waiting_pb2.Waiting, now: datetime) -> list[str]:
    """Return why a run does not go on; nothing if it does."""
    if not waiting.sentence:
        return []
    lines = [wording.one_line(waiting.sentence, 2048), f"since {wording.time_text(waiting.since_time)}"]
    if waiting.HasField("deadline_time"):
        lines[-1] += f", {wording.remaining_text(waiting.deadline_time, now)}"
    return [*lines, f"what lets it go on: {wording.one_line(waiting.remedy, 300)}"]


def _active(call: call_pb2.Call) -> str:
    began = f" since {wording.time_text(call.start_time)}" if call.HasField("start_time") else ""
    state = wording.value_name(call_pb2.CallState, call.state).replace("_", " ")
    return f"{wording.clean(call.tool_name)} is {state}{began}  call {call.call_id}"
