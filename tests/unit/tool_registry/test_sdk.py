"""The SDK for writing tools (TOOL-3, TOOL-4, TOOL-9)."""

from __future__ import annotations

import dataclasses
import enum
import threading
from datetime import date
from typing import Annotated, Any

import msgspec
import pydantic
import pytest

from pawl.tools import (
    Category,
    EffectClass,
    ExecutionContext,
    ProcessLimits,
    SecretNotFound,
    ToolCancelled,
    ToolContext,
    ToolDefinitionError,
    ToolError,
    cannot_say,
    tool,
)
from pawl.tools.rules.definition import decode_definition, encode_definition
from pawl.tools.sdk.signature import read_docstring
from pawl.tools.sdk.values import plain, without
from pawl.values import JobReports, ReportPolicy
from tests.tables import for_each


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Item:
    name: str
    count: int = 1


class Span(msgspec.Struct):
    start: date
    end: date | None = None


class Model(pydantic.BaseModel):
    size: int


@tool
def everything(text: str) -> str:
    """Take everything."""
    return text


def test_descriptions_come_from_the_docstring_or_annotated_types() -> None:
    @tool(name="look_up")
    def look(word: str, language: Annotated[str, "two letters"] = "en", limit: int = 3) -> str:
        """Look a word up.

        In every dictionary.

        Args:
            word: what to look up,
                as written
            limit (int): how many
        Returns:
            What was found.
        """
        return f"{word}{language}{limit}"

    definition = look.definition
    described = {name: part.get("description") for name, part in definition.arguments_schema["properties"].items()}
    assert (definition.name, definition.description) == ("look_up", "Look a word up.\n\nIn every dictionary.")
    assert described == {"word": "what to look up, as written", "language": "two letters", "limit": "how many"}


def test_sphinx_docstrings_are_read_too() -> None:
    def function() -> None:
        """Do it.

        :param str word: what to do
            it with
        :returns: nothing
        """

    assert read_docstring(function) == ("Do it.", {"word": "what to do it with"})


def test_a_tool_without_options_gets_the_most_cautious_defaults() -> None:
    """TOOL-2: the tool is sensitive, takes effect at most once, and never runs in parallel."""
    made = everything.definition
    assert (made.category, made.effect, made.parallel) == (Category.SENSITIVE, EffectClass.AT_MOST_ONCE, False)


def test_a_tool_can_still_be_called_as_a_function() -> None:
    @tool
    def double(number: int, context: ToolContext) -> int:
        """Double a number."""
        return number * 2 * context.attempt

    assert double(4, ToolContext()) == 8
    assert "context" not in double.definition.arguments_schema["properties"]
    assert double.bind({"number": 5}, ToolContext(attempt=3))() == 30


def silent(word: str) -> None:
    pass


@for_each(
    "options",
    [
        {"category": "harmless"},
        {"effect": "readonly"},
        {"parallel": "no"},
        {"allowed_roles": "admin"},
        {"resource_keys": "word"},
        {"rate_per_minute": 1.5},
        {"approvals_required": "2"},
        {"process": True},
        {"heartbeat_seconds": 0.01},
        {"heartbeat_seconds": -1},
    ],
)
def test_an_option_of_the_wrong_type_is_refused_at_definition(options: dict[str, Any]) -> None:
    """Otherwise the registry would fail when it saves this tool and all others."""
    (name,) = options
    with pytest.raises(ToolDefinitionError, match=f"everything: .*{name}"):
        tool(**options)(everything.function)


@for_each(
    ("options", "says"),
    [
        ({"category": "harmless"}, r"category.*; it may be SAFE, SENSITIVE, DESTRUCTIVE$"),
        ({"heartbeat_seconds": 5, "context": ExecutionContext.FRONTEND}, "that the registry runs"),
        ({"effect": "readonly"}, r"effect.*; it may be READ_ONLY, "),
        ({"effect": EffectClass.RECONCILABLE}, "reconcile"),
        ({"effect": EffectClass.IDEMPOTENT, "reconcile": cannot_say}, "reconcile"),
    ],
)
def test_an_invalid_combination_or_value_of_options_is_refused_with_advice(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ToolDefinitionError, match=says):
        tool(**options)(everything.function)


def test_category_and_effect_may_be_given_as_strings() -> None:
    options: dict[str, Any] = {"category": "SAFE", "effect": "READ_ONLY"}
    definition = tool(**options)(everything.function).definition
    assert (definition.category, definition.effect) == (Category.SAFE, EffectClass.READ_ONLY)
    assert encode_definition(definition)


