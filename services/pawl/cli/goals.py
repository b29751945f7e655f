from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from pawl.agent.v1 import goal_pb2 as pb
from pawl.cli import wording
from pawl.cli.command import command, object_of, seconds_of, time_of
from pawl.cli.contract import Columns, Json, Option, listing, verb
from pawl.cli.runs import follow
from pawl.client import AsyncClient
from pawl.event.v1 import goal_pb2, run_pb2

RunId = Annotated[str, typer.Argument(help="Id of the goal's run.", show_default=False)]
_BAR: Final = 20
_DEADLINE: Final = "When to stop: a duration such as 2h or 7d, or a time."


def _arguments(criterion: goal_pb2.GoalCriterion, given: str) -> None:
    object_of(given, "--arguments")
    criterion.arguments_json = given.encode()


def _deadline(message: Any, given: str) -> None:
    """Set the message's deadline from a time such as 2026-01-31T09:00, or a duration from now such as 2h."""
    if given[:1].isdigit() and given[-1:].isalpha() and "T" not in given:
        message.deadline_time.FromDatetime(datetime.now(UTC) + timedelta(seconds=seconds_of(given, "deadline")))
    else:
        message.deadline_time.CopyFrom(time_of(given, "deadline"))


def progress_text(goal: pb.GoalStatus) -> str:
    """Return the goal's attempts and progress: `3 of 10 [########------------] 40% Two links do not answer`."""
    run, progress = goal.run, goal.run.job_progress
    attempts = f"{run.round} of {run.goal.attempts_max}"
    if not run.HasField("job_progress"):
        return attempts
    return f"{attempts}  {_shown(progress.fraction if progress.HasField('fraction') else None, progress.message)}"


def _shown(fraction: float | None, reason: str) -> str:
    bar = "" if fraction is None else f"[{'#' * round(fraction * _BAR):-<{_BAR}}] {fraction:.0%} "
    return f"{bar}{wording.one_line(reason)}"


def _attempt_line(attempt: goal_pb2.GoalAttempt) -> str:
    fraction = attempt.progress if attempt.HasField("progress") else None
    shown = _shown(fraction, attempt.reason) if attempt.HasField("end_time") else "is running"
    return f"  {attempt.number}. {wording.time_text(attempt.start_time)}  {shown}  {attempt.run_id}".rstrip()


def goal_lines(goal: pb.GoalStatus) -> list[str]:
    run = goal.run
    state = wording.state_name(run.state)
    lines = [
        f"{run.run_id}: {state}" + (f" ({run.failure.reason})" if run.HasField("failure") else ""),
        *wording.quoted("aim: ", wording.one_line(run.goal.aim, 300)),
        f"attempts: {progress_text(goal)}",
    ]
    if run.goal.HasField("deadline_time"):
        lines.append(f"deadline: {wording.time_text(run.goal.deadline_time)}")
    if run.token_budget:
        used = run.usage.input_tokens + run.usage.output_tokens
        lines.append(f"tokens: {used} of {run.token_budget}")
    lines += map(_attempt_line, goal.attempts)
    if run.output_text:
        lines += ["", *wording.quoted("", run.output_text)]
    elif run.state in {run_pb2.RUN_STATE_QUEUED, run_pb2.RUN_STATE_RUNNING, run_pb2.RUN_STATE_WAITING}:
        lines.append(f"watch it with: pawl goal watch {run.run_id}")
    return lines


def _lines(answer: Any, _: Any) -> list[str]:
    return goal_lines(answer.goal)


COLUMNS: Final[Columns] = {
    "run": "run.run_id",
    "state": lambda goal: wording.state_name(goal.run.state),
    "aim": lambda goal: wording.one_line(goal.run.goal.aim, 40),
    "attempts": progress_text,
}

app = typer.Typer(help="Start, list and watch goals, and raise their limits.", no_args_is_help=True)
app.command("start")(
    verb(
        pb.StartGoalRequest(),
        {
            "aim": "goal.aim",
            "--agent": "goal.attempts_by.agent",
            "--tool": "goal.criterion.tool_name",
            "--arguments": Option(path="goal.criterion.arguments_json", put=_arguments),
            "--expression": "goal.criterion.expression",
            "--rubric": Option(path="goal.criterion.judge.rubric", excludes="--tool"),
            "--judge": "goal.criterion.judge.agent",
            "--instructions": "goal.attempts_by.instructions",
            "--tools": "goal.attempts_by.tool_names",
            "--attempts": "goal.attempts_max",
            "--deadline": Option(path="goal.deadline_time", help=_DEADLINE, put=_deadline),
            "--wait": "goal.wait_seconds",
            "--tokens": "total_tokens_max",
            "--label": "labels",
        },
        "Start a goal: an agent makes attempts until a tool or a judge decides that the aim is met.",
        _lines,
        needs=("--tool", "--rubric"),
    )
)
app.command("list")(
    listing(
        pb.ListGoalsRequest(open_only=True),
        {"--all -a": Option(path="open_only", help="Also list goals that have ended.", constant=False)},
        "List your open goals, newest first.",
        COLUMNS,
        none="There are no goals.",
        count=20,
    )
)
app.command("show")(
    verb(pb.GetGoalRequest(), {"run": "run_id"}, "Show a goal with its attempts, progress and report.", _lines)
)
app.command("raise")(
    verb(
        pb.RaiseGoalRequest(),
        {
            "run": "run_id",
            "--attempts": "attempts",
            "--deadline": Option(path="deadline_time", help=_DEADLINE, put=_deadline),
            "--tokens": "tokens",
        },
        "Raise the limits of a goal that has not ended.",
        _lines,
        needs=("--attempts", "--deadline", "--tokens"),
    )
)


@app.command()
@command()
async def watch(
    target: AsyncClient,
    console: Console,
    run_id: RunId,
    *,
    after: Annotated[int, typer.Option(help="Only events after this number.", min=0)] = 0,
    json: Json = False,
) -> int:
    """Watch a goal until it ends. The exit code is 0 if it is met, otherwise 1. Ctrl-C does not stop the goal."""
    await target.get_goal(run_id)
    return await follow(target, console, run_id, after, json=json)
