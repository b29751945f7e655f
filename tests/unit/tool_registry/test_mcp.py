"""MCP calls: connections, retries and cost limits (TOOL-3)."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar, cast
from unittest.mock import AsyncMock

import httpx2
import mcp.types
import pytest

from pawl.chassis.ids import StoreId
from pawl.errors import SourceUnreachable
from pawl.tool_registry.catalog.ports import Helper, TooCostly
from pawl.tool_registry.sources.mcp.attempts import ATTEMPTS_MAX, Fault, Garbled, Lost, Refused, TooLarge, check_retry
from pawl.tool_registry.sources.mcp.call import Call
from pawl.tool_registry.sources.mcp.connections import SESSIONS_MAX, Connections, SourceConnections
from pawl.tool_registry.sources.mcp.definitions import listed
from pawl.tool_registry.sources.mcp.elicitation import SCHEMA_BYTES_MAX, Reader, UnanswerableQuestion, ask_person
from pawl.tool_registry.sources.mcp.transports import RateLimit, limit_request, parse_cost
from pawl.tools import QuestionDeclined, ToolError
from pawl.tools.rules.definition import ToolDefinition, ToolVersion
from pawl.tools.sdk.context import OutcomeUnknown, ResultTooLarge, ToolContext
from pawl.values import Category, EffectClass
from tests.fakes.manual_clock import ManualClock
from tests.tables import for_each


def a_session(problem: str = "", **more: Any) -> Any:
    return SimpleNamespace(is_open=True, is_busy=True, used_at=0.0, started_at=0.0, problem=problem, **more)


def connections() -> Connections:
    nothing: Any = None
    return Connections(secrets=nothing, clock=ManualClock(), http=nothing, programs=nothing, idle_seconds=300.0)


def fill(made: Connections, store_id: StoreId) -> int:
    line = made.by_source.setdefault(
        (store_id, "source"), SourceConnections(fingerprint=(b"", ()), clock=ManualClock())
    )
    for opened in range(SESSIONS_MAX + 1):
        try:
            made.make_room(store_id)
        except SourceUnreachable:
            return opened
        line.sessions[f"user-{opened}"] = a_session()  # type: ignore[index]
    raise AssertionError("there is no limit")


def test_each_store_gets_half_of_the_connections_that_others_leave_free() -> None:
    made = connections()
    assert [fill(made, StoreId(store)) for store in "abcdefgh"] == [100, 50, 25, 12, 6, 3, 2, 1]
    assert sum(fill(made, StoreId(f"store-{number}")) for number in range(SESSIONS_MAX)) == 1
    assert len(list(made.all())) == SESSIONS_MAX


def test_a_crashing_source_restarts_with_backoff() -> None:
    clock = ManualClock()
    line = SourceConnections(fingerprint=(b"", ()), clock=clock)
    pauses = []
    for _ in range(9):
        line.ended(None, a_session("it died"))
        pauses.append(line.not_before - clock.monotonic())
    assert pauses == [0, 1, 2, 4, 8, 16, 32, 60, 60]
    line.recover()
    assert line.not_before == 0.0


REPEATABLE = [EffectClass.READ_ONLY, EffectClass.IDEMPOTENT]
INTERNAL, INVALID_PARAMS = -32603, -32602


def tool(effect: EffectClass) -> ToolDefinition:
    return ToolDefinition(
        name="fake.do", description="Does.", arguments_schema={}, category=Category.SAFE, effect=effect
    )


def end(effect: EffectClass, fault: Fault, attempts: int = 1) -> str:
    try:
        check_retry(tool(effect), fault, attempts)
    except (ToolError, OutcomeUnknown) as error:
        return type(error).__name__
    return ""


@for_each("effect", list(EffectClass))
def test_a_call_that_may_have_run_is_retried_only_if_repeating_is_harmless(effect: EffectClass) -> None:
    is_harmless = effect in REPEATABLE
    rows: list[tuple[Fault, int, str]] = [
        (Lost("gone", never_ran=True), 1, ""),
        (Lost("gone"), 1, "" if is_harmless else "OutcomeUnknown"),
        (Lost("gone"), ATTEMPTS_MAX, "ToolError" if is_harmless else "OutcomeUnknown"),
        (Garbled(), 1, "ToolError" if is_harmless else "OutcomeUnknown"),
        (TooLarge("too much"), 1, "ResultTooLarge"),
        (Refused("no"), 1, "ToolError"),
    ]
    assert [end(effect, fault, attempts) for fault, attempts, _ in rows] == [expected for *_, expected in rows]


@for_each(("effect", "has_warning"), [(EffectClass.READ_ONLY, False), (EffectClass.AT_MOST_ONCE, True)])
def test_an_error_reports_whether_the_call_may_have_taken_effect(effect: EffectClass, has_warning: bool) -> None:
    rows: list[tuple[Fault, type[ToolError], bool]] = [
        (TooLarge("it sent too much"), ResultTooLarge, has_warning),
        (Refused("no such city", code=INTERNAL), ToolError, has_warning),
        (Refused("no such city", code=INVALID_PARAMS), ToolError, False),
    ]
    for fault, error, may_say in rows:
        with pytest.raises(error) as raised:
            check_retry(tool(effect), fault, 1)
        assert ("may still have taken effect" in str(raised.value)) is may_say


REQUEST = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {}}
NOTIFICATION = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 1}}
ANSWER = {"jsonrpc": "2.0", "id": "q1", "result": {}}


@for_each(("message", "is_limited"), [(REQUEST, False), (NOTIFICATION, True), (ANSWER, True)])
async def test_only_a_request_may_wait_without_a_read_timeout(message: Any, is_limited: bool) -> None:
    client = httpx2.AsyncClient(timeout=httpx2.Timeout(30.0, read=None), trust_env=False)
    request = client.build_request("POST", "http://example.com", json=message)
    await limit_request(RateLimit(1, 1, ManualClock()), request)
    assert (request.extensions["timeout"]["read"] is not None) is is_limited
    assert request.extensions["timeout"]["connect"] == 30.0
    await client.aclose()


async def test_the_rate_limit_applies_after_a_burst() -> None:
    clock = ManualClock()
    pace = RateLimit(10, 2, clock)
    for _ in range(10):
        await pace.wait()
    late = asyncio.create_task(pace.wait(4))
    await clock.advance(1.9)
    assert not late.done()
    await clock.advance(0.2)
    assert late.done()
    await clock.advance(60)
    for _ in range(10):
        await pace.wait()


async def test_a_tool_list_that_repeats_endlessly_is_read_once() -> None:
    page = mcp.types.ListToolsResult(tools=[mcp.types.Tool(name="a", input_schema={})], next_cursor="1")
    client: Any = SimpleNamespace(session=SimpleNamespace(list_tools=AsyncMock(return_value=page)))
    tools, left_out = await listed(client, ())
    assert list(tools) == ["a"]
    assert [tool.name for tool in left_out] == ["a", "further tools"]


@for_each("flood", [b"\n", b"id\n", b"\r", b"[", b"{}"])
def test_content_that_is_slow_to_parse_counts_for_more_than_its_size(flood: bytes) -> None:
    assert parse_cost(flood * 1000, 0) > 10 * len(flood * 1000)


async def test_reports_of_questions_that_cannot_be_shown_are_limited_in_size() -> None:
    definition = tool(EffectClass.AT_MOST_ONCE)
    entry = ToolVersion(store_id=StoreId("acme"), definition=definition, version=1, source="mcp:fake", create_time=0.0)
    call = Call(entry, ToolContext(), (), Reader(cast("Helper", None), StoreId("acme")))
    properties: Any = {"a": {"type": "string", "pattern": "(", "description": "x" * 10_000}}
    schema = {"type": "object", "properties": properties}
    asked = mcp.types.ElicitRequestFormParams(message="Which?", requested_schema=schema)
    for _ in range(1000):
        assert (await call.ask(asked)).action == "decline"
    with pytest.raises(ToolError) as raised:
        call.outcome(mcp.types.CallToolResult(content=[]))
    assert ("Which?" in str(raised.value), len(str(raised.value)) < 50_000) == (True, True)


# Elicitation: questions from MCP servers to people, and the replies that the servers get.


T = TypeVar("T")


class Person:
    def __init__(self, *answers: str | None) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.options: list[Sequence[str]] = []
        self.schemas: list[bytes] = []

    async def ask(
        self, question: str, *, why: str, kind: str, options: Sequence[str], answer_schema_json: bytes
    ) -> str:
        self.schemas.append(answer_schema_json)
        self.asked.append(question)
        self.options.append(options)
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
    assert (list(person.options[0]), await answer_problem(person.schemas[0], answer)) == (options, "")
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
    problem = await answer_problem(person.schemas[0], answer)
    assert problem
    assert person.asked[1].startswith("That answer is not valid: ")
    assert problem in person.asked[1], "the problem is reported before the answer is accepted"
    assert person.asked[1].endswith(person.asked[0]), "the question is still there"


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


PAGE = "https://login.example.com/start?state=1#here"


@for_each(
    ("asked", "answer", "reply"),
    [
        (form({}), "yes", ("accept", {})),
        (form({}), "no", ("decline", None)),
        (mcp.types.ElicitRequestURLParams(message="Log in.", url=PAGE, elicitation_id="e1"), "done", ("accept", None)),
        (mcp.types.ElicitRequestURLParams(message="Log in.", url=PAGE, elicitation_id="e1"), "no", ("decline", None)),
    ],
)
async def test_a_form_without_fields_and_a_url_with_its_host_are_shown_and_confirmed(
    asked: mcp.types.ElicitRequestParams, answer: str, reply: tuple[str, Any]
) -> None:
    person = Person(answer)
    assert await reply_to(asked, person) == reply
    problems = [await answer_problem(person.schemas[0], each) for each in (answer, "perhaps")]
    assert problems == ["", "it must be yes or no"]
    parts = (PAGE, "page of login.example.com") if isinstance(asked, mcp.types.ElicitRequestURLParams) else ()
    assert [part for part in parts if part not in person.asked[0]] == []


@for_each(
    "asked",
    [
        *(
            mcp.types.ElicitRequestURLParams(message="Log in.", url=url)
            for url in ("javascript:alert(1)", "file:///etc/passwd", "https://bank.example@evil.example/")
        ),
        form({"a": {"type": "nonsense"}}),
        form({"a": 5}),
        form({"a": {"$ref": "https://example.com/schema"}}),
        form({f"property_{number}": {"description": "x" * 300} for number in range(20)}),
    ],
)
async def test_a_request_with_a_suspicious_url_or_unusable_form_is_not_shown(
    asked: mcp.types.ElicitRequestParams,
) -> None:
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
    assert (list(person.options[0]), "v3, v4" in person.asked[0]) == ([], True)


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
