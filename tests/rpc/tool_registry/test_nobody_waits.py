"""The worst that one store may send, beside the calls of another one: nobody waits for what a stranger wrote.

What others wait for is the longest stretch of work that the event loop does without a break. It is measured in
processor time of the loop's thread, which a busy machine does not stretch, and in units of a calibration, which a
slow one stretches as much. So nothing here depends on when anything happens.
"""

from __future__ import annotations

import asyncio
import gc
import json
import math
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pawl.agent_loop.adapters.model.sse import EVENT_BYTES_MAX, EventTooLargeError, SseDecoder
from pawl.agent_loop.domain import text as model_text
from pawl.chassis import strict_json
from pawl.chassis.egress import GuardedEgress
from pawl.chassis.egress_rules import EgressRefused, read_rules, read_target
from pawl.cli import wording
from pawl.errors import PawlError
from pawl.event.v1 import call_pb2
from pawl.tool.v1 import rule_pb2, source_pb2, tool_pb2
from pawl.tool_registry.adapters.http.tools import HttpTools
from pawl.tool_registry.adapters.process.helpers import Helpers
from pawl.tool_registry.app.execution import outcome as outcomes
from pawl.tool_registry.builtin.calculator import evaluate
from pawl.tool_registry.builtin.web import PAGE_BYTES_MAX, web_tools
from pawl.tool_registry.domain.check import QUICK_WORK_MAX, check_arguments, is_quick
from pawl.tool_registry.domain.definition import ARGUMENTS_BYTES_MAX, RESULT_BYTES_MAX, ToolDefinition
from pawl.tool_registry.domain.document import TEXT_BYTES_MAX, parts_of
from pawl.tool_registry.domain.gate import count_at, longest_array
from pawl.tool_registry.domain.http_binding import Binding, UnusableArgument, build
from pawl.tool_registry.domain.names import did_you_mean
from pawl.tool_registry.domain.patterns import ArgumentKind, ArgumentPattern, Matching, TooMuchToMatch
from pawl.tool_registry.domain.resources import resource_keys
from pawl.tool_registry.domain.schema import compile_schema, weigh
from pawl.tools import Category, EffectClass, ToolError, tool
from tests.rpc.tool_registry.registry import Registry, running
from tests.web_server import Reply, WebServer, web_server

# A search for the worst, which computes and computes.
pytestmark = pytest.mark.long

WAIT_SECONDS_MAX = 0.25
UNIT_SECONDS = 0.05
"""What `_unit` takes on the machine that the limit is meant for."""
UNITS = [b"[]", b"1", b"{}", b'""', b'{"":1}', b"1.5", b'"\\u0001"', b"1234567890123456789", b'"\xc3\xa9"', b"[[]]"]
DEFINITION = ToolDefinition(name="make", description="d", arguments_schema={"type": "object"})


def _unit() -> float:
    began = time.thread_time()
    found: dict[str, int] = {}
    for number in range(60_000):
        found[str(number)] = len(found)
    json.loads(json.dumps(found))
    return time.thread_time() - began


@pytest.fixture(scope="module")
def seconds_max() -> float:
    """The limit, in processor time of this machine."""
    return WAIT_SECONDS_MAX * max(1.0, min(_unit() for _ in range(5)) / UNIT_SECONDS)


def cost(work: Callable[[], Any]) -> float:
    """Return the processor time that some work takes: the least of three."""
    times = []
    for _ in range(3):
        began = time.thread_time()
        with suppress(PawlError, TooMuchToMatch, EgressRefused, ToolError, EventTooLargeError, UnusableArgument):
            work()
        times.append(time.thread_time() - began)
    return min(times)


