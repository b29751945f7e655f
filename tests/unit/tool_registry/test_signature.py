"""Conversion of function types to schemas, and of arguments to function parameters (TOOL-3)."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import pathlib
import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NewType,
    NotRequired,
    Optional,
    TypedDict,
    TypeVar,
)

import msgspec
import pydantic
import pytest
import typing_extensions

from pawl.tool_registry.rules.check import Accepted, Refused, check_arguments
from pawl.tools import Tool, ToolContext, ToolDefinitionError, tool
from pawl.tools.rules.schema import compile_schema
from tests.tables import for_each

if TYPE_CHECKING:
    from fractions import Fraction

T = TypeVar("T")
UserId = NewType("UserId", str)


class Unwritable:
    """A value without a JSON form. Its fixed repr makes test ids the same in each process."""

    def __repr__(self) -> str:
        return "<object Unwritable>"


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Mixed(enum.Enum):
    ONE = 1
    TWO = "two"


@dataclasses.dataclass
class Item:
    name: str
    count: int = 1
    color: Color = Color.RED


@dataclasses.dataclass
class Node:
    value: int
    children: list[Node] = dataclasses.field(default_factory=list)


class Place(TypedDict):
    city: str
    zip: NotRequired[str]


class Point(NamedTuple):
    x: int
    y: int = 0


class Inner(pydantic.BaseModel):
    size: int = pydantic.Field(ge=1, description="how large")
    color: Color = Color.RED


class Outer(pydantic.BaseModel):
    inner: Inner
    more: list[Inner] = []
    when: datetime | None = None
    other_name: int = pydantic.Field(default=3, alias="otherName")


class Cat(pydantic.BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(pydantic.BaseModel):
    kind: Literal["dog"]
    barks: bool


@dataclasses.dataclass
class Box:
    inner: Inner


class AroundToo(typing_extensions.TypedDict):
    inner: Inner


class Plain:
    pass


NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def of(hint: Any, **options: Any) -> Tool[..., Any]:
    def take(it: Any) -> Any:
        """Return the argument."""
        return it

    take.__annotations__["it"] = hint
    if "default" in options:
        take.__defaults__ = (options["default"],)
    return tool(take)


def checked(it: Tool[..., Any], arguments: bytes) -> Accepted | Refused:
    return check_arguments(it.definition, compile_schema(it.definition.arguments_schema, recursion=True), arguments)


@for_each(
    ("hint", "written", "got"),
    [
        (Color, '"red"', Color.RED),
        (Level, "2", Level.HIGH),
        (Mixed, '"two"', Mixed.TWO),
        (Item, '{"name": "cup", "color": "blue"}', Item("cup", 1, Color.BLUE)),
        (Node, '{"value": 1, "children": [{"value": 2}]}', Node(1, [Node(2)])),
        (list[Item], '[{"name": "cup"}]', [Item("cup")]),
        (Item | None, "null", None),
        (Optional[Item], '{"name": "cup"}', Item("cup")),  # noqa: UP045  # written so by many
        (Item | Node, '{"value": 1}', Node(1)),
        (Place, '{"city": "Oslo"}', {"city": "Oslo"}),
        (Point, "[1, 2]", Point(1, 2)),
        (Inner, '{"size": 2}', Inner(size=2)),
        (Outer, '{"inner": {"size": 1}, "otherName": 4}', Outer(inner=Inner(size=1), otherName=4)),
        (dict[str, Inner], '{"a": {"size": 2}}', {"a": Inner(size=2)}),
        (Inner | None, '{"size": 2}', Inner(size=2)),
        (Cat | Dog, '{"kind": "dog", "barks": true}', Dog(kind="dog", barks=True)),
        (
            Annotated[Cat | Dog, pydantic.Field(discriminator="kind")],
            '{"kind": "cat", "lives": 9}',
            Cat(kind="cat", lives=9),
        ),
        (Box, '{"inner": {"size": 2}}', Box(Inner(size=2))),
        (AroundToo, '{"inner": {"size": 2}}', {"inner": Inner(size=2)}),
        (datetime, '"2026-01-02T12:00:00Z"', NOON),
        (datetime | None, '"2026-01-02T12:00:00Z"', NOON),
        (date, '"2026-01-02"', date(2026, 1, 2)),
        (time, '"12:00:00Z"', time(12, tzinfo=UTC)),
        (timedelta, '"PT5S"', timedelta(seconds=5)),
        (Literal["a", 1] | None, "1", 1),
        (dict[str, int], '{"a": 1}', {"a": 1}),
        (dict[int, str], '{"1": "a"}', {1: "a"}),
        (dict[Color, int], '{"red": 1}', {Color.RED: 1}),
        (dict, '{"a": [1]}', {"a": [1]}),
        (Sequence[int], "[1, 2]", [1, 2]),
        (set[int], "[1, 2]", {1, 2}),
        (tuple[int, str], '[1, "a"]', (1, "a")),
        (Any, '{"a": 1}', {"a": 1}),
        (UserId, '"ann"', "ann"),
        (decimal.Decimal, '"1.50"', decimal.Decimal("1.50")),
        (uuid.UUID, '"00000000-0000-0000-0000-000000000001"', uuid.UUID(int=1)),
        (bytes, '"aGk="', b"hi"),
        (pathlib.PurePosixPath, '"a/b"', pathlib.PurePosixPath("a/b")),
        ("Item", '{"name": "cup"}', Item("cup")),
        ("list[Node]", '[{"value": 1}]', [Node(1)]),
    ],
)
def test_arguments_are_converted_to_the_parameter_types(hint: Any, written: str, got: Any) -> None:
    it = of(hint)
    accepted = checked(it, b'{"it": %s}' % written.encode())
    assert isinstance(accepted, Accepted), accepted
    assert it.bind(accepted.arguments, ToolContext())() == got


@for_each(
    ("hint", "written"),
    [
        (Color, '"green"'),
        (Level, "3"),
        (Item, '{"name": "cup", "colour": "red"}'),
        (list[Item], '[{"name": "cup", "count": "many"}]'),
        (Node, '{"value": 1, "children": [{}]}'),
        (Place, '{"zip": "0150"}'),
        (Place, '{"city": "Oslo", "zap": "0150"}'),
        (Inner, '{"size": 0}'),
        (Outer, '{"inner": {"size": 0}}'),
        (dict[str, Inner], '{"a": {"size": 0}}'),
        (Annotated[int, pydantic.Field(ge=1)], "0"),
        (pydantic.PositiveInt, "0"),
        (Annotated[str, pydantic.StringConstraints(pattern="^a$")], '"b"'),
        (Annotated[int, msgspec.Meta(le=5)], "6"),
        (datetime, '"tomorrow"'),
        (time, '"noon"'),
        (dict[str, int], '{"a": "x"}'),
        (Literal["a", "b"], '"c"'),
        (pydantic.HttpUrl, '"no address"'),
    ],
)
def test_mismatched_arguments_are_refused_before_the_function_runs(hint: Any, written: str) -> None:
    assert isinstance(checked(of(hint), b'{"it": %s}' % written.encode()), Refused)


@for_each(
    ("hint", "default", "shown"),
    [
        (Color, Color.BLUE, "blue"),
        (Level, Level.LOW, 1),
        (Item, Item("cup"), {"name": "cup", "count": 1, "color": "red"}),
        (Inner, Inner(size=2), {"size": 2, "color": "red"}),
        (
            Outer,
            Outer(inner=Inner(size=1)),
            {"inner": {"size": 1, "color": "red"}, "more": [], "when": None, "otherName": 3},
        ),
        (list[Inner], [Inner(size=1)], [{"size": 1, "color": "red"}]),
        (datetime, NOON, "2026-01-02T12:00:00Z"),
        (timedelta, timedelta(seconds=5), "PT5S"),
        (str | None, None, None),
        (tuple[int, ...], (1, 2), [1, 2]),
        (set[int], {1}, [1]),
        (float, 1, 1),
    ],
)
def test_a_default_is_in_the_schema_and_passed_to_the_function(hint: Any, default: Any, shown: Any) -> None:
    it = of(hint, default=default)
    assert it.definition.arguments_schema["properties"]["it"]["default"] == shown
    assert it.bind({}, ToolContext())() == default
    accepted = checked(it, b"{}")
    assert isinstance(accepted, Accepted)
    assert accepted.arguments == {"it": shown}
    assert it.bind(accepted.arguments, ToolContext())() == default


@for_each(
    ("hint", "text"),
    [
        (Annotated[str, "a word"], "a word"),
        (Annotated[str | None, "a word"], "a word"),
        (Optional[Annotated[str, "a word"]], "a word"),  # noqa: UP045  # written so by many
        (Annotated[str, typing_extensions.Doc("a word")], "a word"),
        (Annotated[str, msgspec.Meta(description="a word")], "a word"),
        (Annotated[int, pydantic.Field(ge=1, description="a number")], "a number"),
        (Annotated[Item, "an item"], "an item"),
        (Annotated[Inner, "a model"], "a model"),
    ],
)
def test_a_description_may_be_part_of_the_type(hint: Any, text: str) -> None:
    assert of(hint).definition.arguments_schema["properties"]["it"]["description"] == text


@for_each("hint", [ToolContext, ToolContext | None, Annotated[ToolContext, "the call"]])
def test_the_context_parameter_is_recognised_in_every_form(hint: Any) -> None:
    it = of(hint)
    assert it.definition.arguments_schema["properties"] == {}
    context = ToolContext(call_id="this")
    assert it.bind({}, context)() is context


def only_checked(it: Fraction) -> None:
    """Take a value of a type that only type checkers know."""


def two_contexts(one: ToolContext, two: ToolContext) -> None:
    """Take two contexts."""


def rest(**others: int) -> None:
    """Take arguments of any name."""


def positional(it: int, /) -> None:
    """Take a positional-only argument."""


def method(self: Any) -> None:
    """Take `self`, as a method does."""


def untyped(it: Any) -> None:
    """Take an argument without a type."""


del method.__annotations__["self"], untyped.__annotations__["it"]


@for_each(
    ("function", "reason"),
    [
        (only_checked, r"only_checked: parameter it: name 'Fraction' is not defined; .* TYPE_CHECKING"),
        (two_contexts, r"two_contexts: one and two are both ToolContext parameters; only one is allowed"),
        (untyped, r"untyped: parameter it has no type: add one, for example it: str"),
        (rest, r"rest: \*\*others.* write one parameter per argument"),
        (positional, r"positional: it.* write one parameter per argument"),
        (method, r"method: a method cannot be a tool; write a function outside the class"),
    ],
)
def test_an_unusable_function_is_refused_with_advice(function: Any, reason: str) -> None:
    with pytest.raises(ToolDefinitionError, match=reason):
        tool(function)


@for_each(
    ("hint", "reason"),
    [
        (Plain, r"Plain has no JSON Schema; write str, int, .* a dataclass, a TypedDict or a pydantic model"),
        (list[Plain], r"list\[.*Plain\] has no JSON Schema; write str"),
        (Callable[[int], int], r".*Callable.* has no JSON Schema; write str"),
        (T, r"the type variable ~T cannot be described"),
        (list[T], r"the type variable ~T cannot be described"),  # type: ignore[valid-type]
        (pydantic.SecretStr, r"the model cannot provide secrets: add a ToolContext parameter and call context.secret"),
        (pydantic.SecretStr | None, r"the model cannot provide secrets"),
    ],
)
def test_a_type_without_a_schema_is_refused_with_advice(hint: Any, reason: str) -> None:
    with pytest.raises(ToolDefinitionError, match=f"take: parameter it: {reason}"):
        of(hint)


@for_each(
    ("hint", "default", "reason"),
    [
        (int, "a", r"its default 'a' does not match its type$"),
        (int, 0.5, r"its default 0.5 does not match its type$"),
        (int, None, r"its default None does not match its type; add \| None to the type"),
        (Color, "green", r"its default 'green' does not match its type$"),
        (int, pydantic.Field(ge=1), r"put its Field inside Annotated"),
        (Any, Unwritable(), r"its default <object .* is not JSON; write None, and replace it in the function"),
    ],
)
def test_a_default_that_no_call_could_pass_is_refused(hint: Any, default: Any, reason: str) -> None:
    with pytest.raises(ToolDefinitionError, match=f"take: parameter it: {reason}"):
        of(hint, default=default)


def test_classes_with_the_same_name_stay_separate() -> None:
    def other() -> type[pydantic.BaseModel]:
        class Inner(pydantic.BaseModel):
            word: str

        class Holder(pydantic.BaseModel):
            inner: Inner

        return Holder

    def take(one: Any, two: Any) -> None:
        """Take two arguments."""

    take.__annotations__ |= {"one": Outer, "two": other()}
    validator = compile_schema(tool(take).definition.arguments_schema)
    assert validator.is_valid({"one": {"inner": {"size": 1}}, "two": {"inner": {"word": "a"}}})
    assert not validator.is_valid({"one": {"inner": {"size": 0}}, "two": {"inner": {"word": "a"}}})
    assert not validator.is_valid({"one": {"inner": {"size": 1}}, "two": {"inner": {"size": 1}}})
