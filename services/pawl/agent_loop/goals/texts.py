"""Writes the texts of goals: the tasks of attempts, and the final report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pawl.agent_loop.goals import judging
from pawl.agent_loop.goals.cursor import Attempt, GoalCursor, Tried
from pawl.agent_loop.loop.rules import text
from pawl.agent_loop.loop.rules.message import Role
from pawl.agent_loop.loop.rules.run import Goal
from pawl.agent_loop.loop.rules.state import State
from pawl.values import RunState

_MESSAGES_BYTES_MAX: Final = 8 * 1024


def report(state: State, goal: Goal, cursor: GoalCursor) -> str:
    """Return the final report on a goal, with its progress and the calls on which the last judgement is based."""
    if cursor.met:
        head = f"The goal was met after {count(cursor)}: {cursor.reason}"
    elif state.loop.failure is not None and state.run.state is not RunState.CANCELLING:
        head = f"The goal was not met: {state.loop.failure.message}"
    else:
        head = f"The goal was cancelled after {count(cursor)}."
    lines = [head, f"Aim: {judging.line(goal.aim, 300)}"]
    if cursor.attempts:
        lines += ["Attempts:", *(_line(number, each) for number, each in enumerate(cursor.attempts, 1))]
    if cursor.evidence:
        lines += ["Evidence:", *(f"- {each}" for each in cursor.evidence)]
    return "\n".join(lines)


def task(state: State, goal: Goal, cursor: GoalCursor, number: int) -> str:
    """Return the task of an attempt: the aim, why earlier attempts were not sufficient, and the user's messages."""
    criterion = goal.criterion
    checked = criterion.judge.rubric if criterion.judge else f"{criterion.tool_name} {criterion.expression}".strip()
    parts = [
        f"Work towards this aim:\n{goal.aim}",
        f"This check decides whether the aim is met after your attempt: {checked}",
        f"This is attempt {number} of {goal.attempts_max}. End with an answer that says what you did.",
    ]
    if cursor.reason:
        parts.append(_quoted("The last check found this", [cursor.reason]))
    earlier = cursor.attempts[: len(cursor.attempts) - len(cursor.tried)]
    if cursor.attempts:
        lines = [*(_line(each, tried) for each, tried in enumerate(earlier, 1)), *map(_told, cursor.tried)]
        parts.append(_quoted("These attempts did not meet the aim. Do not repeat what did not work", lines))
    said = [each.text for each in state.messages if each.role is Role.USER and each.run_id == state.run.run_id][1:]
    if said:
        parts.append(f"The user added:\n{text.cut_bytes(chr(10).join(said).encode(), _MESSAGES_BYTES_MAX)}")
    return "\n\n".join(parts)


def _quoted(header: str, lines: Iterable[str]) -> str:
    """Quote lines that models or tools have written, so that they read as data."""
    return f"[{header}:]\n> " + "\n".join(lines).replace("\n", "\n> ")


def _told(tried: Tried) -> str:
    return f"- Attempt {tried.number}: {tried.reason}\n  It answered: {tried.answer}"


def _line(number: int, attempt: Attempt) -> str:
    return f"- Attempt {number}{_percent(attempt.progress)}: {attempt.reason}"


def _percent(progress: float | None) -> str:
    return "" if progress is None else f" ({progress:.0%})"


def count(cursor: GoalCursor) -> str:
    return f"{len(cursor.attempts)} attempts" if len(cursor.attempts) != 1 else "1 attempt"
