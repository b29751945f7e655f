"""Monitors and CEL conditions: edges, pauses, reports and bounded state."""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from dataclasses import replace as replace_fields
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from pawl.agent_loop.loop.rules import condition, expression, loop_state, monitor
from pawl.agent_loop.loop.rules.call import Call, CallResult
from pawl.agent_loop.loop.rules.expression import ExpressionError
from pawl.agent_loop.loop.rules.fact import Pause
from pawl.agent_loop.loop.rules.loop_state import JobCursor, LoopState
from pawl.agent_loop.loop.rules.run import Job, Monitor, Run
from pawl.errors import Unreadable
from pawl.values import CallState, JobReports, RunState, WaitKind
from tests.fakes.model import calls, says
from tests.fakes.registry import NOT_COMPLETED, tool
from tests.tables import for_each
from tests.unit.agent_loop.scenario import present
from tests.unit.agent_loop.test_background import iteration
from tests.unit.agent_loop.test_jobs import Story, background

_WRITTEN = st.sampled_from(
    [
        {"below": 5},
        {"changed": True},
        "value < 5",
        "previous != null && value > previous",
        "value.price < 5",
        {"equals": 1},
    ]
)
_SECONDS = st.floats(0, 100)


def job(**fields: Any) -> Job:
    return Job(
        tool_name="look", arguments_json=b"{}", begin_time=0.0, interval_seconds=1.0, iterations_max=1000, **fields
    )


def watched(written: object, *, pause: float = 0.0, times: int = 1000, hold: float = 0.0) -> Monitor:
    found = condition.read(written)
    assert found is not None
    return Monitor(condition=found, pause_seconds=pause, firings_max=times, hold_seconds=hold)


def polled(number: int, value: Any, now: float | None = None, *, state: CallState = CallState.SUCCEEDED) -> Call:
    at = float(number) if now is None else now
    result = CallResult(content_json=msgspec.json.encode(value))
    return replace(iteration(number, at, at), state=state, result=result)


def after(what: Job, values: list[Any]) -> JobCursor:
    cursor = JobCursor()
    for number, value in enumerate(values, 1):
        cursor = monitor.evaluated(what, cursor, polled(number, value), msgspec.json.encode(value).decode())
    return cursor


@given(_WRITTEN, st.lists(st.tuples(st.integers(0, 9), _SECONDS), max_size=30), _SECONDS, st.integers(1, 5))
def test_a_monitor_fires_when_its_condition_becomes_true_subject_to_its_pause_and_count(
    written: object, seen: list[tuple[int, float]], pause: float, times: int
) -> None:
    watch = watched(written, pause=pause, times=times)
    cursor, now, fired_at, was_false = JobCursor(), 0.0, [], True
    for value, seconds in seen:
        now += seconds
        before = cursor
        cursor = monitor.fired(watch, cursor, value, now)
        if cursor.fired > before.fired:
            assert cursor.fired == before.fired + 1
            assert was_false or watch.condition.changed, "the condition held all the time"
            fired_at.append(now)
            was_false = False
        elif not cursor.problem and not watch.condition.is_met(value, before.when_seen, before.fired):
            was_false = True
    assert cursor.fired == len(fired_at) <= times
    assert all(later - earlier >= pause for earlier, later in itertools.pairwise(fired_at))


@given(st.lists(st.booleans(), max_size=30))
def test_without_a_pause_a_monitor_fires_each_time_its_condition_becomes_true(seen: list[bool]) -> None:
    cursor = after(job(when=watched("value")), seen)
    assert cursor.fired == sum(value and not (number and seen[number - 1]) for number, value in enumerate(seen))


@given(st.lists(st.tuples(st.booleans(), _SECONDS), max_size=30), _SECONDS)
def test_a_monitor_fires_only_after_its_hold_time(seen: list[tuple[bool, float]], hold: float) -> None:
    watch, cursor, now, since = watched("value", hold=hold), JobCursor(), 0.0, None
    for value, seconds in seen:
        now += seconds
        since = (now if since is None else since) if value else None
        before, cursor = cursor, monitor.fired(watch, cursor, value, now)
        assert cursor.fired == before.fired or (since is not None and now - since >= hold)


@for_each(
    ("wanted", "value", "holds"),
    [
        *((20, 20.0, True), (20.0, 20, True), (20, 20, True), (20, 21.0, False), (1, True, False), (True, 1.0, False)),
        *(("20", 20, False), (20, "20", False), (20, None, False), (2**53 + 1, float(2**53), False)),
    ],
)
def test_equal_numbers_match_in_any_notation(wanted: Any, value: Any, holds: Any) -> None:
    assert present(condition.read({"equals": wanted})).is_met(value) is holds


