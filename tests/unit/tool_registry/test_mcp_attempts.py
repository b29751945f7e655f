"""When a call of an MCP tool is made again, its task asked for again, and how it ends otherwise (TOOL-3, ASYNC-1)."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.tool_registry.adapters.mcp.attempts import (
    ASKED_MAX,
    ATTEMPTS_MAX,
    PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    Attempts,
    Cancelled,
    Fault,
    Garbled,
    Lost,
    Refused,
    TooLarge,
    checkpoint_of,
)
from pawl.tool_registry.domain.definition import Category, EffectClass, ToolDefinition
from pawl.tool_registry.sdk.context import OutcomeUnknown, ResultTooLarge, ToolError
from tests.tables import for_each

REPEATABLE = [EffectClass.READ_ONLY, EffectClass.IDEMPOTENT]
OTHERS = [EffectClass.AT_MOST_ONCE, EffectClass.RECONCILABLE]
INTERNAL, INVALID_PARAMS = -32603, -32602
FORGOTTEN = Refused("no such task", code=INVALID_PARAMS)
TASK = checkpoint_of("task-1")


def attempts(effect: EffectClass, checkpoint: Any = None, status: str = "") -> Attempts:
    definition = ToolDefinition(
        name="fake.do", description="Does.", arguments_schema={}, category=Category.SAFE, effect=effect
    )
    made = Attempts(definition, checkpoint)
    made.saw(status)
    return made


def end(call: Attempts, fault: Fault) -> str:
    """The type of the end of a call after a fault; empty if there is another attempt."""
    try:
        call.again(fault)
    except (ToolError, OutcomeUnknown) as error:
        return type(error).__name__
    return ""


def times(call: Attempts, fault: Fault) -> int:
    """How often a fault may happen before it is the end; at most 20."""
    return next((count for count in range(20) if end(call, fault)), 20)


@for_each("effect", REPEATABLE + OTHERS)
def test_what_never_ran_is_made_again_whatever_its_effect(effect: EffectClass) -> None:
    assert end(attempts(effect), Lost("gone", never_ran=True)) == ""


@for_each(("fault", "checkpoint"), [(Lost("gone"), None), (FORGOTTEN, TASK), (Cancelled("no"), TASK)])
@for_each("effect", REPEATABLE)
def test_a_call_that_does_no_harm_is_made_again_but_not_for_ever(
    effect: EffectClass, fault: Fault, checkpoint: Any
) -> None:
    call = attempts(effect, checkpoint)
    for count in range(ATTEMPTS_MAX):
        assert end(call, fault) == ("ToolError" if count == ATTEMPTS_MAX - 1 else "")
        call.task_id = "" if checkpoint is None else f"task-{count}"


@for_each("effect", OTHERS)
def test_a_call_that_may_have_had_its_effect_is_not_made_again(effect: EffectClass) -> None:
    assert end(attempts(effect), Lost("gone")) == "OutcomeUnknown"
    assert end(attempts(effect), Garbled()) == "OutcomeUnknown"
    assert end(attempts(effect, TASK), FORGOTTEN) == "OutcomeUnknown"
    assert end(attempts(effect, TASK), Lost("gone", never_ran=True)) == "", "its task is asked for again"
    assert end(attempts(effect, TASK), Cancelled("no")) == "ToolError"


@pytest.mark.parametrize("effect", REPEATABLE + OTHERS)
def test_an_answer_that_would_be_the_same_again_ends_the_call(effect: EffectClass) -> None:
    assert end(attempts(effect), TooLarge("too much")) == "ResultTooLarge"
    assert end(attempts(effect), Refused("no")) == "ToolError"
    assert end(attempts(effect, TASK, "failed"), Refused("no", code=INTERNAL)) == "ToolError"
    assert end(attempts(effect), Garbled()) == ("ToolError" if effect in REPEATABLE else "OutcomeUnknown")


def test_an_error_says_whether_the_call_may_have_had_its_effect() -> None:
    for effect, is_said in ((EffectClass.READ_ONLY, False), (EffectClass.AT_MOST_ONCE, True)):
        with pytest.raises(ResultTooLarge) as told:
            attempts(effect).again(TooLarge("it sent too much"))
        assert ("it may have had its effect" in str(told.value)) is is_said
        with pytest.raises(ToolError) as failed:
            attempts(effect).again(Refused("internal error", code=INTERNAL))
        assert ("it may have had its effect" in str(failed.value)) is is_said
        with pytest.raises(ToolError) as refused:
            attempts(effect).again(Refused("no such city", code=INVALID_PARAMS))
        assert "it may have had its effect" not in str(refused.value)


def test_a_started_call_that_no_server_can_be_asked_about_is_unknown() -> None:
    error = ToolError("the source was removed")
    assert attempts(EffectClass.READ_ONLY).unasked(error) is error
    assert isinstance(attempts(EffectClass.READ_ONLY, TASK).unasked(error), OutcomeUnknown)


@for_each("status", ["", "completed"])
@for_each("fault", [Lost("it died"), Refused("come back later", code=INTERNAL)])
def test_a_task_is_asked_for_three_times_in_a_row(status: str, fault: Fault) -> None:
    assert times(attempts(EffectClass.RECONCILABLE, TASK, status), fault) == ASKED_MAX - 1


@for_each("status", ["working", "input_required"])
def test_a_task_that_works_or_asks_in_between_is_asked_for_until_the_deadline(status: str) -> None:
    call = attempts(EffectClass.RECONCILABLE, TASK)
    for _ in range(20):
        assert end(call, Lost("it died")) == ""
        call.asks()
        call.saw(status)


def test_a_server_knows_the_task_whose_status_it_gave() -> None:
    assert times(attempts(EffectClass.RECONCILABLE, TASK), FORGOTTEN) == 0
    assert times(attempts(EffectClass.RECONCILABLE, TASK, "completed"), FORGOTTEN) == ASKED_MAX - 1


def test_pauses_grow_until_the_task_works() -> None:
    call = attempts(EffectClass.RECONCILABLE, TASK)
    pauses = [call.pause_seconds() for _ in range(20)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (PAUSE_SECONDS, PAUSE_SECONDS_MAX)
    call.saw("working")
    assert call.pause_seconds() == PAUSE_SECONDS
