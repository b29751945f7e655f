"""Where and how calls may run in the background: switches, their time there, and what the model is told of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pawl.agent_loop.domain import background as domain
from pawl.agent_loop.domain.call import Call, CallState
from pawl.agent_loop.domain.jobs import wishes_of
from pawl.agent_loop.domain.run import JobReports, RunOptions, RunState
from pawl.agent_loop.domain.tool import Tool
from pawl.chassis.ids import CallId, ConversationId, RunId, StoreId
from tests.fakes.model import calls, says
from tests.unit.agent_loop.scenario import present
from tests.unit.agent_loop.test_jobs import Story, background


async def test_where_it_is_switched_off_the_call_runs_at_once_with_a_note() -> None:
    story = Story(calls(background("work", n=1)), says("Done."), seconds=1.0)
    key = story.say("do it", RunOptions(without_background=True))
    await story.until(lambda: story.is_over)
    (call,) = story.calls(story.world.ledger.run(key))
    assert (call.state, story.jobs) == (CallState.SUCCEEDED, [])
    assert "not in the background" in present(call.result).note
    system = [message for message in story.world.model.requests[0].messages if message["role"] == "system"]
    assert system == []


async def test_a_tool_that_does_not_run_in_the_background_runs_at_once_with_a_note() -> None:
    story = Story(calls(background("here"), background("work")), says("Begun."), seconds=1.0)
    key = story.say("do it")
    await story.until(lambda: story.is_over)
    here, work = story.calls(story.world.ledger.run(key))
    assert (here.state, work.state) == (CallState.SUCCEEDED, CallState.DETACHED)
    assert "not in the background: here does not run there" in present(here.result).note
    assert [job.job and job.job.tool_name for job in story.jobs] == ["work"]


async def test_an_iteration_has_the_time_of_its_tool_in_the_background() -> None:
    """Neither the short timeout of the tool nor the limits of the run cut it."""

    story = Story(calls(background("slow"), background("work")), says("Begun."), seconds=3000.0)
    story.say("do it")
    await story.until(lambda: story.is_over, seconds_max=20_000.0, look_seconds=5.0)
    assert {job.job and job.job.timeout_seconds for job in story.jobs} == {3600.0, 7200.0}
    assert [job.state for job in story.jobs] == [RunState.COMPLETED] * 2
    asked = {execution.tool_name: execution.timeout_seconds for execution in story.world.registry.asked}
    assert asked == {"slow": 7200.0, "work": 3600.0}
    assert {context.in_background for context in story.world.registry.contexts} == {True}


def by_tool(name: str, **more: object) -> str:
    """A call of the tool for the background."""
    return f"in_background {json.dumps({'tool': name, **more})}"


async def test_a_tool_takes_the_place_of_the_parameters_where_that_is_set() -> None:
    """The job makes the call that was meant; the model sees the call that it made."""

    asked = by_tool("look", arguments='{"n":1}', interval=60, stop_after=2, reports="end", duration=None)
    story = Story(
        calls(asked, by_tool("work", arguments={"n": 2}), by_tool("work", arguments="")),
        says("Begun."),
        seconds=1.0,
        as_tool=True,
    )
    key = story.say("watch it")
    await story.until(lambda: story.is_over)
    done = story.calls(story.world.ledger.run(key))
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
    shown, *_ = second.messages[2]["tool_calls"]
    assert shown["function"]["name"] == "in_background"
    assert f"in_background {json.dumps(json.loads(shown['function']['arguments']))}" == asked


def test_what_makes_no_sense_of_the_tool_is_refused_with_a_hint() -> None:
    schemas = {"look": b"{}", "work": b"{}"}
    for asked, hint in (
        ("in_background {}", "`tool` is the name"),
        (by_tool("look", n=1), "There is no n"),
        (by_tool("look", interval=5), "interval needs an end: stop_after (times), duration"),
        (by_tool("wo rk", arguments={}), "There is no tool of that name"),
        (by_tool("look", arguments=[]), "an object"),
        (by_tool("look", arguments=0), "an object"),
        ('in_background {"tool":"look","tool":"work"}', "`tool` is the name"),
        ('in_background {"tool":"look","arguments":{"n":1180591620717411303424}}', "`tool` is the name"),
        (by_tool("look", arguments={"n": 1, "_executeAsync": True}), "has no place in `arguments`"),
        (by_tool("look", arguments='{"_interval": 5}'), "has no place in `arguments`"),
    ):
        _, reading = domain.read_tool(asked.partition(" ")[2], schemas)
        assert (reading.wish, hint in reading.fault) == (None, True), f"{asked}: {reading.fault}"


@pytest.mark.parametrize("name", ["shop.buy", "shop__buy"])
def test_of_names_that_are_alike_the_one_that_was_given_is_meant(name: str) -> None:
    """A tool of a source is called with two underscores, unless there is a tool of that very name."""
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
    for known in (tools, tools[::-1]):
        (call,), _ = wishes_of([asked], known, 0.0, as_tool=True)
        assert call.tool_name == name
    (call,), _ = wishes_of([asked], tools[:1], 0.0, as_tool=True)
    assert call.tool_name == "shop.buy"


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
async def test_a_tool_says_what_is_told_of_its_jobs_where_nobody_else_does(
    tool_name: str, asked: dict[str, Any], reports: JobReports, iterations: int
) -> None:
    """ASYNC-5: the model's word comes first, and who watches for something hears of that."""

    story = Story(calls(background(tool_name, **asked)), says("Begun."))
    story.say("do it")
    await story.until(lambda: len(story.jobs) == 1)
    (job,) = story.jobs
    assert (present(job.job).reports, present(job.job).report_iterations) == (reports, iterations)
    (call,) = story.calls(story.runs[0])
    is_silent = reports is JobReports.NONE
    assert ("you are not told" in present(call.result).note) is is_silent
    assert story.world.ledger.tables.runs[story.key(job)].silent is is_silent