@for_each(
    ("before", "after", "differ"),
    [
        *((20, 20.0, False), (0, -0.0, False), ({"a": [1, 2.0]}, {"a": [1.0, 2]}, False), (1e300, 1e300, False)),
        *((20, 20.5, True), (1, True, True), (20, "20.0", True), (2**53 + 1, float(2**53), True), (None, 0.0, True)),
    ],
)
def test_another_notation_of_a_number_is_not_a_change(before: Any, after: Any, differ: Any) -> None:
    found = condition.read({"changed": True})
    assert present(found).is_met(after, present(found).seen(before)) is differ
    assert present(found).is_met(before, present(found).seen(after)) is differ


def test_a_change_during_the_pause_is_reported_afterwards_unless_it_was_reverted() -> None:
    watch, cursor, fired = watched({"changed": True}, pause=10), JobCursor(), []
    for now, value in [(0, 1), (1, 2), (3, 3), (12, 3), (13, 4), (14, 3), (30, 3), (31, 5)]:
        cursor = monitor.fired(watch, cursor, value, float(now))
        fired.append(cursor.fired)
    assert fired == [0, 1, 1, 2, 2, 2, 2, 3]


def reported(what: Job, polls: list[Call]) -> tuple[JobCursor, list[tuple[float, Any]], Any]:
    """Return the last cursor, the reports of a job with the times of their polls, and the last output."""
    cursor, text, reports = JobCursor(), "", list[tuple[float, Any]]()
    for call in polls:
        content = present(call.result).content_json.decode()
        before, cursor = cursor, monitor.evaluated(what, cursor, call, content)
        text = monitor.job_output(what, before, cursor, content, text)
        cursor, notifies = monitor.report_due(what, before, cursor, call, content)
        if notifies:
            reports.append((call.end_time or 0.0, msgspec.json.decode(text)))
    return cursor, reports, msgspec.json.decode(text)


def test_a_stable_change_is_reported_with_the_previous_value() -> None:
    """ASYNC-4: a change counts only after the value stays the same for `hold` seconds."""
    what = job(when=watched({"changed": True}, hold=10), reports=JobReports.END)
    seen = [(0, "a"), (1, "b"), (9, "c"), (12, "c"), (19, "c"), (20, "d"), (25, "c"), (40, "e"), (50, "e")]
    _, reports, _ = reported(what, [polled(now, value) for now, value in seen])
    assert reports == [
        (19, {"fired": 1, "changed_from": "a", "result": "c"}),
        (50, {"fired": 2, "changed_from": "c", "result": "e"}),
    ]


def test_an_evaluation_error_counts_as_a_failure() -> None:
    what = job(when=watched("value.price < 5"), reports=JobReports.END)
    seen = after(what, [{"price": 1}, {}, {"price": 1}])
    assert (seen.fired, seen.failures, seen.failed_in_a_row, seen.problem) == (1, 1, 0, "")
    blind = after(what, [{}, {}])
    assert "Key not found" in blind.problem
    call = polled(3, {})
    third = monitor.evaluated(what, blind, call, "{}")
    assert third.failed_in_a_row == 3
    assert monitor.report_due(what, blind, third, call, "{}")[1], "the third failure in a row is reported"
    call = polled(4, {})
    assert not monitor.report_due(what, third, monitor.evaluated(what, third, call, "{}"), call, "{}")[1], "once"


def test_failures_are_reported_after_the_requested_number_of_consecutive_failures() -> None:
    what = job(when=watched("value.price < 5"), reports=JobReports.END, failures_told=2)
    values = [{}, {}, {}, {"price": 9}, {}, {}]
    _, reports, _ = reported(what, [polled(number, value) for number, value in enumerate(values, 1)])
    assert [number for number, _ in reports] == [2, 6]


def test_changes_of_values_too_large_to_keep_are_detected() -> None:
    large = ["x" * 4000, "y" * 4000]
    assert "was not stored" in after(job(when=watched("previous != null && value != previous")), large).problem
    assert after(job(when=watched({"changed": True})), large).fired == 1
    kept = after(job(when=watched("previous != null && value != previous")), [large[0], "small", "other"])
    assert (kept.fired, kept.problem) == (1, ""), "it continues once values are small"