class Stretches:
    """What the event loop has done without a break."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.what = ""


@contextmanager
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stretches]:
    """Measure every callback of the event loop, without collecting what earlier tests have left in this process."""
    stretches = Stretches()
    run = asyncio.events.Handle._run
    gc.collect()
    gc.freeze()

    def measured(handle: asyncio.Handle) -> None:
        began = time.thread_time()
        run(handle)
        used = time.thread_time() - began
        if used > stretches.longest:
            stretches.longest, stretches.what = used, repr(handle)[:300]

    with monkeypatch.context() as patch:
        patch.setattr(asyncio.events.Handle, "_run", measured)
        try:
            yield stretches
        finally:
            gc.unfreeze()


def filled(unit: bytes, size: int) -> bytes:
    """Return an array of as many units as fit."""
    return b"[" + b",".join([unit] * ((size - 2) // (len(unit) + 1))) + b"]"


# What a stranger writes is at most this long where it arrives.
def pure_work() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Return what is done in the event loop of some service, with the worst that it may be given."""
    binding = Binding(method="POST", url="https://a.example/", placements=[], rest="query")
    for unit in UNITS:
        yield f"strict JSON of {unit!r}", partial(parse, filled(unit, RESULT_BYTES_MAX))
        units_max = strict_json.CONTAINERS_MAX // (2 if unit == b"[[]]" else 1)
        room = units_max * (len(unit) + 1) if unit[:1] in b"[{" else RESULT_BYTES_MAX
        value = json.loads(filled(unit, min(room, RESULT_BYTES_MAX)))
        yield f"result of {unit!r}", partial(outcomes.of_value, DEFINITION, value, secrets=["secret"], seconds=1)
        arguments = {"body": json.loads(filled(unit, ARGUMENTS_BYTES_MAX))}
        yield f"array of {unit!r}", partial(longest_array, arguments)
        yield f"count of {unit!r}", partial(count_at, arguments, "$.body[*][*]")
        yield f"key of {unit!r}", partial(resource_keys, ("a:{body}",), arguments)
        yield f"request of {unit!r}", partial(build, binding, arguments)
        yield f"request with one value of {unit!r}", partial(build, binding, {"body": [arguments["body"]]})
    yield "JSON of colons", partial(parse, b'["' + b":" * 10**6 + b'"]')
    names = [("ab" * 32)[:-shift] + "b" * shift for shift in range(1, 64)] * 30
    yield "near matches", lambda: did_you_mean("ba" * 32, names)
    for glob in ("*a" * 400, "*" + "a?" * 450 + "b*", "*" + "a" * 900 + "b*", "*a?b*" * 190):
        for text in ("a" * 250_000, "axbx" * 60_000, "\ufdfa" * 80_000, "http://" + "a/../" * 50_000):
            yield f"glob {glob[:8]}", partial(match_all, glob, text)
    for text in ("a\u0301\u0327" * 60_000, "a" + "\u0301\u0327" * 60_000, "\u0f73\u0f81" * 40_000):
        yield f"marks {text[:3]!r}", partial(match_all, "*\u0301", text)
    short = Matching(arguments={"a": ["a"] * 60_000})
    long = ArgumentPattern(argument="a", glob="http://a.example/" + "\xe9" * 900)
    yield "glob of many texts", lambda: short.meets(long, strictly=False)
    below = Matching(arguments={"a": "a" * 4000}, is_below=frozenset({"a"}))
    yield "stars", lambda: below.meets(ArgumentPattern(argument="a", glob="*" * 999 + "b"), strictly=False)
    yield "URL", lambda: read_target("http://" + "\ufdfa." * 4000)
    yield "calculate", lambda: evaluate("(" * 90 + "9" * 200 + "**9)" * 10 + "*9)" * 80)
    yield "calculate powers", lambda: evaluate("+".join(["7**1400"] * 60))
    yield "document", lambda: parts_of("a" * TEXT_BYTES_MAX)
    yield "text of a model", lambda: strict_json.storable("\0\ud800" * 2_000_000)
    yield "name of a model", lambda: model_text.bare_name("<|" * 2_000_000)
    yield "shown text", lambda: wording.clean("\u202e\x1b" * 100_000)
    for piece in (b"data: \n", b"\n", b"data: a\n\n", b"\r", b":" * 100 + b"\n", b"data"):
        yield f"stream of {piece!r}", partial(feed, piece)


def parse(data: bytes) -> None:
    """Read what is as long as it may be."""
    strict_json.loads(data, bytes_max=RESULT_BYTES_MAX)


