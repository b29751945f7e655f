"""Parameters of background calls are read or refused, and iterations are due on a fixed schedule."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.agent_loop.loop import wire
from pawl.agent_loop.loop.rules import background, hints, job_program, jobs
from pawl.agent_loop.loop.rules.background import ITERATIONS_MAX, NAMES, RequestedTerms
from pawl.agent_loop.loop.rules.call import Call
from pawl.agent_loop.loop.rules.jobs import extract_terms
from pawl.agent_loop.loop.rules.run import Job, RunOptions
from pawl.agent_loop.loop.rules.tool import Tool, Verdict
from pawl.chassis import strict_json
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId
from pawl.errors import InvalidField, InvalidJson, TooLarge
from pawl.values import CallState, ExecutionContext, JobReports, RunState, Series
from tests.fakes.model import calls, says
from tests.fakes.registry import FakeRegistry, tool
from tests.tables import for_each
from tests.unit.agent_loop.scenario import present
from tests.unit.agent_loop.test_jobs import Story
from tests.unit.agent_loop.test_jobs import background as async_call

_SCHEMA = b'{"type":"object","properties":{"n":{"type":"integer"}}}'
_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(10**17, 10**400),
    st.floats(),
    st.sampled_from([0.5, 1, 3.5, 60, 1000, 1e308, -1e308, 5e-324, -0.0, 2**63, "every", "change", "END", "true"]),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
)
_EXPRESSIONS = st.sampled_from(["value > 1", "previous", "1/0 > 1", "value.all(x, x > 1)", "/" * 20, "\0", "x" * 300])
_NESTED = st.dictionaries(
    st.sampled_from(
        ["path", "below", "above", "equals", "changed", "cel", "on_failure", "pause", "times", "for", "every", "digest"]
    ),
    st.one_of(_VALUES, _EXPRESSIONS),
    max_size=3,
)
_ODD = st.one_of(_VALUES, _EXPRESSIONS, _NESTED, st.lists(_NESTED, max_size=2))
_PARAMETERS = st.dictionaries(st.sampled_from(sorted(NAMES)), _VALUES)
_WATCHES: dict[str, Any] = {"_executeAsync": True, "_interval": 5, "_duration": 60}
_OTHERS = st.dictionaries(st.text(max_size=6), _VALUES, max_size=3)


def escaped(written: str, chosen: bool) -> str:
    """Return equivalent JSON, in which `chosen` escapes the first character of parameter names."""
    return written.replace('"_', '"\\u005f') if chosen else written


@given(st.one_of(st.text(), st.text().map(lambda text: f'{{"_executeAsync": {text}}}')))
@example("[" * 100_000 + '"_executeAsync"')
@example('{"_executeAsync": true, "x": "\\ud800"}')
@example('{"_executeAsync": true, "n": NaN}')
def test_arguments_of_any_content_can_be_read(written: str) -> None:
    reading = background.read(written, _SCHEMA)
    assert reading.terms is None or reading.fault == ""


@given(_OTHERS, _PARAMETERS, st.booleans())
def test_background_parameters_are_removed_and_either_read_or_refused(
    others: dict[str, Any], parameters: dict[str, Any], as_escapes: bool
) -> None:
    assume(NAMES.isdisjoint(others))
    reading = background.read(escaped(json.dumps(others | parameters), as_escapes), _SCHEMA)
    try:
        rest = strict_json.loads(reading.arguments.encode(), bytes_max=1 << 20)
    except (InvalidJson, TooLarge, UnicodeError):
        # The call is refused, so its options do not matter.
        return
    assert rest == others
    if parameters.get("_executeAsync") is True:
        assert (reading.terms is None) == (reading.fault != "")
    elif parameters.keys() - {"_executeAsync"} or not isinstance(parameters.get("_executeAsync", False), bool):
        assert reading.fault
    else:
        assert (reading.terms, reading.fault) == (None, "")
    if reading.terms is not None:
        check(reading.terms)


@given(
    st.sampled_from([_WATCHES, {"_executeAsync": True}]),
    st.dictionaries(st.sampled_from(sorted(NAMES - {"_executeAsync"})), _ODD, max_size=3),
    st.booleans(),
)
@example(parameters=_WATCHES, more={"_until": {"equals": 10**30}}, as_tool=False)
@example(parameters=_WATCHES, more={"_reports": {"every": ITERATIONS_MAX}}, as_tool=True)
@example(parameters=_WATCHES, more={"_reports": {"every": 1.5}}, as_tool=False)
def test_unusual_parameters_are_refused_or_result_in_a_job_that_ends(
    parameters: dict[str, Any], more: dict[str, Any], as_tool: bool
) -> None:
    """ASYNC-2 to ASYNC-4: the parameters include conditions, monitors and reports. A stored job reads back the same."""
    if as_tool:
        named = {
            own: (parameters | more)[name]
            for own, name in background._NAMES_OF_TOOL.items()
            if name in parameters | more
        }
        _, reading = background.read_tool(json.dumps({"tool": "look"} | named), {"look": _SCHEMA})
    else:
        reading = background.read(json.dumps(parameters | more), _SCHEMA)
    if reading.terms is None:
        assert reading.fault or reading.arguments != "{}", "the call check refuses invalid JSON"
        return
    check(reading.terms)
    job = jobs.new_job(reading.terms, "look", b"{}", 1_800_000_000.0)
    assert wire.JOB.read(wire.JOB.write(job)) == job
    assert job.begin_time <= job_program.due_time(job, None) < job.begin_time + 24 * 3600 + 1
    watches = job.until is not None or job.when is not None
    assert not watches or job.end_time is not None


def check(options: RequestedTerms) -> None:
    assert 1 <= options.iterations_max <= ITERATIONS_MAX
    assert options.interval_seconds == 0 or 0.5 <= options.interval_seconds <= 24 * 3600
    assert 0 <= options.duration_seconds <= 365 * 24 * 3600
    if not options.interval_seconds:
        assert (options.iterations_max, options.duration_seconds, options.delay_first) == (1, 0.0, False)


@for_each(
    ("parameters", "iterations"),
    [
        ({"_interval": 0.5, "_duration": 1440}, 172_801),
        ({"_interval": 0.5, "_stopAfter": 1_000_000}, 1_000_000),
        ({"_interval": 60, "_duration": 525_600}, 525_601),
        ({"_interval": 0.5, "_duration": 525_600, "_stopAfter": 10}, 10),
        ({"_interval": 0.5, "_stopAfter": 1_000_001}, 0),
        ({"_interval": 0.5, "_duration": 525_600}, 0),
        ({"_interval": 60, "_duration": 525_601}, 0),
    ],
)
def test_a_series_may_run_for_up_to_a_year(parameters: Any, iterations: int) -> None:
    """Larger values are refused instead of reduced."""
    reading = background.read(json.dumps({"_executeAsync": True, **parameters}), _SCHEMA)
    assert (reading.terms is None) == (not iterations)
    assert reading.terms is None or reading.terms.iterations_max == iterations
    assert reading.terms is not None or "1,000,000" in reading.fault or "525600" in reading.fault


@given(
    st.one_of(st.none(), st.floats(1, 1_000_000)),
    st.one_of(st.floats(0.5, 86_400), st.floats()),
    st.integers(-1, 2_000_000),
    st.one_of(st.none(), st.floats(0, 1_000_000), st.floats()),
)
def test_editing_a_series_moves_its_end_only_if_the_edit_requests_it(
    end: float | None, interval: float, count: int, edited_end: float | None
) -> None:
    """ASYNC-4: a monitor keeps its deadline unless the edit changes it."""
    shown = Series(digest="shown", interval_seconds=60.0, iterations_max=20, end_time=end)
    edited = Series(interval_seconds=interval, iterations_max=count, end_time=edited_end)
    try:
        granted = background.edited_series(shown, edited, 5.0)
    except InvalidField:
        return
    assert granted.end_time == (end if edited_end is None else edited_end)
    assert (granted.interval_seconds, granted.iterations_max, granted.digest) == (interval, count, "")
    assert granted.end_time is None or 5.0 <= granted.end_time <= 5.0 + 365 * 86_400


def iteration(number: int, start: float, end: float) -> Call:
    return Call(
        store_id="store",  # type: ignore[arg-type]
        conversation_id="conv",  # type: ignore[arg-type]
        run_id="run",  # type: ignore[arg-type]
        call_id=CallId(f"call_{number}"),
        round=number,
        index=0,
        tool_name="look",
        state=CallState.SUCCEEDED,
        proposed_arguments="{}",
        create_time=start,
        end_time=end,
    )


@given(
    st.floats(0.5, 86_400),
    st.floats(0, 2e9),
    st.booleans(),
    st.lists(st.tuples(st.floats(0, 3), st.floats(0, 200_000)), min_size=1, max_size=20),
)
def test_each_iteration_is_due_at_the_next_interval_after_the_previous_one(
    interval: float, start: float, delay: bool, durations: list[tuple[float, float]]
) -> None:
    """How late an iteration starts and how long it takes does not matter."""
    job = Job(tool_name="look", arguments_json=b"{}", begin_time=start, interval_seconds=interval, delay_first=delay)
    last, before, missed = None, -1.0, 0
    for number, (late, seconds) in enumerate(durations, 1):
        due = job_program.due_time(job, last)
        beat = (due - start) / interval
        assert due > before
        assert abs(beat - round(beat)) < 1e-3
        assert last is None or last.end_time is None or due >= last.end_time - 1e-3 - interval * 2e-6
        assert last is not None or due == start + interval * delay
        before = due
        last = iteration(number, due + late, due + late + seconds)
        beats = range(delay, round((job_program.due_time(job, last) - start) / interval))
        assert job_program.missed(replace(job, iterations_max=number + 1), last) == len(beats) - number >= missed
        missed = len(beats) - number


@pytest.mark.parametrize(
    ("written", "schema"),
    [
        # Parsers could disagree about these arguments, so the later argument check refuses them.
        ('{"to":1,"to":2,"_executeAsync":true}', b"{}"),
        (f'{{"to":{2**70},"_executeAsync":true}}', b"{}"),
        # The tool has a parameter of that name.
        ('{"_interval":5}', b'{"properties":{"_interval":{}}}'),
        ('{"_interval":5}', b'{"allOf":[{"properties":{"_interval":{}}}]}'),
        ('{"_interval":5}', b'{"$ref":"#/$defs/a","$defs":{"a":{"properties":{"_interval":{}}}}}'),
        # The name is part of a value.
        ('{"n":"_interval"}', b"{}"),
        ('["_interval"]', b"{}"),
    ],
)
def test_arguments_without_background_parameters_are_passed_on_unchanged(written: str, schema: bytes) -> None:
    assert background.read(written, schema) == background.Reading(arguments=written)


# Background calls: switches, time limits, and what models see.


@pytest.mark.parametrize("is_disabled", [True, False])
async def test_a_call_that_cannot_run_in_the_background_runs_immediately_with_a_note(*, is_disabled: bool) -> None:
    """Background calls are disabled for the run, or the tool does not support them."""
    story = Story(calls(async_call("here"), async_call("work")), says("Begun."), seconds=1.0)
    here, work = story.world.ledger.calls(
        await story.finish("do it", RunOptions(without_background=is_disabled), seconds_max=100.0)
    )
    other = CallState.SUCCEEDED if is_disabled else CallState.DETACHED
    assert (here.state, work.state, len(story.jobs)) == (CallState.SUCCEEDED, other, not is_disabled)
    assert "not in the background" in present(here.result).note
    if is_disabled:
        assert [message for message in story.world.model.requests[0].messages if message["role"] == "system"] == []
    else:
        assert "here cannot run in the background" in present(here.result).note


async def test_an_iteration_uses_the_background_timeout_of_its_tool() -> None:
    """Neither the tool's foreground timeout nor the limits of the run shorten the iteration."""

    story = Story(calls(async_call("slow"), async_call("work")), says("Begun."), seconds=3000.0)
    await story.finish(seconds_max=20_000.0, poll_seconds=5.0)
    assert {job.job and job.job.timeout_seconds for job in story.jobs} == {3600.0, 7200.0}
    assert [job.state for job in story.jobs] == [RunState.COMPLETED] * 2
    asked = {execution.tool_name: execution.timeout_seconds for execution in story.world.registry.asked}
    assert asked == {"slow": 7200.0, "work": 3600.0}
    assert {context.in_background for context in story.world.registry.contexts} == {True}