@given(st.lists(st.text(min_size=1, max_size=4000), min_size=1, max_size=12))
def test_the_state_of_a_monitor_is_bounded(values: list[str]) -> None:
    """The cursor stays under 16 KiB, for results of any size."""
    expression = present(condition.read("value != previous"))
    watch = Monitor(condition=expression, firings_max=1000)
    what = job(until=condition.read("previous == value && false"), when=watch, reports=JobReports.DIGEST)
    cursor = after(what, values)
    written = loop_state.write(LoopState(cursor=cursor))
    assert len(msgspec.json.encode(cursor)) < 16 * 1024
    assert loop_state.read(written).cursor == cursor


def test_a_digest_covers_the_iterations_since_the_last_one() -> None:
    what = job(reports=JobReports.DIGEST, report_seconds=5.0)
    polls = [polled(number, value) for number, value in enumerate([1, 1, 2, 3, 3, 3, 3, 4, 4, 5, 5], 1)]
    _, reports, last = reported(what, polls)
    iterations = [(number, [tuple(each.values())[:3] for each in digest["iterations"]]) for number, digest in reports]
    assert iterations == [
        (5, [(1, 2, "1"), (3, 3, "2"), (4, 5, "3")]),
        (10, [(6, 7, "3"), (8, 9, "4"), (10, 10, "5")]),
    ]
    assert [each["result"] for each in last["digest_before"]] == ["3", "4", "5"], "reported failures may be unread"
    many = after(what, list(range(1, 21)))
    assert (len(many.digest), many.digest_left_out) == (monitor.DIGESTED_MAX, 12)


# CEL expressions over results: evaluated to true or false or refused, at bounded cost.


def evaluated(source: str, value: Any = None, previous: Any = None, fired: int = 0) -> bool:
    expression.check(source)
    return expression.evaluate(source, value=value, previous=previous, fired=fired)


@for_each(
    ("source", "value", "previous", "outcome"),
    [
        ("value.price < 20", {"price": 19.5}, None, True),
        ("value.price < 20", {"price": 20}, None, False),
        ("previous == null || value - previous > 1.5", 10, None, True),
        ("previous == null || value - previous > 1.5", 10, 9.5, False),
        ("value.items.exists(i, !(i in previous.items))", {"items": [1, 2]}, {"items": [2]}, True),
        ("value.all(i, i.ok)", [{"ok": True}, {"ok": False}], None, False),
        ("has(value.error) && value.error.contains('time')", {"error": "timeout"}, None, True),
        ("timestamp(value) > timestamp('2025-01-01T00:00:00Z')", "2026-01-01T00:00:00Z", None, True),
        ("value[0] == 9007199254740993", [9007199254740993], None, True),
        ("fired < 3", None, None, True),
    ],
)
def test_an_expression_evaluates_to_true_or_false(source: str, value: Any, previous: Any, outcome: bool) -> None:
    assert evaluated(source, value, previous) is outcome


@for_each(
    ("source", "hint"),
    [
        ("value.price <", "column 14: the expression ends too early"),
        ("value.price < limit", "column 15: undeclared reference to 'limit'"),
        ("fired + 'a' == 3", "column 7: found no matching overload"),
        ("'cheap'", "has type string"),
        ("", "1 to 256 characters"),
        ("value == " + "1" * 250, "1 to 256 characters"),
        ("value <\n20", "one line"),
        ("\ud800 == value", "one line"),
        ("(" * 100 + "true" + ")" * 100, "recursion limit"),
        ("value.all(x, value.all(y, true))", "may use all, exists, exists_one, map or filter only once"),
        ("value.map(x, [x, x]).all(y, true)", "may use all, exists, exists_one, map or filter only once"),
        ("value.map(x, x)", "has type list"),
        ("value.matches('(a+)+$')", "undeclared reference to 'matches'"),
        ("timestamp(value).getHours('/etc/passwd') > 1", "undeclared reference to 'getHours'"),
        ("cel.bind(x, value, x == 1)", "undeclared reference"),
    ],
)
def test_invalid_expressions_are_refused_with_their_position(source: str, hint: str) -> None:
    with pytest.raises(ExpressionError) as refused:
        expression.check(source)
    assert hint in str(refused.value)


@for_each(
    ("source", "value", "hint"),
    [
        ("value.price < 20", {}, "Key not found"),
        ("value.price < 20", {"price": "a"}, "No matching overloads"),
        ("value", 3, "must be true or false"),
        ("1 / 0 == 1", None, "divide by zero"),
        ("size(value) > 1", "x" * 70_000, "set a path"),
    ],
)
def test_an_expression_without_a_boolean_result_is_an_error(source: str, value: Any, hint: str) -> None:
    with pytest.raises(ExpressionError) as error:
        evaluated(source, value)
    assert hint in str(error.value)


