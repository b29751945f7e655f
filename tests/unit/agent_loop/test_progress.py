"""Progress of a call made once: when it is reported to the conversation, and the expected end."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pawl.agent_loop.loop.rules import progress
from pawl.agent_loop.loop.rules.fact import ToolProgress
from pawl.agent_loop.loop.rules.loop_state import JobCursor
from pawl.agent_loop.loop.rules.message import Role
from pawl.agent_loop.loop.rules.run import Job, JobProgress
from pawl.chassis import job_reports
from pawl.chassis.ids import CallId
from pawl.errors import InvalidField
from pawl.values import JobReports, Progress, RunState
from tests.fakes.model import calls
from tests.unit.agent_loop.scenario import present
from tests.unit.agent_loop.test_jobs import Story, background

PERCENTS = st.sets(st.integers(1, 99), min_size=1, max_size=6).map(lambda each: tuple(sorted(each)))
# Pairs of the seconds until the next report of the tool and its fraction. After a restart, the fraction may go back.
REPORTS = st.lists(st.tuples(st.floats(0.5, 90), st.floats(0, 1)), max_size=30)


def job(**fields: Any) -> Job:
    return Job(tool_name="scrape", arguments_json=b"{}", begin_time=1000.0, **{"reports": JobReports.PROGRESS} | fields)


def at(time: float, fraction: float | None, start_time: float = 1000.0) -> JobProgress:
    return JobProgress(fraction=fraction, time=time, start_time=start_time)


class Told(NamedTuple):
    time: float
    percent: int


def told(what: Job, reports: list[tuple[float, float]], seconds: float = 0.0) -> tuple[list[Told], float]:
    """Play a job as its program does: decide again at each report of the tool and each due time."""
    now, cursor, latest, found = 1000.0, JobCursor(), None, list[Told]()

    def play(until: float) -> None:
        nonlocal cursor
        for _ in range(1000):
            due = progress.report_time(what, cursor, latest, 1000.0, until)
            if due is None or due > until:
                return
            time = max(due, now)
            cursor = progress.reported(what, cursor, latest, time)
            found.append(Told(time, cursor.percent_told))
        raise AssertionError("the rule reports without end")

    for pause, fraction in reports:
        play(now + pause)
        now += pause
        latest = at(now, fraction)
        play(now)
    play(now + seconds)
    return found, now + seconds


@given(PERCENTS, REPORTS, st.floats(0, 200))
def test_each_percentage_is_reported_once_and_a_minute_apart(
    percents: tuple[int, ...], reports: list[tuple[float, float]], seconds: float
) -> None:
    found, _ = told(job(report_percents=percents), reports, seconds)
    passed = [each.percent for each in found]
    assert passed == sorted(set(passed)), "each report covers a larger percentage than the one before"
    assert set(passed) <= set(percents)
    assert all(later - earlier >= 60 for earlier, later in itertools.pairwise([each.time for each in found]))


@given(PERCENTS, REPORTS)
def test_each_percentage_is_reported_within_a_minute_unless_a_restart_loses_it(
    percents: tuple[int, ...], reports: list[tuple[float, float]]
) -> None:
    """A percentage that is lost before its report, because a restart goes back, is reported when passed again."""
    found, _ = told(job(report_percents=percents), reports, 61)
    last = reports[-1][1] if reports else 0.0
    assert (found[-1].percent if found else 0) >= max((each for each in percents if last * 100 >= each), default=0)


@given(st.integers(1, 30), REPORTS, st.floats(0, 7200))
def test_progress_by_the_minute_is_reported_on_time_even_without_a_fraction(
    minutes: int, reports: list[tuple[float, float]], seconds: float
) -> None:
    found, end = told(job(report_seconds=minutes * 60.0), reports, seconds)
    due = (1000.0 + minutes * 60.0 * number for number in itertools.count(1))
    assert [each.time for each in found] == list(itertools.takewhile(lambda time: time <= end, due))


@pytest.mark.parametrize(
    ("percents", "reports", "seconds", "expected"),
    [
        ((25, 50, 75), [(5, 0.8)], 3600, [Told(1005, 75)]),
        ((25, 50), [(5, 0.3), (80, 0.1), (80, 0.3), (80, 0.5)], 0, [Told(1005, 25), Told(1245, 50)]),
    ],
    ids=["passed together", "a restart goes back"],
)
def test_only_the_highest_percentage_passed_is_reported_and_only_once(
    percents: tuple[int, ...], reports: list[tuple[float, float]], seconds: float, expected: list[Told]
) -> None:
    assert told(job(report_percents=percents), reports, seconds)[0] == expected


@pytest.mark.parametrize("reports", [each for each in JobReports if each is not JobReports.PROGRESS])
def test_other_policies_do_not_report_progress(reports: JobReports) -> None:
    what = job(reports=reports, report_percents=(1,))
    assert progress.report_time(what, JobCursor(), at(1010, 0.9), 1000, 1010) is None


@given(st.lists(st.tuples(st.none() | st.floats(0, 1), st.booleans()), max_size=30), st.integers(1, 40))
def test_only_progress_beyond_the_furthest_point_counts_as_progress(
    reported: list[tuple[float | None, bool]], attempt: int
) -> None:
    """In the first 20 attempts at a call, checkpoints count too."""
    cursor, furthest = JobCursor(), 0.0
    for fraction, has_checkpoint in reported:
        report = ToolProgress(call_id=CallId("c"), tool_name="t", fraction=fraction, has_checkpoint=has_checkpoint)
        after = progress.advanced(cursor, report, attempt)
        counts = has_checkpoint and attempt <= 20
        assert (after.advances > cursor.advances) == (counts or (fraction or 0.0) > furthest)
        cursor, furthest = after, max(furthest, fraction or 0.0)


SERIES: dict[str, Any] = {"interval_seconds": 10.0, "iterations_max": 5}


@pytest.mark.parametrize(
    ("what", "latest", "end"),
    [
        (job(), None, None),
        (job(estimated_minutes=10), at(1010, None), 1600),
        (job(estimated_minutes=10), at(1100, 0.25), 1400),
        (job(), at(1100, 0.001), None),  # Too early for an estimate.
        (job(**SERIES), None, 1040),
        (job(**SERIES, delay_first=True), None, 1050),
        (job(**SERIES, end_time=1020.0), None, 1020),
    ],
)
def test_the_expected_end_comes_from_the_series_the_progress_or_the_estimate(
    what: Job, latest: JobProgress | None, end: float | None
) -> None:
    assert progress.expected_end(what, latest) == end


@pytest.mark.parametrize(
    ("given_form", "fields"),
    [
        ({"progress": [25, 50, 75]}, {"reports": "PROGRESS", "report_percents": (25, 50, 75)}),
        ({"minutes": 10}, {"reports": "PROGRESS", "report_seconds": 600.0}),
    ],
)
def test_progress_thresholds_are_read(given_form: dict[str, Any], fields: dict[str, Any]) -> None:
    assert job_reports.read(given_form) == fields


@pytest.mark.parametrize(
    "given_form",
    [
        *({"progress": value} for value in ([], [0], [100], [50, 25], [25, 25], [True], [1.5], ["25"], "25", 25)),
        {"progress": list(range(1, 23))},
        *({"minutes": value} for value in (0, 0.5, -1, True, "10", 1e9, float("nan"))),
        {"progress": [25], "minutes": 10},
    ],
)
def test_invalid_progress_thresholds_are_refused(given_form: dict[str, Any]) -> None:
    with pytest.raises(InvalidField) as refused:
        job_reports.read(given_form)
    assert refused.value.metadata["field"] == "reports"


def scraping(**more: object) -> Story:
    """Return a story in which `look` works for an hour and reports 5 % of progress every 180 s."""
    story = Story(calls(background("look", **more)), seconds=0.0)
    story.world.registry.progress = [
        (180.0, Progress(fraction=percent / 100, message=f"page {percent}")) for percent in range(5, 101, 5)
    ]
    return story


async def test_a_conversation_is_notified_at_each_progress_threshold_and_then_of_the_end() -> None:
    story = scraping(_reports={"progress": [25, 50, 75]})
    await story.finish("scrape it", seconds_max=5000, poll_seconds=5)
    (job,) = story.jobs
    told = [(each["state"], each.get("percent"), each.get("progress")) for each in story.stored_notices]
    assert told == [*[("RUNNING", percent, f"page {percent}") for percent in (25, 50, 75)], ("COMPLETED", None, None)]
    assert (len(story.turns), job.state, job.job_progress) == (4, RunState.COMPLETED, None)
    texts = [each.text for each in story.world.ledger.messages(story.key(story.runs[0])) if each.role is Role.NOTICE]
    assert texts[1] == f"look: 50% done ({job.run_id})"


async def test_progress_is_part_of_the_job_and_is_not_reported_by_default() -> None:
    story = scraping()
    story.say("scrape it")
    await story.until(lambda: bool(story.jobs) and story.jobs[0].job_progress is not None)
    latest = present(story.jobs[0].job_progress)
    assert (latest.fraction, latest.message) == (0.05, "page 5")
    assert latest.time - latest.start_time == pytest.approx(180, abs=1)
    await story.until(lambda: story.is_over, seconds_max=5000, poll_seconds=5)
    assert [each["state"] for each in story.stored_notices] == ["COMPLETED"]


async def test_progress_by_the_minute_is_reported_while_a_call_waits_for_its_completion() -> None:
    story = Story(calls(background("work", _reports={"minutes": 10})), seconds=1.0)
    story.world.registry.awaited["work"] = 1500.0
    await story.finish("do it", seconds_max=5000, poll_seconds=5)
    assert [each.get("minutes") for each in story.stored_notices] == [10.0, 20.0, None]


@pytest.mark.parametrize(
    ("tool_name", "asked", "told"),
    [
        ("halves", {}, [50, None]),
        ("halves", {"_reports": {"progress": [20]}}, [20, None]),
        ("quiet", {"_reports": {"progress": [20]}}, []),
    ],
)
async def test_a_tool_sets_the_thresholds_and_the_model_cannot_override_none(
    tool_name: str, asked: dict[str, Any], told: list[int | None]
) -> None:
    story = Story(calls(background(tool_name, **asked)), seconds=0.0)
    story.world.registry.progress = [(90.0, Progress(fraction=fraction, message="")) for fraction in (0.2, 0.5, 0.9)]
    await story.finish("do it", seconds_max=5000, poll_seconds=5)
    assert [each.get("percent") for each in story.stored_notices] == told


async def test_a_job_commits_its_latest_progress_once_a_second() -> None:
    story = Story(calls(background("look")), seconds=3.0)
    story.world.registry.progress = [(0.1, Progress(fraction=n / 100, message=str(n))) for n in range(1, 101)]
    await story.finish("do it")
    told = [each for each in story.world.ledger.log(story.key(story.jobs[0])) if each.HasField("tool_progress")]
    assert 9 <= len(told) <= 12