def by_tool(name: str, **more: object) -> str:
    return f"in_background {json.dumps({'tool': name, **more})}"


async def test_a_background_tool_replaces_the_parameters_if_configured() -> None:
    """The job makes the nested call, while the model sees the call that it made itself."""

    asked = by_tool("look", arguments='{"n":1}', interval=60, stop_after=2, reports="end", duration=None)
    story = Story(
        calls(asked, by_tool("work", arguments={"n": 2}), by_tool("work", arguments="")),
        says("Begun."),
        seconds=1.0,
        as_tool=True,
    )
    done = story.world.ledger.calls(await story.finish("watch it"))
    assert [(call.tool_name, call.name_for_model, call.state) for call in done] == [
        ("look", "in_background", CallState.DETACHED),
        ("work", "in_background", CallState.DETACHED),
        ("work", "in_background", CallState.DETACHED),
    ]
    jobs = [job.job for job in story.jobs if job.job is not None]
    assert [(job.tool_name, job.arguments_json, job.iterations_max) for job in jobs] == [
        ("look", b'{"n":1}', 2),
        ("work", b'{"n":2}', 1),
        ("work", b"{}", 1),
    ]
    first, second = story.world.model.requests[:2]
    assert "in_background" in [function["function"]["name"] for function in first.tools]
    assert "_executeAsync" not in first.messages[0]["content"]
    shown = second.messages[2]["tool_calls"][0]["function"]
    assert f"{shown['name']} {json.dumps(json.loads(shown['arguments']))}" == asked


