"""The series of a call as who decides about it sees it, and as `pawl approve --series` grants it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from pawl.cli import answers, decisions, wording
from pawl.cli.failure import CommandError
from pawl.cli.status import standing
from pawl.event.v1 import call_pb2, run_pb2


def gated(**series: Any) -> call_pb2.Call:
    call = call_pb2.Call(
        run_id="run_1",
        call_id="call_1",
        state=call_pb2.CALL_STATE_AWAITING_APPROVAL,
        tool_name="pay",
        arguments_json=b'{"amount":1}',
        approval=call_pb2.ApprovalRequest(digest="of the call"),
    )
    if series:
        call.approval.series.CopyFrom(call_pb2.Series(digest="of the series", **series))
    return call


def test_it_is_said_how_often_how_far_apart_and_until_when() -> None:
    call = gated(interval_seconds=60, iterations_max=20)
    end = datetime(2026, 11, 24, 14, tzinfo=UTC)
    lines = wording.call_lines(call, datetime.now(UTC))
    assert "one of a series: every 60 s, at most 20 times (to grant all of it: series)" in lines
    call.approval.series.end_time.FromDatetime(end)
    assert f", until {end.astimezone():%Y-%m-%d %H:%M:%S}" in wording.series_text(call.approval.series)
    assert not any("series" in line for line in wording.call_lines(gated(), datetime.now(UTC)))


def test_only_who_says_so_grants_it() -> None:
    call = gated(interval_seconds=60, iterations_max=20)
    once, series = answers.decision_of("a", call), answers.decision_of("series", call)
    assert (once.for_series, once.digest) == (False, "of the call")
    assert (series.for_series, series.digest) == (True, "of the series")
    with pytest.raises(answers.Unclear, match="decide about the call alone"):
        answers.decision_of("s", gated())


def test_what_is_given_is_changed_and_the_rest_stays() -> None:
    call = gated(interval_seconds=60, iterations_max=20)
    edited = decisions._for_series(call, None, 5.0, None, 10.0)
    assert (edited.kind, edited.for_series, edited.digest) == (call_pb2.DECISION_KIND_EDIT, True, "of the series")
    assert edited.arguments_json == call.arguments_json
    assert (edited.edited_series.interval_seconds, edited.edited_series.iterations_max) == (5.0, 20)
    left = edited.edited_series.end_time.ToDatetime(tzinfo=UTC) - datetime.now(UTC)
    assert timedelta(minutes=9) < left <= timedelta(minutes=10)
    other = decisions._for_series(call, '{"amount": 2}', None, None, None)
    assert (other.arguments_json, other.HasField("edited_series")) == (b'{"amount": 2}', False)


@pytest.mark.parametrize(
    ("stop_after", "duration"), [(2**32, None), (None, 1e12), (None, float("inf")), (None, float("nan"))]
)
def test_what_no_series_can_be_is_said_in_words(stop_after: int | None, duration: float | None) -> None:
    with pytest.raises(CommandError, match="that long"):
        decisions._for_series(gated(interval_seconds=60, iterations_max=20), None, None, stop_after, duration)


def test_an_interval_that_is_none_is_for_the_server_to_refuse() -> None:
    """It is not what was shown: nobody grants that by asking for something else."""
    decision = decisions._for_series(gated(interval_seconds=60, iterations_max=20), None, 0.0, None, None)
    assert decision.edited_series.interval_seconds == 0.0


def test_options_that_say_nothing_together_are_refused() -> None:
    with pytest.raises(CommandError, match="go with --series"):
        decisions._check_series(series=False, others=(), terms=(1.0, None, None))
    with pytest.raises(CommandError, match="goes with an approval"):
        decisions._check_series(series=True, others=("no",), terms=(None, None, None))


def test_status_says_who_granted_what_and_how_much_is_used() -> None:
    grant = call_pb2.Grant(
        series=gated(interval_seconds=60, iterations_max=20).approval.series,
        uses=3,
        approvals=[call_pb2.Decision(user_id="cyd")],
    )
    run = run_pb2.Run(run_id="run_1", grant=grant)
    assert "granted by cyd: every 60 s, at most 20 times; 3 of 20 begun" in standing(run)
    run.grant.ended = True
    assert not any("granted" in line for line in standing(run))