def match_all(glob: str, text: str) -> None:
    """Hold a text against a thousand rules."""
    matching = Matching(arguments={"a": text, "b": [text[:99]] * 2000}, kinds={"a": ArgumentKind.URL})
    for number in range(1000):
        for argument in ("a", "b"):
            matching.meets(ArgumentPattern(argument=argument, glob=f"{glob}{number}"), strictly=number % 2 == 0)


def feed(piece: bytes) -> None:
    """Read a chunk of a stream as it comes from a socket, in the middle of an event that is nearly too large."""
    decoder = SseDecoder()
    decoder.feed(b"data: " + b"a" * (EVENT_BYTES_MAX // 2))
    decoder.feed(piece * (256 * 1024 // len(piece)))


def test_nothing_that_the_event_loop_does_takes_long(seconds_max: float) -> None:
    slow = {name: took for name, work in pure_work() if (took := cost(work)) > seconds_max}
    assert slow == {}


LEAVES = st.sampled_from(
    [
        {"type": "integer"},
        {"type": "string", "maxLength": 3},
        {"enum": [f"{'a' * 30}{number}" for number in range(30)]},
        {"const": [[[]]]},
        {"type": "string", "pattern": "(a|b)*a(a|b){400}c"},
        {"required": [f"k{number}" for number in range(30)]},
        {"type": "string", "format": "email"},
        {"type": "array", "uniqueItems": True},
        {
            "properties": {f"{'a' * 30}{number}": {"type": "null"} for number in range(20)},
            "additionalProperties": False,
        },
        {"default": [[]] * 50},
    ]
)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=5).flatmap(
            lambda parts: st.sampled_from(["anyOf", "oneOf", "allOf"]).map(lambda word: {word: parts * 3})
        ),
        inner.map(lambda part: {"type": "array", "items": part}),
        inner.map(lambda part: {"type": "object", "additionalProperties": part}),
        inner.map(lambda part: {"type": "object", "properties": {"a": part, "b": part}, "required": ["a"]}),
        inner.map(lambda part: {"not": part}),
    ),
    max_leaves=12,
)
ITEMS = st.sampled_from(
    [b'"a"', b'"5"', b"1.0", b"{}", b'{"a":{}}', b'{"aaaab":1}', b"[[]]", b'"[1,2]"', b'"ab"', b"null", b'"true"']
)


@settings(deadline=None, max_examples=60)
@given(st.lists(SCHEMAS, min_size=1, max_size=4), ITEMS, st.integers(1, 4000))
def test_no_schema_and_arguments_that_are_checked_at_once_take_long(parts: list[Any], item: bytes, count: int) -> None:
    """A search for the worst: as many items as are still checked at once, of a schema of any shape."""
    schema = {"type": "object", "properties": {"a": {"type": "array", "items": {"anyOf": parts}}}}
    weight = weigh(schema)
    most = 0 if math.isinf(weight) else int(QUICK_WORK_MAX / weight - 80) // (len(item) + 1)
    if most < 1:
        return
    raw = b'{"a":[' + b",".join([item] * min(most, count)) + b"]}"
    assert is_quick(weight, raw)
    try:
        validator = compile_schema(schema)
    except PawlError:
        return
    definition = ToolDefinition(name="make", description="d", arguments_schema=schema)
    limit = WAIT_SECONDS_MAX * max(1.0, min(_unit() for _ in range(2)) / UNIT_SECONDS)
    assert cost(lambda: check_arguments(definition, validator, raw)) <= limit


def test_no_part_of_a_schema_makes_more_errors_than_it_weighs(seconds_max: float) -> None:
    """Each of these makes many errors of a few bytes."""
    names = [f"k{number}" for number in range(100)]
    parts: list[dict[str, Any]] = [
        {"required": names},
        {"dependentRequired": {"a": names}},
        {"allOf": [False] * 50},
        {"allOf": [{"maxLength": 0}] * 50},
        {"properties": {"a": {"allOf": [False] * 50}}},
    ]
    slow = {}
    for part in parts:
        schema: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "array", "items": part}}}
        validator, weight = compile_schema(schema), weigh(schema)
        definition = ToolDefinition(name="make", description="d", arguments_schema=schema)
        for item in (b"1", b"{}", b"[]", b'{"a":1}'):
            raw = b'{"a":' + filled(item, int(QUICK_WORK_MAX / weight) - 80) + b"}"
            assert is_quick(weight, raw)
            took = cost(lambda: check_arguments(definition, validator, raw))  # noqa: B023
            if took > seconds_max:
                slow[json.dumps(part)[:30], item] = took
    assert slow == {}