@pytest.mark.parametrize(
    ("more", "is_described"),
    [
        ({"reports": {"progress": [25, 50]}}, True),
        ({"reports": {"minutes": 10}}, True),
        ({"reports": "change", "interval": 5, "stop_after": 2}, True),
        ({"reports": {"percent": 5}}, False),
        ({"reports": "never"}, False),
    ],
)
def test_schema_of_the_background_tool_describes_its_reports(more: dict[str, Any], is_described: bool) -> None:
    arguments = {"tool": "look", "arguments": "{}"} | more
    assert jsonschema_rs.is_valid(background.FUNCTION["function"]["parameters"], arguments) is is_described
    _, reading = background.read_tool(json.dumps(arguments), {"look": b"{}"})
    assert (reading.terms is not None) is is_described, reading.fault


def test_nonsensical_arguments_of_the_background_tool_are_refused() -> None:
    schemas = {"look": b"{}", "work": b"{}"}
    for asked, hint in (
        ("in_background {}", "`tool` must be the name"),
        (by_tool("look", n=1), "Unknown parameter n"),
        (by_tool("look", interval_seconds=5), "are estimated_minutes, interval, stop_after, duration"),
        (by_tool("look", interval=5), "interval needs an end: stop_after (times), duration"),
        (by_tool("wo rk", arguments={}), "There is no tool with that name"),
        (by_tool("look", arguments=[]), "a JSON object"),
        (by_tool("look", arguments=0), "a JSON object"),
        ('in_background {"tool":"look","tool":"work"}', "`tool` must be the name"),
        ('in_background {"tool":"look","arguments":{"n":1180591620717411303424}}', "`tool` must be the name"),
        (by_tool("look", arguments={"n": 1, "_executeAsync": True}), "not in it"),
        (by_tool("look", arguments='{"_interval": 5}'), "not in it"),
    ):
        _, reading = background.read_tool(asked.partition(" ")[2], schemas)
        assert (reading.terms, hint in reading.fault) == (None, True), f"{asked}: {reading.fault}"


