"""Jobs as `pawl jobs` shows them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator
from typing import cast

import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from rich.console import Console

from pawl.agent.v1 import jobs_pb2
from pawl.cli.failure import CommandError
from pawl.cli.jobs import job_lines, last_progress, paused_text, reports_of, show_jobs
from pawl.cli.wording import wait_names
from pawl.client import AsyncClient
from pawl.event.v1 import call_pb2, event_pb2, run_pb2, waiting_pb2


def test_all_that_there_is_to_say_of_a_job_is_said_and_nothing_else() -> None:
    """ASYNC-7"""
    definition = run_pb2.Job(tool_name="probe", arguments_json=b"{}", interval_seconds=60, iterations_max=5)
    definition.end_time.CopyFrom(Timestamp(seconds=1_900_000_000))
    job = jobs_pb2.BackgroundJob(
        job_id="run_2",
        conversation_id="conv_1",
        parent_run_id="run_1",
        definition=definition,
        state=run_pb2.RUN_STATE_WAITING,
        iterations=3,
        failures=1,
        last_result='{"up":\x1btrue}',
        waiting=waiting_pb2.Waiting(sentence="It waits for an approval of probe."),
        pending_calls=[
            call_pb2.Call(run_id="run_2", call_id="call_4", state=call_pb2.CALL_STATE_AWAITING_APPROVAL),
            call_pb2.Call(run_id="run_2", call_id="call_5", state=call_pb2.CALL_STATE_OFFERED),
        ],
    )
    said = "\n".join(job_lines(job))
    for part in (
        "run_2: waiting",
        "done: 3 of 5 (1 failed)",
        "each: 60 s, until 2030-",
        "It waits for an approval of probe.",
        "by run run_1",
        "tells: conversation conv_1",
        "decide with: pawl approve run_2 call_4",
    ):
        assert part in said
    for part in ("\x1b", "call_5", "next:", "ended:", "failed:", "stopped by", "kept:"):
        assert part not in said
    job.state, job.stop_cause = run_pb2.RUN_STATE_CANCELLED, run_pb2.STOP_CAUSE_USER
    assert "run_2: cancelled by its user" in job_lines(job)
    job.stop_cause = run_pb2.STOP_CAUSE_MODEL
    assert "run_2: cancelled by the model" in job_lines(job)
    assert wait_names([run_pb2.WAIT_KIND_TIME]) == "the time of its next iteration"
    job.iterations, job.trimmed_iterations = 5_101, 5_000
    assert "kept: those from iteration 5001 on" in job_lines(job)


def test_a_paused_job_is_shown_as_paused_and_says_how_it_goes_on() -> None:
    job = jobs_pb2.BackgroundJob(job_id="run_2", state=run_pb2.RUN_STATE_WAITING)
    job.definition.tool_name = "probe"
    assert "is called once" in paused_text(job)
    job.definition.interval_seconds = 60
    assert paused_text(job) == "run_2 (probe) is paused; it goes on with: pawl jobs resume run_2"
    assert paused_text(job, resumed=True) == "run_2 (probe) goes on"
    job.waiting.reason = waiting_pb2.WAIT_REASON_PAUSED
    assert "run_2: paused" in job_lines(job)
    assert wait_names([run_pb2.WAIT_KIND_PAUSED]) == "its user to resume it"


@pytest.mark.parametrize(
    ("said", "read"),
    [
        ("", ""),
        ("change", "change"),
        ("every=2", {"every": 2.0}),
        ('{"every": 2}', {"every": 2}),
        ('{"digest":600}', {"digest": 600}),
    ],
)
def test_reports_are_said_in_short_or_as_the_model_writes_them(said: str, read: object) -> None:
    assert reports_of(said) == read


@pytest.mark.parametrize("said", ["sometimes", "every=x", "every=", "every=2.5", '{"each": 2}', "digest", "change=2"])
def test_reports_that_make_no_sense_are_refused_with_what_is_taken(said: str) -> None:
    with pytest.raises(CommandError) as caught:
        reports_of(said)
    (example,) = re.findall(r"\{.*\}", str(caught.value))
    assert reports_of(example) == {"every": 10}
    assert reports_of("every=10") == reports_of(example)


class Suite:
    """A suite with one job, at work, and its log."""

    def __init__(self, *events: event_pb2.RunEvent) -> None:
        self.log = [*events]
        self.asked_after: list[int] = []

    async def get(self, run_id: str) -> run_pb2.Run:
        return run_pb2.Run(run_id=run_id, last_seq=self.log[-1].seq)

    async def watch(self, _: str, after_seq: int) -> AsyncGenerator[event_pb2.RunEvent, None]:
        self.asked_after.append(after_seq)
        for event in self.log:
            if event.seq > after_seq:
                yield event
        await asyncio.Event().wait()  # The run goes on.


def progressed(seq: int, fraction: float, message: str) -> event_pb2.RunEvent:
    progress = event_pb2.ToolProgress(call_id="call_1", tool_name="dig", fraction=fraction, message=message)
    return event_pb2.RunEvent(seq=seq, tool_progress=progress)


async def test_a_job_at_work_is_shown_with_what_its_tool_has_said_last(capsys: pytest.CaptureFixture[str]) -> None:
    suite = Suite(progressed(98, 0.1, "one"), progressed(99, 0.4, "two of\x1b five"), event_pb2.RunEvent(seq=100))
    job = jobs_pb2.BackgroundJob(job_id="run_2", state=run_pb2.RUN_STATE_RUNNING, last_result="before")
    target = cast("AsyncClient", suite)
    found = await last_progress(target, job)
    assert "now: 40% two of<U+001B> five" in job_lines(job, found)
    await show_jobs(target, Console(), [job])
    assert capsys.readouterr().out.rstrip().endswith("\t… 40% two of<U+001B> five")
    assert suite.asked_after == [50, 50], "a long log is not read whole"


async def test_what_a_tool_said_in_a_call_that_has_ended_is_shown_no_more() -> None:
    call = event_pb2.CallChanged(call=call_pb2.Call(call_id="call_1", state=call_pb2.CALL_STATE_SUCCEEDED))
    suite = Suite(progressed(3, 0.4, "two of five"), event_pb2.RunEvent(seq=4, call_changed=call))
    job = jobs_pb2.BackgroundJob(job_id="run_2", state=run_pb2.RUN_STATE_RUNNING)
    assert await last_progress(cast("AsyncClient", suite), job) is None
    job.state = run_pb2.RUN_STATE_WAITING
    suite.asked_after.clear()
    assert await last_progress(cast("AsyncClient", suite), job) is None
    assert suite.asked_after == []