@tool(category=Category.SAFE, effect=EffectClass.READ_ONLY)
async def echo(text: str, items: list[Any] = []) -> str:  # noqa: B006
    """Say it again."""
    return text[:10]


def heavy_schemas() -> dict[str, dict[str, Any]]:
    """Schemas that may be registered and make as much work as they can."""
    branches = [{"type": "object", "required": [f"k{number}"]} for number in range(700)]
    nested: dict[str, Any] = {"type": "integer"}
    for _ in range(6):
        nested = {"anyOf": [nested, {"not": nested}]} if len(json.dumps(nested)) < 20_000 else {"anyOf": [nested]}
    names = {f"{'ab' * 28}{number:05d}": {"type": "integer"} for number in range(300)}
    pattern = {"type": "string", "pattern": "(a|b)*a(a|b){400}c"}
    return {
        "branches": {"items": {"anyOf": branches}},
        "nested": {"items": nested},
        "names": {"items": {"type": "object", "properties": names, "additionalProperties": False}},
        "patterns": {"items": {"anyOf": [pattern | {"minLength": number} for number in range(90)]}},
        "unevaluated": {"items": {"anyOf": branches[:300], "unevaluatedProperties": False}},
        "defaults": {"items": {"type": "object", "properties": {"d": {"default": [[0]] * 900}}}},
    }


def hostile_arguments() -> list[bytes]:
    """Return arguments up to their limit."""
    room = ARGUMENTS_BYTES_MAX - 20
    odd = ["ab" * 27 + f"x{number:03d}" for number in range(20)]
    return [
        json.dumps({"a": ["x"] * 700}).encode(),
        json.dumps({"a": [dict.fromkeys(odd, 1)] * 50}).encode(),
        *(b'{"a":' + filled(unit, room) + b"}" for unit in (b"[]", b'"5"', b'"' + b"ab" * 2000 + b'"')),
    ]