@pytest.mark.parametrize("name", ["shop.buy", "shop__buy"])
def test_a_tool_with_the_exact_name_takes_precedence_over_a_similar_name(name: str) -> None:
    """In calls of source tools, two underscores replace the dot, unless a tool has the exact name."""
    tools = [Tool(name=each, version=1) for each in ("shop.buy", "shop__buy")]
    asked = Call(
        store_id=StoreId("s"),
        conversation_id=ConversationId("c"),
        run_id=RunId("r"),
        call_id=CallId("call"),
        round=1,
        index=0,
        tool_name="in_background",
        state=CallState.PROPOSED,
        proposed_arguments=json.dumps({"tool": name, "arguments": "{}"}),
        create_time=0.0,
    )
    for known, found in ((tools, name), (tools[::-1], name), (tools[:1], "shop.buy")):
        (call,), _ = extract_terms([asked], known, 0.0, as_tool=True)
        assert call.tool_name == found


@pytest.mark.parametrize(
    ("tool_name", "asked", "reports", "iterations"),
    [
        ("tenth", {"_interval": 60, "_stopAfter": 30}, JobReports.EVERY, 10),
        ("tenth", {"_interval": 60, "_stopAfter": 30, "_reports": "every"}, JobReports.EVERY, 0),
        ("tenth", {}, JobReports.EVERY, 0),
        ("quiet", {"_interval": 60, "_stopAfter": 30}, JobReports.NONE, 0),
        ("quiet", {}, JobReports.NONE, 0),
        ("quiet", {"_interval": 60, "_stopAfter": 30, "_reports": "change"}, JobReports.CHANGE, 0),
        ("quiet", {"_interval": 60, "_duration": 30, "_until": "value > 1"}, JobReports.END, 0),
        ("quiet", {"_interval": 60, "_duration": 30, "_when": "value > 1"}, JobReports.END, 0),
        ("look", {"_interval": 60, "_stopAfter": 30}, JobReports.EVERY, 0),
    ],
)
async def test_a_tool_sets_its_jobs_default_reports(
    tool_name: str, asked: dict[str, Any], reports: JobReports, iterations: int
) -> None:
    """ASYNC-5: the model's choice takes precedence, and monitors report by default."""

    story = Story(calls(async_call(tool_name, **asked)), says("Begun."))
    story.say("do it")
    await story.until(lambda: len(story.jobs) == 1)
    (job,) = story.jobs
    assert (present(job.job).reports, present(job.job).report_iterations) == (reports, iterations)
    (call,) = story.calls(story.runs[0])
    is_silent = reports is JobReports.NONE
    assert ("You are not notified" in present(call.result).note) is is_silent
    assert story.world.ledger.tables.runs[story.key(job)].silent is is_silent


