"""When a call of an MCP tool is made again, and how it ends otherwise (TOOL-3)."""

from __future__ import annotations

import pytest

from pawl.tool_registry.adapters.mcp.attempts import (
    ATTEMPTS_MAX,
    Fault,
    Garbled,
    Lost,
    Refused,
    TooLarge,
    check_again,
)
from pawl.tool_registry.domain.definition import ToolDefinition
from pawl.tool_registry.sdk.context import OutcomeUnknown, ResultTooLarge, ToolError
from pawl.values import Category, EffectClass
from tests.tables import for_each

REPEATABLE = [EffectClass.READ_ONLY, EffectClass.IDEMPOTENT]
INTERNAL, INVALID_PARAMS = -32603, -32602


def tool(effect: EffectClass) -> ToolDefinition:
    return ToolDefinition(
        name="fake.do", description="Does.", arguments_schema={}, category=Category.SAFE, effect=effect
    )


def end(effect: EffectClass, fault: Fault, attempts: int = 1) -> str:
    """The type of the end of a call after a fault; empty if it is made again."""
    try:
        check_again(tool(effect), fault, attempts)
    except (ToolError, OutcomeUnknown) as error:
        return type(error).__name__
    return ""


@for_each("effect", list(EffectClass))
def test_a_call_that_never_ran_is_made_again_whatever_its_effect(effect: EffectClass) -> None:
    assert end(effect, Lost("gone", never_ran=True)) == ""


@for_each("effect", list(EffectClass))
def test_a_call_that_may_have_had_its_effect_is_made_again_only_if_that_does_no_harm(effect: EffectClass) -> None:
    is_harmless = effect in REPEATABLE
    assert end(effect, Lost("gone")) == ("" if is_harmless else "OutcomeUnknown")
    assert end(effect, Lost("gone"), ATTEMPTS_MAX) == ("ToolError" if is_harmless else "OutcomeUnknown")
    assert end(effect, Garbled()) == ("ToolError" if is_harmless else "OutcomeUnknown")
    assert end(effect, TooLarge("too much")) == "ResultTooLarge"
    assert end(effect, Refused("no")) == "ToolError"


@for_each(("effect", "is_said"), [(EffectClass.READ_ONLY, False), (EffectClass.AT_MOST_ONCE, True)])
def test_an_error_says_whether_the_call_may_have_had_its_effect(effect: EffectClass, is_said: bool) -> None:
    with pytest.raises(ResultTooLarge) as told:
        check_again(tool(effect), TooLarge("it sent too much"), 1)
    assert ("it may have had its effect" in str(told.value)) is is_said
    for code, may_say in ((INTERNAL, is_said), (INVALID_PARAMS, False)):
        with pytest.raises(ToolError) as failed:
            check_again(tool(effect), Refused("no such city", code=code), 1)
        assert ("it may have had its effect" in str(failed.value)) is may_say