@pytest.fixture
async def worlds(database_url: str, tmp_path: Path) -> AsyncIterator[tuple[Registry, WebServer]]:
    """A registry with the tools that read what strangers write, and a server of a stranger."""
    async with web_server(lambda _: Reply(b"")) as server, Helpers() as helpers:
        rules = {"*": read_rules(None, [f"127.0.0.1:{server.port}"])}
        egress = GuardedEgress(rules, tls=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        connector = HttpTools(egress, helpers)
        tools = [echo, *web_tools(egress, helpers)]
        async with running(database_url, tmp_path, tools, connectors=lambda *_: {"http": connector}) as registry:
            yield registry, server


async def attack_with_schemas(registry: Registry, _: WebServer) -> None:
    for name, part in heavy_schemas().items():
        schema = {"type": "object", "properties": {"a": {"type": "array"} | part}}
        definition = tool_pb2.ToolDefinition(
            name=name,
            description="d",
            arguments_schema_json=json.dumps(schema).encode(),
            context=call_pb2.EXECUTION_CONTEXT_FRONTEND,
        )
        await registry.ann.RegisterTool(tool_pb2.RegisterToolRequest(definition=definition))
        for number, raw in enumerate(hostile_arguments()):
            with suppress(grpc.RpcError):  # It may take longer than its own caller waits.
                await registry.check(name, json.loads(raw), call=f"{name}{number}")


async def attack_with_rules(registry: Registry, _: WebServer) -> None:
    for number in range(40):
        glob = ("*a?b" * 200, "*" + "a?" * 400 + "b", "*a" * 400 + "b", "*" + "a" * 900 + "b*")[number % 4]
        rule = rule_pb2.Rule(
            effect=rule_pb2.RULE_EFFECT_DENY,
            scope=rule_pb2.RULE_SCOPE_USER,
            tool_name="*",
            arguments=[rule_pb2.ArgumentPattern(argument=name, glob=glob) for name in ("text", "items")],
        )
        with suppress(grpc.RpcError):
            await registry.rules["acme", "ann"].CreateRule(
                rule_pb2.CreateRuleRequest(rule=rule, request_id=f"r{number}")
            )
    for number, text in enumerate(("a" * 200_000, "axbx" * 50_000, "\ufdfa" * 60_000)):
        await registry.check("echo", {"text": text, "items": [text[:20]] * 1000}, call=f"ruled{number}")


async def attack_with_pages(registry: Registry, server: WebServer) -> None:
    url = f"http://127.0.0.1:{server.port}/"
    bodies = [b"<div>" * (PAGE_BYTES_MAX // 5), b"<a href=x>" * 200_000, b"<p>a" * 14_000, b"&#0;" * 500_000]
    replies = [
        Reply(b"a", headers={"Content-Type": "text/html; charset=" + " " * 50_000}),
        *(Reply(body, headers={"Content-Type": "text/html"}) for body in bodies),
    ]
    for number, reply in enumerate(replies):
        server.answer = lambda _, reply=reply: reply  # type: ignore[misc]
        await registry.run("web_scrape", {"url": url}, call=f"page{number}")


async def attack_with_sources(registry: Registry, server: WebServer) -> None:
    url = f"http://127.0.0.1:{server.port}"
    schemas: dict[str, Any] = {
        f"S{level}": {"properties": {side: {"$ref": f"#/components/schemas/S{level + 1}"} for side in "ab"}}
        for level in range(40)
    }
    schemas["S40"] = {}
    operations = {
        f"/{number}": {
            "post": {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/components/schemas/S0"}}}}}
        }
        for number in range(200)
    }
    documents = [
        json.dumps(
            {"openapi": "3.0.0", "paths": operations, "components": {"schemas": schemas | {"S40": {}}}}
        ).encode(),
        b"openapi: 3.0.0\nx: " + b"[" * 90 + b"]" * 90 + b"\ny: [" + b"[]," * 300_000 + b"]",
        b'{"openapi": "3.0.0", "x": ' + filled(b"[]", 4 * 1024 * 1024) + b"}",
    ]
    for number, document in enumerate(documents):
        open_api = source_pb2.OpenApiConfig(document=document, base_url=url)
        config = source_pb2.SourceConfig(name=f"s{number}", open_api=open_api)
        with suppress(grpc.RpcError):
            await registry.sources["acme", "root"].AddSource(source_pb2.AddSourceRequest(config=config))


async def attack_with_results(registry: Registry, server: WebServer) -> None:
    endpoint = source_pb2.HttpEndpointConfig(url=f"http://127.0.0.1:{server.port}/", method="GET", description="Look.")
    policies = [source_pb2.SourceToolPolicy(tool_name="*", category=call_pb2.TOOL_CATEGORY_SAFE)]
    config = source_pb2.SourceConfig(name="look", http_endpoint=endpoint, policies=policies)
    await registry.sources["acme", "root"].AddSource(source_pb2.AddSourceRequest(config=config))
    for number, unit in enumerate(UNITS):
        reply = Reply(filled(unit, RESULT_BYTES_MAX - 10), headers={"Content-Type": "application/json"})
        server.answer = lambda _, reply=reply: reply  # type: ignore[misc]
        await registry.run("look.call", {}, call=f"result{number}")


ATTACKS = [attack_with_schemas, attack_with_rules, attack_with_pages, attack_with_sources, attack_with_results]


@pytest.mark.parametrize("attack", ATTACKS)
async def test_the_calls_of_another_store_go_on(
    attack: Callable[[Registry, WebServer], Any],
    worlds: tuple[Registry, WebServer],
    monkeypatch: pytest.MonkeyPatch,
    seconds_max: float,
) -> None:
    """The other store's calls are answered all the time, and no stretch of work between two of them is long."""
    registry, server = worlds
    await registry.check("echo", {"text": "a"}, call="warm", store="other")
    with watched(monkeypatch) as stretches:
        attacking = asyncio.ensure_future(attack(registry, server))
        answered = 0
        while not attacking.done():
            verdict = await registry.check("echo", {"text": "a"}, call=f"other{answered}", store="other")
            assert verdict.arguments_json
            answered += 1
        await attacking
    assert answered > 0
    assert stretches.longest <= seconds_max, stretches.what
