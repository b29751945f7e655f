"""Elicitation: questions from MCP servers to people, and the replies that the servers get."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mcp.types
import pytest

from pawl.chassis.ids import StoreId
from pawl.tool_registry.catalog.ports import TooCostly
from pawl.tool_registry.sources.mcp.elicitation import SCHEMA_BYTES_MAX, Reader, UnanswerableQuestion, ask_person
from pawl.tools import QuestionDeclined, ToolError
from tests.tables import for_each

T = TypeVar("T")


class Person:
    def __init__(self, *answers: str | None) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.options: list[Sequence[str]] = []
        self.schemas: list[bytes] = []
        self.why = ""

    async def ask(
        self, question: str, *, why: str, kind: str, options: Sequence[str], answer_schema_json: bytes
    ) -> str:
        self.schemas.append(answer_schema_json)
        self.asked.append(question)
        self.options.append(options)
        self.why = why
        answer = self.answers.pop(0)
        if answer is None:
            raise QuestionDeclined("nobody")
        return answer


class Bounded:
    """Runs functions in this process instead of a helper process. `is_costly` makes them exceed their time limit."""

    is_costly = False

    async def run(self, store_id: str, function: Callable[..., T], *arguments: Any, cpu_seconds: float) -> T:
        if self.is_costly:
            raise TooCostly
        result: T = pickle.loads(pickle.dumps(function))(*arguments)  # noqa: S301  # as a helper does
        return result


READER = Reader(Bounded(), StoreId("acme"))
answer_problem = READER.answer_problem


def form(properties: dict[str, Any], **more: Any) -> mcp.types.ElicitRequestFormParams:
    schema = {"type": "object", "properties": properties, **more}
    return mcp.types.ElicitRequestFormParams(message="Tell\0 me.", requested_schema=schema)


async def reply_to(asked: mcp.types.ElicitRequestParams, person: Person) -> tuple[str, Any]:
    def clean(text: str) -> str:
        return text.replace("\0", "").replace("s3cret", "[secret]")

    result = await ask_person(asked, person.ask, source="shop", clean=clean, reader=READER)
    return result.action, result.content


ENUM = {"type": "string", "enum": ["s", "m"], "enumNames": ["Small", "Medium"]}
TITLED = {"type": "string", "oneOf": [{"const": "#f00", "title": "Red"}, {"const": "#0f0", "title": "Green"}]}
MANY = {"type": "array", "items": {"type": "string", "enum": ["a", "b", "c"]}, "minItems": 1}


@for_each(
    ("schema", "answer", "value", "options"),
    [
        ({"type": "string"}, "free text ", "free text ", []),
        ({"type": "string", "format": "email"}, "a@example.com", "a@example.com", []),
        (ENUM, "small", "s", ["Small", "Medium"]),
        (ENUM, "m", "m", ["Small", "Medium"]),
        ({"type": "string", "enum": ["a", "A"]}, "A", "A", ["a", "A"]),
        (TITLED, "Green", "#0f0", ["Red", "Green"]),
        ({"type": "boolean"}, "Yes.", True, ["yes", "no"]),
        ({"type": "boolean"}, "no", False, ["yes", "no"]),
        ({"type": "integer"}, " 12 ", 12, []),
        ({"type": "number"}, "1.5", 1.5, []),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "12", 12, []),
        (MANY, "a, c", ["a", "c"], []),
        (MANY, '["b"]', ["b"], []),
    ],
)
async def test_a_single_property_is_answered_directly(
    schema: dict[str, Any], answer: str, value: Any, options: list[str]
) -> None:
    person = Person(answer)
    assert await reply_to(form({"size": schema}), person) == ("accept", {"size": value})
    assert list(person.options[0]) == options
    assert await answer_problem(person.schemas[0], answer) == ""
    assert person.asked[0].startswith("Tell me.")


@for_each(
    ("schema", "answer"),
    [
        (ENUM, "huge"),
        ({"type": "boolean"}, "perhaps"),
        ({"type": "integer"}, "1.5"),
        ({"type": "integer"}, "true"),
        ({"type": "integer", "maximum": 5}, "6"),
        ({"type": "number"}, "many"),
        ({"type": "number"}, "NaN"),
        ({"type": "string", "format": "email"}, "nobody"),
        ({"type": "string", "minLength": 3}, "ab"),
        ({"type": "string", "enum": ["a", "A"]}, "ä"),
        (MANY, "a, z"),
        (MANY, ""),
    ],
)
async def test_an_invalid_answer_is_retried_once_then_declined(schema: dict[str, Any], answer: str) -> None:
    person = Person(answer, answer)
    assert await reply_to(form({"size": schema}), person) == ("decline", None)
    assert person.asked[1].startswith("That answer is not valid: ")
    assert person.asked[1].endswith(person.asked[0]), "the question is still there"
    problem = await answer_problem(person.schemas[0], answer)
    assert problem
    assert problem in person.asked[1], "the problem is reported before the answer is accepted"


async def test_several_properties_are_answered_with_json() -> None:
    properties = {
        "name": {"type": "string", "title": "Name", "description": "as on the card"},
        "size": ENUM,
        "gift": {"type": "boolean", "default": False},
        "count": {"type": "integer", "minimum": 1},
    }
    person = Person("Ann", '{"name": "Ann", "size": "s", "count": 2}')
    reply = await reply_to(form(properties, required=["name", "count"]), person)
    assert reply == ("accept", {"name": "Ann", "size": "s", "gift": False, "count": 2})
    assert person.asked[0].splitlines() == [
        "Tell me.",
        "Answer with a JSON object with these properties:",
        "- name: Name; as on the card; text; required",
        "- size: one of Small, Medium; optional",
        "- gift: true or false; default false; optional",
        "- count: whole number; required",
    ]
    assert '"name": ...' in person.asked[1]
    assert '"name": ...' in await answer_problem(person.schemas[0], "Ann")
    assert (await answer_problem(person.schemas[0], '{"name": "Ann", "count": 0}')).startswith("count: ")


async def test_invalid_json_answers_are_declined() -> None:
    asked = form({"a": {"type": "integer"}, "b": {}}, required=["a"])
    for answer in ('{"b": 1}', '{"a": "x"}', "[]", '{"a": 1, "b": {"c": 2}}'):
        assert await reply_to(asked, Person(answer, answer)) == ("decline", None), answer


async def test_an_unanswered_question_is_declined() -> None:
    assert await reply_to(form({"a": ENUM}), Person(None)) == ("decline", None)


@for_each(("answer", "action"), [("yes", "accept"), ("no", "decline")])
async def test_a_form_without_fields_asks_for_confirmation(answer: str, action: str) -> None:
    person = Person(answer)
    assert (await reply_to(form({}), person))[0] == action
    assert await answer_problem(person.schemas[0], answer) == ""
    assert await answer_problem(person.schemas[0], "perhaps") == "it must be yes or no"


@for_each(("answer", "action"), [("done", "accept"), ("no", "decline")])
async def test_a_url_is_shown_with_its_host_and_confirmed(answer: str, action: str) -> None:
    url = "https://login.example.com/start?state=1#here"
    asked = mcp.types.ElicitRequestURLParams(message="Log in.", url=url, elicitation_id="e1")
    person = Person(answer)
    assert await reply_to(asked, person) == (action, None)
    assert await answer_problem(person.schemas[0], answer) == ""
    assert await answer_problem(person.schemas[0], "perhaps") == "it must be yes or no"
    assert url in person.asked[0]
    assert "page of login.example.com" in person.asked[0]


@for_each("url", ["javascript:alert(1)", "file:///etc/passwd", "https://bank.example@evil.example/"])
async def test_a_suspicious_url_is_not_shown(url: str) -> None:
    with pytest.raises(UnanswerableQuestion):
        await reply_to(mcp.types.ElicitRequestURLParams(message="Log in.", url=url), Person())


@for_each(
    "asked",
    [
        form({"a": {"type": "nonsense"}}),
        form({"a": 5}),
        form({"a": {"$ref": "https://example.com/schema"}}),
        form({f"property_{number}": {"description": "x" * 300} for number in range(20)}),
    ],
)
async def test_requests_that_cannot_be_shown_to_a_user_are_reported(asked: mcp.types.ElicitRequestFormParams) -> None:
    with pytest.raises(UnanswerableQuestion):
        await reply_to(asked, Person())


async def test_an_answer_that_takes_too_long_to_check_is_invalid() -> None:
    costly = Bounded()
    costly.is_costly = True
    reader = Reader(costly, StoreId("acme"))
    person = Person("x" * 50_000, "ab")
    asked = form({"name": {"type": "string", "pattern": "^[a-z]+$"}})
    result = await ask_person(asked, person.ask, source="shop", clean=str, reader=reader)
    assert (result.action, result.content) == ("accept", {"name": "ab"})
    assert person.asked[1].startswith("That answer is not valid: it takes too long to check")
    assert (await reader.answer_problem(person.schemas[0], "x" * 50_000)).startswith("it takes too long")


async def test_a_long_list_of_choices_is_put_into_the_question() -> None:
    person = Person("v70")
    schema = {"type": "string", "enum": [f"v{number}" for number in range(80)]}
    assert await reply_to(form({"a": schema}), person) == ("accept", {"a": "v70"})
    assert list(person.options[0]) == []
    assert "v3, v4" in person.asked[0]


@for_each("text", ["s3cret", "x" * SCHEMA_BYTES_MAX])
async def test_hidden_or_oversized_schemas_are_not_shown(text: str) -> None:
    person = Person("many", "3")
    schema = {"type": "integer", "examples": [{"deep": [text]}]}
    assert await reply_to(form({"n": schema}), person) == ("accept", {"n": 3})
    assert person.schemas == [b"", b""]
    assert await answer_problem(b"", "many") == "", "the tool asks once more"


async def test_an_error_while_asking_is_passed_on() -> None:
    class Unavailable(Person):
        async def ask(self, question: str, **_about: object) -> str:
            raise ToolError("a tool may ask 20 questions in a call")

    with pytest.raises(ToolError, match="20 questions"):
        await reply_to(form({"a": ENUM}), Unavailable())
