"""Jobs as `pawl jobs` shows them."""

from __future__ import annotations

from google.protobuf.timestamp_pb2 import Timestamp

from pawl.agent.v1 import jobs_pb2
from pawl.cli.jobs import job_lines, paused_text
from pawl.cli.wording import wait_names
from pawl.event.v1 import call_pb2, run_pb2, waiting_pb2


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
    assert paused_text(job) == "run_2 (probe) is paused; it goes on with: pawl jobs resume run_2"
    assert paused_text(job, resumed=True) == "run_2 (probe) goes on"
    job.waiting.reason = waiting_pb2.WAIT_REASON_PAUSED
    assert "run_2: paused" in job_lines(job)
    assert wait_names([run_pb2.WAIT_KIND_PAUSED]) == "its user to resume it"