_NUMBERS = list(range(9000))
_ROWS = [{"name": f"n{number}", "price": number} for number in range(1500)]


def test_an_expression_that_would_block_the_event_loop_is_refused() -> None:
    """The first rows are the largest values that are still evaluated."""
    rows: list[Any] = [
        ("value.exists(x, x.price < 20)", _ROWS, None, True),
        ("value.exists(x, x.name.contains('zzz'))", _ROWS[:500], None, False),
        ("value.exists(x, !(x in previous))", _NUMBERS[:100], _NUMBERS[:50], True),
        ("value == previous", _NUMBERS[:4000], _NUMBERS[:600], False),
        ("value.contains('" + "y" * 100 + "z')", "y" * 65_000, None, False),
        ("value.all(x, value == previous || x == 0)", _NUMBERS, _NUMBERS[:700], None),
        ("value.all(x, x in value && x in value)", _NUMBERS, None, None),
        ("value.all(x, " + " && ".join(["x == x"] * 20) + ")", _NUMBERS, None, None),
        ("[" + ",".join(["value"] * 25) + "].all(x, x == x && x == x && x == x)", _NUMBERS, None, None),
        ("[" + "1," * 60 + "1].all(x, size(string(x) + value + string(x)) > 0)", "y" * 65_000, None, None),
        ("[" + "1," * 60 + "1].all(x, !value.contains('" + "y" * 40 + "z'))", "y" * 65_000, None, None),
        ("size(" + "+".join(["value"] * 25) + ") > 0", _NUMBERS, None, None),
        ("value.all(x, timestamp(x) == timestamp(x))", ["2026-01-01T00:00:00Z"] * 2500, None, None),
        ("value.a.contains(value.b)", {"a": "y" * 43_000, "b": "y" * 21_000 + "z"}, None, None),
        (
            "value.c.all(x, !value.a.contains(value.b))",
            {"a": "y" * 4000, "b": "y" * 2000 + "z", "c": _NUMBERS},
            None,
            None,
        ),
        (" && ".join(["value == value"] * 12), _NUMBERS, None, None),
    ]
    for source, value, previous, outcome in rows:
        if outcome is not None:
            assert evaluated(source, value, previous) is outcome, source
            continue
        with pytest.raises(ExpressionError, match="set a path"):
            evaluated(source, value, previous)


def test_only_numbers_can_cross_a_threshold() -> None:
    above = present(condition.read({"above": 1}))
    assert [above.is_met(found) for found in (2, 1.5, 1, True, "2", None)] == [True, True, *[False] * 4]


# Jobs that poll a condition without the model, and wake the model once the condition is met (ASYNC-4).


async def test_a_monitor_reports_each_time_its_condition_becomes_true() -> None:
    """ASYNC-4: the job ends after the requested number of firings."""

    when = {"cel": "value.price < 20", "times": 2}
    story = Story(calls(background("look", _interval=60, _duration=600, _when=when)), seconds=0.1)
    for price in (30, 19, 18, 25):
        story.world.registry.results["look"] = CallResult(content_json=b'{"price":%d}' % price)
        seen = story.jobs[0].round if story.jobs else 0
        if not story.jobs:
            story.say("tell me whenever it is under 20")
        await story.until(lambda: len(story.jobs) == 1 and story.jobs[0].round >= seen + 2)  # noqa: B023
    (first,) = story.stored_notices
    assert (first["iteration"] in {2, 3}, first["result"]["fired"]) == (True, 1)
    assert json.loads(story.jobs[0].output_text)["fired_with"] == {"price": 19}
    story.world.registry.results["look"] = CallResult(content_json=b'{"price":17}')
    await story.until(lambda: story.is_over)
    assert [job.state for job in story.jobs] == [RunState.COMPLETED]
    assert story.stored_notices[-1]["result"] == {"fired": 2, "result": {"price": 17}}


# Paused and resumed jobs.