# Refused parameters of other systems get a hint that names Pawl's background parameters.


REFUSED = tool("REFUSE", error_reason="INVALID_ARGUMENTS", error_message="the arguments do not fit")
OTHERS = [
    *("interval_seconds", "duration_minutes", "run_in_background", "is_background", "async", "interval", "duration"),
    *("runInBackground", "isAsync", "poll_interval", "_execute_async", "_runInBackground", "max_iterations", "_async"),
]
PARAMETERS = ("_interval", "_duration", "_executeAsync")
_NAMES = st.sampled_from([*OTHERS, *PARAMETERS, "n", "page", "background_color", "interval" * 10])


def schema_of(*names: str, **more: Any) -> bytes:
    properties: dict[str, Any] = {name: {} for name in names}
    return json.dumps({"type": "object", "properties": properties, "additionalProperties": False, **more}).encode()


def hint(arguments: object, schema: bytes, verdict: Verdict = REFUSED) -> str:
    given_json = arguments if isinstance(arguments, bytes) else json.dumps(arguments).encode()
    return hints.for_request(verdict, given_json, schema).error_message.removeprefix(verdict.error_message)


@pytest.mark.parametrize("name", OTHERS)
def test_a_refused_parameter_of_another_system_gets_a_hint(name: str) -> None:
    assert "interval_seconds" in hint({"n": 1, name: 5}, schema_of("n"))


@given(st.dictionaries(_NAMES, st.just(1), max_size=4), st.sets(_NAMES, max_size=4), st.booleans())
def test_only_parameters_that_the_tool_does_not_have_get_a_hint(
    arguments: dict[str, int], known: set[str], is_open: bool
) -> None:
    """A tool that has one of Pawl's own parameters cannot run in the background."""
    unknown = ({*OTHERS, *PARAMETERS} & arguments.keys()) - known
    expected = not is_open and known.isdisjoint(PARAMETERS) and bool(unknown)
    assert bool(hint(arguments, schema_of(*known, additionalProperties=is_open))) is expected


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_any_bytes_are_accepted_as_arguments_and_schema(arguments: bytes, schema: bytes) -> None:
    assert hint(arguments, schema) == ""


@pytest.mark.parametrize(
    "verdict",
    [
        tool("RUN"),
        replace(REFUSED, error_reason="NOT_ALLOWED"),
        replace(REFUSED, without_background=True),
        replace(REFUSED, context=ExecutionContext.HUMAN),
    ],
)
def test_there_is_no_hint_if_the_call_could_not_run_in_the_background(verdict: Verdict) -> None:
    assert hint({"async": True}, schema_of(), verdict) == ""


async def _result(monkeypatch: pytest.MonkeyPatch, *, as_tool: bool = False, **options: Any) -> str:
    found = Tool(name="strict", version=1, context=ExecutionContext.BACKEND, arguments_schema_json=schema_of("n"))
    monkeypatch.setattr(FakeRegistry, "_tool", lambda _, __: found)
    story = Story(calls('strict {"n": 1, "run_in_background": true}'), says("I see."), as_tool=as_tool)
    story.world.registry.verdicts = {"strict": REFUSED}
    (call,) = story.world.ledger.calls(await story.finish("do it", RunOptions(**options)))
    shown = json.loads(story.world.model.requests[1].messages[-1]["content"])["error"]
    assert json.loads(present(call.result).content_json)["error"] in shown
    return str(shown)


async def test_the_model_reads_the_hint_in_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = await _result(monkeypatch)
    assert refusal.startswith("the arguments do not fit\nTo run the call in the background, add")
    assert all(f'"{name}"' in refusal for name in PARAMETERS)
    refusal = await _result(monkeypatch, as_tool=True)
    assert "use in_background instead" in refusal
    assert not any(name in refusal for name in PARAMETERS)
    assert await _result(monkeypatch, without_background=True) == "the arguments do not fit"
