from __future__ import annotations

import math
from typing import Any, Final

import msgspec

from pawl.agent_loop.goals import judging
from pawl.agent_loop.loop.rules import checks
from pawl.agent_loop.loop.rules.expression import ExpressionError
from pawl.agent_loop.loop.rules.options import NAME_CHARACTERS_MAX, TOOL_NAMES_MAX
from pawl.agent_loop.loop.rules.run import Goal, GoalAgent, GoalCriterion, GoalJudge
from pawl.chassis import strict_json
from pawl.chassis.ids import check_agent_name
from pawl.errors import InvalidField, PawlError

ATTEMPTS_MAX: Final = 100
ATTEMPTS: Final = 10
AIM_BYTES_MAX: Final = 16 * 1024
RUBRIC_BYTES_MAX: Final = 16 * 1024
INSTRUCTIONS_BYTES_MAX: Final = 16_000
WAIT_SECONDS_MAX: Final = 30 * 86_400.0


class _Asked(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments of a call to START_GOAL."""

    aim: str
    check_tool: str = ""
    check_arguments: dict[str, Any] = {}
    check_expression: str = ""
    rubric: str = ""
    tool_names: tuple[str, ...] = ()
    attempts_max: int = ATTEMPTS
    wait_minutes: float = 0.0
    deadline_minutes: float = 0.0


def goal_of(arguments_json: bytes, now: float) -> Goal:
    """Return the goal that a model's call starts.

    Raises:
        ValueError: The arguments are invalid. The message contains the reason.
    """
    try:
        given = msgspec.json.decode(arguments_json, type=_Asked)
    except msgspec.DecodeError as error:
        raise ValueError(f"{error}.") from None
    if not given.aim.strip() or bool(given.check_tool) is bool(given.rubric):
        raise ValueError("A goal requires an `aim`, and either a `check_tool` or a `rubric`.")
    goal = Goal(
        aim=strict_json.storable(given.aim),
        attempts_by=GoalAgent(tool_names=given.tool_names),
        criterion=GoalCriterion(
            tool_name=given.check_tool,
            arguments_json=strict_json.dumps_canonical(given.check_arguments) if given.check_arguments else b"",
            expression=given.check_expression,
            judge=GoalJudge(rubric=strict_json.storable(given.rubric)) if given.rubric else None,
        ),
        attempts_max=given.attempts_max,
        deadline_time=now + given.deadline_minutes * 60 if given.deadline_minutes else None,
        wait_seconds=given.wait_minutes * 60,
    )
    try:
        check(goal)
    except PawlError as error:
        raise ValueError(f"{error.message}.") from None
    return goal


def check(goal: Goal) -> None:
    """Validate a goal's fields.

    Raises:
        InvalidField, InvalidId, InvalidJson, TooLarge
    """
    checks.text(goal.aim, "goal.aim", bytes_max=AIM_BYTES_MAX)
    by = goal.attempts_by
    check_agent_name(by.agent, "goal.attempts_by.agent", optional=True)
    checks.text(by.instructions, "goal.attempts_by.instructions", bytes_max=INSTRUCTIONS_BYTES_MAX, may_be_empty=True)
    if len(by.tool_names) > TOOL_NAMES_MAX or not all(map(_is_name, by.tool_names)):
        wanted = f"at most {TOOL_NAMES_MAX} names of 1 to {NAME_CHARACTERS_MAX} characters"
        raise _invalid("attempts_by.tool_names", f"must be {wanted}")
    if not 1 <= goal.attempts_max <= ATTEMPTS_MAX:
        raise _invalid("attempts_max", f"must be between 1 and {ATTEMPTS_MAX}, got {goal.attempts_max}")
    if not math.isfinite(goal.wait_seconds) or not 0 <= goal.wait_seconds <= WAIT_SECONDS_MAX:
        raise _invalid("wait_seconds", f"must be between 0 and {WAIT_SECONDS_MAX:.0f}, got {goal.wait_seconds:g}")
    criterion = goal.criterion
    if bool(criterion.tool_name) is (criterion.judge is not None):
        raise _invalid("criterion", "must have either tool_name or judge")
    if criterion.judge is not None:
        for name in ("arguments_json", "expression"):
            if getattr(criterion, name):
                raise _invalid(f"criterion.{name}", "requires tool_name")
        check_agent_name(criterion.judge.agent, "goal.criterion.judge.agent", optional=True)
        checks.text(criterion.judge.rubric, "goal.criterion.judge.rubric", bytes_max=RUBRIC_BYTES_MAX)
        return
    if not _is_name(criterion.tool_name):
        raise _invalid("criterion.tool_name", f"must have 1 to {NAME_CHARACTERS_MAX} printable characters")
    checks.arguments_json(criterion.arguments_json or b"{}")
    try:
        if criterion.expression:
            judging.check_expression(criterion.expression)
    except ExpressionError as error:
        raise InvalidField(f"goal.criterion.expression: {error}", field="goal.criterion.expression") from None


def _invalid(name: str, problem: str) -> InvalidField:
    return InvalidField(f"goal.{name} {problem}", field=f"goal.{name}")


def _is_name(name: str) -> bool:
    return 0 < len(name) <= NAME_CHARACTERS_MAX and name.isprintable()
