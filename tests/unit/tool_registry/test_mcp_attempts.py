"""The state of one call of a tool of an MCP server: when it is made again, and how it ends else (TOOL-3, ASYNC-1)."""

from __future__ import annotations

from typing import Any

import pytest

from pawl.tool_registry.adapters.mcp.attempts import (
    ATTEMPTS_MAX,
    LOOKS_FAILED_MAX,
    PAUSE_SECONDS,
    PAUSE_SECONDS_MAX,
    Attempts,
    Fault,
    Garbled,
    Gone,
    InDoubt,
    Looks,
    Lost,
    Refused,
    TooLarge,
    checkpoint_of,
)
from pawl.tool_registry.domain.definition import ToolDefinition
from pawl.tool_registry.sdk.context import OutcomeUnknown, ResultTooLarge, ToolError
from pawl.values import Category, EffectClass
from tests.tables import for_each

REPEATABLE = [EffectClass.READ_ONLY, EffectClass.IDEMPOTENT]
OTHERS = [EffectClass.AT_MOST_ONCE, EffectClass.RECONCILABLE]
FORGOTTEN = Gone("it does not know the task any more", OutcomeUnknown())
INTERNAL, INVALID_PARAMS = -32603, -32602
CANCELLED = Gone("it has cancelled the task", ToolError("cancelled"), was_cancelled=True)


def attempts(effect: EffectClass, checkpoint: Any = None) -> Attempts:
    definition = ToolDefinition(
        name="fake.do", description="Does.", arguments_schema={}, category=Category.SAFE, effect=effect
    )
    return Attempts(definition, checkpoint)


def end(call: Attempts, fault: Fault) -> str:
    """The type of the end of a call after a fault; empty if it is made again."""
    try:
        call.again(fault)
    except (ToolError, OutcomeUnknown) as error:
        return type(error).__name__
    return ""


@for_each("effect", REPEATABLE + OTHERS)
def test_what_never_ran_is_made_again_whatever_its_effect(effect: EffectClass) -> None:
    assert end(attempts(effect), Lost("gone", never_ran=True)) == ""


@for_each("fault", [Lost("gone"), FORGOTTEN, InDoubt()])
@for_each("effect", REPEATABLE)
def test_what_does_no_harm_is_made_again_and_not_for_ever(effect: EffectClass, fault: Fault) -> None:
    call = attempts(effect)
    assert [end(call, fault) for _ in range(ATTEMPTS_MAX)] == [""] * (ATTEMPTS_MAX - 1) + ["ToolError"]


@for_each("effect", OTHERS)
def test_what_may_have_had_its_effect_is_not_made_again(effect: EffectClass) -> None:
    assert end(attempts(effect), Lost("gone")) == "OutcomeUnknown"
    assert end(attempts(effect), FORGOTTEN) == "OutcomeUnknown"
    assert end(attempts(effect), CANCELLED) == "ToolError"
    assert end(attempts(effect), Garbled()) == "OutcomeUnknown"


@pytest.mark.parametrize("effect", REPEATABLE + OTHERS)
def test_an_answer_that_would_be_the_same_again_ends_the_call(effect: EffectClass) -> None:
    assert end(attempts(effect), TooLarge("too much")) == "ResultTooLarge"
    assert end(attempts(effect), Refused("no")) == "ToolError"
    assert end(attempts(effect), Garbled()) == ("ToolError" if effect in REPEATABLE else "OutcomeUnknown")


def test_that_an_effect_may_have_happened_is_said_where_it_may() -> None:
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


@pytest.mark.parametrize("effect", REPEATABLE)
def test_a_task_that_its_server_cancelled_is_begun_again_if_an_earlier_execution_had_begun_it(
    effect: EffectClass,
) -> None:
    call = attempts(effect, checkpoint_of("task-1"))
    assert call.task_id == "task-1"
    assert end(call, CANCELLED) == ""
    assert call.task_id == "", "the next attempt begins another one"
    assert end(call, CANCELLED) == "ToolError", "this one was its own"


def test_a_call_about_which_nobody_can_be_asked_any_more_is_unknown_once_it_was_begun() -> None:
    error = ToolError("the source was removed")
    assert attempts(EffectClass.READ_ONLY).unasked(error) is error
    assert isinstance(attempts(EffectClass.READ_ONLY, checkpoint_of("1")).unasked(error), OutcomeUnknown)


def looked_at(status: str) -> Looks:
    looks = Looks("task-1")
    looks.begin()
    if status:
        looks.saw(status)
    return looks


def times(looks: Looks, fault: Lost | Refused) -> int:
    """How often a fault may happen before it is the end; at most 20."""
    for count in range(20):
        try:
            if isinstance(fault, Lost):
                looks.lost(fault)
            else:
                looks.refused(fault)
        except Gone:
            return count
    return 20


@for_each("status", ["", "completed"])
@for_each("fault", [Lost("it died"), Refused("come back later", code=INTERNAL)])
def test_a_look_that_fails_again_and_again_is_the_end(status: str, fault: Lost | Refused) -> None:
    assert times(looked_at(status), fault) == LOOKS_FAILED_MAX - 1


def test_a_task_that_is_at_work_in_between_is_looked_at_on_and_on() -> None:
    looks = looked_at("")
    for _ in range(20):
        looks.lost(Lost("it died"))
        looks.begin()
        looks.saw("working")


def test_a_connection_may_break_as_often_as_it_likes_while_a_user_is_asked() -> None:
    assert times(looked_at("input_required"), Lost("a proxy has no patience")) == 20
    assert times(looked_at("input_required"), Refused("no", code=INTERNAL)) == LOOKS_FAILED_MAX - 1


def test_a_task_that_its_server_does_not_know_is_gone_at_once() -> None:
    assert times(looked_at(""), Refused("no such task", code=INVALID_PARAMS)) == 0
    assert times(looked_at("completed"), Refused("no such task", code=INVALID_PARAMS)) > 0, "a look says more"
    with pytest.raises(Refused, match="no such city"):
        looked_at("failed").refused(Refused("no such city", code=INTERNAL))


def test_pauses_grow_and_end_when_the_task_is_at_work() -> None:
    looks = looked_at("")
    pauses = [looks.pause_seconds() for _ in range(20)]
    assert pauses == sorted(pauses)
    assert (pauses[0], pauses[-1]) == (PAUSE_SECONDS, PAUSE_SECONDS_MAX)
    looks.saw("working")
    assert looks.pause_seconds() == PAUSE_SECONDS