@pytest.mark.parametrize("key_is_gone", [False, True])
async def test_a_denied_iteration_or_a_missing_key_pauses_the_series(*, key_is_gone: bool) -> None:
    """ASYNC-2: the job pauses instead of failing, and resumes once the reason is gone."""

    story = Story(calls(background("look", _interval=60, _stopAfter=4, _reports="end")), seconds=1.0)
    story.say("watch it")
    await story.until(lambda: any(story.calls(job) for job in story.jobs))
    (job,) = story.jobs
    key, ledger, registry = story.key(job), story.world.ledger, story.world.registry
    allowed, gone = registry.verdicts["look"], set[str]()
    if key_is_gone:
        why = "The API key that started the run was revoked or has lost a role. Start a new run with another key."
        story.world.dependencies = replace_fields(
            story.world.dependencies, credential_is_gone=lambda principal: principal.user_id in gone
        )
        gone.add(job.user_id)
    else:
        why = "rule rule_1 denies it: not at night"
        registry.verdicts["look"] = tool("REFUSE", error_reason="NOT_ALLOWED", error_message=why)
    await story.until(lambda: WaitKind.PAUSED in ledger.run(key).waits)
    denied = ledger.run(key).round
    assert json.loads(ledger.run(key).output_text)["paused"] == why
    with suppress(TimeoutError):
        await story.until(lambda: ledger.run(key).round > denied, seconds_max=300.0)
    assert [call.state for call in story.calls(job)][-1] is CallState.FAILED
    assert ledger.run(key).round == denied, "it stops polling"
    (notice,) = story.stored_notices
    assert (notice["iteration"], notice["state"], notice["result"]["paused"]) == (denied, "PAUSED", why)
    registry.verdicts["look"] = allowed
    gone.clear()
    await ledger.send(key, Pause(resumes=True))
    await story.until(lambda: story.is_over)
    assert (ledger.run(key).state, ledger.run(key).round) == (RunState.COMPLETED, 4)
    assert "paused" not in ledger.run(key).output_text


async def test_failing_polls_back_off() -> None:
    """ASYNC-4: after failures, the job skips intervals. The first two polls are trimmed."""
    story = Story(calls(background("look", _interval=60, _duration=60, _until="value == 1")), seconds=0.1)
    failed = CallResult(content_json=b'{"error":"away"}', is_error=True, error_reason="TOOL_ERROR")
    story.world.registry.results["look"] = failed
    story.say("watch it")
    await story.until(lambda: [job.round for job in story.jobs] == [5])
    start = present(story.jobs[0].job).begin_time
    assert [round(((call.create_time or 0) - start) / 60) for call in story.calls(story.jobs[0])] == [3, 7, 15]


# Calls completed from outside: the run waits without a worker and continues on completion.
DONE = CallResult(content_json=b'{"pages":3}')


async def waiting_job(story: Story, seconds: float = 7200.0) -> tuple[Run, Call]:
    story.world.registry.awaited["slow"] = seconds
    story.say("print it")
    await story.until(lambda: any(WaitKind.COMPLETION in job.waits for job in story.jobs))
    (job,) = story.jobs
    (call,) = story.calls(job)
    return job, call


async def test_a_waiting_call_frees_its_worker_and_continues_on_completion() -> None:
    story = Story(calls(background("slow")), says("Begun."), says("Printed."))
    job, call = await waiting_job(story)
    registry, key = story.world.registry, story.key(job)
    row = story.world.ledger.tables.runs[key]
    assert (job.state, call.state, row.worker_id) == (RunState.WAITING, CallState.RUNNING, None)
    with suppress(TimeoutError):
        await story.until(lambda: False, seconds_max=100.0)
    assert len([each for each in registry.asked if each.call_id == call.call_id]) == 1, "the registry is not polled"

    registry.completed[call.call_id] = DONE
    await story.world.ledger.note_completion(key, call.call_id)
    await story.until(lambda: story.is_over)
    (ended,) = story.calls(story.world.ledger.run(key))
    assert (ended.state, ended.result) == (CallState.SUCCEEDED, DONE)
    assert registry.effects[call.call_id] == 1
    assert json.loads(story.world.ledger.run(key).output_text or "null") == {"pages": 3}


async def test_a_call_that_is_never_completed_fails_at_its_deadline() -> None:
    story = Story(calls(background("slow")), says("Begun."), says("Nobody printed it."))
    job, _ = await waiting_job(story, seconds=60.0)
    await story.until(lambda: story.is_over, seconds_max=200.0)
    (ended,) = story.calls(story.world.ledger.run(story.key(job)))
    assert (ended.state, ended.result) == (CallState.FAILED, NOT_COMPLETED)


@pytest.mark.parametrize("data", [b"{", loop_state.write(LoopState(partial_text="x" * 10_000))[:-9]])
def test_a_damaged_state_has_a_typed_error(data: bytes) -> None:
    with pytest.raises(Unreadable):
        loop_state.read(data)