def test_arguments_that_fail_type_validation_give_an_error_result() -> None:
    class Even(pydantic.BaseModel):
        number: int

        @pydantic.field_validator("number")
        @classmethod
        def check(cls, value: int) -> int:
            if value % 2:
                raise ValueError("must be even")
            return value

    def halve(even: Even) -> int:
        """Halve."""
        return even.number // 2

    halve.__annotations__["even"] = Even  # A local name, which no module contains.
    with pytest.raises(ToolError, match="must be even"):
        tool(halve).bind({"even": {"number": 3}}, ToolContext())


def test_a_context_reports_cancellation() -> None:
    """TOOL-4: a function that waits is woken."""
    flag = threading.Event()
    context = ToolContext(_cancelled=flag)
    context.check_cancelled()
    assert not context.wait_cancelled(0)
    flag.set()
    assert (context.cancelled, context.wait_cancelled(60)) == (True, True)
    with pytest.raises(ToolCancelled):
        context.check_cancelled()


def test_secrets_are_redacted_from_every_string_in_a_value() -> None:
    """TOOL-4, I22: the keys of objects are redacted too."""
    value: Any = {"a hunter2 b": ["hunter2", {"x": "say hunter2!"}], "n": 1}
    assert without({"hunter2"}, value) == {"a [secret] b": ["[secret]", {"x": "say [secret]!"}], "n": 1}


@for_each(
    ("reports_given", "policy"),
    [
        ("", None),
        ("end", ReportPolicy(reports=JobReports.END)),
        ("none", ReportPolicy(reports=JobReports.NONE)),
        ({"every": 10}, ReportPolicy(reports=JobReports.EVERY, report_iterations=10)),
        ({"digest": 600}, ReportPolicy(reports=JobReports.DIGEST, report_seconds=600.0)),
        ({"progress": [25, 50]}, ReportPolicy(reports=JobReports.PROGRESS, report_percents=(25, 50))),
        ({"minutes": 10}, ReportPolicy(reports=JobReports.PROGRESS, report_seconds=600.0)),
    ],
)
def test_a_tool_may_configure_its_jobs_reports(reports_given: Any, policy: ReportPolicy | None) -> None:
    """ASYNC-5: a stored definition reads back the same."""

    @tool(reports=reports_given)
    def look() -> None:
        """Look."""

    definition = look.definition
    assert definition.reports == policy
    assert decode_definition(msgspec.json.decode(encode_definition(definition))) == definition


@for_each(
    ("reports_given", "options"),
    [
        ("sometimes", {}),
        ("digest", {}),
        (["end"], {}),
        ({"change": 2}, {}),
        ({"every": 1.5}, {}),
        ({"every": -1}, {}),
        ({"every": 1_000_001}, {}),
        ({"digest": 0.4}, {}),
        ({"digest": float("nan")}, {}),
        ({"every": 2, "digest": 3}, {}),
        ("end", {"background": False}),
    ],
)
def test_invalid_job_options_are_refused_at_definition(reports_given: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ToolDefinitionError, match="reports"):

        @tool(reports=reports_given, **options)
        def look() -> None:
            """Look."""


def test_return_values_become_json() -> None:
    value = {"c": Color.RED, "i": Item("x"), "s": Span(start=date(2026, 1, 2)), "m": Model(size=2), "t": (1, 2)}
    assert plain(value) == {
        "c": "red",
        "i": {"name": "x", "count": 1},
        "s": {"start": "2026-01-02", "end": None},
        "m": {"size": 2},
        "t": [1, 2],
    }
    with pytest.raises(TypeError):
        plain(object())
    with pytest.raises(SecretNotFound, match="api_key"):
        ToolContext().secret("api_key")
    with pytest.raises(ToolDefinitionError, match=r"silent: description is empty; write a docstring"):
        tool(silent)


@for_each(
    "limits",
    [
        {"memory_bytes": 0},
        {"memory_bytes": 2**41},
        {"memory_bytes": 1e9},
        {"cpu_seconds": 0},
        {"cpu_seconds": 0.5},
        {"cpu_seconds": True},
        {"cpu_seconds": 100_000},
    ],
)
def test_process_limits_are_whole_numbers_within_bounds(limits: dict[str, Any]) -> None:
    (name,) = limits
    with pytest.raises(ToolDefinitionError, match=rf"ProcessLimits: {name} must be an integer between 1"):
        ProcessLimits(**limits)


def top() -> str:
    """Return the name of a function at the top of its module."""
    return "top"


def test_a_function_that_cannot_be_imported_cannot_use_its_own_process() -> None:
    def inner() -> str:
        """Return the name of a nested function."""
        return "inner"

    with pytest.raises(ToolDefinitionError, match="inner: a function that runs in its own process must be at the top"):
        tool(process=ProcessLimits())(inner)


def test_only_backend_tools_may_use_a_process() -> None:
    with pytest.raises(ToolDefinitionError, match="top: only a BACKEND tool can run in its own process"):
        tool(process=ProcessLimits(), context=ExecutionContext.HUMAN)(top)
